"""Pipelines: in each trip a microbatch goes to the next stage, and one of the stream to the stage before; backward both
go the other way. Besides, what the layers inside send; nothing else."""

from __future__ import annotations

import meshlib as mtf
from meshlib.core.graph import Tensor
from tests.lowering.minima.table import (
    F32,
    Case,
    D,
    all_gather,
    all_reduce,
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
M = 8  # microbatches
B, A, H = D("b", 16), D("a", 8), D("h", 16)
MICRO, SMALL = D("microbatch", M), D("b", B.size // M)


def block(t: str) -> int:
    """Bytes of a microbatch."""
    return SMALL.size * A.size * width(t)


def trips(repeats: int = 1) -> int:
    return repeats * M + N - 1


def each_way() -> int:
    """Microbatches that a stage in the middle sends in a trip: to its neighbours on both sides; of two each has one."""
    return 2 if N > 2 else 1


def there_and_back() -> int:
    """The same in a trip forward and one backward."""
    return 2 * each_way()


def stage(t: str) -> object:
    """x + relu(x W) U"""

    def apply(x: Tensor) -> Tensor:
        dims = [d for d in x.shape if d != A]
        h = mtf.relu(product(x, weight("w", [A, H], t), *dims, H))
        return x + product(h, weight("u", [H, A], t), *dims, A)

    return apply


def piped(t: str, repeats: int = 1) -> Tensor:
    return mtf.layers.pipeline(stage(t), given("x", [B, A], t), N, M, repeats)  # type: ignore[arg-type, no-any-return]


@row
def pipeline(t: str) -> Case:
    """x is everywhere; the stream leaves an equal share of the results on each stage, which all get."""
    least = each_way() * trips() * block(t) + all_gather(N, M * block(t))
    return Case({"y": piped(t)}, [], MESH, "stage:m", least)


@row
def pipeline_step(t: str) -> Case:
    """Backward the cotangent of y is everywhere, and goes from stage to stage as x did; weights are where their
    gradients are made."""
    least = there_and_back() * trips() * block(t) + all_gather(N, M * block(t))
    return Case(None, sgd(half_square(piped(t))), MESH, "stage:m", least)


@row
def circular_pipeline_step(t: str) -> Case:
    """Twice as many trips of half the work; the last stage sends to the first, and the stream moves in half of them."""
    least = (2 * trips(2) + each_way() * trips()) * block(t) + all_gather(N, M * block(t))
    return Case(None, sgd(half_square(piped(t, 2))), MESH, "stage:m", least)


@row
def pipeline_of_split_microbatches_step(t: str) -> Case:
    """What is before and after the pipeline is divided by microbatches, as the stream is, whose first slot moves on
    before the loop; the loss is a sum of N numbers."""
    x = given("x", [MICRO, SMALL, A], t)
    y = mtf.layers.pipeline(stage(t), x, N, MICRO)  # type: ignore[arg-type]
    least = there_and_back() * trips() * block(t) + block(t)
    return Case(None, sgd(half_square(y)), MESH, "stage:m;microbatch:m", least)


@row
def pipeline_with_split_batch_step(t: str) -> Case:
    """Gradients are added up over the trips before they are summed over the batch, once."""
    weights = 2 * A.size * H.size * F32  # of a stage
    sent = there_and_back() * trips() * block(t) // 2
    least = sent + all_gather(N, M * block(t) // 2) + all_reduce(2, weights)
    return Case(None, sgd(half_square(piped(t))), f"m:{N};data:2", "stage:m;b:data", least)


@row
def pipeline_of_tensor_parallel_layers_step(t: str) -> Case:
    """A layer sums its result, and backward the cotangent of its input, in each trip, in bubbles too."""
    sums = 2 * trips() * all_reduce(2, block(t))
    least = there_and_back() * trips() * block(t) + sums + all_gather(N, M * block(t))
    return Case(None, sgd(half_square(piped(t))), f"m:{N};tensor:2", "stage:m;h:tensor", least)


@row
def pipeline_of_two_stages_a_device_step(t: str) -> Case:
    """Of the microbatches of two stages one moves to the next device."""
    y = mtf.layers.pipeline(stage(t), given("x", [B, A], t), 2 * N, M)  # type: ignore[arg-type]
    least = there_and_back() * (M + 2 * N - 1) * block(t) + all_gather(N, M * block(t))
    return Case(None, sgd(half_square(y)), MESH, "stage:m", least)


@row
def pipeline_of_one_microbatch_step(t: str) -> Case:
    """One stage after the other; the result is on the last."""
    y = mtf.layers.pipeline(stage(t), given("x", [B, A], t), N, 1)  # type: ignore[arg-type]
    least = there_and_back() * N * M * block(t) + all_reduce(N, M * block(t))
    return Case(None, sgd(half_square(y)), MESH, "stage:m", least)
