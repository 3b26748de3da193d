"""Cost of failures in a whole run: goodput, the best checkpoint interval, and the benefit of spare slices.

Source: `hardware.goodput`, for formulas and theirs.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from hardware.checks import HardwareError
from hardware.goodput import best_segment_seconds, segment_seconds, waiting_share
from meshlib.core.arguments import at, number, whole
from meshlib.core.errors import GraphError
from meshlib.core.text import counted

WHAT = "Estimate.run"


@dataclass(frozen=True)
class Failures:
    """Expected failures of a run, and their cost. Modelled.

    Attributes:
      count: expected number; lost_seconds: the total of `repeated_seconds`, steps since the last checkpoint and
        restarts, and `waiting_seconds`, waiting for repair.
      checkpoint_every: steps between checkpoints; best_every: the interval that minimises the run's duration, None if
        checkpoints cost nothing.
      spare_slices: slices in reserve.
    """

    count: float
    repeated_seconds: float
    waiting_seconds: float
    checkpoint_every: int
    best_every: int | None
    spare_slices: int

    @property
    def lost_seconds(self) -> float:
        """Total seconds lost to failures."""
        return self.repeated_seconds + self.waiting_seconds

    def __str__(self) -> str:
        best = "" if self.best_every is None else f"; a checkpoint every {self.best_every:,} steps is best"
        spares = f", {counted(self.spare_slices, 'spare slice')}" if self.waiting_seconds else ""
        return f"{self.count:.3g} expected*{spares}{best}*"


@dataclass(frozen=True)
class Faults:
    """Failure rate of a machine and its recovery times, seconds."""

    mean_seconds: float
    restart_seconds: float
    spare_slices: int
    repair_seconds: float

    def best_every(self, steps: int, work_seconds: float, checkpoint_seconds: float) -> int:
        """The number of steps between checkpoints that minimises the run time.

        Raises: GraphError where checkpoints cost nothing: then they should come after every step.
        """
        if not checkpoint_seconds:
            raise GraphError(
                f"{at(WHAT)}: mean_time_between_failures needs checkpoints; give checkpoint_every, or "
                "checkpoint_seconds, which gives the best interval"
            )
        each = work_seconds / steps
        near = best_segment_seconds(checkpoint_seconds, self.mean_seconds) / each if each else steps
        candidates = {min(max(1, n), steps) for n in (int(near), ceil(near))}
        return min(candidates, key=lambda n: self._seconds(steps, work_seconds, n, checkpoint_seconds))

    def cost(self, steps: int, work_seconds: float, checkpoints: int, checkpoint_seconds: float) -> Failures:
        """Cost of failures in a run of this many steps and checkpoints.

        Args:
          work_seconds: duration of the run without failures and checkpoints.
        Raises: GraphError where no segment between checkpoints would ever end, or the run would always wait.
        """
        interval = ceil(steps / max(1, checkpoints))
        best = self.best_every(steps, work_seconds, checkpoint_seconds) if checkpoint_seconds else None
        running = self._seconds(steps, work_seconds, interval, checkpoint_seconds)
        repeated = max(0.0, running - work_seconds - max(1, checkpoints) * checkpoint_seconds)
        try:
            share = waiting_share(self.spare_slices, self.repair_seconds, self.mean_seconds)
        except HardwareError as fault:
            raise GraphError(f"{at(WHAT)}: {fault}") from None
        if share == 1:
            raise GraphError(
                f"{at(WHAT)}: with repair_seconds {self.repair_seconds:g} and failures every {self.mean_seconds:g} s "
                f"the run always waits for repair of more than {self.spare_slices} slices; give more spare_slices"
            )
        waiting = running * share / (1 - share)
        return Failures(running / self.mean_seconds, repeated, waiting, interval, best, self.spare_slices)

    def _seconds(self, steps: int, work_seconds: float, interval: int, checkpoint_seconds: float) -> float:
        """Seconds from the first step to the last checkpoint: segments of `interval` steps, and a shorter last one."""
        whole_segments, rest = divmod(steps, interval)
        try:
            seconds = [
                segment_seconds(
                    work_seconds * n / steps, checkpoint_seconds, self.restart_seconds, self.mean_seconds
                ) for n in (interval, rest)
            ]  # fmt: skip
        except HardwareError as fault:
            raise GraphError(f"{at(WHAT)}: {fault}") from None
        return whole_segments * seconds[0] + (seconds[1] if rest else 0.0)


def faults_of(mean: object, restart: object, spares: object, repair: object) -> Faults | None:
    """The failure arguments of `Estimate.run`; None if none is given.

    Raises: GraphError for values that are not durations or counts, or that need another argument.
    """
    others = {"restart_seconds": restart, "spare_slices": spares, "repair_seconds": repair}
    given = [name for name, value in others.items() if value is not None]
    if mean is None:
        if given:
            raise GraphError(f"{at(WHAT)}: {given[0]} needs mean_time_between_failures, in seconds")
        return None
    if spares is not None and repair is None:
        raise GraphError(f"{at(WHAT)}: spare_slices needs repair_seconds, for how long a failed slice is missing")
    durations = [
        number(value, WHAT, name) if value is not None else 0.0
        for name, value in (
            ("mean_time_between_failures", mean),
            ("restart_seconds", restart),
            ("repair_seconds", repair),
        )
    ]
    for name, value in zip(("mean_time_between_failures", "restart_seconds", "repair_seconds"), durations, strict=True):
        if value < 0 or (value == 0 and name == "mean_time_between_failures"):
            bound = "positive" if name == "mean_time_between_failures" else "0 or more"
            raise GraphError(f"{at(WHAT)}: {name} must be {bound}, got {value:g}")
    count = 0 if spares is None else whole(spares, WHAT, "spare_slices", 0)
    return Faults(durations[0], durations[1], count, durations[2])
