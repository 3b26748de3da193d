"""Checks of plain arguments: each answers a wrong one with one error that names it, its value and the user's line."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from layouts.parsing import is_iterable
from meshlib.dtypes import BOOL, DType
from meshlib.errors import GraphError, ShapeError, nearest
from meshlib.graph import Tensor
from meshlib.origin import source_line


def at(what: str) -> str:
    """`what` with the line of the user's code that is running: how a message about an argument begins."""
    return f"{what} ({source_line()})"


def number(value: object, what: str, argument: str) -> float:
    """`value` as a finite float; bools and text are none.

    >>> number(np.float32(0.5), "dropout", "rate")
    0.5
    """
    if isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool):
        try:
            found = float(value)
        except OverflowError:
            found = math.inf
        if math.isfinite(found):
            return found
    raise GraphError(f"{at(what)}: {argument} must be a finite number, got {_shown(value)}")


def whole(value: object, what: str, argument: str) -> int:
    """`value` as an int; bools and floats are none.

    >>> whole(np.int64(3), "slice", "begin")
    3
    """
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        return int(value)
    raise GraphError(f"{at(what)}: {argument} must be an integer, got {_shown(value)}")


def flag(value: object, what: str, argument: str) -> bool:
    """`value` as a bool."""
    if isinstance(value, bool | np.bool_):
        return bool(value)
    raise GraphError(f"{at(what)}: {argument} must be True or False, got {_shown(value)}")


def choice(value: object, what: str, argument: str, options: tuple[str, ...]) -> str:
    """`value`, which must be one of some words."""
    if isinstance(value, str) and value in options:
        return value
    words = " or ".join(map(repr, options))
    raise GraphError(f"{at(what)}: {argument} must be {words}, got {value!r:.80}{nearest(value, options)}")


def items(values: object, what: str, argument: str) -> list[Any]:
    """The elements of a list, tuple or the like; a single tensor or a text is none."""
    if not isinstance(values, Tensor | str | bytes) and is_iterable(values):
        return list(values)
    raise ShapeError(f"{at(what)}: {argument} must be a list, got {_shown(values)}")


def fitting(value: object, dtype: DType, what: str) -> bool | int | float:
    """A Python number that an element of `dtype` can hold: nothing is cut off silently.

    >>> from meshlib.dtypes import INT32
    >>> fitting(3.0, INT32, "constant")
    3
    """
    if isinstance(value, np.generic):
        value = value.item()
    if not isinstance(value, bool | int | float):
        raise ShapeError(f"{at(what)}: expected a number, got {_shown(value)}; feed arrays through mtf.input")
    if dtype.is_float:
        try:
            return float(value)
        except OverflowError:
            raise ShapeError(f"{at(what)}: the number {value:.3g} does not fit {dtype.name}") from None
    low, high = (0, 1) if dtype is BOOL else (-(2**31), 2**31 - 1)
    if not math.isfinite(value) or value != int(value) or not low <= value <= high:
        raise ShapeError(f"{at(what)}: the number {value} does not fit {dtype.name}; use a float dtype, or cast")
    return bool(value) if dtype is BOOL else int(value)


def _shown(value: object) -> str:
    return f"{type(value).__name__} {value!r:.80}"
