"""Convolutions, forward and both gradients, on simulated devices, side by side with the best of NumPy by hand.

    python tests/benchmarks/convolutions.py [--devices 1,512] [--repeats 9]

float32 throughout. All run in one process, turn by turn; the ratios are those of medians of process time. Results are
held against each other first.
"""

from __future__ import annotations

import argparse
import statistics
import time
from functools import partial

import numpy as np
from numpy_convolution import Shapes, ways

import meshlib as mtf

SHAPES = (
    Shapes("first layer 7x7/2", 8, 112, 3, 7, 64, 2),
    Shapes("3x3, 64 channels", 8, 56, 64, 3, 64),
    Shapes("3x3, 128 channels", 8, 28, 128, 3, 128),
    Shapes("3x3/2, 128 to 256", 8, 56, 128, 3, 256, 2),
    Shapes("1x1, 256 to 64", 8, 56, 256, 1, 64),
    Shapes("1x1/2, 256 to 512", 8, 56, 256, 1, 512, 2),
    Shapes("5x5, 32 channels", 8, 28, 32, 5, 32),
    Shapes("3x3, 16 channels, 64 images", 64, 28, 16, 3, 16),
    Shapes("depthwise 3x3, 128", 8, 28, 128, 3, 128, depthwise=True),
)
MESHES = {
    1: ("data:1", ""),
    8: ("data:8", "batch:data"),
    512: ("data:8;rows:4;cols:4;parts:4", "batch:data;height:rows;width:cols;out:parts"),
}


def simulations(s: Shapes, devices: list[int]) -> dict[int, mtf.Simulation]:
    """The same convolution on every number of devices."""
    batch, height, width, channels = (
        mtf.Dimension(n, size)
        for n, size in (("batch", s.batch), ("height", s.size), ("width", s.size), ("channels", s.channels))
    )
    kernel = [mtf.Dimension("kh", s.window), mtf.Dimension("kw", s.window), channels]
    with mtf.Graph():
        x = mtf.input("x", [batch, height, width, channels])
        w = mtf.input("w", kernel if s.depthwise else [*kernel, mtf.Dimension("out", s.out)])
        conv = mtf.depthwise_conv2d if s.depthwise else mtf.conv2d
        y = conv(x, w, s.stride)
        dx, dw = mtf.gradients([y], [x, w], [mtf.input("dy", y.shape)])
        outputs = {"y": y, "dx": dx, "dw": dw}
    found = {}
    for count in devices:
        mesh, layout = MESHES[count]
        layout = layout.replace("out:parts", "channels:parts") if s.depthwise else layout
        found[count] = mtf.simulate(mtf.lower(outputs, mesh=mesh, layout=layout, precision="highest"))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="1,512")
    parser.add_argument("--repeats", type=int, default=9)
    given = parser.parse_args()
    devices = [int(n) for n in given.devices.split(",")]
    rng = np.random.default_rng(0)
    for s in SHAPES:
        x = rng.normal(size=(s.batch, s.size, s.size, s.channels)).astype(np.float32)
        kernel = (s.window, s.window, s.channels)
        w = rng.normal(size=kernel if s.depthwise else (*kernel, s.out)).astype(np.float32)
        dy = rng.normal(size=(s.batch, s.made, s.made, s.out)).astype(np.float32)
        runs = {name: partial(way, x, w, dy) for name, way in ways(s).items()}
        by_hand = list(runs)
        sims = simulations(s, devices)
        runs |= {f"{count}": partial(sim.step, {"x": x, "w": w, "dy": dy}) for count, sim in sims.items()}
        wanted = runs[by_hand[0]]()
        for name, run in runs.items():
            found = run()
            found = found if isinstance(found, tuple) else tuple(found[n] for n in ("y", "dx", "dw"))
            for a, b in zip(found, wanted, strict=True):
                assert np.abs(a - b).max() <= 1e-4 * np.abs(b).max(), f"{s.name}: {name} differs"
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(given.repeats):
            for name, run in runs.items():
                begin = time.process_time()
                run()
                seconds[name].append(time.process_time() - begin)
        medians = {name: statistics.median(times) for name, times in seconds.items()}
        best = min(by_hand, key=medians.__getitem__)
        ratios = "  ".join(f"{n} devices {medians[str(n)] / medians[best]:.2f}x" for n in devices)
        print(f"{s.name:22} NumPy {medians[best] * 1e3:7.1f} ms ({best}):  {ratios}", flush=True)


if __name__ == "__main__":
    main()
