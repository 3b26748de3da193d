"""Double buffers of variables that a program updates in part, such as caches that take one token a step.

Such a variable has two arrays: one has its value, the next step writes the new value into the other. They differ only
in the rows that the last step wrote, so only these rows are copied.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from meshlib.core import arrays
from meshlib.core.arrays import memory_of

Array = np.ndarray[Any, Any]
Rows = tuple[Array, ...]  # one index array per leading dim


def _address(x: Array) -> int:
    address: int = x.__array_interface__["data"][0]
    return address


def same_elements(x: Array, y: Array) -> bool:
    """True if two arrays are views of the same memory in the same order."""
    return _address(x) == _address(y) and x.shape == y.shape and x.strides == y.strides


@dataclass(frozen=True)
class Pair:
    """Two arrays that are equal except for some rows. References keep their addresses from being reused.

    x      the value before the update
    out    the value after the update
    order  permutation of their dims, after which `rows` index the leading ones
    """

    x: Array
    out: Array
    order: list[int]
    rows: Rows

    def has(self, x: Array, out: Array) -> bool:
        """True if the pair consists of these two arrays, in either order."""
        pair = (self.x, self.out) if _address(x) == _address(self.x) else (self.out, self.x)
        return all(same_elements(a, b) for a, b in zip(pair, (x, out), strict=True))


@dataclass
class SpareArrays:
    """Pairs of arrays of one executor with the rows in which they differ, one pair per operation and trip."""

    _pairs: dict[Hashable, Pair] = field(default_factory=dict)
    _in_this_step: dict[int, Pair] = field(default_factory=dict)  # by address of the updated array
    _own: frozenset[int] = frozenset()
    _constants: frozenset[int] = frozenset()

    def begin(self, own: Iterable[Array], constants: Iterable[Array]) -> SpareArrays:
        """Begin a step.

        constants: arrays of variables that the program does not update.
        own: arrays that only this executor writes, and only with new values of variables.
        """
        self._own = frozenset() if arrays.poisoned else frozenset(id(memory_of(a)) for a in own)
        self._constants = frozenset(id(memory_of(a)) for a in constants) - self._own
        self._in_this_step.clear()
        if not self._own:
            self._pairs.clear()
        return self

    def clear(self) -> None:
        """Forget all pairs: the arrays were written from outside."""
        self._pairs.clear()
        self._in_this_step.clear()

    def is_constant(self, x: Array) -> bool:
        """True if the array is a view of a variable that the program does not update."""
        return id(memory_of(x)) in self._constants

    def written_in_this_step(self, x: Array) -> Pair | None:
        """The pair of the update that wrote this whole array from a value of the state, if any."""
        pair = self._in_this_step.get(_address(x)) if self._in_this_step else None
        return pair if pair is not None and same_elements(pair.out, x) else None

    def changed_parts(self, x: Array, out: Array) -> list[Array] | None:
        """The elements in which `out` differs from `x`, if updates of this step wrote all of it from `x`; else None."""
        before, after = memory_of(x), memory_of(out)
        pairs = [p for p in self._in_this_step.values() if memory_of(p.out) is after]
        if sum(p.out.size for p in pairs) != out.size or any(memory_of(p.x) is not before for p in pairs):
            return None
        return [p.out.transpose(p.order)[p.rows] for p in pairs]

    def differing_rows(self, key: Hashable, x: Array, out: Array) -> Rows | None:
        """The rows in which `out` differs from `x`, or None; forgotten until the next `written`."""
        pair = self._pairs.pop(key, None)
        return pair.rows if pair is not None and pair.has(x, out) else None

    def written(self, key: Hashable, x: Array, out: Array, order: list[int], rows: Rows) -> None:
        """Record that `out` equals `x` except for these rows, which index the leading dims after `order`."""
        if id(memory_of(x)) in self._own and id(memory_of(out)) in self._own:
            self._pairs[key] = self._in_this_step[_address(out)] = Pair(x, out, order, rows)
