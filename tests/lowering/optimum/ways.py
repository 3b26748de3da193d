"""The ways to run each operation of a program, whatever lies where: assignments, pending sums, what both cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, permutations, product
from typing import NamedTuple

import meshlib as mtf
from layouts import Sharding
from meshlib.core.graph import Operation, Tensor, TensorType
from meshlib.core.opdef import RESIDENT, Home, Kind, Role, Work
from meshlib.lowering.assigned import Homes, scope_of
from meshlib.lowering.simplification import Simplified
from meshlib.ops.control.sources import is_zero
from meshlib.program.exchanges import busiest_bytes
from meshlib.program.signature import Signature, Signatures

Axes = tuple[str, ...]

BALANCE = mtf.Balance(stationary=False)  # weights are values like any others: the least of all plans
AGAIN = (Kind.SOURCE, Kind.ELEMENTWISE, Kind.VIEW)


class Way(NamedTuple):
    """One assignment: per operand the shardings of which any serves, what comes out, and what it costs."""

    axes: tuple[tuple[str, Axes], ...]
    wants: tuple[tuple[Sharding, ...], ...]
    out: Sharding
    bytes: float  # sent inside the operation
    work: float


def subsets(items: Sequence[str]) -> list[Axes]:
    """All subsets, the empty one first."""
    return [c for n in range(len(items) + 1) for c in combinations(items, n)]


def as_term(s: Sharding) -> tuple[Sharding, ...]:
    """What serves as a term pending like `s`: over any fewer axes too, for it may count on one device of the rest."""
    return tuple(s.with_pending([p for p in s.pending if p[0] in kept]) for kept in subsets(s.pending_axes)[::-1])


class Ways:
    """The ways of each operation, under one mesh and layout.

    Rule 2 says that an axis may split a dim for which a rule or an assigned sharding names it in an operand or in the
    result: optional rules that lost the axis too, and dims that an operation before could have split so.
    """

    def __init__(self, simple: Simplified, homes: Homes) -> None:
        self.simple, self.homes = simple, homes
        self.of: dict[Operation, list[Way]] = {}
        self.groups: dict[Operation, dict[tuple[int, ...], list[Way]]] = {}  # of some terms of a sum
        self.last: dict[Tensor, Operation] = {}  # who uses it last
        self._laid: dict[Tensor, dict[str, set[str]]] = {}  # per dim the axes that it may be split over
        self._waiting: dict[Tensor, set[str]] = {}  # axes over which it may be a pending sum
        self.again: dict[Tensor, tuple[Tensor, ...]] = {}  # what may be made again, and of what
        self._makings: dict[tuple[Tensor, Sharding], tuple[Sharding, ...] | None] = {}
        self._signatures = Signatures()
        entries = [e for op in simple.operations for y in op.outputs for e in homes.of(y).axes]
        self._orders = dict.fromkeys(e for e in entries if len(e) > 1)
        for op in simple.operations:
            self.last.update(dict.fromkeys(simple.inputs[op], op))
            if self._can_run_again(op):
                self.again[op.output] = simple.inputs[op]
        at = {op: n for n, op in enumerate(simple.operations)}
        for y in reversed(self.again):  # what it is made of is needed as long as it is
            for x in self.again[y] if y in self.last else ():
                self.last[x] = max(self.last[x], self.last[y], key=at.__getitem__)
        for op in simple.operations:
            if op.opdef.kind is not Kind.COMMIT:
                self._prepare(op)
        self.least_work = sum(map(self.least_work_of, simple.operations))

    def _can_run_again(self, op: Operation) -> bool:
        """Whether its result may be made wherever it is wanted: of nothing, of smaller operands, or of such as it."""
        if op.opdef.kind not in AGAIN or op.opdef.home is Home.GIVEN or op.opdef.show or len(op.outputs) > 1:
            return False
        y = op.output
        small = (x in self.again or _bytes(x) < _bytes(y) for x in self.simple.inputs[op])
        return y not in self.simple.graph.gradient_of and all(small)

    def making(self, y: Tensor, wanted: Sharding) -> tuple[Sharding, ...] | None:
        """How the operands of what is made again must lie for it to lie so; None if it can't be made so."""
        key = y, wanted
        if key not in self._makings:
            self._makings[key] = self._making(y, wanted)
        return self._makings[key]

    def _making(self, y: Tensor, wanted: Sharding) -> tuple[Sharding, ...] | None:
        op = y.operation
        if wanted.pending and not is_zero(op):
            return None
        signature = self._signatures.of(op)
        split = [(f, wanted.of(f.outputs[0])) for f in signature.factors if f.outputs[0] is not None]
        if any(entry and f.role is not Role.PARALLEL for f, entry in split):
            return None
        axes = {f.name: entry for f, entry in split if entry}
        made = signature.under(self.homes.mesh, axes, ((),) * len(op.inputs))
        return made.operands if made is not None and made.out.axes == wanted.axes else None

    def price(self, op: Operation, work: Work) -> float:
        """Of work, in bytes. To make what may be made again counts for nothing, pending or not."""
        if op.output in self.again:
            return 0.0
        return work.mxu_flops / BALANCE.mxu_flops_per_byte + work.vpu_ops / BALANCE.vpu_ops_per_byte

    def least_work_of(self, op: Operation) -> float:
        """The least work an operation can do."""
        if op.opdef.kind is Kind.COMMIT or op.output in self.again:
            return 0.0
        return min((way.work for way in self.of.get(op, ())), default=0.0)

    def _prepare(self, op: Operation) -> None:
        (y,) = op.outputs
        home = self.homes.of(y)
        named = self.homes.rules.for_dim
        self._laid[y] = {
            d.name: {*home.of(d.name), *(a for r in named(d.name, scope_of(y)) for a in r.axes if a in home.mesh)}
            for d in y.shape
        }
        self._waiting[y] = set(home.mesh.axes) if is_zero(op) else set()
        if op.opdef.kind in RESIDENT:
            return
        xs = self.simple.inputs[op]
        signature = self._signatures.of(op)
        able: dict[str, set[str]] = {}
        for f in (f for f in signature.factors if f.role is not Role.WHOLE):
            dims = [(x, d) for x, d in zip((*xs, y), (*f.operands, f.outputs[0]), strict=True) if d is not None]
            able[f.name] = set().union(*(self._laid[x][d] for x, d in dims))
            for x, d in dims:
                self._laid[x][d] |= able[f.name]
        self.of[op] = list(self._ways(op, signature, able, range(len(xs))))
        if y in self.again:  # all that is not pending is made where it is wanted
            self.of[op] = [w for w in self.of[op] if self.making(y, w.out) != tuple(wants[0] for wants in w.wants)]
        for way in self.of[op]:
            self._waiting[y] |= {a for a, kind in way.out.pending if kind == "sum"}
        if adds(signature) and len(xs) > 2:
            groups = [g for n in range(2, len(xs)) for g in combinations(range(len(xs)), n)]
            self.groups[op] = {g: list(self._ways(op, signature, able, g)) for g in groups}

    def _ways(
        self, op: Operation, signature: Signature, able: dict[str, set[str]], some: Sequence[int]
    ) -> Iterator[Way]:
        """Every assignment; of a sum, over some of its terms alone."""
        mesh = self.homes.mesh
        for passed in dict.fromkeys(self._passes(op, signature, some)):
            busy = {a for p in passed for a in p}
            places = [[None, *(f for f, axes in able.items() if a in axes and a not in busy)] for a in mesh.axes]
            for targets in product(*places):
                given = {f: [a for a, to in zip(mesh.axes, targets, strict=True) if to == f] for f in able}
                for entries in product(*map(self._ordered, given.values())):
                    axes = {f: entry for f, entry in zip(given, entries, strict=True) if entry}
                    way = self._way(op, signature, axes, passed, some)
                    if way is not None:
                        yield way

    def _ordered(self, axes: Sequence[str]) -> list[Axes]:
        """The orders in which some dim has these axes at home, and that of the mesh."""
        known = {tuple(a for a in order if a in axes) for order in self._orders}
        return [p for p in permutations(axes) if p == tuple(axes) or p in known]

    def _passes(self, op: Operation, signature: Signature, some: Sequence[int]) -> Iterator[tuple[Axes, ...]]:
        """Which pending axes of the operands may go through."""
        linear, xs = signature.linear, self.simple.inputs[op]
        waiting = [sorted(self._waiting[x]) if i in some else [] for i, x in enumerate(xs)]
        if linear.together:
            given = [set(waiting[i]) for i in linear.operands]
            for chosen in subsets(sorted(set().union(*given))):
                yield tuple(chosen if i in linear.operands else () for i in range(len(xs)))
            return
        alone = [i for i in linear.operands if xs.count(xs[i]) == 1]
        for taken in product(*(subsets(waiting[i]) for i in alone)):
            axes = [a for t in taken for a in t]
            if len(axes) == len(set(axes)):
                passed = dict(zip(alone, taken, strict=True))
                yield tuple(passed.get(i, ()) for i in range(len(xs)))

    def _way(
        self, op: Operation, signature: Signature, axes: dict[str, Axes], passed: tuple[Axes, ...], some: Sequence[int]
    ) -> Way | None:
        mesh = self.homes.mesh
        made = signature.under(mesh, axes, passed)
        cut = signature.cut(tuple(mesh.group_size(axes.get(n, ())) for n in signature.names))
        if made is None or cut is None:
            return None
        work, linear = cut.work, signature.linear
        counts_once = linear.operands if linear.together else ()
        wants = tuple(as_term(s) if i in counts_once else (s,) for i, s in enumerate(made.operands))
        if adds(signature):
            wants = tuple(w if i in some else () for i, w in enumerate(wants))
            work = self.adding(op, made.out, len(some))
        sent = float(busiest_bytes((e, 1) for e in made.exchanges))
        return Way(tuple(axes.items()), wants, made.out, sent, self.price(op, work))

    def adding(self, op: Operation, out: Sharding, count: int) -> Work:
        """The work of adding so many terms."""
        block = TensorType(out.local_shape, op.output.dtype)
        return op.opdef.work((block,) * count, block, op.attrs)


def adds(signature: Signature) -> bool:
    """Whether an operation is the sum of its operands."""
    return signature.op.opdef.name == "add_n"


def _bytes(t: Tensor) -> int:
    return t.shape.size * t.dtype.itemsize
