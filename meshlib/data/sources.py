"""Sources of examples, with random access by index."""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
from numpy.typing import NDArray

from meshlib.core.errors import DataError
from meshlib.core.file_versions import FileId, check_same, file_ids
from meshlib.core.files import lines_of, open_file
from meshlib.data.batching import Array, Batch, Example
from meshlib.records.framing import FOOTER, Fault, RecordRead, compression_of, index_of, scan, wrong_data
from meshlib.records.images import IMAGE_ENDINGS, read_image

Numbers = NDArray[np.int64]
OPEN_FILES = 128  # open files per source; files beyond these are opened for each record
FINGERPRINT_ROWS = 256  # rows hashed per array, evenly spaced, since files may be larger than memory
READ_AHEAD = 4096  # records of a compressed file kept in memory, unless a buffer needs more


class Source(ABC):
    """Examples by index; several threads may read at once."""

    name: str
    stacks = False  # whether `columns` returns the examples of `read` stacked
    complete = True  # whether no example is skipped
    sequential = False  # whether random access is slow

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read(self, numbers: Sequence[int]) -> list[Example | None]:
        """Examples by index; None for damaged ones that are skipped."""

    def columns(self, numbers: Numbers) -> Batch:
        """The examples as stacked arrays, if it `stacks`."""
        raise NotImplementedError

    @abstractmethod
    def fingerprint(self) -> object:
        """Plain data that differ if the examples do, as far as this is known without reading all of them."""

    def where(self, number: int) -> str:
        """The description of an example in messages."""
        return f"example {number} of {self.name}"

    def keep(self, count: int) -> None:  # noqa: B027 (most sources need not)
        """Prepare for random access within `count` neighbouring examples."""

    @property
    def skipped(self) -> list[Fault]:
        """The records skipped so far."""
        return []

    def leave_out(self, fault: Fault) -> None:  # noqa: B027 (most sources leave nothing out)
        """Count a skipped record, also of another process, or raise its fault."""


def _rows_of(columns: Batch, count: int) -> list[Example]:
    return [{name: column[k] for name, column in columns.items()} for k in range(count)]


@dataclass(frozen=True, eq=False)
class Arrays(Source):
    """Rows of arrays, in memory or mapped from files."""

    arrays: Mapping[str, Array]
    name: str = "arrays"
    stacks = True

    def __len__(self) -> int:
        return len(next(iter(self.arrays.values())))

    def fingerprint(self) -> object:
        rows = np.unique(np.linspace(0, len(self) - 1, FINGERPRINT_ROWS).astype(np.int64))
        kinds = {name: (str(array.dtype), array.shape) for name, array in self.arrays.items()}
        return kinds, self.columns(rows)

    def read(self, numbers: Sequence[int]) -> list[Example | None]:
        copied = self.columns(np.asarray(numbers, np.int64))  # a map may modify its argument
        return [*_rows_of(copied, len(numbers))]

    def columns(self, numbers: Numbers) -> Batch:
        return {name: np.asarray(array[numbers]) for name, array in self.arrays.items()}


@dataclass(frozen=True, eq=False)
class SourceSlice(Source):
    """Examples [begin, end) of another source."""

    whole: Source
    begin: int
    end: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", f"{self.whole.name}[{self.begin}:{self.end}]")
        object.__setattr__(self, "sequential", self.whole.sequential)
        object.__setattr__(self, "stacks", self.whole.stacks)
        object.__setattr__(self, "complete", self.whole.complete)

    def __len__(self) -> int:
        return self.end - self.begin

    def fingerprint(self) -> object:
        return self.begin, self.end, self.whole.fingerprint()

    def read(self, numbers: Sequence[int]) -> list[Example | None]:
        return self.whole.read([n + self.begin for n in numbers])

    def columns(self, numbers: Numbers) -> Batch:
        return self.whole.columns(numbers + self.begin)

    def where(self, number: int) -> str:
        return self.whole.where(number + self.begin)

    def keep(self, count: int) -> None:
        self.whole.keep(count)

    @property
    def skipped(self) -> list[Fault]:
        return self.whole.skipped

    def leave_out(self, fault: Fault) -> None:
        self.whole.leave_out(fault)


class Files:
    """Files with random access by several threads."""

    def __init__(
        self, paths: Sequence[str], error: Callable[[str, OSError], DataError], known: Mapping[str, FileId]
    ) -> None:
        self.paths, self.error, self.known = paths, error, known
        self.lock = threading.Lock()
        self.opened: dict[int, BinaryIO] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"paths": self.paths, "error": self.error, "known": self.known}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def read(self, file: int, at: int, count: int) -> bytes:
        """Bytes of a file; fewer at its end."""
        try:
            opened = self.opened.get(file) or self._opened(file)
            if opened is not None and hasattr(os, "pread"):
                return os.pread(opened.fileno(), count, at)
            if opened is not None:
                with self.lock:
                    opened.seek(at)
                    return opened.read(count)
            with self._open(file) as once:
                once.seek(at)
                return once.read(count)
        except OSError as fault:
            raise self.error(self.paths[file], fault) from fault

    def _opened(self, file: int) -> BinaryIO | None:
        """A file that stays open, if the limit allows."""
        with self.lock:
            if file not in self.opened and len(self.opened) < OPEN_FILES:
                self.opened[file] = self._open(file)
            return self.opened.get(file)

    def _open(self, file: int) -> BinaryIO:
        """An open file, which must be the version that was indexed."""
        path = self.paths[file]
        opened = open(path, "rb", buffering=0)  # noqa: SIM115
        try:
            check_same(os.fstat(opened.fileno()), self.known.get(path), path, "data", DataError)
        except DataError:
            opened.close()
            raise
        return opened

    def __del__(self) -> None:
        for file in getattr(self, "opened", {}).values():
            file.close()


def _unreadable(path: str, fault: OSError) -> DataError:
    return DataError(f"data: {path} can't be read: {fault.strerror or fault}")


class Decode(Protocol):
    """Decoder of records to examples."""

    stacks: bool

    def __call__(self, data: bytes) -> Example:
        """The example of one record."""

    def columns(self, records: Sequence[bytes]) -> Batch | None:
        """The examples of many records, stacked; None if they must be read one by one."""


class Records(Source):
    """The records of files, decoded by `decode`. `interleave` files are read in turns."""

    def __init__(self, paths: Sequence[str], decode: Decode, interleave: int, on_fault: str, name: str) -> None:
        self.paths, self.decode, self.on_fault, self.name = list(paths), decode, on_fault, name
        self.complete = on_fault == "error"
        self.stacks = decode.stacks and self.complete
        self.faults: list[Fault] = []
        self.lock = threading.Lock()
        self.known = file_ids(self.paths)
        self.files = Files(self.paths, _unreadable, self.known)
        self.streams: dict[int, _Stream] = {}
        counts, starts, sizes = [], [], []
        for n, path in enumerate(self.paths):
            compression = compression_of(path)
            if compression is None:
                index = index_of(path)
                starts.append(index.starts)
                sizes.append(index.sizes)
                counts.append(len(index))
                if index.fault is not None:
                    self.leave_out(index.fault)
                continue
            self.streams[n] = _Stream(path, compression, self.known.get(path))
            counts.append(self.streams[n].count)
            starts.append(np.zeros(counts[-1], np.int64))
            sizes.append(np.zeros(counts[-1], np.int64))
            for fault in self.streams[n].faults:
                if not fault[1]:
                    self.leave_out(fault[0])
        self.sequential = bool(self.streams)
        self.starts, self.sizes = np.concatenate(starts), np.concatenate(sizes)
        first = np.cumsum([0, *counts])
        self.file_of = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        self.first = first
        self.order = None if interleave == 1 else _interleaved(counts, interleave)

    def __len__(self) -> int:
        return len(self.starts)

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in vars(self).items() if k != "lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, lock=threading.Lock())

    @property
    def skipped(self) -> list[Fault]:
        return list(self.faults)

    def keep(self, count: int) -> None:
        for stream in self.streams.values():
            stream.room = max(READ_AHEAD, count)

    def where(self, number: int) -> str:
        at = number if self.order is None else int(self.order[number])
        file = int(self.file_of[at])
        return f"record {at - int(self.first[file])} of {self.paths[file]}"

    def fingerprint(self) -> object:
        return self.sizes, self.order is None, np.diff(self.first)

    def read(self, numbers: Sequence[int]) -> list[Example | None]:
        payloads = self._data_of(numbers)
        there = [data for data in payloads if data is not None]
        columns = self.decode.columns(there) if self.decode.stacks and there else None
        if columns is None:
            return [None if data is None else self._decoded(data, numbers[n]) for n, data in enumerate(payloads)]
        rows = iter(_rows_of(columns, len(there)))
        return [None if data is None else next(rows) for data in payloads]

    def columns(self, numbers: Numbers) -> Batch:
        payloads = [data for data in self._data_of(numbers) if data is not None]
        decoded = self.decode.columns(payloads)
        if decoded is not None:
            return decoded
        singly = [self._decoded(data, int(n)) for data, n in zip(payloads, numbers, strict=True)]
        return {name: np.stack([example[name] for example in singly]) for name in singly[0]}

    def _data_of(self, numbers: Sequence[int] | Numbers) -> list[bytes | None]:
        """The bytes of records with checksums verified; None for damaged ones that are skipped."""
        places = np.asarray(numbers, np.int64)
        places = places if self.order is None else self.order[places]
        payloads: list[bytes | None] = [None] * len(places)
        crcs: list[int] = [0] * len(places)
        plain: list[int] = []
        for n, (at, file, start, size) in enumerate(
            zip(places.tolist(), self.file_of[places].tolist(), self.starts[places].tolist(),
                self.sizes[places].tolist(), strict=True)
        ):  # fmt: skip
            if file in self.streams:
                record = self.streams[file].record(at - int(self.first[file]))
                payloads[n] = record.data
                if record.fault is not None:
                    self.leave_out(record.fault)
                continue
            raw = self.files.read(file, start, size + FOOTER.size)
            if len(raw) < size + FOOTER.size:
                self.leave_out(Fault(self.paths[file], start, f"the file became shorter: {len(raw)} bytes are left"))
                continue
            payloads[n], crcs[n] = raw[:size], FOOTER.unpack_from(raw, size)[0]
            plain.append(n)
        for k, what in wrong_data([payloads[n] or b"" for n in plain], [crcs[n] for n in plain]):
            n = plain[k]
            payloads[n] = None
            at = int(places[n])
            self.leave_out(Fault(self.paths[int(self.file_of[at])], int(self.starts[at]), what))
        return payloads

    def _decoded(self, data: bytes, number: int) -> Example:
        try:
            return self.decode(data)
        except DataError as fault:
            raise DataError(f"data: {self.where(number)}: {fault}") from None

    def leave_out(self, fault: Fault) -> None:
        if self.on_fault == "error":
            raise fault.error()
        with self.lock:
            if fault not in self.faults:  # each epoch reports it again
                self.faults.append(fault)


class _Stream:
    """The records of a compressed file in nearly sequential access: skipped ones are buffered for a while."""

    def __init__(self, path: str, compression: str, known: FileId | None) -> None:
        self.path, self.compression, self.known = path, compression, known
        self.count = 0
        self.faults: list[tuple[Fault, bool]] = []  # with True for faults of single records, which have numbers
        last: Fault | None = None
        for record in scan(path, compression, known):
            if last is not None:
                self.faults.append((last, True))
            last = record.fault
            self.count += 1
        if last is not None and not _of_data(last):
            self.count -= 1
            self.faults.append((last, False))
        self.room = READ_AHEAD
        self._begin()

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in vars(self).items() if k not in ("lock", "records", "kept")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._begin()

    def _begin(self) -> None:
        self.lock = threading.Lock()
        self.next, self.kept = 0, OrderedDict[int, RecordRead]()
        self.records: Iterator[RecordRead] = scan(self.path, self.compression, self.known)

    def record(self, number: int) -> RecordRead:
        """One record; rescans from the beginning if it is no longer buffered."""
        with self.lock:
            if number in self.kept:
                return self.kept.pop(number)
            if number < self.next:
                self.next, self.records = 0, scan(self.path, self.compression, self.known)
                self.kept.clear()
            for scanned in self.records:
                self.next += 1
                if self.next > number:
                    return scanned
                self.kept[self.next - 1] = scanned
                if len(self.kept) > self.room:
                    self.kept.popitem(last=False)
        return RecordRead(None, Fault(self.path, 0, f"the file became shorter: it had {self.count} records"))


def _of_data(fault: Fault) -> bool:
    """True for a fault of a single record, after which others follow."""
    return "bytes of data have the CRC" in fault.what


def _interleaved(counts: Sequence[int], together: int) -> Numbers:
    """The interleaved order of files with these numbers of records: `together` are open and yield a record in turn, and
    the next file replaces one that ends.

    >>> _interleaved([2, 3, 1], 2).tolist()
    [0, 2, 1, 3, 5, 4]
    """
    bounds = np.cumsum([0, *counts]).tolist()
    waiting = [iter(range(begin, end)) for begin, end in pairwise(bounds)][::-1]
    turns = deque(waiting.pop() for _ in range(min(together, len(waiting))))
    order: list[int] = []
    while turns:
        turn = turns.popleft()
        at = next(turn, None)
        if at is not None:
            order.append(at)
            turns.append(turn)
        elif waiting:
            turns.appendleft(waiting.pop())
    return np.array(order, np.int64)


class TextLines(Source):
    """The lines of texts, as `field`: str without line ends. Empty lines are skipped."""

    def __init__(self, paths: Sequence[str], field: str, name: str) -> None:
        self.paths, self.field, self.name = list(paths), field, name
        self.files = Files(self.paths, _unreadable, file_ids(self.paths))
        files, starts, ends = [], [], []
        for n, path in enumerate(self.paths):
            begins, stops = _lines_of(path)
            files.append(np.full(len(begins), n, np.int32))
            starts.append(begins)
            ends.append(stops)
        self.file_of, self.starts, self.ends = (np.concatenate(x) for x in (files, starts, ends))

    def __len__(self) -> int:
        return len(self.starts)

    def where(self, number: int) -> str:
        return f"the line at byte {int(self.starts[number])} of {self.paths[int(self.file_of[number])]}"

    def fingerprint(self) -> object:
        return self.field, self.file_of, self.starts, self.ends

    def read(self, numbers: Sequence[int]) -> list[Example | None]:
        examples: list[Example | None] = []
        for n in numbers:
            start, end = int(self.starts[n]), int(self.ends[n])
            raw = self.files.read(int(self.file_of[n]), start, end - start)
            try:
                examples.append({self.field: raw.decode()})
            except UnicodeDecodeError as fault:
                raise DataError(f"data: {self.where(n)} is not UTF-8: {fault.reason}") from None
        return examples


def _lines_of(path: str) -> tuple[Numbers, Numbers]:
    """Offsets at which the non-empty lines of a file begin and end."""
    starts, ends, at = [], [], 0
    with open_file(path, "data", DataError) as (file, _):
        for line in lines_of(file, path, "data", DataError):
            length = len(line.rstrip(b"\r\n"))
            if line[:length].strip():
                starts.append(at)
                ends.append(at + length)
            at += len(line)
    return np.array(starts, np.int64), np.array(ends, np.int64)


class Folder(Source):
    """Images in one folder per class: `image`, uint8 [side, side, channels], and `label`, int32."""

    def __init__(self, path: Path, side: int, channels: int) -> None:
        self.name, self.side, self.channels = str(path), side, channels
        self.classes = tuple(sorted(p.name for p in path.iterdir() if p.is_dir()))
        self.files = [
            (file, label)
            for label, kind in enumerate(self.classes)
            for file in sorted((path / kind).iterdir())
            if file.suffix.lower() in IMAGE_ENDINGS
        ]

    def __len__(self) -> int:
        return len(self.files)

    def where(self, number: int) -> str:
        return str(self.files[number][0])

    def fingerprint(self) -> object:
        return self.side, self.channels, self.classes, [(file.name, label) for file, label in self.files]

    def read(self, numbers: Sequence[int]) -> list[Example | None]:
        return [
            {
                "image": read_image(self.files[n][0], (self.side, self.side), self.channels),
                "label": np.int32(self.files[n][1]),
            }
            for n in numbers
        ]
