"""Weights of eight bits and four in a JAX model: they are stored, sent and read as they are."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import meshlib as mtf


@pytest.mark.parametrize("dtype", ["int8", "int4", "float8_e4m3fn", "float8_e5m2"])
def test_quantised_weights_of_a_model(dtype: str) -> None:
    rng = np.random.default_rng(0)
    params = {"w": jnp.asarray(rng.integers(-6, 7, (16, 24))).astype(dtype), "s": jnp.linspace(0.5, 2, 24)}
    x = rng.normal(size=(64, 16)).astype(np.float32)

    def model(params: Any, x: Any) -> Any:
        return jnp.sum(jnp.tanh((x @ params["w"].astype(jnp.float32)) * params["s"]))

    graph = mtf.from_jax(model, params, x)
    w = graph.variables["params/w"].output
    assert w.dtype.name == dtype
    rows = graph.inputs["x"].output.shape[0].name
    layout = f"{rows}:p;variables/{w.shape[0].name}:p"
    program = mtf.lower(graph.outputs, mesh="p:4", layout=layout, precision="highest")
    (gather,) = (c for c in program.collectives if c.kind == "all_gather")
    assert (gather.dtype, gather.payload_bytes) == (dtype, w.dtype.size_bytes(4 * 24))
    found = mtf.simulate(program).step(x=x)["output"]
    np.testing.assert_allclose(found, model(params, x), rtol=1e-5)
