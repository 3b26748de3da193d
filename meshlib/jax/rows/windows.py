"""JAX rows of convolutions and pools.

lax.conv_general_dilated and lax.reduce_window support strides and dilations; where a window's position within the
block differs between devices (ragged margins), the operand is shifted first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from math import prod
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from meshlib.core.dtypes import BFLOAT16, DType
from meshlib.core.opdef import Halo
from meshlib.jax.context import Array, Index
from meshlib.jax.rows.products import operand
from meshlib.jax.table import Names, RowContext, aligned, rounded, row, stored, widened
from meshlib.ops.images.convolution_kernel import Classes
from meshlib.ops.images.reduce_window import REACHES, identity
from meshlib.ops.images.resize import taps_of
from meshlib.ops.images.sliding import Slide, SlidingDims


@row("convolution", native=True)
def _convolution(part: RowContext, x: Array, w: Array) -> Array:
    windows: tuple[SlidingDims, ...] = part.attrs["windows"]
    dims = Classes.of(part.names[0], part.names[1], part.out.shape.names, windows)
    precise = part.attrs["precision"] == "highest"
    x, w = (operand(a, part.context, precise) for a in (x, w))
    for n in windows:
        x, w = _inside(part, 0, n.first, x), _inside(part, 1, n.second, w)
    sizes = dict(zip((*dims.first, *dims.second), (*x.shape, *w.shape), strict=True))
    inputs = [x.shape[dims.first.index(n)] for n in dims.inputs]
    taps = [w.shape[dims.second.index(n)] for n in dims.taps]
    # [rows, inputs ..., (group, contracted)] and [taps ..., contracted, (group, columns)]
    x = aligned(x, dims.first, (*dims.rows, *dims.inputs, *dims.group, *dims.contracted)).reshape(
        _merged(sizes, dims.rows), *inputs, _merged(sizes, dims.group + dims.contracted)
    )
    w = aligned(w, dims.second, (*dims.taps, *dims.contracted, *dims.group, *dims.columns)).reshape(
        *taps, _merged(sizes, dims.contracted), _merged(sizes, dims.group + dims.columns)
    )
    strides, dilations, spreads, pads, flipped = [], [], [], [], []
    for axis, n in enumerate(windows):
        slide, count = n.slide, (inputs[axis], taps[axis], part.out.shape.dim(n.out).size)
        before = _before(part, slide, (0, n.first), (1, n.second), n.out)
        if slide.dilation < 0:  # last tap first
            flipped.append(axis)
            before = before - slide.dilation * (count[1] - 1)
        spread, step = slide.spread, abs(slide.dilation)
        reach = (count[2] - 1) * slide.stride + (count[1] - 1) * step + 1  # in dilated input positions
        if not isinstance(before, int):
            x, spread, before = _moved(x, 1 + axis, spread, reach, before), 1, 0
        pads.append((before, reach - before - ((x.shape[1 + axis] - 1) * spread + 1)))
        strides.append(slide.stride)
        dilations.append(step)
        spreads.append(spread)
    letters = "DHW"[3 - len(windows) :]
    (x, w), summed, precision = _supported(part, x, w)
    result = lax.conv_general_dilated(
        x,
        jnp.flip(w, flipped) if flipped else w,
        strides,
        pads,
        spreads,
        dilations,
        (f"N{letters}C", f"{letters}IO", f"N{letters}C"),
        _merged(sizes, dims.group),
        precision=precision,
        preferred_element_type=summed,
    )
    order = (*dims.rows, *dims.outputs, *dims.group, *dims.columns)
    out = part.out.shape
    return aligned(result.reshape([out.dim(n).size for n in order]), order, out.names)


def _supported(part: RowContext, x: Array, w: Array) -> tuple[tuple[Array, Array], Any, lax.Precision]:
    """(operands, dtype of the sums, precision) of a convolution that the platform's library has.

    cuDNN and MIOpen return bfloat16 for bfloat16, summed in float32. Where float32 is asked for, rounded operands are
    widened: TF32 holds bfloat16 exactly.
    """
    summed = jnp.float64 if x.dtype == jnp.float64 else jnp.float32
    if part.context.platform not in ("gpu", "rocm") or x.dtype.itemsize >= 4:
        return (x, w), summed, lax.Precision.HIGHEST
    if x.dtype == w.dtype == jnp.bfloat16 and part.out.dtype is BFLOAT16:
        return (x, w), jnp.bfloat16, lax.Precision.DEFAULT
    return (rounded(widened(x)), rounded(widened(w))), summed, lax.Precision.DEFAULT


def _merged(sizes: dict[str, int], names: Names) -> int:
    return prod(sizes[n] for n in names)


def _inside(part: RowContext, n: int, dim: str, x: Array, fill: Any = 0) -> Array:
    """An operand with `fill` for elements of its window that are outside the dim."""
    run, whole = part.runs[n].get(dim), part.operation.inputs[n].shape.dim(dim).size
    axis = part.names[n].index(dim)
    length = x.shape[axis]
    if run is None or (min(run.begins) >= 0 and max(run.begins) + length <= whole):
        return x
    place = _entry(run.begins, run.index) + jnp.arange(length)
    there = ((place >= 0) & (place < whole)).reshape([-1 if a == axis else 1 for a in range(x.ndim)])
    return jnp.where(there, x, jnp.asarray(fill, x.dtype))


def _before(part: RowContext, slide: Slide, first: tuple[int, str], second: tuple[int, str] | None, out: str) -> Index:
    """The slide's `before` relative to these blocks: an int if all devices have the same; `out`: the result's dim."""
    lower, halo = part.operation.opdef.lower, first[1] == out
    runs = [None if at is None else part.runs[at[0]].get(at[1]) for at in (first, second)]
    first_index: Index = slide.before
    known = next((run for run in runs if run is not None), None)
    if known is not None:
        assert isinstance(lower, Halo)
        count = len(known.begins)
        rows_per_block = slide.out // count if halo else 0
        begins = [(0,) * count if run is None else run.begins for run in runs]
        values = [
            slide.before + slide.spread * a - slide.dilation * b - slide.stride * j * rows_per_block
            for j, (a, b) in enumerate(zip(*begins, strict=True))
        ]
        first_index = _entry(tuple(values), known.index)
    if runs[0] is None and not halo:  # a dim of the first operand alone, summed into partial results
        first_index = first_index + slide.spread * part.offsets[first[1]]
    if runs[1] is None and second is not None:
        first_index = first_index - slide.dilation * part.offsets[second[1]]
    return first_index if halo else first_index - slide.stride * part.offsets[out]


def _entry(values: tuple[int, ...], index: Index) -> Index:
    return values[0] if len(set(values)) == 1 else jnp.asarray(values)[index]


def _moved(x: Array, axis: int, spread: int, reach: int, before: Array, fill: Any = 0) -> Array:
    """The dilated input, shifted by a device-dependent number and cut to the windows' reach."""
    long = (x.shape[axis] - 1) * spread + 1
    pads = [(0, 0, 0)] * x.ndim
    pads[axis] = (reach, reach, spread - 1)
    start = reach - jnp.clip(before, -long, reach)
    return lax.dynamic_slice_in_dim(lax.pad(x, jnp.asarray(fill, x.dtype), pads), start, reach, axis)


# ---------------------------------------------------------------- pools


@row("reduce_window")
def _reduce_window(part: RowContext, x: Array) -> Array:
    reduction, names = part.attrs["reduction"], part.names[0]
    fill = identity(reduction, np.dtype(x.dtype))
    sizes, strides, spreads, steps = ([1] * x.ndim for _ in range(4))
    pads = [(0, 0)] * x.ndim
    for dim, slide in part.attrs["slides"]:
        axis = names.index(dim)
        x = _inside(part, 0, dim, x, fill)
        before, step = _before(part, slide, (0, dim), None, dim), abs(slide.dilation)
        if slide.dilation < 0:
            before = before - slide.dilation * (slide.second - 1)
        spread, reach = slide.spread, (part.out.shape.dim(dim).size - 1) * slide.stride + (slide.second - 1) * step + 1
        if not isinstance(before, int):
            x, spread, before = _moved(x, axis, spread, reach, before, fill), 1, 0
        pads[axis] = (before, reach - before - ((x.shape[axis] - 1) * spread + 1))
        sizes[axis], strides[axis], spreads[axis], steps[axis] = slide.second, slide.stride, spread, step
    combine = {"sum": lax.add, "max": lax.max, "min": lax.min}[reduction]
    # Negative padding cuts elements off, which needs a separate pad.
    cut = [(min(a, 0), min(b, 0), 0) for a, b in pads]
    if any(a or b for a, b, _ in cut):
        x = lax.pad(x, jnp.asarray(fill, x.dtype), [(a, b, s - 1) for (a, b, _), s in zip(cut, spreads, strict=True)])
        spreads, pads = [1] * x.ndim, [(max(a, 0), max(b, 0)) for a, b in pads]
    return lax.reduce_window(x, jnp.asarray(fill, x.dtype), combine, sizes, strides, pads, spreads, steps)


class _Tapped(NamedTuple):
    """A dim along which windows slide: its axis, its slide with `before` of this device, and the result's size."""

    axis: int
    slide: Slide
    before: Index
    size: int


def _tapped(part: RowContext, x: Array, n: int, back: bool, fill: Any) -> tuple[Array, list[_Tapped]]:
    """Operand `n` with `fill` outside the tensor, and the dims along which windows slide."""
    dims = []
    for dim, slide in part.attrs["slides"]:
        s = slide.first_cotangent() if back else slide
        before = _before(part, s, (n, dim), None, dim)
        dims.append(_Tapped(part.names[n].index(dim), s, before, part.out.shape.dim(dim).size))
        x = _inside(part, n, dim, x, fill)
    return x, dims


def _at_taps(part: RowContext, x: Array, n: int, back: bool, fill: Any) -> Iterator[Array]:
    """For each tap, the elements of operand `n` under it, per element of the result; `fill` outside."""
    x, dims = _tapped(part, x, n, back, fill)
    for tap in product(*(range(d.slide.second) for d in dims)):
        at_tap = x
        for d, f in zip(dims, tap, strict=True):
            at_tap = _under_tap(at_tap, d.axis, d.slide, d.before - d.slide.dilation * f, d.size, fill)
        yield at_tap


def _under_tap(x: Array, axis: int, s: Slide, before: Index, size: int, fill: Any) -> Array:
    """x[(stride * i - before) / spread] for i < size."""
    fill, pads = jnp.asarray(fill, x.dtype), [(0, 0, 0)] * x.ndim
    if isinstance(before, int) and s.spread == 1:  # only elements under the tap are read
        first = min(size, max(0, -(-before // s.stride)))
        count = max(0, min(size, (x.shape[axis] - 1 + before) // s.stride + 1) - first)
        pads[axis] = (first, size - first - count, 0)
        begin = first * s.stride - before if count else 0
        end = begin + (count - 1) * s.stride + 1 if count else 0
        return lax.pad(lax.slice_in_dim(x, begin, end, s.stride, axis), fill, pads)
    reach = (size - 1) * s.stride + 1
    if isinstance(before, int):
        pads[axis] = (before, reach - before - ((x.shape[axis] - 1) * s.spread + 1), s.spread - 1)
        spread = lax.pad(x, fill, pads)
    else:
        spread = _moved(x, axis, s.spread, reach, before, fill)
    return lax.slice_in_dim(spread, 0, reach, s.stride, axis)


@row("window_extreme", native=True)
def _extreme(part: RowContext, x: Array) -> Array:
    reaches, dtype, weight = REACHES[part.attrs["reduction"]], part.out.dtype.public, 1
    best, dims = _tapped(part, x, 0, False, 0)
    at, any_inside = jnp.zeros(best.shape, dtype), jnp.ones((), bool)
    # One dim after the other, the last first: ties go to the first position in row-major order.
    for (dim, _), s in reversed(list(zip(part.attrs["slides"], dims, strict=True))):
        there = _inside(part, 0, dim, jnp.ones([n if a == s.axis else 1 for a, n in enumerate(x.shape)], bool), False)
        under_taps = [
            [_under_tap(y, s.axis, s.slide, s.before - s.slide.dilation * f, s.size, 0) for y in (best, at, there)]
            for f in range(s.slide.second)
        ]
        best, at, inside = under_taps[0]
        for f, (value, position, is_inside) in enumerate(under_taps[1:], start=1):
            keeps = (inside & reaches(best, value)) | ~is_inside
            position = position + jnp.asarray(f * weight, dtype)
            best, at, inside = jnp.where(keeps, best, value), jnp.where(keeps, at, position), inside | is_inside
        any_inside, weight = any_inside & inside, weight * s.slide.second
    return jnp.where(any_inside, at, jnp.asarray(-1, dtype))


@row("window_pick")
def _pick(part: RowContext, z: Array, at: Array) -> Array:
    total, zero = jnp.zeros(at.shape, z.dtype), jnp.zeros((), z.dtype)
    for position, met in enumerate(_at_taps(part, z, 0, False, 0)):
        total = total + jnp.where(at == position, met, zero)
    return total


@row("window_spread", native=True)
def _spread(part: RowContext, d: Array, at: Array) -> Array:
    chosen, dims = _tapped(part, at, 1, True, -1)
    if all(isinstance(s.before, int) and s.slide.stride == 1 for s in dims):
        return _by_residues(_tapped(part, d, 0, True, 0)[0], chosen, dims, part.out.dtype)
    total, zero = widened(jnp.zeros(part.out.shape.sizes, d.dtype)), jnp.zeros((), d.dtype)
    windows = zip(_at_taps(part, d, 0, True, 0), _at_taps(part, at, 1, True, -1), strict=True)
    for position, (under_tap, chosen) in enumerate(windows):
        total = total + widened(jnp.where(chosen == position, under_tap, zero))
    return total


def _by_residues(d: Array, at: Array, dims: Sequence[_Tapped], dtype: DType) -> Array:
    """`window_spread`, at the resolution of the windows: one sum for each residue of positions modulo their strides.

    A tap reaches the positions of one residue, so nothing is spread over the whole result. XLA stores the taps' values
    and the sums, which are interleaved: both in their own dtype, not in float32.
    """
    zero = jnp.zeros((), d.dtype)
    taps = list(product(*(range(s.slide.second) for s in dims)))
    sums = []
    for residues in product(*(range(s.slide.spread) for s in dims)):
        shape = list(d.shape)
        for s in dims:
            shape[s.axis] = -(-s.size // s.slide.spread)
        total = widened(jnp.zeros(shape, d.dtype))
        for position, tap in enumerate(taps):
            begins = [r - s.before + s.slide.dilation * f for r, s, f in zip(residues, dims, tap, strict=True)]
            if any(begin % s.slide.spread for begin, s in zip(begins, dims, strict=True)):
                continue
            pads = [(0, 0, 0)] * d.ndim
            for begin, s in zip(begins, dims, strict=True):
                first = begin // s.slide.spread
                pads[s.axis] = (-first, shape[s.axis] + first - d.shape[s.axis], 0)
            total = total + widened(lax.pad(jnp.where(at == position, d, zero), zero, pads))
        sums.append(stored(total, dtype))
    return _interleaved(sums, dims)


def _interleaved(sums: list[Array], dims: Sequence[_Tapped]) -> Array:
    """The sums of all residues, the last dim's varying fastest, at their positions of the result."""
    for s in reversed(dims):
        n = s.slide.spread
        stacked = (jnp.stack(sums[k : k + n], s.axis + 1) for k in range(0, len(sums), n))
        whole = (x.reshape(*x.shape[: s.axis], -1, *x.shape[s.axis + 2 :]) for x in stacked)
        sums = [lax.slice_in_dim(x, 0, s.size, axis=s.axis) for x in whole]
    (result,) = sums
    return result


# ---------------------------------------------------------------- interpolation


@row("interpolate")
def _interpolate(part: RowContext, x: Array) -> Array:
    dim = part.attrs["dim"]
    axis, run, size = part.names[0].index(dim), part.runs[0].get(dim), part.out.shape.dim(dim).size
    begin = 0 if run is None else _entry(run.begins, run.index)
    indices, weights = (
        lax.dynamic_slice_in_dim(jnp.asarray(a), part.offsets[dim], size) for a in taps_of(part.operation)
    )
    total = jnp.zeros((), x.dtype)
    for k in range(indices.shape[1]):
        tap = jnp.take(x, indices[:, k] - begin, axis=axis, mode="clip")
        total = total + tap * weights[:, k].astype(x.dtype).reshape([-1 if a == axis else 1 for a in range(x.ndim)])
    return total
