"""How long a step of training waits for a checkpoint, and how long writing the same checkpoint takes.

    python tests/benchmarks/checkpoint_wait.py [--megabytes 128] [--saves 9] [--every 8]

Trains variables and momenta of so many bytes. Printed are medians of what the loop does between two steps: with nothing
to save, with a checkpoint to save, and `mtf.save` alone; as wall time, and as CPU time of the thread that trains.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

import meshlib as mtf


def program(megabytes: int) -> mtf.Program:
    """A kernel that with its momentum has so many bytes, and a step that takes little more than its update."""
    batch, inner = mtf.Dimension("batch", 8), mtf.Dimension("inner", 1024)
    hidden = mtf.Dimension("hidden", max(1, megabytes * 2**20 // (2 * 4 * inner.size)))
    with mtf.Graph():
        x, w = mtf.input("x", [batch, inner]), mtf.variable("w", [inner, hidden])
        loss = mtf.reduce_mean(mtf.square(mtf.einsum([x, w], output_shape=[batch, hidden])), name="loss")
        return mtf.lower({"loss": loss}, mtf.optimize.MomentumOptimizer(0.1, 0.9).minimize(loss))


def main() -> None:
    """Print the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=128)
    parser.add_argument("--saves", type=int, default=9)
    parser.add_argument("--every", type=int, default=8)
    asked = parser.parse_args()
    sim, every = mtf.simulate(program(asked.megabytes)), asked.every
    batch = {"x": np.ones((8, 1024), np.float32)}
    ended: list[tuple[float, float]] = []  # when step n had ended, and when step n + 1 began
    begun: list[tuple[float, float]] = []

    def batches() -> Iterator[dict[str, Any]]:
        while True:
            begun.append(now())
            yield batch

    folder = tempfile.mkdtemp(dir=".")
    try:
        mtf.train(
            sim, batches(), every * (asked.saves + 1) + 1, folder=folder, save_every=every, keep=1, log_every=1,
            report=lambda row: ended.append(now()), progress=False,
        )  # fmt: skip
        alone = []
        for n in range(asked.saves):
            before = now()
            mtf.save(sim, os.path.join(folder, f"{n % 2}.safetensors"))
            alone.append(after(before))
    finally:
        shutil.rmtree(folder)
    between = [(b[0] - a[0], b[1] - a[1]) for a, b in zip(ended, begun[1:], strict=False)]
    steps = [(b[0] - a[0], b[1] - a[1]) for a, b in zip(begun, ended, strict=False)]
    saving = [between[n - 1] for n in range(every, len(between) + 1, every)]
    print(f"state {asked.megabytes} MiB, medians of {asked.saves}, ms    wall   thread")
    show("a step", [s for n, s in enumerate(steps) if n % every])
    show("a step after a checkpoint began", [s for n, s in enumerate(steps) if n and n % every == 0])
    show("between two steps", [s for n, s in enumerate(between, start=1) if n % every])
    show("between two steps, with a checkpoint", saving)
    show("mtf.save alone", alone)


def now() -> tuple[float, float]:
    """Wall time, and CPU time of this thread."""
    return time.perf_counter(), time.thread_time()


def after(before: tuple[float, float]) -> tuple[float, float]:
    """Both since then."""
    return time.perf_counter() - before[0], time.thread_time() - before[1]


def show(what: str, taken: list[tuple[float, float]]) -> None:
    """A line of medians."""
    wall, thread = (1e3 * statistics.median(column) for column in zip(*taken, strict=True))
    print(f"{what:37} {wall:8.1f} {thread:8.1f}")


if __name__ == "__main__":
    main()
