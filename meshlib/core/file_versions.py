"""File versions: consistent reads of several files, or of one file at several times.

Other processes may write files while they are read. A version distinguishes a file from a replacement or an
overwritten state; `open_file` of `meshlib.core.files` records those of the files that it opens for `at_one_moment`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from contextvars import ContextVar
from typing import TypeAlias, TypeVar, cast

T = TypeVar("T")

FileId: TypeAlias = tuple[int, int, int, int]
ATTEMPTS = 6  # retries of a consistent read
opened_files: ContextVar[list[tuple[str, FileId]] | None] = ContextVar("opened_files", default=None)


def file_id(status: os.stat_result) -> FileId:
    """The version of a file: device, inode, size and modification time."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def file_ids(paths: Iterable[str]) -> dict[str, FileId]:
    """The versions of the files that exist, by path."""
    known = {}
    for path in paths:
        with suppress(OSError):
            known[path] = file_id(os.stat(path))
    return known


def check_same(status: os.stat_result, same: FileId | None, path: str, what: str, error: type[Exception]) -> None:
    """Raise `error` if an open file is not the expected version; None: any version."""
    if same is not None and file_id(status) != same:
        raise error(
            f"{what}: {path} was written again while it was read: it had {same[2]:,} bytes, and has "
            f"{status.st_size:,}, written later; start again when no process writes it"
        )


def at_one_moment(read: Callable[[], T], what: str, error: type[Exception]) -> T:
    """The result of `read`, repeated until none of the files that it opened changed meanwhile.

    So a set of files is read as one writer left it. `read` is retried a few times while a writer is active.

    Raises: exceptions of `read` on unchanged files; `error` if a file changed in every attempt.
    """
    around, changed = opened_files.get(), ""
    for attempt in range(ATTEMPTS):
        opened: list[tuple[str, FileId]] = []
        token, fault, result = opened_files.set(opened), None, None
        try:
            result = read()
        except Exception as raised:
            fault = raised
        finally:
            opened_files.reset(token)
        changed = next((path for path, known in opened if not _is_still(path, known)), "")
        if not changed:
            if fault is not None:
                raise fault
            if around is not None:
                around += opened
            return cast(T, result)
        time.sleep(0.01 * 2**attempt)
    raise error(f"{what}: {changed} was written again {ATTEMPTS} times while it was read; wait for its writer to end")


def _is_still(path: str, known: FileId) -> bool:
    try:
        return file_id(os.stat(path)) == known
    except OSError:
        return False
