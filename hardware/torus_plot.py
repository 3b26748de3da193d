"""Frames of a torus on matplotlib Axes, and films of them as files."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hardware.checks import amount
from hardware.errors import HardwareError
from hardware.films import spots

if TYPE_CHECKING:
    from hardware.films import FilmFrame

SHEET = 12  # frames on one sheet
APART = 0.08  # gap between the two directions of a link
HOP, TITLE, LEGEND, LEAST = 0.6, 0.6, 0.35, 3.2  # inches: of a hop, a title and the legend; the least width of a frame
CHARACTERS = 16  # of a title for each inch
IDLE = (0.82, 0.82, 0.82, 1.0)


def plot_frame(frame: FilmFrame, ax: Any) -> Any:
    """`FilmFrame.plot`."""
    torus = frame.torus
    axes = _axes(ax, frame)
    from matplotlib import colormaps
    from matplotlib.collections import LineCollection

    places, lines, shades, widths = spots(torus), [], [], []
    fill = colormaps["Blues"]
    for link in torus.links():
        source, target = torus.ends(link)
        axis = link // 2 % torus.rank
        (x1, y1), (x2, y2) = places[source], places[target]
        if axis < torus.rank - 2:  # a link to another plane: drawn as a stub
            x2, y2 = (x1 + 0.3, y1 - 0.3) if not link % 2 else (x1 - 0.3, y1 + 0.3)
        elif abs(x2 - x1) + abs(y2 - y1) > 1:  # a wrap-around or twisted link: drawn as a stub
            offset = -0.4 if link % 2 else 0.4
            x2, y2 = (x1 + offset, y1) if axis == torus.rank - 1 else (x1, y1 + offset)
        side = -APART if link % 2 else APART
        dx, dy = (0.0, side) if axis == torus.rank - 1 else (side, 0.0)
        load = frame.loads.get(link, 0.0)
        lines.append([(x1 + dx, y1 + dy), (x2 + dx, y2 + dy)])
        shades.append(_shade(load))
        widths.append(_width(load))
    axes.add_collection(LineCollection(lines, colors=shades, linewidths=widths, zorder=1))
    colours = [
        "white" if node in frame.failed else fill(0.15 + 0.85 * frame.received.get(node, 0.6))
        for node in range(torus.nodes)
    ]
    axes.scatter(
        [x for x, _ in places], [y for _, y in places], 110, c=colours,
        edgecolors="black", linewidths=0.6, zorder=2,
    )  # fmt: skip
    axes.set(xlim=(-0.6, max(x for x, _ in places) + 0.6), ylim=(max(y for _, y in places) + 0.6, -0.6), aspect="equal")
    most = int(_size(frame)[0] * CHARACTERS)
    lines_of_title = (line if len(line) <= most else line[: most - 1] + "…" for line in frame.title.split("\n"))
    axes.set_title("\n".join(lines_of_title), fontsize=8)
    axes.axis("off")
    return axes


def _shade(load: float) -> Any:
    from matplotlib import colormaps

    return colormaps["YlOrRd"](0.4 + 0.6 * load) if load else IDLE


def _width(load: float) -> float:
    return 1.2 + 1.8 * load


def _legend(figure: Any, frame: FilmFrame) -> None:
    """A legend of the colours, below all frames."""
    from matplotlib import colormaps
    from matplotlib.lines import Line2D

    links = {"idle": 0.0, "half the time": 0.5, "busy": 1.0}
    handles = [Line2D([], [], color=_shade(load), linewidth=_width(load), label=text) for text, load in links.items()]
    if frame.received:
        style: dict[str, Any] = {"marker": "o", "linestyle": "none", "markeredgecolor": "black", "markersize": 6}
        fill = colormaps["Blues"]
        handles += [
            Line2D([], [], color=fill(shade), label=text, **style)
            for text, shade in (("received nothing", 0.15), ("all", 1.0))
        ]
    figure.legend(handles=handles, loc="lower center", ncols=len(handles), fontsize=7, frameon=False, handlelength=1.5)


def save_film(frames: Sequence[FilmFrame], path: Path, frames_per_second: float) -> Path:
    """`Film.save`."""
    kind = path.suffix.lower()
    if kind not in (".gif", ".png", ".svg"):
        raise HardwareError(f"a film is saved as .gif, .png or .svg, not {path.name!r}")
    if not frames:
        raise HardwareError("a film without frames can't be saved")
    amount("frames_per_second", frames_per_second, positive=True)
    figure, place = _figure(frames, 1 if kind == ".gif" else min(SHEET, len(frames)))
    try:
        if kind == ".gif":
            from matplotlib import animation

            def draw(number: int) -> list[Any]:
                place[0].clear()
                plot_frame(frames[number], place[0])
                return []

            movie = animation.FuncAnimation(figure, draw, frames=len(frames))
            movie.save(path, writer=animation.PillowWriter(fps=frames_per_second))
        else:
            for n, axes in enumerate(place):  # the first, the last, and some between
                plot_frame(frames[round(n * (len(frames) - 1) / max(1, len(place) - 1))], axes)
            figure.savefig(path, dpi=120)
    except OSError as fault:
        raise HardwareError(f"cannot write {path}: {fault.strerror or fault}") from None
    return path


def _figure(frames: Sequence[FilmFrame], count: int) -> tuple[Any, list[Any]]:
    """A figure without a window, and `count` Axes side by side."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise HardwareError("a film is drawn with matplotlib: pip install 'meshlib-tpu[plot]'") from None
    width, height = _size(frames[0])
    columns = min(count, max(1, math.floor(math.sqrt(count * height / width) + 0.5)))  # a sheet about as wide as high
    rows = math.ceil(count / columns)
    figure = Figure(figsize=(width * columns, height * rows + LEGEND))
    FigureCanvasAgg(figure)
    total = height * rows + LEGEND
    bottom, high = LEGEND / total, height / total
    place = [
        figure.add_axes(
            (n % columns / columns, bottom + high * (rows - 1 - n // columns), 1 / columns, high * _share(height))
        )
        for n in range(count)
    ]
    _legend(figure, frames[0])
    return figure, place


def _share(height: float) -> float:
    """Share of a frame's height below its title."""
    return (height - TITLE) / height


def _size(frame: FilmFrame) -> tuple[float, float]:
    """Inches of a frame with its title."""
    places = spots(frame.torus)
    return max(LEAST, HOP * (max(x for x, _ in places) + 1.2)), HOP * (max(y for _, y in places) + 1.2) + TITLE


def _axes(ax: Any, frame: FilmFrame) -> Any:
    if ax is None:
        try:
            from matplotlib import pyplot
        except ImportError:
            raise HardwareError("FilmFrame.plot needs matplotlib: pip install 'meshlib-tpu[plot]'") from None
        return pyplot.figure(figsize=_size(frame)).add_subplot()
    if not callable(getattr(ax, "add_collection", None)):
        raise HardwareError(f"FilmFrame.plot: ax must be matplotlib Axes, got {type(ax).__name__} {ax!r:.80}")
    return ax
