"""Gradients added up by loops in loops: layers, microbatches, stages. Each crosses the wire once, whatever the trips.

What a trip adds to a gradient stays pending until the last trip. What a loop of layers stacks for that, one gradient
per layer, stays so as well where each device has the whole weights, and so room for whole gradients. Of fully sharded
weights it has no such room: a layer's gradient is scattered in each trip, as often as its weight is gathered anyway.
"""

from __future__ import annotations

from collections.abc import Sequence

import meshlib as mtf
from meshlib.core.graph import Tensor
from tests.lowering.minima.table import (
    F32,
    Case,
    D,
    all_gather,
    all_reduce,
    given,
    product,
    reduce_scatter,
    row,
    weight,
    width,
)

N, T = 4, 4
MESH = f"m:{N}"
B, A, E, L = D("b", 64), D("a", 8), D("e", 8), D("layers", 3)
W = A.size * E.size  # of a layer


def block(x: Tensor, w: Tensor) -> Tensor:
    """tanh(x W)"""
    others = [d for d in x.shape if d != A]
    return mtf.rename_dimension(mtf.tanh(product(x, w, *others, E)), "e", "a")


def scanned(x: Tensor, t: str) -> Tensor:
    """Layers in a loop."""

    def body(carries: Sequence[Tensor], slices: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        return (block(carries[0], slices[0]),), ()

    (y,), _ = mtf.scan(body, [x], [weight("w", [L, A, E], t)], L)
    return y


def written_out(x: Tensor, t: str) -> Tensor:
    """As many layers, one after the other."""
    for n in range(L.size):
        x = block(x, weight(f"w{n}", [A, E], t))
    return x


def accumulated(t: str, layout: str, least: int, network: object = scanned, mesh: str = "") -> Case:
    """A step of gradient descent in T microbatches."""

    def model(features: dict[str, Tensor]) -> dict[str, Tensor]:
        y = network(features["x"], t)  # type: ignore[operator]
        return {"loss": mtf.reduce_sum(mtf.square(mtf.cast(y, "float32")))}

    x = given("x", [B, A], t)
    grads, outputs = mtf.serialize_training_step({"x": x}, model, B, T, "sum")
    train = mtf.optimize.SgdOptimizer(0.1).apply_grads(grads, x.graph.trainable_variables)
    return Case({"loss": outputs["loss"]}, train, mesh or MESH, layout, least)


def recurrent(x: Tensor, t: str) -> Tensor:
    """One layer, L times over."""
    w = weight("w", [A, E], t)
    (y,), _ = mtf.scan(lambda carries, _: ((block(carries[0], w),), ()), [x], [], L)
    return y


def grouped(x: Tensor, t: str) -> Tensor:
    """Two loops of layers, in a loop."""
    groups = D("groups", 2)

    def body(carries: Sequence[Tensor], slices: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        layer = lambda c, s: ((block(c[0], s[0]),), ())  # noqa: E731
        return mtf.scan(layer, carries, slices, L)[0], ()

    (y,), _ = mtf.scan(body, [x], [weight("w", [groups, L, A, E], t)], groups)
    return y


@row
def recurrent_layer_of_microbatches_step(t: str) -> Case:
    """What the inner loop adds up is added up by the outer one, pending."""
    return accumulated(t, "b:m", all_reduce(N, W * F32) + all_reduce(N, F32), recurrent)


@row
def groups_of_scanned_layers_of_microbatches_step(t: str) -> Case:
    """A stack of stacks stays pending, too."""
    return accumulated(t, "b:m", all_reduce(N, 2 * L.size * W * F32) + all_reduce(N, F32), grouped)


@row
def scanned_layers_of_microbatches_step(t: str) -> Case:
    """What the layers' loop stacks is added up while pending, in float32, and reduced after the microbatches."""
    return accumulated(t, "b:m", all_reduce(N, L.size * W * F32) + all_reduce(N, F32))


@row
def scanned_layers_of_microbatches_with_split_slots_step(t: str) -> Case:
    """ZeRO-1: gradients scattered once, new weights gathered once."""
    least = reduce_scatter(N, L.size * W * F32) + all_gather(N, L.size * W * F32) + all_reduce(N, F32)
    return accumulated(t, "b:m;slots/a:m", least)


@row
def scanned_layers_of_microbatches_fully_sharded_step(t: str) -> Case:
    """Each microbatch gathers each layer twice and scatters its gradient, which is added as it is then."""
    each = 2 * all_gather(N, W * width(t)) + reduce_scatter(N, W * width(t))
    return accumulated(t, "b:m;variables/a:m;slots/a:m", T * L.size * each + all_reduce(N, F32))


@row
def layers_of_microbatches_fully_sharded_step(t: str) -> Case:
    """Written out nothing is stacked: gradients are scattered once, in float32; the first layer is gathered once."""
    gathered = T * (2 * L.size - 1) * all_gather(N, W * width(t))
    least = gathered + reduce_scatter(N, L.size * W * F32) + all_reduce(N, F32)
    return accumulated(t, "b:m;a:m?", least, written_out)


@row
def scanned_layers_of_microbatches_hybrid_sharded_step(t: str) -> Case:
    """Weights split over `f`, copied over `r`: scattered over `f` in each trip, summed over `r` once."""
    each = T * L.size * (2 * all_gather(2, W * width(t)) + reduce_scatter(2, W * width(t)))
    least = each + all_reduce(2, L.size * W // 2 * F32) + all_reduce(4, F32)
    return accumulated(t, "b:r+f;a:f?", least, scanned, "r:2;f:2")


def piped(t: str, microbatches: int, network: object, batch: int = B.size) -> tuple[Tensor, int]:
    """Two stages of L layers each; and the bytes of the permutes of a step where the batch is split in two."""

    def stage(x: Tensor) -> Tensor:
        return network(x, t)  # type: ignore[operator, no-any-return]

    y = mtf.layers.pipeline(stage, given("x", [D("b", batch), A], t), 2, microbatches)
    sent = 2 * (microbatches + 1) * (batch // microbatches // 2) * A.size * width(t)
    return y, sent + all_gather(2, batch // 2 * A.size * width(t))


def pipeline_of_loops(t: str, microbatches: int) -> Case:
    y, sent = piped(t, microbatches, scanned)
    loss = mtf.reduce_sum(mtf.square(mtf.cast(y, "float32"))) * 0.5
    least = sent + all_reduce(2, L.size * W * F32)
    return Case(None, mtf.optimize.SgdOptimizer(0.1).minimize(loss), "p:2;m:2", "stage:p;b:m", least)


@row
def pipeline_of_scanned_layers_step(t: str) -> Case:
    """Each stage's gradients are summed over the batch once."""
    return pipeline_of_loops(t, 4)


@row
def pipeline_of_scanned_layers_and_more_microbatches_step(t: str) -> Case:
    """Twice as many microbatches send as much of the gradients."""
    return pipeline_of_loops(t, 8)


@row
def pipelines_of_microbatches_step(t: str) -> Case:
    """Three loops in one another: layers of a stage, microbatches of the pipeline, and parts of the batch around it."""

    def model(features: dict[str, Tensor]) -> dict[str, Tensor]:
        y = mtf.layers.pipeline(lambda x: scanned(x, t), features["x"], 2, 4)
        return {"loss": mtf.reduce_sum(mtf.square(mtf.cast(y, "float32")))}

    x = given("x", [B, A], t)
    grads, outputs = mtf.serialize_training_step({"x": x}, model, B, 2, "sum")
    train = mtf.optimize.SgdOptimizer(0.1).apply_grads(grads, x.graph.trainable_variables)
    part = B.size // 2
    permutes = 2 * 2 * 5 * (part // 4 // 2) * A.size * width(t)
    least = permutes + 2 * all_gather(2, part // 2 * A.size * width(t))
    least += all_reduce(2, L.size * W * F32) + all_reduce(2, F32)
    return Case({"loss": outputs["loss"]}, train, "p:2;m:2", "stage:p;b:m", least)


def twice(x: Tensor, w: Tensor) -> Tensor:
    """The same layers, in two loops."""
    for _ in range(2):
        (x,), _ = mtf.scan(lambda c, s: ((block(c[0], s[0]),), ()), [x], [w], L)
    return x


@row
def scanned_layers_run_twice_step(t: str) -> Case:
    """What both loops stack is added up while pending."""
    y = twice(given("x", [B, A], t), weight("w", [L, A, E], t))
    loss = mtf.reduce_sum(mtf.square(mtf.cast(y, "float32"))) * 0.5
    least = all_reduce(N, L.size * W * width(t))
    return Case(None, mtf.optimize.SgdOptimizer(0.1).minimize(loss), MESH, "b:m", least)
