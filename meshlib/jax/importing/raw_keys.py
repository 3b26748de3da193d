"""Which arguments are raw random keys, as `jax.random.PRNGKey` creates them: words of uint32 that draws read."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr

_WORDS = (2, 4)  # of one key, along the last axis
_READERS = ("random_wrap", "threefry2x32")


def raw_keys(closed: Any) -> list[bool]:
    """Whether each argument of a traced function is a raw key or an array of them."""
    return [
        str(v.aval.dtype) == "uint32" and v.aval.shape[-1:] in [(n,) for n in _WORDS] and _read(closed.jaxpr, {v})
        for v in closed.jaxpr.invars
    ]


def _read(jaxpr: Any, values: Collection[Any]) -> bool:
    """True if a key is made of `values`, or of what is computed from them as uint32."""
    reached = {*values}
    for eqn in jaxpr.eqns:
        places = [n for n, v in enumerate(eqn.invars) if not hasattr(v, "val") and v in reached]
        if not places:
            continue
        if eqn.primitive.name in _READERS:
            return True
        for body in _bodies(eqn):
            skipped = len(eqn.invars) - len(body.invars)  # the index of a branch
            inside = {body.invars[n - skipped] for n in places if n >= skipped} if skipped in (0, 1) else {*body.invars}
            if _read(body, inside):
                return True
        reached.update(v for v in eqn.outvars if str(v.aval.dtype) == "uint32")
    return False


def _bodies(eqn: Any) -> Iterator[Any]:
    for param in eqn.params.values():
        for held in param if isinstance(param, tuple | list) else (param,):
            if isinstance(held, ClosedJaxpr | Jaxpr):
                yield getattr(held, "jaxpr", held)
