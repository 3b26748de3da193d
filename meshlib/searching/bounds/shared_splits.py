"""The splits of many candidates at each node of a dataflow, as arrays: times, forms, and collectives between nodes.

All candidates have the same number of axes. The first dim of an array is that of candidates; options of a node are the
splits that any candidate may have over any axis, and none (`node_splits`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import product
from math import prod
from typing import Any, TypeAlias

import numpy as np

from meshlib.core.compiler import Compiler
from meshlib.estimation.time.physics import Physics
from meshlib.searching.bounds.collectives import GATHER, REDUCE, SCATTER, Machine, wire_seconds
from meshlib.searching.bounds.dataflow import Edge, Flow, Node, Placed, Split
from meshlib.searching.bounds.node_splits import ANY, FREE, KINDS, SUM, WHOLE, NodeSplits, Options, ProductTraffic
from meshlib.searching.renamed_dims import Names, Passages
from meshlib.searching.space import Candidate

Floats: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]
Ints: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]
Bools: TypeAlias = np.ndarray[Any, np.dtype[np.bool_]]
Usable: TypeAlias = Mapping[int, Sequence[Bools]]  # for products and each axis: which [candidate, option] may be chosen
NOT_SPLIT = (WHOLE, SUM, ANY, FREE)
MOST_MOVES = 32  # bytes moved per element of operands and results in place of duplicated work, at most
GATHERS, SCATTERS, REDUCES = KINDS.index(GATHER), KINDS.index(SCATTER), KINDS.index(REDUCE)
SUMS = SCATTERS, REDUCES


@dataclass(eq=False)
class Batch:
    """Some candidates with the same program, chip and number of axes of more than one device.

    `shared`: cache for all candidates with the same program and chip.
    """

    candidates: Sequence[Candidate]
    passages: Passages
    physics: Physics
    compiler: Compiler
    shared: dict[object, Any] = field(default_factory=dict)
    _known: dict[object, Any] = field(default_factory=dict)

    @cached_property
    def splits(self) -> Sequence[NodeSplits]:
        """The splits of each candidate."""
        return [NodeSplits(c, self.passages, self.physics, self.compiler, self.shared) for c in self.candidates]

    @cached_property
    def count(self) -> int:
        """The number of axes."""
        return len(self.splits[0].axes)

    @cached_property
    def _machines(self) -> tuple[list[Machine], Ints]:
        """The distinct meshes on slices, and the index of each candidate's."""
        machines = [s.machine for s in self.splits]
        distinct = list(dict.fromkeys(machines))
        return distinct, np.array([distinct.index(machine) for machine in machines])

    def may_split(self, names: Names | None) -> Bools:
        """Whether [candidate, axis] may split a value along any of these dims, or along any at all."""
        key = "may split", names
        may: Bools | None = self._known.get(key)
        if may is None:
            each = [[names is None or not names.isdisjoint(dims) for _, dims, _ in s.axes] for s in self.splits]
            may = self._known[key] = np.array(each, bool).reshape(len(each), -1)
        return may

    @cached_property
    def sizes(self) -> Floats:
        """The size of [candidate, axis]."""
        return np.array([s.group for s in self.splits], float).reshape(len(self.candidates), -1)

    def by_machine(self, value: Callable[[Machine], float]) -> Floats:
        """A figure of each candidate's machine."""
        distinct, index = self._machines
        return np.array([value(machine) for machine in distinct])[index]

    def rate(self, kind: int, axes: Sequence[int]) -> Floats:
        """Seconds on the wire per byte of a collective over some axes."""
        key = "rate", kind, tuple(axes)
        rate: Floats | None = self._known.get(key)
        if rate is None:
            rate = np.zeros(len(self.candidates))
            if axes and not self.compiler.offloads(KINDS[kind], self.candidates[0].slice.chip):
                rate = self.by_machine(lambda machine: wire_seconds(machine, axes, KINDS[kind]))
            self._known[key] = rate
        return rate

    # ------------------------------------------------------------ nodes

    def options_of(self, node: Node) -> tuple[Options, Bools]:
        """The options of a node, and whether [candidate, axis, option] is possible."""
        known: tuple[Options, Bools] | None = self._known.get(node)
        if known is None:
            known = self._known[node] = self._possible(node)
        return known

    def _possible(self, node: Node) -> tuple[Options, Bools]:
        each = [[s.options(node, axis) for axis in range(self.count)] for s in self.splits]
        if node.splits is None:
            return Options.of(node, (None,)), np.ones((len(each), self.count, 1), bool)
        numbers = list(dict.fromkeys(n for own in each for o in own for n in o.numbers))
        rows = {o: [n in o.numbers for n in numbers] for own in each for o in own}
        possible = np.array([[rows[o] for o in own] for own in each])
        return Options.of(node, [None if n is None else node.splits[n] for n in numbers]), possible

    def splits_of(self, flow: Flow, number: int) -> Sequence[Split | None]:
        """The split of each option of a node."""
        return self.options_of(flow.nodes[number])[0].splits

    def seconds(self, flow: Flow, number: int) -> Floats | None:
        """Seconds of a product or attention for [candidate, option of each axis]; infinite if that is impossible."""
        node = flow.nodes[number]
        if node.attention is None and node.product is None:
            return None
        options, possible = self.options_of(node)
        distinct, index = self._machines
        own = []
        for place, (_, sizes, _) in enumerate(distinct):
            splits = self.splits[int(np.argmax(index == place))]
            traffic = partial(splits.traffic, flow, number, prod(sizes))
            own.append(self._joint_seconds(node, splits, options, sizes, traffic))
        seconds: Floats = np.array(own)[index]
        for axis in range(self.count):
            where = np.where(possible[:, axis], 0.0, np.inf)
            seconds = seconds + where.reshape([len(where), *(-1 if m == axis else 1 for m in range(self.count))])
        for axis in range(self.count) if None in options.numbers and self.is_plain(node) else ():
            seconds = self._without_duplicates(node, options, seconds, axis)
        return seconds

    def is_plain(self, node: Node) -> bool:
        """True if the splits of a node are known exactly."""
        return not (node.smaller or node.laid or any(s.free for s in node.splits or ()))

    def _without_duplicates(self, node: Node, options: Options, seconds: Floats, axis: int) -> Floats:
        """Seconds with those infinite for which an axis does the same product or attention on all its devices, though
        it could split it.

        A lowering drops such a strategy where resharding operands and result for a split one costs less than the
        duplicated work (`meshlib.lowering.strategy_costs`): for all but small ones.
        """
        assert node.splits is not None
        others = self.sizes.prod(axis=1) / self.sizes[:, axis]  # may split the work, but none of what is moved
        is_large = 1 - 1 / self.sizes[:, axis] > MOST_MOVES * node.elements_per_flop * others
        named = [[n is not None and not dims.isdisjoint(node.splits[n].operands) for n in options.numbers]
                 for dims in self.rule_dims(axis)]  # fmt: skip
        last, at = np.moveaxis(seconds, 1 + axis, -1), options.numbers.index(None)
        split = np.isfinite(last) & np.array(named).reshape([len(last), *[1] * (self.count - 1), -1])
        instead = split.any(axis=-1) | ~np.isfinite(last[..., at])
        dropped = is_large & instead.reshape(len(last), -1).all(axis=1)
        without = last.copy()
        without[dropped, ..., at] = np.inf
        return np.moveaxis(without, -1, 1 + axis)

    def rule_dims(self, axis: int) -> list[frozenset[str | None]]:
        """For each candidate, the dims for which an axis has a rule in all scopes."""
        key = "rules", axis
        dims: list[frozenset[str | None]] | None = self._known.get(key)
        if dims is None:
            dims = self._known[key] = []
            for s in self.splits:
                rules, name = s.candidate.layout.rules, s.axes[axis][0]
                scoped = {rule.dim for rule in rules if rule.scope in ("variables", "activations")}
                of_axis = (rule for rule in rules if rule.scope is None and name in rule.axes)
                dims.append(frozenset(rule.dim for rule in of_axis if rule.dim not in scoped))
        return dims

    def is_inner(self, axis: int, other: int, dim: str) -> Bools:
        """For each candidate, whether an axis splits the blocks that another one leaves of a dim, in whatever tensor:
        it comes later in the mesh, and in all rules for the dim."""
        inner = []
        for s in self.splits:
            own, before = s.axes[axis][0], s.axes[other][0]
            orders = [[*s.candidate.mesh.sizes_by_axis]]
            orders.append([name for rule in s.candidate.layout.rules if rule.dim == dim for name in rule.axes])
            inner.append(all(names.index(before) < names.index(own) for names in orders if {own, before} <= {*names}))
        return np.array(inner, bool)

    def _joint_seconds(
        self,
        node: Node,
        splits: NodeSplits,
        options: Options,
        sizes: tuple[int, ...],
        traffic: Callable[[int], ProductTraffic],
    ) -> Floats:
        """Seconds for [option of each axis]."""
        key = node, options.numbers, sizes
        seconds: Floats | None = self.shared.get(key)
        if seconds is None:
            chosen = np.array([*product(options.numbers, repeat=len(sizes))], object).reshape(-1, len(sizes))
            factors = [n for n in options.numbers if n is not None] or [0]
            parts = np.array([np.where(chosen == n, sizes, 1).prod(axis=1) for n in factors], np.int64)
            _, first, inverse = np.unique(parts, axis=1, return_index=True, return_inverse=True)
            joint = [tuple(chosen[n]) for n in first]
            unique = splits.joint_seconds(node, joint, traffic)[0]
            seconds = self.shared[key] = unique[inverse.ravel()].reshape([len(options.numbers)] * len(sizes))
        return seconds

    # ------------------------------------------------------------ edges

    def homes_of(self, placed: Placed) -> Ints:
        """The dim along which [candidate, axis] splits a placed value, counted from 1; 0: none."""
        known: Ints | None = self._known.get(placed)
        if known is None:
            names = [WHOLE, *placed.shape.names]
            homes = [[names.index(s.home(placed, axis)) for axis in range(self.count)] for s in self.splits]
            known = self._known[placed] = np.array(homes, np.int64).reshape(len(homes), -1)
        return known

    def homes(self, placed: Placed, axis: int) -> tuple[Sequence[str], Ints]:
        """The forms that a placed value may have, and the number of each candidate's over an axis."""
        return [WHOLE, *placed.shape.names], self.homes_of(placed)[:, axis]

    def results(self, flow: Flow, number: int, axis: int) -> tuple[Sequence[str], Ints]:
        """The forms that a node's result may have, and the number of the one for [candidate, option] over an axis."""
        node = flow.nodes[number]
        if node.placed is not None:
            forms, at = self.homes(node.placed, axis)
            return forms, at[:, None]
        forms = self.options_of(node)[0].results
        return forms, np.broadcast_to(np.arange(len(forms)), (len(self.candidates), len(forms)))

    def kinds(self, flow: Flow, edge: Edge, axis: int) -> Ints:
        """Collectives (as indices into KINDS) for [candidate, option of the source, option of the target]; 0 where an
        option is impossible."""
        key = edge, axis
        kinds: Ints | None = self._known.get(key)
        if kinds is None:
            source, target = flow.nodes[edge.source], flow.nodes[edge.target]
            kinds = self._kinds(flow, edge, axis)
            if source.splits is not None:
                kinds = np.where(self.options_of(source)[1][:, axis, :, None], kinds, 0)
            if target.splits is not None:
                kinds = np.where(self.options_of(target)[1][:, axis, None, :], kinds, 0)
            self._known[key] = kinds
        return kinds

    def _kinds(self, flow: Flow, edge: Edge, axis: int) -> Ints:
        kind, count, target = self.splits[0].kind, len(self.candidates), flow.nodes[edge.target]
        left, lefts = self.results(flow, edge.source, axis)
        if edge.home is not None:
            needed, homes = self.homes(edge.home, axis)
            needs = homes[:, None]
        else:
            needed = list(self.options_of(target)[0].required(edge.operand)) if target.splits is not None else [FREE]
            needs = np.broadcast_to(np.arange(len(needed)), (count, len(needed)))
        table = np.array([[kind(a, b, edge) for b in needed] for a in left], np.int64)
        return table[lefts[:, :, None], needs[:, None, :]]
