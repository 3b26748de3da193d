"""Loops within loops whose trips follow from the counter around, as in attention block by block."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
jnp, lax = jax.numpy, jax.lax

import meshlib as mtf  # noqa: E402
from meshlib.jax.importing.code import NotImported  # noqa: E402
from tests.effort import some  # noqa: E402
from tests.jax.importing.checks import compared  # noqa: E402

rng = np.random.default_rng(0)
Q, K, V = rng.normal(size=(3, 2, 8, 4)).astype(np.float32)
BLOCK, BLOCKS = 2, 4


def attention(q: Any, k: Any, v: Any) -> Any:
    """Causal attention: each block of queries goes over the blocks of keys up to its own."""

    def of_queries(state: Any) -> Any:
        i, out = state
        q_i = lax.dynamic_slice_in_dim(q, i * BLOCK, BLOCK, 1)

        def of_keys(held: Any) -> Any:
            j, high, total, y = held
            k_j, v_j = (lax.dynamic_slice_in_dim(x, j * BLOCK, BLOCK, 1) for x in (k, v))
            rows, columns = i * BLOCK + jnp.arange(BLOCK), j * BLOCK + jnp.arange(BLOCK)
            s = jnp.where(rows[:, None] >= columns, jnp.einsum("bqd,bkd->bqk", q_i, k_j), -1e9)
            new = jnp.maximum(high, s.max(-1))
            p, still = jnp.exp(s - new[..., None]), jnp.exp(high - new)
            return j + 1, new, still * total + p.sum(-1), still[..., None] * y + jnp.einsum("bqk,bkd->bqd", p, v_j)

        begin = (0, jnp.full(q_i.shape[:2], -1e9), jnp.zeros(q_i.shape[:2]), jnp.zeros_like(q_i))
        _, _, total, y = lax.while_loop(lambda held: held[0] < jnp.minimum(i + 1, BLOCKS), of_keys, begin)
        return i + 1, lax.dynamic_update_slice_in_dim(out, y / total[..., None], i * BLOCK, 1)

    return lax.while_loop(lambda state: state[0] < BLOCKS, of_queries, (0, jnp.zeros_like(q)))[1]


def whole(q: Any, k: Any, v: Any) -> Any:
    scores = jnp.where(np.tril(np.ones((8, 8), bool)), jnp.einsum("bqd,bkd->bqk", q, k), -1e9)
    return jax.nn.softmax(scores) @ v


@jax.custom_vjp
def ruled(q: Any, k: Any, v: Any) -> Any:
    return attention(q, k, v)


ruled.defvjp(lambda *operands: (attention(*operands), operands), lambda operands, dy: jax.vjp(whole, *operands)[1](dy))


def by_counter(q: Any, k: Any, v: Any) -> Any:
    """Where the loop around is a `fori_loop`, of which the inner one runs backwards in it."""

    def outer(i: Any, y: Any) -> Any:
        def inner(held: Any) -> Any:
            j, y = held
            return j - 1, y + jnp.tanh(q * k[:, :1]) * v / (1 + j.astype("float32"))

        return lax.while_loop(lambda held: held[0] > (i * 2) // 3, inner, (5 - i, y))[1]

    return lax.fori_loop(0, 4, outer, q)


def by_slices(q: Any, k: Any, v: Any) -> Any:
    """Where the trips follow from what a scan goes over, last first."""

    def outer(y: Any, n: Any) -> Any:
        return lax.fori_loop(0, 5 - n, lambda j, y: jnp.tanh(y * k[:, :1]) * v / (1 + j), y), n

    return lax.scan(outer, q, jnp.arange(4) * 2 - 3, reverse=True)[0]


CASES = {
    "attention": (attention, False),
    "attention with a rule": (ruled, True),
    "by a counter": (by_counter, False),
    "by slices": (by_slices, False),
}


@pytest.mark.parametrize("name", some([*CASES], ["attention with a rule", "by slices"]))
def test_as_jax(name: str) -> None:
    function, gradients = CASES[name]  # JAX does not differentiate a `while` whose trips it does not know

    def loss(q: Any, k: Any, v: Any) -> Any:
        return (function(q, k, v) ** 2).sum()

    layouts = [("data:2", "batch:data"), ("model:4", "d:model")]
    compared(loss, Q, K, V, names={"q": "batch length d"}, layouts=layouts, gradients=gradients)


def test_what_depends_on_data_is_refused_still() -> None:
    def loss(q: Any) -> Any:
        def outer(i: Any, y: Any) -> Any:
            return lax.while_loop(lambda y: y.sum() < i.astype("float32"), lambda y: y * 2, y)

        return lax.fori_loop(0, 4, outer, q).sum()

    with pytest.raises(NotImported, match=r"while \(test_blockwise\.py:\d+\): a loop whose number of trips depends on"):
        mtf.from_jax(loss, Q)
