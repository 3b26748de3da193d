"""Exact minimisation of a sum of small tables over discrete variables (a min-plus factor graph, or weighted CSP).

    bounds       the sum of the tables' minima, raised by `dual_ascent`; what a value adds to it bounds every solution
                 with that value
    pruning      drops values whose bound exceeds the incumbent, and dominated values
    elimination  a variable's tables are added and minimised over it, the smallest result first; backtracking through
                 the minima gives the optimum

The three alternate, with small tables first: most graphs need no bounds then. Equal layers have equal tables, and
results for one are reused for the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from math import inf, prod
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from meshlib.lowering.cost_tables import Floats, Ints, dominated, marginal, minimum

Scope: TypeAlias = tuple[int, ...]  # variables, ascending
Positions: TypeAlias = dict[tuple[int, ...], int]
T = TypeVar("T")

SWEPT = 20  # times that bounding a variable reads its tables; eliminating it must take less
MOST_NEIGHBOURS = 40  # of an eliminated variable, limited by the number of array axes


@dataclass(eq=False)
class FactorGraph:
    """Variables with their domains, and tables over some of them; the sum of all tables is minimised."""

    sizes: list[int] = field(default_factory=list)
    tables: list[tuple[Scope, Floats]] = field(default_factory=list)

    def add_variable(self, size: int) -> int:
        """A new variable with values 0 to `size` - 1."""
        self.sizes.append(size)
        return len(self.sizes) - 1

    def add(self, scope: Sequence[int], table: Floats) -> None:
        """Add a table over distinct variables, one axis each."""
        key = tuple(sorted(scope))
        if key != tuple(scope):
            table = table.transpose([scope.index(v) for v in key])
        self.tables.append((key, table))

    def cost(self, values: Sequence[int]) -> float:
        """The sum of all tables under an assignment."""
        return float(sum([t[tuple([values[v] for v in scope])] for scope, t in self.tables]))


@dataclass(frozen=True)
class Solution:
    """An assignment, its cost, and a lower bound on the cost of every assignment."""

    values: tuple[int, ...]
    cost: float
    bound: float

    @property
    def gap(self) -> float:
        """Relative distance of the cost to the lower bound."""
        return 0.0 if self.cost <= self.bound else (self.cost - self.bound) / max(abs(self.bound), 1e-9)


class _Shared:
    """Cache of array operations by the identity of their operands.

    Equal layers have equal tables, stored as one array; so results for the first layer's tables are
    reused for the others.
    """

    def __init__(self) -> None:
        self._tables: dict[object, Floats] = {}
        self._first: dict[int, Floats] = {}  # first of the equal tables, by identity
        self._known: dict[object, Any] = {}
        self._operands: list[Floats] = []  # kept alive, so that identities stay unique

    def one(self, table: Floats) -> Floats:
        """The representative of all equal tables."""
        if id(table) not in self._first:
            self._first[id(table)] = self._tables.setdefault((table.shape, table.tobytes()), table)
            self._operands.append(table)
        return self._first[id(table)]

    def of(self, what: object, operands: Sequence[Floats], result: Callable[[], T]) -> T:
        """The result of an operation on these operands, computed once."""
        key = (what, *map(id, operands))
        shared: T | None = self._known.get(key)
        if shared is None:
            shared = self._known[key] = result()
            self._operands += operands
        return shared


class _Eliminated(NamedTuple):
    """An eliminated variable: its value follows from those of its neighbours."""

    variable: int
    domain: Ints
    neighbours: Scope
    domains: list[Ints]  # of the neighbours
    axes: Sequence[tuple[int, ...]]  # of each table: 0 is the variable, 1 its first neighbour
    tables: list[Floats]
    known: Positions  # minimising positions by the neighbours' positions; shared with equal tables

    def value(self, values: Sequence[int]) -> int:
        """The minimising value, given its neighbours' `values`."""
        at = tuple([_place(d, values[u]) for d, u in zip(self.domains, self.neighbours, strict=True)])
        if at not in self.known:
            index: tuple[slice | int, ...] = (slice(None), *at)
            rows = [t[tuple([index[n] for n in own])] for own, t in zip(self.axes, self.tables, strict=True)]
            self.known[at] = int(sum(rows[1:], rows[0]).argmin()) if rows else 0
        return int(self.domain[self.known[at]])


class Elimination:
    """A factor graph being solved: domains shrink, variables are eliminated, tables grow."""

    def __init__(self, graph: FactorGraph) -> None:
        ranges = {n: np.arange(n) for n in set(graph.sizes)}
        self.domain: dict[int, Ints] = {v: ranges[n] for v, n in enumerate(graph.sizes)}  # remaining original values
        self.size: dict[int, int] = dict(enumerate(graph.sizes))  # of the domains
        self.tables: dict[Scope, Floats] = {}
        self.of: dict[int, set[Scope]] = {v: set() for v in self.domain}
        self.near: dict[int, set[int]] = {v: set() for v in self.domain}  # variables that share a table
        self.constant = 0.0
        self.trail: list[_Eliminated] = []
        self.changed = set(self.domain)  # variables whose values may have become dominating since the last comparison
        self.shared = _Shared()
        for scope, table in graph.tables:
            self.put(scope, self.shared.one(table))

    def copy(self) -> Elimination:
        """An independent copy; tables are never changed in place."""
        new = object.__new__(Elimination)
        new.domain, new.size, new.tables, new.constant = (
            dict(self.domain),
            dict(self.size),
            dict(self.tables),
            self.constant,
        )
        new.of = {v: set(s) for v, s in self.of.items()}
        new.near = {v: set(s) for v, s in self.near.items()}
        new.trail, new.changed = list(self.trail), set(self.changed)
        new.shared = self.shared
        return new

    def put(self, scope: Scope, table: Floats) -> None:
        if not scope:
            self.constant += float(table)
            return
        self.changed.update(scope)
        old = self.tables.get(scope)
        if old is None:
            self.tables[scope] = table
            for v in scope:
                self.of[v].add(scope)
                near = self.near[v]
                near.update(scope)
                near.remove(v)
        else:
            self.tables[scope] = self.shared.of("sum", (old, table), lambda: old + table)

    def take(self, scope: Scope) -> Floats:
        for v in scope:
            self.of[v].discard(scope)
        return self.tables.pop(scope)

    # ------------------------------------------------------------ domains

    def restrict(self, v: int, keep: NDArray[np.bool_]) -> None:
        """Drop values of a variable."""
        self.domain[v] = self.domain[v][keep]
        self.size[v] = len(self.domain[v])
        mask = keep.tobytes()
        for scope in self.of[v]:
            table, axis = self.tables[scope], scope.index(v)
            self.tables[scope] = self.shared.of((mask, axis), (table,), partial(table.compress, keep, axis=axis))
            self.changed.update(scope)

    def drop_dominated(self) -> set[int]:
        """Drop values that another value dominates under all neighbours' values; returns the variables affected."""
        dropped: set[int] = set()
        compared, self.changed = sorted(self.changed & self.domain.keys()), set()
        for v in compared:
            if self.size[v] > 1:
                own = sorted([(scope.index(v), id(self.tables[scope]), scope) for scope in self.of[v]])
                axes, tables = tuple([axis for axis, _, _ in own]), [self.tables[scope] for _, _, scope in own]
                gone = self.shared.of(("dominated", axes), tables, partial(dominated, axes, tables))
                if gone.any():
                    self.restrict(v, np.logical_not(gone))
                    dropped.add(v)
        return dropped

    def reduce(self, limit: int) -> None:
        """Alternate elimination and dominance while either is possible within `limit`."""
        self.eliminate_up_to(limit)
        while dropped := self.drop_dominated():
            self.eliminate_up_to(limit, dropped.union(*map(self.near.__getitem__, dropped)))

    # ------------------------------------------------------------ elimination

    def width(self, v: int) -> int:
        """Size of the table for eliminating a variable."""
        near = self.near[v]
        if len(near) > MOST_NEIGHBOURS:
            return 1 << 62
        return prod(map(self.size.__getitem__, near), start=self.size[v])

    def eliminate(self, v: int) -> None:
        """Minimise over a variable."""
        scope = tuple(sorted(self.near[v]))
        whole = (v, *scope)
        own = sorted(self.of[v])
        axes = tuple([tuple(map(whole.index, one)) for one in own])
        tables = [self.take(one) for one in own]
        sizes = tuple([self.size[u] for u in whole])
        least, known = self.shared.of(
            ("least", axes, sizes), tables, lambda: (minimum(sizes, axes, tables), Positions())
        )
        domains = [self.domain[u] for u in scope]
        self.trail.append(_Eliminated(v, self.domain[v], scope, domains, axes, tables, known))
        self._leave(v)
        self.put(scope, least)

    def settle(self, v: int) -> None:
        """Remove a variable with a single remaining value from its tables."""
        for scope in list(self.of[v]):
            table, axis = self.take(scope), scope.index(v)
            rest = self.shared.of(("only", axis), (table,), partial(_only, table, axis))
            self.put(tuple([u for u in scope if u != v]), rest)
        self.trail.append(_Eliminated(v, self.domain[v], (), [], (), [], {}))
        self._leave(v)

    def _leave(self, v: int) -> None:
        """Forget a variable without tables."""
        for u in self.near.pop(v):
            self.near[u].discard(v)
        del self.domain[v], self.size[v], self.of[v]

    def eliminate_up_to(self, limit: int, among: Iterable[int] | None = None, narrows: bool = False) -> None:
        """Eliminate variables, smallest table first, while tables stay within `limit`.

        Args:
          among: variables to begin with, if the others are known to need larger tables; by default all.
          narrows: if a table would be larger, halve the widest domain by dropping its less promising values.
        """
        some = list(self.domain if among is None else among)
        for v in [v for v in some if self.size[v] == 1]:
            self.settle(v)
        widths: dict[int, int] = {}
        queue: list[tuple[int, int]] = []

        def note(changed: Iterable[int]) -> None:
            for u in changed:
                width = self.width(u)
                own = sum([self.tables[scope].size for scope in self.of[u]]) if width > limit else 0
                if width <= min(self.size[u], SWEPT) * own:
                    width = limit  # the result is no larger than the tables, which would be swept as often
                if width != widths.get(u):
                    widths[u] = width
                    heappush(queue, (width, u))

        note(v for v in some if v in self.domain)
        while queue:
            width, v = heappop(queue)
            if widths.get(v) != width:
                continue
            near = self.near[v]
            if width <= limit:
                self.eliminate(v)
                del widths[v]
            elif not narrows:
                return
            else:
                widest = max((*near, v), key=self.size.__getitem__)
                self.halve(widest)
                near = {widest, v, *self.near[widest]}
                if self.size[widest] == 1:
                    self.settle(widest)
                    near.remove(widest)
                for u in (widest, v):
                    widths.pop(u, None)
            note(near & self.domain.keys())

    def halve(self, v: int) -> None:
        """Keep the more promising half of a variable's values."""
        total = self.reduced_costs(v)
        keep = np.zeros(len(total), bool)
        keep[np.argsort(total, kind="stable")[: max(1, len(total) // 2)]] = True
        self.restrict(v, keep)

    def solution(self, count: int, known: Mapping[int, int] | None = None) -> list[int]:
        """The values of all variables by backtracking; `known` are those of variables that are not eliminated."""
        values = [(known or {}).get(v, -1) for v in range(count)]
        for step in reversed(self.trail):
            values[step.variable] = step.value(values)
        return values

    # ------------------------------------------------------------ bounds

    def reduced_costs(self, v: int) -> Floats:
        """Reduced cost of each value of a variable: the increase of its tables' minima."""
        total = np.zeros(len(self.domain[v]))
        for scope in self.of[v]:
            least = marginal(self.tables[scope], scope.index(v))
            lowest = least.min()
            total = total + (least - lowest if np.isfinite(lowest) else least)
        return total

    def lower_bound(self) -> float:
        """Sum of the tables' minima."""
        return self.constant + sum([float(t.min()) for t in self.tables.values()])

    def prune(self, most: float) -> float:
        """Drop values that occur in no assignment of cost up to `most`; returns the lower bound."""
        low = self.lower_bound()
        for v in list(self.domain) if low <= most else ():
            keep = low + self.reduced_costs(v) <= most
            if not keep.all():
                if not keep.any():
                    return inf
                self.restrict(v, keep)
        return low


def _place(domain: Ints, value: int) -> int:
    """Position of a value in an ascending domain."""
    if value < len(domain) and domain[value] == value:
        return value
    return int(domain.searchsorted(value))


def _only(table: Floats, axis: int) -> Floats:
    return np.asarray(table.take(0, axis=axis))
