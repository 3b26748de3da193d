"""Ctrl-C and SIGTERM, which end a run after the current step."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

CAUGHT = (signal.SIGINT, signal.SIGTERM)


class Interruption:
    """The received signal, if any."""

    number: int | None = None

    def error(self) -> BaseException:
        """The exception that it would have raised."""
        return KeyboardInterrupt() if self.number == signal.SIGINT else SystemExit(128 + int(self.number or 0))


@contextmanager
def noted(catch: bool) -> Iterator[Interruption]:
    """Record the first signal; the second has its usual effect. Only the main thread can install signal handlers."""
    interruption = Interruption()
    if not catch or threading.current_thread() is not threading.main_thread():
        yield interruption
        return
    before = {number: signal.getsignal(number) for number in CAUGHT}

    def note(number: int, frame: FrameType | None) -> None:
        interruption.number = number
        for caught, handler in before.items():
            signal.signal(caught, handler)

    for number in CAUGHT:
        signal.signal(number, note)
    try:
        yield interruption
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
