"""Sliding windows along one dim: index arithmetic in plain integers, and the arguments stride, dilation and padding.

A convolution adds up first[j] * second[f] into result[i] for all triples (i, f, j) with

    stride * i + dilation * f = spread * j + before

inside their dims. Forward i counts outputs, f the taps of the filter, j inputs; there are `spread` - 1 zeros between
inputs (a transposed convolution). The cotangent of either operand sums over the same triples, so it is a convolution
too: `first_cotangent` and `second_cotangent` solve the equation for j and f.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import gcd
from typing import Any

import numpy as np
from numpy.typing import NDArray

from layouts import Dimension
from meshlib.core.arguments import at, choice, items, whole
from meshlib.core.errors import ShapeError
from meshlib.core.graph import Tensor, find_dim

Range = tuple[int, int]  # begin, end
PerDim = int | Sequence[int] | Mapping[Dimension | str, int]
Padding = str | int | Sequence[Any] | Mapping[Dimension | str, Any]
PADDINGS = ("SAME", "VALID")
MOST = 2**31 - 1  # positions are computed in 64-bit integers


@dataclass(frozen=True)
class Slide:
    """Index relation stride * i + dilation * f = spread * j + before, for i < out, f < second, j < first; spread >
    0."""

    stride: int
    dilation: int
    spread: int
    before: int
    first: int
    second: int
    out: int

    def first_cotangent(self) -> Slide:
        """The slide from the result's cotangent and `second` to the cotangent of `first`.

        >>> Slide(2, 1, 1, 1, first=8, second=3, out=4).first_cotangent()
        Slide(stride=1, dilation=-1, spread=2, before=-1, first=4, second=3, out=8)
        """
        sign = 1 if self.stride > 0 else -1
        steps = sign * self.spread, -sign * self.dilation, sign * self.stride
        return Slide(*steps, -sign * self.before, self.out, self.second, self.first)

    def second_cotangent(self) -> Slide:
        """The slide from `first` and the result's cotangent to the cotangent of `second`.

        >>> Slide(2, 1, 1, 1, first=8, second=3, out=4).second_cotangent()
        Slide(stride=1, dilation=2, spread=1, before=1, first=8, second=4, out=3)
        """
        return Slide(self.dilation, self.stride, self.spread, self.before, self.first, self.out, self.second)

    def swapped(self) -> Slide:
        """The same triples with exchanged operands."""
        sign = -1 if self.dilation > 0 else 1
        steps = sign * self.stride, -sign * self.spread, -sign * self.dilation
        return Slide(*steps, sign * self.before, self.second, self.first, self.out)

    def first_run(self, out: Range, second: Range) -> Range:
        """The range [begin, end) of inputs that these outputs and taps use; it may leave the dim."""
        ends = [self.stride * i + self.dilation * f - self.before for i, f in _corners(out, second)]
        return -(-min(ends) // self.spread), max(ends) // self.spread + 1

    def second_run(self, out: Range, first: Range) -> Range:
        """The range [begin, end) of taps that these outputs and inputs use; it may leave the dim."""
        sign = 1 if self.dilation > 0 else -1
        ends = [sign * (self.spread * j + self.before - self.stride * i) for i, j in _corners(out, first)]
        step = abs(self.dilation)
        return -(-min(ends) // step), max(ends) // step + 1

    def moved(self, first: int, second: int, out: int, sizes: tuple[int, int, int]) -> Slide:
        """The same triples in indices of blocks with these begins and sizes (first, second, out)."""
        before = self.before + self.spread * first - self.dilation * second - self.stride * out
        return Slide(self.stride, self.dilation, self.spread, before, *sizes)

    def plain(self) -> Iterator[PlainSlide]:
        """Decomposition into slides without spread, each with a strided subset of the outputs and taps.

        Together they have all triples; the outputs of a part without taps are zero.

        >>> [(p.outputs, p.taps, p.stride, p.dilation, p.begin) for p in Slide(1, -1, 2, -1, 4, 3, 8).plain()]
        [(slice(0, None, 2), slice(1, None, -2), 1, 1, 0), (slice(1, None, 2), slice(2, None, -2), 1, 1, 0)]
        """
        step, tap_step = self.spread // gcd(self.stride, self.spread), self.spread // gcd(self.dilation, self.spread)
        for i in range(min(step, self.out)):
            outputs = len(range(i, self.out, step))
            fits = (f for f in range(min(tap_step, self.second)) if not self._at(i, f) % self.spread)
            f = next(fits, None)
            if f is None:
                yield PlainSlide(slice(i, None, step), slice(0, 0), 1, 1, 0, outputs, 0)
                continue
            stride, dilation = self.stride * step // self.spread, self.dilation * tap_step // self.spread
            begin, taps = self._at(i, f) // self.spread, len(range(f, self.second, tap_step))
            chosen = slice(f, None, tap_step)
            if dilation < 0:  # last tap first
                begin, dilation = begin + dilation * (taps - 1), -dilation
                chosen = slice(f + (taps - 1) * tap_step, None, -tap_step)
            yield PlainSlide(slice(i, None, step), chosen, stride, dilation, begin, outputs, taps)

    def count(self) -> int:
        """The number of triples."""
        return sum(part.count(self.first) for part in self.plain())

    def _at(self, i: int, f: int) -> int:
        return self.stride * i + self.dilation * f - self.before


@dataclass(frozen=True)
class PlainSlide:
    """Slide without spread: first[begin + stride * i + dilation * f] * second[f] into result[i]; stride may be
    negative.

    outputs, taps   the elements of the result's and the second operand's dim that it covers
    out, second     their numbers
    """

    outputs: slice
    taps: slice
    stride: int
    dilation: int
    begin: int
    out: int
    second: int

    def taps_inside(self, first: int, of: Sequence[int] | None = None) -> NDArray[np.int64]:
        """The number of taps inside a dim of size `first`, for each output or for the outputs `of`."""
        begins = self.begin + self.stride * (np.arange(self.out) if of is None else np.array(of, int))
        low, high = (-((begins - end) // self.dilation) for end in (0, first))
        counts: NDArray[np.int64] = np.clip(high, 0, self.second) - np.clip(low, 0, self.second)
        return counts

    def count(self, first: int) -> int:
        """The number of pairs of an output and a tap inside a dim of size `first`."""
        by_tap = self
        if self.second < self.out:  # sum over the taps, which are fewer
            begin = self.begin + min(0, self.stride * (self.out - 1))
            by_tap = PlainSlide(self.taps, self.outputs, self.dilation, abs(self.stride), begin, self.second, self.out)
        return int(by_tap.taps_inside(first).sum())


def _corners(a: Range, b: Range) -> Iterator[tuple[int, int]]:
    return product((a[0], a[1] - 1), (b[0], b[1] - 1))


@dataclass(frozen=True)
class SlidingDims:
    """Names of the sliding dims of the first operand, the second and the result, with their slide."""

    first: str
    second: str
    out: str
    slide: Slide


@lru_cache(maxsize=65536)
def pairs(slide: Slide, blocks: tuple[int, int, int] = (1, 1, 1)) -> int:
    """The number of triples inside the dims: multiply-adds per pair of channels.

    `blocks`: numbers of blocks of the first operand's, the second's and the result's dim; then the triples of the
    busiest block.

    >>> pairs(Slide(1, 1, 1, 1, first=8, second=3, out=8)), pairs(Slide(1, 1, 1, 1, 8, 3, 8), (1, 1, 4))
    (22, 6)
    """
    parts = first, second, out = slide.first // blocks[0], slide.second // blocks[1], slide.out // blocks[2]
    most = 0
    for f, i in product(range(0, slide.second, second), range(0, slide.out, out)):
        begin, end = slide.first_run((i, i + out), (f, f + second))
        begin = max(begin, 0) // first * first
        for j in range(begin, min(end, slide.first), first):
            most = max(most, slide.moved(j, f, i, parts).count())
    return most


def window_sizes(size: int, window: int, stride: int, dilation: int, padding: str | Range) -> tuple[int, Range]:
    """The number of windows along a dim, and the elements of padding before and after it.

    Args:
      size: size of the dim; window, stride, dilation: geometry of the windows.
      padding: "SAME" (one window per `stride` elements; an odd element of padding goes after), "VALID" (none), or the
        two numbers.
    Example:
      >>> window_sizes(224, 7, 2, 1, "SAME"), window_sizes(8, 3, 1, 2, "VALID"), window_sizes(5, 3, 2, 1, (1, 0))
      ((112, (2, 3)), (4, (0, 0)), (2, (1, 0)))

    Source: tf.nn.convolution, "Padding".
    """
    reach = (window - 1) * dilation + 1
    if padding == "SAME":
        count = -(-size // stride)
        missing = max(0, (count - 1) * stride + reach - size)
        return count, (missing // 2, missing - missing // 2)
    before, after = (0, 0) if isinstance(padding, str) else padding
    return max(0, (size + before + after - reach) // stride + 1), (before, after)


def numbers_per_dim(value: object, dims: Sequence[Dimension], what: str, argument: str) -> list[int]:
    """Integers from 1 to `MOST` per dim: given as one for all, as a list, or by name (1 where missing)."""
    numbers = [whole(n, what, f"{argument} of dim '{d.name}'") for d, n in _per_dim(value, dims, what, argument, 1)]
    for d, n in zip(dims, numbers, strict=True):
        if n < 1:
            raise ShapeError(f"{at(what)}: {argument} of dim '{d.name}' must be at least 1, got {n}")
        if n > MOST:
            raise ShapeError(f"{at(what)}: {argument} of dim '{d.name}' must be at most {MOST}")
    return numbers


def paddings_per_dim(value: object, dims: Sequence[Dimension], what: str) -> list[str | Range]:
    """ "SAME", "VALID", or (before, after) per dim: given as one for all, as a list, or by name (0 where missing)."""
    paddings: list[str | Range] = []
    if len(dims) == 1 and isinstance(value, Sequence) and not isinstance(value, str) and len(value) == 2:
        value = [value]  # with one dim a pair is unambiguous
    for d, given in _per_dim(value, dims, what, "padding", 0):
        if isinstance(given, str):
            paddings.append(choice(given, what, f"padding of dim '{d.name}'", PADDINGS))
            continue
        ends = [given, given] if not isinstance(given, Sequence) else list(given)
        if len(ends) != 2:
            raise ShapeError(
                f"{at(what)}: padding of dim '{d.name}' must be a number or (before, after), got {given!r:.80}"
            )
        before, after = (whole(n, what, f"padding of dim '{d.name}'") for n in ends)
        if min(before, after) < 0:
            raise ShapeError(f"{at(what)}: padding of dim '{d.name}' must not be negative, got ({before}, {after})")
        if max(before, after) > MOST:
            raise ShapeError(f"{at(what)}: padding of dim '{d.name}' must be at most {MOST}")
        paddings.append((before, after))
    return paddings


def _per_dim(
    value: object, dims: Sequence[Dimension], what: str, argument: str, missing: int
) -> list[tuple[Dimension, Any]]:
    if isinstance(value, Mapping):
        by_name = {(d.name if isinstance(d, Dimension) else d): n for d, n in value.items()}
        unknown = [str(d) for d in by_name if d not in [x.name for x in dims]]
        if unknown:
            names = ", ".join(f"'{d.name}'" for d in dims)
            raise ShapeError(f"{at(what)}: {argument} names {', '.join(unknown)}; the dims with windows are {names}")
        return [(d, by_name.get(d.name, missing)) for d in dims]
    if isinstance(value, str) or not isinstance(value, Sequence):
        return [(d, value) for d in dims]
    given = items(value, what, argument)
    if len(given) != len(dims):
        rest = "; leave out those of batch and channels" if len(given) == len(dims) + 2 else ""
        raise ShapeError(f"{at(what)}: {argument} must have {len(dims)} entries, one per dim, got {value!r:.80}{rest}")
    return list(zip(dims, given, strict=True))


def dims_of(x: Tensor, given: object, what: str, argument: str) -> list[tuple[Dimension, Any]]:
    """Dims of `x` by the keys of a dict, with its values."""
    if not isinstance(given, Mapping) or not given:
        raise ShapeError(f"{at(what)}: {argument} must be a dict with an entry per dim, got {given!r:.80}")
    values_of_dims = [(find_dim(x, d, what), value) for d, value in given.items()]
    names = [d.name for d, _ in values_of_dims]
    if len(set(names)) < len(names):
        raise ShapeError(f"{at(what)}: {argument} names a dim twice: {', '.join(names)}")
    return values_of_dims
