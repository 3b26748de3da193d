"""The ways to run one operation: which mesh axis splits which factor, and which pending sums pass (rules 2 and 4).

Each axis goes to one of the factors it already splits somewhere, or to none; all combinations are enumerated. Each
costs the bytes of bringing its operands there, what it sends inside, and the work it duplicates. What the result is
worth where it then lies is for what follows to say: `meshlib.lowering.beam` searches over whole programs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, combinations, product
from typing import NamedTuple, TypeAlias

from layouts import Sharding
from meshlib.lowering.arrivals import NEARLY, NOWHERE, Path, Source, Way, least_cost, obtain, price, slack, total
from meshlib.lowering.endings import Axes, Ending, Endings
from meshlib.operation import Factor, Linear, Role
from meshlib.program.exchange import Exchange
from meshlib.program.signature import Signature

Rank: TypeAlias = tuple[float, int, int]  # cost, collectives, strays
Places: TypeAlias = dict[str, list[Factor | None]]  # per axis the factors that may take it, and None


@dataclass(frozen=True)
class Choice:
    """How one operation runs: the axes of each factor, what each operand must be, what comes out."""

    axes: Mapping[str, Axes]  # factor -> axes, major first
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


class Option(NamedTuple):
    """One way to run an operation where its operands lie as they do."""

    choice: Choice
    cost: float  # bytes sent, and work beyond what the home means
    sent: float  # bytes to bring the operands there, inside the operation, and to bring home what is bound
    collectives: int
    strays: int  # how far it is from what the layout plainly says
    new: tuple[tuple[Path, Sharding], ...]  # where an operand, or what it is made of, lies besides afterwards
    lies: tuple[Sharding, ...]  # where the result lies, home included if it is bound there


def options(endings: Endings, operands: Sequence[Operand], passes: bool) -> tuple[Option, ...]:
    """The ways to run an operation that may be part of the best program, the cheapest first.

    Left out is what another way and a reshard afterwards would be no dearer than. `passes` says whether any user may
    take the result as a pending sum: if none does, a sum is passed on only where that is cheaper here and now.
    """
    moves = _Moves(operands, endings)
    drafts = []
    for axes, passed in _assignments(endings, operands):
        ending = endings.of(axes, passed)
        if ending is not None and not any(map(Operand.leaves, operands, ending.made.operands)):
            leasts = [moves.least(n, s) for n, s in enumerate(ending.made.operands)]
            drafts.append(_Draft(ending, leasts, ending.cost + sum(leasts)))
    found: dict[int, Option] = {}
    for n in sorted(range(len(drafts)), key=lambda n: drafts[n].least):  # the most promising first
        draft = drafts[n]
        option = None if any(_surpasses(o, draft, moves) for o in found.values()) else _option(draft.ending, moves)
        if option is not None:
            found[n] = option
    every = [found[n] for n in sorted(found)]
    if not passes and any(any(o.choice.passed) for o in every):
        ends = dict.fromkeys(d.ending.made.out for d in drafts if not d.ending.made.out.pending)
        every = [o for o in every if not any(o.choice.passed) or not _as_well_now(o, every, ends, endings.blank)]
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
        later = passed.cost + price(blank._replace(lies=passed.lies), s)[0]
        if all(o.cost + price(blank._replace(lies=o.lies), s)[0] > later + slack(later) for o in now):
            return False
    return bool(now)


def rank(x: Option) -> Rank:
    """Cheapest first; at equal cost fewer collectives, then the plain meaning of the layout."""
    return round(x.cost, 3), x.collectives, x.strays


class _Moves:
    """What it costs to bring the operands of one operation elsewhere, each looked up once."""

    def __init__(self, operands: Sequence[Operand], endings: Endings) -> None:
        self.operands, self.endings = operands, endings
        self._brought: dict[tuple[int, Sharding], Way] = {}
        self._leasts: dict[tuple[int, Sharding], float] = {}

    def operand(self, n: int, wanted: Sharding) -> Way:
        """An operand, from where it lies."""
        found = self._brought.get((n, wanted))
        if found is None:
            found = self._brought[n, wanted] = obtain(self.operands[n].source, wanted)
        return found

    def least(self, n: int, wanted: Sharding) -> float:
        """What it costs at least to bring an operand there, as far as can be said without a plan."""
        found = self._leasts.get((n, wanted))
        if found is None:
            x = self.operands[n]
            easy = x.first != n or x.source.made is not None
            found = self._leasts[n, wanted] = 0.0 if easy else least_cost(x.source, wanted)
        return found


class _Draft(NamedTuple):
    """A way to run an operation before its operands are brought there."""

    ending: Ending
    leasts: list[float]  # what each operand costs at least
    least: float  # what it costs in all, at least


def _surpasses(a: Option, draft: _Draft, moves: _Moves) -> bool:
    """Whether `a` covers whatever comes of a draft: see `_covers`.

    An operand that is used later, and that `a` leaves where it is, is brought there in either case.
    """
    if a.cost > draft.least:
        return False
    floor, wanted = draft.ending.cost, draft.ending.made.operands
    for x, least, s, own in zip(moves.operands, draft.leasts, wanted, a.choice.operands, strict=True):
        if least and (s == own or not x.again):
            floor += least
    if a.cost > floor:
        return False
    brought = moves.endings.between(a.lies, draft.ending.lies, floor - a.cost)
    return brought is not None and a.cost + brought[0] < floor - slack(floor)


def _option(ending: Ending, moves: _Moves) -> Option | None:
    """An assignment, with what it takes to bring the operands there; None if they can't be."""
    axes, passed, made, work, cost, collectives, lies = ending
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
    strays = sum(map(len, passed)) + (made.out.axes != moves.endings.home.axes)
    choice = Choice(axes, made.operands, made.out, made.exchanges, passed)
    return Option(choice, cost, cost - work, collectives, strays, tuple(new), lies)


def _covers(a: Option, b: Option, moves: _Moves) -> bool:
    """Whether whatever follows `b` may as well follow `a`, at no more cost."""
    brought = moves.endings.between(a.lies, b.lies, b.cost + slack(b.cost) - a.cost)
    if brought is None:
        return False
    cost, collectives = a.cost + brought[0], a.collectives + brought[1]
    for n, x in enumerate(moves.operands):
        others = [s for path, s in b.new if path == (n,)] if x.again else ()
        if others:
            source = x.source._replace(lies=(*x.lies, *(s for path, s in a.new if path == (n,))))
            more = total(price(source, s) for s in others)
            cost, collectives = cost + more[0], collectives + more[1]
    if abs(cost - b.cost) <= slack(b.cost):
        return (collectives, a.strays) <= (b.collectives, b.strays)
    return cost - NEARLY * (cost - a.cost) < b.cost


def settled(signature: Signature, operands: Sequence[Operand], home: Sharding) -> Choice | None:
    """The choice where there is nothing to choose: all lies as one assignment wants it, and nothing moves.

    Each axis may go to that one factor or to none; without it a device does as much or more.
    What a later user of an operand would gather is not weighed: see `Course.settles`.
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


def _assignments(
    endings: Endings, operands: Sequence[Operand]
) -> Iterator[tuple[Mapping[str, Axes], tuple[Axes, ...]]]:
    """Every way to give each axis to one of its factors or to none, and to pass sums on; sizes divide."""
    signature, home = endings.signature, endings.home
    places = _places(signature.factors, operands, home)
    for passed in pass_options(signature.linear, operands):
        busy = {a for p in passed for a in p}
        free = {a: places[a] for a in places if a not in busy}
        for targets in product(*free.values()):
            split: dict[str, Axes] = {}
            used: dict[str, Factor] = {}
            for axis, f in zip(free, targets, strict=True):
                if f is not None:
                    split[f.name] = (*split.get(f.name, ()), axis)
                    used[f.name] = f
            if all(f.size % home.mesh.group_size(split[n]) == 0 for n, f in used.items()):
                for n, f in used.items():
                    if len(split[n]) > 1:
                        split[n] = _ordered(f, split[n], operands, home)
                yield split, passed


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
