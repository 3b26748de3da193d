"""Names under which a dim continues through a program after renames and reshapes."""

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
    """Names that denote the same dim after renames and reshapes.

    `bound`: dims in constraints.
    """

    names: Mapping[str, Names]
    bound: Names

    @staticmethod
    def of(operations: Iterable[Operation]) -> Passages:
        """Collected from all operations of a program, those in loops included."""
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
        """Dims whose rules may let an axis split a tensor of any of these shapes; None: any axis may."""
        return None if laid_names(shapes) else self.reached(name for shape in shapes for name in shape.names)

    def reached(self, dims: Iterable[str]) -> Names | None:
        """Dims whose rules may bring an axis to any of these dims; None: any axis may."""
        names: Names = frozenset().union(*(self.names.get(name, frozenset({name})) for name in dims))
        return names if names.isdisjoint(self.bound) else None

    def same(self, a: str, b: str) -> bool:
        """True if two names may denote one dim."""
        return a == b or b in self.names.get(a, ())


def laid_names(shapes: Iterable[Shape]) -> Names:
    """Dims of these shapes whose sizes depend on the layout."""
    return frozenset(d.name for shape in shapes for d in shape if isinstance(d, LaidDimension))
