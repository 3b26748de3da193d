"""Spare arrays of variables that a program updates in part, such as caches that take one token a step.

Such a variable has two arrays: its value is in one, the next step writes the new value into the other. They differ only
in the rows that the last step wrote, so copying these rows makes them equal; the others need no copy.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from meshlib.core import arrays
from meshlib.core.arrays import memory_of

Array = np.ndarray[Any, Any]
Rows = tuple[Array, ...]  # an index array for each of the first dims


def _address(x: Array) -> int:
    address: int = x.__array_interface__["data"][0]
    return address


def same_elements(x: Array, y: Array) -> bool:
    """Whether two arrays show the same elements of memory in the same order."""
    return _address(x) == _address(y) and x.shape == y.shape and x.strides == y.strides


@dataclass(frozen=True)
class Pair:
    """Two arrays that are equal but for some rows. They are referenced, so that no other array takes their address.

    x      the value before the update
    out    the value after it
    order  of their dims, in which `rows` index the first
    """

    x: Array
    out: Array
    order: list[int]
    rows: Rows

    def has(self, x: Array, out: Array) -> bool:
        """Whether these are the two arrays, either of them being the value before."""
        pair = (self.x, self.out) if _address(x) == _address(self.x) else (self.out, self.x)
        return all(same_elements(a, b) for a, b in zip(pair, (x, out), strict=True))


@dataclass
class SpareArrays:
    """Which arrays of one executor are equal but for which rows; an operation in a trip of a loop has one pair."""

    _pairs: dict[Hashable, Pair] = field(default_factory=dict)
    _in_this_step: dict[int, Pair] = field(default_factory=dict)  # by the address of the value after
    _own: frozenset[int] = frozenset()
    _constants: frozenset[int] = frozenset()

    def begin(self, own: Iterable[Array], constants: Iterable[Array]) -> SpareArrays:
        """Begin a step.

        constants: of variables that the program does not update.
        own: arrays that only this executor writes, and only new values of variables.
        """
        self._own = frozenset() if arrays.poisoned else frozenset(id(memory_of(a)) for a in own)
        self._constants = frozenset(id(memory_of(a)) for a in constants) - self._own
        self._in_this_step.clear()
        if not self._own:
            self._pairs.clear()
        return self

    def clear(self) -> None:
        """Forget all pairs: something else was written to the arrays."""
        self._pairs.clear()
        self._in_this_step.clear()

    def is_constant(self, x: Array) -> bool:
        """Whether the array shows a variable that the program does not update."""
        return id(memory_of(x)) in self._constants

    def written_in_this_step(self, x: Array) -> Pair | None:
        """The update that made all of this array from a value of the state, if it was one."""
        pair = self._in_this_step.get(_address(x)) if self._in_this_step else None
        return pair if pair is not None and same_elements(pair.out, x) else None

    def changed_parts(self, x: Array, out: Array) -> list[Array] | None:
        """The elements in which `out` differs from `x`, if the updates of this step made all of it from `x`."""
        before, after = memory_of(x), memory_of(out)
        pairs = [p for p in self._in_this_step.values() if memory_of(p.out) is after]
        if sum(p.out.size for p in pairs) != out.size or any(memory_of(p.x) is not before for p in pairs):
            return None
        return [p.out.transpose(p.order)[p.rows] for p in pairs]

    def differing_rows(self, key: Hashable, x: Array, out: Array) -> Rows | None:
        """The rows in which `out` differs from `x`, if they are known; forgotten until `written` names them anew."""
        pair = self._pairs.pop(key, None)
        return pair.rows if pair is not None and pair.has(x, out) else None

    def written(self, key: Hashable, x: Array, out: Array, order: list[int], rows: Rows) -> None:
        """`out` is now equal to `x` but for these rows, which index the first dims in this order."""
        if id(memory_of(x)) in self._own and id(memory_of(out)) in self._own:
            self._pairs[key] = self._in_this_step[_address(out)] = Pair(x, out, order, rows)
