"""Partitioning: from the unsharded graph to local instructions with explicit, explained reshards.

First `meshlib.lowering.problem` chooses the strategy of every operation; then a sweep in program order reshards its
operands, emits it, and reshards bound results to their assigned sharding (rules 1 to 4, 7).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from layouts import Sharding
from meshlib.core.graph import UPDATE, Operation, Tensor
from meshlib.core.opdef import Home, Kind
from meshlib.lowering.assigned import Homes
from meshlib.lowering.bindings import binding, least_memory, settled
from meshlib.lowering.expected_halos import Near
from meshlib.lowering.graph_cache import Prices
from meshlib.lowering.loops import Body, Loops
from meshlib.lowering.placements import Places
from meshlib.lowering.problem import Chosen, Problem, best_choices
from meshlib.lowering.simplification import Simplified
from meshlib.program.instructions import Commit, Compute, Resident, Value
from meshlib.program.signature import Signatures


@dataclass(eq=False)
class Partitioner:
    """State of the partitioning sweep."""

    graph: Simplified
    homes: Homes
    prices: Prices
    signatures: Signatures
    fetched: set[Tensor]
    body: Body  # how loops are lowered
    near: Mapping[Operation, Near] = field(default_factory=dict)  # see `near_shifts`
    choose: Callable[[Problem], Chosen] = best_choices
    variables: dict[str, Value] = field(default_factory=dict)
    inputs: dict[str, Value] = field(default_factory=dict)
    updates: dict[str, Value] = field(default_factory=dict)
    places: Places = field(init=False)
    problem: Problem = field(init=False)
    chosen: Chosen = field(init=False)

    def __post_init__(self) -> None:
        self.loops = Loops(self.graph, self.homes, self.fetched, self.body)
        self.places = Places(self.graph, self.homes, self.signatures, self.prices.balance)
        self.problem = Problem(
            self.graph, self.homes, self.prices, self.signatures, self.fetched, self.loops, self.near
        )
        self.chosen = self.places.chosen = self.choose(self.problem)

    def run(self) -> None:
        """Lower every operation, in order."""
        for op in self.graph.operations:
            match op.opdef.kind:
                case Kind.INPUT | Kind.VARIABLE:
                    self.resident(op)
                case Kind.COMMIT:
                    self._assign(op)
                case Kind.LOOP:
                    self._loop(op)
                case Kind.COPY:
                    self._copy(op)
                case _:
                    self._compute(op)

    def at_home(self, t: Tensor) -> Value:
        """`t` under its assigned sharding, resharded if necessary: for fetched outputs."""
        return self.at(t, self.homes.of(t))

    def at(self, t: Tensor, wanted: Sharding) -> Value:
        """`t` under a given sharding: for loop carries."""
        return self.places.use(t, wanted, self.graph.operations[-1].region, None)

    def as_is(self, t: Tensor) -> Value:
        """`t` under an existing sharding: the assigned one, otherwise the smallest blocks; reduced if it is pending."""
        there = [v.sharding for _, v in self.places.instances[t]]
        return self.at(t, least_memory(there, self.homes.of(t)))

    # ------------------------------------------------------------ operations

    def resident(self, op: Operation) -> None:
        """Enter a value that exists before the first instruction: an input or a variable."""
        value = Value(op.output, self.homes.of(op.output))
        self.places.instances[op.output] = [(None, value)]
        # A value that is already pending is a loop's accumulator.
        self.places.makers[op.output] = dict.fromkeys(value.sharding.pending_axes, (op, "trips"))
        (self.inputs if op.opdef.kind is Kind.INPUT else self.variables)[op.name] = value
        self.places.instructions.append(Resident(op, (), (value,), op.region))

    def _assign(self, op: Operation) -> None:
        (x,) = self.graph.inputs[op]
        name = op.attrs["variable"]
        if name not in self.variables:  # written but never read
            self.resident(self.homes.graph.variables[name])
        value = self.places.use(x, self.variables[name].sharding, UPDATE, op)
        self.updates[name] = value
        self.places.instructions.append(Commit(op, (value,), (), UPDATE))

    def _copy(self, op: Operation) -> None:
        """Copy between device and host memory, block by block."""
        (x,) = self.graph.inputs[op]
        ((choice,),) = self.chosen.runs[op]
        value = self.places.use(x, choice.operands[0], op.region, op)
        copy = Value(op.output, value.sharding)
        self.places.instructions.append(Compute(op, (value,), (copy,), op.region, choice.assignment))
        self._settle(copy)

    def _compute(self, op: Operation) -> None:
        first, *others = self.chosen.runs[op][0]
        for value in self.places.compute(op, first, op.region):
            self._settle(value)
        for choice in others:
            for value in self.places.compute(op, choice, op.region):
                self.places.add(value.tensor, value, op.region)

    def _settle(self, made: Value) -> None:
        """Reshard a result, computed as `made`, to its assigned sharding if it is bound."""
        t = made.tensor
        bound = binding(t, self.graph, self.homes, self.fetched)
        _, placements = settled(made.sharding, bound, self.homes.of(t), t.dtype.itemsize, self.prices.balance)
        value = made
        for s in placements:
            value = self.places.reshard(value, s, None)
            self.places.add(t, value, t.operation.region)
        if t.operation.opdef.home is Home.GIVEN:
            # A constrained value exists under its assigned sharding alone, so that users cannot bypass the constraint.
            self.places.instances[t] = self.places.instances[t][-1:]
        for s in placements:
            self.places.keep(t, s, t.operation.region, None)

    def _loop(self, op: Operation) -> None:
        looped = self.loops.of(op)
        values = [self.places.use(x, s, op.region, op) for x, s in zip(looped.operands, looped.wanted, strict=True)]
        self.places.instructions.append(looped.instruction(op, values))
        self.places.makers.update(looped.makers)
        for value in looped.made:
            self._settle(value)
