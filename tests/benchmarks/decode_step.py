"""One step of decoding on simulated devices, side by side with the same step in JAX on the CPU.

    XLA_FLAGS=--xla_cpu_multi_thread_eigen=false OPENBLAS_NUM_THREADS=1 \\
        taskset -c 0 python tests/benchmarks/decode_step.py [--positions 256,1024,4096] [--repeats 15]

float32 throughout (precision "highest"): 4 layers, d_model 256, 4 heads of 64, d_ff 1024, vocab 1024, batch 8, caches
of that many positions, half of them filled. Both run in one process, turn by turn; the ratio is that of medians of CPU
time. Besides: what reading all caches once takes, by a sum over an array of their size.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax
import jax.numpy as jnp
import numpy as np

import meshlib as mtf

LAYERS, BATCH, HEADS, HEAD, MODEL, HIDDEN, VOCAB = 4, 8, 4, 64, 256, 1024, 1024


def library_step(positions: int) -> tuple[Callable[[], object], float]:
    """A step of the library, and the bytes of its caches."""
    config = mtf.models.preset("llama2-7b").replace(
        layers=LAYERS, d_model=MODEL, heads=HEADS, kv_heads=HEADS, head_dim=HEAD, d_ff=HIDDEN, vocab=VOCAB,
        numerics=mtf.Numerics(),
    )  # fmt: skip
    with mtf.Graph():
        outputs, updates = mtf.models.decode_step(config, batch=BATCH, cache_length=positions)
        program = mtf.lower(outputs, updates, precision="highest")
    simulation = mtf.simulate(program, seed=0)
    simulation.state["serving/positions"] = np.full(BATCH, positions // 2, np.int32)
    tokens = np.ones(BATCH, np.int32)
    caches = sum(np.asarray(value).nbytes for name, value in simulation.state.items() if "cache" in name)
    return lambda: simulation.step(tokens=tokens), caches


def jax_step(positions: int) -> Callable[[], object]:
    """The same network in JAX, its caches donated."""
    sizes = {
        "q": (MODEL, HEADS, HEAD), "k": (MODEL, HEADS, HEAD), "v": (MODEL, HEADS, HEAD), "o": (HEADS, HEAD, MODEL),
        "gate": (MODEL, HIDDEN), "up": (MODEL, HIDDEN), "down": (HIDDEN, MODEL),
    }  # fmt: skip
    weights = {name: jax.random.normal(jax.random.key(0), (LAYERS, *size)) * 0.02 for name, size in sizes.items()}
    embedding = jax.random.normal(jax.random.key(1), (VOCAB, MODEL))
    angles = 10000.0 ** (-jnp.arange(HEAD // 2) / (HEAD // 2))

    def norm(x: jax.Array) -> jax.Array:
        return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-5)

    def turned(x: jax.Array, position: jax.Array) -> jax.Array:
        one, other = jnp.split(x, 2, -1)
        cos, sin = jnp.cos(position * angles), jnp.sin(position * angles)
        return jnp.concatenate([one * cos - other * sin, other * cos + one * sin], -1)

    def step(keys: jax.Array, values: jax.Array, tokens: jax.Array, position: jax.Array) -> tuple[jax.Array, ...]:
        def layer(x: jax.Array, own: tuple[dict[str, jax.Array], jax.Array, jax.Array]):
            w, k_cache, v_cache = own
            h = norm(x)
            q, k, v = (jnp.einsum("bm,mhd->bhd", h, w[name]) for name in "qkv")
            q, k = turned(q, position), turned(k, position)
            k_cache = jax.lax.dynamic_update_slice(k_cache, k[:, :, None], (0, 0, position, 0))
            v_cache = jax.lax.dynamic_update_slice(v_cache, v[:, :, None], (0, 0, position, 0))
            scores = jnp.einsum("bhd,bhld->bhl", q, k_cache) * HEAD**-0.5
            p = jax.nn.softmax(jnp.where(jnp.arange(positions) <= position, scores, -jnp.inf), -1)
            x = x + jnp.einsum("bhd,hdm->bm", jnp.einsum("bhl,bhld->bhd", p, v_cache), w["o"])
            h = norm(x)
            return x + (jax.nn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"], (k_cache, v_cache)

        x, (keys, values) = jax.lax.scan(layer, embedding[tokens], (weights, keys, values))
        return keys, values, norm(x) @ embedding.T, position + 1

    compiled = jax.jit(step, donate_argnums=(0, 1))
    cache = (LAYERS, BATCH, HEADS, positions, HEAD)
    state = [jnp.zeros(cache), jnp.zeros(cache), jnp.array(positions // 2)]
    tokens = jnp.ones(BATCH, int)

    def run() -> None:
        keys, values, logits, position = compiled(state[0], state[1], tokens, state[2])
        state[:] = [keys, values, position]
        logits.block_until_ready()

    return run


def timed(step: Callable[[], object]) -> float:
    """CPU seconds of a step."""
    begin = time.process_time()
    step()
    return time.process_time() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--positions", default="256,1024,4096")
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    for positions in map(int, args.positions.split(",")):
        (ours, cache_bytes), theirs = library_step(positions), jax_step(positions)
        array = np.zeros(int(cache_bytes) // 4, np.float32)
        for _ in range(3):
            ours(), theirs()
        pairs = [(timed(ours), timed(theirs), timed(array.sum)) for _ in range(args.repeats)]
        own, other, read = (statistics.median(column) for column in zip(*pairs, strict=True))
        print(
            f"{positions:5} positions: {own * 1e3:6.1f} ms, JAX {other * 1e3:6.1f} ms, {own / other:.2f}x; caches of "
            f"{cache_bytes / 1e6:.0f} MB read once {read * 1e3:.1f} ms, {own / read:.1f}x"
        )


if __name__ == "__main__":
    main()
