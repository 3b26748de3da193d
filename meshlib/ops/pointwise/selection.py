"""`where`: elements of one tensor or another, selected by a condition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from layouts import Dimension, Shape
from meshlib.core.dtypes import BOOL
from meshlib.core.errors import ShapeError
from meshlib.core.graph import Operation, Tensor, TensorType
from meshlib.core.opdef import Array, Linear
from meshlib.ops.building import as_tensor, build, tensor
from meshlib.ops.pointwise.elementwise import broadcast_to, define, reduce_to
from meshlib.ops.rules import same_dtype, union


def _where_shape(types: tuple[TensorType, ...], attrs: Mapping[str, Any]) -> TensorType:
    condition, x, y = types
    if condition.dtype is not BOOL:
        raise ShapeError(f"the condition must be bool, got {condition.dtype.name}; compare first")
    return TensorType(union([x.shape, y.shape, condition.shape]), same_dtype([x, y]))


def _where_grad(op: Operation, dy: Tensor) -> list[Tensor | None]:
    condition, x, y = op.inputs
    return [None, reduce_to(where(condition, dy, 0.0), x.shape), reduce_to(where(condition, 0.0, dy), y.shape)]


def _where_into(condition: Array, x: Array, y: Array, out: Array) -> None:
    distinct = condition[tuple(np.s_[:1] if stride == 0 else np.s_[:] for stride in condition.strides)]
    if distinct.size < out.size and distinct.all():  # fast for a mask of whole blocks that hides nothing here
        np.copyto(out, x)
    else:
        np.copyto(out, np.where(condition, x, y))


WHERE = define(
    "where", _where_into, _where_grad, _where_shape, linear=lambda op: Linear((1, 2), together=True), exact=True
)


def where(
    condition: Tensor,
    if_true: Tensor | float,
    if_false: Tensor | float,
    output_shape: Shape | Sequence[Dimension] | None = None,
    name: str | None = None,
) -> Tensor:
    """`if_true` where `condition` (bool) holds, else `if_false`; all broadcast by name, then to `output_shape`.

    Two numbers make a float32 tensor. Values that are not chosen do not affect the result, even NaN and infinities.
    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.where(mtf.input("x", "d:2", "bool"), mtf.ones("d:2"), mtf.zeros("d:2"))
      >>> print(mtf.simulate(mtf.lower({"y": y})).step(x=[True, False])["y"])
      [1. 0.]
    """
    like = if_true if isinstance(if_true, Tensor) else if_false if isinstance(if_false, Tensor) else None
    if like is None and isinstance(condition, Tensor):
        from meshlib.ops.control.sources import constant_like

        like = constant_like(0, condition, "float32")
    operands = [tensor(condition, "where"), as_tensor(if_true, like, "where"), as_tensor(if_false, like, "where")]
    return broadcast_to(build(WHERE, operands, {}, name), output_shape)
