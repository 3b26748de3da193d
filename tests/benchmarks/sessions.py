"""A second layout of one program, with and without what a session keeps; run by hand:

    python tests/benchmarks/sessions.py [--rounds 3] [--before CHECKOUT]

One training step of llama2-7b (layers scanned, AdamW, full rematerialisation) is lowered under 20 layouts, checker on:
each by a `mtf.lower` of its own, and all by one `mtf.Session`. Both run in a process of their own, so that neither
finds what the other left in the caches of `layouts`, after a first layout that is not counted. Seconds are of the CPU,
the best of the rounds. `--before` measures `mtf.lower` of another checkout beside them. Target: in the median over the
layouts, a session takes at most a third of what `mtf.lower` took before there were sessions.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FIRST = ("data", "data:2")
LAYOUTS = (
    ("data", "data:8"),
    ("data", "data:64"),
    ("zero1", "data:16"),
    ("zero1", "data:64"),
    ("fsdp", "fsdp:32"),
    ("fsdp", "fsdp:256"),
    ("tensor", "tensor:8"),
    ("tensor", "tensor:32"),
    ("sequence", "tensor:8"),
    ("context", "context:8"),
    ("data+fsdp", "data:4;fsdp:16"),
    ("data+tensor", "data:8;tensor:4"),
    ("data+context", "data:8;context:4"),
    ("zero1+tensor", "data:16;tensor:8"),
    ("zero1+sequence", "data:16;tensor:4"),
    ("fsdp+tensor", "fsdp:32;tensor:8"),
    ("fsdp+sequence", "fsdp:16;tensor:16"),
    ("fsdp+context", "fsdp:16;context:8"),
    ("data+fsdp+tensor", "data:4;fsdp:16;tensor:8"),
    ("data+fsdp+sequence", "data:2;fsdp:64;tensor:4"),
)


def measure(way: str) -> None:
    """Lower all layouts, in this process; prints the seconds of each."""
    import meshlib as mtf

    config = mtf.models.preset("llama2-7b")
    with mtf.Graph():
        program = mtf.models.train_step(config, batch=256, length=4096)
    session = mtf.Session(*program) if way == "session" else None
    seconds = []
    for name, mesh in (FIRST, *LAYOUTS):
        layout = mtf.models.layout(name, config, mesh)
        begun = time.process_time()
        if session is None:
            mtf.lower(*program, mesh=mesh, layout=layout)
        else:
            session.lower(mesh, layout)
        seconds.append(time.process_time() - begun)
    print(json.dumps(seconds[1:]))


def best(way: str, root: Path, rounds: int) -> list[float]:
    """The least seconds of each layout over processes of a checkout."""
    command = [sys.executable, __file__, "--measure", way]
    env = {**os.environ, "PYTHONPATH": str(root)}
    runs = [subprocess.run(command, capture_output=True, text=True, check=True, env=env) for _ in range(rounds)]
    return [min(each) for each in zip(*(json.loads(run.stdout) for run in runs), strict=True)]


def main() -> None:
    """The table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--before", type=Path, help="another checkout, whose mtf.lower is measured too")
    parser.add_argument("--measure", choices=("lower", "session"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        measure(args.measure)
        return
    columns = {"mtf.lower": best("lower", ROOT, args.rounds), "session": best("session", ROOT, args.rounds)}
    if args.before:
        columns = {"before": best("lower", args.before.resolve(), args.rounds), **columns}
    print(f"{'layout':<20}{'mesh':<26}" + "".join(f"{name:>12}" for name in columns) + f"{'ratio':>8}")
    for n, (name, mesh) in enumerate(LAYOUTS):
        row = [times[n] for times in columns.values()]
        print(f"{name:<20}{mesh:<26}" + "".join(f"{s:>10.3f} s" for s in row) + f"{row[0] / row[-1]:>8.2f}")
    medians = [statistics.median(times) for times in columns.values()]
    print(f"{'median':<46}" + "".join(f"{s:>10.3f} s" for s in medians) + f"{medians[0] / medians[-1]:>8.2f}")


if __name__ == "__main__":
    main()
