"""How types are shown: notebook cells of `Shown`, rendered by `meshlib.report.cells`, and the reprs of `Brief`."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields

from hardware.unknown_names import Attributes
from layouts.cells import clipped

FEW = 4  # entries of a collection that a repr has


class Shown(Attributes):
    """A type with its own notebook cell, rendered from the parts of the report.

    >>> import meshlib as mtf
    >>> with mtf.Graph() as graph:
    ...     x = mtf.ones("batch:8")
    >>> "batch" in x._repr_html_()
    True
    """

    __slots__ = ()

    def _repr_html_(self) -> str:
        from meshlib.report.cells import cell

        return cell(self)


class Brief(Attributes):
    """A dataclass whose repr has the fields that differ from their defaults, in at most 200 characters.

    >>> import meshlib as mtf
    >>> mtf.layers.Routing(top_k=1)
    Routing(top_k=1)
    """

    __slots__ = ()

    def __repr__(self) -> str:
        values = ((f, getattr(self, f.name)) for f in fields(self))  # type: ignore[arg-type]
        given = ", ".join(f"{f.name}={_brief(value)}" for f, value in values if value != f.default)
        return clipped(f"{type(self).__name__}({given})")


def _brief(value: object) -> str:
    """The repr of a value, of a long collection its length."""
    if isinstance(value, Collection) and not isinstance(value, str) and len(value) > FEW:
        return f"<{len(value)} entries>"
    return repr(value)
