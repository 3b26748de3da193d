"""Lower bound that adds up all kernels and the core's time for collectives, for many candidates at once.

The core runs one kernel at a time. Beside them it owes `Physics.early_exposed` of the time on the wire of each
collective that runs beside a product, and it waits for each collective that the next product needs
(`meshlib.estimation.time.scheduling`). So a step takes at least

    kernels + element-wise kernels + owed,    and    kernels + waits,

and any mean of the two: the bound takes several. On edges that are `beside`, collectives are owed: of weights, unless
their product is the first of a trip, and of gradients, unless theirs is the last. Others are owed or waited for; each
counts as the cheaper. Of those that may run in pieces beside a product, one piece is waited for, and half of what all
others are longer than the product. What ends a trip of a loop counts in full with what is owed: if not owed itself, it
depends on the last product of the trip, and all that is owed is paid before.

Each axis has a sum of tables over the splits of the nodes, which `min_sum` minimises: a product takes at least its time
under the best splits, and what each axis adds to it. Collectives over several axes are shared out among their sums.
Tables have a leading dim of candidates.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from meshlib.searching.bounds.dataflow import Edge, Flow
from meshlib.searching.bounds.min_sum import Table
from meshlib.searching.bounds.needless_collectives import NeedlessCollectives
from meshlib.searching.bounds.shared_splits import GATHERS, REDUCES, SCATTERS, SUMS, Batch, Bools, Floats, Ints
from meshlib.searching.bounds.shared_times import FlowCollectives

LONG = 1e6  # seconds: of options that an axis does not have
MOST_TARGETS = 3  # targets of one node that are bounded jointly
# Weights of what is owed in means with waits; at 0.57, a second on the wire counts alike in both.
SHARES = (0.95, 0.8, 0.65, 0.57, 0.5, 0.35, 0.25)


@dataclass(frozen=True)
class Sums:
    """Least sums of a program, or of one trip of a loop's body, in seconds, for each candidate.

    `means`: for each share of `SHARES`, the mean with that weight of what is owed, and the rest of waits. `last`: at
    most what is owed for collectives that may be waited for after the last product, beside element-wise kernels.
    `ending`: at most what is counted for those that end a trip.
    """

    means: Floats
    last: Floats
    ending: Floats


@dataclass(frozen=True, eq=False)
class NodeTimes:
    """Seconds of a node: the least, and for each axis what its options add: together no more than joint options do."""

    least: Floats
    excesses: Sequence[Floats]

    @staticmethod
    def of(own: Floats) -> NodeTimes:
        """From the seconds of all joint options: an array of candidates, and a dim for each axis."""
        axes = range(1, own.ndim)
        least = own.min(axis=tuple(axes), keepdims=True)
        least = np.where(np.isfinite(least), least, 0.0)
        excess = np.where(np.isfinite(own), own - least, LONG)
        excesses = [excess.min(axis=tuple(m for m in axes if m != axis), keepdims=True) for axis in axes]
        total = sum(np.where(e < LONG, e, 0.0) for e in excesses)
        part = np.where((total > 0) & (excess < LONG), excess / np.where(total > 0, total, 1.0), 1.0)
        least_part = np.minimum(part.min(axis=tuple(axes), keepdims=True), 1.0)
        parts = [np.where(e < LONG, e * least_part, LONG).reshape(len(own), -1) for e in excesses]
        return NodeTimes(least.reshape(-1), parts)

    @property
    def usable(self) -> Sequence[Bools]:
        """For each axis, which [candidate, option] may be chosen."""
        return [excess < LONG for excess in self.excesses]

    def most(self, apart: int | None = None) -> Floats:
        """For each candidate, the most seconds that it may be counted with; `apart`: without what this axis adds."""
        added = (np.where(e < LONG, e, 0.0).max(axis=1) for axis, e in enumerate(self.excesses) if axis != apart)
        return self.least + sum(added, np.zeros(1))


@dataclass(frozen=True, eq=False)
class Sent:
    """Collectives over an axis from one source, over the options of the nodes `scope`, in seconds.

    `owed`: what is owed; `either`: on the wire, of others that run whole; `cut`: of others that may run in pieces, and
    `awaited`: what is waited for of those; `ending`: on the wire, of those that end a trip; `needless`: where no
    lowering sends any.
    """

    axis: int
    scope: tuple[int, ...]
    owed: Floats | float = 0.0
    either: Floats | float = 0.0
    cut: Floats | float = 0.0
    awaited: Floats | float = 0.0
    ending: Floats | float = 0.0
    needless: Bools | bool = False

    def seconds(self, share: float, exposed: float) -> Floats:
        """In a mean with that share of what is owed."""
        in_pieces = np.minimum(share * exposed * self.cut, (1 - share) * self.awaited)
        sent = np.maximum(min(share * exposed, 1 - share) * self.either, in_pieces)
        return np.where(self.needless, LONG, share * self.owed + sent + share * exposed * self.ending)


@dataclass(eq=False)
class CoreTime:
    """Core time of some candidates with the same number of axes."""

    batch: Batch

    def seconds(self, flow: Flow, element_seconds: Floats, trailing_seconds: Floats) -> Floats:
        """Lower bounds on the seconds of a program, whose element-wise kernels take at least `element_seconds`: of
        those, `trailing_seconds` in trips after all products, beside what the trip ends with."""
        sums = self._sums(flow, False)
        beside = sums.last + np.minimum(sums.ending, trailing_seconds)  # after the last product, beside collectives
        others = np.maximum(0.0, element_seconds - beside)
        means: Floats = sums.means + np.array(SHARES)[:, None] * others
        most: Floats = means.max(axis=0)
        return most

    def _sums(self, flow: Flow, in_loop: bool) -> Sums:
        count, batch = len(self.batch.candidates), self.batch
        means, last, ending = np.zeros((len(SHARES), count)), np.zeros(count), np.zeros(count)
        seconds: dict[int, Floats] = {}
        for n, node in enumerate(flow.nodes):
            if node.loop is not None:
                trip = self._sums(node.loop, True)
                # a trip may have a larger share than that with which all element-wise kernels count
                means += node.trips * np.maximum.accumulate(trip.means, axis=0)
                last, ending = last + node.trips * trip.last, ending + node.trips * trip.ending
                continue
            own = batch.seconds(flow, n)
            if own is not None:
                seconds[n] = own
        times = self._times(flow, seconds)
        means += sum((time.least for time in times.values()), np.zeros(count))
        exempt = _Exempt(flow, batch)
        collectives = FlowCollectives(batch, flow, {n: time.usable for n, time in times.items()})
        sent = [*self._sent(collectives, in_loop, times, exempt)]
        means += sum((self._least(axis, times, sent) for axis in range(batch.count)), np.zeros_like(means))
        own = sum((np.max(x.ending, axis=tuple(range(1, np.ndim(x.ending)))) for x in sent), np.zeros(count))
        hidden = exempt.hidden + np.minimum(exempt.last, own)  # a sum after the last product, beside what ends the trip
        return Sums(means - np.array(SHARES)[:, None] * hidden, last + exempt.last, ending + own)

    def _times(self, flow: Flow, seconds: Mapping[int, Floats]) -> Mapping[int, NodeTimes]:
        """The times of nodes under the options that a lowering may choose."""
        times = {n: NodeTimes.of(own) for n, own in seconds.items()}
        for narrowed in (NeedlessCollectives.without_sums, NeedlessCollectives.without_gathers):
            usable = narrowed(NeedlessCollectives(self.batch, flow, {n: time.usable for n, time in times.items()}))
            for n, own in seconds.items():
                if any((able != before).any() for able, before in zip(usable[n], times[n].usable, strict=True)):
                    times[n] = NodeTimes.of(_only(own, usable[n]))
        return times

    def _sent(
        self, of: FlowCollectives, in_loop: bool, times: Mapping[int, NodeTimes], exempt: _Exempt
    ) -> Iterator[Sent]:
        """The collectives of a program or trip, over each axis."""
        for edges in of.flow.apart:
            if in_loop and self.batch.compiler.unrolled_loops:  # the next trip begins before such collectives end
                edges = [edge for edge in edges if edge.home is None]
            beside = [edge for edge in edges if edge.beside]
            for edge in beside:
                yield from self._owed(of, edge, len(beside), exempt)
            if not beside:  # otherwise one collective may serve both
                ends = in_loop and not self.batch.compiler.unrolled_loops and bool(edges) and of.flow.ends(edges)
                for axis in range(self.batch.count):
                    yield from self._others(of, edges, axis, times, ends)

    def _least(self, axis: int, times: Mapping[int, NodeTimes], sent: Sequence[Sent]) -> Floats:
        """The least sum of what an axis adds to products, and of its collectives, for [share, candidate]."""
        batch = self.batch
        least = []
        for share in SHARES:
            table = Table(count=len(batch.candidates))
            for n, time in times.items():
                table.add((n,), time.excesses[axis])
            for x in sent:
                if x.axis == axis:
                    table.add(x.scope, x.seconds(share, batch.physics.early_exposed))
            least.append(table.least())
        return np.array(least)

    def _owed(self, of: FlowCollectives, edge: Edge, count: int, exempt: _Exempt) -> Iterator[Sent]:
        """The core's time for the collectives on an edge, one of `count` edges that they may serve."""
        node = edge.target if edge.home is None else edge.source
        if node == exempt.left_out and edge.home is None:
            return
        needs = of.needs(edge)  # for each axis and option, whether it takes part in the collective
        owed = self.batch.physics.early_exposed / count * of.shared_out(edge, needs)
        exempt.add(edge, owed.sum(axis=0))
        for axis, (own, need) in enumerate(zip(owed, needs, strict=True)):
            yield Sent(axis, (node,), np.where(need, own[:, None], 0.0))

    def _others(
        self, of: FlowCollectives, edges: Sequence[Edge], axis: int, times: Mapping[int, NodeTimes], ends: bool
    ) -> Iterator[Sent]:
        """Seconds for the collectives over an axis from one source, which may serve all its edges; `ends`: whether no
        product of the trip follows them.

        Then one that depends on the last product is waited for after it, and another one is issued before a product,
        and owed. A pending sum is scattered, what follows is computed in parts, and its result is gathered, where that
        spares the same work on all devices.
        """
        edges = [edge for edge in edges if of.sends(edge, axis).any()]
        if not edges:
            return
        batch, flow, source = self.batch, of.flow, edges[0].source
        targets = list(dict.fromkeys(edge.target for edge in edges))[:MOST_TARGETS]
        scope = (source, *targets)
        shape = [len(batch.candidates), *(len(batch.splits_of(flow, n)) for n in scope)]
        either, cut, awaited, ending = (np.zeros(shape) for _ in range(4))
        whole, needless = np.ones(shape, bool), np.zeros(shape, bool)
        useless = NeedlessCollectives(batch, flow, of.usable).gathers(edges, axis)
        joining = [np.any([of.sends(edge, m) for edge in edges], axis=0) for m in range(batch.count)]
        for edge in edges:
            if edge.target not in targets:
                continue
            kinds = batch.kinds(flow, edge, axis)  # [candidates, options of source, options of target]
            place = [*kinds.shape[:2], *(kinds.shape[2] if n == edge.target else 1 for n in targets)]
            hidden = sum(times[n].least for n in flow.attention_beside(edge) if n in times)
            share = of.share_of_waits(edge, axis)[:, None]
            whole_wire = of.wire_seconds(edge, axis, joining)
            in_parts = (kinds == REDUCES) & (of.gathers_parts(edge, axis)[:, None, None] if ends else False)
            gathered, kinds = whole_wire[:, GATHERS][:, None, None], np.where(in_parts, SCATTERS, kinds)
            group = of.most_devices(edges, axis)
            wire, first, part = (
                np.take_along_axis(each, kinds.reshape(len(kinds), -1), axis=1).reshape(kinds.shape)
                for each in (
                    share * np.maximum(whole_wire - np.reshape(hidden, (-1, 1)), 0.0),
                    share * np.maximum(whole_wire / group - np.reshape(hidden, (-1, 1)), 0.0),
                    1 - 1 / group,
                )
            )
            in_pieces = of.in_pieces(edges, edge, axis) & (np.isin(kinds, SUMS) | (not ends))
            # beside one product there may be pieces that it reads and others of its sum: half of each counts
            waits = first + part / 2 * self._longer(of, edges, edge, axis, times, wire, kinds)
            needless |= (kinds == GATHERS).reshape(place) & useless.reshape(len(kinds), -1, *[1] * len(targets))
            np.maximum(ending, np.where(in_parts, share[:, :, None] * gathered, 0.0).reshape(place), out=ending)
            np.maximum(either, wire.reshape(place), out=either)
            np.maximum(cut, wire.reshape(place), out=cut)
            np.maximum(awaited, np.where(in_pieces, waits, 0.0).reshape(place), out=awaited)
            whole &= (~in_pieces).reshape(place)
        cut, either = np.where(whole, 0.0, cut), np.where(whole, either, 0.0)
        if ends:
            either, ending = np.zeros(1), ending + either
        yield Sent(axis, scope, 0.0, either, cut, awaited, ending, needless)

    def _longer(
        self,
        of: FlowCollectives,
        edges: Sequence[Edge],
        edge: Edge,
        axis: int,
        times: Mapping[int, NodeTimes],
        wire: Floats,
        kinds: Ints,
    ) -> Floats:
        """By what a collective in pieces is longer than the products beside it: those that read what it gathers, or
        the one whose result it sums."""
        longer = np.zeros(wire.shape)
        source, target = times.get(edge.source), times.get(edge.target)
        if target is not None:
            others: dict[int, Bools] = {}  # further products, and whether they read what is gathered
            for e in edges:
                if e.target in times and e.target != edge.target:
                    reads = of.sends(e, axis)
                    others[e.target] = others.get(e.target, reads) | reads
            beside = target.most(axis) + sum(times[n].most() * reads for n, reads in others.items())
            left = wire - np.reshape(beside, (-1, 1, 1)) - target.excesses[axis][:, None, :]
            longer = np.where(kinds == GATHERS, left, longer)
        if source is not None:
            left = wire - np.reshape(source.most(axis), (-1, 1, 1)) - source.excesses[axis][:, :, None]
            longer = np.where(np.isin(kinds, SUMS), left, longer)
        return np.maximum(longer, 0.0)


class _Exempt:
    """The core's time for collectives that may be chained to the first or the last product of a trip instead.

    Attributes:
      left_out: the product whose collectives before it send most, and are left out; `hidden`: at most what is owed
        before another product that is the first, or in pieces beside the last; `last`: at most after the last.
    """

    def __init__(self, flow: Flow, batch: Batch) -> None:
        self.flow, self.batch = flow, batch
        self.before: dict[int, Floats] = {}
        self.after: tuple[dict[int, Floats], dict[int, Floats]] = ({}, {})  # whole, in pieces
        edges = (edge for edges in flow.apart for edge in edges if edge.beside and edge.home is None)
        sizes: dict[int, float] = {}
        for edge in edges:
            if edge.target in flow.firsts and flow.nodes[edge.target].attention is None:
                sizes[edge.target] = sizes.get(edge.target, 0.0) + edge.least_bytes
        self.left_out = max(sizes, key=sizes.__getitem__, default=None)

    def add(self, edge: Edge, seconds: Floats) -> None:
        """Add a collective, which owes at most these seconds."""
        if edge.home is None and edge.target in self.flow.firsts:
            self.before[edge.target] = self.before.get(edge.target, 0.0) + seconds
        elif edge.home is not None and edge.source in self.flow.lasts:
            in_pieces = self.batch.compiler.cuts_in_pieces(max(edge.sizes.values(), default=0.0))
            known = self.after[in_pieces]
            known[edge.source] = known.get(edge.source, 0.0) + seconds

    @property
    def hidden(self) -> Floats:
        """Hidden time of collectives before the first product, or in pieces beside the last."""
        attention = [n for n in self.before if self.flow.nodes[n].attention is not None]
        others = [x for n, x in self.before.items() if n not in attention]
        return _most(others) + sum(self.before[n] for n in attention) + _most(self.after[1].values())

    @property
    def last(self) -> Floats:
        """Of collectives after the last product."""
        return _most(self.after[0].values())


def _only(seconds: Floats, usable: Sequence[Bools]) -> Floats:
    """Seconds of joint options, infinite unless the option of each axis is usable."""
    for axis, able in enumerate(usable):
        seconds = np.where(
            able.reshape([len(able), *(-1 if m == axis else 1 for m in range(len(usable)))]), seconds, np.inf
        )
    return seconds


def _most(values: Iterable[Floats]) -> Floats:
    most: Floats = np.zeros(1)
    for own in values:
        most = np.maximum(most, own)
    return most
