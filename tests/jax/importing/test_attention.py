"""Attention written out in many ways is the kernel that it is; what is none stays as it is written."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshlib as mtf
from tests.jax.importing.checks import compared
from tests.jax.importing.models import weights

B, L, H, D = 2, 8, 4, 4
LAYOUT = [("data:2;model:2", "batch:data;heads:model")]
CAUSAL = np.tri(L, dtype=bool)
PADDING = np.arange(L) < np.array([[8], [5]])


def qkv(x, w, order="blhd"):
    return (jnp.einsum(f"blm,mhd->{order}", x, w[n]) for n in "qkv")


def plain(x, w):
    q, k, v = qkv(x, w)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) * D**-0.5), v)


def causal_by_positions(x, w):
    q, k, v = qkv(x, w, "bhld")
    i = jnp.arange(L)
    scores = jnp.where(i[:, None] >= i[None, :], (q / math.sqrt(D)) @ k.transpose(0, 1, 3, 2), jnp.finfo(x.dtype).min)
    return (jax.nn.softmax(scores, axis=-1) @ v).transpose(0, 2, 1, 3)


def causal_by_array(x, w):
    q, k, v = qkv(x, w)
    scores = jnp.where(CAUSAL[None, None], jnp.einsum("bqhd,bkhd->bhqk", q, k), -1e10)
    e = jnp.exp(scores - jax.lax.stop_gradient(jnp.max(scores, -1, keepdims=True)))
    return jnp.einsum("bhqk,bkhd->bqhd", e / jnp.sum(e, -1, keepdims=True), v)


def causal_by_bias(x, w):
    q, k, v = qkv(x, w)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / D
    scores = scores + jnp.where(jnp.tril(jnp.ones((L, L), bool)), 0.0, -jnp.inf)
    logs = jax.nn.log_softmax(scores, -1)
    return jnp.einsum("bhqk,bkhd->bqhd", jnp.exp(logs), v)


def window(x, w):
    q, k, v = qkv(x, w)
    i, j = jnp.arange(L)[:, None], jnp.arange(L)[None, :]
    seen = (i >= j) & (i - j < 3)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.where(seen, jnp.einsum("bqhd,bkhd->bhqk", q, k), -1e9)), v)


def window_by_array(x, w):
    q, k, v = qkv(x, w)
    seen = np.tri(L, dtype=bool) & ~np.tri(L, k=-3, dtype=bool)
    return jnp.einsum(
        "bhqk,bkhd->bqhd", jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) + np.where(seen, 0, -1e9)), v
    )


def causal_by_factors(x, w):
    q, k, v = qkv(x, w)
    seen = jnp.tril(jnp.ones((L, L)))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * seen - 1e10 * (1 - seen)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


def padded(x, w):
    q, k, v = qkv(x, w)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) + (1.0 - PADDING[:, None, None, :].astype("float32")) * -1e9
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


def causal_and_padded(x, w):
    q, k, v = qkv(x, w)
    seen = jnp.tril(jnp.ones((L, L), bool))[None, None] & PADDING[:, None, None, :]
    scores = jnp.where(seen, jnp.einsum("bqhd,bkhd->bhqk", q, k), -1e9)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


def grouped(x, w):
    q, k, v = qkv(x, w)
    k, v = k[:, :, :2], v[:, :, :2]
    scores = jnp.einsum("bqhgd,bkhd->bhgqk", q.reshape(B, L, 2, 2, D), k)
    return jnp.einsum("bhgqk,bkhd->bqhgd", jax.nn.softmax(scores), v).reshape(B, L, H, D)


def one_head_of_keys(x, w):
    q, k, v = qkv(x, w)
    scores = jnp.einsum("bqhd,bkd->bhqk", q, k[:, :, 0])
    return jnp.einsum("bhqk,bkd->bqhd", jax.nn.softmax(scores), v[:, :, 0])


def jax_nn(x, w):
    return jax.nn.dot_product_attention(*qkv(x, w), is_causal=True)


def vmapped(x, w):
    def one_head(q, k, v):
        return jax.nn.softmax(q @ k.T / D) @ v

    q, k, v = qkv(x, w, "bhld")
    return jax.vmap(jax.vmap(one_head))(q, k, v).transpose(0, 2, 1, 3)


def keys_first(x, w):
    q, k, v = qkv(x, w)
    scores = jnp.einsum("bkhd,bqhd->bhkq", k, q)
    return jnp.einsum("bhkq,bkhd->bqhd", jax.nn.softmax(scores, axis=2), v)


def causal_and_masked_again(x, w):
    q, k, v = qkv(x, w)
    seen = jnp.tril(jnp.ones((L, L), bool))
    p = jax.nn.softmax(jnp.where(seen, jnp.einsum("bqhd,bkhd->bhqk", q, k), -1e9))
    return jnp.einsum("bhqk,bkhd->bqhd", jnp.where(jnp.tril(jnp.ones((L, L), bool)), p, 0), v)


FUSED = {
    plain: (False, None),
    causal_by_positions: (True, None),
    causal_by_array: (True, None),
    causal_by_bias: (True, None),
    window: (True, 3),
    window_by_array: (True, 3),
    causal_by_factors: (True, None),
    padded: (False, None),
    causal_and_padded: (True, None),
    grouped: (False, None),
    one_head_of_keys: (False, None),
    jax_nn: (True, None),
    vmapped: (False, None),
    keys_first: (False, None),
    causal_and_masked_again: (True, None),
}


def imported(attend):
    def loss(params, x):
        return jnp.sum(jnp.cos(jnp.einsum("blhd,hdm->blm", attend(x, params), params["o"])))

    params = {**{n: weights(16, H, D) for n in "qkv"}, "o": weights(H, D, 16)}
    names = {"x": "batch length d_model"}
    if attend not in (grouped, one_head_of_keys):
        names["params.q"] = "d_model heads head_dim"
    layouts = LAYOUT if len(names) == 2 else [("data:2", "batch:data")]
    # The gradients of the kernel are tested elsewhere.
    return compared(
        loss,
        params,
        weights(B, L, 16),
        names=names,
        layouts=layouts,
        gradients=attend is grouped or attend in NOT_FUSED,
    )


@pytest.mark.parametrize("attend", FUSED, ids=lambda f: f.__name__)
def test_recognised(attend):
    graph = imported(attend)
    (found,) = [op for op in graph.operations if op.opdef.name in ("attention", "attention_window")]
    assert (found.attrs["causal"], found.attrs["window"]) == FUSED[attend]
    assert (found.attrs["length"], found.attrs["memory_length"]) == ("length", "memory_length")
    assert len(found.inputs) == (4 if "padded" in attend.__name__ else 3)


def with_bias(x, w):
    q, k, v = qkv(x, w)
    distance = jnp.arange(L)[:, None] - jnp.arange(L)[None, :]
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) - 0.1 * distance**2), v)


def capped(x, w):
    q, k, v = qkv(x, w)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.tanh(jnp.einsum("bqhd,bkhd->bhqk", q, k))), v)


def without_softmax(x, w):
    q, k, v = qkv(x, w)
    scores = jnp.exp(jnp.einsum("bqhd,bkhd->bhqk", q, k) - 3.0)
    return jnp.einsum("bhqk,bkhd->bqhd", scores / scores.sum(1, keepdims=True), v)  # over heads


def masked_afterwards(x, w):
    q, k, v = qkv(x, w)
    p = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
    return jnp.einsum("bhqk,bkhd->bqhd", jnp.where(jnp.tril(jnp.ones((L, L), bool)), p, 0), v)


def fixed_scores(x, w):
    q, k, v = qkv(x, w)
    scores = jax.lax.stop_gradient(jnp.einsum("bqhd,bkhd->bhqk", q, k))
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


def fixed_probabilities(x, w):
    q, k, v = qkv(x, w)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.lax.stop_gradient(jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))), v)


def fixed_denominator(x, w):
    q, k, v = qkv(x, w)
    e = jnp.exp(jnp.einsum("bqhd,bkhd->bhqk", q, k))
    return jnp.einsum("bhqk,bkhd->bqhd", e / jax.lax.stop_gradient(e.sum(-1, keepdims=True)), v)


def masked_before_a_small_scale(x, w):
    q, k, v = qkv(x, w)
    scores = jnp.where(CAUSAL, jnp.einsum("bqhd,bkhd->bhqk", q, k), -2e4) * 1e-4
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


def shown_by_a_negative_scale(x, w):
    q, k, v = qkv(x, w)
    scores = (jnp.einsum("bqhd,bkhd->bhqk", q, k) + jnp.where(CAUSAL, 0, -1e9)) * -1
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


NOT_FUSED = [
    masked_before_a_small_scale,
    shown_by_a_negative_scale,
    with_bias,
    capped,
    without_softmax,
    masked_afterwards,
]
NOT_FUSED += [fixed_scores, fixed_probabilities, fixed_denominator]


@pytest.mark.parametrize("attend", NOT_FUSED, ids=lambda f: f.__name__)
def test_what_is_no_attention_of_the_librarys_stays(attend):
    assert not [op for op in imported(attend).operations if op.opdef.name.startswith("attention")]


def test_bfloat16_with_a_softmax_in_float32():
    def loss(params, x):
        q, k, v = qkv(x, params)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=jnp.float32) * D**-0.5
        p = jax.nn.softmax(scores).astype(x.dtype)
        return jnp.sum(jnp.einsum("bhqk,bkhd->bqhd", p, v).astype(jnp.float32))

    params = {n: jax.ShapeDtypeStruct((16, H, D), "bfloat16") for n in "qkv"}
    graph = mtf.from_jax(loss, params, jax.ShapeDtypeStruct((B, L, 16), "bfloat16"))
    (found,) = [op for op in graph.operations if op.opdef.name == "attention"]
    assert {x.dtype.name for x in found.inputs} == {"bfloat16"}


@pytest.mark.parametrize("narrow", ["qk", "qkv"])
def test_a_result_in_float32_is_not_rounded_to_the_operands_dtype(narrow):
    def loss(params, x):
        q, k, v = qkv(x, params)
        several = zip("qkv", (q, k, v), strict=True)
        q, k, v = (a.astype(jnp.bfloat16).astype(x.dtype) if n in narrow else a for n, a in several)
        p = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
        return jnp.einsum("bhqk,bkhd->bqhd", p, v).transpose(0, 2, 1, 3)

    params = {n: weights(16, H, D) for n in "qkv"}
    names = {"x": "batch length d_model", "params.*": "d_model heads head_dim"}
    graph = mtf.from_jax(loss, params, weights(B, L, 16), names=names)
    (op,) = [op for op in graph.operations if op.opdef.name == "attention"]
    assert op.output.dtype.name == "float32"


def test_values_of_another_size_than_the_keys():
    """Multi-head latent attention: keys have further features for positions, in a slice of the same projection."""

    def loss(params, x):
        q = jnp.einsum("blm,mhd->blhd", x, params["q"])
        k, v = jnp.split(jnp.einsum("blm,mhd->blhd", x, params["kv"]), 2, -1)
        k = jnp.concatenate([k, jnp.tanh(k)], -1)
        return jnp.sum(jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k)), v) ** 2)

    params = {"q": weights(16, H, 2 * D), "kv": weights(16, H, 2 * D)}
    names = {"x": "batch length d_model", "params.*": "d_model heads head_dim"}
    graph = compared(loss, params, weights(B, L, 16), names=names, layouts=LAYOUT)
    assert [op for op in graph.operations if op.opdef.name == "attention"]
