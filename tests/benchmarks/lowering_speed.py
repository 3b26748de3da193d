"""CPU seconds of lowering, of this checkout and of another one; run by hand:

    python tests/benchmarks/lowering_speed.py [--before CHECKOUT] [--rounds 5] [--cases "first 8B;first 405B"]

Training steps with AdamW and full recomputation under `fsdp+sequence` on `fsdp:16;tensor:4`, 64 sequences of 4,096: the
first lowering of a process, with layers scanned and unrolled, and of Gemma 3 4B on three axes (`data+fsdp+sequence`);
the median further layout of a session, of 20 layouts of 64 devices; the same layout again; and a whole `meshlib plan`,
imports included. Each run is a process of its own, and checkouts take turns; printed are medians over the rounds, and
what this checkout takes as a share of the other.
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
MESH, LAYOUT, BATCH, LENGTH = "fsdp:16;tensor:4", "fsdp+sequence", 64, 4096
FIRST = {  # preset, whether layers are scanned
    "first 8B": ("llama3.1-8b", True), "first 405B": ("llama3.1-405b", True),
    "first DeepSeek-V3": ("deepseek-v3", True), "first 8B, 32 layers unrolled": ("llama3.1-8b", False),
}  # fmt: skip
THREE_AXES = "first gemma3-4b, three axes"
SESSION = ("further layout of 8B", "the same again")
PLAN = "plan 8B on v5e-16"
CASES = (*FIRST, THREE_AXES, SESSION[0], PLAN)


def measure(case: str) -> dict[str, float]:
    """The CPU seconds of one case, in this process."""
    if case == PLAN:
        command = [sys.executable, "-m", "meshlib", "plan", "llama3.1-8b", "--slice", "v5e-16"]
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
        spent = os.times()
        return {case: spent.children_user + spent.children_system}
    import meshlib as mtf
    from tests.benchmarks.sessions import FIRST as BEGINNING
    from tests.benchmarks.sessions import ONE_SLICE

    def lowered(session: mtf.Session, mesh: str, name: str) -> float:
        layout = mtf.models.layout(name, config, mesh)
        begun = time.process_time()
        session.lower(mesh, layout)
        return time.process_time() - begun

    preset, scan = ("gemma3-4b", True) if case == THREE_AXES else FIRST.get(case, FIRST["first 8B"])
    config = mtf.models.preset(preset)
    with mtf.Graph():
        program = mtf.models.train_step(config, batch=BATCH, length=LENGTH, scan=scan)
    if case == THREE_AXES:
        return {case: lowered(mtf.Session(*program), "data:2;fsdp:8;tensor:4", "data+fsdp+sequence")}
    if case in FIRST:
        return {case: lowered(mtf.Session(*program), MESH, LAYOUT)}
    session = mtf.Session(*program)
    lowered(session, *BEGINNING)
    further = [lowered(session, *where) for where in ONE_SLICE]
    return dict(zip(SESSION, (statistics.median(further), lowered(session, *ONE_SLICE[-1])), strict=True))


def run(case: str, root: Path) -> dict[str, float]:
    """What a case takes in a process of a checkout."""
    command = [sys.executable, str(Path(__file__).resolve()), "--measure", case]
    env = {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{ROOT}"}
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True, env=env, cwd=root).stdout)


def main() -> None:
    """The table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", type=Path, help="another checkout")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cases", default="", help=f"of {', '.join(CASES)}; separated by semicolons")
    parser.add_argument("--measure", choices=CASES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args.measure)))
        return
    roots = [*([args.before.resolve()] if args.before else []), ROOT]
    print(f"{'CPU seconds':<32}" + "".join(f"{name:>10}" for name in ("before", "now")[-len(roots) :]))
    for case in args.cases.split(";") if args.cases else CASES:
        rounds = [[run(case, root) for root in roots] for _ in range(args.rounds)]
        for name in rounds[0][0]:
            medians = [statistics.median(each[n][name] for each in rounds) for n in range(len(roots))]
            ratio = f"{medians[1] / medians[0]:>9.2f}" if len(roots) == 2 else ""
            print(f"{name:<32}" + "".join(f"{s:>10.3f}" for s in medians) + ratio, flush=True)


if __name__ == "__main__":
    main()
