"""Element-wise operations of one, two and three tensors, broadcast by name; the sum of a list."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from layouts import Dimension, Shape
from meshlib.core import numerics
from meshlib.core.arguments import at, items
from meshlib.core.dtypes import BOOL
from meshlib.core.errors import ShapeError
from meshlib.core.graph import Operation, Tensor, TensorType
from meshlib.core.opdef import TRANSCENDENTAL_OPS, Array, Combination, Linear, OpDef, PowerProduct, ShapeRule
from meshlib.ops.building import as_tensor, build, not_differentiable, same_dtype, tensor, union
from meshlib.ops.pointwise.elementwise import (
    ANY,
    COMPARED,
    FLAG,
    FLAGS,
    FLOAT,
    FLOATS,
    INTEGERS,
    NUMBER,
    NUMBERS,
    ORDERED,
    Binary,
    Unary,
    broadcast_to,
    define,
    described,
    reduce_to,
)

Side = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
_EXAMPLES: dict[ShapeRule, tuple[str, list[tuple[Any, Any]]]] = {
    FLAGS: ("bool", [(True, True), (True, False)]),
    INTEGERS: ("int32", [(7, 2), (2, 3)]),
}
_WHOLE = "; a negative x2, or one above 31, moves all of them out; int32"


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


def _where_shape(types: tuple[TensorType, ...], attrs: Mapping[str, Any]) -> TensorType:
    condition, x, y = types
    if condition.dtype is not BOOL:
        raise ShapeError(f"the condition must be bool, got {condition.dtype.name}; compare first")
    return TensorType(union([x.shape, y.shape, condition.shape]), same_dtype([x, y]))


def _where_grad(op: Operation, dy: Tensor) -> list[Tensor | None]:
    condition, x, y = op.inputs
    return [None, reduce_to(where(condition, dy, 0.0), x.shape), reduce_to(where(condition, 0.0, dy), y.shape)]


def _where_into(condition: Array, x: Array, y: Array, out: Array) -> None:
    distinct = condition[tuple(np.s_[:1] if stride == 0 else np.s_[:] for stride in condition.strides)]
    if distinct.size < out.size and distinct.all():  # fast for a mask of whole blocks that hides nothing here
        np.copyto(out, x)
    else:
        np.copyto(out, np.where(condition, x, y))


WHERE = define(
    "where", _where_into, _where_grad, _where_shape, linear=lambda op: Linear((1, 2), together=True), exact=True
)


def where(
    condition: Tensor,
    if_true: Tensor | float,
    if_false: Tensor | float,
    output_shape: Shape | Sequence[Dimension] | None = None,
    name: str | None = None,
) -> Tensor:
    """`if_true` where `condition` (bool) holds, else `if_false`; all broadcast by name, then to `output_shape`.

    Two numbers make a float32 tensor. Values that are not chosen do not affect the result, even NaN and infinities.
    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.where(mtf.input("x", "d:2", "bool"), mtf.ones("d:2"), mtf.zeros("d:2"))
      >>> print(mtf.simulate(mtf.lower({"y": y})).step(x=[True, False])["y"])
      [1. 0.]
    """
    like = if_true if isinstance(if_true, Tensor) else if_false if isinstance(if_false, Tensor) else None
    if like is None and isinstance(condition, Tensor):
        from meshlib.ops.control.sources import constant_like

        like = constant_like(0, condition, "float32")
    operands = [tensor(condition, "where"), as_tensor(if_true, like, "where"), as_tensor(if_false, like, "where")]
    return broadcast_to(build(WHERE, operands, {}, name), output_shape)


def _binary(
    name: str,
    doc: str,
    function: Callable[..., Any],
    *sides: Side,
    note: str = "",
    ops: int = 1,
    shape: ShapeRule = NUMBERS,
    **traits: Any,
) -> Binary:
    """Define an operation; `sides(x1, x2, y, dy)` are the cotangents of x1 and x2, before they are summed down."""

    def grad(op: Operation, dy: Tensor) -> list[Tensor | None]:
        x1, x2 = op.inputs
        return [reduce_to(side(x1, x2, op.output, dy), x.shape) for side, x in zip(sides, op.inputs, strict=True)]

    kind = define(name, function, grad if sides else not_differentiable, shape, ops, **traits)

    def public(
        x1: Tensor | float,
        x2: Tensor | float,
        output_shape: Shape | Sequence[Dimension] | None = None,
        name: str | None = None,
    ) -> Tensor:
        like = x1 if isinstance(x1, Tensor) else x2 if isinstance(x2, Tensor) else None
        operands = [as_tensor(x, like, kind.name) for x in (x1, x2)]
        return broadcast_to(build(kind, operands, {}, name), output_shape)

    public.__name__ = public.__qualname__ = name
    of_one_dtype, pair = _EXAMPLES.get(shape, ("one dtype", [(7.0, 2.0), (2.0, 2.0)]))
    public.__doc__ = described(
        f"{doc}, broadcast by name{note}", name, function,
        dict(zip(("x1", "x2"), pair, strict=True)),
        f"  x1, x2: tensors of {of_one_dtype}, or one of them a number; dims are matched by name.\n"
        "  output_shape: the dims of the result in this order; by default those of x1, then the other dims of x2.",
    )  # fmt: skip
    return public


_compare = partial(_binary, note="; bool", shape=COMPARED)
_of_bits = partial(_binary, note="; int32", shape=INTEGERS, repeated=True)
_together: dict[str, Any] = {"linear": lambda op: Linear((0, 1), together=True), "repeated": True}

less = _compare("less", "x1 < x2", np.less)
less_equal = _compare("less_equal", "x1 <= x2", np.less_equal)
greater = _compare("greater", "x1 > x2", np.greater)
greater_equal = _compare("greater_equal", "x1 >= x2", np.greater_equal)
equal = _compare("equal", "x1 == x2", np.equal)
not_equal = _compare("not_equal", "x1 != x2", np.not_equal)
logical_and = _binary("logical_and", "x1 and x2", np.logical_and, note="; bool", shape=FLAGS)
logical_or = _binary("logical_or", "x1 or x2", np.logical_or, note="; bool", shape=FLAGS)
bitwise_and = _of_bits("bitwise_and", "The bits that are set in both operands", np.bitwise_and)
bitwise_or = _of_bits("bitwise_or", "The bits that are set in either operand", np.bitwise_or)
bitwise_xor = _of_bits("bitwise_xor", "The bits that are set in one operand alone", np.bitwise_xor)
left_shift = _of_bits("left_shift", "The bits of x1 moved up by x2", np.left_shift, note="; zeros from below" + _WHOLE)
right_shift = _of_bits(
    "right_shift", "The bits of x1 moved down by x2", np.right_shift, note="; copies of its sign from above" + _WHOLE
)
add = _binary(
    "add",
    "x1 + x2",
    np.add,
    lambda x1, x2, y, dy: dy,
    lambda x1, x2, y, dy: dy,
    form=lambda op: Combination((1.0, 1.0)),
    **_together,
)
subtract = _binary(
    "subtract",
    "x1 - x2",
    np.subtract,
    lambda x1, x2, y, dy: dy,
    lambda x1, x2, y, dy: -dy,
    form=lambda op: Combination((1.0, -1.0)),
    **_together,
)
sub = subtract  # Mesh TensorFlow's name
multiply = _binary(
    "multiply",
    "x1 * x2",
    np.multiply,
    lambda x1, x2, y, dy: dy * x2,
    lambda x1, x2, y, dy: dy * x1,
    linear=lambda op: Linear((0, 1)),
    form=lambda op: PowerProduct((1, 1)),
    repeated=True,
)
divide = _binary(
    "divide",
    "x1 / x2",
    np.divide,
    lambda x1, x2, y, dy: dy / x2,
    lambda x1, x2, y, dy: -(dy * y / x2),
    note="; float dtypes",
    ops=TRANSCENDENTAL_OPS,
    shape=FLOATS,
    linear=lambda op: Linear((0,)),
    form=lambda op: PowerProduct((1, -1)),
    repeated=True,
)
maximum = _binary(
    "maximum",
    "The larger",
    np.maximum,
    lambda x1, x2, y, dy: where(greater_equal(x1, x2), dy, 0.0),
    lambda x1, x2, y, dy: where(greater_equal(x1, x2), 0.0, dy),
    note="; at a tie the gradient goes to x1",
    shape=ORDERED,
    exact=True,
)
minimum = _binary(
    "minimum",
    "The smaller",
    np.minimum,
    lambda x1, x2, y, dy: where(less_equal(x1, x2), dy, 0.0),
    lambda x1, x2, y, dy: where(less_equal(x1, x2), 0.0, dy),
    note="; at a tie the gradient goes to x1",
    shape=ORDERED,
    exact=True,
)
pow: Binary = _binary(
    "pow",
    "x1 to the power x2",
    np.power,
    lambda x1, x2, y, dy: dy * x2 * pow(x1, x2 - 1),
    lambda x1, x2, y, dy: dy * y * log(where(greater(x1, 0), x1, 1)),
    note="; float dtypes",
    ops=2 * TRANSCENDENTAL_OPS,
    shape=FLOATS,
)
floordiv = _binary(
    "floordiv",
    "floor(x1 / x2)",
    np.floor_divide,
    note="; int32 stays int32; passes no gradient",
    ops=TRANSCENDENTAL_OPS,
)
mod = _binary(
    "mod",
    "x1 - x2 floor(x1 / x2)",
    np.mod,
    lambda x1, x2, y, dy: dy,
    lambda x1, x2, y, dy: -(dy * floordiv(x1, x2)),
    note="; of the sign of x2, as in Python",
    ops=TRANSCENDENTAL_OPS,
)


def _add_all(x: Array, y: Array, *more: Array, out: Array) -> None:
    np.add(x, y, out=out)
    for z in more:
        np.add(out, z, out=out)


# As much work as pairwise sums: one less than there are operands.
_ADD_N = define(
    "add_n",
    _add_all,
    lambda op, dy: [reduce_to(dy, x.shape) for x in op.inputs],
    NUMBERS,
    linear=lambda op: Linear(tuple(range(len(op.inputs))), together=True),
    form=lambda op: Combination((1.0,) * len(op.inputs)),
    overwrites=2,  # the others are read after the first sum is written
)


def add_n(xs: Sequence[Tensor], name: str | None = None) -> Tensor:
    """The sum of a list of tensors, broadcast by name. Pending sums among them are reduced once, together.

    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.add_n([mtf.input("x", "d:2"), mtf.ones("d:2"), mtf.ones("d:2")])
      >>> print(mtf.simulate(mtf.lower({"y": y})).step(x=[3.0, 4.0])["y"])
      [5. 6.]
    """
    xs = items(xs, "add_n", "xs")
    if not xs:
        raise ShapeError(f"{at('add_n')}: needs at least one tensor, got an empty list")
    if len(xs) == 1:
        return tensor(xs[0], "add_n")
    return build(_ADD_N, [tensor(x, "add_n") for x in xs], {}, name)


def squared_difference(
    x1: Tensor | float,
    x2: Tensor | float,
    output_shape: Shape | Sequence[Dimension] | None = None,
    name: str | None = None,
) -> Tensor:
    """(x1 - x2)^2, broadcast by name.

    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.squared_difference(mtf.input("x", "d:2"), 1.0)
      >>> print(mtf.simulate(mtf.lower({"y": y})).step(x=[3.0, 4.0])["y"])
      [4. 9.]
    """
    return square(subtract(x1, x2, output_shape), name)


def clip_by_value(
    x: Tensor, clip_value_min: Tensor | float, clip_value_max: Tensor | float, name: str | None = None
) -> Tensor:
    """`x`, but at least `clip_value_min` and at most `clip_value_max`, broadcast by name; gradient 1 at both bounds.

    Raises: ShapeError if both bounds are numbers and the lower one is the larger.
    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.clip_by_value(mtf.input("x", "d:2"), 0.0, 3.5)
      >>> print(mtf.simulate(mtf.lower({"y": y})).step(x=[3.0, 4.0])["y"])
      [3.  3.5]
    """
    like = tensor(x, "clip_by_value")
    low, high = (as_tensor(v, like, "clip_by_value") for v in (clip_value_min, clip_value_max))
    if not isinstance(clip_value_min, Tensor) and not isinstance(clip_value_max, Tensor):
        bounds = [v.operation.attrs["value"] for v in (low, high)]
        if bounds[0] > bounds[1]:
            raise ShapeError(f"{at('clip_by_value')}: clip_value_min is {bounds[0]}, but clip_value_max {bounds[1]}")
    return minimum(maximum(x, low), high, name=name)
