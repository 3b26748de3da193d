"""Atomic files: written under a temporary name beside the target, flushed, and renamed.

Only regular files are read or replaced: renaming over a device would remove it for everyone, and opening a pipe may
block forever. Symbolic links are followed and remain links.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import secrets
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from itertools import count, islice
from typing import Any, BinaryIO

from layouts.errors import nearest
from meshlib.core.file_versions import FileId, check_same, file_id, opened_files

TEMPORARY = re.compile(r"\..+\.[0-9a-f]{8}\.saving", re.DOTALL)
MOST_LINE_BYTES = 16 * 2**20
_NAME_BYTES = 200  # bytes of the target's name in a temporary name: file systems allow 255, and a suffix is added


def replace_file(path: object, write: Callable[[BinaryIO], object], what: str, error: type[Exception]) -> str:
    """Replace the content of the file `path`, or leave it unchanged on an error.

    Args:
      path: str or pathlib.Path; its folder must exist. A link stays a link, and its target is replaced.
      write: writes the content to an open binary file.
      what: the caller, at the beginning of messages.
      error: the exception type to raise.
    Returns: the resolved path of the file.
    Raises: `error` if `path` is not the path of a regular file, or can't be written; exceptions of `write` other than
      OSError. A killed writer leaves a temporary file, which the next call removes.
    """
    replacement = Replacement(path, what, error)
    try:
        with replacement.faults():
            write(replacement.file)
        replacement.finish()
    finally:
        replacement.close()
    return replacement.target


class Replacement:
    """New content of a file, written under a temporary name until `finish`; arguments and errors as in `replace_file`.

    Several writers may replace one target at once, each with a temporary file; the last to finish wins. `finish`
    renames the file, `close` closes it and removes it if unfinished.

    follow: whether to replace the target of a link instead of the link.
    """

    def __init__(self, path: object, what: str, error: type[Exception], follow: bool = True) -> None:
        self.path, self.what, self.error = path, what, error
        with self.faults() as target:
            folder, name = os.path.split(target if follow else os.path.abspath(os.fspath(path)))  # type: ignore[call-overload]
            self.target = os.path.join(folder, name)
            remove_stale(folder, name)
            self.file, self.temporary = _temporary(folder, name)
        self.finished = False

    def faults(self) -> contextlib.AbstractContextManager[str]:
        """Context in which OSErrors are raised as `error`."""
        return faults_of(self.path, self.what, "written", self.error)

    def flush(self) -> None:
        """Sync the written data to disk."""
        with self.faults():
            self.file.flush()
            changing("fsync", self.temporary)
            os.fsync(self.file.fileno())

    def finish(self) -> None:
        """Sync the file, rename it to the target, and sync the folder."""
        self.flush()
        self.rename()
        with self.faults():
            sync_folder(os.path.dirname(self.target))

    def rename(self) -> None:
        """Rename the file to the target; durable once its folder is synced."""
        with self.faults():
            if os.name == "nt":
                self.file.close()  # Windows can't rename open files
            changing("rename", self.target)
            os.replace(self.temporary, self.target)  # elsewhere before the lock is released
            self.finished = True

    def close(self) -> None:
        """Close the file, and remove it if unfinished."""
        if not self.finished:
            with suppress(OSError):
                changing("unlink", self.temporary)
                os.unlink(self.temporary)
        with suppress(OSError):
            self.file.close()


def changing(call: str, path: str) -> None:
    """Hook called before each system call that changes a file or folder, so that tests can kill the process there."""


def sync_folder(folder: str) -> None:
    """Sync the entries of a folder to disk."""
    if os.name == "nt":
        return
    with suppress(PermissionError):  # a folder with write but no read permission
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            changing("fsync", folder)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def remove_file(path: str) -> None:
    """Remove a file if it exists."""
    with suppress(FileNotFoundError):
        changing("unlink", path)
        os.unlink(path)


def link_file(path: str, new: str) -> None:
    """Hard-link a file under another name. Raises: OSError if links are not supported or the name exists."""
    changing("link", new)
    os.link(path, new)


def make_folder(folder: object, what: str, error: type[Exception]) -> str:
    """Create a folder and its parents if missing; returns its path. Raises: `error` if it can't be created."""
    try:
        path = os.fspath(folder)  # type: ignore[call-overload]
        if not path:
            raise ValueError("its name is empty")
        changing("mkdir", path)
        os.makedirs(path, exist_ok=True)
    except (OSError, TypeError, ValueError) as fault:
        raise error(
            f"{what}: folder '{folder!s:.200}' can't be created: {getattr(fault, 'strerror', None) or fault}"
            f"{file_remedy(fault, folder)}"
        ) from None
    return str(path)


_REMEDIES = {
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "; name another place, or change its permissions"),
    errno.EEXIST: "; name another, or remove the file of that name",
    errno.ENOTDIR: "; name a folder where a file is named now",
    errno.ENOSPC: "; free some space, or name another disk",
    errno.ENAMETOOLONG: "; use a shorter name",
    errno.ELOOP: "; a link leads back to itself: name the file",
}


def file_remedy(fault: Exception, path: object, written: bool = True) -> str:
    """The remedy at the end of a message about an OSError, or ""."""
    if isinstance(fault, FileNotFoundError):
        return missing_file(str(path), written)
    return _REMEDIES.get(getattr(fault, "errno", None) or 0, "")


def missing_file(path: str, written: bool = False) -> str:
    """The end of a message about a missing file: the missing folder, or a similar name that exists.

    >>> missing_file("/nowhere/x/y.json")
    '; there is no folder /nowhere'
    >>> missing_file("/nowhere/x/y.json", written=True)
    '; there is no folder /nowhere: make it, or name another'
    """
    folder = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(folder):
        while not os.path.isdir(os.path.dirname(folder)):
            folder = os.path.dirname(folder)
        return f"; there is no folder {folder:.200}{': make it, or name another' if written else ''}"
    with suppress(OSError):
        return nearest(os.path.basename(path), islice(os.listdir(folder), 1000)) or "; check the path"
    return "; check the path"


def append_line(path: object, text: str, what: str, error: type[Exception]) -> None:
    """Append a line to a file, creating it if missing; a killed writer leaves a truncated line."""
    with faults_of(path, what, "written", error) as target, open(target, "ab") as file:
        changing("append", target)
        file.write(f"{text}\n".encode())


@contextlib.contextmanager
def locked(path: str) -> Iterator[bool | None]:
    """Context with the lock of a file or folder, once no other process has it; None if locks are not supported."""
    if os.name == "nt":
        yield None
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield _lock(descriptor, wait=True)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def claimed(path: str) -> Iterator[int | None]:
    """Context with exclusive ownership of a lock file: None, or the process id of the current owner (0 if unknown).

    The file has the id of its owner and is removed at the end. A killed owner leaves the file, but not the lock.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        if _lock(descriptor, wait=False) is False or _is_same_file(descriptor, path):
            break
        os.close(descriptor)  # removed by its owner before this process locked it
    try:
        if _lock(descriptor, wait=False) is False:
            text = os.read(descriptor, 20)
            yield int(text) if text.isdigit() else 0
            return
        os.ftruncate(descriptor, 0)
        os.write(descriptor, str(os.getpid()).encode())
        try:
            yield None
        finally:
            with suppress(OSError):
                os.unlink(path)
    finally:
        os.close(descriptor)


def most_unpacked_bytes(packed_bytes: int) -> int:
    """Limit of the size of an uncompressed file: 16 times the compressed one, or 64 MiB. Digits pack to a fifth, zeros
    to 1/1000."""
    return max(64 * 2**20, 16 * packed_bytes)


@contextlib.contextmanager
def open_file(
    path: object, what: str, error: type[Exception], most_bytes: int | None = None, same: FileId | None = None
) -> Iterator[tuple[BinaryIO, str]]:
    """The file `path`, open for reading, and its resolved path. Arguments and errors as in `replace_file`.

    Args:
      same: the expected version (`file_id`), from an earlier read of the file.
    Raises: `error` if it is not a regular file (a pipe, a device), exceeds `most_bytes`, or is not the version `same`.
    """
    with faults_of(path, what, "read", error) as target, open(target, "rb") as file:
        status = os.fstat(file.fileno())
        if (opened := opened_files.get()) is not None:
            opened.append((target, file_id(status)))
        check_same(status, same, target, what, error)
        size = status.st_size
        if most_bytes is not None and size > most_bytes:
            raise error(f"{what}: {target} has {size:,} bytes, more than the {most_bytes:,} that such a file may have")
        yield file, target


def lines_of(file: BinaryIO, path: object, what: str, error: type[Exception]) -> Iterator[bytes]:
    """The lines of an open file, with line ends. Raises: `error` for a line of more than `MOST_LINE_BYTES`."""
    for number in count(1):
        line = file.readline(MOST_LINE_BYTES + 1)
        if len(line) > MOST_LINE_BYTES:
            raise error(f"{what}: {path}, line {number} has more than {MOST_LINE_BYTES:,} bytes; is it a text file?")
        if not line:
            return
        yield line


@contextlib.contextmanager
def faults_of(path: object, what: str, done: str, error: type[Exception]) -> Iterator[str]:
    """Context with the resolved path, in which OSErrors are raised as `error`."""
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(text, str) or not text:
        raise error(f"{what}: the path must be text or a pathlib.Path, got {type(path).__name__} {path!r:.80}")
    try:
        nameable = "\0" not in text and os.fsencode(text)
    except UnicodeEncodeError:
        nameable = False
    if not nameable:
        raise error(f"{what}: {text!r:.80} can't be the name of a file")
    target = text
    try:
        _check_regular(text)
        target = os.path.realpath(text)
        yield target
    except OSError as fault:
        raise error(
            f"{what}: {target:.200} can't be {done}: {fault.strerror or fault}"
            f"{file_remedy(fault, target, done != 'read')}"
        ) from fault


def _check_regular(path: str) -> None:
    """Raise OSError if the path, with links followed, exists and is not a regular file."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        mode = None
    if not os.path.basename(path) or (mode is not None and stat.S_ISDIR(mode)):
        raise IsADirectoryError(errno.EISDIR, "it is a folder; name a file in it")
    if mode is not None and not stat.S_ISREG(mode):
        kind = "a pipe" if stat.S_ISFIFO(mode) else "a socket" if stat.S_ISSOCK(mode) else "a device"
        raise OSError(errno.EINVAL, f"it is {kind}, not a regular file")


def _stem(name: str) -> str:
    """The target's name in the names of its temporary files, or a digest of it if it is too long."""
    raw = os.fsencode(name)
    return name if len(raw) <= _NAME_BYTES else blake2b(raw, digest_size=16).hexdigest()


class _AnnouncedFile(io.FileIO):
    """A file that calls `changing` before each write."""

    def write(self, data: Any, /) -> int:
        changing("write", str(self.name))
        return super().write(data)


def _temporary(folder: str, name: str) -> tuple[BinaryIO, str]:
    """A new locked temporary file beside the target, and its path."""
    while True:
        path = os.path.join(folder, f".{_stem(name)}.{secrets.token_hex(4)}.saving")
        changing("create", path)
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), 0o666)
        except FileExistsError:
            continue
        file = io.BufferedWriter(_AnnouncedFile(path, "wb", opener=partial(_given_descriptor, descriptor)))
        # Another writer may have removed the file as stale before it was locked.
        if _lock(descriptor, wait=True) is None or _is_same_file(descriptor, path):
            return file, path
        file.close()


def _given_descriptor(descriptor: int, path: str, flags: int) -> int:
    return descriptor


def remove_stale(folder: str, *names: str) -> None:
    """Remove unlocked temporary files of killed writers: those of the targets `names`, or all of them without names."""
    stems = [f".{_stem(name)}." for name in names]
    try:
        entries = os.listdir(folder)
    except PermissionError:  # a folder with write but no read permission
        return
    for entry in entries:
        if not TEMPORARY.fullmatch(entry) or (stems and entry[: -len("0123abcd.saving")] not in stems):
            continue
        path = os.path.join(folder, entry)
        with suppress(OSError):  # removed or finished by another writer
            descriptor = os.open(path, os.O_RDWR)
            try:
                if _lock(descriptor, wait=False) and _is_same_file(descriptor, path):
                    changing("unlink", path)
                    os.unlink(path)
            finally:
                os.close(descriptor)


def _lock(descriptor: int, wait: bool) -> bool | None:
    """Lock an open file until it is closed; False if another process has it, None if locks are not supported."""
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


def _is_same_file(descriptor: int, path: str) -> bool:
    """True if `path` still names the open file."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False
