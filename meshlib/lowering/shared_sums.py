"""Sums over split dims that follow from others, so that one reduction serves them all.

A sum left pending by a split costs a reduction of its own. Three identities save some: a factor without the summed dims
moves out of the sum, which makes it smaller, or equal to an existing one; the sum of added cotangents is the sum of
their sums; and deviations from a mean sum to zero. The gradient of a batch norm is left with two sums: of the
cotangent, and of its product with the centred operand. A sum over more dims follows from one over the split dims, which
may replace another sum of equal size.

Whether that sends less depends on reductions that would have been shared otherwise, so programs with and without it are
compared (`one_layout`), and only where enough may be saved.
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

SMALL = 8  # a sum kept from forward for backward must be this many times smaller than what it sums

Key = tuple[Sum, str]  # (sum, region that computes it)


@dataclass(eq=False)
class Sharing:
    """Replacements for sums: each as a sum of products of other sums, and the bytes saved at most.

    `plain`: sums over split dims without outer factors; `products`: existing products to sum.
    """

    simple: Simplified
    fetched: frozenset[Tensor]
    terms: Mapping[Tensor, list[Monomial]]
    plain: Mapping[Tensor, Sum]
    products: Mapping[frozenset[tuple[Factor, int]], Tensor]
    bytes: int  # of reductions that are no longer needed

    @cached_property
    def graph(self) -> Simplified:
        """The graph with these sums replaced.

        New operations are in a copy of the graph without its operations, with the names and source lines of the sums
        that they replace.
        """
        old = self.simple.graph
        new = replace(old, operations=[], gradient_of=dict(old.gradient_of), inner=set(), again=set(), _counts={})
        return _SumRewriter(self.simple, self, new).run(self.fetched)


def split_sums(simple: Simplified, homes: Homes) -> Mapping[Tensor, frozenset[str]]:
    """Sum -> its summed dims that are split in the assigned shardings."""
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
    """The sums over split dims that need no reduction of their own; None if there are none."""
    sharing = _Choice(simple, split, frozenset(fetched)).sharing()
    return sharing if sharing.bytes > 0 else None


@dataclass(eq=False)
class _Choice:
    simple: Simplified
    split: Mapping[Tensor, frozenset[str]]
    fetched: frozenset[Tensor]
    # (sum, region) -> tensors that compute it, for sums over split dims
    groups: dict[Key, list[Tensor]] = field(default_factory=dict)
    totals: dict[Tensor, Monomial] = field(default_factory=dict)
    terms: dict[Tensor, list[Monomial]] = field(default_factory=dict)
    used: set[Key] = field(default_factory=set)  # those that others are derived from
    saved: int = 0

    def __post_init__(self) -> None:
        self.algebra = Algebra(self.simple)

    def sharing(self) -> Sharing:
        for y in self.split:
            total = self.algebra.total(y.operation)
            if total is not None:
                self._enter(y.operation, total)
        self._distribute()
        self._sum_in_two_steps()
        self._join()
        plain = {y: s for y, m in self.totals.items() for s in m.sums if m.number == 1 and len(m.powers) == 1}
        plain = {y: s for y, s in plain.items() if self.terms.get(y, [self.totals[y]]) == [self.totals[y]]}
        return Sharing(self.simple, self.fetched, self.terms, plain, self.algebra.products, self.saved)

    def _distribute(self) -> None:
        """Derive sums of sums, last first, from their parts if these exist."""
        for key in reversed(list(self.groups)):
            follows = None if key in self.used else self._from_others(key)
            if follows is not None:
                members = self.groups.pop(key)
                self._use(follows, key[1])
                self.saved += sum(map(_bytes, members))
                self.terms.update((y, _substitute(self.totals[y], key[0], follows)) for y in members)

    def _sum_in_two_steps(self) -> None:
        """Derive sums over several dims from a sum over the split ones that exists anyway, or can replace another."""
        for key, (y, *others) in list(self.groups.items()):
            inside = None if others or key not in self.groups or key in self.used else self._inside_another(y)
            if inside is not None:
                del self.groups[key]
                self._use([inside], key[1])
                self.saved += _bytes(y)
                self.terms[y] = [inside]

    def _replaces_another(self, total: Sum, where: str) -> bool:
        """Let a sum replace one of equal size that follows from it."""
        dims = {*total.dims}
        for key, members in self.groups.items():
            if key[1] != where or key in self.used or {*key[0].dims} != dims:
                continue
            follows = self._resolved(key[0], where, {key[0]}, total)
            if follows and any(total in m.powers for m in follows):
                del self.groups[key]
                self.groups[total, where] = []
                self._use(follows, where)
                self.terms.update((y, _substitute(self.totals[y], key[0], follows)) for y in members)
                return True
        return False

    def _join(self) -> None:
        """Let sums of the same product share one reduction, also if that sum is smaller than the results."""
        for key, members in self.groups.items():
            if not members:
                continue
            size = members[0].dtype.size_bytes(prod(d.size for d in key[0].dims))
            before = sum(map(_bytes, members))
            if key in self.used or before > size:
                self.terms.update((y, [self.totals[y]]) for y in members)
                self.saved += before - size

    def _use(self, terms: Iterable[Monomial], where: str) -> None:
        self.used.update(key for m in terms for s in m.sums if (key := self._available(s, where)))

    def _enter(self, op: Operation, total: Monomial) -> None:
        self.totals[op.output] = total
        inner = next(total.sums, None)
        if inner is None:
            self.terms[op.output] = [total]
            self.saved += _bytes(op.output)
            return
        there = None if op in op.graph.again else self._available(inner, op.region)
        self.groups.setdefault(there or (inner, op.region), []).append(op.output)

    def _inside_another(self, y: Tensor) -> Monomial | None:
        op = y.operation
        total = self.algebra.total(op, self.split[y])
        inner = next(total.sums, None) if total is not None else None
        if total is None or inner is None or inner in self.totals[y].powers:
            return None
        there = self._available(inner, op.region) or self._replaces_another(inner, op.region)
        return total if there else None

    def _available(self, total: Sum, where: str) -> Key | None:
        """The sum as available in a region: its own, or forward's if that is cheap to keep."""
        if (total, where) in self.groups:
            return total, where
        return (total, FORWARD) if (total, FORWARD) in self.groups and _is_small(total) else None

    def _from_others(self, key: Key) -> list[Monomial] | None:
        """A sum derived from other sums that exist; [] (it vanishes) only where the user does not see it."""
        total, where = key
        sources = self._resolved(total, where, {total})
        if sources is not None and not sources:
            shown = any(y in self.fetched or y in self.simple.graph.gradient_of for y in self.groups[key])
            return None if shown or where != BACKWARD else sources
        return sources

    def _resolved(self, total: Sum, where: str, within: set[Sum], new: Sum | None = None) -> list[Monomial] | None:
        """A sum in terms of existing sums, and possibly of a `new` one."""
        parts = self.algebra.parts(total, where)
        if parts is None:
            return None
        resolved: list[Monomial] = []
        for m in parts:
            inner = next(m.sums, None)
            if inner is None or inner == new or (inner not in within and self._available(inner, where)):
                resolved.append(m)
                continue
            more = None if inner in within else self._resolved(inner, where, {*within, inner}, new)
            if more is None:
                return None
            resolved += _substitute(m, inner, more)
        return self.algebra.collected(resolved)


def _substitute(m: Monomial, total: Sum, terms: Sequence[Monomial]) -> list[Monomial]:
    """A monomial with one factor replaced by a sum of terms."""
    rest = Monomial(m.number, {f: n for f, n in m.powers.items() if f != total})
    return [rest.times(term) for term in terms]


def _is_small(total: Sum) -> bool:
    """True if a sum is small relative to what it sums, so that it is cheap to keep from forward for backward."""
    dims = {d for part in total.parts for t in part for d in t.shape}
    return prod(d.size for d in dims.difference(total.dims)) >= SMALL


def _bytes(t: Tensor) -> int:
    return t.dtype.size_bytes(t.shape.size)


# ---------------------------------------------------------------- the rewritten graph


@dataclass(frozen=True)
class _Node:
    """An operation to write."""

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
    now: dict[Tensor, Tensor] = field(default_factory=dict)  # tensor -> its replacement
    made: dict[Key, Tensor] = field(default_factory=dict)

    def run(self, fetched: Iterable[Tensor]) -> Simplified:
        for op in self.simple.operations:
            terms = self.sharing.terms.get(op.output)
            inner = self.sharing.plain.get(op.output)
            first = inner is not None and self.made.setdefault((inner, op.region), op.output) is op.output
            new = None if terms is None or first else self._rewritten(op, terms)
            if new is None:
                self._append(op, tuple(self.now.get(x, x) for x in self.simple.inputs[op]))
            else:
                self.now[op.output] = new
        return self._linked({self.now.get(t, t) for t in fetched})

    def _linked(self, fetched: set[Tensor]) -> Simplified:
        """The rewritten graph without dead code."""
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

    def _rewritten(self, of: Operation, terms: Sequence[Monomial]) -> Tensor | None:
        """A sum written as a sum of products of others; None if it stays as it is."""
        parts = [self._product(of, m.number, [(self._factor(of, f), n) for f, n in m.powers.items()]) for m in terms]
        whole = self._node("add_n", parts) if len(parts) > 1 else parts[0] if parts else self._number(of, 0.0)
        shape = of.output.shape
        if any(d not in shape for d in whole.type.shape):
            whole = self._node("reduce_sum", [whole], shape=Shape([d for d in whole.type.shape if d in shape]))
        if whole.type.shape != shape:
            kind = "transpose" if len(whole.type.shape) == len(shape) else "broadcast"
            whole = self._node(kind, [whole], shape=shape)
        gradients = self.graph.gradient_of
        if isinstance(whole, Tensor):  # an existing tensor: a gradient must be a tensor of its own
            return None if of.output in gradients else whole
        new = self._emit(of, whole, of.name)
        if of.output in gradients:
            gradients[new] = gradients[of.output]
        return new

    def _factor(self, of: Operation, f: Factor) -> Tensor:
        """A factor as an existing tensor; a sum is written if it does not exist yet."""
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
        """The product to sum: an existing tensor, if there is one."""
        known = self.sharing.products.get(frozenset(part.items()))
        if known is not None and known.operation in self.inputs and known.operation.region == of.region:
            return known
        return self._product(of, 1.0, [(self.now.get(t, t), n) for t, n in part.items()])

    def _product(self, of: Operation, number: float, powers: Iterable[tuple[Tensor, int]]) -> _Node | Tensor:
        """A product with small factors first, then divided by those with negative powers."""
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
