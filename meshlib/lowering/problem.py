"""Choice of strategies for one graph, as a factor graph: strategies of operations, copies of tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

from layouts import Sharding
from meshlib.core.graph import UPDATE, Operation, Tensor
from meshlib.core.opdef import RESIDENT, Home, Kind
from meshlib.lowering.assigned import Homes
from meshlib.lowering.bindings import Binding, binding, settled
from meshlib.lowering.copies import Copies
from meshlib.lowering.copy_trees import CopyTree
from meshlib.lowering.distances import STRAY
from meshlib.lowering.elimination import FactorGraph, Solution
from meshlib.lowering.expected_halos import Near
from meshlib.lowering.graph_cache import Prices
from meshlib.lowering.loops import Loops
from meshlib.lowering.recomputation import Free, blockwise_choice
from meshlib.lowering.simplification import Simplified
from meshlib.lowering.solving import solve
from meshlib.lowering.strategies import Choice, Space
from meshlib.lowering.strategy_costs import Strategy, StrategySet
from meshlib.lowering.values import Values, ValuesKey
from meshlib.program.signature import Signatures


@dataclass(eq=False)
class Problem:
    """The optimisation problem of one graph under one layout."""

    graph: Simplified
    homes: Homes
    prices: Prices
    signatures: Signatures
    fetched: set[Tensor]
    loops: Loops
    near: Mapping[Operation, Near] = field(default_factory=dict)
    factors: FactorGraph = field(default_factory=FactorGraph)
    copies: dict[Tensor, Copies] = field(default_factory=dict)
    # For each operation, its variable in each region; None if that has one value.
    variables: dict[Operation, tuple[int | None, ...]] = field(default_factory=dict)
    values: dict[Operation, Values] = field(default_factory=dict)
    free: dict[Tensor, Free] = field(default_factory=dict)
    at_home: dict[Operation, Choice] = field(default_factory=dict)
    entered: list[tuple[Tensor, range]] = field(default_factory=list)  # each tensor with the variables of its copies

    def __post_init__(self) -> None:
        self.regions = self.graph.regions
        loops = [self.loops.of(op) for op in self.graph.operations if op.opdef.kind is Kind.LOOP]
        given = {y.tensor: y.sharding for looped in loops for y in looped.made}
        self.space = Space(self.graph, self.homes, self.signatures, self.graph.again, given)
        self._fix_known_choices()

    # ------------------------------------------------------------ building

    def build(self) -> None:
        """Enter all operations, then the copies of their tensors."""
        for op in self.graph.operations:
            self._enter(op)
        region = self.graph.operations[-1].region
        for t in (y for op in self.graph.operations for y in op.outputs if y in self.graph.taken):
            self._needs(t, region, self.homes.of(t))
        for t, copies in self.copies.items():
            count = len(self.factors.sizes)
            copies.enter(self.factors, self.prices.tables)
            self.entered.append((t, range(count, len(self.factors.sizes))))

    def _enter(self, op: Operation) -> None:
        inputs = self.graph.inputs[op]
        if op in self.at_home:
            return
        match op.opdef.kind:
            case Kind.INPUT | Kind.VARIABLE:
                self._exists(op, op.output, self.homes.of(op.output))
            case Kind.COMMIT:
                self._needs(inputs[0], UPDATE, self.homes.of(self.homes.graph.variables[op.attrs["variable"]].output))
            case Kind.LOOP:
                looped = self.loops.of(op)
                for x, s in dict.fromkeys(zip(looped.operands, looped.wanted, strict=True)):
                    self._needs(x, op.region, s)
                for y in looped.made:
                    self._exists(op, y.tensor, *self._settled(y.tensor, y.sharding)[1])
            case _:
                self._enter_choice(op)

    def _fix_known_choices(self) -> None:
        """Fix operations whose choice is known: those without operands, or free under assigned shardings.

        The latter compute every block of the assigned sharding from existing blocks, are split by all axes that could
        split them, and their results are used by each other and by variables alone, as in an optimizer's update. No
        table over their values is below zero, and all are zero under these choices.
        """
        assigned: dict[Operation, Choice] = {}
        self.at_home = {}
        for op in self.graph.operations:
            inputs = self.graph.inputs[op]
            free = bool(op.outputs) and op.output in self.graph.again and all(x in self.free for x in inputs)
            choice = self._blockwise(op, self.homes.of(op.output)) if free or op in self.graph.updating else None
            if choice is None:
                continue
            if free:
                operands = tuple([self.free[x] for x in inputs])
                signature, home = self.signatures.of(op), self.homes.of(op.output)
                self.free[op.output] = self.prices.interned.free(signature, home, operands)
                self.at_home[op] = choice
            elif all(s == self.homes.of(x) for x, s in zip(inputs, choice.operands, strict=True)) and (
                self.space.axes(op) <= choice.out.split_axes
            ):
                assigned[op] = choice
        doubtful = list(assigned)
        while doubtful:
            op = doubtful.pop()
            inputs = self.graph.inputs[op]
            if op not in assigned or (
                self._serves_home(op, assigned) and all(self._is_at_home(x, assigned) for x in inputs)
            ):
                continue
            del assigned[op]
            doubtful += [x.operation for x in inputs]
            doubtful += [user for user, _ in self.graph.uses.get(op.output, ())]
        self.at_home.update(assigned)

    def _blockwise(self, op: Operation, out: Sharding) -> Choice | None:
        """The choice that computes a result's sharding block by block; None if there is none."""
        signature, known = self.signatures.of(op), self.prices.blockwise
        if (signature, out) not in known:
            known[signature, out] = blockwise_choice(signature, out)
        return known[signature, out]

    def _is_at_home(self, x: Tensor, assigned: Mapping[Operation, Choice]) -> bool:
        """True if a tensor exists under its assigned sharding whatever is chosen."""
        op = x.operation
        if op.opdef.kind in RESIDENT or x in self.free or op in assigned:
            return True
        return binding(x, self.graph, self.homes, self.fetched) is Binding.ALWAYS

    def _serves_home(self, op: Operation, assigned: Mapping[Operation, Choice]) -> bool:
        """True if all uses of a result are under its assigned sharding."""
        homes, home = self.homes, self.homes.of(op.output)
        return all(
            user in assigned
            or (
                user.opdef.kind is Kind.COMMIT
                and homes.of(homes.graph.variables[user.attrs["variable"]].output) == home
            )
            for user, _ in self.graph.uses.get(op.output, ())
        )

    def _enter_choice(self, op: Operation) -> None:
        inputs, regions = self.graph.inputs[op], self.regions[op]
        values = self.values[op] = self._values(op, self.near.get(op, frozenset()))
        self.space.made(op, values.key.strategies.sums)
        variables = self.variables[op] = tuple(
            [self.factors.add_variable(len(part)) if len(part) > 1 else None for part in values.parts]
        )
        for variable, costs in zip(variables, values.costs, strict=True):
            if variable is not None:
                self.factors.add((variable,), costs)
        for x in dict.fromkeys(inputs):
            if x.operation not in self.at_home:
                operands = tuple([n for n, t in enumerate(inputs) if t is x])
                for r, variable in enumerate(variables):
                    self._copies(x).add_use(variable, regions[r], values.needs(operands, r))
        for n, y in enumerate(op.outputs):
            self._copies(y).set_made(variables, regions, values.makes(n))

    def _values(self, op: Operation, near: Near) -> Values:
        """The values of an operation's variable, shared by all alike operations."""
        inputs = self.graph.inputs[op]
        later = len(self.regions[op]) - 1 if op.output in self.graph.again else None
        often = later is not None and op.output in self.graph.often
        free = tuple([self.free.get(x) for x in inputs])
        others = tuple([(self._binding(y), self.homes.of(y)) for y in op.outputs[1:]])
        if op.opdef.kind is Kind.COPY:
            return self.prices.values(
                op, self.signatures.of(op), ValuesKey(self._of_copy(op), later, often, free, others)
            )
        alike = self.signatures.of(op), self.homes.of(op.output), self._binding(op.output), near, later is not None
        # A cast or view of a weight only passes it on: an operation that computes with it decides whether it moves.
        stays = self.prices.balance.stationary and op.opdef.home is not Home.OPERAND and op.opdef.kind is not Kind.VIEW
        held = tuple([self.homes.held(x) for x in inputs]) if stays else (None,) * len(inputs)
        key = (*alike, *self.space.limits(op), held, later, often, free, others)
        values = self.prices.alike.get(key)
        if values is None:
            strategies = self.prices.of(*alike).strategies(self.space.question(op), held)
            values = self.prices.values(op, alike[0], ValuesKey(strategies, later, often, free, others))
            self.prices.alike[key] = values
        return values

    def depends_on(self, near: Mapping[Operation, Near]) -> bool:
        """True if the choice may change where other operations provide these halos (see `near_shifts`)."""
        some = [(self.values[op], self._values(op, own)) for op, own in near.items() if op in self.values]
        return any(_relative(values) != _relative(others) for values, others in some)

    def _binding(self, t: Tensor) -> Binding:
        return binding(t, self.graph, self.homes, self.fetched)

    def _copies(self, t: Tensor) -> Copies:
        if t not in self.copies:
            home = self.homes.of(t)
            self.copies[t] = Copies(home, t.dtype.itemsize, self.prices.balance, self.homes.regather)
        return self.copies[t]

    def _needs(self, t: Tensor, region: str, s: Sharding) -> None:
        """Record that a region needs a tensor under a sharding, whatever is chosen."""
        if t.operation not in self.at_home:
            self._copies(t).add_use(None, region, self.prices.interned.needs([(s,)]))

    def _exists(self, op: Operation, t: Tensor, *shardings: Sharding) -> None:
        """Record that an operation's result exists under some shardings, whatever is chosen."""
        at = shardings[-1:] if op.opdef.home is Home.GIVEN else shardings
        self._copies(t).set_made((None,), (op.region,), (self.prices.interned.makes([at]),))

    def _settled(self, t: Tensor, s: Sharding) -> tuple[float, tuple[Sharding, ...]]:
        """Cost of resharding a result to its binding, and the placements under which it then exists."""
        return settled(s, self._binding(t), self.homes.of(t), t.dtype.itemsize, self.prices.balance)

    # ------------------------------------------------------------ strategies

    def _of_copy(self, op: Operation) -> StrategySet:
        """Strategies of a copy between memories: block by block, under placements no larger than the assigned one."""
        (x,) = self.graph.inputs[op]
        home = self.homes.of(x)
        targets = [home]
        if x in self.copies:
            targets += [s for s in self.copies[x].placements() if not s.pending and s.local_size <= home.local_size]
        strategies = []
        for n, s in enumerate(dict.fromkeys(targets)):
            cost, at = self._settled(op.output, s)
            split = {d.name: axes for d, axes in zip(s.shape, s.axes, strict=True) if axes}
            strategies.append(Strategy(Choice(split, (s,), s, (), ((),)), cost + STRAY * (n > 0), at, cost))
        return StrategySet(strategies)

    # ------------------------------------------------------------ result

    def _runs(self, op: Operation, solution: Solution) -> Sequence[tuple[Choice, ...]]:
        """The choices of an operation in each of its regions."""
        return [
            tuple([s.choice for s in part[0 if variable is None else solution.values[variable]]])
            for variable, part in zip(self.variables[op], self.values[op].parts, strict=True)
        ]

    def chosen(self, solution: Solution) -> Chosen:
        """The choices of a solution, and its copies."""
        runs: dict[Operation, Sequence[tuple[Choice, ...]]] = {op: [(c,)] for op, c in self.at_home.items()}
        runs.update((op, self._runs(op, solution)) for op in self.values)

        @cache
        def tree(t: Tensor) -> CopyTree:
            return self.copies[t].tree(solution.values) if t in self.copies else CopyTree({})

        def again(t: Tensor, region: str, wanted: Sharding) -> Choice | None:
            op = t.operation
            if t in self.free:
                return self._blockwise(op, wanted)
            for r, name in enumerate(self.regions[op][: len(runs.get(op, ()))]):
                if name == region and r:
                    return next((c for c in runs[op][r] if c.out == wanted), None)
            return None

        return Chosen(runs, tuple(self.copies), tree, again, max(0.0, solution.cost - solution.bound))


class Chosen(NamedTuple):
    """How a graph is lowered; `excess` are the bytes above the lower bound."""

    # For each operation and each of its regions, the choices under which it runs there: two if each computes a copy.
    runs: Mapping[Operation, Sequence[tuple[Choice, ...]]]
    copied: Sequence[Tensor]  # tensors with trees of copies
    tree: Callable[[Tensor], CopyTree]  # from which copy each copy of a tensor is made
    # How a region computes a tensor again under a sharding, if it does.
    again: Callable[[Tensor, str, Sharding], Choice | None]
    excess: float

    def is_same(self, other: Chosen) -> bool:
        """True if another choice for the same graph leads to the same instructions."""
        return self.runs == other.runs and all(self.tree(t) == other.tree(t) for t in {*self.copied, *other.copied})


def _relative(values: Values) -> list[tuple[Choice, float]]:
    """The strategies of an operation, with what each costs above the cheapest."""
    strategies = values.key.strategies.all
    return [(s.choice, s.cost - strategies[0].cost) for s in strategies]


def best_choices(problem: Problem) -> Chosen:
    """The choices of the best program."""
    problem.build()
    return problem.chosen(solve(problem.factors))
