"""Anchors of operations on the page, which link pictures and tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from meshlib.core.folding import alike, name_pattern
from meshlib.estimation import Estimate
from meshlib.estimation.views.profile import ProfilePart


@dataclass(frozen=True)
class PageAnchors:
    """Row number of each operation in the table of operations, and the other places where it is shown: (what, id).

    Operations of unrolled layers share a row.
    """

    numbers: Mapping[str, int] = field(default_factory=dict)
    shown: dict[str, list[tuple[str, str]]] = field(default_factory=dict)

    @staticmethod
    def of(est: Estimate) -> PageAnchors:
        """Rows numbered by descending total time of their operations."""
        parts: dict[str, list[ProfilePart]] = {}
        for part in est.profile().parts:
            parts.setdefault(part.name, []).append(part)
        rows = alike(parts, lambda name: (name_pattern(name), frozenset((p.kind, p.phase) for p in parts[name])))
        rows.sort(key=lambda names: -sum(p.total_seconds for name in names for p in parts[name]))
        return PageAnchors({name: n for n, names in enumerate(rows) for name in names})

    @property
    def rows(self) -> list[list[str]]:
        """The operation names in each row."""
        return alike(self.numbers, self.numbers.__getitem__)

    def op(self, name: str) -> str:
        """The id that all shapes of one operation share; "" for a name without a row."""
        return f"op-{self.numbers[name]}" if name in self.numbers else ""

    def href(self, name: str) -> str:
        """Link target for an operation; "" for a name without a row."""
        mark = self.op(name)
        return f"#{mark}" if mark else ""

    def show(self, name: str, what: str, anchor: str) -> None:
        """Record that an operation is also shown elsewhere, once per kind of place."""
        places = self.shown.setdefault(name, [])
        if what not in (w for w, _ in places):
            places.append((what, anchor))
