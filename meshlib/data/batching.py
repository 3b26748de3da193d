"""Batches of static shapes: plain, padded, packed, or bucketed by length.

A batcher receives examples with their draw numbers, and keeps some until a batch is full. Its state consists of these
numbers alone: on resuming, the examples are read again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from meshlib.core.errors import DataError

Array = np.ndarray[Any, Any]
Example = dict[str, Any]
Batch = dict[str, Array]
TOO_LONG = ("error", "cut", "drop")
OPEN_ROWS = 16  # open rows considered for the next sequence when packing
TARGETS, SOURCES = ("segment_ids", "segment_positions"), ("source_segment_ids", "source_positions")


class Drawn(NamedTuple):
    """An example and the number of its draw."""

    draw: int
    example: Example


Row = list[Drawn]  # the examples in one row of a batch


@dataclass(frozen=True)
class Batching:
    """Options of `Data.batch`.

    size       rows of a batch
    remainder  treatment of an epoch's last rows: "drop", or "pad", with the array `mask`; "wrap" pads with the first
               rows of the epoch, without maps
    lengths    padded lengths of the sequence fields; several lengths: buckets with separate batches
    packed     whether several examples share a row
    """

    size: int
    remainder: str = "drop"
    mask: str = "mask"
    lengths: Mapping[str, tuple[int, ...]] | None = None
    packed: bool = False
    too_long: str = "error"
    segments: Mapping[str, tuple[str, str]] | None = None

    def __str__(self) -> str:
        parts = [str(self.size), self.remainder]
        if self.lengths:
            parts += [f"{n}:{'|'.join(map(str, sizes))}" for n, sizes in self.lengths.items()]
            parts += ["packed" * self.packed, self.too_long]
        return f"batch({', '.join(filter(None, parts))})"

    def batcher(self) -> Batcher:
        """An empty batcher."""
        if self.lengths is None:
            return PlainRows(self)
        return Packed(self) if self.packed else Buckets(self)

    def finished(self, rows: Sequence[Row], full: int) -> Batch:
        """The batch of `rows`, of which only the first `full` are valid."""
        batch = self.stacked([row[0] for row in rows]) if self.lengths is None else self._filled(rows)
        if self.remainder == "pad":
            if self.mask in batch:
                raise DataError(
                    f"batch: '{self.mask}' is a field of the examples and the name of the mask; mask= names another"
                )
            batch[self.mask] = (np.arange(len(rows)) < full).astype(np.float32)
        return batch

    def stacked(self, rows: Sequence[Drawn]) -> Batch:
        """Examples stacked as rows."""
        _check_fields(rows)
        return {name: _stack(name, rows) for name in rows[0].example}

    def _filled(self, rows: Sequence[Row]) -> Batch:
        """Sequences padded in rows of their lengths; other fields stacked from the first example of each row."""
        assert self.lengths is not None
        assert self.segments is not None
        some = [drawn for row in rows for drawn in row]
        _check_fields(some)
        lengths = self._length_of(some)
        batch: Batch = {}
        for name in some[0].example:
            if name not in self.lengths:
                if self.packed:
                    raise DataError(
                        f"batch: '{name}' is not a packed field, and packed rows have several examples; name its "
                        "length in pack=, or drop it with a map"
                    )
                filled = [row[0] if row else Drawn(some[0].draw, _zeros(some[0].example)) for row in rows]
                batch[name] = _stack(name, filled)
                continue
            first = np.asarray(some[0].example[name])
            for drawn in some:
                other = np.asarray(drawn.example[name])
                if other.dtype != first.dtype or other.shape[1:] != first.shape[1:]:
                    raise DataError(
                        f"batch: '{name}' of example {some[0].draw} is {_type(first)}, of example {drawn.draw} "
                        f"{_type(other)}; sequences of a batch differ in length alone; use a map to make them alike"
                    )
            batch[name] = np.zeros((len(rows), lengths[name], *first.shape[1:]), first.dtype)
            ids = np.zeros((len(rows), lengths[name]), np.int32)
            positions = np.zeros_like(ids)
            for n, row in enumerate(rows):
                at = 0
                for number, (_, example) in enumerate(row, start=1):
                    sequence = np.asarray(example[name])
                    end = at + len(sequence)
                    batch[name][n, at:end] = sequence
                    ids[n, at:end] = number
                    positions[n, at:end] = np.arange(len(sequence))
                    at = end
            if name in self.segments:
                taken = [n for n in self.segments[name] if n in some[0].example]
                if taken:
                    raise DataError(
                        f"batch: '{taken[0]}' is a field of the examples and the name of the segments of '{name}'; "
                        "segments= names others"
                    )
                batch.update(zip(self.segments[name], (ids, positions), strict=True))
        return batch

    def _length_of(self, some: Sequence[Drawn]) -> dict[str, int]:
        """The padded length of each field: the least that fits all examples."""
        assert self.lengths is not None
        bucket = max(self.bucket(drawn.example) for drawn in some)
        return {name: sizes[bucket] for name, sizes in self.lengths.items()}

    def bucket(self, example: Example) -> int:
        """The index of the lengths that fit an example."""
        assert self.lengths is not None
        return max(
            next(n for n, size in enumerate(sizes) if len(example[name]) <= size)
            for name, sizes in self.lengths.items()
        )

    def fitting(self, draw: int, example: Example) -> Example | None:
        """The example, cut if too long for the longest row; None if it is dropped."""
        if self.lengths is None:
            return example
        for name, sizes in self.lengths.items():
            if name not in example or np.ndim(example[name]) < 1:
                fault = f"'{name}' is a single value" if name in example else f"no field '{name}'"
                raise DataError(f"batch: example {draw}: {fault}; its fields: {', '.join(example)}")
            length = len(example[name])
            if length > sizes[-1]:
                if self.too_long == "drop":
                    return None
                if self.too_long == "error":
                    raise DataError(
                        f"batch: example {draw}: '{name}' has {length} elements, but a row has {sizes[-1]}; "
                        "too_long='cut' or 'drop' cuts or drops it"
                    )
                example = {**example, name: example[name][: sizes[-1]]}
        return example


class Batcher(ABC):
    """Collects examples one by one, and returns rows when they make a batch."""

    def __init__(self, batching: Batching) -> None:
        self.batching = batching

    @abstractmethod
    def add(self, draw: int, example: Example) -> list[Row] | None:
        """Add an example; returns the rows of a batch if one is full."""

    @abstractmethod
    def flush(self) -> list[Row] | None:
        """Up to a batch of the remaining rows, to be dropped or padded; None if there are none."""

    @abstractmethod
    def pending(self) -> list[list[list[int]]]:
        """The draw numbers of its examples, grouped by rows."""

    @abstractmethod
    def restore(self, groups: Sequence[Sequence[Row]]) -> None:
        """Restore these pending examples."""


class PlainRows(Batcher):
    """Each example is a row."""

    def __init__(self, batching: Batching) -> None:
        super().__init__(batching)
        self.rows: list[Row] = []

    def add(self, draw: int, example: Example) -> list[Row] | None:
        self.rows.append([Drawn(draw, example)])
        return self.flush() if len(self.rows) == self.batching.size else None

    def flush(self) -> list[Row] | None:
        rows, self.rows = self.rows, []
        return rows or None

    def pending(self) -> list[list[list[int]]]:
        return _draws([self.rows])

    def restore(self, groups: Sequence[Sequence[Row]]) -> None:
        (self.rows,) = (list(group) for group in groups)


class Buckets(Batcher):
    """Each example is a row, with separate batches per length."""

    def __init__(self, batching: Batching) -> None:
        super().__init__(batching)
        assert batching.lengths is not None
        self.groups: list[list[Row]] = [[] for _ in next(iter(batching.lengths.values()))]

    def add(self, draw: int, example: Example) -> list[Row] | None:
        group = self.groups[self.batching.bucket(example)]
        group.append([Drawn(draw, example)])
        return self._pop(group) if len(group) == self.batching.size else None

    def flush(self) -> list[Row] | None:
        return next((self._pop(group) for group in self.groups if group), None)

    def _pop(self, group: list[Row]) -> list[Row]:
        rows = list(group)
        group.clear()
        return rows

    def pending(self) -> list[list[list[int]]]:
        return _draws(self.groups)

    def restore(self, groups: Sequence[Sequence[Row]]) -> None:
        self.groups = [list(group) for group in groups]


class Packed(Batcher):
    """Packs each example into the first open row with space; if none has any, the fullest row is closed."""

    def __init__(self, batching: Batching) -> None:
        super().__init__(batching)
        self.done: list[Row] = []
        self.open: list[Row] = []

    def add(self, draw: int, example: Example) -> list[Row] | None:
        new = Drawn(draw, example)
        row = next((row for row in self.open if self._fits(row, example)), None)
        if row is not None:
            row.append(new)
            return None
        self.open.append([new])
        if len(self.open) > OPEN_ROWS:
            self.done.append(self.open.pop(max(range(OPEN_ROWS), key=lambda n: self._length(self.open[n]))))
        return self._pop() if len(self.done) == self.batching.size else None

    def _fits(self, row: Row, example: Example) -> bool:
        assert self.batching.lengths is not None
        return all(
            sum(len(drawn.example[name]) for drawn in row) + len(example[name]) <= sizes[-1]
            for name, sizes in self.batching.lengths.items()
        )

    def _length(self, row: Row) -> int:
        assert self.batching.lengths is not None
        return sum(len(drawn.example[name]) for name in self.batching.lengths for drawn in row)

    def flush(self) -> list[Row] | None:
        room = self.batching.size - len(self.done)
        self.done, self.open = self.done + self.open[:room], self.open[room:]
        return self._pop() or None

    def _pop(self) -> list[Row]:
        rows, self.done = self.done, []
        return rows

    def pending(self) -> list[list[list[int]]]:
        return _draws([self.done, self.open])

    def restore(self, groups: Sequence[Sequence[Row]]) -> None:
        self.done, self.open = (list(group) for group in groups)


def _draws(groups: Sequence[Sequence[Row]]) -> list[list[list[int]]]:
    return [[[drawn.draw for drawn in row] for row in group] for group in groups]


def filled_up(rows: list[Row], batching: Batching) -> list[Row]:
    """Rows padded to a batch: with empty rows for sequences, otherwise by repeating examples from the first on."""
    short = batching.size - len(rows)
    return rows + ([[] for _ in range(short)] if batching.lengths else [rows[n % len(rows)] for n in range(short)])


def _zeros(example: Example) -> Example:
    return {name: np.zeros_like(value) for name, value in example.items()}


def _check_fields(rows: Iterable[Drawn]) -> None:
    first: Drawn | None = None
    for drawn in rows:
        first = first or drawn
        if drawn.example.keys() != first.example.keys():
            raise DataError(
                f"batch: example {first.draw} has the fields {', '.join(first.example)}, example {drawn.draw} has "
                f"{', '.join(drawn.example)}; use a map to give all the same fields"
            )


def _stack(name: str, rows: Sequence[Drawn]) -> Array:
    """A field of all rows."""
    values = [drawn.example[name] for drawn in rows]
    if isinstance(values[0], str | bytes):
        stacked = np.empty(len(values), object)
        stacked[:] = values
        return stacked
    arrays = [np.asarray(v) for v in values]
    first = arrays[0]
    for drawn, array in zip(rows, arrays, strict=True):
        if array.shape != first.shape or array.dtype != first.dtype:
            raise DataError(
                f"batch: '{name}' of example {rows[0].draw} is {_type(first)}, of example {drawn.draw} {_type(array)}; "
                "batches need one shape: use a map, or pad= for sequences"
            )
    return np.stack(arrays)


def _type(array: Array) -> str:
    return f"{array.dtype} {list(array.shape)}"
