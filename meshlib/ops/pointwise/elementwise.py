"""Element-wise operations: unary, binary with broadcasting by name, comparisons, where, casts, add_n."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np

from layouts import Dimension, Shape
from meshlib.core import numerics
from meshlib.core.arguments import at, items
from meshlib.core.dtypes import BOOL, DType, as_dtype
from meshlib.core.errors import GraphError, ShapeError
from meshlib.core.graph import Operation, Tensor, TensorType
from meshlib.core.opdef import (
    EVERY,
    NONLINEAR,
    TRANSCENDENTAL_OPS,
    Array,
    Block,
    Combination,
    GradRule,
    Home,
    Kind,
    Linear,
    OpDef,
    PowerProduct,
    ShapeRule,
    Work,
    operation,
)
from meshlib.ops.building import as_tensor, build, tensor
from meshlib.ops.rules import align, named_factors, not_differentiable, same_dtype, union


class Unary(Protocol):
    """A public operation of one tensor."""

    def __call__(self, x: Tensor, name: str | None = None) -> Tensor: ...


class Binary(Protocol):
    """A public operation of two tensors, or of one and a number."""

    def __call__(
        self,
        x1: Tensor | float,
        x2: Tensor | float,
        output_shape: Shape | Sequence[Dimension] | None = None,
        name: str | None = None,
    ) -> Tensor: ...


def reduce_to(dy: Tensor, shape: Shape) -> Tensor:
    """The cotangent of an operand that was broadcast: sum over the dims it lacks."""
    from meshlib.ops.pointwise.reductions import reduce_sum

    return dy if dy.shape == shape else reduce_sum(dy, output_shape=shape)


def _shape(fits: Callable[[DType], bool], needed: str, result_dtype: DType | None = None) -> ShapeRule:
    """All dims of the operands; their dtype, which must fit, or `result_dtype`."""

    def shape(types: tuple[TensorType, ...], attrs: Mapping[str, Any]) -> TensorType:
        out, dtype = union([t.shape for t in types]), same_dtype(types)
        if not fits(dtype):
            raise ShapeError(f"needs {needed.format(dtype.name)}")
        return TensorType(out, result_dtype or dtype)

    return shape


_FLOAT = _shape(lambda dtype: dtype.is_wide_float, "a float operand, got {}; cast it with mtf.cast")
_NUMBER = _shape(lambda dtype: dtype.computes, "a number operand, got {}; cast it with mtf.cast")
_FLAG = _shape(lambda dtype: dtype is BOOL, "a bool operand, got {}; cast it with mtf.cast")
_FLOATS = _shape(lambda dtype: dtype.is_wide_float, "float operands, got {}; cast them with mtf.cast")
_NUMBERS = _shape(lambda dtype: dtype.computes, "numbers, got {}; cast them, or use mtf.logical_and, mtf.logical_or")
_ORDERED = _shape(lambda dtype: dtype is not BOOL, "numbers, got {}; use mtf.logical_and, mtf.logical_or")
_FLAGS = _shape(lambda dtype: dtype is BOOL, "bool operands, got {}; compare first, as in mtf.greater(x, 0)")
_ANY = _shape(lambda dtype: True, "")
_COMPARED = _shape(lambda dtype: True, "", result_dtype=BOOL)


def _define(
    name: str, function: Callable[..., Any], grad: GradRule, shape: ShapeRule, ops: int = 1, **traits: Any
) -> OpDef:
    """`function` takes the operands' blocks, broadcast by name, and `out`; `ops` are its lane operations."""

    def local(block: Block, *arrays: Array) -> Array:
        to, out = block.out.shape.names, block.result()
        views = [
            x if (names := t.shape.names) == to else align(x, names, to)
            for x, t in zip(arrays, block.inputs, strict=True)
        ]
        function(*views, out=out)
        return out

    def work(ins: tuple[TensorType, ...], out: TensorType, attrs: Mapping[str, Any]) -> Work:
        return Work(0, ops * max(1, len(ins) - 1) * out.shape.size)

    fields: dict[str, Any] = {"roles": named_factors, "overwrites": EVERY, "local": local, **traits}
    return operation(name, kind=Kind.ELEMENTWISE, shape=shape, grad=grad, work=work, **fields)


# ---------------------------------------------------------------- of one tensor


def _described(
    doc: str, name: str, function: Callable[..., Any], operands: Mapping[str, Sequence[object]], arguments: str
) -> str:
    """The docstring of an operation, with an example whose result its own function gives."""
    arrays = [np.array(x, bool if isinstance(x[0], bool) else np.float32) for x in operands.values()]
    out = np.empty_like(function(*arrays) if isinstance(function, np.ufunc) else arrays[0])
    function(*arrays, out=out)
    dtype = ', "bool"' if arrays[0].dtype == bool else ""
    inputs = ", ".join(f'mtf.input("{x}", "d:2"{dtype})' for x in operands)
    fed = ", ".join(f"{x}={list(values)}" for x, values in operands.items())
    text = f"""{doc}.

Args:
{arguments}
  name: of the operation.
Returns: a tensor with the dims of {" and ".join(operands)}.
Example:
  >>> import meshlib as mtf
  >>> with mtf.Graph():
  ...     y = mtf.{name}({inputs})
  >>> print(mtf.simulate(mtf.lower({{"y": y}})).step({fed})["y"]{".round(4)" * (out.dtype.kind == "f")})
  {out.round(4) if out.dtype.kind == "f" else out}"""
    return text.replace("\n", "\n    ")


def unary(
    name: str,
    doc: str,
    function: Callable[..., Any],
    slope: Callable[[Tensor, Tensor, Tensor], Tensor] | None,
    ops: int = 1,
    shape: ShapeRule = _FLOAT,
    **traits: Any,
) -> Unary:
    """Define an operation; `slope(x, y, dy)` is the cotangent of x, None: passes no gradient."""
    grad = not_differentiable if slope is None else lambda op, dy: [slope(op.inputs[0], op.output, dy)]
    kind = _define(name, function, grad, shape, ops, **traits)

    def public(x: Tensor, name: str | None = None) -> Tensor:
        return build(kind, [tensor(x, kind.name)], {}, name)

    public.__name__ = public.__qualname__ = name
    dtypes = {_FLOAT: "a float dtype", _FLAG: "bool"}.get(shape, "a number's dtype")
    signed = shape is _NUMBER or traits.get("exact")
    operand: tuple[object, ...] = (True, False) if shape is _FLAG else (-1.5, 2.5) if signed else (0.25, 1.0)
    public.__doc__ = _described(
        f"{doc}; float dtypes" if shape is _FLOAT else doc, name, function, {"x": operand}, f"  x: any shape, {dtypes}."
    )
    return public


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


# The derivative of relu as one operation: no mask is kept, it is read off the output that is there anyway.
_RELU_GRAD: OpDef = _define(
    "relu_grad",
    lambda dy, y, out: np.multiply(dy, np.greater(y, 0), out=out),
    lambda op, dz: [build(_RELU_GRAD, [dz, op.inputs[1]], {}), None],
    _ANY,
    ops=2,
    linear=lambda op: Linear((0,)),
    repeated=True,
    exact=True,
)

_curve = partial(unary, ops=TRANSCENDENTAL_OPS)
_wave = partial(unary, ops=5 * TRANSCENDENTAL_OPS)  # the argument is reduced to half a period first
_of_numbers = partial(unary, shape=_NUMBER)

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
logical_not = unary("logical_not", "not x; bool", np.logical_not, None, shape=_FLAG)


# ---------------------------------------------------------------- of two

Side = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def _broadcast(y: Tensor, output_shape: Shape | Sequence[Dimension] | None) -> Tensor:
    from meshlib.ops.movement.shape import broadcast

    return y if output_shape is None else broadcast(y, output_shape)


def _binary(
    name: str,
    doc: str,
    function: Callable[..., Any],
    *sides: Side,
    note: str = "",
    ops: int = 1,
    shape: ShapeRule = _NUMBERS,
    **traits: Any,
) -> Binary:
    """Define an operation; `sides(x1, x2, y, dy)` are the cotangents of x1 and x2, before they are summed down."""

    def grad(op: Operation, dy: Tensor) -> list[Tensor | None]:
        x1, x2 = op.inputs
        return [reduce_to(side(x1, x2, op.output, dy), x.shape) for side, x in zip(sides, op.inputs, strict=True)]

    kind = _define(name, function, grad if sides else not_differentiable, shape, ops, **traits)

    def public(
        x1: Tensor | float,
        x2: Tensor | float,
        output_shape: Shape | Sequence[Dimension] | None = None,
        name: str | None = None,
    ) -> Tensor:
        like = x1 if isinstance(x1, Tensor) else x2 if isinstance(x2, Tensor) else None
        operands = [as_tensor(x, like, kind.name) for x in (x1, x2)]
        return _broadcast(build(kind, operands, {}, name), output_shape)

    public.__name__ = public.__qualname__ = name
    truth = shape is _FLAGS
    public.__doc__ = _described(
        f"{doc}, broadcast by name{note}", name, function,
        dict(zip(("x1", "x2"), [(True, True), (True, False)] if truth else [(7.0, 2.0), (2.0, 2.0)], strict=True)),
        f"  x1, x2: tensors of {'bool' if truth else 'one dtype'}, or one of them a number; dims go together by name.\n"
        "  output_shape: the dims of the result in this order; by default those of x1, then what x2 has besides.",
    )  # fmt: skip
    return public


_compare = partial(_binary, note="; bool", shape=_COMPARED)
_together: dict[str, Any] = {"linear": lambda op: Linear((0, 1), together=True), "repeated": True}

less = _compare("less", "x1 < x2", np.less)
less_equal = _compare("less_equal", "x1 <= x2", np.less_equal)
greater = _compare("greater", "x1 > x2", np.greater)
greater_equal = _compare("greater_equal", "x1 >= x2", np.greater_equal)
equal = _compare("equal", "x1 == x2", np.equal)
not_equal = _compare("not_equal", "x1 != x2", np.not_equal)
logical_and = _binary("logical_and", "x1 and x2", np.logical_and, note="; bool", shape=_FLAGS)
logical_or = _binary("logical_or", "x1 or x2", np.logical_or, note="; bool", shape=_FLAGS)
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
    shape=_FLOATS,
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
    shape=_ORDERED,
    exact=True,
)
minimum = _binary(
    "minimum",
    "The smaller",
    np.minimum,
    lambda x1, x2, y, dy: where(less_equal(x1, x2), dy, 0.0),
    lambda x1, x2, y, dy: where(less_equal(x1, x2), 0.0, dy),
    note="; at a tie the gradient goes to x1",
    shape=_ORDERED,
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
    shape=_FLOATS,
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


# ---------------------------------------------------------------- of more


def _where_shape(types: tuple[TensorType, ...], attrs: Mapping[str, Any]) -> TensorType:
    condition, x, y = types
    if condition.dtype is not BOOL:
        raise ShapeError(f"the condition must be bool, got {condition.dtype.name}; compare first")
    return TensorType(union([x.shape, y.shape, condition.shape]), same_dtype([x, y]))


def _where_grad(op: Operation, dy: Tensor) -> list[Tensor | None]:
    condition, x, y = op.inputs
    return [None, reduce_to(where(condition, dy, 0.0), x.shape), reduce_to(where(condition, 0.0, dy), y.shape)]


def _where_into(condition: Array, x: Array, y: Array, out: Array) -> None:
    held = _held(condition)
    if held.size < out.size and held.all():  # a mask of whole blocks, of which this has none to hide
        np.copyto(out, x)
    else:
        np.copyto(out, np.where(condition, x, y))


def _held(x: Array) -> Array:
    """Each element that an array shows, once where it is broadcast."""
    return x[tuple(np.s_[:1] if stride == 0 else np.s_[:] for stride in x.strides)]


WHERE = _define(
    "where",
    _where_into,
    _where_grad,
    _where_shape,
    linear=lambda op: Linear((1, 2), together=True),
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
    operands = [
        tensor(condition, "where"),
        as_tensor(if_true, like, "where"),
        as_tensor(if_false, like, "where"),
    ]
    return _broadcast(build(WHERE, operands, {}, name), output_shape)


def _cast_linear(op: Operation) -> Linear:
    # Only a widening cast of floats commutes with a sum; a narrowing one would round each part.
    old, new = op.inputs[0].dtype, op.output.dtype
    return Linear((0,)) if old.is_float and new.is_float and new.bits > old.bits else NONLINEAR


def _cast_local(block: Block, x: Array) -> Array:
    dtype, out = block.attrs["dtype"], block.result()
    if x.dtype.kind == "f" and out.dtype == np.int32:  # the nearest there is, which float32 can't hold for the largest
        with np.errstate(invalid="ignore"):
            np.copyto(out, x, casting="unsafe")
        for outside, value in ((x >= 2.0**31, 2**31 - 1), (x < -(2.0**31), -(2**31)), (np.isnan(x), 0)):
            np.copyto(out, value, where=outside)
        return out
    if dtype.is_narrow_integer:
        low, high = dtype.bounds
        if x.dtype.kind == "f":  # the nearest there is, as XLA makes it
            x = np.where(np.isnan(x), 0, np.clip(x, low, high))
        elif x.dtype != np.bool_:  # the low bits
            x = (x.astype(np.int32) - low) % (high - low + 1) + low
    np.copyto(out, x, casting="unsafe")
    return out


CAST = _define(
    "cast",
    np.copyto,
    lambda op, dy: [cast(dy, op.inputs[0].dtype.of_cotangents) if op.inputs[0].dtype.is_float else None],
    lambda types, attrs: TensorType(types[0].shape, attrs["dtype"]),
    local=_cast_local,
    linear=_cast_linear,
    home=Home.OPERAND,  # so that gathers move the narrow type
    repeated=True,
)


def cast(x: Tensor, dtype: object, name: str | None = None) -> Tensor:
    """`x` as another dtype: floats are rounded to nearest even, float to integer cuts towards zero.

    Beyond what it holds e4m3 has NaN, e5m2 an infinity; integers have their least or largest number, for NaN 0, and of
    wider integers the low bits. Where a tensor moves between devices its casts run where they leave the narrower type
    to move.
    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.cast(mtf.input("x", "d:2"), "int32")
      >>> print(mtf.simulate(mtf.lower({"y": y})).step(x=[3.5, 4.0])["y"])
      [3 4]
    """
    new = as_dtype(dtype)
    return x if tensor(x, "cast").dtype is new else build(CAST, [x], {"dtype": new}, name)


def to_float(x: Tensor, name: str | None = None) -> Tensor:
    """`x` as float32.

    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.to_float(mtf.input("x", "d:2", "int32"))
      >>> print(mtf.simulate(mtf.lower({"y": y})).step(x=[3, 4])["y"])
      [3. 4.]
    """
    return cast(x, "float32", name)


def to_bfloat16(x: Tensor, name: str | None = None) -> Tensor:
    """`x` as bfloat16, rounded to nearest even.

    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.to_bfloat16(mtf.input("x", "d:2"))
      >>> y.dtype.name
      'bfloat16'
    """
    return cast(x, "bfloat16", name)


def to_int32(x: Tensor, name: str | None = None) -> Tensor:
    """`x` as int32, cut towards zero.

    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.to_int32(mtf.input("x", "d:2"))
      >>> print(mtf.simulate(mtf.lower({"y": y})).step(x=[3.5, 4.0])["y"])
      [3 4]
    """
    return cast(x, "int32", name)


def _add_all(x: Array, y: Array, *more: Array, out: Array) -> None:
    np.add(x, y, out=out)
    for z in more:
        np.add(out, z, out=out)


# The work is that of the sums of two: one less than there are operands.
_ADD_N = _define(
    "add_n",
    _add_all,
    lambda op, dy: [reduce_to(dy, x.shape) for x in op.inputs],
    _NUMBERS,
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


def _no_matmul(x: Tensor, y: object) -> Tensor:
    raise GraphError(
        f"{at('@')}: dims are matched by name, so it must be said which remain: mtf.einsum([x, y], output_shape=...)"
    )


def _swapped(function: Binary) -> Callable[[Tensor, float], Tensor]:
    return lambda x, y: function(y, x)


for _name, _function in {
    "add": add,
    "sub": subtract,
    "mul": multiply,
    "truediv": divide,
    "floordiv": floordiv,
    "mod": mod,
    "pow": pow,
}.items():
    setattr(Tensor, f"__{_name}__", _function)
    setattr(Tensor, f"__r{_name}__", _swapped(_function))

for _name, _method in {
    "abs": abs,
    "invert": logical_not,
    "and": logical_and,
    "or": logical_or,
    "matmul": _no_matmul,
    "neg": negative,
    "lt": less,
    "le": less_equal,
    "gt": greater,
    "ge": greater_equal,
}.items():
    setattr(Tensor, f"__{_name}__", _method)
