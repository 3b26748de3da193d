"""Animations of a torus: busy links and received data, frame by frame, as text or drawn.

    film = film_of(all_reduce(Torus((4, 4)), data), Links(45e9))
    print(film.frames[3])           text for a terminal
    film.save("all_reduce.gif")     an animation; .png or .svg: some of its frames beside each other

In text a node is a digit, the tenths of what it receives that have arrived (* for all), and between nodes > and < say
which way a link carries data (= both ways), v and ^ (‖) down and up. Axes before the last two are planes beside each
other.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hardware.cells import film_cell
from hardware.checks import HardwareError, amount, whole
from hardware.detours import link_between
from hardware.drawing import axes_of, figure_of, write_animation
from hardware.events import Links, Traffic
from hardware.ring_plans import CollectivePlan
from hardware.torus import Torus
from hardware.unknown_names import Attributes

FRAMES, MOST_FRAMES = 24, 10_000
SHEET = 12  # frames on one sheet
APART = 0.08  # gap between the two directions of a link
HOP, TITLE, LEGEND, LEAST = 0.6, 0.6, 0.35, 3.2  # inches: of a hop, a title and the legend; the least width of a frame
CHARACTERS = 16  # of a title for each inch
IDLE = (0.82, 0.82, 0.82, 1.0)


@dataclass(frozen=True)
class FilmFrame(Attributes):
    """State of a torus over an interval of time.

    Attributes:
      torus: the torus; title: text above the picture.
      loads: link -> share of the interval for which it is busy; missing links are idle.
      received: node -> share of its data that has arrived at the end of the interval; empty if unknown.
      failed: failed nodes; x in text.
    """

    torus: Torus
    title: str = ""
    loads: Mapping[int, float] = field(default_factory=dict)
    received: Mapping[int, float] = field(default_factory=dict)
    failed: Collection[int] = ()

    def __str__(self) -> str:
        rows, columns = self._plane()
        planes = [self._plane_lines(first * rows * columns) for first in range(self.torus.nodes // (rows * columns))]
        beside = [
            "    ".join(line.ljust(len(planes[0][0])) for line in lines).rstrip() for lines in zip(*planes, strict=True)
        ]
        return "\n".join([*([self.title] if self.title else []), *beside, *self._between_planes()])

    def plot(self, ax: Any = None) -> Any:
        """Draw the frame: nodes filled by the share of data received, links coloured by load.

        Args:
          ax: matplotlib Axes; by default those of a new figure.
        Returns: the Axes.
        Raises: HardwareError where matplotlib is not installed, or `ax` is something else.
        """
        return plot_frame(self, ax)

    def load(self, node: int, axis: int, step: int) -> float:
        """The load of the link that leaves a node; 0 where there is none."""
        return self.loads.get((node * self.torus.rank + axis) * 2 + (step < 0), 0.0)

    def _plane(self) -> tuple[int, int]:
        """Rows and columns of a plane: the last two axes."""
        shape = (1, *self.torus.shape)
        return shape[-2], shape[-1]

    def _mark(self, node: int, axis: int, marks: str) -> str:
        """The character for the traffic between a node and its next neighbour along an axis, either way."""
        there = self.torus.neighbour(node, axis, 1)
        if there is None:
            return " "
        return marks[2 * (self.load(there, axis, -1) > 0) + (self.load(node, axis, 1) > 0)]

    def _plane_lines(self, first: int) -> list[str]:
        rows, columns = self._plane()
        down, across = self.torus.rank - 2, self.torus.rank - 1
        lines = []
        for row in range(rows):
            nodes = [first + row * columns + column for column in range(columns)]
            lines.append(" ".join(f"{self._digit(node)} {self._mark(node, across, '·><=')}" for node in nodes))
            if down >= 0:
                lines.append("   ".join(self._mark(node, down, "·v^‖") for node in nodes) + "  ")
        return lines

    def _digit(self, node: int) -> str:
        share = self.received.get(node)
        if share is None:
            return "x" if node in self.failed else "o"
        return "*" if share >= 1 - 1e-9 else str(int(10 * share))

    def _between_planes(self) -> list[str]:
        lines = []
        for axis in range(self.torus.rank - 2):
            onward, back = (
                sum(self.load(node, axis, step) > 0 for node in range(self.torus.nodes)) for step in (1, -1)
            )
            lines.append(f"between planes, axis {axis}: {onward} links carry data onward, {back} back")
        return lines


@dataclass(frozen=True)
class Film(Attributes):
    """Frames in order of time."""

    frames: tuple[FilmFrame, ...]

    def save(self, path: str | Path, frames_per_second: float = 4.0) -> Path:
        """Write the film: an animation as .gif, or up to twelve of its frames side by side as .png or .svg.

        Raises: HardwareError for another kind of file, where matplotlib is not installed, or the file can't be written.
        """
        return save_film(self.frames, Path(path), frames_per_second)

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.frames))

    def __repr__(self) -> str:
        return f"<Film of {len(self.frames)} frames>"

    def _repr_html_(self) -> str:
        return film_cell(self)


def film_of(collective: CollectivePlan, links: Links, frames: int = FRAMES) -> Film:
    """Simulate a collective and cut it into frames of equal length.

    Args:
      collective: a plan, such as `hardware.ring_plans.all_reduce` returns; it is run.
      links: rates of the links.
      frames: number of frames.
    Returns: Film; each frame has the loads of links during its interval, and what has arrived at its end.
    Raises: HardwareError for other arguments, or a collective that sends nothing.
    Example:
      >>> import numpy as np
      >>> from hardware.ring_plans import all_gather
      >>> film = film_of(all_gather(Torus((3,)), [np.zeros(2)] * 3, algorithm="oneway"), Links(16.0, 0.0), frames=2)
      >>> print(film)
      0 to 1 s of 2 s
      5 > 5 > 5 >
      <BLANKLINE>
      1 to 2 s of 2 s
      * > * > * >
    """
    if whole("frames", frames, low=1) > MOST_FRAMES:
        raise HardwareError(f"frames must be at most {MOST_FRAMES:,}, not {frames:,}")
    if not isinstance(collective, CollectivePlan):
        raise HardwareError(f"a film is made of a collective, such as ring_plans.all_reduce, not {collective!r:.80}")
    traffic = collective.run(links, record=True)
    if not traffic.seconds:
        raise HardwareError("the collective sends nothing: a film of it would have no frames")
    return Film(tuple(_frame(collective.torus, traffic, n, frames) for n in range(frames)))


def _frame(torus: Torus, traffic: Traffic, number: int, frames: int) -> FilmFrame:
    total = traffic.seconds
    begin, end = total * number / frames, total * (number + 1) / frames
    loads: dict[int, float] = defaultdict(float)
    arrived, due = [0.0] * torus.nodes, [0.0] * torus.nodes
    for crossing in traffic.crossings:
        shared = min(end, crossing.end_seconds) - max(begin, crossing.begin_seconds)
        if shared > 0:
            loads[crossing.link] += shared / (end - begin)
        node = torus.ends(crossing.link)[1]
        due[node] += crossing.size_bytes
        arrived[node] += crossing.size_bytes * (crossing.arrival_seconds <= end * (1 + 1e-12))
    received = {node: got / of if of else 1.0 for node, (got, of) in enumerate(zip(arrived, due, strict=True))}
    unit, name = next(((u, n) for u, n in ((1.0, "s"), (1e-3, "ms")) if total >= u), (1e-6, "us"))
    title = f"{begin / unit:.3g} to {end / unit:.3g} {name} of {total / unit:.3g} {name}"
    return FilmFrame(torus, title, dict(loads), received)


def axis_loads(torus: Torus, busy: Mapping[int, float]) -> dict[int, float]:
    """Loads of all links, from the load of each torus axis.

    Args:
      busy: torus axis -> share of the time for which its links are busy; missing axes are idle.
    Example:
      >>> sorted(axis_loads(Torus((2,), wrap=False), {0: 0.5}).items())
      [(0, 0.5), (3, 0.5)]
    """
    return {link: load for link in torus.links() if (load := busy.get(link // 2 % torus.rank, 0.0))}


def ring_loads(torus: Torus, ring: Sequence[int], load: float) -> dict[int, float]:
    """Loads of the links of a ring of nodes, each way.

    Example:
      >>> sorted(ring_loads(Torus((2, 2), wrap=False), (0, 1, 3, 2), 0.5))
      [0, 2, 4, 7, 9, 10, 13, 15]
    """
    pairs = [*zip(ring, (*ring[1:], ring[0]), strict=True)] if load else []
    return {link_between(torus, *edge): load for a, b in pairs for edge in ((a, b), (b, a))}


def spots(torus: Torus) -> list[tuple[float, float]]:
    """Drawing position of each node: x to the right, y down; planes side by side."""
    rows, columns = (1, *torus.shape)[-2:]
    places = []
    for plane, row, column in itertools.product(range(math.prod(torus.shape[:-2])), range(rows), range(columns)):
        places.append((plane * (columns + 1.5) + column, float(row)))
    return places


def strokes(frame: FilmFrame) -> list[tuple[tuple[float, float], tuple[float, float], float]]:
    """For each link of a frame the ends of its line, and its load."""
    torus, places, lines = frame.torus, spots(frame.torus), []
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
        lines.append(((x1 + dx, y1 + dy), (x2 + dx, y2 + dy), frame.loads.get(link, 0.0)))
    return lines


def plot_frame(frame: FilmFrame, ax: Any) -> Any:
    """`FilmFrame.plot`."""
    torus = frame.torus
    axes = axes_of("FilmFrame.plot", ax, _size(frame))
    from matplotlib import colormaps
    from matplotlib.collections import LineCollection

    places, lines = spots(torus), strokes(frame)
    fill = colormaps["Blues"]
    shades, widths = [_shade(load) for *_, load in lines], [_width(load) for *_, load in lines]
    axes.add_collection(LineCollection([line[:2] for line in lines], colors=shades, linewidths=widths, zorder=1))
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

            def draw(number: int) -> None:
                place[0].clear()
                plot_frame(frames[number], place[0])

            write_animation(figure, draw, len(frames), path, frames_per_second)
        else:
            for n, axes in enumerate(place):  # the first, the last, and some between
                plot_frame(frames[round(n * (len(frames) - 1) / max(1, len(place) - 1))], axes)
            figure.savefig(path, dpi=120)
    except OSError as fault:
        raise HardwareError(f"Film.save: {path} can't be written: {fault.strerror or fault}") from None
    return path


def _figure(frames: Sequence[FilmFrame], count: int) -> tuple[Any, list[Any]]:
    """A figure without a window, and `count` Axes side by side."""
    width, height = _size(frames[0])
    columns = min(count, max(1, math.floor(math.sqrt(count * height / width) + 0.5)))  # a sheet about as wide as high
    rows = math.ceil(count / columns)
    figure = figure_of("Film.save", (width * columns, height * rows + LEGEND))
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
