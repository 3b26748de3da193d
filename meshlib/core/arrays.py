"""Uninitialised arrays, which tests fill with NaN to catch reads of values that were never written."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

# Tests set it: whoever reads what was not written gets NaN, or -1 of integers.
poisoned = False


def unwritten(array: Array) -> Array:
    """`array`, contiguous, whose elements nobody may read until they are written."""
    if poisoned:
        array.reshape(-1).view(np.uint8).fill(0xFF)
    return array


def new_array(shape: tuple[int, ...], dtype: Any) -> Array:
    """An array to write into."""
    return unwritten(np.empty(shape, dtype))


def memory_of(array: Array) -> Array:
    """The array that owns the memory of `array`, which may be a view."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array
