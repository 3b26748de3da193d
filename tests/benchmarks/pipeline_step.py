"""One training step of a pipeline on simulated devices beside the same layers without one.

    python tests/benchmarks/pipeline_step.py [--stages 4] [--turns 5] [--width 256] [--tokens 8192]

Feed-forward layers with norms and residual sums, float32 throughout, plain gradient steps, computed again in the
backward. The step without a pipeline runs all layers on the whole batch; "in parts" it adds up the gradients of as many
microbatches as the pipeline has. CPU seconds, medians, all in one process turn by turn.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np

import meshlib as mtf

D = mtf.Dimension
LAYERS = 2  # of a stage


def layer(x: mtf.Tensor, width: mtf.Dimension) -> mtf.Tensor:
    """x + gelu(norm(x) W) U"""
    h = mtf.layers.dense(mtf.layers.rms_norm(x, width), D("inner", 4 * width.size), activation=mtf.gelu, name="wi")
    return x + mtf.layers.dense(h, width, name="wo")


def layers(x: mtf.Tensor, width: mtf.Dimension, count: int) -> mtf.Tensor:
    """`count` layers."""
    body = lambda carries, _: ((layer(carries[0], width),), ())  # noqa: E731
    (y,), _ = mtf.scan(body, [x], dim=D("layers", count), stack_variables=True)
    return y


def step(apply: Callable[[mtf.Tensor], mtf.Tensor], tokens: int, width: mtf.Dimension) -> tuple:
    """What is lowered."""
    loss = mtf.reduce_mean(mtf.square(apply(mtf.input("x", [D("batch", tokens), width]))))
    return {"loss": loss}, mtf.optimize.SgdOptimizer(1e-3).minimize(loss)


def in_parts(tokens: int, width: mtf.Dimension, count: int, parts: int) -> tuple:
    """The same, the batch in microbatches."""
    batch = D("batch", tokens)
    x = mtf.input("x", [batch, width])
    model = lambda given: {"loss": mtf.reduce_mean(mtf.square(layers(given["x"], width, count)))}  # noqa: E731
    grads, outputs = mtf.serialize_training_step({"x": x}, model, batch, parts)
    return outputs, mtf.optimize.SgdOptimizer(1e-3).apply_grads(grads, x.graph.trainable_variables)


def medians(sims: dict[str, mtf.Simulation], x: np.ndarray, turns: int) -> dict[str, float]:
    """CPU seconds of a step of each."""
    seconds: dict[str, list[float]] = {name: [] for name in sims}
    for turn in range(turns + 1):
        for name, sim in sims.items():
            begun = time.process_time()
            sim.step(x=x)
            if turn:
                seconds[name].append(time.process_time() - begun)
    return {name: statistics.median(found) for name, found in seconds.items()}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=8192)
    args = parser.parse_args()
    width, stages = D("width", args.width), args.stages
    x = np.random.default_rng(0).normal(size=(args.tokens, args.width)).astype(np.float32)
    print("microbatches  repeats  bubble  seconds  / without a pipeline  / that in parts")
    for microbatches, repeats in ((stages, 1), (2 * stages, 1), (stages, 2)):
        count = LAYERS * stages
        made = {}
        with mtf.Graph():
            plain = step(lambda x, n=count: layers(x, width, n), args.tokens, width)
            made["plain"] = mtf.lower(*plain, precision="highest")
        with mtf.Graph():
            made["parts"] = mtf.lower(*in_parts(args.tokens, width, count, microbatches), precision="highest")
        with mtf.Graph():
            run = lambda h, n=LAYERS // repeats: layers(h, width, n)  # noqa: E731
            piped = lambda x, m=microbatches, r=repeats, f=run: mtf.layers.pipeline(  # noqa: E731
                f, x, stages, m, r, remat="none"
            )
            program = step(piped, args.tokens, width)
            made["pipe"] = mtf.lower(*program, mesh=f"pipe:{stages}", layout="stage:pipe", precision="highest")
        found = medians({name: mtf.simulate(program) for name, program in made.items()}, x, args.turns)
        bubble = mtf.layers.schedule(stages, microbatches, repeats).bubble
        print(
            f"{microbatches:12}  {repeats:7}  {bubble:6.0%}  {found['pipe']:7.2f}  "
            f"{found['pipe'] / found['plain']:20.2f}  {found['pipe'] / found['parts']:15.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
