"""Atomic files: written under a temporary name beside the target, flushed, and renamed.

Only regular files are read or replaced: renaming over a device would remove it for everyone, and a pipe may have
nobody at its other end. Links are followed, and stay links.
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
_NAME_BYTES = 200  # of the target's name in a temporary one: file systems take 255, and something is added


def replace_file(path: object, write: Callable[[BinaryIO], object], what: str, error: type[Exception]) -> str:
    """Give the file `path` new content, or leave it as it was.

    Args:
      path: text or a pathlib.Path; its folder must exist. A link stays a link, and its target is replaced.
      write: writes the content to an open binary file.
      what: who asks, as messages begin.
      error: what to raise.
    Returns: the path of the file itself, with no link in it.
    Raises: `error` if the path is none, names something else than a regular file, or can't be written; whatever `write`
      raises but OSError. A killed writer leaves a file beside the target, which the next call removes.
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
    """New content of a file, that is written under a temporary name until `finish`: arguments and faults as above.

    Several may be written for one target at once; each has a file of its own, and the last to finish stays. `finish`
    gives the file its name, `close` ends it, and drops what was not finished.

    follow: whether the target of a link is replaced; else the link itself is.
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
        """In it a fault of the system is one of `error`."""
        return faults_of(self.path, self.what, "written", self.error)

    def flush(self) -> None:
        """Bring what was written to the disk."""
        with self.faults():
            self.file.flush()
            changing("fsync", self.temporary)
            os.fsync(self.file.fileno())

    def finish(self) -> None:
        """Give the file its name."""
        self.flush()
        self.rename()
        with self.faults():
            sync_folder(os.path.dirname(self.target))

    def rename(self) -> None:
        """Give the file its name, which is on the disk when its folder is."""
        with self.faults():
            if os.name == "nt":
                self.file.close()  # Windows renames no open file
            changing("rename", self.target)
            os.replace(self.temporary, self.target)  # else before the lock goes
            self.finished = True

    def close(self) -> None:
        """End it; what has no name yet is gone."""
        if not self.finished:
            with suppress(OSError):
                changing("unlink", self.temporary)
                os.unlink(self.temporary)
        with suppress(OSError):
            self.file.close()


def changing(call: str, path: str) -> None:
    """Called before each system call that changes a file or a folder, so that tests can end the process there."""


def sync_folder(folder: str) -> None:
    """Bring the names in a folder to the disk."""
    if os.name == "nt":
        return
    with suppress(PermissionError):  # a folder that may be written, not read
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            changing("fsync", folder)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def remove_file(path: str) -> None:
    """Remove a file, if it is there."""
    with suppress(FileNotFoundError):
        changing("unlink", path)
        os.unlink(path)


def link_file(path: str, new: str) -> None:
    """Give a file another name besides. Raises: OSError where there are no such links, or the name is taken."""
    changing("link", new)
    os.link(path, new)


def make_folder(folder: object, what: str, error: type[Exception]) -> str:
    """Make a folder and those around it where they are not there; its path. Raises: `error` where it can't be made."""
    try:
        path = os.fspath(folder)  # type: ignore[call-overload]
        if not path:
            raise ValueError("its name is empty")
        changing("mkdir", path)
        os.makedirs(path, exist_ok=True)
    except (OSError, TypeError, ValueError) as fault:
        raise error(
            f"{what}: no folder '{folder!s:.200}' can be made: {getattr(fault, 'strerror', None) or fault}"
            f"{file_remedy(fault, folder)}"
        ) from None
    return str(path)


_REMEDIES = {
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "; name another place, or change its permissions"),
    errno.EEXIST: "; name another, or remove the file of that name",
    errno.ENOTDIR: "; name a folder where a file is named now",
    errno.ENOSPC: "; free some space, or name another disk",
    errno.ENAMETOOLONG: "; take a shorter name",
    errno.ELOOP: "; a link leads back to itself: name the file",
}


def file_remedy(fault: Exception, path: object, written: bool = True) -> str:
    """The end of a message about a fault of the system: what to do about it, or ""."""
    if isinstance(fault, FileNotFoundError):
        return missing_file(str(path), written)
    return _REMEDIES.get(getattr(fault, "errno", None) or 0, "")


def missing_file(path: str, written: bool = False) -> str:
    """The end of a message about a file that is not there: the folder that is missing, or a name like it that exists.

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
    """Add a line to a file, which is made where it is not there; whoever is killed leaves a part of that line."""
    with faults_of(path, what, "written", error) as target, open(target, "ab") as file:
        changing("append", target)
        file.write(f"{text}\n".encode())


@contextlib.contextmanager
def locked(path: str, wait: bool = True) -> Iterator[bool | None]:
    """Hold the lock of a file or a folder: True; False if another process has it; None where there are no locks."""
    if os.name == "nt":
        yield None
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield _lock(descriptor, wait)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def claimed(path: str) -> Iterator[int | None]:
    """Hold a file that only one process may hold: None, or the id of the process that holds it (0 if unknown).

    The file has the id of its holder, and is removed at the end. A killed holder leaves it, and holds it no more.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        if _lock(descriptor, wait=False) is False or _same(descriptor, path):
            break
        os.close(descriptor)  # its holder removed it in the moment before the lock
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
    """What a compressed file may become: 16 times its size, or 64 MiB. Digits pack to a fifth, zeros to 1/1000."""
    return max(64 * 2**20, 16 * packed_bytes)


@contextlib.contextmanager
def open_file(
    path: object, what: str, error: type[Exception], most_bytes: int | None = None, same: FileId | None = None
) -> Iterator[tuple[BinaryIO, str]]:
    """The file `path`, open for reading, and its own path with no link in it. Arguments and faults as above.

    Args:
      same: the file that it was when something else was read of it.
    Raises: `error` for what is no regular file, such as a pipe or a device, for more than `most_bytes`, and for another
      file than `same`.
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
    """The lines of an open file, each with its end. Raises: `error` for a line of more than `MOST_LINE_BYTES`."""
    for number in count(1):
        line = file.readline(MOST_LINE_BYTES + 1)
        if len(line) > MOST_LINE_BYTES:
            raise error(f"{what}: {path}, line {number} has more than {MOST_LINE_BYTES:,} bytes; is it a text?")
        if not line:
            return
        yield line


@contextlib.contextmanager
def faults_of(path: object, what: str, done: str, error: type[Exception]) -> Iterator[str]:
    """The path of the file itself; a fault of the system in what follows is one of `error`."""
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(text, str) or not text:
        raise error(f"{what}: the path must be text or a pathlib.Path, got {type(path).__name__} {path!r:.80}")
    try:
        nameable = "\0" not in text and os.fsencode(text)
    except UnicodeEncodeError:
        nameable = False
    if not nameable:
        raise error(f"{what}: no file can be named {text!r:.80}")
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
    """Raise OSError if there is something at the path, or at the end of its links, that is no regular file."""
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
    """What stands for the target in the names of its temporary files, which are longer than its own."""
    raw = os.fsencode(name)
    return name if len(raw) <= _NAME_BYTES else blake2b(raw, digest_size=16).hexdigest()


class _Written(io.FileIO):
    """A file each of whose writes is announced."""

    def write(self, data: Any, /) -> int:
        changing("write", str(self.name))
        return super().write(data)


def _temporary(folder: str, name: str) -> tuple[BinaryIO, str]:
    """A new locked file beside the target, and its path."""
    while True:
        path = os.path.join(folder, f".{_stem(name)}.{secrets.token_hex(4)}.saving")
        changing("create", path)
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), 0o666)
        except FileExistsError:
            continue
        file = io.BufferedWriter(_Written(path, "wb", opener=partial(_opened, descriptor)))
        # Another writer may take the file for a stale one in the moment before the lock: then it is gone.
        if _lock(descriptor, wait=True) is None or _same(descriptor, path):
            return file, path
        file.close()


def _opened(descriptor: int, path: str, flags: int) -> int:
    return descriptor


def remove_stale(folder: str, *names: str) -> None:
    """Remove what killed writers left: temporary files that no one has locked; those of targets of these names alone.

    Without names it removes all of them.
    """
    stems = [f".{_stem(name)}." for name in names]
    try:
        there = os.listdir(folder)
    except PermissionError:  # a folder that may be written, not read
        return
    for entry in there:
        if not TEMPORARY.fullmatch(entry) or (stems and entry[: -len("0123abcd.saving")] not in stems):
            continue
        path = os.path.join(folder, entry)
        with suppress(OSError):  # another writer removed or finished it
            descriptor = os.open(path, os.O_RDWR)
            try:
                if _lock(descriptor, wait=False) and _same(descriptor, path):
                    changing("unlink", path)
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
