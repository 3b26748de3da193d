"""Watch a systolic array compute y = W x, cycle by cycle, in the terminal.

    python examples/machine/systolic.py                      3x3 array, 3 vectors
    python examples/machine/systolic.py --size 2x4 --batch 5 --mode shadow
    python examples/machine/systolic.py --save frames.gif    one GIF (or frames.png: one PNG per cycle)
    python examples/machine/systolic.py --cores 4            W's columns on 4 cores, whose results a ring adds up

Every box is a processing element: its weight w, the input x that moves right, and the partial sum p that
moves down; where weights are loaded during the run (every mode but noload), also (w), the shadow register in
which they move down before they are used. PE (r, c) holds W[c][r]; x_r enters row r from the left, y_c leaves
below column c. In a dot nothing is there. `--save` needs matplotlib.

With `--cores n` there are n such arrays, each with columns of W of its own and its part of every x: what leaves them
are partial sums. The array shown is that of core 0; behind it an all_reduce adds the sums, one step of the ring after
the other, in a GIF beside it.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

if (ROOT := Path(__file__).resolve().parents[2]).joinpath("meshlib").is_dir():
    sys.path.insert(0, str(ROOT))  # from a checkout, installed or not

from hardware import MXU, HardwareError
from hardware.mxu import MODES
from hardware.ring_steps import RingRun, ring_steps
from hardware.systolic import Run, State

Array = NDArray[Any]

# The worked example of most lectures: small integers, so that every sum can be checked in one's head.
WEIGHTS = np.array([[1, 2, 3], [4, 5, 6], [7, 8, 9]])
VECTORS = np.array([[1, 2, 3], [-1, 0, 4], [5, -2, 1]])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the example; returns the exit status."""
    options = parse(arguments)
    try:
        rows, columns = options.size
        check_size(rows, columns, options)
        weights, vectors = operands(rows, columns, options.batch, options.seed)
        run = MXU(rows, columns).run(weights.T, vectors, options.mode, states=True)
        ring = None if options.cores == 1 else summed(run, rows, columns, options)
        if options.save:
            for path in save(run, weights, options.mode, options.save, ring):
                print(path)
        else:
            play(run, weights, vectors, options.mode, options.delay)
            if ring is not None:
                print(f"\nThat is the partial sum of core 0. All {options.cores} are added:\n\n{ring}")
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (HardwareError, OSError) as fault:
        print(f"systolic.py: {fault}", file=sys.stderr)
        return 2
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, prog="systolic.py"
    )
    parser.add_argument("--size", type=size, default=(3, 3), help="rows x columns of the array, e.g. 3x3")
    parser.add_argument("--batch", type=count, default=3, help="vectors x (default 3)")
    parser.add_argument("--mode", choices=MODES, default="noload", help="how the weights get in")
    parser.add_argument("--seed", type=count, default=0, help="for sizes other than 3x3, batch 3")
    parser.add_argument("--cores", type=count, default=1, help="cores, each with columns of W of its own (default 1)")
    parser.add_argument("--delay", type=seconds, default=0.0, help="seconds between cycles")
    parser.add_argument("--save", type=Path, help="write frames: NAME.gif, or NAME.png for NAME-000.png ...")
    return parser.parse_args(arguments)


def size(text: str) -> tuple[int, int]:
    """3 -> (3, 3); 2x4 -> (2, 4)."""
    parts = text.lower().split("x")
    if len(parts) not in (1, 2) or not all(part.isascii() and part.isdigit() and len(part) < 7 for part in parts):
        raise argparse.ArgumentTypeError(f"a size is written 3 or 2x4, not {text!r}")
    return int(parts[0]), int(parts[-1])


def count(text: str) -> int:
    """A number without a sign."""
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise argparse.ArgumentTypeError(f"must be a whole number from 0 to 999999999, not {text!r}")
    return int(text)


def seconds(text: str) -> float:
    """A time that can be waited for."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"must be seconds from 0 to 3600, not {text!r}")
    return value


def operands(rows: int, columns: int, batch: int, seed: int, worked: bool = True) -> tuple[Array, Array]:
    """W [columns, rows] and vectors [batch, rows], small integers; of 3x3, batch 3, those of the worked example."""
    if worked and (rows, columns, batch) == (3, 3, 3):
        return WEIGHTS, VECTORS
    rng = np.random.default_rng(seed)
    return rng.integers(-9, 10, (columns, rows)), rng.integers(-9, 10, (batch, rows))


def summed(run: Run, rows: int, columns: int, options: argparse.Namespace) -> RingRun:
    """The all_reduce of what every core's array gives: core 0's is this run."""
    results = [run.y]
    for core in range(1, options.cores):
        weights, vectors = operands(rows, columns, options.batch, options.seed + core, worked=False)
        results.append(MXU(rows, columns).run(weights.T, vectors, options.mode).y)
    return ring_steps("all_reduce", results)


# Cycles shown at most, rows or columns on a saved frame at most, cores of a ring at most.
FRAMES, SAVED, CORES = 2000, 24, 16


def check_size(rows: int, columns: int, options: argparse.Namespace) -> None:
    """Refuse arrays that do not fit the terminal or a frame, and runs that nobody would watch."""
    if min(rows, columns, options.batch) < 1:
        raise HardwareError(f"size and batch must be at least 1, not {rows}x{columns}, batch {options.batch}")
    if not 1 <= options.cores <= CORES:
        raise HardwareError(f"cores must be from 1 to {CORES}, not {options.cores}")
    cycles = MXU(rows, columns).cycles(options.batch, rows, columns, options.mode)
    if cycles > FRAMES:
        raise HardwareError(
            f"{rows}x{columns}, batch {options.batch} takes {cycles} cycles; at most {FRAMES} are shown"
        )
    if options.save is not None and max(rows, columns) > SAVED:
        raise HardwareError(f"a frame holds at most {SAVED} rows and columns, not {rows}x{columns}")
    needed, offered = LABEL + columns * (CELL + 1) + 1, shutil.get_terminal_size((120, 50)).columns
    if options.save is None and needed > offered:
        raise HardwareError(
            f"an array of {rows}x{columns} needs {needed} columns of text, the terminal has {offered}; "
            f"use at most {max(1, (offered - LABEL - 1) // (CELL + 1))} columns, or --save"
        )


def play(run: Run, weights: Array, vectors: Array, mode: str, delay: float) -> None:
    """Print every cycle, then the result."""
    columns, rows = weights.shape
    print(f"y = W x on a {rows}x{columns} array, {len(vectors)} vectors\n")
    print("W =", str(weights).replace("\n", "\n    "))
    for state in run.states:
        print("\n" + draw(state, loads=mode != "noload"))
        time.sleep(delay)
    print(f"\n{run.cycles} cycles")
    for m, (x, y) in enumerate(zip(vectors, run.y, strict=True)):
        print(f"vector {m}: W {x.tolist()} = {y.tolist()}")


LABEL, CELL = 14, 11


def draw(state: State, loads: bool) -> str:
    """One cycle as text; with the shadow registers where the run loads weights."""
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
        if loads:
            cells.insert(1, ("", [f"(w {s})" for s in state.shadow[r]]))
        for left, texts in cells:
            lines.append(left.rjust(LABEL - 1) + " |" + "|".join(text.center(CELL) for text in texts) + "|")
        lines.append(rule)
    outs = [
        f"y{c}[{m}]={y}" if m >= 0 else "" for c, (m, y) in enumerate(zip(state.out_vector, state.out, strict=True))
    ]
    lines.append(" " * LABEL + " " + " ".join(out.center(CELL) for out in outs))
    return "\n".join(line.rstrip() for line in lines)


def save(run: Run, weights: Array, mode: str, path: Path, ring: RingRun | None = None) -> list[Path]:
    """Write the frames as one GIF or as numbered PNGs, with the steps of a ring beside the array; returns the files."""
    if path.suffix.lower() not in (".gif", ".png"):
        raise HardwareError(f"--save writes .gif or .png, not {path.name!r}")
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import animation, pyplot
    except ImportError:
        raise HardwareError("--save needs matplotlib; install it with: pip install matplotlib") from None
    columns, rows = weights.shape
    loads = mode != "noload"
    wide, beside = 1.6 * columns + 2.4, 0 if ring is None else len(ring.results) + 2.4
    figure, all_axes = pyplot.subplots(
        1, 1 if ring is None else 2, figsize=(wide + beside, 1.3 * rows + 1.8), squeeze=False
    )
    cycles = len(run.states)

    def frame(n: int) -> list[Any]:
        paint(all_axes[0][0], run.states[min(n, cycles - 1)], loads)
        if ring is not None:
            ring.plot(max(0, n - cycles + 1), all_axes[0][1])
        return []

    frames = cycles + (0 if ring is None else len(ring.steps) - 1)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix.lower() == ".gif":
        movie = animation.FuncAnimation(figure, frame, frames=frames)
        movie.save(path, writer=animation.PillowWriter(fps=1))
        written = [path]
    else:
        written = []
        for n in range(frames):
            frame(n)
            written.append(path.with_name(f"{path.stem}-{n:03d}{path.suffix}"))
            figure.savefig(written[-1], dpi=100)
    pyplot.close(figure)
    return written


def paint(axes: Any, state: State, loads: bool) -> list[Any]:
    """One cycle on matplotlib axes: a square per PE, coloured by the vector it works on."""
    rows, columns = state.weight.shape
    axes.clear()
    axes.set(xlim=(-1.3, columns), ylim=(rows + 0.5, -0.3), aspect="equal", title=f"cycle {state.cycle}")
    axes.axis("off")
    colours = ("#8ecae6", "#ffb703", "#90be6d", "#f28482", "#b8a1e3")
    for r in range(rows):
        for c in range(columns):
            m = state.vector[r, c]
            colour = colours[m % len(colours)] if m >= 0 else "white"
            axes.add_patch(axes_rectangle(c, r, colour))
            lines = [f"w {state.weight[r, c]}"]
            if loads:
                lines.append(f"(w {state.shadow[r, c]})")
            if m >= 0:
                lines += [f"x {state.activation[r, c]} →", f"p {state.partial[r, c]} ↓"]
            text = "\n".join(lines)
            axes.text(c + 0.45, r + 0.45, text, ha="center", va="center", fontsize=9)
        if state.feed_vector[r] >= 0:
            axes.text(-0.2, r + 0.45, f"x{r} = {state.feed[r]} →", ha="right", va="center", fontsize=9)
    for c in range(columns):
        if state.out_vector[c] >= 0:
            text = f"y{c}[{state.out_vector[c]}]\n= {state.out[c]}"
            axes.text(c + 0.45, rows + 0.2, text, ha="center", va="center", fontsize=9)
    return []


def axes_rectangle(column: int, row: int, colour: str) -> Any:
    """The square of one processing element."""
    from matplotlib.patches import Rectangle

    return Rectangle((column, row), 0.9, 0.9, facecolor=colour, edgecolor="black")


if __name__ == "__main__":
    sys.exit(main())
