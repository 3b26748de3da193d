"""State of one trace of a program: mesh, random keys, current trip, and reports for the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from layouts import Mesh
from meshlib.core.graph import Operation
from meshlib.ops.movement.indexing import index_count
from meshlib.program.instructions import Instruction

Array: TypeAlias = jax.Array
Index: TypeAlias = int | Array  # of an element or a block: known at trace time, or only on the device


@dataclass
class Reported:
    """Values that a step reports to the host, in program order.

    checks   for each of the `checked` operations: [whether an index is out of range, the smallest such index]
    prints   values to print: those of each operation, or for a loop one list over all trips
    faults   exceptions of user functions during a step, which JAX would wrap and report repeatedly
    """

    checked: list[Operation] = field(default_factory=list)
    checks: list[Array] = field(default_factory=list)
    prints: list[Any] = field(default_factory=list)
    faults: list[Exception] = field(default_factory=list)

    def add(self, checked: Sequence[Operation], checks: Sequence[Array]) -> None:
        """Report the checks of a loop's body."""
        self.checked += checked
        self.checks += checks


def passed_checks(count: int) -> list[Array]:
    """`count` checks in which no index is out of range."""
    return [jnp.array([0, jnp.iinfo(jnp.int32).max], jnp.int32) for _ in range(count)]


@dataclass(eq=False)
class Stack:
    """The stacked blocks of all trips of a loop; each trip updates its own.

    array  the blocks along a leading axis; trip: index of the current block
    """

    array: Array
    trip: Array


@dataclass(frozen=True)
class TraceContext:
    """Context of one trace.

    mesh      the program's; its axes are those of the shard_map around
    platform  "cpu", "gpu" (NVIDIA's), "rocm" or "tpu"
    highest   whether products keep float32
    step      int32, the number of the step
    checked   whether indices are checked
    keys      the random key of each operation that draws, before step and trips are folded in
    reported  what the trace reports to the host
    trips     the current trip of each enclosing loop, outermost first
    stacks    instruction that updates part of a slice of a stack -> that stack, which it updates in place
    """

    mesh: Mesh
    platform: str
    highest: bool
    step: Array
    keys: Mapping[str, Array]
    reported: Reported
    checked: bool = False
    trips: tuple[Array, ...] = ()
    stacks: Mapping[Instruction, Stack] = field(default_factory=dict)

    def in_trip(self, trip: Any) -> TraceContext:
        """The same context inside one trip of a loop."""
        return replace(self, trips=(*self.trips, trip))

    def index(self, axes: tuple[str, ...]) -> Index:
        """This device's index along several mesh axes, the first of them major."""
        place: Index | None = None
        for axis in axes:
            size = self.mesh.axis_size(axis)
            if size > 1:
                index = lax.axis_index(axis)
                place = index if place is None else place * size + index
        return 0 if place is None else place

    def check_indices(self, op: Operation, indices: Array) -> None:
        """Report whether an index is out of range for the dim that `op` looks up, if checks are on."""
        if not self.checked:
            return
        wrong = (indices < 0) | (indices >= index_count(op))
        bad = jnp.min(jnp.where(wrong, indices, jnp.iinfo(jnp.int32).max), initial=jnp.iinfo(jnp.int32).max)
        self.reported.checked.append(op)
        self.reported.checks.append(jnp.stack([jnp.any(wrong).astype(jnp.int32), bad]))
