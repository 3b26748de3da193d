"""Convolution, an operation of the MXU: an einsum with sliding dims.

Each `SlidingDims` relates a dim of the first operand, one of the second and one of the result by a `Slide`; all other
dims are matched by name as in an einsum. Forward the second operand is a filter, whose dims are short, and the result
has the first operand's spatial dims. The cotangents of both operands are convolutions as well: that of the input slides
the filter over dy; that of the filter slides dy, a filter as large as the result, over the input, and its result is
short.

A split spatial dim needs a halo of its neighbours' rows, with corners if several dims are split. Along a spatial dim of
both operands that the result lacks, each block yields a partial sum; the halo may be of the first operand or of the
second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import gcd, prod
from typing import Any

from layouts import Shape
from meshlib.core.errors import ShapeError
from meshlib.core.graph import Operation, Tensor, TensorType
from meshlib.core.opdef import Array, Block, Factor, Halo, Kind, Linear, Product, Role, Work, operation
from meshlib.ops.building import build, mxu_passes, named_factors, same_dtype
from meshlib.ops.images.convolution_kernel import Classes, convolved
from meshlib.ops.images.sliding import Range, SlidingDims, pairs


def _shape(types: tuple[TensorType, ...], attrs: Mapping[str, Any]) -> TensorType:
    dtype = same_dtype(types)
    if not dtype.is_float:
        raise ShapeError(f"needs float operands, got {dtype.name}; cast them with mtf.cast")
    return TensorType(attrs["shape"], dtype)


def _roles(op: Operation) -> tuple[Factor, ...]:
    windows: tuple[SlidingDims, ...] = op.attrs["windows"]
    special = {d.name: Role.SUM for x in op.inputs for d in x.shape if d.name not in op.output.shape}
    # A dim renamed in the result and absent from the second operand yields partial sums like any other.
    special |= {w.first: Role.HALO for w in windows if w.first == w.out}
    special |= {w.first: Role.OVERLAP for w in windows if w.first != w.out and w.first in op.inputs[1].shape}
    factors = named_factors(op, special)
    overlapping = [f for f in factors if f.role is Role.OVERLAP]  # led by the second operand's blocks or by the first's
    by_second = tuple(replace(f, lead=1) if f in overlapping else f for f in factors)
    return (*by_second, *(replace(f, name=f.name + "'", lead=0) for f in overlapping))


def _needs(op: Operation, factor: Factor, operand: int, start: int, stop: int) -> Range:
    if operand == factor.lead:
        return start, stop
    windows: tuple[SlidingDims, ...] = op.attrs["windows"]
    slide = next(w.slide for w in windows if w.first == factor.operands[0])
    if factor.role is Role.HALO:
        return slide.first_run((start, stop), (0, slide.second))
    if operand == 0:
        return slide.first_run((0, slide.out), (start, stop))
    return slide.second_run((0, slide.out), (start, stop))


def _reads(op: Operation, factor: Factor, operand: int, start: int, stop: int) -> Sequence[Range]:
    """The needed range without the gaps between taps that are further apart than a block is long."""
    needed = _needs(op, factor, operand, start, stop)
    windows: tuple[SlidingDims, ...] = op.attrs["windows"]
    slide = next(w.slide for w in windows if w.first == factor.operands[0])
    halo = factor.role is Role.HALO
    apart, along = (slide.dilation, slide.stride) if halo else (slide.stride, slide.dilation)
    joined = halo or operand == 0
    if operand == factor.lead or (joined and abs(apart) <= abs(along) * (stop - start - 1) + slide.spread):
        return [needed]
    if halo:
        parts = [slide.first_run((start, stop), (tap, tap + 1)) for tap in range(slide.second)]
    else:
        run = slide.first_run if operand == 0 else slide.second_run
        parts = [run((i, i + 1), (start, stop)) for i in range(slide.out)]
    ranges: list[Range] = []
    for begin, end in sorted(part for part in parts if part[0] < part[1]):
        if ranges and begin <= ranges[-1][1]:
            ranges[-1] = ranges[-1][0], max(end, ranges[-1][1])
        else:
            ranges.append((begin, end))
    return ranges


def _local(block: Block, x: Array, w: Array) -> Array:
    windows: tuple[SlidingDims, ...] = block.attrs["windows"]
    first, second = (t.shape for t in block.inputs)
    slides = []
    for n in windows:
        sizes = x.shape[first.index(n.first)], w.shape[second.index(n.second)], block.out.shape.dim(n.out).size
        begins = block.start(0, n.first), block.start(1, n.second) or block.offsets[n.second], block.offsets[n.out]
        slides.append(n.slide.moved(*begins, sizes))
    precise = block.attrs["precision"] == "highest"
    x, w = (block.engine.mxu_operand(a, precise) for a in (x, w))
    dims = Classes.of(first.names, second.names, block.out.shape.names, windows)
    out = block.result()
    convolved(x, w, out, dims, slides, block.engine)
    return out


def _grad(op: Operation, dy: Tensor) -> list[Tensor | None]:
    x, w = op.inputs
    windows: tuple[SlidingDims, ...] = op.attrs["windows"]
    precision = op.attrs["precision"]
    back = [SlidingDims(n.out, n.second, n.first, n.slide.first_cotangent()) for n in windows]
    across = [SlidingDims(n.first, n.out, n.second, n.slide.second_cotangent()) for n in windows]
    return [convolve(dy, w, back, x.shape, precision), convolve(x, dy, across, w.shape, precision)]


def _work(ins: tuple[TensorType, ...], out: TensorType, attrs: Mapping[str, Any]) -> Work:
    return Work(2 * mxu_passes(ins, attrs) * products(ins, out, attrs), 0)


def products(ins: Sequence[TensorType], out: TensorType, attrs: Mapping[str, Any]) -> int:
    """Multiply-adds of the busiest block, without padding. Exact."""
    first, second = (t.shape for t in ins)
    count, sliding = 1, set()
    for w in attrs["windows"]:
        sizes = first.dim(w.first).size, second.dim(w.second).size, out.shape.dim(w.out).size
        whole = w.slide.first, w.slide.second, w.slide.out
        a, b, c = (n // m for n, m in zip(whole, sizes, strict=True))
        if w.out == w.first:
            count *= pairs(w.slide, (1, b, c))
        else:  # a split of both operands: by the blocks of either
            count *= max(pairs(w.slide, (1, b, c)), pairs(w.slide, (a, 1, c)))
        sliding |= {w.first, w.second, w.out}
    sizes_of = {d.name: d.size for shape in (first, second) for d in shape}
    return count * prod(size for name, size in sizes_of.items() if name not in sliding)


def _product(ins: tuple[TensorType, ...], out: TensorType, attrs: Mapping[str, Any]) -> Product:
    """The matrix product by which windows and channels fill the MXU.

    Input channels fill the array's rows, output channels its columns; each tap is a separate product, except for
    adjacent taps of the last dim. For the cotangent of the filter the window is part of the rows of the result, and all
    positions are contracted.
    """
    (first, second), result_shape = (t.shape for t in ins), out.shape
    windows: tuple[SlidingDims, ...] = attrs["windows"]
    dims = Classes.of(first.names, second.names, result_shape.names, windows)
    sizes = {d.name: d.size for shape in (first, second) for d in shape}
    group, rows, contracted, columns = (
        prod(sizes[n] for n in names) for names in (dims.group, dims.rows, dims.contracted, dims.columns)
    )
    taps = [second.dim(w.second).size for w in windows]
    outputs = [result_shape.dim(w.out).size for w in windows]
    if windows[0].out != windows[0].first:
        return Product(group, rows * prod(outputs), contracted * prod(taps), columns, packs=True)
    # In a slide with spread each tap meets only every `spread`-th output.
    phases = [w.slide.spread // gcd(w.slide.spread, w.slide.stride) for w in windows]
    rows *= prod(-(-n // phase) for n, phase in zip(outputs, phases, strict=True))
    return Product(group, rows, contracted, columns, prod(taps), taps[-1], packs=True)


CONVOLUTION = operation(
    "convolution",
    kind=Kind.CONTRACTION,
    shape=_shape,
    roles=_roles,
    local=_local,
    grad=_grad,
    linear=lambda op: Linear((0, 1)),
    work=_work,
    product=_product,
    lower=Halo(_needs, reads=_reads),
)


def convolve(
    x: Tensor,
    w: Tensor,
    windows: Sequence[SlidingDims],
    shape: Shape,
    precision: str = "default",
    name: str | None = None,
) -> Tensor:
    """The convolution of two tensors whose dims are already checked."""
    if windows[0].out == windows[0].second or windows[0].slide.stride < 0:
        # Canonical order: the result has the spatial dims of the first operand, if of any.
        windows = [SlidingDims(n.second, n.first, n.out, n.slide.swapped()) for n in windows]
        x, w = w, x
    attrs = {"windows": tuple(windows), "shape": shape, "precision": precision}
    return build(CONVOLUTION, [x, w], attrs, name)
