"""Host work in published runs whose times include it.

Runs of one table differ in machine and batch only. Hosts prepare images at some rate, and launch each step; so a step
takes

    start + max(images per host / rate, the step on the devices)

Two runs of a table on one machine with different batches determine both constants; these two do not validate the model,
the others of the table do.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hardware.chips import get_chip
from meshlib.validation.runs import ROWS

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Host:
    """A host that prepares `examples_per_second`, and takes `start_seconds` to start a step."""

    examples_per_second: float
    start_seconds: float

    def step_seconds(self, device_seconds: float, examples: float) -> float:
        """Seconds of a step with `examples` examples per host."""
        return self.start_seconds + max(device_seconds, examples / self.examples_per_second)


def includes_input(row: Row) -> bool:
    """Whether a row's time is the wall time of a whole run."""
    return "wall time includes input" in str(row.get("note", ""))


def host_of(row: Row) -> tuple[Host | None, tuple[str, ...], str]:
    """The host of a row, the assumptions made about it, and why the row itself is no measure; None if unknown."""
    if not includes_input(row):
        return None, (), ""
    table = [r for r in ROWS if includes_input(r) and (r.get("batch") or {}).get("global_examples")]
    table = [r for r in table if _talk(r) == _talk(row) and r.get("chip") == row.get("chip")]
    pair = _fitted_host(table)
    if pair is None:
        return None, (), "its time is that of a run, with input and start-up, and no two rows say what a host takes"
    host, names = pair
    if row.get("id") in names:
        return host, (), f"it fixes, with {' and '.join(n for n in names if n != row['id'])}, what a host takes"
    of = " and ".join(names)
    return host, (f"a host's {host.examples_per_second:,.0f} images/s and {host.start_seconds:.3f} s a step: {of}",), ""


def _fitted_host(table: Sequence[Row]) -> tuple[Host, tuple[str, str]] | None:
    """The host fitted to the two largest batches on the largest machine, and the ids of these rows."""
    largest = max((r.get("n_chips") or 0 for r in table), default=0)
    runs = sorted((_run(r) for r in table if r.get("n_chips") == largest), reverse=True)
    if len(runs) < 2 or runs[0][0] == runs[1][0]:
        return None
    (many, long, first), (few, short, second) = runs[:2]
    rate = (many - few) / (long - short)
    if rate <= 0 or short < few / rate:
        return None
    return Host(rate, short - few / rate), (first, second)


def _run(row: Row) -> tuple[float, float, str]:
    """(images per host and step, seconds of a step, id)."""
    batch = row["batch"]["global_examples"]
    hosts = max(1, row["n_chips"] // get_chip(row["chip"]).chips_per_host)
    minutes = next(value for key, value in row["measured"].items() if re.fullmatch(r"minutes_\d+_epochs", key))
    return batch / hosts, 60 * minutes * batch / row["derived"]["images_total"], str(row["id"])


def _talk(row: Row) -> object:
    return (row.get("source") or {}).get("talk")
