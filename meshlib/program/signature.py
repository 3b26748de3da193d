"""Signatures of operations: equal for those that compute the same under every mesh and layout.

The layers of a model are written again and again, and a graph is lowered again and again: what an operation's record
says of it is asked once for all that are alike, and what it means to split it once for each mesh and assignment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

from layouts import LayoutError, Mesh, Sharding
from layouts.sharding import block, laid
from meshlib.core.graph import Operation, Tensor, TensorType
from meshlib.core.opdef import Work
from meshlib.program.exchanges import TOGETHER, Exchange, plan_exchanges
from meshlib.program.factor_shardings import Axes


class BlockCounts(NamedTuple):
    """An operation whose factors are cut into so many blocks each: what bounds the price of an assignment."""

    operands: tuple[int, ...]  # elements of one device's block
    out: int
    work: Work


class Assigned(NamedTuple):
    """An operation under one assignment of axes to its factors: no layout, no home and no price is in it."""

    operands: tuple[Sharding, ...]  # what each operand must be
    out: Sharding
    exchanges: tuple[Exchange, ...]  # what moves inside the operation


class Signature:
    """All operations of one kind with equal attributes on operands of equal types; `op` is one of them."""

    def __init__(self, op: Operation) -> None:
        self.op = op
        self.factors = op.opdef.roles(op)
        self.linear = op.opdef.linear(op)
        self.names = tuple(f.name for f in self.factors)
        self.reducing = tuple(f.name for f in self.factors if f.role.reduces)  # a split leaves the result pending
        self._exchanges = any(f.role in TOGETHER for f in self.factors)
        self._leaves = [(f.name, f.role.pending) for f in self.factors if f.role.pending is not None]
        shares = frozenset(n for n, f in enumerate(self.factors) if f.shares is not None)
        self._sides = [_Side(x, [f.operands[n] for f in self.factors]) for n, x in enumerate(op.inputs)]
        self._sides.append(_Side(op.output, [f.outputs[0] for f in self.factors], shares))
        self._blocks: dict[tuple[int, ...], BlockCounts | None] = {}
        self._assigned: dict[object, Assigned | None] = {}
        self.ways: dict[object, Any] = {}  # how the lowering brings results of it to a place
        self.splits: dict[object, Any] = {}  # by the axes that may split its operands' dims, those of its factors

    def cut(self, counts: tuple[int, ...]) -> BlockCounts | None:
        """It with `counts` blocks along each factor, on whatever mesh; None where a size does not divide."""
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
        """It under an assignment, `passed` pending axes of each operand going through; None where that cannot be."""
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
                placed.append(laid(side.tensor.shape, mesh, entries, waiting))
            except LayoutError:  # mixed kinds of pending, or a size that does not divide
                return None
        *operands, out = placed
        exchanges = plan_exchanges(self.op, self.factors, axes, operands, out) if self._exchanges else ()
        return Assigned(tuple(operands), out, exchanges)

    def forget_assignments(self) -> None:
        """Keep what holds for every mesh only."""
        self._assigned.clear()
        self.ways.clear()
        self.splits.clear()


class _Side:
    """An operand or the result of an operation, and the numbers of the factors that each of its dims is."""

    def __init__(self, tensor: Tensor, names: Sequence[str | None], shares: Set[int] = frozenset()) -> None:
        self.tensor, self._shares = tensor, shares
        self._factors = [[n for n, name in enumerate(names) if name == dim] for dim in tensor.shape.names]
        # Where every dim is one factor, that of each dim.
        alone = all(len(numbers) == 1 and shares.isdisjoint(numbers) for numbers in self._factors)
        self._only = [numbers[0] for numbers in self._factors] if alone else None
        self._blocks: dict[tuple[int, ...], TensorType | None] = {}

    def entries(self, over: Sequence[Axes]) -> tuple[Axes, ...] | None:
        """The axes that split each dim, where each factor is split over some; None if two factors split one dim.

        What splits a dim already is major of the axes of a factor that `shares` it out.
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
        """The type of one device's block, None where a size does not divide; what several factors cut is cut by all."""
        if self._only is not None:
            along = tuple([counts[n] for n in self._only])
        else:
            along = tuple([prod([counts[n] for n in numbers]) for numbers in self._factors])
        if along not in self._blocks:
            shape = self.tensor.shape
            divides = not any(size % n for size, n in zip(shape.sizes, along, strict=True))
            self._blocks[along] = TensorType(block(shape, along), self.tensor.dtype) if divides else None
        return self._blocks[along]


@dataclass(eq=False)
class Signatures:
    """The signatures of a graph's operations."""

    _of: dict[Operation, Signature] = field(default_factory=dict)
    _alike: dict[object, Signature] = field(default_factory=dict)

    def of(self, op: Operation) -> Signature:
        """The signature of an operation."""
        signature = self._of.get(op)
        if signature is None:
            types = [(t.shape, t.dtype) for t in (*op.inputs, *op.outputs)]
            key = (op.opdef, tuple(op.attrs.items()), len(op.inputs), *types)
            signature = self._alike.get(key)
            if signature is None:
                signature = self._alike[key] = Signature(op)
            self._of[op] = signature
        return signature

    def sibling(self) -> Signatures:
        """The signatures of another graph, which are those of this one for operations that are alike."""
        return Signatures(_alike=self._alike)

    def forget_assignments(self) -> None:
        """Keep what holds for every mesh only."""
        for signature in self._alike.values():
            signature.forget_assignments()
