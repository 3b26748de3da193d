"""Iterators over a `Data`: where they are, what they have done, and the threads that work ahead of them."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from meshlib.ahead import Ahead
from meshlib.checks import at
from meshlib.data.batching import Batch
from meshlib.data.maker import Made, Maker, Place
from meshlib.errors import FeedError

if TYPE_CHECKING:
    from meshlib.data.pipeline import Data


@dataclass
class Stats:
    """What an iterator has done so far.

    examples, batches  that were handed out
    made_seconds       the time in which they were made, whether or not anybody waited
    waited_seconds     how long the one who asked waited for them
    skipped            how many records were damaged and left out; `faults` says which
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
        """What this host prepares when nobody holds it up: `mtf.HostInput(examples_per_second=...)` takes it."""
        return self.made_examples / self.made_seconds if self.made_seconds else None


class Feed(Iterator[Batch]):
    """The batches of a `Data`, or its examples where it has no batches."""

    def __init__(self, data: Data) -> None:
        self.data = data
        self._place = Place(0, [])
        self._stats = Stats()
        self._maker: Maker | None = None
        self._ahead: Ahead[Made] | None = None
        self._end: weakref.finalize[..., Feed] | None = None
        self._closed = False
        self._rows: NDArray[np.int64] | None = None

    def __iter__(self) -> Feed:
        return self

    def __next__(self) -> Batch:
        if self._closed:
            raise FeedError(f"{at('data')}: closed; iterate over the data again to go on")
        if self._maker is None:
            self._begin()
        begun = time.perf_counter()
        try:
            made = next(self._maker) if self._ahead is None else self._ahead.take()  # type: ignore[arg-type]
        except BaseException:
            self._stop()  # asked again, this batch is made again
            raise
        self._stats.waited_seconds += time.perf_counter() - begun
        self._stats.examples += made.examples
        self._stats.batches += 1
        self._place = made.after
        found: Batch = made.batch
        return found

    def only(self, rows: NDArray[np.bool_]) -> bool:
        """Prepare of each batch those rows alone, as one of several processes needs; the others hold zeros.

        Returns: whether it does: whose rows are can't be known before they are made where examples are left out, share
          rows or lie apart by lengths, and functions of batches may look at all rows.
        """
        data, asked = self.data, self.data.batching
        left_out = any(m.filters for m in data.maps) or not data.source.complete
        if asked is None or asked.lengths is not None or asked.size != len(rows) or left_out or data.of_batches:
            return False
        self._stop()
        self._rows = np.flatnonzero(rows)
        return True

    def state(self) -> dict[str, Any]:
        """Where it is, for `restore`: some numbers, to be written as JSON."""
        return {"next": self._place.next, "pending": self._place.pending, "of": str(self.data)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on with the batch that came next when `state()` was asked.

        Raises: FeedError for the state of other data, or none.
        """
        try:
            place, of = Place(int(state["next"]), list(state["pending"])), state["of"]
            draws = [int(draw) for group in place.pending for row in group for draw in row]
            if min(place.next, *draws, 0) < 0 or max(draws, default=-1) >= place.next:
                raise ValueError
        except (TypeError, KeyError, ValueError):
            raise FeedError(f"{at('data.restore')}: expected what state() returned, got {state!r:.80}") from None
        if of != str(self.data):
            raise FeedError(
                f"{at('data.restore')}: the state is one of other data\n  state: {of}\n  here:  {self.data}"
            )
        self._stop()
        self._place = place

    @property
    def stats(self) -> Stats:
        """What was done so far."""
        if self._maker is not None:
            self._stats.made_examples, self._stats.made_seconds = self._maker.examples, self._maker.seconds
        self._stats.faults = self.data.source.skipped
        return self._stats

    def close(self) -> None:
        """End its threads; there are no batches after this."""
        self._closed = True
        self._stop()

    def __enter__(self) -> Feed:
        return self

    def __exit__(self, *fault: object) -> None:
        self.close()

    # ------------------------------------------------------------ inside

    def _begin(self) -> None:
        before = self.stats
        self._maker = maker = Maker(self.data, self._place, self._rows)
        maker.examples, maker.seconds = before.made_examples, before.made_seconds
        # Threads know the maker alone, so that this iterator can be dropped while they run.
        self._ahead = Ahead(maker, self.data.ahead, "meshlib.data") if self.data.ahead else None
        self._end = weakref.finalize(self, _ended, maker, self._ahead)

    def _stop(self) -> None:
        _ = self.stats
        if self._end is not None:
            self._end()
        self._maker = self._ahead = self._end = None


def _ended(maker: Maker, ahead: Ahead[Made] | None) -> None:
    if ahead is not None:
        ahead.stop()
    maker.close()
