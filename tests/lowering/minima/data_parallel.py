"""The batch split over the devices: gradients that are summed, weights and slots that are split besides."""

from __future__ import annotations

from collections.abc import Sequence

import meshlib as mtf
from meshlib.core.graph import Operation, Tensor
from tests.lowering.minima.table import (
    F32,
    INT,
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
B, PIXELS, HIDDEN, CLASSES = D("b", 256), D("p", 16), D("h", 32), D("c", 8)
W1, W2 = PIXELS.size * HIDDEN.size, HIDDEN.size * CLASSES.size


def network(t: str, batch: mtf.Dimension = B, pixels: mtf.Dimension = PIXELS, hidden: mtf.Dimension = HIDDEN) -> Tensor:
    """The mean loss of relu(x w1) w2."""
    x, labels = given("x", [batch, pixels], t), given("labels", [batch], "int32")
    h = mtf.relu(product(x, weight("w1", [pixels, hidden], t), batch, hidden))
    logits = product(h, weight("w2", [hidden, CLASSES], t), batch, CLASSES)
    return mtf.reduce_mean(mtf.layers.softmax_cross_entropy_with_logits(logits, labels, CLASSES))


def linear(t: str) -> tuple[Tensor, Tensor]:
    """A loss of x w that needs x w itself, and w."""
    w = weight("w", [PIXELS, HIDDEN], t)
    return half_square(product(given("x", [B, PIXELS], t), w, B, HIDDEN)), w


# ---------------------------------------------------------------- gradients


@row
def data_parallel_step(t: str) -> Case:
    """Each gradient is summed once, and the loss."""
    loss = network(t)
    least = all_reduce(N, (W1 + W2) * width(t)) + all_reduce(N, F32)
    return Case({"loss": loss}, sgd(loss), MESH, "b:m", least, {"all_reduce": 3})


@row
def norm_of_a_split_batch_step(t: str) -> Case:
    """A layer norm of whole rows needs nothing; gradients of its scale and bias are sums over the batch, float32."""
    d = D("d", 16)
    y = mtf.layers.layer_norm(given("x", [B, d], t), d)
    least = all_reduce(N, 2 * d.size * F32)
    return Case(None, sgd(half_square(y * y)), MESH, "b:m", least, {"all_reduce": 2})


@row
def loss_and_accuracy_step(t: str) -> Case:
    """Two numbers besides the gradient: each device's examples are right or wrong by themselves."""
    x, labels = given("x", [B, PIXELS], t), given("labels", [B], "int32")
    logits = product(x, weight("w", [PIXELS, CLASSES], t), B, CLASSES)
    loss = mtf.reduce_mean(mtf.layers.softmax_cross_entropy_with_logits(logits, labels, CLASSES))
    right = mtf.reduce_mean(mtf.cast(mtf.equal(mtf.argmax(logits, CLASSES), labels), "float32"))
    least = all_reduce(N, PIXELS.size * CLASSES.size * width(t)) + 2 * all_reduce(N, F32)
    return Case({"loss": loss, "accuracy": right}, sgd(loss), MESH, "b:m", least, {"all_reduce": 3})


@row
def loss_over_a_counted_mask_step(t: str) -> Case:
    """The loss is divided by how many examples count, a sum over the batch: one number before the gradient.

    Dividing is linear in the gradient, which stays a partial sum until it is whole.
    """
    mask = given("mask", [B])
    y = product(given("x", [B, PIXELS], t), weight("w", [PIXELS, HIDDEN], t), B, HIDDEN)
    each = mtf.reduce_sum(mtf.square(mtf.cast(y, "float32")), reduced_dim=HIDDEN)
    loss = mtf.reduce_sum(each * mask) / mtf.reduce_sum(mask)
    least = all_reduce(N, W1 * width(t)) + all_reduce(N, 2 * F32)
    return Case({"loss": loss}, sgd(loss), MESH, "b:m", least, {"all_reduce": 3})


@row
def two_losses_step(t: str) -> Case:
    """Gradients of two losses for one weight, taken apart and added: their sum is reduced once."""
    v = mtf.variable("w", [PIXELS, HIDDEN])
    w = mtf.cast(v, t)
    y = product(given("x", [B, PIXELS], t), w, B, HIDDEN)
    losses = half_square(y), mtf.reduce_sum(mtf.cast(mtf.cos(y), "float32"))
    first, second = (mtf.gradients([loss], [w])[0] for loss in losses)
    total = mtf.cast(first + second * 0.5, "float32")
    return Case(None, [mtf.assign_sub(v, total * 0.1)], MESH, "b:m", all_reduce(N, W1 * width(t)), {"all_reduce": 1})


@row
def two_losses_of_two_inputs_step(t: str) -> Case:
    """As a generator's and a critic's: each loss by itself reads the weight, one update takes both."""
    v = mtf.variable("w", [PIXELS, HIDDEN])
    w = mtf.cast(v, t)
    grads = []
    for name in ("real", "fake"):
        y = product(given(name, [B, PIXELS], t), w, B, HIDDEN)
        grads += mtf.gradients([half_square(y)], [w])
    update = mtf.assign_sub(v, mtf.cast(grads[0] - grads[1], "float32") * 0.1)
    return Case(None, [update], MESH, "b:m", all_reduce(N, W1 * width(t)), {"all_reduce": 1})


@row
def microbatches_step(t: str) -> Case:
    """Four microbatches one after the other: gradients add up as partial sums, reduced once after the loop.

    They add up in float32, whatever each of them has: four in a type half as wide would be twice the bytes.
    """
    x = given("x", [B, PIXELS], t)

    def model(features: dict[str, Tensor]) -> dict[str, Tensor]:
        y = product(features["x"], weight("w", [PIXELS, HIDDEN], t), features["x"].shape[0], HIDDEN)
        return {"loss": mtf.reduce_mean(mtf.square(mtf.cast(y, "float32")))}

    grads, outputs = mtf.serialize_training_step({"x": x}, model, B, num_splits=4)
    train = mtf.optimize.SgdOptimizer(0.1).apply_grads(grads, x.graph.trainable_variables)
    least = all_reduce(N, W1 * F32) + all_reduce(N, F32)
    return Case({"loss": outputs["loss"]}, train, MESH, "b:m", least, {"all_reduce": 2})


# ---------------------------------------------------------------- weights split besides


def fully_sharded(t: str, n: int) -> int:
    """A weight gathered in the dtype it is multiplied in, its gradient scattered in the same; x's is not asked for."""
    return all_gather(n, W1 * width(t)) + reduce_scatter(n, W1 * width(t))


@row
def fully_sharded_step(t: str) -> Case:
    """w1 gathered once, w2 in both regions, since the hidden cotangent needs it, too; gradients scattered; the loss."""
    loss = network(t)
    weights = all_gather(N, (W1 + 2 * W2) * width(t))
    least = weights + reduce_scatter(N, (W1 + W2) * width(t)) + all_reduce(N, F32)
    return Case({"loss": loss}, sgd(loss), MESH, "b:m;h:m?", least)


@row
def fully_sharded_small_batch_step(t: str) -> Case:
    """The weights stay where they are, since the images are fewer than the hidden layer is wide.

    The images come to every part of w1, in each region; the hidden layer stays split by its width from there on; logits
    are scattered to the batch, their cotangent gathered. Moving w1 takes a gather and a scatter, of twice the bytes.
    """
    b, p, h = D("b", 32), D("p", 64), D("h", 64)
    loss = network(t, b, p, h)
    images, logits = b.size * p.size * width(t), b.size * CLASSES.size * width(t)
    least = all_gather(N, 2 * images) + reduce_scatter(N, logits) + all_gather(N, logits) + all_reduce(N, F32)
    kinds = {"all_gather": 3, "reduce_scatter": 1, "all_reduce": 1}
    return Case({"loss": loss}, sgd(loss), MESH, "b:m;h:m?", least, kinds)


@row
def fully_sharded_over_two_axes_step(t: str) -> Case:
    """Batch and weight over both axes: one gather and one scatter over the four devices."""
    loss, _ = linear(t)
    kinds = {"all_gather": 1, "reduce_scatter": 1}
    return Case(None, sgd(loss), "a:2;f:2", "b:a+f;h:(a+f)?", fully_sharded(t, 4), kinds)


@row
def hybrid_sharded_step(t: str) -> Case:
    """The weight split over `f`, copied over `a`: half of the gradient is left to sum over `a`."""
    loss, _ = linear(t)
    least = fully_sharded(t, 2) + all_reduce(2, W1 // 2 * width(t))
    return Case(None, sgd(loss), "a:2;f:2", "b:a+f;h:f?", least)


@row
def fully_sharded_and_megatron_step(t: str) -> Case:
    """Each half of the hidden layer's weights is split over the batch's axis besides: gathered, scattered there.

    The result is summed over `c`, of half the examples. The input's cotangent is not asked for, so w1 is gathered once.
    """
    n, d = 2, D("d", 16)
    x = given("x", [B, d], t)
    h = mtf.relu(product(x, weight("w1", [d, HIDDEN], t), B, HIDDEN))
    y = product(h, weight("w2", [HIDDEN, d], t), B, d)
    half = d.size * HIDDEN.size // n * width(t)
    least = (
        3 * all_gather(n, half)  # w1, and w2 in both regions
        + 2 * reduce_scatter(n, half)
        + all_reduce(n, elements(y) // n * width(t))
    )
    return Case(None, sgd(half_square(y)), "a:2;c:2", "b:a;h:c;d:a?", least)


@row
def stacked_layers_fully_sharded_step(t: str) -> Case:
    """Three scanned layers, split by an inner dim: a trip gathers its layer, forward and backward, and scatters."""
    layers, d = D("layers", 3), D("d", 16)
    e = D("e", d.size)
    w = weight("w", [layers, d, e], t)

    def body(carries: Sequence[Tensor], slices: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        y = mtf.tanh(product(carries[0], slices[0], B, e))
        return (mtf.rename_dimension(y, "e", "d"),), ()

    (y,), _ = mtf.scan(body, [given("x", [B, d], t)], [w], layers)
    a_layer = d.size * e.size * width(t)
    least = layers.size * (2 * all_gather(N, a_layer) + reduce_scatter(N, a_layer))
    return Case(None, sgd(half_square(y)), MESH, "b:m;variables/d:m;slots/d:m", least)


# ---------------------------------------------------------------- slots, averages, norms


def slots_split(t: str, optimizer: mtf.optimize.Optimizer) -> Case:
    loss = network(t)
    scattered = reduce_scatter(N, (W1 + W2) * width(t))
    least = scattered + all_gather(N, (W1 + W2) * F32) + all_reduce(N, F32)
    return Case({"loss": loss}, optimizer.minimize(loss), MESH, "b:m;slots/h:m", least)


@row
def momentum_with_split_slots_step(t: str) -> Case:
    """ZeRO-1: a gradient is scattered to its slot, a part updated, the new value gathered, float32 as it is kept."""
    return slots_split(t, mtf.optimize.MomentumOptimizer(0.1))


@row
def adam_with_split_slots_step(t: str) -> Case:
    """The same with two slots, neither of which moves."""
    return slots_split(t, mtf.optimize.AdamOptimizer(0.1))


@row
def adamw_of_split_weights_step(t: str) -> Case:
    """Weights split as in Megatron: slots and decay lie with them; the one sum is the product's."""
    x = given("x", [D("b", 8), PIXELS], t)
    h = mtf.relu(product(x, weight("w1", [PIXELS, HIDDEN], t), x.shape[0], HIDDEN))
    y = product(h, weight("w2", [HIDDEN, CLASSES], t), x.shape[0], CLASSES)
    train = mtf.optimize.AdamWOptimizer(0.1).minimize(half_square(y))
    return Case(None, train, MESH, "h:m", all_reduce(N, elements(y) * width(t)), {"all_reduce": 1})


@row
def averaged_weights_step(t: str) -> Case:
    """A moving average of a fully sharded weight lies where the weight does."""
    loss, _ = linear(t)
    average = mtf.variable("average", [PIXELS, HIDDEN], trainable=False)
    (v,) = loss.graph.trainable_variables
    updates: Sequence[Operation] = [*sgd(loss), mtf.assign(average, average * 0.99 + v * 0.01)]
    return Case(None, updates, MESH, "b:m;h:m?", fully_sharded(t, N))


@row
def clipped_split_gradients_step(t: str) -> Case:
    """The common norm of scattered gradients: one number for all of them."""
    loss = network(t)
    weights = all_gather(N, (W1 + 2 * W2) * width(t)) + reduce_scatter(N, (W1 + W2) * width(t))
    train = mtf.optimize.SgdOptimizer(0.1).minimize(loss, max_norm=1.0)
    return Case(None, train, MESH, "b:m;h:m?", weights + all_reduce(N, F32))


@row
def clipped_split_and_whole_gradients_step(t: str) -> Case:
    """Squares of the split gradients are a partial sum, those of the whole one join it: one number."""
    x = given("x", [D("b", 8), PIXELS], t)
    h = mtf.relu(product(x, weight("w1", [PIXELS, HIDDEN], t), x.shape[0], HIDDEN))
    y = product(h, weight("w2", [HIDDEN, CLASSES], t), x.shape[0], CLASSES) + weight("bias", [CLASSES], t)
    train = mtf.optimize.SgdOptimizer(0.1).minimize(half_square(y), max_norm=1.0)
    return Case(None, train, MESH, "h:m", all_reduce(N, elements(y) * width(t)) + all_reduce(N, F32), {"all_reduce": 2})


@row
def layers_scaled_by_their_lengths_step(t: str) -> Case:
    """LARS: of each split weight and of its gradient the length, one number each."""
    x = given("x", [D("b", 8), PIXELS], t)
    h = mtf.relu(product(x, weight("w1", [PIXELS, HIDDEN], t), x.shape[0], HIDDEN))
    y = product(h, weight("w2", [HIDDEN, CLASSES], t), x.shape[0], CLASSES)
    train = mtf.optimize.LarsOptimizer(0.1).minimize(half_square(y))
    return Case(None, train, MESH, "h:m", all_reduce(N, elements(y) * width(t)) + 2 * 2 * all_reduce(N, F32))


@row
def table_of_a_split_batch_step(t: str) -> Case:
    """One table for lookup and logits, fully sharded: gathered once a region, its two gradients scattered as one."""
    v, d = D("v", 32), D("h", 16)
    table, tokens = weight("table", [v, d], t), given("tokens", [B], "int32")
    x = mtf.tanh(mtf.gather(table, tokens, v))
    loss = half_square(product(x, table, B, v))
    moved = elements(table) * width(t)
    assert moved < B.size * (d.size * width(t) + INT)  # so the table moves, not what is looked up in it
    return Case(None, sgd(loss), MESH, "b:m;h:m?", 2 * all_gather(N, moved) + reduce_scatter(N, moved))
