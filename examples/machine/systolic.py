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
from hardware.systolic import Run, text_width

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
    needed, offered = text_width(columns), shutil.get_terminal_size((120, 50)).columns
    if options.save is None and needed > offered:
        raise HardwareError(
            f"an array of {rows}x{columns} needs {needed} columns of text, the terminal has {offered}; "
            f"use at most {max(1, (offered - text_width(0)) // (text_width(1) - text_width(0)))} columns, or --save"
        )


def play(run: Run, weights: Array, vectors: Array, mode: str, delay: float) -> None:
    """Print every cycle, then the result."""
    columns, rows = weights.shape
    print(f"y = W x on a {rows}x{columns} array, {len(vectors)} vectors\n")
    print("W =", str(weights).replace("\n", "\n    "))
    for state in run.states:
        print("\n" + state.text(shadow=mode != "noload"))
        time.sleep(delay)
    print(f"\n{run.cycles} cycles")
    for m, (x, y) in enumerate(zip(vectors, run.y, strict=True)):
        print(f"vector {m}: W {x.tolist()} = {y.tolist()}")


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
        all_axes[0][0].clear()
        run.states[min(n, cycles - 1)].plot(all_axes[0][0], shadow=loads)
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


if __name__ == "__main__":
    sys.exit(main())
