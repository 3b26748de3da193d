"""The ways to run each operation of a program, whatever lies where: assignments, pending sums, what both cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, permutations, product
from typing import NamedTuple

from layouts import Sharding
from meshlib.graph import Operation, Tensor, TensorType
from meshlib.lowering.homes import Homes
from meshlib.lowering.simplification import Simplified
from meshlib.operation import RESIDENT, Kind, Role, Work
from meshlib.ops.sources import is_zero
from meshlib.program.exchange import busiest_bytes
from meshlib.program.signature import Signature, Signatures

Axes = tuple[str, ...]
Laid = tuple[int, str, str]  # operand, dim, axis


class Way(NamedTuple):
    """One assignment: per operand the shardings of which any serves, what comes out, and what it costs."""

    axes: tuple[tuple[str, Axes], ...]
    wants: tuple[tuple[Sharding, ...], ...]
    out: Sharding
    bytes: float  # sent inside the operation
    work: float
    needs: tuple[frozenset[Laid], ...]  # of each axis that no home lays on its dim, who may do so


def subsets(items: Sequence[str]) -> list[Axes]:
    """All subsets, the empty one first."""
    return [c for n in range(len(items) + 1) for c in combinations(items, n)]


def as_term(s: Sharding) -> tuple[Sharding, ...]:
    """What serves as a term pending like `s`: over any fewer axes too, for it may count on one device of the rest."""
    return tuple(s.with_pending([p for p in s.pending if p[0] in kept]) for kept in subsets(s.pending_axes)[::-1])


class Ways:
    """The ways of each operation, under one mesh and layout.

    Rule 2 says that an axis may go to a dim that it splits in an operand or at home. Here an operand may have been
    split wherever an operation before could have had it: whether it was, `needs` lets the search see to.
    """

    def __init__(self, simple: Simplified, homes: Homes) -> None:
        self.simple, self.homes = simple, homes
        self.of: dict[Operation, list[Way]] = {}
        self.groups: dict[Operation, dict[tuple[int, ...], list[Way]]] = {}  # of some terms of a sum
        self.last: dict[Tensor, Operation] = {}  # who uses it last
        self._laid: dict[Tensor, dict[str, set[str]]] = {}  # per dim the axes that it may be split over
        self._waiting: dict[Tensor, set[str]] = {}  # axes over which it may be a pending sum
        self._signatures = Signatures()
        entries = [e for op in simple.operations for y in op.outputs for e in homes.of(y).axes]
        self._orders = dict.fromkeys(e for e in entries if len(e) > 1)
        for op in simple.operations:
            self.last.update(dict.fromkeys(simple.inputs[op], op))
            if op.kind.kind is not Kind.COMMIT:
                self._prepare(op)
        self.least_work = sum(map(self.least_work_of, simple.operations))

    def remade(self, op: Operation) -> bool:
        """Whether an operation's result is made anew wherever it is wanted: such work counts for nothing."""
        return op.kind.remade and all(not x.shape for x in self.simple.inputs[op])

    def price(self, op: Operation, work: Work) -> float:
        """Of work: flops and lane operations alike."""
        return 0.0 if self.remade(op) else float(work.mxu_flops + work.vpu_ops)

    def least_work_of(self, op: Operation) -> float:
        """The least work an operation can do."""
        return min((way.work for way in self.of.get(op, ())), default=0.0)

    def _prepare(self, op: Operation) -> None:
        (y,) = op.outputs
        home = self.homes.of(y)
        self._laid[y] = {d.name: set(home.of(d.name)) for d in y.shape}
        self._waiting[y] = set(home.mesh.axes) if is_zero(op) else set()
        if op.kind.kind in RESIDENT:
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
            common = set.union(*given) if adds(signature) else set.intersection(*given)
            for chosen in subsets(sorted(common)):
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
        work, wants = cut.work, tuple((s,) for s in made.operands)
        if adds(signature):
            wants = tuple(as_term(s) if i in some else () for i, s in enumerate(made.operands))
            work = self.adding(op, made.out, len(some))
        sent = float(busiest_bytes((e, 1) for e in made.exchanges))
        needs = tuple(self.needs(op, axes))
        return Way(tuple(axes.items()), wants, made.out, sent, self.price(op, work), needs)

    def adding(self, op: Operation, out: Sharding, count: int) -> Work:
        """The work of adding so many terms."""
        block = TensorType(out.local_shape, op.output.dtype)
        return op.kind.work((block,) * count, block, op.attrs)

    def needs(self, op: Operation, axes: dict[str, Axes]) -> Iterator[frozenset[Laid]]:
        """Who may have laid each axis where it is, if no home does."""
        ends = (*self.simple.inputs[op], op.output)
        for f in self._signatures.of(op).factors:
            dims = [(i, d) for i, d in enumerate((*f.operands, f.outputs[0])) if d is not None]
            for a in axes.get(f.name, ()):
                if not any(a in self.homes.of(ends[i]).of(d) for i, d in dims):
                    yield frozenset((i, d, a) for i, d in dims if i < len(ends) - 1)


def adds(signature: Signature) -> bool:
    """Whether an operation is the sum of its operands."""
    return signature.op.kind.name == "add_n"
