"""Task schedule of a pipeline training step: order of tasks per stage, their start and end, and idle time.

A backward can be split into the gradient of the stage's input, which the previous stage waits for, and the gradients of
its weights, which no stage waits for and which fill idle time (zero bubble).

Sources: Narayanan et al., arXiv:2104.04473, section 2.2 (1F1B, interleaved); Qi et al., "Zero Bubble Pipeline
Parallelism", arXiv:2401.10241, section 2 (ZB-H1, ZB-H2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

from meshlib.core.arguments import at
from meshlib.core.errors import GraphError
from meshlib.core.loop_record import StageTask, TimedTask
from meshlib.core.text import counted, grid

FORWARD, BACKWARD, WEIGHTS = "forward", "backward", "weights"


Order = tuple[StageTask, ...]
Key = tuple[str, int, int, int]  # kind, microbatch, repeat, stage
Orders = Callable[[int, int, int], list[Order]]
PerStage = float | Sequence[float]


def gpipe(stages: int, microbatches: int, repeats: int) -> list[Order]:
    """All forwards, then all backwards, last microbatch first. With repeats, groups of microbatches take turns."""
    forwards = [StageTask(FORWARD, m, r) for m, r in _rounds(stages, microbatches, repeats)]
    backwards = [StageTask(BACKWARD, t.microbatch, t.repeat) for t in reversed(forwards)]
    return [(*forwards, *backwards)] * stages


def one_forward_one_backward(stages: int, microbatches: int, repeats: int) -> list[Order]:
    """1F1B: forwards until the first backward arrives, then one backward after each forward."""
    if repeats > 1 and microbatches % stages:
        raise GraphError(
            f"{at('schedule')}: interleaved 1F1B needs a multiple of the stages as microbatches, got {microbatches} "
            f"microbatches on {stages} stages: {microbatches} % {stages} = {microbatches % stages}; use "
            f"{-(-microbatches // stages) * stages} microbatches, or repeats=1"
        )
    forwards = [StageTask(FORWARD, m, r) for m, r in _rounds(stages, microbatches, repeats)]
    backwards = [StageTask(BACKWARD, m, repeats - 1 - r) for m, r in _rounds(stages, microbatches, repeats)]
    orders = []
    for stage in range(stages):
        warmup = stages - 1 - stage if repeats == 1 else 2 * (stages - 1 - stage) + (repeats - 1) * stages
        warmup = min(warmup, len(forwards))
        steady = [t for pair in zip(forwards[warmup:], backwards, strict=False) for t in pair]
        orders.append((*forwards[:warmup], *steady, *backwards[len(forwards) - warmup :]))
    return orders


def zero_bubble(stages: int, microbatches: int, repeats: int, ahead: Callable[[int], int], held: int) -> list[Order]:
    """Backwards as early as possible, then forwards, and weight gradients when neither is possible.

    Args:
      ahead: maximal number of microbatches between the forwards and the backwards of a stage.
      held: maximal number of microbatches for which a stage keeps operands of weight gradients.
    """
    if repeats > 1:
        raise GraphError(f"{at('schedule')}: zero-bubble schedules have repeats=1, got {repeats}")
    counts = [{FORWARD: 0, BACKWARD: 0, WEIGHTS: 0} for _ in range(stages)]
    orders: list[list[StageTask]] = [[] for _ in range(stages)]
    while any(c[WEIGHTS] < microbatches for c in counts):
        before = [dict(c) for c in counts]
        for stage, (was, count) in enumerate(zip(before, counts, strict=True)):
            kind = _next_kind(stage, stages, microbatches, before, ahead(stage), held)
            if kind is not None:
                orders[stage].append(StageTask(kind, was[kind]))
                count[kind] += 1
    return [tuple(order) for order in orders]


def _next_kind(
    stage: int, stages: int, microbatches: int, counts: Sequence[Mapping[str, int]], ahead: int, held: int
) -> str | None:
    """The next task kind of a stage, given the number of tasks of each kind that all stages have run."""
    mine = counts[stage]
    forwards, backwards, weights = mine[FORWARD], mine[BACKWARD], mine[WEIGHTS]
    above = counts[stage + 1][BACKWARD] if stage + 1 < stages else forwards
    below = counts[stage - 1][FORWARD] if stage else microbatches
    if forwards < microbatches and forwards - backwards < ahead:
        if forwards - weights >= held and weights < backwards:
            return WEIGHTS  # frees memory for the next forward
        if forwards < below and forwards - weights < held:
            return FORWARD
    if backwards < min(above, forwards):
        return BACKWARD
    return WEIGHTS if weights < backwards else None


def _rounds(stages: int, microbatches: int, repeats: int) -> Iterator[tuple[int, int]]:
    """(microbatch, repeat) in order: groups of `stages` microbatches, each with all its repeats."""
    for begin in range(0, microbatches, stages):
        for repeat in range(repeats):
            for microbatch in range(begin, min(begin + stages, microbatches)):
                yield microbatch, repeat


KINDS: Mapping[str, Orders] = MappingProxyType(
    {
        "gpipe": gpipe,
        "1f1b": one_forward_one_backward,
        "zb-h1": lambda p, m, v: zero_bubble(p, m, v, lambda stage: p - stage, p),
        "zb-h2": lambda p, m, v: zero_bubble(p, m, v, lambda stage: 2 * (p - stage) - 1, 2 * p - 1),
    }
)


def waits_for(task: StageTask, stage: int, stages: int, repeats: int) -> list[Key]:
    """The tasks, with their stages, that a task depends on."""
    kind, microbatch, repeat = task
    if kind == WEIGHTS:
        return [(BACKWARD, microbatch, repeat, stage)]
    if kind == FORWARD:
        if stage:
            return [(FORWARD, microbatch, repeat, stage - 1)]
        return [(FORWARD, microbatch, repeat - 1, stages - 1)] if repeat else []
    own = (FORWARD, microbatch, repeat, stage)
    if stage + 1 < stages:
        return [own, (BACKWARD, microbatch, repeat, stage + 1)]
    return [own, (BACKWARD, microbatch, repeat + 1, 0)] if repeat + 1 < repeats else [own]


@dataclass(frozen=True)
class TaskSchedule:
    """The tasks of all stages in a training step; created by `mtf.layers.schedule(..., kind="1f1b")`."""

    stages: int
    microbatches: int
    repeats: int = 1
    kind: str = "1f1b"

    @property
    def splits(self) -> bool:
        """True if gradients of weights are separate tasks."""
        return self.kind.startswith("zb")

    @cached_property
    def orders(self) -> tuple[Order, ...]:
        """Per stage, its tasks in order."""
        return tuple(KINDS[self.kind](self.stages, self.microbatches, self.repeats))

    # ------------------------------------------------------------ time

    def runs(self, forward: PerStage, backward: PerStage, weights: PerStage = 0.0) -> tuple[tuple[TimedTask, ...], ...]:
        """Per stage, its tasks with times, if each starts as soon as its stage is free and its operands have arrived.

        Args:
          forward, backward, weights: seconds of a task, for all stages or per stage. If the schedule does not split the
            backward, `weights` is part of it.
        """
        seconds = {
            kind: [given] * self.stages if isinstance(given, int | float) else list(given)
            for kind, given in ((FORWARD, forward), (BACKWARD, backward), (WEIGHTS, weights))
        }
        if not self.splits:
            seconds[BACKWARD] = [b + w for b, w in zip(seconds[BACKWARD], seconds[WEIGHTS], strict=True)]
        return _timed(self.orders, self.repeats, seconds)

    def seconds(self, forward: PerStage, backward: PerStage, weights: PerStage = 0.0) -> float:
        """Seconds from the start of the first task to the end of the last."""
        return max(row[-1].end for row in self.runs(forward, backward, weights))

    def bubble_seconds(self, forward: float, backward: float, weights: float = 0.0) -> float:
        """Largest idle time of a stage between its first and last task.

        A stage may begin its next step after its last task, so this is the time of a step in excess of work.
        """
        work = self.repeats * self.microbatches * (forward + backward + weights)
        rows = self.runs(forward, backward, weights)
        return max(row[-1].end - row[0].start for row in rows) - work

    @property
    def bubble(self) -> float:
        """Idle time relative to work, if a backward takes twice a forward, half of it for the weights."""
        return self.bubble_seconds(1.0, 1.0, 1.0) / (3 * self.repeats * self.microbatches)

    # ------------------------------------------------------------ ticks

    @cached_property
    def ticks(self) -> tuple[tuple[StageTask | None, ...], ...]:
        """Per tick, the task of each stage, if all tasks take one tick: the trips of the loop."""
        rows = self.runs(1, 1, 1) if self.splits else self.runs(1, 1)
        table: list[list[StageTask | None]] = [[None] * self.stages for _ in range(int(max(r[-1].end for r in rows)))]
        for stage, row in enumerate(rows):
            for task, start, _ in row:
                table[int(start)][stage] = task
        return tuple(map(tuple, table))

    @cached_property
    def tick_of(self) -> Mapping[Key, int]:
        """The tick of each task, per stage."""
        return {
            (*task, stage): tick
            for tick, row in enumerate(self.ticks)
            for stage, task in enumerate(row)
            if task is not None
        }

    # ------------------------------------------------------------ memory

    @cached_property
    def in_flight(self) -> tuple[int, ...]:
        """Per stage, the maximal number of (microbatch, repeat) pairs whose activations it keeps.

        Activations are kept until the backward, or until the gradients of weights if these are separate.
        """
        last = WEIGHTS if self.splits else BACKWARD
        peaks = []
        for order in self.orders:
            held = peak = 0
            for task in order:
                held += (task.kind == FORWARD) - (task.kind == last)
                peak = max(peak, held)
            peaks.append(peak)
        return tuple(peaks)

    # ------------------------------------------------------------ plots

    @property
    def summary(self) -> str:
        """Stages, microbatches, idle time and microbatches in flight in one line."""
        again = f", each {self.repeats} times round" if self.repeats > 1 else ""
        return (
            f"{self.kind}: {counted(self.stages, 'stage')}, "
            f"{counted(self.microbatches, 'microbatch', 'microbatches')}{again}: "
            f"{self.bubble:.1%} of the work idle, at most {max(self.in_flight)} in flight"
        )

    def __str__(self) -> str:
        rows = [["stage", *(str(n) for n in range(len(self.ticks)))]]
        for stage in range(self.stages):
            rows.append([str(stage), *(_cell(row[stage], self.repeats) for row in self.ticks)])
        key = "F forward, B backward" + (", W weights" if self.splits else "") + "; . idle; each task drawn as one tick"
        return "\n".join(
            line.rstrip() for line in [self.summary, *grid(rows, right=tuple(range(1, len(rows[0])))), key]
        )

    def plot(self, ax: Any = None, forward: float = 1.0, backward: float = 1.0, weights: float = 1.0) -> Any:
        """Plot the tasks of each stage over time: forwards, backwards, weight gradients, idle; needs matplotlib.

        Args:
          ax: matplotlib Axes, or the path of a file (.png, .svg, .pdf); by default a new figure.
          forward, backward, weights: seconds of the tasks, as in `runs`.
        Returns: the Axes.
        """
        from meshlib.report.plots import plot_tasks

        return plot_tasks(self.runs(forward, backward, weights), self.summary, ax, "TaskSchedule.plot")


def _cell(task: StageTask | None, repeats: int) -> str:
    if task is None:
        return "."
    turn = chr(ord("a") + task.repeat % 26) if repeats > 1 else ""
    return f"{task.kind[0].upper()}{task.microbatch}{turn}"


def _timed(
    orders: Sequence[Order], repeats: int, seconds: Mapping[str, Sequence[float]]
) -> tuple[tuple[TimedTask, ...], ...]:
    """The tasks with times: each starts when its stage is free and its dependencies have ended."""
    stages = len(orders)
    ends: dict[Key, float] = {}
    runs: list[list[TimedTask]] = [[] for _ in orders]
    waiting: dict[Key, int] = {}  # the stage waits for a task
    ready = list(range(stages))
    while ready:
        stage = ready.pop()
        order, row = orders[stage], runs[stage]
        while len(row) < len(order):
            task = order[len(row)]
            needed = waits_for(task, stage, stages, repeats)
            missing = next((key for key in needed if key not in ends), None)
            if missing is not None:
                waiting[missing] = stage
                break
            start = max([row[-1].end if row else 0.0, *(ends[key] for key in needed)])
            row.append(TimedTask(task, start, start + seconds[task.kind][stage]))
            ends[(*task, stage)] = row[-1].end
            if (*task, stage) in waiting:
                ready.append(waiting.pop((*task, stage)))
    assert all(len(row) == len(order) for row, order in zip(runs, orders, strict=True)), (
        "the order of a stage deadlocks"
    )
    return tuple(map(tuple, runs))


def slots_of(spans: Iterable[tuple[Any, int, int]]) -> tuple[dict[Any, int], int]:
    """Slots for values written after tick `begin` and last read in tick `end`, and the number of slots.

    >>> slots_of([("a", 0, 2), ("b", 1, 3), ("c", 2, 4)])
    ({'a': 0, 'b': 1, 'c': 0}, 2)
    """
    slots: dict[Any, int] = {}
    free_from: list[int] = []  # per slot, the last tick that reads it
    for key, begin, end in sorted(spans, key=lambda span: span[1:]):
        slot = next((n for n, last in enumerate(free_from) if last <= begin), len(free_from))
        if slot == len(free_from):
            free_from.append(end)
        free_from[slot] = end
        slots[key] = slot
    return slots, len(free_from)
