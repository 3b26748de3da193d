"""Buffers of the fast executor: which array each value is written to, planned once by liveness.

A node that computes writes into a buffer; nodes that only look at their operand differently share its buffer, which
therefore lives until the last of them is used. A buffer is free again after that, and element-wise nodes write over
an operand that dies there. New values of variables get two arrays that take turns with the state's.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

from meshlib.operation import EVERY, Storage
from meshlib.program.checker import instruction_factors
from meshlib.program.records import Instruction, Program, Value

Array = np.ndarray[Any, Any]


@dataclass(eq=False)
class Node:
    """One step of the fast executor: compute, reduce, round, loop, or alias (another name of the same array)."""

    kind: str
    instruction: Instruction
    inputs: tuple[Value, ...]
    output: Value
    zero_offsets: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        factors = instruction_factors(self.instruction)[0] if self.kind == "compute" else ()
        self.zero_offsets = {f.name: 0 for f in factors}

    @property
    def shares(self) -> bool:
        """Whether the output may show its first operand's memory."""
        return self.kind == "alias" or (
            self.kind == "compute" and self._storage is not Storage.FRESH and bool(self.inputs)
        )

    @property
    def writes(self) -> bool:
        """Whether the node writes into a buffer given to it."""
        if self.kind == "round":
            return True
        one = len(self.instruction.outputs) == 1
        return one and self.kind == "compute" and self._storage is Storage.FRESH

    @property
    def _storage(self) -> Storage:
        return self.instruction.operation.kind.storage


class Buffers:
    """The plan, and the arrays it stands for."""

    def __init__(
        self, program: Program, nodes: Sequence[Node], stored_shape: Callable[[Value], tuple[int, ...]]
    ) -> None:
        self.shape = stored_shape
        self.owner: dict[Value, Value] = {}
        for v in (*program.inputs.values(), *program.variables.values()):
            self.owner[v] = v
        for node in nodes:
            x = node.inputs[0] if node.shares else node.output
            self.owner[node.output] = self.owner.get(x, x)
            # Loops, and operations with several results, make their own arrays.
            if len(node.instruction.outputs) > 1 and node.kind in ("loop", "compute"):
                self.owner.update((y, y) for y in node.instruction.outputs)
        self.last = self._last_uses(program, nodes)
        self.resident = {*program.inputs.values(), *program.variables.values()}
        self.sizes: list[int] = []
        self.places: dict[Value, int] = {}
        self._assign(nodes)
        self.memory = [np.empty(size, np.uint8) for size in self.sizes]
        self.double = self._doubled(program)
        self.fixed = {v: self._view(self.memory[b], v) for v, b in self.places.items() if v not in self.double}
        # Two arrays each, so that a new value never lands on the state it was made from.
        self.turns = {v: [np.empty(self.shape(v), v.tensor.dtype.storage) for _ in range(2)] for v in self.double}

    def begin(self, taken: Iterable[Array]) -> dict[Value, Array]:
        """The arrays to write into during the next step: none that the state has `taken`."""
        state = {id(_memory_of(a)) for a in taken}
        arrays = dict(self.fixed)
        for v, pair in self.turns.items():
            free = [a for a in pair if id(a) not in state]
            arrays[v] = free[0] if free else np.empty_like(pair[0])
        return arrays

    @property
    def bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(self.sizes) + sum(a.nbytes for pair in self.turns.values() for a in pair)

    def _view(self, memory: Array, v: Value) -> Array:
        shape, dtype = self.shape(v), v.tensor.dtype.storage
        return memory[: prod(shape) * dtype.itemsize].view(dtype).reshape(shape)

    def _last_uses(self, program: Program, nodes: Sequence[Node]) -> dict[Value, int]:
        """Per owner, the last node that needs its memory."""
        last: dict[Value, int] = {}
        for n, node in enumerate(nodes):
            for v in (*node.inputs, node.output):
                last[self.owner[v]] = n
        for v in (*program.outputs.values(), *program.updates.values()):
            last[self.owner[v]] = len(nodes)
        return last

    def _doubled(self, program: Program) -> set[Value]:
        """The owners of the new values of variables that a node writes."""
        found = {self.owner[v] for v in program.updates.values() if self.owner[v] in self.places}
        for v in found:
            del self.places[v]
        return found

    def _assign(self, nodes: Sequence[Node]) -> None:
        free: list[tuple[int, int]] = []  # (bytes, buffer), sorted
        ends: dict[int, list[Value]] = {}
        holders: dict[int, int] = {}  # per buffer the values that are in it: several where one was written over
        for n, node in enumerate(nodes):
            y = node.output
            if node.writes:
                place = self._over_operand(n, node)
                if place is None:
                    place = self._take(free, prod(self.shape(y)) * y.tensor.dtype.storage.itemsize)
                self.places[y] = place
                holders[place] = holders.get(place, 0) + 1
                ends.setdefault(self.last[y], []).append(y)
            for v in ends.pop(n, ()):
                place = self.places[v]
                holders[place] -= 1
                if not holders[place]:
                    insort(free, (self.sizes[place], place))

    def _over_operand(self, n: int, node: Node) -> int | None:
        y = node.output
        most = node.instruction.operation.kind.overwrites if node.kind == "compute" else EVERY
        candidates = node.inputs[:most]
        for x in candidates:
            owner = self.owner[x]
            same = (self.shape(owner), owner.tensor.shape) == (self.shape(y), y.tensor.shape)
            same = same and x.tensor.shape == y.tensor.shape and owner.tensor.dtype.storage == y.tensor.dtype.storage
            late = node.inputs[len(candidates) :]
            same = same and all(self.owner[other] is not owner for other in late)
            if same and self.last[owner] == n and owner in self.places and owner not in self.resident:
                return self.places[owner]
        return None

    def _take(self, free: list[tuple[int, int]], size: int) -> int:
        """The smallest free buffer that is large enough, unless it is far too large; else a new one."""
        n = bisect_left(free, (size, 0))
        if n < len(free) and free[n][0] <= max(4 * size, 4096):
            return free.pop(n)[1]
        self.sizes.append(size)
        return len(self.sizes) - 1


def _memory_of(array: Array) -> Array:
    """The array that owns the memory `array` shows: a new value of a variable may be a view of where it was made."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array
