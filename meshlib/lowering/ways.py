"""The ways in which tensors lie, by number, and what it costs to bring a tensor from one way to another.

A search meets few ways per tensor, but the same ones over and over: told by numbers they are compared in whole rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from layouts import Sharding
from meshlib.graph import Tensor
from meshlib.lowering.arrivals import Price
from meshlib.lowering.homes import Region

Spot: TypeAlias = tuple[Region, Sharding]
Lies: TypeAlias = tuple[Spot, ...]  # where a tensor exists, and for which region
Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]
Table = TypeVar("Table", NDArray[np.bool_], NDArray[np.float64])

FAR = 1e30  # bytes, of what cannot be reached: more than any program sends


@dataclass(eq=False)
class Ways:
    """The ways in which one tensor lies, in the order in which they were met, and the spots that they consist of."""

    numbers: dict[Lies, int] = field(default_factory=dict)  # among the ways of all tensors
    spots: dict[Spot, int] = field(default_factory=dict)
    has: NDArray[np.bool_] = field(default_factory=lambda: np.zeros((4, 4), bool))  # (ways, spots), and room for more

    def add(self, lies: Lies, number: int) -> None:
        """One more."""
        place = len(self.numbers)
        self.numbers[lies] = number
        own = [self.spots.setdefault(spot, len(self.spots)) for spot in lies]
        self.has = with_room(self.has, len(self.numbers), len(self.spots), False)
        self.has[place, own] = True


@dataclass(eq=False)
class AllWays:
    """The ways of all tensors, each with a number of its own."""

    of: dict[Tensor, Ways] = field(default_factory=dict)
    lies: list[Lies] = field(default_factory=list)  # by number
    tensors: list[Tensor] = field(default_factory=list)
    places: Ints = field(default_factory=lambda: np.zeros(64, int))  # which of its tensor's ways each is

    def number(self, t: Tensor, lies: Lies) -> int:
        """The number of a way of a tensor."""
        ways = self.of.get(t)
        if ways is None:
            ways = self.of[t] = Ways()
        found = ways.numbers.get(lies)
        if found is None:
            found = len(self.lies)
            if found == len(self.places):
                self.places = np.concatenate([self.places, self.places])
            self.places[found] = len(ways.numbers)
            ways.add(lies, found)
            self.lies.append(lies)
            self.tensors.append(t)
        return found

    def numbers(self, t: Tensor) -> list[int]:
        """Those of one tensor."""
        ways = self.of.get(t)
        return list(ways.numbers.values()) if ways is not None else []


class Distances:
    """What it costs a region to bring one tensor from way to way, as far as its users could ask for it (rule 2).

    Who has a tensor in several spots brings it from the nearest. What it costs from spot to spot is worked out where
    somebody asks, once.
    """

    def __init__(self, ways: Ways, home: Sharding, region: str, price: Callable[[Sharding, Sharding], Price]) -> None:
        self._ways, self._home, self._region, self._price = ways, home, region, price
        self._apart: dict[tuple[Sharding, Sharding], Price] = {}
        self._table: Floats = np.zeros((2, 0, 0))

    def table(self) -> Floats:
        """Bytes, and collectives, from way (rows) to way (columns), of all that are known by now."""
        if self._table.shape[1] < len(self._ways.numbers):
            self._table = self._between()
        return self._table

    def _between(self) -> Floats:
        spots = list(self._ways.spots)
        has = self._ways.has[: len(self._ways.numbers), : len(spots)]
        known = has & np.array([r is None or r == self._region for r, _ in spots])
        # No user would ask for an axis on a dim where the tensor has it in none of its spots, nor at home.
        split = np.array([_split(s) for _, s in spots])
        asked = ~(~(known @ split | _split(self._home)) @ split.T)
        same = np.array([[b == a or b == (None, a[1]) for a in spots] for b in spots])
        there = has @ same
        wanted = known.T @ (asked & ~there)  # (from spot, to spot)
        cost, collectives = np.where(known[:, :, None], self._between_spots(spots, wanted)[:, None], FAR)
        reach = cost.min(axis=1)
        launches = np.where(cost == reach[:, None], collectives, FAR).min(axis=1)
        reach[~asked] = FAR
        reach[there], launches[there] = 0.0, 0.0
        both: Floats = np.stack([reach, launches]) @ has.T
        return both

    def _between_spots(self, spots: Sequence[Spot], wanted: NDArray[np.bool_]) -> Floats:
        """From each of these spots (rows) to each (columns), worked out where it is wanted."""
        found = np.full((2, *wanted.shape), FAR)
        for n, m in np.argwhere(wanted).tolist():
            pair = spots[n][1], spots[m][1]
            price = self._apart.get(pair)
            if price is None:
                cost, launches = self._price(*pair)
                price = self._apart[pair] = min(cost, FAR), launches
            found[:, n, m] = price
        return found


@lru_cache(maxsize=1 << 12)
def _split(s: Sharding) -> NDArray[np.bool_]:
    """For each dim, which axes split it."""
    return np.array([[a in entry for a in s.mesh.axes] for entry in s.axes], bool).ravel()


def with_room(table: Table, rows: int, columns: int, blank: float) -> Table:
    """A table, with more rows and columns where it has too few: twice as many at least."""
    have, wide = table.shape[-2:]
    if rows <= have and columns <= wide:
        return table
    rows, columns = (have if rows <= have else 2 * rows), (wide if columns <= wide else 2 * columns)
    more = np.full((*table.shape[:-2], rows, columns), blank, table.dtype)
    more[..., :have, :wide] = table
    return more
