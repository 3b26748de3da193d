"""Schedule of a pipeline: the stage, microbatch and repeat of each trip; the stream of microbatches through it.

GPipe: each trip moves every microbatch to the next stage. With `repeats` the pipeline is a ring that each microbatch
passes several times, so that a stage has several short groups of layers instead of a long one (interleaved, as in
Megatron-LM): filling and draining take as many trips as before, but each trip takes 1/repeats of the time. Microbatches
pass the ring in groups of as many as there are stages: the output of the last stage is the next input of the first, so
nothing is queued.

Each stage stores an equal share of the microbatches, in slots. When the first stage takes a microbatch, its slot is
shifted by one stage towards the first, and the slot freed at the last stage takes the output of the last stage. So
inputs and results share memory, one share of the batch per stage, and each trip sends one microbatch for both.

Sources: Huang et al., "GPipe", arXiv:1811.06965; Narayanan et al., arXiv:2104.04473, section 2.2; the streaming buffer
of AI-Hypercomputer/maxtext `layers/pipeline.py` and google/praxis `layers/pipeline.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from hardware.unknown_names import Attributes
from layouts import Dimension, Shape
from meshlib.core.arguments import choice, whole
from meshlib.core.dtypes import BOOL, INT32
from meshlib.core.graph import Tensor, current_graph
from meshlib.core.loop_record import Active
from meshlib.core.opdef import Array
from meshlib.core.text import counted, grid
from meshlib.layers.pipeline_task_schedule import KINDS, TaskSchedule
from meshlib.ops.control.branches import branch
from meshlib.ops.control.custom_gradients import custom_gradient
from meshlib.ops.movement.dynamic_slices import update_slice
from meshlib.ops.movement.indexing import gather
from meshlib.ops.movement.runs import pad, shift, slice
from meshlib.ops.movement.shape import reshape, transpose
from meshlib.ops.movement.tables import table
from meshlib.ops.pointwise.arithmetic import add, where


class Turn(NamedTuple):
    """The work of a stage in a trip: a microbatch in its `repeat`-th round."""

    microbatch: int
    repeat: int


@dataclass(frozen=True)
class Schedule(Attributes):
    """The turns of all stages in all trips; created by `mtf.layers.schedule`."""

    stages: int
    microbatches: int
    repeats: int = 1

    @property
    def trips(self) -> int:
        """The number of trips until the last microbatch has left the last stage."""
        group, place = divmod(self.microbatches - 1, self.stages)
        return (group * self.repeats + self.repeats - 1) * self.stages + place + self.stages

    @property
    def work(self) -> int:
        """The number of trips in which a stage is active."""
        return self.microbatches * self.repeats

    @property
    def bubble(self) -> float:
        """Idle time of a stage relative to its active time.

        (stages - 1) / (repeats * microbatches) with one repeat, or if microbatches are a multiple of stages.
        """
        return (self.trips - self.work) / self.work

    def turn(self, trip: int, stage: int) -> Turn | None:
        """The turn of a stage in a trip; None if it is idle."""
        if trip < stage:
            return None
        group, within = divmod(trip - stage, self.repeats * self.stages)
        repeat, place = divmod(within, self.stages)
        microbatch = group * self.stages + place
        return Turn(microbatch, repeat) if microbatch < self.microbatches else None

    def exchange(self, trip: int) -> int | None:
        """The number of the microbatch that the first stage takes from the stream after a trip, or None.

        In the same exchange the last stage returns the result of microbatch number - stages, so numbers exceed those of
        microbatches by up to `stages`. None after trips in which the first stage continues with the output of the last.
        """
        group, place = divmod(trip + 1, self.repeats * self.stages)
        return group * self.stages + place if place < self.stages else None

    @cached_property
    def turns(self) -> tuple[tuple[Turn | None, ...], ...]:
        """Per trip, the turn of each stage."""
        return tuple(tuple(self.turn(trip, stage) for stage in range(self.stages)) for trip in range(self.trips))

    def active(self, dim: str) -> Active:
        """The active stages of each trip, as indices of `dim`."""
        working = tuple(tuple(n for n, turn in enumerate(row) if turn is not None) for row in self.turns)
        return Active(dim, working, self.stages, self.summary)

    @property
    def summary(self) -> str:
        """Stages, trips and idle time in one line."""
        again = f", each {self.repeats} times round" if self.repeats > 1 else ""
        idle = self.trips - self.work
        return (
            f"{counted(self.stages, 'stage')}, {counted(self.microbatches, 'microbatch', 'microbatches')}{again}: "
            f"{counted(self.trips, 'trip')}, {idle} of them idle, {self.bubble:.1%} of the work"
        )

    def __str__(self) -> str:
        letters = [_letter(repeat) for repeat in range(self.repeats)] if self.repeats > 1 else [""]
        rows = [
            [f"stage {stage}", *("." if turn is None else f"{turn.microbatch}{letters[turn.repeat]}" for turn in row)]
            for stage, row in enumerate(zip(*self.turns, strict=True))
        ]
        head = ["trip", *map(str, range(self.trips))]
        lines = [self.summary, *grid([head, *rows], right=tuple(range(1, self.trips + 1)))]
        if self.repeats > 1:
            lines.append(f"{letters[0]} to {letters[-1]}: the run of layers that a stage applies; . idle")
        return "\n".join(line.rstrip() for line in lines)


def _letter(repeat: int) -> str:
    """Names of the layer groups: a, b, ... z, aa, ab, ..."""
    text = ""
    while repeat >= 0:
        repeat, last = divmod(repeat, 26)
        text, repeat = chr(ord("a") + last) + text, repeat - 1
    return text


def schedule(stages: int, microbatches: int, repeats: int = 1, kind: str | None = None) -> Schedule | TaskSchedule:
    """The schedule of a pipeline, which can be printed: the stage, microbatch and time of each task.

    Args:
      stages, microbatches, repeats: as in `mtf.layers.pipeline`.
      kind: None for the trips of `mtf.layers.pipeline`; or for a whole training step: "gpipe" (all forwards, then all
        backwards), "1f1b" (one forward, one backward; with repeats interleaved), "zb-h1" or "zb-h2" (zero bubble: the
        backward is split into gradients of inputs and of weights, with the memory of 1F1B or about twice as much).
    Returns: a `Schedule` with `.trips`, `.bubble`, `.turn(trip, stage)`; or a `TaskSchedule` with `.bubble`,
      `.in_flight`, `.runs(forward, backward, weights)`, `.plot()`.
    Raises: GraphError for numbers below 1, an unknown kind, or repeats that the kind does not support.
    Example:
      >>> import meshlib as mtf
      >>> print(mtf.layers.schedule(stages=3, microbatches=4))
      3 stages, 4 microbatches: 6 trips, 2 of them idle, 50.0% of the work
      trip     0  1  2  3  4  5
      stage 0  0  1  2  3  .  .
      stage 1  .  0  1  2  3  .
      stage 2  .  .  0  1  2  3
      >>> print(mtf.layers.schedule(stages=2, microbatches=4, kind="1f1b"))
      1f1b: 2 stages, 4 microbatches: 25.0% of the work idle, at most 2 in flight
      stage   0   1   2   3   4   5   6   7   8   9
      0      F0  F1   .  B0  F2  B1  F3  B2   .  B3
      1       .  F0  B0  F1  B1  F2  B2  F3  B3   .
      F forward, B backward; . idle; each task drawn as one tick
    """
    given = {"stages": stages, "microbatches": microbatches, "repeats": repeats}
    counts = {name: whole(count, "schedule", name, low=1) for name, count in given.items()}
    if kind is None:
        return Schedule(**counts)
    plan = TaskSchedule(**counts, kind=choice(kind, "schedule", "kind", tuple(KINDS)))
    assert plan.orders  # raises if the kind does not support these repeats
    return plan


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
