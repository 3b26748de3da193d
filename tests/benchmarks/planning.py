"""How long the largest plans take; run by hand: python tests/benchmarks/planning.py

Graph, lowering and estimate (time, memory, rows) of a whole training step, each in a process of its own, so that its
memory is what one plan takes. Targets: Llama-3 405B, forward, backward and AdamW with full rematerialisation on a mesh
of three axes of v5p-6144, under 5 s and 1.5 GiB, whatever the number of devices; the 4.9-billion-parameter model of the
Mesh TensorFlow paper on 16x32 cores of v2 under 2 s.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

# model, layout, mesh, slice, batch, length, remat; seconds allowed
PLANS = (
    (("llama3.1-405b", "data+fsdp+sequence", "data:3;fsdp:128;tensor:8", "v5p-6144", 1536, 8192, "full"), 5.0),
    (("llama3.1-405b", "data+fsdp+tensor", "data:3;fsdp:128;tensor:8", "v5p-6144", 1536, 8192, "full"), 5.0),
    (("llama3.1-405b", "data+fsdp+sequence", "data:2;fsdp:2;tensor:2", "v5p-16", 1536, 8192, "full"), 5.0),
    (("mtf-lm-4.9b", "2d", "data:16;model:32", "v2-512", 256, 256, "none"), 2.0),
)
MEMORY_BYTES = 1.5 * 2**30
ROUNDS = 3


def plan(job: list[str]) -> None:
    """One plan, in this process; prints what it took."""
    begun = time.perf_counter()
    import meshlib as mtf

    imported = time.perf_counter() - begun
    name, layout, mesh, slice_, batch, length, remat = job
    begun = time.perf_counter()
    config = mtf.models.preset(name)
    with mtf.Graph():
        outputs, updates = mtf.models.train_step(config, int(batch), int(length), remat=remat)
        program = mtf.lower(outputs, updates, mesh=mesh, layout=mtf.models.layout(layout, config, mesh))
    est = mtf.estimate(program, slice_)
    shown = est.table()
    seconds = time.perf_counter() - begun
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    print(json.dumps({"seconds": seconds, "import": imported, "bytes": rss, "table": len(shown)}))


def main() -> int:
    """The table."""
    bad = 0
    for job, allowed in PLANS:
        rounds = []
        for _ in range(ROUNDS):
            done = subprocess.run(
                [sys.executable, __file__, *map(str, job)], capture_output=True, text=True, check=True, cwd=ROOT
            )
            rounds.append(json.loads(done.stdout))
        seconds = sorted(r["seconds"] for r in rounds)[ROUNDS // 2]
        rss = max(r["bytes"] for r in rounds)
        ok = seconds < allowed and rss < MEMORY_BYTES
        bad += not ok
        where = f"{job[0]} {job[1]} on {job[2]} of {job[3]}"
        verdict = "ok" if ok else "MISSED"
        print(f"{where:<80} {seconds:5.2f} s (< {allowed:g})  {rss / 2**30:.2f} GiB (< 1.5)  {verdict}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(plan(sys.argv[1:]) if len(sys.argv) > 1 else main())
