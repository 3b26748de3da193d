"""Costs of reshards between all placements of a tensor: bytes sent, and the price of each collective.

Most reshards only slice, reduce and gather: their bytes follow from the axes that each dim gains and loses, and are
computed for all pairs of placements at once. Others, where an axis moves to another dim or position, are routed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import gcd, prod
from typing import NamedTuple, TypeAlias

import numpy as np

from layouts import Mesh, Shape, Sharding
from layouts.dims import Dimension
from layouts.sharding import Axes, laid
from meshlib.lowering.balance import Balance
from meshlib.lowering.cost_tables import Floats, Ints
from meshlib.lowering.materialisation import Prices, axes_price, between

COLLECTIVE, STRAY = 2.0**-10, 2.0**-16  # bytes: ties go to fewer collectives, then to the plain reading of the layout
MOST_AXES = 8  # larger meshes: sets of axes are not tabulated
KINDS = {"sum": 0, "max": 1, "min": 2}

Masks: TypeAlias = Ints  # sets of mesh axes, one bit per axis


def distances(placements: Sequence[Sharding], itemsize: float, balance: Balance) -> Floats:
    """Cost of a reshard from each placement (rows) to each (columns): bytes, and the price of each collective."""
    return _distances(tuple(placements), itemsize, balance.axis_prices, COLLECTIVE + balance.collective_bytes)


@lru_cache(maxsize=1 << 13)
def _distances(placements: tuple[Sharding, ...], itemsize: float, prices: Prices, start: float) -> Floats:
    if itemsize % 1:  # a block takes whole bytes
        pairs = np.array([[between(a, b, itemsize, prices) for b in placements] for a in placements], float)
        sent, collectives = pairs.reshape(len(placements), len(placements), 2).transpose(2, 0, 1)
        scale = 1.0
    else:
        shape, mesh = placements[0].shape, placements[0].mesh
        # Factors of a size that axes cannot divide only scale all costs.
        sizes = tuple([gcd(n, mesh.size) for n in shape.sizes])
        sent, collectives = _known(mesh, sizes, prices).between(placements)
        scale = shape.size // prod(sizes) * itemsize
    costs: Floats = sent * scale + start * collectives
    costs.setflags(write=False)
    return costs


class _Known:
    """Cached bytes and collectives between placements of tensors of one shape, at one byte per element."""

    def __init__(self, mesh: Mesh, sizes: tuple[int, ...], prices: Prices) -> None:
        self.mesh, self.prices = mesh, prices
        self.shape = Shape([Dimension(f"d{n}", size) for n, size in enumerate(sizes)])
        self.placements: list[Sharding] = []
        self._numbers: dict[Sharding, int] = {}
        self._costs = np.zeros((2, 0, 0))  # bytes, collectives; NaN: not routed yet

    def between(self, placements: Sequence[Sharding]) -> tuple[Floats, Floats]:
        """Bytes and collectives from each placement to each."""
        new = [s for s in placements if s not in self._numbers]
        if new:
            self._enter(new)
        at = np.array([self._numbers[s] for s in placements])
        costs = self._costs[:, at[:, None], at]
        for a, b in zip(*np.nonzero(np.isnan(costs[0])), strict=True):
            pair = between(self.placements[at[a]], self.placements[at[b]], 1, self.prices)
            costs[:, a, b] = self._costs[:, at[a], at[b]] = pair
        return costs[0], costs[1]

    def _enter(self, new: Sequence[Sharding]) -> None:
        count = len(self.placements)
        numbers = {(s.axes, s.pending): n for n, s in enumerate(self.placements)}
        for s in new:
            key = (s.axes, s.pending)
            self._numbers[s] = numbers.setdefault(key, len(numbers))
            if len(numbers) > len(self.placements):
                self.placements.append(laid(self.shape, self.mesh, *key))
        if len(self.placements) > count:
            rest = self.placements[count:]
            costs = np.empty((2, len(self.placements), len(self.placements)))
            costs[:, :count, :count] = self._costs
            costs[:, count:] = _plain(self.mesh, rest, self.placements, self.prices)
            costs[:, :count, count:] = _plain(self.mesh, self.placements[:count], rest, self.prices)
            self._costs = costs


_known = lru_cache(maxsize=1 << 9)(_Known)


class _Axes(NamedTuple):
    """Sets of mesh axes as bit masks: their devices, and the price of a byte sent along them."""

    bits: dict[str, int]
    devices: Floats
    price: Floats

    def mask(self, axes: Axes) -> int:
        """Bit mask of a set of axes."""
        return sum([self.bits[a] for a in axes])


@lru_cache(maxsize=1 << 8)
def _axes_of(mesh: Mesh, prices: Prices) -> _Axes:
    sets = [[a for k, a in enumerate(mesh.axes) if mask >> k & 1] for mask in range(1 << len(mesh.axes))]
    devices = np.array([mesh.group_size(axes) for axes in sets], float)
    return _Axes({a: 1 << k for k, a in enumerate(mesh.axes)}, devices, np.array([axes_price(s, prices) for s in sets]))


def _plain(mesh: Mesh, sources: Sequence[Sharding], targets: Sequence[Sharding], prices: Prices) -> Floats:
    """Bytes and collectives of reshards that slice, reduce, then gather; NaN for others, infinity if impossible.

    Slices come first, to shrink what follows; sums are then scattered if the target has their axes, and
    reduced in full otherwise; gathers, which send only missing blocks, come last.
    """
    if not sources or len(mesh.axes) > MOST_AXES:
        return np.full((2, len(sources), len(targets)), np.nan)
    axes = _axes_of(mesh, prices)
    before, after = ([axes.mask(s.pending_axes) for s in some] for some in (sources, targets))
    here, there = np.array(before)[:, None], np.array(after)
    kind, wanted = ([KINDS[s.pending[0][1]] if s.pending else 0 for s in some] for some in (sources, targets))
    summed_up, alike = np.array(kind)[:, None] == 0, np.array(kind)[:, None] == np.array(wanted)
    left = here & ~there
    possible = (there == 0) | (alike & (((there & ~here) == 0) | summed_up))
    plain = possible.copy()
    sliced, gathered = np.zeros_like(left), np.zeros_like(left)
    scattered: list[Masks] = []
    collectives = np.zeros(left.shape)
    for d in range(len(targets[0].shape)):
        entries = [s.axes[d] for s in sources], [s.axes[d] for s in targets]
        if len({*entries[0], *entries[1]}) == 1:
            continue
        lost, *gained = _changes(*entries, axes)
        summed = np.zeros_like(left)
        for one in gained:  # major first: scattered sums follow slices
            sums_up = (one & left) != 0
            plain &= (one == 0) | ((lost == 0) & (sums_up | (summed == 0)))
            summed |= np.where(sums_up, one, 0)
            sliced |= np.where(sums_up, 0, one)
        gathered |= lost
        collectives += lost != 0
        if summed.any():
            scattered.append(summed)
            collectives += summed != 0
    plain &= gathered & (sliced | left) == 0
    whole = left
    block = np.array([s.local_size for s in sources], float)[:, None] / axes.devices[sliced]
    sent = np.zeros_like(block)
    for summed in scattered:
        plain &= (summed == 0) | summed_up
        rest = block / axes.devices[summed]
        sent += block - rest
        block, whole = rest, whole & ~summed
    sent += (axes.devices[gathered] - 1) * block
    sent += 2 * (axes.devices[whole] - 1) * block / axes.devices[whole]
    collectives += whole != 0
    if prices:
        plain &= collectives <= 1
        sent *= axes.price[gathered | left]
    sent[~plain] = np.nan
    sent[~possible] = np.inf
    collectives[~possible] = 0
    return np.array((sent, collectives))


def _changes(before: Sequence[Axes], after: Sequence[Axes], axes: _Axes) -> list[Masks]:
    """Masks for each pair of a dim's entries: all axes lost, then each axis gained, major first."""
    rows: dict[Axes, int] = {}
    columns: dict[Axes, int] = {}
    row = np.array([rows.setdefault(e, len(rows)) for e in before])
    column = np.array([columns.setdefault(e, len(columns)) for e in after])
    table = np.zeros((1 + max(map(len, columns)), len(rows), len(columns)), np.intp)
    for a, m in rows.items():
        for b, n in columns.items():
            if a != b:
                same = 0
                while same < min(len(a), len(b)) and a[same] == b[same]:
                    same += 1
                table[0, m, n] = axes.mask(a[same:])
                for k, axis in enumerate(b[same:], start=1):
                    table[k, m, n] = axes.bits[axis]
    return list(table[:, row[:, None], column])
