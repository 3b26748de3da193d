"""Derivative rules of `jax.custom_jvp` and `jax.custom_vjp`: the calls that are imported with their rule.

The library differentiates imported programs itself, from the forward that JAX traced. A rule may be another function on
purpose: a straight-through estimator, a clipped or reversed gradient, a surrogate slope. JAX's own rules are
derivatives at kinks and limits too, where the forward is made of maxima and selections (logaddexp, xlogy). So calls are
imported with their rules, see `meshlib.jax.importing.ruled`, apart from two of JAX's. A rule is JAX's own if all Python
functions that it is made of are defined in JAX's files; `jax.custom_gradient` and `defjvps` wrap functions of the
user's in some of JAX's, which keep these in their closures.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from types import FunctionType, MethodType
from typing import Any

import jax
from jax.interpreters import ad

from meshlib.core.source_lines import shown_file

DECORATORS = ("custom_jvp_call", "custom_vjp_call")
_JAX = os.path.dirname(jax.__file__) + os.sep
_EXPERIMENTAL = os.path.join(_JAX, "experimental", "")  # such as odeint, whose rule solves another equation
_FORWARD = ("call_jaxpr", "fun_jaxpr", "traced")
# JAX's functions whose rule is the derivative of their forward everywhere.
_DERIVATIVES = ("relu", "_softmax")
# Calls that define their transpose, `jax.custom_derivatives.linear_call` and `lax.custom_linear_solve`, and those that
# JAX differentiates by a formula, because the loop over columns that implements them here would save every trip.
_ALWAYS = (
    "linear_call", "custom_linear_solve", "cholesky", "triangular_solve", "lu", "qr", "tridiagonal_solve", "bessel_i0e",
    "bessel_i1e",
)  # fmt: skip
HIGH_LEVEL = "call_hi_primitive"  # a call that JAX 0.11 keeps as an object with its rules, until it is compiled


def has_own_rule(eqn: Any) -> bool:
    """True if a call has a derivative rule that may differ from the derivative of its forward function."""
    name = eqn.primitive.name
    if name in _ALWAYS:
        return True
    if is_of_library(eqn.primitive):
        return eqn.primitive in ad.primitive_jvps
    params = eqn.params
    if name == HIGH_LEVEL:
        call = params["_prim"]
        if "traced" not in call.params:  # no function with a rule: one of JAX's, or a class of the user's
            return not type(call).__module__.startswith("jax.")
        params = call.params
    elif name.removesuffix("_jaxpr") not in DECORATORS:
        return False
    rule = [value for key, value in params.items() if key not in _FORWARD]
    if any(not _of_jax(f.__code__.co_filename) for f in _functions(rule)):
        return True
    return named(eqn).partition(" ")[0] not in _DERIVATIVES


@functools.cache
def is_of_library(primitive: Any) -> bool:
    """True if a primitive is implemented by functions outside JAX."""
    return any(not _of_jax(f.__code__.co_filename) for f in _functions(primitive.impl))


def _functions(rule: Any) -> Iterator[FunctionType]:
    """All Python functions reachable from a rule through closures, wrappers and arguments."""
    seen: set[int] = set()
    left = [rule]
    while left:
        held = left.pop()
        if id(held) in seen:
            continue
        seen.add(id(held))
        if isinstance(held, FunctionType):
            yield held
            left += [cell.cell_contents for cell in held.__closure__ or () if _filled(cell)]
            left += [held.__defaults__, getattr(held, "__wrapped__", None)]
        elif isinstance(held, MethodType):
            left += [held.__func__, held.__self__]
        elif isinstance(held, functools.partial):
            left += [held.func, held.args, held.keywords]
        elif isinstance(held, tuple | list):
            left += held
        elif isinstance(held, dict):
            left += held.values()
        elif hasattr(held, "f") and hasattr(held, "transforms"):  # JAX's WrappedFun
            left += [held.f, held.transforms]
        elif isinstance(held, jax.custom_jvp | jax.custom_vjp):
            left += vars(held).values()


def _of_jax(file: str) -> bool:
    return file.startswith(_JAX) and not file.startswith(_EXPERIMENTAL)


def _filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # not assigned yet
        return False


def named(eqn: Any) -> str:
    """Name and line of the function that a rule belongs to."""
    params = eqn.params["_prim"].params if eqn.primitive.name == HIGH_LEVEL else eqn.params
    inner = next((params[name] for name in _FORWARD if name in params), None)
    info = getattr(getattr(inner, "jaxpr", inner), "debug_info", None)
    name, _, place = str(getattr(info, "func_src_info", None) or eqn.primitive.name).partition(" at ")
    file, _, line = place.rpartition(":")
    return f"{name} ({shown_file(file) or os.path.basename(file)}:{line})" if file else name
