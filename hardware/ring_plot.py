"""One step of a ring collective on matplotlib Axes, and all of them as a GIF."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from hardware.checks import amount, whole
from hardware.errors import HardwareError
from hardware.systolic_plot import COLOURS

if TYPE_CHECKING:
    from hardware.ring_steps import RingRun


def plot_step(run: RingRun, number: int, ax: Any) -> Any:
    """`RingRun.plot`."""
    if whole("step", number) >= len(run.steps):
        raise HardwareError(f"step {number} is not one of the {len(run.steps)} steps of this run, from 0")
    from hardware.ring_steps import shown

    step, n = run.steps[number], len(run.results)
    axes = _axes(ax, n)
    axes.clear()
    title = f"{run.kind}: " + (f"step {number} of {len(run.steps) - 1}, {step.phase}" if number else "start")
    axes.set(xlim=(-1.2, n + 0.1), ylim=(n, -0.3), aspect="equal", title=title)
    axes.axis("off")
    from matplotlib.patches import Rectangle

    arrived = {(t.receiver, t.block) for t in step.transfers}
    for node, row in enumerate(step.held):
        axes.text(-0.15, node + 0.45, f"node {node}", ha="right", va="center", fontsize=9)
        for b, block in enumerate(row):
            colour = "white" if block is None else COLOURS[b % len(COLOURS)]
            width = 2.5 if (node, b) in arrived else 0.8
            axes.add_patch(Rectangle((b, node), 0.9, 0.9, facecolor=colour, edgecolor="black", linewidth=width))
            axes.text(b + 0.45, node + 0.45, shown(block), ha="center", va="center", fontsize=8)
    for t in step.transfers:
        begin, end = (t.block + 0.8, t.sender + 0.75), (t.block + 0.8, t.receiver + 0.15)
        style = {"arrowstyle": "->", "connectionstyle": "arc3,rad=0.3", "color": "#444444"}
        axes.annotate("", xy=end, xytext=begin, arrowprops=style)
    return axes


def save_gif(run: RingRun, path: Path, seconds: float) -> None:
    """`RingRun.save`."""
    if path.suffix.lower() != ".gif":
        raise HardwareError(f"RingRun.save writes a .gif, not {path.name!r}")
    amount("seconds", seconds, positive=True)
    axes = _axes(None, len(run.results))
    try:
        from matplotlib import animation

        writer = animation.PillowWriter(fps=1 / seconds)
    except ImportError:
        raise HardwareError("RingRun.save needs Pillow: pip install Pillow") from None
    movie = animation.FuncAnimation(axes.figure, lambda n: [plot_step(run, n, axes)], frames=len(run.steps))
    try:
        movie.save(path, writer=writer)
    except OSError as fault:
        raise HardwareError(f"RingRun.save: {path} can't be written: {fault.strerror or fault}") from None


def _axes(ax: Any, n: int) -> Any:
    if ax is None:
        try:
            from matplotlib.figure import Figure
        except ImportError:
            raise HardwareError("RingRun.plot needs matplotlib: pip install 'meshlib-tpu[plot]'") from None
        return Figure(figsize=(2.4 + n, 1.2 + n)).add_subplot()
    if not callable(getattr(ax, "add_patch", None)):
        raise HardwareError(f"RingRun.plot: ax must be matplotlib Axes, got {type(ax).__name__} {ax!r:.80}")
    return ax
