"""Passes over a lowered program: dead code, joining and merging of collectives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from layouts.plan import Step, gathered_axes
from meshlib.program.instructions import Commit, Instruction, Move, Resident, Value
from meshlib.program.records import Program

# A collective below this size is dominated by latency: at 70 GB/s, 64 KiB take the time of one hop (about 1 us).
SMALL_PAYLOAD_BYTES = 64 * 1024


def remove_dead_code(program: Program) -> Program:
    """Drop instructions whose results are neither used nor fetched nor written back."""
    needed: set[Value] = {*program.outputs.values(), *program.updates.values()}
    live: list[Instruction] = []
    for instruction in reversed(program.instructions):
        resident = isinstance(instruction, Resident | Commit)
        if resident or any(y in needed for y in instruction.outputs):
            live.append(instruction)
            needed.update(instruction.inputs)
    return program.with_instructions(live[::-1])


def join_gathers(program: Program) -> Program:
    """Merge a gather with a following gather of its result, along the same or another dim.

    The bytes stay the same, but there is one launch over the links of all axes, and no half-gathered value.
    """
    uses = Counter(x for i in program.instructions for x in i.inputs)
    uses.update((*program.outputs.values(), *program.updates.values()))
    joined: dict[Instruction, None] = {}
    gathers: dict[Value, Move] = {}
    for instruction in program.instructions:
        if isinstance(instruction, Move) and instruction.step_kind.gathers and len(instruction.inputs) == 1:
            first = gathers.get(instruction.inputs[0])
            if first is not None and uses[first.outputs[0]] == 1 and first.region == instruction.region:
                del joined[first]
                instruction = _joined(first, instruction)
            gathers[instruction.outputs[0]] = instruction
        joined[instruction] = None
    return program.with_instructions(list(joined))


def _joined(first: Move, second: Move) -> Move:
    (a,), (b,), (why, other) = first.steps, second.steps, (*first.reasons, *second.reasons)
    axes = tuple(x for x in a.before.mesh.axes if x in (*a.axes, *b.axes))
    step = Step(a.kind, axes, None, None, a.before, b.after, a.payload_bytes, a.sent_bytes + b.sent_bytes)
    gone = gathered_axes(step)
    if len(gone) == 1:  # twice along one dim
        ((dim, axes),) = gone
        step = replace(step, axes=axes, dim=dim)
    reason = replace(other, dim=step.dim, why=f"{why.why}; {other.why}", avoid=f"{why.avoid}; {other.avoid}")
    return replace(second, inputs=first.inputs, steps=(step,), reasons=(reason,))


def merge_small_collectives(program: Program) -> Program:
    """Launch small all_reduces of one kind, axes, phase and dtype together.

    A small all_reduce can be launched from the producer of its operand on, and at the latest before the first use of
    any member's result, so members never depend on each other. Bytes do not change, only the number of launches.
    """
    merged: list[Instruction] = []
    waiting: dict[object, list[Move]] = {}
    makers: dict[Value, object] = {}
    fetched = {*program.outputs.values(), *program.updates.values()}
    for instruction in _early(program.instructions):
        for x in instruction.inputs:
            if x in makers:
                _flush(merged, waiting, makers, [makers[x]])
        key = _merge_key(instruction)
        if key is None:
            merged.append(instruction)
            continue
        assert isinstance(instruction, Move)
        waiting.setdefault(key, []).append(instruction)
        makers[instruction.outputs[0]] = key
    _flush(merged, waiting, makers, list(waiting))
    assert all(v not in makers for v in fetched)
    return program.with_instructions(merged)


def _early(instructions: Sequence[Instruction]) -> Iterator[Instruction]:
    """The instructions, with each mergeable all_reduce right after its operand: means of one tensor share a launch."""
    small: dict[Value, list[Instruction]] = {}
    for instruction in instructions:
        if _merge_key(instruction) is not None:
            small.setdefault(instruction.inputs[0], []).append(instruction)
    for instruction in instructions:
        if _merge_key(instruction) is None:
            yield instruction
            emitted = [instruction]
            for one in emitted:  # an all_reduce comes after the one that produces its operand
                emitted += (ready := [move for y in one.outputs for move in small.get(y, ())])
                yield from ready


def _merge_key(instruction: Instruction) -> object | None:
    if not isinstance(instruction, Move) or not instruction.step_kind.sums_in_place:
        return None
    if instruction.inputs[0].local_bytes > SMALL_PAYLOAD_BYTES:
        return None
    (x,), (step,) = instruction.inputs, instruction.steps
    return (step.kind, step.axes, x.sharding.pending, x.tensor.dtype, instruction.region)


def _flush(
    merged: list[Instruction],
    waiting: dict[object, list[Move]],
    makers: dict[Value, object],
    keys: Iterable[object],
) -> None:
    for key in keys:
        members = waiting.pop(key, [])
        if not members:
            continue
        first = members[0]
        merged.append(
            Move(
                first.operation,
                tuple(m.inputs[0] for m in members),
                tuple(m.outputs[0] for m in members),
                first.region,
                tuple(m.steps[0] for m in members),
                tuple(m.reasons[0] for m in members),
            )
        )
        for m in members:
            del makers[m.outputs[0]]
