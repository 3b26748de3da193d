"""Derivative rules that are not the derivative of the forward are imported with it, whatever is around them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
jnp, lax = jax.numpy, jax.lax

import meshlib as mtf  # noqa: E402
from meshlib.jax.importing.code import NotImported  # noqa: E402
from tests.effort import some  # noqa: E402
from tests.jax.importing.checks import compared  # noqa: E402

X, Y = np.random.default_rng(0).normal(size=(2, 4, 3)).astype(np.float32)


@jax.custom_vjp
def rounded(x):
    """Straight through."""
    return jnp.round(x)


rounded.defvjp(lambda x: (jnp.round(x), None), lambda _, dy: (dy,))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def clipped(x, limit):
    """The identity, whose gradient is clipped."""
    return x


clipped.defvjp(lambda x, limit: (x, None), lambda limit, _, dy: (jnp.clip(dy, -limit, limit),))


@jax.custom_gradient
def reversed_gradient(x):
    return x, lambda dy: (-dy,)


@jax.custom_jvp
def spike(x):
    """A step with a surrogate slope."""
    return (x > 0).astype(x.dtype)


spike.defjvps(lambda dx, y, x: dx / (1 + jnp.abs(x)) ** 2)


@jax.custom_jvp
def square(x):
    return x * x


@square.defjvp
def _square_rule(primals, tangents):
    return primals[0] ** 2, 3 * primals[0] * tangents[0]


flat_relu = jax.custom_jvp(jax.nn.relu.fun)  # a function of JAX's, with a rule that is not
flat_relu.defjvp(lambda primals, tangents: (jax.nn.relu(*primals), jnp.zeros_like(primals[0])))

OF_ITS_OWN = {
    "rounded": rounded,
    "clipped": lambda x: clipped(x, 0.1),
    "reversed_gradient": reversed_gradient,
    "spike": spike,
    "square": square,
    "flat_relu": flat_relu,
}
AROUND: dict[str, Callable[[Any], Any]] = {
    "itself": lambda f: f,
    "under jit": jax.jit,
    "for each row": jax.vmap,
    "in a checkpoint": jax.checkpoint,
    "in a loop": lambda f: lambda x: lax.scan(lambda carry, row: (carry, f(row)), 0.0, x)[1],
    "in a branch": lambda f: lambda x: lax.cond(x.sum() > 0, f, lambda y: y, x),
}


LAYOUTS = [("rows:2;cols:3", "rows:rows;cols:cols")]
TRIED = ["rounded-in a loop", "clipped-for each row", "square-in a checkpoint"]
CASES = {f"{name}-{around}": (name, around) for name in OF_ITS_OWN for around in AROUND}


@pytest.mark.parametrize("case", some([*CASES], TRIED))
def test_its_gradient_is_that_of_its_rule(case: str) -> None:
    name, around = CASES[case]
    function = AROUND[around](OF_ITS_OWN[name])
    compared(lambda w: (function(w * 2) * Y).sum(), X, names={"w": "rows cols"}, layouts=LAYOUTS)


def test_of_what_a_loop_or_a_branch_makes_of_arguments_that_it_closes_over() -> None:
    """The loop's carry starts at zeros, and the branch is chosen by a counter: neither is an argument by itself."""

    def loss(w):
        looped, _ = lax.scan(lambda carry, _: (carry + w, None), jnp.zeros_like(w), None, length=2)
        count = lax.fori_loop(0, 3, lambda n, c: c + (w.sum() > n), 0)
        return ((rounded(looped) + rounded(lax.switch(count, [jnp.sin, jnp.cos], w))) * Y).sum()

    compared(loss, X, names={"w": "rows cols"})


def test_without_its_rule_it_is_imported() -> None:
    compared(lambda w: (rounded.fun(w) * w).sum(), X, names={"w": "rows cols"})


def test_rules_of_jax_are_those_of_the_forward() -> None:
    def loss(w):
        y = jax.nn.relu(w) + jax.nn.relu6(w) + jnp.logaddexp(w, 2 * w) + jnp.sinc(w) + jax.nn.silu(w)
        return (y * jax.nn.softmax(w) + jax.scipy.special.xlogy(w * w, w * w + 1)).sum()

    compared(loss, X, names={"w": "rows cols"})


def test_a_gradient_that_jax_took_has_followed_the_rule() -> None:
    """What is imported is then the rule itself."""

    def loss(w):
        return (jax.grad(lambda v: (reversed_gradient(v) ** 2).sum())(w) * w).sum()

    graph = mtf.from_jax(loss, X)
    made = mtf.simulate(mtf.lower(graph.outputs)).step(graph.feeds(X))["output"]
    np.testing.assert_allclose(made, -2 * (X**2).sum(), rtol=1e-5)


def test_what_does_not_depend_on_an_argument_has_no_gradient() -> None:
    mtf.from_jax(lambda w: (w * rounded(jnp.arange(3.0))).sum(), X)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def called(function, x):
    """A function of x, with a rule for x alone."""
    return function(x)


called.defvjp(lambda function, x: (function(x), None), lambda function, _, dy: (dy,))


def test_a_constant_operand_is_not_perturbed() -> None:
    """Rules with symbolic zeros ask; Equinox's assert it of operands without a gradient."""

    @jax.custom_vjp
    def scaled(x, by):
        return x * by

    def forward(x, by):
        assert (x.perturbed, by.perturbed) == (True, False)
        return x.value * by.value, None

    scaled.defvjp(forward, lambda _, dy: (3 * dy, None), symbolic_zeros=True)
    compared(lambda x: scaled(x, jnp.float32(2)).sum(), X)
    with pytest.raises(NotImported, match="derivative rule can't be traced: assert"):
        mtf.from_jax(lambda x: scaled(jnp.float32(2), x).sum(), X)


def test_a_rule_that_says_nothing_of_what_its_function_closes_over() -> None:
    """JAX refuses to differentiate by it, too."""
    compared(lambda w: (called(lambda x: x * Y, w) ** 2).sum(), X, names={"w": "rows cols"})
    with pytest.raises(NotImported, match=r"called \(test_custom_rules.py:\d+\): it closes over a value .* pass that"):
        mtf.from_jax(lambda w, y: (called(lambda x: x * y, w) ** 2).sum(), X, Y)


def test_a_rule_that_reads_values_of_the_enclosing_function() -> None:
    def loss(w, y):
        steep = jax.custom_jvp(lambda x: x * 2)
        steep.defjvp(lambda primals, tangents: (steep(*primals), tangents[0] * y.sum()))
        return steep(w).sum()

    with pytest.raises(NotImported, match=r"rule can't be traced: it closes over a value .* pass that"):
        mtf.from_jax(loss, X, Y)
