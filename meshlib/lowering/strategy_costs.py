"""Costs of the strategies of alike operations, without dominated strategies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from layouts import Mesh, Sharding
from meshlib.core.opdef import Work
from meshlib.lowering.balance import Balance
from meshlib.lowering.bindings import Binding, settled
from meshlib.lowering.cost_tables import Floats
from meshlib.lowering.distances import COLLECTIVE, STRAY, axes_price, least_distances
from meshlib.lowering.expected_halos import Near
from meshlib.lowering.recomputation import price_again
from meshlib.lowering.strategies import Axes, Choice, Question, assignments, pass_options
from meshlib.program.exchanges import busiest_bytes
from meshlib.program.signature import Signature

# (an operand's assigned sharding, axes over which it is stationary)
Stationary: TypeAlias = tuple[Sharding, Axes] | None


class Strategy(NamedTuple):
    """A choice with its price: bytes sent by exchanges and by the reshard to the binding, and duplicated work."""

    choice: Choice
    cost: float
    made: tuple[Sharding, ...]  # placements of the result: see `settled`
    home_cost: float  # of that reshard


class StrategySet:
    """The undominated strategies of alike operations, cheapest first; compared by identity."""

    def __init__(self, strategies: Sequence[Strategy]) -> None:
        self.all = tuple(strategies)
        # The axes over which a result may be pending.
        self.sums = frozenset(a for s in self.all for a, kind in s.choice.out.pending if kind == "sum")


class Pricing:
    """Strategies of alike operations whose results have the same assigned sharding.

    Args:
      binding: whether the result is resharded to its assigned sharding.
      near: (operand, dim) pairs whose halo another operation provides.
      again: whether the result may be recomputed, so that duplicated work costs almost nothing.
    """

    def __init__(
        self, signature: Signature, home: Sharding, binding: Binding, near: Near, again: bool, balance: Balance
    ) -> None:
        self.signature, self.home, self.binding, self.near, self.balance = signature, home, binding, near, balance
        self._price_of = price_again if again else balance.bytes_of
        self._plain = self._plain_work()
        self._strategies: dict[object, StrategySet] = {}

    def _plain_work(self) -> float:
        """Work of computing one block of the assigned sharding; strategies are charged for the excess."""
        counts = dict(zip(self.home.shape.names, self.home.block_counts, strict=True))
        own = (f.outputs[0] if f.shares is None else None for f in self.signature.factors)
        plain = self.signature.cut(tuple(counts.get(name or "", 1) for name in own))
        return 0.0 if plain is None else self._price_of(plain.work)

    def strategies(self, asked: Question, held: Sequence[Stationary]) -> StrategySet:
        """The undominated strategies; `held` are the axes over which operands are stationary."""
        key = (asked, *held)
        known = self._strategies.get(key)
        if known is None:
            possible = [self._priced(choice, work) for choice, work in self._options(asked)]
            # If every strategy moves a weight that should be stationary, as with a convolution's whole kernel, it
            # moves.
            staying = [s for s in possible if not self._moves(s.choice, held)] if any(held) else possible
            known = self._strategies[key] = StrategySet(self._undominated(staying or possible))
        return known

    def _moves(self, choice: Choice, held: Sequence[Stationary]) -> bool:
        """True if a choice moves a weight over an axis over which it is stationary."""
        return any(
            a in own and a not in to
            for each, wanted in zip(held, choice.operands, strict=True)
            if each is not None
            for own, to in zip(each[0].axes, wanted.axes, strict=True)
            for a in each[1]
        )

    def _options(self, asked: Question) -> Iterator[tuple[Choice, Work]]:
        """All possible choices, with the work of one device."""
        signature, mesh = self.signature, self.home.mesh
        for passed in pass_options(signature.linear, asked):
            key = (asked.splits, asked.orders, passed, mesh)
            options = signature.options.get(key)  # shared by operations of several kinds
            if options is None:
                options = signature.options[key] = list(_possible(signature, asked, passed, mesh))
            for choice, counts in options:
                blocks = signature.cut(counts)
                if blocks is not None:
                    yield choice, blocks.work

    def _priced(self, choice: Choice, work: Work) -> Strategy:
        """A choice with its price."""
        home, prices = self.home, self.balance.axis_prices
        out = choice.out
        strays = sum(map(len, choice.passed)) + (out.axes != home.axes)
        home_cost = 0.0
        cost = self._price_of(work) - self._plain + STRAY * strays
        if choice.exchanges:
            exchanges = [e for e in choice.exchanges if (e.operand, e.dim) not in self.near]
            cost += (COLLECTIVE + self.balance.collective_bytes) * len(exchanges)
            for over in dict.fromkeys(e.axes for e in exchanges):
                cost += busiest_bytes((e, 1) for e in exchanges if e.axes == over) * axes_price(over, prices)
        itemsize = self.signature.op.output.dtype.itemsize
        home_cost, results = settled(out, self.binding, home, itemsize, self.balance)
        return Strategy(choice, cost + home_cost, results, home_cost)

    def _undominated(self, strategies: list[Strategy]) -> list[Strategy]:
        """Drop strategies that are no cheaper than another one with reshards before and after it."""
        if len(strategies) <= 1:
            return strategies
        strategies.sort(key=lambda s: s.cost)
        several = len(self.signature.op.outputs) > 1  # further results may be bound or not: compare them as computed
        own = np.array([s.cost - s.home_cost * several for s in strategies])
        costs, is_doubtful = self._instead(strategies, own, several, np.zeros((len(own), len(own)), bool))
        better = costs <= own + 1e-9
        if np.logical_or.reduce(better & is_doubtful, axis=None):
            costs, _ = self._instead(strategies, own, several, better & is_doubtful)
            better &= costs <= own + 1e-9
        undominated: list[int] = []
        for n, row in enumerate(better.T.tolist()):  # [a][b]
            if not any(row[k] for k in undominated):
                undominated.append(n)
        return [strategies[n] for n in undominated]

    def _instead(
        self, strategies: Sequence[Strategy], own: Floats, several: bool, asked: NDArray[np.bool_]
    ) -> tuple[Floats, NDArray[np.bool_]]:
        """Costs [b, a] of strategy b with operands and results of a, and which of them are lower bounds: not `asked`
        for, with a reshard whose route is not known."""
        op, (b, a) = self.signature.op, asked.nonzero()
        instead = np.repeat(own[:, None], len(strategies), axis=1)
        is_doubtful = np.zeros_like(asked)
        for n, x in enumerate(op.inputs):
            numbers: dict[Sharding, int] = {}
            of = np.array([numbers.setdefault(s.choice.operands[n], len(numbers)) for s in strategies])
            if len(numbers) > 1:
                pairs = np.zeros((len(numbers), len(numbers)), bool)
                pairs[of[a], of[b]] = True
                costs, is_known = least_distances(tuple(numbers), x.dtype.itemsize, self.balance, pairs)
                instead += costs[of, of[:, None]]
                is_doubtful |= ~is_known[of, of[:, None]]
        numbers = {}
        rows = [
            [numbers.setdefault(at, len(numbers)) for at in (s.made[:1] if several else s.made)] for s in strategies
        ]
        computed, bound = np.array([[row[0], row[-1]] for row in rows]).T
        pairs = np.zeros((len(numbers), len(numbers)), bool)
        for start, end in zip(b.tolist(), a.tolist(), strict=True):
            pairs[rows[start][0], rows[end]] = pairs[rows[start][-1], rows[end]] = True
        itemsize = sum(y.dtype.itemsize for y in op.outputs)
        between, is_known = least_distances(tuple(numbers), itemsize, self.balance, pairs)
        nearest = np.minimum(between[computed], between[bound])  # from b's result to each placement
        is_near = is_known[computed] & is_known[bound]
        instead += nearest[:, computed] + np.where(bound == computed, 0, nearest[:, bound])
        is_doubtful |= ~(is_near[:, computed] & is_near[:, bound])
        for n, row in enumerate(rows):
            for passed in row[1:-1]:
                instead[:, n] += nearest[:, passed]
                is_doubtful[:, n] |= ~is_near[:, passed]
        return instead, is_doubtful


def _possible(
    signature: Signature, asked: Question, passed: tuple[Axes, ...], mesh: Mesh
) -> Iterator[tuple[Choice, tuple[int, ...]]]:
    """The possible choices where these pending sums pass through, with the number of blocks of each factor."""
    for axes in assignments(signature, asked, passed, mesh):
        assigned = signature.under(mesh, axes, passed)
        if assigned is not None:
            counts = tuple([mesh.group_size(axes.get(name, ())) for name in signature.names])
            yield Choice(axes, assigned.operands, assigned.out, assigned.exchanges, passed), counts
