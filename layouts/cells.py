"""Notebook cells and short reprs of dims, shapes, meshes, layouts and shardings."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from layouts.dims import Dimension, Shape
    from layouts.mesh import Mesh
    from layouts.rules import LayoutRules, Rule
    from layouts.sharding import Sharding

DIVISORS = 12


def clipped(text: str, letters: int = 200) -> str:
    """A text cut to a limit, ending in "...", such as for a repr.

    >>> clipped("<Program of mesh a:8>", 12)
    '<Program ...'
    """
    return text if len(text) <= letters else f"{text[: letters - 3]}..."


def dimension_cell(dim: Dimension) -> str:
    """Name, size, and the numbers of blocks that divide it, as HTML."""
    divisors = [n for n in range(2, min(dim.size, 10_000) + 1) if dim.size % n == 0]
    shown = ", ".join(map(str, divisors[:DIVISORS])) + (", ..." if len(divisors) > DIVISORS else "")
    return html_table(
        "dim", ("name", "size", "divides over axes of"), [(dim.name, f"{dim.size:,}", shown or "nothing")]
    )


def shape_cell(shape: Shape) -> str:
    """The dims, and their total number of elements, as HTML."""
    size = prod(shape.sizes)
    rows = [(dim.name, f"{dim.size:,}") for dim in shape.dims]
    about = f"{size:,} elements; {4 * size:,} bytes in float32, {2 * size:,} in bfloat16"
    return html_table(about, ("dim", "size"), rows)


def mesh_cell(mesh: Mesh) -> str:
    """The axes, as HTML."""
    rows = [(axis, f"{mesh.axis_size(axis):,}") for axis in mesh.axes]
    return html_table(f"mesh of {mesh.size:,} devices", ("axis", "size"), rows)


def rules_cell(rules: LayoutRules) -> str:
    """Each rule with its meaning, as HTML."""
    return html_table("layout", ("rule", "meaning"), [(str(rule), _meaning(rule)) for rule in rules.rules])


def sharding_cell(sharding: Sharding) -> str:
    """Per dim the axes that split it and the size of a block, as HTML."""
    rows = [
        (dim.name, f"{dim.size:,}", "+".join(axes) or "-", f"{local.size:,}")
        for dim, axes, local in zip(sharding.shape.dims, sharding.axes, sharding.local_shape.dims, strict=True)
    ]
    pending = (
        f"; a pending {', '.join(f'{kind} over {axis}' for axis, kind in sharding.pending)}" if sharding.pending else ""
    )
    return html_table(f"on mesh {sharding.mesh}{pending}", ("dim", "size", "split over", "on each device"), rows)


def _meaning(rule: Rule) -> str:
    where = f" of {rule.scope}" if rule.scope else ""
    if not rule.axes:
        return f"dim '{rule.dim}'{where} is not split"
    over = " and ".join(f"'{axis}'" for axis in rule.axes)
    optional = ", in tensors where no other dim takes them" if rule.optional else ""
    return f"dim '{rule.dim}'{where} is split over {over}{optional}"


def html_table(title: str, head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A small HTML table; all cells are escaped.

    >>> html_table("a", ["b"], [["<c>"]]).partition("</caption>")[2]
    '<tr><th>b</th></tr><tr><td>&lt;c&gt;</td></tr></table>'
    """

    def line(cells: Iterable[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    body = line(head, "th") + "".join(line(row, "td") for row in rows)
    caption = f'<caption style="text-align:left;white-space:nowrap">{escape(title)}</caption>'
    return f"<table>{caption}{body}</table>"
