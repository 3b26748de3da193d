"""Costs of reshards between all placements of a tensor: bytes sent, and the price of each collective.

Most reshards only slice, reduce and gather: their bytes follow from the axes that each dim gains and loses, and are
computed for all pairs of placements at once. Others, where an axis moves to another dim or position, are routed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import product
from math import gcd, prod
from typing import TypeAlias

import numpy as np

from layouts import Mesh, Shape, Sharding
from layouts.dims import Dimension
from layouts.sharding import Axes, Pending, laid
from meshlib.lowering.balance import Balance
from meshlib.lowering.cost_tables import Floats, Ints
from meshlib.lowering.materialisation import Prices, axes_price, between

COLLECTIVE, STRAY = 2.0**-10, 2.0**-16  # bytes: ties go to fewer collectives, then to the plain reading of the layout
MOST_USUAL = 2  # axes of a mesh whose placements are tabulated before they are asked for
MOST_AXES = 8  # larger meshes: sets of axes are not tabulated
KINDS = {"sum": 0, "max": 1, "min": 2}

Masks: TypeAlias = Ints  # sets of mesh axes, one bit per axis
Placement: TypeAlias = tuple[tuple[Axes, ...], Pending]  # of a sharding: the axes that split each dim, pending reductions


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
        self.placements: dict[Placement, int] = {}
        self._numbers: dict[Sharding, int] = {}
        self._costs = np.zeros((2, 0, 0))  # bytes, collectives; NaN: not routed yet

    def between(self, placements: Sequence[Sharding]) -> tuple[Floats, Floats]:
        """Bytes and collectives from each placement to each."""
        new = [s for s in placements if s not in self._numbers]
        if new:
            self._enter(new)
        at = np.array([self._numbers[s] for s in placements])
        costs: Floats = self._costs[:, at[:, None], at]
        for a, b in zip(*np.isnan(costs[0]).nonzero(), strict=True):
            ends = [laid(self.shape, self.mesh, s.axes, s.pending) for s in (placements[a], placements[b])]
            costs[:, a, b] = self._costs[:, at[a], at[b]] = between(*ends, 1, self.prices)
        return costs[0], costs[1]

    def _enter(self, new: Sequence[Sharding]) -> None:
        count = len(self.placements)
        if not count:
            self.placements.update((s, n) for n, s in enumerate(self._usual()))
        for s in new:
            self._numbers[s] = self.placements.setdefault((s.axes, s.pending), len(self.placements))
        total = len(self.placements)
        if total > count:
            costs = np.empty((2, total, total))
            costs[:, :count, :count] = self._costs
            pairs = np.ones((total, total), bool)
            pairs[:count, :count] = False
            sources, targets = pairs.nonzero()
            costs[:, sources, targets] = _plain(self.mesh, self.shape, [*self.placements], sources, targets, self.prices)
            self._costs = costs

    def _usual(self) -> Iterator[Placement]:
        """On small meshes all placements with axes in mesh order, pending sums included: in one go that is cheaper."""
        axes = [a for a in self.mesh.axes if self.mesh.axis_size(a) > 1]
        if len(axes) > MOST_USUAL:
            return
        count = len(self.shape)
        for dims in product(range(count + 2), repeat=len(axes)):
            entries = [tuple([a for a, d in zip(axes, dims, strict=True) if d == n]) for n in range(count + 1)]
            if all(d.size % self.mesh.group_size(e) == 0 for d, e in zip(self.shape, entries, strict=False)):
                yield tuple(entries[:count]), tuple([(a, "sum") for a in entries[count]])


_known = lru_cache(maxsize=1 << 9)(_Known)


class _Axes:
    """Sets of mesh axes as bit masks: their devices, and the price of a byte sent along them.

    `changes[:, a, b]`: the axes that a dim loses where entry `b` of a sharding takes the place of entry `a`, then each
    axis that it gains, major first.
    """

    def __init__(self, mesh: Mesh, prices: Prices) -> None:
        sets = [[a for k, a in enumerate(mesh.axes) if mask >> k & 1] for mask in range(1 << len(mesh.axes))]
        self.bits = {a: 1 << k for k, a in enumerate(mesh.axes)}
        self.devices: Floats = np.array([mesh.group_size(axes) for axes in sets], float)
        self.price: Floats = np.array([axes_price(s, prices) for s in sets])
        self.entries: dict[Axes, int] = {}
        self.changes: Masks = np.zeros((1, 0, 0), np.intp)

    def mask(self, axes: Axes) -> int:
        """Bit mask of a set of axes."""
        return sum([self.bits[a] for a in axes])

    def numbers(self, rows: Sequence[Sequence[Axes]]) -> Ints:
        """The numbers of the entries of each row."""
        count = len(self.entries)
        numbers = np.array([[self.entries.setdefault(e, len(self.entries)) for e in row] for row in rows], np.intp)
        if len(self.entries) > count:
            before, total = self.changes, len(self.entries)
            self.changes = np.zeros((1 + max(map(len, self.entries)), total, total), np.intp)
            self.changes[: len(before), :count, :count] = before
            for a, m in self.entries.items():
                for b, n in self.entries.items():
                    if a != b and max(m, n) >= count:
                        same = 0
                        while same < min(len(a), len(b)) and a[same] == b[same]:
                            same += 1
                        self.changes[: 1 + len(b) - same, m, n] = [self.mask(a[same:]), *map(self.bits.get, b[same:])]
        return numbers.reshape(len(rows), -1)


_axes_of = lru_cache(maxsize=1 << 8)(_Axes)


def _plain(
    mesh: Mesh, shape: Shape, placements: Sequence[Placement], sources: Ints, targets: Ints, prices: Prices
) -> Floats:
    """Bytes and collectives of reshards that slice, reduce, then gather; NaN for others, infinity if impossible.

    Slices come first, to shrink what follows; sums are then scattered if the target has their axes, and
    reduced in full otherwise; gathers, which send only missing blocks, come last.

    Args:
      sources: the number of the first placement of each pair; `targets` are those of the second.
    """
    if len(mesh.axes) > MOST_AXES:
        return np.full((2, len(sources)), np.nan)
    axes = _axes_of(mesh, prices)
    entries = axes.numbers([entries for entries, _ in placements])
    split = np.array([axes.mask([a for entry in entries for a in entry]) for entries, _ in placements])
    waiting = np.array([axes.mask([a for a, _ in pending]) for _, pending in placements])
    kind = np.array([KINDS[pending[0][1]] if pending else 0 for _, pending in placements])
    here, there, summed_up = waiting[sources], waiting[targets], kind[sources] == 0
    left = here & ~there
    possible = (there == 0) | ((kind[sources] == kind[targets]) & (((there & ~here) == 0) | summed_up))
    lost, *gained = axes.changes[:, entries[sources], entries[targets]]
    sliced, summed, stays = np.zeros_like(left), np.zeros_like(lost), lost == 0
    plain = possible.copy()
    for one in gained:  # major first: scattered sums follow slices
        sums_up = (one & left[:, None]) != 0
        plain &= ((one == 0) | (stays & (sums_up | (summed == 0)))).all(axis=1)
        summed |= np.where(sums_up, one, 0)
        sliced |= np.bitwise_or.reduce(np.where(sums_up, 0, one), axis=1)
    gathered = np.bitwise_or.reduce(lost, axis=1)
    plain &= gathered & (sliced | left) == 0
    whole = left
    block = (shape.size / axes.devices[split])[sources] / axes.devices[sliced]
    collectives = np.count_nonzero(lost, axis=1) + np.count_nonzero(summed, axis=1)
    sent = np.zeros_like(block)
    for scattered in summed.T[summed.any(axis=0)]:
        plain &= (scattered == 0) | summed_up
        rest = block / axes.devices[scattered]
        sent += block - rest
        block, whole = rest, whole & ~scattered
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
