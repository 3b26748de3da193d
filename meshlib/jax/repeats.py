"""Deliberate recomputations of a program, protected from being merged with the originals.

A program gathers weights again for the backward pass, and recomputes layers, to save memory. A compiler's common
subexpression elimination would merge each repetition with its original and keep the result in memory. So a repetition
takes its operands through an optimisation barrier, together with an element of the instruction before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

from jax import lax

from meshlib.core.opdef import Kind
from meshlib.jax.context import Array
from meshlib.program.instructions import Compute, Instruction, Move, Value


class Repeats:
    """Numbers the values of one program or body: equal numbers for equal values."""

    def __init__(self) -> None:
        self._fresh = count()
        self._numbers: dict[Value, int] = {}
        self._made: dict[Any, tuple[int, ...]] = {}
        self._last: Array | None = None

    def apart(self, i: Instruction, inputs: Sequence[Array]) -> Sequence[Array]:
        """The operands, behind a barrier if an equal instruction has already run on them."""
        if not _must_repeat(i) or self._key(i) not in self._made or self._last is None or not inputs:
            return inputs
        # the result counts as a different value from now on
        self._numbers.update((y, next(self._fresh)) for y in i.outputs)
        separated = lax.optimization_barrier((*inputs, self._last.reshape(-1)[:1]))
        return list(separated[:-1])

    def note(self, i: Instruction, arrays: Sequence[Array]) -> None:
        """Record the results of an instruction."""
        key = self._key(i)
        numbers = self._made.get(key)
        if numbers is None:
            numbers = self._made[key] = tuple(next(self._fresh) for _ in i.outputs)
        for y, number in zip(i.outputs, numbers, strict=True):
            self._numbers.setdefault(y, number)
        if arrays and arrays[-1].size and arrays[-1].dtype.kind != "b":
            self._last = arrays[-1]

    def _key(self, i: Instruction) -> Any:
        """Key that is equal for instructions with equal results."""
        operands, op = tuple(self._number(x) for x in i.inputs), i.operation
        if isinstance(i, Move):
            return (tuple((s.kind, s.axes, s.dim, s.to_dim) for s in i.steps), operands)
        if isinstance(i, Compute) and not op.opdef.unique:
            return (op.opdef.name, tuple(op.attrs.items()), operands, i.assignment, tuple(y.margins for y in i.outputs))
        return i

    def _number(self, x: Value) -> int:
        if x not in self._numbers:
            self._numbers[x] = next(self._fresh)
        return self._numbers[x]


def _must_repeat(i: Instruction) -> bool:
    """True if merging it would be harmful: a collective, or a result that occupies memory."""
    if isinstance(i, Compute):
        return not i.operation.opdef.cheap and i.operation.opdef.kind is not Kind.COPY
    return i.is_collective
