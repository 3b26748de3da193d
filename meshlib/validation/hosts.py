"""Host work in published runs whose times include it.

Runs of one table differ in machine and batch only. Hosts start a run, launch each step and prepare its images at some
rate; so a run takes

    run + steps x (start + max(images per host / rate, the step on the devices))

Each run is predicted with these three constants fitted to the other runs of its table, so that none measures itself.

A log of the same author on half a pod of v2, with newer software (github.com/stanford-futuredata/dawn-bench-entries,
ImageNet/train/google_resnet50_tpupod_tensorflow18.tsv), has a first epoch that is 87 to 100 s longer than later ones;
that of one device with TensorFlow 1.11 (google_resnet50_tpu_tensorflow111.tsv) has 28 s before the first.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hardware.chips import get_chip
from meshlib.validation.runs import ROWS

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Host:
    """A host that prepares `examples_per_second` and takes `start_seconds` to start a step, `run_seconds` a run."""

    examples_per_second: float
    start_seconds: float
    run_seconds: float = 0.0

    def step_seconds(self, device_seconds: float, examples: float) -> float:
        """Seconds of a step with `examples` examples per host."""
        return self.start_seconds + max(device_seconds, examples / self.examples_per_second)

    def __str__(self) -> str:
        rate, start = f"{self.examples_per_second:,.0f} images/s", f"{self.start_seconds:.3f} s a step"
        return f"{rate}, {start} and {self.run_seconds:.0f} s a run"


def includes_input(row: Row) -> bool:
    """True if a row's time is the wall time of a whole run."""
    return "wall time includes input" in str(row.get("note", ""))


def host_of(row: Row) -> tuple[Host | None, tuple[str, ...], str]:
    """The host of a row, the assumptions made about it, and why the row itself is not a measure; None if unknown."""
    if not includes_input(row):
        return None, (), ""
    others = [other for other in table_of(row) if other.get("id") != row.get("id")]
    host = fitted_host(others)
    if host is None:
        return None, (), "its time is that of a run, with input and start-up, and no other rows say what a host takes"
    return host, (f"a host's {host}: fitted to the other {len(others)} rows of its table",), ""


def table_of(row: Row) -> list[Row]:
    """The published rows of the same talk and chip, `row` included, whose batch is stated."""
    rows = [other for other in ROWS if includes_input(other) and (other.get("batch") or {}).get("global_examples")]
    return [other for other in rows if _talk(other) == _talk(row) and other.get("chip") == row.get("chip")]


def fitted_host(table: Sequence[Row]) -> Host | None:
    """The host whose runs differ least from those of the table, in relative time, where hosts bound every step.

    None unless the table determines three constants of a possible host.
    """
    work = np.array([_run(row) for row in table]).reshape(-1, 4)
    each = work[:, :3] / work[:, 3:]
    if np.linalg.matrix_rank(each) < 3:
        return None
    run, start, image = np.linalg.lstsq(each, np.ones(len(each)), rcond=None)[0]
    return Host(1 / float(image), float(start), float(run)) if min(run, start) >= 0 < image else None


def _run(row: Row) -> tuple[float, float, float, float]:
    """(runs, steps, images per host, seconds)."""
    steps = row["derived"]["images_total"] / row["batch"]["global_examples"]
    hosts = max(1, row["n_chips"] // get_chip(row["chip"]).chips_per_host)
    minutes = next(value for key, value in row["measured"].items() if re.fullmatch(r"minutes_\d+_epochs", key))
    return 1.0, steps, row["derived"]["images_total"] / hosts, 60.0 * minutes


def _talk(row: Row) -> object:
    return (row.get("source") or {}).get("talk")
