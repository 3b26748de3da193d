"""The shardings in which each tensor exists while a program is written.

A value is resharded once per target sharding and then serves all users there, in other regions too, unless that copy
takes more memory than the assigned sharding.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from layouts import Sharding, reshard
from layouts.step_kinds import STEP_KINDS
from meshlib.core.graph import Operation, Tensor
from meshlib.lowering.assigned import Homes
from meshlib.lowering.balance import Balance
from meshlib.lowering.distances import between
from meshlib.lowering.loops import Makers
from meshlib.lowering.problem import Chosen
from meshlib.lowering.reasons import explain_exchange, explain_step
from meshlib.lowering.simplification import Simplified
from meshlib.lowering.strategies import Choice
from meshlib.program.factor_shardings import beside
from meshlib.program.instructions import Compute, Instruction, Move, Value
from meshlib.program.signature import Signatures


@dataclass(eq=False)
class Places:
    """The shardings in which each tensor exists; emits the instructions that materialise it under others."""

    graph: Simplified
    homes: Homes
    signatures: Signatures
    balance: Balance
    chosen: Chosen = field(init=False)
    instructions: list[Instruction] = field(default_factory=list)
    # (region that may use it, value); None: all regions.
    instances: dict[Tensor, list[tuple[str | None, Value]]] = field(default_factory=dict)
    # For a pending tensor: axis -> (operation that left it pending, reduced dim).
    makers: dict[Tensor, Makers] = field(default_factory=dict)

    def known(self, t: Tensor, region: str) -> list[Value]:
        """The values of `t` that a region may use; if there are none, those of other regions."""
        allowed = [v for r, v in self.instances[t] if r is None or r == region]
        return allowed or [v for _, v in self.instances[t]]

    def made(self, t: Tensor) -> Value:
        """`t` as computed by its operation."""
        return self.instances[t][0][1]

    def add(self, t: Tensor, value: Value, region: str) -> None:
        """Add a copy of `t` for the regions that may use it."""
        self.instances.setdefault(t, []).append((self.homes.reach(t, value.sharding, region), value))

    def use(self, t: Tensor, wanted: Sharding, region: str, user: Operation | None) -> Value:
        """`t` under `wanted`, made as the tree of its copies says; user None: for its assigned sharding."""
        there = self._existing(t, wanted, region)
        source = self.chosen.tree(t).parents.get((region, wanted)) if there is None else None
        origin = None if source is None else self.use(t, source[1], source[0], user)
        there = there or self._existing(t, wanted, region)  # possibly made by now, for later regions
        if there is not None:
            return there
        value = self._outside_tree(t, wanted, region, user) if origin is None else self.reshard(origin, wanted, user)
        self.add(t, value, region)
        self.keep(t, wanted, region, user)
        return value

    def _existing(self, t: Tensor, wanted: Sharding, region: str) -> Value | None:
        return next((v for v in self.known(t, region) if v.sharding == wanted), None)

    def keep(self, t: Tensor, there: Sharding, region: str, user: Operation | None) -> None:
        """If a copy takes too much memory to serve later regions, make from it what these need."""
        if self.homes.reach(t, there, region) is not None:
            for s in self.chosen.tree(t).kept.get((region, there), ()):
                self.use(t, s, region, user)

    def _outside_tree(self, t: Tensor, wanted: Sharding, region: str, user: Operation | None) -> Value:
        """`t` under `wanted`: computed again, or resharded from the nearest copy."""
        if wanted.pending and t in self.graph.again:  # a recomputed value is complete, and counts on one device
            self.use(t, wanted.drop_pending(), region, user)
        known, itemsize, prices = self.known(t, region), t.dtype.itemsize, self.balance.axis_prices
        costs = [between(v.sharding, wanted, itemsize, prices) for v in known]
        cost, nearest = min(costs), known[costs.index(min(costs))]
        choice = self.chosen.again(t, region, wanted) if cost > (0, 0) else None
        if choice is not None:
            return self.compute(t.operation, choice, region)[0]
        return self.reshard(nearest, wanted, user)

    def compute(self, op: Operation, choice: Choice, region: str) -> tuple[Value, ...]:
        """Emit an operation under a choice; returns its results."""
        values = [self.use(x, s, region, op) for x, s in zip(self.graph.inputs[op], choice.operands, strict=True)]
        results = tuple([Value(y, s) for y, s in zip(op.outputs, beside(op, choice.out), strict=True)])
        if choice.out.pending:
            self._note_makers(op, choice)
        reasons = tuple([explain_exchange(e, op, self.homes) for e in choice.exchanges])
        self.instructions.append(
            Compute(op, tuple(values), results, region, choice.assignment, choice.exchanges, reasons)
        )
        return results

    def _note_makers(self, op: Operation, choice: Choice) -> None:
        """Record the operation responsible for each pending axis of the result."""
        makers: dict[str, tuple[Operation, str]] = {}
        self.makers.update((y, makers) for y in op.outputs)
        for x, s in zip(self.graph.inputs[op], choice.operands, strict=True):
            known = self.makers.get(x, {})
            makers.update({a: known[a] for a in s.pending_axes if a in known})
        for name in self.signatures.of(op).reducing:
            makers.update(dict.fromkeys(choice.axes.get(name, ()), (op, name)))

    def reshard(self, value: Value, wanted: Sharding, user: Operation | None) -> Value:
        """Emit the steps of the cheapest reshard; returns the result."""
        t = value.tensor
        for step in reshard(value.sharding, wanted, t.dtype.itemsize).steps:
            makers = [self.makers[t][a] for a in step.axes] if STEP_KINDS[step.kind].reduces else []
            reason = explain_step(step, t, makers, user, self.homes)
            before, value = value, Value(t, step.after)
            self.instructions.append(Move(user or t.operation, (before,), (value,), reason.phase, (step,), (reason,)))
        return value
