"""Stencils that cut ranges and put them back together: values as JAX's, and the rows that cross the ends of blocks."""

from __future__ import annotations

import pytest

pytest.importorskip("jax")

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import meshlib as mtf
from tests.effort import some
from tests.jax.importing.checks import compared

X, Y = 16, 8  # rows over four devices, 4 each


def dirichlet(u):
    return jnp.concatenate([u[:1], u[1:-1] + 0.1 * (u[2:] - 2 * u[1:-1] + u[:-2]), u[-1:]])


def staggered(u):
    flux = 0.5 * (u[1:] + u[:-1]) * (u[1:] - u[:-1])
    return u.at[1:-1].add(flux[1:] - flux[:-1])


def padded(mode):
    def step(u):
        p = jnp.pad(u, ((1, 1), (0, 0)), mode=mode)
        return u + 0.1 * (p[2:] - 2 * u + p[:-2])

    return step


def five_points(u):
    return u.at[1:-1, 1:-1].set(0.25 * (u[2:, 1:-1] + u[:-2, 1:-1] + u[1:-1, 2:] + u[1:-1, :-2]))


STEPS = {  # a step, and the rows that a device sends
    "boundary values": (dirichlet, 2),
    "differences of fluxes": (staggered, 2),
    "padded by the other end": (padded("wrap"), 2),
    "padded by the edges": (padded("edge"), 2),
    "padded by reflection": (padded("reflect"), 2),
    "padded by zeros": (padded("constant"), 2),
    "padded by a number": (lambda u: jnp.pad(u[1:-1] - u[:-2], ((1, 1), (0, 0)), constant_values=2.5), 1),
    "in two dims": (five_points, 2),
    "negative mirror": (lambda u: jnp.concatenate([-u[0][None], u[1:-1] * u[2:], 3 * u[-1:]]), 1),
    "slice of a slice": (lambda u: u.at[2:-2].mul(u[1:-1][1:-1] + u[:-1][3:]), 1),
    "square root at zero": (lambda u: u.at[1:-1].set(jnp.sqrt(jnp.square(u[2:] - u[:-2]) + 1e-3)), 2),
    "logarithm": (lambda u: u.at[1:-1].set(jnp.log(jnp.abs(u[2:]) + 0.0)), 1),
    "quotient": (lambda u: u.at[:-1].set(u[:-1] / u[1:]), 1),
    "positions": (lambda u: u.at[1:-1].add(jnp.arange(X - 2)[:, None] * u[2:]), 1),
    "known numbers": (lambda u: u.at[1:-1].add(np.linspace(0, 1, X - 2)[:, None].astype("float32") * u[2:]), 1),
    "running window": (lambda u: lax.reduce_window(u, -jnp.inf, lax.max, (3, 1), (1, 1), "SAME"), 2),
    "gradient": (lambda u: jnp.gradient(u, axis=0), 2),
    "chosen by value": (lambda u: jnp.concatenate([u[:1], jnp.where(u[1:-1] > 0, u[2:], u[:-2]), u[-1:]]), 2),
}
FEW = ["differences of fluxes", "padded by the other end", "padded by reflection", "in two dims", "logarithm"]


@pytest.mark.parametrize("name", some([*STEPS], FEW))
def test_ranges_send_what_passes_the_ends_of_blocks(name):
    step, rows = STEPS[name]
    u = jnp.asarray(np.random.default_rng(0).uniform(0.5, 1, (X, Y)) * np.array([1, -1] * (X // 2))[:, None], "float32")
    graph = mtf.from_jax(lambda u: step(u), u, names={"u": "x y"}, argnums=())
    (value,) = graph.outputs.values()
    with graph:
        (slope,) = mtf.gradients([mtf.reduce_sum(value * mtf.square(value))], [graph.inputs["u"].output])
    program = mtf.lower({"value": value}, mesh="m:4", layout="x:m")
    assert program.sent_bytes == rows * Y * 4, mtf.collectives_table(program.collectives)
    program = mtf.lower({"value": value, "slope": slope}, mesh="m:4;n:2", layout="x:m;y:n")
    have = mtf.simulate(program, check_nan=False).step(**graph.feeds(u))
    value, slope = jax.jit(lambda u: (step(u), jax.grad(lambda u: jnp.sum(step(u) ** 3))(u)))(u)
    np.testing.assert_allclose(have["value"], value, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(have["slope"], slope, rtol=1e-4, atol=1e-4)


def test_halves_that_are_joined_again_stay_halves():
    """As in rotary embeddings: computed over the whole axis, they would take twice the work."""

    def rotated(x):
        a, b = x[:, : Y // 2], x[:, Y // 2 :]
        return jnp.concatenate([-b, a * 2], 1)

    graph = mtf.from_jax(rotated, jnp.zeros((X, Y)), names={"x": "x y"}, argnums=())
    program = mtf.lower(graph.outputs)
    sizes = [i.outputs[0].tensor.shape.size for i in program.instructions if i.opcode in ("negative", "multiply")]
    assert sizes == [X * Y // 2] * 2


def test_of_a_padded_array_nothing_but_padding_is_read() -> None:
    def loss(u):
        return (jnp.pad(u, ((X, 0), (0, 0)), constant_values=2.0)[:X] * u**2).sum()

    compared(loss, np.linspace(-1, 1, X * Y, dtype="f").reshape(X, Y), names={"u": "x y"}, layouts=[("p:4", "x:p")])
