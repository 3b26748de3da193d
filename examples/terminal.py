"""What the examples share of a terminal: a progress bar, and how a run ends."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable


def progress(done: int, total: int, text: str) -> None:
    """A bar on one line of the terminal; nothing where the output is not one."""
    if sys.stdout.isatty():
        filled = 30 * done // total
        print(f"\r  [{'#' * filled}{'.' * (30 - filled)}] {done}/{total} {text}", end="", flush=True)


def line(text: str) -> None:
    """A line in place of the bar."""
    print(("\r\033[K" if sys.stdout.isatty() else "") + text, flush=True)


def check_least(parser: argparse.ArgumentParser, args: argparse.Namespace, **least: int) -> None:
    """End with one clear message where a flag is less than it may be."""
    for name, low in least.items():
        if getattr(args, name) < low:
            parser.error(f"--{name.replace('_', '-')} must be at least {low}, got {getattr(args, name)}")


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
