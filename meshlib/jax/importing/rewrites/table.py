"""Table of primitives that are rewritten as JAX functions of others, before any other rule applies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from meshlib.jax.importing.code import CodeStep

Function = Callable[..., Any]

# Step -> equivalent function of its operands; None to keep the primitive.
REWRITES: dict[str, Callable[[CodeStep], Function | None]] = {}
# Primitives whose steps have their own source lines, such as the body of a loop.
OWN_LINES: set[str] = set()


def rewrite(names: str, of: Callable[[CodeStep], Function | None], own_lines: bool = False) -> None:
    """Register the rewrite of one or several primitives, by JAX's names."""
    for name in names.split():
        assert name not in REWRITES, name
        REWRITES[name] = of
        if own_lines:
            OWN_LINES.add(name)
