"""Search for the cheapest sequence of collectives between two assignments of axes to dims, used by `reshard`.

It is an A* search over states (axes of each dim, pending axes). Three facts make it small and exact:

- Costs are elements times the number of participating devices. Ring costs are then integers, sums compare exactly, and
  the result does not depend on the item size.
- Each device must receive the part of its target block that is outside its own. Some device has nothing of it unless
  along each dim the axes of one are the major axes of the other; then blocks are nested, and share the smaller size.
  No step sends less than it delivers: an all_gather sends the added part, an all_to_all a block except the part that
  stays, a permute a block. A reduction over k devices sends at least 1/k of its operand, k - 1 times, and an all_reduce
  of a block at least the block: with the missing part after it, at least the target's block. Both bounds are
  consistent, so the first goal state popped from the queue is optimal.
- Slices cost nothing, so a state from which slices alone lead to the target is a goal state.

Ties go to fewer collectives, then fewer slices, then fewer scatters (a fully reduced intermediate can be reused), then
to the order in which `_StateGraph` lists the moves.

The number of states grows like a factorial with the number of participating axes. Up to three axes the search is
exhaustive, and the plan optimal. Beyond, it is directed: axes are sliced, ordered and permuted only towards the target,
which excludes plans that use an axis elsewhere temporarily to make later steps smaller.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from heapq import heappop, heappush
from itertools import combinations, permutations, product
from math import gcd, prod
from operator import itemgetter
from typing import NamedTuple, TypeAlias

from layouts.step_kinds import SLICE, STEP_KINDS, Place, StepKind, kinds_from

Numbers: TypeAlias = tuple[int, ...]  # axes by number; smaller axes have smaller numbers
Splits: TypeAlias = tuple[Numbers, ...]  # the axes of each dim
State: TypeAlias = tuple[Splits, Numbers]  # with the pending axes

EXHAUSTIVE_AXES = 3
# In the order of `STEP_KINDS`, in which `_StateGraph` lists moves.
_REDUCING = tuple([kind for kind in STEP_KINDS.values() if kind.reduces])
_UNSPLITTING = tuple([kind for kind in STEP_KINDS.values() if kind.takes is Place.SPLIT])
_CUTTING = kinds_from(Place.FREE, Place.SPLIT)
_PERMUTING = kinds_from(None, None)


class RouteStep(NamedTuple):
    """One step of a route, with numbered axes and dims."""

    kind: str
    axes: Numbers
    dim: int  # -1: none
    to_dim: int  # -1: none
    after: State
    cost: int  # elements sent, times the number of participating devices


# cost, order among moves, number of the next state, collectives, slices, scatters, the move
Move: TypeAlias = tuple[int, int, int, int, int, int, RouteStep]


@lru_cache(maxsize=1 << 16)
def route(
    sizes: tuple[int, ...], source: Splits, awaited: Numbers, scatters: bool, target: Splits, axis_sizes: Numbers
) -> tuple[RouteStep, ...]:
    """The steps from `source`, with `awaited` pending, to `target`, in numbered axes and dims.

    Args:
      sizes: sizes of the dims.
      scatters: whether pending reductions may be scattered, as sums may.
      axis_sizes: sizes of the participating axes, by number.
    """
    reach = prod(axis_sizes)
    # A dim that neither end splits can still serve: an axis parked on it makes later steps smaller.
    # Such dims are interchangeable as long as they are empty and divide alike.
    alike = [gcd(n, reach) if not source[d] and not target[d] else 0 for d, n in enumerate(sizes)]
    spare = tuple([(d, n) for d, n in enumerate(alike) if n and alike.count(n) > 1])
    directed = target if len(axis_sizes) > EXHAUSTIVE_AXES else None
    graph = _state_graph(sizes, axis_sizes, scatters or not awaited, spare, directed)
    return tuple(_shortest(graph, (source, awaited), target))


class _Goal:
    """The states from which slices alone lead to a target, and lower bounds of the cost from each state to them."""

    def __init__(self, graph: _StateGraph, splits: Splits) -> None:
        self.graph, self.splits = graph, splits
        self.counts = graph.counts(splits)
        self.block = graph.volume // prod(self.counts)
        prefixes = product(*([entry[:n] for n in range(len(entry) + 1)] for entry in splits))
        self.arrivals = {graph.number((some, ())) for some in prefixes}
        # A state that is not a goal needs at least one more step that sends: half of a block or more.
        self.least = self.block - self.block // min(graph.axis_sizes, default=1)
        self.lacks: dict[int, int] = dict.fromkeys(self.arrivals, 0)

    def lack(self, state: int) -> int:
        """Lower bound of the cost from a state to a goal state."""
        lack = self.lacks.get(state)
        if lack is None:
            graph = self.graph
            splits, awaited = graph.states[state]
            lack = self.block
            if not awaited and _is_nested(splits, self.splits):
                shared = graph.volume // prod(map(max, self.counts, graph.blocks[state]))
                lack = max(self.block - shared, self.least)
            self.lacks[state] = lack
        return lack


def _shortest(graph: _StateGraph, start: State, target: Splits) -> list[RouteStep]:
    goal = graph.goal_at(target)
    arrivals, lacks = goal.arrivals, goal.lacks
    begin = graph.number(start)
    best = {begin: (0, 0, 0, 0)}  # cost, collectives, slices, scatters
    predecessors: dict[int, tuple[int, RouteStep]] = {}
    queue = [(0, 0, 0, 0, 0, 0, begin)]  # bounds on bytes, collectives, slices, scatters, two tie breakers, state
    done: set[int] = set()
    known: float = float("inf")  # cost of the best goal state so far; states with larger bounds are pruned
    while queue:
        state = heappop(queue)[-1]
        if state in done:
            continue
        if state in arrivals:
            return _merged(_steps_to_goal(predecessors, state, graph.states[state][0], target))
        done.add(state)
        cost, collectives, slices, scatters = best[state]
        for more, order, after, sends, cuts, scattering, move in graph.moves(state):
            sent = cost + more
            if sent > known:
                break  # the remaining ones cost as much or more
            if after in done:
                continue
            lack = lacks[after] if after in lacks else goal.lack(after)
            bound = sent + lack
            if bound > known:
                continue
            reached = (sent, collectives + sends, slices + cuts, scatters + scattering)
            before = best.get(after)
            if before is not None and before <= reached:
                continue
            best[after] = reached
            predecessors[after] = state, move
            arrives = after in arrivals
            if arrives:
                known = min(known, sent)
            heappush(queue, (bound, reached[1] + (not arrives), reached[2], reached[3], len(done), order, after))
    raise AssertionError("unreachable: gathering and slicing lead everywhere")


def _is_nested(splits: Splits, goal: Splits) -> bool:
    """True if along each dim one of two splits has the major axes of the other.

    Otherwise two axes differ at some place of a dim: a device first along one and last along the other has blocks that
    share nothing.
    """
    return all(entry[: len(other)] == other[: len(entry)] for entry, other in zip(splits, goal, strict=True))


def _steps_to_goal(
    predecessors: Mapping[int, tuple[int, RouteStep]], state: int, splits: Splits, goal: Splits
) -> list[RouteStep]:
    """The steps to a goal state, followed by its slices."""
    back = []
    while state in predecessors:
        state, move = predecessors[state]
        back.append(move)
    moves = back[::-1]
    for d, entry in enumerate(goal):
        extra = entry[len(splits[d]) :]
        if extra:
            splits = _put(splits, d, entry)
            moves.append(RouteStep(SLICE.name, extra, d, -1, (splits, ()), 0))
    return moves


def _merged(moves: list[RouteStep]) -> list[RouteStep]:
    """The steps with adjacent slices of one dim merged."""
    result: list[RouteStep] = []
    for move in moves:
        if result and move.kind == result[-1].kind == SLICE.name and move.dim == result[-1].dim:
            move = move._replace(axes=result.pop().axes + move.axes)
        result.append(move)
    return result


class _StateGraph:
    """The numbered states of one problem, with moves between them, computed on demand."""

    def __init__(
        self,
        sizes: tuple[int, ...],
        axis_sizes: Numbers,
        scatters: bool,
        spare: tuple[tuple[int, int], ...],
        goal: Splits | None,
    ) -> None:
        self.sizes, self.axis_sizes, self.scatters, self.goal = sizes, axis_sizes, scatters, goal
        self._spare = dict(spare)
        self.volume = prod(sizes) * prod(axis_sizes)  # elements, times the number of participating devices
        self._dims = range(len(sizes))
        self.states: list[State] = []
        self.blocks: list[list[int]] = []  # per state, the number of blocks of each dim
        self._numbers: dict[State, int] = {}
        self._moves: dict[int, list[Move]] = {}
        self._goals: dict[Splits, _Goal] = {}

    def number(self, state: State) -> int:
        """The number of a state."""
        state_number = self._numbers.get(state)
        if state_number is None:
            state_number = self._numbers[state] = len(self.states)
            self.states.append(state)
            self.blocks.append(self.counts(state[0]))
        return state_number

    def goal_at(self, splits: Splits) -> _Goal:
        """The goal of routes to these splits."""
        goal = self._goals.get(splits)
        if goal is None:
            goal = self._goals[splits] = _Goal(self, splits)
        return goal

    def counts(self, splits: Splits) -> list[int]:
        """The number of blocks of each dim."""
        size_of = self.axis_sizes
        return [prod([size_of[a] for a in entry]) for entry in splits]

    def moves(self, state: int) -> list[Move]:
        """All steps that are possible in a state, cheapest first."""
        known_moves = self._moves.get(state)
        if known_moves is None:
            known_moves = self._moves[state] = []
            for order, move in enumerate(self._possible(self.states[state])):
                kind = STEP_KINDS[move.kind]
                cuts = kind.is_local
                known_moves.append((move.cost, order, self.number(move.after), not cuts, cuts, kind.scatters, move))
            known_moves.sort(key=itemgetter(0, 1))
        return known_moves

    def _possible(self, state: State) -> Iterator[RouteStep]:
        """Reductions, then slices, gathers and exchanges, and permutes."""
        splits, awaited = state
        counts = self.counts(splits)
        block = self.volume // prod(counts)
        places = self._places(splits)
        yield from self._reductions(state, counts, block, places)
        yield from self._slices(state, counts, places)
        yield from self._gathers_and_exchanges(state, counts, block, places)
        pool = tuple((a, n) for a, n in enumerate(self.axis_sizes) if a not in awaited)
        for kind in _PERMUTING:
            for other in self._permuted(splits, tuple(counts), pool):
                yield RouteStep(kind.name, (), -1, -1, (other, awaited), block)

    def _reductions(self, state: State, counts: Sequence[int], block: int, places: list[int]) -> Iterator[RouteStep]:
        splits, awaited = state
        for n in range(len(awaited), 0, -1):
            for axes in combinations(awaited, n):
                k = prod([self.axis_sizes[a] for a in axes])
                rest = tuple(a for a in awaited if a not in axes)
                for kind in _REDUCING:
                    cost = _step_cost(kind, block, k)
                    if not kind.scatters:
                        yield RouteStep(kind.name, axes, -1, -1, (splits, rest), cost)
                    elif self.scatters:
                        for d in places:
                            if self._divides(d, counts[d] * k):
                                for ordered in self._orders(axes, d):
                                    after = _put(splits, d, splits[d] + ordered), rest
                                    yield RouteStep(kind.name, ordered, d, -1, after, cost)

    def _slices(self, state: State, counts: Sequence[int], places: list[int]) -> Iterator[RouteStep]:
        splits, awaited = state
        split = {a for entry in splits for a in entry}
        free = [a for a in range(len(self.axis_sizes)) if a not in awaited and a not in split]
        for d in places:
            for a in free:
                cut = (*splits[d], a)
                towards = self.goal is None or self.goal[d][: len(cut)] == cut
                if towards and self._divides(d, counts[d] * self.axis_sizes[a]):
                    for kind in _CUTTING:
                        yield RouteStep(kind.name, (a,), d, -1, (_put(splits, d, cut), awaited), 0)

    def _gathers_and_exchanges(
        self, state: State, counts: Sequence[int], block: int, places: list[int]
    ) -> Iterator[RouteStep]:
        splits, awaited = state
        for d, entry in enumerate(splits):
            for n in range(len(entry), 0, -1):
                left, axes = entry[:-n], entry[-n:]
                k = prod([self.axis_sizes[a] for a in axes])
                without = _put(splits, d, left)
                for kind in _UNSPLITTING:
                    cost = _step_cost(kind, block, k)
                    if kind.gathers:
                        yield RouteStep(kind.name, axes, d, -1, (without, awaited), cost)
                        continue
                    for to in places:
                        if to != d and self._divides(to, counts[to] * k):
                            after = _put(without, to, splits[to] + axes), awaited
                            yield RouteStep(kind.name, axes, d, to, after, cost)

    def _divides(self, d: int, count: int) -> bool:
        return self.sizes[d] % count == 0

    def _places(self, splits: Splits) -> list[int]:
        """The dims that may receive axes; among interchangeable spare dims only the first."""
        seen = {1}  # a dim that no participating axis divides
        places = []
        for d in self._dims:
            alike = 0 if splits[d] else self._spare.get(d, 0)
            if alike not in seen:
                places.append(d)
            if alike:
                seen.add(alike)
        return places

    def _orders(self, axes: Numbers, d: int) -> Iterator[Numbers]:
        """The orders in which axes may be added to a dim."""
        if self.goal is None:
            yield from permutations(axes)
            return
        known = [a for a in self.goal[d] if a in axes]
        yield (*known, *(a for a in axes if a not in known))

    def _permuted(self, splits: Splits, counts: tuple[int, ...], pool: tuple[tuple[int, int], ...]) -> Iterator[Splits]:
        """The other arrangements with as many blocks."""
        if self.goal is None:
            yield from (other for other in _arrangements(counts, pool) if other != splits)
            return
        # One arrangement: per dim the longest possible prefix of the target, the rest unchanged or in any order.
        other, left = [], dict(pool)
        for goal, count in zip(self.goal, counts, strict=True):
            entry: Numbers = ()
            for a in goal:
                if a in left and count % (left[a] * self._product(entry)) == 0:
                    entry += (a,)
                else:
                    break
            other.append(entry)
            for a in entry:
                del left[a]
        for d, count in enumerate(counts):
            for a in (*splits[d], *left):
                if a in left and count % (left[a] * self._product(other[d])) == 0:
                    other[d] += (a,)
                    del left[a]
        permuted = tuple(other)
        if permuted != splits and counts == tuple(map(self._product, permuted)):
            yield permuted

    def _product(self, entry: Numbers) -> int:
        return prod([self.axis_sizes[a] for a in entry])


_state_graph = lru_cache(maxsize=1 << 12)(_StateGraph)


def _step_cost(kind: StepKind, block: int, k: int) -> int:
    """Cost of a step over k devices: k divides a block, which is counted over all participating devices."""
    return kind.ring_parts(k) * block // k


def _put(splits: Splits, d: int, entry: Numbers) -> Splits:
    return (*splits[:d], entry, *splits[d + 1 :])


@lru_cache(maxsize=1 << 12)
def _arrangements(counts: tuple[int, ...], pool: tuple[tuple[int, int], ...]) -> tuple[Splits, ...]:
    """All ways to split dims into `counts` blocks with axes from `pool`."""
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
