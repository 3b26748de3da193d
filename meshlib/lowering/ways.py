"""The ways in which tensors lie, by number, and what it costs to bring a tensor from one way to another.

A search meets few ways per tensor, but the same ones over and over: told by numbers they are compared in whole rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from layouts import Sharding
from meshlib.lowering.homes import Region

Spot: TypeAlias = tuple[Region, Sharding]
Lies: TypeAlias = tuple[Spot, ...]  # where a tensor exists, and for which region
Price: TypeAlias = tuple[float, int]  # bytes and collectives
Floats: TypeAlias = NDArray[np.float64]
Table = TypeVar("Table", NDArray[np.bool_], NDArray[np.float64])

FAR = 1e30  # bytes, of what cannot be reached: more than any program sends


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
    """What it costs a region to bring one tensor from way to way: worked out where somebody asks, once."""

    def __init__(self, ways: Ways, bringing: Callable[[Lies, Sharding], Price]) -> None:
        self._ways, self._bringing = ways, bringing
        self._reach: Floats = np.full((2, 4, 4), np.nan)  # bytes and collectives; (ways, spots)
        self._between: dict[tuple[int, ...], Floats] = {}

    def between(self, numbers: Sequence[int]) -> Floats:
        """Bytes, and collectives, from each of these ways (rows) to each (columns)."""
        key = tuple(numbers)
        found = self._between.get(key)
        if found is None:
            found = self._between[key] = self._found(numbers)
        return found

    def _found(self, numbers: Sequence[int]) -> Floats:
        has = self._ways.has[numbers]
        spots = np.flatnonzero(has.any(axis=0))
        self._reach = with_room(self._reach, *self._ways.has.shape, np.nan)
        at = np.ix_(np.arange(2), np.array(numbers), spots)
        unknown = np.isnan(self._reach[at][0])
        if unknown.any():
            places = list(self._ways.spots)
            for n, m in np.argwhere(unknown):
                self._reach[:, numbers[n], spots[m]] = self._price(numbers[n], places[spots[m]])
        found: Floats = self._reach[at] @ has[:, spots].T
        return found

    def _price(self, number: int, spot: Spot) -> Price:
        lies, (_, sharding) = self._ways.lies[number], spot
        if spot in lies or (None, sharding) in lies:
            return 0.0, 0
        cost, collectives = self._bringing(lies, sharding)
        return min(cost, FAR), collectives


def with_room(table: Table, rows: int, columns: int, blank: float) -> Table:
    """A table, with more rows and columns where it has too few: twice as many at least."""
    *_, have, wide = table.shape
    if rows <= have and columns <= wide:
        return table
    shape = (*table.shape[:-2], max(have, 2 * rows), max(wide, 2 * columns))
    more = np.full(shape, blank, table.dtype)
    more[..., :have, :wide] = table
    return more
