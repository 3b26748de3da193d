"""A loop as the program around it sees it: its body lowered by itself, what it takes and what it makes.

Carries lie at home, slices where the stacked tensors lie, the rest where it lies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from layouts import Dimension, Shape, Sharding
from meshlib.graph import Graph, Operation, Tensor
from meshlib.loop_record import LoopRecord
from meshlib.lowering.homes import Homes
from meshlib.lowering.simplification import Simplified
from meshlib.ops.sources import is_zero
from meshlib.program.instructions import Value
from meshlib.program.records import Program
from meshlib.replay import needed

Makers = Mapping[str, tuple[Operation, str]]  # per pending axis the operation that left it, and the dim it reduced


@dataclass(frozen=True)
class Looped:
    """A lowered loop: `wanted` says where each of `operands` has to be; the rest is as in `instructions.Loop`."""

    operands: tuple[Tensor, ...]
    wanted: tuple[Sharding, ...]
    made: tuple[Value, ...]
    body: Program
    trips: int
    carries: tuple[tuple[str, str], ...]
    slices: tuple[str, ...]
    stacks: tuple[str, ...]
    makers: Mapping[Tensor, Makers]  # of results that are pending sums


@dataclass(frozen=True)
class Body:
    """How the body of a loop is lowered."""

    # (graph, homes, results, their shardings if bound, names of the inputs) -> Program
    lower: Callable[[Graph, Homes, Sequence[Tensor], Sequence[Sharding | None], Sequence[str]], Program]
    # Partitions it without finishing it: (graph, homes, results, those of them that are brought home)
    # -> per tensor how it was made, and who left it pending
    trial: Callable[[Graph, Homes, Sequence[Tensor], Sequence[Tensor]], Callable[[Tensor], tuple[Sharding, Makers]]]


@dataclass(eq=False)
class Loops:
    """The loops of one graph under one layout, each lowered once."""

    graph: Simplified
    homes: Homes
    fetched: set[Tensor]
    body: Body
    _found: dict[Operation, Looped] = field(default_factory=dict)

    def of(self, op: Operation) -> Looped:
        """A loop, lowered."""
        if op not in self._found:
            self._found[op] = self._lowered(op)
        return self._found[op]

    def _lowered(self, op: Operation) -> Looped:
        loop = op.loop
        assert loop is not None
        operands = [self.graph.inputs[op][n] for n in loop.needs]
        inner = [loop.stand_ins[n] for n in loop.needs]
        homes, wanted = self._body_homes(op, loop, inner, {})
        sums, makers = self._accumulators(op, loop, homes)
        if sums:
            homes, wanted = self._body_homes(op, loop, inner, sums)
        # Finals always; of what could be stacked (results, and carries before each trip) only what is used.
        finals, others = op.outputs[: loop.carries], op.outputs[loop.carries :]
        used = [(y, t) for y, t in zip(others, loop.stacked, strict=True) if self._is_used(y)]
        bound: list[Sharding | None] = [*wanted[: loop.carries]]
        for y, _ in used:
            public = y in op.public_outputs
            bound.append(without_dim(without_axes(self._stack_home(y), loop.dim), loop.dim) if public else None)
        made_inside = [*loop.made.finals, *(t for _, t in used)]
        program = self.body.lower(loop.body, homes, made_inside, bound, [x.operation.name for x in inner])
        names = list(program.outputs)
        made = [Value(y, s) for y, s in zip(finals, wanted, strict=False)]
        for (y, _), name in zip(used, names[loop.carries :], strict=True):
            made.append(Value(y, with_dim(program.outputs[name].sharding, y.shape)))
            if y not in op.public_outputs:
                self.homes.bind(y, made[-1].sharding)
        return Looped(
            tuple(operands),
            tuple(wanted),
            tuple(made),
            program,
            loop.dim.size,
            carries=tuple((t.operation.name, name) for t, name in zip(loop.given.inits, names, strict=False)),
            slices=tuple(t.operation.name for t in loop.given.slices if t.operation.name in program.inputs),
            stacks=tuple(names[loop.carries :]),
            makers={op.outputs[n]: found for n, found in makers.items()},
        )

    def _body_homes(
        self, op: Operation, loop: LoopRecord, inner: Sequence[Tensor], sums: Mapping[int, Sharding]
    ) -> tuple[Homes, list[Sharding]]:
        """Homes inside the body of a loop, and where each operand has to be; `sums` says where some carries lie."""
        homes = self.homes.inside(loop.body)
        wanted = []
        for n, y in zip(loop.needs, inner, strict=True):
            x = self.graph.inputs[op][n]
            if y in loop.given.inits:
                home = sums.get(n) or homes.of(y)
                homes.bind(y, home)
            elif y in loop.given.slices:
                home = without_axes(self.homes.of(x), loop.dim)
                homes.bind(y, without_dim(home, loop.dim))
            else:
                home = self.homes.of(x)
                homes.bind(y, home)
            wanted.append(home)
        for n, sharding in sums.items():
            homes.bind(loop.made.finals[n], sharding)
        return homes, wanted

    def _accumulators(
        self, op: Operation, loop: LoopRecord, homes: Homes
    ) -> tuple[dict[int, Sharding], dict[int, Makers]]:
        """Carries that only add something up, from zero: they lie as what is added does, pending sums included.

        So a gradient that every trip adds to is reduced once, after the loop. Found by lowering the body once as if
        there were none. Returned with who leaves each sum pending.
        """
        results = loop.results
        operations = needed(loop.body.known.get(y, y).operation for y in results)
        befores = loop.outputs(op.outputs).befores
        found: dict[int, Tensor] = {}
        for n, (carry, end) in enumerate(zip(loop.given.inits, loop.made.finals, strict=True)):
            first, add = self.graph.inputs[op][n].operation, end.operation
            others = [x for x in add.inputs if x is not carry]
            uses = sum(x is carry for other in operations for x in other.inputs) + results.count(carry)
            # The carry before each trip is asked for by a gradient alone; then it has to be whole.
            stacked = self.graph.uses.get(befores[n])
            linear = add.kind.linear(add)
            adds = linear.together and linear.operands == (0, 1)
            alone = results.count(end) == 1 and not any(end in x.inputs for x in operations)
            one = len(others) == 1 == len(add.inputs) - 1 and others[0].shape == end.shape
            if is_zero(first) and adds and uses == 1 and alone and not stacked and one:
                found[n] = others[0]
        if not found:
            return {}, {}
        ends = [y for n, y in enumerate(loop.made.finals) if n not in found]
        trial = self.body.trial(loop.body, homes, results, [*ends, *loop.stacked])
        tried = {n: trial(t) for n, t in found.items()}
        lies = {n: s for n, (s, _) in tried.items()}
        sums = {
            n: s
            for n, s in lies.items()
            if s != homes.of(loop.given.inits[n]) and all(kind == "sum" for _, kind in s.pending)
        }
        return sums, {n: tried[n][1] for n in sums}

    def _stack_home(self, t: Tensor) -> Sharding:
        """The home of a stacked result; of one that is only cast and transposed into a gradient, that of the gradient.

        So each trip reduces what it made to where the gradient lies.
        """
        end, gradients = t, self.homes.graph.gradient_of
        while end not in gradients:
            uses = self.graph.uses.get(end, [])
            if len(uses) != 1 or end in self.fetched or not _same_elements(uses[0][0]):
                return self.homes.of(t)
            end = uses[0][0].output
        home = self.homes.of(end)
        return Sharding(t.shape, home.mesh, [home.of(d.name) for d in t.shape])

    def _is_used(self, t: Tensor) -> bool:
        return t in self.fetched or t in self.graph.taken or bool(self.graph.uses.get(t))


def _same_elements(op: Operation) -> bool:
    """Whether it only casts its operand, or puts its dims in another order."""
    (x, *others), y = op.inputs, op.output
    return op.kind.cheap and not others and set(x.shape) == set(y.shape)


def without_axes(sharding: Sharding, dim: Dimension) -> Sharding:
    """`sharding` with one dim whole."""
    axes = [() if d == dim else entry for d, entry in zip(sharding.shape, sharding.axes, strict=True)]
    return sharding.with_axes(axes)


def with_dim(sharding: Sharding, shape: Shape) -> Sharding:
    """`sharding` of every index of a dim, which is whole: `shape` has it first."""
    return Sharding(shape, sharding.mesh, [(), *sharding.axes])


def without_dim(sharding: Sharding, dim: Dimension) -> Sharding:
    """`sharding` of one index of `dim`, which is whole."""
    kept = [(d, entry) for d, entry in zip(sharding.shape, sharding.axes, strict=True) if d != dim]
    return Sharding(Shape([d for d, _ in kept]), sharding.mesh, [entry for _, entry in kept])
