"""The copies of one tensor as tables of a factor graph: its producer, its consumers, and reshards between.

A tensor is produced under one or several *placements* (shardings, pending sums included) and consumed under others. One
copy serves every use that can be reached from it, and a reshard may start from any copy, so the joint cost is that of a
cheapest tree. In each region (forward, backward or update) a set of up to three copies is shared, its *hubs*, one of
which may start from another; a use pays for a reshard from the nearest hub. Up to three uses need no more hubs than
that. A copy that takes more memory than the assigned sharding serves one region only; later ones start from the small
hubs, and from free slices of large ones. The set is a variable of its own, unless one or two uses are left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import chain, combinations, islice, permutations, product
from math import inf, prod
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from layouts import Sharding
from meshlib.lowering.balance import Balance
from meshlib.lowering.bindings import stored
from meshlib.lowering.copy_trees import CopyTree, Spot, grown
from meshlib.lowering.cost_tables import Floats, Ints
from meshlib.lowering.distances import distances
from meshlib.lowering.elimination import FactorGraph
from meshlib.lowering.values import ClassRows

HUBS = 3  # maximum number of shared copies per region
MOST_HUB_SETS = 400
MOST_SUMS = 1 << 14  # entries of an array of sums

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
    variables: Sequence[int] = ()  # of its tables, once entered: the producer's and users', then those of hubs
    numbers: dict[str, int] = field(default_factory=dict)  # of the regions
    tables: CopyTables | None = None

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

    def enter(self, graph: FactorGraph, known: dict[object, CopyTables]) -> None:
        """Add the tensor's tables to a factor graph; `known` caches those of alike tensors."""
        if not self.uses:
            return
        place: dict[int | None, int] = {}
        for v in (*self.producers, *[v for v, _, _ in self.uses]):
            if v is not None and v not in place:
                place[v] = len(place)
        if not place and self._is_simple():
            return
        order = self.numbers
        numbers = tuple([order.setdefault(r, len(order)) for r, _ in zip(self.regions, self.made, strict=False)])
        uses = [(place.get(v), order.setdefault(r, len(order)), rows) for v, r, rows in self.uses]
        producers = tuple([place.get(v) for v in self.producers])
        key = (self.home, self.itemsize, self.regather, producers, self.made, numbers, *uses)
        tables = self.tables = known.get(key)
        if tables is None:
            made = list(zip(producers, numbers, self.made, strict=True))
            tables = self.tables = known[key] = CopyTables(self, made, uses, len(place))
        own = tables.graph
        added = [graph.add_variable(size) for size in own.sizes[len(place) :]]
        self.variables = variables = [*[v for v in place if v is not None], *added]
        for scope, table in own.tables:
            graph.add([variables[v] for v in scope], table)

    def _is_simple(self) -> bool:
        """True if nothing is to be chosen: one use in the producer's region, or all uses at home."""
        used = {(region, rows) for _, region, rows in self.uses}
        if all(rows.classes == ((self.home,),) for _, rows in used):
            return self.home in self.made[0].classes[0]
        return len(used) == 1 and self.uses[0][1] == self.regions[0]

    def tree(self, values: Sequence[int]) -> CopyTree:
        """From which copy each copy is made, under values of all variables of the factor graph."""
        if self.tables is None:
            return CopyTree({})
        regions, placements = [*self.numbers], [*self.tables.placements]
        parents = self.tables.tree(tuple([values[v] for v in self.variables]))
        return CopyTree(
            {
                (regions[r], placements[s]): (regions[before], placements[source])
                for (r, s), (before, source) in parents.items()
            }
        )


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

    @cached_property
    def first(self) -> list[int]:
        """The first placement of each class; 0 if it has none."""
        return [wanted[0] if wanted else 0 for wanted in self.classes]

    @cached_property
    def most(self) -> int:
        """The largest number of placements of a class."""
        return max(map(len, self.classes))


class _Hubs(NamedTuple):
    """Costs of the sets of copies that a region may share."""

    sets: Sequence[Ints]  # the sets, by size
    link: Floats  # of reaching a set (columns) from each row of copies
    serve: Sequence[Floats]  # of each class of each use (columns) from a set (rows)
    lasting: Floats  # of each placement in later regions (columns) from a set (rows)


class CopyTables:
    """The tables of a tensor, over its own numbering of variables and placements."""

    def __init__(
        self,
        copies: Copies,
        made: Sequence[tuple[int | None, int, ClassRows]],
        uses: Sequence[tuple[int | None, int, ClassRows]],
        count: int,
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
        self.graph = FactorGraph([0] * count)
        self.hubs: list[tuple[int, Sequence[Ints]]] = []  # of each further variable: its region, the sets by size
        self._trees: dict[Sequence[int], Mapping[Spot, Spot]] = {}
        self._enter()

    def number(self, s: Sharding) -> int:
        """Number of a placement."""
        return self.placements.setdefault(s, len(self.placements))

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

    def _nearest(self, rows: Sequence[list[int]]) -> Floats:
        """Cost of each placement (columns) from the nearest of each row's placements."""
        most = max(map(len, rows))
        if not all(rows):  # nothing is nearest to no placement
            return np.array([np.min(self.between[list(row)], axis=0, initial=inf) for row in rows])
        near = self.between[[row + row[:1] * (most - len(row)) for row in rows]]
        return near[:, 0] if most == 1 else np.minimum.reduce(near, axis=1)

    def _costs_of(self, use: End, root: Floats) -> Floats:
        """Cost of each class of a use (columns) from each row of `root`: of its placements, one from another or not."""
        costs = root[:, use.first]
        if not all(use.classes):
            costs[:, [not wanted for wanted in use.classes]] = 0
        for size in {len(wanted) for wanted in use.classes} - {0, 1} if use.most > 1 else ():
            some = [n for n, wanted in enumerate(use.classes) if len(wanted) == size]
            sets = np.array([use.classes[n] for n in some])
            shared = _min_plus(root, self._together(self.between, sets))  # from one copy more
            costs[:, some] = np.minimum(self._together(root, sets), shared)
        return costs

    # ------------------------------------------------------------ regions

    def _enter(self) -> None:
        graph = self.graph
        regions = sorted({u.region for u in self.uses})
        early = [end for end in self.made if end.region <= regions[0]]
        before, root = _axes(early), self._root(regions[0], early)
        for region in regions:
            mine, is_last = [u for u in self.uses if u.region == region], region == regions[-1]
            again = [end for end in self.made if regions[0] < end.region <= region]
            if again:
                root = np.minimum(root[:, None], self._root(region, again)).reshape(-1, root.shape[1])
                before = [*before, *_axes(again)]
            joint = self._joined(mine, before) if is_last else None
            if joint is not None:
                costs = self._costs_of(joint, root).reshape(len(root), *[len(use.classes) for use in mine])
                self._expand(graph, costs, before, _axes(mine))
                continue
            hubs = self._hubs(root, mine, [u for u in self.uses if u.region > region])
            self.hubs.append((region, hubs.sets))
            own: Axis = (graph.add_variable(len(hubs.lasting)), np.arange(len(hubs.lasting)))
            self._expand(graph, hubs.link, before, [own])
            for table, use in zip(hubs.serve, mine, strict=True):
                self._expand(graph, table, [own], [use.axis])
            before, root = [own], hubs.lasting

    @staticmethod
    def _joined(mine: Sequence[End], before: Sequence[Axis]) -> End | None:
        """The uses of a region as one use, if there is one, or two and their table is no larger than those of hubs."""
        if len(mine) == 1:
            return mine[0]
        if len(mine) > 2 or any(use.most > 1 for use in mine):
            return None
        sizes = [len(of) for _, of in (*before, *_axes(mine))]
        count = len({s for use in mine for row in use.classes for s in row})
        if prod(sizes) > count * (count + 1) // 2 * sum(sizes):
            return None
        classes = [tuple(sorted({*one, *other})) for one, other in product(*[use.classes for use in mine])]
        return End(None, mine[0].region, classes, np.arange(len(classes)))

    # ------------------------------------------------------------ hubs

    def _hubs(self, root: Floats, mine: Sequence[End], following: Sequence[End]) -> _Hubs:
        """The sets of copies that the uses `mine` of a region may share; `following` are uses of later ones."""
        most = min(HUBS, sum([use.most for use in (*mine, *following)]))
        candidates = self._candidates(root, mine, following)
        free = (self.between == 0)[candidates[:, None], candidates]
        sets = [candidates[some] for some in _sets(free.tobytes(), len(candidates), most)]
        if all(not all(use.classes) for use in mine):  # possibly no use needs anything
            sets.insert(0, np.zeros((1, 0), np.intp))
        # Several producers have many combinations, most of which are alike.
        rows, of = np.unique(root, axis=0, return_inverse=True) if len(self.made) > 1 else (root, np.arange(len(root)))
        link = np.concatenate([self._together(rows, some) for some in sets], axis=1)[of.ravel()]
        near = np.concatenate([np.min(self.between[some], axis=1, initial=inf) for some in sets])
        serve = [self._costs_of(use, near) for use in mine]
        lasting = np.zeros((len(near), 0))
        if following:
            lasting = np.concatenate([self._from_lasting(some) for some in sets])
        return _Hubs(sets, link, serve, lasting)

    def _candidates(self, root: Floats, mine: Sequence[End], following: Sequence[End]) -> Ints:
        """The placements that a shared copy may have."""
        wanted = {s for u in mine for c in u.classes for s in c}
        lasting = {s for end in self.made for row in end.classes for s in row if self.light[s]}
        later = {s for u in following for c in u.classes for s in c}
        some = {*wanted, *lasting, *later, *(self.slices if following else ()), self.number(self.home)}
        candidates = np.array(sorted(some))
        return candidates[np.isfinite(root[:, candidates]).any(axis=0)]

    def _together(self, root: Floats, sets: Ints) -> Floats:
        """Cost of reaching all placements of each set (columns), each from the nearest copy, from each row of `root`.

        The cheapest order for sets of up to three, otherwise the given one.
        """
        count = sets.shape[1]
        if not count:
            return np.zeros((len(root), len(sets)))
        columns = sets.T[_orders(count)]  # [place in the order, order, set]
        total = root[:, columns[0]]
        for n in range(1, count):
            nearest = np.minimum.reduce(self.between[columns[:n], columns[n]], axis=0)
            total = total + np.minimum(root[:, columns[n]], nearest)
        costs: Floats = np.minimum.reduce(total, axis=1)
        return costs

    def _from_lasting(self, sets: Ints) -> Floats:
        """Cost of each placement from each set of copies, as far as later regions may use it or free slices of it."""
        free = (self.between[sets] == 0).any(axis=1) & self.light
        costs: Floats = np.where(free[:, :, None], self.between, inf).min(axis=1)
        return costs

    # ------------------------------------------------------------ the copies of a solution

    def tree(self, values: tuple[int, ...]) -> Mapping[Spot, Spot]:
        """From which copy each copy is made, under values of the variables."""
        if values not in self._trees:

            def placements(end: End) -> Sequence[int]:
                return end.classes[0 if end.variable is None else end.of[values[end.variable]]]

            sets = {
                region: next(islice(chain.from_iterable(sets), value, None)).tolist()
                for (region, sets), value in zip(self.hubs, values[len(values) - len(self.hubs) :], strict=True)
            }
            made = [(end.region, s) for end in self.made for s in placements(end)]
            needs = [(use.region, placements(use)) for use in self.uses if use.region in sets]
            joint = {s: None for use in self.uses if use.region not in sets for s in placements(use)}
            needs.append((max([use.region for use in self.uses]), tuple(joint)))
            self._trees[values] = grown(self.between, self.light, made, sets, needs)
        return self._trees[values]

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


@lru_cache(maxsize=1 << 10)
def _sets(free: bytes, number: int, most: int) -> Sequence[Ints]:
    """Sets of up to `most` of a number of candidates, by size, of which none is a free slice of another.

    Args:
      free: whether each candidate (rows) can be sliced to each (columns), as an array's bytes.
    """
    slices = np.frombuffer(free, np.bool_).reshape(number, number)
    related = slices | slices.T
    sets: list[Ints] = []
    for count in range(1, most + 1):
        chosen = np.array(list(combinations(range(number), count)), np.intp).reshape(-1, count)
        for a, b in combinations(range(count), 2):
            chosen = chosen[~related[chosen[:, a], chosen[:, b]]]
        if sum(map(len, sets)) + len(chosen) > MOST_HUB_SETS and count > 1:
            break
        sets.append(chosen)
    return sets


@lru_cache
def _orders(count: int) -> Ints:
    """The orders (columns) of a set's members by place (rows): all of up to three members, otherwise the given one."""
    return np.array(list(permutations(range(count))) if count <= 3 else [tuple(range(count))]).T


def _axes(ends: Sequence[End]) -> Sequence[Axis]:
    return [end.axis for end in ends]


def _min_plus(first: Floats, rest: Floats) -> Floats:
    """Min-plus matrix product: the least sum over the placements in between."""
    flat = rest.reshape(len(rest), -1)
    costs = np.full((len(first), flat.shape[1]), inf)
    step = max(1, MOST_SUMS // max(1, costs.size))  # placements at a time: larger arrays leave the processor's caches
    for n in range(0, len(rest), step):
        np.minimum(costs, np.minimum.reduce(first[:, n : n + step, None] + flat[n : n + step], axis=1), out=costs)
    return costs.reshape(len(first), *rest.shape[1:])
