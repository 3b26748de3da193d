"""A step of five models on JAX's devices: ours, the same written by hand with shard_map, and jit with NamedShardings.

    XLA_FLAGS=--xla_force_host_platform_device_count=8 python tests/benchmarks/jax_models.py [NAME ...]

All three compute the same function, in turns, on arrays that are placed, compiled before. What counts is the median
ratio, of CPU seconds of the process and of seconds by the clock. By hand, `total` is a psum over the axis `model`.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import meshlib as mtf

RATE, WARM, TURNS = 0.01, 3, 12
Arrays = dict[str, Any]
rng = np.random.default_rng(0)


def normal(*sizes: int) -> np.ndarray[Any, Any]:
    return rng.normal(0, sizes[-2] ** -0.5 if len(sizes) > 1 else 1, sizes).astype(np.float32)


# ---------------------------------------------------------------- the models


def mlp(p: Arrays, x: Any, y: Any, total: Any) -> Any:
    return jnp.mean((total(jax.nn.relu(x @ p["w1"]) @ p["w2"]) - y) ** 2)


def normed(x: Any) -> Any:
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def lm(p: Arrays, tokens: Any, labels: Any, total: Any) -> Any:
    def layer(x: Any, w: Arrays) -> tuple[Any, None]:
        q, k, v = (jnp.einsum("btd,dhc->bthc", normed(x), w[n]) for n in ("q", "k", "v"))
        scores = jnp.einsum("bqhc,bkhc->bhqk", q, k) * q.shape[-1] ** -0.5
        causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        heads = jnp.einsum("bhqk,bkhc->bqhc", jax.nn.softmax(jnp.where(causal, scores, -1e9)), v)
        x = x + total(jnp.einsum("bthc,hcd->btd", heads, w["o"]))
        return x + total(jax.nn.silu(normed(x) @ w["w1"]) @ w["w2"]), None

    x = lax.scan(layer, p["embedding"][tokens], p["layers"])[0]
    logits = normed(x) @ p["embedding"].T
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1))


def decode(p: Arrays, x: Any, keys: Any, values: Any, at: Any, total: Any) -> Any:
    """One token of each sequence: its keys and values are written into the cache."""
    q, k, v = (jnp.einsum("bd,dhc->bhc", x, p[n]) for n in ("q", "k", "v"))
    keys = lax.dynamic_update_slice_in_dim(keys, k[:, None], at, 1)
    values = lax.dynamic_update_slice_in_dim(values, v[:, None], at, 1)
    scores = jnp.einsum("bhc,bthc->bht", q, keys) * q.shape[-1] ** -0.5
    scores = jnp.where(jnp.arange(keys.shape[1]) <= at, scores, -1e9)
    x = x + total(jnp.einsum("bht,bthc,hcd->bd", jax.nn.softmax(scores), values, p["o"]))
    return x + total(jax.nn.silu(x @ p["w1"]) @ p["w2"]), keys, values


def experts(p: Arrays, x: Any, y: Any, total: Any) -> Any:
    """One expert for each token, with places for twice the mean."""
    gates = jax.nn.softmax(x @ p["router"])
    chosen = jax.nn.one_hot(jnp.argmax(gates, -1), gates.shape[-1])
    place = (jnp.cumsum(chosen, 1) * chosen - 1).astype(jnp.int32)
    sent = jax.nn.one_hot(place, 2 * x.shape[1] // gates.shape[-1]) * chosen[..., None]
    count = len(p["w1"])
    if count < gates.shape[-1]:  # by hand: the experts of this device
        gates, sent = (lax.dynamic_slice_in_dim(a, lax.axis_index("model") * count, count, 2) for a in (gates, sent))
    h = jax.nn.relu(jnp.einsum("btec,btd,edf->becf", sent, x, p["w1"]))
    out = jnp.einsum("btec,becf,efd->btd", sent * gates[..., None], h, p["w2"])
    return jnp.mean((x + total(out) - y) ** 2)


def resnet(p: Arrays, images: Any, labels: Any, total: Any) -> Any:
    def convolved(x: Any, w: Any, stride: int = 1) -> Any:
        numbers = ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=numbers)

    x = convolved(images, p["first"])
    for n in range(3):
        x = x + convolved(jax.nn.relu(convolved(normed(x), p[f"a{n}"])), p[f"b{n}"])
    logits = jax.nn.relu(convolved(x, p["last"], 2)).mean((1, 2)) @ p["classes"]
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], -1))


# ---------------------------------------------------------------- with their layouts, ours and by hand


@dataclass(frozen=True)
class Case:
    """A function of parameters and inputs, and how both are split over `data` and `model`; a loss, unless `results`."""

    function: Callable[..., Any]
    params: Arrays
    inputs: tuple[Any, ...]
    names: dict[str, str]
    layout: str
    of_params: Any
    of_inputs: tuple[P, ...]
    results: tuple[P, ...] = ()
    model: int = 4


def whole(x: Any) -> Any:
    return x


def cases() -> dict[str, Case]:
    d, f, heads, c, layers, vocab = 128, 512, 8, 16, 4, 512
    attention = {"q": (d, heads, c), "k": (d, heads, c), "v": (d, heads, c), "o": (heads, c, d)}
    split = {"q": P(None, "model"), "k": P(None, "model"), "v": P(None, "model"), "o": P("model")}
    mixed = {"w1": (d, f), "w2": (f, d)}
    of_mixed = {"w1": P(None, "model"), "w2": P("model")}
    stacked = {n: normal(layers, *s) * d**-0.5 * 4 for n, s in (attention | mixed).items()}
    tokens = rng.integers(0, vocab, (2, 16, 64)).astype(np.int32)
    rows, cache = P("data"), P("data", None, "model")
    blocks = {f"{n}{k}": normal(3, 3, 32, 32) * 0.3 for n in "ab" for k in range(3)}
    convolutions = {"first": normal(3, 3, 3, 32), "last": normal(3, 3, 32, 64), "classes": normal(64, 10)} | blocks
    caches = tuple(normal(32, 256, heads, c) for _ in range(2))
    return {
        "MLP": Case(
            mlp, {"w1": normal(512, 1024), "w2": normal(1024, 512)}, (normal(512, 512), normal(512, 512)),
            {"inputs.0": "batch d", "p.w1": "d f"}, "batch:data;f:model", of_mixed, (rows, rows),
        ),
        "LM": Case(
            lm, {"embedding": normal(vocab, d), "layers": stacked}, (tokens[0], tokens[1]),
            {"inputs.0": "batch length", "p.layers.q": "layers d heads c", "p.layers.w1": "layers d f"},
            "batch:data;heads:model;f:model",
            {"embedding": P(), "layers": {n: P(None, *s) for n, s in (split | of_mixed).items()}}, (rows, rows),
        ),
        "decode": Case(
            decode, {n: normal(*s) * 0.3 for n, s in (attention | mixed).items()},
            (normal(32, d), *caches, np.int32(200)),
            {"inputs.0": "batch d", "p.q": "d heads c", "p.w1": "d f"}, "batch:data;heads:model;f:model",
            split | of_mixed, (rows, cache, cache, P()), (rows, cache, cache),
        ),
        "experts": Case(
            experts, {"router": normal(d, 8), "w1": normal(8, d, f), "w2": normal(8, f, d)},
            (normal(16, 64, d), normal(16, 64, d)),
            {"inputs.0": "batch length d", "p.router": "d experts", "p.w1": "experts d f"}, "batch:data;experts:model",
            {"router": P(), "w1": P("model"), "w2": P("model")}, (rows, rows),
        ),
        "ResNet": Case(
            resnet, convolutions, (normal(32, 16, 16, 3), rng.integers(0, 10, 32).astype(np.int32)),
            {"inputs.0": "batch height width colours"}, "batch:data", {n: P() for n in convolutions}, (rows, rows),
            model=1,
        ),
    }  # fmt: skip


# ---------------------------------------------------------------- a step, three times


def ours(case: Case, mesh: str) -> Callable[[], Any]:
    graph = mtf.from_jax(
        lambda p, inputs: case.function(p, *inputs, total=whole), case.params, [*case.inputs], names=case.names
    )
    with graph:
        updates = [] if case.results else mtf.optimize.SgdOptimizer(RATE).minimize(graph.loss)
    program = mtf.lower(graph.outputs, updates, mesh=mesh, layout=case.layout, precision="highest")
    run = mtf.on_jax(program, checked=False)
    step = run.compiled()
    feeds = graph.feeds(case.params, [*case.inputs])
    placed = {n: jax.device_put(np.asarray(x), step.inputs[n]) for n, x in feeds.items() if n in step.inputs}
    state, number, random = dict(run.state.arrays), iter(range(10**6)), step.keys(0)

    def turn() -> Any:
        result = step(state, placed, next(number), random)
        state.update(result.updates)
        return jax.block_until_ready(([*result.outputs.values()], result.updates))[0][0]

    return turn


def theirs(case: Case, mesh: jax.sharding.Mesh, by_hand: bool) -> Callable[[], Any]:
    function: Callable[..., Any] = lambda p, *xs: case.function(p, *xs, total=whole)  # noqa: E731
    if by_hand:

        def body(p: Arrays, *xs: Any) -> Any:
            result = case.function(p, *xs, total=lambda y: lax.psum(y, "model"))
            return result if case.results else lax.pmean(result, "data")

        outs = case.results or P()
        function = jax.shard_map(body, mesh=mesh, in_specs=(case.of_params, *case.of_inputs), out_specs=outs)

    def step(p: Arrays, *xs: Any) -> tuple[Any, Any]:
        if case.results:
            return function(p, *xs), p
        loss, slopes = jax.value_and_grad(function)(p, *xs)
        return (loss,), jax.tree.map(lambda w, dw: w - RATE * dw, p, slopes)

    def shardings(specs: Any) -> Any:
        return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda x: isinstance(x, P))

    of_params, of_inputs = shardings(case.of_params), shardings(case.of_inputs)
    compiled = jax.jit(
        step,
        in_shardings=(of_params, *of_inputs),
        out_shardings=(shardings(case.results or (P(),)), of_params),
        donate_argnums=() if case.results else (0,),
    )
    state = [jax.device_put(case.params, of_params)]
    inputs = [jax.device_put(x, s) for x, s in zip(case.inputs, of_inputs, strict=True)]

    def turn() -> Any:
        results, state[0] = jax.block_until_ready(compiled(state[0], *inputs))
        return results[0]

    return turn


def timed(turns: Sequence[Callable[[], Any]]) -> Iterator[list[tuple[float, float]]]:
    """CPU seconds and seconds of each, one after the other; their results agree."""
    for _ in range(WARM + TURNS):
        times, results = [], []
        for turn in turns:
            cpu, clock = time.process_time(), time.perf_counter()
            results.append(turn())
            times.append((time.process_time() - cpu, time.perf_counter() - clock))
        for other in results[1:]:
            np.testing.assert_allclose(results[0], other, rtol=2e-3, atol=2e-3)
        yield times


def median_ratios(times: Any) -> Any:
    """Ours over each of the others, turn by turn: [CPU, clock] x [by hand, jit]."""
    return np.median(times[:, :1] / times[:, 1:], 0).T


def main(names: Sequence[str]) -> None:
    print(f"{'':8} {'on_jax':>12} {'/ shard_map':>18} {'/ jit + NamedSharding':>24}   (CPU, clock)")
    for name, case in cases().items():
        if names and name not in names:
            continue
        shape = (8 // case.model, case.model)
        mesh = jax.make_mesh(shape, ("data", "model"), axis_types=(AxisType.Auto,) * 2)
        turns = [ours(case, f"data:{shape[0]};model:{shape[1]}"), theirs(case, mesh, True), theirs(case, mesh, False)]
        times = np.array([*timed(turns)][WARM:])
        (cpu, clock), milliseconds = median_ratios(times), np.median(times[:, 0, 1]) * 1e3
        columns = [f"{a:.3f} {b:.3f}" for a, b in zip(cpu, clock, strict=True)]
        print(f"{name:8} {milliseconds:9.2f} ms {columns[0]:>18} {columns[1]:>24}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
