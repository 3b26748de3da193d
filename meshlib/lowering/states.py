"""Ways to have run a program so far, and which of them are worth following."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np

from meshlib.graph import Operation, Tensor
from meshlib.lowering.arrivals import NEARLY, slack
from meshlib.lowering.choose import Choice, Rank
from meshlib.lowering.course import Lies, Where

LOOKED_AT = 4  # so many times as many as are kept are looked at before trifles are left out
TRIFLES = (0.0, 1e-5, 1e-4, 1e-3)  # of what has been sent so far

Price: TypeAlias = tuple[float, int]  # bytes and collectives


class Trail(NamedTuple):
    """What a state decided, latest first."""

    before: Trail | None
    operation: Operation
    choice: Choice


@dataclass(eq=False, slots=True)
class State:
    """A way to have run a program so far. `where.own` tells of the values that not all states have alike."""

    cost: float
    sent: float  # bytes of it
    collectives: int
    strays: int
    where: Where
    trail: Trail | None

    @property
    def lies(self) -> dict[Tensor, Lies]:
        """Where it has what not all states have alike."""
        return self.where.own

    @property
    def rank(self) -> Rank:
        """Cheapest first."""
        return self.cost, self.collectives, self.strays


class Pool:
    """States at one point of the program, compared with each other.

    Each tensor lies in few ways in all of them; a state is the list of their numbers, and what a tensor costs to be
    brought from one way to another is worked out once.
    """

    def __init__(
        self,
        states: Sequence[State],
        price: Callable[[Tensor, Lies], Price],  # of bringing a tensor to where it is to be
        bringing: Callable[[Tensor, Lies, Lies], Price],  # from one way to another
    ) -> None:
        self.bringing = bringing
        self.tensors = list(dict.fromkeys(t for s in states for t in s.lies))
        self.ways: list[dict[Lies, int]] = [{} for _ in self.tensors]
        self.coded: dict[tuple[int, ...], State] = {}
        for state in states:
            of = state.where.of
            code = tuple([ways.setdefault(of(t), len(ways)) for t, ways in zip(self.tensors, self.ways, strict=True)])
            other = self.coded.get(code)
            if other is None or _dearer(other, state):
                self.coded[code] = state
        self.by_number = [list(ways) for ways in self.ways]
        self.prices = [[price(t, lies) for lies in ways] for t, ways in zip(self.tensors, self.ways, strict=True)]
        # What it costs to bring a tensor from one way to another, all in one row: 0 as long as nobody asked.
        counts = [len(ways) for ways in self.ways]
        self.begins = np.cumsum([0, *(n * n for n in counts)])[:-1]
        self.counts = np.array(counts)
        self.known = np.zeros(sum(n * n for n in counts))
        self.bring: list[dict[tuple[int, int], Price]] = [{} for _ in self.tensors]

    def best(self, sent: float, width: int, window: float) -> list[State]:
        """At most `width` states, those that others cover left out, and those expected to cost `window` more.

        `sent`: bytes that all have sent besides.

        Whoever covers a state is expected to cost no more. Where they are too many, trifles are left to the best of
        them, so that what matters stays undecided.
        """
        if len(self.coded) == 1:
            return list(self.coded.values())
        ranked = sorted([(self._expected(code, state), n) for n, (code, state) in enumerate(self.coded.items())])
        items = list(self.coded.items())
        codes = np.array(list(self.coded))
        sent += items[ranked[0][1]][1].sent
        limit, enough = ranked[0][0][0] + window, TRIFLES[-1] * sent + 1.0
        kept: list[tuple[tuple[int, ...], State]] = []
        rows, costs = np.empty((LOOKED_AT * width, len(self.tensors)), int), np.empty(LOOKED_AT * width)
        advantages: list[float] = []  # what each has over those before it
        for (expected, *_), n in ranked:
            if expected > limit or len(kept) == LOOKED_AT * width:
                break
            code, state = items[n]
            advantage = enough
            at_least = costs[: len(kept)] + self.known[rows[: len(kept)] + codes[n]].sum(axis=1)
            for m in (at_least <= state.cost + enough).nonzero()[0]:
                advantage = min(advantage, self._advantage(kept[m][1], state, kept[m][0], code, enough))
                if advantage <= 0:
                    break
            else:
                rows[len(kept)], costs[len(kept)] = self.begins + codes[n] * self.counts, state.cost
                kept.append((code, state))
                advantages.append(advantage)
        for trifle in TRIFLES:
            left = [state for (_, state), advantage in zip(kept, advantages, strict=True) if advantage > trifle * sent]
            if len(left) <= width:
                break
        return left[:width]

    def _expected(self, code: tuple[int, ...], state: State) -> Rank:
        """What a state costs once all is where it is to be."""
        cost, collectives = state.cost, state.collectives
        for prices, n in zip(self.prices, code, strict=True):
            more, number = prices[n]
            cost += more
            collectives += number
        return round(cost, 2), collectives, state.strays

    def _advantage(self, a: State, b: State, here: tuple[int, ...], there: tuple[int, ...], enough: float) -> float:
        """By how much `b` is cheaper than `a` brought to where `b` lies, at most `enough`.

        Not above 0 if `a` is as good.
        """
        cost, collectives = a.cost, a.collectives
        limit = b.cost + enough
        for n, (i, j) in enumerate(zip(here, there, strict=True)):
            if i != j:
                if cost > limit:
                    return enough
                found = self.bring[n].get((i, j))
                if found is None:
                    ways = self.by_number[n]
                    found = self.bring[n][i, j] = self.bringing(self.tensors[n], ways[i], ways[j])
                    self.known[self.begins[n] + i * len(ways) + j] = found[0]
                cost += found[0]
                collectives += found[1]
        if abs(cost - b.cost) <= slack(b.cost):
            return 0.0 if (collectives, a.strays) <= (b.collectives, b.strays) else slack(b.cost)
        return min(cost - b.cost - NEARLY * (cost - a.cost), enough)


def _dearer(a: State, b: State) -> bool:
    if abs(a.cost - b.cost) > slack(b.cost):
        return a.cost > b.cost
    return (a.collectives, a.strays) > (b.collectives, b.strays)
