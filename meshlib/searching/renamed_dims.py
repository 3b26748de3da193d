"""Names from which an axis may come to a dim: those under which the dim continues after renames and reshapes."""

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
    """Names that denote the same dim after renames and reshapes, and those from which a summary deals out its results.

    An axis that splits the ranked dim of `top_k` may deal out the results along another dim; from there it does not
    come to the ranked one (`Factor.shares`).

    `names`: for each dim, those from which it may come; `bound`: dims in constraints; `settled`: whether sizes that
    depend on the layout have their values for it.
    """

    names: Mapping[str, Names]
    bound: Names
    settled: bool

    @staticmethod
    def of(operations: Iterable[Operation], settled: bool) -> Passages:
        """Collected from all operations of a program, those in loops included."""
        groups: dict[str, set[str]] = {}
        bound: set[str] = set()
        dealt: set[tuple[str, str]] = set()
        seen: set[object] = set()
        for op in operations:
            for f in op.opdef.roles(op):
                if (names := (f.operands, f.outputs, f.shares)) in seen:
                    continue
                seen.add(names)
                together = {name for name in (*f.operands, *f.outputs) if name is not None}
                if f.shares is not None:
                    dealt.update((name, f.shares) for name in together - {f.shares})
                    together = {f.shares}
                joined = together.union(*(groups.get(name, ()) for name in together))
                groups.update(dict.fromkeys(joined, joined))
            if op.opdef.home is Home.GIVEN:
                bound |= {rule.dim for rule in op.attrs["layout"].rules}
        for _ in dealt:  # a chain of them is no longer
            for before, after in dealt:
                groups[after] |= groups.setdefault(before, {before})
        return Passages({name: frozenset(group) for name, group in groups.items()}, frozenset(bound), settled)

    def split(self, *shapes: Shape) -> Names | None:
        """Dims whose rules may let an axis split a tensor of any of these shapes; None: any axis may."""
        return None if self.laid(shapes) else self.reached(name for shape in shapes for name in shape.names)

    def reached(self, dims: Iterable[str]) -> Names | None:
        """Dims whose rules may bring an axis to any of these dims; None: any axis may."""
        names: Names = frozenset().union(*(self.names.get(name, frozenset({name})) for name in dims))
        return names if names.isdisjoint(self.bound) else None

    def same(self, a: str, b: str) -> bool:
        """True if two names may denote one dim."""
        return a == b or b in self.names.get(a, ()) or a in self.names.get(b, ())

    def laid(self, shapes: Iterable[Shape]) -> Names:
        """Dims of these shapes whose sizes the layout has yet to give."""
        if self.settled:
            return frozenset()
        return frozenset(d.name for shape in shapes for d in shape if isinstance(d, LaidDimension))
