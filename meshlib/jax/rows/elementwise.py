"""JAX rows of element-wise operations and reductions, one line each where JAX has the function."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import reduce
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshlib.jax.context import Array
from meshlib.jax.table import RowContext, aligned, row, storage, widest


def _of_integers(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` that returns 0 for a zero integer divisor, as NumPy does; XLA's result depends on the machine."""

    def local(x: Array, y: Array) -> Array:
        if not jnp.issubdtype(y.dtype, jnp.integer):
            return function(x, y)
        return jnp.where(y == 0, 0, function(x, jnp.where(y == 0, 1, y)))

    return local


def _bits(x: Array) -> Array:
    if jnp.issubdtype(x.dtype, jnp.integer):
        return lax.bitcast_convert_type(x, jnp.float32)
    return lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)


ELEMENTWISE: dict[str, Callable[..., Any]] = {
    "abs": jnp.abs,
    "add": jnp.add,
    "add_n": lambda *xs: reduce(operator.add, xs),
    "bitcast": _bits,
    "bitwise_and": jnp.bitwise_and,
    "bitwise_or": jnp.bitwise_or,
    "bitwise_xor": jnp.bitwise_xor,
    "ceil": jnp.ceil,
    "cos": jnp.cos,
    "divide": jnp.divide,
    "equal": jnp.equal,
    "erf": lax.erf,
    "exp": jnp.exp,
    "expm1": jnp.expm1,
    "floor": jnp.floor,
    "floordiv": _of_integers(jnp.floor_divide),
    "greater": jnp.greater,
    "greater_equal": jnp.greater_equal,
    "left_shift": jnp.left_shift,
    "less": jnp.less,
    "less_equal": jnp.less_equal,
    "log": jnp.log,
    "log1p": jnp.log1p,
    "logical_and": jnp.logical_and,
    "logical_not": jnp.logical_not,
    "logical_or": jnp.logical_or,
    "maximum": jnp.maximum,
    "minimum": jnp.minimum,
    "mod": _of_integers(jnp.mod),
    "multiply": jnp.multiply,
    "negative": jnp.negative,
    "not_equal": jnp.not_equal,
    "pow": jnp.power,
    "reciprocal": lambda x: 1 / x,
    "relu": lambda x: jnp.maximum(x, 0),
    "relu_grad": lambda dy, y: jnp.where(y > 0, dy, jnp.zeros_like(dy) * dy),  # NaN propagates, as in a product
    "right_shift": jnp.right_shift,
    "round": jnp.round,
    "rsqrt": lambda x: 1 / jnp.sqrt(x),
    "sigmoid": jax.nn.sigmoid,
    "sign": jnp.sign,
    "sin": jnp.sin,
    "softplus": lambda x: jnp.logaddexp(x, 0),
    "sqrt": jnp.sqrt,
    "square": jnp.square,
    "subtract": jnp.subtract,
    "tanh": jnp.tanh,
    "where": jnp.where,
}
REDUCTIONS: dict[str, Callable[..., Any]] = {
    "reduce_all": jnp.all,
    "reduce_any": jnp.any,
    "reduce_max": jnp.max,
    "reduce_min": jnp.min,
}
FEW_TERMS = 16


def _by_name(function: Callable[..., Any]) -> Callable[..., Array]:
    """`function` of operands broadcast by dim name."""

    def local(part: RowContext, *arrays: Array) -> Array:
        to = part.out.shape.names
        y = function(*(aligned(x, names, to) for x, names in zip(arrays, part.names, strict=True)))
        return jnp.broadcast_to(y, part.out.shape.sizes)

    return local


def _over(function: Callable[..., Any]) -> Callable[..., Array]:
    """`function` over the dims that the result lacks."""

    def local(part: RowContext, x: Array) -> Array:
        (names,), out = part.names, part.out.shape.names
        remaining = [n for n in names if n in out]
        y = function(x, axis=tuple(a for a, n in enumerate(names) if n not in out))
        return aligned(y.astype(x.dtype), remaining, out)  # JAX may widen sums of integers

    return local


@row("reduce_sum")
def _reduce_sum(part: RowContext, x: Array) -> Array:
    """Few blocks of whole tiles are added one by one: by the cycles that libtpu states, in a fifth to a seventh of the
    time of a reduction."""
    (names,), out = part.names, part.out.shape.names
    axes = tuple(a for a, n in enumerate(names) if n not in out)
    terms = prod(x.shape[a] for a in axes)
    if part.context.platform != "tpu" or not 1 < terms <= FEW_TERMS or max(axes) >= x.ndim - 2:
        return _over(jnp.sum)(part, x)
    blocks = jnp.moveaxis(x, axes, range(len(axes))).reshape(
        terms, *(n for a, n in enumerate(x.shape) if a not in axes)
    )
    y = reduce(operator.add, (block.astype(widest(part.out.dtype)) for block in blocks))
    return aligned(y.astype(x.dtype), [n for n in names if n in out], out)


for _name, _function in ELEMENTWISE.items():
    row(_name)(_by_name(_function))
for _name, _function in REDUCTIONS.items():
    row(_name)(_over(_function))


@row("cast")
def cast(part: RowContext, x: Array) -> Array:
    """Cast: floats to integers truncate towards zero, wide integers keep their low bits."""
    out = part.out.dtype
    if out.name == "bfloat16" and x.dtype == jnp.float32:
        return x
    if out.is_narrow_integer and jnp.issubdtype(x.dtype, jnp.integer):
        low, high = out.bounds
        x = (x.astype(jnp.int32) - low) % (high - low + 1) + low
    return x.astype(storage(out))
