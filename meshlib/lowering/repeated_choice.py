"""Exact choices for a graph with alike layers, from the factor graph of the shortened graph.

Tables and variables belong to layers, like their operations and tensors. Variables are eliminated in all layers of the
shortened graph alike, while tables stay small, unless the first or last layer then changes tables beside the gap. What
is left of one regular layer is repeated for each omitted layer, and the factor graph of the whole graph is solved: cost
and bound are its own. The solution applies to the shortened graph if the omitted layers, and their neighbours, all
choose alike.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from heapq import heappop, heappush
from typing import TypeAlias

import numpy as np

from meshlib.lowering.cost_tables import Floats
from meshlib.lowering.elimination import Elimination, FactorGraph, Scope, Solution
from meshlib.lowering.problem import Chosen, Problem
from meshlib.lowering.repetition import Irregular, Repetition
from meshlib.lowering.solving import solve

Place: TypeAlias = int | None  # layer number in the short graph; None: outside all layers
Owner: TypeAlias = tuple[Hashable, Place]  # (identity of a variable within its layer, layer)
# (variables relative to the table's layer, entries)
Table: TypeAlias = tuple[tuple[tuple[Hashable, Place], ...], Floats]
NOISE = 1e-9  # relative to a cost
ALIKE_TABLE = 10_000  # entries: before larger tables are added, dominated values are dropped, in each layer


def repeated_choices(problem: Problem, layers: Repetition) -> Chosen:
    """As `best_choices`, for the short graph of a problem, with the excess over the bound of the whole graph.

    Raises: Irregular where omitted layers would choose differently from each other.
    """
    problem.build()
    expanded = _Expanded(problem, layers)
    solution = solve(expanded.graph)
    short = expanded.core.solution(len(problem.factors.sizes), expanded.left(solution))
    cost = expanded.cost(short)
    if cost > solution.cost + NOISE * abs(solution.cost):
        raise Irregular
    return problem.chosen(Solution(tuple(short), cost, solution.bound))


class _Expanded:
    """The factor graph of the whole graph, and the positions of the short graph's variables in it."""

    def __init__(self, problem: Problem, layers: Repetition) -> None:
        self.problem, self.layers = problem, layers
        self.owners = self._owners()
        self.whole = self._tables(problem.factors.tables)
        if not self._is_regular(self.whole):
            raise Irregular
        self.core = Elimination(problem.factors)  # of the short graph
        self._eliminate_alike()
        tables = self._tables(self.core.tables.items())
        if not self._is_regular(tables):  # an end has changed tables beside the gap
            self.core, tables = Elimination(problem.factors), self.whole
        self.graph = FactorGraph()
        self.numbers: dict[tuple[Hashable, Place], int] = {}  # (identity, layer in the whole graph) -> variable
        sizes = self.core.size
        template = layers.first  # the first regular layer after the gap, which equals the one before it
        for v in sizes:
            what, place = self.owners[v]
            self.numbers[what, self._layer(place)] = self.graph.add_variable(sizes[v])
        own = [(what, v) for v in sizes for what, place in [self.owners[v]] if place == template]
        for layer in range(layers.first, layers.end):
            for what, v in own:
                self.numbers[what, layer] = self.graph.add_variable(sizes[v])
        self.graph.add((), np.array(self.core.constant))
        for place, here in tables.items():
            for table in here:
                self._add(table, self._layer(place))
        for layer in range(layers.first, layers.end):
            for table in tables.get(template, ()):
                self._add(table, layer)

    def _eliminate_alike(self) -> None:
        """Eliminate variables in all layers, smallest tables first: those that no table links to each other.

        A variable without neighbours stays: its cost counts once per layer.
        """
        core, alike = self.core, dict[Hashable, list[int]]()
        for v, (what, place) in enumerate(self.owners):
            if place is not None:
                alike.setdefault(what, []).append(v)
        widths, queue = dict[Hashable, int](), list[tuple[int, int, Hashable]]()

        def note(some: Iterable[Hashable]) -> None:
            for what in some:
                width = max(map(core.width, alike[what]))
                if width != widths.get(what):
                    widths[what] = width
                    heappush(queue, (width, alike[what][0], what))

        note(alike)
        while queue and queue[0][0] <= ALIKE_TABLE:
            width, _, what = heappop(queue)
            if widths.get(what) != width:
                continue
            near = [core.near[v] for v in alike[what]]
            others = {self.owners[u][0] for some in near for u in some}
            if what not in others and all(near):
                for v in alike.pop(what):
                    core.eliminate(v)
                del widths[what]
                note(others & alike.keys())

    def _layer(self, place: Place) -> Place:
        return None if place is None else self.layers.layer(place)

    def _owners(self) -> list[Owner]:
        """Identity and layer of each variable of the short graph: operations, and copies of tensors."""
        owners: list[Owner] = [(v, None) for v in range(len(self.problem.factors.sizes))]
        for op, own in self.problem.variables.items():
            what, place = self.layers.where(op)
            for region, v in enumerate(own):
                if v is not None:
                    owners[v] = (what, region), place
        for t, variables in self.problem.entered:
            what, place = self.layers.where(t)
            for n, v in enumerate(variables):
                owners[v] = (what, n), place
        return owners

    def _tables(self, tables: Iterable[tuple[Scope, Floats]]) -> dict[Place, list[Table]]:
        """The tables of each layer of the short graph: the first layer that has one of their variables."""
        of: dict[Place, list[Table]] = {}
        for scope, table in tables:
            relative = [self.owners[v] for v in scope]
            place = min([p for _, p in relative if p is not None], default=None)
            key = tuple([(what, None if p is None or place is None else p - place) for what, p in relative])
            of.setdefault(place, []).append((key, table))
        return of

    def _is_regular(self, tables: Mapping[Place, list[Table]]) -> bool:
        """True if the layers on both sides of the gap have equal tables."""
        first = self.layers.first
        before, behind = (
            {(key, table.shape, table.tobytes()) for key, table in tables.get(place, ())}
            for place in (first - 1, first)
        )
        return before == behind

    def _add(self, table: Table, layer: Place) -> None:
        scope = []
        for what, distance in table[0]:
            at = None if distance is None else (layer or 0) + distance
            number = self.numbers.get((what, at))
            if number is None:
                raise Irregular
            scope.append(number)
        self.graph.add(scope, table[1])

    def left(self, solution: Solution) -> dict[int, int]:
        """The values of the short graph's variables that are left, with the same ones on both sides of the gap."""
        left, first = {}, self.layers.first
        for v in self.core.domain:
            what, place = self.owners[v]
            left[v] = solution.values[self.numbers[what, self._layer(first - 1 if place == first else place)]]
        return left

    def cost(self, short: Sequence[int]) -> float:
        """The sum of all tables of the whole graph, from the short graph's values, as if nothing were eliminated."""
        values = {(what, self._layer(place)): n for (what, place), n in zip(self.owners, short, strict=True)}
        before, first, end = self.layers.first - 1, self.layers.first, self.layers.end
        cost = self.problem.factors.cost(short)
        for layer in range(first, end):
            for scope, table in self.whole.get(before, ()):
                at = [None if distance is None else layer + distance for _, distance in scope]
                at = [before if n is not None and first <= n < end else n for n in at]
                cost += float(table[tuple([values[what, n] for (what, _), n in zip(scope, at, strict=True)])])
        return cost
