"""The table of primitives that are written in other ones, in JAX itself, before anything else looks at them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from meshlib.jax.importing.code import CodeStep

Function = Callable[..., Any]

# What a primitive is in other words: a function of its operands; None where it is to stay as it is.
REWRITES: dict[str, Callable[[CodeStep], Function | None]] = {}
# Those whose steps keep lines of their own, as the body of a loop.
OWN_LINES: set[str] = set()


def rewrite(names: str, of: Callable[[CodeStep], Function | None], own_lines: bool = False) -> None:
    """Add a row for one or several primitives, by the names that JAX gives them."""
    for name in names.split():
        assert name not in REWRITES, name
        REWRITES[name] = of
        if own_lines:
            OWN_LINES.add(name)
