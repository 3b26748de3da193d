"""Position embeddings: rotary, learned, sinusoidal, and T5's relative bias of attention scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor, log, pi

from layouts import Dimension
from meshlib.core import initializers
from meshlib.core.arguments import POSITIVE, at, bounded, flag, number, whole
from meshlib.core.dtypes import INT32, as_dtype
from meshlib.core.errors import GraphError, ShapeError
from meshlib.core.graph import Tensor, find_dim, innermost, scope
from meshlib.layers.norms import widened
from meshlib.layers.numerics import DEFAULT, Numerics, as_numerics
from meshlib.ops.building import as_dim, as_dims, tensor
from meshlib.ops.fused_attention.rotate import rotate_half
from meshlib.ops.movement.indexing import gather
from meshlib.ops.movement.indexing import range as positions_of
from meshlib.ops.movement.runs import slice as part_of
from meshlib.ops.movement.shape import rename_dimension, transpose
from meshlib.ops.pointwise.arithmetic import abs as absolute
from meshlib.ops.pointwise.arithmetic import (
    add,
    add_n,
    clip_by_value,
    cos,
    exp,
    greater,
    greater_equal,
    less,
    maximum,
    minimum,
    mod,
    multiply,
    negative,
    sin,
    subtract,
    where,
)
from meshlib.ops.pointwise.casts import cast

RAMPS = ("turns", "pairs")
STEEP = 0.001  # pairs: width of a ramp whose ends coincide, as in the source
_WHAT = "relative_position_bias"


@dataclass(frozen=True)
class RotaryScaling:
    """Rotary positions with reduced frequencies, for contexts longer than those of the first training.

    The frequency of a pair that rotates t times within `original_length` is divided by `factor` if t <= low, unchanged
    if t >= high, and interpolated in between. Without an original length all are divided by `factor`.

    Args:
      factor: at least 1.
      low, high: numbers of rotations, low < high.
      original_length: tokens.
      ramp: variable of the linear interpolation: "turns", rotations, or "pairs", pair indices between those of `high`
        and `low` rotations, rounded outwards.
      amplitude: factor of queries and keys.
    Raises: GraphError for invalid numbers, and for "pairs" without an original length.
    Example:
      >>> import meshlib as mtf
      >>> llama3 = mtf.layers.RotaryScaling(factor=8.0, low=1.0, high=4.0, original_length=8192)
      >>> llama3.ramp, llama3.amplitude
      ('turns', 1.0)

    Source: the "llama3" (turns), "yarn" (pairs; low 1, high 32, amplitude 0.1 ln(factor) + 1) and "linear" of
    huggingface/transformers, modeling_rope_utils.py; Llama 3.1 has factor 8, Llama 3.2's small models 32, both of 8,192
    tokens. Chen et al., arXiv:2306.15595 (linear); Peng et al., arXiv:2309.00071 (YaRN).
    """

    factor: float
    low: float = 1.0
    high: float = 4.0
    original_length: int | None = None
    ramp: str = "turns"
    amplitude: float = 1.0

    def __post_init__(self) -> None:
        what = "RotaryScaling"
        factor, low, high = (number(getattr(self, n), what, n) for n in ("factor", "low", "high"))
        if factor < 1 or not 0 <= low < high:
            raise GraphError(
                f"{at(what)}: factor must be at least 1 and 0 <= low < high, got factor {factor:g}, low {low:g}, high "
                f"{high:g}"
            )
        if self.original_length is not None:
            whole(self.original_length, what, "original_length", low=1)
        if self.ramp not in RAMPS:
            raise GraphError(f"{at(what)}: ramp must be {' or '.join(RAMPS)}, got {self.ramp!r:.40}")
        if self.ramp == "pairs" and (self.original_length is None or not low):
            raise GraphError(
                f"{at(what)}: a ramp over pairs needs an original_length and low above 0, got {self.original_length} "
                f"and {low:g}"
            )
        bounded(self.amplitude, what, "amplitude", POSITIVE)

    def scaled_frequency(self, frequency: Tensor, pair: Tensor, pairs: int, base: float) -> Tensor:
        """Scaled angles per token of each pair, from `frequency` = base^(-pair / pairs)."""
        if self.original_length is None:
            return frequency * (1 / self.factor)
        if self.ramp == "turns":
            turns = frequency * (self.original_length / (2 * pi))
            unscaled_share = (turns - self.low) * (1 / (self.high - self.low))
        else:
            first, last = self._ramp_ends(pairs, base)
            unscaled_share = (last - pair) * (1 / (last - first))
        return frequency * (clip_by_value(unscaled_share, 0.0, 1.0) * (1 - 1 / self.factor) + 1 / self.factor)

    def _ramp_ends(self, pairs: int, base: float) -> tuple[float, float]:
        """The pairs at the ends of the ramp: those of `high` and of `low` rotations, rounded outwards."""
        if base <= 1:
            raise GraphError(f"{at('rotary')}: a scaling with a ramp over pairs needs a base above 1, got {base:g}")
        assert self.original_length is not None
        first, last = (
            pairs * log(self.original_length / (2 * pi * turns)) / log(base) for turns in (self.high, self.low)
        )
        begin, end = max(floor(first), 0), min(ceil(last), 2 * pairs - 1)
        return begin, end if end > begin else begin + STEEP


def _angles(
    positions: Tensor, dim: Dimension, base: float, dtype: object, scaling: RotaryScaling | None = None
) -> Tensor:
    """position * base^(-2 i / n) for the elements i and i + n / 2 of a dim of n: [dims of positions, dim]."""
    half = dim.size // 2
    pair = cast(mod(positions_of(dim), half), dtype)
    frequency = exp(pair * (-log(base) / half))
    if scaling is not None:
        frequency = scaling.scaled_frequency(frequency, pair, half, base)
    return multiply(cast(positions, dtype), frequency, [*positions.shape, dim])


def check_scaling(scaling: object, what: str, argument: str) -> None:
    """Raise GraphError unless `scaling` is a RotaryScaling or None."""
    if not isinstance(scaling, RotaryScaling | None):
        raise GraphError(f"{at(what)}: {argument} must be an mtf.layers.RotaryScaling, got {scaling!r:.80}")


def _checked_base(base: float, dim: Dimension, what: str) -> float:
    if number(base, what, "base") <= 0:
        raise ShapeError(f"{at(what)}: base must be positive, got {base}")
    if dim.size % 2:
        raise ShapeError(f"{at(what)}: dim {dim} can't be cut into halves: {dim.size} is odd")
    return float(base)


def _checked_positions(positions: Tensor, what: str) -> Tensor:
    if tensor(positions, what).dtype is not INT32:
        raise ShapeError(f"{at(what)}: positions must be int32, got {positions}; cast them with mtf.cast")
    return positions


def rotary(
    x: Tensor,
    length: Dimension | str,
    dim: Dimension | str,
    base: float = 10000.0,
    positions: Tensor | None = None,
    name: str | None = None,
    scaling: RotaryScaling | None = None,
) -> Tensor:
    """Rotary position embedding: the pair (x[i], x[i + n/2]) of `dim` is rotated by position * base^(-2i/n).

    Args:
      x: float, with `length` and `dim`.
      length: dim of the positions 0, 1, ... of the unsplit sequence.
      dim: dim of one head, of even size n.
      base: 10000 in most models; larger for longer contexts.
      positions: int32, in place of 0, 1, ...; its dims are dims of x.
      name: name of the result.
      scaling: reduced frequencies of some pairs.
    Returns: the type of x; all arithmetic is float32.
    Raises: GraphError if x lacks a dim, ShapeError for an odd `dim`.
    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     q = mtf.ones([mtf.Dimension("length", 2), mtf.Dimension("head_dim", 2)])
      ...     y = mtf.layers.rotary(q, "length", "head_dim")
      >>> mtf.simulate(mtf.lower({"y": y})).step()["y"].round(2).tolist()
      [[1.0, 1.0], [-0.30000001192092896, 1.3799999952316284]]

    Source: Su et al., "RoFormer", arXiv:2104.09864; halves instead of neighbours, as in EleutherAI/gpt-neox.
    """
    what = "rotary"
    rows, d = find_dim(tensor(x, what), length, what), find_dim(x, dim, what)
    base = _checked_base(base, d, what)
    check_scaling(scaling, what, "scaling")
    wide = widened(x)
    with innermost([x], what):
        at_rows = positions_of(rows) if positions is None else tensor(positions, what)
        angles = _angles(at_rows, d, base, wide.dtype, scaling)
    if scaling is not None and scaling.amplitude != 1:
        wide = wide * scaling.amplitude
    straight, turned = wide * cos(angles), rotate_half(wide, d) * sin(angles)
    if wide is x:
        return add(straight, turned, name=name)
    return cast(straight + turned, x.dtype, name)


def sinusoidal_positions(
    length: Dimension,
    output_dim: Dimension,
    dtype: object = "float32",
    base: float = 10000.0,
    positions: Tensor | None = None,
) -> Tensor:
    """Sinusoidal positions: sin(position * base^(-2 i / n)) in the first half of `output_dim`, of size n, then cosines.

    To be added to embeddings. Source: Vaswani et al., arXiv:1706.03762, section 3.5; halves instead of neighbours, as
    in tensorflow/tensor2tensor: tensor2tensor/layers/common_attention.py, which has n / 2 - 1 in place of n / 2.

    `positions`: int32, in place of 0, 1, ... along `length`.

    Returns: [length, output_dim], or [dims of the positions, output_dim], computed in float32.
    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.layers.sinusoidal_positions(mtf.Dimension("length", 2), mtf.Dimension("d", 2))
      >>> print(mtf.simulate(mtf.lower({"y": y})).step()["y"].round(4))
      [[0.     1.    ]
       [0.8415 0.5403]]
    """
    what = "sinusoidal_positions"
    rows, d = as_dim(length, what), as_dim(output_dim, what)
    element_type = as_dtype(dtype)
    at_rows = positions_of(rows) if positions is None else _checked_positions(positions, what)
    angles = _angles(at_rows, d, _checked_base(base, d, what), element_type if element_type.itemsize > 4 else "float32")
    return cast(where(less(positions_of(d), d.size // 2), sin(angles), cos(angles), angles.shape), element_type)


def learned_positions(
    length: Dimension,
    output_dim: Dimension,
    max_length: int | None = None,
    numerics: Numerics = DEFAULT,
    initializer: initializers.Initializer | float | None = None,
    name: str = "positions",
    positions: Tensor | None = None,
) -> Tensor:
    """Learned position embeddings: a variable [max_length, output_dim], sliced to `length`, to be added to embeddings.

    Args:
      length, output_dim: dims of the result.
      max_length: positions of the variable; by default those of `length`.
      numerics: dtypes of the variable and of the result.
      initializer: by default normal with standard deviation 0.02.
      name: name of the variable.
      positions: int32 positions of the vectors, in place of 0, 1, ... along `length`.
    Returns: [length, output_dim], or [dims of the positions, output_dim].
    Raises: ShapeError if `length` is longer than `max_length`; FeedError at run time for a position beyond it.
    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.layers.learned_positions(mtf.Dimension("length", 2), mtf.Dimension("d", 2), initializer=0.5)
      >>> print(mtf.simulate(mtf.lower({"y": y})).step()["y"])
      [[0.5 0.5]
       [0.5 0.5]]
    """
    what = "learned_positions"
    rows, d = as_dim(length, what), as_dim(output_dim, what)
    known = Dimension("max_length", rows.size if max_length is None else max_length)
    if rows.size > known.size:
        raise ShapeError(f"{at(what)}: the variable has {known.size} positions, but {rows} needs {rows.size}")
    start = initializers.random_normal(0.0, 0.02) if initializer is None else initializer
    table = as_numerics(numerics, what).variable(name, [known, d], start)
    if positions is not None:
        return gather(table, _checked_positions(positions, what), known)
    if rows.size < known.size:
        table = part_of(table, 0, rows.size, known.name)
    return rename_dimension(table, known.name, rows.name)


def relative_position_bias(
    length: Dimension,
    memory_length: Dimension,
    heads: Dimension | Sequence[Dimension],
    buckets: int = 32,
    max_distance: int = 128,
    causal: bool = False,
    numerics: Numerics = DEFAULT,
    name: str = "relative_position_bias",
    positions: Tensor | int | None = None,
    memory_positions: Tensor | None = None,
) -> Tensor:
    """T5's bias of attention scores: one learned number per head and bucket of relative positions.

    Half of the buckets have one distance each, the others logarithmically growing ranges up to `max_distance`; the last
    one includes all larger distances. Unless `causal`, half of all buckets are for keys after the query.

    Args:
      length, memory_length: dims of queries and keys, with positions from 0 by default.
      heads: dim of the query heads; or two, groups and key heads.
      buckets, max_distance: see above; buckets is even, unless `causal`, and each half has at least 2 of them.
      causal: whether keys after a query are masked anyway.
      numerics: dtypes of the variable and of the result.
      name: name of the variable [heads, buckets], initially zeros.
      positions: of the queries: the offset of the first one among the keys, an int or an int32 tensor without `length`
        (a token decoded against a cache of keys); or int32 with `length` (packed sequences).
      memory_positions: of the keys, int32 with `memory_length`.
    Returns: [heads, length, memory_length], with batch dims of positions between heads and length, for `bias` of
      `Scores`.
    Raises: ShapeError for too few buckets, and for positions of other dtypes or with dims of the heads.
    Example:
      >>> import meshlib as mtf
      >>> D = mtf.Dimension
      >>> with mtf.Graph():
      ...     y = mtf.layers.relative_position_bias(D("length", 8), D("memory_length", 8), D("heads", 2))
      >>> print(y.shape)
      [heads:2, length:8, memory_length:8]

    Source: Raffel et al., arXiv:1910.10683, section 2.1; google-research/text-to-text-transfer-transformer.
    """
    what = _WHAT
    rows, keys, of_queries = as_dim(length, what), as_dim(memory_length, what), as_dims(heads, f"{what} heads")
    one_way = flag(causal, what, "causal")
    each = whole(buckets, what, "buckets") // (1 if one_way else 2)
    if each < 2 or whole(max_distance, what, "max_distance") <= each // 2 or (not one_way and buckets % 2):
        raise ShapeError(
            f"{at(what)}: buckets must be {'at least 2' if one_way else 'even and at least 4'}, and max_distance above "
            f"{each // 2}, got {buckets} and {max_distance}"
        )
    kinds = Dimension("buckets", buckets)
    table = as_numerics(numerics, what).variable(name, [*of_queries, kinds], initializers.zeros())
    with scope(name):
        relative = _relative_positions(rows, keys, positions, memory_positions)
        distance = maximum(negative(relative), 0) if one_way else absolute(relative)
        bucket = add_n(
            [minimum(distance, each // 2), *(_is_at_least(distance, d) for d in _bounds(each, max_distance))]
        )
        if not one_way:
            bucket = bucket + cast(greater(relative, 0), "int32") * each
        return transpose(gather(table, bucket, kinds), [*of_queries, *bucket.shape])


def _relative_positions(
    rows: Dimension, keys: Dimension, positions: Tensor | int | None, memory_positions: Tensor | None
) -> Tensor:
    """Position of each key minus that of each query: int32 [batch dims of the positions, rows, keys]."""
    i, j = positions_of(rows), positions_of(keys) if memory_positions is None else memory_positions
    if positions is not None:
        given = isinstance(positions, Tensor) and rows in positions.shape
        i = positions if given else i + positions  # type: ignore[assignment]
    for x, own, other in ((i, rows, keys), (j, keys, rows)):
        if tensor(x, _WHAT).dtype is not INT32 or own not in x.shape or other.name in x.shape:
            raise ShapeError(f"{at(_WHAT)}: positions of '{own}' must be int32 with it and without '{other}', got {x}")
    batch = [d for x in (i, j) for d in x.shape if d not in (rows, keys)]
    return subtract(j, i, [*dict.fromkeys(batch), rows, keys])


def _bounds(buckets: int, max_distance: int) -> list[int]:
    """The first distance of each logarithmic bucket but the first.

    >>> _bounds(16, 128)
    [12, 16, 23, 32, 46, 64, 91]
    """
    exact = buckets // 2
    wide = buckets - exact
    # a geometric progression; the small number keeps exact integer powers from being rounded up
    return [ceil(exact * (max_distance / exact) ** (n / wide) - 1e-9) for n in range(1, wide)]


def _is_at_least(distance: Tensor, bound: int) -> Tensor:
    return cast(greater_equal(distance, bound), "int32")
