"""Lower bounds on the time of a collective, under any placement of the mesh on the slice that the estimate considers.

Time never falls with bytes, and time per byte never rises, since a collective is a latency and a rate. So between two
sizes priced under all placements, a collective takes at least the time at the smaller size, and at least its bytes at
the rate of the larger one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import count as counter
from math import prod
from typing import NamedTuple

from hardware.checks import HardwareError
from hardware.network import collective_cost
from hardware.placement import Placement, wraps
from hardware.slices import Slice
from layouts.step_kinds import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER, STEP_KINDS, Place, kinds_from
from meshlib.estimation.work.communication import possible_placements

GATHER, SCATTER, REDUCE, SWAP = ALL_GATHER.name, REDUCE_SCATTER.name, ALL_REDUCE.name, ALL_TO_ALL.name
STEP = 4.0  # ratio of the priced sizes
SIZES = (2.0**14, 2.0**22, 2.0**36)  # bytes, between which the best algorithm changes


class Machine(NamedTuple):
    """A mesh on a slice. `sizes`: of its axes; `whole_axes`: whether they take whole axes of the torus where they can
    (`Compiler.whole_torus_axes`)."""

    slice: Slice
    sizes: tuple[int, ...]
    whole_axes: bool


def least_seconds(machine: Machine, axes: Sequence[int], kind: str, size_bytes: float) -> float:
    """Lower bound on one collective over some axes of a mesh, launch included.

    Args:
      axes: indices of those that take part.
      kind: "all_to_all" stands for any collective that moves a split from one dim to another.
      size_bytes: bytes of the value on a device if these axes did not split it.
    """
    ordered, where, group = _ordered(machine, axes)
    ways = [(name, size_bytes) for name in _equivalent_kinds(kind)]
    if STEP_KINDS[kind].rearranges:  # or a gather and a slice
        gathers = [(gather.name, size_bytes) for gather in kinds_from(Place.SPLIT, Place.FREE)]
        ways = [*((name, size / group) for name, size in ways), *gathers]
    try:
        return min([_bound(ordered, where, *way) for way in ways]) + machine.slice.chip.collective_launch_seconds
    except HardwareError:  # no links: the candidate will be refused
        return 0.0


def _equivalent_kinds(kind: str) -> list[str]:
    """The collectives with the same effect; for exchanges, all that preserve the size of blocks."""
    record = STEP_KINDS[kind]
    if record.rearranges:
        return [name for name, other in STEP_KINDS.items() if other.rearranges]
    return [other.name for other in kinds_from(record.takes, record.puts)]


def wire_seconds(machine: Machine, axes: Sequence[int], kind: str) -> float:
    """Lower bound on the seconds per byte for which a collective occupies its busiest links.

    Args as of `least_seconds`.
    """
    ordered, where, group = _ordered(machine, axes)
    try:
        least = min([_wire(ordered, where, name) for name in _equivalent_kinds(kind)])
        return least / group if STEP_KINDS[kind].rearranges else least
    except HardwareError:  # no links: the candidate will be refused
        return 0.0


def _bound(machine: Machine, axes: tuple[int, ...], kind: str, size: float) -> float:
    """Lower bound from the priced sizes on either side."""
    if size <= 0:
        return 0.0
    below = STEP ** math.floor(math.log(size, STEP))
    rate = _seconds(machine, axes, kind, below * STEP) / (below * STEP)
    return max(_seconds(machine, axes, kind, below), rate * size)


@lru_cache(maxsize=1 << 16)
def _seconds(machine: Machine, axes: tuple[int, ...], kind: str, size: float) -> float:
    names = [f"a{n}" for n in axes]
    placements = _distinct_placements(machine, axes)
    return min((collective_cost(p, kind, names, size).seconds for p in placements), default=0.0)


@lru_cache(maxsize=1 << 14)
def _wire(machine: Machine, axes: tuple[int, ...], kind: str) -> float:
    least = float("inf")
    for p in _distinct_placements(machine, axes):
        for size in SIZES:
            cost = collective_cost(p, kind, [f"a{n}" for n in axes], size)
            least = min(least, max((busy for _, busy in cost.busy_seconds), default=0.0) / size)
    return 0.0 if least == float("inf") else least


@lru_cache(maxsize=1 << 14)
def _distinct_placements(machine: Machine, axes: tuple[int, ...]) -> tuple[Placement, ...]:
    """Placements of a mesh of these sizes, one for each distinct mapping of some of its axes, on any torus axes."""
    chosen = [f"a{n}" for n in axes]
    placements: dict[tuple[object, ...], Placement] = {}
    for p in _all_placements(machine):
        names: dict[int, int] = {}
        numbers = counter()
        lying = []
        for f in p.of(chosen):
            place = f.place if f.place < 0 else names.setdefault(f.place, next(numbers))
            lying.append((place, f.size, f.stride, wraps(machine.slice, f)))
        placements.setdefault(tuple(lying), p)
    return tuple(placements.values())


@lru_cache(maxsize=256)
def _all_placements(machine: Machine) -> tuple[Placement, ...]:
    sizes = {f"a{n}": size for n, size in enumerate(machine.sizes)}
    return tuple(possible_placements(machine.slice, sizes, machine.whole_axes, {}))


def _ordered(machine: Machine, axes: Sequence[int]) -> tuple[Machine, tuple[int, ...], int]:
    """The mesh sorted by size, since axis names do not affect cost; the axes in it; and the devices that they join."""
    sizes = machine.sizes
    order = sorted(range(len(sizes)), key=lambda n: (sizes[n], n))
    ordered = machine._replace(sizes=tuple(sizes[n] for n in order))
    return ordered, tuple(sorted(map(order.index, axes))), prod(sizes[n] for n in axes)
