"""Products in eight bits, whole and grouped: operands are quantised, multiplied on the MXU and rescaled.

Each row of an operand along the contracted dims has its own scale: its largest magnitude divided by the largest value
of the grid. The maximum is taken over the whole row, across devices if it is split, so that no layout changes a result.
With a bound, no maximum is taken: the bound is divided by the largest value of the grid, and larger magnitudes are
clipped; cotangents keep their own scales. A grouped product has scales per row of the sorted operand, and per column of
each group's matrix; in the gradient of the matrices, which sums over rows, scales are per column of both operands,
shared by all groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hardware.numerics import LARGEST, round_to_eight_bits
from layouts import Dimension, Shape
from meshlib.core.arguments import POSITIVE, at, bounded, choice, items, whole
from meshlib.core.dtypes import BFLOAT16, BOOL, FLOAT32, as_dtype
from meshlib.core.errors import ShapeError
from meshlib.core.graph import Operation, Tensor, TensorType
from meshlib.core.opdef import Array, Block, Kind, Work, operation
from meshlib.ops.building import align, as_dims, build, floats, reducing_factors, tensor
from meshlib.ops.contraction.einsum import EIGHT_BIT, EINSUM, product_of, product_of_blocks, sides_of
from meshlib.ops.contraction.ragged import RAGGED_DOT, checked_operands, filled_share, product_by_name, segments
from meshlib.ops.control.sources import constant_shaped
from meshlib.ops.control.state import stop_gradient
from meshlib.ops.pointwise.arithmetic import abs as magnitude
from meshlib.ops.pointwise.arithmetic import equal, subtract, where
from meshlib.ops.pointwise.arithmetic import round as round_to_whole
from meshlib.ops.pointwise.casts import cast
from meshlib.ops.pointwise.cumulative import cumsum
from meshlib.ops.pointwise.reductions import reduce_max

Bounds = tuple[float | None, float | None]
GRADIENTS = {"int8": ("int8",), "fp8": ("fp8", "fp8_e5m2")}


def _local(block: Block, a: Array, b: Array, *scales: Array) -> Array:
    names = [t.shape.names for t in block.inputs]
    held = (
        round_to_eight_bits(x / align(s, names[n + 2], names[n]), grid)
        for n, (x, s, grid) in enumerate(zip((a, b), scales, block.attrs["grids"], strict=True))
    )
    out = product_of_blocks(block, *held)
    for n, s in enumerate(scales, start=2):
        np.multiply(out, align(s, names[n], block.out.shape.names), out=out)
    return out


def _grad(op: Operation, dy: Tensor) -> list[Tensor | None]:
    # Straight-through estimator: rounding has slope 1. The products of the gradient are quantised as well.
    grid, of_gradient = op.attrs["precision"], op.attrs["gradient"]
    grids, bounds = (of_gradient, grid), (None, op.attrs["bounds"][1])
    sides = sides_of(op, lambda z, reached: _quantized([dy, z], reached, grids, bounds, grid, of_gradient), dy)
    return [*sides, None, None]


def _work(ins: tuple[TensorType, ...], out: TensorType, attrs: Mapping[str, Any]) -> Work:
    product = EINSUM.work(ins[:2], out, attrs)
    # Division, rounding and clipping per operand element; two factors per result element.
    quantising = 3 * sum(t.shape.size for t in ins[:2]) + 2 * out.shape.size
    return Work(product.mxu_flops, product.vpu_ops + quantising)


QUANTIZED = operation(
    "quantized_einsum",
    kind=Kind.CONTRACTION,
    shape=lambda types, attrs: EINSUM.shape(types[:2], attrs),
    roles=EINSUM.roles,
    local=_local,
    grad=_grad,
    work=_work,
    product=product_of,
)


def quantized_einsum(
    inputs: Sequence[Tensor],
    output_shape: Shape | Sequence[Dimension],
    dtype: str = "int8",
    name: str | None = None,
    gradient_dtype: str | None = None,
    bound: float | None = None,
) -> Tensor:
    """`einsum` of two tensors on the MXU in eight bits.

    With s_a = max over k of |A[b, k]| / m and s_b likewise, m = 127 (int8), 448 (fp8) or 57344 (its gradients in e5m2),
    and q(x) the nearest value of the grid:
    C[b, c] = s_a[b] s_b[c] * sum over k of q(A[b, k] / s_a[b]) q(B[k, c] / s_b[c])

    Args:
      inputs: two tensors of one float dtype.
      output_shape: dims of the result, in order; other dims are summed over.
      dtype: "int8", or "fp8" (e4m3).
      name: of the operation, in listings.
      gradient_dtype: grid of the result's cotangent in the products of the gradient: `dtype`, or for "fp8" also
        "fp8_e5m2", which has less precision and a wider range.
      bound: the largest magnitude of both operands in place of their maxima: s_a = s_b = bound / m. Larger ones are
        clipped. The cotangent is quantised dynamically.
    Returns: a tensor of the operands' dtype; products are exact, sums float32.
    Gradient: that of the product without rounding; its products are quantised in the same way.
    Cost: the MXU flops of `einsum` at the chip's rate for the dtype, vector work to quantise and scale, and without a
      bound two maxima, which are reduced over the devices that share a row.
    Raises: ShapeError as `einsum`, or for a number of tensors other than two; GraphError for another dtype.
    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     k, one = mtf.Dimension("k", 3), mtf.Dimension("one", 1)
      ...     x, w = mtf.input("x", [k]), mtf.input("w", [k])
      ...     y = mtf.quantized_einsum([x, w], [])
      >>> float(mtf.simulate(mtf.lower({"y": y})).step(x=[127.0, 2.4, -3.0], w=[1.0, 127.0, 0.0])["y"])
      381.0

    Source: Abdelfattah et al., AQT, github.com/google/aqt; Micikevicius et al., FP8 formats for deep learning,
      arXiv:2209.05433.
    """
    choice(dtype, "quantized_einsum", "dtype", EIGHT_BIT)
    of_gradient = dtype if gradient_dtype is None else gradient_dtype
    choice(of_gradient, "quantized_einsum", "gradient_dtype", ("fp8", "fp8_e5m2") if dtype == "fp8" else (dtype,))
    operands = [tensor(x, "quantized_einsum") for x in items(inputs, "quantized_einsum", "inputs")]
    if len(operands) != 2:
        raise ShapeError(f"{at('quantized_einsum')}: takes two tensors, got {len(operands)}")
    out = Shape(as_dims(output_shape, "quantized_einsum output_shape", operands))
    for x in operands:
        if not x.dtype.is_wide_float:
            raise ShapeError(f"{at('quantized_einsum')}: needs float operands, got {x}; cast it with mtf.cast")
    return _quantized(
        operands, out, (dtype, dtype), (checked_bound(bound, "quantized_einsum"),) * 2, dtype, of_gradient, name
    )


def checked_bound(bound: float | None, what: str) -> float | None:
    """A bound of operands; GraphError unless it is a positive number or None."""
    return None if bound is None else bounded(bound, what, "bound", POSITIVE)


def _quantized(
    operands: Sequence[Tensor],
    out: Shape,
    grids: tuple[str, str],
    bounds: Bounds,
    dtype: str,
    of_gradient: str,
    name: str | None = None,
) -> Tensor:
    """The product of two operands quantised to `grids`, multiplied on the MXU as `dtype`."""
    scales = [
        scale_of(x, Shape([d for d in x.shape if d in out]), LARGEST[g], bound)
        for x, g, bound in zip(operands, grids, bounds, strict=True)
    ]
    attrs = {"shape": out, "precision": dtype, "grids": grids, "bounds": bounds, "gradient": of_gradient}
    return build(QUANTIZED, [*operands, *scales], attrs, name)


def scale_of(x: Tensor, scale_dims: Shape, largest: float, bound: float | None = None) -> Tensor:
    """The quantisation step of each row of `x` along the dims that `scale_dims` lacks; with a bound, of all."""
    if bound is not None:
        return constant_shaped(bound / largest, scale_dims, cast(x, FLOAT32) if x.dtype is BFLOAT16 else x)
    peak = reduce_max(magnitude(x), output_shape=scale_dims)
    wide = cast(peak, FLOAT32) if x.dtype is BFLOAT16 else peak
    return where(equal(wide, 0.0), 1.0, wide / largest)  # rows with a NaN have a NaN scale


def quantize(
    x: Tensor, reduced_dim: Dimension | Sequence[Dimension], dtype: object = "int8", name: str | None = None
) -> tuple[Tensor, Tensor]:
    """`x` quantised to a narrow type, with one scale per row along `reduced_dim`, such as per channel of a weight.

    scale[c] = max over r of |x[r, c]| / m,  q[r, c] = the nearest number of the type to x[r, c] / scale[c], where m is
    127 (int8), 7 (int4), 448 (e4m3) or 57344 (e5m2): cast(q, x.dtype) * scale is nearly `x`.

    Args:
      x: a float tensor.
      reduced_dim: the dim or dims whose elements share a scale: for a weight those that a product contracts.
      dtype: "int8", "int4", "float8_e4m3fn" or "float8_e5m2".
      name: name of the quantised values in listings.
    Returns: the values in `dtype` with the shape of `x`, and the scale in float32 (float64 for float64) with the other
      dims; it is 1 for rows of zeros, and NaN for rows with a NaN, whose values are unspecified.
    Gradient: for fp8 as without rounding and with a constant scale; none through integers.
    Cost: vector work, and a maximum that is reduced over the devices that share a row.
    Raises: ShapeError for another dtype, a tensor that is not float, or dims that it lacks.
    Example:
      >>> import numpy as np
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     d, f = mtf.Dimension("d", 2), mtf.Dimension("f", 2)
      ...     q, scale = mtf.quantize(mtf.constant(np.array([[1.0, 4.0], [-2.0, 1.0]]), [d, f]), d)
      >>> result = mtf.simulate(mtf.lower({"q": q, "scale": scale * 127})).step()
      >>> result["q"].tolist(), result["scale"].tolist()
      ([[64, 127], [-127, 32]], [2.0, 4.0])

    Source: symmetric per-channel quantisation: Jacob et al., arXiv:1712.05877; Nagel et al., arXiv:2106.08295.
    """
    narrow = as_dtype(dtype)
    floats(x, "quantize")
    if narrow.computes or narrow is BOOL:
        raise ShapeError(f"{at('quantize')}: dtype must be int8, int4, float8_e4m3fn or float8_e5m2, got {narrow.name}")
    dims = as_dims(reduced_dim, "quantize reduced_dim", [x])
    missing = [str(d) for d in dims if d not in x.shape]
    if missing:
        raise ShapeError(f"{at('quantize')}: reduced dims {', '.join(missing)} are not in {x}")
    scale = stop_gradient(scale_of(x, Shape([d for d in x.shape if d not in dims]), narrow.largest))
    units = cast(x, scale.dtype) / scale
    return cast(units if narrow.is_float else round_to_whole(units), narrow, name), scale


def _grouped_local(
    block: Block, a: Array, b: Array, a_scale: Array, b_scale: Array, begins: Array, ends: Array
) -> Array:
    """Per group: quantise, multiply, rescale."""
    attrs, out = block.attrs, block.result()
    out[...] = 0
    names = [t.shape.names for t in (*block.inputs[:4], block.out)]
    arrays = (a, b, a_scale, b_scale)
    for place, group, rows in segments(block, begins, ends):
        chosen: dict[str, Any] = {**place, attrs["groups"]: group, attrs["rows"]: rows}
        where = [tuple(chosen.get(name, np.s_[:]) for name in of) for of in names]
        left = [tuple(n for n in of if not isinstance(chosen.get(n), int)) for of in names]
        x, y, *scales = (array[index] for array, index in zip(arrays, where, strict=False))
        x, y = (
            round_to_eight_bits(z / align(s, left[n + 2], left[n]), grid)
            for n, (z, s, grid) in enumerate(zip((x, y), scales, attrs["grids"], strict=True))
        )
        y = product_by_name(block.engine, x, y, left[0], left[1], left[4])
        for n, s in enumerate(scales, start=2):
            y = y * align(s, left[n], left[4])
        out[where[4]] += y
    return out


def _grouped_grad(op: Operation, dy: Tensor) -> list[Tensor | None]:
    # straight-through, as in quantized_einsum
    a, b, _, _, begins, ends = op.inputs
    grid, of_gradient = op.attrs["precision"], op.attrs["gradient"]

    def side(other: Tensor, wanted: Tensor) -> Tensor:
        bounds = (None, op.attrs["bounds"][1])
        attrs = {**op.attrs, "shape": wanted.shape, "grids": (of_gradient, grid), "bounds": bounds}
        return _grouped(dy, other, begins, ends, attrs)

    return [side(b, a), side(a, b), None, None, None, None]


def _grouped_work(ins: tuple[TensorType, ...], out: TensorType, attrs: Mapping[str, Any]) -> Work:
    product = RAGGED_DOT.work(ins, out, attrs)
    quantising = 3 * sum(t.shape.size for t in ins[:2]) + 2 * out.shape.size  # as in quantized_einsum
    return Work(product.mxu_flops, product.vpu_ops + quantising)


QUANTIZED_RAGGED = operation(
    "quantized_ragged_dot",
    kind=Kind.CONTRACTION,
    shape=RAGGED_DOT.shape,
    roles=reducing_factors,
    local=_grouped_local,
    grad=_grouped_grad,
    work=_grouped_work,
    product=RAGGED_DOT.product,
    read_share=RAGGED_DOT.read_share,
)


def _grouped(
    a: Tensor, b: Tensor, begins: Tensor, ends: Tensor, attrs: Mapping[str, Any], name: str | None = None
) -> Tensor:
    """The product of operands quantised to the grids of `attrs`; the first has the rows."""
    kept_dims = {*attrs["shape"].names, attrs["groups"]}
    scales = [
        scale_of(x, Shape([d for d in x.shape if d.name in kept_dims]), LARGEST[grid], bound)
        for x, grid, bound in zip((a, b), attrs["grids"], attrs["bounds"], strict=True)
    ]
    return build(QUANTIZED_RAGGED, [a, b, *scales, begins, ends], attrs, name)


def quantized_grouped_product(
    x: Tensor,
    w: Tensor,
    sizes: Tensor,
    rows: Dimension,
    groups: Dimension,
    out: Shape,
    filled: float,
    draws: int | None,
    count: int,
    dtype: str,
    gradient_dtype: str,
    bound: float | None,
    name: str | None,
) -> Tensor:
    """`quantized_ragged_dot` of operands already checked; further arguments as in `grouped_product`."""
    ends = cumsum(sizes, groups)
    attrs = {
        "shape": out, "rows": rows.name, "groups": groups.name, "count": count, "filled": filled, "draws": draws,
        "precision": dtype, "grids": (dtype, dtype), "bounds": (bound, bound), "gradient": gradient_dtype,
    }  # fmt: skip
    return _grouped(x, w, subtract(ends, sizes), ends, attrs, name)


def quantized_ragged_dot(
    x: Tensor,
    w: Tensor,
    sizes: Tensor,
    rows: Dimension | str,
    groups: Dimension | str,
    output_shape: Shape | Sequence[Dimension] | None = None,
    *,
    dtype: str = "int8",
    gradient_dtype: str | None = None,
    mean_rows: float | None = None,
    draws: int | None = None,
    bound: float | None = None,
    name: str | None = None,
) -> Tensor:
    """`ragged_dot` on the MXU in eight bits.

    Args:
      x, w, sizes, rows, groups, output_shape, mean_rows, draws, name: as in `ragged_dot`.
      dtype, gradient_dtype, bound: as in `quantized_einsum`.
    Returns: a tensor of the operands' dtype; products are exact, sums float32.
    Gradient: that of the product without rounding; its products are quantised in the same way.
    Cost: the MXU flops of `ragged_dot` at the chip's rate for the dtype, vector work to quantise and scale, and without
      a bound two maxima, which are reduced over the devices that share a row.
    Raises: ShapeError for dims that do not fit; GraphError for another dtype.
    Example:
      >>> import meshlib as mtf
      >>> rows, groups, d = mtf.Dimension("rows", 3), mtf.Dimension("groups", 2), mtf.Dimension("d", 2)
      >>> with mtf.Graph():
      ...     x, w = mtf.input("x", [rows, d]), mtf.input("w", [groups, d])
      ...     y = mtf.quantized_ragged_dot(x, w, mtf.input("sizes", [groups], "int32"), rows, groups)
      >>> step = mtf.simulate(mtf.lower({"y": y})).step
      >>> y = step(x=[[127.0, 2.4], [1.0, 1.0], [127.0, -2.6]], w=[[1.0, 0.0], [0.0, 127.0]], sizes=[2, 1])["y"]
      >>> y.round(3).tolist()
      [127.0, 1.0, -381.0]

    Source: as for `ragged_dot` and `quantized_einsum`.
    """
    what = "quantized_ragged_dot"
    choice(dtype, what, "dtype", EIGHT_BIT)
    of_gradient = dtype if gradient_dtype is None else choice(gradient_dtype, what, "gradient_dtype", GRADIENTS[dtype])
    row, group, out = checked_operands(what, x, w, sizes, rows, groups, output_shape)
    share = filled_share(what, row, mean_rows)
    drawn = None if draws is None else whole(draws, what, "draws", low=1)
    largest = checked_bound(bound, what)
    return quantized_grouped_product(
        x, w, sizes, row, group, out, share, drawn, group.size, dtype, of_gradient, largest, name
    )
