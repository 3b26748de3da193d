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

# each state's ways -> what it costs, and in how many collectives, to bring all to where it is to be
Prices: TypeAlias = Callable[[Ints], Floats]
Between: TypeAlias = Sequence[tuple[Floats, Ints]]  # per tensor what it costs from way to way, and each state's way

COST, SENT, COLLECTIVES, STRAYS = range(4)  # the columns of `States.figures`


class Trail(NamedTuple):
    """What a state decided, latest first."""

    before: Trail | None
    operation: Operation
    choice: Choice


@dataclass(eq=False)
class States:
    """Ways to have run a program so far, a row each. They tell of the values that not all of them have alike."""

    figures: Floats = field(default_factory=lambda: np.zeros((1, 4)))  # cost, bytes of it, collectives, strays
    ways: Ints = field(default_factory=lambda: np.zeros((1, 0), int))  # (states, tensors): numbers of ways
    trails: list[Trail | None] = field(default_factory=lambda: [None])
    columns: dict[Tensor, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.trails)

    @property
    def least(self) -> float:
        """What the cheapest has cost."""
        return float(self.figures[:, COST].min())

    def end(self) -> tuple[float, float, Trail | None]:
        """What the best has cost, bytes of it, and what it decided."""
        n = np.lexsort((self.figures[:, STRAYS], self.figures[:, COLLECTIVES], self.figures[:, COST]))[0]
        return float(self.figures[n, COST]), float(self.figures[n, SENT]), self.trails[n]

    def taken(self, rows: Sequence[int] | Ints) -> States:
        """Some of them."""
        return States(self.figures[rows], self.ways[rows], [self.trails[n] for n in rows], self.columns)

    def followed(self, op: Operation, found: Sequence[Sequence[Outcome]], common: dict[Tensor, int]) -> States:
        """Each of them after what it may do at `op`; `common`: the ways of the values that all have alike."""
        made = [(n, outcome) for n, outcomes in enumerate(found) for outcome in outcomes]
        rows = [n for n, _ in made]
        figures = self.figures[rows]
        figures += [x[1:5] for _, x in made]
        trails = [self.trails[n] if x.choice is None else Trail(self.trails[n], op, x.choice) for n, x in made]
        columns = dict(self.columns)
        changes = [
            (n, columns.setdefault(t, len(columns)), way) for n, (_, x) in enumerate(made) for t, way in x.ways.items()
        ]
        new = list(columns)[len(self.columns) :]
        ways = np.empty((len(made), len(columns)), int)
        ways[:, : len(self.columns)] = self.ways[rows]
        ways[:, len(self.columns) :] = [common.get(t, -1) for t in new]
        if changes:
            at, column, way = zip(*changes, strict=True)
            ways[at, column] = way
        return States(figures, ways, trails, columns)

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

    def best(
        self, sent: float, width: int, window: float, prices: Prices, between: Callable[[States], Between]
    ) -> tuple[States, bool]:
        """At most `width` of them, those that others cover left out, and those expected to cost `window` more.

        `sent`: bytes that all have sent besides. Returned with whether they are all that none of them covers.

        Whoever covers a state is expected to cost no more. Where they are too many, trifles are left to the best of
        them, so that what matters stays undecided.
        """
        some = self.taken(self._different())
        if len(some) == 1:
            return some, True
        cost, collectives = prices(some.ways)
        expected = (cost + some.figures[:, COST]).round(2)
        order = np.lexsort((some.figures[:, STRAYS], collectives + some.figures[:, COLLECTIVES], expected))
        sent += float(some.figures[order[0], SENT])
        limit, enough = expected[order[0]] + window, TRIFLES[-1] * sent + 1.0
        order = order[expected[order] <= limit]
        every = len(order) == len(some)
        if width == 1 or len(order) == 1:
            return some.taken(order[:1]), every and len(order) == 1
        some = some.taken(order)
        kept, advantages = some._uncovered(LOOKED_AT * width, between(some), enough)
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
        found: dict[tuple[int, ...], int] = {}
        for n, row in enumerate(map(tuple, self.ways.tolist())):
            other = found.setdefault(row, n)
            if other != n and self._dearer(other, n):
                found[row] = n
        return list(found.values())

    def _dearer(self, a: int, b: int) -> bool:
        (cost, _, *rest), (other, _, *others) = self.figures[a].tolist(), self.figures[b].tolist()
        if abs(cost - other) > slack(other):
            return bool(cost > other)
        return bool(rest > others)

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

        Not above 0 where that is as good. `some` are the first of the others, and each is compared with those after it.
        """
        before, after = self.figures[some, None, COST], self.figures[others, COST]
        brought = np.repeat(before, len(others), axis=1)
        for (cost, _), places in between:
            brought += cost.take(places[some], axis=0).take(places[others], axis=1)
        found: Floats = np.minimum(brought - after - NEARLY * (brought - before), enough)
        noise = slack(after)
        rows, columns = (np.abs(brought - after) <= noise).nonzero()
        later = columns > rows
        if later.any():
            rows, columns = rows[later], columns[later]
            a, b = some[rows], others[columns]
            collectives = self.figures[a, COLLECTIVES] - self.figures[b, COLLECTIVES]
            for (_, more), places in between:
                collectives += more[places[a], places[b]]
            strays = self.figures[a, STRAYS] <= self.figures[b, STRAYS]
            found[rows, columns] = np.where((collectives < 0) | ((collectives == 0) & strays), 0.0, noise[columns])
        return found
