"""The choice of strategies for one graph, as a factor graph: strategies of operations, copies of tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, product
from typing import NamedTuple

import numpy as np

from layouts import Sharding
from meshlib.core.graph import UPDATE, Operation, Tensor
from meshlib.core.opdef import RESIDENT, Home, Kind, Role
from meshlib.lowering.assigned import Homes
from meshlib.lowering.balance import Balance
from meshlib.lowering.bindings import Binding, binding
from meshlib.lowering.copies import Copies
from meshlib.lowering.distances import STRAY, distances
from meshlib.lowering.elimination import FactorGraph, Solution, solve
from meshlib.lowering.expected_halos import Near
from meshlib.lowering.graph_cache import Prices
from meshlib.lowering.loops import Loops
from meshlib.lowering.materialisation import BYTES_PER_OPERATION, again_axes, made_again
from meshlib.lowering.placements import blockwise
from meshlib.lowering.simplification import Simplified
from meshlib.lowering.strategies import Choice, Space
from meshlib.lowering.strategy_costs import Strategy
from meshlib.program.factor_shardings import beside
from meshlib.program.signature import Signatures

MOST_VALUES = 1500


class Run(NamedTuple):
    """A strategy in a region. A value of an operation's variable is one or several of them, its own first."""

    region: str
    strategy: Strategy


@dataclass(eq=False)
class Problem:
    """One graph under one layout."""

    graph: Simplified
    homes: Homes
    prices: Prices
    signatures: Signatures
    fetched: set[Tensor]
    loops: Loops
    near: Mapping[Operation, Near] = field(default_factory=dict)
    factors: FactorGraph = field(default_factory=FactorGraph)
    copies: dict[Tensor, Copies] = field(default_factory=dict)
    variables: dict[Operation, int] = field(default_factory=dict)
    values: dict[Operation, list[tuple[Run, ...]]] = field(default_factory=dict)
    free: dict[Tensor, Choice] = field(default_factory=dict)
    at_home: dict[Operation, Choice] = field(default_factory=dict)
    constant: float = 0.0

    def __post_init__(self) -> None:
        self.again = made_again(self.graph)
        loops = [self.loops.of(op) for op in self.graph.operations if op.opdef.kind is Kind.LOOP]
        given = {y.tensor: y.sharding for looped in loops for y in looped.made}
        self.space = Space(self.graph, self.homes, self.signatures, self.again, given)
        self.regions = self._regions()
        self._free_costs: dict[tuple[Tensor, Sharding], float] = {}
        self._leave_at_home()

    def _regions(self) -> dict[Operation, list[str]]:
        """The regions in which an operation may run: its own, and those that use its result if it may run again."""
        used: dict[Tensor, set[str]] = {}
        self.often: set[Tensor] = set()  # what several operations use, or one that may itself run in several ways
        regions_of: dict[Operation, list[str]] = {}
        for op in reversed(self.graph.operations):
            regions = {UPDATE if op.opdef.kind is Kind.COMMIT else op.region}
            if op.outputs and op.output in self.again:
                regions |= used.get(op.output, set())
            regions_of[op] = [op.region, *sorted(regions - {op.region})]
            often = bool(op.outputs) and op.output in self.again and op.output in self.often
            for x in self.graph.inputs[op]:
                if often or x in used:
                    self.often.add(x)
                used.setdefault(x, set()).update(regions)
        return regions_of

    # ------------------------------------------------------------ building

    def build(self) -> None:
        """Enter all operations, then the copies of their tensors."""
        for op in self.graph.operations:
            self._enter(op)
        region = self.graph.operations[-1].region
        for t in (y for op in self.graph.operations for y in op.outputs if y in self.graph.taken):
            self._use(t, None, region, [(self.homes.of(t),)])
        for copies in self.copies.values():
            copies.enter(self.factors, self.prices.tables)

    def _enter(self, op: Operation) -> None:
        inputs = self.graph.inputs[op]
        if op in self.at_home:
            return
        match op.opdef.kind:
            case Kind.INPUT | Kind.VARIABLE:
                self._made(op.output, None, [[(op.region, self.homes.of(op.output))]])
            case Kind.COMMIT:
                home = self.homes.of(self.homes.graph.variables[op.attrs["variable"]].output)
                self._use(inputs[0], None, UPDATE, [(home,)])
            case Kind.LOOP:
                looped = self.loops.of(op)
                for x, s in dict.fromkeys(zip(looped.operands, looped.wanted, strict=True)):
                    self._use(x, None, op.region, [(s,)])
                for y in looped.made:
                    cost, shardings = self._settled(y.tensor, y.sharding)
                    self.constant += cost
                    self._made(y.tensor, None, [[(op.region, s) for s in shardings]])
            case _:
                self._enter_choice(op)

    def _leave_at_home(self) -> None:
        """Find operations whose choice is known: made of nothing, or under assigned shardings for nothing.

        The latter compute every block of the assigned sharding from blocks that are there, all axes that could split
        them do, and their results are used by each other and by variables alone, as in an optimizer's update. No table
        over their values is below zero, and all are zero where each of them runs so.
        """
        assigned: dict[Operation, Choice] = {}
        for op in self.graph.operations:
            inputs = self.graph.inputs[op]
            free = bool(op.outputs) and op.output in self.again and all(x in self.free for x in inputs)
            choice = self._home_choice(op) if free or op.opdef.kind is Kind.ELEMENTWISE else None
            if choice is None:
                continue
            if free:
                self.free[op.output] = choice
            elif all(s == self.homes.of(x) for x, s in zip(inputs, choice.operands, strict=True)) and (
                self.space.axes(op) <= choice.out.split_axes
            ):
                assigned[op] = choice
        count = -1
        while count != len(assigned):
            count = len(assigned)
            for op in [op for op in assigned if not self._serves_home(op, assigned)]:
                del assigned[op]
            for op in [op for op in assigned if not all(self._is_there(x, assigned) for x in self.graph.inputs[op])]:
                del assigned[op]
        self.at_home = {**{y.operation: choice for y, choice in self.free.items()}, **assigned}

    def _home_choice(self, op: Operation) -> Choice | None:
        """How an operation makes the assigned sharding of its result block by block; None if it can't."""
        signature, home, nothing = self.signatures.of(op), self.homes.of(op.output), ((),) * len(op.inputs)
        if any(f.outputs[0] is not None and f.role is not Role.PARALLEL for f in signature.factors):
            return None
        axes = again_axes(signature, home)
        assigned = None if axes is None else signature.under(home.mesh, axes, nothing)
        if axes is None or assigned is None or assigned.out != home or assigned.exchanges:
            return None
        return Choice(axes, assigned.operands, home, (), nothing)

    def _is_there(self, x: Tensor, assigned: Mapping[Operation, Choice]) -> bool:
        """Whether a tensor is under its assigned sharding whatever is chosen."""
        op = x.operation
        if op.opdef.kind in RESIDENT or x in self.free or op in assigned:
            return True
        return binding(x, self.graph, self.homes, self.fetched) is Binding.ALWAYS

    def _serves_home(self, op: Operation, assigned: Mapping[Operation, Choice]) -> bool:
        """Whether a result is used under its assigned sharding alone."""
        homes, home = self.homes, self.homes.of(op.output)
        return all(
            user in assigned
            or (
                user.opdef.kind is Kind.COMMIT
                and homes.of(homes.graph.variables[user.attrs["variable"]].output) == home
            )
            for user, _ in self.graph.uses.get(op.output, ())
        )

    def _free_cost(self, t: Tensor, wanted: Sharding) -> float:
        """The work of making something of nothing under a sharding."""
        wanted = wanted.drop_pending()
        if wanted == self.homes.of(t):
            return 0.0
        key = t, wanted
        if key not in self._free_costs:
            op = t.operation
            signature = self.signatures.of(op)
            axes = again_axes(signature, wanted)
            assert axes is not None
            assigned = signature.under(wanted.mesh, axes, ((),) * len(op.inputs))
            blocks = signature.cut(tuple([wanted.mesh.group_size(axes.get(n, ())) for n in signature.names]))
            assert assigned is not None
            assert blocks is not None
            cost = BYTES_PER_OPERATION * (blocks.work.vpu_ops + 1)
            for x, s in zip(self.graph.inputs[op], assigned.operands, strict=True):
                cost += self._free_cost(x, s)
            self._free_costs[key] = cost
        return self._free_costs[key]

    def _enter_choice(self, op: Operation) -> None:
        strategies = self._of_copy(op) if op.opdef.kind is Kind.COPY else self._of(op)
        self.space.made(op, [s.choice for s in strategies])
        values = self.values[op] = self._values(op, strategies)
        variable = self.variables[op] = self.factors.add_variable(len(values))
        price = {id(s): s.cost + self._price(op, s.choice) for s in strategies}
        again = {id(s): self._price_again(op, s.choice) for s in strategies} if len(values) > len(strategies) else {}
        costs = [price[id(v[0].strategy)] + sum([again[id(r.strategy)] for r in v[1:]]) for v in values]
        self.factors.add((variable,), np.array(costs))
        runs: dict[str, list[tuple[Strategy, ...]]] = {}  # per region, what of each value runs there
        for region in dict.fromkeys(r.region for v in values for r in v):
            runs[region] = [tuple([r.strategy for r in v if r.region == region]) for v in values]
        inputs = self.graph.inputs[op]
        for x in dict.fromkeys(inputs):
            if x.operation not in self.at_home:
                at = [n for n, t in enumerate(inputs) if t is x]
                for region, rows in runs.items():
                    wants = [tuple([s.choice.operands[n] for s in row for n in at]) for row in rows]
                    self._use(x, variable, region, wants)
        for n, y in enumerate(op.outputs):
            spots_of_results: list[list[tuple[str, Sharding]]] = [[] for _ in values]
            for region, rows in runs.items():
                for spots, row in zip(spots_of_results, rows, strict=True):
                    spots += [(region, at) for s in row for at in self._made_by(op, n, s)]
            self._made(y, variable, spots_of_results)

    def _made_by(self, op: Operation, n: int, s: Strategy) -> tuple[Sharding, ...]:
        """The placements of a result of an operation under a strategy."""
        return s.made if n == 0 else self._settled(op.outputs[n], beside(op, s.choice.out)[n])[1]

    def _values(self, op: Operation, strategies: Sequence[Strategy]) -> list[tuple[Run, ...]]:
        """One strategy each; what is computed again may run in two ways, and once more in regions that use it later."""
        values: list[tuple[Run, ...]] = [(Run(op.region, s),) for s in strategies]
        if op.output not in self.again:
            return values
        plain = [s for s in strategies if not s.choice.out.pending and not any(s.choice.passed)]
        later = self.regions[op][1:]
        if op.output in self.often:
            outs = list(dict.fromkeys(s.choice.out for s in plain))
            free = distances(outs, op.output.dtype.itemsize, Balance()) == 0 if outs else None
            place = {s: n for n, s in enumerate(outs)}
            both = [
                (Run(op.region, a), Run(op.region, b))
                for a, b in combinations(plain, 2)
                if free is not None
                and not free[place[a.choice.out], place[b.choice.out]]
                and not free[place[b.choice.out], place[a.choice.out]]
            ]
            if (len(values) + len(both)) * (len(plain) + 1 if later else 1) <= MOST_VALUES:
                values += both
        for region in later:
            if len(values) * (len(plain) + 1) > MOST_VALUES:
                break
            again: list[tuple[Run, ...]] = [(Run(region, s),) for s in plain]
            values = [(*a, *b) for a, b in product(values, [(), *again])]
        return values

    def _price(self, op: Operation, choice: Choice) -> float:
        """Of what operands are made of nothing, and results but the first brought home where they are bound there."""
        others = zip(op.outputs[1:], beside(op, choice.out)[1:], strict=True) if len(op.outputs) > 1 else ()
        return self._price_free(op, choice) + sum([self._settled(y, s)[0] for y, s in others])

    def _price_free(self, op: Operation, choice: Choice) -> float:
        inputs = self.graph.inputs[op]
        return sum([self._free_cost(x, s) for x, s in zip(inputs, choice.operands, strict=True) if x in self.free])

    def _price_again(self, op: Operation, choice: Choice) -> float:
        """Of running once more: next to nothing."""
        signature = self.signatures.of(op)
        blocks = signature.cut(tuple([choice.out.mesh.group_size(choice.axes.get(n, ())) for n in signature.names]))
        assert blocks is not None
        return BYTES_PER_OPERATION * (blocks.work.vpu_ops + 1) + self._price_free(op, choice)

    def _copies(self, t: Tensor) -> Copies:
        if t not in self.copies:
            home = self.homes.of(t)
            self.copies[t] = Copies(home, t.dtype.itemsize, self.prices.balance, self.homes.regather)
        return self.copies[t]

    def _use(self, t: Tensor, variable: int | None, region: str, wants: Sequence[Sequence[Sharding]]) -> None:
        if t.operation not in self.at_home:
            self._copies(t).add_use(variable, region, wants)

    def _made(self, t: Tensor, variable: int | None, spots_of_values: Sequence[Sequence[tuple[str, Sharding]]]) -> None:
        if t.operation.opdef.home is Home.GIVEN:
            spots_of_values = [spots[-1:] for spots in spots_of_values]
        self._copies(t).set_made(variable, spots_of_values)

    def _settled(self, t: Tensor, s: Sharding) -> tuple[float, tuple[Sharding, ...]]:
        """What it costs to bring a result where it is bound, and where it is then."""
        settled = binding(t, self.graph, self.homes, self.fetched).settled(s, self.homes.of(t))
        if settled == s:
            return 0.0, (s,)
        cost = float(distances((s, settled), t.dtype.itemsize, self.prices.balance)[0, 1])
        return cost, (s, settled)

    # ------------------------------------------------------------ strategies

    def _of_copy(self, op: Operation) -> list[Strategy]:
        """A copy between memories: every block as it is, under a placement that takes no more memory than home does."""
        (x,) = self.graph.inputs[op]
        home = self.homes.of(x)
        targets = [home]
        if x in self.copies:
            targets += [s for s in self.copies[x].placements if not s.pending and s.local_size <= home.local_size]
        strategies = []
        for n, s in enumerate(dict.fromkeys(targets)):
            cost, at = self._settled(op.output, s)
            split: dict[str, tuple[str, ...]] = {}
            for a, f in blockwise(s):
                split[f] = (*split.get(f, ()), a)
            strategies.append(Strategy(Choice(split, (s,), s, (), ((),)), cost + STRAY * (n > 0), at, cost))
        return strategies

    def _of(self, op: Operation) -> tuple[Strategy, ...]:
        home, inputs = self.homes.of(op.output), self.graph.inputs[op]
        binds = binding(op.output, self.graph, self.homes, self.fetched)
        priced = self.prices.of(self.signatures.of(op), home, binds, self.near.get(op, frozenset()))
        still = [self.homes.stationary_axes(x) if self.prices.balance.stationary else () for x in inputs]
        held = [(self.homes.of(x), axes) if axes else None for x, axes in zip(inputs, still, strict=True)]
        return priced.strategies(self.space.question(op), held)

    # ------------------------------------------------------------ the result

    def choices(self, solution: Solution) -> dict[Operation, Choice]:
        """What each operation does."""
        chosen = dict(self.at_home)
        for op, v in self.variables.items():
            chosen[op] = self.values[op][solution.values[v]][0].strategy.choice
        return chosen


def best_choices(problem: Problem) -> tuple[Mapping[Operation, Choice], float]:
    """What each operation does in the best program found, and by how many bytes that is above the lower bound."""
    problem.build()
    solution = solve(problem.factors)
    return problem.choices(solution), solution.cost - solution.bound
