"""Exact minimisation of a sum of small tables over discrete variables (a min-plus factor graph, or weighted CSP).

    bounds     block-coordinate ascent on the dual (max-product linear programming): mass is moved between a table and
               its variables by min-marginals. What is left, with one value fixed, bounds every solution that has it
    pruning    values whose bound exceeds the incumbent are dropped, and values that another one is never worse than
    elimination  a variable's tables are added up and minimised over it, the smallest result first; backtracking
               through the minima gives the optimum

Pruning with an incumbent that was guessed is sound as long as the optimum found does not exceed it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf, prod
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.intp]
Scope: TypeAlias = tuple[int, ...]  # variables, ascending

TABLE_LIMIT = 4_000_000  # entries of a table
MOST_NEIGHBOURS = 40  # of a variable that is eliminated: an array has so many axes
SMALL_TABLE = 3_000  # entries: eliminating a variable is cheaper than bounding it
DIVE_TABLE = 50_000
WINDOW, WINDOW_TABLE, PASSES = 60, 400_000, 4  # variables; entries of a table; how often at most
SWEEPS = 12  # of dual ascent
GUESSES = (0.03, 0.2, 1.0)  # upper bounds that are tried, as shares of the way from the lower one to the incumbent


class TooLarge(Exception):
    """An elimination would need a table beyond the limit."""


@dataclass(eq=False)
class FactorGraph:
    """Variables with their domains, and tables over some of them; the sum of all tables is to be least."""

    sizes: list[int] = field(default_factory=list)
    tables: dict[Scope, Floats] = field(default_factory=dict)

    def add_variable(self, size: int) -> int:
        """A new variable with values 0 to `size` - 1."""
        self.sizes.append(size)
        return len(self.sizes) - 1

    def add(self, scope: Sequence[int], table: Floats) -> None:
        """Add a table over distinct variables, one axis each."""
        order = sorted(range(len(scope)), key=scope.__getitem__)
        key = tuple([scope[n] for n in order])
        table = table.transpose(order) if len(order) > 1 else table
        old = self.tables.get(key)
        self.tables[key] = table if old is None else old + table

    def cost(self, values: Sequence[int]) -> float:
        """The sum of all tables under an assignment of a value to each variable."""
        return float(sum(t[tuple([values[v] for v in scope])] for scope, t in self.tables.items()))


@dataclass(frozen=True)
class Solution:
    """The value of each variable, their cost, and a lower bound of every solution's cost."""

    values: tuple[int, ...]
    cost: float
    bound: float

    @property
    def gap(self) -> float:
        """How far the cost may be above the optimum, as a share of it."""
        return 0.0 if self.cost <= self.bound else (self.cost - self.bound) / max(abs(self.bound), 1e-9)


class _Problem:
    """A factor graph while it is being solved: domains shrink, variables go, tables grow."""

    def __init__(self, graph: FactorGraph) -> None:
        self.domain: dict[int, Ints] = {v: np.arange(n) for v, n in enumerate(graph.sizes)}  # original values left
        self.tables: dict[Scope, Floats] = {}
        self.of: dict[int, set[Scope]] = {v: set() for v in self.domain}
        self.constant = 0.0
        self.trail: list[tuple[int, Ints, Scope, list[Ints], Ints]] = []
        for scope, table in graph.tables.items():
            self.put(scope, table)

    def copy(self) -> _Problem:
        """An independent copy; tables are never changed in place."""
        new = object.__new__(_Problem)
        new.domain, new.tables, new.constant = dict(self.domain), dict(self.tables), self.constant
        new.of = {v: set(s) for v, s in self.of.items()}
        new.trail = list(self.trail)
        return new

    def put(self, scope: Scope, table: Floats) -> None:
        if not scope:
            self.constant += float(table)
            return
        old = self.tables.get(scope)
        if old is None:
            self.tables[scope] = table
            for v in scope:
                self.of[v].add(scope)
        else:
            self.tables[scope] = old + table

    def take(self, scope: Scope) -> Floats:
        for v in scope:
            self.of[v].discard(scope)
        return self.tables.pop(scope)

    # ------------------------------------------------------------ domains

    def restrict(self, v: int, keep: NDArray[np.bool_]) -> None:
        """Drop values of a variable."""
        self.domain[v] = self.domain[v][keep]
        for scope in self.of[v]:
            self.tables[scope] = self.tables[scope].compress(keep, axis=scope.index(v))

    def drop_dominated(self, v: int) -> bool:
        """Drop values that some other value is never worse than, whatever the neighbours' values."""
        size = len(self.domain[v])
        if size <= 1:
            return False
        worst = np.zeros((size, size))  # [y, x]: by how much y may cost more than x
        for scope in self.of[v]:
            table = np.moveaxis(self.tables[scope], scope.index(v), 0).reshape(size, -1)
            if size * table.size > 400_000:
                return False
            with np.errstate(invalid="ignore"):
                more = table[:, None, :] - table[None, :, :]
            more[np.isnan(more)] = -inf  # neither is possible
            step = more.max(axis=2)
            ruled_out = np.isposinf(worst) | np.isposinf(step)
            worst = np.where(ruled_out, inf, np.where(ruled_out, 0, worst) + np.where(ruled_out, 0, step))
        never: NDArray[np.bool_] = worst <= 0
        ties = never & never.T
        never &= ~ties | (np.arange(size)[:, None] < np.arange(size)[None, :])  # of equals the first stays
        gone: NDArray[np.bool_] = np.any(never, axis=0)
        if not gone.any():
            return False
        self.restrict(v, np.logical_not(gone))
        return True

    # ------------------------------------------------------------ elimination

    def neighbours(self, v: int) -> set[int]:
        """The variables that share a table with one."""
        return {u for scope in self.of[v] for u in scope} - {v}

    def width(self, v: int) -> int:
        """Entries of the table that eliminating a variable adds up."""
        if len(near := self.neighbours(v)) > MOST_NEIGHBOURS:
            return 1 << 62
        return prod([len(self.domain[u]) for u in near]) * len(self.domain[v])

    def eliminate(self, v: int) -> None:
        """Minimise over a variable."""
        scope = tuple(sorted(self.neighbours(v)))
        whole = (*scope, v)
        total: Floats | None = None
        for own in sorted(self.of[v], key=len):
            table = self.take(own)
            order = [own.index(u) for u in whole if u in own]
            shape = [len(self.domain[u]) if u in own else 1 for u in whole]
            table = table.transpose(order).reshape(shape)
            total = table if total is None else total + table
        if total is None:
            total = np.zeros(len(self.domain[v]))
        full = tuple([len(self.domain[u]) for u in whole])
        if total.shape != full:
            total = np.broadcast_to(total, full)
        best = total.argmin(axis=-1)
        self.trail.append((v, self.domain[v], scope, [self.domain[u] for u in scope], best))
        least: Floats = np.asarray(total.min(axis=-1))
        del self.domain[v], self.of[v]
        self.put(scope, least)

    def settle(self, v: int) -> None:
        """Take a variable of which one value is left out of its tables."""
        for scope in list(self.of[v]):
            table = np.asarray(self.take(scope).take(0, axis=scope.index(v)))
            self.put(tuple([u for u in scope if u != v]), table)
        self.trail.append((v, self.domain[v], (), [], np.zeros((), np.intp)))
        del self.domain[v], self.of[v]

    def eliminate_up_to(self, limit: int) -> None:
        """Eliminate variables as long as one needs no table beyond `limit`, the smallest first."""
        for v in [v for v, domain in self.domain.items() if len(domain) == 1]:
            self.settle(v)
        widths = {v: self.width(v) for v in self.domain}
        while widths:
            v = min(widths, key=widths.__getitem__)
            if widths[v] > limit:
                return
            near = self.neighbours(v)
            self.eliminate(v)
            del widths[v]
            for u in near:
                widths[u] = self.width(u)

    def solution(self, count: int) -> list[int]:
        """The values of all variables, by backtracking; all must have been eliminated."""
        values = [-1] * count
        for v, domain, scope, domains, best in reversed(self.trail):
            at = tuple([int(np.searchsorted(d, values[u])) for u, d in zip(scope, domains, strict=True)])
            values[v] = int(domain[best[at]])
        return values

    # ------------------------------------------------------------ bounds

    def bound(self, sweeps: int) -> float:
        """Reparametrise by dual ascent; returns a lower bound. Solutions keep their cost."""
        unary: dict[int, Floats] = {}
        for v in self.domain:
            unary[v] = self.take((v,)) if (v,) in self.of[v] else np.zeros(len(self.domain[v]))
        scopes = sorted(self.tables)
        last = -inf
        for sweep in range(sweeps):
            for scope in scopes if sweep % 2 == 0 else reversed(scopes):
                table = self.tables[scope]
                n = len(scope)
                for axis, v in enumerate(scope):
                    table = table + unary[v].reshape([-1 if k == axis else 1 for k in range(n)])
                shares = []
                for axis in range(n):
                    least = table.min(axis=tuple([k for k in range(n) if k != axis]))
                    shares.append(least / n)
                for axis, v in enumerate(scope):
                    finite = np.where(np.isfinite(shares[axis]), shares[axis], 0.0)
                    table = table - finite.reshape([-1 if k == axis else 1 for k in range(n)])
                    unary[v] = shares[axis]
                self.tables[scope] = table
            total = self.constant + sum(float(u.min()) for u in unary.values())
            total += sum(float(self.tables[s].min()) for s in scopes)
            if total - last <= 1e-6 * abs(total):
                last = max(last, total)
                break
            last = total
        for v, u in unary.items():
            self.put((v,), u)
        return last

    def reduced_costs(self, v: int) -> Floats:
        """The share of each value of a variable in the lower bound."""
        total = np.zeros(len(self.domain[v]))
        for scope in self.of[v]:
            axis, table = scope.index(v), self.tables[scope]
            total = total + table.min(axis=tuple([k for k in range(len(scope)) if k != axis]))
        return total

    def attempt(self, most: float, limit: int) -> bool:
        """Prune by `most` and eliminate, alternating; False if no solution costs so little. Raises: TooLarge."""
        size = SMALL_TABLE
        while self.domain:
            for n in range(8):
                low, gone = self.prune(most)
                if low > most:
                    return False
                if not gone:
                    break
                if n % 2:
                    self.bound(3)
            before = len(self.domain)
            self.eliminate_up_to(size)
            if not self.domain:
                break
            if len(self.domain) == before:
                if size >= limit:
                    raise TooLarge
                size = min(size * 8, limit)
            if self.bound(4) > most:
                return False
        return self.constant <= most

    def prune(self, most: float) -> tuple[float, bool]:
        """Drop values in no solution that costs at most `most`. Returns the lower bound, and whether any went."""
        minima = {scope: float(t.min()) for scope, t in self.tables.items()}
        low = self.constant + sum(minima.values())
        gone = False
        for v in list(self.domain):
            reduced = np.zeros(len(self.domain[v]))
            for scope in self.of[v]:
                axis = scope.index(v)
                table = self.tables[scope]
                reduced = reduced + table.min(axis=tuple([k for k in range(len(scope)) if k != axis])) - minima[scope]
            keep = low + reduced <= most
            if not keep.all():
                if not keep.any():
                    return inf, True
                self.restrict(v, keep)
                gone = True
        return low, gone


def solve(graph: FactorGraph, incumbent: Sequence[int] | None = None, limit: int = TABLE_LIMIT) -> Solution:
    """The least-cost values of all variables, with a lower bound: equal to the cost where that is proved.

    Args:
      incumbent: values that are known to be good, as an upper bound to begin with.
      limit: entries of a table, at most; where more would be needed, the bound may stay below the cost.
    """
    start = _Problem(graph)
    for v in list(start.domain):
        start.drop_dominated(v)
    start.eliminate_up_to(SMALL_TABLE)
    count = len(graph.sizes)
    if not start.domain:
        return _proved(graph, start.solution(count))
    low = start.bound(SWEEPS)
    size = DIVE_TABLE
    best = _dive(graph, start, size)
    while not np.isfinite(graph.cost(best)) and size < limit:  # the values that were kept exclude each other
        size *= 16
        best = _dive(graph, start, size)
    if incumbent is not None and graph.cost(incumbent) < graph.cost(best):
        best = list(incumbent)
    most = graph.cost(best)
    for share in GUESSES:
        aim = low + share * (most - low)
        attempt = start.copy()
        try:
            found = attempt.attempt(aim + _noise(aim), limit)
        except TooLarge:
            break
        if found:
            values = attempt.solution(count)
            cost = graph.cost(values)
            if cost <= aim + 2 * _noise(aim):
                return Solution(tuple(values), cost, cost)
            if cost < most:
                best, most = values, cost
        low = max(low, min(aim, most))
        if low >= most - _noise(most):
            return _proved(graph, best)
    best = _windows(graph, best)
    return Solution(tuple(best), graph.cost(best), low)


def _proved(graph: FactorGraph, values: Sequence[int]) -> Solution:
    cost = graph.cost(values)
    return Solution(tuple(values), cost, cost)


def _noise(cost: float) -> float:
    """How much of a cost is rounding."""
    return 1e-5 + 1e-12 * abs(cost)


def _dive(graph: FactorGraph, core: _Problem, size: int) -> list[int]:
    """A good solution: eliminate, and where tables would grow keep the more promising half of a domain."""
    problem = core.copy()
    while problem.domain:
        problem.eliminate_up_to(size)
        if not problem.domain:
            break
        v = min(problem.domain, key=problem.width)
        near = {*problem.neighbours(v), v}
        widest = max(near, key=lambda u: len(problem.domain[u]))
        reduced = problem.reduced_costs(widest)
        keep = np.zeros(len(reduced), bool)
        keep[np.argsort(reduced, kind="stable")[: max(1, len(reduced) // 2)]] = True
        problem.restrict(widest, keep)
    return problem.solution(len(graph.sizes))


def _windows(graph: FactorGraph, values: list[int]) -> list[int]:
    """Re-optimise runs of variables exactly, all others fixed, as long as that helps."""
    count = len(graph.sizes)
    of: dict[int, list[Scope]] = {v: [] for v in range(count)}
    for scope in graph.tables:
        for v in scope:
            of[v].append(scope)
    for _ in range(PASSES):
        before = graph.cost(values)
        for first in range(0, count, WINDOW // 2):
            some = range(first, min(first + WINDOW, count))
            place = {v: n for n, v in enumerate(some)}
            window = FactorGraph([graph.sizes[v] for v in some])
            for scope in dict.fromkeys(scope for v in some for scope in of[v]):
                at = tuple([slice(None) if v in place else values[v] for v in scope])
                window.add([place[v] for v in scope if v in place], graph.tables[scope][at])
            problem = _Problem(window)
            try:
                if problem.attempt(window.cost([values[v] for v in some]) + 1e-9, WINDOW_TABLE):
                    for v, value in zip(some, problem.solution(len(place)), strict=True):
                        values[v] = value
            except TooLarge:
                continue
        if graph.cost(values) >= before - _noise(before):
            break
    return values
