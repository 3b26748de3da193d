"""Sums, maxima and minima of windows that slide along some dims, and what their gradients need.

    reduce_window(x)[i]        = sum, maximum or minimum of x[j]    over the elements j of window i
    window_pick(x, y, z)[i]    = sum of z[j]  where x[j] >= y[i]     over the elements j of window i
    window_spread(x, y, d)[j]  = sum of d[i]  where x[j] >= y[i]     over the windows i that j is in

The cotangent of a sum is a sum again; that of a maximum spreads dy over the elements that are the maximum, in equal
parts: as many as `window_pick` counts. The last two are each other's cotangents; of minima they take x[j] <= y[i].
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
from meshlib.core.dtypes import BOOL
from meshlib.core.errors import ShapeError
from meshlib.core.graph import Operation, Tensor, TensorType
from meshlib.core.opdef import Array, Block, Factor, Halo, Kind, Linear, Role, Work, operation
from meshlib.ops.building import build
from meshlib.ops.images.sliding import Range, Slide
from meshlib.ops.pointwise.elementwise import divide
from meshlib.ops.rules import named_factors

Slides = tuple[tuple[str, Slide], ...]  # per dim that slides; `first` is its elements, `out` the windows

_CHUNK_BYTES = 1 << 19  # of elements that all taps read again: second-level cache
_COMBINE: dict[str, Callable[..., Any]] = {"sum": np.add, "max": np.maximum, "min": np.minimum}
COMPARE: dict[str, Callable[..., Any]] = {"max": operator.ge, "min": operator.le}  # an element with the extremum


def identity(reduction: str, dtype: np.dtype[Any]) -> Any:
    """What changes nothing: padding is that."""
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
    """The elements of windows [start, stop); of an operand that has the windows, these."""
    if operand == 1:
        return start, stop
    slide = _slide(op, factor.name)
    return slide.first_run((start, stop), (0, slide.second))


def _windows(op: Operation, factor: Factor, operand: int, start: int, stop: int) -> Range:
    """The windows that elements [start, stop) are in; of the operand that has the elements, these."""
    if operand == 0:
        return start, stop
    slide = _slide(op, factor.name).first_cotangent()
    return slide.first_run((start, stop), (0, slide.second))


# ---------------------------------------------------------------- reduce_window


def _shape(types: tuple[TensorType, ...], attrs: Mapping[str, Any]) -> TensorType:
    (x,) = types
    if x.dtype is BOOL:
        raise ShapeError("needs numbers, got bool; cast it with mtf.cast")
    return TensorType(_resized(x.shape, attrs["slides"]), x.dtype)


def _local(block: Block, x: Array) -> Array:
    """One dim after the other, a few of the first dim's elements at a time."""
    reduction, out, shape = block.attrs["reduction"], block.result(), block.out.shape
    moved = [
        (shape.index(dim), s.moved(block.start(0, dim), 0, block.offsets[dim], (x.shape[n], s.second, out.shape[n])))
        for dim, s in block.attrs["slides"]
        for n in (shape.index(dim),)
    ]
    for cut in _pieces(x, [axis for axis, _ in moved]):
        part = x[cut]
        for n, (axis, slide) in enumerate(moved):
            sizes = (*part.shape[:axis], slide.out, *part.shape[axis + 1 :])
            target = out[cut] if n == len(moved) - 1 else np.empty(sizes, x.dtype)
            _reduce(part, target, axis, slide, reduction)
            part = target
    return out


def _pieces(x: Array, sliding: Sequence[int]) -> Iterator[slice]:
    """Runs of the first axis small enough to stay in a cache, unless windows slide along it."""
    if 0 in sliding or x.ndim == 0:
        yield np.s_[:]
        return
    step = max(1, _CHUNK_BYTES * len(x) // max(1, x.nbytes))
    for begin in range(0, len(x), step):
        yield np.s_[begin : begin + step]


def _reduce(x: Array, out: Array, axis: int, slide: Slide, reduction: str) -> None:
    combine = _COMBINE[reduction]
    out[...] = identity(reduction, x.dtype)
    for into, of in _taps(slide):
        target = out[(np.s_[:],) * axis + (into,)]
        combine(target, x[(np.s_[:],) * axis + (of,)], out=target)


def _taps(slide: Slide) -> Iterator[tuple[slice, slice]]:
    """For each tap the windows of which it lies inside, and the elements that it meets there."""
    for p in slide.plain():
        every = p.outputs.step or 1
        for tap in range(p.second):
            at = p.begin + p.dilation * tap  # of the first window
            first = max(0, -(-max(0, -at) // p.stride))
            last = min(p.out, -(-(slide.first - at) // p.stride))  # one past it
            if first < last:
                begin, end = at + first * p.stride, at + (last - 1) * p.stride + 1
                windows = slice(p.outputs.start + first * every, p.outputs.start + (last - 1) * every + 1, every)
                yield windows, slice(begin, end, p.stride)


def _grad(op: Operation, dy: Tensor) -> list[Tensor | None]:
    (x,), slides = op.inputs, op.attrs["slides"]
    if not x.dtype.is_float:
        return [None]
    if op.attrs["reduction"] == "sum":
        back = tuple((dim, s.first_cotangent()) for dim, s in slides)
        return [reduce_window(dy, back, "sum")]
    y = op.output
    return [build(SPREAD, [x, y, divide(dy, build(PICK, [x, y], op.attrs))], op.attrs)]


def _work(ins: tuple[TensorType, ...], out: TensorType, attrs: Mapping[str, Any]) -> Work:
    """One lane operation for each element of each window."""
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
    """The reduction of windows, along dims that the caller has checked."""
    return build(REDUCE_WINDOW, [x], {"slides": slides, "reduction": reduction}, name)


# ---------------------------------------------------------------- elements that are the maximum


def _meetings(slides: Slides, moved: Sequence[Slide], shape: Shape) -> Iterator[tuple[Any, Any]]:
    """For each tap of all dims together: the windows, and the elements that it meets there."""
    axes = [shape.index(dim) for dim, _ in slides]
    for taps in product(*(tuple(_taps(s)) for s in moved)):
        windows: list[slice] = [np.s_[:]] * len(shape)
        elements: list[slice] = [np.s_[:]] * len(shape)
        for axis, (into, of) in zip(axes, taps, strict=True):
            windows[axis], elements[axis] = into, of
        yield tuple(windows), tuple(elements)


def _pick_local(block: Block, x: Array, y: Array, *z: Array) -> Array:
    slides, shape, out = block.attrs["slides"], block.out.shape, block.result()
    reaches = COMPARE[block.attrs["reduction"]]
    out[...] = 0
    moved = [
        s.moved(block.start(0, dim), 0, block.offsets[dim], (x.shape[n], s.second, y.shape[n]))
        for dim, s in slides
        for n in (shape.index(dim),)
    ]
    for windows, elements in _meetings(slides, moved, shape):
        there = reaches(x[elements], y[windows])
        out[windows] += there * z[0][elements] if z else there
    return out


def _spread_local(block: Block, x: Array, y: Array, d: Array) -> Array:
    slides, shape, out = block.attrs["slides"], block.out.shape, block.result()
    reaches = COMPARE[block.attrs["reduction"]]
    out[...] = 0
    moved = [
        s.moved(block.offsets[dim], 0, block.start(1, dim), (x.shape[n], s.second, y.shape[n]))
        for dim, s in slides
        for n in (shape.index(dim),)
    ]
    for windows, elements in _meetings(slides, moved, shape):
        out[elements] += reaches(x[elements], y[windows]) * d[windows]
    return out


def _compared_work(ins: tuple[TensorType, ...], out: TensorType, attrs: Mapping[str, Any]) -> Work:
    """A comparison and an addition for each element of each window."""
    return Work(0, 2 * ins[1].shape.size * prod(s.second for _, s in attrs["slides"]))


_define = partial(operation, kind=Kind.INDEXED, roles=_roles, work=_compared_work)


def _pick_grad(op: Operation, dy: Tensor) -> list[Tensor | None]:
    x, y, *z = op.inputs
    return [None, None, *([build(SPREAD, [x, y, dy], op.attrs)] if z else [])]


def _spread_grad(op: Operation, dy: Tensor) -> list[Tensor | None]:
    x, y, _ = op.inputs
    return [None, None, build(PICK, [x, y, dy], op.attrs)]


PICK = _define(
    "window_pick",
    shape=lambda types, attrs: types[1],
    local=_pick_local,
    grad=_pick_grad,
    linear=lambda op: Linear((2,)) if len(op.inputs) > 2 else Linear(()),
    lower=Halo(_elements),
)
SPREAD = _define(
    "window_spread",
    shape=lambda types, attrs: types[0],
    local=_spread_local,
    grad=_spread_grad,
    linear=lambda op: Linear((2,)),
    lower=Halo(_windows),
)
