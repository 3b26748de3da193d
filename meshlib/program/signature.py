"""What operations that compute the same have in common, under every mesh and layout.

The layers of a model are written again and again, and a graph is lowered again and again: what an operation's record
says of it is asked once for all that are alike, and what it means to split it once for each mesh and assignment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from layouts import Dimension, Mesh, Shape, Sharding
from meshlib.graph import Operation, Tensor, TensorType
from meshlib.operation import Work
from meshlib.program.exchange import Exchange, plan_exchanges
from meshlib.program.split import Axes, derive


class Blocks(NamedTuple):
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
        self.factors = op.kind.roles(op)
        self.linear = op.kind.linear(op)
        self.names = tuple(f.name for f in self.factors)
        self.reducing = {f.name: f.role.value for f in self.factors if f.role.reduces}  # a split leaves it pending
        self._blocks: dict[tuple[int, ...], Blocks | None] = {}
        self._assigned: dict[object, Assigned] = {}

    def cut(self, counts: tuple[int, ...]) -> Blocks | None:
        """It with `counts` blocks along each factor, on whatever mesh; None where a size does not divide."""
        if counts not in self._blocks:
            self._blocks[counts] = self._cut(counts)
        return self._blocks[counts]

    def _cut(self, counts: tuple[int, ...]) -> Blocks | None:
        op = self.op
        cut = [(f, n) for f, n in zip(self.factors, counts, strict=True) if n > 1]
        types = [_block(x, {f.operands[i]: n for f, n in cut}) for i, x in enumerate(op.inputs)]
        out = _block(op.output, {f.outputs[0]: n for f, n in cut})
        operands = tuple(t for t in types if t is not None)
        if out is None or len(operands) < len(types):
            return None
        return Blocks(tuple(t.shape.size for t in operands), out.shape.size, op.kind.work(operands, out, op.attrs))

    def under(self, mesh: Mesh, axes: Mapping[str, Axes], passed: tuple[Axes, ...]) -> Assigned:
        """It under an assignment, `passed` pending axes of each operand going through."""
        key = (mesh, tuple(axes.items()), passed)
        found = self._assigned.get(key)
        if found is None:
            op = self.op
            operands, out = derive(self.factors, axes, [x.shape for x in op.inputs], op.output.shape, mesh, passed)
            found = Assigned(operands, out, plan_exchanges(op, self.factors, axes, operands, out))
            self._assigned[key] = found
        return found

    def forget_assignments(self) -> None:
        """Keep what holds for every mesh only."""
        self._assigned.clear()


def _block(t: Tensor, counts: Mapping[str | None, int]) -> TensorType | None:
    """The type of one device's block."""
    if not counts:
        return t.type
    dims = t.shape.dims
    if any(d.size % counts.get(d.name, 1) for d in dims):
        return None
    return TensorType(Shape([Dimension(d.name, d.size // counts.get(d.name, 1)) for d in dims]), t.dtype)


@dataclass(eq=False)
class Signatures:
    """The signatures of a graph's operations."""

    _of: dict[Operation, Signature] = field(default_factory=dict)
    _alike: dict[object, Signature] = field(default_factory=dict)

    def of(self, op: Operation) -> Signature:
        """The signature of an operation."""
        found = self._of.get(op)
        if found is None:
            key = (op.kind, tuple(op.attrs.items()), *(t.type for t in op.inputs), None, *(t.type for t in op.outputs))
            found = self._alike.get(key)
            if found is None:
                found = self._alike[key] = Signature(op)
            self._of[op] = found
        return found

    def forget_assignments(self) -> None:
        """Keep what holds for every mesh only."""
        for signature in self._alike.values():
            signature.forget_assignments()
