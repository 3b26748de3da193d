"""Exit statuses, errors in one line, and a progress bar."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from hardware.errors import HardwareError
from layouts.errors import LayoutError
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
        print(f"{name}: {fault}", file=sys.stderr)
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


def progress(done: int, total: int, text: str) -> None:
    """A bar on one line of the terminal; nothing where the output is not one."""
    if sys.stderr.isatty():
        filled = 30 * done // max(1, total)
        line = f"[{'#' * filled}{'.' * (30 - filled)}] {done:,}/{total:,} {text}"
        print(f"\r\033[K{line[:79]}", end="", file=sys.stderr, flush=True)


def progress_ends() -> None:
    """Take the bar away."""
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)
