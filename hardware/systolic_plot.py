"""Systolic array cycles as text, on matplotlib Axes, and as files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from hardware.errors import HardwareError

if TYPE_CHECKING:
    from hardware.systolic import Run, State

COLOURS = ("#8ecae6", "#ffb703", "#90be6d", "#f28482", "#b8a1e3")  # by row of x
LABEL, CELL = 14, 11  # characters before the boxes, and per box
SAVED = 24  # at most this many rows or columns in a saved frame


def text_width(columns: int) -> int:
    """Characters of a line of `State.text`."""
    return LABEL + columns * (CELL + 1) + 1


def state_text(state: State, shadow: bool) -> str:
    """`State.text`."""
    rows, columns = state.weight.shape
    rule = " " * LABEL + "+" + ("-" * CELL + "+") * columns
    lines = [f"cycle {state.cycle}: {state.busy} of {rows * columns} processing elements busy", rule]
    for r in range(rows):
        fed = state.feed_vector[r] >= 0
        label = f"x{r}[{state.feed_vector[r]}] = {state.feed[r]} >" if fed else ""
        busy = state.vector[r] >= 0
        cells = [
            ("", [f"w {w}" for w in state.weight[r]]),
            (label, [f"x {a} >" if on else "x . " for a, on in zip(state.activation[r], busy, strict=True)]),
            ("", [f"p {p} v" if on else "p . " for p, on in zip(state.partial[r], busy, strict=True)]),
        ]
        if shadow:
            cells.insert(1, ("", [f"(w {s})" for s in state.shadow[r]]))
        for left, texts in cells:
            lines.append(left.rjust(LABEL - 1) + " |" + "|".join(text.center(CELL) for text in texts) + "|")
        lines.append(rule)
    outs = [
        f"y{c}[{m}]={y}" if m >= 0 else "" for c, (m, y) in enumerate(zip(state.out_vector, state.out, strict=True))
    ]
    lines.append(" " * LABEL + " " + " ".join(out.center(CELL) for out in outs))
    return "\n".join(line.rstrip() for line in lines)


def plot_state(state: State, ax: Any, shadow: bool) -> Any:
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
            if shadow:
                lines.append(f"(w {state.shadow[r, c]})")
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


def save_run(run: Run, path: Path, shadow: bool) -> tuple[Path, ...]:
    """`Run.save`."""
    kind = path.suffix.lower()
    if kind not in (".gif", ".png", ".svg"):
        raise HardwareError(f"a run is saved as .gif, .png or .svg, not {path.name!r}")
    rows, columns = run.registers.rows, run.registers.columns
    if max(rows, columns) > SAVED:
        raise HardwareError(f"a frame shows at most {SAVED} rows and columns, not {rows}x{columns}")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise HardwareError("saving a run needs matplotlib; pip install 'meshlib-tpu[plot]'") from None
    figure = Figure(figsize=(1.6 * columns + 2.4, 1.3 * rows + 1.8))
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()

    def draw(cycle: int) -> list[Any]:
        axes.clear()
        plot_state(run.state(cycle), axes, shadow)
        return []

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if kind == ".gif":
            from matplotlib import animation

            movie = animation.FuncAnimation(figure, draw, frames=run.cycles)
            movie.save(path, writer=animation.PillowWriter(fps=1))
            return (path,)
        written = tuple(path.with_name(f"{path.stem}-{cycle:03d}{path.suffix}") for cycle in range(run.cycles))
        for cycle, file in enumerate(written):
            draw(cycle)
            figure.savefig(file, dpi=100)
    except OSError as fault:
        raise HardwareError(f"cannot write {path}: {fault.strerror or fault}") from None
    return written


def _axes(ax: Any, rows: int, columns: int) -> Any:
    if ax is None:
        try:
            from matplotlib import pyplot
        except ImportError:
            raise HardwareError("State.plot needs matplotlib: pip install 'meshlib-tpu[plot]'") from None
        return pyplot.figure(figsize=(2 + columns, 2 + rows)).add_subplot()
    if not callable(getattr(ax, "add_patch", None)):
        raise HardwareError(f"State.plot: ax must be matplotlib Axes, got {type(ax).__name__} {ax!r:.80}")
    return ax
