"""The best program found for a graph: a search over what each operation may do, in program order.

A *state* is a way to have run the operations so far: where each value that is still needed lies, what is a pending
sum, and what all that has cost. Each operation takes every state on by its `options`. States that lie alike are one
from there on, the cheapest; a state is dropped where another, brought to where it lies, would be no dearer; of the
rest some are kept: those that would be cheapest once they are where a guide is, an earlier search's result, or, in the
first search, at home.

Values that all states have alike are held once, so that an operation costs as much as there is left to decide.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from meshlib.graph import Operation, Tensor
from meshlib.lowering.arrivals import NEARLY, Source, obtain
from meshlib.lowering.choose import Choice, Option, Rank, no_dearer
from meshlib.lowering.course import Course, Lies, Where, is_fixed, known
from meshlib.lowering.guide import Guide

# Kept are so many states; fewer where there are many operations, so that the time stays in proportion.
WIDEST, NARROWEST, STATES = 32, 8, 1000
POOL = 4  # so many times as many are looked at before trifles are left out
TRIFLES = (0.0, 1e-5, 1e-4, 1e-3)  # of what has been sent so far
SEARCHES = 3  # each is guided by what the one before found


def best_choices(course: Course) -> Mapping[Operation, Choice]:
    """What each operation does in the best program found."""
    beam = Beam(course, None)
    beam.run()
    for _ in range(SEARCHES - 1):
        if not beam.undecided:
            break
        guided = Beam(course, Guide(course, beam.chosen))
        guided.run()
        if not guided.cost < beam.cost:
            break
        beam = guided
    return beam.chosen


class Trail(NamedTuple):
    """What a state decided, latest first."""

    before: Trail | None
    operation: Operation
    choice: Choice


@dataclass(eq=False, slots=True)
class State:
    """See above. `where.own` tells of the values that not all states have alike."""

    cost: float
    sent: float  # bytes of it
    collectives: int
    strays: int
    where: Where
    trail: Trail | None

    @property
    def lies(self) -> dict[Tensor, Lies]:
        """Where it has what not all states have alike."""
        return self.where.own

    @property
    def rank(self) -> Rank:
        """Cheapest first."""
        return self.cost, self.collectives, self.strays


@dataclass(eq=False)
class Beam:
    """One search over one graph; `chosen` and `cost` are what it found."""

    course: Course
    guide: Guide | None
    common: dict[Tensor, Lies] = field(default_factory=dict)
    states: list[State] = field(init=False)
    differing: set[Tensor] = field(default_factory=set)  # those of which the states' `lies` tell
    chosen: dict[Operation, Choice] = field(default_factory=dict)
    cost: float = 0.0
    sent: float = 0.0
    undecided: bool = False  # whether there was more than one state at a time
    _region: str = ""  # that of the operation that is on
    _changed: bool = False  # whether states were added, or changed

    def __post_init__(self) -> None:
        self.states = [State(0.0, 0.0, 0, 0, Where(self.common, {}), None)]
        self._all = Where(self.common, self.common)
        self._width = max(NARROWEST, min(WIDEST, STATES // max(1, len(self.course.graph.operations))))
        self._dying: dict[int, list[Tensor]] = {}
        for t, n in self.course.last.items():
            self._dying.setdefault(n, []).append(t)

    def run(self) -> None:
        """Search."""
        for n, op in enumerate(self.course.graph.operations):
            self._region = op.region
            if self.guide is not None:
                self.guide.step(n)
            if is_fixed(op):
                self._run_fixed(op)
            else:
                self._advance(op, n)
            self._forget(n)
        best = min(self.states, key=lambda s: s.rank)
        self.cost += best.cost
        trail = best.trail
        while trail is not None:
            self.chosen[trail.operation] = trail.choice
            trail = trail.before

    # ------------------------------------------------------------ operations

    def _advance(self, op: Operation, n: int) -> None:
        """Take every state on by each option of `op`; by one for all where they have its operands alike."""
        if self._differ(self.course.graph.inputs[op]):
            self._spread(op, [(state, self.course.options(op, n, state.where)) for state in self.states])
            return
        found = self.course.options(op, n, self._all)
        if len(found) > 1:
            self._spread(op, [(state, found) for state in self.states])
            return
        self.chosen[op] = found[0].choice
        self.cost += found[0].cost
        self.sent += found[0].sent
        self.course.take(self._all, op, found[0])

    def _differ(self, tensors: Iterable[Tensor]) -> bool:
        """Whether states may have these, or what they are made of, in different places."""
        inputs, again = self.course.graph.inputs, self.course.again
        return any(t in self.differing or (t in again and self._differ(inputs[t.operation])) for t in tensors)

    def _spread(self, op: Operation, ways: Sequence[tuple[State, Sequence[Option]]]) -> None:
        after = []
        for state, found in ways:
            for option in found:
                where = Where(self.common, dict(state.lies)) if len(found) > 1 else state.where
                self.course.take(where, op, option)
                cost, sent = state.cost + option.cost, state.sent + option.sent
                collectives, strays = state.collectives + option.collectives, state.strays + option.strays
                after.append(State(cost, sent, collectives, strays, where, Trail(state.trail, op, option.choice)))
        self.states = after
        self._changed = True

    def _run_fixed(self, op: Operation) -> None:
        """What leaves no choice, in every state; once for all where they have its operands alike."""
        run, operands = self.course.fixed(op)
        if not self._differ(operands):
            sent = sum(way.cost for way in run(self._all) if way is not None)
            self.cost += sent
            self.sent += sent
            return
        for state in self.states:
            for way in run(state.where):
                if way is not None:
                    state.cost += way.cost
                    state.sent += way.cost
                    state.collectives += way.collectives
        self._changed = True

    # ------------------------------------------------------------ states

    def _forget(self, n: int) -> None:
        """After operation `n`: drop what nobody needs any more, states that are no better than others, the worst."""
        for t in self._dying.get(n, ()):
            if t in self.differing:
                self._changed = True
                for state in self.states:
                    state.lies.pop(t, None)
        if not self._changed:
            return
        self._changed = False
        if len(self.states) > 1:
            self._merge()
        if len(self.states) > 1:
            self._drop()
        self.undecided |= len(self.states) > 1
        first, *others = self.states
        for t, lies in list(first.lies.items()):
            if all(s.lies.get(t) == lies for s in others):
                self.common[t] = lies
                for s in self.states:
                    del s.lies[t]
        self.differing = {t for s in self.states for t in s.lies}

    def _merge(self) -> None:
        """Of states that lie alike, the cheapest."""
        best: dict[object, State] = {}
        for state in self.states:
            key = frozenset(state.lies.items())
            other = best.get(key)
            if other is None or not no_dearer(other.rank, state.rank):
                best[key] = state
        self.states = list(best.values())

    def _drop(self) -> None:
        """Keep the best, but those that another covers. Whoever covers a state is expected to cost no more.

        Where they are too many, trifles are left to the best of them, so that what matters stays undecided.
        """
        states = sorted(self.states, key=self._expected)
        sent = self.sent + states[0].sent
        for trifle in TRIFLES:
            kept: list[State] = []
            for state in states:
                if not any(self._covers(k, state, trifle * sent) for k in kept):
                    kept.append(state)
                    if len(kept) == POOL * self._width:
                        break
            states = kept
            if len(states) <= self._width:
                break
        self.states = states[: self._width]

    def _covers(self, a: State, b: State, trifle: float) -> bool:
        """Whether whatever follows `b` may as well follow `a`, brought to where `b` lies, at hardly more cost."""
        cost, collectives = a.cost - trifle, a.collectives
        for t in {**a.lies, **b.lies}:
            mine, other = a.where.of(t), b.where.of(t)
            if mine == other:
                continue
            size = t.dtype.itemsize
            for region, s in other:
                if (region, s) in mine or (None, s) in mine:
                    continue
                way = obtain(Source(known(mine, self._region), size), s)
                cost += (1 - NEARLY) * way.cost
                collectives += way.collectives
                if cost > b.cost + 1:
                    return False
        return no_dearer((cost, collectives, a.strays), b.rank)

    def _expected(self, state: State) -> Rank:
        """What a state costs once it is where the guide is, or at home."""
        cost, collectives = state.cost, state.collectives
        for t, lies in state.lies.items():
            if self.guide is not None:
                more, number = self.guide.price(t, lies, self._region)
            else:
                source = Source(known(lies, self._region), t.dtype.itemsize)
                more, number, *_ = obtain(source, self.course.homes.of(t))
            cost += more
            collectives += number
        return round(cost, 2), collectives, state.strays
