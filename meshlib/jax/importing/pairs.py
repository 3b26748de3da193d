"""Complex numbers as pairs of real ones, as in rotary embeddings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshlib.jax.importing.code import Var
from meshlib.jax.importing.fourier import fft


@dataclass(frozen=True, eq=False)
class ComplexPair:
    """A complex value of the traced function, as two real ones."""

    real: Var
    imag: Var


Value = Var | ComplexPair
Parts = tuple[Any, Any]  # arrays


def flat(values: Sequence[Value]) -> list[Var]:
    """The values, with pairs replaced by their parts."""
    return [x for v in values for x in ((v.real, v.imag) if isinstance(v, ComplexPair) else (v,))]


def packed(parts: Sequence[Var], avals: Sequence[Any]) -> list[Value]:
    """The inverse of `flat`, for values of these types."""
    rest = iter(parts)
    return [ComplexPair(next(rest), next(rest)) if is_complex(aval) else next(rest) for aval in avals]


def parts_of(avals: Sequence[Any]) -> list[Any]:
    """Types of the values after `flat`."""
    return [
        jax.ShapeDtypeStruct(a.shape, real_type(a.dtype)) if is_complex(a) else a
        for a in avals
        for _ in range(1 + is_complex(a))
    ]


def is_complex(aval: Any) -> bool:
    """True if a value is complex."""
    return str(aval.dtype).startswith("complex")


def real_type(dtype: Any) -> Any:
    """The real dtype of a complex one's parts; other dtypes unchanged."""
    return {"complex64": jnp.float32, "complex128": jnp.float64}.get(str(dtype), dtype)


def in_parts(eqn: Any, pairs: Sequence[bool]) -> Callable[..., tuple[Any, ...]] | None:
    """A step on complex numbers as a function of its real operands and the parts of complex ones; None if unsupported.

    `pairs`: which operands are pairs. The function returns all results, in parts where they are complex.
    """
    name = eqn.primitive.name
    if name not in _BY_PART and name not in _RULES:
        return None

    def run(*xs: Any) -> tuple[Any, ...]:
        rest = iter(xs)
        operands = [(next(rest), next(rest)) if pair else next(rest) for pair in pairs]
        if name in _BY_ELEMENT:  # a jaxpr does not broadcast scalar operands
            shape = eqn.outvars[0].aval.shape
            operands = [
                tuple(jnp.broadcast_to(p, shape) for p in x) if isinstance(x, tuple) else jnp.broadcast_to(x, shape)
                for x in operands
            ]
        if name in _BY_PART:
            results_of_parts = [_of_part(eqn, operands, part) for part in (0, 1)]
            return tuple(y for both in zip(*results_of_parts, strict=True) for y in both)
        parts = _RULES[name](eqn.params, *operands)
        return parts if isinstance(parts, tuple) else (parts,)

    return run


_BY_ELEMENT = frozenset({"add", "add_any", "sub", "mul", "div", "select_n", "complex", "eq", "ne", "pow"})
# Applied to each part separately.
_BY_PART = frozenset({
    "add", "add_any", "sub", "neg", "broadcast_in_dim", "reshape", "transpose", "squeeze", "expand_dims", "slice",
    "split", "concatenate", "stack", "unstack", "select_n", "dynamic_slice", "dynamic_update_slice", "gather", "rev",
    "pad", "tile", "reduce_sum", "cumsum", "copy", "copy_p", "stop_gradient", "optimization_barrier",
    "sharding_constraint",
})  # fmt: skip


def _of_part(eqn: Any, operands: Sequence[Any], part: int) -> Sequence[Any]:
    results = eqn.primitive.bind(*(x[part] if isinstance(x, tuple) else x for x in operands), **eqn.params)
    return results if eqn.primitive.multiple_results else [results]


def _product(function: Callable[[Any, Any], Any]) -> Callable[..., Parts]:
    """Product of two complex operands, or of a complex and a real one."""

    def run(params: Any, x: Any, y: Any) -> Parts:
        if not isinstance(x, tuple):
            return function(x, y[0]), function(x, y[1])
        if not isinstance(y, tuple):
            return function(x[0], y), function(x[1], y)
        (a, b), (c, d) = x, y
        return function(a, c) - function(b, d), function(a, d) + function(b, c)

    return run


_times = _product(lax.mul)


def _dot(params: Any, x: Parts, y: Parts) -> Parts:
    given = {**params, "preferred_element_type": real_type(params["preferred_element_type"])}
    return _product(lambda a, b: lax.dot_general_p.bind(a, b, **given))(params, x, y)


def _reciprocal(x: Parts) -> Parts:
    size = x[0] * x[0] + x[1] * x[1]
    return x[0] / size, -x[1] / size


def _exp(params: Any, x: Parts) -> Parts:
    size = lax.exp(x[0])
    return size * lax.cos(x[1]), size * lax.sin(x[1])


def _log(params: Any, x: Parts) -> Parts:
    return 0.5 * lax.log(x[0] * x[0] + x[1] * x[1]), lax.atan2(x[1], x[0])


def _scaled(x: Parts, factor: float) -> Parts:
    return factor * x[0], factor * x[1]


def _any_power(params: Any, x: Any, y: Any) -> Parts:
    """exp(y log x), where either operand may be real."""
    base, exponent = (z if isinstance(z, tuple) else (z, jnp.zeros_like(z)) for z in (x, y))
    return _exp(params, _times(params, exponent, _log(params, base)))


def _running_product(params: Any, x: Parts) -> Parts:
    product: Parts = lax.associative_scan(
        lambda a, b: _times({}, a, b), x, reverse=params["reverse"], axis=params["axis"]
    )
    return product


def _whole_product(params: Any, x: Parts) -> Parts:
    for axis in sorted(params["axes"], reverse=True):
        running = _running_product({"axis": axis, "reverse": False}, x)
        x = (lax.index_in_dim(running[0], -1, axis, False), lax.index_in_dim(running[1], -1, axis, False))
    return x


def _power(params: Any, x: Parts) -> Parts:
    product = (jnp.ones_like(x[0]), jnp.zeros_like(x[0]))
    for _ in range(abs(params["y"])):
        product = _times({}, product, x)
    return product if params["y"] >= 0 else _reciprocal(product)


def _convert(params: Any, x: Any) -> Any:
    to = real_type(params["new_dtype"])
    if isinstance(x, tuple):
        return x[0].astype(to), x[1].astype(to)
    return x.astype(to), jnp.zeros(x.shape, to)


_RULES: dict[str, Callable[..., Any]] = {
    "mul": _times,
    "div": lambda params, x, y: _times(params, x, _reciprocal(y)),
    "dot_general": _dot,
    "exp": _exp,
    "log": _log,
    "sqrt": lambda params, x: _exp(params, _scaled(_log(params, x), 0.5)),
    "rsqrt": lambda params, x: _exp(params, _scaled(_log(params, x), -0.5)),
    "pow": _any_power,
    "sin": lambda params, x: (lax.sin(x[0]) * lax.cosh(x[1]), lax.cos(x[0]) * lax.sinh(x[1])),
    "cos": lambda params, x: (lax.cos(x[0]) * lax.cosh(x[1]), -lax.sin(x[0]) * lax.sinh(x[1])),
    "cumprod": _running_product,
    "reduce_prod": _whole_product,
    "integer_pow": _power,
    "square": lambda params, x: _times(params, x, x),
    "abs": lambda params, x: lax.sqrt(x[0] * x[0] + x[1] * x[1]),
    "real": lambda params, x: x[0],
    "imag": lambda params, x: x[1],
    "conj": lambda params, x: (x[0], -x[1]) if isinstance(x, tuple) else (x, jnp.zeros_like(-x)),
    "complex": lambda params, a, b: (a, b),
    "convert_element_type": _convert,
    "fft": fft,
    "eq": lambda params, x, y: (x[0] == y[0]) & (x[1] == y[1]),
    "ne": lambda params, x, y: (x[0] != y[0]) | (x[1] != y[1]),
}


def aval_of(x: Any) -> jax.ShapeDtypeStruct:
    """Type of a value, without its split over explicit mesh axes, which all operations on it would have to carry on."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=getattr(x, "weak_type", False))
