"""Every register of a systolic array in any cycle, from the schedule of its tiles.

A vector that enters row 0 in cycle u, its slot, reaches PE (r, c) in cycle u + r + c, as does the partial sum that
began with it in row 0. In a frame that moves along with them no clock is needed: the sums of all slots pass one row of
processing elements after another,

    sum[r][u, c] = sum[r - 1][u, c] + weight[r, c] * x[u, r]        a wave: all u and c at once

with the weights of the last tile that began at u or before. Loading is as regular: after the k-th shift of a column,
its shadow registers 0 .. k-1 hold the last k rows of the incoming tile, in order; the others are unchanged.

Source: Kung and Leiserson, "Systolic arrays (for VLSI)", 1978; `hardware.mxu` for the schedule.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from hardware.mxu import MXU, TileSchedule

Array = NDArray[Any]
Ints = NDArray[np.int64]

_WAVE_ELEMENTS = 1 << 16  # sums of a wave: fit the second-level cache


@dataclass(frozen=True, eq=False)
class Window:
    """The array's activity in one cycle; arrays are [rows, columns].

    Attributes:
      activation: the value of x in each PE; vector: its row of x, or -1; tile: the tile it streams for, or -1.
      started: the tile whose weights each PE uses, or -1 before the first.
    """

    activation: Array
    vector: Ints
    tile: Ints
    started: Ints


class Registers:
    """An array of weights and a stream of vectors on their schedule."""

    def __init__(self, mxu: MXU, schedule: TileSchedule, weights: Array, x: Array) -> None:
        self.rows, self.columns = mxu.rows, mxu.columns
        self.vectors, self.depth = len(x), -(-x.shape[1] // mxu.rows)
        self.start, self.load, self.shifts = (
            np.array(cycles, np.int64) for cycles in (schedule.start, schedule.load, schedule.shifts)
        )
        self.skew, self.preloaded = schedule.skew, schedule.start[0] == 0
        self.tiles = _weight_tiles(mxu, weights)
        self.x = np.zeros((self.vectors, self.depth, mxu.rows), x.dtype)
        self.x.reshape(self.vectors, -1)[:, : x.shape[1]] = x
        self.sums = np.zeros((mxu.rows, mxu.columns), x.dtype)
        self.summed = -1  # the cycle that `sums` belongs to

    def product(self) -> tuple[Array, Ints]:
        """y [M, whole tiles of N], tile by tile, and the cycle in which each element leaves the array."""
        blocks = len(self.tiles) // self.depth
        y = np.zeros((self.vectors, blocks * self.columns), self.x.dtype)
        cycle = np.empty(y.shape, np.int64)
        leaves = np.arange(self.vectors)[:, None] + np.arange(self.columns) + self.rows - 1
        height = max(1, _WAVE_ELEMENTS // self.columns)
        for tile, weights in enumerate(self.tiles):
            block = slice(tile // self.depth * self.columns, (tile // self.depth + 1) * self.columns)
            for begin in range(0, self.vectors, height):
                wave = slice(begin, begin + height)
                y[wave, block] += _wave(self.x[wave, tile % self.depth], weights)
            cycle[:, block] = leaves + self.start[tile]
        return y, cycle

    def window(self, cycle: int) -> Window:
        """The slots that have PEs in `cycle`: PE (r, c) works on slot cycle - r - c."""
        slots = cycle - np.arange(self.rows + self.columns - 1)  # newest first: r + c is the index
        started = np.searchsorted(self.start, slots, side="right") - 1
        vector = slots - self.start[started]
        idle = (started < 0) | (vector >= self.vectors)
        vector[idle] = -1
        tile = np.where(idle, -1, started)
        values = np.zeros((len(slots), self.rows), self.x.dtype)
        busy = np.flatnonzero(~idle)
        values[busy] = self.x[vector[busy], tile[busy] % self.depth]
        if self.preloaded:
            started = np.maximum(started, 0)
        # [r, r', c] -> x[slot r + c, r']; its diagonal r = r' holds the inputs of the PEs of row r
        activation = np.diagonal(sliding_window_view(values, self.columns, axis=0)).T
        return Window(activation, *(sliding_window_view(of, self.columns) for of in (vector, tile, started)))

    def weight(self, started: Ints) -> Array:
        """The weights in use, [rows, columns]: for each PE, the weights of the tile that it has started."""
        oldest, newest = int(started[-1, -1]), int(started[0, 0])
        weight: Array = self.tiles[oldest].copy() if oldest >= 0 else np.zeros_like(self.tiles[0])
        for tile in range(oldest + 1, newest + 1):
            np.copyto(weight, self.tiles[tile], where=started >= tile)
        return weight

    def shadow(self, cycle: int) -> Array:
        """The shadow registers, [rows, columns]."""
        if self.preloaded:
            return np.zeros_like(self.tiles[0])
        local = cycle - self.skew * np.arange(self.columns)  # a skewed column lags by its index
        newest = np.searchsorted(self.load, local, side="right") - 1
        shifted = np.where(newest < 0, 0, np.searchsorted(self.shifts, local - self.load[newest], side="right"))
        row = np.arange(self.rows)[:, None]
        new = row < shifted
        tile = newest - ~new  # rows not yet reached by the new tile still hold the one before
        place = (tile * self.rows + row + np.where(new, self.rows - shifted, 0)) * self.columns
        shadow: Array = self.tiles.reshape(-1).take(place + np.arange(self.columns), mode="clip")
        shadow[tile < 0] = 0
        return shadow

    def partial(self, cycle: int, window: Window, weight: Array) -> Array:
        """The partial sums of a cycle, [rows, columns], from its window and weights."""
        if cycle != self.summed:
            begin = self.summed + 1
            if not begin <= cycle < begin + self.rows:  # a sum in row r entered row 0 r cycles earlier
                self.sums, begin = np.zeros_like(self.sums), max(0, cycle - self.rows + 1)
            for before in range(begin, cycle):
                earlier = self.window(before)
                self._advance(earlier.activation, self.weight(earlier.started))
            self._advance(window.activation, weight)
            self.summed = cycle
        return self.sums

    def _advance(self, activation: Array, weight: Array) -> None:
        """Advance one cycle: every PE adds its product to the sum from above; PEs of row 0 add to zero."""
        with np.errstate(all="ignore"):  # idle PEs multiply their weights by zero
            sums = weight * activation
            sums[0] += 0
            sums[1:] += self.sums[:-1]
        self.sums = sums


def _wave(x: Array, weights: Array) -> Array:
    """Partial sums below the array, [vectors, columns]: x [vectors, rows] passes one row of PEs after another."""
    sums = np.zeros((x.shape[0], weights.shape[1]), x.dtype)
    products = np.empty_like(sums)
    with np.errstate(all="ignore"):
        for values, row in zip(x.T, weights, strict=True):
            np.multiply(values[:, None], row, out=products)
            np.add(sums, products, out=sums)
    return sums


def _weight_tiles(mxu: MXU, weights: Array) -> Array:
    """Weights as [tiles, rows, columns]; the tiles along K of one block of N are consecutive."""
    deep, wide = (-(-weights.shape[0] // mxu.rows), -(-weights.shape[1] // mxu.columns))
    padded = np.zeros((deep * mxu.rows, wide * mxu.columns), weights.dtype)
    padded[: weights.shape[0], : weights.shape[1]] = weights
    blocks = padded.reshape(deep, mxu.rows, wide, mxu.columns)
    return np.ascontiguousarray(blocks.transpose(2, 0, 1, 3)).reshape(-1, mxu.rows, mxu.columns)
