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
        # Per dim of each operand, and of the result, the numbers of its factors.
        self._sides = [_numbers(x, [f.operands[n] for f in self.factors]) for n, x in enumerate(op.inputs)]
        self._sides.append(_numbers(op.output, [f.outputs[0] for f in self.factors]))
        self._shares = frozenset(n for n, f in enumerate(self.factors) if f.shares is not None)
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
        op = self.op
        types = [_block(x, side, counts) for x, side in zip((*op.inputs, op.output), self._sides, strict=True)]
        *operands, out = types
        if out is None or None in operands:
            return None
        blocks = tuple([t for t in operands if t is not None])
        work = op.opdef.work(blocks, out, op.attrs)
        return BlockCounts(tuple([t.shape.size for t in blocks]), out.shape.size, work)

    def under(self, mesh: Mesh, axes: Mapping[str, Axes], passed: tuple[Axes, ...]) -> Assigned | None:
        """It under an assignment, `passed` pending axes of each operand going through; None where that cannot be."""
        key = (mesh, tuple(axes.items()), passed)
        if key not in self._assigned:
            self._assigned[key] = self._under(mesh, axes, passed)
        return self._assigned[key]

    def _under(self, mesh: Mesh, axes: Mapping[str, Axes], passed: tuple[Axes, ...]) -> Assigned | None:
        op = self.op
        over = [axes.get(name, ()) for name in self.names]
        operand_axes = [_entries(side, over) for side in self._sides[:-1]]
        out_axes = _entries(self._sides[-1], over, self._shares)
        if out_axes is None or None in operand_axes:
            return None
        kinds = {a: "sum" for p in passed for a in p}
        for name, kind in self._leaves:
            kinds.update(dict.fromkeys(axes.get(name, ()), kind))
        try:
            placed = [
                laid(x.shape, mesh, entries, tuple([(a, "sum") for a in p]))
                for x, entries, p in zip(op.inputs, operand_axes, passed, strict=True)
                if entries is not None
            ]
            out = laid(op.output.shape, mesh, out_axes, tuple(kinds.items()))
        except LayoutError:  # mixed kinds of pending, or a size that does not divide
            return None
        exchanges = plan_exchanges(op, self.factors, axes, placed, out) if self._exchanges else ()
        return Assigned(tuple(placed), out, exchanges)

    def forget_assignments(self) -> None:
        """Keep what holds for every mesh only."""
        self._assigned.clear()
        self.ways.clear()
        self.splits.clear()


def _numbers(t: Tensor, names: Sequence[str | None]) -> list[list[int]]:
    """Per dim of a tensor the numbers of its factors, which have these names there."""
    return [[n for n, name in enumerate(names) if name == dim] for dim in t.shape.names]


def _entries(
    side: Sequence[Sequence[int]], over: Sequence[Axes], shares: Set[int] = frozenset()
) -> tuple[Axes, ...] | None:
    """The axes that split each dim, where each factor is split over some; None if a dim is split in two ways at once.

    What splits a dim already is major of the axes of a factor that `shares` it out.
    """
    entries: list[Axes] = []
    for numbers in side:
        entry: Axes = ()
        minor: Axes = ()
        for n in numbers:
            if n in shares:
                minor += over[n]
            elif over[n]:
                if entry:
                    return None
                entry = over[n]
        entries.append(entry + minor)
    return tuple(entries)


def _block(t: Tensor, side: Sequence[Sequence[int]], counts: Sequence[int]) -> TensorType | None:
    """The type of one device's block; what several factors cut is cut by all."""
    along = tuple([prod([counts[n] for n in factors]) for factors in side])
    if any(size % n for size, n in zip(t.shape.sizes, along, strict=True)):
        return None
    return TensorType(block(t.shape, along), t.dtype)


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
