"""Small collectives combined into one launch, as compilers do.

A small collective is combined with others of its kind over the same axes, up to the threshold of XLA's combiners.
Members are independent, and no consumer is delayed: all are complete before the first consumer. A collective may thus
be issued later than in the program, but before its first consumer; or earlier, if its operands are available at almost
no cost (the cast of a bias). As in XLA, rates of links do not decide, so that faster ones leave a program's collectives
as they are.

Sources: openxla/xla all_reduce_combiner, all_gather_combiner and reduce_scatter_combiner; the threshold is
kDefaultAllReduceCombineThreshold of xla/service/collective_utils.h. Larger collectives are not combined here: the first
would wait for the last, and lose its overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from meshlib.estimation.work.communication import Communication
from meshlib.estimation.work.units import Unit

COMBINED = ("all_reduce", "all_gather", "reduce_scatter")
THRESHOLD_BYTES = 30 * 2**20
# Small: sent in no more time than a message takes across a square torus, at the nominal rates of v5e. A chip's four
# links of 50 GB/s send 200 kB during a hop of 1 us; n chips are sqrt(n) hops across.
HOP_BYTES = 200_000
# Almost free: HBM moves it in about the time of a launch.
FREE_BYTES = 2**20


Numbers = TypeVar("Numbers", float, NDArray[np.float64])


def small_bytes(devices: Numbers) -> Numbers:
    """The most bytes of a small collective over so many devices; of several collectives, if `devices` is an array."""
    most: Numbers = HOP_BYTES * devices**0.5
    return most


def combined(units: Sequence[Unit]) -> list[Unit]:
    """The units with small collectives combined, in an order that respects dependencies."""
    groups = _Grouping(units).groups
    return _ordered(units, groups) if groups else list(units)


@dataclass(eq=False)
class _Group:
    """Collectives to combine: their positions, and the range of positions at which they can be issued."""

    members: list[int] = field(default_factory=list)
    size_bytes: int = 0
    earliest: int = 0
    latest: int = 0

    def add_if_fits(self, place: int, size_bytes: int, earliest: int, latest: int) -> bool:
        """Add a collective if it is compatible; returns whether it was added."""
        first, last = max(self.earliest, earliest), min(self.latest, latest)
        if self.members and (first > last or self.size_bytes + size_bytes > THRESHOLD_BYTES):
            return False
        if not self.members:
            first, last = earliest, latest
        self.members.append(place)
        self.size_bytes += size_bytes
        self.earliest, self.latest = first, last
        return True


class _Grouping:
    def __init__(self, units: Sequence[Unit]) -> None:
        self.units = units
        self.maker = {y: n for n, u in enumerate(units) for y in u.outputs}
        self.first_user: dict[int, int] = {}
        for n, u in enumerate(units):
            for x in u.inputs:
                self.first_user.setdefault(x, n)
        # whether a value is present at the start, or computed from such values almost for free
        self.at_once: list[bool] = []
        groups: list[_Group] = []
        open_: dict[object, _Group] = {}
        for n, unit in enumerate(units):
            rooted = all(self.at_once[self.maker[x]] for x in unit.inputs if x in self.maker)
            self.at_once.append(rooted and _is_almost_free(unit))
            if not _is_small(unit):
                continue
            (move,) = unit.moves
            latest = min((self.first_user.get(y, len(units)) for y in unit.outputs), default=len(units))
            span = n, move.larger_bytes, 0 if rooted and not unit.early else n, latest
            key = move.kind, move.axes
            if key not in open_ or not open_[key].add_if_fits(*span):
                open_[key] = _Group()
                open_[key].add_if_fits(*span)
                groups.append(open_[key])
        self.groups = [g for g in groups if len(g.members) > 1]


def _is_small(unit: Unit) -> bool:
    if not unit.is_collective:
        return False
    (move,) = unit.moves
    return move.kind in COMBINED and move.larger_bytes <= small_bytes(move.group)


def _is_almost_free(unit: Unit) -> bool:
    if unit.kernel is None or unit.product or unit.moves:
        return False
    return unit.kernel.padded_bytes <= FREE_BYTES


def _ordered(units: Sequence[Unit], groups: Sequence[_Group]) -> list[Unit]:
    maker = {y: n for n, u in enumerate(units) for y in u.outputs}
    starts: dict[int, list[_Group]] = {}
    for g in groups:
        starts.setdefault(max(g.earliest, g.members[0]), []).append(g)
    together = {n for g in groups for n in g.members}
    order: list[Unit] = []
    done: set[int] = set()

    def put(n: int) -> None:
        """Append a unit after the units that it depends on."""
        if n in done:
            return
        done.add(n)
        for x in units[n].inputs:
            if x in maker:
                put(maker[x])
        if n not in together:
            order.append(units[n])

    for n in range(len(units)):
        for g in starts.get(n, ()):
            for member in g.members:
                put(member)
            order.append(_merged([units[m] for m in g.members]))
        if n not in together:
            put(n)
    return order


def _merged(members: Sequence[Unit]) -> Unit:
    """All members in one launch."""
    moves = [move for u in members for move in u.moves]
    first = moves[0]
    move = Communication(
        first.kind,
        first.axes,
        first.group,
        sum(m.payload_bytes for m in moves),
        sum(m.sent_bytes for m in moves),
        sum(m.larger_bytes for m in moves),
        first.tensor,
        first.reason,
        sum(m.tensors for m in moves),
    )
    return replace(
        members[0],
        inputs=tuple(dict.fromkeys(x for u in members for x in u.inputs)),
        outputs=tuple(y for u in members for y in u.outputs),
        moves=(move,),
        early=all(u.early for u in members),
    )
