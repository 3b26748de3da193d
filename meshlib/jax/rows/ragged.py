"""JAX rows of grouped products: `lax.ragged_dot` over a device's rows and groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from math import prod

import jax.numpy as jnp
from jax import lax

from meshlib.jax.context import Array, Index
from meshlib.jax.rows.products import operand, rounded_to
from meshlib.jax.table import Names, RowContext, aligned, row, storage, stored, widened

LANES = 128  # TPU: multiple of the sides of a tile
TILE = (512, 1024, 512)  # rows, and both dims of a result, of a tile of the TPU kernel: 9 MB of VMEM
INTERPRETED = False  # run the TPU kernel in interpreter mode, available on every platform

_ROWS_SUMMED = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
)


@row("ragged_dot")
def _ragged_dot(part: RowContext, a: Array, b: Array, begins: Array, ends: Array) -> Array:
    a, b = (operand(x, part.context, part.attrs["precision"] == "highest") for x in (a, b))
    return _products(part, a, b, begins, ends)


@row("quantized_ragged_dot")
def _quantized(part: RowContext, a: Array, b: Array, *rest: Array) -> Array:
    """Operands rounded to an eight-bit format, each with its scales, multiplied in float32."""
    *scales, begins, ends = rest
    names = part.names
    units = [widened(aligned(s, names[n], names[n - 2])) for n, s in enumerate(scales, start=2)]
    a, b = (
        rounded_to(widened(x) / unit, grid) * unit
        for x, unit, grid in zip((a, b), units, part.attrs["grids"], strict=True)
    )
    return _products(part, a, b, begins, ends)


def _products(part: RowContext, a: Array, b: Array, begins: Array, ends: Array) -> Array:
    """A `lax.ragged_dot` for each index of dims with groups of their own, or shared by both operands.

    Loops run over these indices: outside of one, a compiler copies the operands of all and stores all products twice.
    """
    rows, groups, dtype = part.attrs["rows"], part.attrs["groups"], part.out.dtype
    of_a, of_b, out = *part.names[:2], part.out.shape.names
    of_bounds = part.names[-2]
    apart, result, order_a, order_b = _orders(part, [n for n in of_bounds if n != groups])
    sizes = dict(zip((*of_a, *of_b), (*a.shape, *b.shape), strict=True))
    offset = part.offsets[rows]
    bounds = (jnp.clip(begins - offset, 0, sizes[rows]), jnp.clip(ends - offset, 0, sizes[rows]))
    split = dict(zip(of_bounds, begins.shape, strict=True))[groups] < part.attrs["count"]
    sizes[groups] = begins.shape[of_bounds.index(groups)]
    on_tpu = part.context.platform == "tpu"
    stacked, summed = ([n for n in apart if (n in out) == kept] for kept in (True, False))
    stacked_at, summed_at = ([*product(*(range(sizes[n]) for n in names))] for names in (stacked, summed))

    def one(index: Sequence[Index], onto: Array | None = None) -> Array:
        at = dict(zip((*stacked, *summed), index, strict=True))
        low, high = (_part_of(x, of_bounds, at, [[groups]], sizes) for x in bounds)
        x, y = _part_of(a, of_a, at, order_a, sizes), _part_of(b, of_b, at, order_b, sizes)
        return _one(x, y, low, high, split, rows in of_b, on_tpu, onto)

    def total(index: Sequence[Index]) -> Array:
        first = one((*index, *summed_at[0]))
        if len(summed_at) == 1:
            return first
        rest = jnp.array(summed_at[1:])
        return lax.scan(lambda onto, more: (one((*index, *more), onto), None), first, rest)[0]

    def write(whole: Array, index: Array) -> tuple[Array, None]:
        block = stored(total(tuple(index)), dtype).reshape([1] * len(stacked) + shape[len(stacked) :])
        return lax.dynamic_update_slice(whole, block, (*index, *[0] * (len(shape) - len(stacked)))), None

    shape = [sizes[n] for n in (*stacked, *result)]
    if len(stacked_at) == 1:
        whole = total(stacked_at[0]).reshape(shape)
    else:  # into the shape of the result: what is computed from it element by element can then overwrite it
        whole = lax.scan(write, jnp.zeros(shape, storage(dtype)), jnp.array(stacked_at))[0]
    return aligned(whole, (*stacked, *result), out)


def _orders(
    part: RowContext, own: Sequence[str]
) -> tuple[list[str], list[str], list[Sequence[str]], list[Sequence[str]]]:
    """Dims with a product for each index (`own`: those with groups of their own), dims of a product, and the dims of
    its operands by axis.
    """
    rows, groups = part.attrs["rows"], part.attrs["groups"]
    of_a, of_b = ([n for n in of if n not in (groups, *own)] for of in part.names[:2])
    left, columns = [n for n in of_a if n not in (rows, *of_b)], [n for n in of_b if n not in of_a]
    both = [n for n in of_a if n in of_b and n != rows]
    contracted = [n for n in both if n not in part.out.shape.names]
    apart = [*own, *(n for n in both if n not in contracted)]
    if rows in of_b:
        return [*apart, *contracted], [groups, *left, *columns], [[rows], left], [[rows], columns]
    return [*apart, *left], [rows, *columns], [[rows], contracted], [[groups], contracted, columns]


def _part_of(
    x: Array, names: Names, at: Mapping[str, Index], order: Sequence[Sequence[str]], sizes: Mapping[str, int]
) -> Array:
    """An operand at one index, with its other dims merged in this order."""
    one = x[tuple(at.get(n, slice(None)) for n in names)]
    rest = [n for n in names if n not in at]
    return aligned(one, rest, [n for part in order for n in part]).reshape([prod(sizes[n] for n in p) for p in order])


def _one(
    x: Array,
    y: Array,
    low: Array,
    high: Array,
    split: bool,
    rows_summed: bool,
    on_tpu: bool = False,
    onto: Array | None = None,
) -> Array:
    """The groups at one index, added to `onto` if rows are summed. The first of split groups may start anywhere: rows
    are rotated to begin with it.
    """
    summed = jnp.float64 if x.dtype == jnp.float64 else jnp.float32
    # Products of narrow operands are exact as they are, and a TPU's kernel takes no other precision of them.
    precision = lax.Precision.HIGHEST if x.dtype.itemsize >= 4 else None
    options = {"precision": precision, "preferred_element_type": summed}
    if split:
        x = jnp.roll(x, -low[0], 0)
        y = jnp.roll(y, -low[0], 0) if rows_summed else y
    count = high - low
    if rows_summed and (INTERPRETED or (on_tpu and x.dtype.itemsize == 2)):
        return summed_by_group(x, y, count, onto)
    if rows_summed:
        sums = lax.ragged_dot_general(x, y, count, _ROWS_SUMMED, **options)
        return sums if onto is None else sums + onto
    whole = lax.ragged_dot(x, y, count, **options)
    whole = jnp.where((jnp.arange(len(whole)) < jnp.sum(count))[:, None], whole, 0)
    return jnp.roll(whole, low[0], 0) if split else whole


def summed_by_group(x: Array, y: Array, count: Array, onto: Array | None = None) -> Array:
    """The products of x [rows, k] and y [rows, n], summed over the rows of each group: float32 [groups, k, n].

    The kernel is `tgmm` of megablox. XLA for TPUs compiles `lax.ragged_dot_general` with summed rows to a product of
    all rows for each group: 16 groups take 16 times the FLOPs (libtpu 0.0.42.1).

    Args:
      x, y: bfloat16, sorted by group.
      count: int32 [groups], rows of each group.
      onto: float32 [groups, k, n] to add to, in place.
    """
    from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

    sizes = (len(x), x.shape[1], y.shape[1])
    tile = tuple(min(most, size + -size % LANES) for most, size in zip(TILE, sizes, strict=True))
    x, y = (jnp.pad(z, ((0, -len(z) % tile[0]), (0, 0))) for z in (x, y))
    options = {"preferred_element_type": jnp.float32, "tiling": tile, "existing_out": onto, "interpret": INTERPRETED}
    sums: Array = tgmm(x.T, y, count, **options)
    return sums
