"""HTML of chips, slices, runs of systolic arrays and films of a torus, for notebooks."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hardware.chips import Chip
    from hardware.films import Film, FilmFrame
    from hardware.slices import Slice
    from hardware.systolic import Run, State

COLOURS = ("#8ecae6", "#ffb703", "#90be6d", "#f28482", "#b8a1e3")  # by row of x
CYCLES, SQUARES, FRAMES = 24, 600, 12  # cycles, squares of all cycles together and frames in one cell
SHORT = 16  # most numbers of a result in the words above
RIGHT, DOWN = "\u2192", "\u2193"
BESIDE = "display:inline-block;vertical-align:top;margin:0 1em 1em 0"
HOP, NODE = 44, 11  # pixels between nodes, and their radius


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


def run_cell(run: Run) -> str:
    """The cycles of a systolic array beside each other: weights, values that move right and sums that move down."""
    count = min(run.cycles, CYCLES, max(1, SQUARES // (run.registers.rows * run.registers.columns)))
    more = f"; the first {count} are shown" * (count < run.cycles)
    words = f"{run.cycles} cycles{more}. w: weight; x {RIGHT} and p {DOWN}: what is passed on, coloured by row of x"
    words += f"; y = {run.y.tolist()}" * (run.y.size <= SHORT)
    return f"<p>{words}</p>" + "".join(_cycle(run.state(cycle)) for cycle in range(count))


def _cycle(state: State) -> str:
    """One cycle: a square per processing element, what enters at the left, what leaves below."""
    lines = []
    for r, weights in enumerate(state.weight):
        squares = [
            _square([f"{state.feed[r]} {RIGHT}" if state.feed_vector[r] >= 0 else ""], "border:0;min-width:2.5em")
        ]
        for c, weight in enumerate(weights):
            row, texts, style = state.vector[r, c], [f"w {weight}", "", ""], ""
            if row >= 0:
                texts[1:] = f"x {state.activation[r, c]} {RIGHT}", f"p {state.partial[r, c]} {DOWN}"
                style = f";background:{COLOURS[row % len(COLOURS)]};color:#000"
            squares.append(_square(texts, f"border:1px solid{style}"))
        lines.append(squares)
    leaving = zip(state.out_vector, state.out, strict=True)
    lines.append([_square([""]), *(_square([f"{y} {DOWN}" if row >= 0 else ""]) for row, y in leaving)])
    rows = "".join(f"<tr>{''.join(squares)}</tr>" for squares in lines)
    return f"<table style='{BESIDE};border-collapse:collapse'><caption>cycle {state.cycle}</caption>{rows}</table>"


def _square(texts: list[str], style: str = "border:0") -> str:
    inner = "<br>".join(escape(text) or "&nbsp;" for text in texts)
    return f"<td style='padding:2px 6px;text-align:left;white-space:nowrap;{style}'>{inner}</td>"


def film_cell(film: Film) -> str:
    """Frames of a film beside each other, evenly spaced: nodes with the tenths that they have received, busy links."""
    count = len(film.frames)
    shown = [film.frames[n * (count - 1) // max(1, min(count, FRAMES) - 1)] for n in range(min(count, FRAMES))]
    words = "Red: busy links, in each direction; in a node, the tenths of its data that have arrived"
    return f"<p>{count} frames{f', of which {len(shown)} are shown' * (len(shown) < count)}. {words}</p>" + "".join(
        map(_frame, shown)
    )


def _frame(frame: FilmFrame) -> str:
    """A frame as SVG."""
    from hardware.films import spots, strokes

    places = spots(frame.torus)
    wide, high = (HOP * (max(p[axis] for p in places) + 1.2) for axis in (0, 1))
    parts = []
    for (x1, y1), (x2, y2), load in strokes(frame):
        ends = " ".join(f'{n}="{HOP * (v + 0.6):.1f}"' for n, v in (("x1", x1), ("y1", y1), ("x2", x2), ("y2", y2)))
        style = f'stroke="#d1495b" stroke-width="{1.5 + 2.5 * load:.1f}"' if load else 'stroke="#999" stroke-width="1"'
        parts.append(f"<line {ends} {style}/>")
    for node, (x, y) in enumerate(places):
        share = frame.received.get(node)
        mark = "x" if node in frame.failed else "" if share is None else str(int(10 * share + 1e-9))
        at = f'cx="{HOP * (x + 0.6):.1f}" cy="{HOP * (y + 0.6):.1f}"'
        parts.append(f'<circle {at} r="{NODE}" fill="#fff" stroke="#555"/>')
        parts.append(f'<circle {at} r="{NODE}" fill="#8ecae6" fill-opacity="{share or 0.0:.2f}" stroke="none"/>')
        words = f'x="{HOP * (x + 0.6):.1f}" y="{HOP * (y + 0.6) + 4:.1f}" text-anchor="middle" font-size="11"'
        parts.append(f'<text {words} fill="#000">{mark}</text>')
    picture = f'<svg width="{wide:.0f}" height="{high:.0f}" role="img">{"".join(parts)}</svg>'
    return f"<figure style='{BESIDE}'><figcaption>{escape(frame.title)}</figcaption>{picture}</figure>"


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
