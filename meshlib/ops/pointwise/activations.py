"""Activation functions: softplus as an operation, others composed of operations, with gradients of any order."""

from __future__ import annotations

import math

import numpy as np

from meshlib.core.arguments import flag, number
from meshlib.core.graph import Tensor
from meshlib.core.opdef import TRANSCENDENTAL_OPS, Array
from meshlib.ops.building import floats
from meshlib.ops.pointwise.arithmetic import add, erf, expm1, minimum, multiply, relu, sigmoid, tanh, unary

# Source: Klambauer et al., "Self-normalizing neural networks" (arXiv:1706.02515), in float64: they make mean 0 and
# variance 1 a fixed point.
_SELU_ALPHA = 1.6732632423543772
_SELU_SCALE = 1.0507009873554805


def _softplus(x: Array, out: Array) -> None:
    np.logaddexp(x, x.dtype.type(0), out=out)


# A separate record, because relu(x) + log(1 + exp(-|x|)) loses the slope at 0.
softplus = unary(
    "softplus",
    "log(1 + exp(x)), without overflow",
    _softplus,
    lambda x, y, dy: dy * sigmoid(x),
    ops=2 * TRANSCENDENTAL_OPS,
)


def swish(x: Tensor, name: str | None = None) -> Tensor:
    """x sigmoid(x); float dtypes. Source: Ramachandran et al., arXiv:1710.05941.

    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.swish(mtf.input("x", "d:2"))
      >>> print(mtf.simulate(mtf.lower({"y": y})).step(x=[-1.0, 2.0])["y"].round(4))
      [-0.2689  1.7616]
    """
    return multiply(floats(x, "swish"), sigmoid(x), name=name)


def silu(x: Tensor, name: str | None = None) -> Tensor:
    """x sigmoid(x), an alias of `swish`; float dtypes. Source: Elfwing et al., arXiv:1702.03118.

    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.silu(mtf.input("x", "d:2"))
      >>> print(mtf.simulate(mtf.lower({"y": y})).step(x=[-1.0, 2.0])["y"].round(4))
      [-0.2689  1.7616]
    """
    return multiply(floats(x, "silu"), sigmoid(x), name=name)


def gelu(x: Tensor, approximate: bool = True, name: str | None = None) -> Tensor:
    """x times the normal distribution function of x; float dtypes.

    With `approximate`, as Mesh TensorFlow has it, x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), which is off by up
    to 5e-4; else x/2 (1 + erf(x / sqrt(2))).
    Source: Hendrycks and Gimpel, arXiv:1606.08415.
    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.gelu(mtf.input("x", "d:2"))
      >>> print(mtf.simulate(mtf.lower({"y": y})).step(x=[-1.0, 2.0])["y"].round(4))
      [-0.1588  1.9546]
    """
    x = floats(x, "gelu")
    rough = flag(approximate, "gelu", "approximate")
    bent = tanh((x + x * x * x * 0.044715) * math.sqrt(2 / math.pi)) if rough else erf(x * math.sqrt(0.5))
    return multiply(x, (bent + 1.0) * 0.5, name=name)


def elu(x: Tensor, name: str | None = None) -> Tensor:
    """x where x > 0, else exp(x) - 1; slope 1 at 0; float dtypes. Source: Clevert et al., arXiv:1511.07289.

    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.elu(mtf.input("x", "d:2"))
      >>> print(mtf.simulate(mtf.lower({"y": y})).step(x=[-1.0, 2.0])["y"].round(4))
      [-0.6321  2.    ]
    """
    return add(relu(floats(x, "elu")), expm1(minimum(x, 0.0)), name=name)


def selu(x: Tensor, name: str | None = None) -> Tensor:
    """s x where x > 0, else s a (exp(x) - 1), with s = 1.0507 and a = 1.6733; float dtypes.

    Source: Klambauer et al., arXiv:1706.02515.
    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.selu(mtf.input("x", "d:2"))
      >>> print(mtf.simulate(mtf.lower({"y": y})).step(x=[-1.0, 2.0])["y"].round(4))
      [-1.1113  2.1014]
    """
    bent = relu(floats(x, "selu")) + expm1(minimum(x, 0.0)) * _SELU_ALPHA
    return multiply(bent, _SELU_SCALE, name=name)


def leaky_relu(x: Tensor, alpha: float = 0.2, name: str | None = None) -> Tensor:
    """x where x > 0, else alpha x; slope alpha at 0; float dtypes.

    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.leaky_relu(mtf.input("x", "d:2"))
      >>> print(mtf.simulate(mtf.lower({"y": y})).step(x=[-1.0, 2.0])["y"].round(4))
      [-0.2  2. ]
    """
    alpha = number(alpha, "leaky_relu", "alpha")
    return add(relu(floats(x, "leaky_relu")), minimum(x, 0.0) * alpha, name=name)
