"""Validation of plain arguments: a bad one is one error that names it, its value and the user's source line."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from layouts.parsing import is_iterable
from meshlib.core.dtypes import BOOL, INT4, DType
from meshlib.core.errors import GraphError, MeshlibError, ShapeError, nearest
from meshlib.core.graph import Tensor
from meshlib.core.source_lines import users_line

Array = np.ndarray[Any, Any]


def at(what: str) -> str:
    """`what` followed by the user's source line, if there is one: the beginning of messages about an argument."""
    line = users_line()
    return f"{what} ({line})" if line else what


def divisors_near(total: int, count: int) -> str:
    """The divisors of `total` nearest to `count`, below and above, as a remedy in messages.

    >>> divisors_near(8, 3), divisors_near(4, 9)
    ('2 or 4', '4')
    """
    divisors = [n for n in range(1, total + 1) if total % n == 0]
    below = [n for n in divisors if n < count][-1:]
    above = [n for n in divisors if n > count][:1]
    return " or ".join(map(str, below + above))


def number(value: object, what: str, argument: str) -> float:
    """`value` as a finite float; bools and strings are refused.

    >>> number(np.float32(0.5), "dropout", "rate")
    0.5
    """
    if isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool):
        try:
            number_value = float(value)
        except OverflowError:
            number_value = math.inf
        if math.isfinite(number_value):
            return number_value
    raise GraphError(f"{at(what)}: {argument} must be a finite number, got {_shown(value)}")


POSITIVE, NOT_NEGATIVE, FRACTION = "be positive", "not be negative", "be in [0, 1)"
_BOUNDS: dict[str, Callable[[float], bool]] = {
    POSITIVE: lambda x: x > 0,
    NOT_NEGATIVE: lambda x: x >= 0,
    FRACTION: lambda x: 0 <= x < 1,
}


def bounded(value: object, what: str, argument: str, rule: str = NOT_NEGATIVE) -> float:
    """`value` as a finite float that is positive, non-negative, or a fraction."""
    checked_number = number(value, what, argument)
    if not _BOUNDS[rule](checked_number):
        raise GraphError(f"{at(what)}: {argument} must {rule}, got {checked_number:g}")
    return checked_number


def whole(value: object, what: str, argument: str, low: int | None = None) -> int:
    """`value` as an int of at least `low`; bools and floats are refused.

    >>> whole(np.int64(3), "slice", "begin")
    3
    """
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        if low is None or value >= low:
            return int(value)
        raise GraphError(f"{at(what)}: {argument} must be at least {low}, got {_text(value)}")
    raise GraphError(f"{at(what)}: {argument} must be an integer, got {_shown(value)}")


def flag(value: object, what: str, argument: str) -> bool:
    """`value` as a bool."""
    if isinstance(value, bool | np.bool_):
        return bool(value)
    raise GraphError(f"{at(what)}: {argument} must be True or False, got {_shown(value)}")


def choice(value: object, what: str, argument: str, options: tuple[str, ...]) -> str:
    """`value`, which must be one of the given words."""
    if isinstance(value, str) and value in options:
        return value
    words = " or ".join(map(repr, options))
    raise GraphError(f"{at(what)}: {argument} must be {words}, got {value!r:.80}{nearest(value, options)}")


def items(values: object, what: str, argument: str) -> list[Any]:
    """The elements of a list, tuple or other iterable; a single tensor or a string is refused."""
    if not isinstance(values, Tensor | str | bytes) and is_iterable(values):
        return list(values)
    remedy = f"; write {argument}=[{values.name}, ...]" if isinstance(values, Tensor) else ""
    raise ShapeError(f"{at(what)}: {argument} must be a list, got {_shown(values)}{remedy}")


def fitting(value: object, dtype: DType, what: str) -> bool | int | float:
    """`value` as a Python number that `dtype` can represent; out-of-range and fractional values are refused.

    >>> from meshlib.core.dtypes import INT32
    >>> fitting(3.0, INT32, "constant")
    3
    """
    if isinstance(value, np.generic):
        value = value.item()
    if not isinstance(value, bool | int | float):
        raise ShapeError(
            f"{at(what)}: expected a number, got {_shown(value)}; arrays are NumPy's, in mtf.constant or mtf.input"
        )
    if dtype.is_float:
        try:
            held = float(value)
            with np.errstate(over="ignore"):
                fits = not math.isfinite(held) or np.isfinite(dtype.public.type(held))
        except OverflowError:
            fits = False
        if fits:
            return held
        raise ShapeError(f"{at(what)}: the number {_text(value)} does not fit {dtype.name}")
    low, high = (0, 1) if dtype is BOOL else dtype.bounds
    if not low <= value <= high or value != int(value):
        raise ShapeError(f"{at(what)}: the number {_text(value)} does not fit {dtype.name}; use a float dtype, or cast")
    return bool(value) if dtype is BOOL else int(value)


def stored(array: Array, dtype: DType, what: str, fault: type[MeshlibError]) -> Array:
    """`array` converted to the simulation's storage of `dtype`, C-contiguous; precision may be lost, range may not.

    Raises: `fault` for masked arrays, and for values beyond the range of the dtype.
    """
    if is_masked(array):
        raise fault(f"{what}: a masked array has elements without a value; give them one, as in array.filled(0)")
    if array.dtype == dtype.public:
        return np.asarray(array, dtype=dtype.storage, order="C")
    if dtype.kind == "integer" and array.size:
        low, high = dtype.bounds
        array = array.astype(np.int8) if array.dtype == INT4.public else array
        if array.max() > high or array.min() < low:
            raise fault(f"{what}: value {array.max() if array.max() > high else array.min()} does not fit {dtype.name}")
    with np.errstate(all="ignore"):
        out = np.asarray(array, dtype=dtype.storage, order="C")
        out = dtype.rounded(out)
    if dtype.is_float and not np.isfinite(out).all():
        lost = np.argwhere(~np.isfinite(out) & np.isfinite(array))
        if len(lost):
            where = lost[0].tolist()
            raise fault(f"{what}: the number {array[tuple(where)]:.6g} at index {where} does not fit {dtype.name}")
    return out


def examples_of(arrays: object) -> tuple[list[str], dict[str, int]]:
    """The faults of a dict of arrays whose first dim counts examples, and the number of examples of each valid array.

    >>> examples_of({"x": np.zeros((3, 2)), "y": np.zeros(2)})
    (['the arrays have unequal numbers of examples: x 3, y 2'], {'x': 3, 'y': 2})
    """
    if not isinstance(arrays, Mapping) or not arrays:
        return [f"expected a dict of names to arrays, got {type(arrays).__name__} {arrays!r:.80}"], {}
    faults, counts = [], {}
    for name, array in arrays.items():
        if not isinstance(name, str):
            faults.append(f"the names of arrays must be text, got {name!r:.80}")
        elif not isinstance(array, np.ndarray):
            faults.append(f"'{name}' must be a NumPy array, got {type(array).__name__}; use np.asarray")
        elif array.dtype.hasobject:
            faults.append(f"'{name}' has Python objects as elements; use array.astype('float32') or the like")
        elif is_masked(array):
            faults.append(f"'{name}' is a masked array; give its elements values, as in array.filled(0)")
        elif not array.ndim:
            faults.append(f"'{name}' needs a first dim that counts the examples, got a scalar")
        else:
            counts[name] = len(array)
    if len(set(counts.values())) > 1:
        counts_text = ", ".join(f"{name} {count}" for name, count in counts.items())
        faults.append(f"the arrays have unequal numbers of examples: {counts_text}")
    elif counts and not min(counts.values()):
        faults.append(f"no examples in {', '.join(counts)}")
    return faults, counts


def shape_faults(given: Mapping[str, Any], wanted: Mapping[str, tuple[int, ...]]) -> list[str]:
    """The faults of arrays by name that must include these shapes.

    >>> shape_faults({"w": np.zeros(3)}, {"w": (2,), "b": (1,)})
    ["'w' has shape [3], the model [2]", "'b' [1] is missing"]
    """
    faults = []
    for name, sizes in wanted.items():
        if name not in given:
            faults.append(f"'{name}' {list(sizes)} is missing{nearest(name, given)}")
        elif np.shape(given[name]) != sizes:
            faults.append(f"'{name}' has shape {list(np.shape(given[name]))}, the model {list(sizes)}")
    return faults


def is_masked(value: object) -> bool:
    """True if `value` is a masked array or a list with one; NumPy's conversions drop masks silently."""
    if isinstance(value, list | tuple):
        return any(map(is_masked, value))
    return isinstance(value, np.ma.MaskedArray)


def _shown(value: object) -> str:
    return f"{type(value).__name__} {_text(value)}"


def _text(value: object) -> str:
    try:
        return f"{value!r:.80}"
    except ValueError:  # Python refuses to print integers of more than 4,300 digits
        return "of too many digits to be shown"
