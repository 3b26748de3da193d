"""Values of operations' variables, with the placements that each needs and produces, shared by alike operations.

An operation has a variable per region in which it may run: its own, and later ones that may compute its result again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import NamedTuple

import numpy as np

from layouts import Sharding
from meshlib.core.graph import Operation
from meshlib.core.opdef import Home
from meshlib.lowering.balance import Balance
from meshlib.lowering.bindings import Binding, settled
from meshlib.lowering.cost_tables import Floats, Ints
from meshlib.lowering.distances import least_distances
from meshlib.lowering.recomputation import Free, run_cost
from meshlib.lowering.strategies import Choice
from meshlib.lowering.strategy_costs import Strategy, StrategySet
from meshlib.program.factor_shardings import beside
from meshlib.program.signature import Signature

MOST_VALUES = 1500  # combinations of the values of an operation's variables


@dataclass(frozen=True, eq=False)
class ClassRows:
    """The placements of one tensor that each value of a variable needs or produces, grouped in classes of equal rows.

    Equal rows at one balance are one object: see `SharedValues`.
    """

    classes: Sequence[tuple[Sharding, ...]]
    of: Ints  # class of each value


@dataclass(eq=False)
class SharedValues:
    """Interns equal rows and recomputations, so that tables derived from them are found by identity."""

    _rows: dict[object, ClassRows] = field(default_factory=dict)
    _free: dict[object, Free] = field(default_factory=dict)

    def needs(self, rows: Iterable[tuple[Sharding, ...]]) -> ClassRows:
        """Rows of the placements that each value needs; order and repeats do not matter."""
        first: dict[object, tuple[Sharding, ...]] = {}  # representative of rows that differ in order alone
        return self._one([first.setdefault(frozenset(r), tuple(dict.fromkeys(r))) if len(r) > 1 else r for r in rows])

    def makes(self, rows: Iterable[tuple[Sharding, ...]]) -> ClassRows:
        """Rows of the placements that each value produces."""
        return self._one([tuple(dict.fromkeys(row)) if len(row) > 1 else row for row in rows])

    def _one(self, rows: Iterable[tuple[Sharding, ...]]) -> ClassRows:
        key = tuple(rows)
        known = self._rows.get(key)
        if known is None:
            numbers = {row: n for n, row in enumerate(dict.fromkeys(key))}
            of = np.array([numbers[row] for row in key], np.intp)
            known = self._rows[key] = ClassRows(tuple(numbers), of)
        return known

    def free(self, signature: Signature, home: Sharding, operands: tuple[Free, ...]) -> Free:
        """The recomputation of a tensor that is computed without moving any operand."""
        key = (signature, home, operands)
        if key not in self._free:
            self._free[key] = Free(signature, home, operands)
        return self._free[key]


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
    """The values of the variables of alike operations (`op` is one): costs, and placements needed and produced.

    parts  for each region the values of its variable: one or two strategies; in later regions possibly none
    costs  their costs
    """

    def __init__(
        self, op: Operation, signature: Signature, key: ValuesKey, interned: SharedValues, balance: Balance
    ) -> None:
        self.op, self.signature, self.key = op, signature, key
        self._interned, self._balance = interned, balance
        self._needs: dict[tuple[Sequence[int], int], ClassRows] = {}
        self._makes: dict[int, tuple[ClassRows, ...]] = {}
        strategies = key.strategies.all
        self.parts = self._parts(strategies)
        own, *later = self.parts
        price = {id(s): s.cost + self._price(s.choice) for s in strategies}
        again = {id(s): self._price_again(s.choice) for s in strategies} if later or len(own) > len(strategies) else {}
        self.costs: list[Floats] = [
            np.array([price[id(first)] + sum([again[id(s)] for s in others]) for first, *others in own])
        ]
        self.costs += [np.array([sum([again[id(s)] for s in some], 0.0) for some in part]) for part in later]

    def needs(self, operands: tuple[int, ...], region: int) -> ClassRows:
        """For each value of a region, the placements of a tensor that it needs; the tensor is these operands."""
        key = (operands, region)
        if key not in self._needs:
            rows = [tuple([s.choice.operands[n] for s in some for n in operands]) for some in self.parts[region]]
            self._needs[key] = self._interned.needs(rows)
        return self._needs[key]

    def makes(self, n: int) -> tuple[ClassRows, ...]:
        """For each region, the placements of a result that its values produce."""
        if n not in self._makes:
            # a constrained value exists under its constraint alone
            first = -1 if self.op.opdef.home is Home.GIVEN else 0
            rows = [[tuple([at for s in some for at in self._made(n, s)][first:]) for some in p] for p in self.parts]
            self._makes[n] = tuple(map(self._interned.makes, rows))
        return self._makes[n]

    def _made(self, n: int, s: Strategy) -> tuple[Sharding, ...]:
        return s.made if n == 0 else self._settled(n, beside(self.op, s.choice.out)[n])[1]

    def _settled(self, n: int, s: Sharding) -> tuple[float, tuple[Sharding, ...]]:
        return settled(s, *self.key.others[n - 1], self.op.outputs[n].dtype.itemsize, self._balance)

    def _parts(self, strategies: Sequence[Strategy]) -> list[Sequence[tuple[Strategy, ...]]]:
        """The values: one strategy; if recomputable also two, and one or none in later regions that use the result."""
        own: list[tuple[Strategy, ...]] = [(s,) for s in strategies]
        later = self.key.later
        if later is None:
            return [own]
        plain = [s for s in strategies if not s.choice.out.pending and not any(s.choice.passed)]
        if self.key.often and plain:
            outs = list(dict.fromkeys(s.choice.out for s in plain))
            unasked = np.zeros((len(outs), len(outs)), bool)  # a slice needs no route
            free = least_distances(outs, self.op.output.dtype.itemsize, Balance(), unasked)[0] == 0
            neither = ~(free | free.T)
            place = {s: n for n, s in enumerate(outs)}
            both = [(a, b) for a, b in combinations(plain, 2) if neither[place[a.choice.out], place[b.choice.out]]]
            if (len(own) + len(both)) * (len(plain) + 1 if later else 1) <= MOST_VALUES:
                own += both
        again: Sequence[tuple[Strategy, ...]] = [(), *[(s,) for s in plain]]
        regions, count = 0, len(own)
        while plain and regions < later and count * len(again) <= MOST_VALUES:
            regions, count = regions + 1, count * len(again)
        return [own, *[again] * regions]

    def _price(self, choice: Choice) -> float:
        """Price of operands computed from nothing, and of resharding further results to their bindings."""
        others = list(enumerate(beside(self.op, choice.out)))[1:] if self.key.others else []
        return self._price_free(choice) + sum([self._settled(n, s)[0] for n, s in others])

    def _price_free(self, choice: Choice) -> float:
        return sum([x.cost(s) for x, s in zip(self.key.free, choice.operands, strict=True) if x is not None])

    def _price_again(self, choice: Choice) -> float:
        return run_cost(self.signature, choice.axes, choice.out) + self._price_free(choice)
