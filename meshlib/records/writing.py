"""Writing of record files: one, or several in turn, atomically."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable
from types import TracebackType
from typing import BinaryIO

from layouts.parsing import is_iterable
from meshlib.core.errors import DataError
from meshlib.core.file_sets import FileSet
from meshlib.core.files import Replacement
from meshlib.records.framing import WBITS, frames
from meshlib.records.sets import manifest_of, new_set, set_of, shard_names

HELD_BYTES = 1 << 20  # bytes of records buffered for their sums, which are most efficient in large numbers


class Writer:
    """Writer of record files: `with Writer("train@10") as writer: writer.write(data)`.

    Args:
      path: a file, or "name@count" for several files "name-00000-of-00010", ..., which get one record each in turn.
      compression: None, "gzip" or "zlib".
    Raises: DataError if a file can't be written.

    The files have temporary names until the block ends without an exception. Several appear together
    (`meshlib.core.file_sets`): a killed writer leaves all files of the old set or all of the new one, named by a hidden
    manifest. Of several writers of one path the last to finish wins.

    Example:
      >>> import tempfile
      >>> import meshlib as mtf
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     with mtf.records.Writer(f"{folder}/train@2") as writer:
      ...         for n in range(3):
      ...             writer.write(f"record {n}".encode())
      ...     sorted(mtf.records.read(f"{folder}/train@2"))
      [b'record 0', b'record 1', b'record 2']
    """

    def __init__(self, path: str | os.PathLike[str], compression: str | None = None) -> None:
        if not isinstance(path, str | os.PathLike) or not os.fspath(path):
            raise DataError(f"records: expected the path of a file to write, got {path!r:.80}")
        if compression not in WBITS:
            raise DataError(f"records: compression must be None, 'gzip' or 'zlib', got {compression!r:.80}")
        name = os.fspath(path)
        self.paths = shard_names(name)
        self.count = 0
        self._ended = False
        self._target: Replacement | FileSet
        if (record_set := set_of(name)) is not None:
            self._target = new_set(record_set, "records")
            files = [self._target.file(n) for n in range(len(self.paths))]
        else:
            self._target = Replacement(path, "records", DataError)
            files = [self._target.file]
        self._shards = [_Shard(file, self._target, compression) for file in files]

    def write(self, data: bytes) -> None:
        """Add a record."""
        if not isinstance(data, bytes | bytearray | memoryview):
            raise DataError(f"records: a record must be bytes, got {type(data).__name__} {data!r:.80}")
        if self._ended:
            raise DataError(f"records: {self.paths[0]} is finished and takes no more records; create another Writer")
        self._shards[self.count % len(self._shards)].add(bytes(data))
        self.count += 1

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, fault: BaseException | None, tb: TracebackType | None) -> None:
        try:
            if kind is None:
                for shard in self._shards:
                    shard.end()
                if isinstance(self._target, FileSet):
                    folder = os.path.dirname(self.paths[0])
                    names = self._target.commit(manifest_of)
                    self.paths = [os.path.join(folder, name) for name in names]
                else:
                    self._target.finish()
        finally:
            self._ended = True
            self._target.close()


class _Shard:
    """One file; OSErrors are raised as DataErrors."""

    def __init__(self, file: BinaryIO, target: Replacement | FileSet, compression: str | None) -> None:
        self.file, self.target = file, target
        self.held: list[bytes] = []
        self.held_bytes = 0
        self.packer = None if compression is None else zlib.compressobj(wbits=WBITS[compression])

    def add(self, data: bytes) -> None:
        self.held.append(data)
        self.held_bytes += len(data)
        if self.held_bytes >= HELD_BYTES:
            self._pack()

    def end(self) -> None:
        """Write the buffered records."""
        self._pack()
        if self.packer is not None:
            self._put(self.packer.flush())

    def _pack(self) -> None:
        if self.held:
            framed = frames(self.held)
            self._put(framed if self.packer is None else self.packer.compress(framed))
        self.held, self.held_bytes = [], 0

    def _put(self, data: bytes) -> None:
        with self.target.faults():
            self.file.write(data)


def write(path: str | os.PathLike[str], records: Iterable[bytes], compression: str | None = None) -> list[str]:
    """Write records; arguments and errors as in `Writer`.

    Returns: the paths of the files.
    Example:
      >>> import tempfile
      >>> from meshlib import records
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     _ = records.write(f"{folder}/small@2", [b"a", b"b", b"c"])
      ...     list(records.read(f"{folder}/small@2"))
      [b'a', b'c', b'b']

    Raises: also DataError if `records` is a single bytes object.
    """
    if isinstance(records, bytes | bytearray | memoryview | str) or not is_iterable(records):
        raise DataError(f"records: expected several records, got {type(records).__name__} {records!r:.80}")
    with Writer(path, compression) as writer:
        for data in records:
            writer.write(data)
    return writer.paths
