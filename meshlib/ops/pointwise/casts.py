"""Casts: a tensor in another dtype."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from meshlib.core.dtypes import FLOAT32, INT32, as_dtype
from meshlib.core.errors import ShapeError
from meshlib.core.graph import Operation, Tensor, TensorType
from meshlib.core.opdef import NONLINEAR, Array, Block, Home, Linear
from meshlib.ops.building import build, not_differentiable, tensor
from meshlib.ops.pointwise.elementwise import define


def _cast_linear(op: Operation) -> Linear:
    # Only a widening cast of floats commutes with a sum; a narrowing one would round each part.
    old, new = op.inputs[0].dtype, op.output.dtype
    return Linear((0,)) if old.is_float and new.is_float and new.bits > old.bits else NONLINEAR


def _cast_local(block: Block, x: Array) -> Array:
    dtype, out = block.attrs["dtype"], block.result()
    if x.dtype.kind == "f" and out.dtype == np.int32:  # the nearest representable value; float32 lacks the largest
        with np.errstate(invalid="ignore"):
            np.copyto(out, x, casting="unsafe")
        for outside, value in ((x >= 2.0**31, 2**31 - 1), (x < -(2.0**31), -(2**31)), (np.isnan(x), 0)):
            np.copyto(out, value, where=outside)
        return out
    if dtype.is_narrow_integer:
        low, high = dtype.bounds
        if x.dtype.kind == "f":  # saturates, as in XLA
            x = np.where(np.isnan(x), 0, np.clip(x, low, high))
        elif x.dtype != np.bool_:  # the low bits
            x = (x.astype(np.int32) - low) % (high - low + 1) + low
    np.copyto(out, x, casting="unsafe")
    return out


CAST = define(
    "cast",
    np.copyto,
    lambda op, dy: [cast(dy, op.inputs[0].dtype.of_cotangents) if op.inputs[0].dtype.is_float else None],
    lambda types, attrs: TensorType(types[0].shape, attrs["dtype"]),
    local=_cast_local,
    linear=_cast_linear,
    home=Home.OPERAND,  # so that gathers send the narrow type
    repeated=True,
)


def cast(x: Tensor, dtype: object, name: str | None = None) -> Tensor:
    """`x` as another dtype: floats are rounded to nearest even, float to integer cuts towards zero.

    Out-of-range values become NaN in e4m3 and infinity in e5m2; integers saturate, with 0 for NaN, but casts from wider
    integers keep the low bits. For a tensor that is resharded, casts are placed so that the narrower type is sent.
    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.cast(mtf.input("x", "d:2"), "int32")
      >>> print(mtf.simulate(mtf.lower({"y": y})).step(x=[3.5, 4.0])["y"])
      [3 4]
    """
    new = as_dtype(dtype)
    return x if tensor(x, "cast").dtype is new else build(CAST, [x], {"dtype": new}, name)


def _bits_local(block: Block, x: Array) -> Array:
    out = block.result()
    bits = x.astype(np.float32) if x.dtype.kind == "f" else x  # floats may be stored in float64
    np.copyto(out, bits.view(np.int32 if bits.dtype == np.float32 else np.float32))
    return out


def _bits_shape(types: tuple[TensorType, ...], attrs: Mapping[str, object]) -> TensorType:
    other = {FLOAT32: INT32, INT32: FLOAT32}.get(types[0].dtype)
    if other is None:
        raise ShapeError(f"needs a float32 or int32 operand, got {types[0].dtype.name}; cast it with mtf.cast")
    return TensorType(types[0].shape, other)


_BITCAST = define(
    "bitcast", np.copyto, not_differentiable, _bits_shape, local=_bits_local, home=Home.OPERAND, repeated=True
)


def bitcast(x: Tensor, name: str | None = None) -> Tensor:
    """The bits of a float32 tensor as int32, or of an int32 tensor as float32; passes no gradient.

    Raises: ShapeError for other dtypes.
    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.bitcast(mtf.input("x", "d:2"))
      >>> print(mtf.simulate(mtf.lower({"y": y})).step(x=[1.0, -0.0])["y"])
      [ 1065353216 -2147483648]
    """
    return build(_BITCAST, [tensor(x, "bitcast")], {}, name)


def narrower(x: Tensor) -> Tensor:
    """The values from which a tensor was cast without rounding, if it was; otherwise the tensor."""
    op = x.operation
    return op.inputs[0] if op.opdef is CAST and _cast_linear(op) is not NONLINEAR else x


def to_float(x: Tensor, name: str | None = None) -> Tensor:
    """`x` as float32.

    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.to_float(mtf.input("x", "d:2", "int32"))
      >>> print(mtf.simulate(mtf.lower({"y": y})).step(x=[3, 4])["y"])
      [3. 4.]
    """
    return cast(x, "float32", name)


def to_bfloat16(x: Tensor, name: str | None = None) -> Tensor:
    """`x` as bfloat16, rounded to nearest even.

    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.to_bfloat16(mtf.input("x", "d:2"))
      >>> y.dtype.name
      'bfloat16'
    """
    return cast(x, "bfloat16", name)


def to_int32(x: Tensor, name: str | None = None) -> Tensor:
    """`x` as int32, cut towards zero.

    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.to_int32(mtf.input("x", "d:2"))
      >>> print(mtf.simulate(mtf.lower({"y": y})).step(x=[3.5, 4.0])["y"])
      [3 4]
    """
    return cast(x, "int32", name)
