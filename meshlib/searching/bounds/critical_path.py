"""The critical path of products and collectives: a lower bound for every schedule.

Each mesh axis splits a product along one of its dims, or not at all. For each such choice of a node, the earliest end
is that of its inputs, under their best choices and with the communication in between, plus the node's own time. The
bound assumes nothing about the lowering, which makes some choice at every node; here each node gets its best one. Where
collectives run in pieces, a reduction overlaps the product before it, and a product starts with the first piece of its
operand, but cannot end before the last piece arrives.

Between two nodes the smallest value on the path is sent, by the cheapest collective of the right kind; pending sums and
other values by one each. Products run one after the other, as do trips of a loop. The first and last HBM transfers of a
product add to its time as far as nothing can prefetch them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations, product
from math import prod
from typing import Any, TypeAlias

import numpy as np

from hardware.slices import Slice
from layouts import Sharding
from meshlib.core.compiler import Compiler
from meshlib.estimation.time.kernel_times import Times
from meshlib.estimation.time.physics import Physics
from meshlib.searching.bounds.collectives import GATHER, REDUCE, SCATTER, SWAP, least_seconds, wire_seconds
from meshlib.searching.bounds.dataflow import Bytes, Edge, Flow, HbmUse, Node, Placed, Split
from meshlib.searching.bounds.min_sum import Table
from meshlib.searching.bounds.products import Contraction, Timed
from meshlib.searching.renamed_dims import Passages
from meshlib.searching.space import Candidate

Floats: TypeAlias = np.ndarray[tuple[int], np.dtype[np.float64]]
Ints: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
# Form of a value over one axis: the dim along which it is split, or one of these.
WHOLE, SUM, ANY, FREE = "", "+", "*", "?"  # replicated; pending sum; any form accepted; unknown
MOST_TARGETS = 4  # targets of one node that are bounded jointly
KINDS = ("", GATHER, SCATTER, REDUCE, SWAP)


@dataclass(eq=False)
class CriticalPath:
    """Critical path of one candidate.

    `physics`: constants of the estimate; `compiler`: decides which collectives run in pieces (windowed einsum);
    `shared`: cache for all candidates with the same program and chip.
    """

    candidate: Candidate
    passages: Passages
    physics: Physics
    compiler: Compiler
    shared: dict[object, Any] = field(default_factory=dict)
    _homes: dict[Placed, Sharding] = field(default_factory=dict)
    _known: dict[tuple[object, ...], Any] = field(default_factory=dict)

    @cached_property
    def axes(self) -> Sequence[tuple[str, frozenset[str], int]]:
        """The axes of more than one device: name, dims that they may split, size."""
        return [axis for axis in self.candidate.named_splits if axis[2] > 1]

    @cached_property
    def _group(self) -> Sequence[int]:
        return [size for _, _, size in self.axes]

    @property
    def slice(self) -> Slice:
        return self.candidate.slice

    def seconds(self, flow: Flow, begins: bool = True) -> float:
        """Lower bound on the seconds of a whole program (`begins`), or of one trip of a loop's body."""
        begins_at: list[Floats] = []
        ends: list[Floats] = []
        owns: list[Floats] = []
        heads: list[tuple[float, float]] = []
        for number, edges in enumerate(flow.edges):
            own, since_start = self._node_seconds(flow, number)
            owns.append(own)
            begin, last_piece = np.zeros(len(own)), np.zeros(len(own))
            for edge in edges:
                first, last = self._arrival(flow, edge, begins_at[edge.source], ends[edge.source])
                begin, last_piece = np.maximum(begin, first), np.maximum(last_piece, last)
            heads.append((float(begin.min()), float(own.min())))
            begins_at.append(begin)
            end = np.maximum(begin + own, last_piece)
            ends.append(np.maximum(end, since_start) if begins else end)
        longest = max((float(end.min()) for end in ends), default=0.0)
        return max([longest, _serial_end(heads), *(self._serial(flow, owns, n) for n in range(len(self.axes)))])

    def _serial(self, flow: Flow, owns: Sequence[Floats], axis: int) -> float:
        """Lower bound by serialising all computation and the core's waits for collectives over one axis.

        The core waits for the operands of its next product, and owes `early_exposed` of other collectives, which it
        pays while it waits (`estimation.scheduling`): so it loses at least half of the sum. Each node splits its work
        over the axis in one way for all its consumers: the bound is the minimum over joint choices.
        Collectives that may run in pieces beside a product are left out: they cost the core nothing.
        """
        table, wire = Table(), np.array([self._wire(axis, kind) for kind in range(len(KINDS))])
        for n, (node, own) in enumerate(zip(flow.nodes, owns, strict=True)):
            counts = [len(self._choices(node, m)) for m in range(len(self.axes))]
            others = tuple(m for m in range(len(self.axes)) if m != axis)
            table.add((n,), own.reshape(counts).min(axis=others) if own.size > 1 else own)
        for edges in ([edge for edge in edges if not self._in_pieces(edge)] for edges in flow.apart):
            if not edges:
                continue
            source = edges[0].source
            targets = list(dict.fromkeys(edge.target for edge in edges))[:MOST_TARGETS]
            scope = (source, *targets)
            worst = np.zeros([len(self._choices(flow.nodes[n], axis)) for n in scope])
            for edge in edges:
                if edge.target in targets:
                    kinds = self._kinds(flow.nodes[source], flow.nodes[edge.target], edge, axis)
                    sent = wire[kinds] * self._least_bytes(edge.sizes, [axis])
                    shape = [1] * len(scope)
                    shape[0], shape[1 + targets.index(edge.target)] = sent.shape
                    worst = np.maximum(worst, sent.reshape(shape))
            table.add(scope, worst)
        return table.least()

    def _wire(self, axis: int, kind: int) -> float:
        """Seconds per byte that the core loses to a collective over that axis, or over more axes if faster."""
        if not kind or self.compiler.offloads(KINDS[kind], self.slice.chip):
            return 0.0
        all_axes = range(len(self.axes))
        least = min(wire_seconds(self.slice, self._group, axes, KINDS[kind]) for axes in _among(all_axes, (axis,)))
        return self.physics.early_exposed / 2 * least

    # ------------------------------------------------------------ nodes

    def _node_seconds(self, flow: Flow, number: int) -> tuple[Floats, Floats]:
        """For each choice of splits: a node's own seconds, and its earliest end if the program starts at 0."""
        node = flow.nodes[number]
        if node.loop is not None:
            return _both(np.array([node.trips * self.seconds(node.loop, False)]))
        launch = self.slice.chip.launch_seconds
        if node.attention is not None:
            attention_seconds = node.attention.seconds(self.slice.chip, self.physics)
            if attention_seconds is None:  # no rate: the candidate will be refused
                return _both(np.zeros(len([*self._cuts(node)])))
            whole, rounded = attention_seconds
            seconds = [max(0.0, whole / prod(cuts.values()) - rounded) + launch for cuts in self._cuts(node)]
            return _both(np.array(seconds))
        if node.product is None:
            return _both(np.zeros(1))
        if node.smaller or node.laid or self.slice.chip.peak(node.product.whole.dtype) is None:
            return _both(np.zeros(len([*self._cuts(node)])))
        uses = (*node.reads, *flow.written[number])
        late = sum(self._moved_bytes(use) for use in uses if not use.early)
        moved = late + sum(self._moved_bytes(use) for use in uses if use.early)
        times = [self._timed(node, node.product, cuts).seconds(moved, late) for cuts in self._cuts(node)]
        busy, since_start = np.array(times).T
        return busy + launch, since_start + launch

    def _cuts(self, node: Node) -> Iterator[dict[int, int]]:
        """For each choice of splits: factor number -> number of parts."""
        assert node.splits is not None
        for chosen in product(*(self._choices(node, n) for n in range(len(self.axes)))):
            cuts: dict[int, int] = {}
            for split, (_, _, size) in zip(chosen, self.axes, strict=True):
                if split is not None:
                    number = node.splits.index(split)
                    cuts[number] = cuts.get(number, 1) * size
            yield cuts

    def _timed(self, node: Node, of: Contraction, cuts: Mapping[int, int]) -> Timed:
        key = node, tuple(cuts.items())
        if key not in self.shared:
            self.shared[key] = of.timed(self.slice.chip, self.physics, cuts)
        timed: Timed = self.shared[key]
        return timed

    def _moved_bytes(self, use: HbmUse) -> float:
        """HBM bytes of one operand or result, without what may stay on the chip between its uses.

        A value passed between kernels stays whole or not at all, except for a part in CMEM.
        """
        least = self._least_bytes(use.sizes, ())
        if use.early or self.slice.chip.cmem_bytes:
            return max(0.0, least - self._held_bytes)
        return least if least > self._held_bytes else 0.0

    @cached_property
    def _held_bytes(self) -> int:
        """Bytes that a chip can keep between kernels."""
        return Times(self.slice.chip, self.physics).held_bytes

    def _choices(self, node: Node, axis: int) -> Sequence[Split | None]:
        """The splits of a product over an axis, None for no split; other nodes have one choice."""
        if node.splits is None:
            return (None,)
        key = node, self.axes[axis][1:]
        if key not in self.shared:
            _, dims, size = self.axes[axis]
            self.shared[key] = [
                *(s for s in node.splits if s.size % size == 0 and (s.reached is None or s.reached & dims)),
                None,
            ]
        chosen: Sequence[Split | None] = self.shared[key]
        return chosen

    def _home(self, placed: Placed, axis: int) -> str:
        sharding = self._homes.get(placed)
        if sharding is None:
            c = self.candidate
            sharding = self._homes[placed] = c.layout.fitting(placed.shape, c.mesh, placed.scope)
        name = self.axes[axis][0]
        return next((d.name for d in placed.shape if name in sharding.of(d.name)), WHOLE)

    def _result_forms(self, node: Node, axis: int) -> Sequence[str]:
        """The form of a node's result over an axis, under each choice."""
        if node.placed is not None:
            return (self._home(node.placed, axis),)
        if node.splits is None:
            return (FREE,)
        return [
            WHOLE if s is None else FREE if s.free else SUM if s.output is None else s.output
            for s in self._choices(node, axis)
        ]

    def _required_forms(self, node: Node, edge: Edge, axis: int) -> Sequence[str]:
        """The form that a node requires of an operand over an axis, under each choice."""
        if edge.home is not None:
            return (self._home(edge.home, axis),)
        if node.splits is None:
            return (FREE,)
        return [
            ANY if s is None else FREE if s.free else s.operands[edge.operand] or WHOLE
            for s in self._choices(node, axis)
        ]

    # ------------------------------------------------------------ edges

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
        for n in range(len(self.axes)):
            kinds = self._kinds(source, target, edge, n)
            present.append(sorted(set(kinds.ravel().tolist())))
            codes = len(KINDS) * codes[:, None, :, None] + kinds[None, :, None, :]
            codes = codes.reshape(codes.shape[0] * codes.shape[1], -1)
        if not edge.sizes or all(kinds == [0] for kinds in present):
            return _both(np.full(codes.shape[1], ends.min()))
        moved = np.zeros(len(KINDS) ** len(self.axes))  # other than sums
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
        if not self._in_pieces(edge):
            return _both((ended + sent).min(axis=0))
        first: Floats = np.maximum(ended + sent / prod(self._group), begun + whole[codes]).min(axis=0)
        last: Floats = np.maximum(ended + moved[codes], begun + sent).min(axis=0)
        return first, last

    def _in_pieces(self, edge: Edge) -> bool:
        """Whether a collective on this edge may be large enough to run in pieces."""
        return self.compiler.cuts_in_pieces(max(edge.sizes.values(), default=0.0))

    def _kinds(self, source: Node, target: Node, edge: Edge, axis: int) -> Ints:
        """Collectives (as indices into KINDS) for each pair of choices of both ends."""
        key = edge, axis
        if key not in self._known:
            left, needed = self._result_forms(source, axis), self._required_forms(target, edge, axis)
            self._known[key] = np.array([[self._kind(a, b, edge) for b in needed] for a in left], np.int64)
        kinds: Ints = self._known[key]
        return kinds

    def _kind(self, left: str, needed: str, edge: Edge) -> int:
        """Collective (as an index into KINDS) that converts one form into another."""
        if left in (FREE, WHOLE):
            return 0
        if left == SUM:
            if edge.linear and edge.taken and needed in (ANY, FREE):
                return 0
            return KINDS.index(REDUCE if needed in (ANY, WHOLE) else SCATTER)
        if needed in (ANY, WHOLE):
            return KINDS.index(GATHER)
        return 0 if needed == FREE or self.passages.same(left, needed) else KINDS.index(SWAP)

    def _sent_seconds(self, sizes: Bytes, chosen: Sequence[int]) -> tuple[float, float]:
        """Lower bounds on the seconds sent on an edge: (other collectives, sums).

        The longest of several kinds counts, because one collective may serve them all.
        """

        def together(axes: Sequence[int], kind: int) -> float:
            """One collective over these axes, or also over others with pending sums: more devices have more links."""
            return min(
                least_seconds(self.slice, self._group, more, KINDS[kind], self._least_bytes(sizes, more))
                for more in _among(range(len(self.axes)), axes)
            )

        def least(axes: Sequence[int], kind: int) -> float:
            """One collective over all axes, or several in sequence."""
            first, *others = axes
            least_seconds = together(axes, kind)
            for part in _among(axes, (first,)):
                if len(part) < len(axes):
                    least_seconds = min(
                        least_seconds, together(part, kind) + least([n for n in others if n not in part], kind)
                    )
            return least_seconds

        kinds = {kind: [axis for axis, other in enumerate(chosen) if other == kind] for kind in set(chosen) if kind}
        longest = [0.0, 0.0]
        for kind, axes in kinds.items():
            summed = KINDS[kind] in (SCATTER, REDUCE)
            longest[summed] = max(longest[summed], least(axes, kind))
        return longest[0], longest[1]

    def _least_bytes(self, sizes: Bytes, axes: Sequence[int]) -> float:
        """Smallest bytes on a device if all other axes split whatever they may."""
        others = [(dims, size) for n, (_, dims, size) in enumerate(self.axes) if n not in axes]
        return min(
            whole / prod(size for dims, size in others if names is None or not names.isdisjoint(dims))
            for names, whole in sizes.items()
        )


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


def _among(all_axes: Sequence[int], these: Sequence[int]) -> list[tuple[int, ...]]:
    """All supersets of `these` within `all_axes`."""
    others = [n for n in all_axes if n not in these]
    return [(*these, *more) for count in range(len(others) + 1) for more in combinations(others, count)]
