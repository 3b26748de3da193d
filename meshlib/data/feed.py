"""Iterators over a `Data`: state with fingerprints of the data, statistics, and prefetching threads."""

from __future__ import annotations

import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from meshlib.core.arguments import at
from meshlib.core.canonical_keys import key_of
from meshlib.core.documents import COUNT
from meshlib.core.errors import FeedError, GraphError
from meshlib.data.batching import Batch
from meshlib.data.execution import IteratorPlace, Maker, PreparedBatch

if TYPE_CHECKING:
    from meshlib.data.pipeline import Data


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


def identity_of(data: Data) -> dict[str, str | None]:
    """Identity of data: "of", a description; the key of their "examples", and that of their "functions".

    Functions that refer to objects without a key, such as a lock or an open file, have the key None.
    """
    batching = None if data.batching is None else asdict(data.batching)
    return {
        "of": str(data),
        "examples": key_of("data", data.source.fingerprint(), data.seed, data.buffer, data.joined, batching),
        "functions": _key_of_functions([stage.function for stage in (*data.maps, *data.of_batches)]),
    }


def _key_of_functions(functions: list[Callable[..., Any]]) -> str | None:
    try:
        return key_of("data", functions)
    except GraphError:
        return None


@dataclass
class Stats:
    """Statistics of an iterator.

    examples, batches  numbers returned so far
    made_seconds       time of preparing them, including prefetching
    waited_seconds     time for which the consumer waited
    skipped            number of damaged records that were skipped, listed in `faults`

    Example:
      >>> import numpy as np
      >>> import meshlib as mtf
      >>> feed = iter(mtf.data.arrays({"x": np.arange(4)}).batch(2))
      >>> _ = next(feed)
      >>> feed.stats.examples, feed.stats.batches, feed.stats.skipped
      (2, 1, 0)
    """

    examples: int = 0
    batches: int = 0
    made_examples: int = 0
    made_seconds: float = 0.0
    waited_seconds: float = 0.0
    faults: list[Any] = field(default_factory=list)

    @property
    def skipped(self) -> int:
        return len(self.faults)

    @property
    def examples_per_second(self) -> float | None:
        """Rate at which this host prepares examples, for `mtf.HostInput(examples_per_second=...)`."""
        return self.made_examples / self.made_seconds if self.made_seconds else None


class Feed(Iterator[Batch]):
    """The batches of a `Data`, or its examples if it has no batches.

    Example:
      >>> import numpy as np
      >>> import meshlib as mtf
      >>> feed = iter(mtf.data.arrays({"x": np.arange(4)}).batch(2))
      >>> next(feed)["x"].tolist(), next(feed)["x"].tolist()
      ([0, 1], [2, 3])
    """

    def __init__(self, data: Data) -> None:
        self.data = data
        self._place = IteratorPlace(0, [])
        self._stats = Stats()
        self._maker: Maker | None = None
        self._ahead: Ahead[PreparedBatch] | None = None
        self._end: weakref.finalize[..., Feed] | None = None
        self.closed = False
        self._changing = threading.Lock()  # close() may be called by another thread than the one that waits for a batch
        self._rows: NDArray[np.int64] | None = None

    def __iter__(self) -> Feed:
        return self

    def __next__(self) -> Batch:
        with self._changing:
            if self.closed:
                raise FeedError(f"{at('data')}: closed; iterate over the data again to continue")
            maker = self._maker or self._begin()
            prefetcher = self._ahead
        begun = time.perf_counter()
        try:
            ready = next(maker) if prefetcher is None else prefetcher.take()
        except BaseException:
            self._stop()  # the next call prepares this batch again
            if self.closed:
                raise FeedError(f"{at('data')}: closed while a batch was waited for") from None
            raise
        self._stats.waited_seconds += time.perf_counter() - begun
        self._stats.examples += ready.examples
        self._stats.batches += 1
        self._place = ready.after
        batch: Batch = ready.batch
        return batch

    def only(self, rows: NDArray[np.bool_]) -> bool:
        """Prepare only these rows of each batch, as one of several processes needs; the others are zeros.

        Returns: whether this is possible: not if examples are dropped, packed or bucketed, since the rows of a process
          are unknown in advance, or if functions are mapped over batches, since these may use all rows.
        """
        data, batching = self.data, self.data.batching
        left_out = any(m.filters for m in data.maps) or not data.source.complete
        by_row = batching is not None and batching.lengths is None and batching.size == len(rows)
        if not by_row or left_out or data.of_batches:
            return False
        self._stop()
        self._rows = np.flatnonzero(rows)
        return True

    def state(self) -> dict[str, Any]:
        """The position, for `restore`: some numbers that can be written as JSON."""
        return {"next": self._place.next, "pending": self._place.pending, **self._identity}

    def seek(self, draw: int) -> None:
        """Continue with the batch that begins with this draw."""
        self._stop()
        self._place = IteratorPlace(draw, [])

    @property
    def next_draw(self) -> int:
        """The draw with which the next batch begins."""
        return self._place.next

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue with the batch that was next when `state()` was called.

        Warns if the functions of `map` or `filter` differ from those of the state; the new ones are used.

        Raises: FeedError for the state of other data, or an invalid one.
        """
        place = _place_of(state)
        if place is None:
            raise FeedError(
                f"{at('data.restore')}: expected what state() of {self.data} returned, got {state!r:.80}; a run "
                "must continue with data of the same kind"
            )
        own = self._identity
        if state["of"] != own["of"]:
            raise FeedError(
                f"{at('data.restore')}: the state belongs to other data; give the data of that run, or start over",
                f"state: {state['of']:.1000}",
                f"here:  {own['of']}",
            )
        if state["examples"] != own["examples"]:
            raise FeedError(
                f"{at('data.restore')}: the state belongs to other data: both are {own['of']}, but their examples "
                f"differ (key {state['examples']:.32} of the state, {own['examples']} here); give the examples of that "
                "run, or start over"
            )
        if state["functions"] != own["functions"]:
            warnings.warn(
                f"{at('data.restore')}: the functions of {own['of']} have changed since the state was taken, or "
                "their libraries have other versions: the following batches are made by the current ones",
                stacklevel=3,
            )
        self._stop()
        self._place = place

    @cached_property
    def _identity(self) -> dict[str, Any]:
        return identity_of(self.data)

    @property
    def stats(self) -> Stats:
        """Statistics so far."""
        if self._maker is not None:
            self._stats.made_examples, self._stats.made_seconds = self._maker.examples, self._maker.seconds
        self._stats.faults = self.data.source.skipped
        return self._stats

    def close(self) -> None:
        """End its threads and the sequence of batches. Any thread may call it."""
        with self._changing:
            self.closed = True
        self._stop()

    def __enter__(self) -> Feed:
        return self

    def __exit__(self, *fault: object) -> None:
        self.close()

    def _begin(self) -> Maker:
        before = self.stats
        self._maker = maker = Maker(self.data, self._place, self._rows)
        maker.examples, maker.seconds = before.made_examples, before.made_seconds
        # Threads refer to the maker alone, so that this iterator can be collected while they run.
        self._ahead = Ahead(maker, self.data.ahead, "meshlib.data") if self.data.ahead else None
        self._end = weakref.finalize(self, _close, maker, self._ahead)
        return maker

    def _stop(self) -> None:
        with self._changing:
            _ = self.stats
            end, self._maker, self._ahead, self._end = self._end, None, None, None
        if end is not None:
            end()


def _place_of(state: Any) -> IteratorPlace | None:
    """The position in a state; None if the state is invalid."""
    texts = ("of", "examples", "functions")
    if not isinstance(state, Mapping) or not state.keys() >= {"next", "pending", *texts}:
        return None
    if not all(isinstance(state[name], str) for name in texts[:2]) or not isinstance(state[texts[2]], str | None):
        return None
    following, pending = state["next"], state["pending"]
    groups = pending if isinstance(pending, list) else [None]
    rows = [row for group in groups for row in (group if isinstance(group, list) else [None])]
    draws = [draw for row in rows for draw in (row if isinstance(row, list) else [None])]
    if not COUNT.accepts(following) or not all(COUNT.accepts(draw) and draw < following for draw in draws):
        return None
    return IteratorPlace(following, pending)


def _close(maker: Maker, prefetcher: Ahead[PreparedBatch] | None) -> None:
    if prefetcher is not None:
        prefetcher.stop()
    maker.close()
