"""Gradients of max pools on JAX, against JAX's own: strides, paddings, ties, windows that are split or cross blocks."""

# ruff: noqa: E402 (whatever needs JAX comes after a look whether it is there)

from __future__ import annotations

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="needs JAX: pip install -e '.[jax]'")

import meshlib as mtf
from tests.effort import some

H, W = 12, 10
# window and stride of a dim, padding, mesh and layout
CASES = {
    "stride 2": (3, 2, "SAME", "one:1", ""),
    "stride 3, gaps": (2, 3, "VALID", "one:1", ""),
    "stride 1": (3, 1, "SAME", "one:1", ""),
    "window wider than the stride": (5, 2, "VALID", "one:1", ""),
    "stride 4": (5, 4, "SAME", "one:1", ""),
    "split rows": (2, 2, "SAME", "m:2", "height:m"),
    "windows over blocks": (3, 2, "SAME", "m:2", "height:m"),
    "split batch": (3, 2, "SAME", "m:2", "batch:m"),
}


@pytest.mark.parametrize(
    "name", some([*CASES], ["stride 2", "stride 3, gaps", "window wider than the stride", "windows over blocks"])
)
def test_gradients_are_those_of_jax(name: str) -> None:
    size, stride, padding, mesh, layout = CASES[name]
    dims = [mtf.Dimension(*d) for d in (("batch", 2), ("height", H), ("width", W), ("channels", 3))]
    with mtf.Graph():
        x = mtf.input("x", dims)
        y = mtf.max_pool(x, {"height": size, "width": size + 1}, {"height": stride, "width": stride}, padding)
        (gradient,) = mtf.gradients([mtf.reduce_sum(mtf.square(y))], [x])
        program = mtf.lower({"gradient": gradient}, mesh=mesh, layout=layout, precision="highest")
    numbers = np.random.default_rng(0).integers(0, 4, (2, H, W, 3)).astype(np.float32)  # with ties

    def loss(x: jax.Array) -> jax.Array:
        window, strides = (1, size, size + 1, 1), (1, stride, stride, 1)
        return jax.numpy.sum(jax.lax.reduce_window(x, -np.inf, jax.lax.max, window, strides, padding) ** 2)

    on_devices = mtf.on_jax(program).step(x=numbers)["gradient"]
    np.testing.assert_array_equal(on_devices, jax.jit(jax.grad(loss))(numbers))
