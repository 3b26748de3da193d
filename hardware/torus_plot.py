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
APART = 0.07  # gap between the two directions of a link


def plot_frame(frame: FilmFrame, ax: Any) -> Any:
    """`Frame.plot`."""
    torus = frame.torus
    axes = _axes(ax, frame)
    from matplotlib import colormaps
    from matplotlib.collections import LineCollection

    places, lines, shades, widths = spots(torus), [], [], []
    heat, fill = colormaps["YlOrRd"], colormaps["Blues"]
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
        shades.append(heat(0.25 + 0.75 * load) if load else (0.85, 0.85, 0.85, 1.0))
        widths.append(1.0 + 2.0 * load)
    axes.add_collection(LineCollection(lines, colors=shades, linewidths=widths, zorder=1))
    colours = [
        "white" if node in frame.failed else fill(0.15 + 0.85 * frame.received.get(node, 0.6))
        for node in range(torus.nodes)
    ]
    axes.scatter(
        [x for x, _ in places], [y for _, y in places], 70, c=colours,
        edgecolors="black", linewidths=0.5, zorder=2,
    )  # fmt: skip
    axes.set(xlim=(-0.8, max(x for x, _ in places) + 0.8), ylim=(max(y for _, y in places) + 0.8, -0.8), aspect="equal")
    axes.set_title(frame.title, fontsize=8)
    axes.axis("off")
    return axes


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
            figure.savefig(path)
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
    columns = max(1, math.isqrt(count)) if count > 3 else count
    rows = math.ceil(count / columns)
    figure = Figure(figsize=(width * columns, height * rows))
    FigureCanvasAgg(figure)
    return figure, [figure.add_subplot(rows, columns, n + 1) for n in range(count)]


def _size(frame: FilmFrame) -> tuple[float, float]:
    places = spots(frame.torus)
    return 0.45 * (max(x for x, _ in places) + 2), 0.45 * (max(y for _, y in places) + 2.5)


def _axes(ax: Any, frame: FilmFrame) -> Any:
    if ax is None:
        try:
            from matplotlib import pyplot
        except ImportError:
            raise HardwareError("Frame.plot needs matplotlib: pip install 'meshlib-tpu[plot]'") from None
        return pyplot.figure(figsize=_size(frame)).add_subplot()
    if not callable(getattr(ax, "add_collection", None)):
        raise HardwareError(f"Frame.plot: ax must be matplotlib Axes, got {type(ax).__name__} {ax!r:.80}")
    return ax
