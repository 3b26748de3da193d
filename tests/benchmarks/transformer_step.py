"""One training step of a 2-layer Transformer on simulated devices, side by side with the same step in plain NumPy.

    OPENBLAS_NUM_THREADS=1 python tests/benchmarks/transformer_step.py [--devices 1,8,64,512] [--repeats 9] [--scan]

float32 throughout, AdamW, batch 64, length 64, d_model 256, 8 heads, d_ff 1024, vocab 512; nothing computed again. All
run in one process, turn by turn: the ratios are those of medians of CPU time. Before that the library's losses and new
weights are held against NumPy's, for every number of devices.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
from numpy_transformer import NumpyStep, Sizes

import meshlib as mtf

SIZES = Sizes()
RATE, DECAY = 1e-3, 0.01
MESHES = {
    1: ("data:1", "data"),
    8: ("data:2;tensor:4", "data+tensor"),
    64: ("fsdp:8;tensor:8", "fsdp+tensor"),
    512: ("data:8;fsdp:8;tensor:8", "data+fsdp+tensor"),
}


def config() -> mtf.models.TransformerConfig:
    """The model."""
    return mtf.models.TransformerConfig(
        name="two layers",
        layers=SIZES.layers,
        d_model=SIZES.d_model,
        heads=SIZES.heads,
        head_dim=SIZES.d_model // SIZES.heads,
        d_ff=SIZES.d_ff,
        vocab=SIZES.vocab,
        max_length=SIZES.length,
        numerics=mtf.Numerics(),
    )


def simulations(devices: list[int], scan: bool) -> dict[int, mtf.Simulation]:
    """The same step on every number of devices."""
    with mtf.Graph():
        optimizer = mtf.optimize.AdamWOptimizer(RATE, weight_decay=DECAY)
        outputs, updates = mtf.models.train_step(config(), SIZES.batch, SIZES.length, optimizer, "none", scan)
    found = {}
    for count in devices:
        mesh, name = MESHES[count]
        layout = mtf.models.layout(name, config(), mesh)
        found[count] = mtf.simulate(mtf.lower(outputs, updates, mesh=mesh, layout=layout, precision="highest"))
    return found


def weights(state: Mapping[str, np.ndarray], scan: bool) -> dict[str, np.ndarray]:
    """The library's variables under NumPy's names."""
    flat = (SIZES.d_model, SIZES.d_model)
    found = {"table": state["embedding"], "positions": state["positions"], "norm": state["final_norm/scale"]}
    names = {"norm_1": "attention_norm/scale", "norm_2": "feed_forward_norm/scale"}
    names |= {n: f"attention/{n}/kernel" for n in ("q", "k", "v", "out")}
    names |= {n: f"feed_forward/{n}/kernel" for n in ("wi", "wo")}
    for layer in range(SIZES.layers):
        for short, name in names.items():
            w = state[f"layers/{name}"][layer] if scan else state[f"layer_{layer}/{name}"]
            found[f"{layer}/{short}"] = w.reshape(flat) if w.ndim == 3 else w
    return found


def check(sims: dict[int, mtf.Simulation], scan: bool, feeds: dict[str, np.ndarray]) -> None:
    """Two steps of everybody from the same weights: equal losses and weights."""
    by_hand = NumpyStep(SIZES, weights(next(iter(sims.values())).state, scan), RATE, DECAY)
    wanted = [by_hand(feeds["tokens"], feeds["targets"]) for _ in range(2)]
    for count, sim in sims.items():
        found = [float(sim.step(feeds)["loss"]) for _ in range(2)]
        np.testing.assert_allclose(found, wanted, rtol=1e-5, err_msg=f"loss on {count} devices")
        for name, w in weights(sim.state, scan).items():
            # Adam's first steps are the signs of gradients: where these are noise the weights differ by a step.
            error = np.abs(w - by_hand.weights[name])
            assert error.max() <= 4 * RATE, (count, name, error.max())
            assert error.mean() < 1e-2 * RATE, (count, name, error.mean())


def timed(run: Callable[[], object]) -> float:
    """CPU seconds of one call."""
    start = time.process_time()
    run()
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", default="1,8,64,512")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--scan", action="store_true", help="layers in a loop instead of written out")
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    tokens, targets = rng.integers(0, SIZES.vocab, (2, SIZES.batch, SIZES.length)).astype(np.int32)
    feeds = {"tokens": tokens, "targets": targets}
    sims = simulations([int(n) for n in args.devices.split(",")], args.scan)
    check(sims, args.scan, feeds)
    by_hand = NumpyStep(SIZES, weights(next(iter(sims.values())).state, args.scan), RATE, DECAY)
    seconds: dict[int, list[float]] = {0: [], **{n: [] for n in sims}}
    for _ in range(args.repeats + 1):
        seconds[0].append(timed(lambda: by_hand(tokens, targets)))
        for count, sim in sims.items():
            seconds[count].append(timed(partial(sim.step, feeds)))
    medians = {n: statistics.median(times[1:]) for n, times in seconds.items()}
    print(f"NumPy by hand {medians[0] * 1e3:>9.1f} ms")
    print(f"{'devices':>8} {'mesh':<24}{'ms':>8}{'of NumPy':>10}{'of one':>8}")
    for count in sims:
        ms, of_one = medians[count] * 1e3, medians[count] / medians[next(iter(sims))]
        print(f"{count:>8} {MESHES[count][0]:<24}{ms:>8.1f}{medians[count] / medians[0]:>10.2f}{of_one:>8.2f}")


if __name__ == "__main__":
    main()
