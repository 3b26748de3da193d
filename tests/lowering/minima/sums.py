"""Partial sums on their way: through what is linear, past several users, to where the fewest bytes are left of them."""

from __future__ import annotations

import meshlib as mtf
from meshlib.core.graph import Tensor
from tests.lowering.minima.table import (
    Case,
    D,
    all_reduce,
    elements,
    given,
    product,
    reduce_scatter,
    row,
    weight,
    width,
)

N = 4
MESH = f"m:{N}"
B, K, E, J, C = D("b", 8), D("k", 32), D("e", 32), D("j", 32), D("c", 4)


def partial(t: str, name: str = "") -> Tensor:
    """x w, contracted over the split k: [b, j]."""
    return product(given(f"{name}x", [B, K], t), weight(f"{name}w", [K, J], t), B, J)


def narrow(y: Tensor, t: str, name: str = "u", to: mtf.Dimension = C) -> Tensor:
    """A product with a whole weight, that leaves little of y."""
    return product(y, weight(name, [J, to], t), B, to)


def summed(t: str, *ys: Tensor) -> int:
    return all_reduce(N, elements(*ys) * width(t))


@row
def product_of_split_rows(t: str) -> Case:
    """One sum of the result."""
    y = partial(t)
    return Case({"y": y}, [], MESH, "k:m", summed(t, y), {"all_reduce": 1})


@row
def product_the_other_way_round(t: str) -> Case:
    """w x is x w."""
    y = product(weight("w", [K, J], t), given("x", [B, K], t), J, B)
    return Case({"y": y}, [], MESH, "k:m", summed(t, y), {"all_reduce": 1})


@row
def transposed_product(t: str) -> Case:
    """In whatever order the dims are wanted."""
    y = mtf.transpose(partial(t), [J, B])
    return Case({"y": y}, [], MESH, "k:m", summed(t, y), {"all_reduce": 1})


@row
def one_small_product_of_a_sum(t: str) -> Case:
    """y itself is not asked for: the narrow product is summed."""
    y = narrow(partial(t), t)
    return Case({"y": y}, [], MESH, "k:m", summed(t, y), {"all_reduce": 1})


@row
def two_small_products_of_a_sum(t: str) -> Case:
    """Two narrow products of y are a quarter of y: both are summed, y is not."""
    y = partial(t)
    first, second = narrow(y, t, "u"), narrow(y, t, "v")
    return Case({"first": first, "second": second}, [], MESH, "k:m", summed(t, first, second), {"all_reduce": 2})


@row
def two_large_products_of_a_sum(t: str) -> Case:
    """Two products as wide as y: y is summed once, before them."""
    y = partial(t)
    first, second = narrow(y, t, "u", E), narrow(y, t, "v", E)
    return Case({"first": first, "second": second}, [], MESH, "k:m", summed(t, y), {"all_reduce": 1})


@row
def small_product_beside_the_sum(t: str) -> Case:
    """y is asked for, so it is summed; the product then needs nothing."""
    y = partial(t)
    return Case({"y": y, "z": narrow(y, t)}, [], MESH, "k:m", summed(t, y), {"all_reduce": 1})


@row
def bias_between_two_products(t: str) -> Case:
    """(x w0 w1 + bias) w2: the bias is whole, counts on one device, and the narrow result is summed."""
    hidden = product(partial(t), weight("w1", [J, E], t), B, E) + weight("bias", [E], t)
    y = product(hidden, weight("w2", [E, C], t), B, C)
    return Case({"y": y}, [], MESH, "k:m", summed(t, y), {"all_reduce": 1})


@row
def constant_added_before_a_mean(t: str) -> Case:
    """The mean of y + 1 is one number."""
    return Case({"y": mtf.reduce_mean(partial(t) + 1.0)}, [], MESH, "k:m", all_reduce(N, width(t)), {"all_reduce": 1})


@row
def masked_sum_of_a_sum(t: str) -> Case:
    """What is not chosen is zero in every part: a mask passes, the row sums are summed."""
    y = mtf.where(given("mask", [B, J], "bool"), partial(t), 0.0)
    total = mtf.reduce_sum(y, reduced_dim=J)
    return Case({"y": total}, [], MESH, "k:m", summed(t, total), {"all_reduce": 1})


@row
def chosen_from_a_sum_or_a_whole(t: str) -> Case:
    """Chosen where it is not masked, else a whole value, which counts on one device."""
    y = mtf.where(given("mask", [B, J], "bool"), partial(t), given("other", [B, J], t))
    total = mtf.reduce_sum(y, reduced_dim=J)
    return Case({"y": total}, [], MESH, "k:m", summed(t, total), {"all_reduce": 1})


@row
def dropout_of_a_sum(t: str) -> Case:
    """Every device draws the same mask, for nothing; the narrow product is summed."""
    y = narrow(mtf.dropout(partial(t), True, keep_prob=0.5), t)
    return Case({"y": y}, [], MESH, "k:m", summed(t, y), {"all_reduce": 1})


@row
def sum_beside_one_of_its_terms(t: str) -> Case:
    """relu(a + z) needs a + z; of a besides only a narrow product is asked for, which is summed by itself."""
    a, z = partial(t, "a/"), partial(t, "z/")
    outputs = {"y": mtf.relu(a + z), "u": narrow(a, t)}
    return Case(outputs, [], MESH, "k:m", summed(t, *outputs.values()), {"all_reduce": 2})


@row
def sum_used_beside_one_of_its_terms(t: str) -> Case:
    """relu(a + z) and relu(a): a and z, or a and a + z, are summed: two, not three."""
    a, z = partial(t, "a/"), partial(t, "z/")
    outputs = {"y": mtf.relu(a + z), "u": mtf.relu(a)}
    return Case(outputs, [], MESH, "k:m", summed(t, *outputs.values()), {"all_reduce": 2})


@row
def sum_and_difference(t: str) -> Case:
    """a + z and a - z: two sums of two values, in either order."""
    a, z = partial(t, "a/"), partial(t, "z/")
    outputs = {"plus": mtf.relu(a + z), "minus": mtf.relu(a - z)}
    return Case(outputs, [], MESH, "k:m", summed(t, *outputs.values()), {"all_reduce": 2})


@row
def chain_of_additions(t: str) -> Case:
    """((u + a) + v) + z with whole u and v: a and z are summed together."""
    u, v = given("u", [B, J], t), given("v", [B, J], t)
    y = ((u + partial(t, "a/")) + v) + partial(t, "z/")
    return Case({"y": y}, [], MESH, "k:m", summed(t, y), {"all_reduce": 1})


@row
def scaled_and_added(t: str) -> Case:
    """2 a - z / 3, each scaled by a whole column: linear."""
    scale = given("scale", [J], t)
    y = partial(t, "a/") * scale * 2.0 - partial(t, "z/") / 3.0
    return Case({"y": y}, [], MESH, "k:m", summed(t, y), {"all_reduce": 1})


@row
def product_of_two_split_products(t: str) -> Case:
    """Element by element of two values split alike; contracted after that: one sum."""
    x, f = given("x", [B, J], t), D("f", 64)
    gate, up = (product(x, weight(name, [J, f], t), B, f) for name in ("w1", "w3"))
    y = product(gate * up, weight("w2", [f, C], t), B, C)
    return Case({"y": y}, [], MESH, "f:m", summed(t, y), {"all_reduce": 1})


@row
def product_of_two_sums(t: str) -> Case:
    """(sum a)(sum z) is not a sum of products: one of them is made whole, and the other waits until little is left."""
    y = mtf.reduce_sum(partial(t, "a/") * partial(t, "z/"), reduced_dim=J)
    least = all_reduce(N, (B.size * J.size + B.size) * width(t))
    return Case({"y": y}, [], MESH, "k:m", least, {"all_reduce": 2})


@row
def bilinear_form(t: str) -> Case:
    """x' W y, both dims of W on one axis in turn: x' W stays partial, times y leaves a number a row."""
    x, y = given("x", [B, K], t), given("y", [B, J], t)
    z = mtf.reduce_sum(product(x, weight("w", [K, J], t), B, J) * y, reduced_dim=J)
    return Case({"z": z}, [], MESH, "k:m", summed(t, z), {"all_reduce": 1})


@row
def narrow_in_the_middle(t: str) -> Case:
    """x u v with a rank of 4: summed between the two, [b, 4]."""
    low = product(given("x", [B, K], t), weight("u", [K, C], t), B, C)
    y = product(low, weight("v", [C, J], t), B, J)
    return Case({"y": y}, [], MESH, "k:m", summed(t, low), {"all_reduce": 1})


@row
def three_products_in_a_row(t: str) -> Case:
    """Wide, wider, narrow: summed at the end."""
    wider = D("f", 64)
    y = product(partial(t), weight("w1", [J, wider], t), B, wider)
    y = product(y, weight("w2", [wider, C], t), B, C)
    return Case({"y": y}, [], MESH, "k:m", summed(t, y), {"all_reduce": 1})


@row
def sum_in_a_narrow_type(t: str) -> Case:
    """Widened after the sum: what is summed has the type it is made in."""
    y = mtf.cast(partial(t), "float32")
    return Case({"y": y}, [], MESH, "k:m", all_reduce(N, elements(y) * width(t)), {"all_reduce": 1})


@row
def sums_over_two_axes(t: str) -> Case:
    """A contraction over two dims on two axes: one collective over four devices."""
    x = given("x", [B, K, E], t)
    y = product(x, weight("w", [K, E, J], t), B, J)
    return Case({"y": y}, [], "a:2;c:2", "k:a;e:c", all_reduce(4, elements(y) * width(t)), {"all_reduce": 1})


@row
def mean_over_two_axes(t: str) -> Case:
    """The mean of everything, split both ways: one number, once."""
    y = mtf.reduce_mean(given("x", [K, E], t))
    return Case({"y": y}, [], "a:2;c:2", "k:a;e:c", all_reduce(4, width(t)), {"all_reduce": 1})


@row
def sum_scattered_for_one_of_two_users(t: str) -> Case:
    """relu takes y split by its rows, where it stays; the mean of y is one number, of the parts or of the sum."""
    y = partial(t)
    outputs = {"y": mtf.constrain(mtf.relu(mtf.constrain(y, "b:m")), "b:m"), "mean": mtf.reduce_mean(y)}
    least = reduce_scatter(N, elements(y) * width(t)) + all_reduce(N, width(t))
    return Case(outputs, [], MESH, "k:m", least, {"reduce_scatter": 1, "all_reduce": 1})


TWO = "p:2;q:2"
A, F = D("a", 4), D("f", 4)


def over(t: str, name: str, *dims: mtf.Dimension) -> Tensor:
    """Summed over a, which is split over p, or over f, over q, or both: [b]."""
    return mtf.reduce_sum(given(name, [*dims, B], t), output_shape=[B])


@row
def product_of_a_small_sum_over_two_axes_and_a_large_one(t: str) -> Case:
    """x waits over p and q, the larger v over p. Only one of them may wait over p: v does, x over q alone."""
    x = over(t, "x", A, F)
    v = mtf.reduce_sum(given("v", [A, B, J], t), output_shape=[B, J])
    y = product(x, v)
    minimum = all_reduce(2, elements(x) * width(t)) + all_reduce(4, width(t))
    return Case({"y": y}, [], TWO, "a:p;f:q", minimum, {"all_reduce": 2})


@row
def terms_of_which_one_is_wanted_whole(t: str) -> Case:
    """u is summed over q for its own sake, so the sum of all three waits over p alone."""
    x, z, u = over(t, "x", A), over(t, "z", A), over(t, "u", F)
    outputs = {"y": mtf.tanh(mtf.add_n([x, z, u])), "u": mtf.tanh(u)}
    minimum = sum(all_reduce(2, elements(value) * width(t)) for value in outputs.values())
    return Case(outputs, [], TWO, "a:p;f:q", minimum, {"all_reduce": 2})


@row
def small_term_over_two_axes_and_a_large_one(t: str) -> Case:
    """x is small while it is summed over q; over p it waits for the sum with w, which takes its size from w."""
    x = over(t, "x", A, F)
    w = mtf.reduce_sum(given("w", [A, B, J], t), output_shape=[B, J])
    minimum = all_reduce(2, elements(x) * width(t)) + all_reduce(2, elements(w) * width(t))
    return Case({"y": mtf.tanh(x + w)}, [], TWO, "a:p;f:q", minimum, {"all_reduce": 2})
