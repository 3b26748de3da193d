"""The best program found for a graph: a search over what each operation may do, in program order.

A *state* is a way to have run the operations so far: where each value that is still needed lies, what is a pending
sum, and what all that has cost. Each operation takes every state on by its `options`. States that lie alike are one
from there on, the cheapest; a state is dropped where another, brought to where it lies, would be no dearer; of the
rest some are kept (`states`): those that would be cheapest once they are where a guide is, an earlier search's result,
or, in the first search, at home.

Values that all states have alike are held once, so that an operation costs as much as there is left to decide.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from meshlib.graph import Operation, Tensor
from meshlib.lowering.arrivals import slack
from meshlib.lowering.choose import Choice, Option
from meshlib.lowering.course import Course, Lies, Where, is_fixed
from meshlib.lowering.guide import Guide
from meshlib.lowering.states import Pool, State, Trail

# How many states are kept, without and with a guide: the fewer operations, the more.
FIRST_WIDTHS, WIDTHS = (6, 24), (16, 40)  # at least, at most
EFFORT = 1600  # states times operations
WINDOW = 0.15  # of what the guide sends: who is expected to cost so much more than the best has lost
HOMESICK = (1.0, 0.5, 0.0)  # the first searches differ in how much of the way home they expect to be gone
SEARCHES = 8  # at most; each is guided by what the one before found, as long as that helps


def best_choices(course: Course) -> Mapping[Operation, Choice]:
    """What each operation does in the best program found."""
    best = _searched(Beam(course, None, HOMESICK[0]))
    if best.undecided:
        starts = [best, *(_searched(Beam(course, None, share)) for share in HOMESICK[1:])]
        best = _improved(min(starts, key=lambda beam: beam.cost))
    return best.chosen


def _improved(beam: Beam) -> Beam:
    """What searches find that are guided by it, one after the other as long as that helps."""
    for _ in range(SEARCHES):
        guided = _searched(Beam(beam.course, Guide(beam.course, beam.chosen)))
        if not guided.cost < beam.cost - slack(beam.cost):
            break
        beam = guided
    return beam


def _searched(beam: Beam) -> Beam:
    beam.run()
    return beam


@dataclass(eq=False)
class Beam:
    """One search over one graph; `chosen` and `cost` are what it found."""

    course: Course
    guide: Guide | None
    homesick: float = 1.0  # without a guide: the share of the way home that is expected to be gone
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
        least, most = FIRST_WIDTHS if self.guide is None else WIDTHS
        self._width = max(least, min(most, EFFORT // len(self.course.graph.operations)))
        self._window = float("inf") if self.guide is None else WINDOW * self.guide.sent

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
        for state in self.states:
            self._bring_ends(state)
        best = min(self.states, key=lambda state: state.rank)
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
        more, _ = self.course.take(self._all, op, found[0])
        self.cost += found[0].cost + more
        self.sent += found[0].sent + more

    def _differ(self, tensors: Iterable[Tensor]) -> bool:
        """Whether states may have these, or what they are made of, in different places."""
        inputs, again = self.course.graph.inputs, self.course.again
        return any(t in self.differing or (t in again and self._differ(inputs[t.operation])) for t in tensors)

    def _spread(self, op: Operation, ways: Sequence[tuple[State, Sequence[Option]]]) -> None:
        after = []
        for state, found in ways:
            for option in found:
                where = Where(self.common, dict(state.lies)) if len(found) > 1 else state.where
                more, launches = self.course.take(where, op, option)
                cost, sent = state.cost + option.cost + more, state.sent + option.sent + more
                collectives, strays = state.collectives + option.collectives + launches, state.strays + option.strays
                after.append(State(cost, sent, collectives, strays, where, Trail(state.trail, op, option.choice)))
        self.states = after
        self._changed = True

    def _run_fixed(self, op: Operation) -> None:
        """What leaves no choice, in every state; once for all where they have its operands alike."""
        if not self._differ(self.course.graph.inputs[op]):
            sent, _ = self.course.run_fixed(op, self._all)
            self.cost += sent
            self.sent += sent
            return
        for state in self.states:
            sent, collectives = self.course.run_fixed(op, state.where)
            state.cost += sent
            state.sent += sent
            state.collectives += collectives
        self._changed = True

    # ------------------------------------------------------------ states

    def _forget(self, n: int) -> None:
        """After operation `n`: drop what nobody needs any more, states that are no better than others, the worst."""
        for t in self.course.dying.get(n, ()):
            if t in self.differing:
                self._changed = True
                for state in self.states:
                    state.lies.pop(t, None)
        if not self._changed:
            return
        self._changed = False
        if len(self.states) > 1:
            self.states = Pool(self.states, self._prices, self._bringing).best(self.sent, self._width, self._window)
        self.undecided |= len(self.states) > 1
        first, *others = self.states
        for t in dict.fromkeys(t for s in self.states for t in s.lies):
            lies = first.where.of(t)
            if all(s.where.of(t) == lies for s in others):
                self.common[t] = lies
                for s in self.states:
                    s.lies.pop(t, None)
        self.differing = {t for s in self.states for t in s.lies}

    def _bring_ends(self, state: State) -> None:
        """After the last operation: results come home."""
        for t in self.course.ends:
            way = self.course.bring(state.where, t, self.course.homes.of(t), self._region)
            state.cost += way.cost
            state.sent += way.cost
            state.collectives += way.collectives

    def _prices(self, t: Tensor, lies: Lies) -> tuple[float, int]:
        """What it costs, and in how many collectives, to bring a tensor to where the guide needs it, or home."""
        if self.guide is not None:
            return self.guide.price(t, lies, self._region)
        cost, collectives = self.course.bringing(t, lies, ((None, self.course.homes.of(t)),), self._region)
        return self.homesick * cost, collectives

    def _bringing(self, t: Tensor, lies: Lies, ends: Lies) -> tuple[float, int]:
        return self.course.matching(t, lies, ends, self._region)
