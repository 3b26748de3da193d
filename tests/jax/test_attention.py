"""Attention on JAX: runs of queries, and what goes into the vendor's kernel, against the simulator."""

# ruff: noqa: E402 (whatever needs JAX comes after a look whether it is there)

from __future__ import annotations

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="needs JAX: pip install -e '.[jax]'")

import meshlib as mtf
from meshlib.jax.rows import attention

B, H, G, D = (mtf.Dimension(n, k) for n, k in (("b", 2), ("h", 2), ("g", 3), ("d", 8)))
LENGTH, MEMORY = mtf.Dimension("i", 12), mtf.Dimension("j", 12)


def program(causal: bool, window: int | None) -> mtf.Program:
    """The result and all gradients, heads split."""
    with mtf.Graph():
        q = mtf.input("q", [LENGTH, B, G, H, D])
        k, v = (mtf.input(n, [H, MEMORY, B, D]) for n in "kv")
        y = mtf.attention(q, k, v, LENGTH, MEMORY, D, causal=causal, window=window)
        found = mtf.gradients([y], [q, k, v], [mtf.input("dy", y.shape)])
        outputs = {"y": y, **{f"d{n}": g for n, g in zip("qkv", found, strict=True) if g is not None}}
        return mtf.lower(outputs, mesh="p:2", layout="h:p", precision="highest")


@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (True, 4), (False, 3)])
@pytest.mark.parametrize("way", ["runs", "kernel"])
def test_both_ways_equal_the_simulator(
    way: str, causal: bool, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "runs":
        monkeypatch.setattr(attention, "CHUNK", 12 * 6 * 3)  # a few queries at once
    else:  # the function that calls cuDNN on a GPU, in JAX's own implementation for everybody
        result, gradients = attention.fused, attention.fused_gradients
        monkeypatch.setattr(attention, "fusable", lambda kernel: True)
        monkeypatch.setattr(attention, "fused", lambda kernel, q, k, v, _: result(kernel, q, k, v, "xla"))
        monkeypatch.setattr(attention, "fused_gradients", lambda kernel, _: gradients(kernel, "xla"))
    p = program(causal, window)
    rng = np.random.default_rng(0)
    feeds = {name: rng.normal(size=v.tensor.shape.sizes) for name, v in p.inputs.items()}
    wanted, found = mtf.simulate(p).step(feeds), mtf.on_jax(p).step(feeds)
    for name, y in wanted.items():
        np.testing.assert_allclose(found[name], y, rtol=1e-5, atol=1e-5 * np.abs(y).max(), err_msg=name)
