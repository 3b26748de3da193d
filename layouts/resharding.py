"""From one sharding to another with the fewest bytes.

The search is A* over states (axes of each dim, pending axes still to be reduced). Three facts make it small
and exact:

- Bytes are counted in elements times the number of devices that take part. Every ring figure is then an integer, sums
  compare exactly, and the item size does not matter to the choice.
- Of all steps only all_gather enlarges a block, and it sends exactly the elements by which the block grows.
  So a state whose block is smaller than the target's is at least that growth away. A reduction over k devices
  sends at least the k-th part that it leaves, k - 1 times, and an all_reduce of a block at least the block: with the
  growth after it, at least the target's block. Both bounds are consistent, hence the first arrival that
  leaves the queue is cheapest.
- Slices cost nothing, so a state from which slices alone lead to the target is an arrival.

- A whole value counts as a pending sum once all devices but the first along an axis hold zeros: that costs nothing.

Ties go to fewer collectives, then to fewer slices, then to the order in which `_Search.moves` lists them.

The number of states grows like a factorial with the number of axes that take part. Up to three, all are
searched, and the plan is the cheapest there is. Beyond, the search is directed: axes are cut, ordered and
permuted only towards the target, which leaves out plans that park an axis elsewhere to make later steps smaller.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from heapq import heappop, heappush
from itertools import combinations, permutations
from math import ceil, gcd, prod
from typing import TypeAlias

from layouts.errors import LayoutError
from layouts.plan import Plan, Step
from layouts.sharding import Axes, Sharding, laid

Numbers: TypeAlias = tuple[int, ...]  # of axes, the smaller ones first
Splits: TypeAlias = tuple[Numbers, ...]  # the axes of each dim
EXHAUSTIVE_AXES = 3

State: TypeAlias = tuple[Splits, Numbers]  # and the pending axes still to be reduced
Move: TypeAlias = tuple[str, Numbers, int, int, State, int]  # kind, axes, dim, to_dim (-1: none), after, cost


def reshard(source: Sharding, target: Sharding, itemsize: float) -> Plan:
    """The cheapest way from `source` to `target`, by bytes sent per device.

    Args:
      source: where the blocks are.
      target: where they shall be; same shape and mesh. What is pending there alone is a sum.
      itemsize: bytes per element, 0.5 of 4 bits; a block takes whole bytes.
    Returns: the plan; empty if there is nothing to do. Only axes that occur in `source` or `target` are used.
    Raises: LayoutError if shape or mesh differ, or a maximum or minimum would have to become pending.

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


def at_least(source: Sharding, target: Sharding) -> int:
    """Elements that a device must send from `source` to `target`: a bound that needs no search."""
    if any(a not in target.pending_axes for a in source.pending_axes):
        return target.local_size
    return max(0, target.local_size - source.local_size)


_NOTHING = Plan((), 0, 0)


@lru_cache(maxsize=1 << 16)
def _plan(source: Sharding, target: Sharding, itemsize: float) -> Plan:
    _check(source, target, itemsize)
    masked = tuple(a for a in target.pending_axes if a not in source.pending_axes)
    if masked:
        return _masked(source, target, itemsize, masked)
    kinds = dict(source.pending)
    names = (*source.shape.names, None)  # so that -1 is no dim
    left = tuple(a for a in source.pending_axes if a not in target.pending_axes)
    used = {a for splits in (source.axes, target.axes) for entry in splits for a in entry}.union(left)
    usable = tuple((a, n) for a, n in source.mesh.sizes_by_axis.items() if a in used)
    devices = prod(n for _, n in usable)
    # What of a size the axes can't divide only scales all costs: sizes that divide alike share a search.
    sizes = tuple(gcd(n, devices) for n in source.shape.sizes)
    scale = source.shape.size // prod(sizes)
    # Names do not matter, nor does the order of dims: searches that differ in them alone are one.
    order = sorted(range(len(sizes)), key=lambda d: (sizes[d], source.axes[d], target.axes[d]))
    place = {d: n for n, d in enumerate(order)}
    met = [a for d in order for a in (*source.axes[d], *target.axes[d])]
    ranked = sorted(usable, key=lambda axis: (axis[1], met.index(axis[0]) if axis[0] in met else len(met)))
    number = {a: n for n, (a, _) in enumerate(ranked)}
    ends = [tuple([tuple([number[a] for a in s.axes[d]]) for d in order]) for s in (source, target)]
    scatters = bool(left) and kinds[left[0]] == "sum"
    found = _path(
        tuple([sizes[d] for d in order]),
        ends[0],
        tuple(sorted(number[a] for a in left)),
        scatters,
        ends[1],
        tuple([n for _, n in ranked]),
    )
    steps: list[Step] = []
    before = source
    for kind, numbers, at, to, (entries, awaited), cost in found:
        axes = tuple([ranked[n][0] for n in numbers])
        splits = tuple([tuple([ranked[n][0] for n in entries[place[d]]]) for d in range(len(sizes))])
        dim, to_dim = (order[n] if n >= 0 else -1 for n in (at, to))
        if kind == "all_reduce":
            axes = tuple([a for a in source.mesh.axes if a in axes])
        elif kind == "collective_permute":
            axes = _moving(before.axes, splits, source.mesh.axes)
        pending = target.pending + tuple((ranked[n][0], kinds[ranked[n][0]]) for n in awaited)
        after = laid(source.shape, source.mesh, splits, pending)
        payload = ceil(before.local_size * itemsize)
        sent = _exact(cost * scale * payload, devices * before.local_size)
        steps.append(Step(kind, axes, names[dim], names[to_dim], before, after, payload, sent))
        before = after
    collectives = sum(not step.is_local for step in steps)
    return Plan(tuple(steps), sum(step.sent_bytes for step in steps), collectives)


def _masked(source: Sharding, target: Sharding, itemsize: float, axes: Axes) -> Plan:
    """By way of the same, whole over `axes`; one device along them keeps its block."""
    whole = laid(target.shape, target.mesh, target.axes, tuple(p for p in target.pending if p[0] not in axes))
    way = reshard(source, whole, itemsize)
    mask = Step("mask", axes, None, None, whole, target, ceil(whole.local_size * itemsize), 0)
    return Plan((*way.steps, mask), way.sent_bytes, way.collectives)


def _exact(numerator: int, denominator: int) -> int | float:
    return numerator / denominator if numerator % denominator else numerator // denominator


def _check(source: Sharding, target: Sharding, itemsize: float) -> None:
    if source.shape != target.shape or source.mesh != target.mesh:
        raise LayoutError(
            f"reshard keeps shape and mesh, not from {source} on {source.mesh} to {target} on {target.mesh}"
        )
    kinds = {kind for _, kind in (*source.pending, *target.pending)}
    if not set(target.pending) <= set(source.pending) and kinds != {"sum"}:
        raise LayoutError(f"reshard can make only sums pending: source {source}, target {target}")
    if itemsize <= 0:
        raise LayoutError(f"itemsize must be positive, not {itemsize}")


@lru_cache(maxsize=1 << 16)
def _path(
    sizes: tuple[int, ...],
    source: Splits,
    awaited: Numbers,
    scatters: bool,
    target: Splits,
    usable: Numbers,
) -> tuple[Move, ...]:
    """The moves; they depend neither on names and bytes of items nor on axes that take no part. `usable`: sizes."""
    return tuple(_Search(sizes, (source, awaited), scatters, target, dict(enumerate(usable))).path())


class _Search:
    """One search; `path` yields the moves from start to goal."""

    def __init__(
        self, sizes: tuple[int, ...], start: State, scatters: bool, goal: Splits, size_of: dict[int, int]
    ) -> None:
        self.start, self.goal, self.scatters = start, goal, scatters
        self._blocks: dict[Splits, int] = {}
        self._arrives: dict[Splits, bool] = {}
        self.usable = tuple(size_of)
        self.directed = len(self.usable) > EXHAUSTIVE_AXES
        self.size_of = size_of
        self.sizes = sizes
        reach = prod(size_of.values())
        self.volume = prod(sizes) * reach
        self.goal_block = self.block(self.goal)
        self.dims = range(len(self.sizes))
        # A dim that neither end splits can still serve: an axis parked on it makes later steps smaller.
        # Such dims are interchangeable as long as they are empty and divide alike.
        self.spare = {d: gcd(sizes[d], reach) for d in self.dims if not start[0][d] and not goal[d]}

    def block(self, splits: Splits) -> int:
        """Elements of a block, times the number of devices that take part."""
        found = self._blocks.get(splits)
        if found is None:
            size_of = self.size_of
            found = self._blocks[splits] = self.volume // prod([size_of[a] for entry in splits for a in entry])
        return found

    def arrived(self, state: State) -> bool:
        """Whether slices alone lead to the target."""
        splits, awaited = state
        if awaited:
            return False
        found = self._arrives.get(splits)
        if found is None:
            pairs = zip(splits, self.goal, strict=True)
            found = self._arrives[splits] = all(entry == goal[: len(entry)] for entry, goal in pairs)
        return found

    def path(self) -> list[Move]:
        best: dict[State, tuple[int, int, int]] = {self.start: (0, 0, 0)}
        came: dict[State, tuple[State, Move]] = {}
        queue = [(0, 0, 0, 0, 0, self.start)]  # bound on bytes, on collectives, slices, order, block, state
        order = 0
        done: set[State] = set()
        goal_block = self.goal_block
        least = goal_block - goal_block // min(self.size_of.values(), default=1)
        known: int | None = None  # what the cheapest arrival so far costs: who is bound to cost more is not looked at
        while queue:
            *_, state = heappop(queue)
            if state in done:
                continue
            done.add(state)
            if self.arrived(state):
                return self.merged(self.walked(came, state))
            cost, collectives, slices = best[state]
            block = self.block(state[0])
            for move in self.moves(state):
                kind, axes, _, _, after, more = move
                bound = cost + more
                if known is not None and bound > known:
                    continue
                if after[1]:
                    bound += goal_block
                elif kind == "all_gather":
                    bound += max(0, goal_block - block - more)
                elif kind == "reduce_scatter":
                    bound += max(0, goal_block - block + more)
                elif kind == "slice":
                    bound += max(0, goal_block - block // self.size_of[axes[0]])
                elif block < goal_block:
                    bound += goal_block - block
                if known is not None and bound > known:
                    continue
                local = kind == "slice"
                reached = (cost + more, collectives + (not local), slices + local)
                if after in done or (after in best and best[after] <= reached):
                    continue
                arrives = self.arrived(after)
                if not arrives and not after[1]:
                    # At least one more step that sends: half of a block or more.
                    bound = max(bound, cost + more + least)
                    if known is not None and bound > known:
                        continue
                best[after] = reached
                came[after] = state, move
                order += 1
                if arrives and (known is None or reached[0] < known):
                    known = reached[0]
                heappush(queue, (bound, reached[1] + (not arrives), reached[2], order, 0, after))
        raise AssertionError("unreachable: gathering and slicing lead everywhere")

    def walked(self, came: dict[State, tuple[State, Move]], state: State) -> list[Move]:
        """The moves to an arrival, then its slices."""
        back = []
        at = state
        while at != self.start:
            at, move = came[at]
            back.append(move)
        moves = back[::-1]
        splits = state[0]
        for d in self.dims:
            extra = self.goal[d][len(splits[d]) :]
            if extra:
                splits = _put(splits, d, self.goal[d])
                moves.append(("slice", extra, d, -1, (splits, ()), 0))
        return moves

    def merged(self, moves: list[Move]) -> list[Move]:
        """Neighbouring slices of one dim made one."""
        result: list[Move] = []
        for move in moves:
            if result and move[0] == result[-1][0] == "slice" and move[2] == result[-1][2]:
                result[-1] = ("slice", result[-1][1] + move[1], move[2], -1, move[4], 0)
            else:
                result.append(move)
        return result

    def places(self, splits: Splits) -> list[int]:
        """The dims that may receive axes; of empty spare ones that divide alike, the first."""
        seen = {1}  # a dim that no usable axis divides
        places = []
        for d in self.dims:
            alike = 0 if splits[d] else self.spare.get(d, 0)
            if alike not in seen:
                places.append(d)
            if alike:
                seen.add(alike)
        return places

    def moves(self, state: State) -> Iterator[Move]:
        """Every step that is possible in a state."""
        splits, awaited = state
        size_of = self.size_of
        counts = [prod([size_of[a] for a in entry]) for entry in splits]
        block = self.volume // prod(counts)
        free = [a for a in self.usable if a not in awaited and not any(a in entry for entry in splits)]
        places = self.places(splits)
        for n in range(len(awaited), 0, -1):
            for axes in combinations(awaited, n):
                k = prod([size_of[a] for a in axes])
                rest = tuple(a for a in awaited if a not in axes)
                if self.scatters:
                    for d in places:
                        if self.sizes[d] % (counts[d] * k) == 0:
                            for ordered in self.orders(axes, d):
                                after = _put(splits, d, splits[d] + ordered), rest
                                yield "reduce_scatter", ordered, d, -1, after, block - block // k
                yield "all_reduce", axes, -1, -1, (splits, rest), 2 * (block - block // k)
        for d in places:
            for a in free:
                if self.directed and self.goal[d][: len(splits[d]) + 1] != (*splits[d], a):
                    continue
                if self.sizes[d] % (counts[d] * size_of[a]) == 0:
                    yield "slice", (a,), d, -1, (_put(splits, d, (*splits[d], a)), awaited), 0
        for d, entry in enumerate(splits):
            for n in range(len(entry), 0, -1):
                left, axes = entry[:-n], entry[-n:]
                k = prod([size_of[a] for a in axes])
                without = _put(splits, d, left)
                yield "all_gather", axes, d, -1, (without, awaited), (k - 1) * block
                for to in places:
                    if to != d and self.sizes[to] % (counts[to] * k) == 0:
                        after = _put(without, to, splits[to] + axes), awaited
                        yield "all_to_all", axes, d, to, after, block - block // k
        pool = tuple((a, size_of[a]) for a in self.usable if a not in awaited)
        for other in self.permuted(splits, tuple(counts), pool):
            yield "collective_permute", (), -1, -1, (other, awaited), block

    def orders(self, axes: Numbers, d: int) -> Iterator[Numbers]:
        """The orders in which axes may be put on a dim."""
        if not self.directed:
            yield from permutations(axes)
            return
        known = [a for a in self.goal[d] if a in axes]
        yield (*known, *(a for a in axes if a not in known))

    def permuted(self, splits: Splits, counts: tuple[int, ...], pool: tuple[tuple[int, int], ...]) -> Iterator[Splits]:
        """The other arrangements of as many blocks."""
        if not self.directed:
            yield from (other for other in _arrangements(counts, pool) if other != splits)
            return
        # One arrangement: per dim as much of the target's beginning as fits, the rest as it is or as it comes.
        other, left = [], dict(pool)
        for goal, count in zip(self.goal, counts, strict=True):
            entry: Numbers = ()
            for a in goal:
                if a in left and count % (self.size_of[a] * prod(self.size_of[b] for b in entry)) == 0:
                    entry += (a,)
                else:
                    break
            other.append(entry)
            for a in entry:
                del left[a]
        for d, count in enumerate(counts):
            for a in (*splits[d], *left):
                if a in left and count % (self.size_of[a] * prod(self.size_of[b] for b in other[d])) == 0:
                    other[d] += (a,)
                    del left[a]
        found = tuple(other)
        if found != splits and counts == tuple(prod(self.size_of[a] for a in entry) for entry in found):
            yield found


def _put(splits: Splits, d: int, entry: Numbers) -> Splits:
    return (*splits[:d], entry, *splits[d + 1 :])


@lru_cache(maxsize=1 << 12)
def _arrangements(counts: tuple[int, ...], pool: tuple[tuple[int, int], ...]) -> tuple[Splits, ...]:
    """All ways to split dims into `counts` blocks with axes out of `pool`."""
    if not counts:
        return ((),)
    if counts[0] > 1:
        return tuple(
            ((axis, *rest[0]), *rest[1:])
            for axis, size in pool
            if counts[0] % size == 0
            for rest in _arrangements((counts[0] // size, *counts[1:]), tuple(pair for pair in pool if pair[0] != axis))
        )
    return tuple(((), *rest) for rest in _arrangements(counts[1:], pool))


def _moving(before: tuple[Axes, ...], after: tuple[Axes, ...], usable: Axes) -> Axes:
    """The axes along which a permute sends: those at another place in some dim, ends in common aside."""
    moving: set[str] = set()
    for old, new in zip(before, after, strict=True):
        while old and new and old[0] == new[0]:
            old, new = old[1:], new[1:]
        while old and new and old[-1] == new[-1]:
            old, new = old[:-1], new[:-1]
        moving.update(old, new)
    return tuple(a for a in usable if a in moving)
