"""Minimum of a factor graph: elimination, and a search where that needs too large tables.

dive          a good solution, the incumbent: elimination of promising values alone
windows       runs of variables re-optimised exactly, all others fixed
branches      each value of a variable with many neighbours is tried; the rest is eliminated, or branched on
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshlib.lowering.elimination import Elimination, FactorGraph, Solution

TABLE_LIMIT = 400_000  # entries of a table, above which the search branches
SMALL_TABLES = (16_000, 100_000)  # entries: eliminating a variable is cheaper than bounding it
DIVE_TABLE = 100_000
WINDOW, WINDOW_TABLE, PASSES = 60, 400_000, 4  # variables per window; entries of a table; maximum number of passes
SWEEPS = 8  # of dual ascent
PROGRESS = 0.97  # of the values: if pruning leaves more than this, larger tables are more effective
BRANCHES = 40  # maximum number
BRANCH_REACH = 10**9  # entries: if eliminating any variable takes more, branching would not end


class TooLarge(Exception):
    """An elimination would need a table beyond the limit."""


def solve(graph: FactorGraph, limit: int = TABLE_LIMIT) -> Solution:
    """The least-cost values of all variables, with a lower bound that equals the cost if optimality is proved.

    Tables have at most `limit` entries; where more would be needed, the bound may stay below the cost.
    """
    start = Elimination(graph)
    for size in SMALL_TABLES:
        start.reduce(size)
    count = len(graph.sizes)
    if not start.domain:
        return _proved(graph, start.solution(count))
    low = start.bound(SWEEPS)
    size = DIVE_TABLE
    best = _dive(graph, start, size)
    while not np.isfinite(graph.cost(best)) and size < limit:  # the remaining values exclude each other
        size *= 16
        best = _dive(graph, start, size)
    most = graph.cost(best)
    if low >= most - _noise(most):
        return _proved(graph, best)
    try:
        if _attempt(start, most + _noise(most), limit):
            best = min(best, start.solution(count), key=graph.cost)
        return _proved(graph, best)
    except TooLarge:
        pass
    best = min(best, _dive(graph, start, limit), key=graph.cost)
    best, low = _branched(graph, start, _windows(graph, best), low, limit)
    return Solution(tuple(best), graph.cost(best), low)


def _proved(graph: FactorGraph, values: Sequence[int]) -> Solution:
    cost = graph.cost(values)
    return Solution(tuple(values), cost, cost)


def _noise(cost: float) -> float:
    """Rounding error of a cost."""
    return 1e-5 + 1e-12 * abs(cost)


def _dive(graph: FactorGraph, core: Elimination, size: int) -> list[int]:
    """A good solution: eliminate, keeping only promising values where tables would exceed `size`."""
    problem = core.copy()
    problem.eliminate_up_to(size, narrows=True)
    return problem.solution(len(graph.sizes))


def _attempt(problem: Elimination, most: float, limit: int) -> bool:
    """Prune by `most`, reduce and bound in turn; False if no assignment costs so little. Raises: TooLarge."""
    size = SMALL_TABLES[-1]
    while problem.domain:
        before = sum(problem.size.values())
        if problem.prune(most) > most:
            return False
        problem.reduce(size)
        if sum(problem.size.values()) > PROGRESS * before:
            if size >= limit:
                raise TooLarge
            size = min(size * 8, limit)
        if problem.bound(4) > most:
            return False
    return problem.constant <= most


def _parts(problem: Elimination) -> list[tuple[float, Elimination]]:
    """One subproblem per value of a variable, with its bound, most promising last.

    Among variables with many neighbours, it is the one whose second-best value raises the bound most.
    """
    many = max(map(len, problem.near.values())) / 2
    linked = [v for v in problem.domain if len(problem.near[v]) >= many and problem.size[v] > 1]
    v = max(linked or problem.domain, key=lambda u: float(np.sort(problem.reduced_costs(u))[:2][-1]))
    bounds = problem.lower_bound() + problem.reduced_costs(v)
    parts = []
    for n in np.argsort(-bounds, kind="stable"):
        part = problem.copy()
        part.shared = type(problem.shared)()  # branches share no tables worth caching
        part.restrict(v, np.arange(len(bounds)) == n)
        parts.append((float(bounds[n]), part))
    return parts


def _branched(
    graph: FactorGraph, core: Elimination, best: list[int], low: float, limit: int
) -> tuple[list[int], float]:
    """Branch on a variable with many neighbours; subproblems are eliminated, or branched on again.

    Returns: the best values, and a lower bound of every solution's cost: theirs, unless there were too many branches.
    """
    branches = [(low, core)]
    most = graph.cost(best)
    for _ in range(BRANCHES if min(map(core.width, core.domain)) <= BRANCH_REACH else 0):
        while branches and branches[-1][0] >= most - _noise(most):
            branches.pop()
        if not branches:
            return best, most
        _, problem = branches.pop()
        try:
            if _attempt(problem, most - _noise(most), limit):
                best = min(best, problem.solution(len(graph.sizes)), key=graph.cost)
                most = graph.cost(best)
        except TooLarge:
            branches += _parts(problem)
    return best, min([most, *[bound for bound, _ in branches]])


def _windows(graph: FactorGraph, values: list[int]) -> list[int]:
    """Re-optimise runs of variables exactly, all others fixed, while that helps."""
    count = len(graph.sizes)
    of: dict[int, list[int]] = {v: [] for v in range(count)}
    for n, (scope, _) in enumerate(graph.tables):
        for v in scope:
            of[v].append(n)
    for _ in range(PASSES):
        before = graph.cost(values)
        for first in range(0, count, WINDOW // 2):
            some = range(first, min(first + WINDOW, count))
            place = {v: n for n, v in enumerate(some)}
            window = FactorGraph([graph.sizes[v] for v in some])
            for n in dict.fromkeys(n for v in some for n in of[v]):
                scope, table = graph.tables[n]
                at = tuple([slice(None) if v in place else values[v] for v in scope])
                window.add([place[v] for v in scope if v in place], table[at])
            problem = Elimination(window)
            try:
                if _attempt(problem, window.cost([values[v] for v in some]) + 1e-9, WINDOW_TABLE):
                    for v, value in zip(some, problem.solution(len(place)), strict=True):
                        values[v] = value
            except TooLarge:
                continue
        if graph.cost(values) >= before - _noise(before):
            break
    return values
