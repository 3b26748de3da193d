"""Shardings that a function requests itself with `jax.lax.with_sharding_constraint`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from layouts import LayoutRules, Shape
from layouts.rules import Rule
from meshlib.core.graph import Tensor
from meshlib.ops.control.state import constrain


@dataclass(frozen=True)
class Constraint:
    """One constraint: its line, the dims of the value, and layout rules equivalent to its spec.

    An axis that is a product of dims is split along the major one; axes that the spec leaves open have no rule.
    """

    source: str
    shape: Shape
    rules: LayoutRules

    def __str__(self) -> str:
        return f"{self.source}: {self.shape} as {self.rules or 'whole on each device'}"


@dataclass(eq=False)
class Constraints:
    """The constraints of a function, and whether they are binding."""

    bind: bool
    recorded: list[Constraint] = field(default_factory=list)

    def record(self, x: Tensor, axes: Sequence[Shape], spec: Sequence[Any], source: str) -> Tensor:
        """Record a constraint, and apply it to `x`, which has all dims of the axes, if constraints are binding."""
        rules = [
            Rule(dims.dims[0].name, (entry,) if isinstance(entry, str) else tuple(entry))
            for dims, entry in zip(axes, spec, strict=False)
            if len(dims) and isinstance(entry, str | tuple)
        ]
        one = Constraint(source, x.shape, LayoutRules(rules))
        self.recorded.append(one)
        return constrain(x, one.rules) if self.bind else x
