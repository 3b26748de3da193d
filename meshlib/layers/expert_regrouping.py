"""Rows that several senders have sorted by expert, sorted again by the shard of experts that receives them.

An all_to_all brings each shard one run of rows from each sender. A kernel for sorted rows computes whole tiles, so that
each expert pays for a tile of each run; sorted again, its rows are adjacent. `ExpertRows` says which runs are joined:
those on one device, if that leaves out enough tiles to pay for the passes over the rows.
"""

from __future__ import annotations

from collections.abc import Callable

from meshlib.core.graph import Tensor
from meshlib.layers.expert_rows import SENT, ExpertRows
from meshlib.ops.movement.indexing import gather, scatter_add
from meshlib.ops.movement.indexing import range as positions
from meshlib.ops.movement.ranking import argsort
from meshlib.ops.movement.shape import reshape
from meshlib.ops.pointwise.binary import greater_equal
from meshlib.ops.pointwise.casts import cast
from meshlib.ops.pointwise.cumulative import cumsum
from meshlib.ops.pointwise.reductions import reduce_sum


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
    sent, slots = (rows.dim(name, "regrouped") for name in (SENT, places.name))
    with x.graph:
        row = positions(places)
    is_later = greater_equal(row, cumsum(sizes, members))
    expert = reduce_sum(cast(is_later, "int32"), output_shape=[*outer, places])
    order = argsort(reshape(expert, [*lead, slots]), slots)
    together = reshape(x, [*lead, sent, features])
    by_sender = reshape(sizes, [*lead, rows.dim("senders", "senders"), members])

    def apart(y: Tensor) -> Tensor:
        return reshape(scatter_add(y, order, sent, together.shape, "by_sender"), x.shape)

    joined = gather(together, order, sent, name="regrouped")
    return joined, reduce_sum(by_sender, output_shape=[*lead, members]), apart
