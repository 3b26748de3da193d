"""Cheapest way to materialise a value under a target sharding: reshard an existing copy, or recompute it.

What is made of nothing, or of something smaller (a mask of positions, a one-hot of labels, a cast of what is there), is
made again wherever that sends less than moving it: its price is that of bringing its operands there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import NamedTuple, TypeAlias

from layouts import Sharding, reshard, resharding
from layouts.resharding import at_least
from layouts.step_kinds import STEP_KINDS
from meshlib.core.opdef import Role
from meshlib.program.signature import Signature

Prices: TypeAlias = tuple[tuple[str, float], ...]  # per axis, of a byte sent along it; 1 for axes that have none
Price: TypeAlias = tuple[float, int]  # bytes and collectives
Path: TypeAlias = tuple[int, ...]  # (): the value itself; (n, ...): from its n-th operand

# Making something again is worth it nearly always: a lane operation takes a thousandth of the time of a byte sent.
BYTES_PER_OPERATION = 1e-3


class ValueSource(NamedTuple):
    """Where a value is to be had."""

    lies: tuple[Sharding, ...]
    itemsize: float
    prices: Prices = ()
    made: RepeatableOperation | None = None  # how it can be made again


class RepeatableOperation(NamedTuple):
    """An operation that may run again, and where its operands are to be had."""

    signature: Signature
    operands: tuple[ValueSource, ...]


class Materialisation(NamedTuple):
    """How a value comes to a place; `new` is where it and what it is made of lie besides afterwards.

    What is summed up or put in another order on the way is there for others.
    """

    cost: float
    collectives: int
    origin: int  # which of `lies` it comes from; -1: it is made again
    new: tuple[tuple[Path, Sharding], ...]


NOWHERE = Materialisation(float("inf"), 0, -1, ())


def obtain(source: ValueSource, wanted: Sharding) -> Materialisation:
    """The cheapest way to `wanted`.

    Ways that name an operation are remembered beside its signature, and gone with its graph; those of shardings alone
    are remembered for all graphs.
    """
    if source.made is None:
        return _moved(source, wanted)
    key, ways = (source, wanted), source.made.signature.ways
    route: Materialisation | None = ways.get(key)
    if route is None:
        route = ways[key] = _obtained(source, wanted)
    return route


def _obtained(source: ValueSource, wanted: Sharding) -> Materialisation:
    if wanted in source.lies:
        return Materialisation(0, 0, source.lies.index(wanted), ())
    best, n = _nearest(source, wanted)
    if source.made is not None and best[0] > 0:
        again = _made_again(source.made, wanted)
        if again is not NOWHERE and again.cost < best[0]:
            return again
    if n < 0:
        return NOWHERE
    ends, plan = (*source.lies, wanted), reshard(source.lies[n], wanted, source.itemsize)
    before_last = [t for t in plan.steps[:-1] if not t.after.pending]
    reached = [t.after for t in before_last if t.before.pending or STEP_KINDS[t.kind].rearranges]
    useful = [s for s in reached if s not in source.lies and not parks(s, ends)]
    return Materialisation(*best, n, tuple([((), s) for s in (*useful, wanted)]))


_moved = lru_cache(maxsize=1 << 14)(_obtained)


def _nearest(source: ValueSource, wanted: Sharding) -> tuple[Price, int]:
    """What it costs to move it to `wanted` from where that costs least, and which of `lies` this is; -1: none."""
    best: Price = float("inf"), 0
    nearest = -1
    for n, s in enumerate(source.lies):
        if can_become(s, wanted) and (nearest < 0 or _least_cost(source, s, wanted) <= best[0]):
            cost = between(s, wanted, source.itemsize, source.prices)
            if cost < best:
                best, nearest = cost, n
    return best, nearest


def between(here: Sharding, there: Sharding, itemsize: float, prices: Prices) -> Price:
    """What it costs to move a value from one place alone to another, and in how many collectives."""
    if not can_become(here, there):
        return float("inf"), 0
    if not prices:
        return resharding.price(here, there, itemsize)
    plan = reshard(here, there, itemsize)
    return sum([step.sent_bytes * axes_price(step.axes, prices) for step in plan.steps]), plan.collectives


def _least_cost(source: ValueSource, s: Sharding, wanted: Sharding) -> float:
    least = at_least(s, wanted) * source.itemsize
    return least * min([1.0, *[price for _, price in source.prices]]) if source.prices else least


def axes_price(axes: Iterable[str], prices: Prices) -> float:
    """Of a byte sent along these axes at once."""
    by_axis = dict(prices)
    return max((by_axis.get(a, 1.0) for a in axes), default=1.0)


def parks(s: Sharding, ends: Iterable[Sharding]) -> bool:
    """Whether it has an axis on a dim where none of `ends` has it: no user would bring it there (rule 2)."""
    return any(not any(a in end.axes[d] for end in ends) for d, entry in enumerate(s.axes) for a in entry)


def can_become(source: Sharding, target: Sharding) -> bool:
    """Whether a reshard leads there: a maximum that is taken does not wait again, a sum may."""
    return (
        not target.pending
        or set(target.pending) <= set(source.pending)
        or all(kind == "sum" for _, kind in (*source.pending, *target.pending))
    )


def _made_again(made: RepeatableOperation, wanted: Sharding) -> Materialisation:
    axes = again_axes(made.signature, wanted)
    assigned = None if axes is None else made.signature.under(wanted.mesh, axes, ((),) * len(made.operands))
    if axes is None or assigned is None or assigned.out.axes != wanted.axes:
        return NOWHERE
    counts = tuple([wanted.mesh.group_size(axes.get(name, ())) for name in made.signature.names])
    blocks = made.signature.cut(counts)
    assert blocks is not None
    cost, collectives = BYTES_PER_OPERATION * (blocks.work.vpu_ops + 1), 0
    new: list[tuple[Path, Sharding]] = []
    for n, (x, s) in enumerate(zip(made.operands, assigned.operands, strict=True)):
        route = obtain(x, s)
        if route is NOWHERE:
            return NOWHERE
        cost += route.cost
        collectives += route.collectives
        new += [((n, *path), at) for path, at in route.new]
    return Materialisation(cost, collectives, -1, (*new, ((), wanted)))


def again_axes(signature: Signature, wanted: Sharding) -> Mapping[str, tuple[str, ...]] | None:
    """The assignment under which an operation makes `wanted`, block by block; None if it can't."""
    if wanted.pending:
        return None
    axes: dict[str, tuple[str, ...]] = {}
    for f in signature.factors:
        name = f.outputs[0]
        over = wanted.of(name) if name is not None and name in wanted.shape else ()
        if over and f.role is not Role.PARALLEL:
            return None
        if over:
            axes[f.name] = over
    return axes
