"""Sums over split dims that follow from others, so that one reduction serves them all.

What is left pending by a split is sent once for each sum. A factor that lacks the summed dims moves out of a sum, so
that the sum is smaller, or one that is there anyway; of cotangents that meet, the sum of each may be there; and what
lies around its mean sums to nothing. So of the gradient of a batch norm two sums are left: of the cotangent, and of
its product with the centred operand.

Whether that sends less depends on who else would have shared a reduction, so programs with it and without it are
compared (`layout`), and only where enough may be saved.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod

from layouts import Shape
from meshlib.core.graph import BACKWARD, FORWARD, Graph, Operation, Tensor, TensorType, absolute_scope, region
from meshlib.core.opdef import RESIDENT, Kind, OpDef, record_of
from meshlib.core.source_lines import written_at
from meshlib.lowering.algebra import Algebra, Factor, Monomial, Sum
from meshlib.lowering.assigned import Homes
from meshlib.lowering.simplification import Simplified

SMALL = 8  # times a sum must be smaller than what is summed to be kept from forward for backward

Key = tuple[Sum, str]  # a sum, and the region that makes it


@dataclass(eq=False)
class Sharing:
    """What to write instead of sums: each as a sum of products of others, and what that saves at most.

    `plain`: those of all sums over split dims that have no factors outside; `products`: what is there to be summed.
    """

    simple: Simplified
    fetched: frozenset[Tensor]
    terms: Mapping[Tensor, list[Monomial]]
    plain: Mapping[Tensor, Sum]
    products: Mapping[frozenset[tuple[Factor, int]], Tensor]
    bytes: int  # of reductions that are not needed any more

    @cached_property
    def graph(self) -> Simplified:
        """The graph with those sums made of others.

        New operations lie in a graph of their own, which knows what the old one knows, and bear the names and lines of
        the sums that they make.
        """
        old = self.simple.graph
        new = replace(old, operations=[], gradient_of=dict(old.gradient_of), inner=set(), again=set(), _counts={})
        return _SumRewriter(self.simple, self, new).run(self.fetched)


def split_sums(simple: Simplified, homes: Homes) -> Mapping[Tensor, frozenset[str]]:
    """What sums over dims that are split at home, with these dims."""
    split_axes = {}
    for op in simple.operations:
        if op.opdef.kind in (Kind.REDUCTION, Kind.CONTRACTION):
            out, inputs = op.output.shape, simple.inputs[op]
            split = {d.name for x in inputs for d in x.shape if d.name not in out and homes.of(x).of(d.name)}
            if split:
                split_axes[op.output] = frozenset(split)
    return split_axes


def shared_sums(
    simple: Simplified, split: Mapping[Tensor, frozenset[str]], fetched: Iterable[Tensor]
) -> Sharing | None:
    """Those of the sums over split dims that need no reduction of their own; None if there are none."""
    sharing = _Choice(simple, split, frozenset(fetched)).found()
    return sharing if sharing.bytes > 0 else None


@dataclass(eq=False)
class _Choice:
    simple: Simplified
    split: Mapping[Tensor, frozenset[str]]
    fetched: frozenset[Tensor]
    groups: dict[Key, list[Tensor]] = field(default_factory=dict)  # sums over split dims, by what they sum
    totals: dict[Tensor, Monomial] = field(default_factory=dict)
    terms: dict[Tensor, list[Monomial]] = field(default_factory=dict)
    used: set[Key] = field(default_factory=set)  # those that others are made of
    saved: int = 0

    def __post_init__(self) -> None:
        self.algebra = Algebra(self.simple)

    def found(self) -> Sharing:
        for y in self.split:
            total = self.algebra.total(y.operation)
            if total is not None:
                self._enter(y.operation, total)
        self._take_apart()
        self._put_inside()
        self._join()
        plain = {y: s for y, m in self.totals.items() for s in m.sums if m.number == 1 and len(m.powers) == 1}
        plain = {y: s for y, s in plain.items() if self.terms.get(y, [self.totals[y]]) == [self.totals[y]]}
        return Sharing(self.simple, self.fetched, self.terms, plain, self.algebra.products, self.saved)

    def _take_apart(self) -> None:
        """Sums of what is itself a sum, the last first, whose parts are there."""
        for key in reversed(list(self.groups)):
            follows = None if key in self.used else self._from_others(key)
            if follows is not None:
                members = self.groups.pop(key)
                self._use(follows, key[1])
                self.saved += sum(map(_bytes, members))
                self.terms.update((y, _put(self.totals[y], key[0], follows)) for y in members)

    def _put_inside(self) -> None:
        """Sums over several dims by way of one over those that are split, if that one is there anyway."""
        for key, (y, *others) in list(self.groups.items()):
            inside = None if others or key in self.used else self._inside_another(y)
            if inside is not None:
                del self.groups[key]
                self._use([inside], key[1])
                self.saved += _bytes(y)
                self.terms[y] = [inside]

    def _join(self) -> None:
        """Sums of the same product, or of a smaller one than they are."""
        for key, members in self.groups.items():
            size = members[0].dtype.size_bytes(prod(d.size for d in key[0].dims))
            before = sum(map(_bytes, members))
            if key in self.used or before > size:
                self.terms.update((y, [self.totals[y]]) for y in members)
                self.saved += before - size

    def _use(self, terms: Iterable[Monomial], where: str) -> None:
        self.used.update(key for m in terms for s in m.sums if (key := self._there(s, where)))

    def _enter(self, op: Operation, total: Monomial) -> None:
        self.totals[op.output] = total
        inner = next(total.sums, None)
        if inner is None:
            self.terms[op.output] = [total]
            self.saved += _bytes(op.output)
            return
        there = None if op in op.graph.again else self._there(inner, op.region)
        self.groups.setdefault(there or (inner, op.region), []).append(op.output)

    def _inside_another(self, y: Tensor) -> Monomial | None:
        op = y.operation
        total = self.algebra.total(op, self.split[y])
        inner = next(total.sums, None) if total is not None else None
        if total is None or inner is None or inner in self.totals[y].powers:
            return None
        return total if self._there(inner, op.region) else None

    def _there(self, total: Sum, where: str) -> Key | None:
        """The sum as a region has it: its own, or forward's if that takes little to keep."""
        if (total, where) in self.groups:
            return total, where
        return (total, FORWARD) if (total, FORWARD) in self.groups and _is_small(total) else None

    def _from_others(self, key: Key) -> list[Monomial] | None:
        """A sum made of others that are there; nothing is left of it only where the user does not see it."""
        total, where = key
        sources = self._resolved(total, where, {total})
        if sources is not None and not sources:
            shown = any(y in self.fetched or y in self.simple.graph.gradient_of for y in self.groups[key])
            return None if shown or where != BACKWARD else sources
        return sources

    def _resolved(self, total: Sum, where: str, within: set[Sum]) -> list[Monomial] | None:
        parts = self.algebra.parts(total, where)
        if parts is None:
            return None
        resolved: list[Monomial] = []
        for m in parts:
            inner = next(m.sums, None)
            if inner is None or (inner not in within and self._there(inner, where)):
                resolved.append(m)
                continue
            more = None if inner in within else self._resolved(inner, where, {*within, inner})
            if more is None:
                return None
            resolved += _put(m, inner, more)
        return self.algebra.collected(resolved)


def _put(m: Monomial, total: Sum, terms: Sequence[Monomial]) -> list[Monomial]:
    """A product with a sum of terms in the place of one factor."""
    rest = Monomial(m.number, {f: n for f, n in m.powers.items() if f != total})
    return [rest.times(term) for term in terms]


def _is_small(total: Sum) -> bool:
    """Whether keeping it from forward for backward takes little, beside what is summed."""
    dims = {d for part in total.parts for t in part for d in t.shape}
    return prod(d.size for d in dims.difference(total.dims)) >= SMALL


def _bytes(t: Tensor) -> int:
    return t.dtype.size_bytes(t.shape.size)


# ---------------------------------------------------------------- the graph once more


@dataclass(frozen=True)
class _Node:
    """An operation that is to be written."""

    kind: OpDef
    operands: tuple[_Node | Tensor, ...]
    attrs: Mapping[str, object]
    type: TensorType


@dataclass(eq=False)
class _SumRewriter:
    simple: Simplified
    sharing: Sharing
    graph: Graph  # of the new operations
    operations: list[Operation] = field(default_factory=list)
    inputs: dict[Operation, tuple[Tensor, ...]] = field(default_factory=dict)
    now: dict[Tensor, Tensor] = field(default_factory=dict)  # what stands for a tensor
    made: dict[Key, Tensor] = field(default_factory=dict)

    def run(self, fetched: Iterable[Tensor]) -> Simplified:
        for op in self.simple.operations:
            terms = self.sharing.terms.get(op.output)
            inner = self.sharing.plain.get(op.output)
            first = inner is not None and self.made.setdefault((inner, op.region), op.output) is op.output
            new = None if terms is None or first else self._written(op, terms)
            if new is None:
                self._append(op, tuple(self.now.get(x, x) for x in self.simple.inputs[op]))
            else:
                self.now[op.output] = new
        return self._linked({self.now.get(t, t) for t in fetched})

    def _linked(self, fetched: set[Tensor]) -> Simplified:
        """Without what nobody needs any more."""
        taken = {self.now.get(t, t) for t in self.simple.taken}
        needed, operations = fetched | taken, []
        for op in reversed(self.operations):
            if op.opdef.kind in (*RESIDENT, Kind.COMMIT) or not needed.isdisjoint(op.outputs):
                operations.append(op)
                needed.update(self.inputs[op][n] for n in op.needs)
        same = {t: self.now.get(y, y) for t, y in self.simple.same.items()} | self.now
        return Simplified(
            self.graph, operations[::-1], {op: self.inputs[op] for op in operations}, same, taken=taken
        ).linked()

    # ------------------------------------------------------------ new operations

    def _written(self, of: Operation, terms: Sequence[Monomial]) -> Tensor | None:
        """A sum, as a sum of products of others; None if it is to stay as it is."""
        parts = [self._product(of, m.number, [(self._factor(of, f), n) for f, n in m.powers.items()]) for m in terms]
        whole = self._node("add_n", parts) if len(parts) > 1 else parts[0] if parts else self._number(of, 0.0)
        shape = of.output.shape
        if any(d not in shape for d in whole.type.shape):
            whole = self._node("reduce_sum", [whole], shape=Shape([d for d in whole.type.shape if d in shape]))
        if whole.type.shape != shape:
            kind = "transpose" if len(whole.type.shape) == len(shape) else "broadcast"
            whole = self._node(kind, [whole], shape=shape)
        gradients = self.graph.gradient_of
        if isinstance(whole, Tensor):  # one that is there: a gradient is a tensor of its own
            return None if of.output in gradients else whole
        new = self._emit(of, whole, of.name)
        if of.output in gradients:
            gradients[new] = gradients[of.output]
        return new

    def _factor(self, of: Operation, f: Factor) -> Tensor:
        """A factor as it is there; a sum that nobody made yet is made."""
        if isinstance(f, Tensor):
            return self.now.get(f, f)
        regions = (of.region, FORWARD) if _is_small(f) and of not in of.graph.again else (of.region,)
        factor = next((self.made[f, where] for where in regions if (f, where) in self.made), None)
        if factor is None:
            operands = [self._inside(of, part) for part in f.parts]
            total = self._node(f.kind, operands, **dict(f.attrs), shape=Shape(f.dims))
            factor = self.made[f, of.region] = self._emit(of, total)
        return factor

    def _inside(self, of: Operation, part: Mapping[Tensor, int]) -> _Node | Tensor:
        """What is summed: a product that is there, if there is one."""
        known = self.sharing.products.get(frozenset(part.items()))
        if known is not None and known.operation in self.inputs and known.operation.region == of.region:
            return known
        return self._product(of, 1.0, [(self.now.get(t, t), n) for t, n in part.items()])

    def _product(self, of: Operation, number: float, powers: Iterable[tuple[Tensor, int]]) -> _Node | Tensor:
        """Small factors first, then those that it is divided by."""
        ordered = sorted(powers, key=lambda power: power[0].shape.size)
        product: _Node | Tensor | None = None
        for x in (x for x, n in ordered for _ in range(n)):
            product = x if product is None else self._node("multiply", [product, x])
        if product is None:
            product, number = self._number(of, number), 1.0
        for x in (x for x, n in ordered for _ in range(-n)):
            product = self._node("divide", [product, x])
        if number == 1:
            return product
        return (
            self._node("negative", [product])
            if number == -1
            else self._node("multiply", [product, self._number(of, number)])
        )

    def _number(self, of: Operation, value: float) -> _Node:
        return self._node("constant", [], value=value, shape=Shape([]), dtype=of.output.dtype)

    def _node(self, kind: str | OpDef, operands: Sequence[_Node | Tensor], **attrs: object) -> _Node:
        record = record_of(kind) if isinstance(kind, str) else kind
        types = record.shape(tuple(x.type for x in operands), attrs)
        return _Node(record, tuple(operands), attrs, types[0] if isinstance(types, tuple) else types)

    def _emit(self, of: Operation, node: _Node | Tensor, name: str | None = None) -> Tensor:
        """Write an operation for `of`, after those of its operands."""
        if isinstance(node, Tensor):
            return node
        inputs = tuple(self._emit(of, x) for x in node.operands)
        with region(of.region, of.owner), written_at(of.source), absolute_scope(of.name):
            op = self.graph.add(node.kind, inputs, [node.type], node.attrs, exact_name=name)
        if name is None or of in of.graph.inner:
            self.graph.inner.add(op)
        if of in of.graph.again:
            self.graph.again.add(op)
        self._append(op, inputs)
        return op.output

    def _append(self, op: Operation, inputs: tuple[Tensor, ...]) -> None:
        self.operations.append(op)
        self.inputs[op] = inputs
