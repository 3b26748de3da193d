"""How fast estimates are; run by hand: python tests/benchmarks/estimate_speed.py

Targets: a program of 2,000 operations under 0.3 s, the MNIST program under 20 ms, v3-2048 within 1.3x of v3-8.
An estimate here is time, memory, rows and table; the first call of each is shown apart (it places the mesh).
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import meshlib as mtf
from examples import mnist


def mnist_program(mesh: str, layout: str, batch: int) -> mtf.Program:
    """A training step of the 784-1024-10 network."""
    with mtf.Graph():
        loss, _ = mnist.network(batch, 1024)
        updates = mtf.optimize.MomentumOptimizer(0.1, momentum=0.9).minimize(loss)
        return mtf.lower({"loss": loss}, updates, mesh=mesh, layout=layout)


def deep_program(layers: int, mesh: str) -> mtf.Program:
    """A training step of a deep network: about 2,000 operations for 36 layers."""
    batch, a, b = mtf.Dimension("batch", 8192), mtf.Dimension("a", 1024), mtf.Dimension("b", 4096)
    with mtf.Graph():
        x = mtf.input("x", [batch, a])
        for n in range(layers):
            with mtf.scope(f"layer_{n}"):
                h = mtf.relu(mtf.einsum([x, mtf.variable("w1", [a, b])], [batch, b]))
                x = x + mtf.einsum([h, mtf.variable("w2", [b, a])], [batch, a])
        loss = mtf.reduce_mean(mtf.square(x))
        updates = mtf.optimize.AdamOptimizer(1e-3).minimize(loss)
        return mtf.lower({"loss": loss}, updates, mesh=mesh, layout="batch:data;b:model")


def whole(program: mtf.Program, name: str) -> mtf.Estimate:
    """Everything that a user looks at."""
    est = mtf.estimate(program, name)
    _ = est.fits, est.bound, est.mfu, est.table()
    return est


def measured(call: Callable[[], object], repeats: int = 9) -> tuple[float, float]:
    """(first, median of the rest) in seconds."""
    times = []
    for _ in range(repeats):
        begun = time.perf_counter()
        call()
        times.append(time.perf_counter() - begun)
    return times[0], statistics.median(times[1:] or times)


def show(name: str, call: Callable[[], object], limit: float) -> float:
    first, rest = measured(call)
    print(f"{name:<58} first {first * 1e3:7.1f} ms, then {rest * 1e3:7.1f} ms  (target {limit * 1e3:.0f} ms)")
    return rest


def main() -> int:
    """Print all figures; 1 if a target is missed."""
    small = mnist_program("rows:2;cols:4", "batch:rows;hidden:cols", 512)
    fine = show("MNIST, 2x4 on v3-8", lambda: whole(small, "v3-8"), 0.02) < 0.02
    large = mnist_program("rows:64;cols:32", "batch:rows;hidden:cols", 512 * 64)
    fine &= show("MNIST, 64x32 on v3-2048", lambda: whole(large, "v3-2048"), 0.02) < 0.02
    deep = deep_program(36, "data:2;model:4")
    operations = len(deep.instructions)
    fine &= show(f"{operations} instructions, 2x4 on v3-8", lambda: whole(deep, "v3-8"), 0.3) < 0.3
    wide = deep_program(36, "data:64;model:32")
    pair: list[list[float]] = [[], []]
    for _ in range(9):  # turn by turn, so that the machine's mood meets both
        for times, (program, name) in zip(pair, ((deep, "v3-8"), (wide, "v3-2048")), strict=True):
            times.append(measured(lambda: whole(program, name), 1)[0])  # noqa: B023
    ratio = statistics.median(pair[1]) / statistics.median(pair[0])
    print(f"{operations} instructions, v3-2048 over v3-8: {ratio:.2f}x  (target 1.3x)")
    return 0 if fine and ratio < 1.3 else 1


if __name__ == "__main__":
    sys.exit(main())
