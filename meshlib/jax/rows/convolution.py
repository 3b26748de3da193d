"""Convolutions on JAX: lax.conv_general_dilated, which has strides, both dilations and groups, too."""

from __future__ import annotations

from math import prod

import jax.numpy as jnp
from jax import lax

from meshlib.jax.context import Array, Index
from meshlib.jax.rows.products import operand
from meshlib.jax.table import Names, Part, Run, aligned, row
from meshlib.operation import Halo
from meshlib.ops.convolution_kernel import Classes
from meshlib.ops.sliding import Window


@row("convolution", native=True)
def _convolution(part: Part, x: Array, w: Array) -> Array:
    windows: tuple[Window, ...] = part.attrs["windows"]
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
        before = _before(part, n)
        if slide.dilation < 0:  # the last tap first
            flipped.append(axis)
            before = before - slide.dilation * (count[1] - 1)
        spread, step = slide.spread, abs(slide.dilation)
        reach = (count[2] - 1) * slide.stride + (count[1] - 1) * step + 1  # of the spread inputs
        if not isinstance(before, int):
            x, spread, before = _moved(x, 1 + axis, spread, reach, before), 1, 0
        pads.append((before, reach - before - ((x.shape[1 + axis] - 1) * spread + 1)))
        strides.append(slide.stride)
        dilations.append(step)
        spreads.append(spread)
    letters = "DHW"[3 - len(windows) :]
    made = lax.conv_general_dilated(
        x,
        jnp.flip(w, flipped) if flipped else w,
        strides,
        pads,
        spreads,
        dilations,
        (f"N{letters}C", f"{letters}IO", f"N{letters}C"),
        _merged(sizes, dims.group),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float64 if x.dtype == jnp.float64 else jnp.float32,
    )
    order = (*dims.rows, *dims.outputs, *dims.group, *dims.columns)
    out = part.out.shape
    return aligned(made.reshape([out.dim(n).size for n in order]), order, out.names)


def _merged(sizes: dict[str, int], names: Names) -> int:
    return prod(sizes[n] for n in names)


def _inside(part: Part, n: int, dim: str, x: Array) -> Array:
    """An operand with zeros where its run lies outside the dim."""
    run, whole = part.runs[n].get(dim), part.operation.inputs[n].shape.dim(dim).size
    axis = part.names[n].index(dim)
    length = x.shape[axis]
    if run is None or (min(run.begins) >= 0 and max(run.begins) + length <= whole):
        return x
    place = _entry(run.begins, run.index) + jnp.arange(length)
    there = ((place >= 0) & (place < whole)).reshape([-1 if a == axis else 1 for a in range(x.ndim)])
    return jnp.where(there, x, jnp.zeros((), x.dtype))


def _before(part: Part, window: Window) -> Index:
    """The slide's `before` in the indices of these blocks: a number where it is the same on every device."""
    slide, op, lower = window.slide, part.operation, part.operation.kind.lower
    first, second = part.runs[0].get(window.first), part.runs[1].get(window.second)
    found: Index = slide.before
    known = first or second
    if known is not None:
        assert isinstance(lower, Halo)
        count = len(known.begins)
        made = op.output.shape.dim(window.out).size // count if window.out == window.first else 0
        found = _entry(
            tuple(
                slide.before
                + slide.spread * _begin(first, j)
                - slide.dilation * _begin(second, j)
                - slide.stride * j * made
                for j in range(count)
            ),
            known.index,
        )
    if window.out != window.first:
        return found - slide.stride * part.offsets[window.out]
    return found - slide.dilation * part.offsets[window.second]


def _begin(run: Run | None, j: int) -> int:
    return 0 if run is None else run.begins[j]


def _entry(values: tuple[int, ...], index: Index) -> Index:
    return values[0] if len(set(values)) == 1 else jnp.asarray(values)[index]


def _moved(x: Array, axis: int, spread: int, reach: int, before: Array) -> Array:
    """The spread inputs moved by a number that only the device knows: as many as the windows reach over."""
    long = (x.shape[axis] - 1) * spread + 1
    pads = [(0, 0, 0)] * x.ndim
    pads[axis] = (reach, reach, spread - 1)
    start = reach - jnp.clip(before, -long, reach)
    return lax.dynamic_slice_in_dim(lax.pad(x, jnp.zeros((), x.dtype), pads), start, reach, axis)
