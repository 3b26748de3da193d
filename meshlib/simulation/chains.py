"""Chains of elementwise operations, which the fast executor computes part by part.

Whole arrays would pass through memory once per operation. A chain runs all its operations on one part of their common
shape, small enough to stay in cache, and then on the next; values used inside the chain alone are never stored whole.
Each element is computed as by the single operations, so all bits are the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import numpy as np

from layouts import Shape
from meshlib.core.arrays import cuts, unwritten
from meshlib.core.engine import Engine
from meshlib.core.graph import Operation, TensorType
from meshlib.core.opdef import Block, Kind
from meshlib.program.instructions import Compute, Instruction, Value
from meshlib.program.records import Program
from meshlib.simulation.blocks import finished

Array = np.ndarray[Any, Any]
PART = 1 << 18  # elements of a part
LARGE = 1 << 21  # elements of the shapes computed by part: smaller arrays stay in cache anyway


@dataclass(frozen=True, eq=False)
class Chain(Instruction):
    """Elementwise operations with one result shape; the outputs are the results that other instructions read."""

    steps: tuple[Compute, ...]

    @staticmethod
    def of(steps: Sequence[Compute], uses: Mapping[Value, int]) -> Chain:
        """The chain of `steps`, given how often each value is read in the whole program."""
        inside = Counter(x for i in steps for x in i.inputs)
        results = [y for i in steps for y in i.outputs]
        inputs = tuple(x for x in inside if x not in {*results})
        outputs = tuple(y for y in results if uses[y] > inside[y])
        return Chain(steps[-1].operation, inputs, outputs, steps[-1].region, tuple(steps))

    @cached_property
    def last_use(self) -> dict[Value, int]:
        """The last step that reads each value."""
        return {x: n for n, i in enumerate(self.steps) for x in i.inputs}

    @cached_property
    def owners(self) -> dict[Value, Value]:
        """For each result, the last of those that overwrite one another in its array, beginning with it."""
        owners = {y: y for y in self.outputs}
        for n, i in reversed([*enumerate(self.steps)]):
            (y,) = i.outputs
            owner = owners.setdefault(y, y)
            for x in i.inputs[: i.operation.opdef.overwrites]:
                alike = x.tensor.dtype.storage == y.tensor.dtype.storage and x not in self.inputs and x not in owners
                if alike and self.last_use[x] == n and x not in i.inputs[i.operation.opdef.overwrites :]:
                    owners[x] = owner
                    break
        return owners

    @cached_property
    def scratch_numbers(self) -> dict[Value, int]:
        """The number of the scratch array of each owner that is not an output."""
        numbers: dict[Value, int] = {}
        free: list[int] = []
        for n, i in enumerate(self.steps):
            owner = self.owners[i.outputs[0]]
            if owner not in numbers and owner not in self.outputs:
                numbers[owner] = free.pop() if free else 1 + max(numbers.values(), default=-1)
            free += [numbers[x] for x in dict.fromkeys(i.inputs) if x in numbers and self.last_use[x] == n]
        return numbers

    def overwritable(self, y: Value) -> list[Value]:
        """The operands that are not read after the array of the output `y` is written."""
        n = next(n for n, i in enumerate(self.steps) if self.owners[i.outputs[0]] is y)
        first, *later = self.steps[n:]
        late = {*first.inputs[first.operation.opdef.overwrites :], *(x for i in later for x in i.inputs)}
        return [x for x in self.inputs if x not in late]


def chained(program: Program) -> list[Instruction]:
    """The instructions of a program, with elementwise operations over one large shape joined to chains.

    An operation joins those before it if no other instruction reads their results in between.
    """
    results = (*program.outputs.values(), *program.updates.values())
    uses = Counter([*(x for i in program.instructions for x in i.inputs), *results])
    instructions: list[Instruction] = []
    steps: list[Compute] = []

    def join() -> None:
        single = len(steps) == 1 and len(steps[0].inputs) < 3  # longer sums are several passes
        instructions.extend(steps if single or not steps else [Chain.of(steps, uses)])
        steps.clear()

    for i in program.instructions:
        step = _is_elementwise(i)
        alike = step and bool(steps) and i.outputs[0].tensor.shape == steps[0].outputs[0].tensor.shape
        if not alike and (step or not {y for before in steps for y in before.outputs}.isdisjoint(i.inputs)):
            join()
        if isinstance(i, Compute) and step:
            steps.append(i)
        else:
            instructions.append(i)
    join()
    return instructions


def _is_elementwise(i: Instruction) -> bool:
    """True if an instruction computes a large result elementwise and may overwrite an operand with it."""
    kind = i.operation.opdef
    if not isinstance(i, Compute) or kind.kind is not Kind.ELEMENTWISE or kind.show is not None:
        return False
    return kind.overwrites > 0 and i.outputs[0].tensor.shape.size >= LARGE


class PartStep(NamedTuple):
    """A step on parts of one shape.

    operands, result  numbers of values
    place             where the result is written: the number of an output, or a scratch array
    """

    operation: Operation
    types: tuple[TensorType, ...]
    out: TensorType
    operands: tuple[int, ...]
    result: int
    place: int | Array


class ChainRun:
    """A chain as a function of its operands and of arrays for its outputs.

    `memory`: scratch arrays that chains share, so that they stay in cache; more are appended as needed.
    """

    def __init__(self, chain: Chain, memory: list[Array]) -> None:
        self.chain, self.shape = chain, chain.steps[0].outputs[0].tensor.shape
        numbers = chain.scratch_numbers
        memory += [np.empty(8 * PART, np.uint8) for _ in range(len(memory), 1 + max(numbers.values(), default=-1))]
        self.scratch = {v: memory[n] for v, n in numbers.items()}
        self.stored = (*chain.inputs, *chain.outputs)
        self.numbers = {v: n for n, v in enumerate(dict.fromkeys((*self.stored, *chain.owners)))}
        self.parts = tuple(cuts(self.shape.sizes, PART))
        self._steps: dict[tuple[int, ...], list[PartStep]] = {}

    def run(self, inputs: Sequence[Array], outputs: Sequence[Array], engine: Engine) -> Sequence[Array]:
        """Fill `outputs`, and return them."""
        for memory in self.scratch.values():
            unwritten(memory)
        arrays = (*inputs, *outputs)
        names = [v.tensor.shape.names for v in self.stored]
        for part in self.parts:
            index = dict(zip(self.shape.names, part, strict=True))
            values = [x[(*map(index.get, of), ...)] for x, of in zip(arrays, names, strict=True)]
            values += [values[-1]] * (len(self.numbers) - len(values))
            for op, types, out, operands, result, place in self.steps_on(tuple([c.stop - c.start for c in part])):
                # An elementwise operation needs no offsets.
                block = Block(op, types, out, {}, engine, values[place] if isinstance(place, int) else place)
                (values[result],) = finished(op, (out,), op.opdef.local(block, *[values[n] for n in operands]))
        return outputs

    def steps_on(self, sizes: tuple[int, ...]) -> list[PartStep]:
        """The steps on parts of these sizes."""
        if sizes not in self._steps:
            size = dict(zip(self.shape.names, sizes, strict=True))

            def part(v: Value) -> TensorType:
                return TensorType(Shape([(name, size[name]) for name in v.tensor.shape.names]), v.tensor.dtype)

            self._steps[sizes] = [
                PartStep(
                    i.operation,
                    tuple(map(part, i.inputs)),
                    part(y),
                    tuple(self.numbers[x] for x in i.inputs),
                    self.numbers[y],
                    self._place(y, sizes),
                )
                for i in self.chain.steps
                for y in i.outputs
            ]
        return self._steps[sizes]

    def _place(self, y: Value, sizes: tuple[int, ...]) -> int | Array:
        owner, dtype = self.chain.owners[y], y.tensor.dtype.storage
        if owner in self.chain.outputs:
            return self.numbers[owner]
        return self.scratch[owner][: prod(sizes) * dtype.itemsize].view(dtype).reshape(sizes)
