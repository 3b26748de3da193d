"""Router of a mixture of experts: scores, choices, and load-balancing losses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from layouts import Dimension, Shape
from meshlib.core import initializers
from meshlib.core.arguments import at, number
from meshlib.core.dtypes import FLOAT32, DType
from meshlib.core.errors import ShapeError
from meshlib.core.graph import Tensor, scope
from meshlib.layers.expert_assignment import (
    SMALL,
    Slots,
    assigned_slots,
    assigned_slots_in_shards,
    chosen_by_experts,
    chosen_by_tokens,
    counts,
)
from meshlib.layers.expert_rows import ExpertRows
from meshlib.layers.norms import widened
from meshlib.layers.numerics import Numerics
from meshlib.layers.routing import Routing
from meshlib.ops.building import floats, tensor
from meshlib.ops.control.sources import variable
from meshlib.ops.control.state import stop_gradient
from meshlib.ops.movement.indexing import gather
from meshlib.ops.pointwise.arithmetic import add, divide, maximum, multiply, sigmoid, sign, where
from meshlib.ops.pointwise.casts import cast
from meshlib.ops.pointwise.random import random_uniform
from meshlib.ops.pointwise.reductions import reduce_logsumexp, reduce_mean, reduce_sum, softmax


@dataclass(frozen=True)
class Decision:
    """Result of the router: `slots`, and per group the losses and dropped choices, see `mtf.layers.moe`."""

    slots: Slots
    balance_loss: Tensor
    z_loss: Tensor
    dropped: Tensor
    load: Tensor


def decide(
    x: Tensor,
    tokens: Dimension,
    experts: Dimension,
    places: Dimension,
    routing: Routing,
    training: bool,
    nonpadding: Tensor | None,
    share: Tensor | None,
    numerics: Numerics,
    held: tuple[Dimension, ...] = (),
    rows: ExpertRows | None = None,
) -> Decision:
    """Route x [groups, tokens, features] with float32 scores; each index of `held` has its own router.

    `places` are the slots of each expert; with `rows` the experts of a shard share them. `share` is
    `real_share(nonpadding)`, by which the losses are divided, so that padding does not count.
    """
    inputs = widened(x)
    if training and routing.jitter:
        inputs = multiply(inputs, random_uniform(x.shape, 1 - routing.jitter, 1 + routing.jitter, inputs.dtype))
    logits, scores, favour = _scores(inputs, experts, routing, numerics, held)
    if routing.gating == "expert_choice":
        slots, dropped, load = chosen_by_experts(scores, tokens, experts, places, routing, nonpadding)
        counted = load
    else:
        chosen = chosen_by_tokens(scores, favour, experts, routing, training, nonpadding)
        if rows is None:
            slots, dropped, load = assigned_slots(chosen, tokens, experts, places, routing)
        else:
            slots, dropped, load = assigned_slots_in_shards(chosen, experts, rows)
        first = chosen.index.shape.dim("choices")
        counted = counts(gather(chosen.index, 0, first), experts, load.shape) if routing.gating == "top_2" else load
    balance = _balance_loss(scores, counted, tokens, experts, routing, nonpadding)
    z = _z_loss(logits, tokens, experts, nonpadding)
    if share is not None:
        balance, z = (divide(loss, share, loss.shape) for loss in (balance, z))
    return Decision(slots, balance, z, dropped, load)


def real_share(nonpadding: Tensor, dtype: DType, kept: Sequence[Dimension] = ()) -> Tensor:
    """The share of non-padding tokens, above 0: the mean of the bool mask over all dims except `kept`."""
    return maximum(reduce_mean(cast(nonpadding, dtype), output_shape=list(kept)), SMALL)


def _scores(
    inputs: Tensor, experts: Dimension, routing: Routing, numerics: Numerics, held: tuple[Dimension, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, the scores for gates, and the scores for the choice, which may have a bias."""
    features = inputs.shape[-1]
    with scope("router"):
        kernel = variable(
            "kernel", [*held, features, experts], initializers.scaled_normal([features]), numerics.variable_dtype,
            numerics.slice_dtype, inputs.dtype,
        )  # fmt: skip
        logits = numerics.unquantised.product(inputs, kernel, Shape([*inputs.shape[:-1], experts]), "logits")
        if routing.logit_bias:
            offset = numerics.variable("logit_bias", [*held, experts], initializers.zeros(), logits.dtype)
            logits = add(logits, offset, logits.shape)
        scores = softmax(logits, experts) if routing.scores == "softmax" else sigmoid(logits)
        if not routing.bias:
            return logits, scores, scores
        start = initializers.zeros()
        bias = variable("bias", [*held, experts], start, "float32", activation_dtype=scores.dtype, trainable=False)
    return logits, scores, scores + stop_gradient(bias)


def _balance_loss(
    scores: Tensor, counted: Tensor, tokens: Dimension, experts: Dimension, routing: Routing, nonpadding: Tensor | None
) -> Tensor:
    """experts x sum over experts of (share of choices) x (mean score), per group; the shares have no gradient."""
    share = scores
    if routing.scores != "softmax":
        share = divide(scores, reduce_sum(scores, reduced_dim=experts) + SMALL)
    if nonpadding is not None:
        share = where(nonpadding, share, 0.0, share.shape)
    part = stop_gradient(cast(counted, share.dtype))
    part = divide(part, maximum(reduce_sum(part, reduced_dim=experts), 1.0))
    return reduce_sum(part * reduce_mean(share, reduced_dim=tokens), reduced_dim=experts) * float(experts.size)


def _z_loss(logits: Tensor, tokens: Dimension, experts: Dimension, nonpadding: Tensor | None) -> Tensor:
    """Mean of the squared logarithm of the sum of exponentiated logits, per group."""
    log_z = reduce_logsumexp(logits, experts)
    squared = multiply(log_z, log_z)
    return reduce_mean(squared if nonpadding is None else where(nonpadding, squared, 0.0), reduced_dim=tokens)


def balanced_bias(bias: Tensor, load: Tensor, rate: float = 1e-3) -> Tensor:
    """`bias` of the experts, raised by `rate` for experts with less than mean load, lowered for those with more.

    Args:
      bias: the variable `router/bias` of a layer, or of stacked ones.
      load: number of tokens that chose each expert; summed over dims that bias lacks.
      rate: step size; DeepSeek-V3 uses 0.001.
    Returns: the new value of the variable, for `mtf.assign(bias, balanced_bias(bias, load))`.
    Raises: ShapeError if load lacks a dim of bias.
    Source: Wang et al., arXiv:2408.15664, algorithm 1.
    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.layers.balanced_bias(mtf.zeros("experts:2"), mtf.input("load", "experts:2"), rate=0.1)
      >>> print(mtf.simulate(mtf.lower({"y": y})).step(load=[3.0, 1.0])["y"])
      [-0.1  0.1]
    """
    what = "balanced_bias"
    rate = number(rate, what, "rate")
    floats(bias, what), tensor(load, what)
    missing = [str(d) for d in bias.shape if d not in load.shape]
    if missing or not len(bias.shape):
        raise ShapeError(f"{at(what)}: load must have the dims of bias, {', '.join(missing)} too", load, bias)
    total = reduce_sum(cast(load, FLOAT32), output_shape=bias.shape)
    mean = reduce_mean(total, reduced_dim=bias.shape[-1])
    return add(bias, cast(sign(mean - total) * rate, bias.dtype), bias.shape)
