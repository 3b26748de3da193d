"""The stream of a pipeline: microbatches that wait for the first stage, and results of the last.

Each stage stores an equal share of the microbatches, in slots. When the first stage takes a microbatch, its slot is
shifted by one stage towards the first, and the slot freed at the last stage takes the output of the last stage. So
inputs and results share memory, one share of the batch per stage, and each trip sends one microbatch for both.

Source: the streaming buffer of AI-Hypercomputer/maxtext `layers/pipeline.py` and google/praxis `layers/pipeline.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from layouts import Dimension, Shape
from meshlib.core.dtypes import BOOL, INT32
from meshlib.core.graph import Tensor, current_graph
from meshlib.core.loop_record import Active
from meshlib.core.opdef import Array
from meshlib.layers.pipeline_schedule import Schedule
from meshlib.ops.control.branches import branch
from meshlib.ops.control.custom_gradients import custom_gradient
from meshlib.ops.movement.dynamic_slices import update_slice
from meshlib.ops.movement.indexing import gather
from meshlib.ops.movement.runs import pad, shift, slice
from meshlib.ops.movement.shape import reshape, transpose
from meshlib.ops.movement.tables import table
from meshlib.ops.pointwise.arithmetic import add, where


@dataclass(frozen=True)
class Stream:
    """The stream of one pipeline.

    Initially microbatch m is in slot m % slots of stage m // slots. Exchange n shifts slot n % slots: the first stage
    takes microbatch n from it, and the last stage writes the result of microbatch n - stages to it.
    """

    plan: Schedule
    stage: Dimension
    micro: Dimension
    trip: Dimension

    @cached_property
    def slot(self) -> Dimension:
        """The dim of the slots of each stage."""
        return Dimension(f"{self.trip.name}_slot", -(-self.micro.size // self.plan.stages))

    @property
    def padding(self) -> int:
        """The number of slots in excess of the microbatches."""
        return self.slot.size * self.plan.stages - self.micro.size

    # ------------------------------------------------------------ before and after the loop

    def begin(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The stages' inputs in the first trip, and the slots, from x [microbatch, ...]."""
        rest = x.shape.dims[1:]
        slots = reshape(pad(x, [0, self.padding], self.micro.name), [self.stage, self.slot, *rest])
        slots = transpose(slots, [self.slot, self.stage, *rest])
        enters = table(current_graph("pipeline"), self._at(0), Shape([self.stage]), BOOL, "enters")
        first = slice(slots, 0, 1, self.slot.name)
        held = reshape(first, [self.stage, *rest])
        moved = shift(first, -1, self.stage, wrap=False, name="to_previous_stage")
        slots = update_slice(slots, reshape(moved, [self.stage, *rest]), self.slot, 0)
        return where(enters, held, 0, output_shape=held.shape), slots

    def end(self, slots: Tensor) -> Tensor:
        """The results [microbatch, ...] from the slots after the last trip."""
        rest = slots.shape.dims[2:]
        y = shift(slots, (self.padding - self.plan.stages) % self.slot.size, self.slot, wrap=True)
        y = reshape(transpose(y, [self.stage, self.slot, *rest]), [self._padded_dim, *rest])
        return slice(y, self.padding, self.micro.size, self.micro.name, "out")

    @property
    def _padded_dim(self) -> Dimension:
        return Dimension(self.micro.name, self.slot.size * self.plan.stages)

    # ------------------------------------------------------------ in each trip

    def tables(self) -> list[Tensor]:
        """Per trip: the stage that takes from the stream, the stage that writes to it, and the slot."""
        graph, stages = current_graph("pipeline"), self.plan.stages
        exchanges = [self.plan.exchange(trip) for trip in range(self.trip.size)]
        exchanging = np.array([n is not None for n in exchanges])[:, None]
        shape = Shape([self.trip, self.stage])
        numbers = np.array([0 if n is None else n % self.slot.size for n in exchanges], np.int32)
        tables = [
            table(graph, exchanging & self._at(0), shape, BOOL, "takes"),
            table(graph, exchanging & self._at(stages - 1), shape, BOOL, "gives"),
            table(graph, numbers, Shape([self.trip]), INT32, "slot"),
        ]
        if not exchanging.all():
            tables.append(table(graph, np.repeat(exchanging, stages, axis=1), shape, BOOL, "exchanges"))
        return tables

    def _at(self, stage: int) -> Array:
        return np.equal(np.arange(self.plan.stages), stage)

    def exchange(self, slots: Tensor, y: Tensor, tables: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """The old content of a slot, of which the first stage takes its part, and the slots after the exchange.

        If not every trip has an exchange, it is a branch, which all devices skip together.
        """
        _, writes, number, *exchanging = tables
        if not exchanging:
            return self._exchanged(slots, y, [writes, number])

        def body(carries: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
            (before,) = carries
            graph = before.graph
            read, after = self._exchanged(
                before, graph.adopt(y), [graph.adopt(t) for t in (writes, number, *exchanging)]
            )
            return [after], [read]

        all_stages = tuple(range(self.plan.stages))
        trips = (all_stages if self.plan.exchange(trip) is not None else () for trip in range(self.trip.size))
        results = branch(
            "exchange", body, [slots], exchanging[0], Active(self.stage.name, tuple(trips), self.plan.stages)
        )
        return results.others[0], results.carries[0]

    def _exchanged(self, slots: Tensor, y: Tensor, tables: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """The exchange with a custom gradient: the same in the other direction, writing one slot of the cotangent in
        place."""

        def run(slots: Tensor, y: Tensor, writes: Tensor, number: Tensor, *exchanging: Tensor) -> tuple[Tensor, Tensor]:
            read = gather(slots, number, self.slot)
            moved = shift(read, -1, self.stage, wrap=False, name="to_previous_stage")
            written = where(writes, y, moved, output_shape=read.shape)
            if exchanging:
                written = where(exchanging[0], written, read, output_shape=read.shape)
            return read, update_slice(slots, written, self.slot, number)

        def back(inputs: Sequence[Tensor], _: object, cotangents: Sequence[Tensor]) -> list[Tensor | None]:
            _, _, writes, number, *exchanging = inputs
            d_read, d_slots = cotangents
            d_written = gather(d_slots, number, self.slot)
            d_moved = where(writes, 0, d_written, output_shape=d_written.shape)
            passed = shift(d_moved, 1, self.stage, wrap=False, name="to_next_stage")
            if exchanging:
                passed = where(exchanging[0], passed, d_written, output_shape=d_written.shape)
            before = update_slice(d_slots, add(d_read, passed), self.slot, number)
            return [before, where(writes, d_written, 0, output_shape=d_written.shape), *(None for _ in tables)]

        read, after = custom_gradient(run, back, [slots, y, *tables])
        return read, after
