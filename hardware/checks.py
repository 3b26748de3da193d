"""Checks of plain arguments: bad input is one HardwareError that names it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from numbers import Integral, Real

from hardware.errors import HardwareError


def whole(name: str, value: object, low: int = 0) -> int:
    """`value` as an int, if it is an integer (no bool, no float) of at least `low`.

    Raises: HardwareError that names the argument, the bound and the value.
    Example:
      >>> whole("rows", 128, low=1)
      128
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or value < low:
        raise HardwareError(f"{name} must be an integer >= {low}, not {value!r}")
    return int(value)


def amount(name: str, value: object, positive: bool = False) -> float:
    """`value` as a float, if it is a finite real number, not negative (or above 0 if `positive`).

    Raises: HardwareError that names the argument, the bound and the value.
    Example:
      >>> amount("seconds", 0.5)
      0.5
    """
    bound = "> 0" if positive else ">= 0"
    if isinstance(value, bool) or not isinstance(value, Real):
        raise HardwareError(f"{name} must be a finite number {bound}, not {value!r}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or number < 0 or (positive and number == 0):
        raise HardwareError(f"{name} must be a finite number {bound}, not {value!r}")
    return number


def one_of(what: str, value: object, options: Iterable[str]) -> str:
    """`value`, if it is one of the strings.

    Raises: HardwareError that lists them.
    Example:
      >>> one_of("mode", "serial", ["serial", "shadow"])
      'serial'
    """
    known = tuple(options)
    if not isinstance(value, str) or value not in known:
        raise HardwareError(f"unknown {what} {value!r}; use one of {', '.join(known)}")
    return value


def names(name: str, values: object) -> tuple[str, ...]:
    """A tuple of names; one string is no sequence of names.

    Raises: HardwareError that shows how to write it.
    """
    if not isinstance(values, (list, tuple)) or not all(isinstance(value, str) for value in values):
        raise HardwareError(f"{name} must be a list of names, such as ['x', 'y'], not {values!r}")
    return tuple(values)


def wholes(name: str, values: object, low: int = 0) -> tuple[int, ...]:
    """A tuple of integers of at least `low` each.

    Raises: HardwareError that names the sequence and the first wrong element.
    Example:
      >>> wholes("shape", [4, 8], low=1)
      (4, 8)
    """
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise HardwareError(f"{name} must be a sequence of integers >= {low}, not {values!r}")
    try:
        items = tuple(values)
    except TypeError:  # an array without dims calls itself iterable
        raise HardwareError(f"{name} must be a sequence of integers >= {low}, not {values!r}") from None
    return tuple(whole(f"{name}[{i}] of {items}", item, low) for i, item in enumerate(items))
