"""Seconds of the collectives of many candidates on the wire, shared out among the axes that they run over."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any

import numpy as np

from meshlib.core.opdef import Kind
from meshlib.estimation.work.combined_collectives import small_bytes
from meshlib.searching.bounds.dataflow import Bytes, Edge, Flow, Placed
from meshlib.searching.bounds.node_splits import ANY, FREE, KINDS, SUM, WHOLE
from meshlib.searching.bounds.shared_splits import GATHERS, NOT_SPLIT, SUMS, Batch, Bools, Floats, Ints, Usable


@dataclass(eq=False)
class FlowCollectives:
    """The collectives of one dataflow, for a batch of candidates; `usable`: the options of its products."""

    batch: Batch
    flow: Flow
    usable: Usable
    _known: dict[object, Any] = field(default_factory=dict)

    def share_of_waits(self, edge: Edge, axis: int) -> Floats:
        """For each candidate, the share of collectives over an axis that counts: those over one axis take turns on its
        links, but those over several may be waited for at the same time, on several operands, or for several homes.

        Axes share as the time of what they certainly send; if none certainly does, of what they may send.
        """
        node = None if self.flow.nodes[edge.target].placed is not None else edge.target
        key = "waits", node
        shares: Floats | None = self._known.get(key)
        if shares is None:
            sent = np.array([self._waited(node, a) for a in range(self.batch.count)])  # [axis, certain, ...]
            certain, possible = np.moveaxis(sent, 1, 0)
            weights = np.where(certain.any(axis=0), certain, possible)
            shares = np.divide(weights, weights.sum(axis=0), out=np.ones_like(weights), where=weights.any(axis=0))
            self._known[key] = shares
        own: Floats = shares[axis]
        return own

    def _waited(self, node: int | None, axis: int) -> Floats:
        """Seconds on the wire over an axis alone that a node waits for, for [certainly, possibly; candidate]."""
        seconds = np.zeros((2, len(self.batch.candidates)))
        for edge in self.flow.waited[node]:
            kinds = self.usable_kinds(edge, axis)
            wire = self.batch.rate(GATHERS, (axis,)) * self._least_bytes(edge.sizes, (axis,), self._splitting(edge))
            certain = ((kinds > 0) | ~self._usable_pairs(edge, axis)).all(axis=(1, 2))
            seconds += wire * np.array([certain, (kinds > 0).any(axis=(1, 2))])
        return seconds

    def _subsets(self) -> Iterator[tuple[int, ...]]:
        """All sets of axes, by their bits."""
        axes = range(self.batch.count)
        return (tuple(axis for axis in axes if bits >> axis & 1) for bits in range(1 << self.batch.count))

    def _splitting(self, edge: Edge) -> Bools:
        """For [candidate, axis], whether an axis may split a value that an edge sends: at its source, as a part of a
        sum, or as one of its readers takes it. A lowering uses no other axes for a collective."""
        key = "splitting", edge
        known: Bools | None = self._known.get(key)
        if known is None:
            ends = [(edge.source, None, None), *((e.target, e.operand, e.home) for e in self.flow.readers([edge]))]
            known = self._known[key] = np.array(
                [np.any([self._may_split(*end, axis) for end in ends], axis=0) for axis in range(self.batch.count)]
            ).T
        return known

    def _may_split(self, number: int, operand: int | None, home: Placed | None, axis: int) -> Bools:
        placed = home or (self.flow.nodes[number].placed if operand is None else None)
        if placed is not None:
            return self.batch.homes_of(placed)[:, axis] > 0
        return self._gives((number, operand), axis, (WHOLE, ANY), other=True)

    def _least_bytes(self, sizes: Bytes, axes: Sequence[int], splitting: Bools) -> Floats:
        """Smallest bytes on a device if all other axes split whatever they may; `splitting`: [candidate, axis]."""
        least = np.full(len(self.batch.candidates), np.inf)
        for names, whole in sizes.items():
            parts = np.where(self.batch.may_split(names) & splitting, self.batch.sizes, 1.0)
            parts[:, list(axes)] = 1.0
            least = np.minimum(least, whole / parts.prod(axis=1))
        return least

    def wire_seconds(self, edge: Edge, axis: int, joining: Sequence[Bools]) -> Floats:
        """Seconds on the wire that count for an axis, for [candidate, kind]; `joining`: for each axis, which
        candidates may need other collectives over it from the same source.

        A collective over more axes has more links; it counts for each in proportion to its time over that one alone.
        """
        seconds = np.zeros((len(self.batch.candidates), len(KINDS)))
        bytes_of: dict[tuple[int, ...], Floats] = {}
        splitting = self._splitting(edge)
        for kind in range(1, len(KINDS)):
            part = np.ones(len(self.batch.candidates))
            for axes in self._subsets():
                if axis not in axes:
                    continue
                for those in (axes, *((n,) for n in axes)):
                    if those not in bytes_of:
                        bytes_of[those] = self._least_bytes(edge.sizes, those, splitting)
                whole = np.sum([self.batch.rate(kind, (n,)) * bytes_of[n,] for n in axes], axis=0)
                joint = self.batch.rate(kind, axes) * bytes_of[axes]
                # a sum may be pending over further axes from before the source
                able = kind in SUMS or np.all([joining[n] for n in axes], axis=0)
                part = np.minimum(part, np.divide(joint, whole, out=np.ones_like(whole), where=able & (whole > 0)))
            seconds[:, kind] = part * self.batch.rate(kind, (axis,)) * bytes_of[axis,]
        return seconds

    def most_devices(self, edges: Sequence[Edge], axis: int) -> Floats:
        """The most devices of a gather or sum over an axis that serves some edges, and so pieces: [candidate, kind].

        A gather runs over further axes that need one, too; a sum over those over which it is pending, perhaps from
        before a product that they do not split.
        """
        devices = np.repeat(self.batch.sizes[:, [axis]], len(KINDS), axis=1)
        for other in (n for n in range(self.batch.count) if n != axis):
            gathers = np.zeros(len(self.batch.candidates), bool)
            for edge in edges:
                gathers |= (self.usable_kinds(edge, other) == GATHERS).any(axis=(1, 2))
            sums = self._gives((edges[0].source, None), other, (WHOLE, SUM, FREE))
            size = self.batch.sizes[:, other]
            devices[:, GATHERS] *= np.where(gathers, size, 1.0)
            devices[:, SUMS] *= np.where(sums, size, 1.0)[:, None]
        return devices

    def shared_out(self, edge: Edge, needs: Sequence[Bools]) -> Floats:
        """Seconds on the wire of the collective on an edge between a variable and a product, for [axis, candidate].

        It runs over the axes whose options `needs` it, and over any set of them the sum is no more than its time: each
        axis has what it adds to those before it, in the order that gives most to axes that need it under every usable
        option.
        """
        seconds = self._wire_of_sets(edge, self._splitting(edge))
        options = self.usable[edge.target if edge.home is None else edge.source]
        takes = [need.any(axis=1) for need in needs]
        bits = sum(take.astype(int) << axis for axis, take in enumerate(takes))
        of_sets = [seconds[bits & number, np.arange(len(self.batch.candidates))] for number in range(len(seconds))]
        certain = np.array([(need | ~able).all(axis=1) for need, able in zip(needs, options, strict=True)])
        best: Floats = np.zeros(certain.shape)
        for order in permutations(range(self.batch.count)):
            own, before = np.zeros(certain.shape), 0
            for axis in order:
                own[axis] = np.maximum(of_sets[before | 1 << axis] - of_sets[before], 0.0)
                before |= 1 << axis
            part = np.ones(len(self.batch.candidates))
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
        alone = np.array([self.batch.rate(first, axes) * least_bytes(axes) for axes in subsets])
        seconds = alone
        if edge.home is not None:
            unsplit = self.batch.homes_of(edge.home) == 0
            seconds = np.array([
                np.min([alone[m] for m in range(len(subsets)) if m & n == n], axis=0) if n else alone[0]
                for n in range(len(subsets))
            ])  # fmt: skip
            for number, axes in enumerate(subsets):
                again = np.zeros(len(self.batch.candidates))
                in_turn = np.zeros(len(self.batch.candidates))
                for other, those in enumerate(subsets):  # the axes of the set by which the result is not split
                    if other & ~number:
                        continue
                    same = np.all([unsplit[:, a] == (a in those) for a in axes], axis=0)
                    split = subsets[number & ~other]
                    gathered = self.batch.rate(GATHERS, those) * least_bytes(those)
                    reduced = self.batch.rate(SUMS[1], those) * least_bytes(those)
                    scattered = self.batch.rate(SUMS[0], split) * least_bytes(axes)
                    again = np.where(same, gathered, again)
                    in_turn = np.where(same, scattered + reduced, in_turn)
                seconds[number] = np.minimum(seconds[number] + again, in_turn) if number else 0.0
        least = np.array([least_bytes(axes) for axes in subsets])
        devices = np.array([self.batch.sizes[:, list(axes)].prod(axis=1) for axes in subsets])
        return np.where(least > small_bytes(devices), seconds, 0.0)

    def gathers_parts(self, edge: Edge, axis: int) -> Bools:
        """For each candidate, whether a pending sum on an edge to a home is certainly scattered over an axis, and what
        is computed of the parts gathered: an all_reduce sends as many bytes, and then all devices do the same work.

        There must be such work, no value of more or fewer bytes, which might be sent instead, and a dim that the axis
        may split further, whatever the others split.
        """
        count, axes = len(self.batch.candidates), range(self.batch.count)
        source = self.flow.nodes[edge.source].product
        results = source.instruction.outputs if source is not None else ()
        works = (v not in results and v.tensor.operation.opdef.kind is Kind.ELEMENTWISE for v in edge.values)
        certain = np.zeros(count, bool)
        if edge.home is None or not any(works) or len({v.local_bytes for v in edge.values}) > 1:
            return certain
        homes = self.batch.homes_of(edge.home)
        for n, dim in enumerate(edge.home.shape, 1):
            if any(dim not in v.tensor.shape for v in edge.values):
                continue
            able = np.array([dim.name in dims for dims in self.batch.rule_dims(axis)])
            able &= np.array([dim.size % c.slice.devices == 0 for c in self.batch.candidates])
            for other in (m for m in axes if m != axis):
                inner = (homes[:, other] == n) & self.batch.is_inner(axis, other, dim.name)
                able &= inner | ~((homes[:, other] == n) | self._gives((edge.source, None), other, (dim.name, FREE)))
            certain |= able
        return certain

    def sends(self, edge: Edge, axis: int) -> Bools:
        """For each candidate, whether an edge may need a collective over an axis."""
        key = "sends", edge, axis
        sends: Bools | None = self._known.get(key)
        if sends is None:
            sends = self._known[key] = np.asarray(self.usable_kinds(edge, axis).any(axis=(1, 2)))
        return sends

    def usable_kinds(self, edge: Edge, axis: int) -> Ints:
        """`kinds`, but 0 where an option is not usable."""
        return np.where(self._usable_pairs(edge, axis), self.batch.kinds(self.flow, edge, axis), 0)

    def _usable_pairs(self, edge: Edge, axis: int) -> Bools:
        """Which pairs of options of both ends are usable, broadcast against `kinds`."""
        pairs = np.ones((len(self.batch.candidates), 1, 1), bool)
        if edge.source in self.usable:
            pairs = self.usable[edge.source][axis][:, :, None]
        if edge.target in self.usable and edge.home is None:
            pairs = pairs & self.usable[edge.target][axis][:, None, :]
        return pairs

    def in_pieces(self, edges: Sequence[Edge], edge: Edge, axis: int) -> Bools:
        """True if the collective over an axis on one of the edges that it may serve may be large enough to run in
        pieces, for [candidate, option of the source, option of the target].

        A sum is smaller by the other axes that split the result of its product under any usable option; a gathered
        value by those that split it for all its readers.
        """
        kinds, most = self.batch.kinds(self.flow, edge, axis), max(edge.sizes.values(), default=0.0)
        summed, gathered = np.ones(len(kinds)), np.ones(len(kinds))
        for other in (n for n in range(self.batch.count) if n != axis):
            size = self.batch.sizes[:, other]
            summed *= np.where(self._gives((edge.source, None), other, NOT_SPLIT), 1.0, size)
            read = [self._splits_operand(e, other) for e in self.flow.readers(edges)]
            gathered *= np.where(np.all(read, axis=0), size, 1.0)
        large = [
            np.array([self.batch.compiler.cuts_in_pieces(most / n) for n in parts]) for parts in (summed, gathered)
        ]
        if self.flow.nodes[edge.target].attention is not None or self.flow.is_for_homes(edges):
            large[1] = np.zeros_like(large[1])
        by_kind = (np.isin(kinds, SUMS) & large[0][:, None, None], (kinds == GATHERS) & large[1][:, None, None])
        in_pieces: Bools = np.logical_or(*by_kind)
        return in_pieces

    def _splits_operand(self, edge: Edge, axis: int) -> Bools:
        """For each candidate, True if an axis splits the value at the end of an edge under any usable option."""
        if edge.home is not None:
            split: Bools = self.batch.homes_of(edge.home)[:, axis] > 0
            return split
        return ~self._gives((edge.target, edge.operand), axis, NOT_SPLIT)

    def _gives(self, of: tuple[int, int | None], axis: int, forms: Sequence[str], other: bool = False) -> Bools:
        """For each candidate, whether a usable option of a node gives an operand, or its result (None), one of some
        forms over an axis, or an `other` one; True if its options are unknown."""
        number, operand = of
        if number not in self.usable:
            return np.ones(len(self.batch.candidates), bool)
        options, _ = self.batch.options_of(self.flow.nodes[number])
        given = options.results if operand is None else options.required(operand)
        some: Bools = np.any(self.usable[number][axis] & [(form in forms) is not other for form in given], axis=1)
        return some

    def needs(self, edge: Edge) -> list[Bools]:
        """For each axis, whether the collective on an edge between a variable and a product runs over it, for
        [candidate, option of the product]."""
        node = self.flow.nodes[edge.target if edge.home is None else edge.source]
        _, possible = self.batch.options_of(node)
        wanted = (GATHERS,) if edge.home is None else SUMS
        each = [self.batch.kinds(self.flow, edge, axis) for axis in range(self.batch.count)]
        return [np.isin(kinds.reshape(len(kinds), -1), wanted) & possible[:, axis] for axis, kinds in enumerate(each)]
