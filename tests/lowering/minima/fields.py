"""Programs of other fields: graphs, sets, factorisations, proteins, preferences, recurrences."""

from __future__ import annotations

import meshlib as mtf
from meshlib.core.graph import Tensor
from tests.lowering.minima.table import (
    Case,
    D,
    all_gather,
    all_reduce,
    elements,
    given,
    product,
    reduce_scatter,
    row,
    sgd,
    weight,
    width,
)

N = 4
MESH = f"m:{N}"
B, L, WIDE, C, K, V = D("b", 16), D("l", 16), D("d", 16), D("c", 8), D("k", 8), D("v", 64)


def summed(t: str, *sizes: int) -> int:
    return all_reduce(N, sum(sizes) * width(t))


def total(y: Tensor) -> Tensor:
    """A loss that feels every element in its own way."""
    return mtf.reduce_sum(mtf.sin(y))


@row
def latent_attention(t: str) -> Case:
    """Keys and values of each head out of a narrow whole latent; heads are split: the output is summed."""
    latent, head, heads, memory = D("latent", 8), D("head", 8), D("h", 4), D("memory", L.size)
    x = given("x", [B, L, WIDE], t)
    low = mtf.rename_dimension(product(x, weight("down", [WIDE, latent], t), B, L, latent), "l", "memory")
    q = product(x, weight("q", [WIDE, heads, head], t), B, heads, L, head)
    k, v = (product(low, weight(name, [latent, heads, head], t), B, heads, memory, head) for name in "kv")
    scores = mtf.softmax(product(q, k, B, heads, L, memory), memory)
    y = product(product(scores, v, B, heads, L, head), weight("o", [heads, head, WIDE], t), B, L, WIDE)
    return Case({"y": y}, [], MESH, "h:m", summed(t, elements(y)), {"all_reduce": 1})


@row
def triangle_update(t: str) -> Case:
    """z[i, j] = sum over k of a[i, k] b[j, k], rows split: all rows of b come to each device."""
    i, j, k = D("i", 16), D("j", 16), D("k", 16)
    a, b = given("a", [i, k, C], t), given("b", [i, k, C], t)
    z = product(a, mtf.rename_dimension(b, "i", "j"), i, j, C)
    return Case({"z": z}, [], MESH, "i:m", all_gather(N, elements(b) * width(t)), {"all_gather": 1})


@row
def graph_convolution(t: str) -> Case:
    """Split nodes: what the neighbours tell is narrower after the product than before."""
    n = D("n", 32)
    told = product(given("x", [n, WIDE], t), weight("w", [WIDE, K], t), n, K)
    y = mtf.relu(product(given("edges", [n, D("n2", 32)], t), mtf.rename_dimension(told, "n", "n2"), n, K))
    return Case({"y": y}, [], MESH, "n:m", all_gather(N, elements(told) * width(t)), {"all_gather": 1})


@row
def mean_of_a_split_set_step(t: str) -> Case:
    """The mean over elements of a set, [b, k]; backward the gradient of the weight before it."""
    x, w = given("x", [B, L, WIDE], t), weight("w", [WIDE, K], t)
    mean = mtf.reduce_mean(mtf.relu(product(x, w, B, L, K)), reduced_dim=L)
    y = product(mean, weight("u", [K, C], t), B, C)
    return Case(None, sgd(total(y)), MESH, "l:m", summed(t, elements(mean)) + summed(t, elements(w)))


@row
def matrix_factorisation_step(t: str) -> Case:
    """Users split, items whole: the items' gradient is a sum over users."""
    users, items = D("users", 32), D("items", 16)
    a, b = weight("a", [users, K], t), weight("b", [items, K], t)
    error = product(a, b, users, items) - given("ratings", [users, items], t)
    return Case(None, sgd(mtf.reduce_sum(mtf.square(error))), MESH, "users:m", summed(t, elements(b)))


@row
def skip_gram_step(t: str) -> Case:
    """A word with some others, their width split: the products, whole; gradients are local."""
    others = D("others", 8)
    scores = product(weight("word", [B, WIDE], t), weight("context", [B, others, WIDE], t), B, others)
    loss = mtf.reduce_sum(mtf.log(mtf.sigmoid(scores)))
    return Case(None, sgd(loss), MESH, "d:m", summed(t, elements(scores)), {"all_reduce": 1})


@row
def preference_loss(t: str) -> Case:
    """Two answers under two models, vocabulary split: maximum and sum of each token, and of all wanted logits the
    difference that the loss takes, a number an example."""
    models = {name: weight(name, [WIDE, V], t) for name in ("policy", "reference")}

    def log_p(model: str, answer: str) -> Tensor:
        y = product(given(f"{model}_{answer}", [B, L, WIDE], t), models[model], B, L, V)
        wanted = mtf.one_hot(given(f"{model}_{answer}_tokens", [B, L], "int32"), V, dtype=t)
        return mtf.reduce_sum(mtf.log_softmax(y, V) * wanted, reduced_dim=[L, V])

    chosen, rejected = (log_p("policy", answer) - log_p("reference", answer) for answer in ("chosen", "rejected"))
    loss = -mtf.reduce_mean(mtf.log(mtf.sigmoid((chosen - rejected) * 0.1)))
    return Case({"loss": loss}, [], MESH, "v:m", 8 * summed(t, B.size * L.size) + summed(t, B.size))


@row
def contrastive_prediction_step(t: str) -> Case:
    """x against all y of a split batch: y gathered, the sum of its gradients scattered."""
    others = D("others", B.size)
    x, y = weight("x", [B, C], t), weight("y", [B, C], t)
    scores = product(x, mtf.rename_dimension(y, "b", "others"), B, others)
    right = mtf.equal(mtf.range(B, "int32"), mtf.range(others, "int32"))
    loss = mtf.reduce_sum(mtf.log_softmax(scores, others) * mtf.cast(right, t))
    bytes_ = elements(y) * width(t)
    return Case(None, sgd(loss), MESH, "b:m", all_gather(N, bytes_) + reduce_scatter(N, bytes_))


@row
def weights_split_both_ways_and_stationary(t: str) -> Case:
    """Rows of weights over one axis, columns over the other: each product is summed over the axis of its rows."""
    f = D("f", 32)
    h = product(given("x", [B, WIDE], t), weight("w1", [WIDE, f], t), B, f)
    y = product(mtf.gelu(h), weight("w2", [f, WIDE], t), B, WIDE)
    least = sum(all_reduce(2, elements(z) // 2 * width(t)) for z in (h, y))
    return Case({"y": y}, [], "x:2;y:2", "d:x;f:y", least, {"all_reduce": 2})


@row
def lstm(t: str) -> Case:
    """Split hidden units: in each step all of the last state comes to each; gates and cells stay."""
    steps, gates, before, hidden = 3, D("gates", 4), D("before", 16), D("hidden", 16)
    w = weight("w", [before, gates, hidden], t)

    def step(state: Tensor, cell: Tensor) -> list[Tensor]:
        z = product(mtf.rename_dimension(state, "hidden", "before"), w, B, gates, hidden)
        i, f, o, new = (mtf.reshape(mtf.slice(z, n, 1, "gates"), [B, hidden]) for n in range(4))
        cell = mtf.sigmoid(f) * cell + mtf.sigmoid(i) * mtf.tanh(new)
        return [mtf.sigmoid(o) * mtf.tanh(cell), cell]

    state, _ = mtf.while_loop(steps, step, [given("state", [B, hidden], t), given("cell", [B, hidden], t)])
    return Case({"state": state}, [], MESH, "hidden:m", steps * all_gather(N, elements(state) * width(t)))


@row
def clipped_gradient_of_each_example(t: str) -> Case:
    """The length of an example's gradient is that of its input times that of its error: local; the sum is not."""
    x, w = given("x", [B, WIDE], t), weight("w", [WIDE, K], t)
    error = product(x, w, B, K) - given("y", [B, K], t)
    lengths = [mtf.reduce_sum(mtf.square(z), output_shape=[B]) for z in (x, error)]
    gradient = product(x * mtf.minimum(1.0, mtf.rsqrt(lengths[0] * lengths[1] + 1e-6)), error, WIDE, K)
    return Case({"gradient": gradient}, [], MESH, "b:m", summed(t, elements(gradient)), {"all_reduce": 1})


@row
def attention_of_whole_latents_to_a_split_input(t: str) -> Case:
    """Latents look at a split input: maximum and sum of each, and what they take from it."""
    latents, memory = D("latents", 8), D("memory", 32)
    latent, x = weight("latent", [latents, K], t), given("x", [B, memory, K], t)
    y = product(mtf.softmax(product(latent, x, B, latents, memory), memory), x, B, latents, K)
    return Case({"y": y}, [], MESH, "memory:m", 2 * summed(t, B.size * latents.size) + summed(t, elements(y)))
