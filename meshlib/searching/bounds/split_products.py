"""Lower bound on the time of all products of a program, minimised over all splits axis by axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import TypeAlias

from hardware.core import vpu_rate
from hardware.memory import hbm_seconds
from meshlib.estimation.time.kernel_times import Times
from meshlib.searching.bounds.products import SIDES, ProductKernel, product_seconds

Splits: TypeAlias = tuple[tuple[frozenset[str], int], ...]  # for each axis, the dims that it may split, and its size
Cuts: TypeAlias = tuple[int, ...]  # numbers of parts of `SIDES`
NO_SIDE = len(SIDES)


@dataclass(eq=False)
class SplitProducts:
    """Products of one program on one chip.

    `kernels`: each kind with its runs per step, their HBM traffic besides operands, and its smallest use; `moves`:
    whether values between kernels pass through HBM unless they fit on the chip.
    """

    times: Times
    kernels: Sequence[tuple[ProductKernel, int, float, float]]
    moves: bool
    _sides: dict[tuple[frozenset[str], int], list[int]] = field(default_factory=dict)  # a number for each kernel
    _numbers: dict[tuple[tuple[int, ...], int], int] = field(default_factory=dict)  # of (sides, axis size) pairs
    _axes: list[tuple[tuple[int, ...], int]] = field(default_factory=list)  # the pair for each number
    _least: dict[tuple[int, tuple[int, ...]], float] = field(default_factory=dict)
    _cut: dict[tuple[int, Cuts], float] = field(default_factory=dict)

    def seconds(self, splits: Splits) -> float:
        """Seconds of all products in a step, without launches."""
        total = 0.0
        chosen = [self._sides_of(dims, size) for dims, size in splits if size > 1]
        for n, (_, count, *_) in enumerate(self.kernels):
            axes = tuple(sorted([sides[n] for sides in chosen]))
            least = self._least.get((n, axes))
            if least is None:
                least = self._least[n, axes] = count * self._split(n, [self._axes[number] for number in axes])
            total += least
        return total

    def _sides_of(self, dims: frozenset[str], size: int) -> list[int]:
        """For each kernel, a number for the sides that an axis may split, and the axis size."""
        numbers = self._sides.get((dims, size))
        if numbers is None:
            numbers = []
            for kernel, *_ in self.kernels:
                key = _splittable_sides(kernel, dims, size), size
                if key not in self._numbers:
                    self._numbers[key] = len(self._axes)
                    self._axes.append(key)
                numbers.append(self._numbers[key])
            self._sides[dims, size] = numbers
        return numbers

    def _split(self, n: int, axes: Sequence[tuple[tuple[int, ...], int]]) -> float:
        """Minimum over all assignments of axes to sides."""
        least = float("inf")
        for sides in product(*(sides for sides, _ in axes)):
            cuts = [1] * (NO_SIDE + 1)
            for side, (_, size) in zip(sides, axes, strict=True):
                cuts[side] *= size
            key = tuple(cuts[:NO_SIDE])
            if (n, key) not in self._cut:
                self._cut[n, key] = self._part_seconds(n, key)
            least = min(least, self._cut[n, key])
        return least

    def _part_seconds(self, n: int, cuts: Cuts) -> float:
        """One device's part: the longer of computation, and of HBM traffic that nothing can prefetch."""
        kernel, count, beside_bytes, smallest_bytes = self.kernels[n]
        chip = self.times.chip
        if kernel.factors is None:
            rate = chip.peak_flops(kernel.dtype) / chip.devices_per_chip * chip.mxu_efficiency
            assert kernel.product is not None
            return kernel.product.flops / max(rate, vpu_rate(chip)) / prod(cuts)
        parts = dict(zip(SIDES, cuts, strict=True))
        part, stored = kernel.cut(parts), kernel.cut(parts, tiles=False)  # a row in two tiles is read once
        mxu, vpu = product_seconds(chip, part)
        seconds = max(mxu and self.times.in_step_seconds([part], mxu), vpu)
        if kernel.operands is None or not self.moves:
            return seconds
        awaited = kernel.operands.cut(stored, prod(cuts)).awaited_seconds(self.times)
        stays = smallest_bytes / prod(cuts) <= self.times.held_bytes
        return max(seconds, awaited + (0.0 if stays else hbm_seconds(chip, beside_bytes / count / prod(cuts))))


def _splittable_sides(kernel: ProductKernel, dims: frozenset[str], size: int) -> tuple[int, ...]:
    """The sides that an axis may split; if a product's factors match no sides, the first one stands for all."""
    if kernel.factors is None:
        return (0,) if kernel.dims is None or kernel.dims & dims else (NO_SIDE,)
    sides = {f.side for f in kernel.factors if f.size % size == 0 and (f.names is None or f.names & dims)}
    return tuple(sorted(map(SIDES.index, sides))) or (NO_SIDE,)
