"""A generic interpreter of programs, instruction by instruction, on values of any type.

Executors (the exact one on blocks of every device, the fast one on whole arrays, `verify` in float64) define the
results of computations and moves. Order, loops and live ranges are handled here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Generic, Protocol, Self, TypeVar

from meshlib.program.instructions import Compute, Instruction, Loop, Move, Value
from meshlib.program.records import Program

T = TypeVar("T")


class RunContext(Protocol):
    """Context passed to computations; inside a loop it includes the trip."""

    def in_trip(self, trip: int) -> Self:
        """This context inside one trip of a loop."""


C = TypeVar("C", bound=RunContext)


class Interpreter(ABC, Generic[T, C]):
    """Interpreter of programs on values of type `T` in a context of type `C`."""

    @abstractmethod
    def compute(self, program: Program, i: Compute, inputs: Sequence[T], context: C) -> Iterable[T]:
        """The results of a computation."""

    @abstractmethod
    def move(self, i: Move, inputs: Sequence[T]) -> Iterable[T]:
        """The result of each step of a move."""

    @abstractmethod
    def sliced(self, x: T, trip: int, axis: int) -> T:
        """One index of a loop's operand along the loop's dim, at `axis`."""

    @abstractmethod
    def stacked(self, i: Loop, n: int, parts: Sequence[T]) -> T:
        """The `n`-th stacked result: the values of all trips along a new first dim."""

    @abstractmethod
    def goes_on(self, going: T) -> bool:
        """True if a loop with a condition runs another trip."""

    def observe(self, i: Instruction, y: Value, value: T) -> None:
        """Called with every new value."""

    def before(self, program: Program, n: int, values: dict[Value, T]) -> None:
        """Called before instruction `n` runs; may replace `values` by equal ones."""

    def run(self, program: Program, given: Mapping[Value, T], context: C) -> dict[Value, T]:
        """Run the instructions on the values of inputs and variables.

        Returns the fetched and written values; others are freed after their last use.
        """
        values = dict(given)
        for n, (i, dead) in enumerate(zip(program.instructions, program.dead_after, strict=True)):
            self.before(program, n, values)
            inputs = [values[x] for x in i.inputs]
            for y, value in zip(i.outputs, self.results(program, i, inputs, values, context), strict=True):
                values[y] = value
                self.observe(i, y, value)
            for x in dead:
                values.pop(x, None)
        return values

    def results(
        self, program: Program, i: Instruction, inputs: Sequence[T], values: Mapping[Value, T], context: C
    ) -> Iterable[T]:
        """The results of an instruction; empty for resident values."""
        match i:
            case Compute():
                return self.compute(program, i, inputs, context)
            case Move():
                return self.move(i, inputs)
            case Loop():
                return self.loop(i, inputs, context)
        return [values[y] for y in i.outputs]

    def loop(self, i: Loop, inputs: Sequence[T], context: C) -> list[T]:
        """All trips of a loop: the final carries, then the stacked values."""
        body = i.body
        given = dict(zip(body.inputs.values(), inputs, strict=True))
        whole = {body.inputs[name]: (given[body.inputs[name]], i.slice_axis(name)) for name in i.slices}
        trips: list[list[T]] = [[] for _ in i.stacks]
        for trip in i.trip_order:
            if i.going is not None and not self.goes_on(given[body.inputs[i.going]]):
                break
            given.update({v: self.sliced(x, trip, axis) for v, (x, axis) in whole.items()})
            values = self.trip(i, trip, given, context.in_trip(trip))
            for parts, name in zip(trips, i.stacks, strict=True):
                parts.append(values[body.outputs[name]])
            given.update({body.inputs[begin]: values[body.outputs[end]] for begin, end in i.carries})
        in_order = trips if i.trip_order.step > 0 else [parts[::-1] for parts in trips]
        finals = [given[body.inputs[begin]] for begin, _ in i.carries]
        return finals + [self.stacked(i, n, parts) for n, parts in enumerate(in_order)]

    def trip(self, i: Loop, trip: int, given: Mapping[Value, T], context: C) -> Mapping[Value, T]:
        """One run of a loop's body."""
        return self.run(i.body, given, context)
