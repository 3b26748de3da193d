"""Loops in lowering: a body lowered as a program of its own, its operands and results.

Carries lie at home, slices where the stacked tensors lie, the rest where it lies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from layouts import Dimension, Shape, Sharding
from meshlib.core.graph import Graph, Operation, Tensor
from meshlib.core.loop_record import LoopRecord
from meshlib.core.opdef import Kind
from meshlib.lowering.accumulators import Destination, accumulated_terms, destination
from meshlib.lowering.assigned import Homes
from meshlib.lowering.simplification import Simplified
from meshlib.program.instructions import Value
from meshlib.program.records import Program

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
        # Finals always; of what could be stacked (results, and carries before each trip) only what is used.
        finals, others = op.outputs[: loop.carries], op.outputs[loop.carries :]
        used = [(y, t) for y, t in zip(others, loop.stacked, strict=True) if self._is_used(y)]
        terms = {op.outputs[n]: t for n, t in accumulated_terms(op, loop, self.graph, self._is_added_up).items()}
        terms |= {y: t for y, t in used if self._is_added_up(y)}
        sums, makers = self._sums(op, loop, terms)
        homes, wanted = self._body_homes(op, loop, terms, sums)
        bound: list[Sharding | None] = [*wanted[: loop.carries], *(self._bound(op, y, sums) for y, _ in used)]
        made_inside = [*loop.made.finals, *(t for _, t in used)]
        program = self.body.lower(loop.body, homes, made_inside, bound, [x.operation.name for x in inner])
        names = list(program.outputs)
        results = [Value(y, s) for y, s in zip(finals, wanted, strict=False)]
        for (y, _), name in zip(used, names[loop.carries :], strict=True):
            results.append(Value(y, with_dim(program.outputs[name].sharding, y.shape)))
            if y not in op.public_outputs or y in sums:
                self.homes.bind(y, results[-1].sharding)
        return Looped(
            tuple(operands),
            tuple(wanted),
            tuple(results),
            program,
            loop.dim.size,
            carries=tuple((t.operation.name, name) for t, name in zip(loop.given.inits, names, strict=False)),
            slices=tuple(t.operation.name for t in loop.given.slices if t.operation.name in program.inputs),
            stacks=tuple(names[loop.carries :]),
            makers=makers,
        )

    def _bound(self, op: Operation, y: Tensor, sums: Mapping[Tensor, Sharding]) -> Sharding | None:
        """Where each trip leaves what is stacked; None: wherever it makes it."""
        assert op.loop is not None
        if y in sums or y not in op.public_outputs:
            return sums.get(y)
        return without_dim(without_axes(self._stack_home(y), op.loop.dim), op.loop.dim)

    def _body_homes(
        self, op: Operation, loop: LoopRecord, terms: Iterable[Tensor], sums: Mapping[Tensor, Sharding]
    ) -> tuple[Homes, list[Sharding]]:
        """Homes inside the body of a loop, and where each operand has to be.

        Of the results `terms`, which are accumulators or parts of them, `sums` has the shardings in the body.
        """
        homes = self.homes.inside(loop.body)
        wanted = []
        for n in loop.needs:
            x, y = self.graph.inputs[op][n], loop.stand_ins[n]
            if y in loop.given.inits:
                home = sums.get(op.outputs[n]) or homes.of(y)
                homes.bind(y, home)
            elif y in loop.given.slices:
                home = without_axes(self.homes.of(x), loop.dim)
                homes.bind(y, without_dim(home, loop.dim))
            else:
                home = self.homes.of(x)
                homes.bind(y, home)
            wanted.append(home)
        inside = dict(zip(op.outputs, (*loop.made.finals, *loop.stacked), strict=True))
        for y in terms:
            end = inside[y]
            there = destination(y, self.graph, self.homes, self.fetched) or Destination(homes.of(end), inf)
            if y in sums and end.operation.opdef.kind is not Kind.INPUT:  # a carry may be stacked as it comes in
                homes.bind(end, sums[y])
            homes.destinations[end] = replace(there.of(end), accumulator=homes.of(end))
        return homes, wanted

    def _is_added_up(self, y: Tensor) -> bool:
        """Whether a stacked result becomes part of an accumulator of a loop around."""
        there = destination(y, self.graph, self.homes, self.fetched)
        return there is not None and there.accumulator is not None

    def _sums(
        self, op: Operation, loop: LoopRecord, terms: Mapping[Tensor, Tensor]
    ) -> tuple[dict[Tensor, Sharding], dict[Tensor, Makers]]:
        """Results that add something up, or that a loop around adds up: each is split and pending as its terms are.

        So a gradient that every trip adds to is reduced once, after the loops. Found by lowering the body once with
        accumulators that are whole. Returned with who leaves each sum pending.
        """
        if not terms:
            return {}, {}
        whole = {y: Sharding.replicated(t.shape, self.homes.mesh) for y, t in terms.items()}
        homes, _ = self._body_homes(op, loop, terms, whole)
        bound = [t for y, t in zip(op.outputs, (*loop.made.finals, *loop.stacked), strict=True) if y not in terms]
        trial = self.body.trial(loop.body, homes, loop.results, bound)
        sums: dict[Tensor, Sharding] = {}
        makers: dict[Tensor, Makers] = {}
        for y, t in terms.items():
            chosen, maker = trial(t)
            if y in op.outputs[loop.carries :]:
                chosen = homes.destinations[t].of_sum(chosen)
            if all(kind == "sum" for _, kind in chosen.pending):
                sums[y], makers[y] = chosen, maker
        return sums, makers

    def _stack_home(self, t: Tensor) -> Sharding:
        """The home of a stacked result; of one that becomes a gradient, that of the gradient.

        So each trip reduces what it made to where the gradient lies.
        """
        there = destination(t, self.graph, self.homes, self.fetched)
        return self.homes.of(t) if there is None else there.home

    def _is_used(self, t: Tensor) -> bool:
        is_bound = t in self.fetched or t in self.graph.taken or t in self.homes.destinations
        return is_bound or bool(self.graph.uses.get(t))


def without_axes(sharding: Sharding, dim: Dimension) -> Sharding:
    """`sharding` with one dim whole."""
    axes = [() if d == dim else entry for d, entry in zip(sharding.shape, sharding.axes, strict=True)]
    return sharding.with_axes(axes)


def with_dim(sharding: Sharding, shape: Shape) -> Sharding:
    """`sharding` of every index of a dim, which is whole: `shape` has it first."""
    return Sharding(shape, sharding.mesh, [(), *sharding.axes], sharding.pending)


def without_dim(sharding: Sharding, dim: Dimension) -> Sharding:
    """`sharding` of one index of `dim`, which is whole."""
    entries = [(d, entry) for d, entry in zip(sharding.shape, sharding.axes, strict=True) if d != dim]
    return Sharding(Shape([d for d, _ in entries]), sharding.mesh, [entry for _, entry in entries], sharding.pending)
