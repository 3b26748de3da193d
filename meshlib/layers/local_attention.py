"""Local attention in blocks: work and memory are linear in the length.

The sequence is cut into blocks; the keys of a block are extended by a halo from its neighbours, and each block runs
attention separately. If the sequence is split over devices, blocks are split alike, and devices exchange only halos.
"""

from __future__ import annotations

from collections.abc import Sequence

from layouts import Dimension, Shape
from meshlib.core import initializers
from meshlib.core.arguments import at, flag, whole
from meshlib.core.dtypes import INT32
from meshlib.core.errors import ShapeError
from meshlib.core.graph import Tensor, find_dim, scope
from meshlib.layers.numerics import DEFAULT, Numerics, as_numerics
from meshlib.ops.building import as_dim, size_of, tensor
from meshlib.ops.fused_attention.attention import attention
from meshlib.ops.movement.indexing import range as positions_of
from meshlib.ops.movement.runs import halo_exchange, left_halo_exchange
from meshlib.ops.movement.shape import rename_dimension, replace_dimensions, transpose
from meshlib.ops.pointwise.arithmetic import equal, greater, greater_equal, less, less_equal, logical_and, logical_or

QUERIES, KEYS = "query_block_length", "memory_block_length"


class _Blocks:
    """One position dim cut into blocks: of queries, and of keys with their halos."""

    def __init__(self, dim: Dimension, block: int, radius: int, causal: bool) -> None:
        self.dim = dim
        # The same name, so that blocks are split like the dim.
        self.blocks = Dimension(dim.name, dim.size // block)
        self.radius, self.causal = radius, causal
        self.left = radius - 1 if causal else radius
        self.rows = Dimension(f"query_{dim.name}", block)
        self.narrow = Dimension(f"memory_{dim.name}", block)
        self.keys = Dimension(self.narrow.name, block + self.left + (0 if causal else radius))

    def of_queries(self, x: Tensor) -> Tensor:
        return replace_dimensions(x, self.dim, [self.blocks, self.rows])

    def of_keys(self, x: Tensor) -> Tensor:
        x = replace_dimensions(x, self.dim, [self.blocks, self.narrow])
        return (left_halo_exchange if self.causal else halo_exchange)(x, self.blocks, self.narrow, self.left)

    def distance(self) -> Tensor:
        """Position of a key minus that of a query: [rows, keys]."""
        return positions_of(self.keys) - self.left - positions_of(self.rows)

    def near(self) -> Tensor:
        """True for keys that exist and are within the radius: [blocks, rows, keys]."""
        distance = self.distance()
        near = logical_and(greater(distance, -self.radius), less_equal(distance, 0 if self.causal else self.radius))
        place = positions_of(self.blocks) * self.rows.size + (positions_of(self.keys) - self.left)
        return logical_and(near, logical_and(greater_equal(place, 0), less(place, self.dim.size)))


def local_attention_1d(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    length_dim: Dimension,
    key_dim: Dimension,
    value_dim: Dimension | None = None,
    fully_autoregressive: bool = True,
    length_dim_num_splits: int = 1,
    radius: int = 128,
    sequence_id: Tensor | None = None,
    scale: float | None = None,
    name: str | None = None,
) -> Tensor:
    """Attention of position p to the positions in (p - radius, p], or in (p - radius, p + radius].

    Args:
      q, k, v: [..., length_dim, key_dim or value_dim], float, as in `mtf.attention` but with one name for the length.
      length_dim, key_dim, value_dim: their dims; `value_dim` is `key_dim` by default.
      fully_autoregressive: whether positions after p are hidden.
      length_dim_num_splits: number of parts whose bounds blocks must not cross: the number of shards of the length.
      radius: see above. Blocks are as long as the greatest divisor of a part that is at most max(radius, 128).
      sequence_id: int32 with `length_dim`: positions of other packed sequences are hidden.
      scale: factor of the scores; by default 1 / sqrt(size of key_dim).
      name: name of the kernel operation.
    Returns: the dims of q with `value_dim` in place of `key_dim`.
    Cost: that of `mtf.attention` with as many keys as a block and its halos.
    Raises: ShapeError for dims that do not fit.
    Example:
      >>> import meshlib as mtf
      >>> length, d = mtf.Dimension("length", 512), mtf.Dimension("d", 4)
      >>> with mtf.Graph():
      ...     q, k, v = (mtf.input(n, [length, d]) for n in "qkv")
      ...     y = mtf.layers.local_attention_1d(q, k, v, length, d, length_dim_num_splits=2, radius=32)
      >>> program = mtf.lower({"y": y}, mesh="p:2", layout="length:p")
      >>> [(c.kind, c.payload_bytes) for c in program.collectives]  # of k and v, 31 positions of 4 floats
      [('collective_permute', 496), ('collective_permute', 496)]

    Source: tensorflow/mesh: mesh_tensorflow/transformer/attention.py, `local_attention_1d`.
    """
    what = "local_attention_1d"
    length, *_ = (find_dim(tensor(x, what), length_dim, what) for x in (q, k, v))
    causal = flag(fully_autoregressive, what, "fully_autoregressive")
    cut = _cut(length, length_dim_num_splits, radius, causal, 128, what)
    with q.graph:
        seen = cut.near()
        if sequence_id is not None:
            if tensor(sequence_id, what).dtype is not INT32 or length not in sequence_id.shape:
                raise ShapeError(f"{at(what)}: sequence_id must be int32 with {length}, got {sequence_id}")
            seen = logical_and(seen, equal(cut.of_queries(sequence_id), cut.of_keys(sequence_id)))
    return _attend(q, k, v, [cut], seen, key_dim, value_dim, scale, name)


def local_attention_2d(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    height_dim: Dimension,
    width_dim: Dimension,
    key_dim: Dimension,
    value_dim: Dimension | None = None,
    fully_autoregressive: bool = False,
    num_splits: tuple[int, int] = (1, 1),
    radius: int = 8,
    scale: float | None = None,
    name: str | None = None,
) -> Tensor:
    """Attention of each pixel to those less than `radius` before it and at most `radius` after it along both dims; with
    `fully_autoregressive` only to the rows above and to its own row up to itself.

    Args:
      q, k, v: [..., height_dim, width_dim, key_dim or value_dim], float; the dims may come in any order.
      num_splits: numbers of shards of the two dims, like `length_dim_num_splits` of `local_attention_1d`.
      radius: see above; blocks have sides of about 16 pixels, or of `radius` if it is larger.
      fully_autoregressive, scale, name and the dims: as in `local_attention_1d`.
    Returns: the dims of q with `value_dim` in place of `key_dim`.
    Raises: ShapeError for dims that do not fit.
    Example:
      >>> import meshlib as mtf
      >>> h, w, d = mtf.Dimension("height", 32), mtf.Dimension("width", 48), mtf.Dimension("d", 4)
      >>> with mtf.Graph():
      ...     q, k, v = (mtf.ones([h, w, d]) for _ in "qkv")
      ...     y = mtf.layers.local_attention_2d(q, k, v, h, w, d, radius=3)
      >>> print(y.shape)
      [height:32, width:48, d:4]
    """
    what = "local_attention_2d"
    height, *_ = (find_dim(tensor(x, what), height_dim, what) for x in (q, k, v))
    width, *_ = (find_dim(x, width_dim, what) for x in (q, k, v))
    causal = flag(fully_autoregressive, what, "fully_autoregressive")
    if not isinstance(num_splits, tuple | list) or len(num_splits) != 2:
        raise ShapeError(f"{at(what)}: num_splits must be two numbers, of height and width, got {num_splits!r:.80}")
    rows = _cut(height, num_splits[0], radius, causal, 16, what)
    columns = _cut(width, num_splits[1], radius, False, 16, what)
    with q.graph:
        seen = logical_and(rows.near(), columns.near())
        if causal:
            above, up_to_itself = less(rows.distance(), 0), less_equal(columns.distance(), 0)
            seen = logical_and(seen, logical_or(above, up_to_itself))
    return _attend(q, k, v, [rows, columns], seen, key_dim, value_dim, scale, name)


def _cut(dim: Dimension, splits: int, radius: int, causal: bool, least: int, what: str) -> _Blocks:
    if whole(radius, what, "radius") < 1:
        raise ShapeError(f"{at(what)}: radius must be at least 1, got {radius}")
    if whole(splits, what, "the number of splits") < 1 or dim.size % splits:
        raise ShapeError(f"{at(what)}: {dim} has no {splits} equal parts")
    part = dim.size // splits
    block = max(n for n in range(1, min(part, max(radius, least)) + 1) if part % n == 0)
    return _Blocks(dim, block, radius, causal)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cuts: Sequence[_Blocks],
    seen: Tensor,
    key_dim: Dimension,
    value_dim: Dimension | None,
    scale: float | None,
    name: str | None,
) -> Tensor:
    """Attention within blocks, whose inner dims are merged into one."""
    result_shape = q.shape if value_dim is None else Shape([value_dim if d == key_dim else d for d in q.shape])
    rows, keys = [c.rows for c in cuts], [c.keys for c in cuts]
    for c in cuts:
        q, k, v = c.of_queries(q), c.of_keys(k), c.of_keys(v)
    q, k, v = (_merged(x, inner, to) for x, inner, to in ((q, rows, QUERIES), (k, keys, KEYS), (v, keys, KEYS)))
    seen = _merged(_merged(seen, rows, QUERIES), keys, KEYS)
    y = attention(q, k, v, QUERIES, KEYS, key_dim, value_dim, scale=scale, mask=seen, name=name)
    if len(cuts) == 1:
        y = rename_dimension(y, QUERIES, rows[0].name)
    else:
        y = replace_dimensions(y, Dimension(QUERIES, size_of(rows)), rows)
    for c in cuts:
        rest = [d for d in y.shape if d != c.rows]
        place = rest.index(c.blocks) + 1
        y = replace_dimensions(transpose(y, [*rest[:place], c.rows, *rest[place:]]), [c.blocks, c.rows], c.dim)
    return transpose(y, result_shape)


def _merged(x: Tensor, inner: Sequence[Dimension], name: str) -> Tensor:
    """`x` with the inner dims of its blocks merged."""
    if len(inner) == 1:
        return rename_dimension(x, inner[0].name, name)
    stop = x.shape.index(inner[-1]) + 1
    before, after = (tuple(d for d in dims if d not in inner) for dims in (x.shape[:stop], x.shape[stop:]))
    return replace_dimensions(transpose(x, [*before, *inner, *after]), inner, Dimension(name, size_of(inner)))


def masked_local_attention_1d(
    x: Tensor,
    kv_channels: Dimension,
    heads: Dimension,
    window_size: int = 128,
    length_per_split: int | None = None,
    sequence_id: Tensor | None = None,
    numerics: Numerics = DEFAULT,
    name: str = "masked_local_attention_1d",
) -> Tensor:
    """Multi-head self-attention layer in which position p sees the positions in (p - window_size, p].

    Args:
      x: [..., length, channels], float.
      kv_channels: the dim of one head.
      heads: the dim of the heads.
      window_size: see above.
      length_per_split: positions per device, if a layout splits the length.
      sequence_id: as in `local_attention_1d`.
      numerics: dtypes of variables and activations, precision of the products with variables.
      name: scope of the variables `q`, `k`, `v` [channels, heads, kv_channels] and `o`.
    Returns: the type of x, in the dtype of `numerics` if it has one.
    Raises: ShapeError for dims that clash or do not fit.
    Example:
      >>> import meshlib as mtf
      >>> D = mtf.Dimension
      >>> with mtf.Graph():
      ...     x = mtf.input("x", [D("batch", 2), D("length", 512), D("channels", 64)])
      ...     y = mtf.layers.masked_local_attention_1d(x, D("kv", 16), D("heads", 4), window_size=128)
      >>> y.shape
      Shape('batch:2;length:512;channels:64')
    """
    what = "masked_local_attention_1d"
    x = as_numerics(numerics, what).cast(tensor(x, what))
    if len(x.shape) < 2:
        raise ShapeError(f"{at(what)}: needs [..., length, channels], got {x}")
    *batch, length, channels = x.shape
    head = [as_dim(heads, what), as_dim(kv_channels, what)]
    if length_per_split is not None and (
        whole(length_per_split, what, "length_per_split") < 1 or length.size % length_per_split
    ):
        raise ShapeError(f"{at(what)}: length_per_split {length_per_split} does not divide {length}")
    splits = 1 if length_per_split is None else length.size // length_per_split

    def product(x: Tensor, part: str, reduced: Sequence[Dimension], head_shape: Shape, result: str) -> Tensor:
        weights = numerics.variable(part, [channels, *head], initializers.scaled_normal(reduced), x.dtype)
        return numerics.product(x, weights, head_shape, result)

    with scope(name):
        head_shape = Shape([*batch, head[0], length, head[1]])
        q, k, v = (product(x, part, [channels], head_shape, f"{part}/product") for part in "qkv")
        y = local_attention_1d(q, k, v, length, head[1], None, True, splits, window_size, sequence_id, name="context")
        return product(y, "o", head, x.shape, "out")
