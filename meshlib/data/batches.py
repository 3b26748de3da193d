"""Fixed-size batches from arrays in memory, in an order determined by seed and epoch alone: a view of `mtf.data`.

The order of epoch e under seed s sorts the examples by the raw 64-bit words of NumPy's Philox generator (4x64, ten
rounds) with key (s, e) and counter 0: word i belongs to example i, ties go to the lower index. NumPy guarantees the
raw words of a bit generator across versions, unlike `Generator.permutation`, so that a run can be resumed elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from meshlib.core.arguments import examples_of
from meshlib.core.errors import FeedError, nearest
from meshlib.data.batching import Batch, Batching
from meshlib.data.pipeline import REMAINDERS, Data
from meshlib.data.sources import Arrays

__all__ = ["Batches", "Position"]

Array = np.ndarray[Any, Any]


class Position(NamedTuple):
    """A position in the sequence of batches: the next one is number `batch` of epoch `epoch`, both from 0."""

    epoch: int
    batch: int


class Batches(Iterator[Batch]):
    """An iterator of dicts for `Simulation.step`: `for batch in batches: sim.step(batch)`.

    Args:
      arrays: name -> array; the first dim of each counts the examples.
      batch_size: examples in every batch, including the last of an epoch.
      remainder: "drop" drops the last `examples % batch_size` examples of an epoch's order; "pad" fills the last batch
        with examples from the beginning of the order, and adds to every batch the float32 array `mask`, 1 for an
        example and 0 for a repeated one.
      shuffle_seed: seed of the order (see above); None keeps the order of the arrays.
      epochs: number of epochs; None repeats for ever.
      prefetch: number of batches that a thread prepares ahead; 0 prepares each on request. The batches are the same.
        The thread ends with the last batch, with `close()` and with the iterator; its exceptions are raised here.
      mask: the name of the mask.
    Raises: FeedError with all faults of the arguments.

    Batches are copies. To resume after `mtf.load`, continue from the step, or from a stored `state`:
    `batches.seek(*divmod(int(sim.state["step"]), batches.per_epoch))`.

    Example:
      >>> import meshlib as mtf
      >>> import numpy as np
      >>> batches = mtf.Batches({"x": np.arange(5)}, 2, remainder="pad", epochs=1)
      >>> [(batch["x"].tolist(), batch["mask"].tolist()) for batch in batches]
      [([0, 1], [1.0, 1.0]), ([2, 3], [1.0, 1.0]), ([4, 0], [1.0, 0.0])]
      >>> batches.seek(0, 2)
      >>> next(batches)["x"].tolist(), batches.state
      ([4, 0], Position(epoch=1, batch=0))
    """

    def __init__(
        self,
        arrays: Mapping[str, Array],
        batch_size: int,
        *,
        remainder: str = "drop",
        shuffle_seed: int | None = None,
        epochs: int | None = None,
        prefetch: int = 0,
        mask: str = "mask",
    ) -> None:
        _check(arrays, batch_size, remainder, shuffle_seed, epochs, prefetch, mask)
        self._size = int(batch_size)
        self._data = Data(
            Arrays(dict(arrays)),
            seed=None if shuffle_seed is None else int(shuffle_seed),
            batching=Batching(self._size, "wrap" if remainder == "pad" else "drop", mask),
            epochs=None if epochs is None else int(epochs),
            ahead=int(prefetch),
        )
        self._feed = iter(self._data)

    @property
    def per_epoch(self) -> int:
        """The number of batches in an epoch."""
        return self._data.per_epoch

    @property
    def mask(self) -> str | None:
        """The name of the array that is 1 for valid rows; None if batches are not padded."""
        return self._data.mask

    @property
    def state(self) -> Position:
        """The position of the next batch, for `seek`; prefetched batches don't count."""
        epoch, draw = divmod(self._feed.next_draw, len(self._data))
        batch = draw // self._size
        return Position(epoch, batch) if batch < self.per_epoch else Position(epoch + 1, 0)

    def seek(self, epoch: int, batch: int = 0) -> None:
        """Continue with batch number `batch` of epoch `epoch`.

        Raises: FeedError for a position outside the sequence; its end is allowed.
        """
        position, epochs = Position(epoch, batch), self._data.epochs
        faults = [
            f"{name} must be an integer >= 0, got {value!r:.80}"
            for name, value in zip(position._fields, position, strict=True)
            if not _whole(value, 0)
        ]
        if not faults and batch >= self.per_epoch:
            faults.append(f"an epoch has batches 0 to {self.per_epoch - 1}, got batch {batch}")
        if not faults and epochs is not None and (epoch, batch) > (epochs, 0):
            faults.append(f"{epochs} epochs end at epoch {epochs}, batch 0, got {epoch}, {batch}")
        if faults:
            raise FeedError(f"Batches.seek: {'; '.join(faults)}")
        self._feed.seek(int(epoch) * len(self._data) + int(batch) * self._size)

    def close(self) -> None:
        """End the thread, if there is one, and the sequence. Any thread may call it."""
        self._feed.close()

    def __next__(self) -> Batch:
        if self._feed.closed:
            raise FeedError("Batches: closed; create another to continue")
        try:
            return next(self._feed)
        except FeedError:
            if not self._feed.closed:
                raise
            raise FeedError("Batches: closed while a batch was waited for") from None

    def __enter__(self) -> Batches:
        return self

    def __exit__(self, *fault: object) -> None:
        self.close()


def _whole(value: object, least: int) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and int(value) >= least


def _check(
    arrays: object, batch_size: object, remainder: object, seed: object, epochs: object, prefetch: object, mask: object
) -> None:
    """Raise FeedError with all faults of the arguments of `Batches`."""
    faults, counts = examples_of(arrays)
    faults += _size_faults(counts, batch_size, remainder)
    if seed is not None and (not _whole(seed, 0) or int(seed) >= 2**64):  # type: ignore[call-overload]
        faults.append(f"shuffle_seed must be None or an integer from 0 to 2**64 - 1, got {seed!r:.80}")
    if epochs is not None and not _whole(epochs, 1):
        faults.append(f"epochs must be None or an integer >= 1, got {epochs!r:.80}")
    if not _whole(prefetch, 0):
        faults.append(f"prefetch must be an integer >= 0, got {prefetch!r:.80}")
    if not isinstance(mask, str) or not mask:
        faults.append(f"mask must be a name, got {mask!r:.80}")
    elif isinstance(remainder, str) and remainder == "pad" and isinstance(arrays, Mapping) and mask in arrays:
        faults.append(f"the mask's name '{mask}' is also that of an array; give another, as in mask='{mask}_of_batch'")
    if faults:
        raise FeedError(f"Batches: {'; '.join(faults)}")


def _size_faults(counts: Mapping[str, int], batch_size: object, remainder: object) -> list[str]:
    """Faults of the batch size for this many examples, and of `remainder`."""
    faults = []
    if not isinstance(remainder, str) or remainder not in REMAINDERS:
        faults.append(f"remainder must be 'drop' or 'pad', got {remainder!r:.80}{nearest(remainder, REMAINDERS)}")
    if not isinstance(batch_size, int | np.integer) or not _whole(batch_size, 1):
        faults.append(f"batch_size must be an integer >= 1, got {batch_size!r:.80}")
    elif remainder == "drop" and counts and 0 < min(counts.values()) < batch_size:
        faults.append(
            f"a batch of {batch_size} is larger than the data of {min(counts.values())} examples, and 'drop' would "
            "leave nothing; use a smaller batch_size, or remainder='pad'"
        )
    return faults
