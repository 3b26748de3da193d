"""The systolic array, clocked: every register of every processing element moves each cycle.

In one cycle, PE (r, c)

1. takes the weight of its shadow register over, if the first row of a new tile reaches it now;
2. shifts its shadow register down the column, if the loading wave has reached it;
3. takes the activation of its left neighbour (or of the feed, in column 0);
4. adds weight * activation to the partial sum of its upper neighbour (0, in row 0) and keeps the sum.

A vector's number travels with its activation, so that what leaves below names itself. Moving right is
done on a delay line: the registers are a window that slides left over a buffer, one column per
cycle. Values are those of `hardware.numerics.mxu_matmul`, bit for bit.

Source: `hardware.mxu`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hardware.errors import HardwareError
from hardware.mxu import MXU, Mode, Schedule, check_mode
from hardware.systolic_plot import plot_state

Array = NDArray[Any]
Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class State:
    """Every register after one cycle; arrays are [rows, columns] unless said. -1 means: nothing there.

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

    def plot(self, ax: Any = None) -> Any:
        """Draw the array in this cycle: a square for each processing element, coloured by the row of x it works on.

        Args:
          ax: matplotlib Axes; by default those of a new figure.
        Returns: the Axes.
        Raises: HardwareError where matplotlib is not installed, or `ax` is something else.
        """
        return plot_state(self, ax)


@dataclass(frozen=True, eq=False)
class Run:
    """Result of a clocked run: y [M, N], the cycle in which each y left the array, total cycles."""

    y: Array
    output_cycle: Ints
    cycles: int
    tiles: int
    states: tuple[State, ...]


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
      states: keep the registers after each cycle (cycles * rows * columns values).
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
    (m, k), n = x.shape, weights.shape[1]
    array, schedule = _set_up(mxu, weights, x, mode, weight_rows_per_cycle)
    sink = _Sink(mxu, m, k, n, x.dtype)
    kept = []
    with np.errstate(all="ignore"):  # idle PEs multiply whatever they hold by zero
        for t in range(schedule.cycles):
            sink.take(t, *array.step(t))
            if states:
                kept.append(array.state(t, m))
    sink.flush()
    tiles = mxu.tiles(k, n)
    return Run(sink.y[:, :n].copy(), sink.output_cycle[:, :n].copy(), schedule.cycles, tiles, tuple(kept))


def trace(
    mxu: MXU, weights: Array, x: Array, mode: Mode = "shadow", weight_rows_per_cycle: float | Fraction = 1
) -> Iterator[State]:
    """The state after each cycle, one at a time: as `run(..., states=True)` without keeping them all.

    Raises: HardwareError as `run`.
    Example:
      >>> [state.busy for state in trace(MXU(2, 2), np.eye(2), np.ones((3, 2)), "noload")]
      [1, 3, 4, 3, 1]
    """
    x, weights = _operands(x, weights)
    array, schedule = _set_up(mxu, weights, x, mode, weight_rows_per_cycle)
    for t in range(schedule.cycles):
        with np.errstate(all="ignore"):
            array.step(t)
        yield array.state(t, x.shape[0])


def _set_up(mxu: MXU, weights: Array, x: Array, mode: Mode, rate: float | Fraction) -> tuple[_Array, Schedule]:
    """The array before its first cycle, and the schedule of its tiles."""
    count = mxu.tiles(*weights.shape)
    check_mode(mode, count)
    schedule = mxu.schedule(x.shape[0], count, mode, rate)
    stream = _Stream(mxu, schedule, x, count)
    return _Array(mxu, schedule, _weight_tiles(mxu, weights), stream), schedule


def _operands(x: Array, weights: Array) -> tuple[Array, Array]:
    try:
        x, weights = np.asarray(x), np.asarray(weights)
    except (TypeError, ValueError) as fault:  # rows of unequal lengths
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


def _weight_tiles(mxu: MXU, weights: Array) -> Array:
    """[tiles, rows, columns]; the tiles of K of one block of N follow each other."""
    deep, wide = (-(-weights.shape[0] // mxu.rows), -(-weights.shape[1] // mxu.columns))
    padded = np.zeros((deep * mxu.rows, wide * mxu.columns), weights.dtype)
    padded[: weights.shape[0], : weights.shape[1]] = weights
    blocks = padded.reshape(deep, mxu.rows, wide, mxu.columns)
    return np.ascontiguousarray(blocks.transpose(2, 0, 1, 3)).reshape(-1, mxu.rows, mxu.columns)


class _Stream:
    """The skewed feed: row r receives element r of the vector that entered row 0 r cycles before."""

    def __init__(self, mxu: MXU, schedule: Schedule, x: Array, tiles: int) -> None:
        rows, (m, k) = mxu.rows, x.shape
        depth = -(-k // rows)
        padded = np.zeros((m, depth * rows), x.dtype)
        padded[:, :k] = x
        self.rows = rows
        self.values = np.zeros((rows + schedule.cycles, rows + 1), x.dtype)  # one spare: strides never 0
        self.tags = np.full(rows + schedule.cycles, -1, np.int64)
        for tile in range(tiles):
            slots = slice(rows + schedule.start[tile], rows + schedule.start[tile] + m)
            block = tile % depth * rows
            self.values[slots, :rows] = padded[:, block : block + rows]
            self.tags[slots] = np.arange(tile * m, (tile + 1) * m)
        self.flat = self.values.reshape(-1)

    def at(self, t: int) -> tuple[Array, Ints]:
        """Values and vector numbers that enter rows 0, 1, ... in cycle t."""
        first = (t + self.rows) * (self.rows + 1)
        diagonal = self.flat[first : first - self.rows * self.rows : -self.rows]
        return diagonal, self.tags[t + self.rows : t : -1]


class _Sink:
    """The accumulators below the array: adds what leaves each column, tile by tile."""

    def __init__(self, mxu: MXU, m: int, k: int, n: int, kind: Any) -> None:
        self.m, self.columns = m, mxu.columns
        self.depth, wide = -(-k // mxu.rows), -(-n // mxu.columns)
        self.y = np.zeros((m, wide * mxu.columns), kind)
        self.output_cycle = np.zeros(self.y.shape, np.int64)
        self.values = np.zeros((1024, mxu.columns), kind)
        self.tags = np.full((1024, mxu.columns), -1, np.int64)
        self.first = self.used = 0

    def take(self, t: int, values: Array, tags: Ints) -> None:
        if self.used == len(self.values):
            self.flush()
        if not self.used:
            self.first = t
        self.values[self.used] = values
        self.tags[self.used] = tags
        self.used += 1

    def flush(self) -> None:
        """Add the outputs of the cycles since the last flush, in the order of their tiles."""
        tags = self.tags[: self.used].reshape(-1)
        full = np.flatnonzero(tags >= 0)
        tile, vector = np.divmod(tags[full], self.m)
        cycle, column = np.divmod(full, self.columns)
        place = vector * self.y.shape[1] + tile // self.depth * self.columns + column
        np.add.at(self.y.reshape(-1), place, self.values[: self.used].reshape(-1)[full])  # one by one, in order
        self.output_cycle.reshape(-1)[place] = self.first + cycle
        self.used = 0


class _Array:
    """The registers and one clock step.

    Registers are stored by column, [columns, rows + 1], so that one flat addition moves every partial sum
    down: element r of `sums` is what PE r finds above itself, 0 for r = 0. The spare element of the other
    registers stays 0.
    """

    def __init__(self, mxu: MXU, schedule: Schedule, tiles: Array, stream: _Stream) -> None:
        self.rows, self.columns, self.schedule, self.stream = mxu.rows, mxu.columns, schedule, stream
        self.tiles = np.ascontiguousarray(tiles.transpose(0, 2, 1))
        shape, kind = (mxu.columns, mxu.rows + 1), tiles.dtype
        self.weight, self.shadow = np.zeros(shape, kind), np.zeros(shape, kind)
        self.sums, self.next_sums, self.product = (np.zeros(shape, kind) for _ in range(3))
        self.room = max(4 * mxu.columns, 64)
        self.line = np.zeros((self.room + mxu.columns, mxu.rows + 1), kind)  # the delay line of activations
        self.tag_line = np.full((self.room + mxu.columns, mxu.rows), -1, np.int64)
        self.window = self.room
        if schedule.start[0] == 0:
            self.weight[:, :-1] = self.tiles[0]
        self.shift_of = np.full(schedule.shifts[-1] + 1, -1)  # cycle after load -> which row shifts in
        self.shift_of[list(schedule.shifts)] = np.arange(mxu.rows)
        self.steady = len(self.shift_of) == mxu.rows  # a row of weights every cycle
        self.bits = np.dtype(f"u{kind.itemsize}")
        self.shadow_bits = self.shadow.view(self.bits).reshape(-1)
        self.scratch = np.zeros(self.shadow.size, self.bits)
        self.scratch_box = self.scratch.reshape(shape)
        # ones[i] is all ones for i <= rows + columns: a sliding view of it is the mask r + c <= since
        self.ones = np.zeros(3 * (mxu.rows + mxu.columns) + 3, self.bits)
        self.ones[: mxu.rows + mxu.columns + 1] = ~self.bits.type(0)
        if not self.steady:
            place, moved = np.arange(mxu.rows + 1), np.arange(-1, mxu.rows)[:, None]
            self.below = np.where((place >= 1) & (place <= moved), ~self.bits.type(0), self.bits.type(0))
            self.moves = np.zeros(shape, self.bits)
        self.swapping = self.loading = 0  # first tiles whose wave has not left the array

    def step(self, t: int) -> tuple[Array, Ints]:
        """One cycle; returns what leaves below each column, and its vector number or -1."""
        self._swap(t)
        self._load(t)
        self.window -= 1
        if self.window < 0:  # the window has reached the end of the buffer: begin again at the other
            self.line[self.room :] = self.line[: self.columns].copy()
            self.tag_line[self.room :] = self.tag_line[: self.columns].copy()
            self.window = self.room - 1
        self.line[self.window, :-1], self.tag_line[self.window] = self.stream.at(t)
        view = slice(self.window, self.window + self.columns)
        np.multiply(self.weight, self.line[view], out=self.product)
        np.add(self.sums.reshape(-1)[:-1], self.product.reshape(-1)[:-1], out=self.next_sums.reshape(-1)[1:])
        self.next_sums[:, 0] = 0
        self.sums, self.next_sums = self.next_sums, self.sums
        return self.sums[:, -1], self.tag_line[view, -1]

    def _swap(self, t: int) -> None:
        """Shadow to active along every diagonal that the first row of a tile reaches in cycle t."""
        start = self.schedule.start
        while self.swapping < len(start) and t - start[self.swapping] > self.rows + self.columns - 2:
            self.swapping += 1
        for tile in range(self.swapping, len(start)):
            diagonal = t - start[tile]
            if diagonal < 0:
                break
            if start[tile] == 0:
                continue  # mode noload
            left, right = max(0, diagonal - self.rows + 1), min(self.columns - 1, diagonal)
            # PE (diagonal - c, c) is element diagonal + c * rows of the flat registers
            places = slice(diagonal + left * self.rows, diagonal + right * self.rows + 1, self.rows)
            self.weight.reshape(-1)[places] = self.shadow.reshape(-1)[places]

    def _load(self, t: int) -> None:
        """Shift weights down: in the j-th shift of a column its rows 0 .. j move, the rest still waits."""
        load, skew = self.schedule.load, self.schedule.skew
        last = len(self.shift_of) - 1 + skew * (self.columns - 1)
        while self.loading < len(load) and t - load[self.loading] > last:
            self.loading += 1
        if self.schedule.start[0] == 0:
            return
        for tile in range(self.loading, len(load)):
            since = t - load[tile]
            if since < 0:
                break
            if not skew:
                self._shift_together(self.tiles[tile], int(self.shift_of[since]))
            elif self.steady:
                self._shift_steady(self.tiles[tile], since)
            else:
                self._shift_skewed(self.tiles[tile], since)

    def _shift_together(self, tile: Array, shift: int) -> None:
        if shift >= 0:
            self.shadow[:, 1 : shift + 1] = self.shadow[:, :shift].copy()
            self.shadow[:, 0] = tile[:, self.rows - 1 - shift]

    def _shift_steady(self, tile: Array, since: int) -> None:
        """Column c has shift since - c; r + c <= since moves, by a masked exchange of bits."""
        rows, low, high = self.rows, max(0, since - self.rows + 1), min(self.columns, since + 1)
        begin, end, size = low * (rows + 1), high * (rows + 1), self.bits.itemsize
        flat, changed = self.shadow_bits[begin:end], self.scratch[begin:end]
        np.bitwise_xor(flat[1:], flat[:-1], out=changed[1:])
        offset = (rows + self.columns - since + low) * size
        moves = np.ndarray((high - low, rows + 1), self.bits, self.ones, offset, (size, size))
        box = self.scratch_box[low:high]
        np.bitwise_and(box, moves, out=box)
        np.bitwise_xor(flat, changed, out=flat)
        first = low * rows + rows - 1 - since + low  # element (c, rows - 1 - since + c) of the tile
        self.shadow[low:high, 0] = tile.reshape(-1)[first :: rows + 1][: high - low]

    def _shift_skewed(self, tile: Array, since: int) -> None:
        """As `_shift_steady` where rows of weights arrive more slowly than one per cycle."""
        rows, low, high = self.rows, max(0, since - len(self.shift_of) + 1), min(self.columns, since + 1)
        newest_first = self.shift_of[since - high + 1 : since - low + 1]
        shift = newest_first[::-1]  # of columns low .. high - 1; -1: none in this cycle
        active = np.flatnonzero(shift >= 0)
        if not active.size:
            return
        # The k-th shift moves elements 0 .. k: a row of `below` masks them, row 0 nothing.
        begin, end = low * (rows + 1), high * (rows + 1)
        flat, changed = self.shadow_bits[begin:end], self.scratch[: end - begin]
        np.bitwise_xor(flat[1:], flat[:-1], out=changed[1:])
        box = changed.reshape(high - low, rows + 1)
        np.bitwise_and(box, np.take(self.below, shift + 1, axis=0, out=self.moves[: high - low], mode="clip"), out=box)
        np.bitwise_xor(flat, changed, out=flat)
        columns = active + low
        self.shadow[columns, 0] = tile[columns, rows - 1 - shift[active]]

    def state(self, t: int, m: int) -> State:
        view = slice(self.window, self.window + self.columns)
        feed, tags = self.stream.at(t)
        tag = self.tag_line[view].T
        partial = self.sums[:, 1:].T
        return State(
            cycle=t,
            feed=feed.copy(),
            feed_vector=np.where(tags < 0, -1, tags % m),
            activation=self.line[view, :-1].T.copy(),
            vector=np.where(tag < 0, -1, tag % m),
            tile=np.where(tag < 0, -1, tag // m),
            partial=partial.copy(),
            weight=self.weight[:, :-1].T.copy(),
            shadow=self.shadow[:, :-1].T.copy(),
            out=partial[-1].copy(),
            out_vector=np.where(tag[-1] < 0, -1, tag[-1] % m),
        )
