"""Attention on JAX: runs of queries, and what goes into the vendor's kernel, against the simulator."""

# ruff: noqa: E402 (whatever needs JAX comes after a look whether it is there)

from __future__ import annotations

from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="needs JAX: pip install -e '.[jax]'")

import meshlib as mtf
from meshlib.jax.rows import attention, fused_attention
from tests.effort import some

B, H, G, D = (mtf.Dimension(n, k) for n, k in (("b", 2), ("h", 2), ("g", 3), ("d", 8)))
LENGTH, MEMORY = mtf.Dimension("i", 12), mtf.Dimension("j", 12)


def program(causal: bool, window: int | None, biased: bool = False) -> mtf.Program:
    """The result and all gradients, heads split."""
    with mtf.Graph():
        q = mtf.input("q", [LENGTH, B, G, H, D])
        k, v = (mtf.input(n, [H, MEMORY, B, D]) for n in "kv")
        z = [mtf.input("z", [H, LENGTH, MEMORY])] if biased else []
        mask = mtf.greater(mtf.input("shown", [B, MEMORY]), -0.5) if biased else None
        y = mtf.attention(q, k, v, LENGTH, MEMORY, D, causal=causal, window=window, mask=mask, bias=z[0] if z else None)
        found = mtf.gradients([y], [q, k, v, *z], [mtf.input("dy", y.shape)])
        names = [*"qkvz"][: 3 + len(z)]
        outputs = {"y": y, **{f"d{n}": g for n, g in zip(names, found, strict=True) if g is not None}}
        return mtf.lower(outputs, mesh="p:2", layout="h:p", precision="highest")


WAYS = [*product(["runs", "kernel"], [False, True], [None, 4])]


@pytest.mark.parametrize(
    ("way", "causal", "window"),
    some(WAYS, [("runs", True, None), ("runs", False, 4), ("kernel", True, 4), ("kernel", False, 4)]),
)
def test_both_ways_equal_the_simulator(
    way: str, causal: bool, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "runs":
        monkeypatch.setattr(attention, "CHUNK", 12 * 6 * 3)  # a few queries at once
    else:  # the function that calls cuDNN on a GPU, in JAX's own implementation for everybody
        monkeypatch.setattr(attention, "implementation", lambda kernel: "xla")
    assert_as_simulated(program(causal, window))


@pytest.mark.parametrize(("causal", "kernel"), [(True, "cudnn"), (False, None)])
def test_what_cudnn_refuses_runs_in_blocks(causal: bool, kernel: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(q: jax.Array, *_: jax.Array, local_window_size: tuple[int, int], **__: object) -> jax.Array:
        if local_window_size[1]:
            raise ValueError("cuDNN doesn't support right window")
        return q

    monkeypatch.setattr(jax.nn, "dot_product_attention", attend)
    q, k = (jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((2, 3, 12, 8), (2, 12, 8)))
    part = SimpleNamespace(attrs={"causal": causal, "window": 4, "scale": 1.0}, runs=(0, 0))
    given = SimpleNamespace(
        part=part, first_query=0, first_key=0, queries=12, keys=12, mask=None, q=q, k=k, v=k,
        context=SimpleNamespace(platform="gpu"),
    )  # fmt: skip
    assert fused_attention.implementation(given) == kernel


@pytest.mark.parametrize(
    ("length", "memory", "causal", "window"),
    [(256, 128, False, None), (128, 128, True, None), (128, 128, True, 50), (128, 128, False, 70)],
    ids=["full", "causal", "window", "both_sides"],
)
def test_splash_attention_equals_the_simulator(
    length: int, memory: int, causal: bool, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the kernel's interpreter; key and value dims of other sizes than lanes, queries that share keys."""
    monkeypatch.setattr(fused_attention, "INTERPRETED", True)
    b, h, g, d, e = (mtf.Dimension(n, k) for n, k in (("b", 1), ("h", 2), ("g", 2), ("d", 8), ("e", 24)))
    i, j = mtf.Dimension("i", length), mtf.Dimension("j", memory)
    with mtf.Graph():
        q, k, v = (mtf.input(n, dims) for n, dims in (("q", [i, b, g, h, d]), ("k", [h, j, b, d]), ("v", [b, h, e, j])))
        y = mtf.attention(q, k, v, i, j, d, e, causal=causal, window=window)
        gradients = mtf.gradients([y], [q, k, v], [mtf.input("dy", y.shape)])
        outputs = {"y": y, **{f"d{n}": x for n, x in zip("qkv", gradients, strict=True) if x is not None}}
        p = mtf.lower(outputs, mesh="p:2", layout="h:p", precision="highest")
    assert set(p.outputs) == {"y", "dq", "dk", "dv"}
    assert_as_simulated(p)


@pytest.mark.parametrize(("chunk", "causal", "window"), [(12 * 6 * 3, True, 4), (attention.CHUNK, False, None)])
def test_scores_with_a_bias(chunk: int, causal: bool, window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "CHUNK", chunk)
    p = program(causal, window, biased=True)
    assert "dz" in p.outputs
    assert_as_simulated(p)


def assert_as_simulated(p: mtf.Program) -> None:
    rng = np.random.default_rng(0)
    feeds = {name: rng.normal(size=v.tensor.shape.sizes) for name, v in p.inputs.items()}
    wanted, found = mtf.simulate(p).step(feeds), mtf.on_jax(p).step(feeds)
    for name, y in wanted.items():
        np.testing.assert_allclose(found[name], y, rtol=1e-5, atol=1e-5 * np.abs(y).max(), err_msg=name)
