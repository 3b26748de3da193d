"""Operations that change dims, not values: reshape, rename_dimension, transpose, broadcast, stack, unstack."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from math import gcd
from typing import Any, TypeVar

import numpy as np

from layouts import Dimension, Shape
from meshlib.core.arguments import at, items, whole
from meshlib.core.errors import ShapeError
from meshlib.core.graph import Operation, Tensor, TensorType, find_dim
from meshlib.core.opdef import Array, Block, Factor, Kind, Linear, PowerProduct, Role, Storage, Work, operation
from meshlib.ops.building import align, as_dims, build, named_factors, no_work, same_dtype, size_of, tensor, vector_work
from meshlib.ops.control.sources import constant_like
from meshlib.ops.movement.indexing import gather

# The elements of one operand under other dims.
_define = partial(operation, kind=Kind.VIEW, linear=lambda op: Linear((0,)), exact=True)
Dims = Dimension | Shape | Sequence[Dimension]


def _copy_work(ins: tuple[TensorType, ...], out: TensorType, attrs: Mapping[str, Any]) -> Work:
    # One pass of the vector unit over the larger side: a relayout in tiled memory always costs time.
    return Work(0, max(ins[0].shape.size, out.shape.size))


# ---------------------------------------------------------------- transpose


def _transpose_shape(types: tuple[TensorType, ...], attrs: Mapping[str, Any]) -> TensorType:
    (x,) = types
    out: Shape = attrs["shape"]
    if set(out) != set(x.shape):
        raise ShapeError(f"the new order {out} must hold the same dims as {x.shape}")
    return TensorType(out, x.dtype)


def _aligned(block: Block, x: Array) -> Array:
    return align(x, block.inputs[0].shape.names, block.out.shape.names)


TRANSPOSE = _define(
    "transpose",
    shape=_transpose_shape,
    roles=named_factors,
    local=_aligned,
    grad=lambda op, dy: [transpose(dy, op.inputs[0].shape)],
    form=lambda op: PowerProduct((1,)),
    work=_copy_work,
    storage=Storage.VIEW,
)


def transpose(x: Tensor, new_shape: Shape | Sequence[Dimension], name: str | None = None) -> Tensor:
    """`x` with its dims in the order of `new_shape`.

    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.transpose(mtf.input("x", "a:2;b:2"), "b:2;a:2")
      >>> print(mtf.simulate(mtf.lower({"y": y})).step(x=[[1.0, 2.0], [3.0, 4.0]])["y"])
      [[1. 3.]
       [2. 4.]]
    """
    shape = Shape(as_dims(new_shape, "transpose", [tensor(x, "transpose")]))
    return x if x.shape == shape else build(TRANSPOSE, [x], {"shape": shape}, name)


# ---------------------------------------------------------------- rename


def _rename_roles(op: Operation) -> tuple[Factor, ...]:
    x, y = op.inputs[0].shape, op.output.shape
    return tuple(Factor(a.name, a.size, (a.name,), (b.name,), Role.PARALLEL) for a, b in zip(x, y, strict=True))


RENAME = _define(
    "rename_dimension",
    shape=lambda types, attrs: TensorType(types[0].shape.rename(attrs["old"], attrs["new"]), types[0].dtype),
    roles=_rename_roles,
    local=lambda block, x: x,
    grad=lambda op, dy: [rename_dimension(dy, op.attrs["new"], op.attrs["old"])],
    work=no_work,
    storage=Storage.ALIAS,
)


def rename_dimension(x: Tensor, old_name: str, new_name: str, name: str | None = None) -> Tensor:
    """`x` with one dim renamed, to which other layout rules may apply.

    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.rename_dimension(mtf.input("x", "d:4"), "d", "e")
      >>> print(mtf.simulate(mtf.lower({"y": y})).step(x=[3.0, 1.0, 2.0, 0.0])["y"])
      [3. 1. 2. 0.]
    """
    old_name = find_dim(tensor(x, "rename_dimension"), old_name, "rename_dimension").name
    if not isinstance(new_name, str):
        raise ShapeError(f"{at('rename_dimension')}: the new name must be a string, got {new_name!r:.80}")
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
    # Splitting the major dim of a group splits its elements into consecutive blocks, and so the major dim of the other
    # side: axes stay on the major part.
    factors = []
    for old, new in reshape_groups(op.inputs[0].shape, op.output.shape):
        a = next((d for d in old if d.size > 1), None)
        b = next((d for d in new if d.size > 1), None)
        if a is not None and b is not None:
            factors.append(Factor(a.name, gcd(a.size, b.size), (a.name,), (b.name,), Role.PARALLEL))
        factors += [Factor(d.name, d.size, (d.name,), (None,), Role.WHOLE) for d in old if d is not a]
        factors += [Factor(d.name + "'", d.size, (None,), (d.name,), Role.WHOLE) for d in new if d is not b]
    return tuple(factors)


RESHAPE = _define(
    "reshape",
    shape=_reshape_shape,
    roles=_reshape_roles,
    local=lambda block, x: x.reshape(block.out.shape.sizes),
    grad=lambda op, dy: [reshape(dy, op.inputs[0].shape)],
    work=_copy_work,
    storage=Storage.RESHAPED,
)


def reshape(x: Tensor, new_shape: Shape | Sequence[Dimension], name: str | None = None) -> Tensor:
    """The elements of `x`, in row-major order, under other dims: splits and merges of dims.

    The axes of a split or merged dim stay on its major part; if they can't, the value is gathered.
    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.reshape(mtf.input("x", "a:2;b:2"), "d:4")
      >>> print(mtf.simulate(mtf.lower({"y": y})).step(x=[[1.0, 2.0], [3.0, 4.0]])["y"])
      [1. 2. 3. 4.]
    """
    shape = Shape(as_dims(new_shape, "reshape", [x]))
    return x if tensor(x, "reshape").shape == shape else build(RESHAPE, [x], {"shape": shape}, name)


# ---------------------------------------------------------------- broadcast


def _broadcast_shape(types: tuple[TensorType, ...], attrs: Mapping[str, Any]) -> TensorType:
    (x,) = types
    out: Shape = attrs["shape"]
    missing = [str(d) for d in x.shape if d not in out]
    if missing:
        raise ShapeError(f"the new shape {out} lacks {', '.join(missing)}; broadcast only adds dims")
    return TensorType(out, x.dtype)


def _broadcast_grad(op: Operation, dy: Tensor) -> list[Tensor | None]:
    from meshlib.ops.pointwise.reductions import reduce_sum

    return [reduce_sum(dy, output_shape=op.inputs[0].shape)]


BROADCAST = _define(
    "broadcast",
    shape=_broadcast_shape,
    roles=named_factors,
    local=lambda block, x: np.broadcast_to(_aligned(block, x), block.out.shape.sizes),
    grad=_broadcast_grad,
    form=lambda op: PowerProduct((1,)),
    work=_copy_work,
    storage=Storage.VIEW,
    remade=True,
)


def broadcast(x: Tensor, new_shape: Shape | Sequence[Dimension], name: str | None = None) -> Tensor:
    """`x` repeated over the dims of `new_shape` that it lacks.

    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.broadcast(mtf.input("x", "b:2"), "a:2;b:2")
      >>> print(mtf.simulate(mtf.lower({"y": y})).step(x=[1.0, 2.0])["y"])
      [[1. 2.]
       [1. 2.]]
    """
    shape = Shape(as_dims(new_shape, "broadcast", [x]))
    if tensor(x, "broadcast").shape == shape:
        return x
    if len(shape) == len(x.shape):
        return transpose(x, shape, name)
    return build(BROADCAST, [x], {"shape": shape}, name)


TensorOrShape = TypeVar("TensorOrShape", Tensor, Shape)


def replace_dimensions(tensor_or_shape: TensorOrShape, old_dim_or_dims: Dims, new_dim_or_dims: Dims) -> TensorOrShape:
    """A tensor or a shape with neighbouring dims replaced by others of the same number of elements.

    Args:
      tensor_or_shape: a tensor or shape with the dims.
      old_dim_or_dims: consecutive dims, in this order.
      new_dim_or_dims: their replacement; a tensor is reshaped.
    Returns: a tensor for a tensor, a shape for a shape.
    Raises: ShapeError if they are not consecutive, or the tensor's number of elements would change.
    Example:
      >>> import meshlib as mtf
      >>> n, a, b, c = (mtf.Dimension(name, size) for name, size in (("n", 6), ("a", 2), ("b", 3), ("c", 4)))
      >>> print(mtf.replace_dimensions(mtf.Shape([n, c]), n, [a, b]))
      [a:2, b:3, c:4]
    """
    what = "replace_dimensions"
    old, new = as_dims(old_dim_or_dims, what), as_dims(new_dim_or_dims, what)
    if isinstance(tensor_or_shape, Shape):
        return Shape(_replaced(tensor_or_shape, old, new, what))
    dims = _replaced(tensor(tensor_or_shape, what).shape, old, new, what)
    if size_of(old) != size_of(new):
        raise ShapeError(
            f"{at(what)}: {', '.join(map(str, old))} have {size_of(old)} elements in all, but "
            f"{', '.join(map(str, new))} have {size_of(new)}; both must have as many",
            tensor_or_shape,
        )
    return reshape(tensor_or_shape, dims)


def _replaced(shape: Shape, old: Sequence[Dimension], new: Sequence[Dimension], what: str) -> tuple[Dimension, ...]:
    """The dims of a shape with consecutive ones replaced."""
    if not old or not new:
        raise ShapeError(f"{at(what)}: needs at least one old and one new dim")
    begin = shape.dims.index(old[0]) if old[0] in shape else 0
    if shape.dims[begin : begin + len(old)] != tuple(old):
        raise ShapeError(
            f"{at(what)}: the dims {', '.join(map(str, old))} do not follow one another in {shape}; "
            "transpose it with mtf.transpose first"
        )
    return as_dims([*shape.dims[:begin], *new, *shape.dims[begin + len(old) :]], what)


def combined_dimension(dims: Sequence[Dimension], name: str | None = None) -> Dimension:
    """A dim with the product of the sizes of `dims`, named `name` or like the first of them.

    >>> import meshlib as mtf
    >>> mtf.combined_dimension([mtf.Dimension("heads", 8), mtf.Dimension("d_head", 64)], "d_attention")
    Dimension('d_attention', 512)
    """
    parts = as_dims(dims, "combined_dimension")
    if not parts:
        raise ShapeError(f"{at('combined_dimension')}: needs at least one dim")
    return Dimension(parts[0].name if name is None else name, size_of(parts))


def anonymous_shape(shape: Shape | Sequence[Dimension]) -> Shape:
    """`shape` with dims renamed to names that no layout rule has: `_anonymous_0`, `_anonymous_1`, ...

    >>> import meshlib as mtf
    >>> print(mtf.anonymous_shape(mtf.Shape("batch:4;hidden:6")))
    [_anonymous_0:4, _anonymous_1:6]
    """
    return Shape([(f"_anonymous_{n}", d.size) for n, d in enumerate(as_dims(shape, "anonymous_shape"))])


def anonymize(x: Tensor) -> Tensor:
    """`x` with the dims of `anonymous_shape`, and so replicated on every core.

    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.anonymize(mtf.input("x", "d:4"))
      >>> print(mtf.simulate(mtf.lower({"y": y})).step(x=[3.0, 1.0, 2.0, 0.0])["y"])
      [3. 1. 2. 0.]
    """
    return reshape(x, anonymous_shape(tensor(x, "anonymize").shape))


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
      >>> import meshlib as mtf
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
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.unstack(mtf.input("x", "a:2;b:2"), mtf.Dimension("a", 2))[1]
      >>> print(mtf.simulate(mtf.lower({"y": y})).step(x=[[1.0, 2.0], [3.0, 4.0]])["y"])
      [3. 4.]
    """
    d = find_dim(tensor(x, "unstack"), dim, "unstack")
    return [gather(x, constant_like(n, x, "int32"), d, name=name) for n in np.arange(d.size).tolist()]
