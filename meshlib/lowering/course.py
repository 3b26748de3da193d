"""What one operation does to where things lie: its options, and what each of them leaves where.

Used by the search (`beam`), which follows many ways to run a program, and by its guide, which follows one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import NamedTuple, TypeAlias

from layouts import Sharding
from meshlib.graph import UPDATE, Operation, Tensor
from meshlib.lowering.arrivals import STAYS, Made, Path, Price, Source, Way, between, made_again, obtain, price, total
from meshlib.lowering.choose import Choice, Operand, Option, options, settled
from meshlib.lowering.endings import Binding, Endings, Near
from meshlib.lowering.homes import Homes, Region
from meshlib.lowering.loops import Loops
from meshlib.lowering.memos import Found
from meshlib.lowering.simplification import Simplified
from meshlib.lowering.ways import AllWays, Distances, Floats, Lies
from meshlib.operation import Home, Kind
from meshlib.program.signature import Signatures
from meshlib.program.split import beside

SMALL = 64  # operations: in larger graphs all take what lies well as it lies

Where: TypeAlias = dict[Tensor, Lies]  # where some tensors lie


class Outcome(NamedTuple):
    """What one operation, run in one way, comes to."""

    choice: Choice | None  # None for what leaves none
    cost: float  # bytes sent, and work beyond what the home means
    sent: float  # bytes of it
    collectives: int
    strays: int
    ways: Mapping[Tensor, int]  # where its results lie then, and operands that were brought elsewhere


class _Facts(NamedTuple):
    """What its options depend on besides where its operands lie."""

    endings: Endings
    passes: bool  # whether some user may take the result as a pending sum
    operands: list[tuple[int, Sharding, bool, tuple[str, ...]]]  # all of `Operand` but the source


@dataclass(eq=False)
class Course:
    """The operations of one graph under one layout."""

    graph: Simplified
    homes: Homes
    found: Found
    signatures: Signatures
    fetched: set[Tensor]
    loops: Loops
    near: Mapping[Operation, Near] = field(default_factory=dict)  # see `near`
    again: set[Tensor] = field(init=False)  # what may be made again
    last: dict[Tensor, int] = field(init=False)  # the last operation that needs each tensor
    dying: dict[int, list[Tensor]] = field(init=False)  # per operation, what none after it needs
    # Results that are best at home, though nothing in this graph says so: who reads what a loop stacks does so later.
    ends: list[Tensor] = field(init=False)
    small: bool = field(init=False)  # see `SMALL`
    settles: list[bool] = field(init=False)  # per operation, whether it takes what lies well as it lies
    reads: list[tuple[Tensor, ...]] = field(init=False)  # per operation, and at the end, what its outcomes depend on
    ways: AllWays = field(default_factory=AllWays)
    _facts: dict[Operation, _Facts] = field(default_factory=dict)
    _outcomes: dict[tuple[int, tuple[int, ...]], tuple[Outcome, ...]] = field(default_factory=dict)
    _distances: dict[tuple[Tensor, str], Distances] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.again = made_again(self.graph)
        self.last = last_uses(self.graph, self.again)
        self.dying = {}
        for t, n in self.last.items():
            self.dying.setdefault(n, []).append(t)
        self.small = len(self.graph.operations) <= SMALL
        self.settles = [not self.small or self._settles(op, n) for n, op in enumerate(self.graph.operations)]
        self.ends = [y for op in self.graph.operations for y in op.outputs if y in self.graph.taken]
        self.reads = [self._closure(self._taken(op)) for op in self.graph.operations]
        self.reads.append(self._closure(self.ends))

    def _settles(self, op: Operation, n: int) -> bool:
        """Whether no later user gains if it takes elsewhere what lies well: who reads but a result, no larger."""
        inputs = self.graph.inputs[op]
        return not grows(op, inputs) and all(self.last[t] <= n for t in inputs)

    def _taken(self, op: Operation) -> Sequence[Tensor]:
        """Its operands; of a loop those that its body needs."""
        inputs = self.graph.inputs[op]
        return inputs if op.loop is None else [inputs[n] for n in op.loop.needs]

    def _closure(self, tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
        """They, and what they may be made of again."""
        found: dict[Tensor, None] = {}
        for t in tensors:
            found[t] = None
            if t in self.again:
                found.update(dict.fromkeys(self._closure(self.graph.inputs[t.operation])))
        return tuple(found)

    def outcomes(self, n: int, numbers: tuple[int, ...]) -> tuple[Outcome, ...]:
        """What may come of operation number `n`, where what it reads lies so. After the last one results come home."""
        found = self._outcomes.get((n, numbers))
        if found is None:
            before = {t: self.ways.lies[number] for t, number in zip(self.reads[n], numbers, strict=True)}
            found = self._outcomes[n, numbers] = tuple(self._run(n, before))
        return found

    def _run(self, n: int, before: Where) -> Iterator[Outcome]:
        if n == len(self.graph.operations):
            where = dict(before)
            region = self.graph.operations[-1].region
            brought = [self.bring(where, t, self.homes.of(t), region) for t in self.ends]
            yield self._outcome(before, where, None, brought)
            return
        op = self.graph.operations[n]
        if is_fixed(op):
            where = dict(before)
            yield self._outcome(before, where, None, self._run_fixed(op, where))
            return
        for option in self._options(op, n, before):
            where = dict(before)
            yield self._outcome(before, where, option, self._take(where, op, option))

    def _outcome(self, before: Where, where: Where, option: Option | None, ways: Sequence[Way]) -> Outcome:
        cost, collectives = sum(way.cost for way in ways), sum(way.collectives for way in ways)
        both = zip_longest(where.items(), before.values())  # in the same order: what is new comes last
        numbers = {t: self.ways.number(t, lies) for (t, lies), old in both if lies is not old}
        if option is None:
            return Outcome(None, cost, cost, collectives, 0, numbers)
        return Outcome(
            option.choice,
            option.cost + cost,
            option.sent + cost,
            option.collectives + collectives,
            option.strays,
            numbers,
        )

    def _options(self, op: Operation, n: int, where: Where) -> Sequence[Option]:
        """The ways to run operation number `n`."""
        facts = self._facts.get(op)
        if facts is None:
            facts = self._facts[op] = self._facts_of(op, n)
        sources = [self.source(where, t, op.region) for t in self.graph.inputs[op]]
        operands = [Operand(x, *rest) for x, rest in zip(sources, facts.operands, strict=True)]
        settles = settled(facts.endings.signature, operands, facts.endings.home)
        plain = settles and Option(settles, 0.0, 0.0, 0, 0, (), (settles.out,))
        if plain and self.settles[n]:
            return (plain,)
        key = (facts.endings, facts.passes, *operands)
        found = self.found.options.get(key)
        if found is None:
            found = options(facts.endings, operands, facts.passes)
            if plain and all(x.choice != plain.choice for x in found):
                found = (plain, *found)
            self.found.options[key] = found
        return found

    def _facts_of(self, op: Operation, n: int) -> _Facts:
        inputs, users = self.graph.inputs[op], self.graph.uses.get(op.output, ())
        over = self.found.balance.stationary
        held = [over if over and self.homes.is_weight(t) else () for t in inputs]
        binds = binding(op.output, self.graph, self.homes, self.fetched)
        key = (self.signatures.of(op), self.homes.of(op.output), binds, self.near.get(op, frozenset()))
        return _Facts(
            self.found.endings(*key),
            not users or any(i in self.signatures.of(user).linear.operands for user, i in users),
            [(inputs.index(t), self.homes.of(t), self.last[t] > n, h) for t, h in zip(inputs, held, strict=True)],
        )

    def takes(self, op: Operation, where: Where) -> Sequence[tuple[Tensor, Sharding]]:
        """What an operation that leaves no choice takes, and where."""
        inputs = self.graph.inputs[op]
        match op.kind.kind:
            case Kind.INPUT | Kind.VARIABLE:
                return ()
            case Kind.COMMIT:
                return [(inputs[0], self.homes.of(self.homes.graph.variables[op.attrs["variable"]].output))]
            case Kind.LOOP:
                looped = self.loops.of(op)
                return list(zip(looped.operands, looped.wanted, strict=True))
        assert op.kind.kind is Kind.COPY
        return [(inputs[0], as_it_lies([s for _, s in where[inputs[0]]], self.homes.of(inputs[0])))]

    def _run_fixed(self, op: Operation, where: Where) -> list[Way]:
        """Run what leaves no choice."""
        taken = self.takes(op, where)
        ways = [self.bring(where, x, s, UPDATE if op.kind.kind is Kind.COMMIT else op.region) for x, s in taken]
        match op.kind.kind:
            case Kind.INPUT | Kind.VARIABLE:
                where[op.output] = ((None, self.homes.of(op.output)),)
            case Kind.LOOP:
                ways += [self._made(where, y.tensor, y.sharding) for y in self.loops.of(op).made]
            case Kind.COPY:
                ways.append(self._made(where, op.output, taken[0][1]))
        return ways

    def source(self, where: Where, t: Tensor, region: str) -> Source:
        """Where `t` is to be had in a region."""
        made = None
        if t in self.again:
            op = t.operation
            operands = tuple([self.source(where, x, region) for x in self.graph.inputs[op]])
            made = Made(self.signatures.of(op), operands)
        return Source(known(where[t], region), t.dtype.itemsize, self.found.balance.axis_prices, made)

    def _take(self, where: Where, op: Operation, option: Option) -> list[Way]:
        """Run an operation in one of its ways; returns how its second results come home."""
        self._also(where, op.output, option.new, op.region)
        where[op.output] = laid_out(op.output, option.lies, self.homes)
        others = zip(op.outputs[1:], beside(op, option.lies[0])[1:], strict=True)
        return [self._made(where, y, s) for y, s in others]

    def bring(self, where: Where, t: Tensor, wanted: Sharding, region: str) -> Way:
        """Bring a tensor somewhere."""
        way = obtain(self.source(where, t, region), wanted)
        self._also(where, t, way.new, region)
        return way

    def _made(self, where: Where, t: Tensor, s: Sharding) -> Way:
        """A result that lies as it does; brought home if it is bound there."""
        home, way = self.homes.of(t), STAYS
        at: tuple[Sharding, ...] = (s,)
        if binding(t, self.graph, self.homes, self.fetched).binds(s, home):
            way = obtain(Source(at, t.dtype.itemsize, self.found.balance.axis_prices), home)
            at += tuple([s for _, s in way.new])
        where[t] = laid_out(t, at, self.homes)
        return way

    def bringing(self, t: Tensor, lies: Lies, ends: Lies, region: str) -> tuple[float, int]:
        """What it costs a region, and in how many collectives, to have a tensor wherever `ends` have it."""
        missing = [s for r, s in ends if (r, s) not in lies and (None, s) not in lies]
        return self._bringing(t, lies, missing, region) if missing else (0.0, 0)

    def distances(self, t: Tensor, region: str) -> Floats:
        """What that costs from way to way, as far as the users of a tensor could ask for it: see `Distances.table`."""
        found = self._distances.get((t, region))
        if found is None:

            def apart(here: Sharding, there: Sharding) -> Price:
                return between(here, there, t.dtype.itemsize, self.found.balance.axis_prices)

            found = self._distances[t, region] = Distances(self.ways.of[t], self.homes.of(t), region, apart)
        return found.table()

    def _bringing(self, t: Tensor, lies: Lies, missing: Iterable[Sharding], region: str) -> tuple[float, int]:
        source = Source(known(lies, region), t.dtype.itemsize, self.found.balance.axis_prices)
        return total(price(source, s) for s in missing)

    def _also(self, where: Where, made: Tensor, new: Iterable[tuple[Path, Sharding]], region: str) -> None:
        """A tensor, and what it is made of, are now to be had elsewhere too."""
        for path, s in new:
            t, at = made, made.operation
            for n in path:
                t = self.graph.inputs[at][n]
                at = t.operation
            before = where[t]
            if (None, s) not in before and (region, s) not in before:
                where[t] = (*before, (self.homes.reach(t, s, region), s))


def known(lies: Lies, region: Region) -> tuple[Sharding, ...]:
    """The shardings in which a region may use a tensor."""
    return tuple([s for r, s in lies if r is None or r == region])


def laid_out(t: Tensor, lies: Sequence[Sharding], homes: Homes) -> Lies:
    """A result that exists in these shardings: as it was made, and at home if it was brought there."""
    if t.operation.kind.home is Home.GIVEN:
        lies = lies[-1:]  # its users must not go round the constraint
    return tuple([(homes.reach(t, s, t.operation.region), s) for s in lies])


def as_it_lies(lies: Sequence[Sharding], home: Sharding) -> Sharding:
    """Where a value is to be had without moving it: at home, else in the smallest blocks; home if it is pending."""
    whole = [s for s in lies if not s.pending]
    return min(whole, key=lambda s: (s != home, s.local_size)) if whole else home


def binding(t: Tensor, graph: Simplified, homes: Homes, fetched: set[Tensor]) -> Binding:
    """Whether a value is brought home when it is made: what is fetched, a gradient and a constrained value are.

    A gradient that is scaled and added to others before the update may wait for them, so that two losses share one
    reduction, unless it takes more memory until then. So may one that nobody uses: a loop's running sum, in a trial.
    """
    if t in fetched or t.operation.kind.home is Home.GIVEN:
        return Binding.ALWAYS
    uses = graph.uses.get(t, ())
    if t in homes.graph.gradient_of:
        waits = all(_is_linear(op, i) and op.region != UPDATE for op, i in uses)
        return Binding.IF_LARGER if waits else Binding.ALWAYS
    crosses = any(op.region != t.operation.region for op, _ in uses)
    return Binding.IF_LARGER if crosses else Binding.NEVER


def _is_linear(op: Operation, n: int) -> bool:
    """Whether an operation is linear in operand `n`, or but for how it rounds."""
    return n in op.kind.linear(op).operands or op.kind.home is Home.OPERAND


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


def grows(op: Operation, inputs: Sequence[Tensor]) -> bool:
    """Whether its result is larger than what it is made of."""
    return sum(t.dtype.size_bytes(t.shape.size) for t in inputs) < op.output.dtype.size_bytes(op.output.shape.size)


def is_fixed(op: Operation) -> bool:
    """Whether an operation leaves no choice."""
    return op.kind.kind in (Kind.INPUT, Kind.VARIABLE, Kind.COMMIT, Kind.LOOP, Kind.COPY)
