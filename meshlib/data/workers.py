"""Worker threads, and worker processes that share nothing but requests and answers.

Processes are spawned, so that they do not inherit threads and devices in an inconsistent state, as after a fork. Each
receives the data once, pickled, and then draw numbers; it returns examples, and the records that it skipped.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait
from multiprocessing.context import SpawnContext, SpawnProcess
from typing import TYPE_CHECKING, Any

from meshlib.core.arguments import at
from meshlib.core.errors import DataError, FeedError
from meshlib.core.subprocesses import WatchedName, describe_exit, exit_with_parent
from meshlib.data.batching import Example
from meshlib.records.framing import Fault

if TYPE_CHECKING:
    from meshlib.data.pipeline import Data

Examples = list[Example | None]
KINDS = ("threads", "processes")

_data: Data | None = None  # in a worker process


class _Worker(SpawnProcess):
    """A process of a pool; `stopped` if the pool terminated it."""

    stopped = False

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.name = WatchedName(self.name)

    def terminate(self) -> None:
        """Terminate it, as the executor does with all of its processes when one of them has died."""
        self.stopped = self.stopped or not wait([self.sentinel], 0)
        super().terminate()


class _Context(SpawnContext):
    """A context that keeps its processes in the order of their start."""

    def __init__(self) -> None:
        self.workers: list[_Worker] = []

    def Process(self, *args: Any, **options: Any) -> _Worker:  # type: ignore[override]
        """A new process, not yet started."""
        self.workers.append(_Worker(*args, **options))
        return self.workers[-1]


class Pool:
    """Threads or processes that read and map the examples of draws."""

    def __init__(self, data: Data) -> None:
        self.data = data
        self.pool: ThreadPoolExecutor | ProcessPoolExecutor
        self.context = _Context()
        if data.kind == "threads":
            self.pool = ThreadPoolExecutor(data.workers, "meshlib.data")
        else:
            self.pool = ProcessPoolExecutor(data.workers, self.context, _begin, (pickled(data),))

    def ask(self, draws: Sequence[int], numbers: Sequence[int]) -> Future[tuple[Examples, list[Fault]]]:
        """A future of the examples of draws. Raises: DataError if a process has died."""
        if self.data.kind == "threads":
            return self.pool.submit(lambda: (self.data.examples(draws, numbers), []))
        try:
            return self.pool.submit(_prepare, draws, numbers)
        except BrokenProcessPool:
            raise self._death_error() from None

    def answer(self, future: Future[tuple[Examples, list[Fault]]]) -> Examples:
        """The examples of a future. Raises: exceptions of the task; DataError if a process has died."""
        try:
            results, faults = future.result()
        except BrokenProcessPool:
            raise self._death_error() from None
        for fault in faults:
            self.data.source.leave_out(fault)
        return results

    def close(self) -> None:
        """Shut down the workers."""
        self.pool.shutdown(wait=True, cancel_futures=True)

    def _death_error(self) -> DataError:
        """The error that names the processes which died."""
        self.close()  # waits until the executor has terminated the others
        count = self.data.workers
        ended = [
            f"worker process {n} of {count} (pid {worker.pid}, {describe_exit(worker.exitcode)})"
            for n, worker in enumerate(self.context.workers, start=1)
            if not worker.stopped
        ]
        return DataError(
            f"data: {' and '.join(ended) or 'a worker process'} died while making examples of "
            f"{self.data.source.name}; a script that uses processes needs its lines under "
            "if __name__ == '__main__', and memory for each of them: use fewer, or kind='threads'"
        )


def pickled(data: Data) -> bytes:
    """Data pickled for a process. Raises: FeedError for functions that can't be pickled."""
    try:
        return pickle.dumps(data)
    except (pickle.PicklingError, AttributeError, TypeError) as fault:
        raise FeedError(
            f"{at('data.parallel')}: {data} can't be sent to another process ({fault}); define functions at the top of "
            "a module, or use kind='threads'"
        ) from None


def _begin(sent: bytes) -> None:
    global _data
    exit_with_parent()
    _data = pickle.loads(sent)


def _prepare(draws: Sequence[int], numbers: Sequence[int]) -> tuple[Examples, list[Fault]]:
    assert _data is not None
    return _data.examples(draws, numbers), _data.source.skipped
