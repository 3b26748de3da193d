"""A second layout of one program, with and without what a session keeps; run by hand:

    python tests/benchmarks/sessions.py [--rounds 3] [--before CHECKOUT]

One training step of llama2-7b (layers scanned, AdamW, full rematerialisation) is lowered under 20 layouts of 64
devices, and under 20 on meshes of all sizes, checker on: each by a `mtf.lower` of its own, and all by one session. Both
run in a process of their own, so that neither finds what the other left in the caches of `layouts`, after a first
layout that is not counted. Seconds are of the CPU, the best of the rounds. `--before` measures `mtf.lower` of another
checkout beside them. Target: in the median over the layouts, a session takes at most a third of what `mtf.lower` took
before there were sessions.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FIRST = ("data:2", "data")
# Of 64 devices, as somebody who plans for one slice tries them; then meshes of all sizes, which share next to nothing.
ONE_SLICE = (
    *(("data:64", name) for name in ("data", "zero1", "fsdp")),
    *(("data:8;tensor:8", f"{a}+{b}") for a in ("data", "zero1", "fsdp") for b in ("tensor", "sequence")),
    *(("data:16;tensor:4", f"{a}+{b}") for a in ("data", "zero1", "fsdp") for b in ("tensor", "sequence")),
    *(("data:8;context:8", f"{a}+context") for a in ("data", "zero1", "fsdp")),
    *(("data:2;fsdp:8;tensor:4", f"data+fsdp+{b}") for b in ("tensor", "sequence")),
)
ALL_SIZES = (
    ("data:8", "data"), ("data:64", "data"), ("data:16", "zero1"), ("data:64", "zero1"), ("fsdp:32", "fsdp"),
    ("fsdp:256", "fsdp"), ("tensor:8", "tensor"), ("tensor:32", "tensor"), ("tensor:8", "sequence"),
    ("context:8", "context"), ("data:4;fsdp:16", "data+fsdp"), ("data:8;tensor:4", "data+tensor"),
    ("data:8;context:4", "data+context"), ("data:16;tensor:8", "zero1+tensor"), ("data:16;tensor:4", "zero1+sequence"),
    ("fsdp:32;tensor:8", "fsdp+tensor"), ("fsdp:16;tensor:16", "fsdp+sequence"), ("fsdp:16;context:8", "fsdp+context"),
    ("data:4;fsdp:16;tensor:8", "data+fsdp+tensor"), ("data:2;fsdp:64;tensor:4", "data+fsdp+sequence"),
)  # fmt: skip
SETS = {"one slice": ONE_SLICE, "all sizes": ALL_SIZES}


def measure(way: str, layouts: Sequence[tuple[str, str]]) -> None:
    """Lower all layouts, in this process; prints the seconds of each."""
    import meshlib as mtf

    config = mtf.models.preset("llama2-7b")
    with mtf.Graph():
        program = mtf.models.train_step(config, batch=256, length=4096)
    session = mtf.Session(*program) if way == "session" else None
    seconds = []
    for mesh, name in (FIRST, *layouts):
        layout = mtf.models.layout(name, config, mesh)
        begun = time.process_time()
        if session is None:
            mtf.lower(*program, mesh=mesh, layout=layout)
        else:
            session.lower(mesh, layout)
        seconds.append(time.process_time() - begun)
    print(json.dumps(seconds[1:]))


def run(way: str, which: str, root: Path) -> list[float]:
    """The seconds of each layout in a process of a checkout."""
    command = [sys.executable, __file__, "--measure", way, which]
    env = {**os.environ, "PYTHONPATH": str(root)}
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout)


def main() -> None:
    """Both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--before", type=Path, help="another checkout, whose mtf.lower is measured too")
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        way, which = args.measure
        measure(way, SETS[which])
        return
    ways = {"mtf.lower": ("lower", ROOT), "session": ("session", ROOT)}
    if args.before:
        ways = {"before": ("lower", args.before.resolve()), **ways}
    for which, layouts in SETS.items():
        rounds = [{name: run(way, which, root) for name, (way, root) in ways.items()} for _ in range(args.rounds)]
        columns = {name: [min(each) for each in zip(*(r[name] for r in rounds), strict=True)] for name in ways}
        print(f"{which:<46}" + "".join(f"{name:>12}" for name in columns) + f"{'ratio':>8}")
        rows = [(f"{name:<20}{mesh:<26}", [t[n] for t in columns.values()]) for n, (mesh, name) in enumerate(layouts)]
        rows.append((f"{'median':<46}", [statistics.median(times) for times in columns.values()]))
        for text, row in rows:
            print(text + "".join(f"{s:>10.3f} s" for s in row) + f"{row[0] / row[-1]:>8.2f}")


if __name__ == "__main__":
    main()
