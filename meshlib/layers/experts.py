"""Mixture of experts: each token goes through a few of many feed-forward layers.

Tokens lie by groups (the batch, as a rule), weights by experts. The dims of either have another name on the other's
side, as in Mesh TensorFlow: scores and the places of tokens have `experts_unsplit` beside `batch`, what experts compute
has `experts` beside `batch_unsplit`. So a rule for `batch` and one for `experts` may name the same axis, and the step
between is what exchanges tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from layouts import Dimension, Shape
from meshlib.checks import at, choice, flag
from meshlib.dtypes import BOOL
from meshlib.errors import GraphError, ShapeError
from meshlib.graph import Tensor, scope
from meshlib.layers.norms import widened
from meshlib.layers.numerics import DEFAULT, Numerics, as_numerics
from meshlib.layers.projection import Activation, feed_forward
from meshlib.layers.router import decide
from meshlib.layers.routing import Routing
from meshlib.layers.seating import Slots
from meshlib.ops.building import as_dim, floats, tensor
from meshlib.ops.einsum import einsum
from meshlib.ops.elementwise import cast, multiply
from meshlib.ops.index import gather, one_hot, scatter_add
from meshlib.ops.shape import rename_dimension, reshape

Back = Callable[[Tensor], Tensor]
FORMS = ("einsum", "gather", "dense")
PLACES = "expert_capacity"  # the dim of an expert's places
# A product with the masks of a group multiplies each element of a place with all its tokens, which takes 2 x tokens
# flops; a lookup reads and writes it, 4 bytes in bfloat16. Chips from v2 to v7 make 60 to 560 flops while a byte of HBM
# moves (v5e: 197e12 / 819e9 = 240), so up to about this many tokens the product is done sooner.
EINSUM_TOKENS = 512


@dataclass(frozen=True)
class Mixture:
    """What `moe` returns.

    Attributes:
      values: type of x.
      loss: to be added to that of the task, float32, one for each group: take its mean. It is loss_coef x balance_loss
        + z_loss x z of the routing.
      balance_loss: 1 where all experts are chosen alike: experts x sum over them of (share of choices) x (mean score);
        "top_2" counts first choices alone.
      z_loss: mean of log(sum of exp(scores))^2.
      dropped: int32 by group: choices of tokens that found no room, and with "ntlb" and "expert_choice" the tokens
        that no expert took. Their sum is that of the step.
      load: int32 [groups, experts_unsplit]: how many tokens chose each expert.
    """

    values: Tensor
    loss: Tensor
    balance_loss: Tensor
    z_loss: Tensor
    dropped: Tensor
    load: Tensor


def moe(
    x: Tensor,
    experts: Dimension,
    hidden_channels: Dimension,
    routing: Routing | None = None,
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
      experts: the dim of the experts, the first of their variables.
      hidden_channels: the dim inside each expert.
      routing: who goes where, see `Routing`; its defaults unless given.
      activation, gated, use_bias, dropout: of each expert, as of `feed_forward`.
      shared_channels: the inner dim of a feed-forward layer that all tokens take; several shared experts are one of
        their joint width. None: there is none.
      training: whether routing jitters, and dropout drops.
      nonpadding: bool [groups..., tokens]: False marks tokens that go nowhere and take no room.
      form: "einsum" moves tokens by products with masks, "gather" looks them up; "dense" moves none: every expert takes
        all tokens, with gates of zero for those that are not its own. Equal in result. Unless given, "dense" where
        experts have room for all tokens of a group anyway, as of one token that is decoded; else a product for groups
        of up to 512 tokens.
      numerics: dtypes of the variables and of what is computed, precision of the products; routing is float32.
      name: scope of `router/kernel` (and `router/bias`), `experts/wi/kernel`, `experts/wi_gate/kernel`,
        `experts/wo/kernel`, and the same under `shared`.
    Returns: a `Mixture`. Within the scope the values are called dispatched (what experts get), combined and out.
    Layout: `batch:data;experts:data` splits both over one axis, and tokens change sides by an all_to_all there and one
      back; `batch:data+expert;experts:expert;batch_unsplit:data` has an axis for experts alone. `batch_unsplit`, the
      groups of what experts compute, keeps the axes of the batch that experts do not take: where they take none,
      `batch:data;batch_unsplit:data`. Under an axis for experts that splits no tokens every device routes and looks up
      all, unless `experts_unsplit` lies there too. `hidden_channels` may be split as of any feed-forward layer.
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
    found = Routing() if routing is None else routing
    if not isinstance(found, Routing):
        raise GraphError(f"{at(what)}: routing must be an mtf.layers.Routing, got {type(found).__name__} {found!r:.80}")
    x = as_numerics(numerics, what).cast(floats(x, what))
    if len(x.shape) < 2:
        raise ShapeError(f"{at(what)}: needs [groups..., tokens, features], got {x}")
    if PLACES in x.shape:
        raise ShapeError(f"{at(what)}: {x.shape} already has a dim '{PLACES}'; call it otherwise")
    many, hidden = as_dim(experts, what), as_dim(hidden_channels, what)
    found.check_experts(many.size, what)
    grouped = _grouped(x, found, what)
    inside = _Names(many, grouped, what)
    mask = None if nonpadding is None else _mask(nonpadding, x, grouped.shape, what)
    tokens = grouped.shape[-2]
    places = Dimension(PLACES, found.places(many.size, tokens.size, flag(training, what, "training")))
    if form is None:
        form = "dense" if places.size == tokens.size else "einsum" if tokens.size <= EINSUM_TOKENS else "gather"
    choice(form, what, "form", FORMS)
    with scope(name):
        decision = decide(grouped, tokens, inside.outer, places, found, training, mask, numerics)
        slots, back, gates = decision.slots, None, None
        if form == "dense":
            there, gates = grouped, inside.enter(_gates(slots, tokens), "gates")
        else:
            there, back = _MOVES[form](grouped, tokens, slots)
        made = feed_forward(
            inside.enter(there, "dispatched"), hidden, activation, gated, use_bias, dropout if training else 0.0,
            None, numerics, "experts", (many,), gates,
        )  # fmt: skip
        made = inside.leave(made, "combined")
        values = reshape(made if back is None else back(made), x.shape, "out")
        if shared_channels is not None:
            values = values + feed_forward(
                x, as_dim(shared_channels, what), activation, gated, use_bias, dropout if training else 0.0,
                None, numerics, "shared",
            )  # fmt: skip
        loss = decision.balance_loss * found.loss_coef + decision.z_loss * found.z_loss
    return Mixture(values, loss, decision.balance_loss, decision.z_loss, decision.dropped, decision.load)


class _Names:
    """The names of dims on either side of the exchange."""

    def __init__(self, experts: Dimension, x: Tensor, what: str) -> None:
        self.experts = experts
        # Stages of a pipeline have experts of their own: tokens never leave theirs.
        held = {d.name for g in x.graph.around for d in g.held}
        self.outer = Dimension(f"{experts.name}_unsplit", experts.size)
        taken = [d.name for d in (experts, self.outer) if d.name in x.shape]
        if taken:
            raise ShapeError(f"{at(what)}: {x.shape} already has a dim '{taken[0]}'; call the experts otherwise")
        groups = [d.name for d in x.shape[:-2] if d.name not in held]
        self.inside = {**{group: f"{group}_unsplit" for group in groups}, self.outer.name: experts.name}

    def enter(self, x: Tensor, name: str) -> Tensor:
        """What tokens or routers know, as experts know it."""
        return _renamed(x, self.inside, name)

    def leave(self, x: Tensor, name: str) -> Tensor:
        """And back."""
        return _renamed(x, {inside: outside for outside, inside in reversed(self.inside.items())}, name)


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
            f"{total} % {size} = {total % size}\n  {x}"
        )
    return reshape(x, [*lead, Dimension(outer.name, total // size), Dimension("group", size), features])


def _mask(nonpadding: Tensor, x: Tensor, grouped: Shape, what: str) -> Tensor:
    """The mask of tokens by group."""
    if tensor(nonpadding, what).dtype is not BOOL or nonpadding.shape != x.shape[:-1]:
        raise ShapeError(
            f"{at(what)}: nonpadding must be bool and have the dims of x but the last, {Shape(x.shape[:-1])}"
            f"\n  {nonpadding}\n  {x}"
        )
    return reshape(nonpadding, grouped[:-1])


# ---------------------------------------------------------------- ways to move tokens, or none


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
        found = scatter_add(weighed, slots.token, tokens, x.shape, "combine", out_of_range="zero")
        return cast(found, x.dtype)

    return gather(x, slots.token, tokens, name="dispatch", out_of_range="zero"), back


_MOVES: dict[str, Callable[[Tensor, Dimension, Slots], tuple[Tensor, Back]]] = {
    "einsum": _by_product,
    "gather": _by_lookup,
}
