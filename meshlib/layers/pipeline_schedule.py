"""Schedule of a pipeline: the stage, microbatch and repeat of each trip.

GPipe: each trip moves every microbatch to the next stage. With `repeats` the pipeline is a ring that each microbatch
passes several times, so that a stage has several short groups of layers instead of a long one (interleaved, as in
Megatron-LM): filling and draining take as many trips as before, but each trip takes 1/repeats of the time. Microbatches
pass the ring in groups of as many as there are stages: the output of the last stage is the next input of the first, so
nothing is queued.

Sources: Huang et al., "GPipe", arXiv:1811.06965; Narayanan et al., arXiv:2104.04473, section 2.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from meshlib.core.arguments import choice, whole
from meshlib.core.loop_record import Active
from meshlib.core.text import grid
from meshlib.layers.pipeline_orders import KINDS
from meshlib.layers.pipeline_task_schedule import TaskSchedule


class Turn(NamedTuple):
    """The work of a stage in a trip: a microbatch in its `repeat`-th round."""

    microbatch: int
    repeat: int


@dataclass(frozen=True)
class Schedule:
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
            f"{self.stages} stages, {self.microbatches} microbatches{again}: {self.trips} trips, {idle} of them idle, "
            f"{self.bubble:.1%} of the work"
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
