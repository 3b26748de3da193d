"""The fewest bytes with which a small program can be lowered: a search over every way to run it.

Written apart from the partitioner, as what it is judged by. Every assignment of mesh axes to dims that rule 2 allows,
every pending sum reduced at every point where it can be, every value brought from wherever it already is: dynamic
programming in the order of the program over where each live value lies. States that are equal are merged, and a state is
dropped if another costs no more after bringing values to wherever this one has them. Nothing else is left out, so what
is found is the least, unless there are too many states (`TooMany`).

    run an operation   any assignment; sums are reduced by whoever uses them, a whole term of a sum counts on one device
    bring an operand   `layouts.reshard` from anywhere it is; it is there from then on, a sum taken on the way too
    keep a value       what is larger than at home serves the region that made it alone
    end                outputs, gradients and what is written back lie at home

What it costs is bytes sent and work done, at a balance; or bytes alone, with no more work than is given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations, permutations, product
from time import perf_counter
from typing import NamedTuple

import numpy as np

from layouts import LayoutRules, Mesh, Sharding, reshard
from meshlib.graph import UPDATE, Operation, Tensor, TensorType
from meshlib.lowering import lower
from meshlib.lowering.homes import Homes
from meshlib.lowering.simplification import Simplified, simplify
from meshlib.operation import RESIDENT, Home, Kind, Role, Work
from meshlib.ops.sources import is_zero
from meshlib.program.exchange import busiest_bytes
from meshlib.program.instructions import Compute
from meshlib.program.signature import Signature, Signatures
from meshlib.program.work import local_work

Axes = tuple[str, ...]
Laid = tuple[int, str, str]  # operand, dim, axis
EPS = 1e-6
INFINITE = float("inf")
MAX_STATES = 20_000
MAX_NEW_STATES = 1_000_000
MAX_SECONDS = 10.0
PRUNERS = 1_024  # cheapest states against which all others are held


class TooMany(Exception):
    """There are too many states to go through, or it takes too long."""


# ---------------------------------------------------------------- where one value lies


class Held(NamedTuple):
    """One place where a value is to be had; `region`: the only one that it serves, None: all."""

    sharding: Sharding
    region: str | None


@dataclass(frozen=True)
class Spot:
    """All places where a value is. `free`: made anew wherever it is wanted. `laid`: dims and axes it was split over."""

    held: frozenset[Held] = frozenset()
    free: bool = False
    laid: frozenset[tuple[str, str]] = frozenset()


class Whereabouts:
    """The spots in which one tensor can be, numbered, and what it costs to get from one to another."""

    def __init__(self, t: Tensor, home: Sharding, bound: bool, strict: bool) -> None:
        self.t, self.home, self.bound, self.strict = t, home, bound, strict
        self.zero = is_zero(t.operation)
        self.spots: list[Spot] = []
        self._numbers: dict[Spot, int] = {}
        self._brought: dict[object, list[tuple[float, int]]] = {}
        self._shorts: dict[tuple[int, int], float] = {}
        self._moves: dict[tuple[Sharding, Sharding], tuple[float, tuple[Sharding, ...]]] = {}

    def number(self, spot: Spot) -> int:
        """The number of a spot, without what is at hand for nothing."""
        held = set(spot.held)
        for h in spot.held:
            if h.region is not None and Held(h.sharding, None) in held:
                held.discard(h)
        for h in tuple(held):
            others = (x for x in held if x != h and x.region in (None, h.region))
            if any(self.move(x.sharding, h.sharding)[0] == 0 for x in others):
                held.discard(h)
        spot = Spot(frozenset(held), spot.free, spot.laid)
        if spot not in self._numbers:
            self._numbers[spot] = len(self.spots)
            self.spots.append(spot)
        return self._numbers[spot]

    def made(self, sharding: Sharding, region: str | None) -> int:
        """The number of the spot of a value as its operation made it."""
        return self.number(Spot(frozenset([self._held(sharding, region)]), False, self._laid(sharding)))

    def free(self) -> int:
        """The number of the spot of a value that is made wherever it is wanted."""
        return self.number(Spot(free=True))

    def move(self, source: Sharding, target: Sharding) -> tuple[float, tuple[Sharding, ...]]:
        """Bytes of a reshard, and what it leaves on the way: the value with all sums taken."""
        found = self._moves.get((source, target))
        if found is None:
            found = self._moves[source, target] = self._move(source, target)
        return found

    def _move(self, source: Sharding, target: Sharding) -> tuple[float, tuple[Sharding, ...]]:
        if not set(target.pending) <= set(source.pending):
            return INFINITE, ()
        plan = reshard(source, target, self.t.dtype.itemsize)
        summed = [s.after for s in plan.steps if s.before.pending and not s.after.pending]
        return float(plan.sent_bytes), tuple(s for s in summed if s != target)

    def bring(self, number: int, wanted: Sharding, region: str) -> list[tuple[float, int]]:
        """Ways to have it at `wanted` in a region: bytes and new spot. Straight, or by way of its home."""
        key = (number, wanted, region)
        found = self._brought.get(key)
        if found is None:
            found = self._brought[key] = self._bring(self.spots[number], number, wanted, region)
        return found

    def _bring(self, spot: Spot, number: int, wanted: Sharding, region: str) -> list[tuple[float, int]]:
        if spot.free:
            return [(0.0, number)] if not wanted.pending or self.zero else []
        cost, added = self._straight(spot.held, wanted, region)
        if cost == INFINITE:
            return []
        found = [(cost, self._with(spot, added, wanted))]
        if cost > 0 and wanted != self.home:
            to_home, first = self._straight(spot.held, self.home, region)
            onward, then = self._straight(spot.held | first, wanted, region)
            found.append((to_home + onward, self._with(spot, first | then, wanted)))
        return found

    def _with(self, spot: Spot, added: frozenset[Held], wanted: Sharding) -> int:
        return self.number(Spot(spot.held | added, False, spot.laid | self._laid(wanted)))

    def _straight(self, held: frozenset[Held], wanted: Sharding, region: str) -> tuple[float, frozenset[Held]]:
        best: tuple[float, int, frozenset[Held]] = (INFINITE, 0, frozenset())
        for h in sorted(held, key=str):
            for kept in self._serving(h, wanted, region):
                here = self._held(wanted, region)
                if kept is None:
                    cost, summed = self.move(h.sharding, wanted)
                    added = [here, *(self._held(s, h.region or region) for s in summed)]
                else:
                    (first, early), (then, late) = self.move(h.sharding, kept), self.move(kept, wanted)
                    cost = first + then
                    added = [Held(kept, None), here]
                    added += [self._held(s, h.region) for s in early] + [self._held(s, region) for s in late]
                if (cost, -len(added)) < best[:2]:
                    best = (cost, -len(added), frozenset(added))
        return best[0], best[2]

    def _serving(self, h: Held, wanted: Sharding, region: str) -> Iterator[Sharding | None]:
        """How `h` serves a region: itself (None), or by what of it is kept, which must be no larger than the home."""
        if h.region in (None, region) or self._small(wanted):
            yield None
            return
        yield self.home
        own = [entry + tuple(a for a in at_home if a not in h.sharding.split_axes)
               for entry, at_home in zip(h.sharding.axes, self.home.axes, strict=True)]  # fmt: skip
        waiting = h.sharding.pending_axes
        if not any(a in waiting for entry in own for a in entry) and all(
            d.size % self.home.mesh.group_size(entry) == 0 for d, entry in zip(self.t.shape, own, strict=True)
        ):
            cut = Sharding(self.t.shape, self.home.mesh, own, h.sharding.pending)
            if self._small(cut):
                yield cut

    def _small(self, s: Sharding) -> bool:
        return s.local_size <= self.home.local_size

    def _held(self, s: Sharding, region: str | None) -> Held:
        return Held(s, None if self._small(s) else region)

    def _laid(self, s: Sharding) -> frozenset[tuple[str, str]]:
        if not self.strict:
            return frozenset()
        return frozenset((d.name, a) for d, entry in zip(s.shape, s.axes, strict=True) for a in entry)

    def close(self, number: int) -> float:
        """Bytes to end with it: to bring it home if it is bound there."""
        spot = self.spots[number]
        if not self.bound or spot.free:
            return 0.0
        return min(self.move(h.sharding, self.home)[0] for h in spot.held)

    def short(self, a: int, b: int) -> float:
        """Bytes that surely suffice to have at spot `a` all that is at hand at `b`."""
        if a == b:
            return 0.0
        found = self._shorts.get((a, b))
        if found is None:
            found = self._shorts[a, b] = self._short(self.spots[a], self.spots[b])
        return found

    def _short(self, a: Spot, b: Spot) -> float:
        if not b.laid <= a.laid or (b.free and not a.free):
            return INFINITE
        if a.free:
            return 0.0
        have, total = a.held, 0.0
        for h in sorted(b.held, key=lambda h: (-len(h.sharding.pending), -h.sharding.local_size)):
            if h.region is None:
                total += min(self.move(x.sharding, h.sharding)[0] for x in have)
            else:
                total += self._straight(have, h.sharding, h.region)[0]
            if total == INFINITE:
                break
            have = have | {h}
        return total


# ---------------------------------------------------------------- ways to run one operation


class Way(NamedTuple):
    """One assignment: per operand the shardings of which any serves, what comes out, and what it costs."""

    axes: tuple[tuple[str, Axes], ...]
    wants: tuple[tuple[Sharding, ...], ...]
    out: Sharding
    bytes: float  # sent inside the operation
    work: Work
    needs: tuple[frozenset[Laid], ...]  # of each axis that no home lays on its dim, who may do so


class Done(NamedTuple):
    """One way taken from given spots of the operands: bytes, work, their new spots (-1: gone), that of the result."""

    bytes: float
    work: float
    after: tuple[int, ...]
    out: int
    ways: tuple[Way, ...]


def subsets(items: Sequence[str]) -> list[Axes]:
    """All subsets, the empty one first."""
    return [c for n in range(len(items) + 1) for c in combinations(items, n)]


def passes(signature: Signature, waiting: Sequence[Sequence[str]]) -> Iterator[tuple[Axes, ...]]:
    """Which pending axes of the operands may go through."""
    linear, count = signature.linear, len(waiting)
    nothing: tuple[Axes, ...] = ((),) * count
    if linear.together:
        given = [set(waiting[i]) for i in linear.operands]
        common = set.union(*given) if linear.terms else set.intersection(*given)
        for chosen in subsets(sorted(common)):
            yield tuple(chosen if i in linear.operands else () for i in range(count))
        return
    inputs = signature.op.inputs
    alone = [i for i in linear.operands if sum(x is inputs[i] for x in inputs) == 1]
    for taken in product(*(subsets(waiting[i]) for i in alone)):
        axes = [a for t in taken for a in t]
        if len(axes) == len(set(axes)):
            passed = list(nothing)
            for i, t in zip(alone, taken, strict=True):
                passed[i] = t
            yield tuple(passed)


@dataclass(eq=False)
class Search:
    """The search over one program under one mesh and layout.

    Args:
      simple, homes: the program's live operations, and where the rules lay their values.
      ends: what is fetched.
      flops_per_byte: the price of work; None: work has no price but a limit.
      strict: a dim takes an axis only from where a value really was (else from where it might have been).
    """

    simple: Simplified
    homes: Homes
    ends: frozenset[Tensor]
    flops_per_byte: float | None = 1.0
    strict: bool = False
    most: float = INFINITE  # cost above which nobody is interested
    most_work: float = INFINITE
    max_states: int = MAX_STATES
    max_seconds: float = MAX_SECONDS
    signatures: Signatures = field(default_factory=Signatures)
    states: int = 0  # gone through

    def __post_init__(self) -> None:
        self.at: dict[Tensor, Whereabouts] = {}
        self.laid: dict[Tensor, dict[str, set[str]]] = {}  # per dim the axes that it may be split over
        self.waiting: dict[Tensor, set[str]] = {}  # axes over which it may be a pending sum
        self.last: dict[Tensor, Operation] = {}
        self._ways: dict[Operation, list[Way]] = {}
        self._groups: dict[Operation, dict[tuple[int, ...], list[Way]]] = {}
        homes = [self.homes.of(y) for op in self.simple.operations for y in op.outputs]
        self.orders = dict.fromkeys(entry for s in homes for entry in s.axes if len(entry) > 1)
        for op in self.simple.operations:
            for x in self.simple.inputs[op]:
                self.last[x] = op
            if op.kind.kind is not Kind.COMMIT:
                self._prepare(op)

    # ------------------------------------------------------------ what does not depend on states

    def _prepare(self, op: Operation) -> None:
        (y,) = op.outputs
        home = self.homes.of(y)
        bound = y in self.ends or y in self.simple.graph.gradient_of
        self.at[y] = Whereabouts(y, home, bound, self.strict)
        self.laid[y] = {d.name: set(home.of(d.name)) for d in y.shape}
        self.waiting[y] = set()
        if op.kind.kind in RESIDENT:
            return
        xs = self.simple.inputs[op]
        signature = self.signatures.of(op)
        able: dict[str, set[str]] = {}
        for f in signature.factors:
            if f.role is Role.WHOLE:
                continue
            dims = [(x, d) for x, d in zip(xs, f.operands, strict=True) if d is not None]
            able[f.name] = set().union(*(self.laid[x][d] for x, d in dims))
            if f.outputs[0] is not None:
                able[f.name] |= self.laid[y][f.outputs[0]]
                self.laid[y][f.outputs[0]] |= able[f.name]
            for x, d in dims:
                self.laid[x][d] |= able[f.name]
        self._ways[op] = list(self._ways_of(op, signature, able, range(len(xs))))
        for way in self._ways[op]:
            self.waiting[y] |= {a for a, kind in way.out.pending if kind == "sum"}
        if is_zero(op):
            self.waiting[y] |= set(home.mesh.axes)
        if signature.linear.terms and len(xs) > 2:
            groups = {g for n in range(2, len(xs)) for g in combinations(range(len(xs)), n)}
            self._groups[op] = {g: list(self._ways_of(op, signature, able, g)) for g in sorted(groups)}

    def _ways_of(
        self, op: Operation, signature: Signature, able: dict[str, set[str]], some: Sequence[int]
    ) -> Iterator[Way]:
        """Every assignment; of a sum, over some of its operands alone."""
        xs, home = self.simple.inputs[op], self.homes.of(op.output)
        waiting = [sorted(self.waiting[x]) for x in xs]
        if signature.linear.terms:
            waiting = [w if i in some else [] for i, w in enumerate(waiting)]
        for passed in dict.fromkeys(passes(signature, waiting)):
            busy = {a for p in passed for a in p}
            places = [[None, *(f for f, axes in able.items() if a in axes and a not in busy)] for a in home.mesh.axes]
            for targets in product(*places):
                given = {f: [a for a, to in zip(home.mesh.axes, targets, strict=True) if to == f] for f in able}
                options = [self._ordered(entry) for entry in given.values()]
                for entries in product(*options):
                    axes = {f: entry for f, entry in zip(given, entries, strict=True) if entry}
                    way = self._way(op, signature, axes, passed, some)
                    if way is not None:
                        yield way

    def _ordered(self, axes: Sequence[str]) -> list[Axes]:
        """The orders in which some dim has these axes at home, or that of the mesh."""
        if len(axes) < 2:
            return [tuple(axes)]
        known = [tuple(a for a in o if a in axes) for o in self.orders if set(axes) <= set(o)]
        return list(dict.fromkeys([tuple(axes), *(p for p in permutations(axes) if p in known)]))

    def _way(
        self, op: Operation, signature: Signature, axes: dict[str, Axes], passed: tuple[Axes, ...], some: Sequence[int]
    ) -> Way | None:
        mesh = self.homes.mesh
        made = signature.under(mesh, axes, passed)
        cut = signature.cut(tuple(mesh.group_size(axes.get(n, ())) for n in signature.names))
        if made is None or cut is None:
            return None
        work, wants = cut.work, tuple((s,) for s in made.operands)
        if signature.linear.terms:
            wants = tuple(self._masked(s) if i in some else () for i, s in enumerate(made.operands))
            if self.simple.inputs[op] and len(some) < len(wants):
                types = tuple(TensorType(made.operands[i].local_shape, op.inputs[i].dtype) for i in some)
                work = op.kind.work(types, TensorType(made.out.local_shape, op.output.dtype), op.attrs)
        needs = []
        for f in signature.factors:
            for a in axes.get(f.name, ()):
                dims = [(i, d) for i, d in enumerate(f.operands) if d is not None]
                xs = self.simple.inputs[op]
                name = f.outputs[0]
                if name is not None and a in self.homes.of(op.output).of(name):
                    continue
                if any(a in self.homes.of(xs[i]).of(d) for i, d in dims):
                    continue
                needs.append(frozenset((i, d, a) for i, d in dims))
        return Way(tuple(axes.items()), wants, made.out, float(busiest_bytes((e, 1) for e in made.exchanges)),
                   work, tuple(needs))  # fmt: skip

    def _masked(self, s: Sharding) -> tuple[Sharding, ...]:
        """What serves as a term that is pending like `s`: over any fewer axes too, counted on one device of the rest."""
        return tuple(s.with_pending([p for p in s.pending if p[0] in kept]) for kept in subsets(s.pending_axes)[::-1])

    def remade(self, op: Operation) -> bool:
        """Whether an operation's result is made anew wherever it is wanted: such work counts for nothing."""
        return op.kind.remade and all(not x.shape for x in self.simple.inputs[op])

    def price(self, op: Operation, work: Work) -> float:
        """Of work, in lane operations and flops alike."""
        return 0.0 if self.remade(op) else float(work.mxu_flops + work.vpu_ops)

    def least_work(self, op: Operation) -> float:
        """The least work an operation can do."""
        ways = self._ways.get(op, [])
        return min((self.price(op, w.work) for w in ways), default=0.0)

    # ------------------------------------------------------------ what follows from one state

    def _weighed(self, op: Operation, sent: float, work: Work) -> tuple[float, float]:
        """Cost, and work where it has a limit instead of a price."""
        price = self.price(op, work)
        return (sent, price) if self.flops_per_byte is None else (sent + price / self.flops_per_byte, 0.0)

    def done(self, op: Operation, spots: tuple[int, ...]) -> list[Done]:
        """Every way to run an operation whose operands are at `spots` that no other is as good as."""
        found: list[Done] = []
        xs = tuple(dict.fromkeys(self.simple.inputs[op]))
        if op.kind.kind is Kind.COMMIT:
            home = self.homes.of(self.simple.graph.variables[op.attrs["variable"]].output)
            (x,) = xs
            for sent, to in self.at[x].bring(spots[0], home, UPDATE):
                found += self._ended(op, xs, sent, 0.0, (to,), -1, ())
            return self._best(op, xs, found)
        y = op.output
        where = self.at[y]
        if self.remade(op):
            whole = [Sharding.replicated(x.shape, self.homes.mesh) for x in self.simple.inputs[op]]
            for sent, after in self._brought(op, xs, spots, {i: (s,) for i, s in enumerate(whole)}):
                found += self._ended(op, xs, sent, 0.0, after, where.free(), ())
        for way in self._ways[op]:
            if self._allowed(op, xs, spots, way):
                for sent, after in self._brought(op, xs, spots, dict(enumerate(way.wants))):
                    found += self._made(op, xs, sent + way.bytes, way.work, after, way.out, (way,))
        for blocks in self._partitions(op):
            found += self._grouped(op, xs, spots, blocks)
        return self._best(op, xs, found)

    def _allowed(self, op: Operation, xs: Sequence[Tensor], spots: Sequence[int], way: Way) -> bool:
        if not self.strict:
            return True
        inputs = self.simple.inputs[op]
        laid = [self.at[x].spots[spots[xs.index(x)]].laid for x in inputs]
        return all(any((d, a) in laid[i] for i, d, a in need) for need in way.needs)

    def _brought(
        self, op: Operation, xs: Sequence[Tensor], spots: tuple[int, ...], wants: dict[int, tuple[Sharding, ...]]
    ) -> list[tuple[float, tuple[int, ...]]]:
        """Bytes and spots after bringing each operand to one of the shardings wanted of it."""
        partial = {spots: 0.0}
        for i, alternatives in wants.items():
            if not alternatives:
                continue
            n = xs.index(self.simple.inputs[op][i])
            after: dict[tuple[int, ...], float] = {}
            for at, cost in partial.items():
                for wanted in alternatives:
                    for more, to in self.at[xs[n]].bring(at[n], wanted, op.region):
                        key = (*at[:n], to, *at[n + 1 :])
                        after[key] = min(after.get(key, INFINITE), cost + more)
            partial = after
        return [(cost, at) for at, cost in partial.items()]

    def _made(
        self, op: Operation, xs: Sequence[Tensor], sent: float, work: Work | float, after: tuple[int, ...],
        out: Sharding, ways: tuple[Way, ...],
    ) -> list[Done]:  # fmt: skip
        where = self.at[op.output]
        if op.kind.home is Home.GIVEN:
            sent, out = sent + where.move(out, where.home)[0], where.home
        price = self.price(op, work) if isinstance(work, Work) else work
        return self._ended(op, xs, sent, price, after, where.made(out, op.region), ways)

    def _ended(
        self, op: Operation, xs: Sequence[Tensor], sent: float, work: float, after: tuple[int, ...], out: int,
        ways: tuple[Way, ...],
    ) -> list[Done]:  # fmt: skip
        """With what nobody needs any more ended."""
        spots = list(after)
        for n, x in enumerate(xs):
            if self.last[x] is op:
                sent += self.at[x].close(spots[n])
                spots[n] = -1
        if out >= 0 and op.output not in self.last:
            sent += self.at[op.output].close(out)
            out = -1
        return [Done(sent, work, tuple(spots), out, ways)]

    def cost(self, d: Done) -> tuple[float, float]:
        """What is to be least, and what has a limit."""
        return (d.bytes, d.work) if self.flops_per_byte is None else (d.bytes + d.work / self.flops_per_byte, 0.0)

    def _best(self, op: Operation, xs: Sequence[Tensor], found: list[Done]) -> list[Done]:
        kept: list[tuple[float, float, Done]] = []
        for d in sorted(found, key=self.cost):
            cost, work = self.cost(d)
            if not any(w <= work + EPS and self._as_good(op, xs, cost - c, e, d) for c, w, e in kept):
                kept.append((cost, work, d))
        return [d for _, _, d in kept]

    def _as_good(self, op: Operation, xs: Sequence[Tensor], left: float, a: Done, b: Done) -> bool:
        """Whether what `b` costs more buys at `a` all that `b` has."""
        if a.out != b.out:
            left -= self.at[op.output].short(a.out, b.out)
        for x, i, j in zip(xs, a.after, b.after, strict=True):
            if left < -EPS:
                return False
            if i != j:
                left -= self.at[x].short(i, j)
        return left >= -EPS

    # ------------------------------------------------------------ sums of which some terms are added first

    def _partitions(self, op: Operation) -> list[tuple[tuple[int, ...], ...]]:
        """The ways to add some of its terms first."""
        if op not in self._groups:
            return []
        count = len(op.inputs)
        found: list[tuple[tuple[int, ...], ...]] = [()]
        for i in range(count):
            found = [
                (*p[:n], (*p[n], i), *p[n + 1 :]) if n < len(p) else (*p, (i,))
                for p in found
                for n in range(len(p) + 1)
            ]
        return [p for p in found if 1 < len(p) < count]

    def _grouped(
        self, op: Operation, xs: Sequence[Tensor], spots: tuple[int, ...], blocks: tuple[tuple[int, ...], ...]
    ) -> list[Done]:
        where = self.at[op.output]
        partial: list[tuple[float, float, tuple[int, ...], tuple[Way, ...]]] = [(0.0, 0.0, spots, ())]
        for block in (b for b in blocks if len(b) > 1):
            partial = [
                (sent + more, work + self.price(op, way.work), after, (*ways, way))
                for sent, work, at, ways in partial
                for way in self._groups[op][block]
                if self._allowed(op, xs, spots, way)
                for more, after in self._brought(op, xs, at, {i: way.wants[i] for i in block})
            ]
            partial = self._best_totals(op, xs, partial)
        singles = [b[0] for b in blocks if len(b) == 1]
        found = []
        for way in self._ways[op]:
            if not self._allowed(op, xs, spots, way):
                continue
            wanted = self._masked(way.out)
            types = [TensorType(way.out.local_shape, op.output.dtype)] * len(blocks)
            last = self.price(op, op.kind.work(tuple(types), types[0], op.attrs))
            for sent, work, at, ways in partial:
                total = sent + sum(min(where.move(w.out, s)[0] for s in wanted) for w in ways)
                if total < INFINITE:
                    for more, after in self._brought(op, xs, at, {i: way.wants[i] for i in singles}):
                        found += self._made(op, xs, total + more, work + last, after, way.out, (*ways, way))
        return found

    def _best_totals(
        self, op: Operation, xs: Sequence[Tensor], found: list[tuple[float, float, tuple[int, ...], tuple[Way, ...]]]
    ) -> list[tuple[float, float, tuple[int, ...], tuple[Way, ...]]]:
        where = self.at[op.output]
        kept: list[tuple[tuple[float, float], tuple[float, float, tuple[int, ...], tuple[Way, ...]]]] = []
        ranked = [(self.cost(Done(f[0], f[1], (), -1, ())), f) for f in found]
        for (cost, work), f in sorted(ranked, key=lambda pair: pair[0]):
            for (c, w), k in kept:
                left = cost - c + EPS - sum(where.move(a.out, b.out)[0] for a, b in zip(k[3], f[3], strict=True))
                gone = (x for x in zip(xs, k[2], f[2], strict=True) if self.last[x[0]] is not op or self.at[x[0]].bound)
                if w <= work + EPS and left - sum(self.at[x].short(i, j) for x, i, j in gone) >= 0:
                    break
            else:
                kept.append(((cost, work), f))
        return [f for _, f in kept]

    # ------------------------------------------------------------ all states

    def least(self) -> Optimum | None:
        """The cheapest way through the program; None if none costs as little as is asked for. Raises: TooMany."""
        operations = self.simple.operations
        live: list[Tensor] = []
        rows = np.zeros((1, 0), np.int32)
        cost, work = np.zeros(1), np.zeros(1)
        layers: list[tuple[Operation, np.ndarray, np.ndarray, list[Done]]] = []
        deadline = perf_counter() + self.max_seconds
        rest = sum(self.least_work(op) for op in operations)  # that is still to be done at least
        for op in operations:
            if op.kind.kind in RESIDENT:
                if op.output in self.last:
                    where = self.at[op.output]
                    live.append(op.output)
                    rows = np.column_stack([rows, np.full(len(rows), where.made(where.home, None), np.int32)])
                continue
            rest -= self.least_work(op)
            xs = list(dict.fromkeys(self.simple.inputs[op]))
            columns = [live.index(x) for x in xs]
            every, which = np.unique(rows[:, columns], axis=0, return_inverse=True)
            which = which.reshape(-1)
            steps: list[Done] = []
            parents, taken = [], []
            ready = self._room(cost.min(initial=INFINITE), work.min(initial=INFINITE), rest)
            for n, spots in enumerate(every):
                able = [d for d in self.done(op, tuple(int(s) for s in spots)) if self._fits(d, ready)]
                mine = np.flatnonzero(which == n)
                numbers = np.arange(len(steps), len(steps) + len(able))
                parents.append(np.tile(mine, len(able)))
                taken.append(np.repeat(numbers, len(mine)))
                steps += able
                if sum(map(len, parents)) > MAX_NEW_STATES or perf_counter() > deadline:
                    raise TooMany
            if not steps:
                return None
            parent, step = np.concatenate(parents), np.concatenate(taken)
            costs = np.array([self.cost(d) for d in steps])
            after = np.array([(*d.after, d.out) for d in steps], np.int32)
            cost, work = cost[parent] + costs[step, 0], work[parent] + costs[step, 1]
            room = self._room(0.0, 0.0, rest)
            fits = (cost <= room[0] + EPS) & (work <= room[1] + EPS)
            parent, step, cost, work = parent[fits], step[fits], cost[fits], work[fits]
            rows = np.column_stack([rows[parent], np.zeros(len(parent), np.int32)])
            rows[:, [*columns, -1]] = after[step]
            live.append(op.outputs[0] if op.outputs else op.inputs[0])
            stays = [n for n, x in enumerate(live) if n < len(live) - 1 and self.last[x] is not op]
            if op.outputs and op.output in self.last:
                stays.append(len(live) - 1)
            live, rows = [live[n] for n in stays], rows[:, stays]
            kept = self._undominated(live, rows, cost, work)
            if not len(kept):
                return None
            rows, cost, work = rows[kept], cost[kept], work[kept]
            layers.append((op, parent[kept], step[kept], steps))
            self.states += len(kept)
            if len(kept) > self.max_states:
                raise TooMany
        return self._traced(layers, int(np.lexsort((work, cost))[0]))

    def _room(self, cost: float, work: float, rest: float) -> tuple[float, float]:
        """What may still be spent now."""
        if self.flops_per_byte is None:
            return self.most - cost, self.most_work - rest - work
        return self.most - rest / self.flops_per_byte - cost, INFINITE

    def _fits(self, d: Done, room: tuple[float, float]) -> bool:
        cost, work = self.cost(d)
        return cost <= room[0] + EPS and work <= room[1] + EPS

    def _undominated(self, live: list[Tensor], rows: np.ndarray, cost: np.ndarray, work: np.ndarray) -> np.ndarray:
        """The numbers of the states that no other is as good as, cheapest first."""
        order = np.lexsort((work, cost))
        if rows.shape[1]:
            both = np.column_stack([rows[order], np.round(work[order]).astype(np.int64)])
            _, first = np.unique(both, axis=0, return_index=True)
            order = order[np.sort(first)]
        else:
            order = order[np.flatnonzero(work[order] < np.minimum.accumulate([INFINITE, *work[order][:-1]]) - EPS)]
        rows, cost, work = rows[order], cost[order], work[order]
        shorts = []
        for n, x in enumerate(live):
            numbers, rows[:, n] = np.unique(rows[:, n], return_inverse=True)
            if len(numbers) > 1:
                where = self.at[x]
                shorts.append((n, np.array([[where.short(int(a), int(b)) for b in numbers] for a in numbers])))
        alive = np.ones(len(rows), bool)
        begin = 0
        for _ in range(0, PRUNERS, 32):
            some = begin + np.flatnonzero(alive[begin:])[:32]
            if not len(some):
                break
            others = np.flatnonzero(alive)
            others = others[others > some[0]]
            total = np.broadcast_to(cost[some][:, None], (len(some), len(others))).copy()
            for n, table in shorts:
                total += table[rows[some, n]][:, rows[others, n]]
            worse = (total <= cost[others] + EPS) & (work[some][:, None] <= work[others] + EPS)
            worse &= others > some[:, None]
            alive[others[worse.any(0)]] = False
            begin = int(some[-1]) + 1
        return order[alive]

    def _traced(self, layers: list[tuple[Operation, np.ndarray, np.ndarray, list[Done]]], at: int) -> Optimum:
        path = []
        for op, parents, taken, steps in reversed(layers):
            path.append((op, steps[taken[at]]))
            at = int(parents[at])
        path.reverse()
        sent, work = sum(d.bytes for _, d in path), sum(d.work for _, d in path)
        return Optimum(sent, work, tuple(path), self.states)


@dataclass(frozen=True)
class Optimum:
    """The cheapest way through a program: bytes and work of one device, and how each operation is run."""

    bytes: float
    work: float
    path: tuple[tuple[Operation, Done], ...]
    states: int

    @property
    def cost(self) -> float:
        """Bytes and work, one operation a byte."""
        return self.bytes + self.work

    def obeys(self, search: Search) -> bool:
        """Whether no axis is on a dim on which no value that was really there had it."""
        laid: dict[Tensor, set[tuple[str, str]]] = {}
        for op, done in self.path:
            xs = search.simple.inputs[op]
            for way in done.ways:
                if not all(any((d, a) in laid.get(xs[i], ()) for i, d, a in need) for need in way.needs):
                    return False
            for way in done.ways:
                shardings = [(x, wants[0]) for x, wants in zip(xs, way.wants, strict=True) if wants]
                for t, s in (*shardings, (op.output, way.out)):
                    laid.setdefault(t, set()).update(
                        (d.name, a) for d, e in zip(t.shape, s.axes, strict=True) for a in e
                    )
        return True

    def __str__(self) -> str:
        lines = []
        for op, d in self.path:
            for way in d.ways:
                axes = " ".join(f"{f}@{'+'.join(entry)}" for f, entry in way.axes) or "-"
                lines.append(
                    f"{op.name} {op.kind.name} [{op.region}] {axes} -> {way.out}  {d.bytes:g} B, work {d.work:g}"
                )
        return "\n".join([f"{self.bytes:g} bytes, work {self.work:g}, {self.states} states", *lines])


# ---------------------------------------------------------------- against the library


@dataclass(frozen=True)
class Comparison:
    """What the library's program costs, and the least: by cost, and by bytes with no more work. None: given up."""

    sent: float
    work: float
    least: Optimum | None
    fewest: Optimum | None
    beaten: bool = False  # the library does what the search does not know of

    @property
    def known(self) -> bool:
        """Whether the search came to an end."""
        return self.least is not None and self.fewest is not None

    @property
    def least_bytes(self) -> float:
        """The fewest bytes with no more work than the library does."""
        assert self.fewest is not None
        return self.fewest.bytes

    @property
    def bytes_ratio(self) -> float:
        """The library's bytes over the fewest."""
        return (
            1.0
            if self.sent <= self.least_bytes + EPS
            else self.sent / self.least_bytes
            if self.least_bytes
            else INFINITE
        )

    @property
    def cost_ratio(self) -> float:
        """The library's cost over the least."""
        assert self.least is not None
        return (self.sent + self.work) / self.least.cost if self.least.cost else 1.0


def compare(outputs: Mapping[str, Tensor], updates: Sequence[Operation], mesh: str, layout: str) -> Comparison:
    """Lower a program and search for its optimum."""
    program = lower(outputs, updates, mesh, layout)
    found = searches(outputs, updates, mesh, layout)
    search = found()
    sent = float(program.sent_bytes)
    done = [i for i in program.instructions if isinstance(i, Compute)]
    work = sum(search.price(i.operation, local_work(program, i)) for i in done)
    try:
        least = optimum(found, most=sent + work)
        if least is None:
            return Comparison(sent, work, None, None, beaten=True)
        if least.cost > sent + work - EPS:
            return Comparison(sent, work, least, least)  # fewer bytes for as much work would cost less
        most = least.bytes if least.work <= work + EPS else sent
        fewest = optimum(found, flops_per_byte=None, most=most, most_work=work)
    except TooMany:
        return Comparison(sent, work, None, None)
    return Comparison(sent, work, least, fewest, beaten=fewest is None)


def searches(
    outputs: Mapping[str, Tensor], updates: Sequence[Operation], mesh: str, layout: str
) -> Callable[..., Search]:
    """Makes searches over a program."""
    graph = next(iter(outputs.values())).graph if outputs else updates[0].graph
    simple = simplify(graph, outputs.values(), updates)
    homes = Homes(graph, Mesh(mesh), LayoutRules(layout))
    return partial(Search, simple, homes, frozenset(simple.of(t) for t in outputs.values()))


def optimum(search: Callable[..., Search], **limits: float | None) -> Optimum | None:
    """The least that obeys rule 2 to the letter."""
    one = search(**limits)
    found = one.least()
    if found is None or found.obeys(one):
        return found
    return search(strict=True, **limits).least()
