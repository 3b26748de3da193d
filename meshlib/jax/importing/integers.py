"""Integers that JAX keeps in 4, 8 or 16 bits, or without a sign: the library computes them as int32.

Results are brought back into the dtype's range where they may leave it. Values of uint32 are int32 of the same bits, so
that orders, divisions and conversions to and from floats, which read the upper bit as a sign, are written otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from meshlib.core.graph import Tensor
from meshlib.jax.importing.code import NARROW, Array, CodeStep, numpy_type
from meshlib.ops.pointwise.arithmetic import maximum, minimum, mod
from meshlib.ops.pointwise.casts import cast

SHORT = ("int4", "int8", "int16", "uint8", "uint16")
# Primitives whose results may be outside the range of their operands.
_EXCEEDING = frozenset([
    "abs", "add", "add_any", "bitcast_convert_type", "conv_general_dilated", "convert_element_type", "cumprod",
    "cumsum", "div", "dot_general", "integer_pow", "mul", "neg", "not", "pow", "ragged_dot_general", "random_bits",
    "reduce_prod", "reduce_sum", "scatter-add", "scatter_add", "shift_left", "shift_right_logical", "square", "sub",
])  # fmt: skip


def same_bits(array: Array) -> Array:
    """uint32 as int32 of the same bits; arrays of other dtypes unchanged."""
    return array.view("int32") if array.dtype == np.uint32 else array


def bits_of(dtype: str) -> int:
    """Number of bits of a JAX integer dtype."""
    return int(dtype.lstrip("uint"))


def _range(dtype: str) -> tuple[int, int]:
    """The least and the largest number of a JAX integer dtype."""
    count = 2 ** bits_of(dtype)
    return (0, count - 1) if dtype.startswith("u") else (-count // 2, count // 2 - 1)


def in_range(t: Tensor, step: CodeStep) -> Tensor:
    """The result of a step, computed as int32 or float, as its dtype of fewer bits holds it.

    Integers keep their low bits; floats saturate.
    """
    dtype = step.outs[0].dtype
    if dtype not in SHORT or step.kind not in _EXCEEDING or _widened(step):
        return t
    if dtype in NARROW:
        return cast(t, dtype)
    low, high = _range(dtype)
    if step.kind == "convert_element_type" and "float" in step.ins[0].dtype:
        return minimum(maximum(t, low), high)
    return mod(t - low, high - low + 1) + low


def _widened(step: CodeStep) -> bool:
    """True if a step is a conversion to a dtype that contains all values of the old one."""
    old, new = step.ins[0].dtype, step.outs[0].dtype
    if step.kind != "convert_element_type" or "int" not in old:
        return step.kind == "convert_element_type" and old == "bool"
    (least, most), (low, high) = _range(old), _range(new)
    return low <= least and most <= high


def converted(x: Array, dtype: str) -> Array:
    """Known elements in another dtype, as XLA converts them: floats outside an integer dtype's range saturate."""
    if "int" not in dtype or "float" not in x.dtype.name:
        return x.astype(numpy_type(dtype))
    low, high = _range(dtype)
    wide = np.nan_to_num(x.astype(np.float64), nan=0.0)
    return np.clip(wide, float(low), float(high)).astype(np.int64).astype(numpy_type(dtype))


# ---------------------------------------------------------------- uint32

_LOWEST = np.int32(-(2**31))
Function = Callable[..., Any]


def _flipped(x: Any) -> Any:
    """int32 in the order of uint32, and back."""
    dtype = "uint32" if x.dtype == jnp.int32 else "int32"
    return (x.astype("int32") + _LOWEST).astype(dtype)


def _ordered(step: CodeStep) -> Function:
    primitive = getattr(lax, f"{step.kind}_p")
    unsigned = [x.dtype == "uint32" for x in step.ins]
    selecting = step.kind not in ("lt", "le", "gt", "ge", "lt_to", "le_to", "argmax", "argmin")

    def run(*operands: Any) -> Any:
        results = primitive.bind(
            *(_flipped(x) if u else x for x, u in zip(operands, unsigned, strict=True)), **step.params
        )
        several = list(results) if primitive.multiple_results else [results]
        return [_flipped(y) if selecting and n < len(unsigned) and unsigned[n] else y for n, y in enumerate(several)]

    return run


def _quotient(x: Any, y: Any) -> Any:
    """x / y of uint32, from a signed division of half of x; its remainder is too large by less than y."""
    a, b = x.astype("int32"), y.astype("int32")
    half = lax.div(lax.shift_right_logical(a, np.int32(1)), jnp.maximum(b, 1)) * 2
    rest = (a - half * b).astype("uint32")
    return jnp.where(b < 0, (x >= y).astype("int32"), half + (rest >= y).astype("int32")).astype("uint32")


def _to_float(x: Any, dtype: Any) -> Any:
    """Both halves are exact in float32, so that the sum alone is rounded."""
    bits = x.astype("int32")
    high, low = lax.shift_right_logical(bits, np.int32(16)), bits & np.int32(0xFFFF)
    return (high.astype("float32") * 65536.0 + low.astype("float32")).astype(dtype)


def _from_float(x: Any) -> Any:
    wide = x.astype("float32")
    upper = (wide - 2.0**31).astype("int32") + _LOWEST
    return jnp.where(wide >= 2.0**31, upper, jnp.maximum(wide, 0).astype("int32")).astype("uint32")


def _conversion(step: CodeStep) -> Function | None:
    old, new = step.ins[0].dtype, np.dtype(step.params["new_dtype"]).name
    if old == "uint32" and "float" in new:
        return lambda x: _to_float(x, new)
    return _from_float if new == "uint32" and "float" in old else None


_ORDERED = "lt le gt ge lt_to le_to max min clamp reduce_max reduce_min argmax argmin sort top_k cummax cummin"
_UNSIGNED: dict[str, Callable[[CodeStep], Function | None]] = {
    **dict.fromkeys(_ORDERED.split(), _ordered),
    "div": lambda step: _quotient,
    "rem": lambda step: lambda x, y: x - _quotient(x, y) * y,
    "abs": lambda step: lambda x: x,
    "sign": lambda step: lambda x: (x != 0).astype("uint32"),
    "convert_element_type": _conversion,
}


def as_signed(step: CodeStep) -> Function | None:
    """A function of the operands that computes a primitive of uint32 on int32 of the same bits; None to keep it."""
    if step.kind not in _UNSIGNED or any(x.key for x in step.ins) or all(x.const is not None for x in step.ins):
        return None
    if step.kind != "convert_element_type" and not any(x.dtype == "uint32" for x in step.ins):
        return None
    return _UNSIGNED[step.kind](step)
