"""Bytes that programs send under this checkout and under another one, and the CPU seconds of their lowering.

    python tests/benchmarks/choices.py --before CHECKOUT [--sets minima,pairs,presets] [--pairs 190]

Programs: those of `tests/lowering/minima`, random ones of `tests/lowering/pairs.py`, and training steps of presets
under the usual layouts. Printed: every program whose bytes or cost differ, then a summary. Each checkout runs in a
process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# (preset, batch, length, scan), and the usual layouts with a mesh each
PRESETS = (
    ("llama3-8b", 256, 4096, True), ("llama2-7b", 256, 2048, True), ("llama3-70b", 256, 4096, True),
    ("llama3.1-405b", 256, 4096, True), ("t5-11b", 256, 512, True), ("mixtral-8x7b", 128, 4096, True),
)  # fmt: skip
LAYOUTS = (
    ("data:16", "data"), ("data:16", "zero1"), ("fsdp:16", "fsdp"), ("tensor:8", "tensor"), ("tensor:8", "sequence"),
    ("data:8;tensor:8", "data+tensor"), ("data:16;tensor:4", "zero1+sequence"), ("fsdp:16;tensor:4", "fsdp+tensor"),
    ("fsdp:16;tensor:4", "fsdp+sequence"), ("fsdp:8;context:8", "fsdp+context"),
    ("data:4;fsdp:4;tensor:4", "data+fsdp+tensor"), ("data:2;fsdp:8;tensor:4", "data+fsdp+sequence"),
)  # fmt: skip


def subjects(sets: set[str], pairs: int) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Names of programs, and how to lower each."""
    import meshlib as mtf
    from tests.lowering.minima_tables import ROWS
    from tests.lowering.pairs import pair

    if "minima" in sets:
        for name, build in ROWS.items():
            with mtf.Graph():
                case = build("bfloat16")
            yield f"minimum {name}", (case.outputs, case.updates, case.mesh, case.layout)
    if "pairs" in sets:
        for number in range(pairs):
            p = pair(number)
            yield f"pair {number}", (p.outputs, p.updates, p.mesh, p.layout)
    if "presets" in sets:
        for name, batch, length, scan in PRESETS:
            config = mtf.models.preset(name)
            with mtf.Graph():
                program = mtf.models.train_step(config, batch=batch, length=length, scan=scan)
            for mesh, layout in LAYOUTS:
                try:
                    yield f"{name} {layout} {mesh}", (*program, mesh, mtf.models.layout(layout, config, mesh))
                except mtf.LayoutError as fault:
                    print(f"{name} {layout}: {fault}", file=sys.stderr)


def measure(sets: set[str], pairs: int) -> None:
    """Lower all of them; prints a line of JSON for each."""
    import meshlib as mtf

    balance = mtf.Balance()
    for name, of in subjects(sets, pairs):
        begun = time.process_time()
        try:
            program = mtf.lower(*of)
        except mtf.LayoutError:
            continue
        seconds = time.process_time() - begun
        print(json.dumps([name, program.sent_bytes, cost_of_work(program, balance), seconds]), flush=True)


def cost_of_work(program: Any, balance: Any) -> float:
    """What the work of one device is worth in bytes, loops included."""
    from meshlib.program.analysis.work import local_work
    from meshlib.program.instructions import Loop

    bodies = sum(i.trips * cost_of_work(i.body, balance) for i in program.instructions if isinstance(i, Loop))
    return float(bodies + sum(balance.bytes_of(local_work(program, i)) for i in program.instructions))


def run(root: Path, arguments: list[str]) -> dict[str, list[Any]]:
    """What a checkout makes of them, or made: what `--measure` printed into a file."""
    if root.is_file():
        return {row[0]: row[1:] for row in map(json.loads, root.read_text().splitlines())}
    script = Path(__file__).resolve()
    env = {**os.environ, "PYTHONPATH": str(root)}
    text = subprocess.run(
        [sys.executable, str(script), "--measure", *arguments], stdout=subprocess.PIPE, text=True, check=True, env=env,
        cwd=root,
    ).stdout  # fmt: skip
    return {row[0]: row[1:] for row in map(json.loads, text.splitlines())}


def main() -> None:
    """Both checkouts, side by side."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", type=Path, help="the other checkout")
    parser.add_argument("--sets", default="minima,pairs,presets")
    parser.add_argument("--pairs", type=int, default=190)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        measure(set(args.sets.split(",")), args.pairs)
        return
    arguments = ["--sets", args.sets, "--pairs", str(args.pairs)]
    old, new = run(args.before.resolve(), arguments), run(ROOT, arguments)
    fewer = more = 0
    new = {name: row for name, row in new.items() if name in old}
    for name, (sent, work, seconds) in new.items():
        before = old[name]
        if abs(sent - before[0]) > 1e-9 * sent or abs(sent + work - before[0] - before[1]) > 1e-4 * (sent + work):
            fewer, more = fewer + (sent < before[0]), more + (sent > before[0])
            ratio = sent / before[0] if before[0] else float("inf")
            cost = (sent + work) / max(before[0] + before[1], 1)
            print(f"{name:60} {before[0]:>16.6g} {sent:>16.6g} bytes {ratio:8.4f}  cost {cost:8.6f}  {seconds:.2f} s")
    both = [(old[name][2], row[2]) for name, row in new.items()]
    print(f"{len(new)} programs: {fewer} send less, {more} send more")
    before, after = (statistics.median(seconds) for seconds in zip(*both, strict=True))
    print(f"CPU seconds, medians {before:.3f} -> {after:.3f}")
    print(f"in all {sum(a for a, _ in both):.1f} -> {sum(b for _, b in both):.1f}")


if __name__ == "__main__":
    main()
