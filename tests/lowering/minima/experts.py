"""Mixtures of experts: the layer as users write it, experts over an axis of their own, that of the data, two, and more.

Places are the rows that experts have room for, P bytes in all of a token's features; tokens are T bytes. Every layer
sends its places to the experts and what they make back, and the cotangents of both: two exchanges each. Weights of
experts stay; the router's gradient alone is summed over all devices that share the batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import meshlib as mtf
from meshlib.core.graph import Operation
from meshlib.layers import Mixture, Routing
from tests.lowering.minima.table import (
    F32,
    Case,
    D,
    all_gather,
    all_reduce,
    all_to_all,
    given,
    half_square,
    reduce_scatter,
    row,
    sgd,
    weight,
    width,
)

N = 4
MESH = f"m:{N}"
GROUPS, TOKENS, WIDE, EXPERTS, FF = D("g", 8), D("s", 32), D("d", 16), D("e", 4), D("f", 64)
ONE = Routing(gating="switch", capacity_factor=1.0, min_expert_capacity=1)
TWO = Routing(top_k=2, capacity_factor=1.0, min_expert_capacity=1)


def mixture(t: str, routing: Routing, trained: bool, form: str = "gather", shared: bool = False) -> tuple[Mixture, int]:
    """A layer on tokens, which are a variable where there is a gradient; the bytes of all places."""
    x = (weight if trained else given)("x", [GROUPS, TOKENS, WIDE], t)
    beside = D("shared", 64) if shared else None
    y = mtf.layers.moe(x, EXPERTS, FF, routing, shared_channels=beside, training=True, form=form)
    places = EXPERTS.size * routing.places(EXPERTS.size, TOKENS.size) * GROUPS.size
    return y, places * WIDE.size * width(t)


def step(y: Mixture) -> Sequence[Operation]:
    """Of a loss with all its parts."""
    return sgd(half_square(y.values) + mtf.reduce_mean(y.loss))


def router(n: int) -> int:
    """The sum of its gradient, which is float32, over that many devices."""
    return all_reduce(n, WIDE.size * EXPERTS.size * F32)


# ---------------------------------------------------------------- over the axis of the data


def forward(t: str, routing: Routing, form: str) -> Case:
    """Places to the experts and back."""
    y, places = mixture(t, routing, trained=False, form=form)
    return Case({"y": y.values}, [], MESH, "g:m;e:m", 2 * all_to_all(N, places), {"all_to_all": 2})


def whole_step(t: str, routing: Routing, form: str) -> Case:
    """And their cotangents; the losses are each group's own."""
    y, places = mixture(t, routing, trained=True, form=form)
    sent = 4 * all_to_all(N, places) + router(N)
    return Case(None, step(y), MESH, "g:m;e:m", sent, {"all_to_all": 4, "all_reduce": 1})


@row
def experts_over_the_data(t: str) -> Case:
    """One expert for each token, places found by lookups."""
    return forward(t, ONE, "gather")


@row
def experts_over_the_data_by_masks(t: str) -> Case:
    """The same by products with masks, which are made where the tokens are."""
    return forward(t, ONE, "einsum")


@row
def experts_over_the_data_step(t: str) -> Case:
    """Two experts for each token: twice the places."""
    return whole_step(t, TWO, "gather")


@row
def experts_over_the_data_by_masks_step(t: str) -> Case:
    """The same by products with masks."""
    return whole_step(t, TWO, "einsum")


@row
def experts_that_choose_over_the_data_step(t: str) -> Case:
    """Experts rank the tokens of each group where these are."""
    return whole_step(t, Routing(gating="expert_choice", top_k=2, capacity_factor=1.0), "gather")


@row
def experts_left_to_none_over_the_data_step(t: str) -> Case:
    """No token left behind: each finds another expert in later rounds, decided where it is."""
    return whole_step(t, Routing(gating="ntlb", capacity_factor=1.0, min_expert_capacity=1), "gather")


@row
def experts_by_biased_groups_over_the_data_step(t: str) -> Case:
    """A choice by sigmoid scores with biases, within the best groups of experts, sends nothing either."""
    routing = Routing(
        top_k=2, scores="sigmoid", bias=True, expert_groups=2, groups_per_token=1, group_score="max",
        capacity_factor=1.0, min_expert_capacity=1, z_loss=0.001,
    )  # fmt: skip
    return whole_step(t, routing, "gather")


@row
def dropped_tokens_are_counted(t: str) -> Case:
    """What found no room is a number of each group, added up."""
    y, _ = mixture(t, ONE, trained=False)
    return Case({"dropped": mtf.reduce_sum(y.dropped)}, [], MESH, "g:m;e:m", all_reduce(N, 4), {"all_reduce": 1})


@row
def shared_expert_over_the_data_step(t: str) -> Case:
    """Its weights are on all devices: their gradients are summed as any other's."""
    y, places = mixture(t, ONE, trained=True, shared=True)
    shared = all_reduce(N, 2 * WIDE.size * 64 * width(t))
    return Case(None, step(y), MESH, "g:m;e:m", 4 * all_to_all(N, places) + router(N) + shared)


# ---------------------------------------------------------------- over other axes


@row
def experts_over_an_axis_of_their_own_step(t: str) -> Case:
    """Batch over both axes, experts over one: exchanges stay within it, over the other weights are summed as usual."""
    y, places = mixture(t, ONE, trained=True)
    exchanges = 4 * all_to_all(2, places // 2)
    experts = 2 * EXPERTS.size * WIDE.size * FF.size // 2 * width(t)
    sent = exchanges + all_reduce(2, experts) + router(4)
    return Case(None, step(y), "data:2;expert:2", "g:data+expert;e:expert", sent)


@row
def experts_over_two_axes_step(t: str) -> Case:
    """Batch and experts over both axes: one exchange over the two sends less than one over each."""
    y, places = mixture(t, TWO, trained=True)
    sent = 4 * all_to_all(4, places) + router(4)
    return Case(None, step(y), "a:2;b:2", "g:a+b;e:a+b", sent, {"all_to_all": 4, "all_reduce": 1})


@row
def experts_whose_width_is_split(t: str) -> Case:
    """Two devices share an expert, which makes partial sums of its places.

    There are as many places as tokens: reduced and scattered before the way back, half of it goes, and is gathered
    after; summed at the tokens it would be 1/2 + 1 in place of 1/2 + 1/4 + 1/2.
    """
    y, places = mixture(t, ONE, trained=False)
    own = places // 2  # on each device
    sent = all_to_all(2, places) + reduce_scatter(2, own) + all_to_all(2, places // 2) + all_gather(2, own)
    return Case({"y": y.values}, [], "data:2;tensor:2", "g:data;e:data;f:tensor", sent)


@row
def experts_whose_width_is_split_step(t: str) -> Case:
    """Cotangents of places are partial sums, too."""
    y, places = mixture(t, ONE, trained=True)
    own = places // 2
    once = all_to_all(2, places) + reduce_scatter(2, own) + all_to_all(2, places // 2) + all_gather(2, own)
    return Case(None, step(y), "data:2;tensor:2", "g:data;e:data;f:tensor", 2 * once + router(2))


@row
def experts_of_tokens_that_all_have(t: str) -> Case:
    """An axis for experts that splits no tokens: each device looks up those of its experts.

    What they make has no more places than there are tokens, so it is put together: half of summing it at the tokens.
    """
    y, places = mixture(t, ONE, trained=False)
    return Case({"y": y.values}, [], MESH, "e:m", all_gather(N, places), {"all_gather": 1})


@row
def experts_under_fully_sharded_weights_step(t: str) -> Case:
    """Without a rule for experts their weights are gathered, forward and backward, and their gradients scattered."""
    y, _ = mixture(t, ONE, trained=True)
    weights = 2 * EXPERTS.size * WIDE.size * FF.size * width(t)
    routers = WIDE.size * EXPERTS.size * F32
    sent = 2 * all_gather(N, weights) + reduce_scatter(N, weights)
    return Case(None, step(y), MESH, "g:m;d:m?", sent + 2 * all_gather(N, routers) + reduce_scatter(N, routers))
