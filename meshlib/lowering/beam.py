"""The best program found for a graph: a search over what each operation may do, in program order.

A *state* is a way to have run the operations so far: where each value that is still needed lies, what is a pending
sum, and what all that has cost. Each operation takes every state on by its `options`. States that lie alike are one
from there on, the cheapest; a state is dropped where another, brought to where it lies, would be no dearer; of the
rest the best `WIDTH` are kept, by their cost and what it would cost to bring home what is away.

Values that all states have alike are held once, so that an operation costs as much as there is left to decide.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from layouts import Sharding
from meshlib.graph import UPDATE, Operation, Tensor
from meshlib.lowering.choose import (
    Arrival,
    Balance,
    Binding,
    Choice,
    Operand,
    Option,
    Region,
    arrive,
    no_dearer,
    options,
    reach,
    settled,
)
from meshlib.lowering.homes import Homes
from meshlib.lowering.loops import Loops
from meshlib.lowering.simplification import Simplified
from meshlib.operation import Home, Kind
from meshlib.program.signature import Signatures
from meshlib.program.split import beside

WIDTH = 32

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

    def paid(self, arrival: Arrival) -> None:
        """Count a reshard."""
        self.cost += arrival.sent_bytes
        self.collectives += arrival.collectives


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
    common: dict[Tensor, Lies] = field(default_factory=dict)
    states: list[State] = field(default_factory=lambda: [State(0.0, 0, 0, {}, None)])

    def __post_init__(self) -> None:
        self._last = last_uses(self.graph)
        self._dying: dict[int, list[Tensor]] = {}
        for t, n in self._last.items():
            self._dying.setdefault(n, []).append(t)

    def run(self) -> dict[Operation, Choice]:
        """What each operation does in the best program found."""
        for n, op in enumerate(self.graph.operations):
            match op.kind.kind:
                case Kind.INPUT | Kind.VARIABLE:
                    self.common[op.output] = ((None, self.homes.of(op.output)),)
                    continue
                case Kind.COMMIT:
                    self._commit(op)
                case Kind.LOOP:
                    self._loop(op)
                case Kind.COPY:
                    self._copy(op)
                case _:
                    self._advance(op, n)
            self._forget(n)
        chosen: dict[Operation, Choice] = {}
        trail = min(self.states, key=lambda s: s.rank).trail
        while trail is not None:
            chosen[trail.operation] = trail.choice
            trail = trail.before
        return chosen

    # ------------------------------------------------------------ operations

    def _advance(self, op: Operation, n: int) -> None:
        signature, home = self.signatures.of(op), self.homes.of(op.output)
        bound = binding(op.output, self.graph, self.homes, self.fetched)
        again = [self._last.get(x, -1) > n for x in self.graph.inputs[op]]
        made: list[State] = []
        for state in self.states:
            operands = [
                self._operand(state, x, op, later) for x, later in zip(self.graph.inputs[op], again, strict=True)
            ]
            plain = settled(signature, operands, home)
            if plain is not None:
                self._lay(state, op, (plain.out,))
                state.trail = Trail(state.trail, op, plain)
                made.append(state)
                continue
            tensors = [x.tensor for x in operands]
            key = (
                signature, home, bound,
                *[(x.lies, x.free, x.again, x.held, tensors.index(x.tensor)) for x in operands],
            )  # fmt: skip
            found = self.found.get(key)
            if found is None:
                found = self.found[key] = options(signature, operands, home, bound, self.balance)
            made += [self._taken(state, op, option) for option in found]
        self.states = made

    def _operand(self, state: State, t: Tensor, op: Operation, again: bool) -> Operand:
        lies = state.lies.get(t) or self.common[t]
        free = t.operation.kind.remade and self._are_numbers(state, t.operation, op.region)
        held = self.balance.stationary if self.balance.stationary and self.homes.is_weight(t) else ()
        return Operand(t, known(lies, op.region), free, again, held)

    def _are_numbers(self, state: State, op: Operation, region: str) -> bool:
        """Whether all operands are single numbers that are there."""
        for x in self.graph.inputs[op]:
            lies = state.lies.get(x) or self.common[x]
            if x.shape or all(s.pending for s in known(lies, region)):
                return False
        return True

    def _taken(self, state: State, op: Operation, option: Option) -> State:
        after = State(
            state.cost + option.cost,
            state.collectives + option.collectives,
            state.strays + option.strays,
            dict(state.lies),
            Trail(state.trail, op, option.choice),
        )
        for x, new in zip(self.graph.inputs[op], option.new, strict=True):
            if new:
                self._also(after, x, new, op.region)
        self._lay(after, op, option.lies)
        return after

    def _also(self, state: State, t: Tensor, new: Iterable[Sharding], region: str) -> None:
        lies = state.lies.get(t) or self.common[t]
        home = self.homes.of(t)
        state.lies[t] = lies + tuple((reach(s, home, region), s) for s in new if (None, s) not in lies)

    def _lay(self, state: State, op: Operation, lies: Sequence[Sharding]) -> None:
        """The results of an operation, of which the first was made to lie so."""
        state.lies[op.output] = laid_out(op.output, lies, self.homes)
        if len(op.outputs) > 1:
            for y, s in zip(op.outputs[1:], beside(op, lies[0])[1:], strict=True):
                self._made(state, y, s)

    def _bring(self, state: State, t: Tensor, wanted: Sharding, region: str) -> None:
        lies = state.lies.get(t) or self.common[t]
        arrival = arrive(known(lies, region), wanted, t.dtype.itemsize)
        state.paid(arrival)
        if arrival.new:
            self._also(state, t, arrival.new, region)

    def _commit(self, op: Operation) -> None:
        (x,) = self.graph.inputs[op]
        home = self.homes.of(self.homes.graph.variables[op.attrs["variable"]].output)
        for state in self.states:
            self._bring(state, x, home, UPDATE)

    def _loop(self, op: Operation) -> None:
        looped = self.loops.of(op)
        for state in self.states:
            for x, s in zip(looped.operands, looped.wanted, strict=True):
                self._bring(state, x, s, op.region)
            for y in looped.made:
                self._made(state, y.tensor, y.sharding)

    def _copy(self, op: Operation) -> None:
        (x,) = self.graph.inputs[op]
        for state in self.states:
            s = as_it_lies([s for _, s in state.lies.get(x) or self.common[x]], self.homes.of(x))
            self._bring(state, x, s, op.region)
            self._made(state, op.output, s)

    def _made(self, state: State, t: Tensor, s: Sharding) -> None:
        """A result that lies as it does; brought home if it is bound there."""
        home = self.homes.of(t)
        lies: tuple[Sharding, ...] = (s,)
        if binding(t, self.graph, self.homes, self.fetched).binds(s, home):
            arrival = arrive(lies, home, t.dtype.itemsize)
            state.paid(arrival)
            lies += arrival.new
        state.lies[t] = laid_out(t, lies, self.homes)

    # ------------------------------------------------------------ states

    def _forget(self, n: int) -> None:
        """After operation `n`: drop what nobody needs any more, states that are no better than others, the worst."""
        for t in self._dying.get(n, ()):
            for state in self.states:
                state.lies.pop(t, None)
        if len(self.states) > 1:
            self._merge()
        if len(self.states) > 1:
            self._drop()
        first, *others = self.states
        if not others:
            self.common.update(first.lies)
            first.lies.clear()
            return
        for t, lies in list(first.lies.items()):
            if all(s.lies.get(t) == lies for s in others):
                self.common[t] = lies
                for s in self.states:
                    del s.lies[t]

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
        kept: list[State] = []
        for state in sorted(self.states, key=lambda s: (s.cost, s.collectives, s.strays)):
            if not any(self._covers(k, state) for k in kept):
                kept.append(state)
        if len(kept) > WIDTH:
            kept = sorted(kept, key=self._expected)[:WIDTH]
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
                arrival = arrive(known(mine, region), s, size)
                cost += arrival.sent_bytes
                collectives += arrival.collectives
                if cost > b.cost + 1:
                    return False
        return no_dearer((cost, collectives, a.strays), b.rank)

    def _expected(self, state: State) -> float:
        cost = state.cost
        for t, lies in state.lies.items():
            cost += arrive(tuple([s for _, s in lies]), self.homes.of(t), t.dtype.itemsize).sent_bytes
        return cost


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


def last_uses(graph: Simplified) -> dict[Tensor, int]:
    """Per tensor the number of the last operation that reads it; what nobody reads, of the one that makes it."""
    last: dict[Tensor, int] = {}
    for n, op in enumerate(graph.operations):
        last.update(dict.fromkeys(op.outputs, n))
        last.update(dict.fromkeys(graph.inputs[op], n))
    last.update(dict.fromkeys(graph.taken, len(graph.operations)))
    for op in reversed(graph.operations):
        if op.kind.remade:  # it may be made again as long as it is used
            for x in graph.inputs[op]:
                last[x] = max(last[x], last[op.output])
    return last
