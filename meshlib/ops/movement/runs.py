"""Ranges of a dim: slice, strided slice, pad, shift, concat, split, halo exchange.

Along a split dim each device receives only the elements that its block of the result needs and lacks: see `Halo`. So
none of them gathers a tensor. For a slice whose size the number of blocks does not divide (the last token) each device
contributes its own elements and zeros: a pending sum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np

from layouts import Dimension
from meshlib.core.arguments import at, fitting, flag, items, whole
from meshlib.core.dtypes import BOOL
from meshlib.core.errors import ShapeError
from meshlib.core.graph import Operation, Tensor, TensorType, find_dim
from meshlib.core.opdef import Array, Block, Factor, Halo, Kind, Linear, OpDef, Role, Storage, operation
from meshlib.ops.building import build, named_factors, same_dtype, tensor, vector_work
from meshlib.ops.control.sources import is_zero
from meshlib.ops.movement.shape import reshape


def _roles(op: Operation) -> tuple[Factor, ...]:
    return named_factors(op, {op.attrs["dim"]: Role.HALO})


_define = partial(operation, roles=_roles, work=vector_work)


def _run(axis: int, begin: int, end: int) -> tuple[Any, ...]:
    return (np.s_[:],) * axis + (np.s_[begin:end],)


def _place(out: Array, piece: Array, axis: int, position: int) -> None:
    """Copy `piece` into `out` at `position` along `axis`; elements outside are cut off."""
    begin, end = max(position, 0), min(position + piece.shape[axis], out.shape[axis])
    if begin < end:
        out[_run(axis, begin, end)] = piece[_run(axis, begin - position, end - position)]


# ---------------------------------------------------------------- slice


def _slice_shape(types: tuple[TensorType, ...], attrs: Mapping[str, Any]) -> TensorType:
    (x,) = types
    d = x.shape.dim(attrs["dim"])
    begin, size = attrs["begin"], attrs["size"]
    if not 0 <= begin < begin + size <= d.size:
        raise ShapeError(f"slice [{begin}, {begin + size}) of dim '{d.name}' is outside its {d.size} elements")
    return TensorType(x.shape.resize(d.name, size), x.dtype)


def _slice_roles(op: Operation) -> tuple[Factor, ...]:
    """Split by halo ranges of the result, or by blocks of x with zeros outside (a sum; for bools a maximum)."""
    dim = op.attrs["dim"]
    role = Role.MAX if op.output.dtype is BOOL else Role.SUM
    return (*_roles(op), Factor(_mask_factor(dim), op.inputs[0].shape.dim(dim).size, (dim,), (None,), role))


def _mask_factor(dim: str) -> str:
    """The name of the factor that splits a dim by blocks of x."""
    return dim + "'"


def _slice_local(block: Block, x: Array) -> Array:
    dim = block.attrs["dim"]
    axis = block.out.shape.index(dim)
    size = block.out.shape.dim(dim).size
    # First element, in x, of the result's block. Only one of the two factors has offsets: those of the result's blocks,
    # or those of the blocks of x.
    begin = block.attrs["begin"] + block.offsets[dim] - block.start(0, dim) - block.offsets[_mask_factor(dim)]
    if begin >= 0 and begin + size <= x.shape[axis]:
        run: Array = x[_run(axis, begin, begin + size)]
        return run
    out = block.result()
    out[...] = 0
    _place(out, x, axis, -begin)
    return out


def _slice_grad(op: Operation, dy: Tensor) -> list[Tensor | None]:
    size = op.inputs[0].shape.dim(op.attrs["dim"]).size
    begin = op.attrs["begin"]
    return [pad(dy, [begin, size - begin - op.attrs["size"]], op.attrs["dim"])]


SLICE = _define(
    "slice",
    kind=Kind.VIEW,
    shape=_slice_shape,
    roles=_slice_roles,
    local=_slice_local,
    grad=_slice_grad,
    linear=lambda op: Linear((0,)),
    storage=Storage.VIEW,
    exact=True,
    reads_part=True,
    lower=Halo(lambda op, f, i, start, stop: (start + op.attrs["begin"], stop + op.attrs["begin"])),
)


def slice(x: Tensor, begin: int, size: int, slice_dim_name: str, name: str | None = None) -> Tensor:
    """Elements [begin, begin + size) of one dim; the dim keeps its name.

    A slice that cuts a zero-padded tensor back to its size becomes a `shift`.
    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.slice(mtf.input("x", "d:4"), 1, 2, "d")
      >>> print(mtf.simulate(mtf.lower({"y": y})).step(x=[3.0, 1.0, 2.0, 0.0])["y"])
      [1. 2.]
    """
    d = find_dim(tensor(x, "slice"), slice_dim_name, "slice")
    begin, size = whole(begin, "slice", "begin"), whole(size, "slice", "size")
    if (begin, size) == (0, d.size):
        return x
    padded = x.operation if _is_from(x, PAD, d) and x.operation.attrs["value"] == 0 else None
    if padded is not None and size == padded.inputs[0].shape.dim(d.name).size and 0 <= begin <= d.size - size:
        return shift(padded.inputs[0], padded.attrs["before"] - begin, d.name, False, name)
    return build(SLICE, [x], {"dim": d.name, "begin": begin, "size": size}, name)


def split(
    x: Tensor, split_dim: Dimension, num_or_size_splits: int | Sequence[int], name: str | None = None
) -> list[Tensor]:
    """Consecutive parts of one dim: a number of equal ones, or one per given size; each keeps the dim's name.

    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.split(mtf.input("x", "d:4"), mtf.Dimension("d", 4), 2)[1]
      >>> print(mtf.simulate(mtf.lower({"y": y})).step(x=[3.0, 1.0, 2.0, 0.0])["y"])
      [2. 0.]
    """
    d = find_dim(tensor(x, "split"), split_dim, "split")
    if isinstance(num_or_size_splits, Sequence):
        sizes = [whole(n, "split", "each size") for n in items(num_or_size_splits, "split", "num_or_size_splits")]
    else:
        count = whole(num_or_size_splits, "split", "num_or_size_splits")
        if count < 1 or d.size % count:
            raise ShapeError(f"{at('split')}: dim {d} can't be cut into {count} equal parts; give their sizes")
        sizes = [d.size // count] * count
    if sum(sizes) != d.size or any(n < 1 for n in sizes):
        raise ShapeError(f"{at('split')}: sizes {sizes} must be positive and sum to the {d.size} of dim '{d.name}'")
    begins = [0, *accumulate(sizes)]
    return [slice(x, b, n, d.name, name) for b, n in zip(begins, sizes, strict=False)]


def strided_slice(
    x: Tensor, begin: int, size: int, stride: int, slice_dim_name: str, name: str | None = None
) -> Tensor:
    """Elements begin, begin + stride, ..., `size` of them, of one dim; the dim keeps its name.

    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.strided_slice(mtf.input("x", "d:4"), 0, 2, 2, "d")
      >>> print(mtf.simulate(mtf.lower({"y": y})).step(x=[3.0, 1.0, 2.0, 0.0])["y"])
      [3. 2.]
    """
    d = find_dim(tensor(x, "strided_slice"), slice_dim_name, "strided_slice")
    begin, size, stride = (whole(n, "strided_slice", "begin, size and stride") for n in (begin, size, stride))
    if stride < 1 or size < 1 or begin < 0 or begin + (size - 1) * stride >= d.size:
        raise ShapeError(
            f"{at('strided_slice')}: {size} elements from {begin} on, each {stride} further, do not fit the {d.size} "
            f"of dim '{d.name}'"
        )
    if stride == 1:
        return slice(x, begin, size, d.name, name)
    # The dim is cut into runs of `stride` elements, of which one is taken. Runs may begin before the first element to
    # stay inside the dim; padding is needed only if they cover more than the dim.
    inside = max(0, min(begin, d.size - size * stride))
    filled = pad(x, [0, max(0, inside + size * stride - d.size)], d.name)
    run = slice(filled, inside, size * stride, d.name)
    runs = [Dimension(d.name, size), Dimension(f"{d.name}_stride", stride)]
    at_dim = x.shape.index(d.name)
    dims = list(run.shape)
    apart = reshape(run, [*dims[:at_dim], *runs, *dims[at_dim + 1 :]])
    chosen = slice(apart, begin - inside, 1, f"{d.name}_stride")
    return reshape(chosen, [*dims[:at_dim], runs[0], *dims[at_dim + 1 :]], name)


# ---------------------------------------------------------------- pad


def _pad_shape(types: tuple[TensorType, ...], attrs: Mapping[str, Any]) -> TensorType:
    (x,) = types
    if attrs["before"] < 0 or attrs["after"] < 0:
        raise ShapeError(f"paddings must not be negative, got [{attrs['before']}, {attrs['after']}]")
    old = x.shape.dim(attrs["dim"]).size
    return TensorType(x.shape.resize(attrs["dim"], old + attrs["before"] + attrs["after"]), x.dtype)


def _pad_local(block: Block, x: Array) -> Array:
    dim = block.attrs["dim"]
    out = block.result()
    out[...] = block.attrs["value"]
    _place(out, x, block.out.shape.index(dim), block.attrs["before"] + block.start(0, dim) - block.offsets[dim])
    return out


PAD = _define(
    "pad",
    kind=Kind.INDEXED,
    shape=_pad_shape,
    local=_pad_local,
    grad=lambda op, dy: [slice(dy, op.attrs["before"], op.inputs[0].shape.dim(op.attrs["dim"]).size, op.attrs["dim"])],
    linear=lambda op: Linear((0,)) if op.attrs["value"] == 0 else Linear(()),
    lower=Halo(lambda op, f, i, start, stop: (start - op.attrs["before"], stop - op.attrs["before"])),
)


def pad(x: Tensor, paddings: Sequence[int], dim_name: str, pad_value: float = 0.0, name: str | None = None) -> Tensor:
    """`x` with paddings = [before, after] elements of `pad_value` added to one dim; the dim keeps its name.

    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.pad(mtf.input("x", "d:2"), [1, 1], "d")
      >>> print(mtf.simulate(mtf.lower({"y": y})).step(x=[3.0, 4.0])["y"])
      [0. 3. 4. 0.]
    """
    d = find_dim(tensor(x, "pad"), dim_name, "pad")
    given = items(paddings, "pad", "paddings")
    if len(given) != 2:
        raise ShapeError(f"{at('pad')}: paddings must be [before, after], got {given!r:.80}")
    before, after = (whole(n, "pad", "each of paddings") for n in given)
    pad_value = fitting(pad_value, x.dtype, "pad pad_value")
    if (before, after) == (0, 0):
        return x
    return build(PAD, [x], {"dim": d.name, "before": before, "after": after, "value": pad_value}, name)


# ---------------------------------------------------------------- shift


def _shift_local(block: Block, x: Array) -> Array:
    dim, offset = block.attrs["dim"], block.attrs["offset"]
    axis, rows_here = block.out.shape.index(dim), block.out.shape.dim(dim).size
    first = block.offsets[dim] - offset - block.start(0, dim)  # position in x of the result's first element
    out = block.result()
    if block.attrs["wrap"]:
        size = block.operation.output.shape.dim(dim).size
        np.take(x, (first + np.arange(rows_here)) % size, axis=axis, out=out, mode="clip")
    else:
        out[...] = 0
        _place(out, x, axis, -first)
    return out


SHIFT = _define(
    "shift",
    kind=Kind.INDEXED,
    shape=lambda types, attrs: types[0],
    local=_shift_local,
    grad=lambda op, dy: [shift(dy, -op.attrs["offset"], op.attrs["dim"], op.attrs["wrap"])],
    linear=lambda op: Linear((0,)),
    exact=True,
    lower=Halo(
        lambda op, f, i, start, stop: (start - op.attrs["offset"], stop - op.attrs["offset"]),
        wrap=lambda op: bool(op.attrs["wrap"]),
    ),
)


def shift(x: Tensor, offset: int, dim: Dimension | str, wrap: bool, name: str | None = None) -> Tensor:
    """`x` moved by `offset` along `dim`: y[i] = x[i - offset]; zeros enter, or with `wrap` the elements of the other
    end.

    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.shift(mtf.input("x", "d:4"), 1, mtf.Dimension("d", 4), wrap=False)
      >>> print(mtf.simulate(mtf.lower({"y": y})).step(x=[3.0, 1.0, 2.0, 0.0])["y"])
      [0. 3. 1. 2.]
    """
    d = find_dim(tensor(x, "shift"), dim, "shift")
    offset, wrap = whole(offset, "shift", "offset"), flag(wrap, "shift", "wrap")
    if wrap:
        offset %= d.size
    return build(SHIFT, [x], {"dim": d.name, "offset": offset, "wrap": wrap}, name) if offset else x


# ---------------------------------------------------------------- concat


def _concat_shape(types: tuple[TensorType, ...], attrs: Mapping[str, Any]) -> TensorType:
    dim = attrs["dim"]
    first = types[0].shape
    for t in types:
        if dim not in t.shape:
            raise ShapeError(f"{t.shape} has no dim '{dim}'")
        if t.shape.resize(dim, 1) != first.resize(dim, 1):
            raise ShapeError(f"{t.shape} and {first} differ in more than the size of '{dim}'")
    return TensorType(first.resize(dim, sum(t.shape.dim(dim).size for t in types)), same_dtype(types))


def _begins(op: Operation) -> list[int]:
    return [0, *accumulate(x.shape.dim(op.attrs["dim"]).size for x in op.inputs)]


def _concat_needs(op: Operation, factor: Factor, operand: int, start: int, stop: int) -> tuple[int, int]:
    begin = _begins(op)[operand]
    return start - begin, stop - begin


def _concat_local(block: Block, *xs: Array) -> Array:
    dim = block.attrs["dim"]
    axis, out = block.out.shape.index(dim), block.result()
    for n, (x, begin) in enumerate(zip(xs, _begins(block.operation), strict=False)):
        _place(out, x, axis, begin + block.start(n, dim) - block.offsets[dim])
    return out


def _concat_grad(op: Operation, dy: Tensor) -> list[Tensor | None]:
    dim = op.attrs["dim"]
    sizes = [x.shape.dim(dim).size for x in op.inputs]
    return [slice(dy, b, n, dim) for b, n in zip(_begins(op), sizes, strict=False)]


CONCAT = _define(
    "concat",
    kind=Kind.INDEXED,
    shape=_concat_shape,
    local=_concat_local,
    grad=_concat_grad,
    linear=lambda op: Linear(tuple(range(len(op.inputs))), together=True),
    lower=Halo(_concat_needs),
    exact=True,
)


def concat(xs: Sequence[Tensor], concat_dim_name: str, name: str | None = None) -> Tensor:
    """The tensors concatenated along a dim of all; their other dims must be the same, in the same order.

    Zeros concatenated with a slice of a tensor to its original size become a `shift`.
    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.concat([mtf.input("x", "d:2"), mtf.ones("d:1")], "d")
      >>> print(mtf.simulate(mtf.lower({"y": y})).step(x=[3.0, 4.0])["y"])
      [3. 4. 1.]
    """
    operands = [tensor(x, "concat") for x in items(xs, "concat", "xs")]
    if not operands:
        raise ShapeError(f"{at('concat')}: needs at least one tensor, got an empty list")
    d = find_dim(operands[0], concat_dim_name, "concat")
    if len(operands) == 1:
        return operands[0]
    if len(operands) == 2 and (shifted := _shifted(operands[0], operands[1], d.name, name)) is not None:
        return shifted
    return build(CONCAT, operands, {"dim": d.name}, name)


def _is_from(x: Tensor, kind: OpDef, dim: Dimension) -> bool:
    """True if `x` is the result of an operation of this kind along `dim`."""
    return x.operation.opdef is kind and x.operation.attrs["dim"] == dim.name


def _shifted(first: Tensor, second: Tensor, dim: str, name: str | None) -> Tensor | None:
    """A `shift`, if one tensor is zeros and the other a slice that they restore to its size; else None."""
    zeros, piece = (first, second) if is_zero(first.operation) else (second, first)
    sliced = _is_from(piece, SLICE, piece.shape.dim(dim))
    if not is_zero(zeros.operation) or not sliced or zeros.dtype is not piece.dtype:
        return None
    (x,), offset = piece.operation.inputs, zeros.shape.dim(dim).size
    begin = 0 if zeros is first else offset  # begin of the remaining slice
    same = zeros.shape.resize(dim, 1) == piece.shape.resize(dim, 1)
    fits = same and (x.shape.dim(dim).size, piece.operation.attrs["begin"]) == (
        offset + piece.shape.dim(dim).size,
        begin,
    )
    return shift(x, offset if zeros is first else -offset, dim, False, name) if fits else None


# ---------------------------------------------------------------- halo exchange


def halo_exchange(
    x: Tensor, blocks_dim: Dimension, block_size_dim: Dimension, halo_size: int, wrap: bool = False
) -> Tensor:
    """Each block extended by halos from its neighbours: [blocks, size] -> [blocks, halo + size + halo].

    Args:
      x: a sequence cut into blocks, with both dims.
      blocks_dim: dim of blocks; if it is split, only halos are sent.
      block_size_dim: dim within a block; it grows by 2 * halo_size.
      halo_size: number of elements; may exceed the block size.
      wrap: whether the first and last block are neighbours; otherwise zeros enter.
    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     x, blocks, size = mtf.input("x", "blocks:2;size:3"), mtf.Dimension("blocks", 2), mtf.Dimension("size", 3)
      ...     program = mtf.lower({"y": mtf.halo_exchange(x, blocks, size, 1)}, mesh="m:2", layout="blocks:m")
      >>> mtf.simulate(program).step(x=[[1, 2, 3], [4, 5, 6]])["y"].tolist()
      [[0.0, 1.0, 2.0, 3.0, 4.0], [3.0, 4.0, 5.0, 6.0, 0.0]]
    """
    return _with_margins(x, blocks_dim, block_size_dim, halo_size, wrap, both=True)


def left_halo_exchange(
    x: Tensor, blocks_dim: Dimension, block_size_dim: Dimension, halo_size: int, wrap: bool = False
) -> Tensor:
    """As `halo_exchange`, with a halo on the left only: [blocks, halo + size].

    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     x, blocks, size = mtf.input("x", "blocks:2;size:3"), mtf.Dimension("blocks", 2), mtf.Dimension("size", 3)
      ...     y = mtf.left_halo_exchange(x, blocks, size, 1)
      >>> mtf.simulate(mtf.lower({"y": y})).step(x=[[1, 2, 3], [4, 5, 6]])["y"].tolist()
      [[0.0, 1.0, 2.0, 3.0], [3.0, 4.0, 5.0, 6.0]]
    """
    return _with_margins(x, blocks_dim, block_size_dim, halo_size, wrap, both=False)


def _with_margins(
    x: Tensor, blocks_dim: Dimension, block_size_dim: Dimension, halo_size: int, wrap: bool, both: bool
) -> Tensor:
    find_dim(tensor(x, "halo_exchange"), blocks_dim, "halo_exchange")
    find_dim(x, block_size_dim, "halo_exchange")
    halo, block = whole(halo_size, "halo_exchange", "halo_size"), block_size_dim.size
    if halo < 0:
        raise ShapeError(f"{at('halo_exchange')}: halo_size must not be negative, got {halo}")
    parts = [x]
    for begin in range(0, halo, block):  # nearest first
        distance, size = begin // block + 1, min(block, halo - begin)
        parts.insert(0, shift(slice(x, block - size, size, block_size_dim.name), distance, blocks_dim, wrap))
        if both:
            parts.append(shift(slice(x, 0, size, block_size_dim.name), -distance, blocks_dim, wrap))
    return concat(parts, block_size_dim.name)
