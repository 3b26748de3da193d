"""Pictures on matplotlib, where it is installed: Axes, figures without a window, and animations."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from hardware.checks import HardwareError


def axes_of(what: str, ax: Any, size: tuple[float, float]) -> Any:
    """The given Axes, or those of a new pyplot figure of this size in inches; `what` begins messages.

    Raises: HardwareError where matplotlib is not installed, or `ax` is something else.
    """
    if ax is None:
        try:
            from matplotlib import pyplot
        except ImportError:
            raise _missing(what) from None
        return pyplot.figure(figsize=size).add_subplot()
    if not callable(getattr(ax, "add_patch", None)):
        raise HardwareError(f"{what}: ax must be matplotlib Axes, got {type(ax).__name__} {ax!r:.80}")
    return ax


def figure_of(what: str, size: tuple[float, float]) -> Any:
    """An empty figure without a window, for files. Raises: HardwareError where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise _missing(what) from None
    return Figure(figsize=size)


def write_animation(figure: Any, draw: Callable[[int], object], frames: int, path: Path, per_second: float) -> None:
    """Write an animated GIF, of which `draw` draws each frame on the figure."""
    from matplotlib import animation

    movie = animation.FuncAnimation(figure, lambda n: [draw(n)], frames=frames)
    movie.save(path, writer=animation.PillowWriter(fps=per_second))


def _missing(what: str) -> HardwareError:
    return HardwareError(f"{what} needs matplotlib: pip install 'meshlib-tpu[plot]'")
