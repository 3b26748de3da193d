"""The systolic array of a TPU: cycle of every value, and cycles of a matrix product.

`MXU(rows, columns)` multiplies x [M, K] by weights [K, N]. The weights are cut in tiles of
rows x columns, which stay in the array while M rows of x stream through:

* x[m, r] enters row r at cycle s + m + r and moves right, one processing element per cycle;
* partial sums move down; y[m, c] leaves column c at cycle s + m + rows - 1 + c;
* results of successive tiles of K are added to an accumulator below the array.

Four ways in which weights get in (a tile is loaded in F cycles, F = rows unless memory is slower):

    noload            already there (one tile only)     T + R + C - 2
    serial            array idle while they shift       n (F + T + R + C - 2)
    shadow            next tile shifts down shadow      F + (n-1) max(T, F) + T + R + C - 2
                      registers, column c skewed by
                      c cycles, while this one streams
    shadow_unskewed   as shadow, all columns at once    F + (n-1) max(T, F + C - 1) + T + R + C - 2

with n tiles of T = M rows. The clocked array is in `hardware.systolic`; both agree cycle by cycle.

Sources: Jouppi et al., ISCA 2017 (arXiv:1704.04760), section 2; Samajdar et al., SCALE-Sim
(arXiv:1811.02883) for the serial mode; Kung, "Why systolic architectures?", 1982.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Literal, get_args

from numpy.typing import NDArray

from hardware.checks import HardwareError, amount, one_of, whole
from hardware.unknown_names import Attributes

if TYPE_CHECKING:
    from hardware.systolic import Run

Mode = Literal["noload", "serial", "shadow", "shadow_unskewed"]
MODES: tuple[str, ...] = get_args(Mode)


@dataclass(frozen=True)
class TileSchedule:
    """Load and stream cycles of every tile, counted from 0.

    Attributes:
      load: cycle in which each tile's first weight row enters (all 0 in mode noload).
      start: cycle in which each tile's first row of x reaches PE (0, 0).
      shifts: cycles after `load` in which a row of weights shifts in, one per row of the array.
      skew: cycles by which each column's weights lag those of the column to its left (0 or 1).
      cycles: total, from the first weight or x to the last y.
    """

    load: tuple[int, ...]
    start: tuple[int, ...]
    shifts: tuple[int, ...]
    skew: int
    cycles: int


@dataclass(frozen=True)
class Counters:
    """Cycles of a run by activity, as TPU v1's performance counters divide them.

    Attributes:
      active: rows of x enter; shift: they wait while weights shift into the array (at most one tile's worth
        per tile); stall: they wait for memory; drain: no more rows, results still leave.
    """

    active: int
    shift: int
    stall: int
    drain: int


@dataclass(frozen=True)
class MXU(Attributes):
    """A weight-stationary array of `rows` x `columns` processing elements.

    Example:
      >>> from hardware import MXU
      >>> MXU(128, 128).cycles(m=100, k=784, n=10)
      1250
      >>> import numpy as np
      >>> MXU(2, 3).run(np.array([[1, 2, 3], [4, 5, 6]]), np.array([[1, 10]])).y.tolist()
      [[41, 52, 63]]

    Raises: HardwareError unless both are integers >= 1.
    Source: module docstring.
    """

    rows: int = 128
    columns: int = 128

    def __post_init__(self) -> None:
        whole("MXU rows", self.rows, low=1)
        whole("MXU columns", self.columns, low=1)

    def tiles(self, k: int, n: int) -> int:
        """Tiles of weights [k, n]; ragged ones count whole."""
        return math.ceil(whole("k", k, low=1) / self.rows) * math.ceil(whole("n", n, low=1) / self.columns)

    def load_cycles(self, weight_rows_per_cycle: float | Fraction = 1) -> int:
        """Cycles F to load one tile of weights, at most one row per cycle."""
        if type(weight_rows_per_cycle) is int and weight_rows_per_cycle == 1:
            return self.rows  # the usual rate, without fractions
        return math.ceil(self.rows / _rate(weight_rows_per_cycle))

    def cycles(self, m: int, k: int, n: int, mode: Mode = "shadow", weight_rows_per_cycle: float | Fraction = 1) -> int:
        """Cycles of x [m, k] times weights [k, n], in closed form.

        Args:
          m, k, n: sizes, >= 1.
          mode: how weights get in, see the module docstring.
          weight_rows_per_cycle: rate in (0, 1] at which memory delivers rows of a tile.
        Returns: cycles from the first weight (or x) entering to the last y leaving.
        Raises: HardwareError for sizes below 1, an unknown mode, a rate outside (0, 1], or
          noload with more than one tile.
        Example:
          >>> from hardware import MXU
          >>> from hardware.mxu import MODES
          >>> [MXU(8, 8).cycles(4, 4, 4, mode) for mode in MODES]
          [18, 26, 26, 26]
        """
        exposed, count = self.exposed_cycles(m, k, n, mode, weight_rows_per_cycle), self.tiles(k, n)
        drains = count if mode == "serial" else 1
        return exposed + count * m + drains * (self.rows + self.columns - 2)

    def exposed_cycles(
        self, m: int, k: int, n: int, mode: Mode = "shadow", weight_rows_per_cycle: float | Fraction = 1
    ) -> int:
        """Cycles in which no row enters because weights are missing (the first load included).

        TPU v1's performance counters call this weight stall and weight shift.

        Example:
          >>> from hardware import MXU
          >>> MXU(8, 8).exposed_cycles(m=8, k=32, n=8), MXU(8, 8).exposed_cycles(m=4, k=32, n=8)
          (8, 20)

        Source: Jouppi et al. 2017, table 3.
        """
        t, count = whole("m", m, low=1), self.tiles(k, n)
        check_mode(mode, count)
        load = self.load_cycles(weight_rows_per_cycle)
        if mode == "noload":
            return 0
        if mode == "serial":
            return count * load
        ready = load + self.columns - 1 if mode == "shadow_unskewed" else load
        return load + (count - 1) * max(0, ready - t)

    def counters(
        self, m: int, k: int, n: int, mode: Mode = "shadow", weight_rows_per_cycle: float | Fraction = 1
    ) -> Counters:
        """`cycles` split by the array's activity.

        Example:
          >>> from hardware import MXU
          >>> MXU(256, 256).counters(m=200, k=2560, n=256, weight_rows_per_cycle=0.19)
          Counters(active=2000, shift=2560, stall=9120, drain=510)

        Source: Jouppi et al. 2017, table 3.
        """
        count = self.tiles(k, n)
        exposed = self.exposed_cycles(m, k, n, mode, weight_rows_per_cycle)
        shift = 0
        if exposed:  # of the stall before a tile, the shift itself takes at most one cycle per row
            load = self.load_cycles(weight_rows_per_cycle)
            first = load if mode != "serial" else exposed // count
            later = (exposed - first) // (count - 1) if count > 1 else 0
            shift = min(first, self.rows) + (count - 1) * min(later, self.rows)
        active = count * m
        total = self.cycles(m, k, n, mode, weight_rows_per_cycle)
        return Counters(active, shift, exposed - shift, total - active - exposed)

    def utilisation(
        self, m: int, k: int, n: int, mode: Mode = "shadow", weight_rows_per_cycle: float | Fraction = 1
    ) -> float:
        """Share of the array's multiply-adds that are useful, over the whole run.

        Example:
          >>> from hardware import MXU
          >>> round(MXU().utilisation(m=100_000, k=128, n=128), 2)
          1.0
        """
        work = m * k * n
        return work / (self.cycles(m, k, n, mode, weight_rows_per_cycle) * self.rows * self.columns)

    def schedule(
        self, m: int, count: int, mode: Mode = "shadow", weight_rows_per_cycle: float | Fraction = 1
    ) -> TileSchedule:
        """The cycles of every load and stream of `count` tiles of m rows, event by event."""
        whole("m", m, low=1)
        check_mode(mode, whole("count", count, low=1))
        shifts = _arrivals(self.rows, weight_rows_per_cycle)
        fill, loading = m + self.rows + self.columns - 2, shifts[-1] + 1
        if mode == "noload":
            return TileSchedule((0,), (0,), shifts, 0, fill)
        load, start = [0], [loading]
        for _ in range(count - 1):
            if mode == "serial":
                load.append(start[-1] + fill)
                start.append(load[-1] + loading)
            else:  # a shadow register is free again once its last column has taken its weights
                load.append(start[-1] + (self.columns - 1 if mode == "shadow_unskewed" else 0))
                start.append(max(start[-1] + m, load[-1] + loading))
        return TileSchedule(tuple(load), tuple(start), shifts, int(mode == "shadow"), start[-1] + fill)

    def run(
        self,
        weights: NDArray[Any],
        x: NDArray[Any],
        mode: Mode = "shadow",
        weight_rows_per_cycle: float | Fraction = 1,
        states: bool = False,
    ) -> Run:
        """Clock the array through x [M, K] times weights [K, N]; see `hardware.systolic.run`."""
        from hardware.systolic import run

        return run(self, weights, x, mode, weight_rows_per_cycle, states)


def check_mode(mode: str, tiles: int) -> None:
    """Refuse unknown modes, and noload for more than one tile.

    Raises: HardwareError that lists the modes.
    """
    one_of("weight mode", mode, MODES)
    if mode == "noload" and tiles != 1:
        raise HardwareError(f"mode 'noload' holds one tile of weights, not {tiles}; use 'shadow' or 'serial'")


def _rate(rate: float | Fraction) -> Fraction:
    """A rate in (0, 1] as the exact decimal fraction that was written, so that rounding up is exact."""
    if not isinstance(rate, Fraction):
        rate = Fraction(repr(amount("weight_rows_per_cycle", rate, positive=True)))
    if not 0 < rate <= 1:
        raise HardwareError(f"weight_rows_per_cycle must be in (0, 1], not {float(rate)!r}")
    return rate


def _arrivals(rows: int, rate: float | Fraction) -> tuple[int, ...]:
    """Cycles at which row 0, 1, ... of a tile have arrived, at `rate` rows per cycle."""
    per_cycle = _rate(rate)
    return tuple(math.ceil((row + 1) / per_cycle) - 1 for row in range(rows))
