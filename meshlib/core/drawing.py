"""Plots on matplotlib Axes, where it is installed, and images written as atomic files."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from meshlib.core.errors import GraphError
from meshlib.core.files import replace_file

Panel = Callable[[Any], None]  # draws on Axes


def plotted(
    what: str, ax: object, panels: Sequence[Panel], size: tuple[float, float], rows: int = 1, title: str = ""
) -> Any:
    """Draw each panel on separate Axes.

    Args:
      what: the plotting method in messages, such as "Scaling.plot".
      ax: matplotlib Axes for the first panel; the path of a file, with the format as its suffix, such as .png, .svg or
        .pdf; None for a new pyplot figure, which notebooks show.
      size: figure size in inches; rows: number of rows of panels; title: title of the figure.
    Returns: the Axes, or a tuple of Axes if there are several panels.
    Raises: GraphError where matplotlib is not installed, the file cannot be written, or `ax` is something else.
    """
    if ax is not None and not isinstance(ax, str | os.PathLike):
        if not callable(getattr(ax, "add_patch", None)):
            raise GraphError(
                f"{what}: ax must be matplotlib Axes, or the path of a file, got {type(ax).__name__} {ax!r:.80}"
            )
        panels[0](ax)
        return ax
    figure = _pyplot_figure(what, size) if ax is None else _figure(what, size)
    columns = -(-len(panels) // rows)
    axes = tuple(figure.add_subplot(rows, columns, n) for n in range(1, len(panels) + 1))
    for panel, place in zip(panels, axes, strict=True):
        panel(place)
    if title:
        figure.suptitle(title, fontsize=9)
    if ax is not None:
        _save(figure, ax, what)
    return axes[0] if len(axes) == 1 else axes


def _figure(what: str, size: tuple[float, float]) -> Any:
    """An empty figure outside pyplot, for files."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise GraphError(f"{what} needs matplotlib: pip install 'meshlib-tpu[plot]'") from None
    return Figure(figsize=size, layout="constrained")


def _pyplot_figure(what: str, size: tuple[float, float]) -> Any:
    """An empty pyplot figure, which notebooks show."""
    try:
        from matplotlib import pyplot
    except ImportError:
        raise GraphError(f"{what} needs matplotlib: pip install 'meshlib-tpu[plot]'") from None
    return pyplot.figure(figsize=size, layout="constrained")


def _save(figure: Any, path: str | os.PathLike[str], what: str) -> None:
    def write(file: BinaryIO) -> None:
        try:
            figure.savefig(file, dpi=150, format=Path(path).suffix[1:] or None)
        except ValueError as fault:  # a suffix that matplotlib does not know
            raise GraphError(f"{what}: {path} can't be written: {fault}") from None

    replace_file(path, write, what, GraphError)
