"""`plan base.yml ... --search`: a given run with other mesh sizes, rematerialisation, batch and accumulation."""

from __future__ import annotations

import argparse

from hardware.slices import Slice
from meshlib.command.configured import notes_of, run_of
from meshlib.command.output import say, say_json
from meshlib.command.terminal import Progress
from meshlib.core.compiler import COMPILERS
from meshlib.models.maxtext.emission import Emission
from meshlib.searching.tuning import tune


def tuned(args: argparse.Namespace, where: Slice) -> int:
    """Print the best configuration and the gain of each change; returns 1 if nothing fits."""
    run = run_of(args)
    with Progress(args.quiet) as bar:
        result = tune(
            run, where, seconds=args.seconds, compiler=COMPILERS[args.compiler],
            progress=lambda done, total, text: bar(done, total, f"configurations; best: {text}"),
        )  # fmt: skip
    if args.emit == "maxtext":
        best = result.best
        print(Emission(best.run.overrides, tuple(map(str, best.run.unread))))
    elif args.json:
        say_json(result.as_json())
    else:
        notes = notes_of(run, where)
        say("\n\n".join(part for part in (str(result), notes, "* modelled; all others exact") if part))
    return 0 if result.best.fits else 1
