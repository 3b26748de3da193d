"""Atomic sets of files: all of them are of one writer, whoever is killed.

    1  each member is written under a temporary name, and brought to the disk
    2  members get names with a tag that nothing has, "model~1a2b3c4d.safetensors"; a journal lists what will be stale
    3  the manifest, which says name, size and CRC-32 of each member, replaces the old one: from here on the set is new
    4  what the journal lists is removed
    5  members get their own names: links first, then a manifest with these, then the names with a tag go

Readers take what the manifest names and nothing else. So they find all of the old set before the third step, and all of
the new one after it. A writer that was killed leaves files that no manifest names, until the next one removes them.
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

from meshlib.core.files import Replacement, faults_of, link_file, locked, open_file, remove_file, sync_folder

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


class FileSet:
    """New content of a set of files in a folder: write to `file(n)`, then `commit`; `close` drops what was not.

    Args:
      folder: which is there. Links in it are replaced, not followed.
      manifest: the name of the manifest.
      names: of the members, each in two parts, between which a tag may stand: ("model", ".safetensors").
      owned: a pattern of whole names, of files that are part of this set or an earlier one, or of none.
      named: (content of an older manifest) -> the names of its members, which are removed once they are stale.
      what, error: as of `replace_file`.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        manifest: str,
        names: Sequence[tuple[str, str]],
        owned: str,
        named: Callable[[bytes], Iterable[str]],
        what: str,
        error: type[Exception],
    ) -> None:
        self.folder, self.manifest, self.names = os.path.abspath(folder), manifest, list(names)
        self.journal = f".{manifest}.stale"
        self.owned, self.named, self.what, self.error = re.compile(owned, re.DOTALL), named, what, error
        self.staged: list[Replacement] = []
        try:
            for _ in names:  # all have temporary names of the manifest's, which the next writer knows
                self.staged.append(Replacement(self._path(manifest), what, error, follow=False))
        except BaseException:
            self.close()
            raise

    def file(self, number: int) -> BinaryIO:
        """The file in which a member is to be written."""
        return self.staged[number].file

    def faults(self) -> AbstractContextManager[str]:
        """In it a fault of the system is one of `error`."""
        return faults_of(self._path(self.manifest), self.what, "written", self.error)

    def flush(self) -> None:
        """Bring all members to the disk."""
        for one in self.staged:
            one.flush()

    def commit(self, content: Callable[[Sequence[Member]], bytes] | None) -> list[str]:
        """Make what was written the set that readers find.

        Args:
          content: (members) -> the manifest. None: there is one member, which replaces an older one by its name, and
            an older set with its manifest.
        Returns: the names of the members.
        """
        self.flush()
        plain = ["".join(name) for name in self.names]
        with self.faults(), locked(self.folder):
            old = {*plain, *self._named_before()}
            self._replace(self.journal, json.dumps(sorted(old)).encode())
            if content is None:
                self._rename(plain)
                remove_file(self._path(self.manifest))  # first of all: from here on readers find the new one
                self._remove({*old, self.journal}, plain)
                return plain
            tag = f"~{secrets.token_hex(4)}"
            tagged = [f"{begin}{tag}{end}" for begin, end in self.names]
            members = [Member(name, *_sum(one.temporary)) for name, one in zip(tagged, self.staged, strict=True)]
            self._rename(tagged)
            self._replace(self.manifest, content(members))
            self._remove(old, [*tagged, self.manifest])
            linked = self._link(tagged, plain)
            if linked:
                self._replace(self.manifest, content([replace(m, name=n) for m, n in zip(members, plain, strict=True)]))
            self._remove({*old, self.journal}, [*(plain if linked else tagged), self.manifest])
            return plain if linked else tagged

    def close(self) -> None:
        """End it; what was not committed is gone."""
        for one in self.staged:
            one.close()

    # ------------------------------------------------------------ inside

    def _path(self, name: str) -> str:
        return os.path.join(self.folder, name)

    def _named_before(self) -> list[str]:
        """The members of older sets, by their manifest and the journal of a killed writer, where these can be read."""
        earlier_names: list[str] = []
        for path, named in ((self.manifest, self.named), (self.journal, json.loads)):
            with suppress(OSError, ValueError, TypeError, AttributeError, LookupError, RecursionError):
                with open(self._path(path), "rb") as file:
                    names = [os.path.basename(name) for name in named(file.read())]
                earlier_names += [*names, *map(plain_name, names)]
        return earlier_names

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

    def _remove(self, old: Collection[str], kept: Collection[str]) -> None:
        """Remove what is stale: older members, and files of the set's pattern; the journal last, if it is one."""
        for name in sorted(os.listdir(self.folder), key=self.journal.__eq__):
            if name not in kept and (name in old or self.owned.fullmatch(name)):
                remove_file(self._path(name))
        sync_folder(self.folder)

    def _link(self, tagged: Sequence[str], plain: Sequence[str]) -> bool:
        """Give members their own names besides; False where the file system has no links."""
        try:
            for old, new in zip(tagged, plain, strict=True):
                link_file(self._path(old), self._path(new))
        except OSError:
            self._remove(plain, [*tagged, self.manifest])
            return False
        sync_folder(self.folder)
        return True


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


def _sum(path: str) -> tuple[int, str]:
    """Bytes and CRC-32 of a file."""
    count = total = 0
    with open(path, "rb") as file:
        while part := file.read(READ_BYTES):
            count, total = count + len(part), zlib.crc32(part, total)
    return count, f"{total:08x}"
