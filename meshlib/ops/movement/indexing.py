"""Operations that address elements by index: range, one_hot, gather and its transpose, scatter_add.

Along a split dim each device handles the indices inside its own block: one_hot compares with its block's global
indices, gather looks up its own elements and yields zeros elsewhere, so that the parts are a pending sum (for bools a
pending maximum).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from layouts import Dimension, Shape
from meshlib.core.arguments import at, choice, fitting, flag
from meshlib.core.dtypes import BOOL, INT32, as_dtype
from meshlib.core.errors import FeedError, ShapeError
from meshlib.core.graph import Operation, Tensor, TensorType, current_graph, find_dim
from meshlib.core.opdef import NONLINEAR, Array, Block, Factor, Kind, Linear, Role, Work, operation
from meshlib.ops.building import (
    align,
    as_dim,
    as_dims,
    build,
    build_source,
    check_adds,
    named_factors,
    not_differentiable,
    reducing_factors,
    tensor,
    union,
    vector_work,
)

_OUT_OF_RANGE = ("error", "zero")


def index_count(op: Operation) -> int:
    """The number of valid indices of an operation, or of valid starts of a part."""
    run = op.attrs.get("run")
    return int(op.attrs["dim"].size - (0 if run is None else run.size - 1))


def index_fault(op: Operation, bad: int) -> FeedError:
    """The error for an operation that looks up the invalid index `bad`."""
    dim, run = op.attrs["dim"], op.attrs.get("run")
    if run is not None:
        written = f"position {bad}" if run.size == 1 else f"positions {bad} to {bad + run.size - 1}"
        return FeedError(
            f"{op.opdef.name} {op.name!r} ({op.source}): {written} would be written into dim {dim}, which has "
            f"positions 0 to {dim.size - 1}; make '{dim.name}' larger, or pass out_of_range='drop' to leave out "
            "what does not fit"
        )
    return FeedError(
        f"{op.opdef.name} {op.name!r} ({op.source}): index {bad} is out of range for dim {dim} (0 to {dim.size - 1}); "
        f"it comes from {op.inputs[op.opdef.indices or 0]}; out_of_range='zero' gives zeros for such"
    )


def check_indices(block: Block, indices: Array) -> None:
    """Raise FeedError for an index out of range, unless the operation admits them."""
    count = index_count(block.operation)
    if block.attrs["out_of_range"] == "error" and indices.size and (indices.min() < 0 or indices.max() >= count):
        raise index_fault(block.operation, int(indices[(indices < 0) | (indices >= count)][0]))


# ---------------------------------------------------------------- range


def _range_local(block: Block) -> Array:
    (d,) = block.out.shape
    start, out = block.offsets[d.name], block.result()
    np.copyto(out, np.arange(start, start + d.size), casting="unsafe")
    return out


RANGE = operation(
    "range",
    kind=Kind.SOURCE,
    shape=lambda types, attrs: TensorType(Shape([attrs["dim"]]), attrs["dtype"]),
    roles=named_factors,
    local=_range_local,
    grad=lambda op, dy: [],
    work=vector_work,
    remade=True,
)


def range(dim: Dimension, dtype: object = "int32", name: str | None = None) -> Tensor:
    """0, 1, ..., dim.size - 1 along `dim`.

    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.range(mtf.Dimension("d", 4), "int32")
      >>> print(mtf.simulate(mtf.lower({"y": y})).step()["y"])
      [0 1 2 3]
    """
    dim = as_dim(dim, "range")
    return build_source(current_graph("range"), RANGE, {"dim": dim, "dtype": as_dtype(dtype)}, name).output


# ---------------------------------------------------------------- one_hot


def _one_hot_shape(types: tuple[TensorType, ...], attrs: Mapping[str, Any]) -> TensorType:
    (indices,) = types
    dim: Dimension = attrs["dim"]
    if indices.dtype is not INT32:
        raise ShapeError(f"indices must be int32, got {indices.dtype.name}; cast them with mtf.cast")
    if dim.name in indices.shape:
        raise ShapeError(f"the indices already have a dim '{dim.name}'; rename one with mtf.rename_dimension")
    return TensorType(indices.shape + Shape([dim]), attrs["dtype"])


def _one_hot_local(block: Block, indices: Array) -> Array:
    dim: Dimension = block.attrs["dim"]
    check_indices(block, indices)
    out = block.result()
    start = block.offsets[dim.name]
    hit = indices[..., None] == np.arange(start, start + out.shape[-1], dtype=indices.dtype)
    out[...] = np.where(hit, out.dtype.type(block.attrs["on"]), out.dtype.type(block.attrs["off"]))
    return out


ONE_HOT = operation(
    "one_hot",
    kind=Kind.ELEMENTWISE,
    shape=_one_hot_shape,
    roles=named_factors,
    local=_one_hot_local,
    grad=not_differentiable,
    work=vector_work,
    indices=0,
)


def one_hot(
    indices: Tensor,
    output_dim: Dimension,
    on_value: float = 1.0,
    off_value: float = 0.0,
    dtype: object = "float32",
    name: str | None = None,
    out_of_range: str = "error",
) -> Tensor:
    """`on_value` where the index along the new last dim `output_dim` equals `indices` (int32), else `off_value`.

    `out_of_range`: for an invalid index, "error" raises; "zero" yields `off_value` everywhere, as in Mesh TensorFlow.
    Raises: ShapeError while writing; FeedError at run time for an index out of range.
    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.one_hot(mtf.input("i", "n:2", "int32"), mtf.Dimension("d", 3))
      >>> print(mtf.simulate(mtf.lower({"y": y})).step(i=[2, 0])["y"])
      [[0. 0. 1.]
       [1. 0. 0.]]
    """
    choice(out_of_range, "one_hot", "out_of_range", _OUT_OF_RANGE)
    output_dim = as_dim(output_dim, "one_hot")
    element_type = as_dtype(dtype)
    on, off = fitting(on_value, element_type, "one_hot on_value"), fitting(off_value, element_type, "one_hot off_value")
    attrs = {"dim": output_dim, "on": on, "off": off, "dtype": element_type, "out_of_range": out_of_range}
    return build(ONE_HOT, [tensor(indices, "one_hot")], attrs, name)


# ---------------------------------------------------------------- gather and scatter_add


def _gather_shape(types: tuple[TensorType, ...], attrs: Mapping[str, Any]) -> TensorType:
    weights, indices = types
    dim: Dimension = attrs["dim"]
    if indices.dtype is not INT32:
        raise ShapeError(f"indices must be int32, got {indices.dtype.name}; cast them with mtf.cast")
    if dim.name in indices.shape:
        raise ShapeError(f"the indices have the gathered dim '{dim.name}'; rename it with mtf.rename_dimension")
    rest = Shape([d for d in weights.shape if d != dim and d.name not in indices.shape])
    union([weights.shape, indices.shape])
    return TensorType(indices.shape + rest, weights.dtype)


def _block_indices(block: Block, indices: Array, rows: int) -> tuple[Array, Array | None]:
    """Indices relative to this block, and the mask of those inside (None if all are)."""
    dim: Dimension = block.attrs["dim"]
    check_indices(block, indices)
    if rows == dim.size and block.attrs["out_of_range"] == "error":
        return indices, None
    local = indices - block.offsets[dim.name]
    hit = (local >= 0) & (local < rows)
    return np.where(hit, local, 0), hit


def _gather_local(block: Block, weights: Array, indices: Array) -> Array:
    dim: Dimension = block.attrs["dim"]
    w_names = block.inputs[0].shape.names
    i_names = block.inputs[1].shape.names
    out_names = block.out.shape.names
    axis = w_names.index(dim.name)
    chosen, hit = _block_indices(block, indices, weights.shape[axis])
    if not set(w_names) & set(i_names):  # whole rows
        looked_up = np.take(np.moveaxis(weights, axis, 0), chosen, axis=0)
    else:
        # Dims of both operands are indexed per element; other dims are copied as whole rows, which come last in the
        # result.
        shared = [n for n in w_names if n in i_names]
        rows = np.moveaxis(
            weights, [w_names.index(n) for n in (*shared, dim.name)], np.arange(len(shared) + 1).tolist()
        )
        places = [align(np.arange(rows.shape[k]), (n,), i_names) for k, n in enumerate(shared)]
        looked_up = rows[(*places, chosen)]
    out = block.result()
    # The index arrays cover all dims of weights and indices, so they broadcast to the output.
    np.copyto(
        out, looked_up if hit is None else np.where(align(hit, i_names, out_names), looked_up, looked_up.dtype.type(0))
    )
    return out


def _gather_roles(op: Operation) -> tuple[Factor, ...]:
    # False < True: bools from other devices combine by a maximum.
    return named_factors(op, {op.attrs["dim"].name: Role.MAX if op.output.dtype is BOOL else Role.SUM})


def _gather_grad(op: Operation, dy: Tensor) -> list[Tensor | None]:
    """scatter_add, or `_placed` if no element is looked up twice, which fuses with its consumers."""
    x, indices = op.inputs
    dim: Dimension = op.attrs["dim"]
    if all(d in x.shape for d in indices.shape):
        return [_placed(dy, indices, dim, x.shape), None]
    return [scatter_add(dy, indices, dim, x.shape, out_of_range=op.attrs["out_of_range"]), None]


def _placed(dy: Tensor, indices: Tensor, dim: Dimension, shape: Shape) -> Tensor:
    """`dy` at its index along `dim`, zeros elsewhere; invalid indices are dropped."""
    from meshlib.ops.control.sources import constant_shaped
    from meshlib.ops.pointwise.arithmetic import equal, where

    nothing = constant_shaped(0, shape, dy)  # has all dims, so that the result keeps their order
    return where(equal(indices, range(dim)), dy, nothing)


GATHER = operation(
    "gather",
    kind=Kind.INDEXED,
    shape=_gather_shape,
    roles=_gather_roles,
    local=_gather_local,
    grad=_gather_grad,
    linear=lambda op: NONLINEAR if op.output.dtype is BOOL else Linear((0,)),
    work=vector_work,
    exact=True,
    reads_part=True,
    indices=1,
)


def gather(
    weights: Tensor,
    indices: Tensor | int,
    dim: Dimension,
    output_shape: Shape | Sequence[Dimension] | None = None,
    name: str | None = None,
    out_of_range: str = "error",
) -> Tensor:
    """weights[..., indices, ...] along `dim`: dims of `indices`, then the other dims of `weights`, or `output_shape`.

    Dims shared by `weights` and `indices` are matched by name; `indices` may be one number. Along a split `dim` each
    device looks up its own elements; the parts are a pending sum.
    `out_of_range`: for an invalid index, "error" raises; "zero" yields zeros (False), as in Mesh TensorFlow.
    Raises: ShapeError while writing; FeedError at run time for an index out of range.
    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.gather(mtf.input("x", "d:4"), mtf.input("i", "n:2", "int32"), mtf.Dimension("d", 4))
      >>> print(mtf.simulate(mtf.lower({"y": y})).step(x=[3.0, 1.0, 2.0, 0.0], i=[2, 0])["y"])
      [2. 3.]
    """
    from meshlib.ops.control.sources import constant_like
    from meshlib.ops.movement.shape import broadcast

    choice(out_of_range, "gather", "out_of_range", _OUT_OF_RANGE)
    indexed_dim = find_dim(tensor(weights, "gather"), dim, "gather")
    if isinstance(indices, int | np.integer) and not isinstance(indices, bool):
        indices = constant_like(fitting(indices, INT32, "gather indices"), weights, INT32)
    attrs = {"dim": indexed_dim, "out_of_range": out_of_range}
    y = build(GATHER, [weights, tensor(indices, "gather")], attrs, name)
    return y if output_shape is None else broadcast(y, output_shape)


def _scatter_shape(types: tuple[TensorType, ...], attrs: Mapping[str, Any]) -> TensorType:
    updates, indices = types
    dim: Dimension = attrs["dim"]
    shape: Shape = attrs["shape"]
    check_adds(updates.dtype)
    if indices.dtype is not INT32:
        raise ShapeError(f"indices must be int32, got {indices.dtype.name}; cast them with mtf.cast")
    if dim not in shape or dim.name in updates.shape or dim.name in indices.shape:
        raise ShapeError(f"dim {dim} must be in the output {shape} and in no operand")
    together = union([updates.shape, indices.shape])
    stray = [str(d) for d in shape if d != dim and d not in together]
    if stray:
        raise ShapeError(f"output dims {', '.join(stray)} are in no operand")
    return TensorType(shape, updates.dtype)


def _summed_to(x: Array, names: tuple[str, ...], wanted: tuple[str, ...]) -> tuple[Array, tuple[str, ...]]:
    """An array summed over all dims but those in `wanted`, and the names of its dims."""
    extra = tuple(n for n in names if n not in wanted)
    if not extra:
        return x, names
    summed = np.add.reduce(x, axis=tuple(names.index(n) for n in extra), dtype=x.dtype)
    return summed, tuple(n for n in names if n not in extra)


def _scatter_local(block: Block, updates: Array, indices: Array) -> Array:
    """scatter_add as row updates of a table: [index dims of the result and `dim`, the other dims of the result]."""
    dim: Dimension = block.attrs["dim"]
    (u_names, i_names), out_names = (t.shape.names for t in block.inputs), block.out.shape.names
    sizes = {d.name: d.size for t in (*block.inputs, block.out) for d in t.shape}
    updates, u_names = _summed_to(updates, u_names, (*i_names, *out_names))
    batch = tuple(n for n in i_names if n in out_names)
    row_dims = tuple(n for n in u_names if n not in i_names)
    chosen, hit = _block_indices(block, indices, sizes[dim.name])
    place = np.zeros((1,) * len(i_names), np.intp)
    for n in batch:
        place = place * sizes[n] + align(np.arange(sizes[n]), (n,), i_names)
    place = np.broadcast_to(place * sizes[dim.name] + chosen, indices.shape).reshape(-1)
    table = np.zeros((prod(sizes[n] for n in (*batch, dim.name)), prod(sizes[n] for n in row_dims)), updates.dtype)
    space = (*i_names, *row_dims)
    rows = np.broadcast_to(align(updates, u_names, space), [sizes[n] for n in space]).reshape(place.size, -1)
    if hit is not None:
        place, rows = place[hit.reshape(-1)], rows[hit.reshape(-1)]
    _add_rows(table, place, rows, once=batch == i_names)
    names = (*batch, dim.name, *row_dims)
    out = block.result()
    np.copyto(out, align(table.reshape([sizes[n] for n in names]), names, out_names))
    return out


def _add_rows(table: Array, place: Array, rows: Array, once: bool) -> None:
    """table[place[n]] += rows[n]; with `once` all places are distinct."""
    if once:
        table[place] = rows
    elif place.size:
        order = np.argsort(place, kind="stable")
        place = place[order]
        starts = np.flatnonzero(np.concatenate([[True], place[1:] != place[:-1]]))
        table[place[starts]] = np.add.reduceat(rows[order], starts, axis=0, dtype=rows.dtype)


SCATTER_ADD = operation(
    "scatter_add",
    kind=Kind.INDEXED,
    shape=_scatter_shape,
    roles=reducing_factors,
    local=_scatter_local,
    grad=lambda op, dy: [_gather_back(op, dy), None],
    linear=lambda op: Linear((0,)),
    work=lambda ins, out, attrs: Work(0, ins[0].shape.size),
    indices=1,
)


def _gather_back(op: Operation, dy: Tensor) -> Tensor:
    """A lookup; of the narrower values, if the cotangent is a cast of them, so that these are stored."""
    from meshlib.ops.movement.shape import broadcast
    from meshlib.ops.pointwise.casts import cast, narrower

    shape, given = op.inputs[0].shape, narrower(dy)
    y = cast(gather(given, op.inputs[1], op.attrs["dim"], out_of_range=op.attrs["out_of_range"]), dy.dtype)
    missing = [d for d in y.shape if d not in shape]
    if missing:
        from meshlib.ops.pointwise.reductions import reduce_sum

        y = reduce_sum(y, reduced_dim=missing)
    return broadcast(y, shape)


def scatter_add(
    updates: Tensor,
    indices: Tensor,
    dim: Dimension,
    output_shape: Shape,
    name: str | None = None,
    out_of_range: str = "error",
) -> Tensor:
    """Zeros of `output_shape`, to which each element of `updates` is added at its index along `dim`.

    The transpose of `gather`: dims of the operands that are not in the output are summed over, and with
    `out_of_range="zero"` updates with an invalid index are dropped.
    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.scatter_add(mtf.input("x", "n:3"), mtf.input("i", "n:3", "int32"), mtf.Dimension("d", 2), "d:2")
      >>> print(mtf.simulate(mtf.lower({"y": y})).step(x=[1.0, 2.0, 3.0], i=[1, 0, 1])["y"])
      [2. 4.]
    """
    choice(out_of_range, "scatter_add", "out_of_range", _OUT_OF_RANGE)
    dim = as_dim(dim, "scatter_add")
    shape = Shape(as_dims(output_shape, "scatter_add output_shape"))
    attrs = {"dim": dim, "shape": shape, "out_of_range": out_of_range}
    return build(SCATTER_ADD, [tensor(updates, "scatter_add"), tensor(indices, "scatter_add")], attrs, name)


# ---------------------------------------------------------------- shifts by data-dependent amounts


def dynamic_shift(x: Tensor, offset: Tensor, dim: Dimension, wrap: bool, name: str | None = None) -> Tensor:
    """`x` shifted right along `dim` by `offset` elements: y[i] = x[i - offset], with one offset per row.

    Args:
      x: numbers.
      offset: int32, negative to the left; its dims are dims of x other than `dim`.
      dim: dim of x.
      wrap: whether elements that leave at one end enter at the other; otherwise zeros enter.
    Returns: the type of x.
    Raises: ShapeError for an offset of other dims or dtype.
    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.dynamic_shift(mtf.input("x", "d:4"), mtf.input("n", [], "int32"), "d", True)
      >>> print(mtf.simulate(mtf.lower({"y": y})).step(x=[3.0, 1.0, 2.0, 0.0], n=1)["y"])
      [0. 3. 1. 2.]
    """
    from meshlib.ops.movement.shape import rename_dimension, transpose
    from meshlib.ops.pointwise.arithmetic import greater_equal, less, logical_and, mod, where

    what = "dynamic_shift"
    shifted_dim = find_dim(tensor(x, what), dim, what)
    if tensor(offset, what).dtype is not INT32:
        raise ShapeError(f"{at(what)}: the offset must be int32, got {offset}; cast it with mtf.cast")
    stray = [str(d) for d in offset.shape if d == shifted_dim or d not in x.shape]
    if stray:
        raise ShapeError(f"{at(what)}: offset dims {', '.join(stray)} must be dims of x other than '{dim}'", x)
    source = range(shifted_dim) - offset
    wrapped = mod(source, shifted_dim.size)
    other = f"{shifted_dim.name}_unshifted"
    y = gather(rename_dimension(x, shifted_dim.name, other), wrapped, Dimension(other, shifted_dim.size))
    if flag(wrap, what, "wrap"):
        return transpose(y, x.shape, name)
    return where(logical_and(greater_equal(source, 0), less(source, shifted_dim.size)), y, 0, x.shape, name)
