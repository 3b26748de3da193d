"""`shard_map` inside functions: imported as the global function, with the gradients that JAX gives it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
jnp, lax = jax.numpy, jax.lax

from jax.sharding import AxisType  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import meshlib as mtf  # noqa: E402
from tests.effort import some  # noqa: E402
from tests.jax.importing.checks import compared  # noqa: E402

rng = np.random.default_rng(0)
X = rng.normal(size=(8, 4)).astype(np.float32)
W = rng.normal(size=(4, 6)).astype(np.float32)
NAMES = {"x": "n k", "w": "k m"}
LAYOUTS = [("a:2;b:2", "n:a;k:b"), ("a:2", "m:a"), ("b:2", "k:b")]


def mapped(function: Callable[..., Any], ins: Any, outs: Any, checked: bool = True) -> Callable[..., Any]:
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    return jax.shard_map(function, mesh=mesh, in_specs=ins, out_specs=outs, check_vma=checked)


@jax.custom_vjp
def copied(x):
    """Before a product that is split by columns: its cotangents are summed."""
    return x


@jax.custom_vjp
def summed(x):
    """After a product that is split by rows."""
    return lax.psum(x, "b")


copied.defvjp(lambda x: (x, None), lambda _, dy: (lax.psum(dy, "b"),))
summed.defvjp(lambda x: (lax.psum(x, "b"), None), lambda _, dy: (dy,))
BOTH, ROWS = P("a", "b"), (P("a", "b"), P("b", None))


def looped(x, w):
    def step(h, v):
        return jnp.tanh(lax.psum(h @ v, "b"))[:, :2] + lax.pcast(0.0, ("b",), to="varying"), None

    return lax.scan(step, x, jnp.stack([w, w * 2]))[0]


def collectives(x, w):
    y = lax.ppermute(lax.psum(x @ w, "b"), "a", [(0, 1), (1, 0)])
    z = lax.all_gather(y, "a", axis=0, tiled=True) * (lax.axis_index("b") + 1)
    return y, lax.psum_scatter(z, "b", scatter_dimension=0, tiled=True)


def experts(x, w):
    """Each block of axis `b` has half of the experts; rows of others are last, in no group."""
    own = jnp.arange(len(x)) % 4 - 2 * lax.axis_index("b")
    own = jnp.where((own >= 0) & (own < 2), own, 2)
    order = jnp.argsort(own)
    y = lax.ragged_dot(x[order], w, jnp.bincount(own, length=3)[:2])[jnp.argsort(order)]
    return lax.psum(y, "b")


def megatron(first: Callable[[Any], Any], last: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    specs = (P("a"), P(None, "b"), P("b", None))
    f = mapped(lambda x, w, v: last(jnp.tanh(first(x) @ w) @ v), specs, P("a"), checked=False)
    return lambda w, x: (f(x, w, w.T) ** 2).sum()


CASES: dict[str, Callable[[], Callable[[Any, Any], Any]]] = {
    "product": lambda: lambda w, x: (mapped(lambda x, w: lax.psum(x @ w, "b"), ROWS, P("a"))(x, w) ** 2).sum(),
    "collectives": lambda: (
        lambda w, x: sum((y**2).sum() for y in mapped(collectives, ROWS, (P("a"), P("b")), checked=False)(x, w))
    ),
    "loop": lambda: lambda w, x: (mapped(looped, ROWS, BOTH)(x, w) ** 2).sum(),
    "shift": lambda: lambda w, x: (mapped(lambda x: lax.ppermute(x, "a", [(0, 1)]), BOTH, BOTH)(x) ** 2 @ w).sum(),
    "all_to_all": lambda: (
        lambda w, x: (
            jnp.sin(mapped(lambda x: lax.all_to_all(x, "a", 1, 0, tiled=True), P("a"), P("a"))(x)).sum(0) @ w[:2]
        ).sum()
    ),
    "experts": lambda: (
        lambda w, x: (
            mapped(experts, (P("a"), P("b")), P("a"), checked=False)(x, jnp.stack([w, w * w, jnp.sin(w), w * 2])) ** 2
        ).sum()
    ),
    "in jit, with maxima": lambda: jax.jit(
        lambda w, x: (mapped(lambda x: x / lax.pmax(lax.stop_gradient(x.max()), ("a", "b")), BOTH, BOTH)(x) @ w).sum()
    ),
    "both axes on one": lambda: lambda w, x: (mapped(lambda x: x * x.sum(), P(("b", "a")), P(("b", "a")))(x) @ w).sum(),
    "column and row, with rules": lambda: megatron(copied, summed),
    "row, with a rule": lambda: megatron(lambda x: x, summed),
    "column, with a rule": lambda: megatron(copied, lambda y: lax.psum(y, "b")),
}


@pytest.mark.parametrize("name", some([*CASES], ["collectives", "experts", "column and row, with rules"]))
def test_as_jax(name: str) -> None:
    compared(CASES[name](), W, X, names=NAMES, layouts=LAYOUTS)


def test_an_ambient_mesh_needs_no_devices_and_its_axes_are_constraints() -> None:
    def loss(w, x):
        return (jax.shard_map(lambda x, w: lax.psum(x @ w, "b"), in_specs=ROWS, out_specs=P("a"))(x, w) ** 2).sum()

    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((2, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)):
        graph = mtf.from_jax(loss, W, X, names=NAMES, constraints=True)
    assert [str(c.rules) for c in graph.constraints] == ["n:a;k:b", "k:b"]
    program = mtf.lower(graph.outputs, mesh="a:2;b:2")
    assert [(c.kind, c.axes) for c in program.collectives] == [("all_reduce", ("b",)), ("all_reduce", ("a",))]


def test_types_that_name_explicit_axes() -> None:
    """Arguments keep them, as under `jit`; blocks of a `shard_map` have none, nor has what is rewritten."""
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)

    def body(x, w):
        y = lax.ragged_dot(x.reshape(2, -1, 4).reshape(-1, 4), w, jnp.array([1, len(x) - 1]))
        return lax.psum(y, "b")

    def loss(w, x):
        x = lax.with_sharding_constraint(lax.cond(x.sum() > 0, lambda x: 2 * x, lambda x: x, x), P("a", None))
        x = jax.sharding.reshard(jnp.tanh(jax.sharding.reshard(x, P(None, "b"))), P("a", None))
        both = jnp.stack([w, 2 * w])
        return (
            jax.shard_map(body, in_specs=(P("a", None), P()), out_specs=P("a"), check_vma=False)(x, both) ** 2
        ).sum()

    w, x = (jax.device_put(v, jax.NamedSharding(mesh, spec)) for v, spec in ((W, P()), (X, P("a", None))))
    with jax.set_mesh(mesh):
        graph = compared(loss, w, x, names=NAMES, layouts=LAYOUTS[:1])
    assert [str(c.rules) for c in graph.constraints][:2] == ["k:b", "n:a"]


def test_constants_of_the_body_bear_no_mesh() -> None:
    """As those of jitted functions of JAX's own, under a mesh that is set."""
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)

    def body(x):
        whole = jnp.argmax(x, -1, keepdims=True) // 2 + lax.axis_index("a") % 2
        return x * whole.astype(x.dtype)

    def loss(w, x):
        return (jax.shard_map(body, in_specs=BOTH, out_specs=BOTH)(x) @ w).sum()

    with jax.set_mesh(mesh):
        compared(loss, W, X, names=NAMES, layouts=LAYOUTS[:1])
