"""One training step of the MNIST network, side by side with the same step in NumPy with `out=` buffers.

    python tests/benchmarks/mnist_step.py [--devices 1,8,64,512,2048] [--repeats 9]
    python tests/benchmarks/mnist_step.py --exact --devices 1,8,64      the exact executor beside the fast one, CPU time

Both run in one process, turn by turn; the ratio is that of medians. In bfloat16 both round the operands of each
matmul to bfloat16 once, in the same cache-sized chunks. Also printed: the time of lowering and the peak memory.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from collections.abc import Callable

import numpy as np

import meshlib as mtf
from hardware.numerics import round_to_bfloat16

BATCH, PIXELS, HIDDEN, CLASSES, LR = 4096, 784, 1024, 10, 0.1


def build() -> tuple[mtf.Tensor, list[mtf.Operation]]:
    """Loss and updates of the network, written once."""
    batch, pixels = mtf.Dimension("batch", BATCH), mtf.Dimension("pixels", PIXELS)
    hidden, classes = mtf.Dimension("hidden", HIDDEN), mtf.Dimension("classes", CLASSES)
    with mtf.Graph():
        images = mtf.input("images", [batch, pixels])
        labels = mtf.input("labels", [batch], dtype="int32")
        w1, b1 = mtf.variable("w1", [pixels, hidden]), mtf.variable("b1", [hidden], 0.0)
        w2, b2 = mtf.variable("w2", [hidden, classes]), mtf.variable("b2", [classes], 0.0)
        h = mtf.relu(mtf.einsum([images, w1], output_shape=[batch, hidden]) + b1)
        logits = mtf.einsum([h, w2], output_shape=[batch, classes]) + b2
        targets = mtf.one_hot(labels, classes)
        loss = mtf.reduce_mean(mtf.layers.softmax_cross_entropy_with_logits(logits, targets, classes))
        return loss, mtf.optimize.SgdOptimizer(LR).minimize(loss)


class NumpyStep:
    """The same step by hand: every array allocated once."""

    def __init__(self, state: dict[str, np.ndarray], bfloat16: bool) -> None:
        self.w1, self.b1, self.w2, self.b2 = (state[n].copy() for n in ("w1", "b1", "w2", "b2"))
        f = np.float32
        self.h, self.dh = np.empty((BATCH, HIDDEN), f), np.empty((BATCH, HIDDEN), f)
        self.mask = np.empty((BATCH, HIDDEN), bool)
        self.logits, self.p = np.empty((BATCH, CLASSES), f), np.empty((BATCH, CLASSES), f)
        self.dw1, self.dw2 = np.empty_like(self.w1), np.empty_like(self.w2)
        self.rounded = {k: np.empty_like(v) for k, v in (("w1", self.w1), ("w2", self.w2), ("h", self.h))}
        self.rounded["x"] = np.empty((BATCH, PIXELS), f)
        self.bfloat16 = bfloat16

    def operand(self, name: str, x: np.ndarray) -> np.ndarray:
        """x as a matmul takes it."""
        return round_to_bfloat16(x, out=self.rounded[name]) if self.bfloat16 else x

    def __call__(self, images: np.ndarray, labels: np.ndarray) -> float:
        rows = np.arange(BATCH)
        x, w1 = self.operand("x", images), self.operand("w1", self.w1)
        np.matmul(x, w1, out=self.h)
        np.add(self.h, self.b1, out=self.h)
        np.maximum(self.h, np.float32(0), out=self.h)
        h, w2 = self.operand("h", self.h), self.operand("w2", self.w2)
        np.matmul(h, w2, out=self.logits)
        np.add(self.logits, self.b2, out=self.logits)
        np.subtract(self.logits, self.logits.max(axis=1, keepdims=True), out=self.logits)
        np.exp(self.logits, out=self.p)
        total = self.p.sum(axis=1, keepdims=True)
        loss = float(np.mean(np.log(total[:, 0]) - self.logits[rows, labels]))
        np.divide(self.p, total, out=self.p)
        self.p[rows, labels] -= 1
        np.divide(self.p, np.float32(BATCH), out=self.p)
        db2 = self.p.sum(axis=0)
        if self.bfloat16:
            round_to_bfloat16(self.p, out=self.p)
        np.matmul(h.T, self.p, out=self.dw2)
        np.matmul(self.p, w2.T, out=self.dh)
        np.greater(self.h, 0, out=self.mask)
        np.multiply(self.dh, self.mask, out=self.dh)
        db1 = self.dh.sum(axis=0)
        if self.bfloat16:
            round_to_bfloat16(self.dh, out=self.dh)
        np.matmul(x.T, self.dh, out=self.dw1)
        for w, dw in ((self.w1, self.dw1), (self.w2, self.dw2), (self.b1, db1), (self.b2, db2)):
            np.multiply(dw, np.float32(LR), out=dw)
            np.subtract(w, dw, out=w)
        return loss


def layouts(devices: int) -> dict[str, tuple[str, str]]:
    """Mesh and layout per name, for a number of devices."""
    by_name = {"data": (f"data:{devices}", "batch:data")}
    if devices <= HIDDEN:
        by_name["model"] = (f"model:{devices}", "hidden:model")
    if devices >= 4:
        rows = 2 ** (devices.bit_length() // 2)
        by_name["2-D"] = (f"rows:{rows};cols:{devices // rows}", "batch:rows;hidden:cols")
    return by_name


def timed(run: Callable[[], object]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def measure(program: mtf.Program, about: str, images: np.ndarray, labels: np.ndarray, repeats: int) -> None:
    """Both sides turn by turn, and one line with the medians."""
    sim = mtf.simulate(program, seed=0)
    by_hand = NumpyStep(dict(sim.state), program.precision == "default")
    ours, theirs = [], []
    for n in range(repeats + 2):
        a = timed(lambda: by_hand(images, labels))
        b = timed(lambda: sim.step(images=images, labels=labels))
        if n >= 2:
            theirs.append(a)
            ours.append(b)
    losses = float(sim.step(images=images, labels=labels)["loss"]), by_hand(images, labels)
    mine, his = statistics.median(ours), statistics.median(theirs)
    precision = "float32" if program.precision == "highest" else "bfloat16"
    print(
        f"{precision:<10}{about}{his * 1e3:>9.1f}{mine * 1e3:>9.1f}{mine / his:>7.2f}  {losses[0]:.5f} {losses[1]:.5f}",
        flush=True,
    )


def compare_executors(program: mtf.Program, about: str, images: np.ndarray, labels: np.ndarray, repeats: int) -> None:
    """CPU milliseconds of a step with either executor, turn by turn, and the ratio of the medians."""
    simulations = {name: mtf.simulate(program, seed=0, executor=name) for name in ("fast", "exact")}
    seconds: dict[str, list[float]] = {name: [] for name in simulations}
    for n in range(repeats + 1):
        for name, simulation in simulations.items():
            start = time.process_time()
            simulation.step(images=images, labels=labels)
            if n:
                seconds[name].append(time.process_time() - start)
    fast, exact = (statistics.median(seconds[name]) for name in ("fast", "exact"))
    print(f"{about}{fast * 1e3:>9.1f}{exact * 1e3:>9.1f}{exact / fast:>7.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", default="1,8,64,512,2048")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--exact", action="store_true", help="compare the exact executor with the fast one")
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    images = rng.random((BATCH, PIXELS), np.float32)
    labels = rng.integers(0, CLASSES, BATCH).astype(np.int32)
    loss, train = build()
    if args.exact:
        print(f"{'devices':>8} {'layout':<6}{'fast ms':>9}{'exact ms':>9}{'ratio':>7}")
        for devices in map(int, args.devices.split(",")):
            for name, (mesh, layout) in layouts(devices).items():
                program = mtf.lower({"loss": loss}, updates=train, mesh=mesh, layout=layout)
                compare_executors(program, f"{devices:>8} {name:<6}", images, labels, args.repeats)
        return
    print(
        f"{'precision':<10}{'devices':>8} {'layout':<6}{'lower ms':>9}{'NumPy ms':>9}{'fast ms':>9}{'ratio':>7}  loss"
    )
    for precision in ("highest", "default"):
        for devices in map(int, args.devices.split(",")):
            for name, (mesh, layout) in layouts(devices).items():
                start = time.perf_counter()
                program = mtf.lower({"loss": loss}, updates=train, mesh=mesh, layout=layout, precision=precision)
                lowering = time.perf_counter() - start
                measure(program, f"{devices:>8} {name:<6}{lowering * 1e3:>9.1f}", images, labels, args.repeats)
    print(f"peak memory of this process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB")


if __name__ == "__main__":
    main()
