"""The gradient of a scan: a scan over the same dim in reverse.

Its carries are the cotangents of the loop's carries, and a sum per captured tensor; its slices are the loop's, the
carries before each trip, the values kept by the rematerialisation policy, and the cotangents of stacked values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from meshlib.core.arguments import at
from meshlib.core.dtypes import FLOAT32, FLOAT64
from meshlib.core.errors import GraphError
from meshlib.core.graph import BACKWARD, Graph, Operation, Tensor, region
from meshlib.core.loop_record import LoopRecord
from meshlib.core.opdef import Kind
from meshlib.core.replay import needed, replay
from meshlib.ops.control.deferred import Deferred, deferred, weights_are_separate
from meshlib.ops.control.loops import Body, make_loop
from meshlib.ops.control.remat import from_host
from meshlib.ops.control.sources import constant_full
from meshlib.ops.gradients import gradients, is_wanted
from meshlib.ops.movement.shape import rename_dimension, reshape, transpose
from meshlib.ops.pointwise.arithmetic import where
from meshlib.ops.pointwise.casts import CAST, cast


def loop_gradient(op: Operation, *dys: Tensor | None) -> list[Tensor | None]:
    """The wanted cotangents of the operands of a loop; those of carries are always computed."""
    if op.loop is not None and op.loop.going is not None:
        raise GraphError(
            f"{op} has no gradient: its number of trips is known only at run time; "
            "give while_loop a number of trips, or apply stop_gradient to its inputs"
        )
    return _Backwards(op, dys).run()


@dataclass(eq=False)
class _Backwards:
    """Builder of the gradient of one loop."""

    op: Operation
    dys: Sequence[Tensor | None]
    loop: LoopRecord = field(init=False)
    with_gradient: list[int] = field(default_factory=list)  # numbers of the loop's xs with a cotangent

    def __post_init__(self) -> None:
        assert self.op.loop is not None
        self.loop = self.op.loop
        self.inits, self.xs, self.outer = self.loop.operands(self.op.inputs)
        _, _, self.befores, self.saved = self.loop.outputs(self.op.outputs)
        if self.loop.branch is not None:  # before its only trip, carries have their initial values
            self.befores = [reshape(x, [self.loop.dim, *x.shape]) for x in self.inits]
        dys = self.loop.outputs(self.dys)
        self.floats = [x for x in self.inits if x.dtype.is_float]
        self.sums = [x for x in self.outer if x.dtype.is_float and is_wanted(x)]
        self.stacked = [(n, dy) for n, dy in enumerate(dys.stacks) if dy is not None]
        # In a second derivative the carries before each trip have cotangents too: they are added to those of the
        # carries.
        joined = [dy for x, dy in zip(self.inits, dys.befores, strict=True) if x.dtype.is_float]
        self.joining = {n: dy for n, dy in enumerate(joined) if dy is not None}

    def run(self) -> list[Tensor | None]:
        """Build the backward loop; returns a cotangent or None per operand."""
        dys = zip(self.inits, self.dys, strict=False)
        begin = [_no_cotangent(x) if dy is None else dy for x, dy in dys if x.dtype.is_float]
        begin += [_no_cotangent(x) for x in self.sums]
        slices = [*self.befores, *self.xs, *self.saved, *(dy for _, dy in self.stacked), *self.joining.values()]
        dim, backwards, active = self.loop.dim, not self.loop.reverse, self.loop.active
        if active is not None:
            floats = [n for n, x in enumerate(self.inits) if x.dtype.is_float]
            active = replace(active, whole=tuple(floats.index(n) for n in active.whole if n in floats))
        if weights_are_separate() and active is None:
            finals, dxs = self._in_two_loops(begin, slices)
        elif active is not None:
            finals, dxs = make_loop("scan", self._step, begin, slices, dim, backwards, None, active=active)
        else:
            finals, dxs = self._loop(self._step, begin, slices)
        sums_of_outer = dict(zip(self.sums, finals[len(self.floats) :], strict=True))
        carried = iter(finals[: len(self.floats)])
        sides: list[Tensor | None] = [next(carried) if x.dtype.is_float else None for x in self.inits]
        sliced = {n: transpose(dx, self.xs[n].shape) for n, dx in zip(self.with_gradient, dxs, strict=True)}
        return [*sides, *(sliced.get(n) for n in range(len(self.xs))), *(sums_of_outer.get(x) for x in self.outer)]

    def _split_slices(self, slices: Sequence[Tensor]) -> Iterator[list[Tensor]]:
        """The carries before a trip, on the device, then sliced and saved values, cotangents of stacks and carries."""
        rest = iter(slices)
        befores = zip(islice(rest, len(self.befores)), self.inits, strict=True)
        yield [_as_carried(from_host(t) if t.on_host else t, x) for t, x in befores]
        for part in (self.xs, self.saved, self.stacked, self.joining):
            yield list(islice(rest, len(part)))

    def _accumulated(self, graph: Graph, sums: Sequence[Tensor], cotangents: Sequence[Tensor | None]) -> list[Tensor]:
        """Sums over trips after this one, whose cotangents are added."""
        counted = [g if g is None else self._active_part(graph, g) for g in cotangents]
        return [a if g is None else a + g for a, g in zip(sums, counted, strict=True)]

    def _step(self, carries: Sequence[Tensor], slices: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        graph = slices[0].graph
        befores, xs, saved, dys, joining = self._split_slices(slices)
        results = self._recompute(graph, befores, xs, saved)
        ends, stacks = self.loop.made.finals, self.loop.made.stacks
        ys = [results[y] for y in (*(y for y in ends if y.dtype.is_float), *(stacks[n] for n, _ in self.stacked))]
        seeds = [*carries[: len(self.floats)], *dys]
        before = [t for t in befores if t.dtype.is_float]
        sliced = [(n, xs[n]) for n, x in enumerate(self.xs) if x.dtype.is_float and is_wanted(x)]
        sources = [graph.adopt(x) for x in self.sums]
        cotangents = gradients(ys, [*before, *(t for _, t in sliced), *sources], seeds)
        filled = [_no_cotangent(t) if g is None else g for g, t in zip(cotangents, before, strict=False)]
        for n, dy in zip(self.joining, joining, strict=True):
            filled[n] = filled[n] + _as_carried(dy, filled[n])
        stop = len(before) + len(sliced)
        dxs = {n: g for (n, _), g in zip(sliced, cotangents[len(before) : stop], strict=True) if g is not None}
        self.with_gradient = list(dxs)
        sums = self._accumulated(graph, carries[len(before) :], cotangents[stop:])
        _drop_cheap(graph, [*filled, *sums, *dxs.values()])
        return [*filled, *sums], list(dxs.values())

    def _loop(
        self, step: Body, begin: Sequence[Tensor], slices: Sequence[Tensor]
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """A loop over the same dim in the other direction; for a branch, a branch with the same mask."""
        loop = self.loop
        if loop.branch is None or loop.working is None:
            return make_loop("scan", step, begin, slices, loop.dim, not loop.reverse, None)
        mask = self.inits[loop.given.inits.index(loop.working)]

        def masked(carries: Sequence[Tensor], given: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
            ends, stacked_results = step(carries[:-1], given)
            return [*ends, carries[-1]], stacked_results

        finals, stacked_results = make_loop(
            "scan", masked, [*begin, mask], slices, loop.dim, not loop.reverse, None,
            branch=replace(loop.branch, kind=f"{loop.branch.kind} backward"),
        )  # fmt: skip
        return finals[:-1], stacked_results

    def _in_two_loops(
        self, begin: Sequence[Tensor], slices: Sequence[Tensor]
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Two loops: the first computes cotangents of carries, the second all others from values stacked by the
        first."""
        dim, carried = self.loop.dim, len(self.floats)
        stacked: list[Tensor] = []  # values stacked by the first body
        sliced: list[tuple[Tensor, int]] = []  # slices of the first body that the second reads too, with their numbers
        captured: dict[Tensor, Tensor] = {}
        later, results = Deferred((), (), {}), list[Tensor]()

        def first(carries: Sequence[Tensor], given: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
            nonlocal later, results
            graph = given[0].graph
            zeros = [_no_cotangent(graph.adopt(x)) for x in self.sums]
            ends, dxs = self._step([*carries, *zeros], given)
            results = [*ends[carried:], *dxs]
            later = deferred(graph, ends[:carried], results, lambda x: dim.name not in x.shape)
            for x in later.inputs:
                if x in given:
                    sliced.append((x, list(given).index(x)))
                elif (outer := graph.outer_of(x)) is not None:
                    captured[x] = outer
                else:
                    stacked.append(x)
            return ends[:carried], stacked

        finals, stacks = self._loop(first, begin[:carried], slices)

        def second(carries: Sequence[Tensor], given: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
            graph = given[0].graph
            inside = dict(zip([*stacked, *(x for x, _ in sliced)], given, strict=True))
            inside |= {x: graph.adopt(outer) for x, outer in captured.items()}
            grads = later.written(graph, inside, results)
            count = len(self.sums)
            return [a + g for a, g in zip(carries, grads, strict=False)], grads[count:]

        again = [*stacks, *(slices[n] for _, n in sliced)]
        sums, dxs = self._loop(second, begin[carried:], again) if again else ((), ())
        return (*finals, *(sums or begin[carried:])), tuple(dxs)

    def _active_part(self, graph: Graph, g: Tensor) -> Tensor:
        """A cotangent shared by all trips, zeroed at indices that are inactive in this trip."""
        working = None if graph.loop_body is None else graph.loop_body.working
        if working is None or not set(working.shape) <= set(g.shape):
            return g
        return where(working, g, 0, output_shape=g.shape)

    def _recompute(
        self, graph: Graph, befores: Sequence[Tensor], xs: Sequence[Tensor], saved: Sequence[Tensor]
    ) -> Mapping[Tensor, Tensor]:
        """Recompute the body of one trip, with saved values marked as known."""
        body = self.loop.body
        given = (*befores, *xs, *(graph.adopt(x) for x in self.outer))
        inside = dict(zip(self.loop.stand_ins, given, strict=True))
        # before the copies that use them
        saved_values = [
            (y, from_host(t) if t.on_host and not y.on_host else t) for y, t in zip(self.loop.kept, saved, strict=True)
        ]
        results = replay(body.operations, body.rewrites, inside, graph)
        graph.known.update((results[y], value) for y, value in saved_values)
        return results


def _drop_cheap(graph: Graph, results: Sequence[Tensor]) -> None:
    """Forget kept casts and views whose operand is kept and used as well: they are recomputed from it."""
    live = needed(graph.known.get(y, y).operation for y in results)
    for y, value in tuple(graph.known.items()):
        operand = y.operation.inputs[0] if y.operation.opdef.cheap else None
        source = graph.known.get(operand) if operand is not None else None
        if value.operation in live and source is not None and source.operation in live:
            del graph.known[y]


def _as_carried(before: Tensor, carry: Tensor) -> Tensor:
    """A stacked carry or its cotangent with the dim names of the carry, which may include the loop's dim."""
    for stacked, own in zip(before.shape.names, carry.shape.names, strict=True):
        before = rename_dimension(before, stacked, own)
    return before


def _no_cotangent(x: Tensor) -> Tensor:
    return constant_full(0, x, x.dtype.of_cotangents)


def led_to(graph: Graph) -> set[Tensor]:
    """The tensors of a root graph that depend on trainable variables, and these variables."""
    leads = set(graph.trainable_variables)
    for op in graph.operations:
        if any(x in leads for x in op.inputs):
            leads.update(op.outputs)
    return leads


def wide(x: Tensor) -> Tensor:
    """`x` cast to the dtype of accumulation."""
    return cast(x, FLOAT32) if x.dtype.is_float and x.dtype is not FLOAT64 else x


def variable_gradients(
    graph: Graph, loop: Operation, sources: Sequence[Tensor], totals: Sequence[Tensor], what: str, scale: float = 1.0
) -> list[Tensor]:
    """The gradients of all trainable variables from sums over the trips of a loop, computed once after it.

    Args:
      loop: has the results `totals`, the sums of d loss / d source for the `sources`, tensors of `graph`.
      what: the public function, for messages.
      scale: factor of all gradients.
    Raises: GraphError for a trainable variable that the loss does not depend on.
    """
    roots = []
    for outer, total in zip(sources, totals, strict=True):
        root = _uncast(outer)
        if root.operation.opdef.kind is Kind.VARIABLE:
            _shard_like_slots(loop, total, root.operation)
        roots.append(root)
    trainable = graph.trainable_variables
    with region(BACKWARD):
        scaled = totals if scale == 1 else [t * scale for t in totals]
        seeds = [cast(t, r.dtype) for t, r in zip(scaled, roots, strict=True)]
    of_variables = gradients(roots, trainable, seeds) if roots else [None] * len(trainable)
    missing = [f"'{v.name}' ({v.operation.source})" for v, g in zip(trainable, of_variables, strict=True) if g is None]
    if missing:
        raise GraphError(
            f"{at(what)}: the loss does not depend on {', '.join(missing)}; declare untrained variables with "
            "trainable=False"
        )
    return [g for g in of_variables if g is not None]


def _shard_like_slots(loop: Operation, total: Tensor, variable: Operation) -> None:
    """Give an accumulated gradient the sharding of the variable's slots, in the loop and after it."""
    assert loop.loop is not None
    number = loop.outputs.index(total)
    for t in (loop.loop.given.inits[number], loop.loop.made.finals[number], total):
        t.graph.gradient_of[t] = variable


def _uncast(x: Tensor) -> Tensor:
    """The float tensor that `x` is a cast of: its gradient is accumulated before rounding to the narrow type."""
    while x.operation.opdef is CAST and x.operation.inputs[0].dtype.is_float:
        x = x.operation.inputs[0]
    return x
