"""Loop trips in which only some indices of a dim are active: the fast executor computes these alone.

`LoopRecord.active` gives the active indices, such as the stages of a pipeline as it fills or drains. Of a value of the
body with that dim only the active range [begin, end) is kept, and operations that are parallel along the dim, or sum
over it, run on ranges. Others (the shift to the next stage) run on whole values, zero outside the range.

A carry computed on a range keeps its previous value at other indices: a sum of gradients, to which an idle stage adds
nothing. Stacked results are zero there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from hardware.numerics import round_to_bfloat16
from layouts import Dimension
from meshlib.core.engine import Engine
from meshlib.core.graph import TensorType
from meshlib.core.opdef import Factor, Kind, Role
from meshlib.program.instructions import Compute, Instruction, Loop, Move, Value
from meshlib.program.records import Program
from meshlib.simulation.blocks import compute

if TYPE_CHECKING:
    from meshlib.simulation.fast import FastExecutor

Array = np.ndarray[Any, Any]
Run = tuple[int, int]


class Working(Move):
    """Replacement of a `where` whose mask is true for every computed index: its input, unchanged."""


@dataclass(eq=False)
class Parts:
    """Execution plan of a loop body's instructions on a range of indices of one dim.

    dims     the name that the dim has in each value that has it
    partial  values that are kept for the active range alone; others with the dim are kept whole
    factors  for each computation on the range, the factor of the dim
    loops    the same plan for each nested loop that runs on the range
    """

    size: int
    dims: dict[Value, str] = field(default_factory=dict)
    partial: set[Value] = field(default_factory=set)
    factors: dict[Instruction, Factor] = field(default_factory=dict)
    loops: dict[Loop, Parts] = field(default_factory=dict)
    _types: dict[tuple[Value, int], TensorType] = field(default_factory=dict)

    def cut(self, v: Value, x: Array, run: Run) -> Array:
        """The active range of a whole array."""
        if v not in self.dims:
            return x
        return x[(np.s_[:],) * self.axis(v) + (np.s_[run[0] : run[1]],)]

    def filled(self, v: Value, part: Array, run: Run) -> Array:
        """A whole array, zero outside the active range."""
        whole = np.zeros(v.tensor.shape.sizes, part.dtype)
        self.cut(v, whole, run)[...] = part
        return whole

    def axis(self, v: Value) -> int:
        """Position of the dim in a value."""
        return v.tensor.shape.index(self.dims[v])

    def type(self, v: Value, run: Run) -> TensorType:
        """Type of a value's active range."""
        if v not in self.dims:
            return v.tensor.type
        key = v, run[1] - run[0]
        if key not in self._types:
            self._types[key] = TensorType(v.tensor.shape.resize(self.dims[v], key[1]), v.tensor.dtype)
        return self._types[key]


def _move_parts(parts: Parts, either: set[Value], i: Move) -> None:
    """A move's results are like its operands; those of `Working` are given for the range alone."""
    for x, y in zip(i.inputs, i.outputs, strict=True):
        _propagate(parts, either, x, y)
        if isinstance(i, Working) and y in parts.dims:
            parts.partial.add(y)
            either.discard(y)


def _plan_step(
    executor: FastExecutor,
    parts: Parts,
    either: AbstractSet[Value],
    i: Compute | Loop,
    dim: Dimension,
    passing: AbstractSet[Instruction],
    passed: set[Value],
) -> None:
    """Plan whether a computation or loop runs on the range; `passed` gets views of results of `passing` ones."""
    known = [x for x in i.inputs if x in parts.dims]
    some = any(x in parts.partial for x in known)
    all_whole = any(x not in parts.partial and x not in either for x in known)
    follows = all(x in either for x in known) and not passed.isdisjoint(i.inputs)
    in_part = (some or not all_whole) and i not in passing and not follows
    if follows and i.operation.opdef.kind is Kind.VIEW:
        passed.update(i.outputs)
    if isinstance(i, Loop):
        _loop_parts(executor, parts, i, dim, in_part and bool(known))
    else:
        _compute_parts(parts, i, dim, in_part)


def parts_of(
    executor: FastExecutor,
    inputs: Mapping[Value, str],
    dim: Dimension,
    whole: bool,
    passing: AbstractSet[Instruction] = frozenset(),
) -> Parts:
    """Plan how a body runs on a range of `dim`.

    `inputs` are the inputs with the dim, and its name in each; with `whole`, they are given whole and each user cuts
    its range, otherwise they are given as ranges. `passing` instructions run on whole values, and so do users of their
    results that read no range.
    """
    passed = {y for i in passing for y in i.outputs}
    parts = Parts(dim.size, dict(inputs))
    either = set(inputs) if whole else set()
    if not whole:
        parts.partial.update(inputs)
    for i in executor.ready.instructions:
        if isinstance(i, Move):
            _move_parts(parts, either, i)
            continue
        known = [x for x in i.inputs if x in parts.dims]
        if not isinstance(i, Compute | Loop):
            for x, y in zip(i.inputs, i.outputs, strict=False):  # an operand rounded for the MXU
                _propagate(parts, either, x, y)
            continue
        _plan_step(executor, parts, either, i, dim, passing, passed)
        # Results of `passing` instructions, and of those of which all operands are given either way.
        if i in passing or (known and either.issuperset(known)):
            # A move along the dim of a whole value is right for every index. A move of a range yields values for the
            # indices that are active next, so its result must stay whole.
            either.update(y for y in i.outputs if y not in parts.partial)
        # without a factor, the dim is known by its name
        parts.dims.update({y: dim.name for y in i.outputs if y not in parts.dims and dim in y.tensor.shape})
    return parts


def passing_instructions(executor: FastExecutor, carries: Sequence[tuple[Value, Value]]) -> set[Instruction]:
    """Instructions on a path from these carries at the start of a trip to the same carries at its end."""
    program = executor.ready.instructions
    reached = {begin for begin, _ in carries}
    after = []
    for i in program:
        if not reached.isdisjoint(i.inputs):
            reached.update(i.outputs)
            after.append(i)
    needed = {end for _, end in carries}
    passing = set()
    for i in reversed(after):
        if not needed.isdisjoint(i.outputs):
            needed.update(i.inputs)
            passing.add(i)
    return passing


def _propagate(parts: Parts, either: set[Value], x: Value, y: Value) -> None:
    """Let `y`, an alias of `x` or the sum of its partial results, inherit the state of `x`."""
    if x in parts.dims:
        parts.dims[y] = parts.dims[x]
        if x in parts.partial:
            parts.partial.add(y)
        if x in either:
            either.add(y)


def _compute_parts(parts: Parts, i: Compute, dim: Dimension, in_part: bool) -> None:
    factors = i.operation.opdef.roles(i.operation)
    factor = _factor(parts, i, factors, dim)
    if factor is not None:
        for n, y in enumerate(i.outputs):
            name = factor.outputs[n]
            if name is not None:
                parts.dims[y] = name
        if in_part and (factor.role is Role.PARALLEL or factor.role.reduces):
            parts.factors[i] = factor
            parts.partial.update(y for y in i.outputs if y in parts.dims)


def _factor(parts: Parts, i: Compute, factors: Sequence[Factor], dim: Dimension) -> Factor | None:
    """The factor of the dim in all operands that have it, if results have the dim in the same size."""
    for f in factors:
        names = [parts.dims.get(x) for x in i.inputs]
        here = any(names) or (dim.name in f.outputs and not i.inputs)
        sizes = [y.tensor.shape.dim(name).size for y, name in zip(i.outputs, f.outputs, strict=True) if name]
        if here and list(f.operands) == names and f.size == parts.size and all(size == parts.size for size in sizes):
            return f
    return None


def _loop_parts(executor: FastExecutor, parts: Parts, i: Loop, dim: Dimension, in_part: bool) -> None:
    body = i.body
    given = dict(zip(body.inputs.values(), i.inputs, strict=True))
    inputs = {v: parts.dims[x] for v, x in given.items() if x in parts.dims}
    inside = parts_of(executor.bodies[i], inputs, dim, whole=False)
    ends = [body.outputs[end] for _, end in i.carries]
    stacks = [body.outputs[name] for name in i.stacks]
    begins = [body.inputs[begin] for begin, _ in i.carries]
    same = all(inside.dims.get(a) == inside.dims.get(b) for a, b in zip(begins, ends, strict=True))
    for y, v in zip(i.outputs, (*begins, *stacks), strict=True):
        if v in inside.dims:
            parts.dims[y] = inside.dims[v]
    if in_part and same:
        parts.loops[i] = inside
        parts.partial.update(y for y in i.outputs if y in parts.dims)


@dataclass(eq=False)
class PartialRun:
    """Runs one executor's program on a range of a dim."""

    executor: FastExecutor
    parts: Parts
    places: dict[Value, Array] = field(default_factory=dict)  # where some ranges are written

    def run(self, given: Mapping[Value, Array], engine: Engine, run: Run) -> dict[Value, Array]:
        """As `Interpreter.run`: fetched values, as ranges for those in `parts.partial`."""
        program = self.executor.ready
        values, last = dict(given), program.last_use
        for n, i in enumerate(program.instructions):
            values.update(zip(i.outputs, self._results(program, i, values, engine, run), strict=True))
            for x in i.inputs:
                if last[x] == n:
                    values.pop(x, None)
        return values

    def _results(
        self, program: Program, i: Instruction, values: Mapping[Value, Array], engine: Engine, run: Run
    ) -> Sequence[Array]:
        if isinstance(i, Loop) and i in self.parts.loops:
            return self._loop(i, self._in_part(i, values, run), engine, run)
        factor = self.parts.factors.get(i)
        if isinstance(i, Compute) and factor is not None:
            return self._compute(i, factor, values, engine, run)
        if isinstance(i, Compute | Loop):
            whole = [self._whole(x, values[x], run) for x in i.inputs]
            return tuple(self.executor.results(program, i, whole, values, engine))
        # Moves and rounded operands treat a range like a whole value.
        if isinstance(i, Working):
            return self._in_part(i, values, run)
        if isinstance(i, Move):
            return self.executor.move(i, [values[x] for x in i.inputs])
        if i.inputs:
            return self._rounded(i, values)
        return [values[y] for y in i.outputs]

    def _whole(self, v: Value, x: Array, run: Run) -> Array:
        return self.parts.filled(v, x, run) if v in self.parts.partial else x

    def _in_part(self, i: Instruction, values: Mapping[Value, Array], run: Run) -> list[Array]:
        return [values[x] if x in self.parts.partial else self.parts.cut(x, values[x], run) for x in i.inputs]

    def _rounded(self, i: Instruction, values: Mapping[Value, Array]) -> list[Array]:
        (x,), (y,) = i.inputs, i.outputs
        return [round_to_bfloat16(values[x], out=self._target(y, values[x].shape))]

    def _compute(
        self, i: Compute, factor: Factor, values: Mapping[Value, Array], engine: Engine, run: Run
    ) -> tuple[Array, ...]:
        types = tuple(self.parts.type(x, run) for x in i.inputs)
        outs = tuple(self.parts.type(y, run) for y in i.outputs)
        offsets = {**self.executor.zero_offsets[i], factor.name: run[0]}
        # A range of a whole value may overlap the result's memory at another offset.
        moved = any(x in self.parts.dims and x not in self.parts.partial for x in i.inputs)
        buffer = self.places.get(i.outputs[0])
        if buffer is None and not moved:
            buffer = self._target(i.outputs[0], outs[0].shape.sizes)
        return compute(i.operation, types, outs, self._in_part(i, values, run), offsets, engine, buffer)

    def _target(self, y: Value, shape: tuple[int, ...]) -> Array | None:
        """The array into which a result is written: the beginning of its buffer."""
        buffer = self.executor.target(y)
        if buffer is None or not buffer.flags.c_contiguous:
            return None
        return _beginning(buffer, shape)

    def _loop(self, i: Loop, inputs: Sequence[Array], engine: Engine, run: Run) -> list[Array]:
        """A nested loop on the range: its carries and stacked results are ranges, too."""
        inside = self.parts.loops[i]
        runner = PartialRun(self.executor.bodies[i], inside)
        body = i.body
        given = dict(zip(body.inputs.values(), inputs, strict=True))
        sliced = {body.inputs[name]: (given[body.inputs[name]], i.slice_axis(name)) for name in i.slices}
        stacks = zip(i.outputs[len(i.carries) :], self.executor.stacks_of(i), strict=True)
        beginnings = [_beginning(stack, self.parts.type(y, run).shape.sizes) for y, stack in stacks]
        for trip in i.trip_order:
            given.update({v: self.executor.sliced(x, trip, axis) for v, (x, axis) in sliced.items()})
            runner.executor.begin_trip()
            values = runner.run(given, engine.in_trip(trip), run)
            for stack, name in zip(beginnings, i.stacks, strict=True):
                stack[trip] = runner.result(body.outputs[name], values, run)
            given.update(
                {body.inputs[begin]: runner.result(body.outputs[end], values, run).copy() for begin, end in i.carries}
            )
        return [given[body.inputs[begin]] for begin, _ in i.carries] + beginnings

    def result(self, v: Value, values: Mapping[Value, Array], run: Run) -> Array:
        """The active range of a value of the body."""
        return values[v] if v in self.parts.partial else self.parts.cut(v, values[v], run)


def _beginning(array: Array, shape: tuple[int, ...]) -> Array:
    """A smaller array in the beginning of a contiguous array's memory."""
    return array.reshape(-1)[: prod(shape)].reshape(shape)


@dataclass(eq=False)
class PartialTrips:
    """The trips of one loop in which some indices are idle."""

    loop: Loop
    executor: FastExecutor  # of the loop's body
    over: Mapping[Value, Array]  # carries updated in place, each with its array

    def __post_init__(self) -> None:
        active = self.loop.record.active
        assert active is not None
        self.active = active
        dim = Dimension(active.dim, active.size)
        inputs = {v: active.dim for v in self.loop.body.inputs.values() if dim in v.tensor.shape}
        body = self.loop.body
        carries = [(body.inputs[begin], body.outputs[end]) for begin, end in self.loop.carries]
        passing = passing_instructions(self.executor, [carries[n] for n in active.whole])
        self.runner = PartialRun(self.executor, parts_of(self.executor, inputs, dim, whole=True, passing=passing))
        self.carried: dict[Value, Array] = {}  # arrays that carry other values from trip to trip

    def of(self, trip: int) -> Run | None:
        """The active range of a trip, including gaps; None if it is the whole dim."""
        runs = self.active.runs(trip)
        run = (runs[0][0], runs[-1][1]) if runs else (0, 0)
        return None if run == (0, self.active.size) or not runs else run

    def trip(
        self, given: Mapping[Value, Array], engine: Engine, run: Run, places: Mapping[Value, Array]
    ) -> dict[Value, Array]:
        """Run one trip on its active range; returns the carries, and writes stacked results to `places`."""
        parts, body = self.runner.parts, self.loop.body
        ends = {body.outputs[end]: body.inputs[begin] for begin, end in self.loop.carries}
        self.executor.begin_trip()
        self.runner.places = {v: self._place(v, given[begin], run) for v, begin in ends.items() if self._is_in_place(v)}
        values = self.runner.run(given, engine, run)
        for v, place in places.items():
            if v in parts.partial:
                place[...] = 0
                parts.cut(v, place, run)[...] = values[v]
            else:
                place[...] = values[v]
        return {end: self._carried(end, given[begin], values[end], run) for end, begin in ends.items()}

    def _is_in_place(self, v: Value) -> bool:
        """True if a carry's active range is overwritten in place."""
        return v in self.over and v in self.runner.parts.partial and self.runner.parts.axis(v) == 0

    def _place(self, v: Value, before: Array, run: Run) -> Array:
        held = self.over[v]
        if before is not held:
            held[...] = before
        return self.runner.parts.cut(v, held, run)

    def _carried(self, v: Value, before: Array, after: Array, run: Run) -> Array:
        if v not in self.runner.parts.partial:
            return after.copy()
        if v in self.runner.places:
            if after is not self.runner.places[v]:
                self.runner.places[v][...] = after
            return self.over[v]
        held = self.carried.get(v)
        if held is None or held is not before:
            held = self.carried[v] = before.copy()
        self.runner.parts.cut(v, held, run)[...] = after
        return held
