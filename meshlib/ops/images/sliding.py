"""Index arithmetic of sliding windows along one dim, in plain integers.

A convolution adds up first[j] * second[f] into result[i] for all triples (i, f, j) with

    stride * i + dilation * f = spread * j + before

inside their dims. Forward i counts outputs, f the taps of the filter, j inputs; `spread` - 1 zeros lie between inputs
(a transposed convolution). The cotangent of either operand sums over the same triples, so it is a convolution, too:
`first_cotangent` and `second_cotangent` solve the equation for j and f.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import gcd

import numpy as np
from numpy.typing import NDArray

Range = tuple[int, int]  # begin, end


@dataclass(frozen=True)
class Slide:
    """stride * i + dilation * f = spread * j + before, for i < out, f < second, j < first; spread is positive."""

    stride: int
    dilation: int
    spread: int
    before: int
    first: int
    second: int
    out: int

    def first_cotangent(self) -> Slide:
        """The slide whose operands are the result's cotangent and `second`, and which makes the cotangent of `first`.

        >>> Slide(2, 1, 1, 1, first=8, second=3, out=4).first_cotangent()
        Slide(stride=1, dilation=-1, spread=2, before=-1, first=4, second=3, out=8)
        """
        sign = 1 if self.stride > 0 else -1
        steps = sign * self.spread, -sign * self.dilation, sign * self.stride
        return Slide(*steps, -sign * self.before, self.out, self.second, self.first)

    def second_cotangent(self) -> Slide:
        """The slide whose operands are `first` and the result's cotangent, and which makes the cotangent of `second`.

        >>> Slide(2, 1, 1, 1, first=8, second=3, out=4).second_cotangent()
        Slide(stride=1, dilation=2, spread=1, before=1, first=8, second=4, out=3)
        """
        return Slide(self.dilation, self.stride, self.spread, self.before, self.first, self.out, self.second)

    def swapped(self) -> Slide:
        """The same triples with the operands exchanged."""
        sign = -1 if self.dilation > 0 else 1
        steps = sign * self.stride, -sign * self.spread, -sign * self.dilation
        return Slide(*steps, sign * self.before, self.second, self.first, self.out)

    def first_run(self, out: Range, second: Range) -> Range:
        """Where the inputs lie, inside their dim or not, that these outputs and taps meet; begin and end."""
        ends = [self.stride * i + self.dilation * f - self.before for i, f in _corners(out, second)]
        return -(-min(ends) // self.spread), max(ends) // self.spread + 1

    def second_run(self, out: Range, first: Range) -> Range:
        """Where the taps lie, inside their dim or not, that these outputs and inputs meet; begin and end."""
        sign = 1 if self.dilation > 0 else -1
        ends = [sign * (self.spread * j + self.before - self.stride * i) for i, j in _corners(out, first)]
        step = abs(self.dilation)
        return -(-min(ends) // step), max(ends) // step + 1

    def moved(self, first: int, second: int, out: int, sizes: tuple[int, int, int]) -> Slide:
        """The same triples in indices of blocks that begin there and have these sizes (first, second, out)."""
        before = self.before + self.spread * first - self.dilation * second - self.stride * out
        return Slide(self.stride, self.dilation, self.spread, before, *sizes)

    def plain(self) -> Iterator[PlainSlide]:
        """The slide in parts that have no spread, each with every so many of the outputs and taps.

        Between them they have all triples; of a part without taps the outputs are zero.

        >>> [(p.outputs, p.taps, p.stride, p.dilation, p.begin) for p in Slide(1, -1, 2, -1, 4, 3, 8).plain()]
        [(slice(0, None, 2), slice(1, None, -2), 1, 1, 0), (slice(1, None, 2), slice(2, None, -2), 1, 1, 0)]
        """
        every, taps_every = self.spread // gcd(self.stride, self.spread), self.spread // gcd(self.dilation, self.spread)
        for i in range(min(every, self.out)):
            outputs = len(range(i, self.out, every))
            fits = (f for f in range(min(taps_every, self.second)) if not self._at(i, f) % self.spread)
            f = next(fits, None)
            if f is None:
                yield PlainSlide(slice(i, None, every), slice(0, 0), 1, 1, 0, outputs, 0)
                continue
            stride, dilation = self.stride * every // self.spread, self.dilation * taps_every // self.spread
            begin, taps = self._at(i, f) // self.spread, len(range(f, self.second, taps_every))
            chosen = slice(f, None, taps_every)
            if dilation < 0:  # from the last tap to the first
                begin, dilation = begin + dilation * (taps - 1), -dilation
                chosen = slice(f + (taps - 1) * taps_every, None, -taps_every)
            yield PlainSlide(slice(i, None, every), chosen, stride, dilation, begin, outputs, taps)

    def count(self) -> int:
        """How many triples there are."""
        return sum(part.count(self.first) for part in self.plain())

    def _at(self, i: int, f: int) -> int:
        return self.stride * i + self.dilation * f - self.before


@dataclass(frozen=True)
class PlainSlide:
    """first[begin + stride * i + dilation * f] * second[f] into result[i]; a negative stride goes backwards.

    outputs, taps   which elements of the result's and of the second operand's dim these are
    out, second     how many
    """

    outputs: slice
    taps: slice
    stride: int
    dilation: int
    begin: int
    out: int
    second: int

    def met(self, first: int, of: Sequence[int] | None = None) -> NDArray[np.int64]:
        """How many of the taps of each element of the result, or `of` some of them, lie inside a dim of so many."""
        begins = self.begin + self.stride * (np.arange(self.out) if of is None else np.array(of, int))
        low, high = (-((begins - end) // self.dilation) for end in (0, first))
        met: NDArray[np.int64] = np.clip(high, 0, self.second) - np.clip(low, 0, self.second)
        return met

    def count(self, first: int) -> int:
        """How many pairs of an element of the result and a tap lie inside a dim of so many."""
        turned = self
        if self.second < self.out:  # ask the taps, which are fewer
            begin = self.begin + min(0, self.stride * (self.out - 1))
            turned = PlainSlide(self.taps, self.outputs, self.dilation, abs(self.stride), begin, self.second, self.out)
        return int(turned.met(first).sum())


def _corners(a: Range, b: Range) -> Iterator[tuple[int, int]]:
    return product((a[0], a[1] - 1), (b[0], b[1] - 1))


@dataclass(frozen=True)
class SlidingDims:
    """The dims of the first operand, the second and the result that slide along each other, by name."""

    first: str
    second: str
    out: str
    slide: Slide


@lru_cache(maxsize=65536)
def pairs(slide: Slide, blocks: tuple[int, int, int] = (1, 1, 1)) -> int:
    """How many triples there are inside the dims: multiply-adds for each pair of channels.

    `blocks`: into how many blocks the first operand's, the second's and the result's dim are cut; then those of the
    blocks that have most.

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
    """How many windows there are along a dim, and how many elements of padding lie before and after it.

    Args:
      size: of the dim; window, stride, dilation: of the windows.
      padding: "SAME" (a window for every `stride` elements; the odd element of padding lies after), "VALID" (none), or
        the two numbers.
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
