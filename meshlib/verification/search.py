"""Search for the first operation, in program order, that differs from the unsharded program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from meshlib.core.errors import MeshlibError
from meshlib.program.instructions import Compute, Instruction, Move, Resident, Value
from meshlib.program.records import Program
from meshlib.simulation.exact import Blocks
from meshlib.verification.report import Divergence
from meshlib.verification.rounding import Key, TripCounts, difference

Array = np.ndarray[Any, Any]

FAULTS = (MeshlibError, ValueError, IndexError, TypeError, AssertionError, KeyError)


class Diverged(Exception):
    """Ends a run at the first wrong value."""

    def __init__(self, divergence: Divergence) -> None:
        self.divergence = divergence


@dataclass(eq=False)
class DivergenceSearch:
    """Compares every value of a run with the unsharded one, and stops at the first wrong one."""

    program: Program
    values: Mapping[Key, Array]
    allowed: Mapping[Key, float]
    trips: TripCounts = field(default_factory=TripCounts)

    def watch(self, instruction: Instruction, value: Value, blocks: Blocks) -> None:
        """Callback of `run_exact` for every value."""
        trip = self.trips.next(value)
        key = (value.tensor, trip)
        if key not in self.values or isinstance(instruction, Resident):
            return
        wanted, limit = self.values[key], self.allowed[key]
        sharding = value.sharding
        kinds = {kind for _, kind in sharding.pending}
        merge = {"sum": np.add, "max": np.maximum, "min": np.minimum}[kinds.pop() if kinds else "sum"]
        for group in sharding.mesh.groups(sharding.pending_axes):
            at = sharding.mesh.coordinate(group[0])
            block = np.asarray(merge.reduce([np.asarray(blocks[d], np.float64) for d in group]))
            expected = wanted[sharding.slices(at)]
            if block.shape != expected.shape:
                return  # the run itself reports more
            off = difference(block, expected)
            if off.max(initial=0.0) > limit:
                index = np.unravel_index(int(off.argmax()), off.shape)
                numbers = float(block[index]), float(expected[index]), limit
                raise Diverged(self._report(instruction, value, group, index, numbers, trip))

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
            producer, over = value.tensor.operation, "+".join(a for s in instruction.steps[:1] for a in s.axes)
            what = f"{instruction.opcode} of {producer} over {over}"
            what, op = (what if producer is op else f"{what}, for {op}"), producer
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
