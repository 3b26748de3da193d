"""Exit statuses, errors in one line, and a progress bar."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

from hardware.checks import HardwareError
from layouts.errors import LayoutError
from meshlib.command.output import terminal_width
from meshlib.core.errors import MeshlibError

GOOD, FAILED = 0, 1
INTERRUPTED = 130  # exit status of shells after ctrl-C


def ended(name: str, run: Callable[[], int]) -> int:
    """Run a function and return the exit status."""
    # Python's streams may be None (closed).
    sys.stdout, sys.stderr = (x or open(os.devnull, "w") for x in (sys.stdout, sys.stderr))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # replace letters that the terminal lacks
    try:
        status = run()
        sys.stdout.flush()
    except (MeshlibError, HardwareError, LayoutError) as fault:
        said = str(fault).removeprefix(f"{name.rpartition(' ')[2]}: ")  # of `mtf.search` by `meshlib search`
        print(f"{name}: {said}", *getattr(fault, "__notes__", ()), sep="\n", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader has closed the pipe
        _discard_output()
        return 0
    except OSError as fault:
        _discard_output()
        print(f"{name}: the answer can't be written: {fault.strerror}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return INTERRUPTED
    return status


def _discard_output() -> None:
    """Discard unwritten output, so that Python does not try to flush it again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Progress:
    """A progress bar on one line of standard error, with the remaining time; shown after `DELAY` seconds or `at_once`.

    Nothing is written if standard error is not a terminal, or if `quiet`.
    """

    DELAY = 1.0

    def __init__(self, quiet: bool = False, at_once: bool = False) -> None:
        self.shown = not quiet and sys.stderr is not None and sys.stderr.isatty()
        self.delay_seconds = 0.0 if at_once else self.DELAY
        self.begun = time.monotonic()

    def __call__(self, done: int, total: int, text: str = "") -> None:
        """Show that `done` of `total` steps are done."""
        spent = time.monotonic() - self.begun
        if self.shown and spent >= self.delay_seconds:
            print(
                f"\r\033[K{bar(done, total, text, spent)[: terminal_width() - 1]}", end="", file=sys.stderr, flush=True
            )

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *fault: object) -> None:
        if self.shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def bar(done: int, total: int, text: str, spent_seconds: float) -> str:
    """A progress line; a leading word of `text`, alone or before ";", is the unit.

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


_running: list[Progress] = []  # the progress bar of a script


def progress(done: int, total: int, text: str) -> None:
    """Show a script's progress bar until `progress_ends`."""
    if not _running:
        _running.append(Progress())
    _running[0](done, total, text)


def progress_ends() -> None:
    """Remove a script's progress bar."""
    while _running:
        _running.pop().__exit__()
