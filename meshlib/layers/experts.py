"""Mixture of experts: each token is routed to a few of many feed-forward layers.

Tokens are split by groups (usually the batch), weights by experts. Each dim has another name on the other side, as in
Mesh TensorFlow: scores and slots have `experts_unsplit` and `batch`, activations of experts have `experts` and
`batch_unsplit`. So rules for `batch` and `experts` may name the same axis, and the change of names between them is the
all_to_all of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NoReturn

from layouts import Dimension, Shape
from meshlib.core.arguments import at, choice, flag
from meshlib.core.dtypes import BOOL, FLOAT32, FLOAT64
from meshlib.core.errors import GraphError, ShapeError
from meshlib.core.graph import Tensor, scope
from meshlib.layers.expert_assignment import Slots
from meshlib.layers.expert_moves import Back, by_lookup, by_product
from meshlib.layers.expert_rows import PLACES, ExpertRows, regrouped, rows_of
from meshlib.layers.numerics import DEFAULT, Numerics, as_numerics
from meshlib.layers.projection import Activation, Grouping, feed_forward
from meshlib.layers.router import decide, real_share
from meshlib.layers.routing import Routing
from meshlib.ops.building import as_dim, as_dims, floats, tensor
from meshlib.ops.movement.indexing import scatter_add
from meshlib.ops.movement.shape import rename_dimension, reshape, transpose
from meshlib.ops.pointwise.arithmetic import greater_equal
from meshlib.ops.pointwise.reductions import reduce_mean, reduce_sum

Level = tuple[Dimension, Routing]
FORMS = ("einsum", "gather", "dense", "grouped")  # two levels have only the first two
# A product with the one-hot masks of a group takes 2 x tokens flops per element of a slot; a lookup reads and writes
# it, 4 bytes in bfloat16. Chips from v2 to v7 do 60 to 560 flops per byte of HBM (v5e: 197e12 / 819e9 = 240), so up to
# about this many tokens the product is faster.
EINSUM_TOKENS = 512
# Experts that no token chose need not be read. With 2 choices per expert an eighth of the experts is unused.
FEW_CHOICES = 2


@dataclass(frozen=True)
class Mixture:
    """Result of `moe`.

    Attributes:
      values: type of x.
      loss: auxiliary loss, float32 per group: add its mean to that of the task. It is loss_coef x balance_loss +
        z_loss x z of the routing. The mean over groups is that over tokens without padding.
      balance_loss: experts x sum over experts of (share of choices) x (mean score), which is 1 for uniform choices;
        "top_2" counts first choices alone.
      z_loss: mean of log(sum of exp(scores))^2.
      dropped: int32 per group: choices dropped for lack of capacity, or with "ntlb" and "expert_choice" the tokens
        without an expert. Their sum is the step's.
      load: int32 [groups, experts_unsplit]: number of tokens that chose each expert.
    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     x = mtf.input("x", "batch:2;length:8;d:4")
      ...     y = mtf.layers.moe(x, mtf.Dimension("experts", 4), mtf.Dimension("hidden", 8))
      >>> print(y.values.shape, y.loss.shape, y.dropped.dtype)
      [batch:2, length:8, d:4] [batch:2] i32
    """

    values: Tensor
    loss: Tensor
    balance_loss: Tensor
    z_loss: Tensor
    dropped: Tensor
    load: Tensor

    def __iter__(self) -> NoReturn:
        raise GraphError("moe returns one Mixture y, not a pair; write y.values, and mtf.reduce_mean(y.loss)")


def moe(
    x: Tensor,
    experts: Dimension | Sequence[Dimension],
    hidden_channels: Dimension,
    routing: Routing | Sequence[Routing] | None = None,
    activation: str | Activation = "relu",
    gated: bool = False,
    use_bias: bool = False,
    shared_channels: Dimension | None = None,
    dropout: float = 0.0,
    training: bool = False,
    nonpadding: Tensor | None = None,
    form: str | None = None,
    numerics: Numerics = DEFAULT,
    name: str = "moe",
) -> Mixture:
    """Sum over the experts e that a token is routed to of gate(e) * feed_forward_e(x), plus shared experts.

    Args:
      x: [groups..., tokens, d_model], float. Each group, usually a sequence, is routed independently.
      experts: the dim of the experts, first in their variables. Two dims give two levels, as in Mesh TensorFlow's
        MoE2D: tokens are routed to experts of the first, and those in its slots, by a separate router, to experts of
        the second.
      hidden_channels: the dim inside each expert.
      routing: see `Routing`; by default `Routing()`. With two levels one for both, or one each.
      activation, gated, use_bias, dropout: of each expert, as in `feed_forward`.
      shared_channels: the inner dim of a shared feed-forward layer that all tokens pass; several shared experts are one
        of their total width. None: no shared expert.
      training: whether jitter and dropout are applied.
      nonpadding: bool [groups..., tokens]: False marks padding, which is not routed, takes no slots and does not count
        in the losses.
      form: "einsum" dispatches tokens by products with masks, "gather" by lookups; "dense" runs every expert on all
        tokens, with gates of zero for those not routed to it. All have the same result. By default "dense" if experts
        have capacity for all tokens of a group, as for one decoded token; otherwise "einsum" for groups of up to 512
        tokens.
      numerics: dtypes of variables and activations, precision of the products; routing is float32.
      name: scope of `router/kernel` (and `router/bias`), `experts/wi/kernel`, `experts/wi_gate/kernel`,
        `experts/wo/kernel`, and the same under `shared`; of two levels the routers are `router` and `inner/router`, and
        the experts are under `inner`.
    Returns: a `Mixture`; with two levels `dropped` and the losses are sums over both, `load` is that of the second.
      Values in the scope are named dispatched (the experts' input), combined and out.
    Layout: `batch:data;experts:data` splits both over one axis, with an all_to_all of tokens to the experts and one
      back; `batch:data+expert;experts:expert;batch_unsplit:data` has a separate axis for experts. `batch_unsplit`, the
      groups on the experts' side, keeps the axes of the batch that experts do not take: if they take none,
      `batch:data;batch_unsplit:data`. With an axis for experts that does not split tokens, every device routes and
      looks up all tokens, unless `experts_unsplit` is split over it too. `hidden_channels` may be split as in any
      feed-forward layer. Two levels have one axis each, with an all_to_all over one after the other:
      `batch:y+x;expert_x:x;expert_y:y;batch_unsplit:y`, where `batch_inner` is the inner name of the groups. With
      "grouped" each device sorts its own tokens (of the batch, and of a sequence that a required rule splits). A rule
      for experts sends rows by an all_to_all to the shards into which it splits them, each with the capacity given by
      `shard_factor`, by default the worst case: shards * min(choices, experts of a shard) / choices times the mean;
      `length_unsplit`, like `batch_unsplit`, keeps the axes of the length then.
    Raises: ShapeError for dims that clash, sizes that do not divide and a mask that does not fit; GraphError for more
      choices than experts.
    Example:
      >>> import meshlib as mtf
      >>> D = mtf.Dimension
      >>> with mtf.Graph() as graph:
      ...     x = mtf.input("x", [D("batch", 2), D("length", 8), D("d_model", 4)])
      ...     y = mtf.layers.moe(x, D("experts", 4), D("d_ff", 16), mtf.layers.Routing(gating="switch"))
      >>> print(y.values.shape, y.dropped.shape, graph.variables["moe/experts/wi/kernel"].output.shape)
      [batch:2, length:8, d_model:4] [batch:2] [experts:4, d_model:4, d_ff:16]

    Source: tensorflow/mesh: mesh_tensorflow/transformer/moe.py; Shazeer et al., arXiv:1701.06538; GShard,
      arXiv:2006.16668; shared experts: DeepSeekMoE, arXiv:2401.06066.
    """
    what = "moe"
    x = as_numerics(numerics, what).cast(floats(x, what))
    if len(x.shape) < 2:
        raise ShapeError(f"{at(what)}: needs [groups..., tokens, features], got {x}")
    if PLACES in x.shape:
        raise ShapeError(f"{at(what)}: {x.shape} already has a dim '{PLACES}'; rename it")
    if form is not None:
        choice(form, what, "form", FORMS)
    levels, hidden = _levels(experts, routing, form, what), as_dim(hidden_channels, what)
    flag(training, what, "training")
    if form is not None:
        choice(form, what, "form", FORMS if len(levels) == 1 else FORMS[:2])

    def compute(
        dispatched: Tensor, dims: tuple[Dimension, ...], gates: Tensor | None, grouping: Grouping | None = None
    ) -> Tensor:
        return feed_forward(
            dispatched, hidden, activation, gated, use_bias, dropout if training else 0.0, None, numerics, "experts",
            dims, gates, grouping,
        )  # fmt: skip

    with scope(name):
        mixture = _route(x, levels, (), nonpadding, training, form, numerics, compute)
        if shared_channels is None:
            return mixture
        values = mixture.values + feed_forward(
            x, as_dim(shared_channels, what), activation, gated, use_bias, dropout if training else 0.0,
            None, numerics, "shared",
        )  # fmt: skip
    return replace(mixture, values=values)


def _levels(experts: object, routing: object, form: str | None, what: str) -> list[Level]:
    """The expert dims with their routing, outer level first."""
    dims = as_dims(experts, f"{what} experts")
    if not 1 <= len(dims) <= 2:
        raise GraphError(f"{at(what)}: experts must be one dim, or two for two levels, got {len(dims)}")
    given = [*routing] if isinstance(routing, Sequence) and not isinstance(routing, str) else [routing] * len(dims)
    if len(given) != len(dims):
        raise GraphError(
            f"{at(what)}: routing must be one, or one for each dim of experts: there are {len(dims)} dims, "
            f"but {len(given)} routings"
        )
    levels = []
    for dim, one in zip(dims, given, strict=True):
        level = Routing(capacity_factor=None if form == "grouped" else 1.25) if one is None else one
        if not isinstance(level, Routing):
            raise GraphError(
                f"{at(what)}: routing must be an mtf.layers.Routing, got {type(level).__name__} {level!r:.80}"
            )
        level.check_experts(dim.size, what)
        if form == "grouped":
            level.check_grouped(what)
        levels.append((dim, level))
    if len(levels) == 2 and levels[1][1].group_size is not None:
        if given[0] is not given[1]:
            raise GraphError(
                f"{at(what)}: group_size is for the first of two levels; a group of the second is what an expert of "
                "the first has room for"
            )
        levels[1] = levels[1][0], replace(levels[1][1], group_size=None)
    return levels


def _chosen_form(grouped: Tensor, many: Dimension, routing: Routing, takes_all: bool) -> tuple[str, Routing]:
    """The default form; `takes_all`: a single level whose experts have capacity for all tokens."""
    if takes_all:
        return _unbounded_form(grouped, many, routing)
    return "einsum" if grouped.shape[-2].size <= EINSUM_TOKENS else "gather", routing


def _route(
    x: Tensor,
    levels: Sequence[Level],
    held: tuple[Dimension, ...],
    nonpadding: Tensor | None,
    training: bool,
    form: str | None,
    numerics: Numerics,
    compute: Callable[..., Tensor],
) -> Mixture:
    """Route x [held..., groups..., tokens, features] to the experts of the first of `levels`, which may be levels
    themselves.

    `held` are the experts of the outer level: each has its own router for its tokens.
    """
    what = "moe"
    (many, routing), *inner = levels
    grouped = _grouped(x, routing, what)
    inside = _Names(many, grouped, held, what)
    mask, share = (None, None) if nonpadding is None else _mask_and_share(nonpadding, x, grouped, inside, what)
    tokens = grouped.shape[-2]
    room = routing.places(many.size, tokens.size, training)
    places = Dimension(f"{PLACES}_inner" if held else PLACES, room)
    if form is None:
        form, routing = _chosen_form(grouped, many, routing, room == tokens.size and not (inner or held))
    rows = inside.rows(grouped, routing) if form == "grouped" else None
    decision = decide(grouped, tokens, inside.outer, places, routing, training, mask, share, numerics, held, rows)
    slots, back, gates, grouping = decision.slots, None, None, None
    if rows is not None:
        slots, grouping = _sorted_by_expert(slots, inside, rows)
        sorted_tokens = rows.grouped(grouped, 1)
        dispatched, back = by_lookup(sorted_tokens, sorted_tokens.shape[-2], slots, routing.row_sums)
    elif form == "dense":
        dispatched, gates = grouped, inside.enter(_gates(slots, tokens), "gates")
    else:
        dispatched, back = _MOVES[form](grouped, tokens, slots, routing.row_sums)
    crosses = grouping is None or grouping.parts  # rows of all experts stay with their tokens
    dispatched = inside.enter(dispatched, "dispatched") if crosses else dispatched
    dropped, load, loss, balance, z = (
        decision.dropped, decision.load, decision.balance_loss * routing.loss_coef + decision.z_loss * routing.z_loss,
        decision.balance_loss, decision.z_loss,
    )  # fmt: skip
    if inner:
        filled = inside.enter(greater_equal(slots.token, 0), "filled")
        filled = transpose(filled, dispatched.shape.dims[:-1])
        with scope("inner"):
            below = _route(dispatched, inner, (many,), filled, training, form, numerics, compute)
        combined = below.values
        # Per group of this level; dropped choices are summed over its experts, losses are averaged.
        dropped = dropped + reduce_sum(inside.leave(below.dropped, "dropped"), output_shape=dropped.shape)
        load = inside.leave(below.load, "load")
        load = transpose(load, [*dropped.shape, inside.outer, below.load.shape[-1]])
        loss, balance, z = (
            own + reduce_mean(inside.leave(t, "mean"), output_shape=own.shape)
            for own, t in ((loss, below.loss), (balance, below.balance_loss), (z, below.z_loss))
        )
    else:
        dispatched, grouping, apart = _joined(dispatched, grouping, rows)
        combined = apart(compute(dispatched, (*held, many), gates, grouping))
    combined = inside.leave(combined, "combined") if crosses else combined
    values = reshape(combined if back is None else back(combined), x.shape, "out")
    return Mixture(values, loss, balance, z, dropped, load)


def _joined(x: Tensor, grouping: Grouping | None, rows: ExpertRows | None) -> tuple[Tensor, Grouping | None, Back]:
    """Rows x of all senders sorted by expert, their grouping, and the inverse of the sorting."""
    if grouping is None or rows is None or rows.fixed:
        return x, grouping, lambda y: y
    joined, sizes, apart = regrouped(x, grouping.sizes, rows)
    return joined, replace(grouping, rows=joined.shape[-2], sizes=sizes, draws=rows.count("drawn")), apart


class _Names:
    """Names of dims on both sides of the exchange."""

    def __init__(self, experts: Dimension, x: Tensor, held: tuple[Dimension, ...], what: str) -> None:
        self.experts = experts
        # Pipeline stages have separate experts: tokens stay in their stage.
        self.stays = {d.name for g in x.graph.around if g.loop_body is not None for d in g.loop_body.held}
        stays = self.stays | {d.name for d in held}
        self.outer = Dimension(f"{experts.name}_unsplit", experts.size)
        taken = [d.name for d in (experts, self.outer) if d.name in x.shape]
        if taken:
            raise ShapeError(f"{at(what)}: {x.shape} already has a dim '{taken[0]}'; rename the dim of the experts")
        groups = [d.name for d in x.shape[:-2] if d.name not in stays]
        self.inside = {group: _inner_name(group, bool(held)) for group in groups} | {self.outer.name: experts.name}

    def rows(self, x: Tensor, routing: Routing) -> ExpertRows:
        """The rows sorted by expert; afterwards dims follow its names."""
        rows = rows_of(x, (self.outer.name, self.experts.name), self.experts.size, routing, self.inside)
        if rows.fixed:
            return rows
        self.inside = {rows.length_name: _inner_name(rows.length_name, False), **self.inside}
        return rows_of(x, (self.outer.name, self.experts.name), self.experts.size, routing, self.inside)

    def enter(self, x: Tensor, name: str) -> Tensor:
        """A tensor of tokens or the router with the dim names of the experts' side."""
        return _renamed(x, self.inside, name)

    def leave(self, x: Tensor, name: str) -> Tensor:
        """The inverse of `enter`."""
        return _renamed(x, {inside: outside for outside, inside in reversed(self.inside.items())}, name)


def _inner_name(group: str, second: bool) -> str:
    """Name of a group dim on the experts' side: `batch_unsplit`, or in the second level `batch_inner`."""
    return f"{group.removesuffix('_unsplit')}_inner" if second else f"{group}_unsplit"


def _renamed(x: Tensor, names: Mapping[str, str], last: str) -> Tensor:
    """`x` with dims renamed by `names`; the last operation is named `last`."""
    pairs = [(old, new) for old, new in names.items() if old in x.shape]
    for n, (old, new) in enumerate(pairs, start=1):
        x = rename_dimension(x, old, new, last if n == len(pairs) else None)
    return x


def _grouped(x: Tensor, routing: Routing, what: str) -> Tensor:
    """x as [groups..., tokens of a group, features]."""
    size = routing.group_size
    *lead, tokens, features = x.shape
    if size is None or size == tokens.size:
        return x
    outer = lead.pop() if lead else Dimension("groups", 1)
    total = outer.size * tokens.size
    if total % size:
        raise ShapeError(
            f"{at(what)}: group_size must divide the tokens of '{outer.name}' and '{tokens.name}': "
            f"{total} % {size} = {total % size}",
            x,
        )
    return reshape(x, [*lead, Dimension(outer.name, total // size), Dimension("group", size), features])


def _mask_and_share(nonpadding: Tensor, x: Tensor, grouped: Tensor, inside: _Names, what: str) -> tuple[Tensor, Tensor]:
    """The mask of real tokens per group, and the share of real tokens, which weighs losses."""
    of_losses = FLOAT64 if x.dtype is FLOAT64 else FLOAT32
    share = real_share(nonpadding, of_losses, [d for d in nonpadding.shape if d.name in inside.stays])
    return _mask(nonpadding, x, grouped.shape, what), share


def _mask(nonpadding: Tensor, x: Tensor, grouped: Shape, what: str) -> Tensor:
    """The mask of tokens per group."""
    if tensor(nonpadding, what).dtype is not BOOL or nonpadding.shape != x.shape[:-1]:
        raise ShapeError(
            f"{at(what)}: nonpadding must be bool and have the dims of x but the last, {Shape(x.shape[:-1])}",
            nonpadding,
            x,
        )
    return reshape(nonpadding, grouped[:-1])


# ---------------------------------------------------------------- forms of dispatch


def _unbounded_form(x: Tensor, experts: Dimension, routing: Routing) -> tuple[str, Routing]:
    """The form if experts have capacity for all tokens: for few tokens one that reads only chosen experts."""
    chosen = prod(d.size for d in x.shape[:-1]) * routing.choices
    by_token = routing.gating not in ("ntlb", "expert_choice")
    if by_token and experts.size > 1 and chosen < FEW_CHOICES * experts.size:
        return "grouped", replace(routing, expert_shards=None, shard_factor=None)
    return "dense", routing


def _gates(slots: Slots, tokens: Dimension) -> Tensor:
    """The gate of each token and expert, zero without a slot: [experts, groups, tokens]."""
    places = slots.token.shape[-1]
    shape = Shape([*(d for d in slots.token.shape if d != places), tokens])
    return scatter_add(slots.gate, slots.token, tokens, shape, out_of_range="zero")


def _sorted_by_expert(slots: Slots, inside: _Names, rows: ExpertRows) -> tuple[Slots, Grouping]:
    """Slots shared by the experts of a shard, and their numbers; without the shard dim if there is always one."""
    sizes = slots.sizes
    assert sizes is not None
    dim = slots.token.shape[-1]
    tokens, members = rows.count("tokens"), rows.count("members")
    if not rows.fixed or rows.shards > 1:
        return slots, Grouping(dim, inside.enter(sizes, "sizes"), rows.share, tokens, members, parts=True)
    token, gate = (reshape(t, t.shape.dims[1:]) for t in (slots.token, slots.gate))
    whole = reshape(sizes, [*sizes.shape.dims[1:-1], inside.experts])
    return replace(slots, token=token, gate=gate), Grouping(dim, whole, rows.share, tokens, members)


_MOVES = {"einsum": by_product, "gather": by_lookup}
