"""Minimum of a factor graph: elimination, and a search where that needs too large tables.

ascent    a lower bound, and with it the values that no better solution has; without them, more can be eliminated
rounding  a solution, the incumbent: one variable after another takes its best value under those before it
dive      a better solution where the bound is loose: elimination of promising values alone
branches  each value of a variable with many neighbours is tried; the rest is eliminated, or branched on
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import numpy as np

from meshlib.lowering.cost_tables import marginal
from meshlib.lowering.dual_ascent import program_order, raise_bound
from meshlib.lowering.elimination import Elimination, FactorGraph, Solution

TABLE_LIMIT = 2_000_000  # entries of a table, above which the search branches
SMALL_TABLE = 100_000  # entries: eliminating a variable is cheaper than bounding it
DIVE_TABLE = 100_000
SWEEPS, MORE_SWEEPS = 10, 40  # of dual ascent: at first, and after each pruning
VALUES_LEFT = 0.97  # larger tables are more effective than further sweeps if these leave more of the values than this
BRANCHES = 40  # maximum number
BRANCH_REACH = 10**9  # entries: if eliminating any variable takes more, branching would not end


class TooLarge(Exception):
    """An elimination would need a table beyond the limit."""


class _Incumbent:
    """The best values of a graph's variables so far."""

    def __init__(self, graph: FactorGraph, values: Sequence[int]) -> None:
        self.graph, self.values, self.cost = graph, list(values), graph.cost(values)

    def offer(self, values: Sequence[int]) -> None:
        """Replace the values by these if they cost less."""
        cost = self.graph.cost(values)
        if cost < self.cost:
            self.values, self.cost = list(values), cost

    def solution(self, bound: float | None = None) -> Solution:
        """The values with a lower bound; without one they are proved optimal."""
        return Solution(tuple(self.values), self.cost, self.cost if bound is None else bound)


def solve(graph: FactorGraph, limit: int = TABLE_LIMIT) -> Solution:
    """The least-cost values of all variables, with a lower bound that equals the cost if optimality is proved.

    Tables have at most `limit` entries; where more would be needed, the bound may stay below the cost.
    """
    start = Elimination(graph)
    start.reduce(SMALL_TABLE)
    if not start.domain:
        return _Incumbent(graph, start.solution(len(graph.sizes))).solution()
    best = _Incumbent(graph, [0] * len(graph.sizes))
    _improve(start, best, SWEEPS)
    size = DIVE_TABLE
    while not np.isfinite(best.cost) and size < limit:  # the remaining values exclude each other
        size *= 16
        best.offer(_dive(graph, start, size))
    try:
        _attempt(start, best, _noise(best.cost), limit)
        return best.solution()
    except TooLarge:
        pass
    best.offer(_dive(graph, start, limit))
    return best.solution(_branched(start, best, start.lower_bound(), limit))


def _noise(cost: float) -> float:
    """Rounding error of a cost; none if there is no solution yet."""
    return 1e-5 + 1e-12 * abs(cost) if cost < inf else 0.0


def _dive(graph: FactorGraph, core: Elimination, size: int) -> list[int]:
    """A good solution: eliminate, keeping only promising values where tables would exceed `size`."""
    problem = core.copy()
    problem.eliminate_up_to(size, narrows=True)
    return problem.solution(len(graph.sizes))


def _rounded(graph: FactorGraph, problem: Elimination) -> list[int]:
    """A solution by bounds: in program order each variable takes its best value under those of earlier ones."""
    at: dict[int, int] = {}
    for v in program_order(problem):
        costs = np.zeros(problem.size[v])
        for scope in problem.of[v]:
            table = problem.tables[scope][tuple([at.get(u, slice(None)) for u in scope])]
            left = [u for u in scope if u not in at]
            costs = costs + marginal(table, left.index(v))
        at[v] = int(costs.argmin())
    return problem.solution(len(graph.sizes), {v: int(problem.domain[v][n]) for v, n in at.items()})


def _improve(problem: Elimination, best: _Incumbent, sweeps: int, slack: float = inf) -> None:
    """Raise a problem's bound, then improve the incumbent unless the bound exceeds its cost by more than `slack`.

    Rounding is nearly as good as a dive, and cheaper, once the bound is tight: where what it costs is closer to the
    bound than the bound was raised.
    """
    before = problem.lower_bound()
    low = raise_bound(problem, sweeps)
    if low <= best.cost + slack:
        best.offer(_rounded(best.graph, problem))
        if best.cost - low > low - before:
            best.offer(_dive(best.graph, problem, DIVE_TABLE))


def _attempt(problem: Elimination, best: _Incumbent, slack: float, limit: int) -> None:
    """Prune by the incumbent's cost plus `slack`, reduce, bound and improve it in turn. Raises: TooLarge."""
    graph, size = best.graph, SMALL_TABLE
    while problem.domain:
        before = sum(problem.size.values())
        low = problem.prune(best.cost + slack)
        if low >= best.cost - abs(slack):
            return
        problem.reduce(size)
        if sum(problem.size.values()) > VALUES_LEFT * before:
            if size >= limit:
                raise TooLarge
            size = min(size * 8, limit)
        if problem.domain:
            _improve(problem, best, MORE_SWEEPS, slack)
    if problem.constant <= best.cost + slack:
        best.offer(problem.solution(len(graph.sizes)))


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


def _branched(core: Elimination, best: _Incumbent, low: float, limit: int) -> float:
    """Branch on a variable with many neighbours; subproblems are eliminated, or branched on again.

    Returns: a lower bound of every solution's cost: that of the incumbent, unless there were too many branches.
    """
    branches = [(low, core)]
    for _ in range(BRANCHES if min(map(core.width, core.domain)) <= BRANCH_REACH else 0):
        while branches and branches[-1][0] >= best.cost - _noise(best.cost):
            branches.pop()
        if not branches:
            return best.cost
        _, problem = branches.pop()
        try:
            _attempt(problem, best, -_noise(best.cost), limit)
        except TooLarge:
            branches += _parts(problem)
    return min([best.cost, *[bound for bound, _ in branches]])
