"""Tables of a pipeline training step: the slots that each stage reads and writes in each tick."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from meshlib.core.loop_record import Active, StageTask, TimedTask
from meshlib.layers.pipeline_orders import BACKWARD, FORWARD, WEIGHTS
from meshlib.layers.pipeline_task_schedule import TaskSchedule, slots_of

Array = np.ndarray[Any, Any]
Slots = Mapping[tuple[int, int, int], int]  # microbatch, repeat, stage -> slot

FIRST, LOSS, FIRST_BACKWARD = "first", "loss", "first backward"


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
