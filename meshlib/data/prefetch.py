"""A prefetching thread behind a bounded queue."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Ahead(Generic[T]):
    """The items of an iterator, prepared ahead by a daemon thread; its exceptions are raised in their place.

    `waited_seconds`: time for which the consumer waited.
    """

    def __init__(self, items: Iterator[T], room: int, name: str) -> None:
        self.items, self.room = items, room
        self.ready: deque[tuple[T] | BaseException] = deque()
        self.changed = threading.Condition()
        self.stopped = False
        self.waited_seconds = 0.0
        self.thread = threading.Thread(target=self._work, name=name, daemon=True)
        self.thread.start()

    def _work(self) -> None:
        while True:
            item: tuple[T] | BaseException
            try:
                item = (next(self.items),)
            except BaseException as fault:  # raised in the consumer, StopIteration too
                item = fault
            with self.changed:
                self.changed.wait_for(lambda: self.stopped or len(self.ready) < self.room)
                if self.stopped:
                    return
                self.ready.append(item)
                self.changed.notify_all()
            if isinstance(item, BaseException):
                return

    def take(self) -> T:
        """The next item. Raises StopIteration at the end, as `next` does."""
        begun = time.perf_counter()
        with self.changed:
            self.changed.wait_for(lambda: self.stopped or self.ready)
            self.waited_seconds += time.perf_counter() - begun
            if self.stopped:
                raise StopIteration
            item = self.ready[0] if isinstance(self.ready[0], BaseException) else self.ready.popleft()
            self.changed.notify_all()
        if isinstance(item, BaseException):
            raise item
        return item[0]

    def stop(self) -> None:
        """End the thread. Any thread may call it."""
        with self.changed:
            self.stopped = True
            self.ready.clear()
            self.changed.notify_all()
        if threading.current_thread() is not self.thread:  # a garbage collection may call this from any thread
            self.thread.join()
