"""Lower bounds of a factor graph by dual ascent: costs move between tables, while those of all assignments stay.

A sweep visits the variables in program order, or in reverse. A visit collects the least cost of each value from all
tables of the variable, and spreads it over the tables to variables that are yet to be visited. So what one end of a
program costs reaches the other end in a single sweep, and the sum of all tables' minima rises. Where it meets the cost
of the incumbent, the choice is proved; below, it tells which values no better assignment has (`Elimination.prune`).

Costs often creep in one direction for hundreds of sweeps. So each pair of sweeps starts beyond the end of the last one,
in the direction of its step: as many times further as the reach, which grows with each higher bound. Where the bound
falls, the pair is tried again with less reach.

Source: V. Kolmogorov, Convergent tree-reweighted message passing for energy minimization, IEEE PAMI 28(10), 2006, and
A new look at reweighted message passing, IEEE PAMI 37(5), 2015, for tables over more than two variables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf, prod
from typing import NamedTuple

import numpy as np

from meshlib.lowering.cost_tables import Floats, Ints
from meshlib.lowering.elimination import Elimination

ROUNDING = 1e-12  # relative error of a bound
BLOCK = 1 << 14  # costs that are extrapolated at once
MOST_REACH, GROWTH, CUT = 2.0, 1.5, 4.0  # of the extrapolation, as multiples of the last step


class _Link(NamedTuple):
    """A table of a variable, and whether it leads on."""

    rows: Floats  # view of the table with the variable along its last axis; changed in place
    others: Sequence[int]  # the other axes, in the order in which they are minimised
    leads: tuple[bool, bool]  # to variables that come later, and earlier


@dataclass(eq=False)
class _Variable:
    """A variable during the ascent, with costs of its values that belong to no table over others."""

    costs: Floats
    links: list[_Link] = field(default_factory=list)
    leading: tuple[int, int] = (0, 0)  # number of links that lead to later variables, and to earlier ones

    def visit(self, backwards: bool, is_finite: bool) -> None:
        """Collect the costs of the values, and spread them over the links that lead on."""
        costs, least = self.costs, []
        for rows, others, _ in self.links:
            lowest = rows
            for axis in others:
                lowest = np.minimum.reduce(lowest, axis=axis)
            costs += lowest
            least.append(lowest if is_finite else _finite(lowest))
        count = self.leading[backwards]
        share: Floats | float = 0.0
        if count:
            share = costs / max(self.leading)
            costs -= count * (share if is_finite else _finite(share))
        for (rows, _, leads), lowest in zip(self.links, least, strict=True):
            rows += share - lowest if leads[backwards] else -lowest


def raise_bound(problem: Elimination, sweeps: int) -> float:
    """Move costs between the tables of a problem in an even number of sweeps, or until that raises its bound no more.

    Returns: the lower bound.
    """
    order = program_order(problem)
    costs, starts = _joined(problem)
    nodes, is_finite = _linked(problem, order), bool(np.isfinite(costs).all())
    best, reach = -inf, 1.0
    before, there = costs.copy(), np.empty_like(costs)  # after the last two pairs of sweeps that raised the bound
    for n in range(0, sweeps, 2):
        if n:
            _extrapolate(before, there, reach, costs, is_finite)
        for v in order:
            nodes[v].visit(False, is_finite)
        for v in reversed(order):
            nodes[v].visit(True, is_finite)
        bound = problem.constant + float(np.minimum.reduceat(costs, starts).sum())
        if bound < best:
            reach /= CUT
            continue
        if n:
            before, there, reach = there, before, min(reach * GROWTH, MOST_REACH)
        np.copyto(there, costs)
        is_over = bound - best <= ROUNDING * abs(bound)
        best = bound
        if is_over:
            break
    np.copyto(costs, there)
    return problem.lower_bound()


def _extrapolate(before: Floats, there: Floats, reach: float, costs: Floats, is_finite: bool) -> None:
    """Set `costs` to what lies beyond `there`, by `reach` times the step from `before`."""
    for n in range(0, len(costs), BLOCK):  # which stay in the processor's caches
        old, new, beyond = (part[n : n + BLOCK] for part in (before, there, costs))
        with np.errstate(invalid="ignore"):
            np.subtract(new, old, out=beyond)
        beyond *= reach
        beyond += new
        if not is_finite:
            np.copyto(beyond, new, where=~np.isfinite(beyond))


def _joined(problem: Elimination) -> tuple[Floats, Ints]:
    """Make the tables of a problem, one for each variable included, views of one array; and where each begins."""
    for v in problem.domain:
        problem.put((v,), np.zeros(problem.size[v]))
    scopes = sorted(problem.tables)
    tables = [problem.tables[scope] for scope in scopes]
    ends = np.cumsum([table.size for table in tables])
    costs = np.empty(ends[-1])
    for scope, table, end in zip(scopes, tables, ends, strict=True):
        problem.tables[scope] = costs[end - table.size : end].reshape(table.shape)
        problem.tables[scope][...] = table
    return costs, ends - [table.size for table in tables]


def _linked(problem: Elimination, order: Sequence[int]) -> dict[int, _Variable]:
    """The variables of a problem in an order, with their tables."""
    place = {v: n for n, v in enumerate(order)}
    nodes = {v: _Variable(problem.tables[v,]) for v in order}
    for scope in sorted(problem.tables):
        if len(scope) > 1:
            places = [place[v] for v in scope]
            first, last = min(places), max(places)
            for axis, v in enumerate(scope):
                rows = _rows(problem.tables[scope], axis)
                nodes[v].links.append(_Link(*rows, (place[v] < last, place[v] > first)))
    for node in nodes.values():
        leads = [link.leads for link in node.links]
        node.leading = sum([later for later, _ in leads]), sum([earlier for _, earlier in leads])
    return nodes


def program_order(problem: Elimination) -> list[int]:
    """The variables, those of copies next to their producers'."""
    # Variables of operations are numbered in program order, those of copies behind them.
    return sorted(problem.domain, key=lambda v: (min([v, *problem.near[v]]), v))


def _rows(table: Floats, axis: int) -> tuple[Floats, Sequence[int]]:
    """A view of a table with `axis` last, and the order in which the other axes are minimised, longest first."""
    before, after = prod(table.shape[:axis]), prod(table.shape[axis + 1 :])
    if before == 1 or after == 1:
        rows = table.reshape(before * table.shape[axis], after).T if before == 1 else table.reshape(before, -1)
        return rows, (0,)
    return table.reshape(before, -1, after).swapaxes(1, 2), (1, 0) if before < after else (0, 0)


def _finite(costs: Floats) -> Floats:
    """Costs with zeros for values that are ruled out."""
    finite: Floats = np.where(np.isfinite(costs), costs, 0.0)
    return finite
