"""stack and unstack."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from layouts import Dimension, Shape
from meshlib.core.arguments import at, items, whole
from meshlib.core.errors import ShapeError
from meshlib.core.graph import Tensor, TensorType, find_dim
from meshlib.core.opdef import Array, Block, Kind, Linear, operation
from meshlib.ops.building import build, tensor
from meshlib.ops.control.sources import constant_like
from meshlib.ops.movement.indexing import gather
from meshlib.ops.rules import named_factors, same_dtype, vector_work


def _stack_shape(types: tuple[TensorType, ...], attrs: Mapping[str, Any]) -> TensorType:
    first, axis = types[0].shape, attrs["axis"]
    if any(t.shape != first for t in types):
        raise ShapeError("tensors to stack must have the same dims in the same order")
    if attrs["dim"].name in first:
        raise ShapeError(f"the tensors already have a dim '{attrs['dim'].name}'; give the new dim another name")
    if not 0 <= axis <= len(first):
        raise ShapeError(f"axis {axis} is not in 0 to {len(first)}")
    return TensorType(Shape([*first[:axis], attrs["dim"], *first[axis:]]), same_dtype(types))


def _stack_local(block: Block, *xs: Array) -> Array:
    # A device with a block of the new dim reads only the tensors of that block.
    dim, axis = block.attrs["dim"].name, block.attrs["axis"]
    start = block.offsets[dim]
    out = block.result()
    for n in np.arange(block.out.shape.dim(dim).size):
        out[(np.s_[:],) * axis + (n,)] = xs[start + n]
    return out


STACK = operation(
    "stack",
    kind=Kind.INDEXED,
    shape=_stack_shape,
    roles=named_factors,
    local=_stack_local,
    grad=lambda op, dy: list(unstack(dy, op.attrs["dim"])),
    linear=lambda op: Linear(tuple(np.arange(len(op.inputs)).tolist()), together=True),
    work=vector_work,
    exact=True,
)


def stack(xs: Sequence[Tensor], dim_name: str, axis: int = 0, name: str | None = None) -> Tensor:
    """Tensors of one shape stacked along a new dim, at position `axis`.

    Example:
      >>> with mtf.Graph():
      ...     y = mtf.stack([mtf.input("x", "d:2"), mtf.ones("d:2")], "n")
      >>> print(mtf.simulate(mtf.lower({"y": y})).step(x=[3.0, 4.0])["y"])
      [[3. 4.]
       [1. 1.]]
    """
    operands = [tensor(x, "stack") for x in items(xs, "stack", "xs")]
    if not operands:
        raise ShapeError(f"{at('stack')}: needs at least one tensor, got an empty list")
    attrs = {"dim": Dimension(dim_name, len(operands)), "axis": whole(axis, "stack", "axis")}
    return build(STACK, operands, attrs, name)


def unstack(x: Tensor, dim: Dimension, name: str | None = None) -> list[Tensor]:
    """The tensors at each index of `dim`, without that dim. If it is split, each is a pending sum.

    Example:
      >>> with mtf.Graph():
      ...     y = mtf.unstack(mtf.input("x", "a:2;b:2"), mtf.Dimension("a", 2))[1]
      >>> print(mtf.simulate(mtf.lower({"y": y})).step(x=[[1.0, 2.0], [3.0, 4.0]])["y"])
      [3. 4.]
    """
    d = find_dim(tensor(x, "unstack"), dim, "unstack")
    return [gather(x, constant_like(n, x, "int32"), d, name=name) for n in np.arange(d.size).tolist()]
