"""Atomic sets of files: all of them are of one writer, whoever is killed.

    1  each member is written under a temporary name, and brought to the disk
    2  members get names with a tag that nothing has, "model~1a2b3c4d.safetensors"; a journal lists what will be stale
    3  the manifest, which says name, size and CRC-32 of each member, replaces the old one: from here on the set is new
    4  what the journal lists is removed
    5  members get their own names: links first, then a manifest with these, then the names with a tag go

Readers take what the manifest names and nothing else. So they find all of the old set before the third step, and all of
the new one after it. A writer that was killed leaves files that no manifest names, until the next one removes them.

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

TAG = "~[0-9a-f]{8}"  # as a pattern
READ_BYTES = 1 << 22  # at once


@dataclass(frozen=True)
class Member:
    """A file of a set, as the manifest names it."""

    name: str
    bytes: int
    crc32: str

    def entry(self) -> dict[str, Any]:
        """Plain data for a manifest."""
        return asdict(self)


@dataclass(frozen=True)
class Manifest:
    """The manifest of one kind of set: its name, and what its content says.

    Args:
      named: (content) -> the names of the members. Raises for a file of that name that another program wrote.
      owned: a pattern of whole names, of files that are part of this set or an earlier one, or of none.
      replaces: (content) -> the entries of other manifests that it replaced.
    """

    name: str
    named: Callable[[bytes], Iterable[str]]
    owned: str
    replaces: Callable[[bytes], Iterable[Any]] = lambda _: ()

    @property
    def journal(self) -> str:
        """The name of the journal of a writer that is at work, or was killed."""
        return f".{self.name}.stale"

    def members(self, folder: str) -> list[str]:
        """The names of the members of the set in a folder; none where there is no set of this library."""
        return _read(folder, self.name, self.named)

    def replaced(self, folder: str, other: Manifest) -> bool:
        """Whether this set was written over the one that `other` still names."""
        entries = _read(folder, self.name, self.replaces)
        if not entries or not os.path.isfile(os.path.join(folder, other.name)):
            return False
        try:
            return any(Member(**entry) == other.entry(folder) for entry in entries)
        except (OSError, TypeError):
            return False

    def entry(self, folder: str) -> Member:
        """The manifest itself as an entry of another. Raises: OSError where it is not there."""
        return Member(self.name, *_sum(os.path.join(folder, self.name)))


class FileSet:
    """New content of a set of files in a folder: write to `file(n)`, then `commit`; `close` drops what was not.

    Args:
      folder: which is there. Links in it are replaced, not followed.
      manifest: of this kind of set.
      names: of the members, each in two parts, between which a tag may stand: ("model", ".safetensors").
      what, error: as of `replace_file`.
      rivals: manifests of other kinds of sets, which this one replaces.
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
            for _ in names:  # all have temporary names of the manifest's, which the next writer knows
                self.staged.append(Replacement(self._path(manifest.name), what, error, follow=False))
            for rival in rivals:
                remove_stale(self.folder, rival.name, rival.journal)
        except BaseException:
            self.close()
            raise

    def file(self, number: int) -> BinaryIO:
        """The file in which a member is to be written."""
        return self.staged[number].file

    def faults(self) -> AbstractContextManager[str]:
        """In it a fault of the system is one of `error`."""
        return faults_of(self._path(self.manifest.name), self.what, "written", self.error)

    def flush(self) -> None:
        """Bring all members to the disk."""
        for one in self.staged:
            one.flush()

    def commit(self, content: Callable[[Sequence[Member], Sequence[Member]], bytes] | None) -> list[str]:
        """Make what was written the set that readers find.

        Args:
          content: (members, manifests of other kinds that it replaces) -> the manifest. None: there is one member,
            which replaces an older one by its name, and an older set with its manifest.
        Returns: the names of the members.
        """
        self.flush()
        plain = ["".join(name) for name in self.names]
        with self.faults(), locked(self.folder):
            self._finish_killed()
            replaced = [r.entry(self.folder) for r in self.rivals if os.path.isfile(self._path(r.name))]
            old = {*plain, *self._named_before()}
            journal = self.manifest.journal
            self._replace(journal, json.dumps(sorted(old)).encode())
            stale = [r.journal for r in self.rivals] + [journal]
            if content is None:
                self._rename(plain)
                for manifest in (*self.rivals, self.manifest):  # first of all: from here on readers find the new one
                    if manifest is self.manifest or manifest.name in old:
                        remove_file(self._path(manifest.name))
                self._remove({*old, *stale}, plain)
                return plain
            tag = f"~{secrets.token_hex(4)}"
            tagged = [f"{begin}{tag}{end}" for begin, end in self.names]
            members = [Member(name, *_sum(one.temporary)) for name, one in zip(tagged, self.staged, strict=True)]
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
        """End it; what was not committed is gone."""
        for one in self.staged:
            one.close()

    # ------------------------------------------------------------ inside

    def _path(self, name: str) -> str:
        return os.path.join(self.folder, name)

    def _named_before(self) -> list[str]:
        """What is stale soon, by manifests and journals of killed writers: members, and manifests of other kinds."""
        earlier_names: list[str] = []
        for manifest in (self.manifest, *self.rivals):
            members = manifest.members(self.folder)
            names = [*members, *_read(self.folder, manifest.journal, json.loads)]
            earlier_names += [*names, *map(plain_name, names)]
            if members and manifest is not self.manifest:
                earlier_names.append(manifest.name)
        return earlier_names

    def _finish_killed(self) -> None:
        """Remove a set that a killed writer replaced by one of another kind, so that there is one set."""
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
        """Remove what is stale: older members, and files of the set's pattern; the journal last, if it is one."""
        for name in sorted(os.listdir(self.folder), key=self.manifest.journal.__eq__):
            if name not in used and (name in old or self.owned.fullmatch(name)):
                remove_file(self._path(name))
        sync_folder(self.folder)

    def _link(self, tagged: Sequence[str], plain: Sequence[str]) -> bool:
        """Give members their own names besides; False where the file system has no links."""
        try:
            for old, new in zip(tagged, plain, strict=True):
                link_file(self._path(old), self._path(new))
        except OSError:
            self._remove(plain, [*tagged, self.manifest.name])
            return False
        sync_folder(self.folder)
        return True


def replaced_by(folder: str | os.PathLike[str], manifest: Manifest, rivals: Iterable[Manifest]) -> str:
    """The name of another manifest whose set was written over the one of `manifest`; "" where that is the latest."""
    path = os.fspath(folder)
    return next((rival.name for rival in rivals if rival.replaced(path, manifest)), "")


def checked(folder: str | os.PathLike[str], entry: object, what: str, error: type[Exception], sums: bool = True) -> str:
    """The path of a member that a manifest names, if it is the file that was written.

    Args:
      entry: what the manifest says of it.
      sums: whether its content is read to compare its CRC-32, besides its size.
    Raises: `error` for no such entry, and a file that is missing or another, with both sizes or sums.
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
    if sums and (total := _sum(path)[1]) != crc:
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
    """What a manifest or a journal says; nothing where it can't be read, or is another program's."""
    with suppress(OSError, ValueError, TypeError, AttributeError, LookupError, RecursionError):
        path = os.path.join(folder, name)
        with open(path if os.path.isfile(path) else os.devnull, "rb") as file:
            return [os.path.basename(x) if isinstance(x, str) else x for x in entries(file.read(MOST_BYTES))]
    return []


def _sum(path: str) -> tuple[int, str]:
    """Bytes and CRC-32 of a file."""
    count = total = 0
    with open(path, "rb") as file:
        while part := file.read(READ_BYTES):
            count, total = count + len(part), zlib.crc32(part, total)
    return count, f"{total:08x}"
