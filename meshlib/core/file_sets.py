"""Atomic sets of files: all files of a set come from one writer, whenever a writer is killed.

    1  each member is written under a temporary name and synced to disk
    2  members get names with a new tag, "model~1a2b3c4d.safetensors"; a journal lists the files that become stale
    3  the manifest with the name, size and CRC-32 of each member replaces the old one: this commits the new set
    4  the files in the journal are removed
    5  members get their final names: links first, then a manifest with these, then the tagged names are removed

Readers open only the files in the manifest, so they see the whole old set before the third step and the whole new one
after it. A killed writer leaves files that no manifest names, until the next writer removes them.

Sets of other kinds in the same folder, with manifests of other names, are replaced at the third step as well: the new
manifest says which other manifests it replaced, by their CRC-32s, and `replaced_by` tells readers of those.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import zlib
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, BinaryIO

from meshlib.core.documents import MOST_BYTES
from meshlib.core.files import (
    Replacement,
    faults_of,
    link_file,
    locked,
    open_file,
    remove_file,
    remove_stale,
    sync_folder,
)

TAG = "~[0-9a-f]{8}"  # a regular expression
READ_BYTES = 1 << 22  # bytes per read


@dataclass(frozen=True)
class Member:
    """A file of a set, as the manifest names it."""

    name: str
    bytes: int
    crc32: str

    def entry(self) -> dict[str, Any]:
        """Its manifest entry as plain data."""
        return asdict(self)


@dataclass(frozen=True)
class Manifest:
    """The manifest of one kind of set: its name and the parser of its content.

    Args:
      named: (content) -> the names of the members. Raises for a file of that name written by another program.
      owned: a regular expression matching full names of files of this set or of earlier ones.
      replaces: (content) -> the entries of other manifests that it replaced.
    """

    name: str
    named: Callable[[bytes], Iterable[str]]
    owned: str
    replaces: Callable[[bytes], Iterable[Any]] = lambda _: ()

    @property
    def journal(self) -> str:
        """The name of the journal of a running or killed writer."""
        return f".{self.name}.stale"

    def members(self, folder: str) -> list[str]:
        """The names of the members of the set in a folder; empty if there is no set of this library."""
        return _read(folder, self.name, self.named)

    def replaced(self, folder: str, other: Manifest) -> bool:
        """True if this set was written over the one that `other` still names."""
        entries = _read(folder, self.name, self.replaces)
        if not entries or not os.path.isfile(os.path.join(folder, other.name)):
            return False
        try:
            return any(Member(**entry) == other.entry(folder) for entry in entries)
        except (OSError, TypeError):
            return False

    def entry(self, folder: str) -> Member:
        """The manifest itself as an entry of another. Raises: OSError if it does not exist."""
        return Member(self.name, *_size_crc(os.path.join(folder, self.name)))


class FileSet:
    """New content of a set of files in a folder: write to `file(n)`, then `commit`; `close` discards uncommitted files.

    Args:
      folder: an existing folder. Links in it are replaced, not followed.
      manifest: the manifest of this kind of set.
      names: names of the members, split where a tag is inserted: ("model", ".safetensors").
      what, error: as in `replace_file`.
      rivals: manifests of other kinds of sets that this one replaces.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        manifest: Manifest,
        names: Sequence[tuple[str, str]],
        what: str,
        error: type[Exception],
        rivals: Sequence[Manifest] = (),
    ) -> None:
        self.folder, self.manifest, self.names = os.path.abspath(folder), manifest, list(names)
        self.what, self.error, self.rivals = what, error, [*rivals]
        self.owned = re.compile("|".join(m.owned for m in (manifest, *rivals)), re.DOTALL)
        self.staged: list[Replacement] = []
        try:
            for _ in names:  # temporary names derive from the manifest's, so that the next writer recognises them
                self.staged.append(Replacement(self._path(manifest.name), what, error, follow=False))
            for rival in rivals:
                remove_stale(self.folder, rival.name, rival.journal)
        except BaseException:
            self.close()
            raise

    def file(self, number: int) -> BinaryIO:
        """The open file of a member."""
        return self.staged[number].file

    def faults(self) -> AbstractContextManager[str]:
        """Context in which OSErrors are raised as `error`."""
        return faults_of(self._path(self.manifest.name), self.what, "written", self.error)

    def flush(self) -> None:
        """Sync all members to disk."""
        for one in self.staged:
            one.flush()

    def commit(self, content: Callable[[Sequence[Member], Sequence[Member]], bytes] | None) -> list[str]:
        """Replace the set that readers see by the members written.

        Args:
          content: (members, manifests of other kinds that it replaces) -> the manifest. None: a single member without
            a manifest, which replaces an older file of its name and an older set with its manifest.
        Returns: the names of the members.
        """
        self.flush()
        plain = ["".join(name) for name in self.names]
        with self.faults(), locked(self.folder):
            self._finish_killed()
            replaced = [r.entry(self.folder) for r in self.rivals if os.path.isfile(self._path(r.name))]
            old = {*plain, *self._stale_names()}
            journal = self.manifest.journal
            self._replace(journal, json.dumps(sorted(old)).encode())
            stale = [r.journal for r in self.rivals] + [journal]
            if content is None:
                self._rename(plain)
                for manifest in (*self.rivals, self.manifest):  # the commit point: from here on readers see the new set
                    if manifest is self.manifest or manifest.name in old:
                        remove_file(self._path(manifest.name))
                self._remove({*old, *stale}, plain)
                return plain
            tag = f"~{secrets.token_hex(4)}"
            tagged = [f"{begin}{tag}{end}" for begin, end in self.names]
            members = [Member(name, *_size_crc(one.temporary)) for name, one in zip(tagged, self.staged, strict=True)]
            self._rename(tagged)
            name = self.manifest.name
            self._replace(name, content(members, replaced))
            self._remove(old, [*tagged, name])
            linked = self._link(tagged, plain)
            if linked:
                own = [replace(m, name=n) for m, n in zip(members, plain, strict=True)]
                self._replace(name, content(own, replaced))
            self._remove({*old, *stale}, [*(plain if linked else tagged), name])
            return plain if linked else tagged

    def close(self) -> None:
        """Close all files and discard uncommitted ones."""
        for one in self.staged:
            one.close()

    # ------------------------------------------------------------ steps of a commit

    def _path(self, name: str) -> str:
        return os.path.join(self.folder, name)

    def _stale_names(self) -> list[str]:
        """Names that become stale, from manifests and from journals of killed writers: members and manifests of other
        kinds."""
        earlier_names: list[str] = []
        for manifest in (self.manifest, *self.rivals):
            members = manifest.members(self.folder)
            names = [*members, *_read(self.folder, manifest.journal, json.loads)]
            earlier_names += [*names, *map(plain_name, names)]
            if members and manifest is not self.manifest:
                earlier_names.append(manifest.name)
        return earlier_names

    def _finish_killed(self) -> None:
        """Remove a set that a killed writer had already replaced by one of another kind, so that one set remains."""
        for old in (self.manifest, *self.rivals):
            for new in (self.manifest, *self.rivals):
                if new is not old and new.replaced(self.folder, old) and (members := old.members(self.folder)):
                    used = [*new.members(self.folder), new.name]
                    remove_file(self._path(old.name))
                    self._remove([*members, *map(plain_name, members)], used)

    def _rename(self, names: Sequence[str]) -> None:
        for one, name in zip(self.staged, names, strict=True):
            one.target = self._path(name)
            one.rename()
        sync_folder(self.folder)

    def _replace(self, name: str, content: bytes) -> None:
        replacement = Replacement(self._path(name), self.what, self.error, follow=False)
        try:
            replacement.file.write(content)
            replacement.finish()
        finally:
            replacement.close()

    def _remove(self, old: Collection[str], used: Collection[str]) -> None:
        """Remove stale files: members of earlier sets and files that match the set's pattern; the journal last."""
        for name in sorted(os.listdir(self.folder), key=self.manifest.journal.__eq__):
            if name not in used and (name in old or self.owned.fullmatch(name)):
                remove_file(self._path(name))
        sync_folder(self.folder)

    def _link(self, tagged: Sequence[str], plain: Sequence[str]) -> bool:
        """Link members under their final names; False if the file system has no links."""
        try:
            for old, new in zip(tagged, plain, strict=True):
                link_file(self._path(old), self._path(new))
        except OSError:
            self._remove(plain, [*tagged, self.manifest.name])
            return False
        sync_folder(self.folder)
        return True


def replaced_by(folder: str | os.PathLike[str], manifest: Manifest, rivals: Iterable[Manifest]) -> str:
    """The name of the manifest whose set replaced that of `manifest`; "" if `manifest` is the latest."""
    path = os.fspath(folder)
    return next((rival.name for rival in rivals if rival.replaced(path, manifest)), "")


def checked(folder: str | os.PathLike[str], entry: object, what: str, error: type[Exception], sums: bool = True) -> str:
    """The path of a member that a manifest names, if its size and sum match.

    Args:
      entry: its entry in the manifest.
      sums: whether to compare its CRC-32 as well as its size.
    Raises: `error` for a missing entry or file, or a mismatch, with both sizes or sums.
    """
    match entry:
        case {"name": str(name), "bytes": int(size), "crc32": str(crc)} if os.path.basename(name) == name != "":
            path = os.path.join(folder, name)
        case _:
            raise error(f"{what}: {os.fspath(folder)} has a manifest that names no file of it: {entry!r:.120}")
    with open_file(path, what, error) as (file, target):
        actual_bytes = os.fstat(file.fileno()).st_size
    if actual_bytes != size:
        raise error(
            f"{what}: {target} is not the file that was written with the others: its manifest says {size} bytes, it "
            f"has {actual_bytes}; write the set again, or restore all of its files"
        )
    if sums and (total := _size_crc(path)[1]) != crc:
        raise error(
            f"{what}: {target} is damaged, or of another set: its manifest says the CRC-32 {crc}, it has {total}; "
            "write the set again, or restore all of its files"
        )
    return path


def plain_name(name: str) -> str:
    """The name of a member without its tag.

    >>> plain_name("t-00003~1a2b3c4d-of-00008")
    't-00003-of-00008'
    """
    return re.sub(TAG, "", name, count=1)


def _read(folder: str, name: str, entries: Callable[[bytes], Iterable[Any]]) -> list[Any]:
    """The entries of a manifest or a journal; empty if it can't be read or belongs to another program."""
    with suppress(OSError, ValueError, TypeError, AttributeError, LookupError, RecursionError):
        path = os.path.join(folder, name)
        with open(path if os.path.isfile(path) else os.devnull, "rb") as file:
            return [os.path.basename(x) if isinstance(x, str) else x for x in entries(file.read(MOST_BYTES))]
    return []


def _size_crc(path: str) -> tuple[int, str]:
    """The size of a file in bytes and its CRC-32."""
    count = total = 0
    with open(path, "rb") as file:
        while part := file.read(READ_BYTES):
            count, total = count + len(part), zlib.crc32(part, total)
    return count, f"{total:08x}"
