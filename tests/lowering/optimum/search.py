"""Dynamic programming in the order of the program over where each live value lies."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter

import numpy as np

from meshlib.core.graph import Operation, Tensor
from meshlib.core.opdef import RESIDENT
from tests.lowering.optimum.spots import INFINITE
from tests.lowering.optimum.steps import EPS, Done, Steps

MAX_STATES = 20_000
MAX_NEW_STATES = 1_000_000
MAX_SECONDS = 6.0
PRUNERS = 1_024  # cheapest states against which all others are held
AT_ONCE = 32

Array = np.ndarray


class TooMany(Exception):
    """There are too many states to go through, or it takes too long."""


@dataclass(frozen=True)
class Optimum:
    """The cheapest way through a program: bytes and work of one device, and how each operation is run."""

    bytes: float
    work: float
    path: tuple[tuple[Operation, Done], ...]
    states: int

    @property
    def cost(self) -> float:
        """Bytes, and what the work is worth."""
        return self.bytes + self.work

    def __str__(self) -> str:
        lines = [f"{self.bytes:g} bytes, work {self.work:g}, {self.states} states"]
        for op, done in self.path:
            for way in done.ways:
                axes = " ".join(f"{f}@{'+'.join(entry)}" for f, entry in way.axes) or "-"
                sent = f"  {done.bytes:g} bytes" if done.bytes and way is done.ways[-1] else ""
                lines.append(f"  {op.region} {op.name}: {axes} -> {way.out}{sent}")
        return "\n".join(lines)


class Search:
    """One search. `most` and `most_work` are what it may cost; with a beam what is found is not the least."""

    def __init__(self, steps: Steps, most: float, most_work: float = INFINITE, beam: int | None = None) -> None:
        self.steps, self.most, self.most_work, self.beam = steps, most, most_work, beam
        self.live: list[Tensor] = []
        self.rows = np.zeros((1, 0), np.int32)  # per state the spot of each live tensor
        self.cost, self.work = np.zeros(1), np.zeros(1)
        self.rest = steps.ways.least_work  # that is still to be done at least
        self.layers: list[tuple[Operation, Array, Array, list[Done]]] = []
        self.states = 0  # gone through

    def run(self) -> Optimum | None:
        """The cheapest way through the program; None if none costs so little. Raises: TooMany."""
        deadline = perf_counter() + MAX_SECONDS
        last = self.steps.ways.last
        for op in self.steps.ways.simple.operations:
            if op.opdef.kind not in RESIDENT:
                self.rest -= self.steps.ways.least_work_of(op)
                if not self._follow(op, deadline):
                    return None
            elif op.output in last:
                where = self.steps.at[op.output]
                self.live.append(op.output)
                there = np.full(len(self.rows), where.made(where.home, None), np.int32)
                self.rows = np.column_stack([self.rows, there])
        return self._traced(int(np.lexsort((self.work, self.cost))[0]))

    def _follow(self, op: Operation, deadline: float) -> bool:
        """Go on to all states after an operation; False if there are none."""
        steps = self.steps
        xs = steps.operands(op)
        columns = [self.live.index(x) for x in xs]
        every, which = np.unique(self.rows[:, columns], axis=0, return_inverse=True)
        which = which.reshape(-1)
        found: list[Done] = []
        parents, taken, count = [], [], 0
        for n, spots in enumerate(every):
            mine = np.flatnonzero(which == n)
            able = steps.of(op, tuple(spots.tolist()))
            parents.append(np.tile(mine, len(able)))
            taken.append(np.repeat(np.arange(len(found), len(found) + len(able)), len(mine)))
            found += able
            count += len(parents[-1])
            if count > MAX_NEW_STATES or perf_counter() > deadline:
                raise TooMany
        if not found:
            return False
        parent, step = np.concatenate(parents), np.concatenate(taken)
        costs = np.array([steps.cost(d.bytes, d.work) for d in found])
        cost, work = self.cost[parent] + costs[step, 0], self.work[parent] + costs[step, 1]
        rest, rest_work = (self.rest, 0.0) if steps.priced else (0.0, self.rest)
        fits = (cost + rest <= self.most + EPS) & (work + rest_work <= self.most_work + EPS)
        parent, step, cost, work = parent[fits], step[fits], cost[fits], work[fits]
        rows = np.column_stack([self.rows[parent], np.zeros(len(parent), np.int32)])
        rows[:, [*columns, -1]] = np.array([(*d.after, d.out) for d in found], np.int32)[step]
        stays = [n for n, x in enumerate(self.live) if steps.ways.last[x] is not op]
        live = [self.live[n] for n in stays]
        if op.outputs and op.output in steps.ways.last:
            stays, live = [*stays, rows.shape[1] - 1], [*live, op.output]
        rows = rows[:, stays]
        kept = self._undominated(live, rows, cost, work)[: self.beam]
        self.live, self.rows, self.cost, self.work = live, rows[kept], cost[kept], work[kept]
        self.layers.append((op, parent[kept], step[kept], found))
        self.states += len(kept)
        if len(kept) > MAX_STATES:
            raise TooMany
        return len(kept) > 0

    def _undominated(self, live: list[Tensor], rows: Array, cost: Array, work: Array) -> Array:
        """The numbers of the states that no other is as good as, cheapest first."""
        order = np.lexsort((work, cost))
        both = np.column_stack([rows[order], np.round(64 * work[order]).astype(np.int64)])
        _, first = np.unique(both, axis=0, return_index=True)
        order = order[np.sort(first)]
        rows, cost, work = rows[order], cost[order], work[order]
        shorts = []
        for n, x in enumerate(live):
            numbers, rows[:, n] = np.unique(rows[:, n], return_inverse=True)
            if len(numbers) > 1:
                short, every = self.steps.at[x].short, numbers.tolist()
                shorts.append((n, np.array([[short(a, b) for b in every] for a in every])))
        alive = np.ones(len(rows), bool)
        begin = 0
        for _ in range(0, PRUNERS, AT_ONCE):
            some = begin + np.flatnonzero(alive[begin:])[:AT_ONCE]
            if not len(some):
                break
            others = np.flatnonzero(alive)
            others = others[others > some[0]]
            total = np.broadcast_to(cost[some][:, None], (len(some), len(others))).copy()
            for n, table in shorts:
                total += table[rows[some, n]][:, rows[others, n]]
            worse = (total <= cost[others] + EPS) & (work[some][:, None] <= work[others] + EPS)
            worse &= others > some[:, None]  # of two that are equal the first stays
            alive[others[worse.any(0)]] = False
            begin = int(some[-1]) + 1
        return order[alive]

    def _traced(self, at: int) -> Optimum:
        path = []
        for op, parents, taken, found in reversed(self.layers):
            path.append((op, found[taken[at]]))
            at = int(parents[at])
        path.reverse()
        return Optimum(sum(d.bytes for _, d in path), sum(d.work for _, d in path), tuple(path), self.states)
