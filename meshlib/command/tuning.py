"""`plan base.yml ... --search`: the run it was given, with other mesh sizes, recomputation, batch and accumulation."""

from __future__ import annotations

import argparse
import json

from hardware.slices import Slice
from meshlib.command.configured import notes_of, run_of
from meshlib.command.terminal import progress, progress_ends
from meshlib.core.compiler import COMPILERS
from meshlib.models.maxtext.emission import Emission
from meshlib.searching.tuning import tune


def tuned(args: argparse.Namespace, where: Slice) -> int:
    """Print the best configuration and what each change gains; 1 where nothing fits."""
    run = run_of(args)
    try:
        found = tune(
            run, where, seconds=args.seconds, compiler=COMPILERS[args.compiler],
            progress=lambda done, total, text: progress(done, total, f"best: {text}"),
        )  # fmt: skip
    finally:
        progress_ends()
    if args.emit == "maxtext":
        best = found.best
        print(Emission(best.run.overrides, tuple(map(str, best.run.unread))))
    elif args.json:
        print(json.dumps(found.as_json(), indent=2))
    else:
        notes = notes_of(run, where)
        print("\n\n".join(part for part in (str(found), notes, "* modelled; all others exact") if part))
    return 0 if found.best.fits else 1
