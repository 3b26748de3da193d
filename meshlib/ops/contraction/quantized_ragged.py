"""Grouped products in eight bits: sorted rows and the matrix of each group are quantised dynamically.

Scales are per row, and per column of each group's matrix, as in `quantized_einsum`. In the gradient of the matrices,
which sums over rows, scales are per column of both operands, shared by all groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hardware.eight_bit import LARGEST, round_to_eight_bits
from layouts import Dimension, Shape
from meshlib.core.arguments import choice, whole
from meshlib.core.graph import Operation, Tensor, TensorType
from meshlib.core.opdef import Array, Block, Kind, Work, operation
from meshlib.ops.building import build
from meshlib.ops.contraction.einsum import EIGHT_BIT
from meshlib.ops.contraction.quantized import scale_of
from meshlib.ops.contraction.ragged import RAGGED_DOT, checked_operands, filled_share, product_by_name, segments
from meshlib.ops.pointwise.binary import subtract
from meshlib.ops.pointwise.cumulative import cumsum
from meshlib.ops.rules import align, reducing_factors

GRADIENTS = {"int8": ("int8",), "fp8": ("fp8", "fp8_e5m2")}


def _local(block: Block, a: Array, b: Array, a_scale: Array, b_scale: Array, begins: Array, ends: Array) -> Array:
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


def _grad(op: Operation, dy: Tensor) -> list[Tensor | None]:
    # straight-through, as in quantized_einsum
    a, b, _, _, begins, ends = op.inputs
    grid, of_gradient = op.attrs["precision"], op.attrs["gradient"]

    def side(other: Tensor, wanted: Tensor) -> Tensor:
        attrs = {**op.attrs, "shape": wanted.shape, "grids": (of_gradient, grid)}
        return _quantized(dy, other, begins, ends, attrs)

    return [side(b, a), side(a, b), None, None, None, None]


def _work(ins: tuple[TensorType, ...], out: TensorType, attrs: Mapping[str, Any]) -> Work:
    product = RAGGED_DOT.work(ins, out, attrs)
    quantising = 3 * sum(t.shape.size for t in ins[:2]) + 2 * out.shape.size  # as in quantized_einsum
    return Work(product.mxu_flops, product.vpu_ops + quantising)


QUANTIZED_RAGGED = operation(
    "quantized_ragged_dot",
    kind=Kind.CONTRACTION,
    shape=RAGGED_DOT.shape,
    roles=reducing_factors,
    local=_local,
    grad=_grad,
    work=_work,
    product=RAGGED_DOT.product,
    read_share=RAGGED_DOT.read_share,
)


def _quantized(
    a: Tensor, b: Tensor, begins: Tensor, ends: Tensor, attrs: Mapping[str, Any], name: str | None = None
) -> Tensor:
    """The product of operands quantised to the grids of `attrs`; the first has the rows."""
    kept_dims = {*attrs["shape"].names, attrs["groups"]}
    scales = [
        scale_of(x, Shape([d for d in x.shape if d.name in kept_dims]), LARGEST[grid])
        for x, grid in zip((a, b), attrs["grids"], strict=True)
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
    name: str | None,
) -> Tensor:
    """`quantized_ragged_dot` of operands already checked; further arguments as in `grouped_product`."""
    ends = cumsum(sizes, groups)
    attrs = {
        "shape": out, "rows": rows.name, "groups": groups.name, "count": count, "filled": filled, "draws": draws,
        "precision": dtype, "grids": (dtype, dtype), "gradient": gradient_dtype,
    }  # fmt: skip
    return _quantized(x, w, subtract(ends, sizes), ends, attrs, name)


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
    name: str | None = None,
) -> Tensor:
    """`ragged_dot` on the MXU in eight bits, both operands quantised dynamically.

    Args:
      x, w, sizes, rows, groups, output_shape, mean_rows, draws, name: as in `ragged_dot`.
      dtype, gradient_dtype: as in `quantized_einsum`.
    Returns: a tensor of the operands' dtype; products are exact, sums float32.
    Gradient: that of the product without rounding; its products are quantised in the same way.
    Cost: the MXU flops of `ragged_dot` at the chip's rate for the dtype, vector work to quantise and scale, and two
      maxima, which are reduced over the devices that share a row.
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
    return quantized_grouped_product(x, w, sizes, row, group, out, share, drawn, group.size, dtype, of_gradient, name)
