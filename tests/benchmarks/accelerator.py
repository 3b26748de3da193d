"""Steps on one accelerator, such as a GPU: measured beside modelled, and beside JAX's own `jit`; and their values.

    python tests/benchmarks/accelerator.py [values | steps | profile | jit | groups] [--programs N] [--only NAME ...]

values  random programs and fused attention on the device, against the simulator
steps   MNIST, Transformers and decoding in bfloat16, beside the estimate for the measured chip (`mtf.measure_chip`)
profile where the time of these steps goes, by kind of operation, beside the same estimate
jit     loss functions in plain JAX, imported and under `jit`, in turns
groups  `lax.ragged_dot` with 16 groups beside one product of as many FLOPs

Times are medians of several groups of asynchronous steps.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from hypothesis import HealthCheck, given, settings

import meshlib as mtf
from hardware import Slice

WARM = 3
GROUP = 5  # steps between two readings of the clock
Arrays = dict[str, Any]


# ---------------------------------------------------------------- values


def random_programs(count: int) -> None:
    """Programs of the property tests in float64 on one device."""
    from tests.oracle import assert_close, run
    from tests.simulation.test_property_programs import Written, programs

    tried = 0

    @settings(
        max_examples=count, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(programs(most=6, count=4))
    def check(p: Written) -> None:
        nonlocal tried
        program = mtf.lower(p.outputs, p.updates, precision="highest")
        (wanted,) = run(program, p.feeds)
        fed = {name: p.feeds[name] for name in program.inputs}
        with jax.enable_x64(True):
            devices = mtf.on_jax(program)
            results = {**devices.step(fed), **{f"new {name}": devices.state[name] for name in program.updates}}
        assert_close(results, wanted, 1e-4, repr(p), floor=1.0)  # float32, and optimizers in float32
        tried += 1

    check()
    print(f"{tried} random programs: the simulator's values")


def attention() -> None:
    """Fused attention and its gradients in bfloat16 against the simulator in float32."""
    b, h, g, d = (mtf.Dimension(n, k) for n, k in (("b", 2), ("h", 2), ("g", 3), ("d", 64)))
    i, j = mtf.Dimension("i", 256), mtf.Dimension("j", 256)
    rng = np.random.default_rng(0)
    for causal, window in ((False, None), (True, None), (True, 100), (False, 70)):
        results = {}
        for dtype in ("bfloat16", "float32"):
            with mtf.Graph():
                q = mtf.input("q", [i, b, g, h, d], dtype)
                k, v = (mtf.input(n, [h, j, b, d], dtype) for n in "kv")
                y = mtf.attention(q, k, v, i, j, d, causal=causal, window=window)
                slopes = mtf.gradients([y], [q, k, v], [mtf.input("dy", y.shape, dtype)])
                program = mtf.lower(
                    {"y": y, **{f"d{n}": x for n, x in zip("qkv", slopes, strict=True) if x is not None}}
                )
            if not results:
                feeds = {n: rng.normal(size=v.tensor.shape.sizes) for n, v in program.inputs.items()}
                feeds = {n: x.astype(ml_dtypes.bfloat16).astype(np.float32) for n, x in feeds.items()}
                run = mtf.on_jax(program)
                text = run.compiled().compiled.as_text().lower()
                results[dtype] = run.step(feeds)
            else:
                results[dtype] = mtf.simulate(program).step(feeds)
        errors = {
            n: float(
                np.abs(np.asarray(x, np.float32) - results["float32"][n]).max() / np.abs(results["float32"][n]).max()
            )
            for n, x in results["bfloat16"].items()
        }
        assert max(errors.values()) < 0.03, errors
        kernel = "cuDNN" if "cudnn" in text or "fmha" in text else "blocks of queries"
        print(f"attention causal={causal} window={window}: {kernel}, errors {errors}")


# ---------------------------------------------------------------- steps


def seconds(step: Callable[[], Any], repeats: int) -> float:
    """Seconds of a step, the median of groups of steps that run asynchronously."""
    for _ in range(WARM):
        jax.block_until_ready(step())
    taken = []
    for _ in range(repeats):
        begin = time.perf_counter()
        for _ in range(GROUP):
            result = step()
        jax.block_until_ready(result)
        taken.append((time.perf_counter() - begin) / GROUP)
    return statistics.median(taken)


def on_device(program: mtf.Program, feeds: Arrays | None = None, state: Arrays | None = None) -> Callable[[], Any]:
    """The compiled step of a program on arrays of the device; by default random ones. Its state is donated."""
    step = mtf.on_jax(program, checked=False).compiled()
    feeds, state = (
        drawn(values) if arrays is None else {n: jnp.array(x) for n, x in arrays.items()}
        for values, arrays in ((program.inputs, feeds), (program.variables, state))
    )
    random = step.keys(0)

    def turn() -> Any:
        result = step(state, feeds, np.int32(0), random)
        state.update(result.updates)
        return [*result.outputs.values(), result.updates]

    return turn


def drawn(values: Any) -> Arrays:
    """Small normal numbers, or ones for integers, of the shapes and dtypes of the values, drawn on the device."""
    arrays = {}
    for seed, (name, value) in enumerate(values.items()):
        sizes, dtype = value.tensor.shape.sizes, value.tensor.dtype.public
        is_integer = np.issubdtype(dtype, np.integer)
        arrays[name] = jnp.ones(sizes, dtype) if is_integer else small_numbers(seed, sizes, dtype)
    return arrays


@partial(jax.jit, static_argnums=(1, 2))
def small_numbers(seed: int, sizes: tuple[int, ...], dtype: Any) -> Any:
    return (jax.random.normal(jax.random.key(seed), sizes) * 0.02).astype(dtype)


def digits(batch: int, hidden: int) -> mtf.Program:
    """The network of `examples/mnist.py`, wider."""
    from examples.mnist import network

    with mtf.Graph():
        loss, _ = network(batch, hidden)
        return mtf.lower({"loss": loss}, mtf.optimize.MomentumOptimizer(0.1, momentum=0.9).minimize(loss))


def training(name: str, batch: int, length: int, remat: str) -> mtf.Program:
    """A training step of a preset in bfloat16 with AdamW."""
    with mtf.Graph():
        outputs, updates = mtf.models.train_step(
            mtf.models.preset(name), batch, length, mtf.optimize.AdamWOptimizer(1e-4), remat
        )
        return mtf.lower(outputs, updates)


def decoding(name: str, batch: int, positions: int) -> mtf.Program:
    """A step of decoding of a preset, its weights in bfloat16."""
    config = mtf.models.preset(name)
    config = config.replace(numerics=replace(config.numerics, variable_dtype="bfloat16"))
    with mtf.Graph():
        outputs, updates = mtf.models.decode_step(config, batch, positions)
        return mtf.lower(outputs, updates)


def programs() -> dict[str, Callable[[], mtf.Program]]:
    return {
        "MNIST 784-8192-10, batch 8,192": lambda: digits(8192, 8192),
        "GPT-2 124M, 16 x 1,024": lambda: training("gpt2", 16, 1024, "none"),
        "GPT-2 XL 1.5B, 8 x 1,024, all layers again": lambda: training("gpt2-xl", 8, 1024, "full"),
        "Llama 2 7B decoding, 8 x 2,048": lambda: decoding("llama2-7b", 8, 2048),
        "Llama 2 7B decoding, 64 x 1,024": lambda: decoding("llama2-7b", 64, 1024),
    }


def steps(repeats: int, names: list[str]) -> None:
    chip = mtf.measure_chip()
    slice_ = Slice("measured-1", chip)
    print(f"{chip}; clock {chip.clock_hz / 1e9:.1f} GHz x {chip.vpu_lanes}, launch {chip.launch_seconds * 1e6:.2f} us")
    print(f"{'':46} {'measured':>10} {'modelled':>10} {'ratio':>6}", flush=True)
    for name, build in programs().items():
        if names and not any(n in name for n in names):
            continue
        program = build()
        measured = seconds(on_device(program), repeats)
        est = mtf.estimate(program, slice_)
        columns = f"{measured * 1e3:7.2f} ms {est.step_seconds * 1e3:7.2f} ms {measured / est.step_seconds:6.2f}"
        print(f"{name:46} {columns}  ({est.flops / measured / 1e12:.0f} TFLOP/s)", flush=True)


def profiles(names: list[str]) -> None:
    """Device time of the steps by kind of operation, from JAX's profiler, beside the estimate."""
    slice_ = Slice("measured-1", mtf.measure_chip())
    for name, build in programs().items():
        if names and not any(n in name for n in names):
            continue
        program = build()
        feeds = {n: np.asarray(x) for n, x in drawn(program.inputs).items()}
        measured = mtf.on_jax(program, checked=False).profile(feeds)
        parts = mtf.estimate(program, slice_).profile(measured).by("kind")
        busy = f"{measured.device_seconds * 1e3:.2f} ms of work"
        print(f"{name}: {busy}; the longest kinds of operation:\n{'':24} {'measured':>10} {'modelled':>10}", flush=True)
        for part in sorted(parts, key=lambda p: -(p.measured_seconds or 0.0))[:12]:
            taken = (part.measured_seconds or 0.0) * 1e3
            print(f"{part.name:24} {taken:7.2f} ms {part.total_seconds * 1e3:7.2f} ms", flush=True)


def by_jit(repeats: int, names: list[str]) -> None:
    """Loss functions in plain JAX, imported and by `jit`: a step of SGD, in turns."""
    from tests.benchmarks import jax_models

    print(f"{'':12} {'on_jax':>10} {'jit':>10} {'ratio':>6}")
    for name, case in larger(jax_models).items():
        if names and name not in names:
            continue
        rate = jax_models.RATE
        params = jax.tree.map(jnp.asarray, case.params)
        inputs = [jnp.asarray(x) for x in case.inputs]

        def loss(p: Any, *xs: Any, case: Any = case) -> Any:
            narrow = jax.tree.map(lambda w: w.astype(jnp.bfloat16), p)
            return case.function(narrow, *xs, total=jax_models.whole)

        graph = mtf.from_jax(lambda p, inputs: loss(p, *inputs), params, inputs)
        with graph:
            updates = mtf.optimize.SgdOptimizer(rate).minimize(graph.loss)
        program = mtf.lower(graph.outputs, updates)
        ours = on_device(program, graph.feeds(params, inputs), graph.state(params, inputs))

        def plain(p: Any, *xs: Any) -> Any:
            value, slopes = jax.value_and_grad(loss)(p, *xs)
            return value, jax.tree.map(lambda w, dw: w - rate * dw, p, slopes)  # noqa: B023

        compiled, state = jax.jit(plain, donate_argnums=0), [jax.tree.map(jnp.copy, params)]

        def theirs() -> Any:
            value, state[0] = compiled(state[0], *inputs)  # noqa: B023
            return value, state[0]  # noqa: B023

        first = (float(ours()[0]), float(theirs()[0]))
        times = np.array([(seconds(ours, 3), seconds(theirs, 3)) for _ in range(max(1, repeats // 3))])
        own, other = np.median(times, 0)
        print(
            f"{name:12} {own * 1e3:7.2f} ms {other * 1e3:7.2f} ms {np.median(times[:, 0] / times[:, 1]):6.3f}",
            f" losses {first[0]:.4f} {first[1]:.4f}",
            flush=True,
        )


def grouped(repeats: int) -> None:
    """Products of rows in 16 groups, and the gradient of their weights, beside one product of as many FLOPs."""
    groups, rows, inner, columns = 16, 16_384, 1024, 4096
    sizes = jnp.array(np.random.default_rng(0).multinomial(rows, np.full(groups, 1 / groups)), jnp.int32)
    x, dy = (small_numbers(n, (rows, width), jnp.bfloat16) for n, width in enumerate((inner, columns)))
    w = small_numbers(2, (groups, inner, columns), jnp.bfloat16)
    wide = {"preferred_element_type": jnp.float32}
    summed = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
    functions = {
        "one product": lambda: jnp.matmul(x, w[0], **wide),
        "ragged_dot": lambda: jax.lax.ragged_dot(x, w, sizes, **wide),
        "its weights' gradient": lambda: jax.lax.ragged_dot_general(x, dy, sizes, summed, **wide),
    }
    for name, function in functions.items():
        print(f"{name:24} {seconds(jax.jit(function), repeats) * 1e3:7.3f} ms", flush=True)


def larger(jax_models: Any) -> Arrays:
    """The models of `jax_models` in sizes that fill an accelerator."""
    normal, rng = jax_models.normal, np.random.default_rng(0)
    d, f, heads, c, layers, vocab = 2048, 8192, 16, 128, 4, 32000
    sizes = {"q": (d, heads, c), "k": (d, heads, c), "v": (d, heads, c), "o": (heads, c, d), "w1": (d, f), "w2": (f, d)}
    stacked = {n: normal(layers, *s) * d**-0.5 for n, s in sizes.items()}
    tokens = rng.integers(0, vocab, (2, 8, 1024)).astype(np.int32)
    bfloat16 = ml_dtypes.bfloat16
    blocks = {f"{n}{k}": normal(3, 3, 256, 256) * 0.05 for n in "ab" for k in range(3)}
    images = {"first": normal(3, 3, 3, 256), "last": normal(3, 3, 256, 512) * 0.05, "classes": normal(512, 10)} | blocks
    cases = jax_models.cases()
    replaced = {
        "MLP": (
            {"w1": normal(4096, 16384), "w2": normal(16384, 4096)},
            (normal(8192, 4096).astype(bfloat16), normal(8192, 4096).astype(bfloat16)),
        ),
        "LM": ({"embedding": normal(vocab, d), "layers": stacked}, (tokens[0], tokens[1])),
        "experts": (
            {"router": normal(1024, 8), "w1": normal(8, 1024, 4096), "w2": normal(8, 4096, 1024)},
            (normal(16, 512, 1024).astype(bfloat16), normal(16, 512, 1024).astype(bfloat16)),
        ),
        "ResNet": (images, (normal(64, 56, 56, 3).astype(bfloat16), rng.integers(0, 10, 64).astype(np.int32))),
    }
    return {n: replace(cases[n], params=p, inputs=x) for n, (p, x) in replaced.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["values", "steps", "profile", "jit", "groups"])
    parser.add_argument("--programs", type=int, default=60)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--only", nargs="*", default=[])
    args = parser.parse_args()
    print(f"JAX {jax.__version__}, {jax.devices()}")
    if args.what in (None, "values"):
        attention()
        random_programs(args.programs)
    if args.what in (None, "steps"):
        steps(args.repeats, args.only)
    if args.what in (None, "jit"):
        by_jit(args.repeats, args.only)
    if args.what in (None, "profile"):
        profiles(args.only)
    if args.what in (None, "groups"):
        grouped(args.repeats)


if __name__ == "__main__":
    main()
