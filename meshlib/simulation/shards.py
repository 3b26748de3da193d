"""Blocks and collectives of intermediate tensors, by running the last step again up to the tensor asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from hardware.ring_steps import KINDS, RingRun, ring_steps
from layouts.checking import some
from layouts.step_kinds import STEP_KINDS
from meshlib.core.arguments import at
from meshlib.core.engine import Engine
from meshlib.core.errors import FeedError, nearest
from meshlib.program.instructions import Instruction, Loop, Move, Value
from meshlib.program.records import Program
from meshlib.simulation.exact import Blocks, cut, run_exact

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class LastStep:
    """Everything that determines a step's values: program, feeds, state before the step, seed and step number."""

    program: Program
    feeds: Mapping[str, Array]
    state: Mapping[str, Array]
    engine: Engine


class _Seen(Exception):  # ends the run; not an error
    """The value has been computed as many times as asked for."""


def intermediate(step: LastStep, name: str, device: int, trip: int) -> Array:
    """One device's block of a tensor in a step; see `Simulation.shard`.

    Returns: a copy, in the tensor's dtype.
    Raises: FeedError for a name that the program does not have, and a trip that it does not reach.
    """
    value = _value(step.program, _tensor_name(step.program, name), "shard")
    return np.array(_blocks(step, value, name, trip)[device], dtype=value.tensor.dtype.public)


def ring_of(step: LastStep, name: str, device: int, trip: int) -> RingRun:
    """The collective that produced a tensor, step by step, in one device's group; see `Simulation.ring`."""
    name = _tensor_name(step.program, name)
    named = None if not name.startswith("%") else _value(step.program, name, "ring")
    for move, place in _ring_moves(step.program):
        value = move.outputs[place]
        if value is named or (named is None and value.tensor.name == name):
            break
    else:
        _value(step.program, name, "ring")  # raises for unknown names
        names = dict.fromkeys(move.outputs[place].tensor.name for move, place in _ring_moves(step.program))
        results = some([*names]) or "none"
        raise FeedError(
            f"{at('ring')}: '{name}' is not the result of a collective on a ring; there are {results}; "
            "print(program) has names for copies, such as %3"
        )
    reshard, operand = move.steps[place], move.inputs[place]
    blocks = _blocks(step, operand, name, trip)
    group = next(g for g in step.program.mesh.groups(reshard.axes) if device in g)
    along = reshard.to_dim or reshard.dim  # the dim cut into blocks comes first
    dim = operand.tensor.shape.index(along) if along and not STEP_KINDS[reshard.kind].gathers else 0
    dtype = operand.tensor.dtype.public
    exact = dtype if np.dtype(dtype).kind in "fiu" else np.dtype(np.float32)
    return ring_steps(reshard.kind, [np.moveaxis(np.atleast_1d(blocks[d].astype(exact)), dim, 0) for d in group])


def _blocks(step: LastStep, value: Value, name: str, trip: int) -> Blocks:
    """All devices' blocks of a value, at its `trip`-th computation."""
    if value in step.program.inputs.values():
        return cut(step.feeds[value.tensor.name], value.sharding)
    if value in step.program.variables.values():
        return cut(step.state[value.tensor.name], value.sharding)
    blocks_of_trips: list[Blocks] = []

    def watch(instruction: Instruction, computed: Value, blocks: Blocks) -> None:
        if computed is value:
            blocks_of_trips.append(blocks)
            if len(blocks_of_trips) > trip:
                raise _Seen

    try:
        with np.errstate(all="ignore"):
            run_exact(step.program, step.state, step.feeds, step.engine, watch)
    except _Seen:
        return blocks_of_trips[trip]
    times = len(blocks_of_trips)
    raise FeedError(
        f"{at('shard')}: '{name}' is computed {times} times in a step; trip must be under {times}, got {trip}"
    )


def _tensor_name(program: Program, name: str) -> str:
    """The name of a tensor that is given by its own name or, if no tensor has it, by that of an output."""
    tensors = {y.tensor.name for body in _bodies(program) for i in body.instructions for y in i.outputs}
    return program.outputs[name].tensor.name if name in program.outputs and name not in tensors else name


def _value(program: Program, name: str, what: str) -> Value:
    """The value of a name; of several copies of a tensor, the last one in the program or loop body that computes it."""
    if name.startswith("%"):
        own = [y for i in program.instructions for y in i.outputs]
        if name[1:].isdecimal() and int(name[1:]) < len(own):
            return own[int(name[1:])]
        raise FeedError(f"{at(what)}: no value {name!r}; print(program) lists %0 to %{len(own) - 1}")
    names: set[str] = set()
    for body in _bodies(program):
        values = [y for i in body.instructions for y in i.outputs]
        copies = [y for y in values if y.tensor.name == name]
        if copies:
            return copies[-1]
        names |= {y.tensor.name for y in values}
    raise FeedError(
        f"{at(what)}: no tensor '{name}' in the program"
        + (nearest(name, names) or "; print(program) lists all; values that nothing uses are not computed")
    )


def _ring_moves(program: Program) -> Iterator[tuple[Move, int]]:
    """Ring collectives, each with the position of one of its values."""
    for body in _bodies(program):
        for i in body.instructions:
            if isinstance(i, Move):
                yield from ((i, place) for place, step in enumerate(i.steps) if step.kind in KINDS)


def _bodies(program: Program) -> Iterator[Program]:
    """The program, then the bodies of its loops in order."""
    yield program
    for i in program.instructions:
        if isinstance(i, Loop):
            yield from _bodies(i.body)
