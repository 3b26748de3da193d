"""One cycle of a systolic array on matplotlib Axes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hardware.errors import HardwareError

if TYPE_CHECKING:
    from hardware.systolic import State

COLOURS = ("#8ecae6", "#ffb703", "#90be6d", "#f28482", "#b8a1e3")  # by row of x


def plot_state(state: State, ax: Any) -> Any:
    """`State.plot`."""
    rows, columns = state.weight.shape
    axes = _axes(ax, rows, columns)
    axes.set(xlim=(-1.3, columns), ylim=(rows + 0.5, -0.3), aspect="equal", title=f"cycle {state.cycle}")
    axes.axis("off")
    from matplotlib.patches import Rectangle

    for r in range(rows):
        for c in range(columns):
            m = state.vector[r, c]
            colour = COLOURS[m % len(COLOURS)] if m >= 0 else "white"
            axes.add_patch(Rectangle((c, r), 0.9, 0.9, facecolor=colour, edgecolor="black"))
            lines = [f"w {state.weight[r, c]}"]
            if m >= 0:
                lines += [f"x {state.activation[r, c]} \u2192", f"p {state.partial[r, c]} \u2193"]
            axes.text(c + 0.45, r + 0.45, "\n".join(lines), ha="center", va="center", fontsize=9)
        if state.feed_vector[r] >= 0:
            axes.text(-0.2, r + 0.45, f"x{r} = {state.feed[r]} \u2192", ha="right", va="center", fontsize=9)
    for c in range(columns):
        if state.out_vector[c] >= 0:
            text = f"y{c}[{state.out_vector[c]}]\n= {state.out[c]}"
            axes.text(c + 0.45, rows + 0.2, text, ha="center", va="center", fontsize=9)
    return axes


def _axes(ax: Any, rows: int, columns: int) -> Any:
    if ax is None:
        try:
            from matplotlib import pyplot
        except ImportError:
            raise HardwareError("State.plot needs matplotlib: pip install matplotlib") from None
        return pyplot.figure(figsize=(2 + columns, 2 + rows)).add_subplot()
    if not callable(getattr(ax, "add_patch", None)):
        raise HardwareError(f"State.plot: ax must be matplotlib Axes, got {type(ax).__name__} {ax!r:.80}")
    return ax
