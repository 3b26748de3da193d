"""The rotation of halves by 90 degrees in rotary position embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from layouts import Dimension
from meshlib.core.errors import ShapeError
from meshlib.core.graph import Tensor, TensorType, find_dim
from meshlib.core.opdef import Array, Block, Kind, Linear, Role, operation
from meshlib.ops.building import build, named_factors, tensor, vector_work
from meshlib.ops.pointwise.arithmetic import negative


def _shape(types: tuple[TensorType, ...], attrs: Mapping[str, Any]) -> TensorType:
    (x,) = types
    d = x.shape.dim(attrs["dim"])
    if not x.dtype.is_wide_float:
        raise ShapeError(f"needs a float operand, got {x.dtype.name}; cast it with mtf.cast")
    if d.size % 2:
        raise ShapeError(f"dim {d} can't be cut into halves: {d.size} is odd")
    return x


def _local(block: Block, x: Array) -> Array:
    axis = block.out.shape.index(block.attrs["dim"])
    half = x.shape[axis] // 2
    before = (np.s_[:],) * axis
    first, second = (*before, np.s_[:half]), (*before, np.s_[half:])
    out = block.result()
    np.negative(x[second], out=out[first])
    np.copyto(out[second], x[first])
    return out


ROTATE_HALF = operation(
    "rotate_half",
    kind=Kind.VIEW,
    shape=_shape,
    roles=lambda op: named_factors(op, {op.attrs["dim"]: Role.WHOLE}),
    local=_local,
    grad=lambda op, dy: [negative(rotate_half(dy, op.attrs["dim"]))],
    linear=lambda op: Linear((0,)),
    work=vector_work,
    exact=True,
)


def rotate_half(x: Tensor, dim: Dimension | str, name: str | None = None) -> Tensor:
    """(-b, a) for the two halves (a, b) of `x` along `dim`: each pair (a[i], b[i]) rotated by 90 degrees.

    Raises: ShapeError for a dim of odd size.
    """
    rotated_dim = find_dim(tensor(x, "rotate_half"), dim, "rotate_half")
    return build(ROTATE_HALF, [x], {"dim": rotated_dim.name}, name)
