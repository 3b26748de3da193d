"""Rows that several senders have sorted by expert, sorted again by the shard of experts that receives them.

An all_to_all brings each shard one run of rows from each sender. A kernel for sorted rows computes whole tiles, so that
each expert pays for a tile of each run; sorted again, its rows are adjacent. `ExpertRows` says which runs are joined:
those on one device, if that leaves out enough tiles to pay for the passes over the rows.
"""

from __future__ import annotations

from collections.abc import Callable

from layouts import Shape
from meshlib.core.graph import Tensor
from meshlib.layers.expert_rows import SENT, ExpertRows
from meshlib.ops.control.sources import constant_like
from meshlib.ops.movement.indexing import gather, scatter_add
from meshlib.ops.movement.indexing import range as positions
from meshlib.ops.movement.shape import reshape
from meshlib.ops.pointwise.binary import add, greater_equal, less, logical_and
from meshlib.ops.pointwise.cumulative import cumsum
from meshlib.ops.pointwise.reductions import reduce_sum
from meshlib.ops.pointwise.selection import where


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
    together = reshape(x, [*lead, sent, features])
    result_shape = Shape([*lead, joined, features])

    def apart(y: Tensor) -> Tensor:
        return reshape(gather(y, slot, joined, name="by_sender", out_of_range="zero"), x.shape)

    return scatter_add(together, slot, joined, result_shape, "regrouped", out_of_range="zero"), totals, apart
