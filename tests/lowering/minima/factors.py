"""Sums that follow from others: factors that move out of them, norms and their gradients, statistics of one product."""

from __future__ import annotations

from collections.abc import Sequence

import meshlib as mtf
from meshlib.core.graph import Operation, Tensor
from tests.lowering.minima.table import Case, D, all_reduce, elements, given, product, row, sgd, weight, width

N = 4
MESH = f"m:{N}"
B, L, WIDE, C, K = D("b", 16), D("l", 16), D("d", 16), D("c", 8), D("k", 8)


def sums(t: str, *sizes: int) -> int:
    """So many elements reduced."""
    return all_reduce(N, sum(sizes) * width(t))


def total(y: Tensor) -> Tensor:
    """A loss that feels every element in its own way."""
    return mtf.reduce_sum(mtf.sin(y))


def centred(x: Tensor, *dims: mtf.Dimension) -> tuple[Tensor, Tensor]:
    """x around its mean, and one over its deviation."""
    around = x - mtf.reduce_mean(x, reduced_dim=dims)
    return around, mtf.rsqrt(mtf.reduce_mean(mtf.square(around), reduced_dim=dims) + 1e-5)


def affine(x: Tensor, t: str, *dims: mtf.Dimension) -> Tensor:
    """Scaled and moved by weights."""
    return x * weight("scale", dims, t) + weight("bias", dims, t)


# ---------------------------------------------------------------- batch norms, however they are written


@row
def batch_norm_behind_a_product_step(t: str) -> Case:
    """Mean and variance; backward two sums a channel, as everywhere below, and the gradient of the product's weight."""
    x, w = given("x", [B, WIDE], t), weight("w", [WIDE, C], t)
    around, scale = centred(product(x, w, B, C), B)
    y = mtf.relu(affine(around * scale, t, C))
    return Case(None, sgd(total(y)), MESH, "b:m", sums(t, 4 * C.size, elements(w)))


@row
def batch_norm_by_division_step(t: str) -> Case:
    """The deviation divides; the mean is that of squared differences."""
    x = weight("x", [B, L, C], t)
    mean = mtf.reduce_mean(x, reduced_dim=[B, L])
    variance = mtf.reduce_mean(mtf.squared_difference(x, mean), reduced_dim=[B, L])
    y = affine((x - mean) / mtf.sqrt(variance + 1e-5), t, C)
    return Case(None, sgd(total(y)), MESH, "b:m", sums(t, 4 * C.size))


@row
def batch_norm_by_moments_step(t: str) -> Case:
    """The variance is the mean square less the squared mean; scale and deviation are multiplied first."""
    x = weight("x", [B, C], t)
    mean = mtf.reduce_mean(x, reduced_dim=B)
    variance = mtf.reduce_mean(mtf.square(x), reduced_dim=B) - mtf.square(mean)
    y = (x - mean) * (mtf.rsqrt(variance + 2.0) * weight("scale", [C], t)) + weight("bias", [C], t)
    return Case(None, sgd(total(y)), MESH, "b:m", sums(t, 4 * C.size))


@row
def batch_norm_of_chosen_rows_step(t: str) -> Case:
    """Weighted by a mask: how many there are is a number; what is weighted around its weighted mean sums to nothing."""
    x, mask = weight("x", [B, C], t), mtf.square(given("mask", [B], t))
    count = mtf.reduce_sum(mask)
    around = x - mtf.reduce_sum(x * mask, reduced_dim=B) / count
    variance = mtf.reduce_sum(mtf.square(around) * mask, reduced_dim=B) / count
    y = affine(around * mtf.rsqrt(variance + 1e-5), t, C)
    return Case(None, sgd(total(y)), MESH, "b:m", sums(t, 4 * C.size, 1))


def scanned_batch_norms(t: str, remat: str) -> Sequence[Operation]:
    """A step of three layers."""
    layers = D("layers", 3)

    def layer(carries: Sequence[Tensor], _: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        around, scale = centred(carries[0], B)
        return [mtf.sin(affine(around * scale, t, C))], []

    (y,), _ = mtf.scan(layer, [weight("x", [B, C], t)], dim=layers, stack_variables=True, remat=remat)
    return sgd(total(y))


@row
def batch_norms_recomputed_in_a_scan_step(t: str) -> Case:
    """A layer has two statistics in forward, again in backward, and two sums of cotangents."""
    return Case(None, scanned_batch_norms(t, "full"), MESH, "b:m", 3 * sums(t, 6 * C.size))


@row
def batch_norms_kept_in_a_scan_step(t: str) -> Case:
    """Two statistics a layer, and two sums of cotangents."""
    return Case(None, scanned_batch_norms(t, "none"), MESH, "b:m", 3 * sums(t, 4 * C.size))


@row
def instance_norm_of_a_split_length_step(t: str) -> Case:
    """The gradients of scale and bias are sums over examples of the two sums that the norm's gradient needs."""
    around, scale = centred(weight("x", [B, L, C], t), L)
    return Case(None, sgd(total(affine(around * scale, t, C))), MESH, "l:m", 4 * sums(t, B.size * C.size))


@row
def style_norm_of_a_split_length_step(t: str) -> Case:
    """Scale and bias of each example: their gradients are the two sums that the norm's needs."""
    around, scale = centred(weight("x", [B, L, C], t), L)
    y = affine(around * scale, t, B, C)
    return Case(None, sgd(total(y)), MESH, "l:m", 4 * sums(t, B.size * C.size))


@row
def weight_norm_step(t: str) -> Case:
    """The lengths of columns, the product; backward the sum of dw w a column, for gain and length."""
    x, w = given("x", [B, WIDE], t), weight("w", [WIDE, K], t)
    length = mtf.rsqrt(mtf.reduce_sum(mtf.square(w), reduced_dim=WIDE))
    y = product(x, w * (weight("gain", [K], t) * length), B, K)
    return Case(None, sgd(total(y)), MESH, "d:m", sums(t, elements(y), 2 * K.size))


@row
def cosine_similarity_step(t: str) -> Case:
    """Two lengths and a product a row; backward takes the same product."""
    x, y = weight("x", [B, WIDE], t), weight("y", [B, WIDE], t)
    units = [z * mtf.rsqrt(mtf.reduce_sum(mtf.square(z), reduced_dim=WIDE) + 1e-6) for z in (x, y)]
    return Case(None, sgd(total(mtf.reduce_sum(units[0] * units[1], reduced_dim=WIDE))), MESH, "d:m", 3 * sums(t, 16))


# ---------------------------------------------------------------- factors that make a sum larger


@row
def outer_product_summed(t: str) -> Case:
    """sum over l of a[l, c] q[d]: that of a, then the product."""
    y = mtf.reduce_sum(given("a", [L, C], t) * given("q", [WIDE], t), reduced_dim=L)
    return Case({"y": mtf.tanh(y)}, [], MESH, "l:m", sums(t, C.size), {"all_reduce": 1})


@row
def product_of_three_operands(t: str) -> Case:
    """q[b, k] x[b, d] w[d]: a number a row of x w, whatever is multiplied first."""
    q, x, w = given("q", [B, K], t), given("x", [B, WIDE], t), weight("w", [WIDE], t)
    y = mtf.einsum([q, x, w], output_shape=[B, K])
    return Case({"y": mtf.tanh(y)}, [], MESH, "d:m", sums(t, B.size), {"all_reduce": 1})


@row
def product_gated_twice(t: str) -> Case:
    """(g x) w and (h x) w: x w once."""
    x, w = given("x", [B, WIDE], t), weight("w", [WIDE, K], t)
    gates = [given(name, [B], t) for name in ("g", "h")]
    outputs = {gate.name: mtf.tanh(product(x * gate, w, B, K)) for gate in gates}
    return Case(outputs, [], MESH, "d:m", sums(t, B.size * K.size), {"all_reduce": 1})


@row
def mean_beside_a_scaled_sum(t: str) -> Case:
    """One number serves both."""
    x = mtf.square(given("x", [B], t))
    outputs = {"mean": mtf.exp(mtf.reduce_mean(x)), "sum": mtf.exp(mtf.reduce_sum(x * 0.25))}
    return Case(outputs, [], MESH, "b:m", sums(t, 1), {"all_reduce": 1})


@row
def loss_beside_its_parts(t: str) -> Case:
    """The mean of a weighted sum follows from the means of its terms."""
    x, z = given("x", [B], t), mtf.square(given("z", [B], t))
    means = {"loss": mtf.reduce_mean(x + z * 1e-4), "x": mtf.reduce_mean(x), "z": mtf.reduce_mean(z)}
    return Case({name: mtf.exp(y) for name, y in means.items()}, [], MESH, "b:m", 2 * sums(t, 1))


@row
def repeated_and_summed(t: str) -> Case:
    """sum over b of q[c] is q, so many times: nothing to send."""
    q = mtf.broadcast(mtf.tanh(given("q", [C], t)), [B, C])
    return Case({"y": mtf.reduce_sum(q, reduced_dim=B)}, [], MESH, "b:m", 0)


@row
def rows_of_what_is_recomputed(t: str) -> Case:
    """relu(q r') of whole weights, which is computed whole where its rows are summed: nothing to send."""
    r = D("r", 96)
    y = mtf.relu(weight("q", [C], t) * weight("r", [r], t))
    return Case({"y": mtf.reduce_sum(y, reduced_dim=r)}, [], MESH, "activations/r:m", 0)


# ---------------------------------------------------------------- statistics


@row
def mixture_of_gaussians(t: str) -> Case:
    """Of each cluster its weight, and the sums of its points and of their squares."""
    x, share = given("x", [B, WIDE], t), mtf.softmax(given("logits", [B, K], t), K)
    weights = mtf.reduce_sum(share, reduced_dim=B)
    mean = product(share, x, K, WIDE) / weights
    variance = product(share, mtf.square(x), K, WIDE) / weights - mtf.square(mean)
    return Case({"mean": mean, "variance": variance}, [], MESH, "b:m", sums(t, K.size, 2 * K.size * WIDE.size))


@row
def newton_step_of_a_logistic_regression(t: str) -> Case:
    """Gradient and Hessian of split examples."""
    x, labels, w = given("x", [B, WIDE], t), given("labels", [B], t), weight("w", [WIDE], t)
    p = mtf.sigmoid(product(x, w, B))
    gradient = product(x, p - labels, WIDE)
    hessian = product(x * (p * (1.0 - p)), mtf.rename_dimension(x, "d", "e"), WIDE, D("e", WIDE.size))
    outputs = {"gradient": gradient, "hessian": hessian}
    return Case(outputs, [], MESH, "b:m", sums(t, elements(gradient, hessian)))


@row
def correlation_of_two_columns(t: str) -> Case:
    """Two means, then three products of what lies around them."""
    x, y = (z - mtf.reduce_mean(z) for z in (given("x", [B], t), given("y", [B], t)))
    squares = mtf.reduce_sum(mtf.square(x)) * mtf.reduce_sum(mtf.square(y))
    outputs = {"correlation": mtf.reduce_sum(x * y) * mtf.rsqrt(squares + 1e-6)}
    return Case(outputs, [], MESH, "b:m", 5 * sums(t, 1))


@row
def spectral_norm(t: str) -> Case:
    """One step of the power iteration on split columns: a length, then w v, whole, from which the rest follows."""
    i, j = D("i", 16), D("j", 32)
    w, u = weight("w", [i, j], t), given("u", [i], t)
    v = product(w, u, j)
    v = v * mtf.rsqrt(mtf.reduce_sum(mtf.square(v)) + 1e-6)
    s = product(w, v, i)
    sigma = mtf.reduce_sum(s * s * mtf.rsqrt(mtf.reduce_sum(mtf.square(s)) + 1e-6))
    y = product(given("x", [B, i], t), w, B, j) / sigma
    return Case({"y": y}, [], MESH, "j:m", sums(t, 1) + sums(t, i.size))


@row
def factorisation_machine(t: str) -> Case:
    """Of split features: x v, [b, k], squared; the sum of squares waits until it is a number a row."""
    f = D("f", 32)
    x, v = given("x", [B, f], t), weight("v", [f, K], t)
    pairs = mtf.square(product(x, v, B, K)) - product(mtf.square(x), mtf.square(v), B, K)
    y = mtf.reduce_sum(pairs, reduced_dim=K) * 0.5
    return Case({"y": y}, [], MESH, "f:m", sums(t, B.size * K.size) + sums(t, B.size))


@row
def squeeze_and_excite_step(t: str) -> Case:
    """The mean of a split length gates the channels; backward one sum more, of the gates' gradient."""
    x = weight("x", [B, L, C], t)
    mean = mtf.reduce_mean(x, reduced_dim=L)
    hidden = mtf.relu(product(mean, weight("w1", [C, K], t), B, K))
    gates = mtf.sigmoid(product(hidden, weight("w2", [K, C], t), B, C))
    return Case(None, sgd(total(x * gates)), MESH, "l:m", 2 * sums(t, B.size * C.size))


@row
def normalised_advantages(t: str) -> Case:
    """A policy's loss: mean and variance of the advantages, then one number."""
    around, scale = centred(given("advantages", [B], t), B)
    loss = mtf.reduce_mean(around * scale * given("log_p", [B], t))
    return Case({"loss": loss}, [], MESH, "b:m", 3 * sums(t, 1))
