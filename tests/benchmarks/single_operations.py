"""Single operations beside what a compiler for TPUs reports; run by hand: python tests/benchmarks/single_operations.py

Draws products, element-wise operations, reductions, softmaxes, norms and optimizer updates at random, compiles each
ahead of time for one chip (no device is needed, but JAX with libtpu is), adds up the cycles that it reports for its
fusions and the copies into VMEM that they wait for, and compares the modelled time. Gathers are left out, and programs
whose layouts SparseCores change: no cycles are reported for these.

    python tests/benchmarks/single_operations.py --chip v5e --products 150 --others 150 --seed 1
"""

from __future__ import annotations

import argparse
import math
import os
import random
import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from meshlib.jax.compiling.topologies import ENVIRONMENT

os.environ.update({**ENVIRONMENT, **os.environ})

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

import meshlib as mtf
from hardware import CHIPS
from hardware.memory import hbm_seconds
from hardware.slices import Slice, legal_slices

TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "v7": "tpu7x:2x2x1"}
BYTES = {"f32": 4, "bf16": 2, "s32": 4, "s8": 1, "pred": 1}


def normed(x: Any, centred: bool) -> Any:
    """Layer norm or RMS norm without variables, in float32."""
    y = x.astype(jnp.float32)
    if centred:
        y = y - y.mean(-1, keepdims=True)
    return (y * jax.lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + 1e-6)).astype(x.dtype)


def normed_here(x: mtf.Tensor, centred: bool) -> mtf.Tensor:
    """The same in named dims."""
    last, y = x.shape.dims[-1], mtf.cast(x, "float32")
    if centred:
        y = y - mtf.reduce_mean(y, reduced_dim=last)
    return mtf.cast(y * mtf.rsqrt(mtf.reduce_mean(mtf.square(y), reduced_dim=last) + 1e-6), x.dtype)


def momentum(w: Any, m: Any, g: Any) -> tuple[Any, Any]:
    """One update of SGD with momentum."""
    m = m * 0.9 + g
    return w - m * 0.1, m


# name -> operands of one shape, the function of arrays, the function of tensors
OTHERS: dict[str, tuple[int, Callable[..., Any], Callable[..., Any]]] = {
    "relu": (1, jax.nn.relu, mtf.relu),
    "exp": (1, jnp.exp, mtf.exp),
    "tanh": (1, jnp.tanh, mtf.tanh),
    "gelu": (1, jax.nn.gelu, mtf.gelu),
    "add": (2, jnp.add, mtf.add),
    "multiply": (2, jnp.multiply, mtf.multiply),
    "multiply_add": (3, lambda x, y, z: x * y + z, lambda x, y, z: x * y + z),
    "gated": (2, lambda x, y: jax.nn.silu(x) * y, lambda x, y: mtf.silu(x) * y),
    "sum_last": (1, lambda x: x.sum(-1), lambda x: mtf.reduce_sum(x, reduced_dim=x.shape.dims[-1])),
    "sum_first": (1, lambda x: x.sum(0), lambda x: mtf.reduce_sum(x, reduced_dim=x.shape.dims[0])),
    "max_last": (1, lambda x: x.max(-1), lambda x: mtf.reduce_max(x, reduced_dim=x.shape.dims[-1])),
    "softmax": (1, jax.nn.softmax, lambda x: mtf.softmax(x, x.shape.dims[-1])),
    "layer_norm": (1, lambda x: normed(x, True), lambda x: normed_here(x, True)),
    "rms_norm": (1, lambda x: normed(x, False), lambda x: normed_here(x, False)),
    "momentum": (3, momentum, momentum),
}


def reported_seconds(chip: str, fn: Callable[..., Any], shapes: list[tuple[tuple[int, ...], str]]) -> float | None:
    """Cycles of the fusions of the compiled program over the clock, and the copies into VMEM that none of them covers;
    None if the program has parts without cycles: layouts changed by SparseCores."""
    entry = compiled(chip, fn, shapes)
    entry = entry[entry.index("ENTRY") :]
    if "sparse-core" in entry:
        return None
    seconds, started = 0.0, {}
    for line in entry.splitlines():
        if start := re.search(r"%([\w.-]+) = \((\w+)\[([\d,]*)\][^=]*? copy-start\(", line):
            name, dtype, sizes = start.groups()
            copied = BYTES.get(dtype, 4) * math.prod(int(n) for n in sizes.split(",") if n)
            started[name] = seconds + hbm_seconds(CHIPS[chip], copied)
        elif done := re.search(r" copy-done\(%([\w.-]+)\)", line):
            seconds = max(seconds, started.pop(done[1]))
        elif cycles := re.search(r'"estimated_cycles":"(\d+)"', line):
            seconds += int(cycles[1]) / CHIPS[chip].clock_hz
    return seconds


def compiled(chip: str, fn: Callable[..., Any], shapes: list[tuple[tuple[int, ...], str]]) -> str:
    """The text of a program compiled for one device."""
    device = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[chip]).devices[0]
    at = SingleDeviceSharding(device)
    operands = [jax.ShapeDtypeStruct(shape, dtype, sharding=at) for shape, dtype in shapes]
    text: str = jax.jit(fn).lower(*operands).compile().as_text()
    return text


def modelled_seconds(chip: str, build: Callable[[], Any]) -> float:
    """The estimate of a program on the smallest slice, each device of which does the same."""
    name = legal_slices(chip)[0]
    with mtf.Graph():
        made = build()
        results = made if isinstance(made, tuple) else (made,)
        outputs = {f"y{n}": y for n, y in enumerate(results)}
        program = mtf.lower(outputs, mesh=f"copies:{Slice(name).devices}")
    return mtf.estimate(program, name).step_seconds


def size(draw: random.Random, low: int, high: int) -> int:
    """Log-uniform; nearly half are multiples of 128, a quarter any number."""
    n = round(math.exp(draw.uniform(math.log(low), math.log(high))))
    step = draw.choices([128 if n >= 128 else 8, 8, 1], [45, 30, 25])[0]
    return max(step, n // step * step)


def product(draw: random.Random, chip: str) -> tuple[str, float | None]:
    """(what it is, relative error) of a product, one in four batched; no error where no cycles are reported."""
    while True:
        batch = 2 ** draw.randint(1, 8) if draw.random() < 0.25 else 1
        m, k, n = (size(draw, 8, 2048 if batch > 1 else 8192) for _ in "mkn")
        if 1e4 < batch * (m * k + k * n + m * n) < 3e8:
            break
    dtype = draw.choices(["bfloat16", "float32"], [70, 30])[0]
    sizes = {"batch": batch, "rows": m, "depth": k, "columns": n}
    b, r, d, c = (mtf.Dimension(name, n) for name, n in sizes.items())
    fn = lambda x, y: jnp.einsum("bmk,bkn->bmn", x, y) if batch > 1 else x @ y  # noqa: E731
    lead = [b] if batch > 1 else []

    def build() -> mtf.Tensor:
        x, y = mtf.input("x", [*lead, r, d], dtype), mtf.input("y", [*lead, d, c], dtype)
        return mtf.einsum([x, y], [*lead, r, c])

    ahead = (batch,) if batch > 1 else ()
    reported = reported_seconds(chip, fn, [((*ahead, m, k), dtype), ((*ahead, k, n), dtype)])
    error = None if reported is None else modelled_seconds(chip, build) / reported - 1
    return f"product {dtype} {list(sizes.values())}", error


def other(draw: random.Random, chip: str) -> tuple[str, float | None]:
    """(what it is, relative error) of an operation on the vector unit; as `product`."""
    name = draw.choice(sorted(OTHERS))
    count, fn, build = OTHERS[name]
    dtype = "float32" if name == "momentum" else draw.choice(["bfloat16", "float32"])
    columns = size(draw, 16, 16384)
    rows = max(8, round(math.exp(draw.uniform(math.log(2**13), math.log(2**25)))) // columns // 8 * 8)
    dims = [mtf.Dimension("rows", rows), mtf.Dimension("columns", columns)]
    reported = reported_seconds(chip, fn, [((rows, columns), dtype)] * count)
    modelled = modelled_seconds(chip, lambda: build(*(mtf.input(f"x{n}", dims, dtype) for n in range(count))))
    return f"{name} {dtype} {[rows, columns]}", None if reported is None else modelled / reported - 1


def main() -> None:
    """Print the errors of both groups."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chip", choices=sorted(TOPOLOGIES), default="v5e")
    parser.add_argument("--products", type=int, default=50)
    parser.add_argument("--others", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--verbose", action="store_true", help="print each operation")
    args = parser.parse_args()
    draw = random.Random(args.seed)
    for what, one, count in (("products", product, args.products), ("others", other, args.others)):
        errors = []
        for _ in range(count):
            name, error = one(draw, args.chip)
            if error is None:
                continue
            errors.append(abs(error))
            if args.verbose:
                print(f"{error:+8.1%}  {name}")
        if errors:
            worst = sorted(errors)[min(len(errors) - 1, int(0.9 * len(errors)))]
            middle = statistics.median(errors)
            print(f"{args.chip} {what}: {len(errors)}, median error {middle:.1%}, 90 % below {worst:.1%}")


if __name__ == "__main__":
    main()
