"""Integers bit by bit: logic, shifts, the bits of floats, and arguments and results of uint32."""

from __future__ import annotations

import numpy as np
import pytest

import meshlib as mtf
from tests.jax.importing.checks import compared

jax = pytest.importorskip("jax")
jnp, lax = jax.numpy, jax.lax
rng = np.random.default_rng(11)
WORDS = rng.integers(-(2**31), 2**31, (2, 4, 6)).astype(np.int32)
DTYPES = ["int8", "uint8", "int16", "uint16", "int32", "uint32"]
LAYOUT = [("rows:2;cols:2", "x_0:rows;x_1:cols")]
FLOATS = np.array([[1.5, -0.0, 3e38, -1e-30], [-2.75, 1.0, 0.0, 7e20]], np.float32)


def of(function, *xs, close=0.0):
    """`function` on inputs, to the last bit by default, beside a loss of a parameter."""

    def run(w, x, *more):
        return w.sum(), function(x, *more)

    compared(run, np.ones(2, np.float32), *xs, layouts=LAYOUT, gradients=False, loss_close=close)


def many(function):
    """`function` on integers of all dtypes, and a count of bits up to beyond the dtype."""

    def run(x, y):
        results = []
        for dtype in DTYPES:
            a, b = x.astype(dtype), y.astype(dtype)
            results += function(a, b, (y % 35 - 1).astype(dtype))
        return results

    return run


def test_logic_and_shifts_of_every_dtype() -> None:
    of(many(lambda a, b, n: [a & b, a | b, a ^ b, ~a, a & 12, 5 | a, a << n, a >> n, a << 3, a >> 7]), *WORDS)


def test_logical_shifts_and_counts_of_bits() -> None:
    # Without optimisation XLA on CPUs counts -32 leading zeros of a negative number.
    of(many(lambda a, b, n: [lax.shift_right_logical(a, n), lax.population_count(a), lax.clz(a & 63)]), *WORDS)


def test_bits_of_floats() -> None:
    def run(x):
        narrow = x.astype("bfloat16")
        bits = lax.bitcast_convert_type(narrow, jnp.uint16)
        words = lax.bitcast_convert_type(x, jnp.uint32)
        return (
            words,
            lax.bitcast_convert_type(x, jnp.int32) >> 23,
            bits,
            lax.bitcast_convert_type(bits & jnp.uint16(0xFFF0), jnp.bfloat16).astype("float32"),
            lax.bitcast_convert_type(words ^ jnp.uint32(2**31), jnp.float32),
            jnp.nextafter(x, -x), jnp.nextafter(x, x), jnp.frexp(x), jnp.signbit(narrow),
        )  # fmt: skip

    of(run, FLOATS)


def test_reductions_by_bits_and_by_any_function() -> None:
    def run(x):
        floats = jnp.sin(x.astype("float32"))
        pairs = lax.reduce(
            (floats, x), (np.float32(-2), np.int32(7)),
            lambda a, b: tuple(jnp.where(a[0] > b[0], u, v) for u, v in zip(a, b, strict=True)), (1,),
        )  # fmt: skip
        window = lax.reduce_window(floats, np.float32(0), lambda a, b: a + b - a * b, (2, 3), (1, 2), "SAME")
        every = [f.reduce(x, axis=n) for n, f in ((0, jnp.bitwise_and), (1, jnp.bitwise_or), (0, jnp.bitwise_xor))]
        return (*every, *pairs, window, lax.reduce(floats, np.float32(3), jnp.logaddexp, (0, 1)))

    of(run, WORDS[0], close=1e-5)


def test_words_of_arguments_and_results_keep_their_dtype() -> None:
    words = WORDS[0].view(np.uint32)
    graph = mtf.from_jax(lambda w, x: x ^ w["mask"], {"mask": words[0]}, words, names={"x": "rows cols"})
    program = mtf.lower(graph.outputs, mesh="m:2", layout="rows:m")
    run = mtf.simulate(program)
    (result,) = graph.to_jax(run.step(**graph.feeds(None, words))).values()
    assert result.dtype == np.uint32
    np.testing.assert_array_equal(result, words ^ words[0])
    np.testing.assert_array_equal(graph.to_jax({"w/mask": run.state["w/mask"]})["w/mask"], words[0])


def test_hash_encoding_trains_its_table() -> None:
    def loss(table, points):  # T. Müller et al., Instant Neural Graphics Primitives (2022), equation 4
        cell = jnp.floor(points * 8).astype(jnp.uint32)
        hashed = cell[:, 0] ^ (cell[:, 1] * jnp.uint32(2654435761)) ^ (cell[:, 2] * jnp.uint32(805459861))
        return jnp.mean((table[hashed % jnp.uint32(16)] - points @ jnp.ones((3, 4))) ** 2)

    table, points = rng.normal(size=(16, 4)).astype(np.float32), rng.random((12, 3)).astype(np.float32)
    compared(loss, table, points, layouts=[("rows:2;cols:2", "points_0:rows;table_1:cols")])
