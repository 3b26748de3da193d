"""Anchors of operations on the page, which link pictures and tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from meshlib.estimation import Estimate


@dataclass(frozen=True)
class PageAnchors:
    """Of each operation the id of its row among the operations, and where else it is shown: (what, id).

    Names without a row lead to the table itself.
    """

    numbers: Mapping[str, int] = field(default_factory=dict)
    shown: dict[str, list[tuple[str, str]]] = field(default_factory=dict)

    @staticmethod
    def of(est: Estimate) -> PageAnchors:
        """Numbers by the time that an operation takes."""
        names = dict.fromkeys(part.name for part in est.profile().parts)
        return PageAnchors({name: n for n, name in enumerate(names)})

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
