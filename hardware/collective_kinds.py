"""Kinds of collectives, one record each: their phases on the links, which determine bytes, time and results.

    all_gather          gather                 (n-1)/n of the larger side sent on a ring of n
    reduce_scatter      reduce                 (n-1)/n
    all_reduce          reduce, then gather    2 (n-1)/n
    all_to_all          exchange               (n-1)/n
    collective_permute  shift                  1
    broadcast           spread                 1

Times are in `hardware.network`, single steps in `hardware.ring_steps`, messages in `hardware.ring_plans` and
`hardware.point_plans`. What a kind does to a sharding is in `layouts.step_kinds`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hardware.checks import one_of
from hardware.numerics import ring_reduce_scatter

Array = NDArray[Any]
Join = Callable[[Sequence[Array]], Array]


class Phase(Enum):
    """A communication pattern within a group, of which collectives are composed."""

    GATHER = "all_gather"  # every node's block to all
    REDUCE = "reduce_scatter"  # partial sums to the owner of each block
    EXCHANGE = "all_to_all"  # a different block to every node
    SHIFT = "shift"  # all data to the next node
    SPREAD = "spread"  # all data of one node to all

    @property
    def is_staged(self) -> bool:
        """True if all nodes send blocks at once, along one axis after the other."""
        return self not in (Phase.SHIFT, Phase.SPREAD)


@dataclass(frozen=True, slots=True)
class CollectiveKind:
    """A kind of collective: its name, and its phases in order.

    Example:
      >>> COLLECTIVE_KINDS["all_reduce"].phases
      (<Phase.REDUCE: 'reduce_scatter'>, <Phase.GATHER: 'all_gather'>)
    """

    name: str
    phases: tuple[Phase, ...]

    @property
    def is_staged(self) -> bool:
        """True if all nodes send blocks at once, along one axis after the other."""
        return all(phase.is_staged for phase in self.phases)

    @property
    def moves_all(self) -> bool:
        """True if all data crosses every level of the network; otherwise each level leaves a part of it to the next."""
        return Phase.EXCHANGE in self.phases

    @property
    def hbm_passes(self) -> int:
        """Number of passes over the data in HBM: each phase reads and writes it."""
        return 2 * len(self.phases)

    def ring_share(self, n: int) -> float:
        """Data sent by a node of a ring of n nodes, relative to the larger of operand and result."""
        return sum([(n - 1) / n if phase.is_staged else float(n > 1) for phase in self.phases])


COLLECTIVE_KINDS: Mapping[str, CollectiveKind] = MappingProxyType({
    kind.name: kind
    for kind in (
        CollectiveKind("all_gather", (Phase.GATHER,)),
        CollectiveKind("reduce_scatter", (Phase.REDUCE,)),
        CollectiveKind("all_reduce", (Phase.REDUCE, Phase.GATHER)),
        CollectiveKind("all_to_all", (Phase.EXCHANGE,)),
        CollectiveKind("collective_permute", (Phase.SHIFT,)),
        CollectiveKind("broadcast", (Phase.SPREAD,)),
    )
})  # fmt: skip


def group_results(
    kind: str,
    parts: Sequence[Array],
    cut: int | None,
    join: Join,
    op: str = "sum",
    carry: Callable[[Array], Array] | None = None,
) -> list[Array]:
    """Results of a staged collective on each node of one group; sums are added in ring order.

    Args:
      kind: of `COLLECTIVE_KINDS`, such as "all_reduce".
      parts: the operand of each node, equal shapes.
      cut: dim along which operands are cut into blocks; None: they are flattened before.
      join: makes one array of blocks.
      op, carry: as of `hardware.numerics.ring_reduce_scatter`.
    Raises: HardwareError for another kind, and as `ring_reduce_scatter`.
    Example:
      >>> parts = [np.int32([1, 2]), np.int32([10, 20])]
      >>> [out.tolist() for out in group_results("all_to_all", parts, 0, np.concatenate)]
      [[1, 10], [2, 20]]
    """
    one_of("kind", kind, [name for name, record in COLLECTIVE_KINDS.items() if record.is_staged])
    blocks, nodes = list(parts), len(parts)
    for phase in COLLECTIVE_KINDS[kind].phases:
        if phase is Phase.GATHER:
            blocks = [join(blocks)] * nodes
            continue
        whole = blocks if cut is not None else [block.reshape(-1) for block in blocks]
        if phase is Phase.REDUCE:
            blocks = ring_reduce_scatter(whole, cut or 0, op, carry)
        else:
            pieces = [np.array_split(block, nodes, axis=cut or 0) for block in whole]
            blocks = [join([pieces[source][own] for source in range(nodes)]) for own in range(nodes)]
    return blocks
