"""Uninitialised arrays, which tests fill with NaN to catch reads of values that were never written."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

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
