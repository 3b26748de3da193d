"""The names under which a dim continues through a program."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from layouts import Shape
from meshlib.core.graph import Operation
from meshlib.core.laid_dims import LaidDimension
from meshlib.core.opdef import Home

Names: TypeAlias = frozenset[str]


@dataclass(frozen=True)
class Passages:
    """The names under which dims go on, through renamings and reshapes.

    `bound`: those that constraints lay out.
    """

    names: Mapping[str, Names]
    bound: Names

    @staticmethod
    def of(operations: Iterable[Operation]) -> Passages:
        """From all operations of a program, those in loops included."""
        groups: dict[str, set[str]] = {}
        bound: set[str] = set()
        for op in operations:
            for f in op.opdef.roles(op):
                together = {name for name in (*f.operands, *f.outputs) if name is not None}
                joined = together.union(*(groups.get(name, ()) for name in together))
                groups.update(dict.fromkeys(joined, joined))
            if op.opdef.home is Home.GIVEN:
                bound |= {rule.dim for rule in op.attrs["layout"].rules}
        return Passages({name: frozenset(group) for name, group in groups.items()}, frozenset(bound))

    def split(self, *shapes: Shape) -> Names | None:
        """The dims by whose rules an axis may split a tensor of any of these shapes; None where any axis may."""
        return None if laid_names(shapes) else self.reached(name for shape in shapes for name in shape.names)

    def reached(self, dims: Iterable[str]) -> Names | None:
        """The dims by whose rules an axis may get to any of these; None where any axis may get there."""
        names: Names = frozenset().union(*(self.names.get(name, frozenset({name})) for name in dims))
        return names if names.isdisjoint(self.bound) else None

    def same(self, a: str, b: str) -> bool:
        """Whether one dim may have both names."""
        return a == b or b in self.names.get(a, ())


def laid_names(shapes: Iterable[Shape]) -> Names:
    """The names of dims of these shapes whose sizes follow from the layout."""
    return frozenset(d.name for shape in shapes for d in shape if isinstance(d, LaidDimension))
