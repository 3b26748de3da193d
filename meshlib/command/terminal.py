"""Exit statuses, errors in one line, and a progress bar."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

from hardware.errors import HardwareError
from layouts.errors import LayoutError
from meshlib.command.output import terminal_width
from meshlib.core.errors import MeshlibError

INTERRUPTED = 130  # what shells say of ctrl-C


def ended(name: str, run: Callable[[], int]) -> int:
    """The exit status of a run."""
    # A closed one is None.
    sys.stdout, sys.stderr = (x or open(os.devnull, "w") for x in (sys.stdout, sys.stderr))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal without a letter shows another, and goes on
    try:
        status = run()
        sys.stdout.flush()
    except (MeshlibError, HardwareError, LayoutError) as fault:
        print(f"{name}: {fault}", *getattr(fault, "__notes__", ()), sep="\n", file=sys.stderr)
        return 2
    except BrokenPipeError:  # whoever read the output has seen enough
        _say_no_more()
        return 0
    except OSError as fault:
        _say_no_more()
        print(f"{name}: the answer can't be written: {fault.strerror}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return INTERRUPTED
    return status


def _say_no_more() -> None:
    """What is not written yet goes nowhere, so that Python does not try again at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Progress:
    """A bar on one line of the error stream, with the time that is left; shown after `DELAY` seconds.

    Nothing is written where the error stream is no terminal, or `quiet`.
    """

    DELAY = 1.0

    def __init__(self, quiet: bool = False) -> None:
        self.shown = not quiet and sys.stderr is not None and sys.stderr.isatty()
        self.begun = time.monotonic()

    def __call__(self, done: int, total: int, text: str = "") -> None:
        """Show that `done` of `total` steps are done."""
        spent = time.monotonic() - self.begun
        if self.shown and spent >= self.DELAY:
            print(
                f"\r\033[K{bar(done, total, text, spent)[: terminal_width() - 1]}", end="", file=sys.stderr, flush=True
            )

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *fault: object) -> None:
        if self.shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def bar(done: int, total: int, text: str, spent_seconds: float) -> str:
    """Progress as a line; where `text` begins with a word and ";", or is one, that is the unit.

    >>> bar(10, 40, "layouts; best: 2.1 s", 5)
    '[#####...............] 10 of 40 layouts, about 15 s left; best: 2.1 s'
    >>> bar(10, 40, "loss 2.1", 5)
    '[#####...............] 10 of 40, about 15 s left; loss 2.1'
    """
    unit, _, rest = text.partition("; ") if text.partition(";")[0].isalpha() else ("", "", text)
    filled = 20 * done // max(1, total)
    left = f", about {spent_seconds * (total - done) / done:.0f} s left" if done else ""
    more = f"; {rest}" if rest else ""
    return f"[{'#' * filled}{'.' * (20 - filled)}] {done:,} of {total:,}{f' {unit}' * bool(unit)}{left}{more}"


_running: list[Progress] = []  # the bar of a script


def progress(done: int, total: int, text: str) -> None:
    """The bar of a script, until `progress_ends`."""
    if not _running:
        _running.append(Progress())
    _running[0](done, total, text)


def progress_ends() -> None:
    """Take the bar of a script away."""
    while _running:
        _running.pop().__exit__()
