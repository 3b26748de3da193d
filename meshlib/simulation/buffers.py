"""Buffers of the fast executor, planned once from live ranges.

A computation writes to a buffer. Views of its result share that buffer, which therefore lives until the last of them is
used; then it is free again. Element-wise work overwrites an operand that dies there. New values of variables alternate
between two arrays, one of which is the state's.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import Any

import numpy as np

from meshlib.core.arrays import memory_of, new_array, unwritten
from meshlib.core.opdef import EVERY, Storage
from meshlib.program.instructions import Commit, Compute, Instruction, Loop, Move, Resident, Value
from meshlib.program.records import Program
from meshlib.simulation.chains import Chain

Array = np.ndarray[Any, Any]


def _writes(i: Instruction) -> bool:
    """True if an instruction writes its results into buffers given to it."""
    if isinstance(i, Resident | Move | Loop | Commit) or (len(i.outputs) != 1 and not isinstance(i, Chain)):
        return False
    return not isinstance(i, Compute) or i.operation.opdef.storage is Storage.FRESH


def overwritable(i: Instruction, y: Value) -> Sequence[Value]:
    """The operands of an instruction that its result `y` may overwrite element by element."""
    if isinstance(i, Chain):
        return i.overwritable(y)
    return i.inputs[: i.operation.opdef.overwrites if isinstance(i, Compute) else EVERY]


class Buffers:
    """The buffer plan of a program, and its arrays."""

    def __init__(self, program: Program) -> None:
        self.resident = {*program.inputs.values(), *program.variables.values()}
        self.owner: dict[Value, Value] = {v: v for v in self.resident}
        for i in program.instructions:
            self.owner.update(self._owners(i))
        self.last = self._last_uses(program)
        self.sizes: list[int] = []
        self.places: dict[Value, int] = {}
        self._assign(program)
        self.memory = [np.empty(size, np.uint8) for size in self.sizes]
        self.double = self._doubled(program)
        self.fixed = {v: self._view(self.memory[b], v) for v, b in self.places.items() if v not in self.double}
        # Two arrays each, so that a new value never overwrites the state that it was computed from.
        self.turns = {
            v: [new_array(v.tensor.shape.sizes, v.tensor.dtype.storage) for _ in range(2)] for v in self.double
        }

    def _owners(self, i: Instruction) -> Iterator[tuple[Value, Value]]:
        """(result, value whose memory it aliases). Loops, and operations with several results, own their memory."""
        fresh = not isinstance(i, Compute) or i.operation.opdef.storage is Storage.FRESH
        view = isinstance(i, Move) or (not fresh and len(i.outputs) == 1)
        for n, y in enumerate(i.outputs):
            x = i.inputs[n] if i.inputs and view else y
            yield y, self.owner.get(x, x)

    def begin(self, taken: Iterable[Array]) -> dict[Value, Array]:
        """The arrays to write to during the next step; none that the state has `taken`."""
        state = {id(memory_of(a)) for a in taken}
        for memory in self.memory:
            unwritten(memory)
        arrays = dict(self.fixed)
        for v, pair in self.turns.items():
            free = [a for a in pair if id(a) not in state]
            arrays[v] = unwritten(free[0] if free else np.empty_like(pair[0]))
        return arrays

    @property
    def bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(self.sizes) + sum(a.nbytes for pair in self.turns.values() for a in pair)

    def _view(self, memory: Array, v: Value) -> Array:
        shape, dtype = v.tensor.shape.sizes, v.tensor.dtype.storage
        return memory[: prod(shape) * dtype.itemsize].view(dtype).reshape(shape)

    def _last_uses(self, program: Program) -> dict[Value, int]:
        """For each owner, the last instruction that needs its memory."""
        last: dict[Value, int] = {}
        for n, i in enumerate(program.instructions):
            for y in i.outputs:
                owner = self.owner[y]
                last[owner] = max(last.get(owner, n), program.last_use.get(y, n))
        return last

    def _doubled(self, program: Program) -> set[Value]:
        """Owners of the new values of variables that an instruction writes."""
        doubled = {self.owner[v] for v in program.updates.values() if self.owner[v] in self.places}
        for v in doubled:
            del self.places[v]
        return doubled

    def _assign(self, program: Program) -> None:
        free: list[tuple[int, int]] = []  # sorted (bytes, buffer) pairs
        ends: dict[int, list[Value]] = {}
        holders: dict[int, int] = {}  # values per buffer: several where an operand was overwritten
        for n, i in enumerate(program.instructions):
            for y in i.outputs if _writes(i) else ():
                place = self._over_operand(n, i, y)
                if place is None:
                    place = self._take(free, y.tensor.shape.size * y.tensor.dtype.storage.itemsize)
                self.places[y] = place
                holders[place] = holders.get(place, 0) + 1
                ends.setdefault(self.last[y], []).append(y)
            for v in ends.pop(n, ()):
                place = self.places[v]
                holders[place] -= 1
                if not holders[place]:
                    insort(free, (self.sizes[place], place))

    def _over_operand(self, n: int, i: Instruction, y: Value) -> int | None:
        chain, over = isinstance(i, Chain), overwritable(i, y)
        for x in over:
            owner = self.owner[x]
            same = owner.tensor.shape == y.tensor.shape
            same = same and x.tensor.shape == y.tensor.shape and owner.tensor.dtype.storage == y.tensor.dtype.storage
            # A view may have other elements at the same place, which a chain would read after those of earlier parts.
            others = (z for z in i.inputs if z is not x) if chain else i.inputs[len(over) :]
            same = same and all(self.owner[z] is not owner for z in others) and (x is owner or not chain)
            place = self.places.get(owner)
            free = owner not in self.resident and all(self.places.get(other) != place for other in i.outputs)
            if same and self.last[owner] == n and free and place is not None:
                return place
        return None

    def _take(self, free: list[tuple[int, int]], size: int) -> int:
        """The smallest free buffer of at least `size` bytes and at most four times as many or 4,096, or a new one."""
        n = bisect_left(free, (size, 0))
        if n < len(free) and free[n][0] <= max(4 * size, 4096):
            return free.pop(n)[1]
        self.sizes.append(size)
        return len(self.sizes) - 1
