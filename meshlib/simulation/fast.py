"""The fast executor: all blocks of a value are one array.

A value is stored in global order: an axis that splits a dim is part of that dim, an axis over which the value is
replicated is not there, and a pending axis is a leading array axis. So moves are free, a computation that is parallel
over an axis runs on all its blocks at once, and one that leaves a pending sum runs once per block of what it sums.

The folding pass removes those leading axes: an operation whose pending result is only reduced, or only passed on by
linear operations to where it is reduced, runs its own `local` on blocks merged over the axis, as one BLAS call. What
changes is the order of addition, which the exact executor keeps; the instructions are the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import product
from types import MappingProxyType
from typing import Any

import numpy as np

from hardware.numerics import round_to_bfloat16
from layouts import Dimension, Shape
from meshlib.arrays import new_array, unwritten
from meshlib.dtypes import FLOAT32
from meshlib.engine import Engine
from meshlib.graph import Operation, TensorType
from meshlib.operation import ON_MXU, Block, Factor, Halo, Role
from meshlib.ops.elementwise import WHERE
from meshlib.program.exchange import summary_factor
from meshlib.program.instructions import Compute, Instruction, Loop, Move, Value
from meshlib.program.interpreter import Interpreter
from meshlib.program.records import Program
from meshlib.simulation.blocks import compute, summarised
from meshlib.simulation.buffers import Buffers
from meshlib.simulation.parts import PartialTrips, Working

Array = np.ndarray[Any, Any]
_NONE: Mapping[Value, Array] = MappingProxyType({})


def settled_mask(i: Loop) -> Value | None:
    """The mask of a loop's body that says what works in a trip, if nothing else is ever computed."""
    record = i.record
    if record.active is None or record.working is None:
        return None
    alone = all(len(record.active.runs(trip)) == 1 for trip in range(i.trips))
    return i.body.inputs.get(record.working.operation.name) if alone else None


def unfolded_axes(program: Program, fold: bool = True) -> dict[Value, tuple[str, ...]]:
    """Per pending value the axes that must stay apart; with `fold` only where a reduction is not all that follows."""
    if not fold:
        # Sums that stay pending through a loop are folded in any case: what begins as nothing has no parts.
        through = {a for v in (*program.inputs.values(), *program.outputs.values()) for a in v.sharding.pending_axes}
        for i in program.instructions:
            if isinstance(i, Loop):
                through |= {a for v in (*i.inputs, *i.outputs) for a in v.sharding.pending_axes}
        found = {y: y.sharding.pending_axes for i in program.instructions for y in i.outputs if y.sharding.pending}
        kept = {y: tuple(a for a in axes if a not in through) for y, axes in found.items()}
        return {y: axes for y, axes in kept.items() if axes}
    users: dict[Value, list[tuple[Instruction, Value]]] = {}
    for i in program.instructions:
        for n, x in enumerate(i.inputs if i.outputs else ()):
            users.setdefault(x, []).append((i, i.outputs[n if isinstance(i, Move) else 0]))
    apart: dict[Value, tuple[str, ...]] = {}
    for i in reversed(program.instructions):
        for y in i.outputs:
            stuck = tuple(
                a
                for a in y.sharding.pending_axes
                # Each user either takes the reduction or passes the sum on to a value that is folded itself.
                if not all(
                    a not in out.sharding.pending_axes or a not in apart.get(out, ()) for _, out in users.get(y, [])
                )
            )
            if stuck:
                apart[y] = stuck
        if any(y in apart for y in i.outputs[1:]) and isinstance(i, Compute):
            # Results of one computation come apart together: it runs once per block.
            together = {a for y in i.outputs for a in apart.get(y, ())}
            apart.update((y, tuple(a for a in y.sharding.pending_axes if a in together)) for y in i.outputs)
    return apart


@dataclass(frozen=True, eq=False)
class Round(Instruction):
    """A float32 operand of the MXU rounded to bfloat16, once for all products that read it."""


@dataclass(eq=False)
class FastExecutor(Interpreter[Array, Engine]):
    """A program made ready to run many steps: buffers planned once by liveness, arrays reused."""

    program: Program
    fold: bool = True
    settled: Value | None = None  # a mask that holds for all that is computed
    bodies: dict[Loop, FastExecutor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.apart = unfolded_axes(self.program, self.fold)
        loops = [i for i in self.program.instructions if isinstance(i, Loop)]
        self.bodies = {i: FastExecutor(i.body, self.fold, settled_mask(i)) for i in loops}
        self.ready = self.program.with_instructions(self._rounding())
        self.buffers = Buffers(self.ready, self._stored_shape)
        self.zero_offsets = {
            i: {f.name: 0 for f in i.operation.kind.roles(i.operation)}
            for i in self.ready.instructions
            if isinstance(i, Compute)
        }
        self._targets: Mapping[Value, Array] = _NONE  # where the run that is on writes
        self._stacks: dict[Loop, list[Array]] = {}
        # Carries that each trip writes over, which are there once.
        self._carried = {i: {v: self._array(v) for v in inside.written_over(i)} for i, inside in self.bodies.items()}
        self._partial = {
            i: PartialTrips(i, inside, self._carried[i])
            for i, inside in self.bodies.items()
            if i.record.active is not None
        }

    # ------------------------------------------------------------ planning

    def _stored_shape(self, v: Value) -> tuple[int, ...]:
        return (*(self.program.mesh.axis_size(a) for a in self.apart.get(v, ())), *v.tensor.shape.sizes)

    def _rounding(self) -> list[Instruction]:
        """The instructions, with operands of products rounded before the first product that reads them."""
        found: list[Instruction] = []
        rounded: dict[Value, Value] = {}
        settled = {self.settled}
        for i in self.program.instructions:
            if isinstance(i, Move):  # a part of the mask holds as well
                settled.update(y for x, y in zip(i.inputs, i.outputs, strict=True) if x in settled)
            if isinstance(i, Compute) and self._is_settled(i, settled):
                i = Working(i.operation, i.inputs[1:2], i.outputs, i.region, (), ())
            if isinstance(i, Compute) and self._rounds(i):
                for x in i.inputs:
                    if x.tensor.dtype is FLOAT32 and x not in rounded:
                        rounded[x] = y = Value(x.tensor, x.sharding)
                        if x in self.apart:
                            self.apart[y] = self.apart[x]
                        found.append(Round(i.operation, (x,), (y,), i.region))
                i = replace(i, inputs=tuple(rounded.get(x, x) for x in i.inputs))
            found.append(i)
        return found

    def _is_settled(self, i: Compute, settled: Set[Value | None]) -> bool:
        """Whether it chooses by a mask that holds, and so does nothing."""
        if i.operation.kind is not WHERE or i.inputs[0] not in settled:
            return False
        x, y = i.inputs[1], i.outputs[0]
        return (x.tensor.type, self.apart.get(x)) == (y.tensor.type, self.apart.get(y))

    def _rounds(self, i: Compute) -> bool:
        precise = self.program.precision == "highest" or i.operation.attrs.get("precision", "default") != "default"
        return i.operation.kind.kind in ON_MXU and not precise

    # ------------------------------------------------------------ running

    def step(
        self, state: Mapping[str, Array], feeds: Mapping[str, Array], engine: Engine
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        """Run one step: global outputs and new values of the updated variables.

        Outputs are the executor's own arrays, valid until the next step. New values are never written over the
        state, so that a step that fails leaves it as it was.
        """
        engine = Engine(engine.seed, engine.step, engine.highest, in_order=False, rounded=True, shared={})
        given = {v: feeds[name] for name, v in self.program.inputs.items()}
        given |= {v: state[name] for name, v in self.program.variables.items()}
        self._targets = self.buffers.begin(state.values())
        arrays = self.run(self.ready, given, engine)
        outputs = {name: arrays[v] for name, v in self.program.outputs.items()}
        owned = self.buffers.double
        updates = {
            name: arrays[v] if self.buffers.owner[v] in owned else arrays[v].copy()
            for name, v in self.program.updates.items()
        }
        return outputs, updates

    def results(
        self, program: Program, i: Instruction, inputs: Sequence[Array], values: Mapping[Value, Array], context: Engine
    ) -> Iterable[Array]:
        """As everywhere; operands of products are rounded besides."""
        if isinstance(i, Round):
            return [round_to_bfloat16(inputs[0], out=self.target(i.outputs[0]))]
        return super().results(program, i, inputs, values, context)

    def loop(self, i: Loop, inputs: Sequence[Array], context: Engine) -> list[Array]:
        """As everywhere, into arrays that serve every step."""
        for stack in self.stacks_of(i):
            unwritten(stack)
        return super().loop(i, inputs, context)

    def trip(self, i: Loop, trip: int, given: Mapping[Value, Array], context: Engine) -> Mapping[Value, Array]:
        """One run of a loop's body, which writes what is stacked where it belongs, if it has a buffer of its own."""
        inside = self.bodies[i]
        stacked = [i.body.outputs[name] for name in i.stacks]
        places = [stack[trip, ...] for stack in self.stacks_of(i)]
        carried = self._carried[i]
        if i in self._partial and (run := self._partial[i].of(trip)) is not None:
            made = self._partial[i].trip(given, context, run, dict(zip(stacked, places, strict=True)))
            return made | dict(zip(stacked, places, strict=True))
        into = {v: place for v, place in zip(stacked, places, strict=True) if v in inside.buffers.fixed}
        inside.begin_trip({**into, **carried})
        made = inside.run(inside.ready, given, context)
        for v, place in zip(stacked, places, strict=True):
            if made[v] is not place:
                place[...] = made[v]
        # Copied, because the next trip writes into the same buffers, but what is its own buffer.
        ends = [v for v in (i.body.outputs[end] for _, end in i.carries) if made[v] is not carried.get(v)]
        return made | {v: made[v].copy() for v in ends}

    def written_over(self, i: Loop) -> list[Value]:
        """Of a loop with this body, the carries after a trip that may be written where those before it are."""
        made = {
            y: (n, instruction) for n, instruction in enumerate(self.ready.instructions) for y in instruction.outputs
        }
        found = []
        for begin, end in i.carries:
            before, after = self.program.inputs[begin], self.program.outputs[end]
            n, maker = made.get(after, (0, None))
            if maker is None or after not in self.buffers.places or self.apart.get(after) or self.apart.get(before):
                continue
            over = maker.inputs[: maker.operation.kind.overwrites] if isinstance(maker, Compute) else ()
            read = [x for x in maker.inputs if self.buffers.owner[x] is before]
            once = [self.program.outputs[name] for _, name in i.carries].count(after) == 1
            if once and self.buffers.last[before] <= n and all(x is before and x in over for x in read):
                found.append(after)
        return found

    def _array(self, v: Value) -> Array:
        return new_array(v.tensor.shape.sizes, v.tensor.dtype.storage)

    def begin_trip(self, into: Mapping[Value, Array] = _NONE) -> None:
        """Make the buffers ready for a run of this body; what is stacked is written `into` its place."""
        self._targets = {**self.buffers.begin(()), **into}

    def target(self, y: Value) -> Array | None:
        """The buffer that a value is written to in the run that is on, if it has one."""
        return self._targets.get(y)

    def sliced(self, x: Array, trip: int, axis: int) -> Array:
        """A view where the loop's dim comes first."""
        return x[(np.s_[:],) * axis + (trip, ...)]

    def stacked(self, i: Loop, n: int, parts: Sequence[Array]) -> Array:
        """The array of all trips, into which each has written."""
        return self.stacks_of(i)[n]

    def stacks_of(self, i: Loop) -> list[Array]:
        """The arrays of all trips, which serve every step."""
        if i not in self._stacks:
            outputs = i.outputs[len(i.carries) :]
            self._stacks[i] = [new_array(y.tensor.shape.sizes, y.tensor.dtype.storage) for y in outputs]
        return self._stacks[i]

    def goes_on(self, going: Array) -> bool:
        """A number that all devices hold."""
        return bool(going)

    def move(self, i: Move, inputs: Sequence[Array]) -> list[Array]:
        """Other names of the operands, and the sums of what stayed apart."""
        parts = zip(i.inputs, i.outputs, inputs, strict=True)
        return [self._reduce(x, y, array) for x, y, array in parts]

    def _reduce(self, before: Value, after: Value, x: Array) -> Array:
        mine, left = self.apart.get(before, ()), self.apart.get(after, ())
        axes = tuple(n for n, a in enumerate(mine) if a not in left)
        if any(a not in mine for a in left):
            assert not axes  # a mask adds to what is pending
            return self._mask(mine, after, x)
        if not axes:
            return x
        kind = before.sharding.pending[0][1]
        ufunc = {"sum": np.add, "max": np.maximum, "min": np.minimum}[kind]
        y: Array = ufunc.reduce(x, axis=axes, dtype=x.dtype)  # NumPy would widen int32
        return before.tensor.dtype.rounded(y)

    def _mask(self, mine: tuple[str, ...], after: Value, x: Array) -> Array:
        """What becomes a pending sum whose parts stay apart: the first part is the value, the others are zero."""
        left = self.apart[after]
        y = new_array(self._stored_shape(after), after.tensor.dtype.storage)
        y[...] = 0
        y[tuple(np.s_[:] if a in mine else 0 for a in left)] = x
        return y

    def compute(self, program: Program, i: Compute, inputs: Sequence[Array], context: Engine) -> tuple[Array, ...]:
        """All blocks at once, or those of each coordinate of the axes that stay apart."""
        if (show := i.operation.kind.show) is not None:
            show(i.operation, inputs[1:])
        looped = self._looped_axes(i)
        if looped:
            return self._compute_apart(i, inputs, context, looped)
        types = tuple(x.tensor.type for x in i.inputs)
        outs = tuple(y.tensor.type for y in i.outputs)
        buffer = self.target(i.outputs[0])
        return compute(i.operation, types, outs, inputs, self.zero_offsets[i], context, buffer)

    def _looped_axes(self, i: Compute) -> tuple[str, ...]:
        axes = set(self.apart.get(i.outputs[0], ()))
        for x in i.inputs:
            axes |= set(self.apart.get(x, ()))
        return tuple(a for a in self.program.mesh.axes if a in axes)

    def _compute_apart(
        self, i: Compute, taken: Sequence[Array], engine: Engine, looped: tuple[str, ...]
    ) -> tuple[Array, ...]:
        """Run once per coordinate of the axes that stay apart, each time on the blocks at that coordinate."""
        mesh = self.program.mesh
        factors = i.operation.kind.roles(i.operation)
        split = {f.name: tuple(a for a, name in i.assignment if name == f.name and a in looped) for f in factors}
        results = tuple(new_array(self._stored_shape(y), y.tensor.dtype.storage) for y in i.outputs)
        outs = tuple(y.tensor.type for y in i.outputs)
        shared = summary_factor(factors, split)
        groups: dict[tuple[int, ...], list[tuple[Block, list[Array], dict[str, int]]]] = {}
        for point in product(*(range(mesh.axis_size(a)) for a in looped)):
            at = dict(zip(looped, point, strict=True))
            offsets, places = {}, {}
            for f in factors:
                index, count = 0, 1
                for axis in split[f.name]:
                    size = mesh.axis_size(axis)
                    index, count = index * size + at[axis], count * size
                places[f.name] = index, count
                offsets[f.name] = index * (_cut_size(i.operation, f) // count)
            blocks, types, starts = [], [], []
            for n, (x, array) in enumerate(zip(i.inputs, taken, strict=True)):
                array = array[tuple(at[a] for a in self.apart.get(x, ()))]
                cuts, dims = {}, []
                for d in x.tensor.shape:
                    ways = [f for f in factors if f.operands[n] == d.name]
                    f = next((f for f in ways if places[f.name][1] > 1), ways[0])
                    cuts[d.name] = _part(i.operation, f, n, d, *places[f.name])
                    dims.append(Dimension(d.name, d.size // places[f.name][1]))
                blocks.append(array[tuple(np.s_[begin:end] for begin, end in cuts.values())])
                types.append(TensorType(Shape(dims), x.tensor.dtype))
                starts.append({f.operands[n] or "": cuts[f.operands[n] or ""][0]
                               for f in factors if f.role is Role.OVERLAP and places[f.name][1] > 1})  # fmt: skip
            if shared is None:
                made = compute(i.operation, tuple(types), outs, blocks, offsets, engine, None, tuple(starts))
                self._keep(i, at, results, made)
            else:
                block = Block(i.operation, tuple(types), outs[0], offsets, engine)
                others = tuple(at[a] for a in looped if a not in split[shared.name])
                groups.setdefault(others, []).append((block, blocks, at))
        for group in groups.values():  # blocks that tell each other what they are
            made_by = summarised(i.operation, outs, [block for block, _, _ in group], [xs for _, xs, _ in group])
            for (_, _, at), made in zip(group, made_by, strict=True):
                self._keep(i, at, results, made)
        return results

    def _keep(self, i: Compute, at: Mapping[str, int], results: Sequence[Array], made: Sequence[Array]) -> None:
        """Put what was made at one coordinate in its place."""
        for y, result, part in zip(i.outputs, results, made, strict=True):
            result[tuple(at[a] for a in self.apart.get(y, ()))] = part


def _cut_size(op: Operation, f: Factor) -> int:
    """The size of the dim that a split of a factor cuts in blocks."""
    return Halo.length(op, f) if f.role is Role.OVERLAP else f.size


def _part(op: Operation, f: Factor, operand: int, d: Dimension, index: int, count: int) -> tuple[int, int]:
    """The indices of an operand's dim that block number `index` of `count` is given; parts of a sum may overlap."""
    if f.role is Role.OVERLAP and count > 1:
        assert isinstance(op.kind.lower, Halo)
        made = Halo.length(op, f) // count
        begin, end = op.kind.lower.needs(op, f, operand, index * made, (index + 1) * made)
        return min(max(begin, 0), d.size), min(max(end, 0), d.size)
    return index * (d.size // count), (index + 1) * (d.size // count)
