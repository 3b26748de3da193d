"""Ways to have run a program so far, and which of them are worth following."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from meshlib.graph import Operation, Tensor
from meshlib.lowering.arrivals import NEARLY, slack
from meshlib.lowering.choose import Choice
from meshlib.lowering.course import Outcome
from meshlib.lowering.ways import Distances

LOOKED_AT = 4  # so many times as many as are kept are looked at before trifles are left out
TRIFLES = (0.0, 1e-5, 1e-4, 1e-3)  # of what has been sent so far

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]
# (tensor, the ways in which it lies) -> what it costs, and in how many collectives, to bring it to where it is to be
Prices: TypeAlias = Callable[[Tensor, Ints], tuple[Floats, Ints]]


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
        changed = dict.fromkeys(t for outcomes in {id(x): x for x in found}.values() for x in outcomes for t in x.ways)
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

    def best(self, sent: float, width: int, window: float, prices: Prices, distances: Distances) -> States:
        """At most `width` of them, those that others cover left out, and those expected to cost `window` more.

        `sent`: bytes that all have sent besides.

        Whoever covers a state is expected to cost no more. Where they are too many, trifles are left to the best of
        them, so that what matters stays undecided.
        """
        some = self.taken(self._different())
        if len(some) == 1:
            return some
        expected, collectives = some.cost.copy(), some.collectives.copy()
        for t, n in some.columns.items():
            more, number = prices(t, some.ways[:, n])
            expected += more
            collectives += number
        expected = expected.round(2)
        order = np.lexsort((some.strays, collectives, expected))
        sent += float(some.sent[order[0]])
        limit, enough = expected[order[0]] + window, TRIFLES[-1] * sent + 1.0
        some = some.taken(order[expected[order] <= limit])
        kept, advantages = some._uncovered(LOOKED_AT * width, enough, distances)
        for trifle in TRIFLES:
            left = [n for n in kept if advantages[n] > trifle * sent]
            if len(left) <= width:
                break
        return some.taken(left[:width])

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

    def _uncovered(self, most: int, enough: float, distances: Distances) -> tuple[list[int], Floats]:
        """The first `most` that none before them covers, and the advantage of each over those before it."""
        tables = [distances.table(t) for t in self.columns]
        begins, widths = (np.array(x, int) for x in zip(*tables, strict=True)) if tables else (np.zeros(0, int),) * 2
        advantages = np.full(len(self), enough)
        kept: list[int] = []
        left = np.arange(len(self))  # not looked at yet, and not covered
        while len(left) and len(kept) < most:
            best, left = int(left[0]), left[1:]
            kept.append(best)
            if not len(left):
                break
            entries = begins + self.ways[best] * widths + self.ways[left]
            least = self.cost[best] + distances.cost[entries].sum(axis=1)
            near = (least <= self.cost[left] + enough).nonzero()[0]
            if len(near):
                others, entries = left[near], entries[near]
                self._ask(best, others, entries, least[near], enough, distances)
                advantages[others] = np.minimum(
                    advantages[others], self._advantages(best, others, entries, enough, distances)
                )
                left = left[advantages[left] > 0]
        return kept, advantages

    def _ask(self, best: int, others: Ints, entries: Ints, least: Floats, enough: float, distances: Distances) -> None:
        """Work out what `best` would cost where others are, as far as it may be cheap enough."""
        unknown = ~distances.asked[entries]
        tensors = list(self.columns)
        for m in unknown.any(axis=1).nonzero()[0]:
            cost, limit = least[m], self.cost[others[m]] + enough
            for n in unknown[m].nonzero()[0]:
                if cost > limit:
                    break
                cost += distances.ask(tensors[n], int(self.ways[best, n]), int(self.ways[others[m], n]))

    def _advantages(self, best: int, others: Ints, entries: Ints, enough: float, distances: Distances) -> Floats:
        """By how much others are cheaper than `best` brought to where they lie; not above 0 if it is as good."""
        brought = self.cost[best] + distances.cost[entries].sum(axis=1)
        collectives = self.collectives[best] + distances.collectives[entries].sum(axis=1)
        own = self.cost[others]
        noise = 1e-3 + 1e-11 * np.abs(own)
        far = brought > own + enough
        brought = np.where(far, own + enough, brought)
        found = np.minimum(brought - own - NEARLY * (brought - self.cost[best]), enough)
        fewer = (collectives < self.collectives[others]) | (
            (collectives == self.collectives[others]) & (self.strays[best] <= self.strays[others])
        )
        found = np.where(np.abs(brought - own) <= noise, np.where(fewer, 0.0, noise), found)
        return np.where(far, enough, found)
