"""The exact executor: each device's block apart, collectives in ring order, the MXU's own order of addition.

It is the proof of a program: every offset, axis and collective matters here. What must be equal on several devices
is compared bit by bit when it is put together, so that a lost collective shows even in a value nobody expects.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from hardware.numerics import ring_reduce, ring_reduce_scatter, round_to_bfloat16
from layouts import Sharding, permute_pairs
from layouts.plan import Step
from meshlib.dtypes import BFLOAT16, DType
from meshlib.errors import ProgramError
from meshlib.lower.checker import instruction_factors
from meshlib.lower.program import Instruction, Program, Value
from meshlib.simulate.blocks import compute
from meshlib.simulate.engine import Engine

Array = np.ndarray[Any, Any]
Blocks = list[Array]  # one per device
Watch = Callable[[Instruction, Value, Blocks], None]


def run_exact(
    program: Program,
    state: Mapping[str, Array],
    feeds: Mapping[str, Array],
    engine: Engine,
    watch: Watch | None = None,
) -> tuple[dict[str, Array], dict[str, Array]]:
    """Run one step: global outputs and global new values of the updated variables.

    `watch` is called with every value made, for reports.
    """
    given = {v: cut(feeds[name], v.sharding) for name, v in program.inputs.items()}
    given |= {v: cut(state[name], v.sharding) for name, v in program.variables.items()}
    values = _run(program, given, engine, watch)
    outputs = {name: together(v, values[v], name) for name, v in program.outputs.items()}
    updates = {name: together(v, values[v], name) for name, v in program.updates.items()}
    return outputs, updates


def _run(program: Program, given: Mapping[Value, Blocks], engine: Engine, watch: Watch | None) -> dict[Value, Blocks]:
    """Run the instructions on the blocks of inputs and variables; the results hold what is fetched or written back."""
    values: dict[Value, Blocks] = dict(given)
    last = {x: n for n, i in enumerate(program.instructions) for x in i.inputs}
    kept = {*program.outputs.values(), *program.updates.values()}
    for n, instruction in enumerate(program.instructions):
        inputs = [values[x] for x in instruction.inputs]
        if instruction.is_reshard:
            for blocks, y, step in zip(inputs, instruction.outputs, instruction.steps, strict=True):
                values[y] = move(step, blocks, y.tensor.dtype)
        elif instruction.body is not None:
            made = _loop(instruction, instruction.body, inputs, engine, watch)
            values.update(zip(instruction.outputs, made, strict=True))
        elif instruction.opcode not in ("input", "variable", "assign"):
            values[instruction.outputs[0]] = _compute(program, instruction, inputs, engine)
        if watch is not None:
            for y in instruction.outputs:
                watch(instruction, y, values[y])
        for x in instruction.inputs:
            if last[x] == n and x not in kept:
                values.pop(x, None)
    return values


def _loop(
    instruction: Instruction, body: Program, inputs: list[Blocks], engine: Engine, watch: Watch | None
) -> list[Blocks]:
    given = dict(zip(body.inputs.values(), inputs, strict=True))
    for trip in range(instruction.trips):
        values = _run(body, given, engine.in_trip(trip), watch)
        given.update({body.inputs[begin]: values[body.outputs[end]] for begin, end in instruction.carries})
    return [given[body.inputs[begin]] for begin, _ in instruction.carries]


def cut(array: Array, sharding: Sharding) -> Blocks:
    """One block per device."""
    return [array[sharding.slices(c)] for c in sharding.mesh.coordinates()]


def together(value: Value, blocks: Blocks, name: str) -> Array:
    """The global array. Raises ProgramError if devices that hold the same block disagree in any bit."""
    sharding = value.sharding
    out = np.empty(sharding.shape.sizes, value.tensor.dtype.storage)
    first: dict[tuple[int, ...], int] = {}
    for device, coordinate in enumerate(sharding.mesh.coordinates()):
        index = sharding.block_index(coordinate)
        holder = first.setdefault(index, device)
        if holder == device:
            out[sharding.slices(coordinate)] = blocks[device]
        elif not np.array_equal(blocks[holder], blocks[device], equal_nan=out.dtype.kind == "f"):
            raise ProgramError(
                f"'{name}' {value}: cores {sharding.mesh.coordinate(holder)} and {coordinate} hold the same block, "
                "but different numbers; a collective is missing or wrong"
            )
    return out


def _compute(program: Program, instruction: Instruction, inputs: list[Blocks], engine: Engine) -> Blocks:
    op = instruction.operation
    (out,) = instruction.outputs
    factors, _ = instruction_factors(instruction)
    mesh = program.mesh
    types = tuple(x.local for x in instruction.inputs)
    axes: dict[str, list[str]] = {}
    for axis, factor in instruction.assignment:
        axes.setdefault(factor, []).append(axis)
    blocks: Blocks = []
    for device, coordinate in enumerate(mesh.coordinates()):
        offsets = {}
        for f in factors:
            index, count = 0, 1
            for axis in axes.get(f.name, ()):
                size = mesh.axis_size(axis)
                index, count = index * size + coordinate[mesh.index(axis)], count * size
            offsets[f.name] = index * (f.size // count)
        arrays = [b[device] for b in inputs]
        blocks.append(compute(op, types, out.local, arrays, offsets, engine, None))
    return blocks


def move(step: Step, blocks: Blocks, dtype: DType) -> Blocks:
    """Run one reshard step over all devices."""
    before, mesh = step.before, step.before.mesh
    if step.kind == "collective_permute":
        out = list(blocks)
        for source, destination in permute_pairs(before, step.after):
            out[destination] = blocks[source]
        return out
    dim = before.shape.index(step.dim) if step.dim else 0
    to_dim = before.shape.index(step.to_dim) if step.to_dim else 0
    out = list(blocks)
    for group in mesh.groups(step.axes):
        parts = [blocks[d] for d in group]
        for device, block in zip(group, _exchange(step, parts, dim, to_dim, dtype), strict=True):
            out[device] = block
    return out


def _exchange(step: Step, parts: Blocks, dim: int, to_dim: int, dtype: DType) -> Blocks:
    """One replica group's part of a collective: the blocks of its members afterwards."""
    k = len(parts)
    carry = round_to_bfloat16 if dtype is BFLOAT16 else None
    if step.kind == "all_gather":
        return [np.concatenate(parts, axis=dim)] * k
    if step.kind == "all_reduce":
        return [ring_reduce(parts, _kind(step), carry)] * k
    if step.kind == "reduce_scatter":
        return ring_reduce_scatter(parts, dim, _kind(step), carry)
    if step.kind == "slice":
        return [np.split(part, k, axis=dim)[c] for c, part in enumerate(parts)]
    assert step.kind == "all_to_all"
    pieces = [np.split(part, k, axis=to_dim) for part in parts]
    return [np.concatenate([pieces[source][c] for source in range(k)], axis=dim) for c in range(k)]


def _kind(step: Step) -> str:
    return dict(step.before.pending)[step.axes[0]]
