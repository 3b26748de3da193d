"""Decoding on JAX: caches of all layers in one stack, which a step updates in place."""

# ruff: noqa: E402 (whatever needs JAX comes after a look whether it is there)

from __future__ import annotations

import re

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="needs JAX: pip install -e '.[jax]'")

import meshlib as mtf
from meshlib.jax import step
from meshlib.jax.rows import index
from meshlib.jax.step import Step
from tests.effort import some

LAYERS, BATCH, LENGTH = 3, 4, 8
LAYOUTS = [("data:2;cache:4", "data+cache"), ("data:2;tensor:2", "data+tensor")]


def program(mesh: str, layout: str, length: int = LENGTH) -> mtf.Program:
    config = mtf.models.TransformerConfig(
        name="tiny", layers=LAYERS, d_model=16, heads=4, kv_heads=2, head_dim=4, d_ff=32, vocab=32, norm="rms",
        position="rotary",
    )  # fmt: skip
    with mtf.Graph():
        outputs, updates = mtf.models.decode_step(config, BATCH, length)
    return mtf.lower(outputs, updates, mesh, mtf.models.layout(layout, config, mesh), precision="highest")


@pytest.mark.parametrize(("mesh", "layout"), some(LAYOUTS, LAYOUTS[:1]), ids=lambda text: text)
def test_tokens_and_caches_equal_the_simulators(mesh: str, layout: str) -> None:
    lowered = program(mesh, layout)
    run, simulation = mtf.on_jax(lowered, seed=0), mtf.simulate(lowered, seed=0)
    rng = np.random.default_rng(0)
    caches = [name for name, v in lowered.variables.items() if "cache_length" in v.tensor.shape]
    assert len(caches) == 2
    for name in caches:
        filled = rng.normal(size=simulation.state[name].shape).astype("float32")
        run.state[name] = simulation.state[name] = filled
    for _ in range(2):
        tokens = rng.integers(0, 32, BATCH)
        logits, wanted = run.step(tokens=tokens)["logits"], simulation.step(tokens=tokens)["logits"]
        np.testing.assert_allclose(np.float32(logits), np.float32(wanted), atol=0.05)
    for name in caches:
        np.testing.assert_allclose(np.float32(run.state[name]), np.float32(simulation.state[name]), atol=0.05)


@pytest.mark.parametrize(("mesh", "layout"), some(LAYOUTS, LAYOUTS[1:2]), ids=lambda text: text)
def test_tokens_are_written_in_blocks_where_features_do_not_fill_lanes(
    mesh: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a cache of GPT-2, of heads of 64, a TPU makes a copy of twice its size for a scatter or one position."""
    lowered = program(mesh, layout, 64)
    rng = np.random.default_rng(0)
    state = {n: rng.normal(size=(LAYERS, BATCH, 2, 64, 4)) for n in ("keys", "values")}
    tokens = rng.integers(0, 32, (3, BATCH))  # the third token of the last sequence is out of range

    def caches() -> list[np.ndarray]:
        run = mtf.on_jax(lowered, seed=0, checked=False)
        for name, drawn in state.items():
            run.state[f"layers/attention/cache/{name}"] = drawn.astype(np.float32)
        run.state["serving/positions"] = np.array([0, 7, 8, 62], np.int32)
        for given in tokens:
            run.step(tokens=given)
        return [np.float32(run.state[f"layers/attention/cache/{name}"]) for name in state]

    scattered = caches()
    monkeypatch.setattr(step, "platform_of", lambda mesh: "tpu")
    monkeypatch.setattr(index, "LANES", 8)
    assert '"stablehlo.scatter"' not in str(Step(lowered, None, False).lowered().as_text())
    for written, wanted in zip(caches(), scattered, strict=True):
        np.testing.assert_array_equal(written, wanted)


def test_a_token_goes_right_into_the_stack_and_only_what_is_looked_up_is_cast() -> None:
    """XLA copies a slice that is updated and put back, transposes what is scattered into in another order, and casts
    a whole table before it looks up."""
    text = str(Step(program(*LAYOUTS[1]), None, False).lowered().as_text())
    stack = f"tensor<{LAYERS}x{BATCH // 2}x1x{LENGTH}x4x"
    scatters = re.findall(r'"stablehlo.scatter".*?\}\) : \((\S+),', text, re.DOTALL)
    assert len(scatters) == 2
    assert all(operand.startswith(stack) for operand in scatters), scatters
    assert re.findall(r'"stablehlo.gather".*: \(tensor<16x16x(\w+)>', text) == ["f32"]  # a block of the table
