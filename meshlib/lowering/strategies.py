"""Strategies of one operation: the mesh axes that split each dim, and the pending sums that pass through.

The space is static. A mesh axis may split a dim of an operation where a rule of the layout names it for that dim of an
operand or of the result (including an optional rule that lost the axis to another dim), where an assigned sharding has
it there, or where it may split another dim from which an earlier operation derived this one by renaming or reshaping.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, combinations, product
from typing import Any, NamedTuple, TypeAlias

from layouts import Mesh, Sharding
from meshlib.core.graph import Operation, Tensor
from meshlib.core.opdef import RESIDENT, Factor, Kind, Linear, Role
from meshlib.lowering.assigned import Homes
from meshlib.lowering.simplification import Simplified
from meshlib.program.exchanges import Exchange
from meshlib.program.signature import Signature, Signatures

Axes: TypeAlias = tuple[str, ...]
AxisSet: TypeAlias = frozenset[str]
Sets: TypeAlias = tuple[AxisSet, ...]  # per dim of a tensor, or per factor of an operation, the axes that may split it
EMPTY: AxisSet = frozenset()
UNSPLIT = (*RESIDENT, Kind.LOOP, Kind.COMMIT)


@dataclass(frozen=True)
class Choice:
    """The strategy of one operation: the axes of each factor, the operands' shardings, the result's."""

    axes: Mapping[str, Axes]  # factor -> axes, major first
    operands: tuple[Sharding, ...]
    out: Sharding
    exchanges: tuple[Exchange, ...]  # exchanges within the operation
    passed: tuple[Axes, ...]  # for each operand, the pending axes that pass through

    @cached_property
    def assignment(self) -> tuple[tuple[str, str], ...]:
        """(axis, factor) pairs, major first within a factor."""
        return tuple((a, f) for f, axes in self.axes.items() for a in axes)


@dataclass(eq=False)
class Space:
    """The axes that may split each dim of each operation, and over which each tensor may be pending.

    Args:
      again: the tensors that may be recomputed, under any placement.
      given: the known shardings of results of loops.
    """

    graph: Simplified
    homes: Homes
    signatures: Signatures
    again: Set[Tensor]
    given: Mapping[Tensor, Sharding]
    orders: dict[Axes, None] = field(default_factory=dict)  # orders of several axes on one dim, from assigned shardings
    _dims: dict[Tensor, Sets] = field(default_factory=dict)
    _factors: dict[Operation, Sets] = field(default_factory=dict)  # of operations that can be split
    _pending: dict[Tensor, AxisSet] = field(default_factory=dict)
    _alike: dict[object, Any] = field(default_factory=dict)  # results of the methods below, for alike operations

    def __post_init__(self) -> None:
        for op in self.graph.operations:
            kind = op.opdef.kind
            for y in op.outputs:
                if kind is not Kind.LOOP or y in self.given:
                    self._enter(y)
            if kind not in UNSPLIT:
                self._split(op)
        for op in reversed(self.graph.operations):
            if op.outputs and op.output in self.again:
                self._follow_users(op)
        self._all_orders = tuple(self.orders)

    def _enter(self, t: Tensor) -> None:
        """Record the axes that rules and assigned shardings name for the dims of a tensor."""
        home, scope = self.homes.of(t), self.homes.scope(t)
        key = (home, self.given.get(t), scope)
        if key not in self._alike:
            self._alike[key] = self._named((home, self.given[t]) if t in self.given else (home,), scope)
        self._dims[t], self._pending[t] = self._alike[key]

    def _named(self, shardings: Sequence[Sharding], scope: str) -> tuple[Sets, AxisSet]:
        """The axes that may split each dim of a tensor, and those over which it may be pending."""
        mesh, rules = self.homes.mesh, self.homes.rules
        dims = [
            frozenset(a for rule in rules.for_dim(d.name, scope) for a in rule.axes if a in mesh).union(
                *[s.axes[n] for s in shardings]
            )
            for n, d in enumerate(shardings[0].shape)
        ]
        self.orders.update(dict.fromkeys(entry for s in shardings for entry in s.axes if len(entry) > 1))
        return tuple(dims), frozenset(a for s in shardings for a in s.pending_axes)

    def _split(self, op: Operation) -> None:
        """Record the axes that may split each factor of an operation, and so its operands and results."""
        tensors = (*self.graph.inputs[op], *op.outputs)
        signature = self.signatures.of(op)
        key = (self.graph.first[op], *[self._dims[x] for x in tensors])
        splits = signature.splits.get(key)
        if splits is None:
            splits = signature.splits[key] = self._factors_of(signature, tensors)
        self._factors[op], dims = splits
        self._dims.update(zip(tensors, dims, strict=True))

    def _factors_of(self, signature: Signature, tensors: Sequence[Tensor]) -> tuple[Sets, Sequence[Sets]]:
        """The axes that may split each factor, and as a consequence each dim of each operand and result."""
        operands, factors = len(signature.op.inputs), []
        dims = {x: dict(zip(x.shape.names, self._dims[x], strict=True)) for x in tensors}
        for f in signature.factors:
            named = zip(tensors, (*f.operands, f.outputs[0]), strict=False) if f.role is not Role.WHOLE else ()
            factors.append(EMPTY.union(*[dims[x].get(name, EMPTY) for x, name in named if name is not None]))
        for f, axes in zip(signature.factors, factors, strict=True):
            first = operands if f.shares is not None else 0
            for x, name in zip(tensors[first:], (*f.operands, *f.outputs)[first:], strict=True):
                if name is not None and name in dims[x]:
                    dims[x][name] |= axes
        return tuple(factors), [tuple(dims[x].values()) for x in tensors]

    def _follow_users(self, op: Operation) -> None:
        """Let a recomputable operation be split in every way that its users may need."""
        inputs, y = self.graph.inputs[op], op.output
        for n, f in enumerate(self.signatures.of(op).factors):
            name = f.outputs[0]
            if name is None or f.role is not Role.PARALLEL:
                continue
            factors = self._factors[op]
            axes = factors[n] | self._dims[y][y.shape.names.index(name)]
            if axes != factors[n]:
                self._factors[op] = (*factors[:n], axes, *factors[n + 1 :])
            for x, own in zip(inputs, f.operands, strict=True):
                if own is not None:
                    at, dims = x.shape.names.index(own), self._dims[x]
                    if not axes <= dims[at]:
                        self._dims[x] = (*dims[:at], dims[at] | axes, *dims[at + 1 :])

    def axes(self, op: Operation) -> AxisSet:
        """The axes that may split an operation."""
        factors = self._factors[op]
        axes: AxisSet | None = self._alike.get(factors)
        if axes is None:
            axes = self._alike[factors] = EMPTY.union(*factors)
        return axes

    def limits(self, op: Operation) -> tuple[object, ...]:
        """All that `question` depends on, besides the mesh."""
        inputs = self.graph.inputs[op]
        return self._factors[op], tuple([self._pending[x] for x in inputs]), self.graph.first[op], self._all_orders

    def question(self, op: Operation) -> Question:
        """Everything that an operation's assignments depend on, once its operands' strategies are known."""
        splits = tuple(map(self._in_order, self._factors[op]))
        sums = tuple([self._in_order(self._pending[x]) for x in self.graph.inputs[op]])
        return Question(splits, sums, self.graph.first[op], self._all_orders)

    def _in_order(self, axes: AxisSet) -> Axes:
        """Axes in mesh order."""
        return tuple([a for a in self.homes.mesh.axes if a in axes]) if axes else ()

    def made(self, op: Operation, sums: AxisSet) -> None:
        """Record the axes over which an operation's results may be pending."""
        if sums:
            for y in op.outputs:
                self._pending[y] |= sums


class Question(NamedTuple):
    """Everything that the assignments of an operation depend on."""

    splits: tuple[Axes, ...]  # for each factor, the axes that may split it
    sums: tuple[Axes, ...]  # for each operand, the axes over which it may be pending
    first: tuple[int, ...]  # for each operand and result, the index of the first one that is the same tensor
    orders: tuple[Axes, ...]


def assignments(
    signature: Signature, q: Question, passed: tuple[Axes, ...], mesh: Mesh
) -> Iterator[Mapping[str, Axes]]:
    """Every assignment of each axis to a factor or to none, where pending sums pass through; sizes divide."""
    places: dict[str, list[Factor | None]] = {}
    busy = {a for p in passed for a in p}
    for axis in mesh.axes:
        able = [f for f, axes in zip(signature.factors, q.splits, strict=True) if axis in axes]
        if able and axis not in busy and mesh.axis_size(axis) > 1:
            places[axis] = [*able, None]
    for targets in product(*places.values()):
        split: dict[str, Axes] = {}
        used: dict[str, Factor] = {}
        for axis, f in zip(places, targets, strict=True):
            if f is not None:
                split[f.name] = (*split.get(f.name, ()), axis)
                used[f.name] = f
        if all(f.size % mesh.group_size(split[n]) == 0 for n, f in used.items()):
            several = [n for n in split if len(split[n]) > 1]
            if not several:
                yield split
                continue
            for entries in product(*(_orders(split[n], q.orders) for n in several)):
                yield {**split, **dict(zip(several, entries, strict=True))}


def _orders(axes: Axes, known: Sequence[Axes]) -> list[Axes]:
    """Orders in which assigned shardings have these axes on a dim; otherwise mesh order."""
    orders = [tuple(a for a in order if a in axes) for order in known]
    return list(dict.fromkeys(o for o in orders if len(o) == len(axes))) or [axes]


def pass_options(linear: Linear, q: Question) -> Iterator[tuple[Axes, ...]]:
    """Pending axes of operands that may pass through; none first, so that ties reduce as early as possible."""
    nothing: tuple[Axes, ...] = ((),) * len(q.sums)
    yield nothing
    if not any(q.sums):
        return
    if linear.together:
        # A complete operand counts on one device only, so it passes too.
        some = list(dict.fromkeys(a for i in linear.operands for a in q.sums[i]))
        for subset in _subsets(some):
            yield tuple(subset if i in linear.operands else () for i in range(len(q.sums)))
        return
    alone = [i for i in linear.operands if q.first.count(q.first[i]) == 1]
    for chosen in product(*(((), *_subsets(q.sums[i])) for i in alone)):
        taken = list(chain.from_iterable(chosen))
        if taken and len(taken) == len(set(taken)):
            passed = list(nothing)
            for i, axes in zip(alone, chosen, strict=True):
                passed[i] = axes
            yield tuple(passed)


def _subsets(axes: Sequence[str]) -> list[Axes]:
    """The non-empty subsets, largest first."""
    return [c for n in range(len(axes), 0, -1) for c in combinations(axes, n)]
