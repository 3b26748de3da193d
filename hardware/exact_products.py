"""Products of bfloat16 values through BLAS, bit for bit in the order of addition of the systolic array.

The product of two bfloat16 values has 16 significant bits, so it is exact in float32 and a fused multiply-add rounds
once, as a multiplication followed by an addition does. What is left to settle is the order of addition. A BLAS adds
k = 0, 1, ... into one accumulator for each element of the result wherever its kernels work on whole register tiles;
at ragged edges, and for depths that it cuts in blocks, it may not. So operands are padded with zeros to panels of a few
fixed shapes, at most one tile of the array deep, and each shape is compared with the ordered loop, bit for bit, before
it is used for the first time in a process. A shape that differs, under this BLAS on this processor, is never used.

The time of a panel is proportional to its multiply-adds, padding included. So panels have fine edges where BLAS is
exact at these, and coarse ones elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")
Array = NDArray[Any]
Range = tuple[float, float]  # smallest non-zero and largest magnitude
Ordered = Callable[[Array, Array, Array, int], None]  # first [K, B, M], second [K, B, N], out [B, M, N], rows

FINE = (16, 32, 64, 128, 256, 384)  # panel edges: multiples of the register tiles of some kernels
COARSE = (48, 96, 192, 384)  # multiples of those of all common kernels
DEPTHS = (16, 32, 64)  # depths of panels shallower than the array
MOST_PADDING = 8  # a panel costs at most an eighth of the ordered loop per multiply-add
LARGEST_PRODUCT = float(np.finfo(np.float32).max)
SMALLEST_PRODUCT = 2.0**-134  # the last of its 16 bits is still on the grid of float32's subnormals

_MAGNITUDE, _LOWER_HALF, _INFINITY = np.uint32(0x7FFFFFFF), np.uint32(0xFFFF), np.uint32(0x7F800000)


class OperandCache:
    """Cache of values derived from operands that several products share, such as magnitudes and padded copies.

    Keys are an array's address, shape, strides and dtype. Arrays are kept alive, so that addresses are not reused, and
    must not change while this object is in use.
    """

    def __init__(self) -> None:
        self._results: dict[tuple[object, ...], tuple[Array, Any]] = {}

    def of(self, what: Hashable, x: Array, function: Callable[[Array], T]) -> T:
        """`function(x)`, cached under the name `what`.

        Example:
          >>> operands, x = OperandCache(), np.arange(4.0)
          >>> operands.of("twice", x, lambda x: 2 * x) is operands.of("twice", x[:], lambda x: 3 * x)
          True
        """
        key = (what, x.__array_interface__["data"][0], x.shape, x.strides, x.dtype)
        if key not in self._results:
            self._results[key] = x, function(x)
        result: T = self._results[key][1]
        return result


class Panel(NamedTuple):
    """Shape of one BLAS call: [height, depth] times [depth, width]."""

    height: int
    width: int
    depth: int


def multiply_exactly(
    left: Array, right: Array, out: Array, rows: int, ordered: Ordered, operands: OperandCache | None = None
) -> bool:
    """Multiply in the order of addition of an array of `rows` rows, where BLAS is known to give the same bits.

    Args:
      left: [B, M, K], float32. right: [B, K, N], float32.
      out: [B, M, N], float32, filled if the result is True and left alone otherwise.
      rows: depth of a tile: partial sums begin at 0 in each, and tiles are added in order.
      ordered: the ordered loop, which new shapes of panels are compared with.
      operands: shared with other products.
    Returns: whether `out` was filled. Operands that are not bfloat16 values, that are not finite, or whose products
      leave the range in which they are exact are refused, and so are shapes that padding would make too large.
    Example:
      >>> from hardware.numerics import mxu_matmul  # which calls this function
      >>> x = np.arange(-2304, 2304, dtype=np.float32).reshape(48, 96) / 64
      >>> x.view(np.uint32)[...] &= np.uint32(0xFFFF0000)  # now bfloat16 values
      >>> bool((mxu_matmul(x, x.T) == x.astype(np.float64) @ x.T.astype(np.float64)).mean() > 0.5)
      True
    """
    batch, height, depth = left.shape
    width = right.shape[2]
    if 0 in (batch, height, width, depth):
        return False
    depths = _depths(depth, rows)
    if sum(_edges(height, COARSE)) * sum(_edges(width, COARSE)) * sum(depths) > MOST_PADDING * height * width * depth:
        return False
    operands = operands or OperandCache()
    if not _products_are_exact(
        operands.of("magnitudes", left, _magnitudes), operands.of("magnitudes", right, _magnitudes)
    ):
        return False
    for edges in (FINE, COARSE):
        heights, widths = _edges(height, edges), _edges(width, edges)
        panels = (Panel(h, w, d) for h in {*heights} for w in {*widths} for d in {*depths})
        if all(_is_exact(panel, ordered) for panel in panels):
            break
    else:
        return False
    a = _padded(operands, left, sum(heights), sum(depths))
    b = _padded(operands, right, sum(depths), sum(widths))
    for n in range(batch):
        for i, h in _runs(heights):
            for j, w in _runs(widths):
                _sum_of_tiles(a[n, i : i + h], b[n, :, j : j + w], depths[0], out[n, i : i + h, j : j + w])
    return True


def _sum_of_tiles(a: Array, b: Array, tile: int, out: Array) -> None:
    """The product of one panel, tile by tile, without its padding; the accumulator begins with the first tile."""
    height, width = out.shape
    if out.shape == (a.shape[0], b.shape[1]):
        np.matmul(a[:, :tile], b[:tile], out=out)
        if a.shape[1] <= tile:
            return
        begin = tile
    else:
        out[...] = 0
        begin = 0
    partial = np.empty((a.shape[0], b.shape[1]), np.float32)
    for k in range(begin, a.shape[1], tile):
        np.matmul(a[:, k : k + tile], b[k : k + tile], out=partial)
        np.add(out, partial[:height, :width], out=out)


def _edges(size: int, edges: tuple[int, ...]) -> list[int]:
    """Edges of the panels that cover `size` rows or columns; several in place of one where that saves an eighth."""
    whole, rest = divmod(size, edges[-1])
    panels = [edges[-1]] * whole
    if rest:
        fitting = next(e for e in edges if e >= rest)
        below = max((e for e in edges if e <= rest), default=fitting)
        parts = [below, *_edges(max(0, rest - below), edges)]
        panels += parts if 8 * sum(parts) <= 7 * fitting else [fitting]
    return panels


def _depths(depth: int, rows: int) -> list[int]:
    """Depths of the tiles of an array of `rows` rows: whole ones, and a shallower one for what is left."""
    whole, rest = divmod(depth, rows)
    return [rows] * whole + ([min(rows, next((d for d in DEPTHS if d >= rest), rows))] if rest else [])


def _runs(edges: list[int]) -> Iterator[tuple[int, int]]:
    begin = 0
    for edge in edges:
        yield begin, edge
        begin += edge


def _padded(operands: OperandCache, x: Array, height: int, width: int) -> Array:
    if x.shape[1:] == (height, width) and x.flags.c_contiguous:
        return x

    def padded(x: Array) -> Array:
        wide = np.zeros((x.shape[0], height, width), np.float32)
        wide[:, : x.shape[1], : x.shape[2]] = x
        return wide

    return operands.of((height, width), x, padded)


def _products_are_exact(left: Range | None, right: Range | None) -> bool:
    """True if all operands are bfloat16 values, and all products of two of them exact in float32."""
    if left is None or right is None:
        return False
    (least, most), (other_least, other_most) = left, right
    return most * other_most <= LARGEST_PRODUCT and least * other_least >= SMALLEST_PRODUCT


def _magnitudes(x: Array) -> Range | None:
    """Smallest non-zero and largest magnitude of finite bfloat16 values; None if any value is not a finite bfloat16."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    if np.bitwise_or.reduce(bits, axis=None) & _LOWER_HALF:
        return None
    magnitudes = bits & _MAGNITUDE
    most = magnitudes.max()
    if most >= _INFINITY:
        return None
    least = np.minimum.reduce(magnitudes - np.uint32(1), axis=None)  # zero wraps round to the largest integer
    values = np.array([most if least >= _INFINITY else least + np.uint32(1), most], np.uint32).view(np.float32)
    return (float(values[0]) or 1.0, float(values[1]))


@lru_cache(maxsize=1024)
def _is_exact(panel: Panel, ordered: Ordered) -> bool:
    """True if BLAS adds a panel of this shape in order, tested once on values whose sums depend on the order."""
    for seed in range(2):
        a, b = (_probe((height, width), seed + n) for n, (height, width) in enumerate(
            ((panel.height, panel.depth), (panel.depth, panel.width))
        ))  # fmt: skip
        expected = np.empty((1, panel.height, panel.width), np.float32)
        ordered(np.ascontiguousarray(a.T)[:, None], b[:, None], expected, panel.depth)
        result = np.empty_like(expected[0])
        _sum_of_tiles(a, b, panel.depth, result)
        if not np.array_equal(result.view(np.uint32), expected[0].view(np.uint32)):
            return False
    return True


def _probe(shape: tuple[int, int], seed: int) -> Array:
    """bfloat16 test values from 2**-70 to 2**60 with zeros of either sign: sums that cancel, absorb, are subnormal."""
    random = np.random.default_rng(seed)
    exponents = random.integers(-8, 9, shape) + random.choice([-62, 0, 52], (shape[0], 1))
    values: Array = np.ldexp(random.normal(size=shape), exponents).astype(np.float32)
    values[random.random(shape) < 0.1] *= np.float32(0)
    bits = values.view(np.uint32)
    bits &= np.uint32(0xFFFF0000)
    return values
