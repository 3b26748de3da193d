"""Derivative rules of `jax.custom_jvp` and `jax.custom_vjp`: which calls may be imported as their forward alone.

The library differentiates imported programs itself, from the forward that JAX traced; a rule is not looked at. That
is right where the rule is the derivative of the forward, written down for speed or precision, as JAX's own rules are
(relu, logaddexp, xlogy, ...). Any other rule may be another function on purpose: a straight-through estimator, a
clipped or reversed gradient, a surrogate slope. Calls with such rules are refused. A rule is JAX's own if all Python
functions that it is made of are defined in JAX's files; `jax.custom_gradient` and `defjvps` wrap functions of the
user's in some of JAX's, which keep these in their closures.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Sequence
from types import FunctionType, MethodType
from typing import Any

import jax

from meshlib.origin import shown_file

DECORATORS = {"custom_jvp_call": "jax.custom_jvp", "custom_vjp_call": "jax.custom_vjp"}
_JAX = os.path.dirname(jax.__file__) + os.sep
_EXPERIMENTAL = os.path.join(_JAX, "experimental", "")  # such as odeint, whose rule solves another equation
_FORWARD = ("call_jaxpr", "fun_jaxpr")


def foreign_rule(eqn: Any) -> str | None:
    """Why a call can't be imported, if it has a derivative rule that is not JAX's own."""
    decorator = DECORATORS.get(eqn.primitive.name.removesuffix("_jaxpr"))
    if decorator is None:
        return None
    rule = [value for name, value in eqn.params.items() if name not in _FORWARD]
    foreign = [f for f in _functions(rule) if not _of_jax(f.__code__.co_filename)]
    if not foreign:
        return None
    return (
        f"{_named(eqn, foreign)}: a derivative rule of its own ({decorator}), without which gradients would be those "
        "of its forward; where these are wanted, call the function that was decorated, its .fun"
    )


def _functions(rule: Any) -> Iterator[FunctionType]:
    """All Python functions that a rule holds, in closures, wrappers and arguments."""
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


def _named(eqn: Any, foreign: Sequence[FunctionType]) -> str:
    """The function that has the rule, with its line; where that is one of JAX's, with the line of the rule."""
    inner = next(eqn.params[name] for name in _FORWARD if name in eqn.params)
    info = getattr(getattr(inner, "jaxpr", inner), "debug_info", None)
    name, _, place = str(getattr(info, "func_src_info", None) or "a function").partition(" at ")
    file, _, line = place.rpartition(":")
    if _of_jax(file):  # as wrapped by jax.custom_gradient
        rule = next((f for f in foreign if f.__name__ != "<lambda>"), None)
        name = name if rule is None else rule.__name__
        code = (rule or foreign[0]).__code__
        file, line = code.co_filename, str(code.co_firstlineno)
    return f"{name} ({shown_file(file) or os.path.basename(file)}:{line})"
