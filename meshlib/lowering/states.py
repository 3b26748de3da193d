"""Ways to have run a program so far, and which of them are worth following."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np

from meshlib.graph import Operation, Tensor
from meshlib.lowering.arrivals import NEARLY, slack
from meshlib.lowering.choose import Choice
from meshlib.lowering.course import Outcome
from meshlib.lowering.ways import Floats, Ints

LOOKED_AT = 4  # so many times as many as are kept are looked at before trifles are left out
BLOCK = 32  # so many are compared with all others at once
TRIFLES = (0.0, 1e-5, 1e-4, 1e-3)  # of what has been sent so far

# (tensor, each state's way) -> what each costs, and in how many collectives, to bring it to where it is to be
Prices: TypeAlias = Callable[[Tensor, Ints], Floats]
# (tensor, ways) -> the same from way to way, for these at least
Table: TypeAlias = Callable[[Tensor, Ints], Floats]
Between: TypeAlias = Sequence[tuple[Floats, Ints]]  # per tensor what it costs from way to way, and each state's way


class Trail(NamedTuple):
    """What a state decided, latest first."""

    before: Trail | None
    operation: Operation
    choice: Choice


@dataclass(eq=False)
class States:
    """Ways to have run a program so far, a row each. They tell of the values that not all of them have alike."""

    cost: Floats = field(default_factory=lambda: np.zeros(1))
    sent: Floats = field(default_factory=lambda: np.zeros(1))  # bytes of it
    collectives: Ints = field(default_factory=lambda: np.zeros(1, int))
    strays: Ints = field(default_factory=lambda: np.zeros(1, int))
    ways: Ints = field(default_factory=lambda: np.zeros((1, 0), int))  # (states, tensors): numbers of ways
    trails: list[Trail | None] = field(default_factory=lambda: [None])
    columns: dict[Tensor, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.trails)

    def taken(self, rows: Sequence[int] | Ints) -> States:
        """Some of them."""
        return States(
            self.cost[rows],
            self.sent[rows],
            self.collectives[rows],
            self.strays[rows],
            self.ways[rows],
            [self.trails[n] for n in rows],
            self.columns,
        )

    def followed(self, op: Operation, found: Sequence[Sequence[Outcome]], common: dict[Tensor, int]) -> States:
        """Each of them after what it may do at `op`; `common`: the ways of the values that all have alike."""
        made = [outcome for outcomes in found for outcome in outcomes]
        rows = np.repeat(np.arange(len(self)), [len(outcomes) for outcomes in found])
        after = self.taken(rows)
        after.cost += [x.cost for x in made]
        after.sent += [x.sent for x in made]
        after.collectives += [x.collectives for x in made]
        after.strays += [x.strays for x in made]
        after.trails = [
            trail if x.choice is None else Trail(trail, op, x.choice)
            for trail, x in zip(after.trails, made, strict=True)
        ]
        changed = dict.fromkeys(t for x in made for t in x.ways)
        new = [t for t in changed if t not in self.columns]
        if new:
            own = np.array([[common.get(t, -1) for t in new]]).repeat(len(made), axis=0)
            after.ways = np.concatenate([after.ways, own], axis=1)
            after.columns = {**self.columns, **{t: len(self.columns) + n for n, t in enumerate(new)}}
        for t in changed:
            now = np.array([x.ways.get(t, -1) for x in made])
            column = after.ways[:, after.columns[t]]
            np.copyto(column, now, where=now >= 0)
        return after

    def forget(self, tensors: Iterable[Tensor]) -> bool:
        """Say no more of these; whether anything was said."""
        gone = [t for t in tensors if t in self.columns]
        if gone:
            self._keep([t for t in self.columns if t not in gone])
        return bool(gone)

    def alike(self) -> dict[Tensor, int]:
        """The values that all have alike: they tell of them no more."""
        same = (self.ways == self.ways[0]).all(axis=0)
        found = {t: int(self.ways[0, n]) for t, n in self.columns.items() if same[n]}
        if found:
            self._keep([t for t in self.columns if t not in found])
        return found

    def best(self, sent: float, width: int, window: float, prices: Prices, distances: Table) -> tuple[States, bool]:
        """At most `width` of them, those that others cover left out, and those expected to cost `window` more.

        `sent`: bytes that all have sent besides. Returned with whether they are all that none of them covers.

        Whoever covers a state is expected to cost no more. Where they are too many, trifles are left to the best of
        them, so that what matters stays undecided.
        """
        some = self.taken(self._different())
        if len(some) == 1:
            return some, True
        expected, collectives = some.cost.copy(), some.collectives.astype(float)
        for t, n in some.columns.items():
            cost, more = prices(t, some.ways[:, n])
            expected += cost
            collectives += more
        expected = expected.round(2)
        order = np.lexsort((some.strays, collectives, expected))
        sent += float(some.sent[order[0]])
        limit, enough = expected[order[0]] + window, TRIFLES[-1] * sent + 1.0
        order = order[expected[order] <= limit]
        every = len(order) == len(some)
        some = some.taken(order)
        between = [(distances(t, occurring(some.ways[:, n])), some.ways[:, n]) for t, n in some.columns.items()]
        kept, advantages = some._uncovered(LOOKED_AT * width, between, enough)
        for trifle in TRIFLES:
            left = [n for n in kept if advantages[n] > trifle * sent]
            if len(left) <= width:
                break
        return some.taken(left[:width]), every and len(kept) <= width

    def _keep(self, tensors: Sequence[Tensor]) -> None:
        self.ways = self.ways[:, [self.columns[t] for t in tensors]]
        self.columns = {t: n for n, t in enumerate(tensors)}

    def _different(self) -> list[int]:
        """One of all that lie alike: the cheapest."""
        found: dict[bytes, int] = {}
        rows = np.ascontiguousarray(self.ways)
        for n, row in enumerate(rows):
            key = row.tobytes()
            other = found.get(key)
            if other is None or self._dearer(other, n):
                found[key] = n
        return list(found.values())

    def _dearer(self, a: int, b: int) -> bool:
        if abs(self.cost[a] - self.cost[b]) > slack(self.cost[b]):
            return bool(self.cost[a] > self.cost[b])
        return (self.collectives[a], self.strays[a]) > (self.collectives[b], self.strays[b])

    def _uncovered(self, most: int, between: Between, enough: float) -> tuple[list[int], Floats]:
        """The first `most` that none before them covers, and the advantage of each over those before it."""
        advantages = np.full(len(self), enough)
        kept: list[int] = []
        left = np.arange(len(self))  # not looked at yet, and not covered
        while len(left) and len(kept) < most:
            rows = self._advantages(left[:BLOCK], left, between, enough)
            rest = advantages[left]
            for n, row in enumerate(rows):
                if rest[n] > 0:
                    kept.append(int(left[n]))
                    np.minimum(rest[n + 1 :], row[n + 1 :], out=rest[n + 1 :])
            advantages[left] = rest
            left = left[BLOCK:]
            left = left[advantages[left] > 0]
        return kept[:most], advantages

    def _advantages(self, some: Ints, others: Ints, between: Between, enough: float) -> Floats:
        """By how much others (columns) are cheaper than some (rows) brought to where they lie, at most `enough`.

        Not above 0 where that is as good.
        """
        before, after = self.cost[some, None], self.cost[others]
        brought = np.repeat(before, len(others), axis=1)
        for (cost, _), codes in between:
            brought += cost[codes[some, None], codes[others]]
        found = np.minimum(brought - after - NEARLY * (brought - before), enough)
        noise = slack(after)
        rows, columns = (np.abs(brought - after) <= noise).nonzero()
        a, b = some[rows], others[columns]
        collectives = self.collectives[a] - self.collectives[b]
        for (_, more), codes in between:
            collectives = collectives + more[codes[a], codes[b]]
        fewer = (collectives < 0) | ((collectives == 0) & (self.strays[a] <= self.strays[b]))
        found[rows, columns] = np.where(fewer, 0.0, noise[columns])
        return found


def occurring(numbers: Ints) -> Ints:
    """Each of them once, in order."""
    found: Ints = np.bincount(numbers).nonzero()[0]
    return found
