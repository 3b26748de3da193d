"""Primitives expanded on import: those that JAX 0.11 writes for several older ones, and those of other libraries.

Libraries such as Equinox and Lineax define primitives for their own transformations, and give JAX the function of other
primitives that computes them. Where they also define a derivative, `meshlib.jax.importing.ruled` takes it from there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
from jax.extend import core

from meshlib.jax.importing.custom_rules import HIGH_LEVEL, is_of_library


def expanded(eqn: Any, axis_env: Sequence[tuple[str, int]]) -> Any:
    """The jaxpr of an equation in terms of other primitives, or None; `axis_env`: enclosing mapped axes."""
    primitive, avals = eqn.primitive, [v.aval for v in eqn.invars]
    if (of := _EXPANSIONS.get(primitive.name)) is not None:
        return jax.make_jaxpr(of(eqn.params), axis_env=list(axis_env))(*avals)
    if not is_of_library(primitive):
        return None
    try:
        return jax.make_jaxpr(partial(primitive.impl, **eqn.params), axis_env=list(axis_env))(*avals)
    except (TypeError, jax.errors.JAXTypeError):  # it computes on NumPy arrays
        return None


def function_of(eqn: Any) -> Callable[..., Sequence[Any]]:
    """The call as a function of its operands."""
    same = jax.make_jaxpr(lambda *xs: xs)(*(v.aval for v in eqn.invars))
    outs = [core.Var(v.aval) for v in eqn.outvars]
    call = eqn.replace(invars=same.jaxpr.invars, outvars=outs)
    function: Callable[..., Sequence[Any]] = core.jaxpr_as_fun(
        core.ClosedJaxpr(same.jaxpr.replace(eqns=[call], outvars=outs), ())
    )
    return function


def without_library_primitives(closed: Any) -> Any:
    """A jaxpr with the primitives of other libraries expanded, also in functions that it calls."""
    if not any(is_of_library(e.primitive) or e.primitive.name == "jit" for e in closed.jaxpr.eqns):
        return closed

    def run(*operands: Any) -> list[Any]:
        env: dict[Any, Any] = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        env.update(zip(closed.jaxpr.invars, operands, strict=True))
        for eqn in closed.jaxpr.eqns:
            given = [v.val if hasattr(v, "val") else env[v] for v in eqn.invars]
            if eqn.primitive.name == "jit":
                outs = core.jaxpr_as_fun(without_library_primitives(eqn.params["jaxpr"]))(*given)
            elif is_of_library(eqn.primitive):
                outs = jax.tree.leaves(eqn.primitive.impl(*given, **eqn.params))
            else:
                outs = function_of(eqn)(*given)
            env.update(zip(eqn.outvars, outs, strict=True))
        return [v.val if hasattr(v, "val") else env[v] for v in closed.jaxpr.outvars]

    return jax.make_jaxpr(run)(*closed.in_avals)


def _high_level(params: Any) -> Callable[..., Any]:
    call = params["_prim"]
    return lambda *leaves: jax.tree.leaves(call.expand(*jax.tree.unflatten(call.in_tree, leaves)))


def _polynomial(x: Any, *coefficients: Any) -> Any:
    """Horner's rule; the coefficients' powers rise from 0."""
    *rest, value = coefficients
    for c in reversed(rest):
        value = value * x + c
    return value


_EXPANSIONS: dict[str, Callable[[Any], Callable[..., Any]]] = {
    HIGH_LEVEL: _high_level,
    "one_minus_square": lambda params: lambda x: (1 + x) * (1 - x),
    "polynomial": lambda params: _polynomial,
}
