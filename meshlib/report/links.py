"""Anchors of operations on the page, which link pictures and tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from meshlib.core.folding import alike, name_pattern
from meshlib.estimation import Estimate
from meshlib.estimation.views.profile import ProfilePart


@dataclass(frozen=True)
class PageAnchors:
    """Of each operation the number of its row among the operations, and where else it is shown: (what, id).

    Operations of unrolled layers share a row. Names without a row lead to the table itself.
    """

    numbers: Mapping[str, int] = field(default_factory=dict)
    shown: dict[str, list[tuple[str, str]]] = field(default_factory=dict)

    @staticmethod
    def of(est: Estimate) -> PageAnchors:
        """Numbers by the time that the operations of a row take together."""
        parts: dict[str, list[ProfilePart]] = {}
        for part in est.profile().parts:
            parts.setdefault(part.name, []).append(part)
        rows = alike(parts, lambda name: (name_pattern(name), frozenset((p.kind, p.phase) for p in parts[name])))
        rows.sort(key=lambda names: -sum(p.total_seconds for name in names for p in parts[name]))
        return PageAnchors({name: n for n, names in enumerate(rows) for name in names})

    @property
    def rows(self) -> list[list[str]]:
        """The names of each row."""
        return alike(self.numbers, self.numbers.__getitem__)

    def op(self, name: str) -> str:
        """The mark that all shapes of one operation share; "" for what is none."""
        return f"op-{self.numbers[name]}" if name in self.numbers else ""

    def href(self, name: str) -> str:
        """Where a click on something of this name leads; "" for what is none."""
        mark = self.op(name)
        return f"#{mark}" if mark else ""

    def show(self, name: str, what: str, anchor: str) -> None:
        """Remember that an operation is shown elsewhere, too, once for each kind of place."""
        places = self.shown.setdefault(name, [])
        if what not in (w for w, _ in places):
            places.append((what, anchor))
