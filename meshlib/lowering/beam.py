"""The best program found for a graph: a search over what each operation may do, in program order.

A *state* is a way to have run the operations so far: where each value that is still needed lies, what is a pending
sum, and what all that has cost. Each operation takes every state on by its `options`. States that lie alike are one
from there on, the cheapest; a state is dropped where another, brought to where it lies, would be no dearer; of the
rest the best `WIDEST` are kept, by their cost and what it would cost to bring home what is away.

Values that all states have alike are held once, so that an operation costs as much as there is left to decide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from layouts import Sharding
from meshlib.graph import UPDATE, Operation, Tensor
from meshlib.lowering.arrivals import NEARLY, Made, Path, Region, Source, Way, made_again, obtain, reach
from meshlib.lowering.choose import Balance, Binding, Choice, Operand, Option, no_dearer, options, settled
from meshlib.lowering.homes import Homes
from meshlib.lowering.loops import Loops
from meshlib.lowering.simplification import Simplified
from meshlib.operation import Home, Kind
from meshlib.program.signature import Signatures
from meshlib.program.split import beside

# Kept are so many states; fewer where there are many operations, so that the time stays in proportion.
WIDEST, NARROWEST, STATES = 32, 8, 3000

Lies: TypeAlias = tuple[tuple[Region, Sharding], ...]  # where a tensor exists, and for which region


class Trail(NamedTuple):
    """What a state decided, latest first."""

    before: Trail | None
    operation: Operation
    choice: Choice


@dataclass(eq=False, slots=True)
class State:
    """See above. `lies` tells of the values that not all states have alike."""

    cost: float
    collectives: int
    strays: int
    lies: dict[Tensor, Lies]
    trail: Trail | None

    @property
    def rank(self) -> tuple[float, int, int]:
        """Cheapest first."""
        return self.cost, self.collectives, self.strays


@dataclass(eq=False)
class Beam:
    """The search over one graph."""

    graph: Simplified
    homes: Homes
    balance: Balance
    signatures: Signatures
    found: dict[object, tuple[Option, ...]]  # at this balance
    fetched: set[Tensor]
    loops: Loops
    guide: Mapping[Operation, Choice] | None = None  # what an earlier search found
    common: dict[Tensor, Lies] = field(default_factory=dict)
    states: list[State] = field(default_factory=lambda: [State(0.0, 0, 0, {}, None)])
    differing: set[Tensor] = field(default_factory=set)  # those of which the states' `lies` tell
    chosen: dict[Operation, Choice] = field(default_factory=dict)
    region: str = ""  # that of the operation that is on
    changed: bool = False  # whether states were added, or changed

    def __post_init__(self) -> None:
        self._again = made_again(self.graph)
        self._last = last_uses(self.graph, self._again)
        self._width = max(NARROWEST, min(WIDEST, STATES // max(1, len(self.graph.operations))))
        self._guided: dict[Tensor, Lies] = {}  # where things lie in what the guide found
        self._dying: dict[int, list[Tensor]] = {}
        for t, n in self._last.items():
            self._dying.setdefault(n, []).append(t)

    def run(self) -> dict[Operation, Choice]:
        """What each operation does in the best program found."""
        for n, op in enumerate(self.graph.operations):
            self.region = op.region
            match op.kind.kind:
                case Kind.INPUT | Kind.VARIABLE:
                    self.common[op.output] = self._guided[op.output] = ((None, self.homes.of(op.output)),)
                case Kind.COMMIT:
                    self._commit(op)
                case Kind.LOOP:
                    self._loop(op)
                case Kind.COPY:
                    self._copy(op)
                case _:
                    self._advance(op, n)
            self._forget(n)
        best = min(self.states, key=lambda s: s.rank)
        self.cost = best.cost
        trail = best.trail
        while trail is not None:
            self.chosen[trail.operation] = trail.choice
            trail = trail.before
        return self.chosen

    # ------------------------------------------------------------ operations

    def _advance(self, op: Operation, n: int) -> None:
        """Take every state on by each option of `op`; by one for all where they have its operands alike."""
        inputs = self.graph.inputs[op]
        if self.guide is not None:
            found = self._options(op, n, self._guided)
            self._take(self._guided, op, next(o for o in found if o.choice == self.guide[op]))
        if not self._differ(inputs):
            found = self._options(op, n, self.common)
            if len(found) == 1:
                self.chosen[op] = found[0].choice
                self._take(self.common, op, found[0])
            else:
                self._spread(op, [(state, found) for state in self.states])
        else:
            self._spread(op, [(state, self._options(op, n, state.lies)) for state in self.states])

    def _differ(self, tensors: Iterable[Tensor]) -> bool:
        """Whether states may have these, or what they are made of, in different places."""
        return any(
            t in self.differing or (t in self._again and self._differ(self.graph.inputs[t.operation])) for t in tensors
        )

    def _spread(self, op: Operation, ways: Sequence[tuple[State, Sequence[Option]]]) -> None:
        after = []
        for state, found in ways:
            for option in found:
                lies = dict(state.lies) if len(found) > 1 else state.lies
                self._take(lies, op, option)
                after.append(
                    State(
                        state.cost + option.cost,
                        state.collectives + option.collectives,
                        state.strays + option.strays,
                        lies,
                        Trail(state.trail, op, option.choice),
                    )
                )
        self.states = after
        self.changed = True

    def _options(self, op: Operation, n: int, lies: Mapping[Tensor, Lies]) -> Sequence[Option]:
        signature, home, inputs = self.signatures.of(op), self.homes.of(op.output), self.graph.inputs[op]
        operands = []
        for t in inputs:
            held = self.balance.stationary if self.balance.stationary and self.homes.is_weight(t) else ()
            source = self._source(lies, t, op.region)
            operands.append(Operand(source, inputs.index(t), self._last[t] > n, held))
        plain = settled(signature, operands, home)
        if plain is not None:
            return (Option(plain, 0.0, 0, 0, (), (plain.out,)),)
        binds = binding(op.output, self.graph, self.homes, self.fetched)
        passes = any(i in self.signatures.of(user).linear.operands for user, i in self.graph.uses.get(op.output, ()))
        key = (signature, home, binds, passes, *operands)
        found = self.found.get(key)
        if found is None:
            found = self.found[key] = options(signature, operands, home, binds, passes, self.balance)
        return found

    def _source(self, lies: Mapping[Tensor, Lies], t: Tensor, region: str) -> Source:
        made = None
        if t in self._again:
            op = t.operation
            operands = tuple([self._source(lies, x, region) for x in self.graph.inputs[op]])
            made = Made(self.signatures.of(op), operands)
        return Source(known(lies.get(t) or self.common[t], region), t.dtype.itemsize, made)

    def _take(self, lies: dict[Tensor, Lies], op: Operation, option: Option) -> None:
        """Where things lie after an option."""
        self._also(lies, op, option.new, op.region)
        lies[op.output] = laid_out(op.output, option.lies, self.homes)
        for y, s in zip(op.outputs[1:], beside(op, option.lies[0])[1:], strict=True):
            self._made(lies, y, s)

    def _also(self, lies: dict[Tensor, Lies], op: Operation, new: Iterable[tuple[Path, Sharding]], region: str) -> None:
        """Operands of `op`, and what they are made of, are now to be had elsewhere too."""
        for path, s in new:
            t, at = op.output, op
            for n in path:
                t = self.graph.inputs[at][n]
                at = t.operation
            before = lies.get(t) or self.common[t]
            if (None, s) not in before and (region, s) not in before:
                lies[t] = (*before, (reach(s, self.homes.of(t), region), s))

    def _bring(self, lies: dict[Tensor, Lies], t: Tensor, wanted: Sharding, region: str) -> Way:
        way = obtain(self._source(lies, t, region), wanted)
        self._also(lies, t.operation, way.new, region)
        return way

    def _made(self, lies: dict[Tensor, Lies], t: Tensor, s: Sharding) -> Way | None:
        """A result that lies as it does; brought home if it is bound there."""
        home, way = self.homes.of(t), None
        at: tuple[Sharding, ...] = (s,)
        if binding(t, self.graph, self.homes, self.fetched).binds(s, home):
            way = obtain(Source(at, t.dtype.itemsize), home)
            at += tuple([s for _, s in way.new])
        lies[t] = laid_out(t, at, self.homes)
        return way

    def _commit(self, op: Operation) -> None:
        (x,) = self.graph.inputs[op]
        home = self.homes.of(self.homes.graph.variables[op.attrs["variable"]].output)
        self._deterministic(lambda lies: [self._bring(lies, x, home, UPDATE)], [x])

    def _loop(self, op: Operation) -> None:
        looped = self.loops.of(op)

        def run(lies: dict[Tensor, Lies]) -> list[Way | None]:
            wanted = zip(looped.operands, looped.wanted, strict=True)
            ways: list[Way | None] = [self._bring(lies, x, s, op.region) for x, s in wanted]
            return [*ways, *(self._made(lies, y.tensor, y.sharding) for y in looped.made)]

        self._deterministic(run, looped.operands)

    def _copy(self, op: Operation) -> None:
        (x,) = self.graph.inputs[op]

        def run(lies: dict[Tensor, Lies]) -> list[Way | None]:
            s = as_it_lies([s for _, s in lies.get(x) or self.common[x]], self.homes.of(x))
            return [self._bring(lies, x, s, op.region), self._made(lies, op.output, s)]

        self._deterministic(run, [x])

    def _deterministic(
        self, run: Callable[[dict[Tensor, Lies]], Sequence[Way | None]], operands: Sequence[Tensor]
    ) -> None:
        """What leaves no choice, in every state; once for all where they have its operands alike."""
        if self.guide is not None:
            run(self._guided)
        if not self._differ(operands):
            run(self.common)
            return
        for state in self.states:
            for way in run(state.lies):
                if way is not None:
                    state.cost += way.cost
                    state.collectives += way.collectives
        self.changed = True

    # ------------------------------------------------------------ states

    def _forget(self, n: int) -> None:
        """After operation `n`: drop what nobody needs any more, states that are no better than others, the worst."""
        for t in self._dying.get(n, ()):
            if t in self.differing:
                self.changed = True
                for state in self.states:
                    state.lies.pop(t, None)
        if not self.changed:
            return
        self.changed = False
        if len(self.states) > 1:
            self._merge()
        if len(self.states) > 1:
            self._drop()
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
        """Keep the best, but those that another covers. Whoever covers a state is expected to cost no more."""
        kept: list[State] = []
        for state in sorted(self.states, key=self._expected):
            if not any(self._covers(k, state) for k in kept):
                kept.append(state)
                if len(kept) == self._width:
                    break
        self.states = kept

    def _covers(self, a: State, b: State) -> bool:
        """Whether whatever follows `b` may as well follow `a`, brought to where `b` lies, at no more cost."""
        cost, collectives = a.cost, a.collectives
        for t in {**a.lies, **b.lies}:
            mine, other = a.lies.get(t) or self.common[t], b.lies.get(t) or self.common[t]
            if mine == other:
                continue
            size = t.dtype.itemsize
            for region, s in other:
                if (region, s) in mine or (None, s) in mine:
                    continue
                way = obtain(Source(known(mine, self.region), size), s)
                cost += (1 - NEARLY) * way.cost
                collectives += way.collectives
                if cost > b.cost + 1:
                    return False
        return no_dearer((cost, collectives, a.strays), b.rank)

    def _expected(self, state: State) -> tuple[float, int, int]:
        """What a state costs once it is where the guide is, or at home."""
        cost, collectives = state.cost, state.collectives
        for t, lies in state.lies.items():
            size = t.dtype.itemsize
            if self.guide is None:
                ends: Lies = ((None, self.homes.of(t)),)
            else:
                ends = self._guided[t]
            for region, s in ends:
                if (region, s) not in lies and (None, s) not in lies:
                    way = obtain(Source(known(lies, self.region), size), s)
                    cost += way.cost
                    collectives += way.collectives
        return round(cost, 2), collectives, state.strays


def known(lies: Lies, region: Region) -> tuple[Sharding, ...]:
    """The shardings in which a region may use a tensor."""
    return tuple([s for r, s in lies if r is None or r == region])


def laid_out(t: Tensor, lies: Sequence[Sharding], homes: Homes) -> Lies:
    """A result that exists in these shardings: as it was made, and at home if it was brought there."""
    home = homes.of(t)
    if t.operation.kind.home is Home.GIVEN:
        lies = lies[-1:]  # its users must not go round the constraint
    return tuple([(reach(s, home, t.operation.region), s) for s in lies])


def as_it_lies(lies: Sequence[Sharding], home: Sharding) -> Sharding:
    """Where a value is to be had without moving it: at home, else in the smallest blocks; home if it is pending."""
    whole = [s for s in lies if not s.pending]
    return min(whole, key=lambda s: (s != home, s.local_size)) if whole else home


def binding(t: Tensor, graph: Simplified, homes: Homes, fetched: set[Tensor]) -> Binding:
    """Whether a value is brought home when it is made: what is fetched, a gradient and a constrained value are."""
    if t in fetched or t in homes.graph.gradient_of or t.operation.kind.home is Home.GIVEN:
        return Binding.ALWAYS
    region = t.operation.region
    crosses = any(op.region != region for op, _ in graph.uses.get(t, ()))
    return Binding.IF_LARGER if crosses else Binding.NEVER


def last_uses(graph: Simplified, again: set[Tensor]) -> dict[Tensor, int]:
    """Per tensor the number of the last operation that reads it; what nobody reads, of the one that makes it.

    What others may be made of again is needed as long as they are.
    """
    last: dict[Tensor, int] = {}
    for n, op in enumerate(graph.operations):
        last.update(dict.fromkeys(op.outputs, n))
        last.update(dict.fromkeys(graph.inputs[op], n))
    last.update(dict.fromkeys(graph.taken, len(graph.operations)))
    for op in reversed(graph.operations):
        if op.output in again:
            for x in graph.inputs[op]:
                last[x] = max(last[x], last[op.output])
    return last
