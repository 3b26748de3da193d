"""einsum by dim names, the operation of the MXU; matmul and products of several operands are built from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np

from hardware.exact_products import OperandCache
from hardware.numerics import round_to_eight_bits
from layouts import Dimension, Shape
from meshlib.core.arguments import at, choice, items
from meshlib.core.dtypes import FLOAT32, INT32, DType, as_dtype
from meshlib.core.errors import ShapeError
from meshlib.core.graph import Operation, Tensor, TensorType
from meshlib.core.opdef import (
    NONLINEAR,
    Array,
    Block,
    Form,
    Kind,
    Linear,
    PowerProduct,
    Product,
    Total,
    Work,
    operation,
)
from meshlib.ops.building import as_dims, build, mxu_passes, reducing_factors, same_dtype, tensor, union

Names = tuple[str, ...]

EIGHT_BIT = ("int8", "fp8")
PRECISIONS = ("default", "highest", *EIGHT_BIT)


@dataclass(frozen=True)
class MatmulPlan:
    """A binary einsum as one batched matmul: the batch, row, contracted and column dims."""

    summed_a: Names  # dims of a alone that the result lacks: summed first
    summed_b: Names
    batch: Names
    rows: Names
    contracted: Names
    columns: Names
    swapped: bool  # operands exchanged to give the result its dim order


@lru_cache(maxsize=65536)
def matmul_plan(a: Names, b: Names, out: Names) -> MatmulPlan:
    """The classes of the dims of `a` and `b`, with the order of operands that avoids transposing the result."""
    here = {"a": {*a}, "b": {*b}, "out": {*out}}

    def only_in(names: Names, *holders: str) -> Names:
        return tuple([n for n in names if [h for h in here if n in here[h]] == [*holders]])

    batch, contracted = only_in(out, "a", "b", "out"), only_in(a, "a", "b")
    rows, columns = only_in(out, "a", "out"), only_in(out, "b", "out")
    summed_a, summed_b = only_in(a, "a"), only_in(b, "b")
    if out == batch + columns + rows and out != batch + rows + columns:
        return MatmulPlan(summed_b, summed_a, batch, columns, contracted, rows, True)
    return MatmulPlan(summed_a, summed_b, batch, rows, contracted, columns, False)


def _arrange(x: Array, names: Names, summed: Names, groups: Sequence[Names]) -> Array:
    """`x` with each group of dims merged into one axis, after summing over `summed`."""
    axes, orders, flat = _arrangement(names, summed, tuple(groups))
    if axes:
        x = np.add.reduce(x, axis=axes)
    sizes = x.shape
    if flat:
        x = x.transpose(flat)
    return x.reshape([prod([sizes[n] for n in order]) for order in orders])


@lru_cache(maxsize=65536)
def _arrangement(
    names: Names, summed: Names, groups: tuple[Names, ...]
) -> tuple[tuple[int, ...], list[list[int]], list[int]]:
    """The axes to sum over, the remaining axes of each group, and the permutation they need (empty: none)."""
    rest = [n for n in names if n not in summed]
    orders = [[rest.index(n) for n in group] for group in groups]
    flat = [n for order in orders for n in order]
    return tuple(names.index(n) for n in summed), orders, [] if flat == sorted(flat) else flat


def _local(block: Block, a: Array, b: Array) -> Array:
    precision = block.attrs["precision"]
    if a.dtype == np.int8:
        return _product_of_bytes(block, a, b)
    if precision in EIGHT_BIT:
        return product_of_blocks(block, *(round_to_eight_bits(x, precision) for x in (a, b)))
    precise = precision == "highest"
    engine = block.engine
    return product_of_blocks(block, *(engine.shared_operand(x, precise) for x in (a, b)), operands=engine.operands)


def _product_of_bytes(block: Block, a: Array, b: Array) -> Array:
    """The product of int8 and int4 operands, exact modulo 2^32: float64 represents sums of up to 2^39 products."""
    wide = block._replace(buffer=np.empty(block.out.shape.sizes))
    wide_product = product_of_blocks(wide, a.astype(np.float64), b.astype(np.float64))
    out = block.result()
    np.copyto(out, wide_product.astype(np.int64), casting="unsafe")
    return out


def product_of_blocks(block: Block, a: Array, b: Array, *, operands: OperandCache | None = None) -> Array:
    """The product of the blocks of the first two operands, rounded as for the MXU, in the result's array.

    `operands`: shared by devices, of arrays that do not change while an instruction runs.
    """
    x, y, *_ = block.inputs
    out_names = block.out.shape.names
    plan = matmul_plan(x.shape.names, y.shape.names, out_names)
    engine = block.engine
    a_names, b_names = x.shape.names, y.shape.names
    if plan.swapped:
        a, b, a_names, b_names = b, a, b_names, a_names
    left = _arrange(a, a_names, plan.summed_a, (plan.batch, plan.rows, plan.contracted))
    right = _arrange(b, b_names, plan.summed_b, (plan.batch, plan.contracted, plan.columns))
    natural = plan.batch + plan.rows + plan.columns
    shape = (left.shape[0], left.shape[1], right.shape[2])
    if natural == out_names:
        out = block.result()
        engine.matmul(left, right, out.reshape(shape), operands)
        return out
    sizes = {d.name: d.size for d in block.out.shape}
    temporary = np.empty(shape, left.dtype)
    engine.matmul(left, right, temporary, operands)
    unmerged = temporary.reshape([sizes[n] for n in natural])
    out = block.result()
    np.copyto(out, unmerged.transpose([natural.index(n) for n in out_names]))
    return out


def _shape(types: tuple[TensorType, ...], attrs: Mapping[str, Any]) -> TensorType:
    dtype = _dtype_of_product(types, attrs["precision"])
    _check_dims(types, attrs["shape"])
    wanted = attrs.get("dtype") or dtype
    if not (wanted.is_wide_float if dtype.is_float else wanted is INT32):
        remedy = (
            "a float dtype to compute in" if dtype.is_float else "int32, as every sum of integers is; cast it after"
        )
        raise ShapeError(f"the result's dtype must be {remedy}, got {wanted.name}")
    return TensorType(attrs["shape"], wanted)


def _dtype_of_product(types: Sequence[TensorType], precision: str) -> DType:
    """The dtype of the result for these operands, unless one is requested."""
    dtypes = [t.dtype for t in types]
    narrow = all(t.is_float and not t.computes for t in dtypes), all(t.is_narrow_integer for t in dtypes)
    if any(narrow):
        if precision != "default":
            raise ShapeError(
                f"precision {precision!r} is for operands that the vector unit computes in, got {dtypes[0].name}; "
                "the MXU takes that as it is"
            )
        return FLOAT32 if narrow[0] else INT32
    dtype = same_dtype(types)
    if not dtype.is_wide_float:
        raise ShapeError(
            f"needs float operands (or int32 without a precision), got {dtype.name}; cast them with mtf.cast"
        )
    return dtype


def _check_dims(types: Sequence[TensorType], out: Shape) -> None:
    everything = union([t.shape for t in types])
    for d in out:
        if d.name not in everything:
            raise ShapeError(
                f"output dim '{d.name}' is in no operand; einsum can't invent it (mtf.broadcast adds dims)"
            )
        if everything.dim(d.name).size != d.size:
            raise ShapeError(
                f"output dim '{d.name}' has size {d.size}, but {everything.dim(d.name).size} in the operands"
            )


def _form(op: Operation) -> Form | None:
    if op.attrs["precision"] in EIGHT_BIT:
        return None
    sums = any(d not in op.output.shape for x in op.inputs for d in x.shape)
    return Total() if sums else PowerProduct((1, 1))


def _grad(op: Operation, dy: Tensor) -> list[Tensor | None]:
    from meshlib.ops.pointwise.casts import cast

    if not op.output.dtype.is_float:
        return [None, None]
    # Cotangents are not values of an eight-bit grid, so their product is computed in a wide type.
    precision = "highest" if op.attrs["precision"] == "highest" else "default"
    wide = op.inputs[0].dtype.of_cotangents
    dy = cast(dy, wide)
    return sides_of(op, lambda z, reached: einsum([dy, cast(z, wide)], output_shape=reached, precision=precision), dy)


def sides_of(op: Operation, product: Callable[[Tensor, Shape], Tensor], dy: Tensor) -> list[Tensor | None]:
    """The cotangents of both operands: `product` (the other operand, shape) multiplies it with dy."""
    from meshlib.ops.movement.shape import broadcast

    sides: list[Tensor | None] = []
    for this, other in ((0, 1), (1, 0)):
        x, z = op.inputs[this], op.inputs[other]
        # Dims of this operand alone were summed over: the cotangent is constant along them.
        reached = Shape([d for d in x.shape if d in dy.shape or d in z.shape])
        side = product(z, reached)
        sides.append(side if reached == x.shape else broadcast(side, x.shape))
    return sides


def _work(ins: tuple[TensorType, ...], out: TensorType, attrs: Mapping[str, Any]) -> Work:
    a, b = (t.shape for t in ins)
    plan = matmul_plan(a.names, b.names, out.shape.names)
    contracted = prod(a.dim(n).size for n in plan.contracted)
    passes = mxu_passes(ins, attrs)
    others = {*out.shape.names}
    summed = sum(t.size for t, other in ((a, b), (b, a)) if {*t.names} - {*other.names} - others)
    return Work(2 * out.shape.size * contracted * passes, summed)


def product_of(ins: tuple[TensorType, ...], out: TensorType, attrs: Mapping[str, Any]) -> Product:
    """The sizes of the product on one device."""
    a, b = (t.shape for t in ins[:2])
    plan = matmul_plan(a.names, b.names, out.shape.names)
    sizes = {d.name: d.size for shape in (a, b) for d in shape}
    batch, rows, contracted, columns = (
        prod(sizes[n] for n in dims) for dims in (plan.batch, plan.rows, plan.contracted, plan.columns)
    )
    return Product(batch, rows, contracted, columns, swapped=plan.swapped)


EINSUM = operation(
    "einsum",
    kind=Kind.CONTRACTION,
    shape=_shape,
    roles=reducing_factors,
    local=_local,
    grad=_grad,
    linear=lambda op: NONLINEAR if op.attrs["precision"] in EIGHT_BIT else Linear((0, 1)),  # pending sums are rounded
    form=_form,
    work=_work,
    product=product_of,
)


def _operands(xs: Sequence[Tensor]) -> list[Tensor]:
    """The operands that a user gave: at least one."""
    if isinstance(xs, Tensor):
        raise ShapeError(f"{at('einsum')}: takes a list of tensors, got one tensor; write einsum([x, w], ...)")
    operands = [tensor(x, "einsum") for x in items(xs, "einsum", "xs")]
    if not operands:
        raise ShapeError(f"{at('einsum')}: needs at least one tensor, got an empty list")
    return operands


def _kept_dims(a: Tensor, b: Tensor, later: Sequence[Tensor], out: Shape) -> Shape:
    """The dims of the product of two operands that later ones or the result have."""
    if not later:
        return out
    wanted = {d.name for y in later for d in y.shape} | set(out.names)
    return Shape([d for d in union([a.shape, b.shape]) if d.name in wanted])


def einsum(
    xs: Sequence[Tensor],
    output_shape: Shape | Sequence[Dimension] | None = None,
    reduced_dims: Sequence[Dimension] | None = None,
    *,
    precision: str = "default",
    dtype: object | None = None,
    name: str | None = None,
) -> Tensor:
    """Multiply tensors, matching dims by name, and sum over every dim that is not in the output.

    A[b, k], B[k, c]  ->  C[b, c] = sum over k of A[b, k] * B[k, c]

    Args:
      xs: one or more tensors of one float dtype, or int32; for narrow types two, both int8 or int4, or both fp8. More
        than two are multiplied pairwise from the left.
      output_shape: dims of the result, in order; or
      reduced_dims: dims to sum over; the others stay in order of appearance. Without either, dims shared by several
        operands are summed over.
      precision: "default" rounds float32 operands to bfloat16 for the MXU; "highest" keeps float32; "int8" and "fp8"
        (e4m3) round the operands to these grids, of which they should already be values. To quantise with scales, see
        `quantized_einsum`.
      dtype: dtype of the result, a float dtype for float operands; sums are rounded to it.
      name: of the operation, in listings.
    Returns: a tensor of `dtype`, by default that of the operands; float32 for fp8, int32 for int8 and int4. Products
      are exact and sums float32; for integers both are exact modulo 2^32.
    Gradient: bfloat16 for fp8 operands, from products in bfloat16; none for integers.
    Cost: 2 x (product of all dims) MXU flops for two operands, at the chip's rate for narrow types. int32 products run
      on the vector unit, with one operation per product and per sum.
    Raises: ShapeError if sizes clash, an output dim is in no operand, or dtypes differ.
    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     x = mtf.zeros([mtf.Dimension("batch", 8), mtf.Dimension("inner", 4)])
      ...     w = mtf.zeros([mtf.Dimension("inner", 4), mtf.Dimension("outer", 2)])
      >>> print(mtf.einsum([x, w], reduced_dims=[mtf.Dimension("inner", 4)]).shape)
      [batch:8, outer:2]
    """
    given: object = xs
    if isinstance(given, str):
        raise ShapeError(
            f"{at('einsum')}: dims go by name; write mtf.einsum([x, w], output_shape=...), not {given!r:.80}"
        )
    operands = _operands(xs)
    choice(precision, "einsum", "precision", PRECISIONS)
    result_dtype = None if dtype is None else as_dtype(dtype)
    out = _output_shape(operands, output_shape, reduced_dims)
    if len(operands) == 1:
        from meshlib.ops.pointwise.casts import cast
        from meshlib.ops.pointwise.reductions import reduce_sum

        summed = reduce_sum(operands[0], output_shape=out, name=name)
        return summed if result_dtype is None else cast(summed, result_dtype)
    integers = all(x.dtype is INT32 for x in operands) and precision not in EIGHT_BIT
    if integers and result_dtype in (None, INT32):
        try:
            _check_dims([x.type for x in operands], out)
        except ShapeError as fault:
            raise ShapeError(f"{at('einsum')}: {fault}", *operands) from None
    result = operands[0]
    for i, x in enumerate(operands[1:], start=2):
        keep = _kept_dims(result, x, operands[i:], out)
        if integers:
            result = _product_of_integers(result, x, keep, name)
        else:
            attrs = {"shape": keep, "precision": precision}
            result = build(
                EINSUM, [result, x], attrs if result_dtype is None else {**attrs, "dtype": result_dtype}, name
            )
    return result


def _product_of_integers(a: Tensor, b: Tensor, shape: Shape, name: str | None) -> Tensor:
    from meshlib.ops.pointwise.arithmetic import multiply
    from meshlib.ops.pointwise.reductions import reduce_sum

    a, b = (reduce_sum(x, output_shape=[d for d in x.shape if d in z.shape or d in shape]) for x, z in ((a, b), (b, a)))
    if set(a.shape) | set(b.shape) == set(shape):
        return multiply(a, b, shape, name)
    return reduce_sum(multiply(a, b), output_shape=shape, name=name)


def _output_shape(
    xs: Sequence[Tensor], output_shape: Shape | Sequence[Dimension] | None, reduced_dims: Sequence[Dimension] | None
) -> Shape:
    if output_shape is not None and reduced_dims is not None:
        raise ShapeError(f"{at('einsum')}: give output_shape or reduced_dims, not both")
    if output_shape is not None:
        return Shape(as_dims(output_shape, "einsum output_shape", xs))
    try:
        everything = union([x.shape for x in xs])
    except ShapeError as fault:
        raise ShapeError(f"{at('einsum')}: {fault}", *xs) from None
    if reduced_dims is not None:
        dims = as_dims(reduced_dims, "einsum reduced_dims", xs)
        missing = [str(d) for d in dims if d not in everything]
        if missing:
            raise ShapeError(
                f"{at('einsum')}: reduced dims {', '.join(missing)} are in no operand; all dims: {everything}"
            )
        gone = {d.name for d in dims}
    else:
        gone = {d.name for d in everything if sum(d.name in x.shape for x in xs) > 1}
    return Shape([d for d in everything if d.name not in gone])


def matmul(
    a: Tensor,
    b: Tensor,
    output_shape: Shape | Sequence[Dimension] | None = None,
    reduced_dims: Sequence[Dimension] | None = None,
    *,
    precision: str = "default",
    dtype: object | None = None,
    name: str | None = None,
) -> Tensor:
    """`einsum` of two tensors.

    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.matmul(mtf.input("x", "a:2;b:2"), mtf.ones("b:2;c:1"))
      >>> print(mtf.simulate(mtf.lower({"y": y})).step(x=[[1.0, 2.0], [3.0, 4.0]])["y"])
      [[3.]
       [7.]]
    """
    return einsum([a, b], output_shape, reduced_dims, precision=precision, dtype=dtype, name=name)
