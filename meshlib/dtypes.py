"""Element types: what a tensor declares, and how the simulation stores it.

A bfloat16 value is stored as the float32 array of the same values (every bfloat16 is a float32), because NumPy
computes on float32 ten times faster; bytes are always counted by the declared type.
"""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from meshlib.errors import ShapeError, nearest
from meshlib.origin import source_line


@dataclass(frozen=True)
class DType:
    """One element type: `name`, `itemsize` in bytes on the device, NumPy `storage` in the simulation."""

    name: str
    short: str
    itemsize: int
    storage: np.dtype
    public: np.dtype
    is_float: bool

    def __str__(self) -> str:
        return self.short

    def __reduce__(self) -> tuple[object, tuple[str]]:
        # There is one of each: copies are compared by identity too.
        return as_dtype, (self.name,)


def _make(name: str, short: str, itemsize: int, storage: type, public: type) -> DType:
    return DType(name, short, itemsize, np.dtype(storage), np.dtype(public), short.startswith(("f", "bf")))


_TYPES = (
    _make("float64", "f64", 8, np.float64, np.float64),
    _make("float32", "f32", 4, np.float32, np.float32),
    _make("bfloat16", "bf16", 2, np.float32, ml_dtypes.bfloat16),
    _make("int32", "i32", 4, np.int32, np.int32),
    _make("bool", "bool", 1, np.bool_, np.bool_),
)
BY_NAME = {t.name: t for t in _TYPES}
FLOAT64, FLOAT32, BFLOAT16, INT32, BOOL = _TYPES


def as_dtype(dtype: object) -> DType:
    """The `DType` of a name, a NumPy or ml_dtypes type, or a `DType`.

    >>> as_dtype("bfloat16").itemsize, as_dtype(np.int32).name
    (2, 'int32')
    """
    if isinstance(dtype, DType):
        return dtype
    name = dtype if isinstance(dtype, str) else _numpy_name(dtype)
    found = BY_NAME.get(name)
    if found is None:
        raise ShapeError(
            f"unknown dtype {dtype!r:.80} ({source_line()}): use one of {', '.join(BY_NAME)}{nearest(name, BY_NAME)}"
        )
    return found


def _numpy_name(dtype: object) -> str:
    if dtype is None:  # NumPy would take it for float64
        return "None"
    try:
        return np.dtype(dtype).name  # type: ignore[call-overload,no-any-return]
    except (TypeError, ValueError):
        return str(dtype)
