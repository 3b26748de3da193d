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


@dataclass(frozen=True)
class _Pair:
    """Two arrays that are equal but for some rows. They are referenced, so that no other array takes their address."""

    one: Array
    other: Array
    rows: Rows

    def has(self, x: Array, out: Array) -> bool:
        return {_address(self.one), _address(self.other)} == {_address(x), _address(out)}


@dataclass
class SpareArrays:
    """Which arrays of one executor are equal but for which rows; an operation in a trip of a loop has one pair."""

    _pairs: dict[Hashable, _Pair] = field(default_factory=dict)
    _own: frozenset[int] = frozenset()

    def begin(self, own: Iterable[Array]) -> SpareArrays:
        """Begin a step. `own`: arrays that only this executor writes, and only new values of variables."""
        self._own = frozenset() if arrays.poisoned else frozenset(id(memory_of(a)) for a in own)
        if not self._own:
            self.clear()
        return self

    def clear(self) -> None:
        """Forget all pairs: something else was written to the arrays."""
        self._pairs.clear()

    def differing_rows(self, key: Hashable, x: Array, out: Array) -> Rows | None:
        """The rows in which `out` differs from `x`, if they are known; forgotten until `written` names them anew."""
        pair = self._pairs.pop(key, None)
        return pair.rows if pair is not None and pair.has(x, out) else None

    def written(self, key: Hashable, x: Array, out: Array, rows: Rows) -> None:
        """`out` is now equal to `x` but for these rows."""
        if id(memory_of(x)) in self._own and id(memory_of(out)) in self._own:
            self._pairs[key] = _Pair(x, out, rows)
