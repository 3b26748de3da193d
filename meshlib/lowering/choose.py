"""The ways to run one operation: which mesh axis splits which factor, and which pending sums pass (rules 2 and 4).

Each axis goes to one of the factors it already splits somewhere, or to none; all combinations are enumerated. Each
costs the bytes of bringing its operands there, what it sends inside, and the work it duplicates. What the result is
worth where it then lies is for what follows to say: `meshlib.lowering.beam` searches over whole programs.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, combinations, product
from math import prod
from typing import NamedTuple, TypeAlias

from layouts import Sharding
from meshlib.lowering.arrivals import (
    NEARLY,
    NOWHERE,
    Path,
    Prices,
    Source,
    Way,
    axes_price,
    least_cost,
    obtain,
    parks,
    slack,
)
from meshlib.operation import Factor, Linear, Role, Work
from meshlib.program.exchange import Exchange, busiest_bytes
from meshlib.program.signature import Assigned, Signature

Axes: TypeAlias = tuple[str, ...]
Rank: TypeAlias = tuple[float, int, int]  # cost, collectives, strays
Near: TypeAlias = frozenset[tuple[int, str]]  # operands and dims of which others bring what lies elsewhere
Lies: TypeAlias = tuple[Sharding, ...]  # where something is to be had
Places: TypeAlias = dict[str, list[Factor | None]]  # per axis the factors that may take it, and None


@dataclass(frozen=True)
class Balance:
    """How much duplicated work is worth one byte sent per device.

    Nominal: one operation a byte, far below a chip's real balance (TPU v3: about 800 MXU flops per ICI byte). At the
    real one a step of a small batch would gather its activations and compute whole gradients on every core: cheaper
    on paper, but not what somebody who splits the batch means. So work that a layout divides stays divided unless
    duplicating it is next to free.

    `axis_prices` are what a byte sent along an axis is worth, where they differ: (axis, price) pairs, 1 for the others.
    `mtf.balance` makes all that of a slice.

    `stationary` are mesh axes over which variables never move: activations come to the weights, as in Megatron, even
    where gathering a weight would send less.
    """

    mxu_flops_per_byte: float = 1.0
    vpu_ops_per_byte: float = 32.0
    stationary: tuple[str, ...] = ()
    axis_prices: Prices = ()

    def bytes_of(self, work: Work) -> float:
        """What a device's work is worth."""
        return work.mxu_flops / self.mxu_flops_per_byte + work.vpu_ops / self.vpu_ops_per_byte


@dataclass(frozen=True)
class Choice:
    """How one operation runs: the axes of each factor, what each operand must be, what comes out."""

    axes: dict[str, Axes]  # factor -> axes, major first
    operands: tuple[Sharding, ...]
    out: Sharding
    exchanges: tuple[Exchange, ...]  # what moves inside the operation
    passed: tuple[Axes, ...]  # the pending axes of each operand that go through

    @property
    def assignment(self) -> tuple[tuple[str, str], ...]:
        """(axis, factor) pairs, major first within a factor."""
        return tuple((a, f) for f, axes in self.axes.items() for a in axes)


class Operand(NamedTuple):
    """One operand as the chooser sees it."""

    source: Source
    first: int  # which operand is the first that is the same tensor
    home: Sharding
    again: bool = False  # somebody uses it later
    held: Axes = ()  # axes over which it must not move

    @property
    def lies(self) -> tuple[Sharding, ...]:
        """Where it exists."""
        return self.source.lies

    def pending(self) -> Axes:
        """Axes over which it is to be had as a pending sum."""
        return tuple(dict.fromkeys(a for s in self.lies for a, kind in s.pending if kind == "sum"))

    def leaves(self, wanted: Sharding) -> bool:
        """Whether to bring it to `wanted` moves it over an axis over which it is held."""
        return (
            bool(self.held)
            and wanted not in self.lies
            and any(
                a in own and a not in to
                for s in self.lies
                for own, to in zip(s.axes, wanted.axes, strict=True)
                for a in self.held
            )
        )


class Binding(enum.Enum):
    """Whether a result is brought home as soon as it is made."""

    ALWAYS = "always"
    IF_LARGER = "if larger"  # another region needs it: until then it must not take more memory than its home
    NEVER = "never"

    def binds(self, made: Sharding, home: Sharding) -> bool:
        """Whether a result that was made so is brought home."""
        return self is Binding.ALWAYS or (self is Binding.IF_LARGER and made.local_size > home.local_size)


class Option(NamedTuple):
    """One way to run an operation where its operands lie as they do."""

    choice: Choice
    cost: float  # bytes sent, and work beyond what the home means
    sent: float  # bytes to bring the operands there, inside the operation, and to bring home what is bound
    collectives: int
    strays: int  # how far it is from what the layout plainly says
    new: tuple[tuple[Path, Sharding], ...]  # where an operand, or what it is made of, lies besides afterwards
    lies: tuple[Sharding, ...]  # where the result lies, home included if it is bound there


def options(
    signature: Signature,
    operands: Sequence[Operand],
    home: Sharding,
    binding: Binding,
    passes: bool,
    balance: Balance,
    near: Near = frozenset(),
) -> tuple[Option, ...]:
    """The ways to run an operation that may be part of the best program, the cheapest first.

    Left out is what another way and a reshard afterwards would be no dearer than. `passes` says whether any user may
    take the result as a pending sum: if none does, a sum is passed on only where that is cheaper here and now. `near`:
    the operands, and their dims, of which another operation brings what this one needs of its neighbours.
    """
    blank = Source((), signature.op.output.dtype.itemsize, balance.axis_prices)
    moves = _Moves(operands, home, blank, sum(y.dtype.itemsize for y in signature.op.outputs[1:]))
    drafts = []
    for c in _candidates(signature, operands, home, balance):
        made = signature.under(home.mesh, c.axes, c.passed)
        if made is not None and not any(map(Operand.leaves, operands, made.operands)):
            drafts.append(_draft(c, made, moves, binding, near))
    found: dict[int, Option] = {}
    for n in sorted(range(len(drafts)), key=lambda n: drafts[n].least):  # the most promising first
        draft = drafts[n]
        option = None if any(_surpasses(o, draft, moves) for o in found.values()) else _option(draft, moves)
        if option is not None:
            found[n] = option
    made_now = dict.fromkeys(d.made.out for d in drafts if not d.made.out.pending)
    every = [found[n] for n in sorted(found)]
    if not passes:
        every = [o for o in every if not any(o.choice.passed) or not _as_well_now(o, every, made_now, blank)]
    every.sort(key=rank)
    kept: list[Option] = []
    for option in every:
        if not any(_covers(k, option, moves) for k in kept):
            kept.append(option)
    return tuple(kept)


def _as_well_now(passed: Option, found: Sequence[Option], ends: Iterable[Sharding], blank: Source) -> bool:
    """Whether reducing its operands first is no dearer, wherever (`ends`) others would have the result."""
    now = [o for o in found if not o.choice.out.pending]
    for s in ends:
        later = passed.cost + obtain(blank._replace(lies=passed.lies), s).cost
        if all(o.cost + obtain(blank._replace(lies=o.lies), s).cost > later + slack(later) for o in now):
            return False
    return bool(now)


def rank(x: Option) -> Rank:
    """Cheapest first; at equal cost fewer collectives, then the plain meaning of the layout."""
    return round(x.cost, 3), x.collectives, x.strays


class _Moves:
    """What it costs to bring the operands and the result of one operation elsewhere, each looked up once."""

    def __init__(self, operands: Sequence[Operand], home: Sharding, blank: Source, beside: float) -> None:
        self.operands, self.home, self.blank = operands, home, blank
        self._beside = beside  # item size of all results but the first, which lie as that was made
        self._brought: dict[tuple[int, Sharding], Way] = {}
        self._home: dict[Sharding, Way] = {}
        self._leasts: dict[tuple[int, Sharding], float] = {}
        self._least: dict[tuple[Lies, Lies], float] = {}
        self._between: dict[tuple[Lies, Lies], tuple[float, int]] = {}

    def operand(self, n: int, wanted: Sharding) -> Way:
        """An operand, from where it lies."""
        found = self._brought.get((n, wanted))
        if found is None:
            found = self._brought[n, wanted] = obtain(self.operands[n].source, wanted)
        return found

    def bound(self, made: Sharding) -> Way:
        """A result, home."""
        found = self._home.get(made)
        if found is None:
            found = self._home[made] = obtain(self.blank._replace(lies=(made,)), self.home)
        return found

    def least(self, n: int, wanted: Sharding) -> float:
        """What it costs at least to bring an operand there, as far as can be said without a plan."""
        found = self._leasts.get((n, wanted))
        if found is None:
            x = self.operands[n]
            easy = x.first != n or x.source.made is not None
            found = self._leasts[n, wanted] = 0.0 if easy else least_cost(x.source, wanted)
        return found

    def between(self, here: Lies, there: Lies, limit: float) -> tuple[float, int] | None:
        """The results that lie in some places, to others; None where that exceeds the limit, or nobody would do so.

        The first place is where they were made.
        """
        key = (here, there)
        least = self._least.get(key)
        if least is None:
            result = self.blank._replace(lies=here)
            parked = parks(there[0], (*here, self.home))
            least = self._least[key] = float("inf") if parked else max([least_cost(result, s) for s in there])
        if least > limit:
            return None
        found = self._between.get(key)
        if found is None:
            result = self.blank._replace(lies=here)
            ways = [obtain(result, s) for s in there]
            if self._beside:
                ways.append(obtain(self.blank._replace(lies=here[:1], itemsize=self._beside), there[0]))
            found = self._between[key] = sum([way.cost for way in ways]), sum([way.collectives for way in ways])
        return found


class _Draft(NamedTuple):
    """A candidate before its operands are brought there."""

    candidate: _Candidate
    made: Assigned
    cost: float  # of all but the operands
    collectives: int
    lies: Lies  # where the result lies then, home included if it is bound there
    leasts: list[float]  # what each operand costs at least
    least: float  # what it costs in all, at least


def _draft(c: _Candidate, made: Assigned, moves: _Moves, binding: Binding, near: Near) -> _Draft:
    exchanges = [e for e in made.exchanges if (e.operand, e.dim) not in near]
    cost, collectives, lies = c.work, len(exchanges), (made.out,)
    for over in dict.fromkeys(e.axes for e in exchanges):
        cost += busiest_bytes((e, 1) for e in exchanges if e.axes == over) * axes_price(over, moves.blank.prices)
    if binding.binds(made.out, moves.home):
        way = moves.bound(made.out)
        cost += way.cost
        collectives += way.collectives
        lies += tuple([s for _, s in way.new])
    leasts = [moves.least(n, s) for n, s in enumerate(made.operands)]
    return _Draft(c, made, cost, collectives, lies, leasts, cost + sum(leasts))


def _surpasses(a: Option, draft: _Draft, moves: _Moves) -> bool:
    """Whether `a` covers whatever comes of a draft: see `_covers`.

    An operand that is used later, and that `a` leaves where it is, is brought there in either case.
    """
    if a.cost > draft.least:
        return False
    floor = draft.cost
    for x, least, s, own in zip(moves.operands, draft.leasts, draft.made.operands, a.choice.operands, strict=True):
        if least and (s == own or not x.again):
            floor += least
    if a.cost > floor:
        return False
    brought = moves.between(a.lies, draft.lies, floor - a.cost)
    return brought is not None and a.cost + brought[0] < floor - slack(floor)


def _option(draft: _Draft, moves: _Moves) -> Option | None:
    """A draft, with what it takes to bring its operands there; None if they can't be."""
    (axes, passed, work), made, cost, collectives, lies, *_ = draft
    sources: dict[int, Source] = {}
    new: list[tuple[Path, Sharding]] = []
    for n, (x, wanted) in enumerate(zip(moves.operands, made.operands, strict=True)):
        source = sources.get(x.first)
        if wanted in (source or x.source).lies:
            continue
        way = obtain(source, wanted) if source else moves.operand(n, wanted)
        if way is NOWHERE:
            return None
        cost += way.cost
        collectives += way.collectives
        new += [((n, *path), s) for path, s in way.new]
        sources[x.first] = (source or x.source).with_lies(way.new)
    strays = sum(map(len, passed)) + (made.out.axes != moves.home.axes)
    choice = Choice(axes, made.operands, made.out, made.exchanges, passed)
    return Option(choice, cost, cost - work, collectives, strays, tuple(new), lies)


def _covers(a: Option, b: Option, moves: _Moves) -> bool:
    """Whether whatever follows `b` may as well follow `a`, at no more cost."""
    brought = moves.between(a.lies, b.lies, b.cost + slack(b.cost) - a.cost)
    if brought is None:
        return False
    cost, collectives = a.cost + brought[0], a.collectives + brought[1]
    for n, x in enumerate(moves.operands):
        others = [s for path, s in b.new if path == (n,)] if x.again else ()
        if others:
            source = x.source._replace(lies=(*x.lies, *(s for path, s in a.new if path == (n,))))
            for s in others:
                way = obtain(source, s)
                cost += way.cost
                collectives += way.collectives
    if abs(cost - b.cost) <= slack(b.cost):
        return (collectives, a.strays) <= (b.collectives, b.strays)
    return cost - NEARLY * (cost - a.cost) < b.cost


def settled(signature: Signature, operands: Sequence[Operand], home: Sharding) -> Choice | None:
    """The choice where there is nothing to choose: all lies as one assignment wants it, and nothing moves.

    Each axis may go to that one factor or to none; without it a device does as much or more.
    What a later user of an operand would gather is not weighed: see `Course.thorough`.
    """
    lie = [x.lies[0] for x in operands if len(x.lies) == 1]
    if len(lie) < len(operands) or any(s.pending for s in lie) or any(x.held for x in operands):
        return None
    split: dict[str, Axes] = {}
    for f in signature.factors:
        dims = zip((*lie, home), (*f.operands, f.outputs[0]), strict=True)
        entry, *others = {s.of(dim) for s, dim in dims if dim is not None}
        if others or (entry and f.role is not Role.PARALLEL):
            return None
        if entry:
            split[f.name] = entry
    taken = [a for entry in split.values() for a in entry]
    if len(set(taken)) < len(taken):
        return None
    names = sorted(split, key=lambda name: min(map(home.mesh.axes.index, split[name])))
    return Choice({name: split[name] for name in names}, tuple(lie), home, (), ((),) * len(operands))


class _Candidate(NamedTuple):
    axes: dict[str, Axes]
    passed: tuple[Axes, ...]
    work: float  # more than what the home means, in bytes


def _candidates(
    signature: Signature, operands: Sequence[Operand], home: Sharding, balance: Balance
) -> Iterator[_Candidate]:
    places = _places(signature.factors, operands, home)
    sizes = home.mesh.sizes_by_axis
    plain = _plain_work(signature, home, balance)
    for passed in pass_options(signature.linear, operands):
        busy = {a for p in passed for a in p}
        free = {a: places[a] for a in places if a not in busy}
        for split in _assignments(free, operands, home):
            counts = [prod([sizes[a] for a in split[n]]) if n in split else 1 for n in signature.names]
            blocks = signature.cut(tuple(counts))
            if blocks is None:
                continue
            yield _Candidate(split, passed, balance.bytes_of(blocks.work) - plain)


def _plain_work(signature: Signature, home: Sharding, balance: Balance) -> float:
    """The work of a device that makes its block of the home; what others do is counted from there."""
    counts = dict(zip(home.shape.names, home.block_counts, strict=True))
    own = (f.outputs[0] if f.shares is None else None for f in signature.factors)
    plain = signature.cut(tuple(counts.get(name or "", 1) for name in own))
    return 0 if plain is None else balance.bytes_of(plain.work)


def _places(factors: Sequence[Factor], operands: Sequence[Operand], home: Sharding) -> Places:
    """Per axis, in mesh order, the factors it may split: those whose dim it splits in an operand or in a home.

    An axis never wanders to a dim that nobody laid on it: a layout that splits the batch alone reduces gradients,
    even where exchanging activations and cutting another dim would send a little less.
    """
    laid_on = [(f, _axes_of(f, operands, home)) for f in factors if f.role is not Role.WHOLE]
    found: dict[str, list[Factor | None]] = {}
    for axis in home.mesh.axes:
        able = [f for f, axes in laid_on if axis in axes]
        if able:
            found[axis] = [*able, None]
    return found


def _axes_of(f: Factor, operands: Sequence[Operand], home: Sharding) -> set[str]:
    name = f.outputs[0]
    axes = set(home.of(name)) if name is not None else set()
    for x, own in zip(operands, f.operands, strict=True):
        if own is not None:
            for s in (*x.lies, x.home):
                axes.update(s.of(own))
    return axes


def _assignments(places: Places, operands: Sequence[Operand], home: Sharding) -> Iterator[dict[str, Axes]]:
    """Every way to give each axis to one of its factors or to none; sizes divide."""
    mesh = home.mesh
    for targets in product(*places.values()):
        split: dict[str, Axes] = {}
        used: dict[str, Factor] = {}
        for axis, f in zip(places, targets, strict=True):
            if f is not None:
                split[f.name] = (*split.get(f.name, ()), axis)
                used[f.name] = f
        if all(f.size % mesh.group_size(split[n]) == 0 for n, f in used.items()):
            for n, f in used.items():
                if len(split[n]) > 1:
                    split[n] = _ordered(f, split[n], operands, home)
            yield split


def _ordered(f: Factor, axes: Axes, operands: Sequence[Operand], home: Sharding) -> Axes:
    """The axes of one factor in the order in which its dim has them already, the home first."""
    wanted = set(axes)
    seen: list[Axes] = []
    if f.outputs[0] is not None and f.outputs[0] in home.shape:
        seen.append(home.of(f.outputs[0]))
    for i, x in enumerate(operands):
        name = f.operands[i]
        if name is not None:
            seen += [s.of(name) for s in x.lies]
    for order in seen:
        if wanted <= set(order):
            return tuple(a for a in order if a in wanted)
    return axes


def pass_options(linear: Linear, operands: Sequence[Operand]) -> Iterator[tuple[Axes, ...]]:
    """Which pending axes of which operands may go through; nothing first, so that ties reduce as early as possible."""
    sums = [x.pending() for x in operands]
    nothing: tuple[Axes, ...] = ((),) * len(operands)
    yield nothing
    if not any(sums):
        return
    if linear.together:
        # What is whole counts on one device only, so it passes too.
        some = list(dict.fromkeys(a for i in linear.operands for a in sums[i]))
        for subset in _subsets(some):
            yield tuple(subset if i in linear.operands else () for i in range(len(operands)))
        return
    alone = [i for i in linear.operands if sum(x.first == operands[i].first for x in operands) == 1]
    for chosen in product(*(((), *_subsets(sums[i])) for i in alone)):
        taken = list(chain.from_iterable(chosen))
        if taken and len(taken) == len(set(taken)):
            passed = list(nothing)
            for i, axes in zip(alone, chosen, strict=True):
                passed[i] = axes
            yield tuple(passed)


def _subsets(axes: Sequence[str]) -> list[Axes]:
    """The non-empty subsets, largest first."""
    return [c for n in range(len(axes), 0, -1) for c in combinations(axes, n)]
