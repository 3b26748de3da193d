"""Convolution in NumPy: windows of the first operand, copied in pieces to a buffer, times the second operand.

The buffer has as many windows as fit a cache, so that no array of all windows is ever allocated. A slide with spread (a
transposed convolution, the cotangent of a strided one) is cut into plain ones, one per phase of the outputs, which
multiply no zeros. A depthwise convolution has no matrix product: taps are multiplied and added one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import prod

import numpy as np
from numpy.lib.stride_tricks import as_strided

from meshlib.core.engine import Engine
from meshlib.core.opdef import Array
from meshlib.ops.images.sliding import PlainSlide, Slide, SlidingDims

Names = tuple[str, ...]

_CHUNK_BYTES = 3 << 20  # of windows, or of products of taps: fits a cache, and is enough for a product
_NARROWING = 3  # ratio of input to output channels from which summing products pays off: three passes per copy


@dataclass(frozen=True)
class Classes:
    """The dims of operands and result by their role in a convolution, as ordered names.

    group       in all three: independent convolutions
    rows        in the first operand and the result; columns: in the second operand and the result
    contracted  in both operands
    inputs      sliding dims of the first operand; taps: of the second, outputs: of the result, in the same order
    """

    first: Names
    second: Names
    out: Names
    group: Names
    rows: Names
    columns: Names
    contracted: Names
    inputs: Names
    taps: Names
    outputs: Names

    @staticmethod
    def of(first: Names, second: Names, out: Names, windows: Sequence[SlidingDims]) -> Classes:
        """Classify dims by their occurrence; dims that do not slide keep the order of the operands."""
        inputs, taps, outputs = (tuple(getattr(w, side) for w in windows) for side in ("first", "second", "out"))
        a, b, c = (
            [n for n in names if n not in sliding]
            for names, sliding in ((first, inputs), (second, taps), (out, outputs))
        )
        group, rows = (tuple(n for n in a if (n in b) is both and n in c) for both in (True, False))
        columns = tuple(n for n in b if n not in a)
        contracted = tuple(n for n in a if n in b and n not in c)
        return Classes(first, second, out, group, rows, columns, contracted, inputs, taps, outputs)


def _narrows(x: Array, w: Array, dims: Classes, slides: Sequence[Slide]) -> bool:
    """True if products at each tap, with far fewer channels, should precede the sum over taps."""
    channels, new_channels = (prod(a.shape[names.index(n)] for n in classes) for a, names, classes in
                      ((x, dims.first, dims.contracted), (w, dims.second, dims.columns)))  # fmt: skip
    short = prod(s.first for s in slides) <= 2 * prod(s.out for s in slides)  # else most products of taps are unused
    return bool(dims.rows) and all(s.stride == 1 for s in slides) and channels > _NARROWING * new_channels and short


def convolved(x: Array, w: Array, out: Array, dims: Classes, slides: Sequence[Slide], engine: Engine) -> None:
    """Write the convolution of `x` and `w` into `out`; `slides` are in indices of these blocks."""
    if _narrows(x, w, dims, slides):
        _add_products_at_taps(x, w, out, dims, slides, engine)
        return
    for parts in product(*(tuple(s.plain()) for s in slides)):
        target = out[_cuts(dims.out, dims.outputs, [p.outputs for p in parts])]
        if any(p.second == 0 for p in parts):
            target[...] = 0
            continue
        taken = w[_cuts(dims.second, dims.taps, [p.taps for p in parts])]
        apart = dims.group and not dims.columns and not (dims.contracted and dims.rows) and not engine.in_order
        (_add_taps if apart else _multiply)(x, taken, target, dims, parts, engine)


def _cuts(names: Names, sliding: Names, cuts: Sequence[slice]) -> tuple[slice, ...]:
    by_name = dict(zip(sliding, cuts, strict=True))
    return tuple(by_name.get(n, np.s_[:]) for n in names)


def _arranged(x: Array, names: Names, order: Sequence[Names]) -> Array:
    """`x` with each class of dims merged into one axis, in this order; a view if possible."""
    x = x.transpose([names.index(n) for dims in order for n in dims])
    sizes = iter(x.shape)
    return x.reshape([prod(next(sizes) for _ in dims) for dims in order])


def _each(names: Names) -> list[Names]:
    return [(n,) for n in names]


# ---------------------------------------------------------------- windows of an array


class _Inputs:
    """The first operand as [group, lead, inputs ..., tail], with zero padding, from which windows are taken."""

    def __init__(self, x: Array, parts: Sequence[PlainSlide]) -> None:
        self.x, self.parts = x, parts
        ends = [[p.begin + p.stride * i + p.dilation * (p.second - 1) * n for i in (0, p.out - 1) for n in (0, 1)]
                for p in parts]  # fmt: skip
        self.spans = [(min(e), max(e) + 1) for e in ends]
        inside = all(b >= 0 and e <= size for (b, e), size in zip(self.spans, x.shape[2:-1], strict=True))
        self.padded: Array | None = None if inside else np.zeros(0, x.dtype)
        self._holds = (0, 0)  # range of the lead in the padded array

    def windows(self, begin: int, end: int, outputs_first: bool) -> Array:
        """Windows at [begin, end) of the lead: [group, lead, outputs ..., taps ..., tail], or taps before outputs."""
        x, first = self.x[:, begin:end], [b for b, _ in self.spans]
        if self.padded is None:
            first = [0] * len(self.parts)
        else:
            x = self._padded(x, (begin, end))
        at = [p.begin - b for p, b in zip(self.parts, first, strict=True)]
        start = x[(np.s_[:], np.s_[:], *(np.s_[n:] for n in at))]
        steps = x.strides[2:-1]
        outputs = [s * p.stride for s, p in zip(steps, self.parts, strict=True)]
        taps = [s * p.dilation for s, p in zip(steps, self.parts, strict=True)]
        output_sizes, slid = [p.out for p in self.parts], [p.second for p in self.parts]
        shape = [*output_sizes, *slid] if outputs_first else [*slid, *output_sizes]
        strides = [*outputs, *taps] if outputs_first else [*taps, *outputs]
        return as_strided(
            start, (*x.shape[:2], *shape, x.shape[-1]), (*x.strides[:2], *strides, x.strides[-1]), writeable=False
        )

    def _padded(self, x: Array, run: tuple[int, int]) -> Array:
        shape = (*x.shape[:2], *(e - b for b, e in self.spans), x.shape[-1])
        assert self.padded is not None
        if self.padded.shape[:1] + self.padded.shape[2:] != shape[:1] + shape[2:] or len(self.padded[0]) < shape[1]:
            self.padded = np.zeros(shape, x.dtype)
        out = self.padded[:, : shape[1]]
        if run == self._holds:
            return out
        self._holds = run
        cuts = [
            (max(b, 0), min(e, size), max(-b, 0)) for (b, e), size in zip(self.spans, self.x.shape[2:-1], strict=True)
        ]
        if all(begin < end for begin, end, _ in cuts):
            inside = tuple(np.s_[to : to + end - begin] for begin, end, to in cuts)
            out[(np.s_[:], np.s_[:], *inside)] = x[(np.s_[:], np.s_[:], *(np.s_[b:e] for b, e, _ in cuts))]
        return out


def _chunks(lead: int, rows: int, item_bytes: int) -> Iterator[tuple[int, int, int, int]]:
    """Ranges of the lead and, within one, of the first axis whose windows fill a chunk: (begin, end, from, to)."""
    whole = _CHUNK_BYTES // max(1, item_bytes * rows)
    if whole:
        for begin in range(0, lead, whole):
            yield begin, min(begin + whole, lead), 0, rows
        return
    some = max(1, _CHUNK_BYTES // max(1, item_bytes))
    for n, begin in product(range(lead), range(0, rows, some)):
        yield n, n + 1, begin, min(begin + some, rows)


def _merges(x: Array, *counts: int) -> bool:
    """True if consecutive groups of `counts` axes can each be merged without a copy."""
    at = 0
    for count in counts:
        axes = [(x.shape[n], x.strides[n]) for n in range(at, at + count) if x.shape[n] > 1]
        if any(outer[1] != inner[0] * inner[1] for outer, inner in pairwise(axes)):
            return False
        at += count
    return True


# ---------------------------------------------------------------- matrix products


def _multiply(x: Array, w: Array, out: Array, dims: Classes, parts: Sequence[PlainSlide], engine: Engine) -> None:
    """Windows as rows of a matrix, or as columns: whichever copies longer contiguous ranges of the first operand."""
    matrix_dims = [n for n in dims.first if n in dims.rows or n in dims.contracted]
    if matrix_dims and matrix_dims[-1] in dims.rows:
        _multiply_across(x, w, out, dims, parts, engine)
    else:
        _multiply_windows(x, w, out, dims, parts, engine)


def _multiply_windows(
    x: Array, w: Array, out: Array, dims: Classes, parts: Sequence[PlainSlide], engine: Engine
) -> None:
    """Matrix product [group, (rows, outputs), (taps, contracted)] times [group, (taps, contracted), columns]."""
    inputs = _Inputs(_arranged(x, dims.first, [dims.group, dims.rows, *_each(dims.inputs), dims.contracted]), parts)
    right = _arranged(w, dims.second, [dims.group, dims.taps + dims.contracted, dims.columns])
    group, lead, slid = len(right), inputs.x.shape[1], len(parts)
    order = [dims.group, dims.rows, *_each(dims.outputs), dims.columns]
    arranged = _arranged(out, dims.out, order)  # [group, rows, outputs ..., columns]
    depth, made_rows = right.shape[1], arranged.shape[2]
    inner = prod(arranged.shape[3:-1])
    pieces: Iterator[tuple[int, int, int, int]] = iter([(0, lead, 0, made_rows)])
    if inputs.padded is not None or not _merges(inputs.windows(0, lead, True), 1, 1 + slid, slid + 1):
        pieces = _chunks(lead, made_rows, group * inner * depth * x.itemsize)
    for begin, end, first, last in pieces:
        windows = inputs.windows(begin, end, True)[:, :, first:last]
        left = windows.reshape(group, -1, depth)
        target = arranged[:, begin:end, first:last]
        if _merges(target, 1, 1 + slid, 1):
            engine.matmul(left, right, target.reshape(group, -1, right.shape[2]))
        else:
            product_ = np.empty((group, left.shape[1], right.shape[2]), left.dtype)
            engine.matmul(left, right, product_)
            np.copyto(target, product_.reshape(target.shape))
    _copy_back(arranged, out, dims.out, order)


def _multiply_across(
    x: Array, w: Array, out: Array, dims: Classes, parts: Sequence[PlainSlide], engine: Engine
) -> None:
    """Matrix product [group, (contracted, taps), (outputs, rows)], transposed, times [group, (contracted, taps),
    columns]."""
    inputs = _Inputs(_arranged(x, dims.first, [dims.group, dims.contracted, *_each(dims.inputs), dims.rows]), parts)
    right = _arranged(w, dims.second, [dims.group, dims.contracted, dims.taps[:1], dims.taps[1:], dims.columns])
    group, lead, taps, _, columns = right.shape
    order = [dims.group, dims.outputs + dims.rows, dims.columns]
    arranged = _arranged(out, dims.out, order)
    slid, width = len(parts), arranged.shape[1]
    pieces: Iterator[tuple[int, int, int, int]] = iter([(0, lead, 0, taps)])
    if inputs.padded is not None or not _merges(inputs.windows(0, lead, False), 1, 1 + slid, slid + 1):
        pieces = _chunks(lead, taps, group * right.shape[3] * width * x.itemsize)
    part: Array | None = None
    for begin, end, first, last in pieces:
        windows = inputs.windows(begin, end, False)[:, :, first:last].reshape(group, -1, width)
        block = right[:, begin:end, first:last].reshape(group, -1, columns)
        if part is None:
            engine.matmul(windows.swapaxes(1, 2), block, arranged)
            part = np.empty(arranged.shape, arranged.dtype)
        else:
            engine.matmul(windows.swapaxes(1, 2), block, part)
            np.add(arranged, part, out=arranged)
    _copy_back(arranged, out, dims.out, order)


def _copy_back(result: Array, out: Array, names: Names, order: Sequence[Names]) -> None:
    """Copy a result from its arranged form to the original array, unless it is a view of it."""
    if not np.may_share_memory(result, out):
        there = out.transpose([names.index(n) for dims in order for n in dims])
        np.copyto(there, result.reshape(there.shape))


def _add_products_at_taps(
    x: Array, w: Array, out: Array, dims: Classes, slides: Sequence[Slide], engine: Engine
) -> None:
    """Convolution to few output channels: multiply inputs by all taps, [rows, contracted] x [contracted, (taps,
    columns)], then sum.

    Windows of the many input channels are never copied; only products with few channels are added into the outputs.
    """
    first = _arranged(x, dims.first, [dims.group, dims.rows, *_each(dims.inputs), dims.contracted])
    right = _arranged(w, dims.second, [dims.group, dims.contracted, dims.taps + dims.columns])
    order = [dims.group, dims.rows, *_each(dims.outputs), dims.columns]
    arranged = _arranged(out, dims.out, order)
    arranged[...] = 0
    group, lead, *inputs, channels = first.shape
    taps, width = [s.second for s in slides], arranged.shape[-1]
    item_bytes = group * prod(inputs[1:]) * right.shape[2] * x.itemsize
    for begin, end, top, bottom in _chunks(lead, inputs[0], item_bytes):
        left = first[:, begin:end, top:bottom]
        terms = np.empty((group, prod(left.shape[1:-1]), right.shape[2]), x.dtype)
        engine.matmul(left.reshape(group, -1, channels), right, terms)
        apart = terms.reshape(*left.shape[:-1], *taps, width)
        for tap in np.ndindex(*taps):
            meets = [_overlapping(s, f, (top, bottom) if n == 0 else (0, s.first))
                     for n, (s, f) in enumerate(zip(slides, tap, strict=True))]  # fmt: skip
            if all(meets):
                of = tuple(m[0] for m in meets if m)
                target = arranged[(np.s_[:], np.s_[begin:end], *(m[1] for m in meets if m))]
                np.add(target, apart[(np.s_[:], np.s_[:], *of, *tap)], out=target)
    _copy_back(arranged, out, dims.out, order)


def _overlapping(s: Slide, tap: int, run: tuple[int, int]) -> tuple[slice, slice] | None:
    """The part of a range of inputs that meets outputs at a tap, relative to its begin; and these outputs."""
    at = s.before - s.dilation * tap  # input j goes to output spread * j + at
    begin, end = max(run[0], -(at // s.spread)), min(run[1], -((at - s.out) // s.spread))
    if begin >= end:
        return None
    return np.s_[begin - run[0] : end - run[0]], np.s_[s.spread * begin + at : s.spread * (end - 1) + at + 1 : s.spread]


# ---------------------------------------------------------------- depthwise convolution


def _add_taps(x: Array, w: Array, out: Array, dims: Classes, parts: Sequence[PlainSlide], engine: Engine) -> None:
    """Depthwise convolution tap by tap; the group is the last axis, which NumPy vectorises."""
    lead = dims.contracted if not dims.rows else dims.rows
    inputs = _Inputs(_arranged(x, dims.first, [(), lead, *_each(dims.inputs), dims.group]), parts)
    order = [lead if dims.rows else (), *_each(dims.outputs), dims.group]
    arranged = _arranged(out, dims.out, order)
    if dims.rows:
        _add_windows(inputs, _arranged(w, dims.second, [*_each(dims.taps), dims.group]), arranged)
    else:
        _add_products(inputs, _arranged(w, dims.second, [lead, *_each(dims.taps), dims.group]), arranged[0])
    _copy_back(arranged, out, dims.out, order)


def _add_windows(inputs: _Inputs, taps: Array, result: Array) -> None:
    """result[row, output ...] = sum over taps of a window's element times the tap."""
    lead, slid = inputs.x.shape[1], taps.ndim - 1
    for begin, end, first, last in _chunks(lead, result.shape[1], 2 * prod(result.shape[2:]) * result.itemsize):
        windows = inputs.windows(begin, end, True)[0, :, first:last]
        target = result[begin:end, first:last]
        term: Array | None = None
        for tap in np.ndindex(*taps.shape[:-1]):
            of_tap = windows[(np.s_[:],) * (slid + 1) + tap]
            if term is None:
                np.multiply(of_tap, taps[tap], out=target)
                term = np.empty(target.shape, result.dtype)
            else:
                np.multiply(of_tap, taps[tap], out=term)
                np.add(target, term, out=target)


def _add_products(inputs: _Inputs, second: Array, result: Array) -> None:
    """result[output ...] = sum over all indices of a window's element times the second operand's."""
    result[...] = 0
    lead, width = len(second), result.shape[-1]
    for begin, end, first, last in _chunks(lead, second.shape[1], 2 * prod(second.shape[2:]) * second.itemsize):
        windows = inputs.windows(begin, end, False)[0, :, first:last]
        block = second[begin:end, first:last]
        term = np.empty(block.shape, block.dtype)
        for output in np.ndindex(*result.shape[:-1]):
            np.multiply(windows[(..., *output, np.s_[:])], block, out=term)
            result[output] += np.add.reduce(term.reshape(-1, width), axis=0)
