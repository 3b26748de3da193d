"""In-place updates of rows at indices: the new tokens of many sequences into shared pages."""

from __future__ import annotations

import numpy as np

from layouts import Dimension
from meshlib.core.arguments import at, choice
from meshlib.core.dtypes import INT32
from meshlib.core.errors import ShapeError
from meshlib.core.graph import Operation, Tensor, find_dim
from meshlib.core.opdef import Array, Block, Kind, Linear, Role, Work, operation
from meshlib.ops.building import build, tensor
from meshlib.ops.control.sources import constant_full
from meshlib.ops.movement.dynamic_slices import written_shape
from meshlib.ops.movement.indexing import check_indices, gather
from meshlib.ops.movement.shape import transpose
from meshlib.ops.rules import named_factors


def _local(block: Block, x: Array, rows: Array, indices: Array) -> Array:
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


def _grad(op: Operation, dy: Tensor) -> list[Tensor | None]:
    _, rows, indices = op.inputs
    hidden = build(UPDATE_ROWS, [dy, constant_full(0, rows, dy.dtype), indices], op.attrs)
    return [hidden, transpose(gather(dy, indices, op.attrs["dim"], out_of_range="zero"), rows.shape), None]


UPDATE_ROWS = operation(
    "update_rows",
    kind=Kind.INDEXED,
    shape=written_shape,
    roles=lambda op: named_factors(op, {d.name: Role.WHOLE for d in op.inputs[2].shape}),
    local=_local,
    grad=_grad,
    linear=lambda op: Linear((0, 1), together=True),
    work=lambda ins, out, attrs: Work(0, ins[1].shape.size),
    overwrites=1,
    exact=True,
    writes_part=True,
    indices=2,
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
