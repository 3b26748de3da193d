"""Layer norm and RMS norm; statistics are float32, whatever the dtype of the input."""

from __future__ import annotations

from collections.abc import Sequence

from layouts import Dimension
from meshlib.core import initializers
from meshlib.core.arguments import at, flag, items, number
from meshlib.core.dtypes import FLOAT32, FLOAT64
from meshlib.core.errors import ShapeError
from meshlib.core.graph import Tensor, find_dim, scope
from meshlib.layers.numerics import DEFAULT, Numerics, as_numerics
from meshlib.ops.building import floats
from meshlib.ops.pointwise.binary import add, multiply
from meshlib.ops.pointwise.casts import cast
from meshlib.ops.pointwise.reductions import reduce_mean
from meshlib.ops.pointwise.unary import rsqrt, square


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
