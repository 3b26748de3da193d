"""What operations that compute the same have in common, under every mesh and layout.

The layers of a model are written again and again, and a graph is lowered again and again: what an operation's record
says of it is asked once for all that are alike, and what it means to split it once for each mesh and assignment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from layouts import LayoutError, Mesh, Sharding
from meshlib.graph import Operation, TensorType
from meshlib.operation import Role, Work
from meshlib.program.exchange import Exchange, plan_exchanges
from meshlib.program.split import Axes, derive


@dataclass(frozen=True, eq=False, slots=True)
class Assigned:
    """An operation under one assignment of axes to its factors: no layout, no home and no price is in it.

    operands   what each operand must be
    out        what comes out
    work       what one device does
    exchanges  what moves inside the operation
    """

    axes: Mapping[str, Axes]
    operands: tuple[Sharding, ...]
    out: Sharding
    work: Work
    exchanges: tuple[Exchange, ...]


class Signature:
    """All operations of one kind with equal attributes on operands of equal types; `op` is one of them."""

    def __init__(self, op: Operation) -> None:
        self.op = op
        self.factors = op.kind.roles(op)
        self.linear = op.kind.linear(op)
        self.reduces = any(f.role.reduces for f in self.factors)  # a split may leave a pending reduction
        self.extremes = tuple(f.name for f in self.factors if f.role in (Role.MAX, Role.MIN))
        self._assigned: dict[object, Assigned | None] = {}

    def under(self, mesh: Mesh, axes: Mapping[str, Axes], passed: tuple[Axes, ...]) -> Assigned | None:
        """It under an assignment, `passed` pending axes of each operand going through; None where that cannot be."""
        key = (mesh, tuple(axes.items()), passed)
        if key not in self._assigned:
            self._assigned[key] = self._under(mesh, axes, passed)
        return self._assigned[key]

    def _under(self, mesh: Mesh, axes: Mapping[str, Axes], passed: tuple[Axes, ...]) -> Assigned | None:
        op = self.op
        try:
            operands, out = derive(self.factors, axes, [x.shape for x in op.inputs], op.output.shape, mesh, passed)
        except LayoutError:  # mixed kinds of pending, or a size that does not divide
            return None
        types = tuple([TensorType(s.local_shape, x.dtype) for s, x in zip(operands, op.inputs, strict=True)])
        work = op.kind.work(types, TensorType(out.local_shape, op.output.dtype), op.attrs)
        return Assigned(axes, operands, out, work, plan_exchanges(op, self.factors, axes, operands, out))

    def forget_assignments(self) -> None:
        """Keep what holds for every mesh only."""
        self._assigned.clear()


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
