"""The fast executor: all blocks of a value in one array.

A value is stored in global order: an axis that splits a dim is part of that dim, and an axis over which the value is
replicated is absent. So moves are free, and a computation that is parallel over an axis runs on all its blocks at once.
A pending axis is absent, too: a consumer of a pending sum either reduces it or is linear in it, and so may read the
complete sum. An operation that leaves a pending sum runs its own `local` on blocks merged over the axis, as one BLAS
call. The instructions are those of the exact executor; only the order of addition differs.

Operands of the MXU that are reused from step to step have rounded copies: a variable that the program does not update,
such as the weights in decoding, is rounded to bfloat16 in the first step alone; of a cache, only the rows that the step
wrote are rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np

from hardware.numerics import round_to_bfloat16
from meshlib.core.arrays import memory_of, new_array, unwritten
from meshlib.core.dtypes import FLOAT32
from meshlib.core.engine import Engine
from meshlib.core.opdef import ON_MXU, Block, Kind
from meshlib.core.spare_arrays import SpareArrays, same_elements
from meshlib.ops.pointwise.arithmetic import WHERE
from meshlib.program.instructions import Compute, Instruction, Loop, Move, Resident, Value
from meshlib.program.interpreter import Interpreter
from meshlib.program.records import Program
from meshlib.simulation.blocks import compute, finished
from meshlib.simulation.buffers import Buffers, overwritable
from meshlib.simulation.chains import Chain, ChainRun, chained
from meshlib.simulation.parts import PartialTrips, Working

Array = np.ndarray[Any, Any]
Bound: TypeAlias = Callable[[Sequence[Array], Engine], Iterable[Array]]
MOST_CONSTANT = 1 << 14  # elements of a source without operands whose value is kept from step to step


@dataclass
class RoundedCopies:
    """For each operand of a body and trip: the array that was rounded (kept alive), and its rounded copy."""

    _copies: dict[Hashable, tuple[Array, Array]] = field(default_factory=dict)

    def clear(self) -> None:
        """Forget all copies: their source arrays may have been overwritten."""
        self._copies.clear()

    def of(self, key: Hashable, x: Array, spare: SpareArrays) -> Array | None:
        """The rounded copy of `x`; None unless `x` is a constant of the program or was updated by rows."""
        source, rounded = self._copies.pop(key, (None, None))
        pair = spare.written_in_this_step(x)
        if pair is None and not spare.is_constant(x):
            return None
        before = x if pair is None else pair.x
        if rounded is None:
            rounded = new_array(x.shape, x.dtype)
        if source is None or not same_elements(source, before):
            round_to_bfloat16(x, out=rounded)
        elif pair is not None:
            rounded.transpose(pair.order)[pair.rows] = round_to_bfloat16(x.transpose(pair.order)[pair.rows])
        self._copies[key] = x, rounded
        return rounded


_NONE: Mapping[Value, Array] = MappingProxyType({})


def settled_mask(i: Loop) -> Value | None:
    """The loop body's mask of the indices active in a trip, if no other indices are ever computed."""
    record = i.record
    if record.active is None or record.working is None:
        return None
    alone = all(len(record.active.runs(trip)) == 1 for trip in range(i.trips))
    return i.body.inputs.get(record.working.operation.name) if alone else None


@dataclass(frozen=True, eq=False)
class Round(Instruction):
    """Rounds a float32 operand of the MXU to bfloat16, once for all products that read it."""


@dataclass(eq=False)
class FastExecutor(Interpreter[Array, Engine]):
    """An executor that prepares a program for many steps: buffers are planned once by liveness, arrays are reused."""

    program: Program
    settled: Value | None = None  # a mask that is true for every index computed
    ranged: bool = False  # whether it also runs on ranges of a dim, operation by operation
    bodies: dict[Loop, FastExecutor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        loops = [i for i in self.program.instructions if isinstance(i, Loop)]
        self.bodies = {
            i: FastExecutor(i.body, settled_mask(i), self.ranged or i.record.active is not None) for i in loops
        }
        self.ready = self.program.with_instructions(self._rounding())
        if not self.ranged:
            self.ready = self.ready.with_instructions(chained(self.ready))
        self.buffers = Buffers(self.ready)
        self.zero_offsets = {
            i: {f.name: 0 for f in i.operation.opdef.roles(i.operation)}
            for i in self.ready.instructions
            if isinstance(i, Compute)
        }
        self.types = {
            i: (tuple(x.tensor.type for x in i.inputs), tuple(y.tensor.type for y in i.outputs))
            for i in self.zero_offsets
        }
        self._targets: Mapping[Value, Array] = _NONE  # where the current run writes
        self._spare, self._rounded = SpareArrays(), RoundedCopies()
        self._constants: dict[Instruction, Array] = {}
        self._scratch: list[Array] = []
        self._stacks: dict[Loop, list[Array]] = {}
        # their alternates, when the state has taken the first array
        self._other_stacks: dict[tuple[Loop, int], Array] = {}
        # Stacks that variables may take without a copy, since nothing else shares their memory.
        self._stacked_alone = {y for i in loops for y in i.outputs[len(i.carries) :]}
        # Carries that are overwritten in place by each trip.
        self._carried = {i: {v: self._array(v) for v in inside.written_over(i)} for i, inside in self.bodies.items()}
        self._partial = {
            i: PartialTrips(i, inside, self._carried[i])
            for i, inside in self.bodies.items()
            if i.record.active is not None
        }

    # ------------------------------------------------------------ planning

    def _rounding(self) -> list[Instruction]:
        """The instructions, with a `Round` of each product operand before the first product that reads it."""
        instructions: list[Instruction] = []
        rounded: dict[Value, Value] = {}
        settled = {self.settled}
        for i in self.program.instructions:
            if isinstance(i, Move):  # a part of a settled mask is settled too
                settled.update(y for x, y in zip(i.inputs, i.outputs, strict=True) if x in settled)
            if isinstance(i, Compute) and self._is_settled(i, settled):
                i = Working(i.operation, i.inputs[1:2], i.outputs, i.region, (), ())
            if isinstance(i, Compute) and self._rounds(i):
                for x in i.inputs:
                    if x.tensor.dtype is FLOAT32 and x not in rounded:
                        rounded[x] = y = Value(x.tensor, x.sharding)
                        instructions.append(Round(i.operation, (x,), (y,), i.region))
                i = replace(i, inputs=tuple(rounded.get(x, x) for x in i.inputs))
            instructions.append(i)
        return instructions

    def _is_settled(self, i: Compute, settled: Set[Value | None]) -> bool:
        """True if an instruction selects by a settled mask, and so returns its first choice unchanged."""
        if i.operation.opdef is not WHERE or i.inputs[0] not in settled:
            return False
        return i.inputs[1].tensor.type == i.outputs[0].tensor.type

    def _rounds(self, i: Compute) -> bool:
        precise = self.program.precision == "highest" or i.operation.attrs.get("precision", "default") != "default"
        return i.operation.opdef.kind in ON_MXU and not precise

    # ------------------------------------------------------------ running

    @np.errstate(all="ignore")  # overflow and NaN are ordinary values here; the NaN report looks for them
    def step(
        self, state: Mapping[str, Array], feeds: Mapping[str, Array], engine: Engine
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        """Run one step; returns global outputs and new values of the updated variables.

        Outputs are the executor's own arrays, valid until the next step. New values are never written over the
        state, so that a step that fails leaves it as it was.
        """
        given = self.program.given(state, feeds)
        self._targets = self.buffers.begin(state.values())
        self._free_stacks(state.values())
        constants = (state[name] for name in self.program.variables if name not in self.program.updates)
        spare = self._spare.begin(self._arrays_of_state(), constants)
        engine = replace(engine, in_order=False, rounded=True, shared={}, spare=spare)
        arrays = self.run(self.ready, given, engine)
        outputs = {name: arrays[v] for name, v in self.program.outputs.items()}
        owned = self.buffers.double | self._stacked_alone
        updates = {
            name: arrays[v] if self.buffers.owner[v] in owned else arrays[v].copy()
            for name, v in self.program.updates.items()
        }
        return outputs, updates

    def changed_parts(self, before: Array, after: Array) -> list[Array]:
        """The parts of a variable's value that the last step changed: all of it, unless only rows were written."""
        parts = self._spare.changed_parts(before, after)
        return [after] if parts is None else parts

    def forget(self) -> None:
        """Drop everything cached about arrays of earlier steps, which another executor may have overwritten."""
        self._spare.clear()
        self._rounded.clear()
        for inside in self.bodies.values():
            inside.forget()

    def run(self, program: Program, given: Mapping[Value, Array], context: Engine) -> dict[Value, Array]:
        """As in the interpreter, with instructions that were bound to their types and buffers once."""
        if program is not self.ready:
            return super().run(program, given, context)
        values = dict(given)
        for run, inputs, outputs, dead in self._steps:
            results = run([values[x] for x in inputs], context)
            for y, value in zip(outputs, results, strict=True):
                values[y] = value
            for x in dead:
                values.pop(x, None)
        return values

    @cached_property
    def _steps(self) -> list[tuple[Bound, Sequence[Value], Sequence[Value], Sequence[Value]]]:
        """The instructions but those of resident values, with operands, results, and the values that end there."""
        pairs = zip(self.ready.instructions, self.ready.dead_after, strict=True)
        return [(self.bound(i), i.inputs, i.outputs, dead) for i, dead in pairs if not isinstance(i, Resident)]

    def bound(self, i: Instruction) -> Bound:
        """An instruction as a function of its operands and the engine."""
        if isinstance(i, Chain):
            return self._bound_chain(i)
        if not isinstance(i, Compute) or i.operation.opdef.show is not None:
            return lambda inputs, context: self.results(self.ready, i, inputs, _NONE, context)
        op, local, (types, outs), offsets = i.operation, i.operation.opdef.local, self.types[i], self.zero_offsets[i]
        y, out = i.outputs[0], outs[0]

        def run(inputs: Sequence[Array], context: Engine) -> Iterable[Array]:
            block = Block(op, types, out, offsets, context, self._targets.get(y))
            return finished(op, outs, local(block, *inputs))

        def constant(inputs: Sequence[Array], context: Engine) -> Iterable[Array]:
            if i not in self._constants:
                (value,) = finished(op, outs, local(Block(op, types, out, offsets, context)))
                value.flags.writeable = False
                self._constants[i] = value
            return (self._constants[i],)

        same = op.opdef.kind is Kind.SOURCE and not op.opdef.unique and not i.inputs
        same = same and self.buffers.owner[y] not in self.buffers.double  # no array of the state
        return constant if same and out.shape.size <= MOST_CONSTANT else run

    def _bound_chain(self, i: Chain) -> Bound:
        chain = ChainRun(i, self._scratch)

        def run(inputs: Sequence[Array], context: Engine) -> Iterable[Array]:
            targets = [self._targets.get(y) for y in i.outputs]
            places = [self._array(y) if place is None else place for y, place in zip(i.outputs, targets, strict=True)]
            return chain.run(inputs, places, context)

        return run

    def results(
        self, program: Program, i: Instruction, inputs: Sequence[Array], values: Mapping[Value, Array], context: Engine
    ) -> Iterable[Array]:
        """As in the interpreter, plus rounding of product operands."""
        if isinstance(i, Round):
            spare = context.spare
            copy = None if spare is None else self._rounded.of((i, context.trips), inputs[0], spare)
            if copy is not None:
                return [copy]
            return [round_to_bfloat16(inputs[0], out=self.target(i.outputs[0]))]
        return super().results(program, i, inputs, values, context)

    def loop(self, i: Loop, inputs: Sequence[Array], context: Engine) -> list[Array]:
        """As in the interpreter, with stacked results in arrays that are reused by every step."""
        for stack in self.stacks_of(i):
            unwritten(stack)
        return super().loop(i, inputs, context)

    def trip(self, i: Loop, trip: int, given: Mapping[Value, Array], context: Engine) -> Mapping[Value, Array]:
        """One trip of a loop's body, which writes stacked results directly to their slot where they have a buffer."""
        inside = self.bodies[i]
        stacked = [i.body.outputs[name] for name in i.stacks]
        places = [stack[trip, ...] for stack in self.stacks_of(i)]
        carried = self._carried[i]
        if i in self._partial and (run := self._partial[i].of(trip)) is not None:
            if context.spare is not None:  # the record of written rows does not cover partial writes
                context.spare.clear()
                inside.forget()
            context = replace(context, spare=None)
            results = self._partial[i].trip(given, context, run, dict(zip(stacked, places, strict=True)))
            return results | dict(zip(stacked, places, strict=True))
        into = {v: place for v, place in zip(stacked, places, strict=True) if v in inside.buffers.fixed}
        inside.begin_trip({**into, **carried})
        results = inside.run(inside.ready, given, context)
        for v, place in zip(stacked, places, strict=True):
            if results[v] is not place:
                place[...] = results[v]
        # The next trip reuses these buffers, so carries are copied, except those with buffers of their own.
        ends = [v for v in (i.body.outputs[end] for _, end in i.carries) if results[v] is not carried.get(v)]
        return results | {v: results[v].copy() for v in ends}

    def written_over(self, i: Loop) -> list[Value]:
        """For a loop with this body: carries whose new value may overwrite the old one in place."""
        producers = {
            y: (n, instruction) for n, instruction in enumerate(self.ready.instructions) for y in instruction.outputs
        }
        overwriting = []
        for begin, end in i.carries:
            before, after = self.program.inputs[begin], self.program.outputs[end]
            n, maker = producers.get(after, (0, None))
            if maker is None or after not in self.buffers.places:
                continue
            over = overwritable(maker, after) if isinstance(maker, Compute | Chain) else ()
            read = [x for x in maker.inputs if self.buffers.owner[x] is before]
            once = [self.program.outputs[name] for _, name in i.carries].count(after) == 1
            if once and self.buffers.last[before] <= n and all(x is before and x in over for x in read):
                overwriting.append(after)
        return overwriting

    def _array(self, v: Value) -> Array:
        return new_array(v.tensor.shape.sizes, v.tensor.dtype.storage)

    def begin_trip(self, into: Mapping[Value, Array] = _NONE) -> None:
        """Prepare the buffers for a trip of this body; stacked results are written to their slots in `into`."""
        self._targets = {**self.buffers.begin(()), **into}

    def target(self, y: Value) -> Array | None:
        """The buffer that a value is written to in the current run, if it has one."""
        return self._targets.get(y)

    def sliced(self, x: Array, trip: int, axis: int) -> Array:
        """A view of one slice along the loop's dim."""
        return x[(np.s_[:],) * axis + (trip, ...)]

    def stacked(self, i: Loop, n: int, parts: Sequence[Array]) -> Array:
        """The array of all trips, into which each trip has written its slice."""
        return self.stacks_of(i)[n]

    def _arrays_of_state(self) -> Iterator[Array]:
        """Arrays of new values of variables that the state takes without a copy."""
        for pair in self.buffers.turns.values():
            yield from pair
        for stacks in self._stacks.values():
            yield from stacks
        yield from self._other_stacks.values()

    def _free_stacks(self, taken: Iterable[Array]) -> None:
        """Switch to the alternate array of each stack that the state has `taken` as the new value of a variable."""
        state = {id(memory_of(a)) for a in taken}
        for i, stacks in self._stacks.items():
            for n, stack in enumerate(stacks):
                if id(memory_of(stack)) in state:
                    other = self._other_stacks.pop((i, n), None)
                    free = other is not None and id(memory_of(other)) not in state
                    stacks[n] = other if other is not None and free else np.empty_like(stack)
                    self._other_stacks[i, n] = stack

    def stacks_of(self, i: Loop) -> list[Array]:
        """Arrays of all trips' stacked results, reused by every step."""
        if i not in self._stacks:
            outputs = i.outputs[len(i.carries) :]
            self._stacks[i] = [new_array(y.tensor.shape.sizes, y.tensor.dtype.storage) for y in outputs]
        return self._stacks[i]

    def goes_on(self, going: Array) -> bool:
        """The loop's condition, which is the same number on all devices."""
        return bool(going)

    def move(self, i: Move, inputs: Sequence[Array]) -> Sequence[Array]:
        """A move changes nothing here: the operands themselves."""
        return inputs

    def compute(self, program: Program, i: Compute, inputs: Sequence[Array], context: Engine) -> tuple[Array, ...]:
        """Compute all blocks in one call."""
        if (show := i.operation.opdef.show) is not None:
            show(i.operation, inputs[1:])
        types, outs = self.types[i]
        buffer = self.target(i.outputs[0])
        return compute(i.operation, types, outs, inputs, self.zero_offsets[i], context, buffer)
