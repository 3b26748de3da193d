"""Worker processes that end with their parent, and descriptions of exit codes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from contextlib import suppress
from multiprocessing.connection import wait
from typing import Any

CHECK_SECONDS = 1.0  # interval between checks of the parent's id


def exit_with_parent() -> None:
    """End this worker process as soon as its parent has ended for any reason, whatever it is doing.

    The parent's sentinel is a pipe that closes when the parent ends. Other children of the parent, forked later, may
    keep it open: so a thread also compares the parent's id every `CHECK_SECONDS`.
    """
    parent = multiprocessing.parent_process()
    if parent is None or parent.pid is None:
        return
    pid, sentinel = parent.pid, parent.sentinel
    kill_when_closed(sentinel)

    def watch() -> None:
        while os.getppid() == pid and not wait([sentinel], CHECK_SECONDS):
            pass
        os._exit(1)

    threading.Thread(target=watch, name="meshlib.parent", daemon=True).start()


def kill_when_closed(pipe: int) -> None:
    """Have the kernel kill this process when the other end of a pipe closes or writes; Linux only.

    A thread that watches the pipe never runs while a regular expression, or another call into C, holds the
    interpreter's lock.
    """
    if sys.platform != "linux":
        return
    import fcntl

    with suppress(OSError):  # an emulated kernel without signals for pipes: a thread watches as well
        fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)


class WatchedName(str):
    """The name of a spawned process that makes the process end with its parent from its first moment.

    A spawned process imports the user's script, which may take seconds, before any function of this library runs. It
    reads its name first: unpickling this one needs no import of this library and starts a thread.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return eval, (f"exec({_WATCH.format(pid=os.getpid(), seconds=CHECK_SECONDS / 2)!r}, {{}}) or {str(self)!r}",)


_WATCH = """
import os, threading, time

def watch():
    while os.getppid() == {pid}:
        time.sleep({seconds})
    os._exit(1)

if os.getpid() != {pid} and not any(thread.name == "meshlib.start" for thread in threading.enumerate()):
    threading.Thread(target=watch, name="meshlib.start", daemon=True).start()
"""


def describe_exit(code: int | None) -> str:
    """An exit code in words: "status 1" or the name of the signal."""
    if code is None or code >= 0:
        return f"status {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:  # a real-time signal has no name
        name = f"signal {-code}"
    return f"{name}{', perhaps for want of memory' if -code == signal.SIGKILL else ''}"
