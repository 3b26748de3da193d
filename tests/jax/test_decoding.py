"""Decoding on JAX: caches of all layers in one stack, which a step updates in place."""

# ruff: noqa: E402 (whatever needs JAX comes after a look whether it is there)

from __future__ import annotations

import re

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="needs JAX: pip install -e '.[jax]'")

import meshlib as mtf
from meshlib.jax.step import Step
from tests.effort import some

LAYERS, BATCH, LENGTH = 3, 4, 8
LAYOUTS = [("data:2;cache:4", "data+cache"), ("data:2;tensor:2", "data+tensor")]


def program(mesh: str, layout: str) -> mtf.Program:
    config = mtf.models.TransformerConfig(
        name="tiny", layers=LAYERS, d_model=16, heads=4, kv_heads=2, head_dim=4, d_ff=32, vocab=32, norm="rms",
        position="rotary",
    )  # fmt: skip
    with mtf.Graph():
        outputs, updates = mtf.models.decode_step(config, BATCH, LENGTH)
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


def test_a_token_goes_right_into_the_stack_and_only_what_is_looked_up_is_cast() -> None:
    """XLA copies a slice that is updated and put back, transposes what is scattered into in another order, and casts
    a whole table before it looks up."""
    text = str(Step(program(*LAYOUTS[1]), None, False).lowered().as_text())
    stack = f"tensor<{LAYERS}x{BATCH // 2}x1x{LENGTH}x4x"
    scatters = re.findall(r'"stablehlo.scatter".*?\}\) : \((\S+),', text, re.DOTALL)
    assert len(scatters) == 2
    assert all(operand.startswith(stack) for operand in scatters), scatters
    assert re.findall(r'"stablehlo.gather".*: \(tensor<16x16x(\w+)>', text) == ["f32"]  # a block of the table
