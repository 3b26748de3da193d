"""Where each tensor exists while a program is written, and how it gets elsewhere.

A value is brought to a sharding once and serves everybody there: other regions too, unless keeping it takes more memory
than its home does.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from layouts import Sharding, reshard
from meshlib.graph import Operation, Tensor
from meshlib.lowering.choose import arrive, reach
from meshlib.lowering.homes import Homes
from meshlib.lowering.loops import Makers
from meshlib.lowering.reasons import explain_step
from meshlib.lowering.simplification import Simplified
from meshlib.program.instructions import Compute, Instruction, Move, Value


@dataclass(eq=False)
class Places:
    """The shardings in which each tensor exists; emits the instructions that bring it to others."""

    graph: Simplified
    homes: Homes
    instructions: list[Instruction] = field(default_factory=list)
    # For every region (None) or within one.
    instances: dict[Tensor, list[tuple[str | None, Value]]] = field(default_factory=dict)
    # For a pending tensor: per axis the operation that left it pending, and the dim that it reduced.
    makers: dict[Tensor, Makers] = field(default_factory=dict)

    def known(self, t: Tensor, region: str) -> list[Value]:
        """The values of `t` that a region may use."""
        return [v for r, v in self.instances[t] if r is None or r == region]

    def made(self, t: Tensor) -> Value:
        """`t` as its operation made it."""
        return self.instances[t][0][1]

    def remade(self, t: Tensor, region: str) -> bool:
        """Whether a value is made anew wherever a region needs it: constants, ranges, numbers in every place."""
        return t.operation.kind.remade and self._numbers(t.operation, region) is not None

    def _numbers(self, op: Operation, region: str) -> tuple[Value, ...] | None:
        """The operands of `op`, if they are single numbers; None if one has dims or waits for its sum."""
        found = []
        for x in self.graph.inputs[op]:
            whole = [] if x.shape else [v for v in self.known(x, region) if not v.sharding.pending]
            if not whole:
                return None
            found.append(whole[0])
        return tuple(found)

    def add(self, t: Tensor, value: Value, region: str) -> None:
        """Another place where `t` is to be had."""
        self.instances.setdefault(t, []).append((reach(value.sharding, self.homes.of(t), region), value))

    def use(self, t: Tensor, wanted: Sharding, op: Operation) -> Value:
        """The value of `t` under `wanted`, for an operation."""
        return self.bring(t, wanted, op.region, op)

    def bring(self, t: Tensor, wanted: Sharding, region: str, user: Operation | None) -> Value:
        """The value of `t` under `wanted`, from where it is nearest; None as user: to its home."""
        known = self.known(t, region)
        for v in known:
            if v.sharding == wanted:
                return v
        if self.remade(t, region):
            value = self._remake(t, wanted, region)
            self.instances[t].append((region, value))
            return value
        arrival = arrive(tuple([v.sharding for v in known]), wanted, t.dtype.itemsize)
        passed = {v.sharding: v for v in self.walk(known[arrival.source], wanted, user)}
        for s in arrival.new:
            self.add(t, passed[s], region)
        return passed[wanted]

    def _remake(self, t: Tensor, wanted: Sharding, region: str) -> Value:
        op, value = t.operation, Value(t, wanted)
        taken = self._numbers(op, region) or ()
        self.instructions.append(Compute(op, taken, (value,), region, blockwise(wanted)))
        return value

    def walk(self, value: Value, wanted: Sharding, user: Operation | None) -> list[Value]:
        """Emit the steps of the cheapest reshard. Returns `value`, then what each step makes of it."""
        t, values = value.tensor, [value]
        for step in reshard(value.sharding, wanted, t.dtype.itemsize).steps:
            reduces = step.kind in ("all_reduce", "reduce_scatter")
            makers = [self.makers[t][a] for a in step.axes] if reduces else []
            reason = explain_step(step, t, makers, user, self.homes)
            after = Value(t, step.after)
            op = user or t.operation
            self.instructions.append(Move(op, (values[-1],), (after,), reason.phase, (step,), (reason,)))
            values.append(after)
        return values


def blockwise(sharding: Sharding) -> tuple[tuple[str, str], ...]:
    """The assignment of an operation that makes every block of its result from nothing but the block that is there."""
    return tuple((a, d.name) for d, axes in zip(sharding.shape, sharding.axes, strict=True) for a in axes)
