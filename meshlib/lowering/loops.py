"""Lowering of loops: a body is lowered as a program of its own, with shardings for its operands and results.

Carries have their assigned sharding, slices that of the stacked tensors; other operands keep their shardings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import inf

from layouts import Dimension, Shape, Sharding
from meshlib.core.graph import Graph, Operation, Tensor
from meshlib.core.loop_record import LoopRecord
from meshlib.core.opdef import Kind
from meshlib.lowering.accumulators import Destination, accumulated_terms, destination
from meshlib.lowering.assigned import Homes
from meshlib.lowering.simplification import Simplified
from meshlib.program.instructions import Loop, Value
from meshlib.program.records import Program

Makers = Mapping[str, tuple[Operation, str]]  # pending axis -> (operation that left it, reduced dim)


@dataclass(frozen=True)
class Looped:
    """A lowered loop: `wanted` are the shardings of `operands`; other fields are as in `instructions.Loop`."""

    operands: tuple[Tensor, ...]
    wanted: tuple[Sharding, ...]
    made: tuple[Value, ...]
    body: Program
    trips: int
    carries: tuple[tuple[str, str], ...]
    slices: tuple[str, ...]
    stacks: tuple[str, ...]
    makers: Mapping[Tensor, Makers]  # of results that are pending sums

    def instruction(self, op: Operation, operands: Iterable[Value]) -> Loop:
        """The loop as an instruction, given its operands."""
        return Loop(
            op,
            tuple(operands),
            self.made,
            op.region,
            body=self.body,
            trips=self.trips,
            carries=self.carries,
            slices=self.slices,
            stacks=self.stacks,
        )


@dataclass(frozen=True)
class Body:
    """Functions that lower the body of a loop."""

    # (graph, homes, results, their shardings if bound, names of the inputs) -> Program
    lower: Callable[[Graph, Homes, Sequence[Tensor], Sequence[Sharding | None], Sequence[str]], Program]
    # Partition without further passes: (graph, homes, results, those to be resharded to their assigned sharding) ->
    # function from a tensor to its computed sharding and its pending axes' makers
    trial: Callable[[Graph, Homes, Sequence[Tensor], Sequence[Tensor]], Callable[[Tensor], tuple[Sharding, Makers]]]
    told: Callable[[Loop], object] | None = None  # called with each lowered loop


@dataclass(eq=False)
class Loops:
    """The loops of one graph under one layout, each lowered once."""

    graph: Simplified
    homes: Homes
    fetched: set[Tensor]
    body: Body
    _found: dict[Operation, Looped] = field(default_factory=dict)

    def of(self, op: Operation) -> Looped:
        """Lower a loop."""
        if op not in self._found:
            looped = self._found[op] = self._lowered(op)
            if self.body.told is not None:
                self.body.told(looped.instruction(op, map(Value, looped.operands, looped.wanted)))
        return self._found[op]

    def _lowered(self, op: Operation) -> Looped:
        loop = op.loop
        assert loop is not None
        operands = [self.graph.inputs[op][n] for n in loop.needs]
        inner = [loop.stand_ins[n] for n in loop.needs]
        # Finals always; of stackable values (results, carries before each trip) only those that are used.
        finals, others = op.outputs[: loop.carries], op.outputs[loop.carries :]
        used = [(y, t) for y, t in zip(others, loop.stacked, strict=True) if self._is_used(y)]
        terms = {op.outputs[n]: t for n, t in accumulated_terms(op, loop, self.graph, self._is_accumulated).items()}
        terms |= {y: t for y, t in used if (there := self._destination(y)) is not None and there.is_term}
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
        """The sharding that each trip gives a stacked result; None: as computed."""
        assert op.loop is not None
        if y in sums or y not in op.public_outputs:
            return sums.get(y)
        return without_dim(without_axes(self._stack_home(y), op.loop.dim), op.loop.dim)

    def _body_homes(
        self, op: Operation, loop: LoopRecord, terms: Iterable[Tensor], sums: Mapping[Tensor, Sharding]
    ) -> tuple[Homes, list[Sharding]]:
        """Assigned shardings inside a loop's body, and the shardings of its operands.

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
            there = self._destination(y) or Destination(homes.of(end), inf)
            if y in sums and end.operation.opdef.kind is not Kind.INPUT:  # a carry may be stacked unchanged
                homes.bind(end, sums[y])
            homes.destinations[end] = replace(there.of(end), accumulator=homes.of(end))
        return homes, wanted

    def _destination(self, y: Tensor) -> Destination | None:
        return destination(y, self.graph, self.homes, self.fetched)

    def _is_accumulated(self, y: Tensor) -> bool:
        """True if a result becomes part of an enclosing loop's accumulator."""
        there = self._destination(y)
        return there is not None and there.accumulator is not None

    def _sums(
        self, op: Operation, loop: LoopRecord, terms: Mapping[Tensor, Tensor]
    ) -> tuple[dict[Tensor, Sharding], dict[Tensor, Makers]]:
        """Sharding of each result that a loop (or an enclosing one) accumulates: split and pending like its terms.

        So an accumulated gradient is reduced once, after the loops. Determined by lowering the body once with
        complete accumulators. Returned with the makers of the pending axes.
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
        """The sharding of a stacked result; for gradients, that of the gradient.

        So each trip reduces its result to the gradient's sharding.
        """
        there = self._destination(t)
        return self.homes.of(t) if there is None else there.home

    def _is_used(self, t: Tensor) -> bool:
        is_bound = t in self.fetched or t in self.graph.taken or t in self.homes.destinations
        return is_bound or bool(self.graph.uses.get(t))


@lru_cache(maxsize=1 << 12)
def without_axes(sharding: Sharding, dim: Dimension) -> Sharding:
    """`sharding` with one dim unsplit."""
    axes = [() if d == dim else entry for d, entry in zip(sharding.shape, sharding.axes, strict=True)]
    return sharding.with_axes(axes)


@lru_cache(maxsize=1 << 12)
def with_dim(sharding: Sharding, shape: Shape) -> Sharding:
    """`sharding` extended by an unsplit leading dim of `shape`."""
    return Sharding(shape, sharding.mesh, [(), *sharding.axes], sharding.pending)


@lru_cache(maxsize=1 << 12)
def without_dim(sharding: Sharding, dim: Dimension) -> Sharding:
    """`sharding` without the unsplit dim `dim`."""
    entries = [(d, entry) for d, entry in zip(sharding.shape, sharding.axes, strict=True) if d != dim]
    return Sharding(Shape([d for d, _ in entries]), sharding.mesh, [entry for _, entry in entries], sharding.pending)
