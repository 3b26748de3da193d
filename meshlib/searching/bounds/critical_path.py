"""The critical path of products and collectives: a lower bound for every schedule.

For each split of a node (`node_splits`), the earliest end is that of its inputs, under their best splits and with the
communication in between, plus the node's own time. The bound assumes nothing else about the lowering, which makes some
choice at every node; here each node gets its best one. Where
collectives run in pieces, a reduction overlaps the product before it, and a product starts with the first piece of its
operand, but cannot end before the last piece arrives.

Between two nodes the smallest value on the path is sent, by the cheapest collective of the right kind; pending sums and
other values by one each. Products run one after the other, as do trips of a loop. The first and last HBM transfers of a
product add to its time as far as nothing can prefetch them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations, product
from math import prod
from typing import Any

import numpy as np

from meshlib.searching.bounds.collectives import GATHER, REDUCE, SCATTER, SWAP, least_seconds
from meshlib.searching.bounds.dataflow import Bytes, Edge, Flow
from meshlib.searching.bounds.node_splits import KINDS, Floats, Ints, NodeSplits


@dataclass(eq=False)
class CriticalPath:
    """Critical path of one candidate, given its splits."""

    splits: NodeSplits
    _known: dict[tuple[object, ...], Any] = field(default_factory=dict)

    def seconds(self, flow: Flow, begins: bool = True) -> float:
        """Lower bound on the seconds of a whole program (`begins`), or of one trip of a loop's body.

        In an unrolled loop the next trip begins after the last product or loop, before later collectives end.
        """
        unrolled = not begins and self.splits.compiler.unrolled_loops
        begins_at: list[Floats] = []
        ends: list[Floats] = []
        heads: list[tuple[float, float]] = []
        longest = 0.0
        for number, edges in enumerate(flow.edges):
            node = flow.nodes[number]
            if node.loop is not None:
                own = since_start = np.array([node.trips * self.seconds(node.loop, False)])
            else:
                own, since_start = self.splits.seconds(flow, number)
            counts = not unrolled or node.splits is not None or node.loop is not None
            begin, last_piece = np.zeros(len(own)), np.zeros(len(own))
            for edge in edges:
                first, last = self._arrival(flow, edge, begins_at[edge.source], ends[edge.source])
                begin = np.maximum(begin, first)
                if edge.source in flow.several:  # of consecutive products, only one ends after the last piece
                    longest = max(longest, float(last.min()) if counts else 0.0)
                else:
                    last_piece = np.maximum(last_piece, last)
            begins_at.append(begin)
            end = np.maximum(begin + own, last_piece)
            ends.append(np.maximum(end, since_start) if begins else end)
            if counts:
                heads.append((float(begin.min()), float(own.min())))
                longest = max(longest, float(ends[-1].min()))
        return max(longest, _serial_end(heads))

    def _arrival(self, flow: Flow, edge: Edge, begins: Floats, ends: Floats) -> tuple[Floats, Floats]:
        """Earliest arrival of the first and the last piece of an operand, under each choice of the consuming node.

        `begins` and `ends` are those of the source, under each of its choices. Without pieces, all is sent after the
        source's end. With pieces, a sum overlaps its source, and is complete before the target begins, unless its
        second half is a gather; a gather overlaps its target. One piece of each cannot overlap.
        """
        source, target = flow.nodes[edge.source], flow.nodes[edge.target]
        if source.splits is None and source.placed is None:
            return _both(ends)  # the result may have any form
        codes: Ints = np.zeros((1, 1), np.int64)
        present: list[list[int]] = []
        for n in range(len(self.splits.axes)):
            kinds = self.splits.kinds(source, target, edge, n)
            present.append(sorted(set(kinds.ravel().tolist())))
            codes = len(KINDS) * codes[:, None, :, None] + kinds[None, :, None, :]
            codes = codes.reshape(codes.shape[0] * codes.shape[1], -1)
        if not edge.sizes or all(kinds == [0] for kinds in present):
            return _both(np.full(codes.shape[1], ends.min()))
        moved = np.zeros(len(KINDS) ** len(self.splits.axes))  # other than sums
        summed, whole = moved.copy(), moved.copy()  # sums, and those that are no gather
        sizes = tuple(edge.sizes.items())
        for chosen in product(*present):
            code = 0
            for kind in chosen:
                code = len(KINDS) * code + kind
            key = sizes, chosen
            if key not in self._known:
                self._known[key] = self._sent_seconds(edge.sizes, chosen)
            moved[code], summed[code] = self._known[key]
            whole[code] = summed[code] / (2 if KINDS.index(REDUCE) in chosen else 1)
        begun, ended = begins[:, None], ends[:, None]
        sent = (moved + summed)[codes]
        if not self.splits.compiler.cuts_in_pieces(max(edge.sizes.values())):
            return _both((ended + sent).min(axis=0))
        first: Floats = np.maximum(ended + sent / prod(self.splits.group), begun + whole[codes]).min(axis=0)
        last: Floats = np.maximum(ended + moved[codes], begun + sent).min(axis=0)
        return first, last

    def _sent_seconds(self, sizes: Bytes, chosen: Sequence[int]) -> tuple[float, float]:
        """Lower bounds on the seconds sent on an edge: (other collectives, sums).

        The longest of several kinds counts, because one collective may serve them all. The second half of an all_reduce
        is a gather, which may be one with those over other axes; then the first half alone counts.
        """

        machine = self.splits.machine

        def together(axes: Sequence[int], kind: int) -> float:
            """One collective over these axes, or also over others with pending sums: more devices have more links."""
            return min(
                least_seconds(machine, more, KINDS[kind], self.splits.least_bytes(sizes, more))
                for more in supersets(range(len(self.splits.axes)), axes)
            )

        def least(axes: Sequence[int], kind: int) -> float:
            """One collective over all axes, or several in sequence."""
            first, *others = axes
            least_seconds = together(axes, kind)
            for part in supersets(axes, (first,)):
                if len(part) < len(axes):
                    least_seconds = min(
                        least_seconds, together(part, kind) + least([n for n in others if n not in part], kind)
                    )
            return least_seconds

        if any(KINDS[kind] in (GATHER, SWAP) for kind in chosen):
            halves = {KINDS.index(REDUCE): KINDS.index(SCATTER)}
            chosen = [halves.get(kind, kind) for kind in chosen]
        kinds = {kind: [axis for axis, other in enumerate(chosen) if other == kind] for kind in set(chosen) if kind}
        longest = [0.0, 0.0]
        for kind, axes in kinds.items():
            summed = KINDS[kind] in (SCATTER, REDUCE)
            longest[summed] = max(longest[summed], least(axes, kind))
        return longest[0], longest[1]


def _both(seconds: Floats) -> tuple[Floats, Floats]:
    return seconds, seconds


def _serial_end(heads: Sequence[tuple[float, float]]) -> float:
    """Earliest end of kernels that run one at a time, given (earliest begin, seconds) of each.

    >>> _serial_end([(0.0, 1.0), (5.0, 2.0), (6.0, 3.0)])
    10.0
    """
    end = 0.0
    for begin, own in sorted(heads):
        end = max(end, begin) + own
    return end


def supersets(all_axes: Sequence[int], these: Sequence[int]) -> list[tuple[int, ...]]:
    """All supersets of `these` within `all_axes`."""
    others = [n for n in all_axes if n not in these]
    return [(*these, *more) for count in range(len(others) + 1) for more in combinations(others, count)]
