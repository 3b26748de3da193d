"""What operations that compute the same have in common, under every mesh and layout.

The layers of a model are written again and again, and a graph is lowered again and again: what an operation's record
says of it is asked once for all that are alike, and what it means to split it once for each mesh and assignment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from layouts import LayoutError, Mesh, Sharding
from meshlib.graph import Operation, TensorType
from meshlib.operation import Factor, Linear, Role, Work
from meshlib.program.exchange import Exchange, plan_exchanges
from meshlib.program.split import Axes, derive


@dataclass(eq=False)
class Assigned:
    """An operation under one assignment of axes to its factors: no layout, no home and no price is in it."""

    signature: Signature
    axes: Mapping[str, Axes]
    operands: tuple[Sharding, ...]
    out: Sharding

    @cached_property
    def work(self) -> Work:
        """What one device does."""
        op = self.signature.op
        types = (TensorType(s.local_shape, x.dtype) for s, x in zip(self.operands, op.inputs, strict=True))
        return op.kind.work(tuple(types), TensorType(self.out.local_shape, op.output.dtype), op.attrs)

    @cached_property
    def exchanges(self) -> tuple[Exchange, ...]:
        """What moves inside the operation."""
        return plan_exchanges(self.signature.op, self.signature.factors, self.axes, self.operands, self.out)


@dataclass(eq=False)
class Signature:
    """All operations of one kind with equal attributes on operands of equal types; `op` is one of them."""

    op: Operation
    factors: tuple[Factor, ...]
    linear: Linear
    _assigned: dict[object, Assigned | None] = field(default_factory=dict)

    @cached_property
    def reduces(self) -> bool:
        """Whether a split of some factor leaves a pending reduction."""
        return any(f.role.reduces for f in self.factors)

    @cached_property
    def extremes(self) -> tuple[str, ...]:
        """The factors over which it takes a maximum or minimum."""
        return tuple(f.name for f in self.factors if f.role in (Role.MAX, Role.MIN))

    def under(self, mesh: Mesh, axes: Mapping[str, Axes], passed: tuple[Axes, ...]) -> Assigned | None:
        """It under an assignment, `passed` pending axes of each operand going through; None where that cannot be."""
        key = (mesh, tuple(axes.items()), passed)
        if key not in self._assigned:
            op = self.op
            try:
                operands, out = derive(self.factors, axes, [x.shape for x in op.inputs], op.output.shape, mesh, passed)
                self._assigned[key] = Assigned(self, axes, operands, out)
            except LayoutError:  # mixed kinds of pending, or a size that does not divide
                self._assigned[key] = None
        return self._assigned[key]

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
                found = self._alike[key] = Signature(op, op.kind.roles(op), op.kind.linear(op))
            self._of[op] = found
        return found

    def forget_assignments(self) -> None:
        """Keep what holds for every mesh only."""
        for signature in self._alike.values():
            signature.forget_assignments()
