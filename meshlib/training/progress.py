"""A progress bar: steps, loss, measured examples/s and the prediction for the slice."""

from __future__ import annotations

import sys
import time

from meshlib.core.text import count_text
from meshlib.estimation import estimate
from meshlib.program.records import Program
from meshlib.simulation import Simulation
from meshlib.training.history import Row

BATCH = "batch"
EVERY_SECONDS = 0.1


class ProgressBar:
    """Shown if standard error is a terminal, at most ten times a second."""

    def __init__(self, run: Simulation, steps: int) -> None:
        self.steps, self.last, self.shown = steps, 0.0, False
        self.terminal = sys.stderr.isatty()
        self.predicted = predicted_rate(run) if self.terminal else None

    def show(self, step: int, rows: list[Row]) -> None:
        """Draw it, if due."""
        now = time.monotonic()
        if not self.terminal or (now - self.last < EVERY_SECONDS and step < self.steps):
            return
        self.last, self.shown = now, True
        row = next((r for r in reversed(rows) if "examples_per_second" in r), {})
        parts = [f"loss {row['loss']:.4f}"] if "loss" in row else []
        parts += [f"{count_text(row['examples_per_second'])} examples/s here"] if row else []
        parts += [f"{count_text(self.predicted)} predicted"] if self.predicted else []
        filled = 20 * step // self.steps
        line = f"[{'#' * filled}{'.' * (20 - filled)}] {step:,}/{self.steps:,} {', '.join(parts)}"
        print(f"\r\033[K{line[:79]}", end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Erase it."""
        if self.shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def predicted_rate(run: Simulation) -> float | None:
    """Modelled examples per second on the slice of a run; None without a slice or a dim "batch"."""
    examples = examples_of(run.program)
    if run.slice is None or examples is None:
        return None
    return examples / estimate(run.program, run.slice).step_seconds


def examples_of(program: Program) -> int | None:
    """Examples per step: the largest dim "batch" of the inputs."""
    shapes = [v.tensor.shape for v in program.inputs.values()]
    return max((s.dim(BATCH).size for s in shapes if BATCH in s.names), default=None)
