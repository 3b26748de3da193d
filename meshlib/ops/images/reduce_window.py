"""Sums, maxima and minima of sliding windows, and the operations of their gradients.

    reduce_window(x)[i]     = sum, maximum or minimum of x[j]   over the elements j of window i
    window_extreme(x)[i]    = position in window i of its first element that is the maximum or minimum
    window_pick(z, p)[i]    = z[j]             of the element j at position p[i] of window i
    window_spread(d, p)[j]  = sum of d[i]      over the windows i in which j has position p[i]

Positions count the elements of a window in row-major order of the dims of x. The cotangent of a sum is a sum again;
that of a maximum goes to the first element that is the maximum, as in JAX, TensorFlow and PyTorch. `window_pick` and
`window_spread` are each other's cotangents.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from math import prod
from typing import Any

import numpy as np

from layouts import Shape
from meshlib.core.dtypes import BOOL, INT8, INT32
from meshlib.core.errors import ShapeError
from meshlib.core.graph import Operation, Tensor, TensorType
from meshlib.core.opdef import Array, Block, Factor, Halo, Kind, Linear, Role, Work, operation
from meshlib.ops.building import build, named_factors, not_differentiable
from meshlib.ops.images.sliding import Range, Slide

Slides = tuple[tuple[str, Slide], ...]  # per sliding dim; `first` is its elements, `out` the windows

_CHUNK_BYTES = 1 << 19  # chunk read again by all taps: second-level cache
_COMBINE: dict[str, Callable[..., Any]] = {"sum": np.add, "max": np.maximum, "min": np.minimum}
# x, y -> whether x is still the extreme
REACHES: dict[str, Callable[..., Any]] = {"max": operator.ge, "min": operator.le}


def identity(reduction: str, dtype: np.dtype[Any]) -> Any:
    """The neutral element of a reduction, used as padding."""
    if reduction == "sum":
        return dtype.type(0)
    if dtype.kind == "f":
        return dtype.type(-np.inf if reduction == "max" else np.inf)
    return np.iinfo(dtype).min if reduction == "max" else np.iinfo(dtype).max


def _resized(shape: Shape, slides: Slides) -> Shape:
    for dim, slide in slides:
        shape = shape.resize(dim, slide.out)
    return shape


def _roles(op: Operation) -> tuple[Factor, ...]:
    return named_factors(op, {dim: Role.HALO for dim, _ in op.attrs["slides"]})


def _slide(op: Operation, dim: str) -> Slide:
    slides: dict[str, Slide] = dict(op.attrs["slides"])
    return slides[dim]


def _elements(op: Operation, factor: Factor, operand: int, start: int, stop: int) -> Range:
    """Halo of windows [start, stop): their elements; for the operand with the windows, these."""
    if operand == 1:
        return start, stop
    slide = _slide(op, factor.name)
    return slide.first_run((start, stop), (0, slide.second))


def _windows(op: Operation, factor: Factor, operand: int, start: int, stop: int) -> Range:
    """Halo of elements [start, stop): the windows that contain them."""
    slide = _slide(op, factor.name).first_cotangent()
    return slide.first_run((start, stop), (0, slide.second))


# ---------------------------------------------------------------- reduce_window


def _shape(types: tuple[TensorType, ...], attrs: Mapping[str, Any]) -> TensorType:
    (x,) = types
    if x.dtype is BOOL:
        raise ShapeError("needs numbers, got bool; cast it with mtf.cast")
    return TensorType(_resized(x.shape, attrs["slides"]), x.dtype)


def _local(block: Block, x: Array) -> Array:
    """The reduction along one dim after another, in chunks of the first axis."""
    reduction, out, shape = block.attrs["reduction"], block.result(), block.out.shape
    moved = [
        (shape.index(dim), s.moved(block.start(0, dim), 0, block.offsets[dim], (x.shape[n], s.second, out.shape[n])))
        for dim, s in block.attrs["slides"]
        for n in (shape.index(dim),)
    ]
    for cut in _chunks(x, [axis for axis, _ in moved]):
        part = x[cut]
        for n, (axis, slide) in enumerate(moved):
            sizes = (*part.shape[:axis], slide.out, *part.shape[axis + 1 :])
            target = out[cut] if n == len(moved) - 1 else np.empty(sizes, x.dtype)
            _reduce(part, target, axis, slide, reduction)
            part = target
    return out


def _chunks(x: Array, sliding: Sequence[int]) -> Iterator[slice]:
    """Ranges of the first axis that fit a cache, unless windows slide along it."""
    if 0 in sliding or x.ndim == 0:
        yield np.s_[:]
        return
    step = max(1, _CHUNK_BYTES * len(x) // max(1, x.nbytes))
    for begin in range(0, len(x), step):
        yield np.s_[begin : begin + step]


def _reduce(x: Array, out: Array, axis: int, slide: Slide, reduction: str) -> None:
    combine = _COMBINE[reduction]
    out[...] = identity(reduction, x.dtype)
    for _, into, of in _taps(slide):
        target = out[(np.s_[:],) * axis + (into,)]
        combine(target, x[(np.s_[:],) * axis + (of,)], out=target)


def _taps(slide: Slide) -> Iterator[tuple[int, slice, slice]]:
    """For each tap its number, the windows in which it is inside the dim, and the elements there."""
    for p in slide.plain():
        step = p.outputs.step or 1
        for tap, number in enumerate(range(slide.second)[p.taps]):
            at = p.begin + p.dilation * tap  # in the first window
            first = max(0, -(-max(0, -at) // p.stride))
            last = min(p.out, -(-(slide.first - at) // p.stride))  # exclusive
            if first < last:
                begin, end = at + first * p.stride, at + (last - 1) * p.stride + 1
                windows = slice(p.outputs.start + first * step, p.outputs.start + (last - 1) * step + 1, step)
                yield number, windows, slice(begin, end, p.stride)


def _grad(op: Operation, dy: Tensor) -> list[Tensor | None]:
    (x,), slides = op.inputs, op.attrs["slides"]
    if not x.dtype.is_float:
        return [None]
    if op.attrs["reduction"] == "sum":
        back = tuple((dim, s.first_cotangent()) for dim, s in slides)
        return [reduce_window(dy, back, "sum")]
    return [extreme_gradient(x, dy, slides, op.attrs["reduction"])]


def _work(ins: tuple[TensorType, ...], out: TensorType, attrs: Mapping[str, Any]) -> Work:
    """One lane operation per element of each window."""
    shape = out.shape
    for dim, s in attrs["slides"]:
        taps = ins[0].shape.dim(dim).size if s.spread > 1 else shape.dim(dim).size
        shape = shape.resize(dim, s.second * taps)
    return Work(0, shape.size)


REDUCE_WINDOW = operation(
    "reduce_window",
    kind=Kind.INDEXED,
    shape=_shape,
    roles=_roles,
    local=_local,
    grad=_grad,
    work=_work,
    linear=lambda op: Linear((0,)) if op.attrs["reduction"] == "sum" else Linear(()),
    lower=Halo(_elements),
)


def reduce_window(x: Tensor, slides: Slides, reduction: str, name: str | None = None) -> Tensor:
    """The reduction of windows, along dims already checked."""
    return build(REDUCE_WINDOW, [x], {"slides": slides, "reduction": reduction}, name)


# ---------------------------------------------------------------- the first element that attains the maximum


def extreme_gradient(x: Tensor, dy: Tensor, slides: Slides, reduction: str) -> Tensor:
    """The cotangent of x: that of each window's maximum or minimum goes to the first element that attains it."""
    inside = sorted(slides, key=lambda of: x.shape.index(of[0]))  # positions are in row-major order
    attrs = {"slides": tuple(inside), "reduction": reduction}
    return build(SPREAD, [dy, build(EXTREME, [x], attrs)], attrs)


def _taps_of_windows(
    block: Block, elements: tuple[Array, Mapping[str, int]], windows: tuple[Array, Mapping[str, int]]
) -> Iterator[tuple[int, Any, Any]]:
    """For each position in a window, the windows in which it is inside the dim, and the elements there.

    `elements` and `windows`: the array, and the global index at which it begins, per dim.
    """
    (of, begin), (out, out_begin) = elements, windows
    slides, names = block.attrs["slides"], block.out.shape.names
    axes = [names.index(dim) for dim, _ in slides]
    moved = [
        s.moved(begin[dim], 0, out_begin[dim], (of.shape[n], s.second, out.shape[n]))
        for n, (dim, s) in zip(axes, slides, strict=True)
    ]
    for taps in product(*(tuple(_taps(s)) for s in moved)):
        into: list[slice] = [np.s_[:]] * len(names)
        element_index: list[slice] = [np.s_[:]] * len(names)
        position = 0
        for n, slide, (tap, here, there) in zip(axes, moved, taps, strict=True):
            position = position * slide.second + tap
            into[n], element_index[n] = here, there
        yield position, tuple(into), tuple(element_index)


def _starts(block: Block) -> dict[str, int]:
    """The global index at which operand 0 begins, per sliding dim."""
    return {dim: block.start(0, dim) for dim, _ in block.attrs["slides"]}


def _extreme_local(block: Block, x: Array) -> Array:
    out, reaches = block.result(), REACHES[block.attrs["reduction"]]
    out[...] = -1
    best = np.empty(block.out.shape.sizes, x.dtype)
    for position, windows, elements in _taps_of_windows(block, (x, _starts(block)), (out, block.offsets)):
        keeps = (out[windows] >= 0) & reaches(best[windows], x[elements])
        best[windows] = np.where(keeps, best[windows], x[elements])
        out[windows] = np.where(keeps, out[windows], position)
    return out


def _pick_local(block: Block, z: Array, at: Array) -> Array:
    out = block.result()
    out[...] = 0
    for position, windows, elements in _taps_of_windows(block, (z, _starts(block)), (out, block.offsets)):
        out[windows] += (at[windows] == position) * z[elements]
    return out


def _spread_local(block: Block, d: Array, at: Array) -> Array:
    out = block.result()
    out[...] = 0
    for position, windows, elements in _taps_of_windows(block, (out, block.offsets), (d, _starts(block))):
        out[elements] += (at[windows] == position) * d[windows]
    return out


def _positions(attrs: Mapping[str, Any]) -> int:
    return prod(s.second for _, s in attrs["slides"])


def _extreme_shape(types: tuple[TensorType, ...], attrs: Mapping[str, Any]) -> TensorType:
    return TensorType(_resized(types[0].shape, attrs["slides"]), INT8 if _positions(attrs) <= 128 else INT32)


def _spread_shape(types: tuple[TensorType, ...], attrs: Mapping[str, Any]) -> TensorType:
    shape = types[0].shape
    for dim, slide in attrs["slides"]:
        shape = shape.resize(dim, slide.first)
    return TensorType(shape, types[0].dtype)


def _compared_work(ins: tuple[TensorType, ...], out: TensorType, attrs: Mapping[str, Any]) -> Work:
    """A comparison, and a selection or addition, per element of each window."""
    windows = min(out.shape.size, ins[-1].shape.size)
    return Work(0, 2 * windows * _positions(attrs))


def _pick_grad(op: Operation, dy: Tensor) -> list[Tensor | None]:
    return [build(SPREAD, [dy, op.inputs[1]], op.attrs), None]


_define = partial(operation, kind=Kind.INDEXED, roles=_roles, work=_compared_work)

EXTREME = _define(
    "window_extreme", shape=_extreme_shape, local=_extreme_local, grad=not_differentiable, lower=Halo(_elements)
)
PICK = _define(
    "window_pick",
    shape=lambda types, attrs: TensorType(types[1].shape, types[0].dtype),
    local=_pick_local,
    grad=_pick_grad,
    linear=lambda op: Linear((0,)),
    lower=Halo(_elements),
    exact=True,
)
SPREAD = _define(
    "window_spread",
    shape=_spread_shape,
    local=_spread_local,
    grad=lambda op, dy: [build(PICK, [dy, op.inputs[1]], op.attrs), None],
    linear=lambda op: Linear((0,)),
    lower=Halo(_windows),
)
