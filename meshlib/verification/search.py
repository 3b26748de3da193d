"""The first operation, in a program's order, whose value is not that of the unsharded program."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from meshlib.errors import MeshlibError
from meshlib.program.instructions import Compute, Instruction, Loop, Move, Resident, Value
from meshlib.program.records import Program
from meshlib.simulation.exact import Blocks
from meshlib.verification.report import Divergence
from meshlib.verification.rounding import Counted, Key, difference

Array = np.ndarray[Any, Any]

FAULTS = (MeshlibError, ValueError, IndexError, TypeError, AssertionError, KeyError)


class Diverged(Exception):
    """Ends a run at the first value that is wrong."""

    def __init__(self, found: Divergence) -> None:
        self.found = found


@dataclass(eq=False)
class Search:
    """Compares every value a run makes with the unsharded one, and stops at the first that is off."""

    program: Program
    values: Mapping[Key, Array]
    allowed: Mapping[Key, float]
    counted: Counted = field(default_factory=Counted)
    partial: set[Value] = field(default_factory=set)
    parts: dict[Value, tuple[Array, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.partial = set(_partial_sums(self.program))

    def watch(self, instruction: Instruction, value: Value, blocks: Blocks) -> None:
        """What `run_exact` calls with every value made."""
        trip = self.counted.next(value)
        known = self._expected(instruction, value, trip)
        if known is None or isinstance(instruction, Resident):
            return
        wanted, limit = known
        sharding = value.sharding
        kinds = {kind for _, kind in sharding.pending}
        merge = {"sum": np.add, "max": np.maximum, "min": np.minimum}[kinds.pop() if kinds else "sum"]
        for group in sharding.mesh.groups(sharding.pending_axes):
            at = sharding.mesh.coordinate(group[0])
            block = np.asarray(merge.reduce([np.asarray(blocks[d], np.float64) for d in group]))
            expected = wanted[sharding.slices(at)]
            if block.shape != expected.shape:
                return  # the run itself says more
            off = difference(block, expected)
            if off.max(initial=0.0) > limit:
                index = np.unravel_index(int(off.argmax()), off.shape)
                numbers = float(block[index]), float(expected[index]), limit
                raise Diverged(self._report(instruction, value, group, index, numbers, trip))

    def _expected(self, instruction: Instruction, value: Value, trip: int) -> tuple[Array, float] | None:
        """The unsharded value and what may differ in it; of a sum of some operands only, the sum of theirs."""
        if value not in self.partial:
            key = (value.tensor, trip)
            return (self.values[key], self.allowed[key]) if key in self.values else None
        if isinstance(instruction, Move):
            x = instruction.inputs[instruction.outputs.index(value)]
            self.parts[value] = self.parts[x]
            return self.parts[value]
        keys = [(x.tensor, trip if (x.tensor, trip) in self.values else 0) for x in instruction.inputs]
        if any(key not in self.values for key in keys):
            return None
        total = np.add.reduce([np.asarray(self.values[key], np.float64) for key in keys])
        self.parts[value] = total, sum(self.allowed[key] for key in keys)
        return self.parts[value]

    def _report(
        self,
        instruction: Instruction,
        value: Value,
        group: Sequence[int],
        index: tuple[Any, ...],
        numbers: tuple[float, float, float],
        trip: int,
    ) -> Divergence:
        sharding, op = value.sharding, instruction.operation
        mesh = sharding.mesh
        coordinate = mesh.coordinate(group[0])
        summed = sharding.pending_axes
        start = sharding.offsets(coordinate)
        what = str(op)
        if isinstance(instruction, Move):
            made, over = value.tensor.operation, "+".join(a for s in instruction.steps[:1] for a in s.axes)
            what = f"{instruction.opcode} of {made} over {over}"
            what, op = (what if made is op else f"{what}, for {op}"), made
        split = instruction.assignment if isinstance(instruction, Compute) else ()
        return Divergence(
            op.name,
            instruction.opcode,
            op.source,
            instruction.region,
            value.tensor.name,
            str(value),
            ", ".join(f"{f}@{a}" for a, f in split),
            what,
            str(mesh),
            str(self.program.layout),
            tuple(group),
            {a: c for a, c in zip(mesh.axes, coordinate, strict=True) if a not in summed},
            {d.name: int(o + i) for d, o, i in zip(sharding.shape, start, index, strict=True)},
            *numbers,
            trip if op.graph.parent is not None else None,
        )


def _partial_sums(program: Program) -> Iterator[Value]:
    """Values that carry an n-ary sum's tensor but hold some of its operands only: the sum itself takes them up."""
    found: set[Value] = set()
    for i in reversed(program.instructions):
        if isinstance(i, Loop):
            yield from _partial_sums(i.body)
        elif isinstance(i, Move):
            found.update(x for x, y in zip(i.inputs, i.outputs, strict=True) if y in found)
        elif i.outputs:
            found.update(x for x in i.inputs if x.tensor is i.outputs[0].tensor)
    yield from found
