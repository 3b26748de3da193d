"""Element-wise primitives."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from meshlib.core.dtypes import BOOL, INT32
from meshlib.core.graph import Tensor
from meshlib.jax.importing.code import DTYPES, Array, CodeStep
from meshlib.jax.importing.integers import bits_of
from meshlib.jax.importing.masks import condition_of
from meshlib.jax.importing.table import Operand, rule, same_axes
from meshlib.jax.importing.writing import StepWriter
from meshlib.ops.control.custom_gradients import gradient_of_residuals
from meshlib.ops.pointwise.arithmetic import (
    abs,
    add,
    bitwise_and,
    bitwise_or,
    bitwise_xor,
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
    left_shift,
    less,
    less_equal,
    log,
    log1p,
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
    right_shift,
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
from meshlib.ops.pointwise.casts import cast
from meshlib.ops.pointwise.elementwise import reduce_to
from meshlib.ops.pointwise.logic import logical_xor

Function = Callable[..., Any]


def _row(name: str, function: Function, fold: Function | None) -> None:
    def write(w: StepWriter, step: CodeStep) -> Tensor:
        operands = w.operands(step)
        if not any(isinstance(x, Tensor) for x in operands):
            operands[0] = w.as_tensor(operands[0], step.ins[0])
        result: Tensor = function(*operands)
        return result

    rule(name, axes=same_axes, write=write, fold=_folding(fold), by_element=True)


def _folding(function: Function | None) -> Function | None:
    if function is None:
        return None

    def fold(step: CodeStep, *arrays: Array) -> Array:
        with np.errstate(all="ignore"):
            return np.asarray(function(*arrays))

    return fold


def _kinked(function: Function, *cotangents: Function) -> Function:
    """`function` with JAX's gradient where it has a kink; `cotangents(dy, *operands)` are those of the operands."""

    def write(*xs: Operand) -> Operand:
        tensors = [x for x in xs if isinstance(x, Tensor)]
        if not tensors or not tensors[0].dtype.is_float:
            result: Operand = function(*xs)
            return result

        def operands(given: Sequence[Tensor]) -> list[Operand]:
            rest = iter(given)
            return [next(rest) if isinstance(x, Tensor) else x for x in xs]

        def gradient(given: Sequence[Tensor], dys: Sequence[Tensor | None]) -> list[Tensor | None]:
            full, (dy,) = operands(given), dys
            return [
                None if dy is None else reduce_to(cotangent(dy, *full), x.shape)
                for cotangent, x in zip(cotangents, full, strict=True)
                if isinstance(x, Tensor)
            ]

        return gradient_of_residuals(lambda *given: ([function(*operands(given))], given), gradient, tensors)[0]

    return write


def _swapped(cotangent: Function) -> Function:
    return lambda dy, x, y: cotangent(dy, y, x)


def _share(inner: Function) -> Function:
    """Cotangent of the first operand of a maximum or minimum, which equal operands share; `inner`: whether it wins."""
    return lambda dy, x, y: where(inner(x, y), dy, where(equal(x, y), dy * 0.5, 0.0))


# ---------------------------------------------------------------- unary


def _power(x: Tensor, y: int) -> Tensor:
    """Integer powers by repeated multiplication, as in XLA."""
    if y < 0:
        return reciprocal(_power(x, -y))
    if y == 2:
        return square(x)
    if y < 2:
        return x if y else x * 0 + 1
    half = _power(x, y // 2)
    return multiply(multiply(half, half), x) if y % 2 else multiply(half, half)


def _round(w: StepWriter, step: CodeStep) -> Tensor:
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
    ("log1p", log1p, np.log1p),
    ("expm1", expm1, np.expm1),
    ("sqrt", sqrt, np.sqrt),
    ("rsqrt", rsqrt, lambda x: 1 / np.sqrt(x)),
    ("cbrt", lambda x: sign(x) * pow(abs(x), 1 / 3), np.cbrt),
    ("square", square, np.square),
    ("tanh", tanh, np.tanh),
    ("logistic", sigmoid, lambda x: 1 / (1 + np.exp(-x))),
    ("erf", erf, np.vectorize(math.erf, otypes=[float])),
    ("sin", sin, np.sin),
    ("cos", cos, np.cos),
    ("tan", lambda x: divide(sin(x), cos(x)), np.tan),
    ("sinh", lambda x: (expm1(x) - expm1(negative(x))) * 0.5, np.sinh),
    ("cosh", lambda x: (exp(x) + exp(negative(x))) * 0.5, np.cosh),
    ("abs", _kinked(abs, lambda dy, x: where(less(x, 0), negative(dy), dy)), np.abs),
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


# ---------------------------------------------------------------- binary


def _is(x: Operand, number: float) -> bool:
    return not isinstance(x, Tensor) and x == number


def _neutral(function: Function, number: float, either: bool = True) -> Function:
    """`function` with `number` as a neutral operand, for which the other operand is returned unchanged."""

    def write(x: Operand, y: Operand) -> Operand:
        if _is(y, number):
            return x
        return y if either and _is(x, number) else function(x, y)

    return write


def _quotient(x: Operand, y: Operand) -> Operand:
    if _is(y, 1):
        return x
    if not any(isinstance(v, Tensor) and v.dtype is INT32 for v in (x, y)):
        return divide(x, y)
    if not isinstance(y, Tensor) and y > 0:  # truncating division; the absolute value of -2^31 is not an int32
        return floordiv(where(less(x, 0), x + (y - 1), x), y)
    return multiply(multiply(_sign(x), _sign(y)), floordiv(_abs(x), _abs(y)))


def _remainder(x: Operand, y: Operand) -> Operand:
    """The remainder of a truncating division, which has the sign of x."""
    if isinstance(x, Tensor) and x.dtype is INT32:
        return x - multiply(_quotient(x, y), y)
    size = _abs(y)
    if not isinstance(x, Tensor):
        return multiply(_sign(x), mod(_abs(x), size))
    return where(less(x, 0), negative(mod(negative(x), size)), mod(x, size))


def _sign(x: Operand) -> Operand:
    return sign(x) if isinstance(x, Tensor) else (x > 0) - (x < 0)


def _abs(x: Operand) -> Operand:
    if isinstance(x, Tensor):
        return abs(x)
    return x if x >= 0 else -x


def _pow(w: StepWriter, step: CodeStep) -> Operand:
    x, y = w.operands(step)
    if isinstance(x, Tensor) and (_is(y, 0) or _is(y, 2)):
        return _power(x, step.ins[1].number)
    # The exponent may be an integer, which the library treats like any number.
    y = cast(y, DTYPES[step.outs[0].dtype]) if isinstance(y, Tensor) else y
    power: Tensor = pow(x, y)
    return power


def _compared(function: Function, holds: Function) -> Function:
    def write(x: Operand, y: Operand) -> Operand:
        condition = condition_of(x, y, holds)
        return function(x, y) if condition is None else condition

    return write


def _logic(function: Function, neutral: bool) -> Function:
    def write(x: Operand, y: Operand) -> Operand:
        for a, b in ((x, y), (y, x)):
            if not isinstance(b, Tensor) and b is neutral:
                return a
        result: Operand = function(*(v if isinstance(v, Tensor) else bool(v) for v in (x, y)))
        return result

    return write


def _by_bits(of_flags: Function, of_integers: Function) -> Function:
    """`of_flags` for bool operands, `of_integers` for others."""

    def write(x: Operand, y: Operand) -> Operand:
        flags = any((v.dtype is BOOL) if isinstance(v, Tensor) else isinstance(v, bool) for v in (x, y))
        result: Operand = (of_flags if flags else of_integers)(x, y)
        return result

    return write


def _no(x: Operand) -> Operand:
    return logical_not(x) if isinstance(x, Tensor) else not x


def _shifted_in_zeros(w: StepWriter, step: CodeStep) -> Operand:
    """A shift to the right that fills with zeros, where `right_shift` fills with the sign."""
    x, count = w.operand_tensor(step, 0), w.operands(step)[1]
    held = bits_of(step.ins[0].dtype)
    if held < 32:
        return right_shift(bitwise_and(x, 2**held - 1), count)
    moved = right_shift(bitwise_and(right_shift(x, 1), 2**31 - 1), count - 1)
    if isinstance(count, Tensor):
        return where(equal(count, 0), x, moved)
    return moved if count else x


def _not_a_number(x: Operand) -> Operand:
    return not_equal(x, x) if isinstance(x, Tensor) else math.isnan(x)


def _in_order(function: Function, strict: bool) -> Function:
    """Comparison in total order, with NaN last."""

    def write(x: Operand, y: Operand) -> Operand:
        last = _not_a_number(y)
        if strict:
            last = _both(last, _no(_not_a_number(x)))
        ordered: Operand = _either(function(x, y), last)
        return ordered

    return write


_both, _either = _logic(logical_and, True), _logic(logical_or, False)
_BINARY: tuple[_Row, ...] = (
    ("add add_any", _neutral(add, 0), np.add),
    ("sub", _neutral(subtract, 0, either=False), np.subtract),
    ("mul", _neutral(multiply, 1), np.multiply),
    ("div", _quotient, lambda x, y: x / y if x.dtype.kind not in "iu" else np.trunc(x / y)),
    ("rem", _remainder, np.fmod),
    ("max", _neutral(_kinked(maximum, _share(greater), _swapped(_share(greater))), -math.inf), np.maximum),
    ("min", _neutral(_kinked(minimum, _share(less), _swapped(_share(less))), math.inf), np.minimum),
    ("lt", _compared(less, np.less), np.less),
    ("le", _compared(less_equal, np.less_equal), np.less_equal),
    ("gt", _compared(greater, np.greater), np.greater),
    ("ge", _compared(greater_equal, np.greater_equal), np.greater_equal),
    ("eq", _compared(equal, np.equal), np.equal),
    ("ne", _compared(not_equal, np.not_equal), np.not_equal),
)
for _row_of in _BINARY:
    _row(*_row_of)
rule("pow", axes=same_axes, write=_pow, fold=_folding(np.power), by_element=True)
_row("shift_left", left_shift, np.left_shift)
_row("shift_right_arithmetic", right_shift, np.right_shift)
rule("shift_right_logical", axes=same_axes, write=_shifted_in_zeros, by_element=True)
_row("and", _by_bits(_both, bitwise_and), np.bitwise_and)
_row("or", _by_bits(_either, bitwise_or), np.bitwise_or)
_row("xor", _by_bits(_logic(logical_xor, False), bitwise_xor), np.bitwise_xor)
_row("eq_to", lambda x, y: _either(equal(x, y), _both(_not_a_number(x), _not_a_number(y))), None)
_row("le_to", _in_order(less_equal, strict=False), None)
_row("lt_to", _in_order(less, strict=True), None)


# ---------------------------------------------------------------- three and more operands


def _select(w: StepWriter, step: CodeStep) -> Tensor:
    which, *cases = w.operands(step)
    if not isinstance(which, Tensor):
        return w.as_tensor(cases[int(which)], step.outs[0])
    if which.dtype is not BOOL:
        selected = w.as_tensor(cases[0], step.outs[0])
        for n, case in enumerate(cases[1:], start=1):
            selected = where(equal(which, n), case, selected)
        return selected
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


def _clamp(w: StepWriter, step: CodeStep) -> Tensor:
    low, x, high = w.operands(step)
    clamped: Tensor = _clamped(low, x, high)
    return clamped


_clamped = _kinked(
    lambda low, x, high: minimum(maximum(x, low), high),
    lambda dy, low, x, high: where(greater(low, x), dy, 0.0),
    lambda dy, low, x, high: where(_both(greater(x, low), less(x, high)), dy, 0.0),
    lambda dy, low, x, high: where(greater(x, high), dy, 0.0),
)
rule(
    "clamp",
    axes=same_axes,
    write=_clamp,
    fold=lambda step, low, x, high: np.minimum(np.maximum(x, low), high),
    by_element=True,
)
