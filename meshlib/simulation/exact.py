"""The exact executor: a separate block per device, collectives in ring order, accumulation in the MXU's order.

It is the proof of a program: every offset, axis and collective matters here. Blocks that must be equal on several
devices are compared bit by bit when they are assembled, so that a lost collective shows even in values without an
expected result.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from functools import lru_cache
from itertools import product
from math import prod
from typing import Any

import numpy as np

from hardware.collective_kinds import group_results
from hardware.exact_products import OperandCache
from layouts import Mesh, Shape, Sharding, permute_pairs
from layouts.plan import Step, gathered_axes
from layouts.step_kinds import STEP_KINDS, Place
from meshlib.core.arrays import new_array
from meshlib.core.dtypes import DType
from meshlib.core.engine import Engine
from meshlib.core.errors import ProgramError
from meshlib.core.graph import Operation, TensorType
from meshlib.core.opdef import ON_MXU, Block, Factor, Halo, Role, Storage, Summary
from meshlib.program.exchanges import RUNS, run_factors, runs, summary_factor
from meshlib.program.instructions import Compute, Instruction, Loop, Move, Value, Widen
from meshlib.program.interpreter import Interpreter
from meshlib.program.records import Program
from meshlib.simulation.blocks import compute, summarised

Array = np.ndarray[Any, Any]
Blocks = list[Array]  # one per device
Watch = Callable[[Instruction, Value, Blocks], None]


@np.errstate(all="ignore")  # overflow and NaN are ordinary values here; the NaN report looks for them
def run_exact(
    program: Program, state: Mapping[str, Array], feeds: Mapping[str, Array], engine: Engine, watch: Watch | None = None
) -> tuple[dict[str, Array], dict[str, Array]]:
    """Run one step; returns global outputs, and global new values of the updated variables.

    `watch` is called with every value made, for reports.
    """
    given = {v: cut(array, v.sharding) for v, array in program.given(state, feeds).items()}
    values = _Exact(watch).run(program, given, engine)
    outputs = {name: together(v, values[v], name) for name, v in program.outputs.items()}
    for name, v in program.updates.items():
        # State is stored as global arrays, which would hide a core writing a block that is not its own.
        if v.sharding != program.variables[name].sharding:
            raise ProgramError(f"variable '{name}' is sharded as {program.variables[name]}, but is written as {v}")
    updates = {name: together(v, values[v], name) for name, v in program.updates.items()}
    return outputs, updates


class _Exact(Interpreter[Blocks, Engine]):
    """Executor whose values are the blocks of all devices."""

    def __init__(self, watch: Watch | None) -> None:
        self.watch = watch

    def compute(self, program: Program, i: Compute, inputs: Sequence[Blocks], context: Engine) -> list[Blocks]:
        if (show := i.operation.opdef.show) is not None:
            data = list(zip(i.inputs, inputs, strict=True))[1:]
            show(i.operation, [together(v, blocks, v.tensor.name) for v, blocks in data])
        return _compute(program, i, inputs, context)

    def move(self, i: Move, inputs: Sequence[Blocks]) -> list[Blocks]:
        if isinstance(i, Widen):
            return [widened(i, inputs[0])]
        if i.outputs[0].margins:
            return [cut_wide(i.inputs[0], i.outputs[0], inputs[0])]
        parts = zip(i.steps, inputs, i.outputs, strict=True)
        return [_checked(move(step, blocks, y.tensor.dtype), y, i) for step, blocks, y in parts]

    def sliced(self, x: Blocks, trip: int, axis: int) -> Blocks:
        slices = {key: np.take(block, trip, axis=axis) for key, block in {id(b): b for b in x}.items()}
        return [slices[id(block)] for block in x]  # devices that share an array still do

    def stacked(self, i: Loop, n: int, parts: Sequence[Blocks]) -> Blocks:
        by_device = list(zip(*parts, strict=True))
        stacks = {key: np.stack(blocks) for key, blocks in {tuple(map(id, b)): b for b in by_device}.items()}
        return [stacks[tuple(map(id, blocks))] for blocks in by_device]

    def goes_on(self, going: Blocks) -> bool:
        if len({bool(block) for block in going}) > 1:
            raise ProgramError("some cores continue a loop that others leave; a collective is missing or wrong")
        return bool(going[0])

    def observe(self, i: Instruction, y: Value, value: Blocks) -> None:
        if self.watch is not None:
            self.watch(i, y, without_margins(y, value) if y.margins else value)


def _checked(blocks: Blocks, y: Value, instruction: Move) -> Blocks:
    for block in blocks:
        if block.shape != y.sharding.local_shape.sizes:
            what = f"{instruction.opcode} for {instruction.operation}"
            raise ProgramError(f"{what} made a block of shape {list(block.shape)}, not the declared {y.local} of {y}")
    return blocks


def cut(array: Array, sharding: Sharding) -> Blocks:
    """One block per device, as views; devices with the same block share one view."""
    first_holders = _first_devices(sharding)
    views = {first: array[sharding.slices(sharding.mesh.coordinate(first))] for first in dict.fromkeys(first_holders)}
    return [views[first] for first in first_holders]


@lru_cache(maxsize=4096)
def _first_devices(sharding: Sharding) -> tuple[int, ...]:
    """For each device, the first device with the same block."""
    first: dict[tuple[int, ...], int] = {}
    return tuple(first.setdefault(sharding.block_index(c), n) for n, c in enumerate(sharding.mesh.coordinates()))


def together(value: Value, blocks: Blocks, name: str) -> Array:
    """The global array. Raises ProgramError if devices with the same block differ in any bit."""
    sharding = value.sharding
    out = np.empty(sharding.shape.sizes, value.tensor.dtype.storage)
    mesh = sharding.mesh
    for device, holder in enumerate(_first_devices(sharding)):
        mine, held = blocks[device], blocks[holder]
        if holder == device:
            out[sharding.slices(mesh.coordinate(device))] = mine
        elif mine is not held and not np.array_equal(held, mine, equal_nan=out.dtype.kind == "f"):
            raise ProgramError(
                f"'{name}' {value}: cores {mesh.coordinate(holder)} and {mesh.coordinate(device)} hold the same block, "
                "but different numbers; a collective is missing or wrong"
            )
    return out


def _compute(program: Program, instruction: Compute, inputs: Sequence[Blocks], engine: Engine) -> list[Blocks]:
    """Run a computation on the devices; returns the blocks of each output."""
    op = instruction.operation
    if op.opdef.kind in ON_MXU:
        engine = replace(engine, operands=OperandCache())
    factors = op.opdef.roles(op)
    axes = instruction.factor_axes
    places = _block_starts(program.mesh, factors, axes, op)
    split, moving = summary_factor(factors, axes), run_factors(factors, axes)
    types = tuple(x.local for x in instruction.inputs)
    outs = tuple(y.local for y in instruction.outputs)
    if any(v.margins for v in (*instruction.inputs, *instruction.outputs)):
        results = [_within_margins(instruction, factors, place, d, inputs, engine) for d, place in enumerate(places)]
    elif split is not None:
        results = _summarised(instruction, split, axes[split.name], places, inputs, engine)
    else:
        taken = [_with_halos(instruction, moving, axes, n, blocks) for n, blocks in enumerate(inputs)]

        same = [(*(id(b[d]) for b, _ in taken), *place.values()) for d, place in enumerate(places)]
        memory = iter(_adjacent_arrays(instruction, sum(min(n, 2) for n in Counter(same).values())))

        def on(device: int) -> tuple[Array, ...]:
            arrays, starts = [b[device] for b, _ in taken], tuple(s[device] for _, s in taken)
            return compute(op, types, outs, arrays, places[device], engine, next(memory, None), starts)

        results = _shared_results(same, on)
    return [[y[n] for y in results] for n in range(len(outs))]


def _adjacent_arrays(instruction: Compute, count: int) -> Sequence[Array]:
    """Uninitialised arrays for the results of `count` devices, in one piece of memory, which takes fewer page faults
    than many; none for an operation that returns memory of its own.
    """
    if len(instruction.outputs) > 1 or instruction.operation.opdef.storage is not Storage.FRESH:
        return ()
    (y,) = instruction.outputs
    memory = new_array((count, *y.sharding.local_shape.sizes), y.tensor.dtype.storage)
    return [memory[n, ...] for n in range(count)]


def _shared_results(same: Sequence[tuple[int, ...]], on: Callable[[int], tuple[Array, ...]]) -> list[tuple[Array, ...]]:
    """The results of all devices; those with equal `same` have the same arrays as operands and the same offsets.

    The first and the last of these compute. If their bits differ, the operation depends on something else, and all
    compute; if not, the others have the first result.
    """
    devices_of: dict[tuple[int, ...], list[int]] = {}
    for device, key in enumerate(same):
        devices_of.setdefault(key, []).append(device)
    results: list[tuple[Array, ...]] = [()] * len(same)
    for first, *between in devices_of.values():
        results[first] = on(first)
        if not between:
            continue
        last = between.pop()
        results[last] = on(last)
        agree = all(x.tobytes() == y.tobytes() for x, y in zip(results[first], results[last], strict=True))
        for device in (*between, last) if agree else between:
            results[device] = results[first] if agree else on(device)
    return results


def _block_starts(
    mesh: Mesh, factors: Sequence[Factor], axes: Mapping[str, tuple[str, ...]], op: Operation
) -> list[dict[str, int]]:
    """For each device: factor -> global index at which the device's block begins."""
    begin = {f.name: 0 for f in factors}
    split = []
    for f in factors:
        if f.name not in axes:
            continue
        # With a window, operand and result may differ in size: blocks are those of the result, if it has the dim.
        size = Halo.length(op, f) if f.role in RUNS else f.size
        over = [(mesh.index(axis), mesh.axis_size(axis)) for axis in axes[f.name]]
        split.append((f.name, over, size // prod(count for _, count in over)))
    places = []
    for coordinate in mesh.coordinates():
        place = begin.copy()
        for name, over, size in split:
            index = 0
            for axis, count in over:
                index = index * count + coordinate[axis]
            place[name] = index * size
        places.append(place)
    return places


def _with_halos(
    instruction: Compute, moving: Sequence[Factor], axes: Mapping[str, tuple[str, ...]], operand: int, blocks: Blocks
) -> tuple[Blocks, list[dict[str, int]]]:
    """The windows of an operand that each device reads along split dims, and where they begin; dim by dim.

    Rows of other devices come from the instruction's exchanges; without one, a device has its own block alone.
    """
    op = instruction.operation
    starts: list[dict[str, int]] = [{} for _ in blocks]
    received = {e.dim for e in instruction.exchanges if e.operand == operand}
    lower, shape = op.opdef.lower, op.inputs[operand].shape
    for f in moving:
        dim = f.operands[operand]
        if dim is None:
            continue
        assert isinstance(lower, Halo)
        axis, size = shape.index(dim), shape.dim(dim).size
        before, blocks = blocks, list(blocks)
        for group in instruction.outputs[0].sharding.mesh.groups(axes[f.name]):
            rows_per_block, block = lower.length(op, f) // len(group), size // len(group)
            for n, device in enumerate(group):
                begin, _ = lower.needs(op, f, operand, n * rows_per_block, (n + 1) * rows_per_block)
                pieces = [before[device][(np.s_[:],) * axis + (np.s_[:0],)]]
                at_end = begin if lower.wrap(op) else max(begin, 0)
                for first, last in lower.parts(op, f, operand, n * rows_per_block, (n + 1) * rows_per_block):
                    cut = list(runs(first, last, size, block, lower.wrap(op)))
                    if cut and (first := first if lower.wrap(op) else max(first, 0)) > at_end:
                        unread = list(before[device].shape)
                        unread[axis] = first - at_end
                        pieces.append(np.zeros(unread, before[device].dtype))
                    for run in cut:
                        if run.source == n or dim in received:
                            at = run.begin - run.source * block
                            cut_out = (np.s_[:],) * axis + (np.s_[at : at + run.end - run.begin],)
                            pieces.append(before[group[run.source]][cut_out])
                    at_end = max(at_end, last)
                blocks[device] = np.concatenate(pieces, axis=axis)
                starts[device][dim] = begin if lower.wrap(op) else max(begin, 0)
    return blocks, starts


def _ranges_of_factors(
    factors: Sequence[Factor],
    split: AbstractSet[str],
    of_result: Mapping[str, tuple[int, int]],
    of_operands: Sequence[Mapping[str, tuple[int, int]]],
) -> dict[str, tuple[int, int]]:
    """The indices of each factor on one device: those of the result; of an overlap those of its leading operand."""
    ranges = {f.name: of_result[f.outputs[0]] for f in factors if f.outputs[0] is not None}
    for f in factors:
        if f.role is Role.OVERLAP and f.name in split and (led := f.operands[f.lead]) is not None:
            ranges[f.name] = of_operands[f.lead][led]
    return ranges


def _window(
    op: Operation, factor: Factor, operand: int, computed: tuple[int, int], held: tuple[int, int], size: int
) -> tuple[int, int]:
    """The indices of an operand that the `computed` ones of a factor read, of those held; `size`: of the whole dim."""
    lower = op.opdef.lower
    assert isinstance(lower, Halo)
    begin, end = lower.needs(op, factor, operand, *computed)
    low, high = held
    if lower.wrap(op):
        length, begin = end - begin, low + (begin - low) % size
        end = begin + length
    begin = min(max(begin, low), high)
    return begin, min(max(end, begin), high)


def _within_margins(
    instruction: Compute,
    factors: Sequence[Factor],
    place: Mapping[str, int],
    device: int,
    inputs: Sequence[Blocks],
    engine: Engine,
) -> tuple[Array, ...]:
    """Result of one device, computed from operands with margins that are cut to what it reads."""
    op = instruction.operation
    y = instruction.outputs[0]
    coordinate = y.sharding.mesh.coordinates()[device]
    runs_of_dims, wide = held_runs(y, coordinate), {m.dim for m in y.margins}
    own = [held_runs(Value(x.tensor, x.sharding), coordinate) for x in instruction.inputs]
    split = {name for _, name in instruction.assignment}
    by_factor = _ranges_of_factors(factors, split, runs_of_dims, own)
    along = [f for f in factors if f.name in by_factor]
    offsets = {**place, **{name: begin for name, (begin, _) in by_factor.items()}}
    arrays, starts, types = [], [], []
    for n, (x, blocks) in enumerate(zip(instruction.inputs, inputs, strict=True)):
        held, wanted = held_runs(x, coordinate), dict(own[n])
        start: dict[str, int] = {}
        for f in along:
            dim = f.operands[n]
            if dim is None:
                continue
            if f.role in RUNS and f.name in split:
                wanted[dim] = _window(op, f, n, by_factor[f.name], held[dim], x.tensor.shape.dim(dim).size)
                start[dim] = wanted[dim][0]
            elif f.outputs[0] in wide:
                wanted[dim] = by_factor[f.name]
        cuts = tuple(np.s_[b - held[d][0] : e - held[d][0]] for d, (b, e) in wanted.items())
        arrays.append(blocks[device][cuts])
        starts.append(start)
        # A window past the end of the dim is empty, but no type has size 0.
        types.append(TensorType(Shape([(d, max(e - b, 1)) for d, (b, e) in wanted.items()]), x.tensor.dtype))
    outs = tuple(z.local for z in instruction.outputs)
    if wide:
        outs = (TensorType(Shape([(d, e - b) for d, (b, e) in runs_of_dims.items()]), y.tensor.dtype),)
    return compute(op, tuple(types), outs, arrays, offsets, engine, None, tuple(starts))


def held_runs(v: Value, coordinate: tuple[int, ...]) -> dict[str, tuple[int, int]]:
    """The range of indices of each dim on one device, margins included."""
    margins = {m.dim: m for m in v.margins}
    runs_of_dims = {}
    for d, block, cut in zip(v.tensor.shape, v.sharding.local_shape.sizes, v.sharding.slices(coordinate), strict=True):
        margin = margins.get(d.name)
        runs_of_dims[d.name] = margin.run(cut.start // block, block, d.size) if margin else (cut.start, cut.stop)
    return runs_of_dims


def without_margins(v: Value, blocks: Blocks) -> Blocks:
    """Each device's block without margins."""
    inner_blocks, plain = [], Value(v.tensor, v.sharding)
    for block, c in zip(blocks, v.sharding.mesh.coordinates(), strict=True):
        runs_held, own = held_runs(v, c), held_runs(plain, c)
        inner_blocks.append(block[tuple(np.s_[b - runs_held[d][0] : e - runs_held[d][0]] for d, (b, e) in own.items())])
    return inner_blocks


def cut_wide(x: Value, y: Value, blocks: Blocks) -> Blocks:
    """Cut each device's block, with margins, from the wider one that it has."""
    wide_blocks = []
    for block, c in zip(blocks, y.sharding.mesh.coordinates(), strict=True):
        held, wanted = held_runs(x, c), held_runs(y, c)
        for axis, d in enumerate(y.tensor.shape):
            begin, end = wanted[d.name]
            # Past the ends of a whole dim, indices wrap round.
            block = np.take(block, np.arange(begin, end) - held[d.name][0], axis=axis, mode="wrap")
        wide_blocks.append(block)
    return wide_blocks


def widened(i: Widen, blocks: Blocks) -> Blocks:
    """Each device's block with one more margin, copied from the blocks of other devices."""
    (x,), (y,) = i.inputs, i.outputs
    (margin,) = (m for m in y.margins if m not in x.margins)
    axis, size = x.tensor.shape.index(margin.dim), x.tensor.shape.dim(margin.dim).size
    out = list(blocks)
    for group in x.sharding.mesh.groups(i.steps[0].axes):
        block = size // len(group)
        for n, device in enumerate(group):
            pieces = []
            for run in runs(*margin.run(n, block, size), size, block, margin.wrap):
                at = run.begin - run.source * block
                pieces.append(blocks[group[run.source]][(np.s_[:],) * axis + (np.s_[at : at + run.end - run.begin],)])
            out[device] = np.concatenate(pieces, axis=axis)
    return out


def _summarised(
    instruction: Compute,
    factor: Factor,
    over: tuple[str, ...],
    places: Sequence[Mapping[str, int]],
    inputs: Sequence[Blocks],
    engine: Engine,
) -> list[tuple[Array, ...]]:
    """Exchange the summaries of all blocks (or parts of them) within each replica group, then finish each block."""
    op = instruction.operation
    types = tuple(x.local for x in instruction.inputs)
    outs = tuple(y.local for y in instruction.outputs)
    blocks = [Block(op, types, outs[0], place, engine) for place in places]
    results: list[tuple[Array, ...]] = [()] * len(places)
    for group in instruction.outputs[0].sharding.mesh.groups(over):
        arrays = [[b[device] for b in inputs] for device in group]
        parts = summarised(
            op, outs, [blocks[d] for d in group], arrays, bool(instruction.exchanges), _shared_axes(instruction, factor)
        )
        for device, part in zip(group, parts, strict=True):
            results[device] = part
    return results


def _shared_axes(instruction: Compute, factor: Factor) -> tuple[int, ...]:
    """Axes of the summaries along which each device receives only its own part."""
    op = instruction.operation
    assert isinstance(op.opdef.lower, Summary)
    if factor.shares is None:
        return ()
    types = op.opdef.lower.types(tuple(x.local for x in instruction.inputs), op.attrs)
    return tuple(t.shape.index(factor.shares) for t in types)


def move(step: Step, blocks: Blocks, dtype: DType) -> Blocks:
    """Run one reshard step on all devices."""
    out = list(blocks)
    if STEP_KINDS[step.kind].permutes:
        for source, destination in permute_pairs(step.before, step.after):
            out[destination] = blocks[source]
        return out
    for group in step.before.mesh.groups(step.axes):
        parts = [blocks[d] for d in group]
        for device, block in zip(group, _exchange(step, parts, dtype), strict=True):
            out[device] = block
    return out


def _exchange(step: Step, parts: Blocks, dtype: DType) -> Blocks:
    """Run a step on one replica group; returns its members' blocks afterwards."""
    kind, shape = STEP_KINDS[step.kind], step.before.shape
    dim = shape.index(step.dim) if step.dim else None
    if kind.is_local:
        if kind.puts is Place.PENDING:
            return [parts[0], *(np.zeros_like(part) for part in parts[1:])]
        return [np.split(part, len(parts), axis=dim or 0)[n] for n, part in enumerate(parts)]
    cut = shape.index(step.to_dim) if step.to_dim else dim

    def join(blocks: Sequence[Array]) -> Array:
        if kind.reduces:  # the block was flattened before it was cut
            return np.concatenate(blocks).reshape(parts[0].shape)
        return _concatenate(step, blocks) if dim is None else np.concatenate(blocks, axis=dim)

    reduction = dict(step.before.pending)[step.axes[0]] if kind.reduces else "sum"
    return group_results(step.kind, parts, cut, join, reduction, dtype.rounded if dtype.is_rounded else None)


def _concatenate(step: Step, parts: Sequence[Array]) -> Array:
    """Concatenate the blocks of a group along several dims."""
    sizes = [range(step.before.mesh.axis_size(a)) for a in step.axes]
    blocks = dict(zip(product(*sizes), parts, strict=True))
    for name, axes in gathered_axes(step):
        along = [step.axes.index(a) for a in axes]
        rows: dict[tuple[int, ...], list[Array]] = {}
        for place in sorted(blocks, key=lambda place: [place[n] for n in along]):
            rows.setdefault(tuple(0 if n in along else x for n, x in enumerate(place)), []).append(blocks[place])
        blocks = {place: np.concatenate(row, axis=step.before.shape.index(name)) for place, row in rows.items()}
    (whole,) = blocks.values()
    return whole
