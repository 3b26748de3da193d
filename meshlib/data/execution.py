"""Execution of a `Data` from any position: draws in order, workers, examples, batches.

Processes are spawned, so that they do not inherit threads and devices in an inconsistent state, as after a fork. Each
receives the data once, pickled, and then draw numbers; it returns examples, and the records that it skipped.
"""

from __future__ import annotations

import pickle
import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from multiprocessing.connection import wait
from multiprocessing.context import SpawnContext, SpawnProcess
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshlib.core.arguments import at
from meshlib.core.errors import DataError, FeedError
from meshlib.core.subprocesses import WatchedName, describe_exit, exit_with_parent
from meshlib.data.batching import Array, Batch, Batcher, Batching, Drawn, Example, filled_up
from meshlib.data.order import Order
from meshlib.records.framing import Fault

if TYPE_CHECKING:
    from meshlib.data.pipeline import Data


Examples = list[Example | None]
KINDS = ("threads", "processes")

_data: Data | None = None  # in a worker process
CHUNK = 32  # examples per worker task


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


class IteratorPlace(NamedTuple):
    """The position of an iterator: `next` is the following draw; `pending` are the draws in a batcher."""

    next: int
    pending: list[Any]


class PreparedBatch(NamedTuple):
    """A batch, its number of examples, and the position of the iterator after it."""

    batch: Any
    examples: int
    after: IteratorPlace


class Maker(Iterator[PreparedBatch]):
    """Iterator of batches from a position on."""

    def __init__(self, data: Data, place: IteratorPlace, rows: NDArray[np.int64] | None) -> None:
        self.data, self.rows = data, rows
        self.count = len(data.source)
        self.order = Order(self.count, data.seed, data.buffer)
        self.last = None if data.epochs is None else data.epochs * self.count
        self.pool = Pool(data) if data.workers else None
        self.examples, self.seconds = 0, 0.0
        data.source.keep(2 * (data.buffer or 0) + 2 * CHUNK * (data.workers + 1))
        self.batches = self._from(place)

    def __next__(self) -> PreparedBatch:
        begun = time.perf_counter()
        ready = next(self.batches)
        self.seconds += time.perf_counter() - begun
        self.examples += ready.examples
        return ready

    def close(self) -> None:
        with suppress(ValueError):  # another thread is preparing the last batch
            self.batches.close()
        if self.pool is not None:
            self.pool.close()

    def _from(self, place: IteratorPlace) -> Generator[PreparedBatch, None, None]:
        data, batching = self.data, self.data.batching
        if batching is None:
            for draw, example in self._drawn(place.next):
                if example is not None:
                    yield PreparedBatch(example, 1, IteratorPlace(draw + 1, []))
            return
        plain = not data.maps and batching.lengths is None and data.source.stacks
        if (plain or self.rows is not None) and not place.pending:
            yield from self._by_place(place.next, batching, plain)
            return
        yield from self._batched(place, batching)

    def _by_place(self, begin: int, batching: Batching, plain: bool) -> Iterator[PreparedBatch]:
        """Batches whose examples are determined by their positions: directly from columns, or of some rows only."""
        while self.last is None or begin < self.last:
            stop = begin + batching.size
            epoch_ends = (begin // self.count + 1) * self.count
            end = min(stop, self.last or stop) if self.data.joined else min(stop, epoch_ends)
            if end == stop or batching.remainder != "drop":
                first = epoch_ends - self.count if batching.remainder == "wrap" and end < stop else begin
                index = (begin - first + np.arange(batching.size)) % (end - first)
                index = index if self.rows is None else index[self.rows]
                places = self.order.places(first, end)[index]
                columns = self.data.source.columns(places) if plain else self._mapped(first + index, places, batching)
                if self.rows is not None:
                    columns = {name: _scatter_rows(x, self.rows, batching.size) for name, x in columns.items()}
                if batching.remainder != "drop":
                    columns = _with_mask(columns, batching, end - begin)
                yield self._map_batch(columns, end - begin, IteratorPlace(end, []))
            begin = end

    def _mapped(self, draws: NDArray[np.int64], places: NDArray[np.int64], batching: Batching) -> Batch:
        """The examples of some draws, mapped and stacked."""
        parts = [slice(n, n + CHUNK) for n in range(0, len(draws), CHUNK)]
        asks = [(draws[part].tolist(), places[part].tolist()) for part in parts]
        if self.pool is None:
            lists = [self.data.examples(*ask) for ask in asks]
        else:
            lists = [self.pool.answer(future) for future in [self.pool.ask(*ask) for ask in asks]]
        examples = [example for part in lists for example in part if example is not None]
        return batching.stacked([Drawn(int(draw), example) for draw, example in zip(draws, examples, strict=True)])

    def _batched(self, place: IteratorPlace, batching: Batching) -> Iterator[PreparedBatch]:
        batcher = batching.batcher()
        if place.pending:
            self._refill(batcher, place.pending)
        fresh = place.next  # begin of the epoch that has not yielded anything yet
        ends = place.next if place.next and place.next % self.count == 0 else None
        drawn = self._drawn(place.next)
        while True:
            if ends is not None and (not self.data.joined or ends == self.last):
                while (rows := batcher.flush()) is not None:
                    if len(rows) == batching.size or batching.remainder == "pad":
                        yield self._of_rows(rows, batching, IteratorPlace(ends, batcher.pending()))
                        fresh = ends
                if ends - fresh >= self.count:
                    raise DataError(
                        f"data: {self.data} yields no batch from {self.count} examples, those of an epoch: filters "
                        "leave too few; use a smaller batch, or remainder='pad'"
                    )
            elif ends is not None and ends - fresh >= self.count * max(1, batching.size) and self._none_left(batcher):
                raise DataError(f"data: {self.data} has no example left after filters and faults")
            drawn_example = next(drawn, None)
            if drawn_example is None:
                return
            draw, example = drawn_example
            ends = draw + 1 if (draw + 1) % self.count == 0 else None
            rows = None if example is None else batcher.add(draw, example)
            if rows is not None:
                yield self._of_rows(rows, batching, IteratorPlace(draw + 1, batcher.pending()))
                fresh = draw + 1 if ends is None else ends

    def _none_left(self, batcher: Batcher) -> bool:
        return not any(row for group in batcher.pending() for row in group)

    def _of_rows(self, rows: list[list[Drawn]], batching: Batching, after: IteratorPlace) -> PreparedBatch:
        full = len(rows)
        examples = sum(map(len, rows))
        batch = batching.finished(filled_up(rows, batching), full)
        return self._map_batch(batch, examples, after)

    def _map_batch(self, batch: Batch, examples: int, after: IteratorPlace) -> PreparedBatch:
        for stage, mapped in enumerate(self.data.of_batches):
            mapped_batch = mapped(
                batch,
                after.next,
                len(self.data.maps) + stage,
                lambda: f"the batch that ends with draw {after.next - 1}",
            )
            assert mapped_batch is not None
            batch = mapped_batch
        return PreparedBatch(batch, examples, after)

    def _refill(self, batcher: Batcher, pending: list[Any]) -> None:
        """Restore the pending examples of a batcher by reading them again."""
        draws = [draw for group in pending for row in group for draw in row]
        places = [int(self.order.places(draw, draw + 1)[0]) for draw in draws]
        example_of_draw = dict(zip(draws, self.data.examples(draws, places), strict=True))
        lost = [draw for draw, example in example_of_draw.items() if example is None]
        if lost:
            raise DataError(
                f"data: {self.data.source.where(places[draws.index(lost[0])])} has disappeared since it was read"
            )
        batcher.restore([[[Drawn(d, example_of_draw[d]) for d in row] for row in group] for group in pending])

    def _drawn(self, begin: int) -> Iterator[tuple[int, Example | None]]:
        """Draws from a number on, in order, with their examples."""
        chunks = self._chunks(begin)
        if self.pool is None:
            for draws, places in chunks:
                yield from zip(draws, self.data.examples(draws, places), strict=True)
            return
        waiting: deque[tuple[range, Future[Any]]] = deque()
        for draws, places in chunks:
            waiting.append((draws, self.pool.ask(draws, places)))
            if len(waiting) > 2 * self.data.workers:
                done, future = waiting.popleft()
                yield from zip(done, self.pool.answer(future), strict=True)
        while waiting:
            done, future = waiting.popleft()
            yield from zip(done, self.pool.answer(future), strict=True)

    def _chunks(self, begin: int) -> Iterator[tuple[range, list[int]]]:
        """Ranges of draws that do not cross the end of an epoch."""
        while self.last is None or begin < self.last:
            end = min(begin + CHUNK, (begin // self.count + 1) * self.count)
            yield range(begin, end), self.order.places(begin, end).tolist()
            begin = end


def _scatter_rows(rows: Array, places: NDArray[np.int64], size: int) -> Array:
    """Rows at their positions in a batch, with zeros elsewhere."""
    spread = np.zeros((size, *rows.shape[1:]), rows.dtype)
    spread[places] = rows
    return spread


def _with_mask(batch: Batch, batching: Batching, full: int) -> Batch:
    if batching.mask in batch:
        raise DataError(
            f"batch: '{batching.mask}' is a field of the examples and the name of the mask; mask= names another"
        )
    return {**batch, batching.mask: (np.arange(batching.size) < full).astype(np.float32)}
