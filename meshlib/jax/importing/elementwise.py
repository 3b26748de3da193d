"""Primitives that work element by element."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from meshlib.dtypes import BOOL, INT32, as_dtype
from meshlib.graph import Tensor
from meshlib.jax.importing.code import DTYPES, Array, Step
from meshlib.jax.importing.masks import condition_of, hot
from meshlib.jax.importing.table import Operand, rule, same_axes
from meshlib.jax.importing.writing import Writer
from meshlib.ops.elementwise import (
    CAST,
    abs,
    add,
    cast,
    ceil,
    cos,
    divide,
    equal,
    erf,
    exp,
    expm1,
    floor,
    floordiv,
    greater,
    greater_equal,
    less,
    less_equal,
    log,
    logical_and,
    logical_not,
    logical_or,
    maximum,
    minimum,
    mod,
    multiply,
    negative,
    not_equal,
    pow,
    reciprocal,
    relu,
    round,
    rsqrt,
    sigmoid,
    sign,
    sin,
    sqrt,
    square,
    subtract,
    tanh,
    where,
)
from meshlib.ops.logic import logical_xor
from meshlib.ops.state import identity, stop_gradient

Function = Callable[..., Any]


def _row(name: str, function: Function, fold: Function | None, fault: Function = lambda step: None) -> None:
    def write(w: Writer, step: Step) -> Tensor:
        made: Tensor = function(*w.operands(step))
        return made

    rule(name, axes=same_axes, write=write, fold=_folding(fold), fault=fault, by_element=True)


def _folding(function: Function | None) -> Function | None:
    if function is None:
        return None

    def fold(step: Step, *arrays: Array) -> Array:
        with np.errstate(all="ignore"):
            return np.asarray(function(*arrays))

    return fold


# ---------------------------------------------------------------- of one operand


def _log1p(x: Tensor) -> Tensor:
    return log(x + 1.0)


def _power(x: Tensor, y: int) -> Tensor:
    """By products, as XLA does."""
    if y < 0:
        return reciprocal(_power(x, -y))
    if y == 2:
        return square(x)
    if y < 2:
        return x if y else x * 0 + 1
    half = _power(x, y // 2)
    return multiply(multiply(half, half), x) if y % 2 else multiply(half, half)


def _round(w: Writer, step: Step) -> Tensor:
    x = w.operand_tensor(step, 0)
    if int(step.params["rounding_method"]) == 1:
        return round(x)
    return multiply(sign(x), floor(abs(x) + 0.5))


def _not(x: Tensor) -> Tensor:
    return logical_not(x) if x.dtype is BOOL else negative(x) - 1


_Row = tuple[str, Function, Function | None]
_UNARY: tuple[_Row, ...] = (
    ("neg", negative, np.negative),
    ("exp", exp, np.exp),
    ("exp2", lambda x: exp(x * math.log(2)), np.exp2),
    ("log", log, np.log),
    ("log1p", _log1p, np.log1p),
    ("expm1", expm1, np.expm1),
    ("sqrt", sqrt, np.sqrt),
    ("rsqrt", rsqrt, lambda x: 1 / np.sqrt(x)),
    ("cbrt", lambda x: sign(x) * pow(abs(x), 1 / 3), np.cbrt),
    ("square", square, np.square),
    ("tanh", tanh, np.tanh),
    ("logistic", sigmoid, lambda x: 1 / (1 + np.exp(-x))),
    ("erf", erf, None),
    ("erfc", lambda x: subtract(1.0, erf(x)), None),
    ("sin", sin, np.sin),
    ("cos", cos, np.cos),
    ("tan", lambda x: divide(sin(x), cos(x)), np.tan),
    ("sinh", lambda x: (exp(x) - exp(negative(x))) * 0.5, np.sinh),
    ("cosh", lambda x: (exp(x) + exp(negative(x))) * 0.5, np.cosh),
    ("abs", abs, np.abs),
    ("sign", sign, np.sign),
    ("floor", floor, np.floor),
    ("ceil", ceil, np.ceil),
    ("not", _not, np.invert),
    ("is_finite", lambda x: equal(x - x, 0.0), np.isfinite),
    ("jit:relu", relu, None),
)
for _row_of in _UNARY:
    _row(*_row_of)

rule("round", axes=same_axes, write=_round, fold=lambda step, x: np.rint(x), by_element=True)
rule(
    "integer_pow",
    axes=same_axes,
    write=lambda w, step: _power(w.operand_tensor(step, 0), int(step.params["y"])),
    fold=lambda step, x: np.power(x, x.dtype.type(step.params["y"])),
    by_element=True,
)


# ---------------------------------------------------------------- of two


def _is(x: Operand, number: float) -> bool:
    return not isinstance(x, Tensor) and x == number


def _neutral(function: Function, number: float, either: bool = True) -> Function:
    """`function`, which leaves one operand as it is where the other is `number`."""

    def write(x: Operand, y: Operand) -> Operand:
        if _is(y, number):
            return x
        return y if either and _is(x, number) else function(x, y)

    return write


def _quotient(x: Operand, y: Operand) -> Operand:
    if any(isinstance(v, Tensor) and v.dtype is INT32 for v in (x, y)):  # cut towards zero
        return multiply(multiply(_sign(x), _sign(y)), floordiv(_abs(x), _abs(y)))
    return x if _is(y, 1) else divide(x, y)


def _remainder(x: Operand, y: Operand) -> Operand:
    return multiply(_sign(x), mod(_abs(x), _abs(y)))  # of the sign of x, as in C


def _sign(x: Operand) -> Operand:
    return sign(x) if isinstance(x, Tensor) else (x > 0) - (x < 0)


def _abs(x: Operand) -> Operand:
    if isinstance(x, Tensor):
        return abs(x)
    return x if x >= 0 else -x


def _pow(x: Operand, y: Operand) -> Operand:
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        y = cast(y, x.dtype)
    return square(x) if isinstance(x, Tensor) and _is(y, 2) else pow(x, y)


def _compared(function: Function, holds: Function) -> Function:
    def write(x: Operand, y: Operand) -> Operand:
        found = condition_of(x, y, holds)
        return function(x, y) if found is None else found

    return write


def _logic(function: Function, neutral: bool) -> Function:
    def write(x: Operand, y: Operand) -> Operand:
        for a, b in ((x, y), (y, x)):
            if not isinstance(b, Tensor) and b is neutral:
                return a
        made: Operand = function(*(v if isinstance(v, Tensor) else bool(v) for v in (x, y)))
        return made

    return write


def _flags(step: Step) -> str | None:
    return None if all(x.dtype == "bool" for x in step.ins) else "of integers, bit by bit"


_BINARY: tuple[_Row, ...] = (
    ("add add_any", _neutral(add, 0), np.add),
    ("sub", _neutral(subtract, 0, either=False), np.subtract),
    ("mul", _neutral(multiply, 1), np.multiply),
    ("div", _quotient, lambda x, y: x / y if x.dtype.kind not in "iu" else np.trunc(x / y)),
    ("rem", _remainder, np.fmod),
    ("max", _neutral(maximum, -math.inf), np.maximum),
    ("min", _neutral(minimum, math.inf), np.minimum),
    ("pow", _pow, np.power),
    ("lt", _compared(less, np.less), np.less),
    ("le", _compared(less_equal, np.less_equal), np.less_equal),
    ("gt", _compared(greater, np.greater), np.greater),
    ("ge", _compared(greater_equal, np.greater_equal), np.greater_equal),
    ("eq", _compared(equal, np.equal), np.equal),
    ("ne", _compared(not_equal, np.not_equal), np.not_equal),
)
for _row_of in _BINARY:
    _row(*_row_of)
_row("and", _logic(logical_and, True), np.bitwise_and, _flags)
_row("or", _logic(logical_or, False), np.bitwise_or, _flags)
_row("xor", _logic(logical_xor, False), np.bitwise_xor, _flags)


# ---------------------------------------------------------------- of more


def _select(w: Writer, step: Step) -> Tensor:
    which, *cases = w.operands(step)
    if not isinstance(which, Tensor):
        return w.as_tensor(cases[int(which)], step.outs[0])
    if which.dtype is not BOOL:
        made = w.as_tensor(cases[0], step.outs[0])
        for n, case in enumerate(cases[1:], start=1):
            made = where(equal(which, n), case, made)
        return made
    if_false, if_true = cases
    if step.outs[0].dtype == "bool":
        if if_true is True and if_false is False:
            return which
        if if_true is False and if_false is True:
            return logical_not(which)
        if if_false is False:
            return logical_and(which, if_true)
        if if_true is True:
            return logical_or(which, if_false)
    if not isinstance(if_true, Tensor) and not isinstance(if_false, Tensor):
        if_true = w.as_tensor(if_true, step.outs[0])
    return where(which, if_true, if_false)


rule(
    "select_n",
    axes=same_axes,
    write=_select,
    fold=lambda step, which, *cases: np.choose(which.astype(int), cases) if cases[0].size else cases[0],
    by_element=True,
)


def _clamp(w: Writer, step: Step) -> Tensor:
    low, x, high = w.operands(step)
    return minimum(maximum(x, low), high)


rule(
    "clamp",
    axes=same_axes,
    write=_clamp,
    fold=lambda step, low, x, high: np.minimum(np.maximum(x, low), high),
    by_element=True,
)


# ---------------------------------------------------------------- the same in another type, or with a meaning


def numpy_type(dtype: str) -> np.dtype[Any]:
    """The NumPy type of JAX's dtype."""
    return np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


def _convert(w: Writer, step: Step) -> Tensor:
    (x,) = w.operands(step)
    (out,) = step.outs
    if not isinstance(x, Tensor):
        return w.as_tensor(x, out)
    to = DTYPES[out.dtype]
    if to == "bool":
        return not_equal(x, 0)
    found = hot(x, to)
    if found is not None:
        return found
    stored = x.operation.inputs[0] if x.operation.kind is CAST else x
    # An argument in eight bits or four is cast from there.
    return cast(stored if stored.dtype.is_narrow_integer and not as_dtype(to).is_narrow_integer else x, to)


rule(
    "convert_element_type",
    axes=same_axes,
    write=_convert,
    fold=lambda step, x: x.astype(numpy_type(step.outs[0].dtype)),
    by_element=True,
)


def _pass(w: Writer, step: Step) -> list[Tensor | None]:
    return [w.tensor(x) for x in step.ins]


def _pass_axes(axes: Any, step: Step) -> None:
    for x, out in zip(step.ins, step.outs, strict=True):
        same_axes(axes, Step(step.kind, [x], [out], {}, step.place))


rule(
    "copy copy_p optimization_barrier sharding_constraint mesh_cast reshard layout_constraint pvary pcast",
    axes=_pass_axes,
    write=_pass,
    fold=lambda step, *xs: xs[0],
    by_element=True,
)
rule(
    "stop_gradient",
    axes=same_axes,
    write=lambda w, step: stop_gradient(w.tensor(step.ins[0])),
    fold=lambda step, x: x,
    by_element=True,
)
rule(
    "name",
    axes=same_axes,
    write=lambda w, step: identity(w.tensor(step.ins[0]), "".join(str(step.params["name"]).split())),
    by_element=True,
)


def _precision(step: Step) -> tuple[int, int]:
    return int(step.params["exponent_bits"]), int(step.params["mantissa_bits"])


def _reduce_precision(w: Writer, step: Step) -> Tensor:
    x = w.tensor(step.ins[0])
    return cast(cast(x, "bfloat16"), x.dtype) if _precision(step) == (8, 7) else x


rule(
    "reduce_precision",
    axes=same_axes,
    write=_reduce_precision,
    fault=lambda step: None if _precision(step) in ((8, 7), (8, 23)) else f"to {_precision(step)} bits",
    by_element=True,
)
