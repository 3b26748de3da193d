"""What the examples share of a terminal: a progress bar, and how a run ends."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from typing import Any


def progress(done: int, total: int, text: str) -> None:
    """A bar on one line of the terminal; nothing where the output is not one."""
    if sys.stdout.isatty():
        filled = 30 * done // total
        print(f"\r  [{'#' * filled}{'.' * (30 - filled)}] {done}/{total} {text}", end="", flush=True)


def line(text: str) -> None:
    """A line in place of the bar."""
    print(("\r\033[K" if sys.stdout.isatty() else "") + text, flush=True)


class Lines:
    """A line for each epoch of `mtf.train`: the loss, how quick it was, and what the evaluation at its end found."""

    def __init__(self, per_epoch: int) -> None:
        self.per_epoch = per_epoch
        self.row: dict[str, Any] = {}

    def __call__(self, row: dict[str, Any]) -> None:
        """Take a row of the history."""
        if "eval_accuracy" not in row:
            self.row = row
            return
        epoch, rate = row["step"] // self.per_epoch, self.row["examples_per_second"]
        line(
            f"epoch {epoch:>2}  loss {self.row['loss']:.4f}  test accuracy {row['eval_accuracy']:.2%}  "
            f"({rate:,.0f} examples/s)"
        )


def check_least(parser: argparse.ArgumentParser, args: argparse.Namespace, **least: int) -> None:
    """End with one clear message where a flag is less than it may be."""
    for name, low in least.items():
        if getattr(args, name) < low:
            parser.error(f"--{name.replace('_', '-')} must be at least {low}, got {getattr(args, name)}")


def counts(text: str) -> list[int]:
    """Numbers of at least 1, joined by commas: the type of a flag."""
    numbers = [int(part) if part.isascii() and part.isdigit() else 0 for part in text.split(",")]
    if min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"expected numbers of at least 1, such as 8,16, got {text!r}")
    return numbers


def finish(name: str, run: Callable[[], object], faults: tuple[type[Exception], ...]) -> int:
    """Run an example: its exit code, with one clear message where the flags or the data are wrong."""
    try:
        run()
    except faults as fault:
        print(f"{name}: {fault}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\n{name}: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:  # whoever read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0
