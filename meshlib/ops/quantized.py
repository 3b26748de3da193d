"""Products in eight bits: both operands are quantised as they come, multiplied on the MXU and scaled back.

Each row of an operand along the dims that are summed over has a scale of its own, its largest magnitude over the
largest number of the grid. That takes a maximum over all of the row, over the cores that hold it too, so no layout
changes a result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hardware.eight_bit import LARGEST, round_to_eight_bits
from layouts import Dimension, Shape
from meshlib.checks import at, choice, items
from meshlib.dtypes import BFLOAT16, FLOAT32
from meshlib.errors import ShapeError
from meshlib.graph import Operation, Tensor, TensorType
from meshlib.operation import Array, Block, Kind, Work, operation
from meshlib.ops.building import as_dims, build, tensor
from meshlib.ops.einsum import EIGHT_BIT, EINSUM, product_of, product_of_blocks, sides_of
from meshlib.ops.elementwise import abs as magnitude
from meshlib.ops.elementwise import cast, greater, where
from meshlib.ops.reduce import reduce_max
from meshlib.ops.rules import align


def _local(block: Block, a: Array, b: Array, *scales: Array) -> Array:
    grid, names = block.attrs["precision"], [t.shape.names for t in block.inputs]
    held = (
        round_to_eight_bits(x / align(s, names[n + 2], names[n]), grid)
        for n, (x, s) in enumerate(zip((a, b), scales, strict=True))
    )
    out = product_of_blocks(block, *held)
    for n, s in enumerate(scales, start=2):
        np.multiply(out, align(s, names[n], block.out.shape.names), out=out)
    return out


def _grad(op: Operation, dy: Tensor) -> list[Tensor | None]:
    # Straight through: as if the operands had not been rounded. The cotangent's products are quantised as well.
    grid = op.attrs["precision"]
    return [*sides_of(op, lambda z, reached: quantized_einsum([dy, z], reached, grid), dy), None, None]


def _work(ins: tuple[TensorType, ...], out: TensorType, attrs: Mapping[str, Any]) -> Work:
    product = EINSUM.work(ins[:2], out, attrs)
    # Of each operand's elements division, rounding and limits; of the result's two factors.
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
) -> Tensor:
    """`einsum` of two tensors on the MXU in eight bits, both quantised as they come.

    With s_a = max over k of |A[b, k]| / m and s_b likewise, m = 127 (int8) or 448 (fp8), and q(x) the nearest number
    of the grid:  C[b, c] = s_a[b] s_b[c] * sum over k of q(A[b, k] / s_a[b]) q(B[k, c] / s_b[c])

    Args:
      inputs: two tensors of one float dtype.
      output_shape: dims of the result, in order; the others are summed over.
      dtype: "int8", or "fp8" (e4m3).
      name: of the operation, in listings.
    Returns: a tensor of the operands' dtype; products are exact, sums float32.
    Gradient: that of the product without rounding, whose own products are quantised in the same way.
    Cost: the MXU flops of `einsum` at the chip's rate for the dtype, vector work to quantise and scale, and two
      maxima, which are reduced over the cores that share a row.
    Raises: ShapeError as einsum, or for another number of tensors; GraphError for another dtype.
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
    operands = [tensor(x, "quantized_einsum") for x in items(inputs, "quantized_einsum", "inputs")]
    if len(operands) != 2:
        raise ShapeError(f"{at('quantized_einsum')}: takes two tensors, got {len(operands)}")
    out = Shape(as_dims(output_shape, "quantized_einsum output_shape"))
    for x in operands:
        if not x.dtype.is_float:
            raise ShapeError(f"{at('quantized_einsum')}: needs float operands, got {x}; cast it with mtf.cast")
    scales = [_scale(x, out, LARGEST[dtype]) for x in operands]
    return build(QUANTIZED, [*operands, *scales], {"shape": out, "precision": dtype}, name)


def _scale(x: Tensor, out: Shape, largest: float) -> Tensor:
    """What the numbers of the grid count in, one of each row of `x` along the dims that the result lacks."""
    found = reduce_max(magnitude(x), output_shape=Shape([d for d in x.shape if d in out]))
    wide = cast(found, FLOAT32) if x.dtype is BFLOAT16 else found
    return where(greater(wide, 0.0), wide / largest, 1.0)
