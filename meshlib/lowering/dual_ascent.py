"""Lower bounds of a factor graph by dual ascent: costs move between tables, while those of all assignments stay.

A sweep visits the variables in program order, or in reverse. A visit collects the least cost of each value from all
tables of the variable, and spreads it over the tables to variables that are yet to be visited. So what one end of a
program costs reaches the other end in a single sweep, and the sum of all tables' minima rises. Where it meets the cost
of the incumbent, the choice is proved; below, it tells which values no better assignment has (`Elimination.prune`).

Source: V. Kolmogorov, Convergent tree-reweighted message passing for energy minimization, IEEE PAMI 28(10), 2006, and
A new look at reweighted message passing, IEEE PAMI 37(5), 2015, for tables over more than two variables.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from meshlib.lowering.cost_tables import Floats, marginal
from meshlib.lowering.elimination import Elimination


class _Link(NamedTuple):
    """A table of a variable: its axis there, the shape that aligns a vector with it, and whether it leads on."""

    table: Floats  # changed in place
    axis: int
    shape: tuple[int, ...]
    leads: tuple[bool, bool]  # to variables that come later, and earlier


@dataclass(eq=False)
class _Variable:
    """A variable during the ascent, with costs of its values that belong to no table over others."""

    costs: Floats
    links: list[_Link] = field(default_factory=list)
    leading: tuple[int, int] = (0, 0)  # number of links that lead to later variables, and to earlier ones

    def visit(self, backwards: bool) -> None:
        """Collect the costs of the values, and spread them over the links that lead on."""
        costs = self.costs
        for table, axis, shape, _ in self.links:
            least = marginal(table, axis)
            table -= _finite(least).reshape(shape)
            costs = costs + least
        if self.leading[backwards]:
            share = costs / max(self.leading)
            for table, _, shape, leads in self.links:
                if leads[backwards]:
                    table += share.reshape(shape)
            costs = costs - self.leading[backwards] * _finite(share)
        self.costs = costs


def raise_bound(problem: Elimination, sweeps: int) -> float:
    """Move costs between the tables of a problem in an even number of sweeps; returns its lower bound."""
    # Variables of operations are numbered in program order, those of copies behind them: each comes to its producer.
    order = sorted(problem.domain, key=lambda v: (min([v, *problem.near[v]]), v))
    place = {v: n for n, v in enumerate(order)}
    nodes = {v: _Variable(np.zeros(problem.size[v])) for v in order}
    for scope in sorted(problem.tables):
        if len(scope) == 1:
            nodes[scope[0]].costs = problem.take(scope)
            continue
        table = problem.tables[scope] = problem.tables[scope].copy(order="C")
        places = [place[v] for v in scope]
        first, last = min(places), max(places)
        for axis, v in enumerate(scope):
            shape = tuple([size if n == axis else 1 for n, size in enumerate(table.shape)])
            nodes[v].links.append(_Link(table, axis, shape, (place[v] < last, place[v] > first)))
    for node in nodes.values():
        leads = [link.leads for link in node.links]
        node.leading = sum([later for later, _ in leads]), sum([earlier for _, earlier in leads])
    for _ in range(0, sweeps, 2):
        for v in order:
            nodes[v].visit(backwards=False)
        for v in reversed(order):
            nodes[v].visit(backwards=True)
    for v, node in nodes.items():
        problem.put((v,), node.costs)
    return problem.lower_bound()


def _finite(costs: Floats) -> Floats:
    """Costs with zeros for values that are ruled out."""
    finite: Floats = np.where(np.isfinite(costs), costs, 0.0)
    return finite
