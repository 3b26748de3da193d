"""The one error of the hardware package, and checks of arguments.

Bad input (a negative size, an unknown chip, a wrong rank, a rate that is not finite) is answered with a single
`HardwareError` whose message names the argument, its value and, where there is one, a remedy.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from numbers import Integral, Real


class HardwareError(ValueError):
    """An invalid argument to a function of the hardware package.

    Example:
      >>> from hardware import HardwareError
      >>> from hardware import Slice
      >>> try:
      ...     Slice("v5e-7")
      ... except HardwareError as fault:
      ...     print(fault)
      'v5e-7' is not a slice of v5e (the number counts chips); the nearest are v5e-1, v5e-4, v5e-8
    """


class UnknownChipError(HardwareError, KeyError):
    """A name of no published chip; also a `KeyError`, since `hardware.CHIPS` is a mapping."""

    __str__ = Exception.__str__


def whole(name: str, value: object, low: int = 0) -> int:
    """Check that `value` is an integer of at least `low` (no bool, no float); return it as an int.

    Raises: HardwareError that names the argument, the bound and the value.
    Example:
      >>> whole("rows", 128, low=1)
      128
    """
    if type(value) is int and value >= low:  # the usual case, without a look at abstract classes
        return value
    if isinstance(value, bool) or not isinstance(value, Integral) or value < low:
        raise HardwareError(f"{name} must be an integer >= {low}, not {value!r}")
    return int(value)


def amount(name: str, value: object, positive: bool = False) -> float:
    """Check that `value` is a finite real number, at least 0 (above 0 if `positive`); return it as a float.

    Raises: HardwareError that names the argument, the bound and the value.
    Example:
      >>> amount("seconds", 0.5)
      0.5
    """
    if type(value) is float and 0 < value < math.inf:  # the usual case, without a look at abstract classes
        return value
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
    """Check that `value` is one of `options`.

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
    """Check a sequence of names (a single string is refused); return it as a tuple.

    Raises: HardwareError that shows how to write it.
    """
    if not isinstance(values, (list, tuple)) or not all(isinstance(value, str) for value in values):
        raise HardwareError(f"{name} must be a list of names, such as ['x', 'y'], not {values!r}")
    return tuple(values)


def wholes(name: str, values: object, low: int = 0) -> tuple[int, ...]:
    """Check a sequence of integers of at least `low` each; return it as a tuple.

    Raises: HardwareError that names the sequence and the first wrong element.
    Example:
      >>> wholes("shape", [4, 8], low=1)
      (4, 8)
    """
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise HardwareError(f"{name} must be a sequence of integers >= {low}, such as (4, 4), not {values!r}")
    try:
        items = tuple(values)
    except TypeError:  # a 0-d array has __iter__ but raises
        raise HardwareError(f"{name} must be a sequence of integers >= {low}, not {values!r}") from None
    return tuple(whole(f"{name}[{i}] of {items}", item, low) for i, item in enumerate(items))
