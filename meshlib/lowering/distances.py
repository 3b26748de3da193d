"""Costs of reshards between all placements of a tensor: bytes sent, and the price of each collective.

Most reshards only slice, reduce and gather: their bytes follow from the axes that each dim gains and loses, and are
computed for all pairs of placements at once. Others, where an axis moves to another dim or position, are routed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import product
from math import gcd, isnan, prod
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from layouts import Mesh, Shape, Sharding, reshard
from layouts.dims import Dimension
from layouts.resharding import elements_sent
from layouts.sharding import Axes, Pending, laid
from meshlib.lowering.balance import Balance
from meshlib.lowering.cost_tables import Floats, Ints

COLLECTIVE, STRAY = 2.0**-10, 2.0**-16  # bytes: ties go to fewer collectives, then to the plain reading of the layout
MOST_USUAL = 2  # axes of a mesh whose placements are tabulated before they are asked for
MOST_AXES = 12  # larger meshes: sets of axes are not tabulated
KINDS = {"sum": 0, "max": 1, "min": 2}

Prices: TypeAlias = tuple[tuple[str, float], ...]  # (axis, price of a byte sent along it); 1 for other axes
Price: TypeAlias = tuple[float, int]  # bytes and collectives
Masks: TypeAlias = Ints  # sets of mesh axes, one bit per axis
# Of a sharding: the axes that split each dim, and pending reductions.
Placement: TypeAlias = tuple[tuple[Axes, ...], Pending]


def distances(placements: Sequence[Sharding], itemsize: float, balance: Balance) -> Floats:
    """Cost of a reshard from each placement (rows) to each (columns): bytes, and the price of each collective."""
    return _distances(tuple(placements), itemsize, balance.axis_prices, COLLECTIVE + balance.collective_bytes)


def least_distances(
    placements: Sequence[Sharding], itemsize: float, balance: Balance, asked: NDArray[np.bool_]
) -> tuple[Floats, NDArray[np.bool_]]:
    """Lower bounds of `distances`, and which of them are exact: those that are `asked` for or need no route."""
    start = COLLECTIVE + balance.collective_bytes
    if itemsize % 1:
        return distances(placements, itemsize, balance), np.ones_like(asked)
    known, scale = _known_of(placements, itemsize, balance.axis_prices)
    costs = known.costs(placements, scale, start, asked)
    is_known = ~np.isnan(costs)
    return (costs if is_known.all() else np.where(is_known, costs, known.least(placements, scale) + start)), is_known


@lru_cache(maxsize=1 << 13)
def _distances(placements: tuple[Sharding, ...], itemsize: float, prices: Prices, start: float) -> Floats:
    if itemsize % 1:  # a block takes whole bytes
        pairs = [[between(a, b, itemsize, prices) for b in placements] for a in placements]
        costs: Floats = np.array([[sent + start * collectives for sent, collectives in row] for row in pairs], float)
    else:
        known, scale = _known_of(placements, itemsize, prices)
        costs = known.costs(placements, scale, start)
    costs.setflags(write=False)
    return costs


def _known_of(placements: Sequence[Sharding], itemsize: float, prices: Prices) -> tuple[_Known, float]:
    """The cached distances that placements' are multiples of, and by which factor."""
    shape, mesh = placements[0].shape, placements[0].mesh
    # Factors of a size that axes cannot divide only scale all costs.
    sizes = tuple([gcd(n, mesh.size) for n in shape.sizes])
    return _known(mesh, sizes, prices), shape.size // prod(sizes) * itemsize


class _Known:
    """Cached bytes and collectives between placements of tensors of one shape, at one byte per element."""

    def __init__(self, mesh: Mesh, sizes: tuple[int, ...], prices: Prices) -> None:
        self.mesh, self.prices = mesh, prices
        self.shape = Shape([Dimension(f"d{n}", size) for n, size in enumerate(sizes)])
        self.placements: dict[Placement, int] = {}
        self._numbers: dict[Sharding, int] = {}
        self._costs = np.zeros((3, 0, 0))  # bytes, collectives; NaN: not routed yet; a lower bound of the bytes
        self._scaled: dict[tuple[float, float], Floats] = {}  # by bytes per element and price of a collective

    def costs(
        self, placements: Sequence[Sharding], scale: float, start: float, asked: NDArray[np.bool_] | None = None
    ) -> Floats:
        """Cost of a reshard from each placement to each, at `scale` bytes per element and `start` per collective.

        Pairs that are not `asked` for, and whose route is not known, are not numbers; by default all are asked for.
        """
        new = [s for s in placements if s not in self._numbers]
        if new:
            self._enter(new)
        scaled = self._scaled.get((scale, start))
        if scaled is None:
            scaled = self._scaled[scale, start] = self._costs[0] * scale + start * self._costs[1]
        at = np.array([self._numbers[s] for s in placements])
        costs: Floats = scaled[at[:, None], at]
        if isnan(np.add.reduce(costs, axis=None)):
            missing = np.isnan(costs) if asked is None else np.isnan(costs) & asked
            for a, b in zip(*missing.nonzero(), strict=True):
                pair = at[a], at[b]
                if isnan(self._costs[0][pair]):
                    ends = [laid(self.shape, self.mesh, s.axes, s.pending) for s in (placements[a], placements[b])]
                    self._costs[:2, pair[0], pair[1]] = between(ends[0], ends[1], 1, self.prices)
                sent, collectives = self._costs[:2, pair[0], pair[1]]
                costs[a, b] = scaled[pair] = sent * scale + start * collectives
        return costs

    def least(self, placements: Sequence[Sharding], scale: float) -> Floats:
        """Lower bound of the price of the bytes sent from each of these placements to each."""
        at = np.array([self._numbers[s] for s in placements])
        bytes_: Floats = self._costs[2][at[:, None], at] * scale * min([1.0, *dict(self.prices).values()])
        return bytes_

    def _enter(self, new: Sequence[Sharding]) -> None:
        count = len(self.placements)
        if not count:
            self.placements.update((s, n) for n, s in enumerate(self._usual()))
        for s in new:
            self._numbers[s] = self.placements.setdefault((s.axes, s.pending), len(self.placements))
        total = len(self.placements)
        if total > count:
            costs = np.empty((3, total, total))
            costs[:, :count, :count] = self._costs
            pairs = np.ones((total, total), bool)
            pairs[:count, :count] = False
            sources, targets = pairs.nonzero()
            costs[:, sources, targets] = _plain(
                self.mesh, self.shape, [*self.placements], sources, targets, self.prices
            )
            self._costs = costs
            self._scaled.clear()

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

    def mask(self, axes: Iterable[str]) -> int:
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
                        self.changes[: 1 + len(b) - same, m, n] = [
                            self.mask(a[same:]),
                            *[self.bits[axis] for axis in b[same:]],
                        ]
        return numbers.reshape(len(rows), -1)


_axes_of = lru_cache(maxsize=1 << 8)(_Axes)


def _plain(
    mesh: Mesh, shape: Shape, placements: Sequence[Placement], sources: Ints, targets: Ints, prices: Prices
) -> Floats:
    """Bytes and collectives of reshards that slice, reduce, then gather; NaN for others, infinity if impossible; and a
    lower bound of the bytes of each.

    Slices come first, to shrink what follows; sums are then scattered if the target has their axes, and
    reduced in full otherwise; gathers, which send only missing blocks, come last. The bound is that of
    `layouts.routes`.

    Args:
      sources: the number of the first placement of each pair; `targets` are those of the second.
    """
    if len(mesh.axes) > MOST_AXES:
        return np.concatenate([np.full((2, len(sources)), np.nan), np.zeros((1, len(sources)))])
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
    # Slices, one all_to_all and gathers send no more than what the target's block lacks.
    moved = gathered & sliced
    rest = gathered & ~moved
    onto = (gained[0] == moved[:, None]) & (sum(gained[1:], np.zeros_like(lost)) == 0) if gained else lost < 0
    swapped = possible & (moved != 0) & (moved & (moved - 1) == 0) & (left == 0) & onto.any(axis=1)
    leaves = (lost == moved[:, None]) | (lost & moved[:, None] == 0)
    swapped &= ((stays | ~np.any(gained, axis=0)) & leaves).all(axis=1)
    if prices:
        swapped &= rest == 0
    before = block * axes.devices[moved]
    bytes_sent = (before - block) * axes.price[moved] + (axes.devices[rest] - 1) * before
    sent[swapped], collectives[swapped] = bytes_sent[swapped], np.count_nonzero(lost, axis=1)[swapped]
    sent[~possible] = np.inf
    collectives[~possible] = 0
    is_nested = (stays | ~np.any(gained, axis=0)).all(axis=1) & (left == 0)
    target = (shape.size / axes.devices[split])[targets]
    return np.array((sent, collectives, target - np.where(is_nested, target / axes.devices[lost].prod(axis=1), 0.0)))


def between(here: Sharding, there: Sharding, itemsize: float, prices: Prices) -> Price:
    """Price of a reshard between two shardings: bytes and collectives."""
    if not can_become(here, there):
        return float("inf"), 0
    if itemsize == 1 and not prices:
        return elements_sent(here, there)
    plan = reshard(here, there, itemsize)
    return sum([step.sent_bytes * axes_price(step.axes, prices) for step in plan.steps]), plan.collectives


def axes_price(axes: Iterable[str], prices: Prices) -> float:
    """Price of a byte sent along these axes together."""
    by_axis = dict(prices)
    return max((by_axis.get(a, 1.0) for a in axes), default=1.0)


def can_become(source: Sharding, target: Sharding) -> bool:
    """True if a reshard exists: a reduced maximum cannot become pending again, a sum can."""
    return (
        not target.pending
        or set(target.pending) <= set(source.pending)
        or all(kind == "sum" for _, kind in (*source.pending, *target.pending))
    )
