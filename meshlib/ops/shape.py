"""Operations that change dims, not values: reshape, rename_dimension, transpose, broadcast, slice, pad."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import gcd
from typing import Any

import numpy as np

from layouts import Dimension, Shape
from meshlib.checks import at, fitting, items, whole
from meshlib.errors import ShapeError
from meshlib.graph import Operation, Tensor, TensorType, find_dim
from meshlib.operation import (
    Array,
    Block,
    Factor,
    Kind,
    Linear,
    Role,
    Work,
    align,
    as_dims,
    build,
    named_factors,
    operation,
    tensor,
    traffic_bytes,
)

_LINEAR = Linear((0,))


def _copy_work(ins: tuple[TensorType, ...], out: TensorType, attrs: Mapping[str, Any]) -> Work:
    # One pass of the vector unit over the larger side: a relayout in tiled memory is never free.
    return Work(0, max(ins[0].shape.size, out.shape.size), traffic_bytes(ins, out))


def _free_work(ins: tuple[TensorType, ...], out: TensorType, attrs: Mapping[str, Any]) -> Work:
    return Work(0, 0, 0)


# ---------------------------------------------------------------- transpose


def _transpose_shape(types: tuple[TensorType, ...], attrs: Mapping[str, Any]) -> TensorType:
    (x,) = types
    out: Shape = attrs["shape"]
    if set(out) != set(x.shape):
        raise ShapeError(f"the new order {out} must hold the same dims as {x.shape}")
    return TensorType(out, x.dtype)


def _transpose_local(block: Block, x: Array) -> Array:
    return align(x, block.inputs[0].shape.names, block.out.shape.names)


TRANSPOSE = operation(
    "transpose",
    kind=Kind.VIEW,
    shape=_transpose_shape,
    roles=named_factors,
    local=_transpose_local,
    grad=lambda op, dy: [transpose(dy, op.inputs[0].shape)],
    linear=lambda op: _LINEAR,
    work=_copy_work,
)


def transpose(x: Tensor, new_shape: Shape | Sequence[Dimension], name: str | None = None) -> Tensor:
    """`x` with its dims in the order of `new_shape`."""
    shape = Shape(as_dims(new_shape, "transpose"))
    return x if tensor(x, "transpose").shape == shape else build(TRANSPOSE, [x], {"shape": shape}, name)


# ---------------------------------------------------------------- rename


def _rename_roles(op: Operation) -> tuple[Factor, ...]:
    x, y = op.inputs[0].shape, op.output.shape
    return tuple(Factor(a.name, a.size, (a.name,), (b.name,), Role.PARALLEL) for a, b in zip(x, y, strict=True))


RENAME = operation(
    "rename_dimension",
    kind=Kind.VIEW,
    shape=lambda types, attrs: TensorType(types[0].shape.rename(attrs["old"], attrs["new"]), types[0].dtype),
    roles=_rename_roles,
    local=lambda block, x: x,
    grad=lambda op, dy: [rename_dimension(dy, op.attrs["new"], op.attrs["old"])],
    linear=lambda op: _LINEAR,
    work=_free_work,
)


def rename_dimension(x: Tensor, old_name: str, new_name: str, name: str | None = None) -> Tensor:
    """`x` with one dim under another name, which layout rules may lay elsewhere."""
    old_name = find_dim(tensor(x, "rename_dimension"), old_name, "rename_dimension").name
    if old_name == new_name:
        return x
    if new_name in x.shape:
        raise ShapeError(
            f"{at('rename_dimension')}: {x} already has a dim '{new_name}'; choose a name it does not have"
        )
    return build(RENAME, [x], {"old": old_name, "new": new_name}, name)


# ---------------------------------------------------------------- reshape


def reshape_groups(old: Shape, new: Shape) -> list[tuple[tuple[Dimension, ...], tuple[Dimension, ...]]]:
    """Cut both shapes, left to right, into the smallest groups of equal size.

    >>> a = Shape("b:2;h:3;k:4"); c = Shape("b:2;d:12")
    >>> [(len(i), len(o)) for i, o in reshape_groups(a, c)]
    [(1, 1), (2, 1)]
    """
    groups = []
    i = j = 0
    while i < len(old) or j < len(new):
        start_i, start_j, left, right = i, j, 1, 1
        while True:
            if i < len(old) and (left <= right or j == len(new)):
                left *= old[i].size
                i += 1
            elif j < len(new):
                right *= new[j].size
                j += 1
            if (left == right and j > start_j and i > start_i) or (i == len(old) and j == len(new)):
                break
        groups.append((tuple(old.dims[start_i:i]), tuple(new.dims[start_j:j])))
    return groups


def _reshape_shape(types: tuple[TensorType, ...], attrs: Mapping[str, Any]) -> TensorType:
    (x,) = types
    out: Shape = attrs["shape"]
    if out.size != x.shape.size:
        raise ShapeError(f"{x.shape} has {x.shape.size} elements, but {out} has {out.size}")
    return TensorType(out, x.dtype)


def _reshape_roles(op: Operation) -> tuple[Factor, ...]:
    # Splitting the major dim of a group splits the group's elements into runs, and so the major dim of the
    # other side: axes stay on the major part.
    factors = []
    for old, new in reshape_groups(op.inputs[0].shape, op.output.shape):
        a = next((d for d in old if d.size > 1), None)
        b = next((d for d in new if d.size > 1), None)
        if a is not None and b is not None:
            factors.append(Factor(a.name, gcd(a.size, b.size), (a.name,), (b.name,), Role.PARALLEL))
        factors += [Factor(d.name, d.size, (d.name,), (None,), Role.WHOLE) for d in old if d is not a]
        factors += [Factor(d.name + "'", d.size, (None,), (d.name,), Role.WHOLE) for d in new if d is not b]
    return tuple(factors)


RESHAPE = operation(
    "reshape",
    kind=Kind.VIEW,
    shape=_reshape_shape,
    roles=_reshape_roles,
    local=lambda block, x: x.reshape(block.out.shape.sizes),
    grad=lambda op, dy: [reshape(dy, op.inputs[0].shape)],
    linear=lambda op: _LINEAR,
    work=_copy_work,
)


def reshape(x: Tensor, new_shape: Shape | Sequence[Dimension], name: str | None = None) -> Tensor:
    """`x` with its elements, in row-major order, under other dims: splits and merges of dims.

    The axes of a split or merged dim stay on its major part; where they can't, the value is gathered.
    """
    shape = Shape(as_dims(new_shape, "reshape"))
    return x if tensor(x, "reshape").shape == shape else build(RESHAPE, [x], {"shape": shape}, name)


# ---------------------------------------------------------------- broadcast


def _broadcast_shape(types: tuple[TensorType, ...], attrs: Mapping[str, Any]) -> TensorType:
    (x,) = types
    out: Shape = attrs["shape"]
    missing = [str(d) for d in x.shape if d not in out]
    if missing:
        raise ShapeError(f"the new shape {out} lacks {', '.join(missing)}; broadcast only adds dims")
    return TensorType(out, x.dtype)


def _broadcast_local(block: Block, x: Array) -> Array:
    return np.broadcast_to(align(x, block.inputs[0].shape.names, block.out.shape.names), block.out.shape.sizes)


def _broadcast_grad(op: Operation, dy: Tensor) -> list[Tensor | None]:
    from meshlib.ops.reduce import reduce_sum

    return [reduce_sum(dy, output_shape=op.inputs[0].shape)]


BROADCAST = operation(
    "broadcast",
    kind=Kind.VIEW,
    shape=_broadcast_shape,
    roles=named_factors,
    local=_broadcast_local,
    grad=_broadcast_grad,
    linear=lambda op: _LINEAR,
    work=_copy_work,
)


def broadcast(x: Tensor, new_shape: Shape | Sequence[Dimension], name: str | None = None) -> Tensor:
    """`x` repeated over the dims of `new_shape` that it lacks."""
    shape = Shape(as_dims(new_shape, "broadcast"))
    if tensor(x, "broadcast").shape == shape:
        return x
    if len(shape) == len(x.shape):
        return transpose(x, shape, name)
    return build(BROADCAST, [x], {"shape": shape}, name)


# ---------------------------------------------------------------- slice and pad


def _one_dim_roles(op: Operation) -> tuple[Factor, ...]:
    return named_factors(op, {op.attrs["dim"]: Role.WHOLE})


def _slice_shape(types: tuple[TensorType, ...], attrs: Mapping[str, Any]) -> TensorType:
    (x,) = types
    d = x.shape.dim(attrs["dim"])
    begin, size = attrs["begin"], attrs["size"]
    if not 0 <= begin < begin + size <= d.size:
        raise ShapeError(f"slice [{begin}, {begin + size}) of dim '{d.name}' lies outside its {d.size} elements")
    return TensorType(x.shape.resize(d.name, size), x.dtype)


def _slice_local(block: Block, x: Array) -> Array:
    axis = block.inputs[0].shape.index(block.attrs["dim"])
    begin = block.attrs["begin"]
    return x[(np.s_[:],) * axis + (np.s_[begin : begin + block.attrs["size"]],)]


def _slice_grad(op: Operation, dy: Tensor) -> list[Tensor | None]:
    whole = op.inputs[0].shape.dim(op.attrs["dim"]).size
    begin, size = op.attrs["begin"], op.attrs["size"]
    return [pad(dy, [begin, whole - begin - size], op.attrs["dim"])]


SLICE = operation(
    "slice",
    kind=Kind.VIEW,
    shape=_slice_shape,
    roles=_one_dim_roles,
    local=_slice_local,
    grad=_slice_grad,
    linear=lambda op: _LINEAR,
    work=_copy_work,
)


def slice(x: Tensor, begin: int, size: int, slice_dim_name: str, name: str | None = None) -> Tensor:
    """Elements [begin, begin + size) of one dim; the dim keeps its name."""
    d = find_dim(tensor(x, "slice"), slice_dim_name, "slice")
    begin, size = whole(begin, "slice", "begin"), whole(size, "slice", "size")
    if (begin, size) == (0, d.size):
        return x
    return build(SLICE, [x], {"dim": d.name, "begin": begin, "size": size}, name)


def _pad_shape(types: tuple[TensorType, ...], attrs: Mapping[str, Any]) -> TensorType:
    (x,) = types
    if attrs["before"] < 0 or attrs["after"] < 0:
        raise ShapeError(f"paddings must not be negative, got [{attrs['before']}, {attrs['after']}]")
    old = x.shape.dim(attrs["dim"]).size
    return TensorType(x.shape.resize(attrs["dim"], old + attrs["before"] + attrs["after"]), x.dtype)


def _pad_local(block: Block, x: Array) -> Array:
    axis = block.inputs[0].shape.index(block.attrs["dim"])
    before = block.attrs["before"]
    out = block.result()
    out[...] = block.attrs["value"]
    inside = (np.s_[:],) * axis + (np.s_[before : before + x.shape[axis]],)
    out[inside] = x
    return out


PAD = operation(
    "pad",
    kind=Kind.INDEXED,
    shape=_pad_shape,
    roles=_one_dim_roles,
    local=_pad_local,
    grad=lambda op, dy: [slice(dy, op.attrs["before"], op.inputs[0].shape.dim(op.attrs["dim"]).size, op.attrs["dim"])],
    linear=lambda op: _LINEAR if op.attrs["value"] == 0 else Linear(()),
    work=_copy_work,
)


def pad(x: Tensor, paddings: Sequence[int], dim_name: str, pad_value: float = 0.0, name: str | None = None) -> Tensor:
    """`x` with paddings = [before, after] elements of `pad_value` added to one dim; the dim keeps its name."""
    d = find_dim(tensor(x, "pad"), dim_name, "pad")
    given = items(paddings, "pad", "paddings")
    if len(given) != 2:
        raise ShapeError(f"{at('pad')}: paddings must be [before, after], got {given!r:.80}")
    before, after = (whole(n, "pad", "each of paddings") for n in given)
    pad_value = fitting(pad_value, x.dtype, "pad pad_value")
    if (before, after) == (0, 0):
        return x
    return build(PAD, [x], {"dim": d.name, "before": before, "after": after, "value": pad_value}, name)
