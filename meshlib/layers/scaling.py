"""Scaling of activations and gradients: unit-scale products, clipped gradients."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from layouts import Dimension, Shape
from meshlib.core.arguments import at, number
from meshlib.core.errors import ShapeError
from meshlib.core.graph import Tensor
from meshlib.layers.norms import widened
from meshlib.ops.building import floats
from meshlib.ops.contraction.einsum import einsum
from meshlib.ops.control.custom_gradients import custom_gradient
from meshlib.ops.control.state import identity
from meshlib.ops.pointwise.binary import maximum, multiply
from meshlib.ops.pointwise.casts import cast
from meshlib.ops.pointwise.reductions import reduce_mean
from meshlib.ops.pointwise.unary import sqrt, square


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
