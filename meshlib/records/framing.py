"""Records in files in TensorFlow's format (TFRecord), with two checksums per record.

    8 bytes     length of the data, little-endian
    4 bytes     masked CRC-32C of these 8 bytes
    the data
    4 bytes     masked CRC-32C of the data

Files may be compressed as a whole, with gzip or zlib, detected from the first bytes. Uncompressed files have random
access; compressed ones are read sequentially.

Source of the format: tensorflow/tensorflow, tensorflow/core/lib/io/record_writer.h.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshlib.core.errors import DataError, nearest
from meshlib.core.file_versions import FileId, at_one_moment, file_ids
from meshlib.core.files import most_unpacked_bytes, open_file
from meshlib.records.crc import crc32c, masked, masked_crcs
from meshlib.records.sets import Paths, files_of

HEADER, FOOTER = struct.Struct("<QI"), struct.Struct("<I")
FRAME_BYTES = HEADER.size + FOOTER.size
CHUNK_BYTES = 1 << 20  # bytes per read
AUTOMATIC = 32 + zlib.MAX_WBITS  # zlib's code for either header
WBITS = {None: 0, "gzip": 16 + zlib.MAX_WBITS, "zlib": zlib.MAX_WBITS}

Whole = NDArray[np.int64]


class Fault(NamedTuple):
    """A fault of a file with its position: `offset` counts the bytes of the records, decompressed.

    Example:
      >>> import meshlib as mtf
      >>> print(mtf.records.Fault("train-00000-of-00010", 4096, "its CRC is wrong"))
      train-00000-of-00010: at byte 4096: its CRC is wrong
    """

    path: str
    offset: int
    what: str

    def __str__(self) -> str:
        return f"{self.path}: at byte {self.offset}: {self.what}"

    def error(self) -> DataError:
        """The fault as an exception."""
        return DataError(f'records: {self}; on_fault="skip" leaves out and counts what is damaged')


@dataclass(frozen=True)
class Index:
    """Positions of a file's records: the first byte of the data of each, and its length, int64 [n].

    fault: the fault at which the file ends early; None if it is complete.
    """

    starts: Whole
    sizes: Whole
    fault: Fault | None

    def __len__(self) -> int:
        return len(self.starts)


@lru_cache(1 << 12)
def length_crc(length: int) -> int:
    """The masked CRC-32C of a length; cached, since most records of a file have few distinct lengths."""
    return masked(crc32c(struct.pack("<Q", length)))


def frame(data: bytes) -> bytes:
    """A framed record, as in a file.

    >>> frame(b"hi").hex(" ", -4)
    '02000000 00000000 78270b34 686913d6 0856'
    """
    return HEADER.pack(len(data), length_crc(len(data))) + data + FOOTER.pack(masked(crc32c(data)))


def frames(records: Sequence[bytes]) -> bytes:
    """Many framed records, concatenated."""
    parts: list[bytes] = []
    for data, crc in zip(records, masked_crcs(records).tolist(), strict=True):
        parts += (HEADER.pack(len(data), length_crc(len(data))), data, FOOTER.pack(crc))
    return b"".join(parts)


def compression_of(path: str | os.PathLike[str]) -> str | None:
    """The compression of a file: None, "gzip" or "zlib". A valid record header means None."""
    with open_file(path, "records", DataError) as (file, _):
        head = file.read(HEADER.size)
    if len(head) == HEADER.size:
        length, crc = HEADER.unpack(head)
        if length_crc(length) == crc:
            return None
    if head[:2] == b"\x1f\x8b":
        return "gzip"
    is_zlib = len(head) > 1 and head[0] & 15 == 8 and int.from_bytes(head[:2], "big") % 31 == 0
    return "zlib" if is_zlib else None


def index_of(path: str | os.PathLike[str]) -> Index:
    """The positions of records in an uncompressed file: reads only headers."""
    starts: list[int] = []
    sizes: list[int] = []
    fault = None
    with open_file(path, "records", DataError) as (file, target):
        total, at = os.fstat(file.fileno()).st_size, 0
        while at < total:
            head = file.read(HEADER.size)
            what = _wrong_head(head) or _cut_short(head, total - at)
            if what:
                fault = Fault(target, at, what)
                break
            length = HEADER.unpack(head)[0]
            starts.append(at + HEADER.size)
            sizes.append(length)
            at += length + FRAME_BYTES
            file.seek(length + FOOTER.size, os.SEEK_CUR)
    return Index(np.array(starts, np.int64), np.array(sizes, np.int64), fault)


def _wrong_head(head: bytes) -> str | None:
    """The fault of a record header, if any."""
    if len(head) < HEADER.size:
        return f"truncated: a header takes {HEADER.size} bytes, {len(head)} are left"
    length, crc = HEADER.unpack(head)
    if length_crc(length) != crc:
        return f"the length {length} has the CRC {length_crc(length):#010x}, but was written with {crc:#010x}"
    return None


def _cut_short(head: bytes, left: int) -> str | None:
    need = HEADER.unpack(head)[0] + FRAME_BYTES
    return f"truncated: the record takes {need} bytes, {left} are left" if need > left else None


def wrong_data(records: Sequence[bytes], crcs: Sequence[int]) -> list[tuple[int, str]]:
    """Records whose checksum does not match: number and fault."""
    actual = masked_crcs(records)
    wrong = set(np.flatnonzero(actual != np.array(crcs, np.uint32)).tolist())
    return [
        (n, f"the {len(data)} bytes of data have the CRC {now:#010x}, but were written with {written:#010x}")
        for n, (data, now, written) in enumerate(zip(records, actual, crcs, strict=True))
        if n in wrong
    ]


class RecordRead(NamedTuple):
    """A record from a sequential read: its data, or its fault."""

    data: bytes | None
    fault: Fault | None


def scan(
    path: str | os.PathLike[str], compression: str | None = None, same: FileId | None = None
) -> Iterator[RecordRead]:
    """The records of a file in order; a fault after which no more can be located comes last.

    Raises: DataError if it is not the version `same`.
    """
    with open_file(path, "records", DataError, same=same) as (file, target):
        chunks = _Chunks(file, compression)
        most = most_unpacked_bytes(os.fstat(file.fileno()).st_size)
        held, begin = bytearray(), 0  # unconsumed bytes, and their position in the file
        need = HEADER.size
        while True:
            ready: list[bytes] = []
            crcs: list[int] = []
            starts: list[int] = []
            at, what = 0, None
            while len(held) - at >= HEADER.size:
                head = bytes(held[at : at + HEADER.size])
                what = _wrong_head(head)
                need = FRAME_BYTES + HEADER.unpack(head)[0]
                if not what and need > most:
                    what = f"the record takes {need} bytes, more than the {most} that its file may unpack to"
                if what or len(held) - at < need:
                    break
                ready.append(bytes(held[at + HEADER.size : at + need - FOOTER.size]))
                crcs += FOOTER.unpack_from(held, at + need - FOOTER.size)
                starts.append(begin + at)
                at += need
            wrong = dict(wrong_data(ready, crcs))
            for n, data in enumerate(ready):
                yield RecordRead(None, Fault(target, starts[n], wrong[n])) if n in wrong else RecordRead(data, None)
            if what:
                yield RecordRead(None, Fault(target, begin + at, what))
                return
            del held[:at]
            begin += at
            try:
                chunk = chunks.next()
            except zlib.error as fault:
                yield RecordRead(None, Fault(target, begin, f"the {compression} stream is damaged: {fault}"))
                return
            if not chunk:
                break
            held += chunk
        if held:
            head = bytes(held[: HEADER.size])
            what = _wrong_head(head) or _cut_short(head, len(held))
            yield RecordRead(None, Fault(target, begin, str(what)))


class _Chunks:
    """The decompressed content of a file, in chunks."""

    def __init__(self, file: BinaryIO, compression: str | None) -> None:
        self.file = file
        self.stream = None if compression is None else zlib.decompressobj(AUTOMATIC)
        self.left = b""
        self.begun = False

    def next(self) -> bytes:
        """The next chunk; empty at the end. Raises zlib.error for a damaged or truncated stream."""
        if self.stream is None:
            return self.file.read(CHUNK_BYTES)
        while True:
            raw = self.left or self.file.read(CHUNK_BYTES)
            if not raw:
                if self.begun:
                    raise zlib.error("the compressed stream is truncated")
                return b""
            self.begun = True
            chunk = self.stream.decompress(raw, CHUNK_BYTES)  # bounded, whatever the input expands to
            self.left = self.stream.unconsumed_tail
            if self.stream.eof:  # another may follow, if gzipped files were concatenated
                self.left = self.stream.unused_data
                self.stream, self.begun = zlib.decompressobj(AUTOMATIC), False
            if chunk:
                return chunk


ON_FAULT = ("error", "skip")


def checked_on_fault(value: object) -> str:
    """The treatment of damaged records, which must be "error" or "skip"."""
    if isinstance(value, str) and value in ON_FAULT:
        return value
    raise DataError(f"records: on_fault must be 'error' or 'skip', got {value!r:.80}{nearest(value, ON_FAULT)}")


def read(paths: Paths, on_fault: str = "error", faults: list[Fault] | None = None) -> Iterator[bytes]:
    """The records of files, one file after the other. Memory: a megabyte, plus the largest record.

    Args:
      paths: a file, "name@10", a pattern such as "train-*", a folder, or a list of these. Compressed files are detected
        by their first bytes.
      on_fault: "error", or "skip": skip records with damaged data, and the rest of a file after a damaged header.
      faults: a list to which the faults of skipped records are appended.
    Raises: DataError with file, byte position and fault.
    Example:
      >>> import tempfile
      >>> import meshlib as mtf
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     _ = mtf.records.write(f"{folder}/train@2", [b"one", b"two", b"three"])
      ...     sorted(mtf.records.read(f"{folder}/train@2"))
      [b'one', b'three', b'two']
    """
    checked_on_fault(on_fault)
    names, known = at_one_moment(lambda: (files := files_of(paths), file_ids(files)), "records", DataError)

    def contents() -> Iterator[bytes]:
        for name in names:
            for record in scan(name, compression_of(name), known.get(name)):
                if record.data is not None:
                    yield record.data
                    continue
                assert record.fault is not None
                if on_fault == "error":
                    raise record.fault.error()
                if faults is not None:
                    faults.append(record.fault)

    return contents()
