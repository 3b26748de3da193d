"""CPU seconds until `meshlib plan` knows its first verdict; run by hand: python tests/benchmarks/verdicts.py [NAME...]

Every preset on two slices: the smallest on which 16 bytes a parameter (weights, gradients, Adam's slots) take at most
half of the memory, and one with a fourth of its devices. Each plan runs in a process of its own, imports left out. The
first verdict is the first layout that fits, or the proof that none does. Target: at most 2 CPU seconds.

    python tests/benchmarks/verdicts.py --out now.json
    python tests/benchmarks/verdicts.py --against before.json gemma3-4b     # verdicts that differ from an earlier run's
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))  # after PYTHONPATH, which may name another checkout

from hardware.slices import Slice
from meshlib.command import main, planning
from meshlib.command.plan import text_of
from meshlib.command.subject import Subject
from meshlib.command.tried_layouts import PlannedLayout
from meshlib.core.garbage import collect_rarely
from meshlib.lowering import Session
from meshlib.models import IMAGE_PRESETS, PRESETS, preset

TARGET_SECONDS = 2.0
BYTES_OF_A_PARAMETER, SHARE, FEWER = 16, 0.5, 4
SLICES = [Slice(f"v5e-{n}") for n in (1, 4, 8, 16, 32, 64, 128, 256)] + [
    Slice(f"v5p-{n}") for n in (256, 512, 1024, 2048, 4096, 8960)
]


def slices_of(name: str) -> list[str]:
    """The slice on which a preset fits with room, and one a fourth of its size."""
    if name in IMAGE_PRESETS:
        return ["v5e-8"]
    bytes_ = preset(name).parameters * BYTES_OF_A_PARAMETER
    capacity = [where.usable_hbm_bytes_per_device * where.devices for where in SLICES]
    ample = next((n for n, size in enumerate(capacity) if bytes_ <= SHARE * size), len(SLICES) - 1)
    tight = next(n for n, size in enumerate(capacity) if FEWER * size >= capacity[ample])
    return [*dict.fromkeys((SLICES[ample].name, SLICES[tight].name))]


class _FirstVerdict(planning.Progress):
    """The progress of a plan, which records when its first layout fits."""

    seconds = 0.0

    def __call__(self, done: int, total: int, text: str = "") -> None:
        if "; fits: " in text or text.endswith("; none fits"):
            _FirstVerdict.seconds = _FirstVerdict.seconds or time.process_time()


def plan(name: str, where: str) -> dict[str, Any]:
    """One plan in this process: the seconds it took, its verdict and its best layout."""
    calls = {"lowered": 0, "lowering": 0.0}
    plain = Session.lower

    def lowered(self: Session, *args: Any, **choices: Any) -> Any:
        begun = time.process_time()
        try:
            return plain(self, *args, **choices)
        finally:
            calls["lowered"] += 1
            calls["lowering"] += time.process_time() - begun

    texts: list[str] = []
    plans: list[tuple[Subject, Sequence[PlannedLayout]]] = []

    def kept(subject: Subject, where: Slice, each: Sequence[PlannedLayout]) -> str:
        _FirstVerdict.seconds = _FirstVerdict.seconds or time.process_time()
        plans.append((subject, each))
        return text_of(subject, where, each)

    Session.lower = lowered  # type: ignore[method-assign]
    planning.Progress, planning.text_of = _FirstVerdict, kept  # type: ignore[misc]
    planning.say, planning.say_verdict = texts.append, lambda text, good: texts.append(text)  # type: ignore[assignment]
    begun = time.process_time()
    main(["plan", name, "--slice", where])
    whole = time.process_time() - begun
    (subject, shown), first = plans[0], _FirstVerdict.seconds - begun
    best = shown[0]
    step = best.est.step_seconds if best.est is not None else None
    layout = [best.name, best.mesh, best.choices, dict(subject.sizes)]
    needed = None if best.memory is None else best.memory.needed_bytes
    figures = {"fits": best.fits, "layout": layout, "step": step, "needed": needed, "text": "\n".join(texts)}
    return {"first": first, "whole": whole, **calls, "layouts": len(shown), **figures}


def apart(function: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What a function returns in a process of its own."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        with os.fdopen(write, "w") as stream:
            json.dump(function(), stream)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as stream:
        text = stream.read()
    os.waitpid(child, 0)
    return json.loads(text)


def differences(before: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    """What differs between the verdicts of two runs."""
    for key in ("fits", "layout", "step"):
        if before[key] != now[key]:
            yield f"{key} {before[key]} -> {now[key]}"


def table(names: Sequence[str], earlier: dict[str, Any]) -> dict[str, Any]:
    """Print the plans of models; returns them."""
    done: dict[str, Any] = {}
    print("   first    whole  lowered  lowering  plan")
    for name in names:
        for where in slices_of(name):
            now = done[f"{name} on {where}"] = apart(lambda name=name, where=where: plan(name, where))
            figures = f"{now['first']:8.2f} {now['whole']:8.2f} {now['lowered']:8} {now['lowering']:9.2f}"
            print(f"{figures}  {name} on {where}: {'fits' if now['fits'] else 'does not fit'}", flush=True)
            before = earlier.get(f"{name} on {where}")
            for line in differences(before, now) if before is not None else ():
                print(f"{'':37}  {line}")
    return done


def run() -> int:
    """The table, and how many first verdicts are late."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="presets; default: all")
    parser.add_argument("--out", type=Path, help="write the plans to a file")
    parser.add_argument("--against", type=Path, help="compare with the plans of an earlier run")
    args = parser.parse_args()
    collect_rarely()
    earlier = json.loads(args.against.read_text()) if args.against else {}
    done = table(args.names or [*PRESETS, *IMAGE_PRESETS], earlier)
    late = sum(each["first"] > TARGET_SECONDS for each in done.values())
    whole = sum(each["whole"] for each in done.values())
    print(f"{late} of {len(done)} first verdicts take more than {TARGET_SECONDS:g} CPU s; {whole:.0f} CPU s in all")
    if args.out:
        args.out.write_text(json.dumps(done, indent=1))
    return bool(late)


if __name__ == "__main__":
    sys.exit(run())
