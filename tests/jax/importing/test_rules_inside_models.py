"""Derivative rules where models have them: around products, in loops over layers, with residuals and results."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
jnp, lax = jax.numpy, jax.lax

import meshlib as mtf  # noqa: E402
from meshlib.core.errors import GraphError  # noqa: E402
from tests.effort import some  # noqa: E402
from tests.jax.importing.checks import compared  # noqa: E402

rng = np.random.default_rng(1)
W = rng.normal(0, 0.5, (3, 4, 4)).astype(np.float32)
X = rng.normal(0, 1, (6, 4)).astype(np.float32)
NAMES = {"x": "rows in", "w": "layers in out"}
LAYOUTS = [("data:2;model:2", "rows:data;in:model"), ("fsdp:2", "rows:fsdp;out:fsdp?"), ("model:4", "out:model")]


@jax.custom_vjp
def dense(x, w):
    """A product whose weight learns from rounded inputs."""
    return jnp.tanh(x @ w)


def _dense_forward(x, w):
    y = jnp.tanh(x @ w)
    return y, (x, w, 1 - y * y)


def _dense_backward(kept, dy):
    x, w, slope = kept
    dz = dy * slope
    return dz @ w.T, jnp.round(x * 4).T @ dz / 4


dense.defvjp(_dense_forward, _dense_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def clipped(x, low, high):
    return x


clipped.defvjp(lambda x, low, high: (x, None), lambda low, high, _, dy: (jnp.clip(dy, low, high),))


@jax.custom_vjp
def quantized(x):
    """Rounded to steps of a size that is learnt from their largest."""
    size = jnp.abs(x).max() / 7
    return jnp.round(x / size) * size


quantized.defvjp(
    lambda x: (quantized(x), jnp.abs(x) <= 0.9 * jnp.abs(x).max()),
    lambda inside, dy: (jnp.where(inside, dy, 0.1 * dy),),
)


@jax.custom_vjp
def both(x, which):
    """Two results, a whole number among the operands, and one that gets no gradient."""
    return jnp.sin(x) * which, jnp.floor(x), jnp.argmax(x, -1)


def _both_backward(kept, dys):
    x, which = kept
    return (dys[0] * 2 + dys[1] * jnp.abs(x)) * which, None


both.defvjp(lambda x, which: (both(x, which), (x, which)), _both_backward)


@jax.custom_jvp
def root(x, y):
    return jnp.sqrt(jnp.abs(x)) + y


@functools.partial(root.defjvp, symbolic_zeros=True)
def _root_rule(primals, tangents):
    (x, y), (dx, dy) = primals, tangents
    zero = jax.custom_derivatives.SymbolicZero
    total = 0.0 if isinstance(dx, zero) else dx * jnp.minimum(1 / jnp.sqrt(jnp.abs(x)), 3.0)
    return root(x, y), total + (jnp.zeros_like(x) if isinstance(dy, zero) else 2 * dy)


@jax.custom_vjp
def turned(z):
    return z * (1 + 2j)


turned.defvjp(lambda z: (turned(z), None), lambda _, dz: (dz * (2 - 1j),))


def layers(step: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda x, w: (lax.scan(lambda h, v: (step(h, v), None), x, w)[0] ** 2).sum()


MODELS: dict[str, Callable[[Any, Any], Any]] = {
    "layers": layers(dense),
    "recomputed layers": layers(jax.checkpoint(dense)),
    "layers in a checkpoint": jax.checkpoint(layers(lambda h, v: quantized(dense(h, clipped(v, -0.1, 0.2))))),
    "nested": layers(lambda h, v: jnp.tanh(quantized(clipped(h, -1, 1) @ quantized(v)))),
    "unrolled": lambda x, w: (dense(dense(x, w[0]), w[1]) * dense(x, w[2])).sum(),
    "for each row": lambda x, w: (jax.vmap(lambda h: dense(h[None], w[0])[0])(x) ** 2).sum(),
    "for each layer": lambda x, w: (jax.vmap(quantized)(w) * X[0]).sum() + x.sum(),
    "of a repeated result": lambda x, w: (clipped(jnp.broadcast_to(w[0, 0], x.shape), -0.5, 0.5) * x * x).sum(),
    "of the mean": lambda x, w: (clipped(x.mean(), -0.1, 0.1) * x @ w[0]).sum(),
    "two results": lambda x, w: sum(y.sum() for y in both(x @ w[0], jnp.int32(3))[:2]) + x.sum(),
    "one of two": lambda x, w: (both(x @ w[0], 2)[1] * x).sum(),
    "symbolic zeros": lambda x, w: (root(x, 1.0) @ root(w[0], w[1])).sum(),
    "complex": lambda x, w: (turned(lax.complex(x @ w[0], x)).real * x).sum(),
    "linear call": lambda x, w: (
        jax.custom_derivatives.linear_call(lambda r, v: v @ r, lambda r, dy: 2 * dy @ r.T, W[0], x + w.sum()) * x
    ).sum(),
}


@pytest.mark.parametrize("name", some([*MODELS], ["layers in a checkpoint", "nested", "two results"]))
def test_gradients_are_those_of_the_rules(name: str) -> None:
    function = MODELS[name]
    compared(lambda w, x: function(x, w), W, X, names=NAMES, layouts=LAYOUTS)


def test_a_rule_is_sharded_like_any_code() -> None:
    """Its backward is split, and its sums are reduced, once."""
    graph = mtf.from_jax(lambda w, x: (dense(x, w[0]) ** 2).sum(), W, X, names=NAMES)
    with graph:
        (dw,) = mtf.gradients([graph.loss], [graph.variables["w"].output])
    program = mtf.lower({"dw": dw}, mesh="data:3", layout="rows:data")
    assert [(c.kind, c.axes) for c in program.collectives] == [("all_reduce", ("data",))]


def test_second_derivatives_are_refused() -> None:
    graph = mtf.from_jax(lambda w, x: (dense(x, w[0]) ** 2).sum(), W, X, names=NAMES)
    w = graph.variables["w"].output
    with graph:
        (dw,) = mtf.gradients([graph.loss], [w])
        with pytest.raises(GraphError, match=r"a derivative rule, of which no second derivative.*by jax\.grad"):
            mtf.gradients([mtf.reduce_sum(mtf.square(dw))], [w])
