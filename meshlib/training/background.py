"""Background work in parallel with the steps: one thread, one task at a time, no error lost."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType


class Background:
    """Runs one task at a time in a thread; a task's exception is raised by the next call of `check` or `wait`.

    As a context manager it waits for the last task on exit. If another exception ends the context, the task's error
    becomes a note of that exception.

    Example:
      >>> with Background() as background:
      ...     background.start(lambda: print("saved"))
      ...     background.wait()
      saved
    """

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._task: Future[object] | None = None

    def start(self, task: Callable[[], object]) -> None:
        """Start a task after the previous one has ended. Raises: the error of the previous task."""
        self.wait()
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "meshlib.background")
        self._task = self._thread.submit(task)

    def check(self) -> None:
        """Raise the error of a finished task."""
        if self._task is not None and self._task.done():
            self.wait()

    def wait(self) -> None:
        """Wait for the task to end. Raises: its error."""
        if self._task is not None:
            self._task.exception()  # an interrupt while waiting leaves the task for the next call
            task, self._task = self._task, None
            task.result()

    def __enter__(self) -> Background:
        return self

    def __exit__(self, kind: type[BaseException] | None, fault: BaseException | None, at: TracebackType | None) -> None:
        try:
            self.wait()
        except Exception as unseen:
            if fault is None:
                raise
            fault.add_note(f"besides: {unseen}")
        finally:
            if self._thread is not None:
                self._thread.shutdown()
                self._thread = None
