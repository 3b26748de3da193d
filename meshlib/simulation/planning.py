"""Planning of the fast executor: chains of elementwise operations, and buffers from live ranges.

Whole arrays would pass through memory once per operation. A chain runs all its operations on one part of their common
shape, small enough to stay in cache, and then on the next; values used inside the chain alone are never stored whole.
Each element is computed as by the single operations, so all bits are the same.

A computation writes to a buffer. Views of its result share that buffer, which therefore lives until the last of them is
used; then it is free again. Element-wise work overwrites an operand that dies there. New values of variables alternate
between two arrays, one of which is the state's.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import numpy as np

from layouts import Shape
from meshlib.core.arrays import cuts, memory_of, new_array, unwritten
from meshlib.core.engine import Engine
from meshlib.core.graph import Operation, TensorType
from meshlib.core.opdef import EVERY, Block, Kind, Storage
from meshlib.program.instructions import Commit, Compute, Instruction, Loop, Move, Resident, Value
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


def _writes(i: Instruction) -> bool:
    """True if an instruction writes its results into buffers given to it."""
    if isinstance(i, Resident | Move | Loop | Commit) or (len(i.outputs) != 1 and not isinstance(i, Chain)):
        return False
    return not isinstance(i, Compute) or i.operation.opdef.storage is Storage.FRESH


def overwritable(i: Instruction, y: Value) -> Sequence[Value]:
    """The operands of an instruction that its result `y` may overwrite element by element."""
    if isinstance(i, Chain):
        return i.overwritable(y)
    return i.inputs[: i.operation.opdef.overwrites if isinstance(i, Compute) else EVERY]


class Buffers:
    """The buffer plan of a program, and its arrays."""

    def __init__(self, program: Program) -> None:
        self.resident = {*program.inputs.values(), *program.variables.values()}
        self.owner: dict[Value, Value] = {v: v for v in self.resident}
        for i in program.instructions:
            self.owner.update(self._owners(i))
        self.last = self._last_uses(program)
        self.sizes: list[int] = []
        self.places: dict[Value, int] = {}
        self._assign(program)
        self.memory = [np.empty(size, np.uint8) for size in self.sizes]
        self.double = self._doubled(program)
        self.fixed = {v: self._view(self.memory[b], v) for v, b in self.places.items() if v not in self.double}
        # Two arrays each, so that a new value never overwrites the state that it was computed from.
        self.turns = {
            v: [new_array(v.tensor.shape.sizes, v.tensor.dtype.storage) for _ in range(2)] for v in self.double
        }

    def _owners(self, i: Instruction) -> Iterator[tuple[Value, Value]]:
        """(result, value whose memory it aliases). Loops, and operations with several results, own their memory."""
        fresh = not isinstance(i, Compute) or i.operation.opdef.storage is Storage.FRESH
        view = isinstance(i, Move) or (not fresh and len(i.outputs) == 1)
        for n, y in enumerate(i.outputs):
            x = i.inputs[n] if i.inputs and view else y
            yield y, self.owner.get(x, x)

    def begin(self, taken: Iterable[Array]) -> dict[Value, Array]:
        """The arrays to write to during the next step; none that the state has `taken`."""
        state = {id(memory_of(a)) for a in taken}
        for memory in self.memory:
            unwritten(memory)
        arrays = dict(self.fixed)
        for v, pair in self.turns.items():
            free = [a for a in pair if id(a) not in state]
            arrays[v] = unwritten(free[0] if free else np.empty_like(pair[0]))
        return arrays

    @property
    def bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(self.sizes) + sum(a.nbytes for pair in self.turns.values() for a in pair)

    def _view(self, memory: Array, v: Value) -> Array:
        shape, dtype = v.tensor.shape.sizes, v.tensor.dtype.storage
        return memory[: prod(shape) * dtype.itemsize].view(dtype).reshape(shape)

    def _last_uses(self, program: Program) -> dict[Value, int]:
        """For each owner, the last instruction that needs its memory."""
        last: dict[Value, int] = {}
        for n, i in enumerate(program.instructions):
            for y in i.outputs:
                owner = self.owner[y]
                last[owner] = max(last.get(owner, n), program.last_use.get(y, n))
        return last

    def _doubled(self, program: Program) -> set[Value]:
        """Owners of the new values of variables that an instruction writes."""
        doubled = {self.owner[v] for v in program.updates.values() if self.owner[v] in self.places}
        for v in doubled:
            del self.places[v]
        return doubled

    def _assign(self, program: Program) -> None:
        free: list[tuple[int, int]] = []  # sorted (bytes, buffer) pairs
        ends: dict[int, list[Value]] = {}
        holders: dict[int, int] = {}  # values per buffer: several where an operand was overwritten
        for n, i in enumerate(program.instructions):
            for y in i.outputs if _writes(i) else ():
                place = self._over_operand(n, i, y)
                if place is None:
                    place = self._take(free, y.tensor.shape.size * y.tensor.dtype.storage.itemsize)
                self.places[y] = place
                holders[place] = holders.get(place, 0) + 1
                ends.setdefault(self.last[y], []).append(y)
            for v in ends.pop(n, ()):
                place = self.places[v]
                holders[place] -= 1
                if not holders[place]:
                    insort(free, (self.sizes[place], place))

    def _over_operand(self, n: int, i: Instruction, y: Value) -> int | None:
        chain, over = isinstance(i, Chain), overwritable(i, y)
        for x in over:
            owner = self.owner[x]
            same = owner.tensor.shape == y.tensor.shape
            same = same and x.tensor.shape == y.tensor.shape and owner.tensor.dtype.storage == y.tensor.dtype.storage
            # A view may have other elements at the same place, which a chain would read after those of earlier parts.
            others = (z for z in i.inputs if z is not x) if chain else i.inputs[len(over) :]
            same = same and all(self.owner[z] is not owner for z in others) and (x is owner or not chain)
            place = self.places.get(owner)
            free = owner not in self.resident and all(self.places.get(other) != place for other in i.outputs)
            if same and self.last[owner] == n and free and place is not None:
                return place
        return None

    def _take(self, free: list[tuple[int, int]], size: int) -> int:
        """The smallest free buffer of at least `size` bytes and at most four times as many or 4,096, or a new one."""
        n = bisect_left(free, (size, 0))
        if n < len(free) and free[n][0] <= max(4 * size, 4096):
            return free.pop(n)[1]
        self.sizes.append(size)
        return len(self.sizes) - 1
