"""Ways to have run a program so far, and which of them are worth following."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

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
        self.bring: list[dict[tuple[int, int], Price]] = [{} for _ in self.tensors]
        self.coded: dict[tuple[int, ...], State] = {}
        for state in states:
            of = state.where.of
            code = tuple([ways.setdefault(of(t), len(ways)) for t, ways in zip(self.tensors, self.ways, strict=True)])
            other = self.coded.get(code)
            if other is None or _dearer(other, state):
                self.coded[code] = state
        self.by_number = [list(ways) for ways in self.ways]
        self.prices = [[price(t, lies) for lies in ways] for t, ways in zip(self.tensors, self.ways, strict=True)]

    def best(self, sent: float, width: int, window: float) -> list[State]:
        """At most `width` states, those that others cover left out, and those expected to cost `window` more.

        `sent`: bytes that all have sent besides.

        Whoever covers a state is expected to cost no more. Where they are too many, trifles are left to the best of
        them, so that what matters stays undecided.
        """
        if len(self.coded) == 1:
            return list(self.coded.values())
        ranked = sorted(self.coded.items(), key=self._expected)
        sent += ranked[0][1].sent
        limit = self._expected(ranked[0])[0] + window
        kept: list[tuple[tuple[int, ...], State]] = []
        advantages: list[float] = []  # what each has over those before it
        for code, state in ranked:
            if self._expected((code, state))[0] > limit:
                break
            advantage = min((self._advantage(a, state, k, code) for k, a in kept), default=float("inf"))
            if advantage > 0:
                kept.append((code, state))
                advantages.append(advantage)
                if len(kept) == LOOKED_AT * width:
                    break
        for trifle in TRIFLES:
            left = [state for (_, state), advantage in zip(kept, advantages, strict=True) if advantage > trifle * sent]
            if len(left) <= width:
                break
        return left[:width]

    def _expected(self, item: tuple[tuple[int, ...], State]) -> Rank:
        """What a state costs once all is where it is to be."""
        code, state = item
        cost, collectives = state.cost, state.collectives
        for prices, n in zip(self.prices, code, strict=True):
            more, number = prices[n]
            cost += more
            collectives += number
        return round(cost, 2), collectives, state.strays

    def _advantage(self, a: State, b: State, here: tuple[int, ...], there: tuple[int, ...]) -> float:
        """By how much `b` is cheaper than `a` brought to where `b` lies; not above 0 if `a` is as good."""
        cost, collectives, limit = a.cost, a.collectives, float("inf")
        for n, (i, j) in enumerate(zip(here, there, strict=True)):
            if i != j:
                found = self.bring[n].get((i, j))
                if found is None:
                    ways = self.by_number[n]
                    found = self.bring[n][i, j] = self.bringing(self.tensors[n], ways[i], ways[j])
                cost += found[0]
                collectives += found[1]
                if cost == limit:
                    return limit
        advantage = cost - b.cost - NEARLY * (cost - a.cost)
        if abs(advantage) <= slack(b.cost):
            return 0.0 if (collectives, a.strays) <= (b.collectives, b.strays) else slack(b.cost)
        return advantage


def _dearer(a: State, b: State) -> bool:
    if abs(a.cost - b.cost) > slack(b.cost):
        return a.cost > b.cost
    return (a.collectives, a.strays) > (b.collectives, b.strays)
