"""Kernels and callbacks are what the user says of them, by name; without a word they are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
jnp = jax.numpy
pallas = pytest.importorskip("jax.experimental.pallas", exc_type=ImportError)

import meshlib as mtf  # noqa: E402
from meshlib.core.errors import GraphError  # noqa: E402

X = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)


def doubled(x_ref: Any, y_ref: Any) -> None:
    y_ref[...] = x_ref[...] * 2


def sine(x: Any) -> Any:
    return np.sin(x)


SHAPE = jax.ShapeDtypeStruct((4, 3), np.float32)


def loss(w: Any) -> Any:
    y = pallas.pallas_call(doubled, out_shape=SHAPE)(w)
    z = pallas.pallas_call(doubled, out_shape=SHAPE, name="again")(w)
    return (y * jax.pure_callback(sine, SHAPE, w, vmap_method="sequential") * z).sum()


KERNELS = {"doubled": lambda x: x * 2, "again": lambda x: x + x, "sine": jnp.sin}


def test_they_are_the_functions_that_are_given() -> None:
    graph = mtf.from_jax(loss, X, kernels=KERNELS, names={"w": "rows cols"})
    with graph:
        (dw,) = mtf.gradients([graph.loss], [graph.variables["w"].output])
    program = mtf.lower({"loss": graph.loss, "dw": dw}, mesh="m:2", layout="rows:m")
    made = mtf.simulate(program).step()
    value, slope = jax.value_and_grad(lambda w: (4 * w * w * jnp.sin(w)).sum())(X)
    np.testing.assert_allclose(made["loss"], value, rtol=1e-5)
    np.testing.assert_allclose(made["dw"], slope, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("kernels", "said"),
    [
        ({}, r"pallas_call \(test_kernels.py:\d+\): 'again': say what it computes, as a JAX function"),
        ({}, r"pure_callback \(test_kernels.py:\d+\): 'sine': say"),
        (KERNELS | {"sine": np.sin}, r"'sine' must be a JAX function \(jax.numpy\)"),
        (KERNELS | {"again": lambda x: x[0]}, r"'again' returns float32\[3\], the kernel float32\[4, 3\]"),
        (KERNELS | {"again": lambda x, y: x}, r"'again' takes float32\[4, 3\]: .*missing 1 required"),
        (KERNELS | {"again": lambda x: {}["a"]}, r"'again' failed at test_kernels.py:\d+: KeyError: 'a'"),
        (KERNELS | {"agian": jnp.sin}, r"none called 'agian'; did you mean 'again'"),
        (3, r"kernels must be a dict of names to JAX functions, got 3"),
    ],
    ids=["no kernel", "no callback", "of NumPy", "other shape", "other operands", "raises", "misspelt", "none"],
)  # fmt: skip
def test_what_is_wrong_with_them(kernels: Any, said: str) -> None:
    with pytest.raises(GraphError, match=said):
        mtf.from_jax(loss, X, kernels=kernels)
