"""Mixture of experts: each token goes through a few of many feed-forward layers.

Tokens lie by groups (the batch, as a rule), weights by experts. The dims of either have another name on the other's
side, as in Mesh TensorFlow: scores and the places of tokens have `experts_unsplit` beside `batch`, what experts compute
has `experts` beside `batch_unsplit`. So a rule for `batch` and one for `experts` may name the same axis, and the step
between is what exchanges tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from layouts import Dimension, Shape
from meshlib.core.arguments import at, choice, flag
from meshlib.core.dtypes import BOOL, FLOAT32, FLOAT64
from meshlib.core.errors import GraphError, ShapeError
from meshlib.core.graph import Tensor, scope
from meshlib.layers.expert_assignment import PLACES, Slots
from meshlib.layers.expert_rows import ExpertRows, rows_of
from meshlib.layers.norms import widened
from meshlib.layers.numerics import DEFAULT, Numerics, as_numerics
from meshlib.layers.projection import Activation, Grouping, feed_forward
from meshlib.layers.router import decide, real_share
from meshlib.layers.routing import Routing
from meshlib.ops.building import as_dim, as_dims, floats, tensor
from meshlib.ops.contraction.einsum import einsum
from meshlib.ops.movement.indexing import gather, one_hot, scatter_add
from meshlib.ops.movement.shape import rename_dimension, reshape, transpose
from meshlib.ops.pointwise.binary import greater_equal, multiply
from meshlib.ops.pointwise.casts import cast
from meshlib.ops.pointwise.reductions import reduce_mean, reduce_sum

Back = Callable[[Tensor], Tensor]
Level = tuple[Dimension, Routing]
FORMS = ("einsum", "gather", "dense", "grouped")  # two levels have the first two
# A product with the masks of a group multiplies each element of a place with all its tokens, which takes 2 x tokens
# flops; a lookup reads and writes it, 4 bytes in bfloat16. Chips from v2 to v7 make 60 to 560 flops while a byte of HBM
# moves (v5e: 197e12 / 819e9 = 240), so up to about this many tokens the product is done sooner.
EINSUM_TOKENS = 512
# Experts of which none is chosen need not be read. Of 2 choices for each expert an eighth of the experts has none.
FEW_CHOICES = 2


@dataclass(frozen=True)
class Mixture:
    """What `moe` returns.

    Attributes:
      values: type of x.
      loss: to be added to that of the task, float32, one for each group: take its mean. It is loss_coef x balance_loss
        + z_loss x z of the routing. The mean over groups is one over tokens that are no padding.
      balance_loss: 1 where all experts are chosen alike: experts x sum over them of (share of choices) x (mean score);
        "top_2" counts first choices alone.
      z_loss: mean of log(sum of exp(scores))^2.
      dropped: int32 by group: choices of tokens that found no room, and with "ntlb" and "expert_choice" the tokens
        that no expert took. Their sum is that of the step.
      load: int32 [groups, experts_unsplit]: how many tokens chose each expert.
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
      x: [groups..., tokens, d_model], float. Each group, a sequence as a rule, is routed by itself.
      experts: the dim of the experts, the first of their variables. Two dims make two levels, as Mesh TensorFlow's
        MoE2D has them: tokens are routed to some of the first, and what each of these has room for, by a router of its
        own, to some of the second.
      hidden_channels: the dim inside each expert.
      routing: who goes where, see `Routing`; its defaults unless given. Of two levels one for both, or one each.
      activation, gated, use_bias, dropout: of each expert, as of `feed_forward`.
      shared_channels: the inner dim of a feed-forward layer that all tokens take; several shared experts are one of
        their joint width. None: there is none.
      training: whether routing jitters, and dropout drops.
      nonpadding: bool [groups..., tokens]: False marks tokens that go nowhere, take no room and have no weight in the
        losses.
      form: "einsum" moves tokens by products with masks, "gather" looks them up; "dense" moves none: every expert takes
        all tokens, with gates of zero for those that are not its own. Equal in result. Unless given, "dense" where
        experts have room for all tokens of a group anyway, as of one token that is decoded; else a product for groups
        of up to 512 tokens.
      numerics: dtypes of the variables and of what is computed, precision of the products; routing is float32.
      name: scope of `router/kernel` (and `router/bias`), `experts/wi/kernel`, `experts/wi_gate/kernel`,
        `experts/wo/kernel`, and the same under `shared`; of two levels the routers are `router` and `inner/router`, and
        the experts are under `inner`.
    Returns: a `Mixture`; of two levels `dropped` counts both, losses are the sums of theirs, `load` is of the second.
      Within the scope the values are called dispatched (what experts get), combined and out.
    Layout: `batch:data;experts:data` splits both over one axis, and tokens change sides by an all_to_all there and one
      back; `batch:data+expert;experts:expert;batch_unsplit:data` has an axis for experts alone. `batch_unsplit`, the
      groups of what experts compute, keeps the axes of the batch that experts do not take: where they take none,
      `batch:data;batch_unsplit:data`. Under an axis for experts that splits no tokens every device routes and looks up
      all, unless `experts_unsplit` lies there too. `hidden_channels` may be split as of any feed-forward layer. Of two
      levels each has an axis, and tokens change sides over one after the other: `batch:y+x;expert_x:x;expert_y:y;
      batch_unsplit:y`, where `batch_inner` is what the groups are called inside. With "grouped" each device
      sorts its own tokens (those of the batch, and of a sequence that a required rule splits). A rule for experts sends
      rows by an all_to_all to as many shards of the experts as it splits them into, each with room that `shard_factor`
      sets: for all that may come, shards / min(choices, experts of a shard) times too much on the mean, unless it is
      given; `length_unsplit`, as `batch_unsplit`, keeps the axes of the length then.
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
        raise ShapeError(f"{at(what)}: {x.shape} already has a dim '{PLACES}'; call it otherwise")
    if form is not None:
        choice(form, what, "form", FORMS)
    levels, hidden = _levels(experts, routing, form, what), as_dim(hidden_channels, what)
    flag(training, what, "training")
    if form is not None:
        choice(form, what, "form", FORMS if len(levels) == 1 else FORMS[:2])

    def compute(
        there: Tensor, dims: tuple[Dimension, ...], gates: Tensor | None, grouping: Grouping | None = None
    ) -> Tensor:
        return feed_forward(
            there, hidden, activation, gated, use_bias, dropout if training else 0.0, None, numerics, "experts", dims,
            gates, grouping,
        )  # fmt: skip

    with scope(name):
        said = _routed(x, levels, (), nonpadding, training, form, numerics, compute)
        if shared_channels is None:
            return said
        values = said.values + feed_forward(
            x, as_dim(shared_channels, what), activation, gated, use_bias, dropout if training else 0.0,
            None, numerics, "shared",
        )  # fmt: skip
    return replace(said, values=values)


def _levels(experts: object, routing: object, form: str | None, what: str) -> list[Level]:
    """The dims of experts, the outer first, each with how it is routed."""
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
    """How tokens move where the user does not say; `takes_all`: one level, whose experts have room for all tokens."""
    if takes_all:
        return _without_room(grouped, many, routing)
    return "einsum" if grouped.shape[-2].size <= EINSUM_TOKENS else "gather", routing


def _routed(
    x: Tensor,
    levels: Sequence[Level],
    held: tuple[Dimension, ...],
    nonpadding: Tensor | None,
    training: bool,
    form: str | None,
    numerics: Numerics,
    compute: Callable[..., Tensor],
) -> Mixture:
    """One level: x [held..., groups..., tokens, features] to experts of this one, which may be levels themselves.

    `held` are the experts of the level around: each routes what it has been given by a router of its own.
    """
    what = "moe"
    (many, routing), *inner = levels
    grouped = _grouped(x, routing, what)
    inside = _Names(many, grouped, held, what)
    mask = share = None
    if nonpadding is not None:
        mask = _mask(nonpadding, x, grouped.shape, what)
        of_losses = FLOAT64 if x.dtype is FLOAT64 else FLOAT32
        share = real_share(nonpadding, of_losses, [d for d in nonpadding.shape if d.name in inside.stays])
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
        there, back = _by_lookup(sorted_tokens, sorted_tokens.shape[-2], slots)
    elif form == "dense":
        there, gates = grouped, inside.enter(_gates(slots, tokens), "gates")
    else:
        there, back = _MOVES[form](grouped, tokens, slots)
    crosses = grouping is None or grouping.parts  # rows of all experts stay with their tokens
    there = inside.enter(there, "dispatched") if crosses else there
    dropped, load, loss, balance, z = (
        decision.dropped, decision.load, decision.balance_loss * routing.loss_coef + decision.z_loss * routing.z_loss,
        decision.balance_loss, decision.z_loss,
    )  # fmt: skip
    if inner:
        filled = inside.enter(greater_equal(slots.token, 0), "filled")
        filled = transpose(filled, there.shape.dims[:-1])
        with scope("inner"):
            below = _routed(there, inner, (many,), filled, training, form, numerics, compute)
        combined = below.values
        # By the groups of this level; what is dropped is summed over its experts, of losses the mean is taken.
        dropped = dropped + reduce_sum(inside.leave(below.dropped, "dropped"), output_shape=dropped.shape)
        load = inside.leave(below.load, "load")
        load = transpose(load, [*dropped.shape, inside.outer, below.load.shape[-1]])
        loss, balance, z = (
            own + reduce_mean(inside.leave(t, "mean"), output_shape=own.shape)
            for own, t in ((loss, below.loss), (balance, below.balance_loss), (z, below.z_loss))
        )
    else:
        combined = compute(there, (*held, many), gates, grouping)
    combined = inside.leave(combined, "combined") if crosses else combined
    values = reshape(combined if back is None else back(combined), x.shape, "out")
    return Mixture(values, loss, balance, z, dropped, load)


class _Names:
    """The names of dims on either side of the exchange."""

    def __init__(self, experts: Dimension, x: Tensor, held: tuple[Dimension, ...], what: str) -> None:
        self.experts = experts
        # Stages of a pipeline have experts of their own: tokens never leave theirs.
        self.stays = {d.name for g in x.graph.around if g.loop_body is not None for d in g.loop_body.held}
        stays = self.stays | {d.name for d in held}
        self.outer = Dimension(f"{experts.name}_unsplit", experts.size)
        taken = [d.name for d in (experts, self.outer) if d.name in x.shape]
        if taken:
            raise ShapeError(f"{at(what)}: {x.shape} already has a dim '{taken[0]}'; call the experts otherwise")
        groups = [d.name for d in x.shape[:-2] if d.name not in stays]
        self.inside = {group: _inside(group, bool(held)) for group in groups} | {self.outer.name: experts.name}

    def rows(self, x: Tensor, routing: Routing) -> ExpertRows:
        """The rows of experts that are sorted by expert; from here on the names of their dims, too."""
        rows = rows_of(x, (self.outer.name, self.experts.name), self.experts.size, routing, self.inside)
        if rows.fixed:
            return rows
        self.inside = {rows.length_name: _inside(rows.length_name, False), **self.inside}
        return rows_of(x, (self.outer.name, self.experts.name), self.experts.size, routing, self.inside)

    def enter(self, x: Tensor, name: str) -> Tensor:
        """What tokens or routers know, as experts know it."""
        return _renamed(x, self.inside, name)

    def leave(self, x: Tensor, name: str) -> Tensor:
        """And back."""
        return _renamed(x, {inside: outside for outside, inside in reversed(self.inside.items())}, name)


def _inside(group: str, second: bool) -> str:
    """What experts call the groups: `batch_unsplit`; those of a second level, which get that, `batch_inner`."""
    return f"{group.removesuffix('_unsplit')}_inner" if second else f"{group}_unsplit"


def _renamed(x: Tensor, names: Mapping[str, str], last: str) -> Tensor:
    """`x` with other names of those of its dims that are among `names`; the last of the operations is called `last`."""
    here = [(old, new) for old, new in names.items() if old in x.shape]
    for n, (old, new) in enumerate(here, start=1):
        x = rename_dimension(x, old, new, last if n == len(here) else None)
    return x


def _grouped(x: Tensor, routing: Routing, what: str) -> Tensor:
    """[groups..., tokens of a group, features]."""
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


def _mask(nonpadding: Tensor, x: Tensor, grouped: Shape, what: str) -> Tensor:
    """The mask of tokens by group."""
    if tensor(nonpadding, what).dtype is not BOOL or nonpadding.shape != x.shape[:-1]:
        raise ShapeError(
            f"{at(what)}: nonpadding must be bool and have the dims of x but the last, {Shape(x.shape[:-1])}",
            nonpadding,
            x,
        )
    return reshape(nonpadding, grouped[:-1])


# ---------------------------------------------------------------- ways to move tokens, or none


def _without_room(x: Tensor, experts: Dimension, routing: Routing) -> tuple[str, Routing]:
    """The form where experts have room for all tokens: of few tokens one that reads only experts that are chosen."""
    chosen = prod(d.size for d in x.shape[:-1]) * routing.choices
    by_token = routing.gating not in ("ntlb", "expert_choice")
    if by_token and experts.size > 1 and chosen < FEW_CHOICES * experts.size:
        return "grouped", replace(routing, expert_shards=None, shard_factor=None)
    return "dense", routing


def _gates(slots: Slots, tokens: Dimension) -> Tensor:
    """The gate of each token with each expert, zero where it has no place: [experts, groups, tokens]."""
    places = slots.token.shape[-1]
    shape = Shape([*(d for d in slots.token.shape if d != places), tokens])
    return scatter_add(slots.gate, slots.token, tokens, shape, out_of_range="zero")


def _by_product(x: Tensor, tokens: Dimension, slots: Slots) -> tuple[Tensor, Back]:
    """Products with the one-hots of the tokens in all places."""
    ordered = [*slots.token.shape, x.shape[-1]]
    mask = one_hot(slots.token, tokens, dtype=x.dtype, out_of_range="zero")

    def back(y: Tensor) -> Tensor:
        weighed = multiply(mask, cast(slots.gate, x.dtype), mask.shape)
        return einsum([weighed, y], output_shape=x.shape, name="combine")

    return einsum([mask, x], output_shape=ordered, name="dispatch"), back


def _by_lookup(x: Tensor, tokens: Dimension, slots: Slots) -> tuple[Tensor, Back]:
    """A lookup of the token in each place, and its transpose."""

    def back(y: Tensor) -> Tensor:
        weighed = multiply(widened(y), cast(slots.gate, widened(y).dtype), y.shape)
        token_sums = scatter_add(weighed, slots.token, tokens, x.shape, "combine", out_of_range="zero")
        return cast(token_sums, x.dtype)

    return gather(x, slots.token, tokens, name="dispatch", out_of_range="zero"), back


def _sorted_by_expert(slots: Slots, inside: _Names, rows: ExpertRows) -> tuple[Slots, Grouping]:
    """Places that the experts of a shard share, and how many each has; of one shard for good without its dim."""
    sizes = slots.sizes
    assert sizes is not None
    dim = slots.token.shape[-1]
    tokens, members = rows.count("tokens"), rows.count("members")
    if not rows.fixed or rows.shards > 1:
        return slots, Grouping(dim, inside.enter(sizes, "sizes"), rows.share, tokens, members, parts=True)
    token, gate = (reshape(t, t.shape.dims[1:]) for t in (slots.token, slots.gate))
    whole = reshape(sizes, [*sizes.shape.dims[1:-1], inside.experts])
    return Slots(token, gate), Grouping(dim, whole, rows.share, tokens, members)


_MOVES: dict[str, Callable[[Tensor, Dimension, Slots], tuple[Tensor, Back]]] = {
    "einsum": _by_product,
    "gather": _by_lookup,
}
