"""Files that are whole or not there: written under a temporary name beside the target, flushed, and renamed."""

from __future__ import annotations

import errno
import os
import re
import secrets
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import BinaryIO


def replace_file(target: str, write: Callable[[BinaryIO], object]) -> None:
    """Give the file `target` (an absolute path) new content, or leave it as it was.

    Args:
      write: writes the content to an open binary file.
    Raises: OSError as the system does; whatever `write` raises. A killed writer leaves a file beside the target, which
      the next call removes.
    """
    folder, name = os.path.split(target)
    if os.path.isdir(target):
        raise IsADirectoryError(errno.EISDIR, "it is a folder; name a file in it")
    _remove_stale(folder, name)
    file, temporary = _temporary(folder, name)
    try:
        with file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
            if os.name == "nt":
                file.close()  # Windows renames no open file
            os.replace(temporary, target)  # else before the lock goes
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    if os.name != "nt":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _temporary(folder: str, name: str) -> tuple[BinaryIO, str]:
    """A new locked file beside the target, and its path."""
    while True:
        path = os.path.join(folder, f".{name}.{secrets.token_hex(4)}.saving")
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), 0o666)
        except FileExistsError:
            continue
        file = os.fdopen(descriptor, "wb")
        # Another writer may take the file for a stale one in the moment before the lock: then it is gone.
        if _lock(descriptor, wait=True) is None or _same(descriptor, path):
            return file, path
        file.close()


def _remove_stale(folder: str, name: str) -> None:
    """Remove what killed writers of the same target left: temporary files that no one has locked."""
    pattern = re.compile(re.escape(f".{name}.") + r"[0-9a-f]{8}\.saving")
    for found in os.listdir(folder):
        if not pattern.fullmatch(found):
            continue
        path = os.path.join(folder, found)
        with suppress(OSError):  # another writer removed or finished it
            descriptor = os.open(path, os.O_RDWR)
            try:
                if _lock(descriptor, wait=False) and _same(descriptor, path):
                    os.unlink(path)
            finally:
                os.close(descriptor)


def _lock(descriptor: int, wait: bool) -> bool | None:
    """Lock an open file until it is closed; False if another process has it, None where there are no such locks."""
    if sys.platform == "win32":
        return None
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return None
    return True


def _same(descriptor: int, path: str) -> bool:
    """Whether `path` is still the open file."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False
