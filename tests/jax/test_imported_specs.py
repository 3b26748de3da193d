"""PartitionSpecs of imported programs lay the user's arrays, and XLA sends under plain `jit` what `.note()` says."""

# ruff: noqa: E402 (whatever needs JAX comes after a look whether it is there)

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="needs JAX: pip install -e '.[jax]'")

import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import meshlib as mtf
from meshlib.jax.hlo import sent_bytes
from tests.effort import some

rng = np.random.default_rng(0)
HEADS, HEAD_DIM, D = 4, 8, 16


def attention(params: Any, x: Any) -> Any:
    """Heads and their dims are one axis of the weights, as in most checkpoints."""
    q, k, v = (jnp.einsum("btd,de->bte", x, params[n]).reshape(*x.shape[:2], HEADS, HEAD_DIM) for n in "qkv")
    scores = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
    y = jnp.einsum("bhqk,bkhd->bqhd", scores, v).reshape(*x.shape[:2], -1)
    return jnp.mean((y @ params["o"]) ** 2)


PARAMS = {n: rng.normal(0, 0.2, (D, HEADS * HEAD_DIM)).astype("float32") for n in "qkv"}
PARAMS["o"] = rng.normal(0, 0.2, (HEADS * HEAD_DIM, D)).astype("float32")
X = rng.normal(0, 1, (8, 4, D)).astype("float32")
NAMES = {"x": "batch length d_model", "params.q": "d_model (heads head_dim)"}
LAYOUTS = {
    "heads": ("data:2;model:4", "batch:data;heads:model", P(None, "model")),
    "fsdp": ("fsdp:8", "batch:fsdp;d_model:fsdp?", P("fsdp")),
    "both": ("data:2;m:4", "batch:data;variables/d_model:data;heads:m", P("data", "m")),
    "within heads": ("heads:4;dim:2", "heads:heads;head_dim:dim", P(None, ("heads", "dim"))),
}


@pytest.mark.parametrize("name", some([*LAYOUTS], ["both", "within heads"]))
def test_the_users_own_jit_runs_by_the_specs_and_sends_what_the_note_says(name: str) -> None:
    mesh, layout, of_q = LAYOUTS[name]
    graph = mtf.from_jax(attention, PARAMS, X, names=NAMES)
    weights = [op.output for op in graph.variables.values()]
    with graph:
        slopes = mtf.gradients([graph.loss], weights)
    fetched = {"loss": graph.loss} | {f"d {w.name}": d for w, d in zip(weights, slopes, strict=True)}
    program = mtf.lower(fetched, mesh=mesh, layout=layout)
    specs = mtf.partition_specs(program)
    assert specs.variables["params/q"] == of_q
    assert specs.outputs["d params/q"] == of_q
    placed = specs.shardings(PARAMS, X)
    params, x = (jax.device_put(a, s) for a, s in zip((PARAMS, X), placed, strict=True))
    assert params["q"].sharding.spec == of_q
    results = (jax.sharding.NamedSharding(specs.mesh(), P()), placed[0])
    step = jax.jit(jax.value_and_grad(attention), in_shardings=placed, out_shardings=results).lower(params, x).compile()
    loss, slope = step(params, x)
    assert abs(loss - jax.jit(attention)(PARAMS, X)) < 1e-5
    assert slope["q"].sharding.spec == of_q
    sent = sent_bytes(step.as_text())
    assert specs.xla_sent_bytes() == pytest.approx(sent)
    assert "under jit with these specs XLA sends" in specs.note()


def test_what_no_spec_says_is_noted() -> None:
    graph = mtf.from_jax(attention, PARAMS, X, names=NAMES)
    specs = mtf.partition_specs(mtf.lower(graph.outputs, mesh="m:8", layout="head_dim:m"))
    assert specs.variables["params/q"] == P()
    assert "params/q: no spec says that head_dim is split within an axis" in specs.note()


def test_arguments_that_the_program_does_not_know_are_whole() -> None:
    graph = mtf.from_jax(lambda params, x, key: attention(params["a"], x), {"a": PARAMS, "b": X}, X, jax.random.key(0))
    layout = f"{graph.arguments['x'].shape.names[0]}:m"
    specs = mtf.partition_specs(mtf.lower(graph.outputs, mesh="m:8", layout=layout))
    placed = specs.shardings({"a": PARAMS, "b": X}, X, jax.random.key(0))
    assert [placed[0]["b"].spec, placed[1].spec, placed[2].spec] == [P(), P("m"), P()]
    plain = mtf.Graph()
    with plain:
        y = mtf.reduce_sum(mtf.input("x", [mtf.Dimension("d", 4)]))
    with pytest.raises(mtf.GraphError, match=r"not imported from JAX; use \.variables"):
        mtf.partition_specs(mtf.lower({"y": y})).shardings(X)


def normalised(params: Any, x: Any) -> Any:
    """Weights in complex numbers, and statistics that lowering computes from other sums than the function."""
    h = ((1 + 2j) * (x @ params["w"])).real
    mean, variance = h.mean(0), h.var(0)
    return jnp.sum(((h - mean) / jnp.sqrt(variance + 1e-3) * params["scale"]) ** 2), {"mean": mean, "var": variance}


def test_results_and_gradients_in_another_form_are_those_of_the_users_jit() -> None:
    params = {"w": (PARAMS["q"] + 1j * PARAMS["k"]).astype("complex64"), "scale": PARAMS["q"][0]}
    x = X.reshape(-1, D)
    graph = mtf.from_jax(normalised, params, x, names={"x": "batch d_model", "params.scale": "hidden"})
    weights = [op.output for op in graph.variables.values()]
    with graph:
        slopes = mtf.gradients([graph.loss], weights)
    fetched = graph.outputs | {f"d {w.name}": d for w, d in zip(weights, slopes, strict=True)}
    specs = mtf.partition_specs(mtf.lower(fetched, mesh="data:2;model:4", layout="batch:data;hidden:model"))
    assert specs.outputs["d params/w/imag"] == specs.variables["params/w/imag"] == P(None, "model")
    placed = specs.shardings(params, x)
    results = [jax.sharding.NamedSharding(specs.mesh(), spec) for spec in map(specs.outputs.get, graph.outputs)]

    def step(params: Any, x: Any) -> Any:
        (loss, averages), slope = jax.value_and_grad(normalised, has_aux=True)(params, x)
        return jax.tree_util.tree_leaves((loss, averages)), jax.tree_util.tree_map(jnp.conj, slope)

    compiled = jax.jit(step, in_shardings=placed, out_shardings=(results, placed[0])).lower(params, x).compile()
    assert specs.xla_sent_bytes() == sent_bytes(compiled.as_text()) > 0


@pytest.mark.parametrize(
    ("optimizer", "slots"),
    [
        (mtf.optimize.AdamWOptimizer(1e-3), {"adam_m": P("model"), "adam_v": P("model")}),
        (mtf.optimize.AdafactorOptimizer(min_dim_size_to_factor=2), {"slot_vr": P("model"), "slot_vc": P("model")}),
    ],
)
def test_slots_have_the_axes_of_their_variable(optimizer: Any, slots: dict[str, Any]) -> None:
    graph = mtf.from_jax(attention, PARAMS, X, names=NAMES)
    with graph:
        updates = optimizer.minimize(graph.loss)
    specs = mtf.partition_specs(mtf.lower(updates=updates, mesh="data:2;model:4", layout="batch:data;heads:model"))
    assert {name: specs.variables[f"params/o/{name}"] for name in slots} == slots
