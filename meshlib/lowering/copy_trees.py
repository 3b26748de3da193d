"""From which copy each copy of a tensor is made: the tree of reshards that its tables have priced.

A tree grows region by region from the placements in which the tensor is produced: first the region's hubs (see
`copies`), then the placements that its users need, each from the nearest copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import permutations
from math import inf
from operator import itemgetter
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from layouts import Sharding
from meshlib.lowering.cost_tables import Floats

Bools: TypeAlias = NDArray[np.bool_]
Spot: TypeAlias = tuple[int, int]  # (region, placement); regions in order
Copy: TypeAlias = tuple[str, Sharding]  # (region, placement)


@dataclass(frozen=True)
class CopyTree:
    """The copies of a tensor, each with the copy from which it is made; produced ones have none."""

    parents: Mapping[Copy, Copy]

    @cached_property
    def kept(self) -> Mapping[Copy, Sequence[Sharding]]:
        """The copies that are made from each copy, in its region, for later regions."""
        kept: dict[Copy, dict[Sharding, None]] = {}
        for (region, _), copy in self.parents.items():
            parent = self.parents.get(copy)
            while region != copy[0] and parent is not None and parent[0] == copy[0]:
                kept.setdefault(parent, {})[copy[1]] = None
                copy, parent = parent, self.parents.get(parent)
        return {copy: tuple(some) for copy, some in kept.items()}


class _Growth:
    """A growing tree. Later regions may use light copies alone, but light copies may be made for them in time."""

    def __init__(self, between: Floats, light: Bools, made: Sequence[Spot]) -> None:
        self.between, self.light = between, light.tolist()
        self.there = list(made)
        self.parents: dict[Spot, Spot] = {}

    def _nearest(self, there: Sequence[Spot], region: int, s: int) -> tuple[float, Spot, int]:
        """The cheapest path to a placement: its cost, the copy it starts from, and its last placement but one."""
        best: tuple[float, bool, Spot, int] = inf, True, there[0], s
        for r, at in there:
            if r == region or (r < region and self.light[at]):
                cost, via = float(self.between[at, s]), at
            elif r < region:
                costs = self.between[at] + self.between[:, s]
                via = min([p for p, light in enumerate(self.light) if light], key=costs.__getitem__)
                cost = float(costs[via])
            else:
                continue
            best = min(best, (cost, not self.light[at], (r, at), via), key=itemgetter(0, 1))
        return best[0], *best[2:]

    def _cost(self, region: int, order: Sequence[int]) -> float:
        there, total = self.there, 0.0
        for s in order:
            total += self._nearest(there, region, s)[0]
            there = [*there, (region, s)]
        return total

    def extend(self, region: int, orders: Iterator[tuple[int, ...]]) -> None:
        """Make the copies of the cheapest of some sequences, each from the nearest one."""
        for s in min(orders, key=lambda order: self._cost(region, order)):
            if (region, s) not in self.there:
                _, source, via = self._nearest(self.there, region, s)
                if via != source[1]:
                    self._add((source[0], via), source)
                    source = source[0], via
                self._add((region, s), source)

    def _add(self, copy: Spot, source: Spot) -> None:
        self.parents[copy] = source
        self.there.append(copy)


def grown(
    between: Floats,
    light: Bools,
    made: Sequence[Spot],
    hubs: Mapping[int, Sequence[int]],
    needs: Sequence[tuple[int, Sequence[int]]],
) -> Mapping[Spot, Spot]:
    """From which copy each copy is made.

    Args:
      between: cost of a reshard from each placement (rows) to each.
      light: whether a copy under each placement may serve later regions.
      made: where the tensor is produced.
      hubs: the hubs of each region.
      needs: the region of each user, with the placements that it needs.
    """
    growth = _Growth(between, light, made)
    for region in sorted({region for region, _ in needs}):
        growth.extend(region, permutations(hubs.get(region, ())))
        for _, wanted in (need for need in needs if need[0] == region):
            growth.extend(region, _orders(wanted, len(light)))
    return growth.parents


def _orders(wanted: Sequence[int], count: int) -> Iterator[tuple[int, ...]]:
    """The orders in which placements may be made; several also by way of another placement."""
    yield from permutations(wanted)
    if len(wanted) > 1:
        yield from ((s, *order) for s in range(count) for order in permutations(wanted))
