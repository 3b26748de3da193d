"""The ticks of a pipeline training step: slots that each stage reads and writes, and the microbatches in them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from layouts import Dimension, Shape
from meshlib.core.arguments import at
from meshlib.core.errors import GraphError, ShapeError
from meshlib.core.graph import Graph, Tensor, TensorType
from meshlib.core.loop_record import Active, StageTask, TimedTask
from meshlib.core.names import free_name
from meshlib.layers.pipeline_task_schedule import BACKWARD, FORWARD, WEIGHTS, TaskSchedule, slots_of
from meshlib.ops.building import tensor
from meshlib.ops.control.branches import inner_carry
from meshlib.ops.control.loops import end_late, late_carry
from meshlib.ops.movement.dynamic_slices import update_slice
from meshlib.ops.movement.indexing import gather
from meshlib.ops.movement.shape import rename_dimension, replace_dimensions

Array = np.ndarray[Any, Any]
Slots = Mapping[tuple[int, int, int], int]  # microbatch, repeat, stage -> slot

FIRST, LOSS, FIRST_BACKWARD = "first", "loss", "first backward"
WHAT = "pipeline_training_step"
# Rules may split microbatches over the stages, as those of models do; each stage gathers its own from all.
MICROBATCH, TURN = "microbatch", "microbatch_unsplit"
Features = Mapping[str, Tensor]


@dataclass(frozen=True)
class Ticks:
    """The tables of one schedule; tables per stage are [tick, stage]."""

    plan: TaskSchedule
    loads: list[float] = field(default_factory=list)  # work per stage relative to the largest; empty: equal

    @property
    def count(self) -> int:
        """The number of ticks."""
        return len(self.plan.ticks)

    @property
    def summary(self) -> str:
        """The schedule in one line."""
        return self.plan.summary

    # ------------------------------------------------------------ activity

    def runs(self, kind: str, task: StageTask, stage: int) -> bool:
        """True if a branch of this kind is part of a task of a stage."""
        plan = self.plan
        at_first = stage == 0 and task.repeat == 0
        at_last = stage == plan.stages - 1 and task.repeat == plan.repeats - 1
        return {
            FIRST: task.kind == FORWARD and at_first,
            LOSS: task.kind == FORWARD and at_last,
            FIRST_BACKWARD: task.kind == BACKWARD and at_first,
        }.get(kind, task.kind == kind)

    def works(self, kind: str) -> Array:
        """Bool table of the ticks in which a stage runs a branch."""
        return self._table(lambda task, stage: self.runs(kind, task, stage), False, np.bool_)

    def active(self, kind: str, dim: str) -> Active:
        """`works` as an `Active` record."""
        works = self.works(kind)
        return Active(dim, tuple(tuple(map(int, np.nonzero(row)[0])) for row in works), self.plan.stages)

    def turns(self, kind: str, part: str) -> Array:
        """The microbatch or the repeat of the running task; 0 if none of this kind runs."""
        return self._table(lambda task, _: getattr(task, part) if task.kind == kind else 0, 0, np.int32)

    def _table(self, of: Callable[[StageTask, int], Any], idle: Any, dtype: Any) -> Array:
        rows = [[idle if task is None else of(task, n) for n, task in enumerate(row)] for row in self.plan.ticks]
        return np.array(rows, dtype)

    # ------------------------------------------------------------ slots

    @cached_property
    def inputs(self) -> tuple[Slots, int]:
        """Slots of stage inputs, from arrival to the backward."""
        return self._slots(self._arrival, BACKWARD)

    @cached_property
    def residuals(self) -> tuple[Slots, int]:
        """Slots of forward residuals."""
        return self._slots(lambda m, r, s: self.plan.tick_of[FORWARD, m, r, s], BACKWARD)

    @cached_property
    def cotangents(self) -> tuple[Slots, int]:
        """Slots of cotangents of stage outputs, from arrival to the backward."""
        return self._slots(self._cotangent_arrival, BACKWARD)

    @cached_property
    def operands(self) -> tuple[Slots, int]:
        """Slots of the operands of weight gradients, if these are separate tasks."""
        return self._slots(lambda m, r, s: self.plan.tick_of[BACKWARD, m, r, s], WEIGHTS)

    def _slots(self, begin: Callable[[int, int, int], int], last: str) -> tuple[Slots, int]:
        plan, slots, most = self.plan, {}, 1
        for stage in range(plan.stages):
            own = [(m, r, stage) for m in range(plan.microbatches) for r in range(plan.repeats)]
            of_stage, count = slots_of((key, begin(*key), plan.tick_of[last, *key]) for key in own)
            slots.update(of_stage)
            most = max(most, count)
        return slots, most

    def _arrival(self, microbatch: int, repeat: int, stage: int) -> int:
        ticks, stages = self.plan.tick_of, self.plan.stages
        if stage:
            return ticks[FORWARD, microbatch, repeat, stage - 1]
        if repeat:
            return ticks[FORWARD, microbatch, repeat - 1, stages - 1]
        return ticks[FORWARD, microbatch, repeat, stage]

    def _cotangent_arrival(self, microbatch: int, repeat: int, stage: int) -> int:
        ticks, plan = self.plan.tick_of, self.plan
        if stage + 1 < plan.stages:
            return ticks[BACKWARD, microbatch, repeat, stage + 1]
        if repeat + 1 < plan.repeats:
            return ticks[BACKWARD, microbatch, repeat + 1, 0]
        return ticks[FORWARD, microbatch, repeat, stage]

    def reads(self, kind: str, slots: tuple[Slots, int]) -> Array:
        """The slot read by each task of a kind; 0 in other ticks."""
        of, _ = slots
        return self._table(lambda t, s: of[t.microbatch, t.repeat, s] if t.kind == kind else 0, 0, np.int32)

    def writes(self, kind: str, slots: tuple[Slots, int]) -> Array:
        """The slot written by a branch of a kind; one past the last in other ticks."""
        of, count = slots
        return self._table(
            lambda t, s: of[t.microbatch, t.repeat, s] if self.runs(kind, t, s) else count, count, np.int32
        )

    def arrivals(self, kind: str) -> Array:
        """The slot for data received from the previous (backward: next) stage; otherwise one past the last."""
        plan, step = self.plan, 1 if kind == FORWARD else -1
        of, count = self.inputs if kind == FORWARD else self.cotangents
        table = np.full((self.count, plan.stages), count, np.int32)
        for tick, row in enumerate(plan.ticks):
            for stage, task in enumerate(row):
                if task is None or task.kind != kind:
                    continue
                to = (stage + step) % plan.stages
                repeat = task.repeat + (step if to != stage + step else 0)
                if 0 <= repeat < plan.repeats:
                    table[tick, to] = of[task.microbatch, repeat, to]
        return table

    # ------------------------------------------------------------ time

    def stage_runs(self, branches: Mapping[str, float], rest: float) -> tuple[tuple[TimedTask, ...], ...]:
        """Per stage, its tasks with times: see `Timing`.

        A stage waits only for its own operands, as with point-to-point transfers. The remaining work of a tick is part
        of each task.
        """
        plan, loads = self.plan, self.loads or [1.0] * self.plan.stages

        def of(kind: str) -> list[float]:
            return [branches.get(kind, 0.0) * load + rest for load in loads]

        forward, backward = of(FORWARD), of(BACKWARD)
        forward[0] += branches.get(FIRST, 0.0) / plan.repeats
        forward[-1] += branches.get(LOSS, 0.0) / plan.repeats
        backward[0] += branches.get(FIRST_BACKWARD, 0.0) / plan.repeats
        return plan.runs(forward, backward, of(WEIGHTS) if plan.splits else 0.0)


@dataclass(frozen=True)
class CutFeatures:
    """Features cut into microbatches: those of `parts` have the dim `micro`, those of `others` are not cut."""

    micro: Dimension
    parts: Features
    others: Features

    @classmethod
    def of(cls, features: Features, batch: Dimension, count: int, stage: Dimension) -> CutFeatures:
        """The features cut along `batch`, with all checks."""
        if not isinstance(features, Mapping) or not features:
            raise GraphError(f"{at(WHAT)}: features must be a dict of names to tensors, got {features!r:.80}")
        if not isinstance(batch, Dimension):
            raise GraphError(f"{at(WHAT)}: batch_dim must be a Dimension, got {batch!r:.80}")
        micro, parts, others = Dimension(TURN, count), {}, {}
        for name, x in features.items():
            tensor(x, f"{WHAT} feature {name!r}")
            for taken in (MICROBATCH, TURN, stage.name):
                if taken in x.shape:
                    raise ShapeError(f"{at(WHAT)}: feature {name!r}, {x}, has a dim '{taken}'; rename it")
            if batch not in x.shape:
                others[name] = x
                continue
            if batch.size % count:
                raise ShapeError(
                    f"{at(WHAT)}: {x} can't be cut into {count} equal microbatches: {batch.size} % {count} = "
                    f"{batch.size % count}"
                )
            small = Dimension(batch.name, batch.size // count)
            cut = replace_dimensions(x, batch, [small, Dimension(MICROBATCH, count)])
            parts[name] = rename_dimension(cut, MICROBATCH, TURN)
        if not parts:
            raise GraphError(f"{at(WHAT)}: no feature has the dim {batch}: {', '.join(map(str, features.values()))}")
        return cls(micro, parts, others)

    def of_turn(self, graph: Graph, which: Tensor) -> dict[str, Tensor]:
        """The features of the current microbatch of each stage: [stage, ...]."""
        given = {name: gather(graph.adopt(x), which, self.micro) for name, x in self.parts.items()}
        return {**given, **{name: graph.adopt(x) for name, x in self.others.items()}}


@dataclass(frozen=True, eq=False)
class SlotBuffer:
    """Slots for a value of several microbatches: [slot, stage, ...], a carry of the loop over ticks."""

    carry: Tensor
    slot: Dimension

    @classmethod
    def like(cls, x: Tensor, graph: Graph, count: int, name: str) -> SlotBuffer:
        """Empty slots for values of the type of `x`; `graph` is the body of the loop over ticks."""
        slot = Dimension(free_name(f"{name}_slot", x.shape.names), count)
        return cls(late_carry(graph, TensorType(Shape([slot, *x.shape]), x.dtype), name), slot)

    @property
    def value(self) -> Tensor:
        """The current value of the carry within a tick."""
        body = self.carry.graph.loop_body
        assert body is not None
        return body.late[self.carry].end

    def read(self, graph: Graph, slots: Tensor) -> Tensor:
        """The value in one slot of each stage, read in the body of a branch: [stage, ...]."""
        return gather(graph.adopt(self.value), graph.adopt(slots), self.slot)

    def write(self, x: Tensor, slots: Tensor) -> None:
        """Write `x`, from the body of a branch or of the loop over ticks, to slots; out-of-range slots are skipped."""
        graph = x.graph
        inside = graph is not self.carry.graph
        value = inner_carry(self.carry, graph) if inside else self.value
        after = update_slice(value, x, self.slot, graph.adopt(slots), out_of_range="drop")
        end_late(value if inside else self.carry, after)
