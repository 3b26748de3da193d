"""Tensors into a new dim and out of it; parts addressed by an index that is itself a tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from layouts import Dimension, Shape
from meshlib.checks import at, items, whole
from meshlib.errors import ShapeError
from meshlib.graph import Tensor, TensorType, find_dim
from meshlib.operation import Array, Block, Kind, Linear, operation
from meshlib.ops.building import as_tensor, build, tensor
from meshlib.ops.elementwise import greater_equal, less, logical_and, maximum, minimum, where
from meshlib.ops.index import gather
from meshlib.ops.index import range as positions
from meshlib.ops.rules import named_factors, same_dtype, vector_work
from meshlib.ops.shape import rename_dimension, transpose
from meshlib.ops.sources import constant_like


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
    # A device that holds only part of the new dim takes only these tensors.
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
    """Tensors of one shape side by side along a new dim, which becomes dim number `axis`."""
    operands = [tensor(x, "stack") for x in items(xs, "stack", "xs")]
    if not operands:
        raise ShapeError(f"{at('stack')}: needs at least one tensor, got an empty list")
    attrs = {"dim": Dimension(dim_name, len(operands)), "axis": whole(axis, "stack", "axis")}
    return build(STACK, operands, attrs, name)


def unstack(x: Tensor, dim: Dimension, name: str | None = None) -> list[Tensor]:
    """The tensors at each index of `dim`, without that dim. Where it is split, each is made of one pending sum."""
    d = find_dim(tensor(x, "unstack"), dim, "unstack")
    return [gather(x, constant_like(n, x, "int32"), d, name=name) for n in np.arange(d.size).tolist()]


def dynamic_slice(x: Tensor, start: Tensor | int, size: int, dim: Dimension | str, name: str | None = None) -> Tensor:
    """Elements [start, start + size) of one dim, where `start` is an int32 tensor without dims.

    Along a split dim the parts are a pending sum. Raises: FeedError at run time if the run leaves the dim.
    """
    d = find_dim(tensor(x, "dynamic_slice"), dim, "dynamic_slice")
    size = whole(size, "dynamic_slice", "size")
    if not 1 <= size <= d.size:
        raise ShapeError(f"{at('dynamic_slice')}: size {size} is not in 1 to {d.size}, the size of dim {d}")
    run = Dimension(f"{d.name}_run", size)
    chosen = positions(run) + _start(start, x, "dynamic_slice")
    shape = x.shape.resize(d.name, size).rename(d.name, run.name)
    return rename_dimension(transpose(gather(x, chosen, d), shape), run.name, d.name, name)


def update_slice(x: Tensor, part: Tensor, dim: Dimension | str, start: Tensor | int, name: str | None = None) -> Tensor:
    """`x` with [start, start + n) of one dim replaced by `part`, whose dim of that name has size n.

    `start` is an int32 tensor without dims; what of the part would fall outside is left out. Where the dim is split
    each device writes what falls into its block, and x stays where it is.
    """
    d = find_dim(tensor(x, "update_slice"), dim, "update_slice")
    p = find_dim(tensor(part, "update_slice"), d.name, "update_slice")
    if part.shape.rename(d.name, "_") != x.shape.resize(d.name, p.size).rename(d.name, "_"):
        raise ShapeError(f"{at('update_slice')}: {part} must have the dims of {x}, but for the size of '{d.name}'")
    begin = _start(start, x, "update_slice")
    place = positions(d) - begin
    inside = logical_and(greater_equal(place, 0), less(place, p.size))
    run = Dimension(f"{d.name}_run", p.size)
    index = minimum(maximum(place, 0), p.size - 1)
    found = gather(rename_dimension(part, d.name, run.name), index, run)
    return where(inside, transpose(found, x.shape), x, name=name)


def _start(start: Tensor | int, like: Tensor, what: str) -> Tensor:
    if isinstance(start, int) and not isinstance(start, bool):
        return constant_like(start, like, "int32")
    begin = as_tensor(start, None, what)
    if len(begin.shape) or begin.dtype.name != "int32":
        raise ShapeError(f"{at(what)}: start must be an int32 tensor without dims, got {begin}")
    return begin
