"""Assignment of tokens to slots of experts: choices, capacity, and precedence.

Each group of tokens is assigned independently. The result is `Slots`: for each slot of each expert its token and gate.
Both forms of dispatch in `experts` are based on it.

Precedence among the tokens that choose an expert beyond its capacity: first choices before second ones, and so on; then
earlier tokens first. Ties between scores go to the expert of the lower index, or, if experts choose tokens, to the
earlier token.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from layouts import Dimension, Shape
from meshlib.core.graph import Tensor
from meshlib.core.laid_dims import LaidDimension, size_of
from meshlib.layers.expert_rows import PLACES, ExpertRows
from meshlib.layers.routing import Routing
from meshlib.ops.control.sources import constant_like, constant_shaped, ones_like, zeros_like
from meshlib.ops.control.state import stop_gradient
from meshlib.ops.movement.indexing import gather, scatter_add
from meshlib.ops.movement.indexing import range as positions
from meshlib.ops.movement.ranking import argsort, top_k
from meshlib.ops.movement.shape import broadcast, rename_dimension, reshape, transpose
from meshlib.ops.pointwise.arithmetic import (
    divide,
    equal,
    floordiv,
    greater,
    greater_equal,
    less,
    logical_and,
    logical_or,
    maximum,
    minimum,
    multiply,
    where,
)
from meshlib.ops.pointwise.casts import cast
from meshlib.ops.pointwise.cumulative import cumsum
from meshlib.ops.pointwise.random import random_uniform
from meshlib.ops.pointwise.reductions import reduce_sum

SMALL = 1e-20  # avoids a division by zero if all gates underflow


@dataclass(frozen=True)
class SlotOfChoice:
    """The slot of each choice.

    `slot`: its number among those of all experts, [groups, choices, tokens], and their count for a choice without one;
    `gate`: the gate of the choice, alike; `slots`: a dim for the slots of all experts. Choices come before tokens, so
    that a sum over the rows of each token adds whole tiles.
    """

    slot: Tensor
    gate: Tensor
    slots: Dimension


@dataclass(frozen=True)
class Slots:
    """Expert assignment. Dims: experts (those of the router), groups, slots.

    `token`: index of the token in each slot, -1 in empty ones; `gate`: its weight, 0 in empty ones. `sizes`: for slots
    shared by several experts and sorted by expert, the number per expert: [shards, groups, experts of a shard].
    `chosen`: the slots by choice, where tokens choose.
    """

    token: Tensor
    gate: Tensor
    sizes: Tensor | None = None
    chosen: SlotOfChoice | None = None


# ---------------------------------------------------------------- tokens choose experts


@dataclass(frozen=True)
class Chosen:
    """The expert of each token and choice, or the number of experts for none, and the gate: [groups, tokens, k]."""

    index: Tensor
    gate: Tensor


def chosen_by_tokens(
    scores: Tensor, favour: Tensor, experts: Dimension, routing: Routing, training: bool, nonpadding: Tensor | None
) -> Chosen:
    """The experts with the highest `favour` per token, with gates computed from `scores`.

    Args:
      scores: basis of the gates, [groups, tokens, experts]; favour: basis of the ranking, scores possibly with a bias.
    """
    if routing.expert_groups > 1:
        favour = _within_best_groups(favour, experts, routing)
    asked = routing.ntlb_top_k if routing.gating == "ntlb" else routing.choices
    gate, index = top_k(favour, experts, Dimension("choices", asked), "choice")
    if favour is not scores:
        gate = gather(scores, index, experts)
        gate = transpose(gate, index.shape)
    choices = index.shape.dim("choices")
    if routing.renormalise and routing.gating in ("top_k", "top_2"):
        gate = divide(gate, reduce_sum(gate, reduced_dim=choices) + SMALL)
    if routing.gating == "top_2" and routing.second_policy != "all":
        index = where(_kept_seconds(gate, choices, routing, training), index, experts.size, index.shape)
    if nonpadding is not None:
        index = where(nonpadding, index, experts.size, index.shape)
    return Chosen(index, gate * routing.scale if routing.scale != 1.0 else gate)


def _kept_seconds(gate: Tensor, choices: Dimension, routing: Routing, training: bool) -> Tensor:
    """The second choices that the policy keeps; "random" only in training, otherwise by the threshold."""
    first = equal(numbers_beside(gate, choices), 0)
    if routing.second_policy == "none":
        return broadcast(first, gate.shape)
    bound = constant_like(routing.second_threshold, gate, gate.dtype)
    if routing.second_policy == "random" and training:
        bound = multiply(random_uniform(gate.shape, 0.0, 1.0, gate.dtype), bound)
    return logical_or(first, greater(gate, bound))


def _within_best_groups(favour: Tensor, experts: Dimension, routing: Routing) -> Tensor:
    """`favour`, with minus infinity for experts outside each token's best groups."""
    groups = Dimension("expert_groups", routing.expert_groups)
    members = Dimension("group_experts", experts.size // groups.size)
    rest = [d for d in favour.shape if d != experts]
    grouped = reshape(stop_gradient(favour), [*rest, groups, members])
    count = 1 if routing.group_score == "max" else 2
    best, _ = top_k(grouped, members, Dimension("best", count))
    total = reduce_sum(best, output_shape=[*rest, groups])
    best_groups = Dimension("kept_groups", routing.groups_per_token)
    _, index = top_k(total, groups, best_groups)
    is_best = reduce_sum(cast(equal(index, numbers_beside(favour, groups)), "int32"), output_shape=[*rest, groups])
    allowed = reshape(broadcast(greater(is_best, 0), [*rest, groups, members]), favour.shape)
    return where(allowed, favour, -1e30)


def numbers_beside(x: Tensor, dim: Dimension) -> Tensor:
    """0, 1, ... along `dim`, in the graph of `x`."""
    with x.graph:
        return positions(dim)


# ---------------------------------------------------------------- slots


def assigned_slots(
    chosen: Chosen, tokens: Dimension, experts: Dimension, places: Dimension, routing: Routing
) -> tuple[Slots, Tensor, Tensor]:
    """Slots, the number of dropped choices, and the number of choices per expert, by group."""
    if routing.gating == "ntlb":
        return _assign_in_rounds(chosen, tokens, experts, places)
    position, load = _positions(chosen.index, tokens, experts)
    dropped = reduce_sum(maximum(load - places.size, 0), reduced_dim=experts)
    return _slots(chosen.index, chosen.gate, position, tokens, experts, places), dropped, load


def assigned_slots_in_shards(chosen: Chosen, experts: Dimension, rows: ExpertRows) -> tuple[Slots, Tensor, Tensor]:
    """The result of `assigned_slots` for rows that the experts of a shard share, sorted by expert."""
    index, gate = (rows.grouped(t, 1) for t in (chosen.index, chosen.gate))
    sorted_together = index.shape[-2]
    places = rows.sized(PLACES, "rows")
    shards, members = rows.sized(experts.name, "shards"), rows.sized("shard_experts", "members")
    place, load = _positions(index, sorted_together, experts)
    groups = [d for d in load.shape if d != experts]
    apart = reshape(load, [*groups, shards, members])
    begins = cumsum(apart, members, exclusive=True)
    begin = gather(reshape(begins, load.shape), index, experts, out_of_range="zero")
    row = place + transpose(begin, index.shape)
    slots = _slots(floordiv(index, _number(rows.count("members"), index)), gate, row, sorted_together, shards, places)
    room = _number(rows.count("rows"), begins)
    sizes = minimum(maximum(room - begins, 0), apart)
    slots = replace(slots, sizes=transpose(sizes, [shards, *groups, members]))
    if not rows.fixed:
        load = counts(chosen.index, experts, Shape([*(d for d in chosen.index.shape[:-2]), experts]))
    of_load = [d for d in load.shape if d != experts]
    if rows.fixed:
        return slots, reduce_sum(apart - sizes, output_shape=groups), load
    if rows.factor is None:
        return slots, constant_shaped(0, Shape(of_load), load), load
    unseated = logical_and(greater_equal(row, room), less(index, experts.size))
    dropped = reduce_sum(reshape(cast(unseated, "int32"), chosen.index.shape), output_shape=of_load)
    return slots, dropped, load


def _number(value: int, like: Tensor) -> Tensor:
    """An integer beside a tensor, which may depend on the layout."""
    return constant_like(value, like, "int32")


def _positions(index: Tensor, tokens: Dimension, experts: Dimension) -> tuple[Tensor, Tensor]:
    """The position of each choice in its expert's queue, and the length of each queue.

    All choices of a group are sorted by expert with a stable sort, first choices first. So a choice's position is its
    rank among all minus the number of choices of preceding experts.
    """
    choices = index.shape.dim("choices")
    groups = [d for d in index.shape if d not in (tokens, choices)]
    queue = _sized("queue", choices.size * tokens.size, tokens)
    flat = reshape(transpose(index, [*groups, choices, tokens]), [*groups, queue])
    order = rename_dimension(argsort(flat, queue), queue.name, "rank")
    rank = scatter_add(numbers_beside(index, queue.renamed("rank")), order, queue, flat.shape)
    load = counts(index, experts, Shape([*groups, experts]))
    before = gather(cumsum(load, experts, exclusive=True), flat, experts, out_of_range="zero")
    place = reshape(rank - transpose(before, rank.shape), [*groups, choices, tokens])
    return transpose(place, index.shape), load


def _sized(name: str, size: int, of: Dimension) -> Dimension:
    """A dim of that size, which depends on the layout if `of` does."""
    return of.plan.dim(name, name) if isinstance(of, LaidDimension) else Dimension(name, size)


def counts(index: Tensor, experts: Dimension, shape: Shape) -> Tensor:
    """The number of tokens that chose each expert."""
    return scatter_add(ones_like(index), index, experts, shape, out_of_range="zero")


def _slots(
    index: Tensor, gate: Tensor, position: Tensor, tokens: Dimension, experts: Dimension, places: Dimension
) -> Slots:
    """The token and gate of the choice in each slot."""
    groups = [d for d in index.shape if d not in (tokens, index.shape.dim("choices"))]
    seats = _sized("seats", experts.size * places.size, places)
    room, shards, count = (_number(size_of(d), index) for d in (places, experts, seats))
    is_assigned = logical_and(less(position, room), less(index, shards))
    slot = where(is_assigned, index * room + position, count)
    ordered = [experts, *groups, places]

    def by_slot(values: Tensor) -> Tensor:
        flat = scatter_add(values, slot, seats, Shape([*groups, seats]), out_of_range="zero")
        return transpose(reshape(flat, [*groups, experts, places]), ordered)

    token = by_slot(numbers_beside(index, tokens) + 1) - 1
    by_choice = [*groups, index.shape.dim("choices"), tokens]
    chosen = SlotOfChoice(transpose(slot, by_choice), transpose(gate, by_choice), seats)
    return Slots(token, by_slot(gate), chosen=chosen)


def _assign_in_rounds(
    chosen: Chosen, tokens: Dimension, experts: Dimension, places: Dimension
) -> tuple[Slots, Tensor, Tensor]:
    """Assignment in rounds: tokens without a slot try their next choice; the first with a free slot is final."""
    choices = chosen.index.shape.dim("choices")
    rest = [d for d in chosen.index.shape if d != choices]
    queues = Shape([*(d for d in rest if d != tokens), experts])
    one, nobody = Dimension(choices.name, 1), experts.size
    rounds = [[gather(x, n, choices) for x in (chosen.index, chosen.gate)] for n in range(choices.size)]
    index, gate = zeros_like(rounds[0][0]) + nobody, zeros_like(rounds[0][1])
    slot, assigned = zeros_like(index), zeros_like(counts(index, experts, queues))
    for wanted, weight in rounds:
        requested = where(less(index, nobody), nobody, wanted)
        queued, _ = _positions(reshape(requested, [*rest, one]), tokens, experts)
        before = gather(assigned, requested, experts, out_of_range="zero")
        queue_position = reshape(queued, rest) + transpose(before, rest)
        fits = logical_and(less(queue_position, places.size), less(requested, nobody))
        index, gate, slot = where(fits, requested, index), where(fits, weight, gate), where(fits, queue_position, slot)
        assigned = assigned + counts(where(fits, requested, nobody), experts, queues)
    load = counts(rounds[0][0], experts, queues)
    dropped = reduce_sum(load - assigned, reduced_dim=experts)
    index, gate, slot = (reshape(x, [*rest, one]) for x in (index, gate, slot))
    return _slots(index, gate, slot, tokens, experts, places), dropped, load


# ---------------------------------------------------------------- experts choose tokens


def chosen_by_experts(
    scores: Tensor,
    tokens: Dimension,
    experts: Dimension,
    places: Dimension,
    routing: Routing,
    nonpadding: Tensor | None,
) -> tuple[Slots, Tensor, Tensor]:
    """The tokens with the highest scores for each expert; tokens that no expert chose count as dropped."""
    if nonpadding is not None:
        scores = where(nonpadding, scores, -1.0, scores.shape)  # below all scores
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
