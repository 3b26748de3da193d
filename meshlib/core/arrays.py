"""Uninitialised arrays, which tests fill with NaN to catch reads of values never written, and parts of arrays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Cut = tuple[slice, ...]

# Set by tests: uninitialised elements are filled with NaN, or -1 for integers.
poisoned = False


def unwritten(array: Array) -> Array:
    """`array`, contiguous, whose elements must be written before they are read."""
    if poisoned:
        array.reshape(-1).view(np.uint8).fill(0xFF)
    return array


def new_array(shape: tuple[int, ...], dtype: Any) -> Array:
    """A new uninitialised array."""
    return unwritten(np.empty(shape, dtype))


def memory_of(array: Array) -> Array:
    """The array that owns the memory of `array`, which may be a view."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def cuts(sizes: Sequence[int], limit: int) -> Iterator[Cut]:
    """Parts of an array of these sizes with at most `limit` elements each: ranges of one dim, with later dims whole.

    >>> [[c.start for c in part[:2]] for part in cuts((2, 4, 3), 6)]
    [[0, 0], [0, 2], [1, 0], [1, 2]]
    """
    if not sizes:
        yield ()
        return
    rest = prod(sizes[1:])
    step = max(1, limit // rest)
    for start in range(0, sizes[0], step):
        first = slice(start, min(start + step, sizes[0]))
        if rest <= limit:
            yield (first, *(slice(0, n) for n in sizes[1:]))
        else:
            yield from ((first, *later) for later in cuts(sizes[1:], limit))
