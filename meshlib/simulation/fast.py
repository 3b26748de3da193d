"""The fast executor: all blocks of a value are one array.

A value is stored in global order: an axis that splits a dim is part of that dim, an axis over which the value is
replicated is not there, and a pending axis is a leading array axis. So moves are free, a computation that is parallel
over an axis runs on all its blocks at once, and one that leaves a pending sum runs once per block of what it sums.

The folding pass removes those leading axes: an operation whose pending result is only reduced, or only passed on by
linear operations to where it is reduced, runs its own `local` on blocks merged over the axis, as one BLAS call. What
changes is the order of addition, which the exact executor keeps; the instructions are the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import product
from types import MappingProxyType
from typing import Any

import numpy as np

from hardware.numerics import round_to_bfloat16
from layouts import Dimension, Shape
from meshlib.dtypes import FLOAT32
from meshlib.engine import Engine
from meshlib.graph import TensorType
from meshlib.operation import ON_MXU
from meshlib.program.checker import instruction_factors
from meshlib.program.records import Instruction, Program, Value
from meshlib.simulation.blocks import compute
from meshlib.simulation.buffers import Buffers, Node

Array = np.ndarray[Any, Any]
_NONE: Mapping[Value, Array] = MappingProxyType({})


def unfolded_axes(program: Program, fold: bool = True) -> dict[Value, tuple[str, ...]]:
    """Per pending value the axes that must stay apart; with `fold` only where a reduction is not all that follows."""
    if not fold:
        # Sums that stay pending through a loop are folded in any case: what begins as nothing has no parts.
        through = {a for v in (*program.inputs.values(), *program.outputs.values()) for a in v.sharding.pending_axes}
        for i in program.instructions:
            if i.body is not None:
                through |= {a for v in (*i.inputs, *i.outputs) for a in v.sharding.pending_axes}
        found = {y: y.sharding.pending_axes for i in program.instructions for y in i.outputs if y.sharding.pending}
        kept = {y: tuple(a for a in axes if a not in through) for y, axes in found.items()}
        return {y: axes for y, axes in kept.items() if axes}
    users: dict[Value, list[tuple[Instruction, Value]]] = {}
    for i in program.instructions:
        for n, x in enumerate(i.inputs if i.outputs else ()):
            users.setdefault(x, []).append((i, i.outputs[n if i.is_reshard else 0]))
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
        if any(y in apart for y in i.outputs[1:]) and not i.is_reshard and i.body is None:
            # Results of one computation come apart together: it runs once per block.
            together = {a for y in i.outputs for a in apart.get(y, ())}
            apart.update((y, tuple(a for a in y.sharding.pending_axes if a in together)) for y in i.outputs)
    return apart


@dataclass(eq=False)
class FastExecutor:
    """A program made ready to run many steps: buffers planned once by liveness, arrays reused."""

    program: Program
    fold: bool = True
    nodes: list[Node] = field(default_factory=list)
    bodies: dict[Instruction, FastExecutor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.apart = unfolded_axes(self.program, self.fold)
        self._rounded: dict[Value, Value] = {}
        self._stacks: dict[Instruction, list[tuple[Value, Array]]] = {}
        self._plan_nodes()
        self.buffers = Buffers(self.program, self.nodes, self._stored_shape)

    # ------------------------------------------------------------ planning

    def _stored_shape(self, v: Value) -> tuple[int, ...]:
        return (*(self.program.mesh.axis_size(a) for a in self.apart.get(v, ())), *v.tensor.shape.sizes)

    def _plan_nodes(self) -> None:
        """One node per computation and per reduction of what stayed apart; moves are other names of their operand."""
        for i in self.program.instructions:
            if i.opcode in ("input", "variable", "assign"):
                continue
            if i.is_reshard:
                for x, y in zip(i.inputs, i.outputs, strict=True):
                    summed = [a for a in self.apart.get(x, ()) if a not in self.apart.get(y, ())]
                    self.nodes.append(Node("reduce" if summed else "alias", i, (x,), y))
                continue
            if i.body is not None:
                self.nodes.append(Node("loop", i, i.inputs, i.outputs[0]))
                self.bodies[i] = FastExecutor(i.body, self.fold)
                continue
            self.nodes.append(Node("compute", i, self._mxu_inputs(i), i.outputs[0]))

    def _mxu_inputs(self, i: Instruction) -> tuple[Value, ...]:
        """Operands of a matmul rounded to bfloat16 once, however many matmuls read them."""
        op = i.operation
        precise = self.program.precision == "highest" or op.attrs.get("precision", "default") != "default"
        if op.kind.kind not in ON_MXU or precise:
            return i.inputs
        taken = []
        for x in i.inputs:
            if x.tensor.dtype is not FLOAT32:
                taken.append(x)
                continue
            if x not in self._rounded:
                self._rounded[x] = y = Value(x.tensor, x.sharding)
                if x in self.apart:
                    self.apart[y] = self.apart[x]
                self.nodes.append(Node("round", i, (x,), y))
            taken.append(self._rounded[x])
        return tuple(taken)

    # ------------------------------------------------------------ running

    def run(
        self, state: Mapping[str, Array], feeds: Mapping[str, Array], engine: Engine
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        """Run one step: global outputs and new values of the updated variables.

        Outputs are the executor's own arrays, valid until the next step. New values are never written over the
        state, so that a step that fails leaves it as it was.
        """
        engine = Engine(engine.seed, engine.step, engine.highest, in_order=False, rounded=True, shared={})
        given = {v: feeds[name] for name, v in self.program.inputs.items()}
        given |= {v: state[name] for name, v in self.program.variables.items()}
        arrays = self._run_nodes(given, state.values(), engine)
        outputs = {name: arrays[v] for name, v in self.program.outputs.items()}
        owned = self.buffers.double
        updates = {
            name: arrays[v] if self.buffers.owner[v] in owned else arrays[v].copy()
            for name, v in self.program.updates.items()
        }
        return outputs, updates

    def _run_nodes(
        self, given: Mapping[Value, Array], taken: Iterable[Array], engine: Engine, into: Mapping[Value, Array] = _NONE
    ) -> dict[Value, Array]:
        """All nodes in order; `into` has arrays to write some values to instead of their buffers."""
        arrays = self.buffers.begin(taken)
        arrays.update(into)
        arrays.update(given)
        for node in self.nodes:
            if node.kind == "loop":
                self._run_loop(node.instruction, arrays, engine)
            else:
                self._run_node(node, arrays, engine)
        return arrays

    def _run_loop(self, i: Instruction, arrays: dict[Value, Array], engine: Engine) -> None:
        body, inside = i.body, self.bodies[i]
        assert body is not None
        given = {v: arrays[x] for v, x in zip(body.inputs.values(), i.inputs, strict=True)}
        whole = {body.inputs[name]: (given[body.inputs[name]], i.slice_axis(name)) for name in i.slices}
        stacks = self._stacks_of(i)
        for trip in i.trip_order:
            for v, (array, axis) in whole.items():
                given[v] = np.take(array, trip, axis=axis) if axis else array[trip, ...]
            # What is stacked is made where it belongs, if it has a buffer of its own.
            into = {v: stack[trip, ...] for v, stack in stacks if v in inside.buffers.fixed}
            made = inside._run_nodes(given, (), engine.in_trip(trip), into)
            for v, stack in stacks:
                if made[v] is not into.get(v):
                    stack[trip] = made[v]
            # Copied, because the next trip writes into the same buffers.
            given.update({body.inputs[begin]: made[body.outputs[end]].copy() for begin, end in i.carries})
        arrays.update({y: given[body.inputs[begin]] for y, (begin, _) in zip(i.outputs, i.carries, strict=False)})
        arrays.update({y: stack for y, (_, stack) in zip(i.outputs[len(i.carries) :], stacks, strict=True)})

    def _stacks_of(self, i: Instruction) -> list[tuple[Value, Array]]:
        """Per stacked output the body's value and the array of all trips, which serves every step."""
        assert i.body is not None
        if i not in self._stacks:
            values = [i.body.outputs[name] for name in i.stacks]
            outputs = i.outputs[len(i.carries) :]
            self._stacks[i] = [
                (v, np.empty(y.tensor.shape.sizes, y.tensor.dtype.storage))
                for v, y in zip(values, outputs, strict=True)
            ]
        return self._stacks[i]

    def _run_node(self, node: Node, arrays: dict[Value, Array], engine: Engine) -> None:
        (first, *_) = node.inputs or (None,)
        if node.kind == "compute":
            taken = [arrays[x] for x in node.inputs]
            made = self._compute(node, taken, engine, arrays.get(node.output))
            arrays.update(zip(node.instruction.outputs, made, strict=True))
            return
        assert first is not None
        x = arrays[first]
        if node.kind == "alias":
            arrays[node.output] = x
        elif node.kind == "round":
            out = arrays.get(node.output)
            arrays[node.output] = round_to_bfloat16(x, out=out)
        else:
            arrays[node.output] = self._reduce(node, first, x)

    def _reduce(self, node: Node, before: Value, x: Array) -> Array:
        mine = self.apart[before]
        left = self.apart.get(node.output, ())
        axes = tuple(n for n, a in enumerate(mine) if a not in left)
        kind = before.sharding.pending[0][1]
        ufunc = {"sum": np.add, "max": np.maximum, "min": np.minimum}[kind]
        y: Array = ufunc.reduce(x, axis=axes, dtype=x.dtype)  # NumPy would widen int32
        return round_to_bfloat16(y) if before.tensor.dtype.name == "bfloat16" else y

    def _compute(self, node: Node, taken: list[Array], engine: Engine, buffer: Array | None) -> tuple[Array, ...]:
        i = node.instruction
        looped = self._looped_axes(i)
        if not looped:
            types = tuple(x.tensor.type for x in i.inputs)
            outs = tuple(y.tensor.type for y in i.outputs)
            return compute(i.operation, types, outs, taken, node.zero_offsets, engine, buffer)
        return self._compute_apart(i, taken, engine, looped)

    def _looped_axes(self, i: Instruction) -> tuple[str, ...]:
        axes = set(self.apart.get(i.outputs[0], ()))
        for x in i.inputs:
            axes |= set(self.apart.get(x, ()))
        return tuple(a for a in self.program.mesh.axes if a in axes)

    def _compute_apart(
        self, i: Instruction, taken: list[Array], engine: Engine, looped: tuple[str, ...]
    ) -> tuple[Array, ...]:
        """Run once per coordinate of the axes that stay apart, each time on the blocks at that coordinate."""
        mesh = self.program.mesh
        factors, _ = instruction_factors(i)
        split = {f.name: tuple(a for a, name in i.assignment if name == f.name and a in looped) for f in factors}
        results = tuple(np.empty(self._stored_shape(y), y.tensor.dtype.storage) for y in i.outputs)
        for point in product(*(range(mesh.axis_size(a)) for a in looped)):
            at = dict(zip(looped, point, strict=True))
            offsets, counts = {}, {}
            for f in factors:
                index, count = 0, 1
                for axis in split[f.name]:
                    size = mesh.axis_size(axis)
                    index, count = index * size + at[axis], count * size
                counts[f.name] = count
                offsets[f.name] = index * (f.size // count)
            blocks, types = [], []
            for n, (x, array) in enumerate(zip(i.inputs, taken, strict=True)):
                array = array[tuple(at[a] for a in self.apart.get(x, ()))]
                cuts, dims = [], []
                for d in x.tensor.shape:
                    f = next(f for f in factors if f.operands[n] == d.name)
                    size = d.size // counts[f.name]
                    start = offsets[f.name] // (f.size // counts[f.name]) * size if counts[f.name] > 1 else 0
                    cuts.append(np.s_[start : start + size])
                    dims.append(Dimension(d.name, size))
                blocks.append(array[tuple(cuts)])
                types.append(TensorType(Shape(dims), x.tensor.dtype))
            outs = tuple(y.tensor.type for y in i.outputs)
            made = compute(i.operation, tuple(types), outs, blocks, offsets, engine, None)
            for y, result, part in zip(i.outputs, results, made, strict=True):
                result[tuple(at[a] for a in self.apart.get(y, ()))] = part
        return results
