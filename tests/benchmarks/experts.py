"""The best layout that a search finds beside that of the people who ran it: published training runs.

    .venv/bin/python tests/benchmarks/experts.py [--seconds 30] [--workers 2] [--only NAME]

Of each published row that says its layout (`meshlib.validation.published`): model, batch, slice, optimizer and what is
computed again are the row's; mesh and layout are searched, the row's own among them. Both are predictions by the same
model of time, whose median error on these rows is about 3.5 %: what is found by less than that is a tie.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import meshlib as mtf
from layouts import Mesh
from meshlib.core.errors import MeshlibError
from meshlib.core.text import grid, seconds_text
from meshlib.models import train_step
from meshlib.optimize import AdamWOptimizer
from meshlib.searching.outcomes import Outcome
from meshlib.validation.policies import NotExpressed
from meshlib.validation.published import ROWS
from meshlib.validation.runs import Run, run_of
from meshlib.validation.training import config_of, layout_of, remat_of


@dataclass(frozen=True)
class Line:
    """One row: the run, what its people chose, what was found, and by how much that could still be beaten."""

    run: Run
    expert: Outcome
    found: Outcome
    gap: float
    seconds: float

    @property
    def cells(self) -> tuple[str, ...]:
        """For the table."""
        expert, found = self.expert, self.found
        less = 1 - found.value / expert.value
        fits = "" if expert.fits else " !"
        what = "the same" if less == 0 else f"{found.candidate.mesh} {found.candidate.layout}"
        return (
            self.run.name, seconds_text(expert.value) + fits, seconds_text(found.value),
            f"{less:.1%}", f"{self.gap:.1%}", str(expert.candidate.mesh), what,
        )  # fmt: skip


def runs(only: str) -> Iterator[Run]:
    """The published training runs that can be expressed."""
    for row in ROWS:
        try:
            run = run_of(row)
        except NotExpressed:
            continue
        if only in run.name and not run.encoder:
            yield run


def searched(run: Run, seconds: float, workers: int) -> Line:
    """One row."""
    config, mesh = config_of(run), Mesh(run.mesh)
    remat = remat_of(run, config)

    def build() -> tuple[Any, Any]:
        adamw = AdamWOptimizer(1e-3, slot_dtype=run.state_dtype, master_dtype=run.state_dtype)
        return train_step(config, run.padded_batch, run.length, adamw, remat)

    begun = time.process_time()
    own = (mesh, layout_of(run, config, mesh))
    found = mtf.search(build, run.slice, also=[own], seconds=seconds, workers=workers)
    expert = found.outcomes[0]
    if expert.figures is None:
        raise MeshlibError(f"{run.name}: its own layout: {expert.why}")
    return Line(run, expert, found.best, found.gap, time.process_time() - begun)


def main() -> None:
    """The table, row by row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    lines = []
    for run in runs(args.only):
        try:
            line = searched(run, args.seconds, args.workers)
        except MeshlibError as fault:
            print(f"{run.name}: {fault}", flush=True)
            continue
        lines.append(line)
        print("  ".join(line.cells), flush=True)
    print(
        "\n".join(grid([("row", "expert*", "found*", "less", "gap", "its mesh", "found"), *(x.cells for x in lines)]))
    )
    print("* modelled; ! does not fit")


if __name__ == "__main__":
    main()
