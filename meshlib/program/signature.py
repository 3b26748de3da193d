"""Signatures of operations: equal for those that compute the same under every mesh and layout.

Models repeat layers, and a graph is lowered repeatedly: an operation's record is evaluated once for all equal
operations, and the effects of splitting it once per mesh and assignment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

from layouts import LayoutError, Mesh, Sharding
from layouts.sharding import block, laid
from meshlib.core.graph import Operation, TensorType
from meshlib.core.opdef import Work
from meshlib.program.exchanges import TOGETHER, Exchange, plan_exchanges
from meshlib.program.factor_shardings import Axes

NOTHING: frozenset[int] = frozenset()


class BlockCounts(NamedTuple):
    """An operation with numbers of blocks per factor: the basis of bounds of an assignment's cost."""

    operands: tuple[int, ...]  # elements of one device's block
    out: int
    work: Work


class Assigned(NamedTuple):
    """An operation under one assignment of axes to factors, independent of layout and costs."""

    operands: tuple[Sharding, ...]  # required sharding of each operand
    out: Sharding
    exchanges: tuple[Exchange, ...]  # exchanges inside the operation


class Signature:
    """All operations of one kind with equal attributes and operand types; `op` is a representative.

    `shared` caches what depends on shapes and factors alone, for signatures of several kinds.
    """

    def __init__(self, op: Operation, shared: dict[object, Any]) -> None:
        self.op = op
        self.factors = op.opdef.roles(op)
        self.linear = op.opdef.linear(op)
        self.names = tuple(f.name for f in self.factors)
        self.reducing = tuple(f.name for f in self.factors if f.role.reduces)  # a split leaves the result pending
        self._exchanges = any(f.role in TOGETHER for f in self.factors)
        self._leaves = [(f.name, f.role.pending) for f in self.factors if f.role.pending is not None]
        shares = frozenset(n for n, f in enumerate(self.factors) if f.shares is not None)
        sides = [(x.type, tuple([f.operands[n] for f in self.factors]), NOTHING) for n, x in enumerate(op.inputs)]
        sides.append((op.output.type, tuple([f.outputs[0] for f in self.factors]), shares))
        self._sides = [shared[side] if side in shared else shared.setdefault(side, _Side(*side)) for side in sides]
        self._blocks: dict[tuple[int, ...], BlockCounts | None] = {}
        shapes = tuple([(type_.shape, *dims) for type_, *dims in sides])
        sizes = tuple([f.size for f in self.factors])
        alike = op if self._exchanges else (self.names, sizes, tuple(self._leaves), shapes)
        self._assigned: dict[object, Assigned | None]
        self.options: dict[object, Any]  # cache of the lowering: assignments by what they depend on
        self._assigned, self.options = shared.setdefault(alike, ({}, {}))
        self.splits: dict[object, Any] = {}  # keyed by the axes that may split each factor

    def cut(self, counts: tuple[int, ...]) -> BlockCounts | None:
        """The operation with `counts` blocks per factor, on any mesh; None if a size does not divide."""
        if counts not in self._blocks:
            self._blocks[counts] = self._cut(counts)
        return self._blocks[counts]

    def _cut(self, counts: tuple[int, ...]) -> BlockCounts | None:
        *operands, out = [side.block(counts) for side in self._sides]
        if out is None or None in operands:
            return None
        blocks = tuple([t for t in operands if t is not None])
        work = self.op.opdef.work(blocks, out, self.op.attrs)
        return BlockCounts(tuple([t.shape.size for t in blocks]), out.shape.size, work)

    def under(self, mesh: Mesh, axes: Mapping[str, Axes], passed: tuple[Axes, ...]) -> Assigned | None:
        """The operation under an assignment, with `passed` pending axes of each operand passing through; None if
        impossible."""
        key = (mesh, tuple(axes.items()), passed)
        if key not in self._assigned:
            self._assigned[key] = self._under(mesh, axes, passed)
        return self._assigned[key]

    def _under(self, mesh: Mesh, axes: Mapping[str, Axes], passed: tuple[Axes, ...]) -> Assigned | None:
        over = [axes.get(name, ()) for name in self.names]
        kinds = {a: "sum" for p in passed for a in p}
        for name, kind in self._leaves:
            kinds.update(dict.fromkeys(axes.get(name, ()), kind))
        pending = [*[tuple([(a, "sum") for a in p]) for p in passed], tuple(kinds.items())]
        placed = []
        for side, waiting in zip(self._sides, pending, strict=True):
            entries = side.entries(over)
            if entries is None:
                return None
            try:
                placed.append(laid(side.type.shape, mesh, entries, waiting))
            except LayoutError:  # mixed kinds of pending, or a size that does not divide
                return None
        *operands, out = placed
        exchanges = plan_exchanges(self.op, self.factors, axes, operands, out) if self._exchanges else ()
        return Assigned(tuple(operands), out, exchanges)

    def forget_assignments(self) -> None:
        """Drop cached results of particular meshes."""
        self._assigned.clear()
        self.options.clear()
        self.splits.clear()


class _Side:
    """The type of an operand or result, with the factors of each of its dims by number."""

    def __init__(self, type_: TensorType, names: Sequence[str | None], shares: Set[int]) -> None:
        self.type, self._shares = type_, shares
        self._factors = [[n for n, name in enumerate(names) if name == dim] for dim in type_.shape.names]
        # If every dim is one factor, the factor of each dim.
        alone = all(len(numbers) == 1 and shares.isdisjoint(numbers) for numbers in self._factors)
        self._only = [numbers[0] for numbers in self._factors] if alone else None
        self._blocks: dict[tuple[int, ...], TensorType | None] = {}

    def entries(self, over: Sequence[Axes]) -> tuple[Axes, ...] | None:
        """The axes that split each dim, given those of each factor; None if two factors split one dim.

        Existing splits of a dim are major of the axes of a factor that `shares` it.
        """
        if self._only is not None:
            return tuple([over[n] for n in self._only])
        entries: list[Axes] = []
        for numbers in self._factors:
            entry: Axes = ()
            minor: Axes = ()
            for n in numbers:
                if n in self._shares:
                    minor += over[n]
                elif over[n]:
                    if entry:
                        return None
                    entry = over[n]
            entries.append(entry + minor)
        return tuple(entries)

    def block(self, counts: Sequence[int]) -> TensorType | None:
        """The type of one device's block, None if a size does not divide; splits by several factors of a dim
        multiply."""
        if self._only is not None:
            along = tuple([counts[n] for n in self._only])
        else:
            along = tuple([prod([counts[n] for n in numbers]) for numbers in self._factors])
        if along not in self._blocks:
            shape = self.type.shape
            divides = not any(size % n for size, n in zip(shape.sizes, along, strict=True))
            self._blocks[along] = TensorType(block(shape, along), self.type.dtype) if divides else None
        return self._blocks[along]


@dataclass(eq=False)
class Signatures:
    """The signatures of a graph's operations."""

    _of: dict[Operation, Signature] = field(default_factory=dict)
    _alike: dict[object, Signature] = field(default_factory=dict)
    _shared: dict[object, Any] = field(default_factory=dict)  # see `Signature`

    def of(self, op: Operation) -> Signature:
        """The signature of an operation."""
        signature = self._of.get(op)
        if signature is None:
            types = [(t.shape, t.dtype) for t in (*op.inputs, *op.outputs)]
            key = (op.opdef, tuple(op.attrs.items()), len(op.inputs), *types)
            signature = self._alike.get(key)
            if signature is None:
                signature = self._alike[key] = Signature(op, self._shared)
            self._of[op] = signature
        return signature

    def sibling(self) -> Signatures:
        """Signatures for another graph, sharing those of equal operations with this one."""
        return Signatures(_alike=self._alike, _shared=self._shared)

    def forget_assignments(self) -> None:
        """Drop cached results of particular meshes."""
        for signature in self._alike.values():
            signature.forget_assignments()
