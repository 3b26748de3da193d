"""A split vocabulary, softmax over a split dim, candidates, metrics, contrasts."""

from __future__ import annotations

from collections.abc import Callable

import meshlib as mtf
from meshlib.core.graph import Tensor
from tests.lowering.minima.table import (
    F32,
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
    reduce_scatter,
    row,
    sgd,
    weight,
    width,
)

N = 4
MESH = f"m:{N}"
B, V, WIDE = D("b", 8), D("v", 64), D("d", 16)
ROWS_OF_FLOATS = B.size * F32  # a statistic of each example


def logits(t: str, trained: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """x, the logits x w, and labels."""
    x = weight("x", [B, WIDE], t) if trained else given("x", [B, WIDE], t)
    return x, product(x, weight("w", [WIDE, V], t), B, V), given("labels", [B], "int32")


# ---------------------------------------------------------------- Megatron's cross-entropy


@row
def cross_entropy_of_each_example(t: str) -> Case:
    """Maximum, sum of exponentials, wanted logit: three numbers an example, in the float32 of the loss."""
    _, y, labels = logits(t)
    loss = mtf.layers.softmax_cross_entropy_with_logits(y, labels, V)
    return Case({"loss": loss}, [], MESH, "v:m", 3 * all_reduce(N, ROWS_OF_FLOATS), {"all_reduce": 3})


@row
def mean_cross_entropy(t: str) -> Case:
    """Of the wanted logits only the mean is needed: log z is whole, counts once, and the mean of both is one sum."""
    _, y, labels = logits(t)
    loss = mtf.reduce_mean(mtf.layers.softmax_cross_entropy_with_logits(y, labels, V))
    return Case({"loss": loss}, [], MESH, "v:m", 2 * all_reduce(N, ROWS_OF_FLOATS) + all_reduce(N, F32))


@row
def mean_cross_entropy_step(t: str) -> Case:
    """Backward: softmax less the labels is local; the cotangent of x sums over the vocabulary."""
    x, y, labels = logits(t, trained=True)
    loss = mtf.reduce_mean(mtf.layers.softmax_cross_entropy_with_logits(y, labels, V))
    statistics = 2 * all_reduce(N, ROWS_OF_FLOATS) + all_reduce(N, F32)
    return Case({"loss": loss}, sgd(loss), MESH, "v:m", statistics + all_reduce(N, elements(x) * width(t)))


@row
def smoothed_cross_entropy_of_each_example(t: str) -> Case:
    """The mean logit and the wanted one are partial sums of the same kind: added first, still three numbers."""
    _, y, labels = logits(t)
    loss = mtf.layers.softmax_cross_entropy_with_logits(y, labels, V, z_loss=1e-4, label_smoothing=0.1)
    return Case({"loss": loss}, [], MESH, "v:m", 3 * all_reduce(N, ROWS_OF_FLOATS), {"all_reduce": 3})


@row
def mean_cross_entropy_over_two_axes(t: str) -> Case:
    """Half the examples each, half the vocabulary each: two numbers an example over `c`, the loss over all four."""
    _, y, labels = logits(t)
    loss = mtf.reduce_mean(mtf.layers.softmax_cross_entropy_with_logits(y, labels, V))
    least = 2 * all_reduce(2, ROWS_OF_FLOATS // 2) + all_reduce(4, F32)
    return Case({"loss": loss}, [], "a:2;c:2", "b:a;v:c", least, {"all_reduce": 3})


@row
def mean_distillation_loss(t: str) -> Case:
    """Maximum and sum of the teacher and of the student; the divergence itself sums over everything, to one number."""
    student, teacher = (given(name, [B, V], t) for name in ("student", "teacher"))
    ours, theirs = (mtf.log_softmax(x, V) for x in (student, teacher))
    loss = mtf.reduce_mean(mtf.reduce_sum(mtf.exp(theirs) * (theirs - ours), reduced_dim=V))
    e = width(t)
    return Case({"loss": loss}, [], MESH, "v:m", 4 * all_reduce(N, B.size * e) + all_reduce(N, e), {"all_reduce": 5})


# ---------------------------------------------------------------- tables split by vocabulary


@row
def lookup_in_a_split_vocabulary(t: str) -> Case:
    """Each device looks up what it holds; the parts are summed."""
    found = mtf.gather(weight("table", [V, WIDE], t), given("tokens", [B], "int32"), V)
    return Case({"x": found}, [], MESH, "v:m", all_reduce(N, elements(found) * width(t)), {"all_reduce": 1})


@row
def lookup_plus_positions(t: str) -> Case:
    """Positions are whole on every device and join when the parts are summed."""
    found = mtf.gather(weight("table", [V, WIDE], t), given("tokens", [B], "int32"), V)
    x = found + weight("positions", [B, WIDE], t)
    return Case({"x": x}, [], MESH, "v:m", all_reduce(N, elements(x) * width(t)), {"all_reduce": 1})


@row
def lookup_step(t: str) -> Case:
    """The cotangent is whole on every device, each adds up the rows that it holds."""
    found = mtf.gather(weight("table", [V, WIDE], t), given("tokens", [B], "int32"), V)
    return Case(None, sgd(half_square(found)), MESH, "v:m", all_reduce(N, elements(found) * width(t)))


@row
def lookup_for_a_split_batch(t: str) -> Case:
    """Table and examples over one axis: the tokens go to every part of the table, what is found back to the examples.

    A device finds for all examples, most of it zeros, and scatters; the table itself is larger.
    """
    v = D("v", 512)
    found = mtf.gather(weight("table", [v, WIDE], t), given("tokens", [B], "int32"), v)
    least = all_gather(N, B.size * INT) + reduce_scatter(N, elements(found) * width(t))
    return Case({"x": found}, [], MESH, "b:m;v:m", least, {"all_gather": 1, "reduce_scatter": 1})


@row
def tied_split_table_step(t: str) -> Case:
    """Lookup and logits of one split table: the found rows, their cotangent, and the loss's statistics."""
    table, tokens = weight("table", [V, WIDE], t), given("tokens", [B], "int32")
    x = mtf.tanh(mtf.gather(table, tokens, V))
    each = mtf.layers.softmax_cross_entropy_with_logits(product(x, table, B, V), given("labels", [B], "int32"), V)
    loss = mtf.reduce_mean(each)
    least = 2 * all_reduce(N, elements(x) * width(t)) + 2 * all_reduce(N, ROWS_OF_FLOATS) + all_reduce(N, F32)
    return Case({"loss": loss}, sgd(loss), MESH, "v:m", least)


@row
def tied_split_table_and_data_step(t: str) -> Case:
    """Half the examples and half the table on each device: over `c` as above, over `a` the table's gradient, once."""
    n = 2
    table, tokens = weight("table", [V, WIDE], t), given("tokens", [B], "int32")
    x = mtf.tanh(mtf.gather(table, tokens, V))
    each = mtf.layers.softmax_cross_entropy_with_logits(product(x, table, B, V), given("labels", [B], "int32"), V)
    loss = mtf.reduce_mean(each)
    least = (
        2 * all_reduce(n, elements(x) // n * width(t))
        + 2 * all_reduce(n, ROWS_OF_FLOATS // n)
        + all_reduce(n, elements(table) // n * width(t))
        + all_reduce(n * n, F32)
    )
    return Case({"loss": loss}, sgd(loss), "a:2;c:2", "b:a;v:c", least)


# ---------------------------------------------------------------- over a split dim


def over_the_split(t: str, function: Callable[[Tensor], Tensor], statistics: int) -> Case:
    """So many numbers an example, each reduced on its own."""
    y = function(given("x", [B, V], t))
    return Case({"y": y}, [], MESH, "v:m", statistics * all_reduce(N, B.size * width(t)), {"all_reduce": statistics})


@row
def softmax_over_a_split(t: str) -> Case:
    """Maximum and sum."""
    return over_the_split(t, lambda x: mtf.softmax(x, V), 2)


@row
def log_sum_exp_over_a_split(t: str) -> Case:
    """Maximum and sum."""
    return over_the_split(t, lambda x: mtf.reduce_logsumexp(x, V), 2)


@row
def less_the_maximum(t: str) -> Case:
    """One maximum an example."""
    return over_the_split(t, lambda x: x - mtf.reduce_max(x, reduced_dim=V), 1)


@row
def variance_over_a_split(t: str) -> Case:
    """Mean, then the mean of squares around it: two numbers an example, as in one pass of two sums."""
    return over_the_split(
        t, lambda x: mtf.reduce_mean(mtf.square(x - mtf.reduce_mean(x, reduced_dim=V)), reduced_dim=V), 2
    )


@row
def entropy_over_a_split(t: str) -> Case:
    """Maximum, sum, and the sum of p log p."""

    def entropy(x: Tensor) -> Tensor:
        log_p = mtf.log_softmax(x, V)
        return -mtf.reduce_sum(mtf.exp(log_p) * log_p, reduced_dim=V)

    return over_the_split(t, entropy, 3)


def cosine(t: str) -> Tensor:
    x, y = given("x", [B, V], t), given("y", [B, V], t)
    dot, xx, yy = (mtf.reduce_sum(u * v, reduced_dim=V) for u, v in ((x, y), (x, x), (y, y)))
    return dot * mtf.rsqrt(xx * yy + 1e-6)


@row
def cosine_similarity(t: str) -> Case:
    """Three sums an example: neither length is linear in the result."""
    least = 3 * all_reduce(N, B.size * width(t))
    return Case({"y": cosine(t)}, [], MESH, "v:m", least, {"all_reduce": 3})


@row
def mean_cosine_similarity(t: str) -> Case:
    """The mean is linear in the dot products, given the lengths: they are summed to one number."""
    least = 2 * all_reduce(N, B.size * width(t)) + all_reduce(N, width(t))
    return Case({"y": mtf.reduce_mean(cosine(t))}, [], MESH, "v:m", least, {"all_reduce": 3})


# ---------------------------------------------------------------- candidates


def candidates(t: str, k: int = 1) -> int:
    """Each device's best k of each example, with their indices, to the device that ranks that example.

    An exchange: n parts of the examples, of which a device keeps one.
    """
    return all_to_all(N, N * B.size * k * (width(t) + INT))


@row
def argmax_over_a_split(t: str) -> Case:
    """Candidates to the device that ranks the example; the indices of the best to all."""
    best = mtf.argmax(given("x", [B, V], t), V)
    return Case({"best": best}, [], MESH, "v:m", candidates(t) + all_gather(N, B.size * INT))


@row
def argmax_of_a_split_batch(t: str) -> Case:
    """Who ranks an example is who wants to know."""
    best = mtf.argmax(given("x", [B, V], t), V)
    return Case({"best": best}, [], MESH, "v:m;b:m?", candidates(t))


@row
def accuracy_over_a_split(t: str) -> Case:
    """Candidates as for the argmax; labels are everywhere, so who ranks an example compares it: one count is summed."""
    best = mtf.argmax(given("x", [B, V], t), V)
    right = mtf.equal(best, given("labels", [B], "int32"))
    accuracy = mtf.reduce_mean(mtf.cast(right, "float32"))
    return Case({"accuracy": accuracy}, [], MESH, "v:m", candidates(t) + all_reduce(N, F32))


@row
def sample_over_a_split(t: str) -> Case:
    """The argmax of float32 logits with noise; each device draws the noise of its part."""
    drawn = mtf.sample_with_temperature(given("x", [B, V], t), V)
    return Case({"drawn": drawn}, [], MESH, "v:m", candidates("float32") + all_gather(N, B.size * INT))


@row
def top_k_over_a_split(t: str) -> Case:
    """k candidates of each device; the best k, values and indices, to all."""
    k = 4
    values, indices = mtf.top_k(given("x", [B, V], t), V, D("k", k))
    found = B.size * k * (width(t) + INT)
    return Case({"values": values, "indices": indices}, [], MESH, "v:m", candidates(t, k) + all_gather(N, found))


@row
def sample_of_the_top_k(t: str) -> Case:
    """Who ranks an example draws among its best k, with its part of the noise; the indices drawn go to all."""
    k = D("k", 4)
    values, indices = mtf.top_k(given("x", [B, V], t), V, k)
    drawn = mtf.gather(indices, mtf.sample_with_temperature(values, k), k)
    return Case({"drawn": drawn}, [], MESH, "v:m", candidates(t, k.size) + all_gather(N, B.size * INT))


# ---------------------------------------------------------------- contrasts and means over a split batch


def pairs(t: str, trained: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Embeddings of as many images and texts, and the product of each with each, [b, c]."""
    b = D("b", 64)
    x, y = ((weight if trained else given)(name, [b, WIDE], t) for name in ("images", "texts"))
    return x, y, product(x, mtf.rename_dimension(y, "b", "c"), b, D("c", 64))


def contrast(x: Tensor, y: Tensor, scores: Tensor) -> Tensor:
    """CLIP's loss: each image against all texts, each text against all images."""
    wide = mtf.cast(scores, "float32")
    right = mtf.reduce_mean(mtf.cast(mtf.reduce_sum(x * y, reduced_dim=WIDE), "float32"))
    rows, columns = (mtf.reduce_mean(mtf.reduce_logsumexp(wide, wide.shape.dim(name))) for name in ("c", "b"))
    return rows + columns - right * 2


@row
def contrastive_loss(t: str) -> Case:
    """The texts are gathered; of each column the maximum, which all need, and the sum; the loss, three means in one."""
    x, y, scores = pairs(t, trained=False)
    statistics = all_reduce(N, 64 * F32) + reduce_scatter(N, 64 * F32)
    least = all_gather(N, elements(y) * width(t)) + statistics + all_reduce(N, F32)
    return Case({"loss": contrast(x, y, scores)}, [], MESH, "b:m", least)


@row
def contrastive_loss_step(t: str) -> Case:
    """Backward: the cotangent of the texts sums over the images; it is scattered to its rows.

    The texts as columns are whole by the layout, so the backward finds them where the forward gathered them.
    """
    x, y, scores = pairs(t, trained=True)
    loss = contrast(x, y, scores)
    moved = elements(y) * width(t)
    statistics = 2 * all_reduce(N, 64 * F32)
    least = all_gather(N, moved) + reduce_scatter(N, moved) + statistics + all_reduce(N, F32)
    return Case({"loss": loss}, sgd(loss), MESH, "b:m", least)


@row
def pairwise_sigmoid_loss(t: str) -> Case:
    """SigLIP: every pair by itself, so nothing but the texts and the loss."""
    _, y, scores = pairs(t, trained=False)
    loss = mtf.reduce_mean(mtf.cast(mtf.softplus(scores), "float32"))
    least = all_gather(N, elements(y) * width(t)) + all_reduce(N, F32)
    return Case({"loss": loss}, [], MESH, "b:m", least, {"all_gather": 1, "all_reduce": 1})


@row
def huber_loss(t: str) -> Case:
    """Element by element; one number."""
    error = mtf.abs(mtf.cast(given("x", [B, WIDE], t) - given("y", [B, WIDE], t), "float32"))
    loss = mtf.reduce_mean(mtf.where(mtf.less(error, 1.0), mtf.square(error) * 0.5, error - 0.5))
    return Case({"loss": loss}, [], MESH, "b:m", all_reduce(N, F32), {"all_reduce": 1})


@row
def masked_mean(t: str) -> Case:
    """A sum and a count: two numbers."""
    x, mask = given("x", [B, WIDE], t), given("mask", [B, WIDE], t)
    mean = mtf.reduce_sum(x * mask) / mtf.reduce_sum(mask)
    return Case({"mean": mean}, [], MESH, "b:m", 2 * all_reduce(N, width(t)), {"all_reduce": 2})
