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
from meshlib.lowering.homes import Region

Spot: TypeAlias = tuple[Region, Sharding]
Lies: TypeAlias = tuple[Spot, ...]  # where a tensor exists, and for which region
Price: TypeAlias = tuple[float, int]  # bytes and collectives
Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]
Table = TypeVar("Table", NDArray[np.bool_], NDArray[np.float64])

FAR = 1e30  # bytes, of what cannot be reached: more than any program sends
_BOTH = np.arange(2)  # bytes and collectives


@dataclass(eq=False)
class Ways:
    """Numbers for the ways in which one tensor lies, and for the spots that they consist of."""

    numbers: dict[Lies, int] = field(default_factory=dict)
    lies: list[Lies] = field(default_factory=list)  # by number
    spots: dict[Spot, int] = field(default_factory=dict)
    has: NDArray[np.bool_] = field(default_factory=lambda: np.zeros((4, 4), bool))  # (ways, spots), and room for more

    def number(self, lies: Lies) -> int:
        """The number of a way."""
        found = self.numbers.get(lies)
        if found is None:
            found = self.numbers[lies] = len(self.lies)
            self.lies.append(lies)
            own = [self.spots.setdefault(spot, len(self.spots)) for spot in lies]
            self.has = with_room(self.has, len(self.lies), len(self.spots), False)
            self.has[found, own] = True
        return found


class Distances:
    """What it costs a region to bring one tensor from way to way, as far as its users could ask for it (rule 2).

    Who has a tensor in several spots brings it from the nearest. What it costs from spot to spot is worked out where
    somebody asks, once.
    """

    def __init__(self, ways: Ways, home: Sharding, region: str, price: Callable[[Sharding, Sharding], Price]) -> None:
        self._ways, self._home, self._region, self._price = ways, home, region, price
        self._apart: Floats = np.full((2, 4, 4), np.nan)  # bytes and collectives; (from spot, to spot)
        self._table: Floats = np.full((2, 4, 4), np.nan)  # (from way, to way)
        self._asked: set[bytes] = set()  # what `table` was asked for

    def table(self, numbers: Ints) -> Floats:
        """Bytes, and collectives, from way (rows) to way (columns): of these at least, of others maybe NaN."""
        asked = numbers.tobytes()
        if asked in self._asked:
            return self._table
        self._asked.add(asked)
        ways = len(self._ways.lies)
        self._table = with_room(self._table, ways, ways, np.nan)
        at = np.ix_(_BOTH, numbers, numbers)
        if np.isnan(self._table[at]).any():
            self._table[at] = self._between(numbers)
        return self._table

    def _between(self, numbers: Ints) -> Floats:
        has = self._ways.has[numbers]
        used = np.flatnonzero(has.any(axis=0))
        has = has[:, used]
        every = list(self._ways.spots)
        spots = [every[n] for n in used]
        known = has & np.array([r is None or r == self._region for r, _ in spots])
        # No user would ask for an axis on a dim where the tensor has it in none of its spots, nor at home.
        split = np.array([_split(s) for _, s in spots])
        asked = ~(~(known @ split | _split(self._home)) @ split.T)
        same = np.array([[b == a or b == (None, a[1]) for a in spots] for b in spots])
        there = has @ same
        wanted = known.T @ (asked & ~there)  # (from spot, to spot)
        cost, collectives = np.where(known[:, :, None], self._between_spots(used, spots, wanted)[:, None], FAR)
        reach = cost.min(axis=1)
        launches = np.where(cost == reach[:, None], collectives, FAR).min(axis=1)
        reach[~asked] = FAR
        reach[there], launches[there] = 0.0, 0.0
        both: Floats = np.stack([reach, launches]) @ has.T
        return both

    def _between_spots(self, used: NDArray[np.intp], spots: Sequence[Spot], wanted: NDArray[np.bool_]) -> Floats:
        """From each of these spots (rows) to each (columns), worked out where it is wanted."""
        size = len(self._ways.spots)
        self._apart = with_room(self._apart, size, size, np.nan)
        at = np.ix_(_BOTH, used, used)
        for n, m in np.argwhere(np.isnan(self._apart[at][0]) & wanted):
            (_, here), (_, there) = spots[n], spots[m]
            cost, launches = self._price(here, there)
            self._apart[:, used[n], used[m]] = min(cost, FAR), launches
        return np.where(wanted, self._apart[at], FAR)


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
