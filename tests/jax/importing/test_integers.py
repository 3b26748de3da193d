"""Integers of few bits and without a sign: an imported function wraps, saturates and compares as JAX does."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import meshlib as mtf
from tests.jax.importing.checks import compared

RNG = np.random.default_rng(5)
X = RNG.normal(0, 120, (4, 8)).astype(np.float32)
I = RNG.integers(0, 200, (4, 8)).astype(np.int32)  # noqa: E741
LOWEST = jnp.int32(-(2**31))


def _unsigned(i):
    return i.astype("uint32") - jnp.uint32(100)


def short(x, i):
    a, b = i.astype("int8"), i.astype("uint8")
    return {
        "from floats": [x.astype(d) for d in ("int8", "uint8", "int4")] + [(x * 1e3).astype("int16")],
        "sums": [a + a, b - 100, (b * b) >> 2, i.astype("int16") * jnp.int16(300), jnp.cumsum(a, 1, dtype="int8")],
        "reductions": [a.sum(1), a.sum(1, dtype="int8"), b.prod(1, dtype="uint8")],
        "products": [a @ a.T, lax.dot_general(a, a, (((1,), (1,)), ((), ())), preferred_element_type="int32")],
        "bits": [~b, a << 3, a >> 2, lax.shift_right_logical(a, jnp.int8(3)), (i - 100) & 0x7FFFFFFF],
        "scattered": jnp.zeros((4, 8), "uint8").at[i[:, 0] % 4].add(jnp.uint8(200)),
        "known": jnp.array([300.0, -5, 1e10, 3.7] * 2).astype("uint8") + b,
    }


def unsigned(x, i):
    u = _unsigned(i)
    high = jnp.uint32(0xF0000000)
    return {
        "order": [u < 50, jnp.minimum(u, high), u.max(1), jnp.argmax(u, 1), jnp.sort(u, 1), jnp.clip(u, 5, high)],
        "quotients": [u // 3, u % 7, u // u[::-1], high // jnp.maximum(u, 1), u // jnp.uint32(0x80000001)],
        "floats": [u.astype("float32"), (x * 1e8).astype("uint32"), (i - 100).astype("uint32") % 7],
        "hash": ((u * jnp.uint32(0x9E3779B9) + jnp.uint32(0x85EBCA6B)) >> 8).astype("float32") / 2**24,
    }


def signed(x, i):
    low, y = jnp.where(i > 100, LOWEST, i - 100), jnp.where(i > 50, -7, 5)
    return [lax.div(low, 7), lax.rem(low, 7), lax.div(i - 100, y), lax.rem(i - 100, y), (x * 1e9).astype("int32") // 2]


@pytest.mark.parametrize("function", [short, unsigned, signed])
def test_integers(function):
    def bits(x, i):  # results of uint32 are int32 of the same bits
        return jax.tree.map(lambda y: y.astype("int32"), function(x, i))

    layouts = [("data:2", "batch:data")]
    compared(bits, X, I, names={"x": "batch d", "i": "batch d"}, layouts=layouts, gradients=False)


def test_quantised_activations_are_stored_in_eight_bits():
    graph = mtf.from_jax(lambda x: jnp.clip(jnp.round(x), -127, 127).astype("int8").astype("float32"), X, argnums=())
    (result,) = graph.outputs.values()
    assert result.operation.inputs[0].dtype.name == "int8"


@pytest.mark.parametrize("wrapped", [False, True])
def test_words_are_keys_where_draws_read_them(wrapped):
    """Raw keys are uint32[2]; so are two tokens."""

    def function(table, tokens, key):
        def drawn(tokens, key):
            return table[tokens] + jax.random.uniform(key, (4, 2, 3))

        return (jax.jit(drawn) if wrapped else drawn)(tokens, key)

    tokens = RNG.integers(0, 6, (4, 2)).astype(np.uint32)
    table, key = np.arange(18, dtype=np.float32).reshape(6, 3), jax.random.PRNGKey(0)
    graph = mtf.from_jax(function, table, tokens, key)
    assert [*graph.inputs] == ["tokens"]
    y = mtf.simulate(mtf.lower(graph.outputs)).step(graph.feeds(table, tokens, key))["output"]
    np.testing.assert_array_equal(np.floor(y.reshape(4, 2, 3)), table[tokens])
