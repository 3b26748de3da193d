"""How fast the hardware floor simulates; run by hand: python tests/benchmarks/hardware_speed.py

Wall-clock and, in brackets, process time of the fastest runs: on a busy machine the second is the steadier.

Targets: clocked 128x128 array >= 100,000 cycles/s with values; all_reduce on an 8x8 torus by events < 1 s; a
closed form < 20 us; best placement of 4 axes on v5p-12288 < 1 s; rounding to bfloat16 <= 1 ns per element and
faster than a cast there and back; large products of bfloat16 values <= 0.05 ns a multiply-add.
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import ml_dtypes
import numpy as np

from hardware import MXU, Links, Slice, Torus, best_placement, collective_cost
from hardware.collectives import all_gather_seconds, all_reduce_seconds, all_to_all_seconds
from hardware.numerics import mxu_matmul, ring_reduce_scatter, round_to_bfloat16
from hardware.ring_plans import all_reduce


def best(call, repeat=5, number=1):
    """(wall-clock, process) seconds of the fastest of `repeat` runs."""
    walls, busy = [], []
    for _ in range(repeat):
        wall, process = time.perf_counter(), time.process_time()
        for _ in range(number):
            call()
        walls.append((time.perf_counter() - wall) / number)
        busy.append((time.process_time() - process) / number)
    return min(walls), min(busy)


def shown(seconds, unit=1e6, digits=1):
    """Both times in one unit."""
    return f"{seconds[0] * unit:.{digits}f} [{seconds[1] * unit:.{digits}f}]"


def systolic():
    rng = np.random.default_rng(0)
    for m, k, mode, rate in (
        (5000, 128, "noload", 1),
        (1000, 1280, "shadow", 1),
        (128, 3840, "shadow", 1),
        (128, 3840, "serial", 1),
        (128, 1280, "shadow", 0.3),
        (128, 1280, "shadow", 0.1),
    ):
        x, w = (
            rng.standard_normal((m, k)).astype(np.float32),
            rng.standard_normal((k, 128)).astype(np.float32),
        )
        cycles = MXU(128, 128).cycles(m, k, 128, mode, rate)
        seconds = best(lambda: MXU(128, 128).run(w, x, mode, rate), 3)  # noqa: B023
        print(
            f"clocked 128x128, {m:5} rows, {k // 128:2} tiles, {mode:7}, {rate:3} rows of weights a cycle: "
            f"{cycles / seconds[0]:8.0f} [{cycles / seconds[1]:8.0f}] cycles/s"
        )


def events():
    data = [np.ones(64 * 4) for _ in range(64)]
    for algorithm in ("halves", "shortest"):
        seconds = best(lambda: all_reduce(Torus((8, 8)), data, algorithm=algorithm).run(Links(45e9)), 3)  # noqa: B023
        print(f"all_reduce by events, 8x8 torus, {algorithm:8}: {shown(seconds, 1, 3)} s")


def closed_forms():
    links, axes = Links(45e9), [(16, True), (16, True), (8, False)]
    placement, _ = best_placement(Slice("v5p-1024"), {"data": 64, "model": 8})
    forms = {
        "all_gather, 1 axis": lambda: all_gather_seconds(1e8, axes[:1], links),
        "all_reduce, 2 axes": lambda: all_reduce_seconds(1e8, axes[:2], links),
        "all_reduce, 3 axes": lambda: all_reduce_seconds(1e8, axes, links),
        "all_to_all, 3 axes": lambda: all_to_all_seconds(1e8, axes, links),
        "MXU cycles": lambda: MXU(128, 128).cycles(512, 4096, 4096),
        "placed all_reduce (search of ways)": lambda: collective_cost(placement, "all_reduce", ["data"], 1e8),
    }
    for name, form in forms.items():
        print(f"{name:35}: {shown(best(form, 5, 300))} us")
    mesh = {"a": 4, "b": 8, "c": 12, "d": 16}
    print(f"best placement, 4 axes on v5p-12288: {shown(best(lambda: best_placement('v5p-12288', mesh), 2), 1, 2)} s")


def numerics():
    for size in (1000, 10_000, 100_000, 1 << 20, 1 << 23):
        x = np.random.default_rng(0).standard_normal(size).astype(np.float32)
        out, number = np.empty_like(x), max(1, (1 << 21) // size)
        casts = best(lambda: x.astype(ml_dtypes.bfloat16).astype(np.float32), 7, number)  # noqa: B023
        ours = best(lambda: round_to_bfloat16(x), 7, number)  # noqa: B023
        into = best(lambda: round_to_bfloat16(x, out=out), 7, number)  # noqa: B023
        print(
            f"round {size:8} elements: casts {shown(casts, 1e9 / size, 2)}, ours {shown(ours, 1e9 / size, 2)}, "
            f"into a buffer {shown(into, 1e9 / size, 2)} ns per element"
        )
    rng = np.random.default_rng(0)
    for m, k, n in ((512, 784, 1024), (512, 1024, 10), (8, 16, 8)):
        a, b = rng.standard_normal((m, k)).astype(np.float32), rng.standard_normal((k, n)).astype(np.float32)
        for dtype, x, y in (("float32", a, b), ("bfloat16", round_to_bfloat16(a), round_to_bfloat16(b))):
            seconds = best(lambda: mxu_matmul(x, y), 3)  # noqa: B023
            each = shown(seconds, 1e9 / (m * k * n), 3)
            print(f"mxu_matmul {m}x{k}x{n} of {dtype} values: {shown(seconds, 1e3, 2)} ms, {each} ns a multiply-add")
    parts = [rng.standard_normal(1 << 18).astype(np.float32) for _ in range(8)]
    seconds = best(lambda: ring_reduce_scatter(parts, 0), 5)
    print(f"ring_reduce_scatter, 8 x 1 MiB: {shown(seconds, 1e3, 2)} ms")


if __name__ == "__main__":
    for section in (systolic, events, closed_forms, numerics):
        section()
