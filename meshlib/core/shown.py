"""Notebook display: types that derive from `Shown` are rendered by `meshlib.report.cells`."""

from __future__ import annotations

from hardware.unknown_names import Attributes


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
