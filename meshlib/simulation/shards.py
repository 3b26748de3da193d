"""Blocks of intermediate tensors: the last step once more, core by core, as far as the tensor that is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshlib.core.arguments import at
from meshlib.core.engine import Engine
from meshlib.core.errors import FeedError, nearest
from meshlib.program.instructions import Instruction, Loop, Value
from meshlib.program.records import Program
from meshlib.simulation.exact import Blocks, run_exact

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class LastStep:
    """What determines every value of a step: program, feeds, the state before it, and seed and number of the step."""

    program: Program
    feeds: Mapping[str, Array]
    state: Mapping[str, Array]
    engine: Engine


class _Seen(Exception):  # ends a run, and is no fault
    """The value was computed as often as was asked."""


def intermediate(step: LastStep, name: str, device: int, trip: int) -> Array:
    """The block of a tensor on one device, in a step.

    Args:
      name: of the tensor, or "%3" as in the listing of the program, which also names partial sums.
      trip: which of the times that loops compute it.
    Returns: a copy, in the tensor's dtype.
    Raises: FeedError for a name that the program does not have, and a trip that it does not reach.
    """
    value = _value(step.program, name)
    if value in step.program.inputs.values():
        whole = step.feeds[value.tensor.name]
        return _copied(whole[value.sharding.slices(step.program.mesh.coordinate(device))], value)
    blocks_of_trips: list[Array] = []

    def watch(instruction: Instruction, computed: Value, blocks: Blocks) -> None:
        if computed is value:
            blocks_of_trips.append(blocks[device])
            if len(blocks_of_trips) > trip:
                raise _Seen

    try:
        with np.errstate(all="ignore"):
            run_exact(step.program, step.state, step.feeds, step.engine, watch)
    except _Seen:
        return _copied(blocks_of_trips[trip], value)
    times = len(blocks_of_trips)
    raise FeedError(
        f"{at('shard')}: '{name}' is computed {times} times in a step; trip must be under {times}, got {trip}"
    )


def _copied(block: Array, value: Value) -> Array:
    return np.array(block, dtype=value.tensor.dtype.public)


def _value(program: Program, name: str) -> Value:
    """The value of a name; of several copies of a tensor the last in the program, or loop body, that computes it."""
    if name.startswith("%"):
        own = [y for i in program.instructions for y in i.outputs]
        if name[1:].isdecimal() and int(name[1:]) < len(own):
            return own[int(name[1:])]
        raise FeedError(f"{at('shard')}: no value {name!r}; print(program) lists %0 to %{len(own) - 1}")
    names: set[str] = set()
    for body in _bodies(program):
        values = [y for i in body.instructions for y in i.outputs]
        copies = [y for y in values if y.tensor.name == name]
        if copies:
            return copies[-1]
        names |= {y.tensor.name for y in values}
    raise FeedError(
        f"{at('shard')}: no tensor '{name}' in the program{nearest(name, names)}; print(program) lists all; what "
        "nothing needs is not computed"
    )


def _bodies(program: Program) -> Iterator[Program]:
    """The program, then the bodies of its loops in their order."""
    yield program
    for i in program.instructions:
        if isinstance(i, Loop):
            yield from _bodies(i.body)
