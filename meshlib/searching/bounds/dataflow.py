"""Dependencies between products, and the form in which each needs its operands.

A *node* is a product or attention; or a value whose sharding the layout fixes (a variable, an input, a loop carry); or
any other operation, which accepts its operands in any form. *Edges* connect nodes: chains of values that
element-wise operations, casts and views compute from one another. Over one mesh axis a value is replicated, split along
a dim, or a pending sum. Where a node's result and the next node's requirement differ in form, one of the values on the
edge is sent; which one is open, so the smallest counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple, TypeAlias

from layouts import Shape
from meshlib.program.instructions import Value
from meshlib.searching.bounds.products import Contraction, ProductKernel
from meshlib.searching.renamed_dims import Names

# Bytes of the smallest value on an edge, for each set of dims along which its values can be split.
Bytes: TypeAlias = Mapping[Names | None, float]


@dataclass(frozen=True)
class Split:
    """A split of a product, or of attention, over an axis.

    `reached`: the dims whose rules may bring an axis to it, None if any may.
    `operands`: the dim split in each operand, None where the operand must be whole; `output`: that of
    the result, None where a pending sum results. `free`: its requirements are unknown; `of_slots`: whether rules for
    slots may bring an axis to it, too.
    """

    reached: Names | None
    size: int
    operands: tuple[str | None, ...]
    output: str | None
    free: bool = False
    of_slots: bool = True


@dataclass(frozen=True)
class Placed:
    """A value whose sharding the layout fixes."""

    shape: Shape
    scope: str


@dataclass(frozen=True)
class HbmUse:
    """An operand or result in HBM: one of some values. `early`: it may be present when the program starts."""

    sizes: Bytes
    early: bool


@dataclass(frozen=True, eq=False)
class Node:
    """A producer of values. `placed`: the layout fixes its sharding; `splits`: one for each possible split; neither:
    its result may have any form.

    `product`, `attention`: its computation; `reads`: operands in HBM; `beside`: what else its kernel reads; `held`:
    operands that are weights, with where the layout places them; `loop`: the body of a loop with `trips` trips.
    """

    placed: Placed | None = None
    splits: tuple[Split, ...] | None = None
    product: Contraction | None = None
    reads: Sequence[HbmUse] = ()
    beside: Sequence[HbmUse] = ()
    held: Sequence[tuple[int, Placed]] = ()
    attention: ProductKernel | None = None
    loop: Flow | None = None
    trips: float = 1
    smaller: bool = False  # whether the product may be computed from smaller factors of its operands, with less work
    laid: bool = False  # whether its sizes depend on the layout, so that any axis may split it
    elements_per_flop: float = float("inf")  # of its operands and results

    @property
    def is_apart(self) -> bool:
        """True if no other product can fuse it, so that values between both pass through HBM."""
        return any(x is not None for x in (self.placed, self.product, self.attention, self.loop))


@dataclass(frozen=True, eq=False)
class Edge:
    """An edge from a node to an operand of another one, or to its `home`, the sharding that the layout fixes.

    `value`: the operand; `values`: all on the edge. `linear`: whether a pending sum may pass; `taken`: whether the
    target accepts one, too; `summed`: the values that may be a pending sum of the source; `of_sums`: whether only sums
    count. `beside`: whether the values depend on no product but the source, and no product on them but the target: a
    collective is issued before a product that runs beside it, unless the target is the first of all or the source the
    last (`meshlib.lowering.ordering`).
    """

    source: int
    target: int
    operand: int
    sizes: Bytes
    linear: bool
    taken: bool = True
    home: Placed | None = None
    values: frozenset[Value] = frozenset()
    beside: bool = False
    summed: frozenset[Value] = frozenset()
    of_sums: bool = False
    value: Value | None = None

    @property
    def least_bytes(self) -> float:
        """Bytes of the smallest value on it, on one device."""
        return min(self.sizes.values(), default=0.0)


class ValueUse(NamedTuple):
    """A use of a value: by an operand of a node, or at a `home`; by an unknown operation if there is neither. A result
    of the program has a home, but no node."""

    node: int | None = None
    operand: int = 0
    home: Placed | None = None


@dataclass(frozen=True, eq=False)
class Flow:
    """A program or loop body as nodes in order, and the edges into each.

    `full`: values, those in loops included, that no product of smaller values can replace. `uses`: the uses of each
    value; `derived`: values that element-wise operations compute from it, and whether these are linear in it.
    """

    nodes: Sequence[Node]
    edges: Sequence[Sequence[Edge]]  # for each node, the edges that end there
    full: frozenset[Value] = frozenset()
    uses: Mapping[Value, Sequence[ValueUse]] = field(default_factory=dict)
    derived: Mapping[Value, Sequence[tuple[Value, bool]]] = field(default_factory=dict)
    _beside: dict[tuple[int, int], Sequence[int]] = field(default_factory=dict)
    _along: dict[tuple[Edge, ...], Sequence[ValueUse]] = field(default_factory=dict)

    @cached_property
    def apart(self) -> Sequence[Sequence[Edge]]:
        """Edges in groups of one source each, so that no collective serves edges of two groups.

        For each operand, of the most bytes first, those of the source whose values fewest other operands depend on. Of
        others the pending sums, if they are reduced before the values that are shared.
        """
        edges_of: dict[tuple[Value | None, int], list[Edge]] = {}  # by operand and source
        users: Counter[Value] = Counter()  # number of operands that depend on a value
        for edge in self._sending:
            edges_of.setdefault((edge.value, edge.source), []).append(edge)
        for edges in edges_of.values():
            users.update(edges[0].values)

        def rank(key: tuple[Value | None, int]) -> tuple[float, int, int]:
            edge = edges_of[key][0]
            return -edge.least_bytes, max(users[v] for v in edge.values), -edge.source

        groups: list[list[Edge]] = []
        group_of: dict[Value, list[Edge]] = {}
        left: list[list[Edge]] = []
        for key in sorted(edges_of, key=rank):
            edges = edges_of[key]
            if group_of.keys().isdisjoint(edges[0].values):
                groups.append(edges)
                group_of.update(dict.fromkeys(edges[0].values, edges))
            else:
                left.append(edges)
        left += [[replace(e, values=e.summed, of_sums=True, beside=False) for e in edges] for edges in left]
        for edges in left:
            met = {id(group_of[v]): group_of[v] for v in edges[0].values if v in group_of}
            group = next(iter(met.values()), None)
            if group is None:
                group = []
                groups.append(group)
            if len(met) <= 1 and (not group or group[0].source == edges[0].source):
                group += edges
                group_of.update(dict.fromkeys(edges[0].values, group))
        return groups

    @property
    def _sending(self) -> Iterator[Edge]:
        """The edges on which a collective may be needed."""
        known = [n for n, node in enumerate(self.nodes) if node.splits is not None or node.placed is not None]
        for target in known:
            for edge in self.edges[target]:
                placed = self.nodes[edge.source].placed
                if edge.values and edge.source in known and (placed is None or placed != edge.home):
                    yield edge

    @cached_property
    def firsts(self) -> frozenset[int]:
        """Products and attention that no other product or loop must precede."""
        return frozenset(
            n for n, node in enumerate(self.nodes)
            if node.splits is not None and not any(self._is_large(m) for m in self._ancestors[n])
        )  # fmt: skip

    @cached_property
    def lasts(self) -> frozenset[int]:
        """Products that no other product or loop must follow."""
        followed = {m for n in range(len(self.nodes)) if self._is_large(n) for m in self._ancestors[n]}
        return frozenset(n for n, node in enumerate(self.nodes) if node.product is not None and n not in followed)

    @cached_property
    def several(self) -> frozenset[int]:
        """Nodes whose results several products may read."""
        counts = Counter({edge.source: 0 for edges in self.edges for edge in edges})
        for node, edges in zip(self.nodes, self.edges, strict=True):
            counts.update({edge.source for edge in edges} if node.product is not None else ())
        return frozenset(n for n, count in counts.items() if count > 1)

    @cached_property
    def waited(self) -> Mapping[int | None, Sequence[Edge]]:
        """The edges on which collectives may be waited for at the same time: those into each node, or to all homes."""
        waited: dict[int | None, list[Edge]] = {}
        for edge in (edge for edges in self.apart for edge in edges if not edge.beside):
            waited.setdefault(None if self.nodes[edge.target].placed is not None else edge.target, []).append(edge)
        return waited

    def _is_large(self, number: int) -> bool:
        return self.nodes[number].product is not None or self.nodes[number].loop is not None

    def readers(self, edges: Sequence[Edge]) -> Sequence[Edge]:
        """All edges with values that are on these edges, too."""
        values = frozenset().union(*(edge.values for edge in edges))
        return [edge for into in self.edges for edge in into if not edge.values.isdisjoint(values)]

    def computed_from(self, values: Iterable[Value], linear: bool = False) -> set[Value]:
        """These values, and what element-wise operations compute from them; if `linear`, those linear in them alone."""
        left = [*values]
        seen = set(left)
        while left:
            for y, is_linear in self.derived.get(left.pop(), ()):
                if y not in seen and (is_linear or not linear):
                    seen.add(y)
                    left.append(y)
        return seen

    def uses_along(self, edges: Sequence[Edge]) -> Sequence[ValueUse]:
        """All uses of the values on some edges, and of what is computed from them."""
        key = tuple(edges)
        if key not in self._along:
            self._along[key] = self.uses_of(self.computed_from(v for edge in edges for v in edge.values))
        return self._along[key]

    def ends(self, edges: Sequence[Edge]) -> bool:
        """True if these edges from a node lead to homes, and no product, attention or loop follows it; all attention
        comes before it, or before a product or loop."""
        source, large = edges[0].source, [n for n in range(len(self.nodes)) if self._is_large(n)]
        before = self._ancestors[source].union(*(self._ancestors[n] for n in large))
        attention = {n for n, node in enumerate(self.nodes) if node.attention is not None and n != source}
        return (
            all(edge.home is not None for edge in edges)
            and not any(source in self._ancestors[n] for n in (*large, *attention))
            and attention <= before
        )

    def is_for_homes(self, edges: Sequence[Edge]) -> bool:
        """True if nothing but homes needs the values on these edges, and no product can take pieces of them."""
        return all(use.home is not None for use in self.uses_along(edges))

    def uses_of(self, values: Iterable[Value]) -> Sequence[ValueUse]:
        """All uses of some values."""
        return [*dict.fromkeys(use for v in values for use in self.uses.get(v, ()))]

    @property
    def products(self) -> Iterator[tuple[Node, Contraction, Sequence[HbmUse]]]:
        """The nodes of all products, those in loops included, with what their kernels move besides operands."""
        for node, written in zip(self.nodes, self.written, strict=True):
            if node.loop is not None:
                yield from node.loop.products
            elif node.product is not None:
                yield node, node.product, [*written, *node.beside]

    @cached_property
    def written(self) -> Sequence[Sequence[HbmUse]]:
        """For each node, the result that it writes for other kernels or for its home: the largest one."""
        largest_of_source: dict[int, Edge] = {}
        for edge in (edge for edges in self.edges for edge in edges if edge.sizes and self.nodes[edge.target].is_apart):
            if edge.source not in largest_of_source or edge.least_bytes > largest_of_source[edge.source].least_bytes:
                largest_of_source[edge.source] = edge
        return [
            [HbmUse(largest_of_source[n].sizes, False)] if n in largest_of_source else []
            for n in range(len(self.nodes))
        ]

    def attention_beside(self, edge: Edge) -> Sequence[int]:
        """Attention that may run during a collective on an edge between products or attention: all others come before
        or after both."""
        ends = edge.source, edge.target
        if any(self.nodes[n].splits is None for n in ends):
            return ()
        if ends not in self._beside:
            self._beside[ends] = [
                n for n, node in enumerate(self.nodes)
                if node.attention is not None and n not in ends
                and not (n in self._ancestors[edge.source] or edge.target in self._ancestors[n])
            ]  # fmt: skip
        return self._beside[ends]

    @cached_property
    def _ancestors(self) -> Sequence[frozenset[int]]:
        """The ancestors of each node."""
        ancestors: list[frozenset[int]] = []
        for edges in self.edges:
            ancestors.append(frozenset().union(*(ancestors[edge.source] | {edge.source} for edge in edges)))
        return ancestors
