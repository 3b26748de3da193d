"""Slices and rows at positions that are tensors: dynamic_slice, and update_slice and update_rows in place.

Each row may have its own start, like the sequences of a batch in a cache. If the dim is split each device writes the
part inside its block, and nothing is sent. Like a compiler, the buffer plan updates a tensor in place if it has no
later reader; the kernel then moves only the part.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from layouts import Dimension
from meshlib.core.arguments import at, choice, whole
from meshlib.core.dtypes import INT32
from meshlib.core.errors import ShapeError
from meshlib.core.graph import Operation, Tensor, TensorType, find_dim
from meshlib.core.opdef import Array, Block, Kind, Linear, Role, Work, operation, variant
from meshlib.ops.building import as_tensor, build, named_factors, tensor, union
from meshlib.ops.control.sources import constant_full, constant_like
from meshlib.ops.movement.indexing import check_indices, gather
from meshlib.ops.movement.indexing import range as positions
from meshlib.ops.movement.shape import rename_dimension, transpose


def written_shape(types: tuple[TensorType, ...], attrs: Mapping[str, Any]) -> TensorType:
    """The type of a tensor of which a part is replaced.

    Raises: ShapeError if the part has another dtype.
    """
    x, part, _ = types
    union([t.shape for t in types])
    if x.dtype is not part.dtype:
        raise ShapeError(f"operands have dtypes {x.dtype.name} and {part.dtype.name}; cast the part with mtf.cast")
    return x


def _local(block: Block, x: Array, part: Array, start: Array) -> Array:
    check_indices(block, start)
    out = block.result()
    dim, run = block.attrs["dim"].name, block.attrs["run"].name
    names, p_names, s_names = (t.shape.names for t in block.inputs)
    if run not in p_names:
        part, p_names = part[..., None], (*p_names, run)
    size, count = out.shape[names.index(dim)], part.shape[p_names.index(run)]
    place = start[..., None] + np.arange(count) - block.offsets[dim]
    inside = (place >= 0) & (place < size)
    rest = [n for n in names if n != dim and n not in s_names]
    order = [names.index(n) for n in (*s_names, dim, *rest)]
    into = out.transpose(order)
    of = part.transpose([p_names.index(n) for n in (*s_names, run, *rest)])
    at_rows = np.nonzero(inside)
    rows = (*at_rows[:-1], place[inside])
    spare, key = block.engine.spare, (block.operation, block.engine.trips)
    if out is not x:
        differing = None if spare is None else spare.differing_rows(key, x, out)
        if differing is None:
            np.copyto(out, x)
        else:
            into[differing] = x.transpose(order)[differing]
    into[rows] = of[at_rows]
    if spare is not None and out is not x:
        spare.written(key, x, out, order, rows)
    return out


def _grad(op: Operation, dy: Tensor) -> list[Tensor | None]:
    _, part, start = op.inputs
    dim, run = op.attrs["dim"], op.attrs["run"]
    hidden = build(UPDATE_SLICE, [dy, constant_full(0, part, dy.dtype), start], op.attrs)
    with start.graph:
        chosen = positions(run) + start if run.name in part.shape else start
    return [hidden, transpose(gather(dy, chosen, dim, out_of_range="zero"), part.shape), None]


UPDATE_SLICE = operation(
    "update_slice",
    kind=Kind.INDEXED,
    shape=written_shape,
    roles=lambda op: named_factors(op, {op.attrs["run"].name: Role.WHOLE}),
    local=_local,
    grad=_grad,
    linear=lambda op: Linear((0, 1), together=True),
    work=lambda ins, out, attrs: Work(0, ins[1].shape.size),
    overwrites=1,
    exact=True,
    writes_part=True,
    indices=2,
)


def update_slice(
    x: Tensor,
    part: Tensor,
    dim: Dimension | str,
    start: Tensor | int,
    name: str | None = None,
    out_of_range: str = "error",
) -> Tensor:
    """`x` with [start, start + n) of one dim replaced by `part`.

    X[B, I], P[B, n], s[B]  ->  Y[B, I]: Y[b, s[b] + j] = P[b, j], else X[b, i]

    Args:
      x: any dtype.
      part: the dims of x, with `dim` of size n, or with another dim of size n in its place (which layouts that split
        `dim` do not split), or without it: then n is 1. Dtype of x.
      dim: dim of x or its name.
      start: a number, or int32 with dims of x except `dim`: one per row, such as per sequence of a batch.
      name: name of the result.
      out_of_range: for a part that leaves the dim: "error" raises, "drop" writes only the elements inside.
    Returns: the type of x.
    Cost: the bytes of the part if x has no later reader and is updated in place; otherwise also x is read and written.
      Nothing is sent if `dim` is split: each device writes the part inside its block.
    Raises: ShapeError for dims or dtypes that do not fit; FeedError at run time if the part leaves the dim.
    Example:
      >>> import meshlib as mtf
      >>> batch, length = mtf.Dimension("batch", 2), mtf.Dimension("length", 4)
      >>> with mtf.Graph():
      ...     at, new = mtf.input("at", [batch], "int32"), mtf.input("new", [batch])
      ...     y = mtf.update_slice(mtf.zeros([batch, length]), new, length, at)
      >>> mtf.simulate(mtf.lower({"y": y})).step(at=[0, 3], new=[5, 7])["y"].tolist()
      [[5.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 7.0]]
    """
    what = "update_slice"
    choice(out_of_range, what, "out_of_range", ("error", "drop"))
    d = find_dim(tensor(x, what), dim, what)
    runs = [p for p in tensor(part, what).shape if p.name == d.name or p.name not in x.shape]
    rest = {p for p in part.shape if p not in runs}
    if len(runs) > 1 or rest != {p for p in x.shape if p != d}:
        raise ShapeError(f"{at(what)}: {part} must have the dims of {x}, but for '{d.name}' or one in its place")
    begin = _start(start, x, d, what)
    run = Dimension(f"{d.name}_run", runs[0].size if runs else 1)
    moved = rename_dimension(part, runs[0].name, run.name) if runs else part
    return build(UPDATE_SLICE, [x, moved, begin], {"dim": d, "run": run, "out_of_range": out_of_range}, name)


def dynamic_slice(x: Tensor, start: Tensor | int, size: int, dim: Dimension | str, name: str | None = None) -> Tensor:
    """Elements [start, start + size) of one dim, where `start` is a number, or int32 with dims of x except `dim`.

    Along a split dim the parts are a pending sum. Raises: FeedError at run time if the range leaves the dim.
    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.dynamic_slice(mtf.input("x", "d:4"), mtf.input("i", [], "int32"), 2, "d")
      >>> print(mtf.simulate(mtf.lower({"y": y})).step(x=[3.0, 1.0, 2.0, 0.0], i=1)["y"])
      [1. 2.]
    """
    what = "dynamic_slice"
    d = find_dim(tensor(x, what), dim, what)
    size = whole(size, what, "size")
    if not 1 <= size <= d.size:
        raise ShapeError(f"{at(what)}: size {size} is not in 1 to {d.size}, the size of dim {d}")
    run = Dimension(f"{d.name}_run", size)
    chosen = positions(run) + _start(start, x, d, what)
    shape = x.shape.resize(d.name, size).rename(d.name, run.name)
    return rename_dimension(transpose(gather(x, chosen, d), shape), run.name, d.name, name)


def _start(start: Tensor | int, x: Tensor, dim: Dimension, what: str) -> Tensor:
    if isinstance(start, int | np.integer) and not isinstance(start, bool):
        return constant_like(int(start), x, "int32")
    begin = as_tensor(start, None, what)
    stray = [str(d) for d in begin.shape if d not in x.shape or d == dim]
    if stray or begin.dtype is not INT32:
        raise ShapeError(
            f"{at(what)}: start must be a number, or int32 of dims of {x} but '{dim.name}'; got {begin}"
            + (f", whose dims {', '.join(stray)} are none" if stray else "; cast it with mtf.cast")
        )
    return begin


def _write_rows(block: Block, x: Array, rows: Array, indices: Array) -> Array:
    """Write the rows whose indices are in this block."""
    dim = block.attrs["dim"]
    check_indices(block, indices)
    out = block.result()
    if out is not x:
        np.copyto(out, x)
    names, of_rows, of_indices = (t.shape.names for t in block.inputs)
    rest = [n for n in names if n != dim.name]
    place = indices - block.offsets[dim.name]
    inside = (place >= 0) & (place < out.shape[names.index(dim.name)])
    into = out.transpose([names.index(n) for n in (dim.name, *rest)])
    into[place[inside]] = rows.transpose([of_rows.index(n) for n in (*of_indices, *rest)])[inside]
    return out


def _rows_grad(op: Operation, dy: Tensor) -> list[Tensor | None]:
    _, rows, indices = op.inputs
    hidden = build(UPDATE_ROWS, [dy, constant_full(0, rows, dy.dtype), indices], op.attrs)
    return [hidden, transpose(gather(dy, indices, op.attrs["dim"], out_of_range="zero"), rows.shape), None]


UPDATE_ROWS = variant(
    UPDATE_SLICE,
    "update_rows",
    roles=lambda op: named_factors(op, {d.name: Role.WHOLE for d in op.inputs[2].shape}),
    local=_write_rows,
    grad=_rows_grad,
)


def update_rows(
    x: Tensor, rows: Tensor, indices: Tensor, dim: Dimension | str, name: str | None = None, out_of_range: str = "error"
) -> Tensor:
    """`x` with the rows at `indices` of one dim replaced.

    X[I, D], R[n, D], i[n]  ->  Y[I, D]: Y[i[j], d] = R[j, d], else X

    Args:
      x: any dtype.
      rows: the dims of `indices`, and those of x except `dim`. Dtype of x.
      indices: int32, with dims that x lacks; valid indices are distinct.
      dim: dim of x or its name.
      name: name of the result.
      out_of_range: for rows with an invalid index: "error" raises, "drop" skips them.
    Returns: the type of x.
    Cost: the bytes of the rows if x has no later reader and is updated in place; otherwise also x is read and written.
      If `dim` is split, rows are replicated and each device writes those in its block.
    Raises: ShapeError for dims or dtypes that do not fit; FeedError at run time for an invalid index.
    Example:
      >>> import meshlib as mtf
      >>> pages, new = mtf.Dimension("pages", 4), mtf.Dimension("new", 2)
      >>> with mtf.Graph():
      ...     rows, at = mtf.input("rows", [new]), mtf.input("at", [new], "int32")
      ...     y = mtf.update_rows(mtf.zeros([pages]), rows, at, pages)
      >>> mtf.simulate(mtf.lower({"y": y})).step(rows=[5, 7], at=[3, 0])["y"].tolist()
      [7.0, 0.0, 0.0, 5.0]
    """
    what = "update_rows"
    choice(out_of_range, what, "out_of_range", ("error", "drop"))
    d = find_dim(tensor(x, what), dim, what)
    wanted = {*tensor(indices, what).shape, *(p for p in x.shape if p != d)}
    if indices.dtype is not INT32 or any(p.name in x.shape.names for p in indices.shape):
        raise ShapeError(f"{at(what)}: indices must be int32, with dims that x lacks", indices, x)
    if {*tensor(rows, what).shape} != wanted:
        raise ShapeError(f"{at(what)}: rows must have the dims of the indices and those of x but '{d.name}'", rows, x)
    return build(UPDATE_ROWS, [x, rows, indices], {"dim": d, "out_of_range": out_of_range}, name)
