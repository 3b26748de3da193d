"""Relative positions: T5's bias of attention scores."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from layouts import Dimension
from meshlib.core import initializers
from meshlib.core.arguments import at, flag, whole
from meshlib.core.dtypes import INT32
from meshlib.core.errors import ShapeError
from meshlib.core.graph import Tensor, scope
from meshlib.layers.numerics import DEFAULT, Numerics, as_numerics
from meshlib.ops.building import as_dim, as_dims, tensor
from meshlib.ops.movement.indexing import gather
from meshlib.ops.movement.indexing import range as positions_of
from meshlib.ops.movement.shape import transpose
from meshlib.ops.pointwise.binary import add_n, greater, greater_equal, maximum, minimum, subtract
from meshlib.ops.pointwise.casts import cast
from meshlib.ops.pointwise.unary import abs as absolute
from meshlib.ops.pointwise.unary import negative

_WHAT = "relative_position_bias"


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
