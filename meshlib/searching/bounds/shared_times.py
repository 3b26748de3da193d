"""Seconds of the collectives of many candidates on the wire, shared out among the axes that they run over."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import permutations

import numpy as np

from meshlib.estimation.work.combined_collectives import THRESHOLD_BYTES
from meshlib.searching.bounds.collectives import overhead_seconds, wire_seconds
from meshlib.searching.bounds.dataflow import Bytes, Edge, Flow, Placed
from meshlib.searching.bounds.node_splits import ANY, FREE, KINDS, SUM, WHOLE
from meshlib.searching.bounds.shared_splits import GATHERS, SUMS, Batch, Bools, Floats, Usable


@dataclass(eq=False)
class TimedBatch(Batch):
    """A batch of candidates with the seconds of its collectives."""

    _rates: dict[tuple[int, tuple[int, ...]], Floats] = field(default_factory=dict)

    def share_of_waits(self, flow: Flow, edge: Edge, axis: int, usable: Usable) -> Floats:
        """For each candidate, the share of a collective over an axis that counts, because those on several operands, or
        for several homes, may be waited for at the same time: all of it if no other axis sends any, since they then
        take turns on its links."""
        node = None if flow.nodes[edge.target].placed is not None else edge.target
        key = "waits", flow, node
        known: tuple[dict[tuple[int, int], Floats], Bools] | None = self._known.get(key)
        if known is None:
            sizes: dict[tuple[int, int], Floats] = {}
            over = np.zeros((self.count, len(self.candidates)), bool)
            for e in flow.waited[node]:
                sends = np.array([self.sends(flow, e, a, usable) for a in range(self.count)])
                size = np.where(sends.any(axis=0), max(1.0, e.least_bytes), 0.0)
                sizes[e.target, e.operand] = np.maximum(sizes.get((e.target, e.operand), 0.0), size)
                over |= sends
            known = self._known[key] = sizes, over
        sizes, over = known
        size, total = sizes[edge.target, edge.operand], np.sum([*sizes.values()], axis=0)
        share = np.divide(size, total, out=np.ones_like(size), where=total > 0)
        return np.where(np.delete(over, axis, axis=0).any(axis=0), share, 1.0)

    def _subsets(self) -> Iterator[tuple[int, ...]]:
        """All sets of axes, by their bits."""
        axes = range(self.count)
        return (tuple(axis for axis in axes if bits >> axis & 1) for bits in range(1 << self.count))

    def _rate(self, kind: int, axes: Sequence[int]) -> Floats:
        """Seconds on the wire per byte of a collective over some axes."""
        key = kind, tuple(axes)
        rate = self._rates.get(key)
        if rate is None:
            rate = np.zeros(len(self.candidates))
            if axes and not self.compiler.offloads(KINDS[kind], self.candidates[0].slice.chip):
                rate = self.by_machine(lambda machine: wire_seconds(machine, axes, KINDS[kind]))
            self._rates[key] = rate
        return rate

    def _splitting(self, flow: Flow, edge: Edge, usable: Usable) -> Bools:
        """For [candidate, axis], whether an axis may split a value that an edge sends: at its source, as a part of a
        sum, or as one of its readers takes it. A lowering uses no other axes for a collective."""
        key = "splitting", edge
        known: Bools | None = self._known.get(key)
        if known is None:
            ends = [(edge.source, None, None), *((e.target, e.operand, e.home) for e in flow.readers([edge]))]
            known = self._known[key] = np.array(
                [
                    np.any([self._may_split(flow, *end, axis, usable) for end in ends], axis=0)
                    for axis in range(self.count)
                ]
            ).T
        return known

    def _may_split(
        self, flow: Flow, number: int, operand: int | None, home: Placed | None, axis: int, usable: Usable
    ) -> Bools:
        placed = home or (flow.nodes[number].placed if operand is None else None)
        if placed is not None:
            return self.homes_of(placed)[:, axis] > 0
        forms = (WHOLE,) if operand is None else (WHOLE, ANY)
        options, able = self.options_of(flow.nodes[number])[0], usable.get(number)
        if able is None:
            return np.ones(len(self.candidates), bool)
        given = options.results if operand is None else options.required(operand)
        split: Bools = np.any(able[axis] & ~np.isin(given, forms), axis=1)
        return split

    def _least_bytes(self, sizes: Bytes, axes: Sequence[int], splitting: Bools) -> Floats:
        """Smallest bytes on a device if all other axes split whatever they may; `splitting`: [candidate, axis]."""
        types, index = self.types
        least = np.full(len(self.candidates), np.inf)
        for names, whole in sizes.items():
            touches = np.array([names is None or not names.isdisjoint(dims) for dims, _ in types], bool)
            parts = np.where(touches[index] & splitting, self.sizes, 1.0)
            parts[:, list(axes)] = 1.0
            least = np.minimum(least, whole / parts.prod(axis=1))
        return least

    def wire_seconds(self, flow: Flow, edge: Edge, axis: int, joining: Sequence[Bools], usable: Usable) -> Floats:
        """Seconds on the wire that count for an axis, for [candidate, kind]; `joining`: for each axis, which
        candidates may need other collectives over it from the same source.

        A collective over more axes has more links; it counts for each in proportion to its time over that one alone.
        """
        seconds = np.zeros((len(self.candidates), len(KINDS)))
        bytes_of: dict[tuple[int, ...], Floats] = {}
        splitting = self._splitting(flow, edge, usable)
        for kind in range(1, len(KINDS)):
            part = np.ones(len(self.candidates))
            for axes in self._subsets():
                if axis not in axes:
                    continue
                for those in (axes, *((n,) for n in axes)):
                    if those not in bytes_of:
                        bytes_of[those] = self._least_bytes(edge.sizes, those, splitting)
                whole = np.sum([self._rate(kind, (n,)) * bytes_of[n,] for n in axes], axis=0)
                joint = self._rate(kind, axes) * bytes_of[axes]
                # a sum may be pending over further axes from before the source
                able = kind in SUMS or np.all([joining[n] for n in axes], axis=0)
                part = np.minimum(part, np.divide(joint, whole, out=np.ones_like(whole), where=able & (whole > 0)))
            seconds[:, kind] = part * self._rate(kind, (axis,)) * bytes_of[axis,]
        return seconds

    def most_devices(self, flow: Flow, edges: Sequence[Edge], axis: int, usable: Usable) -> Floats:
        """The most devices of a gather or sum over an axis that serves some edges, and so pieces: [candidate, kind].

        A gather runs over further axes that need one, too; a sum over those over which it is pending, perhaps from
        before a product that they do not split.
        """
        devices = np.repeat(self.sizes[:, [axis]], len(KINDS), axis=1)
        for other in (n for n in range(self.count) if n != axis):
            gathers = np.zeros(len(self.candidates), bool)
            for edge in edges:
                gathers |= (self.usable_kinds(flow, edge, other, usable) == GATHERS).any(axis=(1, 2))
            sums = ~self.never(flow, (edges[0].source, None), other, usable, (WHOLE, SUM, FREE))
            size = self.sizes[:, other]
            devices[:, GATHERS] *= np.where(gathers, size, 1.0)
            devices[:, SUMS] *= np.where(sums, size, 1.0)[:, None]
        return devices

    def shared_out(self, flow: Flow, edge: Edge, needs: Sequence[Bools], usable: Usable) -> Floats:
        """Seconds on the wire of the collective on an edge between a variable and a product, for [axis, candidate].

        It runs over the axes whose options `needs` it, and over any set of them the sum is no more than its time: each
        axis has what it adds to those before it, in the order that gives most to axes that need it under every usable
        option.
        """
        seconds = self._wire_of_sets(edge, self._splitting(flow, edge, usable))
        options = usable[edge.target if edge.home is None else edge.source]
        takes = [need.any(axis=1) for need in needs]
        bits = sum(take.astype(int) << axis for axis, take in enumerate(takes))
        of_sets = [seconds[bits & number, np.arange(len(self.candidates))] for number in range(len(seconds))]
        certain = np.array([(need | ~able).all(axis=1) for need, able in zip(needs, options, strict=True)])
        best: Floats = np.zeros(certain.shape)
        for order in permutations(range(self.count)):
            own, before = np.zeros(certain.shape), 0
            for axis in order:
                own[axis] = np.maximum(of_sets[before | 1 << axis] - of_sets[before], 0.0)
                before |= 1 << axis
            part = np.ones(len(self.candidates))
            for axes, most in zip(self._subsets(), of_sets, strict=True):
                total = own[list(axes)].sum(axis=0)
                part = np.minimum(part, np.divide(most, total, out=np.ones_like(part), where=total > 0))
            own = own * part
            is_better = (own * (1 + certain)).sum(axis=0) > (best * (1 + certain)).sum(axis=0)
            best = np.where(is_better, own, best)
        return best

    def _wire_of_sets(self, edge: Edge, splitting: Bools) -> Floats:
        """Lower bounds on the seconds on the wire of a collective over each set of axes, for [set, candidate].

        A sum over axes by which the result is not split is gathered again; it may be pending over further axes from
        before the source. Nothing where it may be so small that it is combined with others.
        """
        subsets = [*self._subsets()]

        def least_bytes(axes: Sequence[int]) -> Floats:
            return self._least_bytes(edge.sizes, axes, splitting)

        first = GATHERS if edge.home is None else SUMS[0]
        alone = np.array([self._rate(first, axes) * least_bytes(axes) for axes in subsets])
        seconds = alone
        if edge.home is not None:
            unsplit = self.homes_of(edge.home) == 0
            seconds = np.array([
                np.min([alone[m] for m in range(len(subsets)) if m & n == n], axis=0) if n else alone[0]
                for n in range(len(subsets))
            ])  # fmt: skip
            for number, axes in enumerate(subsets):
                again = np.zeros(len(self.candidates))
                in_turn = np.zeros(len(self.candidates))
                for other, those in enumerate(subsets):  # the axes of the set by which the result is not split
                    if other & ~number:
                        continue
                    same = np.all([unsplit[:, a] == (a in those) for a in axes], axis=0)
                    split = subsets[number & ~other]
                    gathered = self._rate(GATHERS, those) * least_bytes(those)
                    reduced = self._rate(SUMS[1], those) * least_bytes(those)
                    scattered = self._rate(SUMS[0], split) * least_bytes(axes)
                    again = np.where(same, gathered, again)
                    in_turn = np.where(same, scattered + reduced, in_turn)
                seconds[number] = np.minimum(seconds[number] + again, in_turn) if number else 0.0
        most = self.by_machine(lambda machine: overhead_seconds(machine, KINDS[first]))
        least = np.array([least_bytes(axes) for axes in subsets])
        return np.where((seconds < most) & (least < THRESHOLD_BYTES), 0.0, seconds)
