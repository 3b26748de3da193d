"""The ways in which tensors lie, by number, and what it costs to bring a tensor from one way to another.

A search meets few ways per tensor, but the same ones over and over: told by numbers they are compared in whole rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from layouts import Sharding
from meshlib.graph import Tensor
from meshlib.lowering.homes import Region

Lies: TypeAlias = tuple[tuple[Region, Sharding], ...]  # where a tensor exists, and for which region
Price: TypeAlias = tuple[float, int]  # bytes and collectives

_FIRST_WIDTH = 4  # ways of a tensor that a table has room for at first


@dataclass(eq=False)
class Ways:
    """Numbers for the ways in which each tensor lies."""

    _numbers: dict[Tensor, dict[Lies, int]] = field(default_factory=dict)
    _lies: dict[Tensor, list[Lies]] = field(default_factory=dict)

    def number(self, t: Tensor, lies: Lies) -> int:
        """The number of a way."""
        numbers = self._numbers.setdefault(t, {})
        found = numbers.get(lies)
        if found is None:
            found = numbers[lies] = len(numbers)
            self._lies.setdefault(t, []).append(lies)
        return found

    def lies(self, t: Tensor, number: int) -> Lies:
        """The way of a number."""
        return self._lies[t][number]

    def count(self, t: Tensor) -> int:
        """How many there are."""
        return len(self._lies[t])


class Distances:
    """What it costs a region to bring each tensor from one way to another: worked out where somebody asks, once.

    All tables lie in one row; that of a tensor begins at `table(t)[0]` and has rows of `table(t)[1]` entries.
    """

    def __init__(self, ways: Ways, bringing: Callable[[Tensor, Lies, Lies], Price]) -> None:
        self._ways, self._bringing = ways, bringing
        self._tables: dict[Tensor, tuple[int, int]] = {}
        self._used = 0
        self.cost: NDArray[np.float64] = np.zeros(1024)  # 0 where nobody asked
        self.collectives: NDArray[np.int64] = np.zeros(1024, int)
        self.asked: NDArray[np.bool_] = np.zeros(1024, bool)

    def table(self, t: Tensor) -> tuple[int, int]:
        """Where that of a tensor begins, and how long its rows are."""
        begin, width = self._tables.get(t, (0, 0))
        count = self._ways.count(t)
        if count > width:
            begin, width = self._tables[t] = self._grown(begin, width, max(_FIRST_WIDTH, 2 * count))
        return begin, width

    def ask(self, t: Tensor, source: int, target: int) -> float:
        """Work out what one entry costs."""
        begin, width = self.table(t)
        at = begin + source * width + target
        lies = self._ways.lies
        self.cost[at], self.collectives[at] = self._bringing(t, lies(t, source), lies(t, target))
        self.asked[at] = True
        return float(self.cost[at])

    def _grown(self, old: int, before: int, width: int) -> tuple[int, int]:
        """A longer table, with what is known already."""
        begin = self._used
        self._used += width * width
        if self._used > len(self.cost):
            more = max(len(self.cost), width * width)
            self.cost, self.collectives, self.asked = (
                np.concatenate([x, np.zeros(more, x.dtype)]) for x in (self.cost, self.collectives, self.asked)
            )
        for x in (self.cost, self.collectives, self.asked):
            table = x[begin : begin + width * width].reshape(width, width)
            table[:before, :before] = x[old : old + before * before].reshape(before, before)
        self.asked[begin : begin + width * width : width + 1] = True  # to stay costs nothing
        return begin, width
