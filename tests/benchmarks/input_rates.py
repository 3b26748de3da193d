"""How many examples a second the input pipeline prepares from records, and what bounds it.

    python -m tests.benchmarks.input_rates [--seconds 5] [--processes 2]

Records of MNIST's size (784 bytes and a label) and JPEGs of 224x224 are drawn here, written to a temporary folder, read
in an order of their own, checked, decoded and batched, with a thread that prefetches. Beside the rate by the clock
stands the time of processors that an example takes, all threads and processes together: on a busy machine the first
says how busy it is, the second what one core does at most. `waited` is the share of the time in which whoever asked had
no batch: all of it, as this one does nothing else.
"""

from __future__ import annotations

import argparse
import io
import multiprocessing
import os
import tempfile
import time
from pathlib import Path

import numpy as np

import meshlib as mtf

BATCH, SIDE = 128, 224


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("--seconds", type=float, default=5.0)
    made.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    args = made.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        digits, pictures = _digits(Path(folder)), _pictures(Path(folder))
        print(f"{os.cpu_count()} cores, batches of {BATCH}")
        print(f"{'':34}{'examples/s':>12}{'us of a core':>14}{'waited':>8}  bound by")
        _row("784 bytes, whole batches", digits, args.seconds)
        _row("784 bytes, a map of each", digits.map(_scaled), args.seconds)
        _row(f"JPEG of {SIDE}x{SIDE}, one thread", pictures, args.seconds)
        for kind in ("threads", "processes"):
            data = pictures.parallel(args.processes, kind)
            _row(f"JPEG of {SIDE}x{SIDE}, {args.processes} {kind}", data, args.seconds)


def _digits(folder: Path) -> mtf.data.Data:
    rng = np.random.default_rng(0)
    made = (mtf.records.encode({"image": rng.bytes(784), "label": n % 10}) for n in range(20_000))
    mtf.records.write(folder / "digits@4", made)
    fields = {"image": mtf.data.Field("uint8", (28, 28)), "label": mtf.data.Field("int32")}
    return mtf.data.records(folder / "digits@4", fields, interleave=4)


def _pictures(folder: Path) -> mtf.data.Data:
    """Smooth noise, which as a JPEG takes about as many bytes as a photograph."""
    from PIL import Image

    rng, made = np.random.default_rng(0), []
    for n in range(512):
        coarse = Image.fromarray(rng.integers(0, 256, (SIDE // 4, SIDE // 4, 3), np.uint8))
        file = io.BytesIO()
        coarse.resize((SIDE, SIDE), Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
        made.append(mtf.records.encode({"image": file.getvalue(), "label": n % 10}))
    mtf.records.write(folder / "pictures@4", made)
    fields = {"image": mtf.data.Field("image", (SIDE, SIDE, 3)), "label": mtf.data.Field("int32")}
    return mtf.data.records(folder / "pictures@4", fields, interleave=4)


def _scaled(example: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {**example, "image": example["image"] * np.float32(1 / 255)}


def _row(name: str, data: mtf.data.Data, seconds: float) -> None:
    with iter(data.shuffle(0).batch(BATCH).repeat().prefetch(2)) as feed:
        next(feed)  # files are open, processes have started
        begun, used, before = time.perf_counter(), _used_seconds(), feed.stats.examples
        waited = feed.stats.waited_seconds
        while time.perf_counter() - begun < seconds:
            next(feed)
        taken = time.perf_counter() - begun
        used = _used_seconds() - used
        count, waited = feed.stats.examples - before, feed.stats.waited_seconds - waited
    busy = used / taken
    bound = "its threads and processes" if busy > 0.9 * min(2, os.cpu_count() or 1) else f"{busy:.1f} cores at work"
    print(f"{name:34}{count / taken:12,.0f}{1e6 * used / count:14.1f}{waited / taken:8.0%}  {bound}", flush=True)


def _used_seconds() -> float:
    """Of processors, by this process and, where the system says it in /proc, by those that it started."""
    used = time.process_time()
    for child in multiprocessing.active_children():
        stat = Path(f"/proc/{child.pid}/stat")
        if stat.exists():
            user, system = stat.read_text().rpartition(")")[2].split()[11:13]
            used += (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
    return used


if __name__ == "__main__":
    main()
