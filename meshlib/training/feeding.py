"""Batches of any kind with their position in the data, and how many of their rows are valid."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, Protocol

import numpy as np

from layouts.parsing import is_iterable
from meshlib.core.arguments import at
from meshlib.core.documents import COUNT
from meshlib.core.errors import FeedError
from meshlib.data import Data, Feed
from meshlib.data.batches import Batches

MASK = "mask"


class Feeding(Protocol):
    """An iterator of batches with a state representable as JSON."""

    def __next__(self) -> Mapping[str, Any]: ...

    def state(self) -> dict[str, Any]:
        """The current position."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a position."""


class _OfBatches:
    def __init__(self, batches: Batches) -> None:
        self.batches = batches

    def __next__(self) -> Mapping[str, Any]:
        return next(self.batches)

    def state(self) -> dict[str, Any]:
        return self.batches.state._asdict()

    def restore(self, state: Mapping[str, Any]) -> None:
        _of_this_kind(state, "epoch", "batch")
        self.batches.seek(state["epoch"], state["batch"])


class _Counted:
    """Other iterables of batches, which are resumed by skipping the batches already taken."""

    def __init__(self, batches: Iterable[Mapping[str, Any]]) -> None:
        self.batches: Iterator[Mapping[str, Any]] = iter(batches)
        self.taken = 0

    def __next__(self) -> Mapping[str, Any]:
        batch = next(self.batches)
        if not isinstance(batch, Mapping):
            raise FeedError(f"{at('train')}: batch {self.taken} must be a dict of names to arrays, got {batch!r:.80}")
        self.taken += 1
        return batch

    def state(self) -> dict[str, Any]:
        return {"batches": self.taken}

    def restore(self, state: Mapping[str, Any]) -> None:
        _of_this_kind(state, "batches")
        for _ in islice(self.batches, state["batches"] - self.taken):
            self.taken += 1


def _of_this_kind(state: Mapping[str, Any], *names: str) -> None:
    if not isinstance(state, Mapping) or set(state) != set(names):
        raise FeedError(
            f"{at('train')}: the checkpoint is of a run on data of another kind: their state has {', '.join(state)}, "
            f"that of these {', '.join(names)}; give the data of that run, or another folder"
        )
    for name in names:
        if not COUNT.accepts(state[name]):
            raise FeedError(
                f"{at('train')}: the checkpoint's state of the data is damaged: '{name}' is {state[name]!r:.40}"
            )


def mask_of(data: object, batch: Mapping[str, Any]) -> Any:
    """The array of a batch that is 1 for valid rows; None if all are valid."""
    chain = data.data if isinstance(data, Feed) else data.batches if isinstance(data, _OfBatches) else data
    if isinstance(chain, Data | Batches):
        return None if chain.mask is None else batch.get(chain.mask)
    mask = batch.get(MASK)  # name of the mask in other batches
    return None if mask is None or np.ndim(mask) != 1 else mask


def examples_of(data: object, batch: Mapping[str, Any]) -> float:
    """The number of valid rows of a batch."""
    mask = mask_of(data, batch)
    if mask is not None:
        return float(np.sum(mask))
    first = next((x for x in batch.values() if np.ndim(x)), None)
    return 1.0 if first is None else float(len(first))


def feeding_of(data: Any) -> Feeding:
    """The `Feeding` for data of any kind. Raises: FeedError if they are not batches."""
    chain = data.data if isinstance(data, Feed) else data
    if isinstance(chain, Data) and chain.batching is None:
        raise FeedError(f"{at('train')}: the data are examples, not batches: {chain}; write data.batch(size)")
    if isinstance(data, Data | Feed):
        return iter(data)
    if isinstance(data, Batches):
        return _OfBatches(data)
    if not is_iterable(data) or isinstance(data, str | bytes | Mapping):
        raise FeedError(f"{at('train')}: data must be mtf.data, or an iterable of dicts, got {data!r:.80}")
    return _Counted(data)
