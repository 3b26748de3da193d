"""A step on JAX's devices against the same model written by hand with shard_map: MLP, batch and hidden layer split.

    XLA_FLAGS=--xla_force_host_platform_device_count=8 python tests/benchmarks/jax_step.py

Both run in turns, on arrays that lie on the devices, compiled and donated alike; what counts is the ratio of medians.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import meshlib as mtf

BATCH, PIXELS, HIDDEN, CLASSES = 512, 784, 1024, 10
RATE, TURNS = 0.1, 30


def program() -> mtf.Program:
    """The network of the README, in float32."""
    batch, pixels = mtf.Dimension("batch", BATCH), mtf.Dimension("pixels", PIXELS)
    hidden, classes = mtf.Dimension("hidden", HIDDEN), mtf.Dimension("classes", CLASSES)
    with mtf.Graph():
        images, labels = mtf.input("images", [batch, pixels]), mtf.input("labels", [batch], dtype="int32")
        w1, w2 = mtf.variable("w1", [pixels, hidden]), mtf.variable("w2", [hidden, classes])
        h = mtf.relu(mtf.einsum([images, w1], output_shape=[batch, hidden]))
        logits = mtf.einsum([h, w2], output_shape=[batch, classes])
        losses = mtf.layers.softmax_cross_entropy_with_logits(logits, mtf.one_hot(labels, classes), classes)
        loss = mtf.reduce_mean(losses)
        train = mtf.optimize.SgdOptimizer(RATE).minimize(loss)
    return mtf.lower({"loss": loss}, train, mesh="rows:2;cols:4", layout="batch:rows;hidden:cols", precision="highest")


def by_hand(mesh: jax.sharding.Mesh) -> object:
    """The same step, as one would write it."""

    def step(w1, w2, images, labels):  # type: ignore[no-untyped-def]
        h = jnp.maximum(images @ w1, 0)
        logits = lax.psum(h @ w2, "cols")
        shifted = logits - logits.max(-1, keepdims=True)
        logs = shifted - jnp.log(jnp.exp(shifted).sum(-1, keepdims=True))
        target = labels[:, None] == jnp.arange(CLASSES)
        loss = lax.psum(-jnp.where(target, logs, 0).sum(), "rows") / BATCH
        d_logits = (jnp.exp(logs) - target) / BATCH
        d_w2 = lax.psum(h.T @ d_logits, "rows")
        d_h = (d_logits @ w2.T) * (h > 0)
        d_w1 = lax.psum(images.T @ d_h, "rows")
        return w1 - RATE * d_w1, w2 - RATE * d_w2, loss

    weights = P(None, "cols"), P("cols")
    mapped = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(*weights, P("rows"), P("rows")),
        out_specs=(*weights, P()),
        check_vma=False,
    )
    return jax.jit(mapped, donate_argnums=(0, 1))


def main() -> None:
    run = mtf.on_jax(program(), checked=False)
    step = run.compiled()
    rng = np.random.default_rng(0)
    feeds = {"images": rng.normal(size=(BATCH, PIXELS)), "labels": rng.integers(0, CLASSES, BATCH)}
    first = {n: run.state[n] for n in ("w1", "w2")}
    placed = {
        "images": jax.device_put(feeds["images"].astype(np.float32), step.inputs["images"]),
        "labels": jax.device_put(feeds["labels"].astype(np.int32), step.inputs["labels"]),
    }
    state = dict(run.state.arrays)
    keys = step.keys(0)
    hand = by_hand(step.mesh)
    w1, w2 = (jax.device_put(first[n], NamedSharding(step.mesh, step.variables[n].spec)) for n in ("w1", "w2"))
    ours, theirs = [], []
    for turn in range(TURNS + 3):
        begun = time.perf_counter()
        made = step(state, placed, turn, keys)
        state |= made.updates
        jax.block_until_ready(state["w1"])
        ours.append(time.perf_counter() - begun)
        begun = time.perf_counter()
        w1, w2, loss = hand(w1, w2, placed["images"], placed["labels"])  # type: ignore[operator]
        jax.block_until_ready(w1)
        theirs.append(time.perf_counter() - begun)
        np.testing.assert_allclose(made.outputs["loss"], loss, rtol=1e-4)
    a, b = median(ours[3:]), median(theirs[3:])
    print(f"on_jax {a * 1e3:.2f} ms, by hand {b * 1e3:.2f} ms: {a / b:.3f} times")


if __name__ == "__main__":
    main()
