"""Which mesh axis splits which factor of one operation (rule 2 of the lowering).

Each axis goes to one of the factors it already splits somewhere, or to none; all combinations are enumerated. Each
costs the bytes of bringing its operands there, plus the bytes of bringing its result home, plus the work it
duplicates. The choice is greedy, operation by operation, and so not globally optimal. It looks ahead as far as an
earlier sweep over the program tells it (`meshlib.lowering.places.Foresight`): what later operations bring about anyway
costs nothing, and a sum costs nothing where others like it are reduced anyway. A search over layouts does the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, combinations, product
from math import prod
from typing import NamedTuple, TypeAlias

from layouts import Sharding, reshard
from layouts.sharding import laid
from meshlib.graph import Tensor
from meshlib.operation import Factor, Linear, Role
from meshlib.program.exchange import Exchange, busiest_bytes
from meshlib.program.signature import Signature

Axes: TypeAlias = tuple[str, ...]
Places: TypeAlias = dict[str, list[Factor | None]]  # per axis the factors that may take it, and None


@dataclass(frozen=True)
class Balance:
    """How much duplicated work is worth one byte sent per device.

    Nominal: one operation a byte, far below a chip's real balance (TPU v3: about 800 MXU flops per ICI byte). At the
    real one a step of a small batch would gather its activations and compute whole gradients on every core: cheaper
    on paper, but not what somebody who splits the batch means. So work that a layout divides stays divided unless
    duplicating it is next to free.

    `stationary` are mesh axes over which variables never move: activations come to the weights, as in Megatron, even
    where gathering a weight would send less.
    """

    mxu_flops_per_byte: float = 1.0
    vpu_ops_per_byte: float = 1.0
    stationary: tuple[str, ...] = ()


@dataclass(frozen=True)
class Choice:
    """How one operation runs: the axes of each factor, what each operand must be, what comes out."""

    axes: dict[str, Axes]  # factor -> axes, major first
    operands: tuple[Sharding, ...]
    out: Sharding
    regroup: bool  # sum equally pending operands first, reduce each sum once
    exchanges: tuple[Exchange, ...]  # what moves inside the operation

    @property
    def assignment(self) -> tuple[tuple[str, str], ...]:
        """(axis, factor) pairs, major first within a factor."""
        return tuple((a, f) for f, axes in self.axes.items() for a in axes)


# A sum that can still meet others before it is reduced is worth waiting for: they would share the reduction. This
# only decides between points of equal bytes; otherwise the earliest of them is taken.
_SHARED = 0.999


class Point(NamedTuple):
    """A place further down the linear chain of single uses of a value, where a pending sum could be reduced."""

    home: Sharding
    itemsize: int
    shared: bool  # behind a sum with other operands
    joined: frozenset[tuple[tuple[str, str], ...]] = frozenset()  # what others in this sum are pending over anyway


class Operand(NamedTuple):
    """One operand as the chooser sees it: the shardings it is to be had in, at what cost a cut elsewhere."""

    tensor: Tensor
    instances: tuple[Sharding, ...]
    free: bool  # a source that is made anew wherever it is needed
    coming: tuple[Sharding, ...] = ()  # those that operations further on bring about anyway
    shared: bool = False  # has other users in this region
    held: Axes = ()  # axes over which it must not move

    def cost(self, wanted: Sharding) -> tuple[float, int]:
        """Bytes and collectives to bring it to `wanted` from where it is nearest; infinite where it must not move."""
        if self.free:
            return 0, 0
        if self.held and any(
            a in own and a not in to
            for s in self.instances
            for own, to in zip(s.axes, wanted.axes, strict=True)
            for a in self.held
        ):
            return float("inf"), 0
        return min(route_cost(s, wanted, self.tensor.dtype.itemsize) for s in (*self.instances, *self.coming))

    @property
    def largest(self) -> int:
        """Elements of the largest block it is to be had in: what a larger one has to grow from."""
        return max([s.local_size for s in (*self.instances, *self.coming)], default=0)

    @property
    def pending(self) -> Axes:
        """Axes over which the value is a pending sum wherever it exists."""
        return self.instances[0].pending_axes if self.instances and self.instances[0].pending else ()


@lru_cache(maxsize=1 << 16)
def route_cost(source: Sharding, target: Sharding, itemsize: int) -> tuple[float, int]:
    """Bytes and collectives of a reshard; infinite where it is impossible."""
    if not set(target.pending) <= set(source.pending):
        return float("inf"), 0
    plan = reshard(source, target, itemsize)
    return plan.sent_bytes, plan.collectives


def choice_key(signature: Signature, operands: Sequence[Operand], home: Sharding, later: Sequence[Point]) -> object:
    """All that a choice depends on, the balance aside."""
    tensors = [x.tensor for x in operands]
    return (
        signature,
        tuple([(x.instances, x.free, x.coming, x.shared, x.held) for x in operands]),
        tuple([tensors.index(t) for t in tensors]),
        home,
        tuple(later),
    )


def choose(
    signature: Signature,
    operands: Sequence[Operand],
    home: Sharding,
    later: Sequence[Point],
    balance: Balance,
) -> Choice:
    """The cheapest assignment.

    `later` are the points further down the linear chain of single uses that starts at the result: a pending result
    may be reduced at any of them.
    """
    shared = any(x.shared for x in operands)
    itemsize = signature.op.output.dtype.itemsize
    best: tuple[float, int, int, int] | None = None
    chosen: Choice | None = None
    for c in sorted(_candidates(signature, operands, home, balance), key=lambda c: (c.at_least, c.order)):
        if best is not None and c.at_least > best[0]:
            break  # and so are all that follow
        made = signature.under(home.mesh, c.axes, c.passed)
        if made is None:
            continue
        sent, collectives = _operand_cost(operands, made.operands, c.regroup)
        inside = made.exchanges
        after, more = _home_cost(made.out, home, itemsize, later)
        total = c.work + sent + busiest_bytes((e, 1) for e in inside) + after
        # At equal cost a shared operand moves rather than the result: its other users may want it there too.
        rank = (total, collectives + len(inside) + more, more if shared else 0, c.order)
        if best is None or rank < best:
            best, chosen = rank, Choice(c.axes, made.operands, made.out, c.regroup, inside)
    assert chosen is not None  # the empty assignment is always there
    return chosen


def settled(signature: Signature, operands: Sequence[Operand], home: Sharding) -> Choice | None:
    """The choice where there is nothing to choose: all lies as one assignment wants it, and nothing moves.

    Each axis may go to that one factor or to none; without it a device does as much or more.
    """
    lie = [x.instances[0] for x in operands if len(x.instances) == 1]
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
    return Choice({name: split[name] for name in names}, tuple(lie), home, False, ())


class _Candidate(NamedTuple):
    """An assignment, with what it costs at least: its work, and the bytes by which blocks have to grow.

    Only gathering makes a block larger, and it sends just what the block grows by; so this bounds any reshard without
    searching for it, and most candidates are never priced.
    """

    axes: dict[str, Axes]
    passed: tuple[Axes, ...]
    regroup: bool
    work: float
    at_least: float
    order: int


def _candidates(
    signature: Signature, operands: Sequence[Operand], home: Sharding, balance: Balance
) -> Iterator[_Candidate]:
    places = _places(signature.factors, operands, home)
    sizes, itemsize = home.mesh.sizes_by_axis, signature.op.output.dtype.itemsize
    largest = [x.largest for x in operands]
    once = len({x.tensor for x in operands}) == len(operands)
    order = 0
    for passed, regroup in pass_options(signature, operands):
        busy = {a for p in passed for a in p}
        free = {a: places[a] for a in places if a not in busy}
        for split in _assignments(free, operands, home):
            order += 1
            waiting = [*busy, *(a for name in signature.reducing for a in split.get(name, ()))]
            counts = [prod([sizes[a] for a in split[n]]) if n in split else 1 for n in signature.names]
            blocks = signature.cut(tuple(counts))
            if blocks is None:
                continue
            done = blocks.work
            work = done.mxu_flops / balance.mxu_flops_per_byte + done.vpu_ops / balance.vpu_ops_per_byte
            pending = any(sizes[a] > 1 for a in waiting)
            growth = 0 if pending else max(0, home.local_size - blocks.out) * itemsize
            if not regroup:
                needs = zip(operands, blocks.operands, largest, strict=True)
                growing = [max(0, size - most) * x.tensor.dtype.itemsize for x, size, most in needs if not x.free]
                growth += sum(growing) if once else max(growing, default=0)
            yield _Candidate(split, passed, regroup, work, work + growth, order)


def _places(factors: Sequence[Factor], operands: Sequence[Operand], home: Sharding) -> Places:
    """Per axis, in mesh order, the factors it may split: those whose dim it splits in an operand or in the home.

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
            for s in x.instances:
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
            seen += [s.of(name) for s in x.instances]
    for order in seen:
        if wanted <= set(order):
            return tuple(a for a in order if a in wanted)
    return axes


def pass_options(signature: Signature, operands: Sequence[Operand]) -> Iterator[tuple[tuple[Axes, ...], bool]]:
    """Which pending axes of which operands may go through; the second value: whether to sum groups first.

    Reducing everything first is always an option and comes first, so that ties reduce as early as possible.
    """
    pending = [x.pending if x.instances and x.instances[0].pending[:1] else () for x in operands]
    sums = [tuple(a for a, kind in x.instances[0].pending if kind == "sum") if x.instances else () for x in operands]
    nothing: tuple[Axes, ...] = ((),) * len(operands)
    linear = signature.linear
    if linear.terms and len(operands) > 1 and len(set(pending)) > 1:
        yield nothing, True
        return
    yield nothing, False
    if any(sums):
        yield from ((p, False) for p in _passes(linear, sums, operands, nothing))


def _passes(
    linear: Linear, sums: Sequence[Axes], operands: Sequence[Operand], nothing: tuple[Axes, ...]
) -> Iterator[tuple[Axes, ...]]:
    if linear.together:
        common = [a for a in sums[linear.operands[0]] if all(a in sums[i] for i in linear.operands)]
        for subset in _subsets(common):
            yield tuple(subset if i in linear.operands else () for i in range(len(operands)))
        return
    alone = [i for i in linear.operands if sum(x.tensor is operands[i].tensor for x in operands) == 1]
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


def _operand_cost(operands: Sequence[Operand], wanted: Sequence[Sharding], regroup: bool) -> tuple[float, int]:
    """Bytes and collectives to bring all operands where they are wanted; a value wanted once is paid once."""
    needs = {(x.tensor, s): (x, s) for x, s in zip(operands, wanted, strict=True)}
    groups: set[Axes] = set()
    sent, collectives = 0.0, 0
    for x, s in needs.values():
        if regroup and x.pending:
            if x.pending in groups:
                continue  # its group is reduced once, for all members
            groups.add(x.pending)
        cost, count = x.cost(s)
        sent += cost
        collectives += count
    return sent, collectives


def _home_cost(out: Sharding, home: Sharding, itemsize: int, later: Sequence[Point]) -> tuple[float, int]:
    """Bytes to bring the result home; a pending one may wait for the cheapest point of its linear chain."""
    best = route_cost(out, home, itemsize)
    if out.pending and out.pending[0][1] == "sum":
        for point in later:
            arriving = as_pending(point.home, out)
            if arriving.pending in point.joined:
                return 0, 0  # added to the others before these are reduced
            sent, count = route_cost(arriving, point.home, point.itemsize)
            best = min(best, (sent * _SHARED if point.shared else sent, count))
    return best


@lru_cache(maxsize=1 << 14)
def as_pending(home: Sharding, source: Sharding) -> Sharding:
    """`home` as the value would arrive there if the pending axes of `source` were still to be summed."""
    waiting = set(source.pending_axes)
    axes = tuple(tuple(a for a in entry if a not in waiting) for entry in home.axes)
    return laid(home.shape, home.mesh, axes, source.pending)
