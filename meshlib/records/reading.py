"""Sequential reading of record files."""

from __future__ import annotations

from collections.abc import Iterator

from meshlib.core.errors import DataError, nearest
from meshlib.core.file_versions import at_one_moment, file_ids
from meshlib.records.framing import Fault, compression_of, scan
from meshlib.records.shard_names import Paths, files_of

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
