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

from hardware.checks import whole
from hardware.errors import HardwareError
from hardware.mxu import MXU, Mode, check_mode
from hardware.registers import Registers
from hardware.systolic_plot import plot_state, save_run, state_text

Array = NDArray[Any]
Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class State:
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
class Run:
    """Result of a clocked run: y [M, N], the cycle in which each y left the array, total cycles."""

    y: Array
    output_cycle: Ints
    cycles: int
    tiles: int
    states: tuple[State, ...]
    registers: Registers = field(repr=False)

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
