"""Values of operations' variables, with the placements that each needs and produces, shared by alike operations."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations, product
from typing import Any, NamedTuple

import numpy as np

from layouts import Sharding
from meshlib.core.graph import Operation
from meshlib.core.opdef import Home
from meshlib.lowering.balance import Balance
from meshlib.lowering.bindings import Binding
from meshlib.lowering.cost_tables import Floats, Ints
from meshlib.lowering.distances import distances
from meshlib.lowering.materialisation import BYTES_PER_OPERATION, again_axes
from meshlib.lowering.strategies import Choice
from meshlib.lowering.strategy_costs import Strategy, StrategySet
from meshlib.program.factor_shardings import beside
from meshlib.program.signature import Signature

MOST_VALUES = 1500


class PlacedStrategy(NamedTuple):
    """A strategy in a region: 0 is the operation's own, others are later ones that use its result.

    A value of an operation's variable is one or several runs, the one in its own region first.
    """

    region: int
    strategy: Strategy


@dataclass(frozen=True, eq=False)
class ClassRows:
    """The placements of one tensor that each value of a variable needs or produces, grouped in classes of equal rows.

    Equal rows at one balance are one object: see `SharedValues`.
    """

    classes: Sequence[tuple[Any, ...]]
    of: Ints  # class of each value

    @cached_property
    def regions(self) -> tuple[int, ...]:
        """The regions in which some value produces the tensor, in order."""
        return tuple(dict.fromkeys([region for spots in self.classes for region, _ in spots]))


@dataclass(eq=False)
class SharedValues:
    """Interns equal rows and recomputations, so that tables derived from them are found by identity."""

    _rows: dict[object, ClassRows] = field(default_factory=dict)
    _free: dict[object, Free] = field(default_factory=dict)
    values: dict[object, Values] = field(default_factory=dict)

    def needs(self, rows: Iterable[tuple[Sharding, ...]]) -> ClassRows:
        """Rows of the placements that each value needs; order and repeats do not matter."""
        first: dict[object, tuple[Sharding, ...]] = {}  # representative of rows that differ in order alone
        return self._one([first.setdefault(frozenset(r), tuple(dict.fromkeys(r))) if len(r) > 1 else r for r in rows])

    def makes(self, rows: Iterable[tuple[tuple[int, Sharding], ...]]) -> ClassRows:
        """Rows of the placements that each value produces, with region numbers."""
        return self._one([tuple(dict.fromkeys(row)) if len(row) > 1 else row for row in rows])

    def _one(self, rows: Iterable[tuple[Any, ...]]) -> ClassRows:
        key = tuple(rows)
        known = self._rows.get(key)
        if known is None:
            numbers = {row: n for n, row in enumerate(dict.fromkeys(key))}
            of = np.array([numbers[row] for row in key], np.intp)
            known = self._rows[key] = ClassRows(tuple(numbers), of)
        return known

    def free(self, signature: Signature, home: Sharding, operands: tuple[Free, ...]) -> Free:
        """The recomputation of a tensor that is computed from nothing."""
        key = (signature, home, operands)
        if key not in self._free:
            self._free[key] = Free(signature, home, operands)
        return self._free[key]


@dataclass(eq=False)
class Free:
    """A tensor computed from nothing wherever it is used; `operands` are those of its operation."""

    signature: Signature
    home: Sharding
    operands: tuple[Free, ...]
    _costs: dict[Sharding, float] = field(default_factory=dict)

    def cost(self, wanted: Sharding) -> float:
        """Work of computing it under a sharding."""
        wanted = wanted.drop_pending()
        if wanted == self.home:
            return 0.0
        if wanted not in self._costs:
            axes = again_axes(self.signature, wanted)
            assert axes is not None
            assigned = self.signature.under(wanted.mesh, axes, ((),) * len(self.operands))
            assert assigned is not None
            cost = run_cost(self.signature, axes, wanted)
            for x, s in zip(self.operands, assigned.operands, strict=True):
                cost += x.cost(s)
            self._costs[wanted] = cost
        return self._costs[wanted]


def run_cost(signature: Signature, axes: Any, out: Sharding) -> float:
    """Price of running an operation again: almost nothing."""
    blocks = signature.cut(tuple([out.mesh.group_size(axes.get(n, ())) for n in signature.names]))
    assert blocks is not None
    return BYTES_PER_OPERATION * (blocks.work.vpu_ops + 1)


def settled(
    s: Sharding, binding: Binding, home: Sharding, itemsize: float, balance: Balance
) -> tuple[float, tuple[Sharding, ...]]:
    """Cost of resharding a result to its binding, and the placements under which it then exists."""
    bound = binding.settled(s, home)
    if bound == s:
        return 0.0, (s,)
    return float(distances((s, bound), itemsize, balance)[0, 1]), (s, bound)


class ValuesKey(NamedTuple):
    """Everything that the values of an operation's variable depend on.

    Args:
      strategies: the operation's strategies.
      later: number of later regions that use its result, if it may run again there; otherwise None.
      often: whether several operations use its result, so that it may run under two strategies.
      free: for each operand, its recomputation if it is computed from nothing; otherwise None.
      others: (binding, assigned sharding) of each result but the first.
    """

    strategies: StrategySet
    later: int | None
    often: bool
    free: tuple[Free | None, ...]
    others: tuple[tuple[Binding, Sharding], ...]


class Values:
    """The values of the variable of alike operations (`op` is one): costs, and placements needed and produced."""

    def __init__(
        self, op: Operation, signature: Signature, key: ValuesKey, interned: SharedValues, balance: Balance
    ) -> None:
        self.op, self.signature, self.key = op, signature, key
        self._interned, self._balance = interned, balance
        self._needs: dict[tuple[Sequence[int], int], ClassRows] = {}
        self._makes: dict[int, ClassRows] = {}
        strategies = key.strategies.all
        self.runs = self._runs(strategies)
        self.regions = sorted({r.region for runs in self.runs for r in runs})
        price = {id(s): s.cost + self._price(s.choice) for s in strategies}
        again = {id(s): self._price_again(s.choice) for s in strategies} if len(self.runs) > len(strategies) else {}
        own = [price[id(runs[0].strategy)] + sum([again[id(r.strategy)] for r in runs[1:]]) for runs in self.runs]
        self.costs: Floats = np.array(own)

    def needs(self, operands: tuple[int, ...], region: int) -> ClassRows:
        """For each value, the placements of a tensor needed in a region; the tensor is these operands."""
        key = (operands, region)
        if key not in self._needs:
            rows = [
                tuple([r.strategy.choice.operands[n] for r in runs if r.region == region for n in operands])
                for runs in self.runs
            ]
            self._needs[key] = self._interned.needs(rows)
        return self._needs[key]

    def makes(self, n: int) -> ClassRows:
        """For each value, the placements of a result, with their regions."""
        if n not in self._makes:
            # a constrained value exists under its constraint alone
            first = -1 if self.op.opdef.home is Home.GIVEN else 0
            rows = [
                tuple([(r.region, at) for r in runs for at in self._made(n, r.strategy)][first:]) for runs in self.runs
            ]
            self._makes[n] = self._interned.makes(rows)
        return self._makes[n]

    def _made(self, n: int, s: Strategy) -> tuple[Sharding, ...]:
        return s.made if n == 0 else self._settled(n, beside(self.op, s.choice.out)[n])[1]

    def _settled(self, n: int, s: Sharding) -> tuple[float, tuple[Sharding, ...]]:
        return settled(s, *self.key.others[n - 1], self.op.outputs[n].dtype.itemsize, self._balance)

    def _runs(self, strategies: Sequence[Strategy]) -> list[tuple[PlacedStrategy, ...]]:
        """Runs of the operation: one strategy; if recomputable also two, and one more in later regions that use it."""
        values: list[tuple[PlacedStrategy, ...]] = [(PlacedStrategy(0, s),) for s in strategies]
        later = self.key.later
        if later is None:
            return values
        plain = [s for s in strategies if not s.choice.out.pending and not any(s.choice.passed)]
        if self.key.often and plain:
            outs = list(dict.fromkeys(s.choice.out for s in plain))
            free = distances(outs, self.op.output.dtype.itemsize, Balance()) == 0
            neither = ~(free | free.T)
            place = {s: n for n, s in enumerate(outs)}
            both = [
                (PlacedStrategy(0, a), PlacedStrategy(0, b))
                for a, b in combinations(plain, 2)
                if neither[place[a.choice.out], place[b.choice.out]]
            ]
            if (len(values) + len(both)) * (len(plain) + 1 if later else 1) <= MOST_VALUES:
                values += both
        for region in range(1, later + 1):
            if len(values) * (len(plain) + 1) > MOST_VALUES:
                break
            again: list[tuple[PlacedStrategy, ...]] = [(PlacedStrategy(region, s),) for s in plain]
            values = [(*a, *b) for a, b in product(values, [(), *again])]
        return values

    def _price(self, choice: Choice) -> float:
        """Price of operands computed from nothing, and of resharding further results to their bindings."""
        others = list(enumerate(beside(self.op, choice.out)))[1:] if self.key.others else []
        return self._price_free(choice) + sum([self._settled(n, s)[0] for n, s in others])

    def _price_free(self, choice: Choice) -> float:
        return sum([x.cost(s) for x, s in zip(self.key.free, choice.operands, strict=True) if x is not None])

    def _price_again(self, choice: Choice) -> float:
        return run_cost(self.signature, choice.axes, choice.out) + self._price_free(choice)
