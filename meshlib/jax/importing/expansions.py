"""Primitives that JAX 0.11 writes for what older versions write as several, expanded into these on import."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from meshlib.jax.importing.custom_rules import HIGH_LEVEL


def expanded(eqn: Any, axis_env: Sequence[tuple[str, int]]) -> Any:
    """The jaxpr of an equation in terms of other primitives, or None; `axis_env`: enclosing mapped axes."""
    of = _EXPANSIONS.get(eqn.primitive.name)
    if of is None:
        return None
    return jax.make_jaxpr(of(eqn.params), axis_env=list(axis_env))(*(v.aval for v in eqn.invars))


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
