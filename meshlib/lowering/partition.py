"""Partitioning: from the unsharded graph to local instructions with explicit, explained reshards.

First `meshlib.lowering.problem` chooses the strategy of every operation; then a sweep in program order reshards its
operands, emits it, and reshards bound results to their assigned sharding (rules 1 to 4, 7).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from layouts import Sharding
from meshlib.core.graph import UPDATE, Operation, Tensor
from meshlib.core.opdef import Home, Kind
from meshlib.lowering.assigned import Homes
from meshlib.lowering.bindings import binding, least_memory
from meshlib.lowering.expected_halos import Near
from meshlib.lowering.graph_cache import Prices
from meshlib.lowering.loops import Body, Loops
from meshlib.lowering.placements import Places
from meshlib.lowering.problem import Problem, best_choices
from meshlib.lowering.reasons import explain_exchange
from meshlib.lowering.simplification import Simplified
from meshlib.lowering.strategies import Choice, Choices
from meshlib.program.factor_shardings import beside
from meshlib.program.instructions import Commit, Compute, Loop, Resident, Value
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
    choose: Callable[[Problem], tuple[Choices, float]] = best_choices
    variables: dict[str, Value] = field(default_factory=dict)
    inputs: dict[str, Value] = field(default_factory=dict)
    updates: dict[str, Value] = field(default_factory=dict)
    places: Places = field(init=False)
    choices: Choices = field(default_factory=dict)
    excess_bytes: float = 0.0  # of the choices above their lower bound

    def __post_init__(self) -> None:
        self.loops = Loops(self.graph, self.homes, self.fetched, self.body)
        self.places = Places(self.graph, self.homes, self.signatures, self.prices.balance, self.loops)

    def run(self) -> None:
        """Lower every operation, in order."""
        problem = Problem(self.graph, self.homes, self.prices, self.signatures, self.fetched, self.loops, self.near)
        self.choices, self.excess_bytes = self.choose(problem)
        self.places.choices = self.choices
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
        return self.places.materialise(t, wanted, t.operation.region, None)

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
        value = self.places.materialise(x, self.variables[name].sharding, UPDATE, op)
        self.updates[name] = value
        self.places.instructions.append(Commit(op, (value,), (), UPDATE))

    def _copy(self, op: Operation) -> None:
        """Copy between device and host memory, block by block."""
        (x,) = self.graph.inputs[op]
        (choice,) = self.choices[op]
        value = self.places.use(x, choice.operands[0], op)
        copy = Value(op.output, value.sharding)
        self.places.instructions.append(Compute(op, (value,), (copy,), op.region, choice.assignment))
        self._settle(copy)

    def _compute(self, op: Operation) -> None:
        first, *others = self.choices[op]
        for value in self._computed(op, first):
            self._settle(value)
        for choice in others:
            for value in self._computed(op, choice):
                self.places.add(value.tensor, value, op.region)

    def _computed(self, op: Operation, choice: Choice) -> tuple[Value, ...]:
        """Emit an operation under a choice; returns its results."""
        inputs = self.graph.inputs[op]
        values = [self.places.use(x, s, op) for x, s in zip(inputs, choice.operands, strict=True)]
        results = tuple([Value(y, s) for y, s in zip(op.outputs, beside(op, choice.out), strict=True)])
        if choice.out.pending:
            self._note_makers(op, inputs, choice)
        reasons = tuple([explain_exchange(e, op, self.homes) for e in choice.exchanges])
        self.places.instructions.append(
            Compute(op, tuple(values), results, op.region, choice.assignment, choice.exchanges, reasons)
        )
        return results

    def _note_makers(self, op: Operation, inputs: Sequence[Tensor], choice: Choice) -> None:
        """Record the operation responsible for each pending axis of the result."""
        makers: dict[str, tuple[Operation, str]] = {}
        self.places.makers.update((y, makers) for y in op.outputs)
        for x, s in zip(inputs, choice.operands, strict=True):
            known = self.places.makers.get(x, {})
            makers.update({a: known[a] for a in s.pending_axes if a in known})
        for name in self.signatures.of(op).reducing:
            makers.update(dict.fromkeys(choice.axes.get(name, ()), (op, name)))

    def _settle(self, made: Value) -> None:
        """Reshard a result, computed as `made`, to its assigned sharding if it is bound."""
        t = made.tensor
        passing = self.places.add(t, made, t.operation.region) is not None
        settled = binding(t, self.graph, self.homes, self.fetched).settled(made.sharding, self.homes.of(t))
        if settled != made.sharding:
            self.places.materialise(t, settled, t.operation.region, None)
        elif passing:
            self.places.leave_copy(t, settled)
        if t.operation.opdef.home is Home.GIVEN:
            # A constrained value exists under its assigned sharding alone, so that users cannot bypass the constraint.
            self.places.instances[t] = self.places.instances[t][-1:]

    def _loop(self, op: Operation) -> None:
        looped = self.loops.of(op)
        values = [self.places.use(x, s, op) for x, s in zip(looped.operands, looped.wanted, strict=True)]
        self.places.instructions.append(
            Loop(
                op,
                tuple(values),
                looped.made,
                op.region,
                body=looped.body,
                trips=looped.trips,
                carries=looped.carries,
                slices=looped.slices,
                stacks=looped.stacks,
            )
        )
        self.places.makers.update(looped.makers)
        for value in looped.made:
            self._settle(value)
