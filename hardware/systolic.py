"""The systolic array, clocked: every register of every processing element moves each cycle.

In one cycle, PE (r, c)

1. takes the weight of its shadow register over, if the first row of a new tile reaches it now;
2. shifts its shadow register down the column, if the loading wave has reached it;
3. takes the activation of its left neighbour (or of the feed, in column 0);
4. adds weight * activation to the partial sum of its upper neighbour (0, in row 0) and keeps the sum.

A vector's number travels with its activation, so that what leaves below names itself. Results are computed in
waves, one row of processing elements at a time over many vectors; the registers of any cycle follow from them and
from the schedule (`hardware.registers`). Values are those of `hardware.numerics.mxu_matmul`, bit for bit.

Source: `hardware.mxu`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hardware.cells import COLOURS, run_cell
from hardware.checks import HardwareError, whole
from hardware.drawing import axes_of, figure_of, write_animation
from hardware.mxu import MXU, Mode, check_mode
from hardware.registers import Registers
from hardware.unknown_names import Attributes

LABEL, CELL = 14, 11  # characters before the boxes, and per box
SAVED = 24  # at most this many rows or columns in a saved frame
Array = NDArray[Any]


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
    axes = axes_of("State.plot", ax, (2 + columns, 2 + rows))
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
    figure = figure_of("Run.save", (1.6 * columns + 2.4, 1.3 * rows + 1.8))
    axes = figure.add_subplot()

    def draw(cycle: int) -> None:
        axes.clear()
        plot_state(run.state(cycle), axes, shadow)

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if kind == ".gif":
            write_animation(figure, draw, run.cycles, path, per_second=1)
            return (path,)
        written = tuple(path.with_name(f"{path.stem}-{cycle:03d}{path.suffix}") for cycle in range(run.cycles))
        for cycle, file in enumerate(written):
            draw(cycle)
            figure.savefig(file, dpi=100)
    except OSError as fault:
        raise HardwareError(f"Run.save: {path} can't be written: {fault.strerror or fault}") from None
    return written


Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class State(Attributes):
    """Every register after one cycle; arrays are [rows, columns] unless said. -1 means empty.

    Attributes:
      cycle: counted from 0.
      feed: value entering each row this cycle, [rows]; feed_vector: its row of x, or -1.
      activation, partial: registers of each PE; vector: the row of x they belong to, or -1.
      tile: the tile of weights that this row of x streams for, or -1.
      weight, shadow: the weight in use and the one on its way.
      out: what leaves each column, [columns]; out_vector: its row of x, or -1.
    """

    cycle: int
    feed: Array
    feed_vector: Ints
    activation: Array
    vector: Ints
    tile: Ints
    partial: Array
    weight: Array
    shadow: Array
    out: Array
    out_vector: Ints

    @property
    def busy(self) -> int:
        """Processing elements that did useful work this cycle."""
        return int((self.vector >= 0).sum())

    def text(self, shadow: bool = False) -> str:
        """The array in this cycle as text boxes: weight w, value x moving right, partial sum p moving down.

        Args:
          shadow: whether boxes have their shadow register, (w), too.
        Example:
          >>> state = next(trace(MXU(1, 2), np.array([[3, 4]]), np.array([[5]]), "noload"))
          >>> print(state.text())
          cycle 0: 1 of 2 processing elements busy
                        +-----------+-----------+
                        |    w 3    |    w 4    |
            x0[0] = 5 > |   x 5 >   |    x .    |
                        |   p 15 v  |    p .    |
                        +-----------+-----------+
                           y0[0]=15
        """
        return state_text(self, shadow)

    def __str__(self) -> str:
        return self.text()

    def plot(self, ax: Any = None, shadow: bool = False) -> Any:
        """Draw the array in this cycle: one square per processing element, coloured by its row of x.

        Args:
          ax: matplotlib Axes; by default those of a new figure.
          shadow: whether squares have their shadow register, (w), too.
        Returns: the Axes.
        Raises: HardwareError where matplotlib is not installed, or `ax` is something else.
        """
        return plot_state(self, ax, shadow)


@dataclass(frozen=True, eq=False)
class Run(Attributes):
    """Result of a clocked run: y [M, N], the cycle in which each y left the array, total cycles."""

    y: Array
    output_cycle: Ints
    cycles: int
    tiles: int
    states: tuple[State, ...]
    registers: Registers = field(repr=False)

    def __repr__(self) -> str:
        rows, columns = self.registers.rows, self.registers.columns
        return f"<Run of a {rows}x{columns} systolic array: {self.cycles} cycles, y {self.y.shape}>"

    def _repr_html_(self) -> str:
        return run_cell(self)

    def state(self, cycle: int) -> State:
        """Every register after `cycle`; recomputed if the run did not keep its states.

        Args:
          cycle: from 0 to `cycles` - 1; cycles in ascending order are read fastest.
        Raises: HardwareError for another cycle.
        Example:
          >>> run(MXU(2, 2), np.eye(2), np.ones((3, 2)), "noload").state(1).partial.tolist()
          [[1.0, 0.0], [1.0, 0.0]]
        """
        if whole("cycle", cycle) >= self.cycles:
            raise HardwareError(f"cycle {cycle} is not one of the {self.cycles} cycles of this run")
        return _state(self.registers, cycle)

    def save(self, path: str | Path, shadow: bool = False) -> tuple[Path, ...]:
        """Draw all cycles: NAME.gif is an animation, NAME.png or NAME.svg become NAME-000.png, NAME-001.png, ...

        Args:
          shadow: as of `State.plot`.
        Returns: the files.
        Raises: HardwareError for another kind of file, an array of more than 24 rows or columns, a file that can't be
          written, or where matplotlib is not installed.
        """
        return save_run(self, Path(path), shadow)


def run(
    mxu: MXU,
    weights: Array,
    x: Array,
    mode: Mode = "shadow",
    weight_rows_per_cycle: float | Fraction = 1,
    states: bool = False,
) -> Run:
    """Clock `mxu` through x times weights.

    Args:
      weights: [K, N], float32, float64 or integer; padded with zeros to whole tiles.
      x: [M, K]. float32 stays float32, integers become int64, a mixture float64.
      mode, weight_rows_per_cycle: see `hardware.mxu`.
      states: keep the registers after each cycle (cycles * rows * columns values); `Run.state` reads those of one.
    Returns: Run; `output_cycle` is that of the last tile of K, when y is complete.
    Raises: HardwareError for wrong ranks, sizes or dtypes, and as `MXU.cycles`.
    Example:
      >>> result = run(MXU(3, 3), np.eye(3), np.array([[1.0, 2.0, 3.0]]), mode="noload", states=True)
      >>> result.y.tolist(), result.output_cycle.tolist(), result.cycles
      ([[1.0, 2.0, 3.0]], [[2, 3, 4]], 5)
      >>> [state.busy for state in result.states]
      [1, 2, 3, 2, 1]

    Source: module docstring.
    """
    x, weights = _operands(x, weights)
    registers, cycles = _set_up(mxu, weights, x, mode, weight_rows_per_cycle)
    y, left = registers.product()
    n = weights.shape[1]
    recorded = tuple(_state(registers, cycle) for cycle in range(cycles if states else 0))
    return Run(y[:, :n].copy(), left[:, :n].copy(), cycles, len(registers.tiles), recorded, registers)


def trace(
    mxu: MXU, weights: Array, x: Array, mode: Mode = "shadow", weight_rows_per_cycle: float | Fraction = 1
) -> Iterator[State]:
    """Iterate over the states of a run, one per cycle: `run(..., states=True)` without keeping them.

    Raises: HardwareError as `run`.
    Example:
      >>> [state.busy for state in trace(MXU(2, 2), np.eye(2), np.ones((3, 2)), "noload")]
      [1, 3, 4, 3, 1]
    """
    x, weights = _operands(x, weights)
    registers, cycles = _set_up(mxu, weights, x, mode, weight_rows_per_cycle)
    return (_state(registers, cycle) for cycle in range(cycles))


def _set_up(mxu: MXU, weights: Array, x: Array, mode: Mode, rate: float | Fraction) -> tuple[Registers, int]:
    """Registers and number of cycles of a run."""
    count = mxu.tiles(*weights.shape)
    check_mode(mode, count)
    schedule = mxu.schedule(x.shape[0], count, mode, rate)
    return Registers(mxu, schedule, weights, x), schedule.cycles


def _state(registers: Registers, cycle: int) -> State:
    window = registers.window(cycle)
    weight = registers.weight(window.started)
    partial = registers.partial(cycle, window, weight)
    activation, vector = window.activation.copy(), window.vector.copy()
    return State(
        cycle=cycle,
        feed=activation[:, 0].copy(),
        feed_vector=vector[:, 0].copy(),
        activation=activation,
        vector=vector,
        tile=window.tile.copy(),
        partial=partial.copy(),
        weight=weight,
        shadow=registers.shadow(cycle),
        out=partial[-1].copy(),
        out_vector=vector[-1].copy(),
    )


def _operands(x: Array, weights: Array) -> tuple[Array, Array]:
    try:
        x, weights = np.asarray(x), np.asarray(weights)
    except (TypeError, ValueError) as fault:  # ragged nested lists
        raise HardwareError(f"MXU: x and weights must be arrays: {fault}") from None
    shapes = f"x {x.shape}, weights {weights.shape}"
    if x.ndim != 2 or weights.ndim != 2 or x.shape[1] != weights.shape[0] or 0 in (*x.shape, *weights.shape):
        raise HardwareError(f"MXU: need x [M, K] and weights [K, N] with one K, all >= 1; got {shapes}")
    if x.dtype.kind not in "iuf" or weights.dtype.kind not in "iuf":
        raise HardwareError(f"MXU: operands must be float or integer; got x {x.dtype}, weights {weights.dtype}")
    if x.dtype == weights.dtype == np.float32:
        return x, weights
    kind = np.int64 if x.dtype.kind in "iu" and weights.dtype.kind in "iu" else np.float64
    return x.astype(kind), weights.astype(kind)
