"""Where each tensor exists while a graph is partitioned, and how it gets elsewhere.

A value is brought to a sharding once a region and serves everybody there. What a sweep finds out about who brings what
is kept as `Foresight`: with it a second sweep can let early users share what later ones bring about anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from layouts import Sharding, reshard
from meshlib.graph import Operation, Tensor
from meshlib.lowering.homes import Homes
from meshlib.lowering.reasons import explain_step
from meshlib.lowering.simplification import Simplified
from meshlib.program.instructions import Commit, Compute, Instruction, Loop, Move, Value

Pending = tuple[tuple[str, str], ...]


@dataclass(eq=False)
class Foresight:
    """What a sweep learns for the next one.

    wants   per tensor and region, the shardings to which operations have it brought at some cost, or share
    sums    per n-ary sum, what each operand arrives pending over
    missed  whether some operation might choose otherwise if it knew
    """

    wants: dict[tuple[Tensor, str], dict[Operation, Sharding]] = field(default_factory=dict)
    sums: dict[Operation, tuple[Pending, ...]] = field(default_factory=dict)
    missed: bool = False

    def coming(self, t: Tensor, op: Operation) -> tuple[Sharding, ...]:
        """What operations after `op` have `t` brought to in its region; called in the order of the program."""
        wanted = self.wants.get((t, op.region))
        if not wanted:
            return ()
        wanted.pop(op, None)
        return tuple(dict.fromkeys(wanted.values()))


@dataclass(eq=False)
class Places:
    """The shardings in which each tensor exists; emits the instructions that bring it to others."""

    graph: Simplified
    homes: Homes
    instructions: list[Instruction] = field(default_factory=list)
    # For every region (None: as made for a single user, or at home) or within one.
    instances: dict[Tensor, list[tuple[str | None, Value]]] = field(default_factory=dict)
    # For a pending tensor: per axis the operation that left it pending, and the dim that it reduced.
    makers: dict[Tensor, dict[str, tuple[Operation, str]]] = field(default_factory=dict)
    learnt: Foresight = field(default_factory=Foresight)
    _used: dict[tuple[Tensor, str], set[Sharding]] = field(default_factory=dict)

    def known(self, t: Tensor, region: str) -> list[Value]:
        """The values of `t` that a region may use."""
        return [v for r, v in self.instances[t] if r is None or r == region]

    def made(self, t: Tensor) -> Value:
        """`t` as its operation made it or, once settled, at home."""
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

    def use(self, t: Tensor, wanted: Sharding, op: Operation) -> Value:
        """The value of `t` under `wanted`, for an operation."""
        value = self.bring(t, wanted, op.region, op)
        self._used.setdefault((t, op.region), set()).add(wanted)
        return value

    def bring(self, t: Tensor, wanted: Sharding, region: str, user: Operation | None) -> Value:
        """The value of `t` under `wanted`, from where it is nearest; None as user: to its home."""
        for r, v in self.instances[t]:
            if v.sharding == wanted and (r is None or r == region):
                if r is not None and user is not None:
                    self.learnt.wants.setdefault((t, region), {})[user] = wanted
                return v
        if self.remade(t, region):
            value = self._remake(t, wanted, region)
        else:
            size = t.dtype.itemsize
            usable = [v for v in self.known(t, region) if set(wanted.pending) <= set(v.sharding.pending)]
            nearest = min(usable, key=lambda v: _distance(v.sharding, wanted, size))
            if user is not None and _distance(nearest.sharding, wanted, size)[0]:
                self.learnt.wants.setdefault((t, region), {})[user] = wanted
                self.learnt.missed |= any(s != wanted for s in self._used.get((t, region), ()))
            *passed, value = self.walk(nearest, wanted, user)
            # What is summed up on the way is there for others.
            summed = [v for before, v in pairwise(passed) if before.sharding.pending and not v.sharding.pending]
            self.instances[t] += [(region, v) for v in summed]
        self.instances[t].append((region, value))
        return value

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

    def sent_bytes(self, kept: Sequence[Tensor]) -> float:
        """Bytes that a device sends by what was emitted so far, dead instructions aside."""
        needed = {self.made(t) for t in kept}
        total = 0.0
        for i in reversed(self.instructions):
            if not isinstance(i, Commit) and not any(y in needed for y in i.outputs):
                continue
            needed.update(i.inputs)
            total += i.sent_bytes
            if isinstance(i, Loop):
                total += i.trips * i.body.sent_bytes
        return total


def blockwise(sharding: Sharding) -> tuple[tuple[str, str], ...]:
    """The assignment of an operation that makes every block of its result from nothing but the block that is there."""
    return tuple((a, d.name) for d, axes in zip(sharding.shape, sharding.axes, strict=True) for a in axes)


def _distance(source: Sharding, wanted: Sharding, itemsize: int) -> tuple[float, int]:
    plan = reshard(source, wanted, itemsize)
    return plan.sent_bytes, plan.collectives
