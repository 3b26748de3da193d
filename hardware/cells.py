"""HTML tables of chips and slices for notebooks."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hardware.chips import Chip
    from hardware.slices import Slice


def chip_cell(chip: Chip) -> str:
    """A chip's figures with their sources, as HTML."""
    rows = [
        *(
            (f"peak {dtype}", f"{rate / 1e12:.4g} T/s", f"peak_{dtype}_flops")
            for dtype in ("bf16", "int8", "fp8", "int4")
            if (rate := chip.peak(dtype))
        ),
        ("HBM", f"{chip.hbm_bytes / 2**30:.4g} GiB", "hbm_bytes"),
        ("HBM bandwidth", f"{chip.hbm_bytes_per_second / 1e9:.4g} GB/s", "hbm_bytes_per_second"),
        ("MXUs of a core", f"{chip.mxus_per_core} of {chip.mxu_rows}x{chip.mxu_columns}", "mxus_per_core"),
        ("clock", f"{chip.clock_hz / 1e6:.4g} MHz", "clock_hz"),
        ("cores, devices", f"{chip.cores_per_chip}, {chip.devices_per_chip}", "cores_per_chip"),
    ]
    if chip.usd_per_chip_hour is not None:
        rows.append(("list price", f"${chip.usd_per_chip_hour:,.2f} an hour", "usd_per_chip_hour"))
    return html_table(f"chip {chip.name}", ("", "", "source"), ((a, b, chip.source(c)) for a, b, c in rows))


def slice_cell(slice_: Slice) -> str:
    """A slice's figures, as HTML."""
    shape = "x".join(map(str, slice_.torus_shape))
    rings = ", ".join(f"axis {n} is a ring" for n, wraps in enumerate(slice_.wrap) if wraps) or "no axis is a ring"
    rows = [
        ("chips", f"{slice_.chips:,}" + (f" in {slice_.slices} slices over DCN" if slice_.slices > 1 else "")),
        ("torus of a slice", f"{shape}; {rings}" + "; short axes are twisted" * slice_.twisted),
        ("devices, hosts", f"{slice_.devices:,}, {slice_.hosts:,}"),
        ("HBM of a device", f"{slice_.usable_hbm_bytes_per_device / 2**30:.4g} GiB that programs are offered"),
        ("peak of all", f"{slice_.peak_flops() / 1e15:.4g} PFLOP/s"),
    ]
    if slice_.usd_per_hour is not None:
        rows.append(("list price", f"${slice_.usd_per_hour:,.2f} an hour"))
    return html_table(f"slice {slice_.name}", ("", ""), rows)


def html_table(title: str, head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A small table; all cells are text.

    >>> html_table("a", ["b"], [["<c>"]]).partition("</caption>")[2]
    '<tr><th>b</th></tr><tr><td>&lt;c&gt;</td></tr></table>'
    """

    def line(cells: Iterable[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    body = line(head, "th") + "".join(line(row, "td") for row in rows)
    caption = f'<caption style="text-align:left;white-space:nowrap">{escape(title)}</caption>'
    return f"<table>{caption}{body}</table>"
