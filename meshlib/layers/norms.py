"""Layer norm, RMS norm, spectral norm, and scaling; statistics are float32, whatever the dtype of the input."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from layouts import Dimension, Shape
from meshlib.core import initializers
from meshlib.core.arguments import at, flag, items, number, whole
from meshlib.core.dtypes import FLOAT32, FLOAT64
from meshlib.core.errors import GraphError, ShapeError
from meshlib.core.graph import UPDATE, Operation, Tensor, find_dim, region, scope
from meshlib.layers.numerics import DEFAULT, Numerics, as_numerics
from meshlib.ops.building import as_dims, floats
from meshlib.ops.contraction.einsum import einsum
from meshlib.ops.control.custom_gradients import custom_gradient
from meshlib.ops.control.sources import variable
from meshlib.ops.control.state import assign, identity, stop_gradient, stored
from meshlib.ops.pointwise.arithmetic import add, maximum, multiply, rsqrt, sqrt, square
from meshlib.ops.pointwise.casts import cast
from meshlib.ops.pointwise.reductions import reduce_mean, reduce_sum


def widened(x: Tensor) -> Tensor:
    """`x` in the dtype of statistics: float32, or float64 for float64."""
    return cast(x, FLOAT64 if x.dtype is FLOAT64 else FLOAT32)


def checked_norm(
    x: Tensor, dims: Dimension | Sequence[Dimension], epsilon: float, numerics: Numerics, what: str
) -> tuple[Tensor, tuple[Dimension, ...], float]:
    """The operand of a norm in the dtype of `numerics`, and the dims of its variables."""
    floats(x, what)
    norm_dims = tuple(
        find_dim(x, d, what) for d in ([dims] if isinstance(dims, Dimension) else items(dims, what, "dims"))
    )
    if not norm_dims:
        raise ShapeError(f"{at(what)}: needs at least one dim, got none", x)
    if number(epsilon, what, "epsilon") < 0:
        raise ShapeError(f"{at(what)}: epsilon must not be negative, got {epsilon}")
    return as_numerics(numerics, what).cast(x), norm_dims, float(epsilon)


def layer_norm(
    x: Tensor,
    dim: Dimension,
    epsilon: float = 1e-6,
    use_bias: bool = True,
    numerics: Numerics = DEFAULT,
    name: str = "layer_norm",
) -> Tensor:
    """(x - mean) / sqrt(variance + epsilon) * scale + bias; mean and variance over `dim`.

    Args:
      x: float, with `dim`.
      dim: the normalised dim; if it is split, its two sums are reduced over the devices.
      epsilon: added to the variance.
      use_bias: whether there is a bias.
      numerics: dtypes of the variables and of the result.
      name: scope of `scale`, initially ones, and `bias`, initially zeros.
    Returns: the type of x, or that of `numerics`; all arithmetic is float32.
    Raises: GraphError if x lacks `dim`.
    Source: Ba et al., arXiv:1607.06450.
    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.layers.layer_norm(mtf.input("x", "d:2"), mtf.Dimension("d", 2))
      >>> print(mtf.simulate(mtf.lower({"y": y})).step(x=[1.0, 3.0])["y"].round(4))
      [-1.  1.]
    """
    x, (d, *_), epsilon = checked_norm(x, [dim], epsilon, numerics, "layer_norm")
    wide = widened(x)
    with scope(name):
        centred = wide - reduce_mean(wide, reduced_dim=d)
        y = centred * rsqrt(reduce_mean(square(centred), reduced_dim=d) + epsilon)
        y = multiply(y, numerics.variable("scale", [d], initializers.ones(), wide.dtype), x.shape)
        if flag(use_bias, "layer_norm", "use_bias"):
            y = add(y, numerics.variable("bias", [d], initializers.zeros(), wide.dtype))
        return cast(y, x.dtype)


def rms_norm(
    x: Tensor,
    dim: Dimension | Sequence[Dimension],
    epsilon: float = 1e-6,
    numerics: Numerics = DEFAULT,
    name: str = "rms_norm",
) -> Tensor:
    """x / sqrt(mean of x^2 over `dim`, or over several dims together, + epsilon) * scale.

    Other arguments, result and errors as in `layer_norm`. Source: Zhang and Sennrich, arXiv:1910.07467.
    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.layers.rms_norm(mtf.input("x", "d:2"), mtf.Dimension("d", 2))
      >>> print(mtf.simulate(mtf.lower({"y": y})).step(x=[1.0, 1.0])["y"].round(4))
      [1. 1.]
    """
    x, dims, epsilon = checked_norm(x, dim, epsilon, numerics, "rms_norm")
    wide = widened(x)
    other_dims = [d for d in wide.shape if d not in dims]
    with scope(name):
        y = wide * rsqrt(reduce_mean(square(wide), output_shape=other_dims) + epsilon)
        y = multiply(y, numerics.variable("scale", [*dims], initializers.ones(), wide.dtype), x.shape)
        return cast(y, x.dtype)


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


def us_einsum(
    xs: Sequence[Tensor],
    output_shape: Shape | Sequence[Dimension] | None = None,
    reduced_dims: Sequence[Dimension] | None = None,
    *,
    precision: str = "default",
    name: str | None = None,
) -> Tensor:
    """Unit-scaled `mtf.einsum`: divided by the root of the number of summed products, it preserves unit scale.

    Gradients are scaled by the same factor. In Mesh TensorFlow this holds if its unit-scaling convention is switched
    on.

    Args:
      xs, output_shape, reduced_dims, precision, name: as in `mtf.einsum`; float.
    Returns: the einsum / sqrt(product of the dims summed over).
    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     x, w = mtf.ones([mtf.Dimension("d", 16)]), mtf.ones([mtf.Dimension("d", 16), mtf.Dimension("k", 2)])
      ...     y = mtf.layers.us_einsum([x, w])
      >>> mtf.simulate(mtf.lower({"y": y})).step()["y"].tolist()  # 16 / sqrt(16)
      [4.0, 4.0]
    """
    inner = None if name is None else f"{name}/sum"
    y = einsum(xs, output_shape, reduced_dims, precision=precision, name=inner)
    if not y.dtype.is_wide_float:
        raise ShapeError(f"{at('us_einsum')}: needs float operands, got {y.dtype.name}; cast them with mtf.cast")
    everything = {d for x in xs for d in x.shape}
    summed = Shape([d for d in everything if d not in y.shape])
    return multiply(y, summed.size**-0.5, name=name)


def clip_activation_gradient(x: Tensor, rms_norm: float = 1.0, name: str | None = None) -> Tensor:
    """`x`, with its gradient scaled down to a root mean square of at most `rms_norm`.

    dx = dy * rms_norm / max(rms(dy), rms_norm)

    Args:
      x: float.
      rms_norm: positive; the mean is over all elements on all devices, computed in float32.
      name: name of the result.
    Returns: x.
    Raises: ShapeError if x is not float or rms_norm is not positive.
    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     x = mtf.input("x", [mtf.Dimension("d", 2)])
      ...     (dx,) = mtf.gradients([mtf.layers.clip_activation_gradient(x, 0.5) * 3.0], [x])
      >>> mtf.simulate(mtf.lower({"dx": dx})).step()["dx"].tolist()
      [0.5, 0.5]
    """
    what = "clip_activation_gradient"
    floats(x, what)
    limit = number(rms_norm, what, "rms_norm")
    if limit <= 0:
        raise ShapeError(f"{at(what)}: rms_norm must be positive, got {rms_norm}")
    clipped: Tensor = custom_gradient(lambda v: identity(v, name), partial(_clipped, limit), [x])
    return clipped


def _clipped(limit: float, inputs: Any, results: Any, cotangents: Sequence[Tensor]) -> list[Tensor]:
    # At module level, so that graphs with it can be pickled.
    (dy,) = cotangents
    rms = sqrt(reduce_mean(square(widened(dy)), output_shape=[]))
    return [multiply(dy, cast(limit / maximum(rms, limit), dy.dtype), dy.shape)]
