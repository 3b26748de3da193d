"""Spectral norm: weights divided by their largest singular value, tracked by power iteration from step to step."""

from __future__ import annotations

from collections.abc import Sequence

from layouts import Dimension, Shape
from meshlib.core import initializers
from meshlib.core.arguments import at, flag, number, whole
from meshlib.core.errors import GraphError, ShapeError
from meshlib.core.graph import UPDATE, Operation, Tensor, find_dim, region, scope
from meshlib.layers.norms import widened
from meshlib.ops.building import as_dims, floats
from meshlib.ops.contraction.einsum import einsum
from meshlib.ops.control.sources import variable
from meshlib.ops.control.state import assign, stop_gradient, stored
from meshlib.ops.pointwise.binary import maximum, multiply
from meshlib.ops.pointwise.casts import cast
from meshlib.ops.pointwise.reductions import reduce_sum
from meshlib.ops.pointwise.unary import sqrt, square


def spectral_norm(
    weights: Tensor,
    output_dims: Dimension | Sequence[Dimension],
    is_training: bool,
    iterations: int = 1,
    epsilon: float = 1e-12,
    name: str = "spectral_norm",
) -> tuple[Tensor, list[Operation]]:
    """weights / sigma, with sigma the largest singular value of the matrix [all other dims, output_dims].

    v = weights u / |weights u|,  u = weights^T v / |weights^T v|,  sigma = v^T weights u: u is a variable, so that one
    iteration per step tracks the slowly changing weights. No gradient flows through u and v.

    Args:
      weights: float, usually a variable.
      output_dims: the columns, the output channels of a kernel.
      is_training: whether u is updated; otherwise sigma is computed from the stored u.
      iterations: at least 1.
      epsilon: lower bound of norms in divisions.
      name: scope of the untrained variable `u`, with dims output_dims.
    Returns: the type of weights, and the updates of u, empty unless training. The products run in float32; if the
      weights are split, two vectors and a number are reduced over the devices, not the weights.
    Raises: ShapeError if output_dims are empty or all dims; GraphError for dims that weights lack.
    Source: Miyato et al., arXiv:1802.05957, algorithm 1.
    Example:
      >>> import meshlib as mtf
      >>> rows, cols = mtf.Dimension("rows", 2), mtf.Dimension("cols", 2)
      >>> import numpy as np
      >>> with mtf.Graph():
      ...     given = mtf.variable("given", [rows, cols], np.diag([4.0, 1.0]))
      ...     w, updates = mtf.layers.spectral_norm(given, cols, True, 9)
      >>> mtf.simulate(mtf.lower({"w": w}, updates)).step()["w"].round(3).tolist()
      [[1.0, 0.0], [0.0, 0.25]]
    """
    what = "spectral_norm"
    wide = widened(floats(weights, what))
    columns = Shape([find_dim(weights, d, what) for d in as_dims(output_dims, what)])
    rows = Shape([d for d in weights.shape if d not in columns])
    if not len(columns) or not len(rows):
        raise ShapeError(f"{at(what)}: output_dims must be some of the dims, not none or all", weights)
    count, least = whole(iterations, what, "iterations"), number(epsilon, what, "epsilon")
    if count < 1 or least <= 0:
        raise GraphError(f"{at(what)}: iterations must be at least 1, epsilon positive, got {count} and {least:g}")

    def unit(x: Tensor) -> Tensor:
        return x * (1 / maximum(sqrt(reduce_sum(square(x))), least))

    def product(x: Tensor, y: Tensor, dims: Shape) -> Tensor:
        return einsum([x, y], output_shape=dims, precision="highest")

    with scope(name):
        u_variable = variable("u", columns, initializers.random_normal(0.0, 1.0), wide.dtype, trainable=False)
        still, u = stop_gradient(wide), u_variable
        for _ in range(count):
            v = unit(product(still, u, rows))
            u = unit(product(still, v, columns))
        sigma = reduce_sum(multiply(product(wide, stop_gradient(u), rows), stop_gradient(v)))
        y = cast(wide * (1 / sigma), weights.dtype)
        if not flag(is_training, what, "is_training"):
            return y, []
        with region(UPDATE, stored(u_variable)):
            return y, [assign(u_variable, stop_gradient(u))]
