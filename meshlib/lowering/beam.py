"""The best program found for a graph: a search over what each operation may do, in program order.

A *state* is a way to have run the operations so far: where each value that is still needed lies, what is a pending
sum, and what all that has cost. Each operation takes every state on by its `options`. States that lie alike are one
from there on, the cheapest; a state is dropped where another, brought to where it lies, would be no dearer; of the
rest some are kept (`states`): those that would be cheapest once they are where a guide is, an earlier search's result,
or, in the first search, at home.

Values that all states have alike are held once, so that an operation costs as much as there is left to decide.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite

import numpy as np

from meshlib.graph import Operation, Tensor
from meshlib.lowering.arrivals import NEARLY, Price, slack
from meshlib.lowering.choose import Choice
from meshlib.lowering.course import Course, Outcome
from meshlib.lowering.guide import Guide
from meshlib.lowering.states import Between, States
from meshlib.lowering.ways import Floats, Ints, Lies, with_room

# How many states are kept, without and with a guide: the fewer operations, the more.
FIRST_WIDTHS, WIDTHS = (6, 36), (16, 48)  # at least, at most
EFFORT = 2000  # states times operations
# Who is expected to cost so much more than the best has lost: of what the guide sends, and, in the first searches in
# large graphs, of what the way sends that follows the one best state.
WINDOW, FIRST_WINDOW = 0.2, 0.3
# The first searches differ in how much of the way home they expect to be gone; in small graphs none is sure of it.
HOMESICK = (1.0, 0.5, 0.0)
FEW = 8  # states: so many are not worth looking for those that others cover, unless one may be lost by the window
BEHIND = 0.1  # of what the search ahead sends: who is so far behind does not catch up
SEARCHES = 8  # at most; each is guided by what the one before found, as long as that helps


def best_choices(course: Course) -> Mapping[Operation, Choice]:
    """What each operation does in the best program found."""
    found, window = [], float("inf")
    shares = HOMESICK[1:] if course.small else HOMESICK
    if not course.small:
        found = [_searched(Beam(course, None, width=1))]
        window = FIRST_WINDOW * found[0].sent
    first = _searched(Beam(course, None, shares[0], window))
    if not first.dropped:
        return first.chosen
    found += [first, *(_searched(Beam(course, None, share, window, ahead=first)) for share in shares[1:])]
    return _improved(min((beam for beam in found if not beam.lost), key=lambda beam: beam.cost)).chosen


def _improved(beam: Beam) -> Beam:
    """What searches find that are guided by it, one after the other as long as that helps."""
    for _ in range(SEARCHES):
        guide = Guide(beam.course, beam.chosen)
        guided = _searched(Beam(beam.course, guide, window=WINDOW * guide.sent))
        gain = beam.cost - guided.cost
        if gain > slack(beam.cost):
            beam = guided
        if gain <= NEARLY * guide.sent + slack(beam.cost):
            break
    return beam


def _searched(beam: Beam) -> Beam:
    beam.run()
    return beam


@dataclass(eq=False)
class Beam:
    """One search over one graph; `chosen` and `cost` are what it found."""

    course: Course
    guide: Guide | None
    homesick: float = HOMESICK[0]  # without a guide: the share of the way home that is expected to be gone
    window: float = float("inf")  # who is expected to cost so much more than the best is dropped
    ahead: Beam | None = None  # an earlier search: once this one is so far behind that it can't catch up it gives up
    width: int = 0  # how many states are kept; 0: as many as there is time for
    common: dict[Tensor, int] = field(default_factory=dict)  # the ways of what `states` do not tell of
    states: States = field(default_factory=States)
    chosen: dict[Operation, Choice] = field(default_factory=dict)
    cost: float = 0.0
    sent: float = 0.0
    pace: list[float] = field(default_factory=list)  # what the cheapest state had cost after each operation
    lost: bool = False  # whether it gave up
    dropped: bool = False  # whether it dropped states that no other covers: another search may find better ones
    _region: str = ""  # that of the operation that is on
    _changed: bool = False  # whether states were added, or changed
    _prices: Floats = field(default_factory=lambda: np.full((2, 64), np.nan))  # see `_known`

    def __post_init__(self) -> None:
        least, most = FIRST_WIDTHS if self.guide is None else WIDTHS
        self.width = self.width or max(least, min(most, EFFORT // len(self.course.graph.operations)))

    def run(self) -> None:
        """Search; who is too far behind the one ahead gives up."""
        operations = self.course.graph.operations
        for n, op in enumerate(operations):
            if self._region != op.region:
                self._prices.fill(np.nan)
                self._region = op.region
            if self.guide is not None:
                for t in self.guide.step(n):
                    self._unlearn(t)
            self._advance(op, n)
            self._forget(n)
            self.pace.append(self.cost + self.states.least)
            if self.ahead is not None and self.pace[n] > self.ahead.pace[n] + BEHIND * self.ahead.sent:
                self.lost = True
                return
        self._advance(operations[-1], len(operations))
        cost, sent, trail = self.states.end()
        self.cost += cost
        self.sent += sent
        while trail is not None:
            self.chosen[trail.operation] = trail.choice
            trail = trail.before

    def _advance(self, op: Operation, n: int) -> None:
        """Take every state on by each outcome of operation `n`; by one for all where they have its operands alike."""
        states, reads = self.states, self.course.reads[n]
        differing = [(m, states.columns[t]) for m, t in enumerate(reads) if t in states.columns]
        numbers = [-1 if t in states.columns else self.common[t] for t in reads]
        if not differing:
            outcomes = self.course.outcomes(n, tuple(numbers))
            if len(outcomes) == 1:
                self._run(op, outcomes[0])
                return
            found = [outcomes] * len(states)
        else:
            found = []
            for own in states.ways[:, [column for _, column in differing]].tolist():
                for (m, _), number in zip(differing, own, strict=True):
                    numbers[m] = number
                found.append(self.course.outcomes(n, tuple(numbers)))
        self.states = states.followed(op, found, self.common)
        self._changed = True

    def _run(self, op: Operation, outcome: Outcome) -> None:
        """What all states do alike."""
        if outcome.choice is not None:
            self.chosen[op] = outcome.choice
        self.common.update(outcome.ways)
        self.cost += outcome.cost
        self.sent += outcome.sent

    def _forget(self, n: int) -> None:
        """After operation `n`: drop what nobody needs any more, states that are no better than others, the worst."""
        self._changed |= self.states.forget(self.course.dying.get(n, ()))
        if not self._changed:
            return
        self._changed = False
        if len(self.states) > (FEW if self.window == float("inf") and self.width > FEW else 1):
            best = self.states.best(self.sent, self.width, self.window, self._expected, self._between)
            self.states, all_uncovered = best
            self.dropped |= not all_uncovered
        self.common.update(self.states.alike())

    def _between(self, states: States) -> Between:
        """What it costs to bring each tensor from way to way, and which way each state has it."""
        places = self.course.ways.places[states.ways]
        return [(self.course.distances(t, self._region), places[:, n]) for t, n in states.columns.items()]

    def _expected(self, ways: Ints) -> Floats:
        """Per state what it costs, and in how many collectives, to bring all to where the guide needs it, or home."""
        every, prices = self.course.ways, self._known()
        found: Floats = prices[:, ways].sum(axis=2)
        if np.isnan(found[0]).any():
            for number in np.unique(ways[np.isnan(prices[0, ways])]).tolist():
                prices[:, number] = self._price(every.tensors[number], every.lies[number])
            found = prices[:, ways].sum(axis=2)
        return found

    def _known(self) -> Floats:
        """What each way is known to cost, NaN where nobody asked yet."""
        self._prices = with_room(self._prices, 2, len(self.course.ways.lies), np.nan)
        return self._prices

    def _unlearn(self, t: Tensor) -> None:
        """The guide needs it elsewhere now."""
        self._known()[:, self.course.ways.numbers(t)] = np.nan

    def _price(self, t: Tensor, lies: Lies) -> Price:
        if self.guide is not None:
            return self.guide.price(t, lies, self._region)
        cost, collectives = self.course.bringing(t, lies, ((None, self.course.homes.of(t)),), self._region)
        return (self.homesick * cost if isfinite(cost) else 0.0), collectives  # what cannot come home is made again
