"""Norms and their gradients, linear algebra, clusters: statistics of split data."""

from __future__ import annotations

import meshlib as mtf
from meshlib.core.graph import Tensor
from tests.lowering.minima.table import (
    F32,
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
B, WIDE = D("b", 32), D("d", 16)


# ---------------------------------------------------------------- norms


def batch_norm(x: Tensor) -> Tensor:
    """Over the batch, with scale and bias; float32."""
    wide = mtf.cast(x, "float32")
    centred = wide - mtf.reduce_mean(wide, reduced_dim=B)
    normed = centred * mtf.rsqrt(mtf.reduce_mean(mtf.square(centred), reduced_dim=B) + 1e-5)
    return normed * weight("scale", [WIDE], "float32") + weight("bias", [WIDE], "float32")


@row
def batch_norm_of_a_split_batch(t: str) -> Case:
    """Mean and variance of each channel, float32."""
    y = batch_norm(given("x", [B, WIDE], t))
    return Case({"y": y}, [], MESH, "b:m", 2 * all_reduce(N, WIDE.size * F32), {"all_reduce": 2})


@row
def batch_norm_of_a_split_batch_step(t: str) -> Case:
    """Backward: two sums a channel, of the cotangent and of its product with the centred x.

    The bias's and the scale's gradients are these sums, times factors that have no batch. So are the cotangents of mean
    and variance: scale and deviation move out of their sums, and the sum of the centred x is the one that the forward
    has, less its mean: nothing new.
    """
    y = batch_norm(weight("x", [B, WIDE], t))
    least = (2 + 2) * all_reduce(N, WIDE.size * F32)
    return Case(None, sgd(mtf.reduce_sum(mtf.sin(y))), MESH, "b:m", least)


@row
def factor_moved_out_of_a_sum(t: str) -> Case:
    """sum(x z) and sum(x z q) over the batch, q of the channels: one sum of x z."""
    x, z, q = given("x", [B, WIDE], t), given("z", [B, WIDE], t), given("q", [WIDE], t)
    totals = mtf.reduce_sum(x * z, reduced_dim=B), mtf.reduce_sum(x * z * q, reduced_dim=B)
    outputs = {name: mtf.tanh(total) for name, total in zip(("plain", "scaled"), totals, strict=True)}
    return Case(outputs, [], MESH, "b:m", all_reduce(N, WIDE.size * width(t)), {"all_reduce": 1})


@row
def layer_norm_of_a_split_width(t: str) -> Case:
    """Mean and variance of each row, float32; scale and bias lie with the width."""
    y = mtf.layers.layer_norm(given("x", [B, WIDE], t), WIDE)
    return Case({"y": y}, [], MESH, "d:m", 2 * all_reduce(N, B.size * F32), {"all_reduce": 2})


@row
def layer_norm_of_a_split_width_step(t: str) -> Case:
    """Backward: two more numbers a row; the gradients of scale and bias are sums over rows, local."""
    y = mtf.layers.layer_norm(weight("x", [B, WIDE], t), WIDE)
    return Case(None, sgd(half_square(y * y)), MESH, "d:m", 4 * all_reduce(N, B.size * F32), {"all_reduce": 4})


@row
def rms_norm_of_a_split_width_step(t: str) -> Case:
    """One number a row forward, one backward."""
    y = mtf.layers.rms_norm(weight("x", [B, WIDE], t), WIDE)
    return Case(None, sgd(half_square(y * y)), MESH, "d:m", 2 * all_reduce(N, B.size * F32), {"all_reduce": 2})


# ---------------------------------------------------------------- linear algebra


@row
def gram_matrix_of_split_rows(t: str) -> Case:
    """x' x: a sum over the rows, [d, d]."""
    x = given("x", [B, WIDE], t)
    gram = product(x, mtf.rename_dimension(x, "d", "e"), WIDE, D("e", 16))
    return Case({"gram": gram}, [], MESH, "b:m", all_reduce(N, elements(gram) * width(t)), {"all_reduce": 1})


@row
def gram_matrix_between_split_rows(t: str) -> Case:
    """x x': all rows come to each device's."""
    x = given("x", [B, WIDE], t)
    gram = product(x, mtf.rename_dimension(x, "b", "other"), B, D("other", B.size))
    return Case({"gram": gram}, [], MESH, "b:m", all_gather(N, elements(x) * width(t)), {"all_gather": 1})


@row
def normal_equations(t: str) -> Case:
    """x' x and x' y of split rows: a matrix and a vector."""
    x, y = given("x", [B, WIDE], t), given("y", [B], t)
    left, right = product(x, mtf.rename_dimension(x, "d", "e"), WIDE, D("e", 16)), product(x, y, WIDE)
    least = all_reduce(N, elements(left, right) * width(t))
    return Case({"left": left, "right": right}, [], MESH, "b:m", least, {"all_reduce": 2})


@row
def covariance_of_split_rows(t: str) -> Case:
    """The mean of each column, then the sum of products around it."""
    x = given("x", [B, WIDE], t)
    centred = x - mtf.reduce_mean(x, reduced_dim=B)
    cov = product(centred, mtf.rename_dimension(centred, "d", "e"), WIDE, D("e", 16)) * (1 / B.size)
    least = all_reduce(N, (WIDE.size + elements(cov)) * width(t))
    return Case({"cov": cov}, [], MESH, "b:m", least, {"all_reduce": 2})


@row
def orthogonalisation(t: str) -> Case:
    """Five steps x <- 1.5 x - 0.5 x x' x of a tall split matrix: x' x is small, summed in every step."""
    steps, e = 5, D("e", WIDE.size)

    def step(x: Tensor) -> Tensor:
        gram = product(x, mtf.rename_dimension(x, "d", "e"), WIDE, e)
        turned = mtf.rename_dimension(product(x, gram, B, e), "e", "d")
        return x * 1.5 - turned * 0.5

    (y,) = mtf.while_loop(steps, step, [given("x", [B, WIDE], t) * 0.1])
    return Case({"y": y}, [], MESH, "b:m", steps * all_reduce(N, WIDE.size**2 * width(t)))


def square_matrix(t: str, n: int = 32) -> tuple[Tensor, mtf.Dimension, mtf.Dimension]:
    i, j = D("i", n), D("j", n)
    return given("a", [i, j], t), i, j


@row
def power_iteration(t: str) -> Case:
    """Split rows and vector: in each step all of the vector comes to each part of the rows, and its length is one sum.

    The normed vector would be gathered just as well: the same bytes.
    """
    steps = 5
    a, i, j = square_matrix(t)

    def step(v: Tensor) -> Tensor:
        w = product(a, mtf.rename_dimension(v, "i", "j"), i)
        return w * mtf.rsqrt(mtf.reduce_sum(mtf.square(w)) + 1e-6)

    (v,) = mtf.while_loop(steps, step, [given("v", [i], t)])
    least = steps * (all_gather(N, j.size * width(t)) + all_reduce(N, width(t)))
    return Case({"v": v}, [], MESH, "i:m", least)


@row
def conjugate_gradients(t: str) -> Case:
    """A step gathers the direction for the split rows, and sums two numbers: its curvature and the new residual."""
    steps = 3
    a, i, j = square_matrix(t)

    def step(x: Tensor, r: Tensor, p: Tensor, rr: Tensor) -> list[Tensor]:
        turned = product(a, mtf.rename_dimension(p, "i", "j"), i)
        rate = rr / (mtf.reduce_sum(p * turned) + 1.0)
        x, r = x + p * rate, r - turned * rate
        new = mtf.reduce_sum(mtf.square(r))
        return [x, r, r + p * (new / (rr + 1.0)), new]

    start = given("r", [i], t)
    x, *_ = mtf.while_loop(steps, step, [start * 0.0, start, start, given("rr", [], t)])
    least = steps * (all_gather(N, j.size * width(t)) + 2 * all_reduce(N, width(t)))
    return Case({"x": x}, [], MESH, "i:m", least)


@row
def scaled_rows_and_columns(t: str) -> Case:
    """Sinkhorn: columns are scaled by sums over the split rows, rows by their own sums."""
    steps = 3
    a, i, j = square_matrix(t)
    kernel = mtf.exp(a)

    def step(rows: Tensor) -> Tensor:
        columns = mtf.reciprocal(product(kernel, rows, j))
        return mtf.reciprocal(product(kernel, columns, i))

    (rows,) = mtf.while_loop(steps, step, [mtf.exp(given("rows", [i], t))])
    return Case({"rows": rows}, [], MESH, "i:m", steps * all_reduce(N, j.size * width(t)))


@row
def power_of_a_matrix(t: str) -> Case:
    """a a a of split rows: all rows of a come to each device once, for both products."""
    a, i, j = square_matrix(t)
    again = mtf.rename_dimension(mtf.rename_dimension(a, "j", "k"), "i", "j")  # [j, k]
    second = mtf.rename_dimension(product(a, again, i, D("k", j.size)), "k", "j")
    third = product(second, again, i, D("k", j.size))
    return Case({"y": third}, [], MESH, "i:m", all_gather(N, elements(a) * width(t)), {"all_gather": 1})


@row
def matrix_and_its_transpose(t: str) -> Case:
    """a + a' of split rows: each device sends the others their part of its rows."""
    a, *_ = square_matrix(t)
    turned = mtf.rename_dimension(mtf.rename_dimension(mtf.rename_dimension(a, "i", "k"), "j", "i"), "k", "j")
    return Case({"y": a + turned}, [], MESH, "i:m;j:m?", all_to_all(N, elements(a) * width(t)), {"all_to_all": 1})


@row
def length_of_a_split_weight(t: str) -> Case:
    """A weight divided by its length, as in weight normalisation: one number."""
    w = weight("w", [B, WIDE], t)
    y = w * mtf.rsqrt(mtf.reduce_sum(mtf.square(w)) + 1e-6)
    return Case({"y": y}, [], MESH, "b:m", all_reduce(N, width(t)), {"all_reduce": 1})


# ---------------------------------------------------------------- clusters, counts


@row
def k_means_step(t: str) -> Case:
    """Points stay, centres are whole: of each cluster the sum of its points, and how many they are."""
    clusters = D("c", 8)
    points = given("points", [B, WIDE], t)
    centres = mtf.variable("centres", [clusters, WIDE], trainable=False)
    held = mtf.cast(centres, t)
    scores = product(points, held, B, clusters) * 2.0 - mtf.reduce_sum(mtf.square(held), reduced_dim=WIDE)
    chosen = mtf.one_hot(mtf.argmax(scores, clusters), clusters, dtype=t)
    sums = product(chosen, points, clusters, WIDE)
    counts = mtf.reduce_sum(chosen, reduced_dim=B)
    update = mtf.assign(centres, mtf.cast(sums / mtf.maximum(counts, 1.0), "float32"))
    return Case(None, [update], MESH, "b:m", all_reduce(N, elements(sums, counts) * width(t)), {"all_reduce": 2})


@row
def histogram(t: str) -> Case:
    """Counts of a split batch."""
    bins = D("bins", 8)
    counts = mtf.reduce_sum(mtf.one_hot(given("at", [B], "int32"), bins, dtype=t), reduced_dim=B)
    return Case({"counts": counts}, [], MESH, "b:m", all_reduce(N, elements(counts) * width(t)), {"all_reduce": 1})


@row
def load_of_experts(t: str) -> Case:
    """The balancing loss of a router: mean gates times mean counts of a split batch, added over experts.

    One of the two means is made whole, [e]; its product with the other waits until it is one number.
    """
    e = D("e", 8)
    gates = mtf.softmax(given("x", [B, e], t), e)
    counts = mtf.one_hot(mtf.argmax(gates, e), e, dtype=t)
    loss = mtf.reduce_sum(mtf.reduce_mean(gates, reduced_dim=B) * mtf.reduce_mean(counts, reduced_dim=B))
    return Case({"loss": loss}, [], MESH, "b:m", all_reduce(N, (e.size + 1) * width(t)), {"all_reduce": 2})


@row
def penalty_of_a_split_weight(t: str) -> Case:
    """The loss of a product summed over the split k, and the squares of the weight: these are one number more."""
    x, w = given("x", [B, WIDE], t), weight("w", [WIDE, B], t)
    y = product(x, mtf.rename_dimension(w, "b", "n"), B, D("n", B.size))
    loss = half_square(y) + half_square(w) * 0.01
    return Case({"loss": loss}, [], MESH, "d:m", all_reduce(N, elements(y) * width(t)) + all_reduce(N, F32))


@row
def standardised_with_moving_statistics_stays(t: str) -> Case:
    """Inference: the mean is a variable, each row by itself."""
    x = given("x", [B, WIDE], t)
    y = (x - weight("mean", [WIDE], t)) * mtf.rsqrt(mtf.square(weight("deviation", [WIDE], t)) + 1e-5)
    return Case({"y": y}, [], MESH, "b:m", 0)
