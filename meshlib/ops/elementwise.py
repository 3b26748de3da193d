"""Element-wise operations: unary, binary with broadcasting by name, comparisons, where, casts, add_n."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from layouts import Dimension, Shape
from meshlib import special
from meshlib.checks import at, items
from meshlib.dtypes import BOOL, DType, as_dtype
from meshlib.errors import GraphError, ShapeError
from meshlib.graph import Operation, Tensor, TensorType
from meshlib.operation import (
    EVERY,
    NONLINEAR,
    Array,
    Block,
    GradRule,
    Home,
    Kind,
    Linear,
    OpDef,
    Work,
    align,
    as_tensor,
    build,
    named_factors,
    not_differentiable,
    operation,
    same_dtype,
    tensor,
    union,
)

# Lane operations per element. Arithmetic takes one; transcendental functions are short polynomials or
# table look-ups with refinement in the vector unit. Modelled, not published: see `Work`.
TRANSCENDENTAL_OPS = 8

Builder = Callable[..., Tensor]


def _work(ops_per_element: int) -> Callable[..., Work]:
    def work(ins: tuple[TensorType, ...], out: TensorType, attrs: Mapping[str, Any]) -> Work:
        return Work(0, ops_per_element * max(1, len(ins) - 1) * out.shape.size)

    return work


def _aligned(block: Block, arrays: Sequence[Array]) -> list[Array]:
    to = block.out.shape.names
    return [align(x, t.shape.names, to) for x, t in zip(arrays, block.inputs, strict=True)]


def reduce_to(dy: Tensor, shape: Shape) -> Tensor:
    """The cotangent of an operand that was broadcast: sum over the dims it lacks."""
    from meshlib.ops.reduce import reduce_sum

    return dy if dy.shape == shape else reduce_sum(dy, output_shape=shape)


def define_unary(
    name: str,
    function: Callable[..., Any],
    grad: GradRule,
    *,
    ops: int = 1,
    linear: Linear = NONLINEAR,
    dtypes: str = "float",
    out_dtype: DType | None = None,
    **traits: Any,
) -> OpDef:
    def shape(types: tuple[TensorType, ...], attrs: Mapping[str, Any]) -> TensorType:
        (x,) = types
        if (dtypes == "float" and not x.dtype.is_float) or (dtypes == "bool") != (x.dtype is BOOL):
            raise ShapeError(f"needs a {dtypes} operand, got {x.dtype.name}; cast it with mtf.cast")
        return TensorType(x.shape, out_dtype or x.dtype)

    def local(block: Block, x: Array) -> Array:
        out = block.result()
        function(x, out=out)
        return out

    return operation(
        name,
        kind=Kind.ELEMENTWISE,
        shape=shape,
        roles=named_factors,
        local=local,
        grad=grad,
        linear=lambda op: linear,
        work=_work(ops),
        overwrites=EVERY,
        **traits,
    )


def _sigmoid(x: Array, out: Array) -> None:
    # Both branches without overflow: 1/(1+e^-x) = (1 + tanh(x/2)) / 2.
    np.multiply(x, x.dtype.type(0.5), out=out)
    np.tanh(out, out=out)
    np.add(out, out.dtype.type(1), out=out)
    np.multiply(out, out.dtype.type(0.5), out=out)


def _rsqrt(x: Array, out: Array) -> None:
    np.sqrt(x, out=out)
    np.reciprocal(out, out=out)


def _relu(x: Array, out: Array) -> None:
    np.maximum(x, x.dtype.type(0), out=out)


def unary_builder(kind: OpDef, doc: str) -> Callable[..., Tensor]:
    def function(x: Tensor, name: str | None = None) -> Tensor:
        return build(kind, [tensor(x, kind.name)], {}, name)

    function.__name__ = function.__qualname__ = kind.name
    function.__doc__ = doc
    return function


_NEGATIVE = define_unary(
    "negative",
    np.negative,
    lambda op, dy: [negative(dy)],
    linear=Linear((0,)),
    dtypes="number",
    repeated=True,
    exact=True,
)
_EXP = define_unary("exp", np.exp, lambda op, dy: [dy * op.output], ops=TRANSCENDENTAL_OPS)
_LOG = define_unary("log", np.log, lambda op, dy: [dy / op.inputs[0]], ops=TRANSCENDENTAL_OPS)
_SQRT = define_unary("sqrt", np.sqrt, lambda op, dy: [dy * 0.5 / op.output], ops=TRANSCENDENTAL_OPS)
_RSQRT = define_unary(
    "rsqrt", _rsqrt, lambda op, dy: [dy * op.output * op.output * op.output * -0.5], ops=TRANSCENDENTAL_OPS
)
_SQUARE = define_unary("square", np.square, lambda op, dy: [dy * op.inputs[0] * 2], dtypes="number")
_RECIPROCAL = define_unary(
    "reciprocal", np.reciprocal, lambda op, dy: [negative(dy * op.output * op.output)], ops=TRANSCENDENTAL_OPS
)
_TANH = define_unary("tanh", np.tanh, lambda op, dy: [dy * (1.0 - op.output * op.output)], ops=TRANSCENDENTAL_OPS)
_SIGMOID = define_unary(
    "sigmoid", _sigmoid, lambda op, dy: [dy * op.output * (1.0 - op.output)], ops=TRANSCENDENTAL_OPS
)
_RELU = define_unary("relu", _relu, lambda op, dy: [build(_RELU_GRAD, [dy, op.output], {})], exact=True)
_EXPM1 = define_unary("expm1", np.expm1, lambda op, dy: [dy * (op.output + 1.0)], ops=TRANSCENDENTAL_OPS)
_ERF = define_unary(
    "erf",
    special.erf,
    lambda op, dy: [dy * (2 / math.sqrt(math.pi)) * exp(negative(square(op.inputs[0])))],
    ops=2 * TRANSCENDENTAL_OPS,  # two polynomials and a division
)
_FLOOR = define_unary("floor", np.floor, not_differentiable, exact=True)
_CEIL = define_unary("ceil", np.ceil, not_differentiable, exact=True)
_ROUND = define_unary("round", np.rint, not_differentiable, exact=True)
_ABS = define_unary("abs", np.absolute, lambda op, dy: [dy * sign(op.inputs[0])], dtypes="number", exact=True)
_SIGN = define_unary("sign", np.sign, not_differentiable, dtypes="number", exact=True)
_SIN = define_unary("sin", np.sin, lambda op, dy: [dy * cos(op.inputs[0])], ops=TRANSCENDENTAL_OPS)
_COS = define_unary("cos", np.cos, lambda op, dy: [negative(dy * sin(op.inputs[0]))], ops=TRANSCENDENTAL_OPS)
_NOT = define_unary("logical_not", np.logical_not, not_differentiable, dtypes="bool")

negative: Builder = unary_builder(_NEGATIVE, "-x.")
exp: Builder = unary_builder(_EXP, "e to the power x; float dtypes.")
log: Builder = unary_builder(_LOG, "Natural logarithm; float dtypes.")
sqrt: Builder = unary_builder(_SQRT, "Square root; float dtypes.")
rsqrt: Builder = unary_builder(_RSQRT, "1 / sqrt(x); float dtypes.")
square: Builder = unary_builder(_SQUARE, "x * x.")
reciprocal: Builder = unary_builder(_RECIPROCAL, "1 / x; float dtypes.")
expm1: Builder = unary_builder(_EXPM1, "exp(x) - 1, exact for small x too; float dtypes.")
erf: Builder = unary_builder(
    _ERF, "Error function, 2 / sqrt(pi) times the integral of exp(-t^2) from 0 to x; float dtypes."
)
floor: Builder = unary_builder(_FLOOR, "The largest integer <= x; passes no gradient; float dtypes.")
ceil: Builder = unary_builder(_CEIL, "The smallest integer >= x; passes no gradient; float dtypes.")
round: Builder = unary_builder(_ROUND, "The nearest integer, halves to even; passes no gradient; float dtypes.")
tanh: Builder = unary_builder(_TANH, "Hyperbolic tangent; float dtypes.")
sigmoid: Builder = unary_builder(_SIGMOID, "1 / (1 + exp(-x)); float dtypes.")
relu: Builder = unary_builder(_RELU, "max(x, 0); gradient 0 at 0; float dtypes.")
abs: Builder = unary_builder(_ABS, "Absolute value; gradient 0 at 0.")
sign: Builder = unary_builder(_SIGN, "-1, 0 or 1; passes no gradient.")
sin: Builder = unary_builder(_SIN, "Sine of radians; float dtypes.")
cos: Builder = unary_builder(_COS, "Cosine of radians; float dtypes.")
logical_not: Builder = unary_builder(_NOT, "not x; bool.")


def _binary_shape(types: tuple[TensorType, ...], attrs: Mapping[str, Any]) -> TensorType:
    return TensorType(attrs.get("shape") or union([t.shape for t in types]), same_dtype(types))


def _arithmetic_shape(types: tuple[TensorType, ...], attrs: Mapping[str, Any]) -> TensorType:
    out = _binary_shape(types, attrs)
    if out.dtype is BOOL:
        raise ShapeError("needs numbers, got bool; cast them, or use mtf.logical_and, mtf.logical_or")
    return out


def _float_shape(types: tuple[TensorType, ...], attrs: Mapping[str, Any]) -> TensorType:
    out = _binary_shape(types, attrs)
    if not out.dtype.is_float:
        raise ShapeError(f"needs float operands, got {out.dtype.name}; cast them with mtf.cast")
    return out


def _compare_shape(types: tuple[TensorType, ...], attrs: Mapping[str, Any]) -> TensorType:
    return TensorType(_binary_shape(types, attrs).shape, BOOL)


def _define_binary(
    name: str,
    function: Callable[..., Any],
    grad: GradRule,
    *,
    ops: int = 1,
    linear: Linear = NONLINEAR,
    shape: Callable[[tuple[TensorType, ...], Mapping[str, Any]], TensorType] = _arithmetic_shape,
    **traits: Any,
) -> OpDef:
    def local(block: Block, x: Array, y: Array) -> Array:
        x, y = _aligned(block, (x, y))
        out = block.result()
        function(x, y, out=out)
        return out

    return operation(
        name,
        kind=Kind.ELEMENTWISE,
        shape=shape,
        roles=named_factors,
        local=local,
        grad=grad,
        linear=lambda op: linear,
        work=_work(ops),
        overwrites=EVERY,
        **traits,
    )


def _broadcast(y: Tensor, output_shape: Shape | Sequence[Dimension] | None) -> Tensor:
    from meshlib.ops.shape import broadcast

    return y if output_shape is None else broadcast(y, output_shape)


def _binary_builder(kind: OpDef, doc: str) -> Callable[..., Tensor]:
    def function(
        x1: Tensor | float,
        x2: Tensor | float,
        output_shape: Shape | Sequence[Dimension] | None = None,
        name: str | None = None,
    ) -> Tensor:
        like = x1 if isinstance(x1, Tensor) else x2 if isinstance(x2, Tensor) else None
        operands = [as_tensor(x, like, kind.name) for x in (x1, x2)]
        return _broadcast(build(kind, operands, {}, name), output_shape)

    function.__name__ = function.__qualname__ = kind.name
    function.__doc__ = doc
    return function


def _divide(x: Array, y: Array, out: Array) -> None:
    np.divide(x, y, out=out)


def _grad_sides(left: Callable[..., Tensor], right: Callable[..., Tensor]) -> GradRule:
    def grad(op: Operation, dy: Tensor) -> list[Tensor | None]:
        x, y = op.inputs
        return [reduce_to(left(op, dy, x, y), x.shape), reduce_to(right(op, dy, x, y), y.shape)]

    return grad


def _zero_where(condition: Tensor, dy: Tensor, keep: bool) -> Tensor:
    return where(condition, dy, 0.0) if keep else where(condition, 0.0, dy)


_ADD = _define_binary(
    "add",
    np.add,
    _grad_sides(lambda op, dy, x, y: dy, lambda op, dy, x, y: dy),
    linear=Linear((0, 1), together=True),
    repeated=True,
)
_SUBTRACT = _define_binary(
    "subtract",
    np.subtract,
    _grad_sides(lambda op, dy, x, y: dy, lambda op, dy, x, y: negative(dy)),
    linear=Linear((0, 1), together=True),
    repeated=True,
)
_MULTIPLY = _define_binary(
    "multiply",
    np.multiply,
    _grad_sides(lambda op, dy, x, y: dy * y, lambda op, dy, x, y: dy * x),
    linear=Linear((0, 1)),
    repeated=True,
)
_DIVIDE = _define_binary(
    "divide",
    _divide,
    _grad_sides(lambda op, dy, x, y: dy / y, lambda op, dy, x, y: negative(dy * op.output / y)),
    ops=TRANSCENDENTAL_OPS,
    linear=Linear((0,)),
    shape=_float_shape,
    repeated=True,
)
_MAXIMUM = _define_binary(
    "maximum",
    np.maximum,
    _grad_sides(
        lambda op, dy, x, y: _zero_where(greater_equal(x, y), dy, True),
        lambda op, dy, x, y: _zero_where(greater_equal(x, y), dy, False),
    ),
    exact=True,
)
_MINIMUM = _define_binary(
    "minimum",
    np.minimum,
    _grad_sides(
        lambda op, dy, x, y: _zero_where(less_equal(x, y), dy, True),
        lambda op, dy, x, y: _zero_where(less_equal(x, y), dy, False),
    ),
    exact=True,
)
_POW = _define_binary(
    "pow",
    np.power,
    _grad_sides(
        lambda op, dy, x, y: dy * y * pow(x, y - 1),
        lambda op, dy, x, y: dy * op.output * log(where(greater(x, 0), x, 1)),
    ),
    ops=2 * TRANSCENDENTAL_OPS,
    shape=_float_shape,
)
_FLOORDIV = _define_binary("floordiv", np.floor_divide, not_differentiable, ops=TRANSCENDENTAL_OPS)
# The remainder of rounding towards minus infinity: x - y floor(x / y), of the sign of y.
_MOD = _define_binary(
    "mod",
    np.mod,
    _grad_sides(lambda op, dy, x, y: dy, lambda op, dy, x, y: negative(dy * floordiv(x, y))),
    ops=TRANSCENDENTAL_OPS,
)
_LESS = _define_binary("less", np.less, not_differentiable, shape=_compare_shape)
_LESS_EQUAL = _define_binary("less_equal", np.less_equal, not_differentiable, shape=_compare_shape)
_GREATER = _define_binary("greater", np.greater, not_differentiable, shape=_compare_shape)
_GREATER_EQUAL = _define_binary("greater_equal", np.greater_equal, not_differentiable, shape=_compare_shape)
_EQUAL = _define_binary("equal", np.equal, not_differentiable, shape=_compare_shape)
_NOT_EQUAL = _define_binary("not_equal", np.not_equal, not_differentiable, shape=_compare_shape)


def _logic_shape(types: tuple[TensorType, ...], attrs: Mapping[str, Any]) -> TensorType:
    out = _binary_shape(types, attrs)
    if out.dtype is not BOOL:
        raise ShapeError(f"needs bool operands, got {out.dtype.name}; compare first, as in mtf.greater(x, 0)")
    return out


_AND = _define_binary("logical_and", np.logical_and, not_differentiable, shape=_logic_shape)
_OR = _define_binary("logical_or", np.logical_or, not_differentiable, shape=_logic_shape)

add: Builder = _binary_builder(_ADD, "x1 + x2, broadcast by name.")
subtract: Builder = _binary_builder(_SUBTRACT, "x1 - x2, broadcast by name.")
multiply: Builder = _binary_builder(_MULTIPLY, "x1 * x2, broadcast by name.")
sub: Builder = subtract  # Mesh TensorFlow's name
divide: Builder = _binary_builder(_DIVIDE, "x1 / x2, broadcast by name; float dtypes.")
maximum: Builder = _binary_builder(_MAXIMUM, "The larger, broadcast by name; at a tie the gradient goes to x1.")
minimum: Builder = _binary_builder(_MINIMUM, "The smaller, broadcast by name; at a tie the gradient goes to x1.")
pow: Builder = _binary_builder(_POW, "x1 to the power x2, broadcast by name; float dtypes.")
floordiv: Builder = _binary_builder(
    _FLOORDIV, "floor(x1 / x2), broadcast by name; int32 stays int32; passes no gradient."
)
mod: Builder = _binary_builder(_MOD, "x1 - x2 floor(x1 / x2), of the sign of x2 as in Python; broadcast by name.")
less: Builder = _binary_builder(_LESS, "x1 < x2, broadcast by name; bool.")
less_equal: Builder = _binary_builder(_LESS_EQUAL, "x1 <= x2, broadcast by name; bool.")
greater: Builder = _binary_builder(_GREATER, "x1 > x2, broadcast by name; bool.")
greater_equal: Builder = _binary_builder(_GREATER_EQUAL, "x1 >= x2, broadcast by name; bool.")
equal: Builder = _binary_builder(_EQUAL, "x1 == x2, broadcast by name; bool.")
not_equal: Builder = _binary_builder(_NOT_EQUAL, "x1 != x2, broadcast by name; bool.")
logical_and: Builder = _binary_builder(_AND, "x1 and x2, broadcast by name; bool.")
logical_or: Builder = _binary_builder(_OR, "x1 or x2, broadcast by name; bool.")


def _relu_grad_local(block: Block, dy: Array, y: Array) -> Array:
    dy, y = _aligned(block, (dy, y))
    out = block.result()
    np.multiply(dy, np.greater(y, 0), out=out)
    return out


# The derivative of relu as one operation: no mask is kept, it is read off the output that is there anyway.
_RELU_GRAD: OpDef = operation(
    "relu_grad",
    kind=Kind.ELEMENTWISE,
    shape=_binary_shape,
    roles=named_factors,
    local=_relu_grad_local,
    grad=lambda op, dz: [build(_RELU_GRAD, [dz, op.inputs[1]], {}), None],
    linear=lambda op: Linear((0,)),
    work=_work(2),
    overwrites=EVERY,
    repeated=True,
    exact=True,
)


def _where_shape(types: tuple[TensorType, ...], attrs: Mapping[str, Any]) -> TensorType:
    condition, x, y = types
    if condition.dtype is not BOOL:
        raise ShapeError(f"the condition must be bool, got {condition.dtype.name}; compare first")
    return TensorType(union([x.shape, y.shape, condition.shape]), same_dtype([x, y]))


def _where_local(block: Block, condition: Array, x: Array, y: Array) -> Array:
    condition, x, y = _aligned(block, (condition, x, y))
    out = block.result()
    np.copyto(out, np.where(condition, x, y))
    return out


def _where_grad(op: Operation, dy: Tensor) -> list[Tensor | None]:
    condition, x, y = op.inputs
    return [
        None,
        reduce_to(where(condition, dy, 0.0), x.shape),
        reduce_to(where(condition, 0.0, dy), y.shape),
    ]


_WHERE = operation(
    "where",
    kind=Kind.ELEMENTWISE,
    shape=_where_shape,
    roles=named_factors,
    local=_where_local,
    grad=_where_grad,
    linear=lambda op: Linear((1, 2), together=True),
    work=_work(1),
    overwrites=EVERY,
    exact=True,
)


def where(
    condition: Tensor,
    if_true: Tensor | float,
    if_false: Tensor | float,
    output_shape: Shape | Sequence[Dimension] | None = None,
    name: str | None = None,
) -> Tensor:
    """`if_true` where `condition` (bool) holds, else `if_false`; all broadcast by name, then to `output_shape`.

    Two numbers make a float32 tensor. What is not chosen has no influence on the result, NaN and infinities included.
    """
    like = if_true if isinstance(if_true, Tensor) else if_false if isinstance(if_false, Tensor) else None
    if like is None and isinstance(condition, Tensor):
        from meshlib.ops.sources import constant_like

        like = constant_like(0, condition, "float32")
    operands = [
        tensor(condition, "where"),
        as_tensor(if_true, like, "where"),
        as_tensor(if_false, like, "where"),
    ]
    return _broadcast(build(_WHERE, operands, {}, name), output_shape)


def _cast_local(block: Block, x: Array) -> Array:
    out = block.result()
    np.copyto(out, x, casting="unsafe")
    return out


def _cast_linear(op: Operation) -> Linear:
    # Only a widening cast of floats commutes with a sum; a narrowing one would round each part.
    old, new = op.inputs[0].dtype, op.output.dtype
    return Linear((0,)) if old.is_float and new.is_float and new.itemsize >= old.itemsize else NONLINEAR


CAST = operation(
    "cast",
    kind=Kind.ELEMENTWISE,
    shape=lambda types, attrs: TensorType(types[0].shape, attrs["dtype"]),
    roles=named_factors,
    local=_cast_local,
    grad=lambda op, dy: [cast(dy, op.inputs[0].dtype) if op.inputs[0].dtype.is_float else None],
    linear=_cast_linear,
    work=_work(1),
    overwrites=EVERY,
    home=Home.OPERAND,  # so that gathers move the narrow type
    repeated=True,
)


def cast(x: Tensor, dtype: object, name: str | None = None) -> Tensor:
    """`x` as another dtype: float32 to bfloat16 rounds to nearest even, float to int32 cuts towards zero."""
    new = as_dtype(dtype)
    return x if tensor(x, "cast").dtype is new else build(CAST, [x], {"dtype": new}, name)


def to_float(x: Tensor, name: str | None = None) -> Tensor:
    """`x` as float32."""
    return cast(x, "float32", name)


def to_bfloat16(x: Tensor, name: str | None = None) -> Tensor:
    """`x` as bfloat16, rounded to nearest even."""
    return cast(x, "bfloat16", name)


def to_int32(x: Tensor, name: str | None = None) -> Tensor:
    """`x` as int32, cut towards zero."""
    return cast(x, "int32", name)


def _add_n_local(block: Block, *xs: Array) -> Array:
    aligned = _aligned(block, xs)
    out = block.result()
    np.add(aligned[0], aligned[1], out=out)
    for x in aligned[2:]:
        np.add(out, x, out=out)
    return out


_ADD_N = operation(
    "add_n",
    kind=Kind.ELEMENTWISE,
    shape=_arithmetic_shape,
    roles=named_factors,
    local=_add_n_local,
    grad=lambda op, dy: [reduce_to(dy, x.shape) for x in op.inputs],
    linear=lambda op: Linear(tuple(range(len(op.inputs))), together=True, terms=True),
    work=_work(1),
    overwrites=2,  # the others are read after the first sum is written
)


def add_n(xs: Sequence[Tensor], name: str | None = None) -> Tensor:
    """The sum of a list of tensors, broadcast by name. Pending sums among them are reduced once, together."""
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
    """(x1 - x2)^2, broadcast by name."""
    return square(subtract(x1, x2, output_shape), name)


def clip_by_value(
    x: Tensor, clip_value_min: Tensor | float, clip_value_max: Tensor | float, name: str | None = None
) -> Tensor:
    """`x`, but at least `clip_value_min` and at most `clip_value_max`, broadcast by name; gradient 1 at both bounds.

    Raises: ShapeError if both bounds are numbers and the lower one is the larger.
    """
    like = tensor(x, "clip_by_value")
    low, high = (as_tensor(v, like, "clip_by_value") for v in (clip_value_min, clip_value_max))
    if not isinstance(clip_value_min, Tensor) and not isinstance(clip_value_max, Tensor):
        bounds = [v.operation.attrs["value"] for v in (low, high)]
        if bounds[0] > bounds[1]:
            raise ShapeError(f"{at('clip_by_value')}: clip_value_min is {bounds[0]}, but clip_value_max {bounds[1]}")
    return minimum(maximum(x, low), high, name=name)


def _no_matmul(x: Tensor, y: object) -> Tensor:
    raise GraphError(
        f"{at('@')}: dims are matched by name, so it must be said which remain: mtf.einsum([x, y], output_shape=...)"
    )


def _swapped(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda x, y: function(y, x)


for _name, _function in {
    "__add__": add,
    "__radd__": _swapped(add),
    "__sub__": subtract,
    "__rsub__": _swapped(subtract),
    "__mul__": multiply,
    "__rmul__": _swapped(multiply),
    "__truediv__": divide,
    "__rtruediv__": _swapped(divide),
    "__floordiv__": floordiv,
    "__rfloordiv__": _swapped(floordiv),
    "__mod__": mod,
    "__rmod__": _swapped(mod),
    "__pow__": pow,
    "__rpow__": _swapped(pow),
    "__abs__": abs,
    "__invert__": logical_not,
    "__and__": logical_and,
    "__or__": logical_or,
    "__matmul__": _no_matmul,
    "__neg__": negative,
    "__lt__": less,
    "__le__": less_equal,
    "__gt__": greater,
    "__ge__": greater_equal,
}.items():
    setattr(Tensor, _name, _function)
