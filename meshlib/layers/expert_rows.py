"""Rows sorted by expert: groups sorted separately, shards of experts that share rows, and their regrouping.

An all_to_all brings each shard one run of rows from each sender. A kernel for sorted rows computes whole tiles, so that
each expert pays for a tile of each run; sorted again, its rows are adjacent. `ExpertRows` says which runs are joined:
those on one device, if that leaves out enough tiles to pay for the passes over the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import ceil, gcd, lcm

from layouts import Dimension, LayoutRules, Mesh, Shape
from meshlib.core.graph import Tensor
from meshlib.core.laid_dims import LaidDimension, LaidFloat, LaidInt, Part, SizePlan, blocks
from meshlib.layers.routing import Routing
from meshlib.ops.contraction.ragged import computed_rows
from meshlib.ops.control.sources import constant_like
from meshlib.ops.movement.indexing import range as positions
from meshlib.ops.movement.indexing import scatter_add
from meshlib.ops.movement.inverse_lookup import gather_with_inverse
from meshlib.ops.movement.shape import broadcast, reshape
from meshlib.ops.pointwise.arithmetic import add, greater_equal, less, logical_and, where
from meshlib.ops.pointwise.cumulative import cumsum
from meshlib.ops.pointwise.reductions import reduce_sum

TOKENS = "expert_tokens"  # the dim of tokens that are sorted together
SENT = "sender_rows"  # the dim of rows of several senders before they are sorted again
PLACES = "expert_capacity"  # the dim of an expert's slots, or of the rows of a shard
# Rows in tiles to leave out for each row that is sorted again. A step reads and writes such a row four times, 16 bytes
# for each element of d_model, where the products of a row take 18 x d_ff flops: a quarter of these lasts as long at
# d_ff = 3.6 x (flops per byte of HBM), about 850 on v5e.
LEFT_OUT = 0.25


@dataclass(frozen=True, kw_only=True)
class ExpertRows(SizePlan):
    """Sizes of rows sorted by expert.

    Tokens of a group are sorted together. Each shard of the experts has the same number of rows per group, which its
    experts share. If both depend on the layout, a group is a device's tokens, or the device's block of a sequence that
    is split; shards are the blocks into which a rule splits the experts.

    Attributes:
      experts, choices, factor: number of experts, choices per token, and capacity of a shard relative to its mean load;
        None: capacity for the worst case.
      batch, length: sizes of the token dims, with their names; an empty name if there is no batch.
      names: names of the expert dims in layout rules.
      inside: name of a dim on the experts' side -> its name on the tokens' side.
      groups, cuts: blocks of the batch and of the length that are sorted separately; shards: blocks of the experts.
      group_blocks, cut_blocks: blocks of groups and cuts on the experts' side, each of whose rows are sorted again.
      fixed: whether the caller fixed the sizes, independently of the layout.
    """

    experts: int
    choices: int
    factor: float | None
    batch: int
    length: int
    batch_name: str
    length_name: str
    names: tuple[str, str]
    inside: tuple[tuple[str, str], ...] = ()
    groups: int = 1
    cuts: int = 1
    shards: int = 1
    group_blocks: int = 1
    cut_blocks: int = 1
    fixed: bool = False

    @property
    def tokens(self) -> int:
        """Tokens per group."""
        return self.batch * self.length // (self.groups * self.cuts)

    @property
    def members(self) -> int:
        """Experts per shard."""
        return self.experts // self.shards

    @property
    def rows(self) -> int:
        """Rows (capacity for choices) per shard and group."""
        most = self.tokens * min(self.choices, self.members)
        if self.factor is None:
            return most
        return min(most, ceil(self.choices * self.tokens * self.factor / self.shards - 1e-9))

    @property
    def filled(self) -> float:
        """The mean share of a shard's rows that is filled, if all experts are chosen equally often."""
        return min(1.0, self.choices * self.tokens / (self.shards * self.rows))

    @property
    def senders(self) -> int:
        """Groups and cuts whose rows of a shard are sorted together on the experts' side."""
        return self.groups * self.cuts // (self.group_blocks * self.cut_blocks)

    # ------------------------------------------------------------ as a size plan

    @property
    def note(self) -> str:
        """A note on rows for the worst case, where they are more than twice the mean."""
        if self.factor is not None or 2 * self.filled >= 1:
            return ""
        return (
            f"each of {self.shards} shards of '{self.names[1]}' has rows for the worst case, {1 / self.filled:.3g}"
            " times the mean, and memory, all_to_all and HBM traffic grow with them; shard_factor=2.0 in the Routing"
            " reserves twice the mean, and counts the choices beyond it as dropped"
        )

    def under(self, mesh: Mesh, rules: LayoutRules) -> ExpertRows:
        """These sizes with the groups and shards of a layout."""
        if self.fixed:
            return self
        outer, inner = (blocks([name], mesh, rules, optional=True) for name in self.names)
        groups = gcd(self.batch, blocks([self.batch_name], mesh, rules)) if self.batch_name else 1
        cuts = gcd(self.length, blocks([self.length_name], mesh, rules))
        groups, shards = self.batch if cuts > 1 else groups, gcd(self.experts, lcm(outer, inner))
        laid = replace(self, groups=groups, cuts=cuts, shards=shards, group_blocks=groups, cut_blocks=cuts)
        if shards == 1:
            return laid
        here = {old: blocks([new], mesh, rules, optional=True) for new, old in self.inside}
        cut_blocks = gcd(cuts, here.get(self.length_name, 1))
        joined = replace(
            laid,
            group_blocks=groups if cut_blocks > 1 else gcd(groups, here.get(self.batch_name, 1)),
            cut_blocks=cut_blocks,
        )
        sorted_again = groups * cuts * laid.rows
        return joined if laid.computed_rows - joined.computed_rows > LEFT_OUT * sorted_again else laid

    @property
    def computed_rows(self) -> int:
        """Rows in tiles of all runs of a shard, at the mean load."""
        runs = self.group_blocks * self.cut_blocks
        return runs * computed_rows(ceil(self.filled * self.rows) * self.senders, self.members)

    def number(self, part: Part) -> float:
        """A size by attribute name; "queue": all choices of a group; "seats": all rows of a group."""
        if isinstance(part, int):
            return part
        if part == "queue":
            return self.tokens * self.choices
        if part == "seats":
            return self.shards * self.rows
        if part in ("regrouped", "drawn"):
            return self.senders * (self.rows if part == "regrouped" else self.tokens)
        return float(self.filled) if part == "filled" else int(getattr(self, part))

    def simplest(self, dim: LaidDimension) -> LaidDimension:
        """Rows of a single sender are those of the shard."""
        if self.senders > 1:
            return dim
        part = {"group_blocks": "groups", "cut_blocks": "cuts", "regrouped": "rows"}.get(str(dim.part), dim.part)
        return LaidDimension(PLACES if dim.name == SENT else dim.name, self, part)

    def name(self, name: str) -> str:
        """The name of a dim; with one shard, rows stay with their tokens, and dims keep the tokens' names."""
        if name == SENT and self.senders == 1:
            return PLACES
        return dict(self.inside).get(name, name) if self.shards == 1 else name

    # ------------------------------------------------------------ dims and numbers

    def sized(self, name: str, part: Part) -> Dimension:
        """A dim with one of the sizes."""
        return Dimension(name, int(self.number(part))) if self.fixed else self.dim(name, part)

    def count(self, part: Part) -> int:
        """A size for attributes and constants."""
        return int(self.number(part)) if self.fixed else LaidInt(self, part)

    @property
    def share(self) -> float:
        """`filled` for attributes."""
        return self.filled if self.fixed else LaidFloat(self, "filled")

    def grouped(self, x: Tensor, rest: int) -> Tensor:
        """x [lead..., batch, length, rest...] as [lead..., groups, cuts, tokens, rest...], with `rest` trailing
        dims."""
        if self.fixed:
            return x
        front = len(x.shape) - rest - (2 if self.batch_name else 1)
        lead = [self.sized(d.name, d.size) for d in x.shape[:front]]
        batch = [self.sized(self.batch_name, "groups")] if self.batch_name else []
        dims = [*lead, *batch, self.sized(self.length_name, "cuts"), self.sized(TOKENS, "tokens")]
        return reshape(x, [*dims, *x.shape[len(x.shape) - rest :]])


def rows_of(x: Tensor, experts: tuple[str, str], count: int, routing: Routing, inside: Mapping[str, str]) -> ExpertRows:
    """The rows for tokens x [groups..., tokens, features] and `count` experts.

    Args:
      experts: names of the expert dim in the router and in kernels.
      inside: name on the experts' side -> name in x or the router.
    """
    *lead, tokens, _ = x.shape
    fixed = routing.expert_shards is not None or routing.group_size is not None
    batch = lead[-1] if lead and not fixed else None
    return ExpertRows(
        experts=count,
        choices=routing.choices,
        factor=routing.shard_factor,
        batch=1 if batch is None else batch.size,
        length=tokens.size,
        batch_name="" if batch is None else batch.name,
        length_name=tokens.name,
        names=experts,
        inside=tuple((new, old) for old, new in inside.items() if old != experts[0]),
        shards=routing.expert_shards or 1,
        fixed=fixed,
    )


def regrouped(x: Tensor, sizes: Tensor, rows: ExpertRows) -> tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]:
    """Rows of all senders sorted by expert, their number per expert, and the inverse of the sorting.

    Args:
      x: rows of the experts' side [shards, ..., groups, cuts, rows, features]; without groups if there is no batch.
      sizes: number of rows per sender and expert, [shards, ..., groups, cuts, experts of a shard].
    Returns: rows [shards, ..., blocks of groups, blocks of cuts, rows, features], sizes alike, and a function from rows
      of that shape to rows of the shape of x. All are the identity where each sender's rows stay apart.
    """
    *outer, places, features = x.shape
    members = sizes.shape[-1]
    parts = ("group_blocks", "cut_blocks") if rows.batch_name else ("cut_blocks",)
    lead, runs = outer[: -len(parts)], outer[-len(parts) :]
    lead += [rows.dim(d.name, part) for d, part in zip(runs, parts, strict=True)]
    sent, joined = (rows.dim(name, "regrouped") for name in (SENT, places.name))
    senders = rows.dim("senders", "senders")
    of_sender = reshape(sizes, [*lead, senders, members])
    totals = reduce_sum(of_sender, output_shape=[*lead, members])
    begins, earlier = (cumsum(of_sender, dim, exclusive=True) for dim in (members, senders))
    moved = add(earlier, cumsum(totals, members, exclusive=True), of_sender.shape) - begins
    with x.graph:
        row = positions(places)
    of_expert = logical_and(greater_equal(row, begins), less(row, begins + of_sender))
    shape = [*lead, senders, places]
    place = add(reduce_sum(where(of_expert, moved, 0), output_shape=shape), row, shape)
    filled = less(row, reduce_sum(of_sender, reduced_dim=members))
    beyond = constant_like(rows.count("regrouped"), sizes, "int32")
    slot = reshape(where(filled, place, beyond, shape), [*lead, sent])
    with x.graph:
        numbers = broadcast(positions(sent) + 1, slot.shape)
    origin = scatter_add(numbers, slot, joined, Shape([*lead, joined]), out_of_range="zero") - 1
    together = reshape(x, [*lead, sent, features])

    def apart(y: Tensor) -> Tensor:
        return reshape(gather_with_inverse(y, slot, joined, origin, sent, "by_sender"), x.shape)

    return gather_with_inverse(together, origin, sent, slot, joined, "regrouped"), totals, apart
