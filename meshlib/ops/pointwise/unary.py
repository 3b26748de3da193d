"""Element-wise operations of one tensor: exp, sqrt, tanh, relu, sin, logical_not and the like."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from meshlib.core import numerics
from meshlib.core.graph import Tensor
from meshlib.core.opdef import TRANSCENDENTAL_OPS, Array, Linear, OpDef, PowerProduct, ShapeRule
from meshlib.ops.building import build, tensor
from meshlib.ops.pointwise.elementwise import ANY, FLAG, FLOAT, NUMBER, Unary, define, described
from meshlib.ops.rules import not_differentiable


def unary(
    name: str,
    doc: str,
    function: Callable[..., Any],
    slope: Callable[[Tensor, Tensor, Tensor], Tensor] | None,
    ops: int = 1,
    shape: ShapeRule = FLOAT,
    **traits: Any,
) -> Unary:
    """Define an operation; `slope(x, y, dy)` is the cotangent of x, None: passes no gradient."""
    grad = not_differentiable if slope is None else lambda op, dy: [slope(op.inputs[0], op.output, dy)]
    kind = define(name, function, grad, shape, ops, **traits)

    def public(x: Tensor, name: str | None = None) -> Tensor:
        return build(kind, [tensor(x, kind.name)], {}, name)

    public.__name__ = public.__qualname__ = name
    dtypes = {FLOAT: "a float dtype", FLAG: "bool"}.get(shape, "a number's dtype")
    signed = shape is NUMBER or traits.get("exact")
    operand: tuple[object, ...] = (True, False) if shape is FLAG else (-1.5, 2.5) if signed else (0.25, 1.0)
    public.__doc__ = described(
        f"{doc}; float dtypes" if shape is FLOAT else doc, name, function, {"x": operand}, f"  x: any shape, {dtypes}."
    )
    return public


def _sigmoid(x: Array, out: Array) -> None:
    # Exact to the last bits in both tails, unlike (1 + tanh(x/2)) / 2; where e^-x overflows the result is 0.
    np.negative(x, out=out)
    np.exp(out, out=out)
    np.add(out, out.dtype.type(1), out=out)
    np.reciprocal(out, out=out)


def _rsqrt(x: Array, out: Array) -> None:
    np.sqrt(x, out=out)
    np.reciprocal(out, out=out)


def _relu(x: Array, out: Array) -> None:
    np.maximum(x, x.dtype.type(0), out=out)


# The derivative of relu as one operation: computed from the output instead of a stored mask.
_RELU_GRAD: OpDef = define(
    "relu_grad",
    lambda dy, y, out: np.multiply(dy, np.greater(y, 0), out=out),
    lambda op, dz: [build(_RELU_GRAD, [dz, op.inputs[1]], {}), None],
    ANY,
    ops=2,
    linear=lambda op: Linear((0,)),
    repeated=True,
    exact=True,
)

_curve = partial(unary, ops=TRANSCENDENTAL_OPS)
_wave = partial(unary, ops=5 * TRANSCENDENTAL_OPS)  # the argument is reduced to half a period first
_of_numbers = partial(unary, shape=NUMBER)

negative: Unary = _of_numbers(
    "negative",
    "-x",
    np.negative,
    lambda x, y, dy: -dy,
    linear=lambda op: Linear((0,)),
    form=lambda op: PowerProduct((1,), -1.0),
    repeated=True,
    exact=True,
)
exp = _curve("exp", "e to the power x", np.exp, lambda x, y, dy: dy * y)
log = _curve("log", "Natural logarithm", np.log, lambda x, y, dy: dy / x)
sqrt = _curve("sqrt", "Square root", np.sqrt, lambda x, y, dy: dy * 0.5 / y)
rsqrt = _curve("rsqrt", "1 / sqrt(x)", _rsqrt, lambda x, y, dy: dy * y * y * y * -0.5)
square = _of_numbers("square", "x * x", np.square, lambda x, y, dy: dy * x * 2, form=lambda op: PowerProduct((2,)))
reciprocal = _curve(
    "reciprocal", "1 / x", np.reciprocal, lambda x, y, dy: -(dy * y * y), form=lambda op: PowerProduct((-1,))
)
expm1 = _curve("expm1", "exp(x) - 1, exact for small x too", np.expm1, lambda x, y, dy: dy * (y + 1.0))
log1p = _curve("log1p", "log(1 + x), exact for small x too", np.log1p, lambda x, y, dy: dy / (x + 1.0))
erf = unary(
    "erf",
    "Error function, 2 / sqrt(pi) times the integral of exp(-t^2) from 0 to x",
    numerics.erf,
    lambda x, y, dy: dy * (2 / math.sqrt(math.pi)) * exp(-square(x)),
    ops=2 * TRANSCENDENTAL_OPS,  # two polynomials and a division
)
floor = unary("floor", "The largest integer <= x; passes no gradient", np.floor, None, exact=True)
ceil = unary("ceil", "The smallest integer >= x; passes no gradient", np.ceil, None, exact=True)
round = unary("round", "The nearest integer, halves to even; passes no gradient", np.rint, None, exact=True)
tanh = _curve("tanh", "Hyperbolic tangent", np.tanh, lambda x, y, dy: dy * (1.0 - y * y))
sigmoid = _curve("sigmoid", "1 / (1 + exp(-x))", _sigmoid, lambda x, y, dy: dy * y * (1.0 - y))
relu = unary("relu", "max(x, 0); gradient 0 at 0", _relu, lambda x, y, dy: build(_RELU_GRAD, [dy, y], {}), exact=True)
sign = _of_numbers("sign", "-1, 0 or 1; passes no gradient", np.sign, None, exact=True)
abs = _of_numbers("abs", "Absolute value; gradient 0 at 0", np.absolute, lambda x, y, dy: dy * sign(x), exact=True)
sin = _wave("sin", "Sine of radians", np.sin, lambda x, y, dy: dy * cos(x))
cos: Unary = _wave("cos", "Cosine of radians", np.cos, lambda x, y, dy: -(dy * sin(x)))
logical_not = unary("logical_not", "not x; bool", np.logical_not, None, shape=FLAG)
