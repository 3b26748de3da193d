"""Values that change their split, experts, gathers over two axes, and what costs nothing to make where it is wanted."""

from __future__ import annotations

import meshlib as mtf
from meshlib.core.graph import Tensor
from tests.lowering.minima.table import (
    INT,
    Case,
    D,
    all_gather,
    all_reduce,
    all_to_all,
    elements,
    given,
    half_square,
    product,
    row,
    sgd,
    weight,
    width,
)

N = 4
MESH = f"m:{N}"
B, J, WIDE = D("b", 16), D("j", 32), D("d", 16)


# ---------------------------------------------------------------- constraints


@row
def relu_between_two_constraints(t: str) -> Case:
    """relu runs where both say, not where the rules would lay it: one exchange, of the input."""
    x = given("x", [B, J], t)
    y = mtf.constrain(mtf.relu(mtf.constrain(x, "j:m")), "j:m")
    return Case({"y": y}, [], MESH, "b:m", all_to_all(N, elements(x) * width(t)), {"all_to_all": 1})


@row
def chain_between_two_constraints(t: str) -> Case:
    """Several operations, one of them with two operands."""
    x, z = given("x", [B, J], t), given("z", [J], t)
    y = mtf.constrain(mtf.tanh(mtf.relu(mtf.constrain(x, "j:m")) * 2.0 + z), "j:m")
    return Case({"y": y}, [], MESH, "b:m", all_to_all(N, elements(x) * width(t)), {"all_to_all": 1})


@row
def length_to_heads_and_back(t: str) -> Case:
    """Ulysses: queries, keys and values from their lengths to their heads, the context back."""
    length, h, k = D("l", 16), D("h", 4), D("k", 8)
    q, keys, values = (mtf.constrain(given(name, [length, h, k], t), "h:m") for name in "qkv")
    keys, values = (mtf.rename_dimension(x, "l", "t") for x in (keys, values))
    y = mtf.constrain(mtf.attention(q, keys, values, length, D("t", 16), k), "l:m")
    return Case({"y": y}, [], MESH, "l:m;h:m?", 4 * all_to_all(N, elements(y) * width(t)), {"all_to_all": 4})


# ---------------------------------------------------------------- experts

GROUPS, TOKENS, EXPERTS, CAPACITY, FF = D("g", 4), D("s", 16), D("e", 4), D("c", 4), D("f", 64)


def experts(x: Tensor, masks: Tensor, t: str) -> Tensor:
    """Tokens to their places in experts, each expert's feed-forward layer, and back: [g, s, d]."""
    g, s, _ = x.shape
    places = product(masks, x, EXPERTS, g, CAPACITY, WIDE)
    h = mtf.relu(product(places, weight("w1", [EXPERTS, WIDE, FF], t), EXPERTS, g, CAPACITY, FF))
    made = product(h, weight("w2", [EXPERTS, FF, WIDE], t), EXPERTS, g, CAPACITY, WIDE)
    return product(masks, made, g, s, WIDE)


def routed(t: str, trained: bool) -> tuple[Tensor, Tensor, int]:
    """x, what the experts make of it, and the bytes of all places."""
    x = (weight if trained else given)("x", [GROUPS, TOKENS, WIDE], t)
    masks = given("masks", [GROUPS, TOKENS, EXPERTS, CAPACITY], t)
    places = GROUPS.size * EXPERTS.size * CAPACITY.size * WIDE.size * width(t)
    return x, experts(x, masks, t), places


@row
def dispatch_and_combine(t: str) -> Case:
    """Groups of tokens and experts over one axis: an exchange of the places to the experts, and one back."""
    _, y, places = routed(t, trained=False)
    return Case({"y": y}, [], MESH, "g:m;e:m?", 2 * all_to_all(N, places), {"all_to_all": 2})


@row
def dispatch_and_combine_step(t: str) -> Case:
    """The cotangents take the same ways.

    What came to an expert is as large as at home, so it is kept for w1's gradient. Experts' gradients lie with them.
    After the way back x's cotangent is local.
    """
    _, y, places = routed(t, trained=True)
    return Case(None, sgd(half_square(y)), MESH, "g:m;e:m?", 4 * all_to_all(N, places), {"all_to_all": 4})


@row
def split_experts_of_whole_tokens(t: str) -> Case:
    """All tokens on every device, each with its experts: what they make is a partial sum over experts."""
    _, y, _ = routed(t, trained=False)
    return Case({"y": y}, [], MESH, "e:m", all_reduce(N, elements(y) * width(t)), {"all_reduce": 1})


@row
def split_experts_of_whole_tokens_step(t: str) -> Case:
    """Backward: so is x's cotangent."""
    x, y, _ = routed(t, trained=True)
    return Case(None, sgd(half_square(y)), MESH, "e:m", 2 * all_reduce(N, elements(x) * width(t)), {"all_reduce": 2})


@row
def shared_expert_beside_split_ones(t: str) -> Case:
    """A feed-forward layer that all tokens take, split by its width: its partial sum joins that of the experts."""
    x, y, _ = routed(t, trained=False)
    f = D("shared", 64)
    h = mtf.relu(product(x, weight("v1", [WIDE, f], t), GROUPS, TOKENS, f))
    total = x + (y + product(h, weight("v2", [f, WIDE], t), GROUPS, TOKENS, WIDE))
    return Case({"y": total}, [], MESH, "e:m;shared:m", all_reduce(N, elements(x) * width(t)), {"all_reduce": 1})


# ---------------------------------------------------------------- gathers


@row
def gathered_over_two_dims_and_axes(t: str) -> Case:
    """Both dims made whole: a block from each of three others."""
    x = given("x", [B, J], t)
    y = mtf.constrain(x, "")
    return Case({"y": y}, [], "a:2;c:2", "b:a;j:c", all_gather(4, elements(x) * width(t)), {"all_gather": 1})


@row
def gathered_over_one_dim_and_two_axes(t: str) -> Case:
    """One dim, split over both axes: one collective."""
    x = given("x", [B, J], t)
    y = mtf.constrain(x, "")
    return Case({"y": y}, [], "a:2;c:2", "b:a+c", all_gather(4, elements(x) * width(t)), {"all_gather": 1})


@row
def weight_cast_before_it_moves(t: str) -> Case:
    """A float32 weight, gathered in the type that it is multiplied in."""
    w = weight("w", [WIDE, J], t)
    y = product(given("x", [D("b", 256), WIDE], t), w, D("b", 256), J)
    return Case({"y": y}, [], MESH, "b:m;j:m?", all_gather(N, elements(w) * width(t)), {"all_gather": 1})


@row
def weight_for_two_products(t: str) -> Case:
    """Gathered once for both."""
    b = D("b", 256)
    w = weight("w", [WIDE, J], t)
    first, second = (product(given(name, [b, WIDE], t), w, b, J) for name in ("x", "z"))
    outputs = {"first": first, "second": second}
    return Case(outputs, [], MESH, "b:m;j:m?", all_gather(N, elements(w) * width(t)), {"all_gather": 1})


# ---------------------------------------------------------------- free to be made


@row
def one_hot_made_where_it_is_wanted(t: str) -> Case:
    """By the vocabulary, though its labels are split by the batch: they are gathered, 4 bytes an example."""
    v = D("v", 64)
    labels = given("labels", [B], "int32")
    y = given("x", [B, v], t) * mtf.one_hot(labels, v, dtype=t)
    return Case({"y": y}, [], MESH, "v:m;b:m?", all_gather(N, B.size * INT), {"all_gather": 1})


@row
def one_hot_in_two_places(t: str) -> Case:
    """By the batch for one product, by the vocabulary for the other: made twice, from labels gathered once."""
    v = D("v", 64)
    hot = mtf.one_hot(given("labels", [B], "int32"), v, dtype=t)
    here = mtf.constrain(given("x", [B, v], t), "b:m") * hot
    there = mtf.constrain(given("z", [B, v], t) * hot, "v:m")
    outputs = {"here": mtf.constrain(here, "b:m"), "there": there}
    # `x` lies split by v, as `z` does: it is exchanged.
    least = all_to_all(N, B.size * v.size * width(t)) + all_gather(N, B.size * INT)
    return Case(outputs, [], MESH, "v:m;b:m?", least)


@row
def causal_mask_is_free(t: str) -> Case:
    """Positions are known everywhere."""
    queries, keys = D("l", 16), D("t", 16)
    seen = mtf.greater_equal(mtf.range(queries), mtf.range(keys))
    y = mtf.softmax(mtf.where(seen, given("scores", [queries, keys], t), -1e9), keys)
    return Case({"y": y}, [], MESH, "l:m", 0)


@row
def mask_of_positions_in_two_places_is_free(t: str) -> Case:
    """The same mask over scores split by queries and over scores split by keys."""
    queries, keys = D("l", 16), D("t", 16)
    seen = mtf.greater_equal(mtf.range(queries), mtf.range(keys))
    by_queries = mtf.where(seen, given("scores", [queries, keys, WIDE], t), 0.0)
    by_keys = mtf.constrain(mtf.where(seen, given("bias", [keys, J], t), 0.0), "t:m")
    return Case({"by_queries": by_queries, "by_keys": by_keys}, [], MESH, "l:m;t:m?", 0)


@row
def rotary_positions_are_free(t: str) -> Case:
    """Each device turns its part of a split length by the positions that it knows."""
    x = given("x", [B, D("l", 16), WIDE], t)
    return Case({"y": mtf.layers.rotary(x, "l", WIDE)}, [], MESH, "l:m", 0)


@row
def sinusoidal_positions_are_free(t: str) -> Case:
    """Made for the part of the length that they are added to."""
    length = D("l", 16)
    y = given("x", [B, length, WIDE], t) + mtf.layers.sinusoidal_positions(length, WIDE, dtype=t)
    return Case({"y": y}, [], MESH, "l:m", 0)


@row
def dropout_is_free(t: str) -> Case:
    """Counted by global position: each device draws its own part of the mask, forward and backward."""
    x = weight("x", [B, J], t)
    y = mtf.dropout(x, True, keep_prob=0.5)
    return Case(None, sgd(half_square(y)), MESH, "b:m", 0)


@row
def noise_made_where_it_is_wanted(t: str) -> Case:
    """One draw for two values that lie split differently: drawn twice; the one exchange is the constraint's."""
    x, z = given("x", [B, J], t), given("z", [B, J], t)
    keep = mtf.cast(mtf.less(mtf.random_uniform([B, J]), 0.5), t)
    outputs = {"here": x * keep, "there": mtf.constrain(mtf.constrain(z, "j:m") * keep, "j:m")}
    return Case(outputs, [], MESH, "b:m", all_to_all(N, elements(z) * width(t)), {"all_to_all": 1})


@row
def split_transposed_stays(t: str) -> Case:
    """A transpose of what is split moves nothing between devices."""
    x = given("x", [B, J, WIDE], t)
    y = mtf.transpose(x, [WIDE, J, B])
    return Case({"y": y}, [], MESH, "b:m", 0)
