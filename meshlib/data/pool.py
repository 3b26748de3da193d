"""Workers that make examples: threads, or processes, which share nothing but what they are asked and answer.

A process is started anew (`spawn`), so that it has none of the threads and devices of the one that asks, which a fork
would find halfway. It gets the data once, pickled, and then numbers of draws; it answers with examples, and with what
it left out.
"""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TYPE_CHECKING

from meshlib.checks import at
from meshlib.data.batching import Example
from meshlib.errors import DataError, FeedError
from meshlib.records.frames import Fault

if TYPE_CHECKING:
    from meshlib.data.pipeline import Data

Made = list[Example | None]
KINDS = ("threads", "processes")

_data: Data | None = None  # of a worker's process


class Pool:
    """Makes examples of draws by several workers."""

    def __init__(self, data: Data) -> None:
        self.data = data
        self.pool: ThreadPoolExecutor | ProcessPoolExecutor
        if data.kind == "threads":
            self.pool = ThreadPoolExecutor(data.workers, "meshlib.data")
            return
        context = multiprocessing.get_context("spawn")
        self.pool = ProcessPoolExecutor(data.workers, context, _begin, (pickled(data),))

    def ask(self, draws: Sequence[int], numbers: Sequence[int]) -> Future[tuple[Made, list[Fault]]]:
        """The examples of draws, some time."""
        if self.data.kind == "threads":
            return self.pool.submit(lambda: (self.data.examples(draws, numbers), []))
        return self.pool.submit(_made, draws, numbers)

    def answer(self, asked: Future[tuple[Made, list[Fault]]]) -> Made:
        """Wait for them. Raises: what making them raised; DataError if a process has ended."""
        try:
            made, faults = asked.result()
        except BrokenProcessPool:
            raise DataError(
                f"data: a process that makes examples of {self.data.source.name} has ended; a script that uses "
                "processes needs its lines under if __name__ == '__main__', and memory for each of them"
            ) from None
        for fault in faults:
            self.data.source.leave_out(fault)
        return made

    def close(self) -> None:
        """End the workers."""
        self.pool.shutdown(wait=True, cancel_futures=True)


def pickled(data: Data) -> bytes:
    """Data as they are sent to a process. Raises: FeedError for functions that can't be."""
    try:
        return pickle.dumps(data)
    except (pickle.PicklingError, AttributeError, TypeError) as fault:
        raise FeedError(
            f"{at('data.parallel')}: {data} can't be sent to another process ({fault}); define functions at the top of "
            "a module, or use kind='threads'"
        ) from None


def _begin(sent: bytes) -> None:
    global _data
    _data = pickle.loads(sent)


def _made(draws: Sequence[int], numbers: Sequence[int]) -> tuple[Made, list[Fault]]:
    assert _data is not None
    return _data.examples(draws, numbers), _data.source.skipped
