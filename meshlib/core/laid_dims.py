"""Dimensions whose sizes follow from a layout: lowering resolves them from the rules and the mesh.

Most programs have the same shapes under every layout. Some depend on a number of blocks that only the layout tells:
tokens that are sorted by expert on each device, and sent to as many shards as the experts are split into. A `SizePlan`
computes such sizes from the number of blocks of ordinary dims; until a layout is known there is one block of each.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, TypeAlias

from layouts import Dimension, LayoutRules, Mesh

Part: TypeAlias = str | int


class SizePlan(ABC):
    """Sizes that follow from a layout; a frozen dataclass, so that equal plans are one."""

    @abstractmethod
    def under(self, mesh: Mesh, rules: LayoutRules) -> SizePlan:
        """The plan for the blocks that a layout makes."""

    @abstractmethod
    def number(self, part: Part) -> float:
        """One of its sizes, or a number that follows from them, by name; a number stands for itself."""

    def name(self, name: str) -> str:
        """What a dim of that name is called once the layout is known."""
        return name

    def dim(self, name: str, part: Part) -> LaidDimension:
        """A dim of one of its sizes."""
        return LaidDimension(name, self, part)


class LaidDimension(Dimension):
    """A dimension whose size is a part of a plan. It is never equal to an ordinary one."""

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
        """The ordinary dimension that it is under a layout."""
        return Dimension(plan.name(self.name), int(plan.number(self.part)))

    def __repr__(self) -> str:
        return f"Dimension({self.name!r}, {self.size})"


class _LaidNumber:
    """A number that is a part of a plan."""

    plan: SizePlan
    part: Part

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return type(self), (self.plan, self.part)


class LaidInt(_LaidNumber, int):
    """An integer that is a part of a plan, for attributes and constants."""

    def __new__(cls, plan: SizePlan, part: Part) -> LaidInt:
        number = int.__new__(cls, int(plan.number(part)))
        number.plan, number.part = plan, part
        return number

    def of(self, plan: SizePlan) -> int:
        """The number under a layout."""
        return int(plan.number(self.part))


class LaidFloat(_LaidNumber, float):
    """The same of a fraction."""

    def __new__(cls, plan: SizePlan, part: Part) -> LaidFloat:
        number = float.__new__(cls, float(plan.number(part)))
        number.plan, number.part = plan, part
        return number

    def of(self, plan: SizePlan) -> float:
        """The number under a layout."""
        return float(plan.number(self.part))


def size_of(dim: Dimension) -> int:
    """The size of a dim, as attributes and constants take it: still to be resolved where the dim is."""
    return LaidInt(dim.plan, dim.part) if isinstance(dim, LaidDimension) else dim.size


def blocks(names: Iterable[str], mesh: Mesh, rules: LayoutRules, optional: bool = False) -> int:
    """Into how many blocks a layout splits a dim of activations that is known by one of these names.

    Args:
      optional: whether optional rules count, where there is no required one.
    """
    axes: list[str] = []
    for name in names:
        own = rules.required_axes(name, "activations")
        if not own and optional:
            own = tuple(axis for rule in rules.for_dim(name) for axis in rule.axes)
        axes += [axis for axis in own if axis in mesh and axis not in axes]
    return mesh.group_size(axes)
