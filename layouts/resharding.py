"""Reshard plans that send the fewest bytes.

The problem is reduced to numbered axes and dims, and `layouts.routes` searches for the cheapest route. A replicated
value becomes a pending sum at no cost, by setting it to zero on all devices but the first along an axis.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from math import ceil, gcd, prod
from typing import NamedTuple

from layouts.errors import LayoutError
from layouts.plan import Plan, Step
from layouts.routes import RouteStep, route
from layouts.sharding import Axes, Sharding, laid
from layouts.step_kinds import MASK, STEP_KINDS


def reshard(source: Sharding, target: Sharding, itemsize: float) -> Plan:
    """The plan from `source` to `target` that sends the fewest bytes per device.

    Args:
      source: the given sharding.
      target: the required sharding; same shape and mesh. Axes pending there alone must be sums.
      itemsize: bytes per element, 0.5 for 4 bits; a block takes whole bytes.
    Returns: the plan; empty if there is nothing to do. Only axes that occur in `source` or `target` are used.
    Raises: LayoutError if shape or mesh differ, or a maximum or minimum would have to become pending.

    >>> from layouts import Sharding, reshard
    >>> here = Sharding("batch:512;d:1024", "rows:2;cols:4", [("rows",), ()], {"cols": "sum"})
    >>> print(reshard(here, here.drop_pending(), 4))
    all_reduce over cols: 1572864 bytes sent
    >>> print(reshard(here, here.drop_pending().with_axes([("rows",), ("cols",)]), 4))
    reduce_scatter over cols d: 786432 bytes sent
    >>> print(reshard(here.drop_pending(), here, 4))
    mask over cols: 0 bytes sent
    """
    if source == target:
        return _NOTHING
    return _plan(source, target, itemsize)


def elements_sent(source: Sharding, target: Sharding) -> tuple[float, int]:
    """Elements that each device sends in the plan of `reshard`, and the number of its collectives."""
    if source == target:
        return 0, 0
    cheapest = _cheapest_route(source, _unmasked(source, target))
    sent = sum([_exact(move.cost * cheapest.scale, cheapest.devices) for move in cheapest.moves])
    return sent, cheapest.collectives


_NOTHING = Plan((), 0, 0)


@lru_cache(maxsize=1 << 16)
def _plan(source: Sharding, target: Sharding, itemsize: float) -> Plan:
    if itemsize <= 0:
        raise LayoutError(f"itemsize must be positive, not {itemsize}")
    whole = _unmasked(source, target)
    cheapest = _cheapest_route(source, whole)
    steps = list(_steps(source, whole, cheapest, itemsize))
    if whole != target:
        axes = tuple([a for a in target.pending_axes if a not in source.pending_axes])
        steps.append(Step(MASK.name, axes, None, None, whole, target, ceil(whole.local_size * itemsize), 0))
    collectives = sum(not step.is_local for step in steps)
    return Plan(tuple(steps), sum(step.sent_bytes for step in steps), collectives)


def _unmasked(source: Sharding, target: Sharding) -> Sharding:
    """The target, replicated over the axes along which only one device keeps its block in the end."""
    if source.shape != target.shape or source.mesh != target.mesh:
        raise LayoutError(
            f"reshard keeps shape and mesh, not from {source} on {source.mesh} to {target} on {target.mesh}"
        )
    still_pending = tuple([pair for pair in target.pending if pair in source.pending])
    if len(still_pending) == len(target.pending):
        return target
    if {kind for _, kind in (*source.pending, *target.pending)} != {"sum"}:
        raise LayoutError(f"reshard can make only sums pending: source {source}, target {target}")
    return laid(target.shape, target.mesh, target.axes, still_pending)


class _NamedRoute(NamedTuple):
    """A route, with the names of its numbered axes and dims."""

    moves: tuple[RouteStep, ...]
    axes: tuple[str, ...]  # by number
    dims: tuple[int, ...]  # of the shape, by number
    fixed: tuple[Axes, ...]  # per dim the fixed axes, before those that move
    scale: int  # elements of the value per element in the search
    devices: int  # devices that take part

    @property
    def collectives(self) -> int:
        """The number of collectives."""
        return sum([not STEP_KINDS[move.kind].is_local for move in self.moves])


def _cheapest_route(source: Sharding, target: Sharding) -> _NamedRoute:
    """The cheapest route from source to target."""
    # Common major axes of source and target may stay fixed: devices that differ along them exchange nothing, which
    # makes the search smaller. Moving them too pays off only in plans of several steps.
    alike = tuple([_common_prefix(*pair) for pair in zip(source.axes, target.axes, strict=True)])
    if any(alike):
        direct = _route_with_fixed(source, target, alike)
        if direct.collectives <= 1:
            return direct
    return _route_with_fixed(source, target, ((),) * len(alike))


def _moving_axes(s: Sharding, fixed: tuple[Axes, ...]) -> list[Axes]:
    """The axes of each dim after those that stay."""
    return [entry[len(own) :] for entry, own in zip(s.axes, fixed, strict=True)]


def _numbered(splits: Sequence[Axes], number: Mapping[str, int]) -> tuple[tuple[int, ...], ...]:
    return tuple([tuple([number[a] for a in entry]) for entry in splits])


def _ranked(axes: tuple[tuple[str, int], ...], seen: list[str]) -> list[tuple[str, int]]:
    """Axes with their sizes, ordered by size and then by first occurrence in `seen`."""
    return sorted(axes, key=lambda axis: (axis[1], seen.index(axis[0]) if axis[0] in seen else len(seen)))


def _route_with_fixed(source: Sharding, target: Sharding, fixed: tuple[Axes, ...]) -> _NamedRoute:
    """The cheapest route that keeps the given major axes of source and target fixed."""
    ends = [_moving_axes(source, fixed), _moving_axes(target, fixed)]
    left = tuple(a for a in source.pending_axes if a not in target.pending_axes)
    used = set(left).union(*ends[0], *ends[1])
    usable = tuple((a, n) for a, n in source.mesh.sizes_by_axis.items() if a in used)
    devices = prod(n for _, n in usable)
    # The part of a size that the axes can't divide only scales all costs: sizes with equal divisors share a search.
    group = source.mesh.group_size
    sizes = tuple(gcd(n // group(own), devices) for n, own in zip(source.shape.sizes, fixed, strict=True))
    # Searches that differ only in names or in the order of dims are shared.
    order = [d for d, n in enumerate(sizes) if n > 1]
    order.sort(key=lambda d: (sizes[d], ends[0][d], ends[1][d]))
    ranked = _ranked(usable, [a for d in order for a in (*ends[0][d], *ends[1][d])])
    number = {a: n for n, (a, _) in enumerate(ranked)}
    scatters = bool(left) and dict(source.pending)[left[0]] == "sum"
    from_, to_ = (_numbered([splits[d] for d in order], number) for splits in ends)
    moves = route(
        tuple([sizes[d] for d in order]),
        from_,
        tuple(sorted(number[a] for a in left)),
        scatters,
        to_,
        tuple([n for _, n in ranked]),
    )
    scale = source.shape.size // (prod(sizes) * prod(map(group, fixed)))
    return _NamedRoute(moves, tuple([a for a, _ in ranked]), tuple(order), fixed, scale, devices)


def _steps(source: Sharding, target: Sharding, cheapest: _NamedRoute, itemsize: float) -> Iterator[Step]:
    """The steps of a route, with the names of its axes and dims."""
    kinds = dict(source.pending)
    names = (*[source.shape.names[d] for d in cheapest.dims], None)  # for -1, no dim
    place = {d: n for n, d in enumerate(cheapest.dims)}
    before = source
    for kind, numbers, at, to, (entries, awaited), cost in cheapest.moves:
        axes = tuple([cheapest.axes[n] for n in numbers])
        moved = {d: tuple([cheapest.axes[a] for a in entries[n]]) for d, n in place.items()}
        splits = tuple([own + moved.get(d, ()) for d, own in enumerate(cheapest.fixed)])
        if STEP_KINDS[kind].permutes:
            axes = _moving(before.axes, splits, source.mesh.axes)
        elif at < 0:  # no dim: the order is irrelevant
            axes = tuple([a for a in source.mesh.axes if a in axes])
        pending = target.pending + tuple((cheapest.axes[n], kinds[cheapest.axes[n]]) for n in awaited)
        after = laid(source.shape, source.mesh, splits, pending)
        payload = ceil(before.local_size * itemsize)
        sent = _exact(cost * cheapest.scale * payload, cheapest.devices * before.local_size)
        yield Step(kind, axes, names[at], names[to], before, after, payload, sent)
        before = after


def _common_prefix(a: Axes, b: Axes) -> Axes:
    """The common prefix of two sequences of axes."""
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return a[:n]


def _exact(numerator: int, denominator: int) -> int | float:
    return numerator / denominator if numerator % denominator else numerator // denominator


def _moving(before: tuple[Axes, ...], after: tuple[Axes, ...], usable: Axes) -> Axes:
    """The axes along which a permute sends: those that change position in a dim, common prefixes and suffixes aside."""
    moving: set[str] = set()
    for old, new in zip(before, after, strict=True):
        while old and new and old[0] == new[0]:
            old, new = old[1:], new[1:]
        while old and new and old[-1] == new[-1]:
            old, new = old[:-1], new[:-1]
        moving.update(old, new)
    return tuple(a for a in usable if a in moving)
