"""Published training runs: measured, modelled under their own layout, and under the best layout that a search finds.

    .venv/bin/python tests/benchmarks/experts.py [--seconds 30] [--workers 2] [--only PART ...]

Of each published row that says its layout (`meshlib.validation.runs`): model, batch, slice, optimizer, compiler
and what is computed again are the row's; mesh and layout are searched, the row's own among them. Both times are
predictions: a gain within the model's median error, or within its error on the row, is a tie. Below each other gain:
what to know before acting on it (`Found.cautions`).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
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
from meshlib.validation.runs import ROWS, Run, run_of
from meshlib.validation.training import compiler_of, config_of, layout_of, remat_of

HEAD = ("row", "measured", "own layout*", "off", "best*", "gain*", "gap", "best layout")


@dataclass(frozen=True)
class Line:
    """One row: the run, its own layout, and what a search has found."""

    run: Run
    own: Outcome
    result: mtf.Found

    @property
    def measured_seconds(self) -> float:
        """Of one step."""
        return self.run.measured_seconds / self.run.steps

    @property
    def gain(self) -> float:
        """By what share the fastest layout is faster than the run's own."""
        return 1 - self.result.fastest.value / self.own.value

    @property
    def error(self) -> float:
        """Of the model on this row; where the measured time has an evaluation in it, that of the model in general."""
        general = self.result.objective.error
        return general if self.run.evaluation else max(general, abs(self.own.value / self.measured_seconds - 1))

    @property
    def is_tie(self) -> bool:
        """Whether the model's error covers the gain."""
        return self.gain <= self.error

    @property
    def cells(self) -> tuple[str, ...]:
        """For the table."""
        own, candidate = self.own, self.result.fastest.candidate
        off = "" if self.run.evaluation else f"{own.value / self.measured_seconds - 1:+.1%}"
        return (
            self.run.name, seconds_text(self.measured_seconds), seconds_text(own.value) + ("" if own.fits else " !"),
            off, seconds_text(self.result.fastest.value), "tie" if self.is_tie else f"{self.gain:.1%}",
            f"{self.result.gap:.1%}", "its own" if self.gain == 0 else f"{candidate.mesh} {candidate.layout}",
        )  # fmt: skip


def runs(only: Sequence[str]) -> Iterator[Run]:
    """The published training runs that can be expressed."""
    for row in ROWS:
        try:
            run = run_of(row)
        except NotExpressed:
            continue
        if any(part in run.name for part in only) and not run.encoder:
            yield run


def searched(run: Run, seconds: float, workers: int) -> Line:
    """One row."""
    config, mesh = config_of(run), Mesh(run.mesh)
    remat = remat_of(run, config)

    def build() -> tuple[Any, Any]:
        adamw = AdamWOptimizer(1e-3, slot_dtype=run.state_dtype, master_dtype=run.state_dtype)
        return train_step(config, run.padded_batch, run.length, adamw, remat)

    own = (mesh, layout_of(run, config, mesh))
    result = mtf.search(build, run.slice, also=[own], seconds=seconds, workers=workers, compiler=compiler_of(run))
    if result.outcomes[0].figures is None:
        raise MeshlibError(f"{run.name}: its own layout: {result.outcomes[0].why}")
    return Line(run, result.outcomes[0], result)


def main() -> None:
    """The table, row by row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--only", nargs="*", default=[""], help="parts of names of rows")
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
        for caution in () if line.is_tie else line.result.cautions:
            print(f"    {caution}", flush=True)
    print("\n".join(grid([HEAD, *(x.cells for x in lines)])))
    print("* modelled; ! does not fit")


if __name__ == "__main__":
    main()
