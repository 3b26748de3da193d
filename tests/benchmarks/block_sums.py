"""Cycles that a block of a product takes beyond its tiles, by a TPU compiler; run by hand: python
tests/benchmarks/block_sums.py --chip v5e

Compiles a layer of a Transformer without its attention, with its gradients, ahead of time for one chip (no device is
needed, but JAX with libtpu is). For each product the compiler states blocks, steps over the depth and cycles. What
these exceed the cycles of whole tiles by is divided by the float32 registers of the block: `SUM_CYCLES` of
`hardware.blocking` is about the median.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from hardware import CHIPS
from tests.benchmarks.single_operations import TOPOLOGIES  # its import sets the environment of the compiler

REGISTER = 8 * 128
HEAD = 128


def normed(x: Any, scale: Any) -> Any:
    """RMS norm of the last dim, computed in float32."""
    y = x.astype(jnp.float32)
    return (y * jax.lax.rsqrt((y * y).mean(-1, keepdims=True) + 1e-6)).astype(x.dtype) * scale.astype(x.dtype)


def layer(x: Any, p: dict[str, Any]) -> Any:
    """One layer; attention is replaced by an element-wise function of queries, keys and values."""
    w = {name: value.astype(jnp.bfloat16) for name, value in p.items()}
    h = normed(x, p["s1"])
    q, k, v = (jnp.einsum("td,dnh->tnh", h, w[name]) for name in "qkv")
    x = x + jnp.einsum("tnh,nhd->td", q * k + v, w["o"])
    h = normed(x, p["s2"])
    gate, up = (jnp.einsum("td,df->tf", h, w[name]) for name in ("gate", "up"))
    return x + jnp.einsum("tf,fd->td", jax.nn.silu(gate) * up, w["down"])


def loss(layers: dict[str, Any], x: Any) -> Any:
    """Mean square of the result of some layers, each recomputed in the backward pass."""
    y, _ = jax.lax.scan(lambda x, p: (jax.checkpoint(layer)(x, p), None), x, layers)
    return jnp.square(y.astype(jnp.float32)).mean()


def compiled(chip: str, tokens: int, width: int, hidden: int) -> str:
    """The compiled gradient of four layers, as text."""
    device = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[chip]).devices[0]
    at = SingleDeviceSharding(device)
    heads = width // HEAD
    sizes = {"s1": (width,), "s2": (width,), "o": (heads, HEAD, width), "down": (hidden, width)}
    sizes |= dict.fromkeys("qkv", (width, heads, HEAD)) | dict.fromkeys(("gate", "up"), (width, hidden))
    layers = {name: jax.ShapeDtypeStruct((4, *size), jnp.float32, sharding=at) for name, size in sizes.items()}
    x = jax.ShapeDtypeStruct((tokens, width), jnp.bfloat16, sharding=at)
    return str(jax.jit(jax.grad(loss)).lower(layers, x).compile().as_text())


def excesses(chip: str, text: str) -> Iterator[tuple[int, int, float]]:
    """(depth of a step, float32 registers of a block, cycles of a core per register and step) of each product."""
    figures = CHIPS[chip]
    core_macs = figures.peak_flops("bf16") / 2 / figures.clock_hz / figures.cores_per_chip
    cores = figures.cores_per_device
    for line in text.splitlines():
        if "estimated_cycles" not in line or " fusion(" not in line or "dot_general" not in line:
            continue
        window = json.loads(line[line.index("backend_config=") + len("backend_config=") :])["window_config"]
        if not window["kernel_window_bounds"]:
            continue
        kernel, output, operand, steps = (
            math.prod(map(int, window[f"{name}_bounds"]))
            for name in ("kernel_window", "output_window", "input_window", "iteration")
        )
        depth = math.sqrt(REGISTER * kernel * operand / output)  # [rows, depth] and [depth, columns] to [rows, columns]
        whole = math.ceil(depth / figures.mxu_rows - 0.01) * figures.mxu_rows
        cycles = int(window["estimated_cycles"]) / steps - output * REGISTER * whole / core_macs / cores
        yield round(depth), output, cycles * cores / output


def main() -> None:
    """Print the cycles per register of each product, and their median."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chip", choices=sorted(TOPOLOGIES), default="v5e")
    for name, size in (("tokens", 8192), ("width", 4096), ("hidden", 11008)):
        parser.add_argument(f"--{name}", type=int, default=size)
    args = parser.parse_args()
    text = compiled(args.chip, args.tokens, args.width, args.hidden)
    rows = sorted(excesses(args.chip, text))
    for depth, registers, cycles in rows:
        print(f"depth {depth:5d}  registers {registers:5d}  cycles per register {cycles:5.2f}")
    largest = max(map(int, re.findall(r'"memory_space":"1","offset":"\d+","size":"(\d+)"', text)))
    median = statistics.median(cycles for _, _, cycles in rows)
    print(
        f"{args.chip}: {len(rows)} products, median {median:.1f} cycles; kernels take up to {largest / 2**20:.1f} MiB"
    )


if __name__ == "__main__":
    main()
