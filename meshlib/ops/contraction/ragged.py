"""Grouped products: rows sorted by group, each group with its own matrix, as for experts without capacity.

    ragged_dot(x, w, sizes)[r, f] = sum over d of x[r, d] * w[g, d, f]    for the group g that row r is in

One operation covers both forms that gradients need: the result has the rows of the first operand, or it has the groups,
and the rows of each group are summed over. Groups are given by the rows where they begin and end, so that a
device with some of the groups or rows needs nothing from the others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from layouts import Dimension, Shape
from meshlib.core.arguments import at, choice, number, whole
from meshlib.core.dtypes import INT32
from meshlib.core.engine import Engine
from meshlib.core.errors import ShapeError
from meshlib.core.graph import Operation, Tensor, TensorType
from meshlib.core.opdef import Array, Block, Kind, Linear, Product, Work, operation
from meshlib.ops.building import as_dim, as_dims, build, mxu_passes, reducing_factors, same_dtype, tensor
from meshlib.ops.contraction.einsum import Names, matmul_plan
from meshlib.ops.pointwise.arithmetic import subtract
from meshlib.ops.pointwise.casts import cast
from meshlib.ops.pointwise.cumulative import cumsum

PRECISIONS = ("default", "highest")
# Row tile of the kernel: AI-Hypercomputer/maxtext src/maxtext/configs/types.py, wi_tile_fwd_batch_seq.
TILE_ROWS = 512


def _shape(types: tuple[TensorType, ...], attrs: Mapping[str, Any]) -> TensorType:
    begins, ends = types[-2:]
    dtype = same_dtype(types[:2])
    if not dtype.is_wide_float:
        raise ShapeError(f"needs float operands, got {dtype.name}; cast them with mtf.cast")
    if begins.dtype is not INT32 or begins != ends:
        raise ShapeError(f"begins and ends of groups must be int32 with equal shapes, got {begins} and {ends}")
    return TensorType(attrs["shape"], dtype)


# ---------------------------------------------------------------- on one device


def segments(block: Block, begins: Array, ends: Array) -> Iterator[tuple[dict[str, int], int, slice]]:
    """The non-empty groups of this block: the index along further dims of `begins`, the group, its rows."""
    attrs, names = block.attrs, block.inputs[-2].shape.names
    groups, first = names.index(attrs["groups"]), block.offsets[attrs["rows"]]
    count = block.inputs[0].shape.dim(attrs["rows"]).size
    for index in np.ndindex(*begins.shape):
        low, high = (min(max(int(x[index]) - first, 0), count) for x in (begins, ends))
        if low < high:
            place = {name: n for name, n in zip(names, index, strict=True) if name != attrs["groups"]}
            yield place, index[groups], slice(low, high)


def _local(block: Block, a: Array, b: Array, begins: Array, ends: Array) -> Array:
    """The product group by group; rows of other blocks are skipped."""
    attrs, engine = block.attrs, block.engine
    a, b = (engine.mxu_operand(x, attrs["precision"] == "highest") for x in (a, b))
    out = block.result()
    out[...] = 0
    names = [t.shape.names for t in (*block.inputs[:2], block.out)]
    for place, group, rows in segments(block, begins, ends):
        chosen: dict[str, Any] = {**place, attrs["groups"]: group, attrs["rows"]: rows}
        where = [tuple(chosen.get(name, np.s_[:]) for name in of) for of in names]
        left = [tuple(n for n in of if not isinstance(chosen.get(n), int)) for of in names]
        out[where[2]] += product_by_name(engine, a[where[0]], b[where[1]], *left)
    return out


def product_by_name(engine: Engine, a: Array, b: Array, a_names: Names, b_names: Names, out: Names) -> Array:
    """The product of two arrays with dims matched by name."""
    plan = matmul_plan(a_names, b_names, out)
    if plan.swapped:
        a, b, a_names, b_names = b, a, b_names, a_names
    sizes = dict(zip((*a_names, *b_names), (*a.shape, *b.shape), strict=True))

    def arranged(x: Array, names: Names, *groups: Names) -> Array:
        moved = x.transpose([names.index(n) for g in groups for n in g])
        return moved.reshape([prod(sizes[n] for n in g) for g in groups])

    left = arranged(a, a_names, plan.batch, plan.rows, plan.contracted)
    right = arranged(b, b_names, plan.batch, plan.contracted, plan.columns)
    result = np.empty((left.shape[0], left.shape[1], right.shape[2]), left.dtype)
    engine.matmul(left, right, result)
    natural = plan.batch + plan.rows + plan.columns
    return result.reshape([sizes[n] for n in natural]).transpose([natural.index(n) for n in out])


# ---------------------------------------------------------------- gradient


def _grad(op: Operation, dy: Tensor) -> list[Tensor | None]:
    a, b, begins, ends = op.inputs
    wide = a.dtype.of_cotangents
    dy = cast(dy, wide)

    def side(other: Tensor, wanted: Tensor) -> Tensor:
        return _ragged_product(cast(other, wide), dy, begins, ends, wanted.shape, op.attrs)

    return [side(b, a), side(a, b), None, None]


def _ragged_product(
    a: Tensor, b: Tensor, begins: Tensor, ends: Tensor, out: Shape, attrs: Mapping[str, Any], name: str | None = None
) -> Tensor:
    """A RAGGED_DOT operation; operands are swapped if needed, since the first must have the rows."""
    if attrs["rows"] not in a.shape.names:
        a, b = b, a
    return build(RAGGED_DOT, [a, b, begins, ends], {**attrs, "shape": out}, name)


# ---------------------------------------------------------------- work


def _share(ins: Sequence[TensorType], attrs: Mapping[str, Any]) -> float:
    """The mean share of the rows that belong to this device's groups, for equally filled groups."""
    return float(attrs["filled"]) * ins[-2].shape.dim(attrs["groups"]).size / int(attrs["count"])


def _work(ins: tuple[TensorType, ...], out: TensorType, attrs: Mapping[str, Any]) -> Work:
    dims = {d.name: d.size for t in (*ins[:2], out) for d in t.shape if d.name != attrs["groups"]}
    passes = mxu_passes(ins, attrs)
    return Work(round(2 * prod(dims.values()) * _share(ins, attrs)) * passes, 0)


def computed_rows(rows: int, groups: int) -> int:
    """Rows that a kernel for sorted rows multiplies: whole tiles; a tile with rows of two groups counts twice.

    >>> computed_rows(4096, 8), computed_rows(4096, 1), computed_rows(16, 8)
    (7680, 4096, 128)
    """
    tile = min(TILE_ROWS, max(8, 1 << (rows - 1).bit_length()))
    return (-(-rows // tile) + min(groups, rows) - 1) * tile


def _product_of(ins: tuple[TensorType, ...], out: TensorType, attrs: Mapping[str, Any]) -> Product:
    rows, groups = attrs["rows"], attrs["groups"]
    a, b, bounds = (t.shape for t in (*ins[:2], ins[-2]))
    first, second, result = ({d.name: d.size for d in shape if d.name != groups} for shape in (a, b, out.shape))
    both = {n for n in first if n in second}
    runs = prod(d.size for d in bounds if d.name != groups and d.name not in both & {*result})
    batch = prod(first[n] for n in both if n in result)
    rows_made = prod(size for n, size in first.items() if n in result and n not in both)
    contracted = prod(size for n, size in first.items() if n not in result)
    columns = prod(size for n, size in second.items() if n not in both)
    summed, share = rows not in result, _share(ins, attrs)
    if summed:
        contracted = max(1, round(contracted * share))
    else:
        rows_made = max(1, round(rows_made * share))
    members = bounds.dim(groups).size
    return Product(batch, rows_made, contracted, columns, groups=members, groups_summed=summed, runs=runs)


def _read_share(operand: int, ins: tuple[TensorType, ...], out: TensorType, attrs: Mapping[str, Any]) -> float:
    """The share of matrices whose group has rows: draws hit all groups with equal probability, or with probabilities
    scaled by the expert loads ("loads") of the estimate.
    """
    groups, draws = attrs["groups"], attrs["draws"]
    if operand != 1 or draws is None or groups not in ins[1].shape.names:
        return 1.0
    rows = ins[0].shape.dim(attrs["rows"]).size * float(attrs["filled"])
    chance = rows / (int(attrs["count"]) * draws)
    runs = prod(d.size for d in ins[-2].shape if d.name not in ins[1].shape.names)
    chances = np.minimum(1.0, chance * np.array(attrs.get("loads") or (1.0,)))
    return float(np.mean(1 - (1 - chances) ** (draws * runs)))


RAGGED_DOT = operation(
    "ragged_dot",
    kind=Kind.CONTRACTION,
    shape=_shape,
    roles=reducing_factors,
    local=_local,
    grad=_grad,
    linear=lambda op: Linear((0, 1)),
    work=_work,
    product=_product_of,
    read_share=_read_share,
)


# ---------------------------------------------------------------- the public function


def ragged_dot(
    x: Tensor,
    w: Tensor,
    sizes: Tensor,
    rows: Dimension | str,
    groups: Dimension | str,
    output_shape: Shape | Sequence[Dimension] | None = None,
    *,
    precision: str = "default",
    mean_rows: float | None = None,
    draws: int | None = None,
    name: str | None = None,
) -> Tensor:
    """The product of each row with the matrix of its group; rows are sorted by group.

    x[rows, d], w[groups, d, f], sizes[groups]  ->  y[rows, f]

    The first `sizes[0]` rows are in group 0, the next `sizes[1]` in group 1, and so on; rows after the last group yield
    zeros, and so do groups without rows.

    Args:
      x: float, with `rows` and without `groups`.
      w: same dtype as x, with `groups`, or with `rows`: see `output_shape`.
      sizes: int32, number of rows per group; the sum is at most the size of `rows`. Its dims besides `groups` are batch
        dims: with x [batch, rows, d] and sizes [batch, groups], each batch item has its own groups.
      rows, groups: the dims, or their names.
      output_shape: dims of the result, in order; by default the dims that only x or only w has, without `groups`, and
        those that both share with `sizes`. If w has `rows` in place of `groups`, the result has `groups` in place of
        `rows`, and the rows of each group are summed over: y[groups, d, f] from x[rows, d] and w[rows, f], the
        gradient of the matrices.
      precision: "default", or "highest" to keep float32, as in `einsum`; for eight bits see `quantized_ragged_dot`.
      mean_rows: mean number of rows that belong to a group, for the estimate; by default all.
      draws: number of independent draws, such as tokens, that choose the groups of the rows uniformly; the estimate
        derives the share of groups without rows, whose matrices are not read. None: all are read.
      name: of the operation, in listings.
    Returns: a tensor of the operands' dtype; products are exact, sums float32.
    Cost: 2 x rows in groups x (product of the other dims) MXU flops, whatever the number of groups. Its time counts
      whole tiles of up to 512 rows, and a tile with rows of two groups twice. If groups are split, each device computes
      the rows of its groups, giving a pending sum; the estimate assumes rows in proportion to groups.
    Raises: ShapeError for dims that do not fit.
    Example:
      >>> import meshlib as mtf
      >>> rows, groups, d = mtf.Dimension("rows", 4), mtf.Dimension("groups", 2), mtf.Dimension("d", 1)
      >>> with mtf.Graph():
      ...     x, w = mtf.input("x", [rows, d]), mtf.input("w", [groups, d])
      ...     y = mtf.ragged_dot(x, w, mtf.input("sizes", [groups], "int32"), rows, groups)
      >>> step = mtf.simulate(mtf.lower({"y": y})).step
      >>> step(x=[[1.0], [2.0], [3.0], [4.0]], w=[[1.0], [10.0]], sizes=[1, 2])["y"].tolist()
      [1.0, 20.0, 30.0, 0.0]

    Source: jax.lax.ragged_dot; Gale et al., MegaBlocks, arXiv:2211.15841.
    """
    what = "ragged_dot"
    choice(precision, what, "precision", PRECISIONS)
    row, group, out = checked_operands(what, x, w, sizes, rows, groups, output_shape)
    drawn = None if draws is None else whole(draws, what, "draws", low=1)
    share = filled_share(what, row, mean_rows)
    return grouped_product(x, w, sizes, row, group, out, share, drawn, group.size, precision, name)


def filled_share(what: str, rows: Dimension, mean_rows: float | None) -> float:
    """The mean share of the rows that belong to a group. Raises: ShapeError for more rows than there are."""
    filled = rows.size if mean_rows is None else number(mean_rows, what, "mean_rows")
    if not 0 < filled <= rows.size:
        raise ShapeError(
            f"{at(what)}: mean_rows must be above 0 and at most the {rows.size} of '{rows.name}', got {filled}"
        )
    return filled / rows.size


def grouped_product(
    x: Tensor,
    w: Tensor,
    sizes: Tensor,
    rows: Dimension,
    groups: Dimension,
    out: Shape,
    filled: float,
    draws: int | None,
    count: int,
    precision: str,
    name: str | None,
) -> Tensor:
    """`ragged_dot` of operands already checked.

    Args:
      filled: mean share of the rows that belong to a group. count: global number of groups.
    """
    ends = cumsum(sizes, groups)
    attrs = {
        "rows": rows.name, "groups": groups.name, "count": count, "filled": filled, "draws": draws,
        "precision": precision,
    }  # fmt: skip
    return _ragged_product(x, w, subtract(ends, sizes), ends, out, attrs, name)


def checked_operands(
    what: str, x: object, w: object, sizes: object, rows: Dimension | str, groups: Dimension | str, output_shape: object
) -> tuple[Dimension, Dimension, Shape]:
    """The dims of the rows, the groups and the result. Raises: ShapeError if the operands do not fit."""
    x, w, sizes = operands = [tensor(t, what) for t in (x, w, sizes)]
    row, group = _dim_of(x, rows, what, "rows"), _dim_of(sizes, groups, what, "groups")
    faults = _faults(x, w, sizes, row, group)
    if faults:
        raise ShapeError(f"{at(what)}: {'; '.join(faults)}", *operands)
    return row, group, _output_shape(what, x, w, sizes, row, group, output_shape)


def _dim_of(t: Tensor, dim: Dimension | str, what: str, argument: str) -> Dimension:
    name = dim if isinstance(dim, str) else as_dim(dim, what).name
    if name not in t.shape.names:
        raise ShapeError(f"{at(what)}: {argument} '{name}' is not a dim of {t}")
    if isinstance(dim, Dimension) and t.shape.dim(name) != dim:
        raise ShapeError(f"{at(what)}: {argument} {dim} has size {t.shape.dim(name).size} in {t}")
    return t.shape.dim(name)


def _faults(x: Tensor, w: Tensor, sizes: Tensor, rows: Dimension, groups: Dimension) -> list[str]:
    faults = []
    if sizes.dtype is not INT32:
        faults.append(f"sizes must be int32, got {sizes.dtype.name}")
    if groups.name in x.shape.names:
        faults.append(f"x must not have the groups '{groups.name}'")
    if rows in w.shape:
        if groups.name in w.shape.names:
            faults.append(f"w has both rows '{rows.name}' and groups '{groups.name}'")
    elif groups not in w.shape:
        faults.append(f"w must have the groups {groups}, or the rows {rows}")
    for d in sizes.shape:
        if d != groups and d not in x.shape:
            faults.append(f"dim {d} of sizes is none of x")
    for d in w.shape:
        if d.name in x.shape.names and d not in x.shape:
            faults.append(f"dim '{d.name}' has size {x.shape.dim(d.name).size} in x, {d.size} in w")
    return faults


def _default_shape(
    x: Tensor, w: Tensor, summed: Sequence[Dimension], first: Sequence[Dimension], alone: Collection[Dimension]
) -> Shape:
    """`first`, then the dims of x that are not summed over, and those of w that are in `alone`."""
    of_x = [d for d in x.shape if d not in summed]
    return Shape([*first, *of_x, *(d for d in w.shape if d in alone and d not in of_x)])


def _output_shape(
    what: str, x: Tensor, w: Tensor, sizes: Tensor, rows: Dimension, groups: Dimension, wanted: object
) -> Shape:
    """The dims of the result; no operand may be summed over a dim that only it has."""
    summed_rows = rows in w.shape
    both = [d for d in x.shape if d in w.shape and d not in sizes.shape]
    alone = {*x.shape, *w.shape} - {*both, rows, groups}
    own = groups if summed_rows else rows
    if wanted is None:
        return _default_shape(x, w, [*both, rows] if summed_rows else both, [groups] if summed_rows else [], alone)
    out = Shape(as_dims(wanted, f"{what} output_shape", [x, w, sizes]))
    shared = {d for d in alone if d in sizes.shape} if summed_rows else set()
    missing = [str(d) for d in (*(alone - shared), own) if d not in out]
    strange = [str(d) for d in out if d not in (own, *alone, *both)]
    faults = [f"it lacks {', '.join(missing)}"] * bool(missing) + [f"{', '.join(strange)} can't be in it"] * bool(
        strange
    )
    if faults:
        raise ShapeError(f"{at(what)}: output_shape {out}: {'; '.join(faults)}", x, w, sizes)
    return out
