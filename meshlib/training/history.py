"""The history of a run: JSON lines, a row per logging interval and per evaluation, and a progress bar."""

from __future__ import annotations

import csv
import io
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from meshlib.core.documents import COUNT, MOST_BYTES, parse_json
from meshlib.core.drawing import Panel, plotted
from meshlib.core.errors import CheckpointError, GraphError
from meshlib.core.files import append_line, open_file, replace_file
from meshlib.core.text import count_text
from meshlib.estimation import estimate
from meshlib.program.records import Program
from meshlib.simulation import Simulation

Row = dict[str, Any]
TIMES = ("examples_per_second", "waited_seconds")  # keys with values that differ between equal runs
BATCH = "batch"
EVERY_SECONDS = 0.1


class History:
    """Rows in step order, each with "step"; names from evaluations begin with "eval_".

    path: a file to which rows are appended as JSON lines; None keeps them only in memory.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self.path = None if path is None else Path(path)
        self.rows: list[Row] = []

    def resume(self, step: int) -> None:
        """Read the rows of the file up to a step, and drop later ones."""
        self.rows = [] if self.path is None else [row for row in read_history(self.path) if row["step"] <= step]
        if self.path is not None:
            text = "".join(f"{json.dumps(row)}\n" for row in self.rows)
            replace_file(self.path, lambda file: file.write(text.encode()), "train", CheckpointError)

    def add(self, row: Row) -> None:
        """Add a row."""
        self.rows.append(row)
        if self.path is not None:
            append_line(self.path, json.dumps(row), "train", CheckpointError)

    def column(self, name: str) -> tuple[list[int], list[float]]:
        """Steps and values of one metric, such as "loss" or "eval_loss"."""
        rows_with_name = [row for row in self.rows if name in row]
        return [row["step"] for row in rows_with_name], [row[name] for row in rows_with_name]

    @property
    def names(self) -> list[str]:
        """All metrics that occur in a row."""
        return list(dict.fromkeys(name for row in self.rows for name in row if name != "step"))

    def save_csv(self, path: str | os.PathLike[str]) -> None:
        """Write the rows as a CSV table with a header.

        Raises: CheckpointError if the file can't be written.
        """
        text = io.StringIO()
        writer = csv.DictWriter(text, ["step", *self.names], lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows)
        replace_file(path, lambda file: file.write(text.getvalue().encode()), "history", CheckpointError)

    def plot(self, ax: Any = None, names: list[str] | None = None) -> Any:
        """Plot metrics over the steps, one panel each, together with those of evaluations; needs matplotlib.

        Args:
          ax: matplotlib Axes for the first panel, or the path of a file (.png, .svg, .pdf) for all; by default a new
            figure.
          names: metrics to plot; by default all except times.
        Returns: the Axes, or a tuple of them for several metrics.
        Raises: GraphError for names that no row has, if matplotlib is not installed, or if the file can't be written.
        """
        if names is not None and not isinstance(names, list | tuple):
            raise GraphError(f"history.plot: names must be a list of names, got {names!r:.80}")
        shown = [n for n in self.names if not n.startswith("eval_") and n not in TIMES] if names is None else names
        shown += [n.removeprefix("eval_") for n in self.names if n.startswith("eval_")] if names is None else []
        shown = [n for n in dict.fromkeys(shown) if self.column(n)[0] or self.column(f"eval_{n}")[0]]
        if not shown:
            raise GraphError(
                f"history.plot: no row has {names or 'a figure'}; there are {', '.join(self.names) or 'none'}"
            )
        panels = [self._panel(name, name == shown[-1]) for name in shown]
        return plotted("history.plot", ax, panels, (7, 1 + 2.2 * len(shown)), rows=len(shown))

    def _panel(self, name: str, last: bool) -> Panel:
        """One metric, of training and evaluation."""

        def panel(axes: Any) -> None:
            for column, label, style in ((name, "training", "-"), (f"eval_{name}", "evaluation", "o-")):
                steps, values = self.column(column)
                if steps:
                    axes.plot(steps, values, style, label=label, markersize=3)
            axes.set_ylabel(name)
            axes.legend()
            if last:
                axes.set_xlabel("step")

        return panel


def read_history(path: str | os.PathLike[str]) -> list[Row]:
    """The rows of the file without a truncated last line; empty if it does not exist.

    Raises: CheckpointError for an invalid history file.
    """
    if isinstance(path, str | os.PathLike) and os.fspath(path) and not os.path.lexists(path):
        return []
    with open_file(path, "history", CheckpointError, MOST_BYTES) as (file, target):
        lines = file.read().split(b"\n")
    rows = []
    for number, line in enumerate(lines[:-1], start=1):  # a killed writer leaves a truncated last line

        def fail(fault: str, number: int = number) -> NoReturn:
            raise CheckpointError(
                f"history: line {number} of {target} is not a row with a step: {fault}; delete the "
                "file: runs only append to it"
            ) from None

        rows.append(parse_json(line, fail, {"step": COUNT}, constants=True))
    return rows


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
