"""Which tokens go to which experts: scores, choices, places, and the losses that keep experts busy.

A decision is made for each group of tokens by itself. Its result is `Slots`: of each place in each expert the token
that takes it, and with what weight. Both ways to move tokens (`dispatch`) are written against that.

Order of precedence where an expert has fewer places than tokens that chose it: first choices before second ones, and
so on; of equal choices the token that comes first. Of equal scores the expert of the lower index is chosen; where
experts choose tokens, the earlier token.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import ceil

from layouts import Dimension, Shape
from meshlib import initializers
from meshlib.checks import at, choice, flag, number, whole
from meshlib.dtypes import FLOAT32
from meshlib.errors import GraphError, ShapeError
from meshlib.graph import Tensor, scope
from meshlib.layers.norms import widened
from meshlib.layers.numerics import Numerics
from meshlib.ops.building import floats, tensor
from meshlib.ops.cumulative import cumsum
from meshlib.ops.elementwise import (
    add,
    cast,
    divide,
    equal,
    greater,
    less,
    logical_and,
    logical_or,
    maximum,
    multiply,
    sigmoid,
    sign,
    where,
)
from meshlib.ops.index import gather, scatter_add
from meshlib.ops.index import range as positions
from meshlib.ops.ranking import argsort, top_k
from meshlib.ops.reduce import reduce_logsumexp, reduce_mean, reduce_sum, softmax
from meshlib.ops.shape import broadcast, rename_dimension, reshape, transpose
from meshlib.ops.sources import constant_like, ones_like, random_uniform, variable, zeros_like
from meshlib.ops.state import stop_gradient

GATINGS = ("top_k", "top_2", "switch", "ntlb", "expert_choice")
POLICIES = ("all", "none", "threshold", "random")
_SMALL = 1e-20  # keeps a sum of gates that all underflow from being divided by


@dataclass(frozen=True, kw_only=True)
class Routing:
    """How tokens find experts.

    Choice:
      gating: "top_k": each token goes to the experts of its `top_k` highest scores. "switch": to the highest one.
        "top_2": to the two highest, of which `second_policy` may drop the second. "ntlb" (no token left behind): to
        the first of its `ntlb_top_k` highest whose expert has room. "expert_choice": each expert takes the tokens
        whose scores for it are highest, as many as it has room for: `top_k` says for how many experts a token there
        is room.
      scores: "softmax" over all experts, or "sigmoid" of each.
      renormalise: whether the gates of a token are divided by their sum. Of softmax that is the softmax over the
        chosen ones. Of one choice it would leave nothing to learn: "switch", "ntlb" and "expert_choice" never do.
      scale: a factor of all gates (DeepSeek's routed scaling).
      bias: whether a bias of each expert, which is no part of the gates, takes part in the choice; a variable that is
        not trained, see `balanced_bias`.
      expert_groups, groups_per_token: experts in that many groups of equal size, of which a token takes only the best
        few, by the highest score of a group or the sum of its two highest (`group_score`: "max", "top_2").
    Room:
      capacity_factor: an expert has room for that many times the mean number of tokens that choose it, in each group;
        None: for all that may come. capacity_factor_eval: the same when not training; as training unless given.
      min_expert_capacity: at least so many places, but never more than tokens of a group.
      group_size: tokens of a group; those along the last dim before the features unless given.
    Training:
      jitter: scores are made of inputs that are multiplied by random numbers in [1 - jitter, 1 + jitter].
      loss_coef: of the balance loss. z_loss: of the squared logarithm of the sum of exponentiated scores.
      second_policy: of "top_2": "all" keeps second choices, "none" drops them, "threshold" keeps those whose gate is
        above `second_threshold`, "random" keeps them with probability gate / second_threshold.

    Raises: GraphError with all that is wrong at once.
    Example:
      >>> import meshlib as mtf
      >>> mtf.layers.Routing(gating="switch", capacity_factor=1.25).places(experts=8, tokens=512)
      80

    Source: tensorflow/mesh: mesh_tensorflow/transformer/moe.py for names; Shazeer et al., arXiv:1701.06538; GShard,
      arXiv:2006.16668; Switch, arXiv:2101.03961; expert choice, arXiv:2202.09368; DeepSeek-V3, arXiv:2412.19437.
    """

    gating: str = "top_k"
    top_k: int = 2
    scores: str = "softmax"
    renormalise: bool = True
    scale: float = 1.0
    bias: bool = False
    expert_groups: int = 1
    groups_per_token: int = 1
    group_score: str = "top_2"
    capacity_factor: float | None = 1.25
    capacity_factor_eval: float | None = None
    min_expert_capacity: int = 4
    group_size: int | None = None
    jitter: float = 0.0
    loss_coef: float = 0.01
    z_loss: float = 0.0
    second_policy: str = "all"
    second_threshold: float = 0.2
    ntlb_top_k: int = 4

    def __post_init__(self) -> None:
        what = "Routing"
        choice(self.gating, what, "gating", GATINGS)
        choice(self.scores, what, "scores", ("softmax", "sigmoid"))
        choice(self.group_score, what, "group_score", ("max", "top_2"))
        choice(self.second_policy, what, "second_policy", POLICIES)
        for f in fields(self):
            value, (kind, _, optional) = getattr(self, f.name), str(f.type).partition(" | ")
            if kind in _KINDS and not (optional and value is None):
                _KINDS[kind](value, what, f.name)
        if faults := self._faults():
            raise GraphError("\n  ".join([f"{at(what)}:", *faults]))

    @property
    def choices(self) -> int:
        """Experts that a token asks for a place, in the end."""
        return {"switch": 1, "ntlb": 1, "top_2": 2}.get(self.gating, self.top_k)

    def places(self, experts: int, tokens: int, training: bool = True) -> int:
        """Tokens of a group that an expert has room for."""
        factor = self.capacity_factor
        if not training and self.capacity_factor_eval is not None:
            factor = self.capacity_factor_eval
        wanted = tokens if factor is None else ceil(self.choices * tokens * factor / experts - 1e-9)
        return min(tokens, max(wanted, self.min_expert_capacity))

    def check_experts(self, experts: int, what: str) -> None:
        """Raise GraphError unless there are enough experts to choose from, in groups of equal size."""
        faults = []
        asked = max(self.choices, self.ntlb_top_k if self.gating == "ntlb" else 1)
        within = experts // self.expert_groups * self.groups_per_token
        if experts % self.expert_groups:
            faults.append(
                f"{experts} experts are no {self.expert_groups} groups of equal size: "
                f"{experts} % {self.expert_groups} = {experts % self.expert_groups}"
            )
        elif self.gating != "expert_choice" and asked > within:
            faults.append(f"each token chooses {asked} experts, but there are only {within} to choose from")
        elif self.expert_groups > 1 and self.group_score == "top_2" and experts // self.expert_groups < 2:
            faults.append("group_score 'top_2' adds up the two best of a group, which has one expert; use 'max'")
        if faults:
            raise GraphError("\n  ".join([f"{at(what)}:", *faults]))

    def _faults(self) -> list[str]:
        faults = []
        for name in ("top_k", "expert_groups", "groups_per_token", "min_expert_capacity", "group_size", "ntlb_top_k"):
            size = getattr(self, name)
            if size is not None and size < 1:
                faults.append(f"{name} must be at least 1, got {size}")
        for name in ("capacity_factor", "capacity_factor_eval", "scale", "second_threshold"):
            if getattr(self, name) is not None and getattr(self, name) <= 0:
                faults.append(f"{name} must be positive, got {getattr(self, name)}")
        for name in ("loss_coef", "z_loss"):
            if getattr(self, name) < 0:
                faults.append(f"{name} must not be negative, got {getattr(self, name)}")
        if not 0 <= self.jitter < 1:
            faults.append(f"jitter must be in [0, 1), got {self.jitter}")
        if self.groups_per_token > self.expert_groups:
            faults.append(f"groups_per_token {self.groups_per_token} of expert_groups {self.expert_groups}")
        if self.gating == "expert_choice" and (self.bias or self.expert_groups > 1):
            faults.append("bias and expert_groups are for tokens that choose; 'expert_choice' has neither")
        return faults


_KINDS = {"int": whole, "float": number, "bool": flag}


@dataclass(frozen=True)
class Slots:
    """Who sits where. Dims: experts (those of the router), groups, places.

    `token`: index of the token in each place, -1 in empty ones; `gate`: its weight, 0 in empty ones.
    """

    token: Tensor
    gate: Tensor


@dataclass(frozen=True)
class Decision:
    """What a router says: `slots`, and of each group the losses and what found no room, see `mtf.layers.moe`."""

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
    numerics: Numerics,
) -> Decision:
    """Route x [groups, tokens, features], by scores in float32 whatever its dtype."""
    inputs = widened(x)
    if training and routing.jitter:
        inputs = multiply(inputs, random_uniform(x.shape, 1 - routing.jitter, 1 + routing.jitter, inputs.dtype))
    features = x.shape[-1]
    with scope("router"):
        kernel = variable(
            "kernel", [features, experts], initializers.scaled_normal([features]), numerics.variable_dtype,
            numerics.slice_dtype, inputs.dtype,
        )  # fmt: skip
        logits = numerics.unquantised.product(inputs, kernel, Shape([*x.shape[:-1], experts]), "logits")
        softly = routing.scores == "softmax"
        scores = softmax(logits, experts) if softly else sigmoid(logits)
        favour = scores
        if routing.bias:
            start = initializers.zeros()
            favour = scores + stop_gradient(
                variable("bias", [experts], start, "float32", activation_dtype=scores.dtype, trainable=False)
            )
    log_z = reduce_logsumexp(logits, experts)
    squared = multiply(log_z, log_z)
    if nonpadding is not None:
        squared = where(nonpadding, squared, 0.0)
    z_loss = reduce_mean(squared, reduced_dim=tokens)
    share = scores if softly else divide(scores, reduce_sum(scores, reduced_dim=experts) + _SMALL)
    if nonpadding is not None:
        share = where(nonpadding, share, 0.0, share.shape)
    if routing.gating == "expert_choice":
        slots, dropped, load = _chosen_by_experts(scores, tokens, experts, places, routing, nonpadding)
        counted = load
    else:
        chosen = _chosen_by_tokens(scores, favour, experts, routing, training, nonpadding)
        slots, dropped, load = _seated(chosen, tokens, experts, places, routing)
        first = chosen.index.shape.dim("choices")
        counted = _counts(gather(chosen.index, 0, first), experts, load.shape) if routing.gating == "top_2" else load
    part = stop_gradient(cast(counted, share.dtype))
    part = divide(part, maximum(reduce_sum(part, reduced_dim=experts), 1.0))
    balance = reduce_sum(part * reduce_mean(share, reduced_dim=tokens), reduced_dim=experts) * float(experts.size)
    return Decision(slots, balance, z_loss, dropped, load)


def balanced_bias(bias: Tensor, load: Tensor, rate: float = 1e-3) -> Tensor:
    """`bias` of the experts, raised by `rate` where fewer tokens than the mean chose one, lowered where more did.

    Args:
      bias: the variable `router/bias` of a layer, or of stacked ones.
      load: tokens that chose each expert; of any dims besides those of bias, over which it is summed.
      rate: step; DeepSeek-V3 takes 0.001.
    Returns: what to assign to the variable: `mtf.assign(bias, balanced_bias(bias, load))`.
    Raises: ShapeError if load lacks a dim of bias.
    Source: Wang et al., arXiv:2408.15664, algorithm 1.
    """
    what = "balanced_bias"
    rate = number(rate, what, "rate")
    floats(bias, what), tensor(load, what)
    missing = [str(d) for d in bias.shape if d not in load.shape]
    if missing or not len(bias.shape):
        raise ShapeError(f"{at(what)}: load must have the dims of bias, {', '.join(missing)} too\n  {load}\n  {bias}")
    total = reduce_sum(cast(load, FLOAT32), output_shape=bias.shape)
    mean = reduce_mean(total, reduced_dim=bias.shape[-1])
    return add(bias, cast(sign(mean - total) * rate, bias.dtype), bias.shape)


# ---------------------------------------------------------------- tokens choose


@dataclass(frozen=True)
class _Chosen:
    """Of each token and choice the expert, or their number where there is none, and the gate: [groups, tokens, k]."""

    index: Tensor
    gate: Tensor


def _chosen_by_tokens(
    scores: Tensor, favour: Tensor, experts: Dimension, routing: Routing, training: bool, nonpadding: Tensor | None
) -> _Chosen:
    if routing.expert_groups > 1:
        favour = _within_best_groups(favour, experts, routing)
    asked = routing.ntlb_top_k if routing.gating == "ntlb" else routing.choices
    gate, index = top_k(favour, experts, Dimension("choices", asked), "choice")
    if favour is not scores:
        gate = gather(scores, index, experts)
        gate = transpose(gate, index.shape)
    choices = index.shape.dim("choices")
    if routing.renormalise and routing.gating in ("top_k", "top_2"):
        gate = divide(gate, reduce_sum(gate, reduced_dim=choices) + _SMALL)
    if routing.gating == "top_2" and routing.second_policy != "all":
        index = where(_kept_seconds(gate, choices, routing, training), index, experts.size, index.shape)
    if nonpadding is not None:
        index = where(nonpadding, index, experts.size, index.shape)
    return _Chosen(index, gate * routing.scale if routing.scale != 1.0 else gate)


def _kept_seconds(gate: Tensor, choices: Dimension, routing: Routing, training: bool) -> Tensor:
    """Which choices the policy of second ones keeps; at random only in training, else by the threshold."""
    first = equal(numbers_beside(gate, choices), 0)
    if routing.second_policy == "none":
        return broadcast(first, gate.shape)
    bound = constant_like(routing.second_threshold, gate, gate.dtype)
    if routing.second_policy == "random" and training:
        bound = multiply(random_uniform(gate.shape, 0.0, 1.0, gate.dtype), bound)
    return logical_or(first, greater(gate, bound))


def _within_best_groups(favour: Tensor, experts: Dimension, routing: Routing) -> Tensor:
    """`favour`, but minus infinity in experts whose group is none of a token's best."""
    groups = Dimension("expert_groups", routing.expert_groups)
    members = Dimension("group_experts", experts.size // groups.size)
    rest = [d for d in favour.shape if d != experts]
    apart = reshape(stop_gradient(favour), [*rest, groups, members])
    count = 1 if routing.group_score == "max" else 2
    best, _ = top_k(apart, members, Dimension("best", count))
    total = reduce_sum(best, output_shape=[*rest, groups])
    kept = Dimension("kept_groups", routing.groups_per_token)
    _, index = top_k(total, groups, kept)
    hit = reduce_sum(cast(equal(index, numbers_beside(favour, groups)), "int32"), output_shape=[*rest, groups])
    taken = reshape(broadcast(greater(hit, 0), [*rest, groups, members]), favour.shape)
    return where(taken, favour, -1e30)


def numbers_beside(x: Tensor, dim: Dimension) -> Tensor:
    """0, 1, ... along `dim`, in the graph of `x`."""
    with x.graph:
        return positions(dim)


# ---------------------------------------------------------------- places


def _seated(
    chosen: _Chosen, tokens: Dimension, experts: Dimension, places: Dimension, routing: Routing
) -> tuple[Slots, Tensor, Tensor]:
    """Slots, how many choices found no room, and how many chose each expert, by group."""
    if routing.gating == "ntlb":
        return _seated_somewhere(chosen, tokens, experts, places)
    position, load = _positions(chosen.index, tokens, experts)
    dropped = reduce_sum(maximum(load - places.size, 0), reduced_dim=experts)
    return _slots(chosen.index, chosen.gate, position, tokens, experts, places), dropped, load


def _positions(index: Tensor, tokens: Dimension, experts: Dimension) -> tuple[Tensor, Tensor]:
    """The place of each choice in its expert's queue, and how many stand in each.

    All choices of a group are sorted by expert, first choices first; the sort keeps the order of equal ones. So a
    choice's place is its place among all less the number of choices of experts before its own.
    """
    choices = index.shape.dim("choices")
    groups = [d for d in index.shape if d not in (tokens, choices)]
    queue = Dimension("queue", choices.size * tokens.size)
    flat = reshape(transpose(index, [*groups, choices, tokens]), [*groups, queue])
    order = rename_dimension(argsort(flat, queue), queue.name, "rank")
    rank = scatter_add(numbers_beside(index, Dimension("rank", queue.size)), order, queue, flat.shape)
    load = _counts(index, experts, Shape([*groups, experts]))
    before = gather(cumsum(load, experts, exclusive=True), flat, experts, out_of_range="zero")
    place = reshape(rank - transpose(before, rank.shape), [*groups, choices, tokens])
    return transpose(place, index.shape), load


def _counts(index: Tensor, experts: Dimension, shape: Shape) -> Tensor:
    """How many chose each expert."""
    return scatter_add(ones_like(index), index, experts, shape, out_of_range="zero")


def _slots(
    index: Tensor, gate: Tensor, position: Tensor, tokens: Dimension, experts: Dimension, places: Dimension
) -> Slots:
    """Of each place the token and the gate of the choice that has it."""
    groups = [d for d in index.shape if d not in (tokens, index.shape.dim("choices"))]
    seats = Dimension("seats", experts.size * places.size)
    seated = logical_and(less(position, places.size), less(index, experts.size))
    seat = where(seated, index * places.size + position, seats.size)
    ordered = [experts, *groups, places]

    def held(values: Tensor) -> Tensor:
        flat = scatter_add(values, seat, seats, Shape([*groups, seats]), out_of_range="zero")
        return transpose(reshape(flat, [*groups, experts, places]), ordered)

    return Slots(held(numbers_beside(index, tokens) + 1) - 1, held(gate))


def _seated_somewhere(
    chosen: _Chosen, tokens: Dimension, experts: Dimension, places: Dimension
) -> tuple[Slots, Tensor, Tensor]:
    """Round by round all tokens that still stand ask their next choice; one that finds room has its only place."""
    choices = chosen.index.shape.dim("choices")
    rest = [d for d in chosen.index.shape if d != choices]
    queues = Shape([*(d for d in rest if d != tokens), experts])
    one, nobody = Dimension(choices.name, 1), experts.size
    rounds = [[gather(x, n, choices) for x in (chosen.index, chosen.gate)] for n in range(choices.size)]
    index, gate = zeros_like(rounds[0][0]) + nobody, zeros_like(rounds[0][1])
    place, taken = zeros_like(index), zeros_like(_counts(index, experts, queues))
    for wanted, weight in rounds:
        asked = where(less(index, nobody), nobody, wanted)
        queued, _ = _positions(reshape(asked, [*rest, one]), tokens, experts)
        before = gather(taken, asked, experts, out_of_range="zero")
        found = reshape(queued, rest) + transpose(before, rest)
        fits = logical_and(less(found, places.size), less(asked, nobody))
        index, gate, place = where(fits, asked, index), where(fits, weight, gate), where(fits, found, place)
        taken = taken + _counts(where(fits, asked, nobody), experts, queues)
    load = _counts(rounds[0][0], experts, queues)
    dropped = reduce_sum(load - taken, reduced_dim=experts)
    index, gate, place = (reshape(x, [*rest, one]) for x in (index, gate, place))
    return _slots(index, gate, place, tokens, experts, places), dropped, load


# ---------------------------------------------------------------- experts choose


def _chosen_by_experts(
    scores: Tensor,
    tokens: Dimension,
    experts: Dimension,
    places: Dimension,
    routing: Routing,
    nonpadding: Tensor | None,
) -> tuple[Slots, Tensor, Tensor]:
    """Each expert the tokens of its highest scores; what is dropped are tokens that no expert took."""
    if nonpadding is not None:
        scores = where(nonpadding, scores, -1.0, scores.shape)  # below all others
    gate, token = top_k(scores, tokens, places, "choice")
    groups = [d for d in scores.shape if d not in (tokens, experts)]
    gate, token = (transpose(t, [experts, *groups, places]) for t in (gate, token))
    real = greater(gate, -0.5)
    token = where(real, token, -1)
    gate = where(real, gate * routing.scale if routing.scale != 1.0 else gate, 0.0)
    takers = scatter_add(ones_like(token), token, tokens, Shape([*groups, tokens]), out_of_range="zero")
    left = equal(takers, 0)
    if nonpadding is not None:
        left = logical_and(left, nonpadding)
    dropped = reduce_sum(cast(left, "int32"), reduced_dim=tokens)
    load = reduce_sum(cast(real, "int32"), output_shape=[*groups, experts])
    return Slots(token, gate), dropped, load
