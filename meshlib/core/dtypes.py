"""Element types: the declared type of a tensor and its storage in the simulation.

The vector unit computes in float64, float32, bfloat16 and int32. The narrow types (int8, int4 and the two fp8 formats)
are for storage, communication and products on the MXU; other arithmetic needs a cast first.

bfloat16 and fp8 values are stored as the float32 array of the same values, because NumPy computes on float32 ten times
faster; int4 as int8. Bytes are always counted by the declared type: two int4 take one byte, an odd count rounds up.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import ml_dtypes
import numpy as np

from hardware.numerics import round_to_bfloat16
from meshlib.core.errors import ShapeError, nearest
from meshlib.core.source_lines import source_line

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, eq=False)
class DType:
    """One element type: `name`, `bits` on the device, NumPy `storage` in the simulation, `public` type for users.

    `computes`: whether the vector unit computes in it. It equals its name and its NumPy or ml_dtypes type, too:

    >>> as_dtype("float32") == np.float32, as_dtype("bfloat16") == "bfloat16", as_dtype("int8") == "int4"
    (True, True, False)
    >>> as_dtype("float32") in {"float32", "bfloat16"}
    True
    """

    name: str
    short: str
    bits: int
    storage: np.dtype
    public: np.dtype
    kind: str  # "float", "integer" or "flag"
    computes: bool

    def __eq__(self, other: object) -> bool:
        if isinstance(other, DType):
            return self is other
        return BY_NAME.get(other if isinstance(other, str) else _numpy_name(other)) is self

    def __hash__(self) -> int:
        return hash(self.name)

    def __str__(self) -> str:
        return self.short

    def __reduce__(self) -> tuple[object, tuple[str]]:
        # DTypes are singletons: copying returns the same object.
        return as_dtype, (self.name,)

    @property
    def itemsize(self) -> int | float:
        """Bytes per element on the device: 0.5 for int4."""
        return self.bits / 8 if self.bits % 8 else self.bits // 8

    def size_bytes(self, count: int) -> int:
        """Bytes of `count` packed elements on the device.

        >>> as_dtype("int4").size_bytes(7), as_dtype("bfloat16").size_bytes(7)
        (4, 14)
        """
        return -(-count * self.bits // 8)

    @property
    def is_float(self) -> bool:
        """True for float types including fp8: those with gradients."""
        return self.kind == "float"

    @property
    def is_wide_float(self) -> bool:
        """True for float types that the vector unit computes in."""
        return self.is_float and self.computes

    @property
    def is_narrow_integer(self) -> bool:
        """int8 and int4."""
        return self.kind == "integer" and not self.computes

    @property
    def of_cotangents(self) -> DType:
        """The dtype of cotangents of its values: fp8 values have wider cotangents, since those are summed."""
        return BFLOAT16 if self.is_float and not self.computes else self

    @property
    def bounds(self) -> tuple[int, int]:
        """The smallest and largest value of an integer type."""
        return -(1 << (self.bits - 1)), (1 << (self.bits - 1)) - 1

    @property
    def largest(self) -> float:
        """The largest value of a symmetric quantisation grid."""
        if not self.is_float:
            return float(self.bounds[1])
        return float(ml_dtypes.finfo(self.public).max)  # type: ignore[no-untyped-call]

    @cached_property
    def is_rounded(self) -> bool:
        """True if values are stored in a wider type, so that results must be rounded."""
        return self.is_float and self.storage != self.public

    def rounded(self, x: Array, out: Array | None = None) -> Array:
        """Stored values rounded to the type, to nearest even; values beyond the largest become infinity, in e4m3 NaN.

        `out`: array to write to, which may be `x`; by default a new array, or `x` if nothing needs rounding.
        """
        if self is BFLOAT16:
            return round_to_bfloat16(x, out)
        if not self.is_rounded:
            return x
        with np.errstate(all="ignore"):
            near = x.astype(self.public).astype(self.storage)
        if out is None:
            return near
        np.copyto(out, near)
        return out


def _make(name: str, short: str, bits: int, storage: type, public: type, kind: str, computes: bool = True) -> DType:
    return DType(name, short, bits, np.dtype(storage), np.dtype(public), kind, computes)


_TYPES = (
    _make("float64", "f64", 64, np.float64, np.float64, "float"),
    _make("float32", "f32", 32, np.float32, np.float32, "float"),
    _make("bfloat16", "bf16", 16, np.float32, ml_dtypes.bfloat16, "float"),
    _make("int32", "i32", 32, np.int32, np.int32, "integer"),
    _make("bool", "bool", 8, np.bool_, np.bool_, "flag", computes=False),
    _make("int8", "i8", 8, np.int8, np.int8, "integer", computes=False),
    _make("int4", "i4", 4, np.int8, ml_dtypes.int4, "integer", computes=False),
    _make("float8_e4m3fn", "f8e4m3fn", 8, np.float32, ml_dtypes.float8_e4m3fn, "float", computes=False),
    _make("float8_e5m2", "f8e5m2", 8, np.float32, ml_dtypes.float8_e5m2, "float", computes=False),
)
BY_NAME = {t.name: t for t in _TYPES}
FLOAT64, FLOAT32, BFLOAT16, INT32, BOOL, INT8, INT4, E4M3, E5M2 = _TYPES
# NumPy's `kind` does not distinguish these types.
_FLOATS_OF_OTHERS = tuple(t.public for t in _TYPES if t.is_float)


def as_dtype(dtype: object) -> DType:
    """The `DType` of a name, a NumPy or ml_dtypes type, or a `DType`.

    >>> as_dtype("bfloat16").itemsize, as_dtype(np.int32).name
    (2, 'int32')
    """
    if isinstance(dtype, DType):
        return dtype
    name = dtype if isinstance(dtype, str) else _numpy_name(dtype)
    known = BY_NAME.get(name)
    if known is None:
        raise ShapeError(
            f"unknown dtype {dtype!r:.80} ({source_line()}): use one of {', '.join(BY_NAME)}{nearest(name, BY_NAME)}"
        )
    return known


def _numpy_name(dtype: object) -> str:
    if dtype is None:  # NumPy would read None as float64
        return "None"
    try:
        return np.dtype(dtype).name  # type: ignore[call-overload,no-any-return]
    except (TypeError, ValueError):
        return str(dtype)


def kind_of(dtype: np.dtype) -> str:
    """Letter of a NumPy or ml_dtypes type: "f" for floats, "i" and "u" for integers, "b" for bools; else NumPy's own.

    >>> kind_of(np.dtype(ml_dtypes.bfloat16)), kind_of(np.dtype(ml_dtypes.int4)), kind_of(np.dtype(np.uint8))
    ('f', 'i', 'u')
    """
    if dtype in _FLOATS_OF_OTHERS:
        return "f"
    return "i" if dtype == INT4.public else dtype.kind
