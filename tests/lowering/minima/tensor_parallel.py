"""Weights split over the devices that share a batch: Megatron and what grew out of it."""

from __future__ import annotations

import meshlib as mtf
from meshlib.core.graph import Tensor
from tests.lowering.minima.table import (
    F32,
    Case,
    D,
    all_gather,
    all_reduce,
    elements,
    given,
    half_square,
    product,
    reduce_scatter,
    row,
    sgd,
    weight,
    width,
)

N = 4
MESH = f"m:{N}"
B, L, WIDE, HEADS, KEY = D("b", 4), D("l", 8), D("d", 16), D("h", 8), D("k", 4)
FF = D("f", 64)


def mlp(x: Tensor, t: str, name: str = "") -> Tensor:
    """relu(x w1) w2."""
    rest = [d for d in x.shape if d != WIDE]
    h = mtf.relu(product(x, weight(f"{name}w1", [WIDE, FF], t), *rest, FF))
    return product(h, weight(f"{name}w2", [FF, WIDE], t), *x.shape)


def gated(x: Tensor, t: str) -> Tensor:
    """(silu(x w1) * x w3) w2."""
    rest = [d for d in x.shape if d != WIDE]
    gate, up = (product(x, weight(name, [WIDE, FF], t), *rest, FF) for name in ("w1", "w3"))
    return product(mtf.silu(gate) * up, weight("w2", [FF, WIDE], t), *x.shape)


def attention(x: Tensor, t: str, of_queries: list[mtf.Dimension], of_memory: list[mtf.Dimension]) -> Tensor:
    """Causal attention of x to itself."""
    b, length, _ = x.shape
    memory = D("t", length.size)
    q = product(x, weight("q", [WIDE, *of_queries, KEY], t), b, length, *of_queries, KEY)
    k, v = (
        mtf.rename_dimension(product(x, weight(name, [WIDE, *of_memory, KEY], t), b, length, *of_memory, KEY), "l", "t")
        for name in ("k", "v")
    )
    context = mtf.attention(q, k, v, length, memory, KEY, causal=True)
    return product(context, weight("o", [*of_queries, KEY, WIDE], t), *x.shape)


# ---------------------------------------------------------------- Megatron


@row
def megatron_mlp(t: str) -> Case:
    """The hidden layer stays where its weights are; the result is a sum over it: one all_reduce."""
    x = given("x", [B, L, WIDE], t)
    least = all_reduce(N, elements(x) * width(t))
    return Case({"y": mlp(x, t)}, [], MESH, "f:m", least, {"all_reduce": 1})


@row
def megatron_mlp_step(t: str) -> Case:
    """The same for the cotangent of x on the way back; gradients of weights lie where the weights do."""
    x = weight("x", [B, L, WIDE], t)
    least = 2 * all_reduce(N, elements(x) * width(t))
    return Case(None, sgd(half_square(mlp(x, t))), MESH, "f:m", least, {"all_reduce": 2})


@row
def megatron_attention(t: str) -> Case:
    """Heads stay apart up to the product with `o`, which sums over them."""
    x = given("x", [B, L, WIDE], t)
    least = all_reduce(N, elements(x) * width(t))
    return Case({"y": attention(x, t, [HEADS], [HEADS])}, [], MESH, "h:m", least, {"all_reduce": 1})


@row
def megatron_attention_step(t: str) -> Case:
    """q, k and v leave three partial cotangents of x, which are added before they are reduced."""
    x = weight("x", [B, L, WIDE], t)
    loss = half_square(attention(x, t, [HEADS], [HEADS]))
    least = 2 * all_reduce(N, elements(x) * width(t))
    return Case(None, sgd(loss), MESH, "h:m", least, {"all_reduce": 2})


@row
def gated_ffn_step(t: str) -> Case:
    """A product of two split values needs nothing; two partial cotangents of x meet in one all_reduce."""
    x = weight("x", [B, L, WIDE], t)
    least = 2 * all_reduce(N, elements(x) * width(t))
    return Case(None, sgd(half_square(gated(x, t))), MESH, "f:m", least, {"all_reduce": 2})


@row
def residual_and_bias_behind_a_sum(t: str) -> Case:
    """x + (h w2 + bias): whole values join when the sum is made; one all_reduce."""
    x = given("x", [B, L, WIDE], t)
    y = x + (mlp(x, t) + weight("bias", [WIDE], t))
    return Case({"y": y}, [], MESH, "f:m", all_reduce(N, elements(x) * width(t)), {"all_reduce": 1})


@row
def two_layers_of_megatron(t: str) -> Case:
    """Each of two residual layers needs its sum before the next norm."""
    x = given("x", [B, L, WIDE], t)
    y = x + mlp(mtf.layers.rms_norm(x, WIDE, name="n1"), t, "a/")
    y = y + mlp(mtf.layers.rms_norm(y, WIDE, name="n2"), t, "b/")
    return Case({"y": y}, [], MESH, "f:m", 2 * all_reduce(N, elements(x) * width(t)), {"all_reduce": 2})


# ---------------------------------------------------------------- grouped queries


def grouped(t: str, trained: bool) -> tuple[Tensor, Tensor, mtf.Dimension, mtf.Dimension]:
    """x, attention of 2 x 2 query heads with 2 heads of keys and values."""
    heads, group = D("h", 2), D("g", 2)
    x = weight("x", [B, L, WIDE], t) if trained else given("x", [B, L, WIDE], t)
    return x, attention(x, t, [heads, group], [heads]), heads, group


@row
def fewer_memory_heads_than_devices(t: str) -> Case:
    """2 heads of keys on 2 x 2 devices: pairs of devices make the same keys; the result is summed over all four."""
    x, y, *_ = grouped(t, trained=False)
    return Case({"y": y}, [], "a:2;c:2", "h:a;g:c", all_reduce(4, elements(x) * width(t)))


@row
def fewer_memory_heads_than_devices_step(t: str) -> Case:
    """Cotangents of keys and values are partial over the queries' groups, [b, l, h, k] each, and used twice.

    Both uses are linear. In the cotangent of x they join the sum that is reduced over all four anyway; the gradients
    of the two kernels, [d, h, k], half of which lie on each device, are smaller than what they are made from.
    """
    x, y, heads, _ = grouped(t, trained=True)
    kernel = WIDE.size * (heads.size // 2) * KEY.size
    assert WIDE.size < B.size * L.size
    least = 2 * all_reduce(4, elements(x) * width(t)) + 2 * all_reduce(2, kernel * width(t))
    return Case(None, sgd(half_square(y)), "a:2;c:2", "h:a;g:c", least)


@row
def one_memory_head_step(t: str) -> Case:
    """Multi-query: every device has all keys, and a partial cotangent of them from its own heads; as above."""
    x = weight("x", [B, L, WIDE], t)
    y = attention(x, t, [HEADS], [])
    least = 2 * all_reduce(N, elements(x) * width(t)) + 2 * all_reduce(N, WIDE.size * KEY.size * width(t))
    return Case(None, sgd(half_square(y)), MESH, "h:m", least)


# ---------------------------------------------------------------- parallel blocks


@row
def parallel_block_one_after_the_other(t: str) -> Case:
    """(x + attention) + ffn: two partial sums and a whole value, one all_reduce."""
    x = given("x", [B, L, WIDE], t)
    y = (x + attention(x, t, [HEADS], [HEADS])) + mlp(x, t)
    return Case({"y": y}, [], MESH, "h:m;f:m", all_reduce(N, elements(x) * width(t)), {"all_reduce": 1})


@row
def parallel_block_branches_first(t: str) -> Case:
    """x + (attention + ffn): the same."""
    x = given("x", [B, L, WIDE], t)
    y = x + (attention(x, t, [HEADS], [HEADS]) + mlp(x, t))
    return Case({"y": y}, [], MESH, "h:m;f:m", all_reduce(N, elements(x) * width(t)), {"all_reduce": 1})


@row
def parallel_block_step(t: str) -> Case:
    """Backward: the cotangent of x is one whole value (past both) and four partial ones: one all_reduce."""
    x = weight("x", [B, L, WIDE], t)
    loss = half_square((x + attention(x, t, [HEADS], [HEADS])) + mlp(x, t))
    least = 2 * all_reduce(N, elements(x) * width(t))
    return Case(None, sgd(loss), MESH, "h:m;f:m", least, {"all_reduce": 2})


# ---------------------------------------------------------------- low-rank adapters


@row
def adapter_of_rows(t: str) -> Case:
    """x w + (x a) c, all contracted over the split k: the narrow x a stays partial and joins: one all_reduce."""
    k, n, r = D("k", 32), D("n", 16), D("r", 2)
    x = given("x", [B, k], t)
    low = product(x, weight("a", [k, r], t), B, r)
    y = product(x, weight("w", [k, n], t), B, n) + product(low, weight("c", [r, n], t), B, n)
    return Case({"y": y}, [], MESH, "k:m", all_reduce(N, elements(y) * width(t)), {"all_reduce": 1})


@row
def adapter_of_columns_step(t: str) -> Case:
    """w and c split by columns, w frozen: nothing forward. The cotangent of x a is partial, [b, r], used twice.

    It joins the cotangent of x, which is reduced anyway; before that, as [b, r] x r, it is smaller than a's gradient
    [d, r], so it is reduced itself.
    """
    f, r = D("f", 32), D("r", 2)
    x = weight("x", [B, WIDE], t)
    low = product(x, weight("a", [WIDE, r], t), B, r)
    y = product(x, weight("w", [WIDE, f], t, trainable=False), B, f) + product(low, weight("c", [r, f], t), B, f)
    assert B.size < WIDE.size
    least = all_reduce(N, (elements(x) + B.size * r.size) * width(t))
    return Case(None, sgd(half_square(y)), MESH, "f:m", least)


@row
def adapter_of_columns_large_batch_step(t: str) -> Case:
    """The same for more examples than the width: now a's gradient [d, r] is the smaller."""
    b, f, r = D("b", 64), D("f", 32), D("r", 2)
    x = weight("x", [b, WIDE], t)
    low = product(x, weight("a", [WIDE, r], t), b, r)
    y = product(x, weight("w", [WIDE, f], t, trainable=False), b, f) + product(low, weight("c", [r, f], t), b, f)
    least = all_reduce(N, (elements(x) + WIDE.size * r.size) * width(t))
    return Case(None, sgd(half_square(y)), MESH, "f:m", least)


# ---------------------------------------------------------------- two axes, split sequences


@row
def megatron_and_data_step(t: str) -> Case:
    """Over `cols` half of the batch's result; over `rows` the gradients of half of each weight, and the loss."""
    n = 2
    x = given("x", [B, L, WIDE], t)
    y = mlp(x, t)
    loss = half_square(y)
    weights = 2 * WIDE.size * FF.size
    least = (
        all_reduce(n, elements(x) // n * width(t))  # y
        + all_reduce(n, weights // n * width(t))
        + all_reduce(n, F32)  # loss
    )
    return Case({"loss": loss}, sgd(loss), "rows:2;cols:2", "b:rows;f:cols", least, {"all_reduce": 4})


@row
def weights_split_both_ways(t: str) -> Case:
    """x by d over `r`, the hidden layer by f over `c`, the result by d over `r` again: each product sums one axis.

    Moving a quarter of a weight instead, 32 x 64 / 4, would take more than half of the [b, f] or [b, d].
    """
    n, wide = 2, D("d", 32)
    x = given("x", [B, wide], t)
    h = mtf.relu(product(x, weight("w1", [wide, FF], t), B, FF))
    y = product(h, weight("w2", [FF, wide], t), B, wide)
    least = all_reduce(n, elements(h) // n * width(t)) + all_reduce(n, elements(y) // n * width(t))
    return Case({"y": y}, [], "r:2;c:2", "d:r;f:c", least, {"all_reduce": 2})


@row
def sequence_parallel(t: str) -> Case:
    """Norms run on a part of the length; it is gathered before the split products, their sum scattered after."""
    x = given("x", [B, L, WIDE], t)
    y = x + mlp(mtf.layers.rms_norm(x, WIDE), t)
    moved = elements(x) * width(t)
    least = all_gather(N, moved) + reduce_scatter(N, moved)
    return Case({"y": y}, [], MESH, "l:m?;f:m", least, {"all_gather": 1, "reduce_scatter": 1})


@row
def sequence_parallel_step(t: str) -> Case:
    """Backward: the cotangent is gathered and scattered the other way round, the normed input gathered once more.

    The forward does not keep it whole: that is what splitting the length is for. The norm's scale has seen a part of
    the length: its gradient is summed, in float32.
    """
    x = weight("x", [B, L, WIDE], t)
    loss = half_square(x + mlp(mtf.layers.rms_norm(x, WIDE), t))
    moved = elements(x) * width(t)
    least = 3 * all_gather(N, moved) + 2 * reduce_scatter(N, moved) + all_reduce(N, WIDE.size * F32)
    return Case(None, sgd(loss), MESH, "l:m?;f:m", least)
