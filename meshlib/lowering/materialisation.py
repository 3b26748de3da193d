"""Cheapest way to materialise a value under a target sharding: reshard an existing copy, or recompute it.

A value computed without operands, or from something smaller (a mask of positions, a one-hot of labels, a cast), is
recomputed wherever that sends less than resharding it: the price is that of materialising its operands.
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

Prices: TypeAlias = tuple[tuple[str, float], ...]  # (axis, price of a byte sent along it); 1 for other axes
Price: TypeAlias = tuple[float, int]  # bytes and collectives
Path: TypeAlias = tuple[int, ...]  # (): the value itself; (n, ...): within its n-th operand

# Recomputation nearly always pays off: a lane operation takes a thousandth of the time of a byte sent.
BYTES_PER_OPERATION = 1e-3


class ValueSource(NamedTuple):
    """The shardings in which a value exists, and the operation that can recompute it, if any."""

    lies: tuple[Sharding, ...]
    itemsize: float
    prices: Prices = ()
    made: RepeatableOperation | None = None  # how to recompute it


class RepeatableOperation(NamedTuple):
    """An operation that may run again, with the sources of its operands."""

    signature: Signature
    operands: tuple[ValueSource, ...]


class Materialisation(NamedTuple):
    """The cheapest way to materialise a value; `new` are the copies (of it and its operands) that exist afterwards.

    Intermediate shardings after a reduction or a rearrangement are available to others.
    """

    cost: float
    collectives: int
    origin: int  # index into `lies` of the copy to reshard; -1: recompute
    new: tuple[tuple[Path, Sharding], ...]


NOWHERE = Materialisation(float("inf"), 0, -1, ())


def cheapest(source: ValueSource, wanted: Sharding) -> Materialisation:
    """The cheapest way to materialise a value under `wanted`.

    Results for an operation are cached with its signature, and freed with its graph; those for shardings alone
    are cached for all graphs.
    """
    if source.made is None:
        return _resharded(source, wanted)
    key, ways = (source, wanted), source.made.signature.ways
    route: Materialisation | None = ways.get(key)
    if route is None:
        route = ways[key] = _obtained(source, wanted)
    return route


def _obtained(source: ValueSource, wanted: Sharding) -> Materialisation:
    if wanted in source.lies:
        return Materialisation(0, 0, source.lies.index(wanted), ())
    best, n = _nearest_copy(source, wanted)
    if source.made is not None and best[0] > 0:
        again = _recomputation(source.made, wanted)
        if again is not NOWHERE and again.cost < best[0]:
            return again
    if n < 0:
        return NOWHERE
    ends, plan = (*source.lies, wanted), reshard(source.lies[n], wanted, source.itemsize)
    before_last = [t for t in plan.steps[:-1] if not t.after.pending]
    reached = [t.after for t in before_last if t.before.pending or STEP_KINDS[t.kind].rearranges]
    useful = [s for s in reached if s not in source.lies and not has_stray_axis(s, ends)]
    return Materialisation(*best, n, tuple([((), s) for s in (*useful, wanted)]))


_resharded = lru_cache(maxsize=1 << 14)(_obtained)


def _nearest_copy(source: ValueSource, wanted: Sharding) -> tuple[Price, int]:
    """Price of resharding to `wanted` from the nearest copy, and that copy's index in `lies`; -1: none."""
    best: Price = float("inf"), 0
    nearest = -1
    for n, s in enumerate(source.lies):
        if can_become(s, wanted) and (nearest < 0 or _least_cost(source, s, wanted) <= best[0]):
            cost = between(s, wanted, source.itemsize, source.prices)
            if cost < best:
                best, nearest = cost, n
    return best, nearest


def between(here: Sharding, there: Sharding, itemsize: float, prices: Prices) -> Price:
    """Price of a reshard between two shardings: bytes and collectives."""
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
    """Price of a byte sent along these axes together."""
    by_axis = dict(prices)
    return max((by_axis.get(a, 1.0) for a in axes), default=1.0)


def has_stray_axis(s: Sharding, ends: Iterable[Sharding]) -> bool:
    """True if a sharding has an axis on a dim where none of `ends` has it, which no user would choose (rule 2)."""
    return any(not any(a in end.axes[d] for end in ends) for d, entry in enumerate(s.axes) for a in entry)


def can_become(source: Sharding, target: Sharding) -> bool:
    """True if a reshard exists: a reduced maximum cannot become pending again, a sum can."""
    return (
        not target.pending
        or set(target.pending) <= set(source.pending)
        or all(kind == "sum" for _, kind in (*source.pending, *target.pending))
    )


def _recomputation(made: RepeatableOperation, wanted: Sharding) -> Materialisation:
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
        route = cheapest(x, s)
        if route is NOWHERE:
            return NOWHERE
        cost += route.cost
        collectives += route.collectives
        new += [((n, *path), at) for path, at in route.new]
    return Materialisation(cost, collectives, -1, (*new, ((), wanted)))


def again_axes(signature: Signature, wanted: Sharding) -> Mapping[str, tuple[str, ...]] | None:
    """The assignment under which an operation computes `wanted` block by block; None if it cannot."""
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
