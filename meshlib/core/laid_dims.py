"""Dimensions whose sizes depend on the layout: lowering resolves them from the rules and the mesh.

Most programs have the same shapes under every layout. Some depend on a number of blocks that the layout determines:
tokens that are sorted by expert on each device, and sent to as many shards as the experts are split into. A `SizePlan`
computes such sizes from the number of blocks of ordinary dims; until a layout is known, every dim has one block.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, TypeAlias

from layouts import Dimension, LayoutRules, Mesh

Part: TypeAlias = str | int


class SizePlan(ABC):
    """Sizes that depend on the layout; a frozen dataclass, so that equal plans are shared."""

    @abstractmethod
    def under(self, mesh: Mesh, rules: LayoutRules) -> SizePlan:
        """The plan for the numbers of blocks of a layout."""

    @abstractmethod
    def number(self, part: Part) -> float:
        """One of its sizes, or a number derived from them, by name; a literal number is returned unchanged."""

    def name(self, name: str) -> str:
        """The name of a dim once the layout is known."""
        return name

    def simplest(self, dim: LaidDimension) -> LaidDimension:
        """The dim that `dim` is in the plan as it is, where two parts of it are one."""
        return dim

    @property
    def note(self) -> str:
        """A note on the cost of its sizes under a layout; empty without one."""
        return ""

    def dim(self, name: str, part: Part) -> LaidDimension:
        """A dim with one of the plan's sizes."""
        return LaidDimension(name, self, part)


class LaidDimension(Dimension):
    """A dimension whose size is part of a plan. It is never equal to an ordinary dimension."""

    __slots__ = ("part", "plan")

    plan: SizePlan
    part: Part

    def __init__(self, name: str, plan: SizePlan, part: Part) -> None:
        size = int(plan.number(part))
        self._fill(name, plan, part, name=name, size=size, plan=plan, part=part)

    def renamed(self, name: str) -> LaidDimension:
        """This dimension under another name."""
        return LaidDimension(name, self.plan, self.part)

    def of(self, plan: SizePlan) -> Dimension:
        """The ordinary dimension under a resolved plan; under its own plan it stays unresolved."""
        if plan == self.plan:
            return plan.simplest(self)
        return Dimension(plan.name(self.name), int(plan.number(self.part)))

    def __repr__(self) -> str:
        return f"Dimension({self.name!r}, {self.size})"


class _LaidNumber:
    """A number that is part of a plan."""

    plan: SizePlan
    part: Part

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return type(self), (self.plan, self.part)


class LaidInt(_LaidNumber, int):
    """An integer that is part of a plan, for attributes and constants."""

    def __new__(cls, plan: SizePlan, part: Part) -> LaidInt:
        number = int.__new__(cls, int(plan.number(part)))
        number.plan, number.part = plan, part
        return number

    def of(self, plan: SizePlan) -> int:
        """The integer under a resolved plan."""
        return self if plan == self.plan else int(plan.number(self.part))


class LaidFloat(_LaidNumber, float):
    """A fraction that is part of a plan, for attributes and constants."""

    def __new__(cls, plan: SizePlan, part: Part) -> LaidFloat:
        number = float.__new__(cls, float(plan.number(part)))
        number.plan, number.part = plan, part
        return number

    def of(self, plan: SizePlan) -> float:
        """The fraction under a resolved plan."""
        return self if plan == self.plan else float(plan.number(self.part))


def size_of(dim: Dimension) -> int:
    """The size of a dim for attributes and constants: unresolved (a `LaidInt`) if the dim is."""
    return LaidInt(dim.plan, dim.part) if isinstance(dim, LaidDimension) else dim.size


def blocks(names: Iterable[str], mesh: Mesh, rules: LayoutRules, optional: bool = False) -> int:
    """The number of blocks into which a layout splits a dim of activations with one of these names.

    Args:
      optional: whether optional rules count if there is no required one.
    """
    axes: list[str] = []
    for name in names:
        own = rules.required_axes(name, "activations")
        if not own and optional:
            own = tuple(axis for rule in rules.for_dim(name) for axis in rule.axes)
        axes += [axis for axis in own if axis in mesh and axis not in axes]
    return mesh.group_size(axes)
