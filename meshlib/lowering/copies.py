"""The copies of one tensor as tables of a factor graph: its producer, its consumers, and reshards between.

A tensor is produced under one or several *placements* (shardings, pending sums included) and consumed under others. One
copy serves every use that can be reached from it, and a reshard may start from any copy, so the joint cost is that of a
cheapest tree. Trees of up to three uses are tabulated exactly (Dreyfus-Wagner over all placements). With more uses, an
extra variable selects the copies that a region shares, its *hubs*; a use then pays for a reshard from the nearest hub.
A copy that takes more memory than the assigned sharding serves one region only (forward, backward or update). Where it
is gathered again for a later region, hubs may have a small copy that was computed from it; trees do not, so they may
cost more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations, permutations, product
from math import inf, prod
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from layouts import Sharding
from meshlib.lowering.balance import Balance
from meshlib.lowering.bindings import stored
from meshlib.lowering.cost_tables import Floats, Ints
from meshlib.lowering.distances import distances
from meshlib.lowering.elimination import FactorGraph
from meshlib.lowering.values import ClassRows

DIRECT_ENTRIES = 60_000  # largest table of a tree
HUBS = 3  # maximum number of shared copies per region
MOST_HUB_SETS = 400
ROWS_AT_ONCE = 16  # rows compared at once
HUGE = 1e100  # bytes: replaces infinity where sums of infinities would be undefined

Spot: TypeAlias = tuple[int, int]  # (region, placement); regions in order
Axis: TypeAlias = tuple[int | None, Ints]  # (variable, class of each of its values)


@dataclass(eq=False)
class Copies:
    """The producer of a tensor and its users; `made` has the placements produced in each of `regions`."""

    home: Sharding
    itemsize: float
    balance: Balance
    regather: bool
    producers: Sequence[int | None] = ()  # variable of each region that may compute the tensor
    regions: Sequence[str] = ()
    made: tuple[ClassRows, ...] = ()
    uses: list[tuple[int | None, str, ClassRows]] = field(default_factory=list)  # (variable, region, placements needed)

    def set_made(self, variables: Sequence[int | None], regions: Sequence[str], made: tuple[ClassRows, ...]) -> None:
        """Set the placements that each value of the producer's variables produces; later regions may have none."""
        self.producers, self.regions, self.made = variables, regions, made

    def add_use(self, variable: int | None, region: str, needs: ClassRows) -> None:
        """Add the placements that each value of a user's variable needs, if any."""
        if any(needs.classes):
            self.uses.append((variable, region, needs))

    def placements(self) -> list[Sharding]:
        """All placements that are produced or used."""
        (first, *rest), later = self.made[0].classes, [row for rows in self.made[1:] for row in rows.classes]
        needed = [row for _, _, rows in self.uses for row in rows.classes]
        return list(dict.fromkeys([s for row in (first, *later, *rest, *needed) for s in row]))

    def enter(self, graph: FactorGraph, known: dict[object, FactorGraph]) -> None:
        """Add the tensor's tables to a factor graph; `known` caches those of alike tensors."""
        if not self.uses:
            return
        place: dict[int | None, int] = {}
        for v in (*self.producers, *[v for v, _, _ in self.uses]):
            if v is not None and v not in place:
                place[v] = len(place)
        if not place:  # the cost of its copies does not depend on any choice
            return
        order: dict[str, int] = {}
        numbers = tuple([order.setdefault(r, len(order)) for r, _ in zip(self.regions, self.made, strict=False)])
        uses = [(place.get(v), order.setdefault(r, len(order)), rows) for v, r, rows in self.uses]
        producers = tuple([place.get(v) for v in self.producers])
        key = (self.home, self.itemsize, self.regather, producers, self.made, numbers, *uses)
        own = known.get(key)
        if own is None:
            own = known[key] = FactorGraph([0] * len(place))
            _Tables(self, list(zip(producers, numbers, self.made, strict=True)), uses).enter(own)
        variables = [v for v in place if v is not None]
        variables += [graph.add_variable(size) for size in own.sizes[len(place) :]]
        for scope, table in own.tables:
            graph.add([variables[v] for v in scope], table)


@dataclass(eq=False)
class End:
    """The producer of a tensor, or a user, in one region: for each value of its variable a class of placements."""

    variable: int | None
    region: int
    classes: list[tuple[int, ...]]
    of: Ints  # class of each value

    @property
    def axis(self) -> Axis:
        """Its axis in a table."""
        return self.variable, self.of


class _Tables:
    """The tables of a tensor, over its own numbering of variables and placements."""

    def __init__(
        self,
        copies: Copies,
        made: Sequence[tuple[int | None, int, ClassRows]],
        uses: Sequence[tuple[int | None, int, ClassRows]],
    ) -> None:
        self.home, self.regather = copies.home, copies.regather
        self.placements = {s: n for n, s in enumerate(copies.placements())}
        number = self.placements.__getitem__
        self.made = [End(v, r, [tuple(map(number, row)) for row in rows.classes], rows.of) for v, r, rows in made]
        self.uses = [
            End(v, r, [tuple(sorted(map(number, row))) for row in rows.classes], rows.of) for v, r, rows in uses
        ]
        self.number(self.home)  # a copy there serves all regions
        large = [s for s in self.placements if self.regather and s.local_size > self.home.local_size]
        self.slices = {self.number(stored(s, self.home)) for s in large}
        placements = list(self.placements)
        self.between = distances(placements, copies.itemsize, copies.balance)
        light = [not self.regather or s.local_size <= self.home.local_size for s in placements]
        self.light: NDArray[np.bool_] = np.array(light)
        self.reach = [self._reach(u) for u in self.uses]

    def number(self, s: Sharding) -> int:
        """Number of a placement."""
        return self.placements.setdefault(s, len(self.placements))

    def enter(self, graph: FactorGraph) -> None:
        """Add the tables to a factor graph."""
        entries = len(self.placements) * prod([len(end.classes) for end in (*self.made, *self.uses)])
        if len(self.uses) <= 3 and entries <= DIRECT_ENTRIES:
            self._enter_trees(graph)
        else:
            self._enter_hubs(graph)

    def _reach(self, use: End) -> Floats:
        """Cost of each class of a use (columns) from each placement (rows)."""
        costs = self.between[:, [wanted[0] if wanted else 0 for wanted in use.classes]]
        by_size: dict[int, list[int]] = {}
        for n, wanted in enumerate(use.classes):
            if len(wanted) != 1:
                by_size.setdefault(len(wanted), []).append(n)
        for size, some in by_size.items():
            costs[:, some] = self._together(self.between, np.array([use.classes[n] for n in some])) if size else 0
        return costs

    def _root(self, region: int, made: Sequence[End]) -> Floats:
        """Cost of each placement (columns) in a region, from each combination of produced placements (rows)."""
        light = self.light.tolist()
        rows = list(product(*[[[(end.region, s) for s in row] for row in end.classes] for end in made]))
        spots = [[spot for part in parts for spot in part] for parts in rows]
        costs = self._nearest([[s for r, s in row if r == region or (r < region and light[s])] for row in spots])
        if not all(light[s] for row in spots for r, s in row if r < region):
            earlier = [[s for r, s in row if r < region] for row in spots]
            lasting = np.where(self.light, self._nearest(earlier), inf)
            costs = np.minimum(costs, _min_plus(lasting, self.between))
        return costs

    def _nearest(self, rows: Sequence[Sequence[int]]) -> Floats:
        """Cost of each placement (columns) from the nearest of each row's placements."""
        if all(len(row) == 1 for row in rows):
            return self.between[[row[0] for row in rows]]
        of, some = _padded(rows)
        costs: Floats = np.minimum.reduce(self.between[of], axis=1)
        return costs if some.all() else np.where(some[:, None], costs, inf)

    def _enter_trees(self, graph: FactorGraph) -> None:
        last = max([u.region for u in self.uses])
        made = [end for end in self.made if end.region <= last]
        roots = {region: self._root(region, made) for region in dict.fromkeys([u.region for u in self.uses])}
        match self.uses:
            case [u]:
                table = self._single_use(roots[u.region], 0)
            case [_, _]:
                table = self._pair(roots, 0, 1)
            case _:
                table = self._triple(roots)
        self._expand(graph, table, _axes(made), _axes(self.uses))

    def _single_use(self, root: Floats, n: int) -> Floats:
        """Cost of each class of a use (columns) from each row of `root`; 0 for classes that need nothing."""
        costs = _min_plus(root, self.reach[n])
        if not all(self.uses[n].classes):
            costs[:, self._needs_nothing(n)] = 0
        return costs

    def _needs_nothing(self, n: int) -> NDArray[np.bool_]:
        """Mask of the classes of a use that need nothing."""
        return np.array([not wanted for wanted in self.uses[n].classes])

    def _pair(self, roots: dict[int, Floats], a: int, b: int) -> Floats:
        u, v = self.uses[a], self.uses[b]
        alone = self._single_use(roots[u.region], a)[:, :, None], self._single_use(roots[v.region], b)[:, None]
        best = np.minimum(alone[0] + alone[1], _min_plus(roots[self._first(u, v)], self._joint(a, b)))
        if u.region < v.region:
            return np.minimum(best, alone[0] + self._inherited(a, b))
        if v.region < u.region:
            return np.minimum(best, alone[1] + self._inherited(b, a).T)
        return best

    def _inherited(self, a: int, b: int) -> Floats:
        """Cost of a later use from the placements of an earlier one, if these are kept."""
        return _min_plus(self._from_lasting(self.uses[a].classes), self.reach[b])

    @staticmethod
    def _first(*uses: End) -> int:
        return min([u.region for u in uses])

    def _joint(self, a: int, b: int) -> Floats:
        """Cost of two uses together, from each placement as their shared copy."""
        costs = self.reach[a][:, :, None] + self.reach[b][:, None, :]
        if self.uses[a].region != self.uses[b].region:
            costs = np.where(self.light[:, None, None], costs, inf)
        return costs

    def _triple(self, roots: dict[int, Floats]) -> Floats:
        us = self.uses
        alone = [self._single_use(roots[u.region], n) for n, u in enumerate(us)]
        shape = [(slice(None), *(slice(None) if n == k else None for n in range(3))) for k in range(3)]
        best = alone[0][shape[0]] + alone[1][shape[1]] + alone[2][shape[2]]
        junction = self.reach[0][shape[0]] + self.reach[1][shape[1]] + self.reach[2][shape[2]]
        for a, b, c in ((0, 1, 2), (0, 2, 1), (1, 2, 0)):
            joint = self._joint(a, b)
            root = _min_plus(roots[self._first(us[a], us[b])], joint)
            best = np.minimum(best, np.expand_dims(root, c + 1) + alone[c][shape[c]])
            inner = _min_plus(self.between, joint)
            junction = np.minimum(junction, np.expand_dims(inner, c + 1) + self.reach[c][shape[c]])
        if len({u.region for u in us}) > 1:
            junction = np.where(self.light[:, None, None, None], junction, inf)
        return np.minimum(best, _min_plus(roots[self._first(*us)], junction))

    # ------------------------------------------------------------ hubs

    def _enter_hubs(self, graph: FactorGraph) -> None:
        regions = sorted({u.region for u in self.uses})
        early = [end for end in self.made if end.region <= regions[0]]
        before, root = _axes(early), self._root(regions[0], early)
        for region in regions:
            mine = [n for n, u in enumerate(self.uses) if u.region == region]
            count = len(root)
            again = [end for end in self.made if regions[0] < end.region <= region]
            if again:
                root = np.concatenate([root, self._root(region, again)])
            if len(mine) == 1 and region == regions[-1]:
                self._link(graph, self._single_use(root, mine[0]), count, before, _axes(again), self.uses[mine[0]].axis)
                continue
            sets, link, serve = self._hub_sets(root, mine, region)
            own: Axis = (graph.add_variable(len(sets)), np.arange(len(sets)))
            self._link(graph, link, count, before, _axes(again), own)
            for n, table in zip(mine, serve, strict=True):
                self._expand(graph, table, [own], [self.uses[n].axis])
            before, root = [own], self._from_lasting(sets)

    def _link(
        self, graph: FactorGraph, costs: Floats, count: int, before: Sequence[Axis], again: Sequence[Axis], end: Axis
    ) -> None:
        """Add the costs of copies that start from the previous region's (first `count` rows) or a recomputation."""
        if len(costs) == count:
            self._expand(graph, costs, before, [end])
            return
        source: Axis = (graph.add_variable(2), np.arange(2))
        first, second = costs[:count], costs[count:]
        self._expand(graph, np.stack([first, np.zeros_like(first)], axis=1), before, [source, end])
        self._expand(graph, np.stack([np.zeros_like(second), second], axis=1), again, [source, end])

    def _hub_sets(self, root: Floats, mine: Sequence[int], region: int) -> tuple[list[Ints], Floats, list[Floats]]:
        """Candidate sets of copies shared in a region, their cost from each row of `root`, and the cost of each use."""
        wanted = {s for n in mine for c in self.uses[n].classes for s in c}
        lasting = {s for end in self.made for row in end.classes for s in row if self.light[s]}
        following = [u for u in self.uses if u.region > region]
        later = {s for u in following for c in u.classes for s in c if self.light[s]}
        some = {*wanted, *lasting, *later, *(self.slices if following else ()), self.number(self.home)}
        candidates = np.array(sorted(s for s in some if np.isfinite(root[:, s]).any()))
        free = (self.between == 0) | (self.between == 0).T
        sets: list[Ints] = []
        links: list[Floats] = []
        tables: list[list[Floats]] = [[] for _ in mine]
        kept_copies: list[Floats] = []
        idle = [self._needs_nothing(n) for n in mine]
        if all(none.any() for none in idle):  # possibly no use needs anything
            sets.append(np.array((), np.intp))
            links.append(np.zeros((len(root), 1)))
            tables = [[np.where(none, 0, inf)[None]] for none in idle]
            kept_copies += [self._from_lasting(sets)] if following else []
        for count in range(1, HUBS + 1):
            chosen = np.array(list(combinations(candidates, count)), np.intp).reshape(-1, count)
            for a, b in combinations(range(count), 2):
                chosen = chosen[~free[chosen[:, a], chosen[:, b]]]
            if len(sets) + len(chosen) > MOST_HUB_SETS and count > 1:
                break
            sets += list(chosen)
            links.append(self._together(root, chosen))
            for n, parts in zip(mine, tables, strict=True):
                parts.append(np.minimum.reduce(self.reach[n][chosen], axis=1))
            if following:
                kept_copies.append(self._from_lasting(chosen))
        link = np.concatenate(links, axis=1)
        serve = [np.concatenate(parts) for parts in tables]
        # Sets that are dominated in cost and in every use are dropped.
        later_tables = [np.concatenate(kept_copies)] if following else []
        alive = _undominated(np.concatenate([link.T, *serve, *later_tables], axis=1))
        return [sets[n] for n in alive], link[:, alive], [parts[alive] for parts in serve]

    def _together(self, root: Floats, sets: Ints) -> Floats:
        """Cost of reaching all placements of each set (columns), each from the nearest copy, from each row of `root`.

        The cheapest order for sets of up to three, otherwise the given one.
        """
        count = sets.shape[1]
        costs = []
        for order in permutations(range(count)) if count <= 3 else [range(count)]:
            columns = sets.T[list(order)]
            total = root[:, columns[0]]
            for n in range(1, count):
                nearest = np.minimum.reduce(self.between[columns[:n], columns[n]], axis=0)
                total = total + np.minimum(root[:, columns[n]], nearest)
            costs.append(total)
        return costs[0] if len(costs) == 1 else np.minimum.reduce(costs)

    def _from_lasting(self, sets: Sequence[Sequence[int]] | Sequence[Ints] | Ints) -> Floats:
        """Cost of each placement from each set of copies, as far as later regions may use it or free slices of it."""
        of, some = _padded(sets)
        free = (self.between[of] == 0).any(axis=1) & self.light & some[:, None]
        costs: Floats = np.where(free[:, :, None], self.between, inf).min(axis=1)
        return costs

    # ------------------------------------------------------------ from classes to values

    @staticmethod
    def _expand(graph: FactorGraph, table: Floats, first: Sequence[Axis], others: Sequence[Axis]) -> None:
        """Expand a table over classes to the values of variables; several axes may belong to one variable.

        The first axis of the table has the combinations of the classes of `first`.
        """
        axes = (*first, *others)
        if len(first) > 1:
            table = table.reshape(*[1 + int(of.max()) for _, of in first], *table.shape[1:])
        variables = list(dict.fromkeys(v for v, _ in axes if v is not None))
        index = []
        for v, of in axes:
            shape = [1] * len(variables)
            if v is not None:
                shape[variables.index(v)] = len(of)
            index.append(of.reshape(shape))
        graph.add(variables, table[tuple(index)])


def _axes(ends: Sequence[End]) -> Sequence[Axis]:
    return [end.axis for end in ends]


def _padded(rows: Sequence[Sequence[int]] | Sequence[Ints] | Ints) -> tuple[Ints, NDArray[np.bool_]]:
    """Rows of placements as an array, padded with their first element, and a mask of non-empty rows."""
    if isinstance(rows, np.ndarray):
        return rows, np.ones(len(rows), np.bool_)
    width = max([1, *map(len, rows)])
    full = [[*row, *[row[0] if len(row) else 0] * (width - len(row))] for row in rows]
    return np.array(full, np.intp).reshape(-1, width), np.array([len(row) > 0 for row in rows], np.bool_)


def _min_plus(first: Floats, rest: Floats) -> Floats:
    """Min-plus matrix product: the least sum over the placements in between."""
    flat = rest.reshape(len(rest), -1)
    costs: Floats = np.minimum.reduce(first[:, :, None] + flat, axis=1)
    return costs.reshape(len(first), *rest.shape[1:])


def _undominated(rows: Floats) -> Ints:
    """Rows that no other row dominates; of equal rows the first."""
    order = np.argsort(np.add.reduce(np.minimum(rows, HUGE), axis=1), kind="stable")  # dominating rows come first
    undominated = order[:0]
    for first in range(0, len(order), ROWS_AT_ONCE):
        some = order[first : first + ROWS_AT_ONCE]
        if first:
            above = np.logical_and.reduce(rows[undominated] <= rows[some][:, None], axis=2)
            some = some[~np.logical_or.reduce(above, axis=1)]
        below = np.triu(np.logical_and.reduce(rows[some][:, None] <= rows[some], axis=2), 1)
        undominated = np.concatenate([undominated, some[~np.logical_or.reduce(below, axis=0)]])
    return np.sort(undominated)
