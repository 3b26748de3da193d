"""Records into files: one, or several that get a record each in turn; whole or not there."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable
from contextlib import suppress
from types import TracebackType
from typing import BinaryIO

from meshlib.errors import DataError
from meshlib.records.frames import WBITS, frames
from meshlib.records.naming import SAVING, shard_names

HELD_BYTES = 1 << 20  # of records that wait for their sums, which cost least many at once


class Writer:
    """Files of records that are being written: `with Writer("train@10") as writer: writer.write(data)`.

    Args:
      path: a file, or "name@count" for several files "name-00000-of-00010", ..., which get a record each in turn.
      compression: None, "gzip" or "zlib".
    Raises: DataError if a file can't be written.

    The files have temporary names, that end in ".saving", until the block ends without a fault.
    """

    def __init__(self, path: str | os.PathLike[str], compression: str | None = None) -> None:
        if not isinstance(path, str | os.PathLike) or not os.fspath(path):
            raise DataError(f"records: expected the path of a file to write, got {path!r:.80}")
        if compression not in WBITS:
            raise DataError(f"records: compression must be None, 'gzip' or 'zlib', got {compression!r:.80}")
        self.paths = shard_names(os.fspath(path))
        self.count = 0
        self._ended = False
        self._shards: list[_Shard] = []
        try:
            for name in self.paths:
                self._shards.append(_Shard(name, compression))
        except BaseException:
            self._drop()
            raise

    def write(self, data: bytes) -> None:
        """Add a record."""
        if not isinstance(data, bytes | bytearray | memoryview):
            raise DataError(f"records: a record is bytes, got {type(data).__name__} {data!r:.80}")
        if self._ended:
            raise DataError(f"records: {self.paths[0]} is written, and takes no more; begin another Writer")
        self._shards[self.count % len(self._shards)].add(bytes(data))
        self.count += 1

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, fault: BaseException | None, tb: TracebackType | None) -> None:
        try:
            if kind is None:
                for shard in self._shards:
                    shard.finish()
                for shard in self._shards:
                    shard.rename()
        finally:
            self._drop()

    def _drop(self) -> None:
        self._ended = True
        for shard in self._shards:
            shard.drop()


class _Shard:
    """One file; faults of the system are DataErrors."""

    def __init__(self, path: str, compression: str | None) -> None:
        self.path, self.temporary = path, f"{path}{SAVING}"
        self.held: list[bytes] = []
        self.held_bytes = 0
        self.packer = None if compression is None else zlib.compressobj(wbits=WBITS[compression])
        self.file: BinaryIO = self._tried(lambda: open(self.temporary, "wb"))  # noqa: SIM115 (closed by finish or drop)

    def add(self, data: bytes) -> None:
        self.held.append(data)
        self.held_bytes += len(data)
        if self.held_bytes >= HELD_BYTES:
            self._flush()

    def finish(self) -> None:
        self._flush()
        if self.packer is not None:
            self._put(self.packer.flush())
        self._tried(self.file.flush)
        self._tried(lambda: os.fsync(self.file.fileno()))
        self.file.close()

    def rename(self) -> None:
        self._tried(lambda: os.replace(self.temporary, self.path))

    def drop(self) -> None:
        with suppress(OSError):
            self.file.close()
        with suppress(OSError):
            os.unlink(self.temporary)

    def _flush(self) -> None:
        if self.held:
            made = frames(self.held)
            self._put(made if self.packer is None else self.packer.compress(made))
        self.held, self.held_bytes = [], 0

    def _put(self, data: bytes) -> None:
        self._tried(lambda: self.file.write(data))

    def _tried(self, do: object) -> BinaryIO:
        try:
            return do()  # type: ignore[operator, no-any-return]
        except OSError as fault:
            raise DataError(f"records: {self.path} can't be written: {fault.strerror or fault}") from fault


def write(path: str | os.PathLike[str], records: Iterable[bytes], compression: str | None = None) -> list[str]:
    """Write records; arguments and faults as of `Writer`.

    Returns: the paths of the files.
    Example:
      >>> import tempfile
      >>> from meshlib import records
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     _ = records.write(f"{folder}/small@2", [b"a", b"b", b"c"])
      ...     list(records.read(f"{folder}/small@2"))
      [b'a', b'c', b'b']
    """
    with Writer(path, compression) as writer:
        for data in records:
            writer.write(data)
    return writer.paths
