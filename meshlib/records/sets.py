"""Sets of record files, "name@count": names, and the hidden manifest of a set.

    train-00003-of-00010            a member
    train-00003~1a2b3c4d-of-00010   a member until it has its final name (`meshlib.core.file_sets`)
    .train@10.json                  the manifest: names, sizes and CRC-32s

Sets of other programs have no manifest: then all files with these names are members.
"""

from __future__ import annotations

import glob
import json
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from meshlib.core.documents import read_json
from meshlib.core.errors import DataError
from meshlib.core.file_sets import TAG, FileSet, Manifest, Member, checked
from meshlib.core.files import missing_file

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def shard_names(name: str) -> list[str]:
    """The files of a set: those of "name@count", or the one file of any other name.

    >>> shard_names("train@2"), shard_names("train.records")
    (['train-00000-of-00002', 'train-00001-of-00002'], ['train.records'])

    Raises: DataError for 0 files, or more than 99,999.
    """
    parts = set_of(name)
    if parts is None:
        return [name]
    stem, count = parts
    return [f"{stem}-{n:05d}-of-{count:05d}" for n in range(count)]


def files_of(paths: Paths) -> list[str]:
    """The files selected by `paths`, in order; matches of a pattern are sorted by name.

    Args:
      paths: a file, "name@10", a pattern with * ? or [], a folder (all files in it), or a list of these.
    Raises: DataError for missing files, an incomplete set, and files named twice.
    Example:
      >>> import tempfile
      >>> import meshlib as mtf
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     _ = mtf.records.write(f"{folder}/train@2", [b"one", b"two"])
      ...     [name.removeprefix(folder) for name in mtf.records.files_of(f"{folder}/train*")]
      ['/train-00000-of-00002', '/train-00001-of-00002']
    """
    given = [paths] if isinstance(paths, str | os.PathLike) else list(paths) if isinstance(paths, Sequence) else []
    if not given or not all(isinstance(p, str | os.PathLike) for p in given):
        raise DataError(f"records: expected the path of a file, or a list of paths, got {paths!r:.80}")
    files: list[str] = []
    sets = ManifestSets()
    for path in given:
        files += _files_of_name(os.fspath(path), sets)
    faults = [f"no file {name}{missing_file(name)}" for name in files if not os.path.isfile(name)]
    faults += [f"{name} is named {files.count(name)} times" for name in dict.fromkeys(files) if files.count(name) > 1]
    faults += _missing(files)
    if faults:
        more = f", and {len(faults) - 8} more" if len(faults) > 8 else ""
        raise DataError(f"records: {'; '.join(faults[:8])}{more}")
    return files


def _files_of_name(name: str, sets: ManifestSets) -> list[str]:
    """The files selected by one name: a folder, a file, a pattern, or a set such as "name@10"."""
    if os.path.isdir(name):
        # Names of temporary files, which may be left by killed writers, begin with a dot.
        visible = sorted(str(p) for p in Path(name).iterdir() if p.is_file() and not p.name.startswith("."))
        members = [p for p in visible if sets.has(p)]
        if not members:
            raise DataError(
                f"records: the folder {name} has no files in it; name another, or write them: mtf.records.write"
            )
        return members
    if os.path.exists(name):
        if not sets.has(name):
            raise DataError(
                f"records: {name} is left from an earlier set, or one that was never finished: the manifest "
                f"{sets.manifest(name)} does not name it"
            )
        return [name]
    if any(c in name for c in "*?["):
        matching = sorted(n for n in glob.glob(name) if os.path.isfile(n) and sets.has(n))
        if not matching:
            raise DataError(f"records: no file matches '{name}'{missing_file(name)}")
        return matching
    return sets.members(name) or shard_names(name)


def _missing(present: Sequence[str]) -> list[str]:
    """A message per set of shards of which only some files were named."""
    sets: dict[tuple[str, int, str], set[int]] = {}
    for name in present:
        parts = SHARD.fullmatch(name)
        if parts:
            sets.setdefault((parts[1], int(parts[4]), parts[5]), set()).add(int(parts[2]))
    return [
        f"of {count} files {stem}-*-of-{count:05d}{end} {len(there)} were named, the first missing is "
        f"{min(set(range(count)) - there):05d}"
        for (stem, count, end), there in sets.items()
        if len(there) < count and len(present) > 1
    ]


FORMAT = "meshlib records 1"
MOST_SHARDS = 99_999  # limit of five digits
SHARD = re.compile(rf"(.*)-([0-9]{{5}})({TAG})?-of-([0-9]{{5}})(.*)", re.DOTALL)
_SET = re.compile(r"(.*)@0*([0-9]{1,9})", re.DOTALL)


def set_of(name: str) -> tuple[str, int] | None:
    """Name prefix and number of files of a set "name@count"; None for another name.

    >>> set_of("data/train@10"), set_of("train.records")
    (('data/train', 10), None)

    Raises: DataError for 0 files, or more than 99,999.
    """
    match = _SET.fullmatch(name)
    if not match:
        return None
    stem, count = match[1], int(match[2])
    if not 1 <= count <= MOST_SHARDS:
        raise DataError(f"records: '{name}' has {count} files; there may be 1 to {MOST_SHARDS}")
    return stem, count


def new_set(of: tuple[str, int], what: str) -> FileSet:
    """New content of a set. Raises: DataError if it can't be written."""
    path, count = of
    folder, stem = os.path.split(path)
    names = [(f"{stem}-{n:05d}", f"-of-{count:05d}") for n in range(count)]
    owned = rf"{re.escape(stem)}-[0-9]{{5}}{TAG}-of-{count:05d}"
    return FileSet(folder or ".", Manifest(_manifest(stem, count), _named, owned), names, what, DataError)


def manifest_of(members: Sequence[Member], replaced: Sequence[Member] = ()) -> bytes:
    """The content of the manifest of these files."""
    return json.dumps({"format": FORMAT, "files": [m.entry() for m in members]}, indent=1).encode()


class ManifestSets:
    """Membership of files in sets, from their manifests, each read once."""

    def __init__(self) -> None:
        self._entries: dict[str, dict[str, object] | None] = {}

    def has(self, path: str) -> bool:
        """True if a file matches its set's manifest, or its set has no manifest.

        Raises: DataError for a member whose size differs from the manifest, and for a damaged manifest.
        """
        entries = self._of(path)
        folder, name = os.path.split(path)
        if entries is None:
            parts = SHARD.fullmatch(name)
            return parts is None or parts[3] is None
        if name not in entries:
            return False
        checked(folder, entries[name], "records", DataError, sums=False)
        return True

    def members(self, name: str) -> list[str]:
        """The files of "name@count" by its manifest; empty without a manifest. Raises: as in `has`."""
        record_set = set_of(name)
        if record_set is None:
            return []
        folder, stem = os.path.split(record_set[0])
        entries = self._read(os.path.join(folder, _manifest(stem, record_set[1]))) or {}
        return [checked(folder, entry, "records", DataError, sums=False) for entry in entries.values()]

    def manifest(self, path: str) -> str:
        """The path of the manifest of a member's set; "" for other files."""
        folder, name = os.path.split(path)
        parts = SHARD.fullmatch(name)
        return os.path.join(folder, _manifest(parts[1], int(parts[4]))) if parts and not parts[5] else ""

    def _of(self, path: str) -> dict[str, object] | None:
        manifest = self.manifest(path)
        return self._read(manifest) if manifest else None

    def _read(self, path: str) -> dict[str, object] | None:
        if path not in self._entries:
            self._entries[path] = _entries(path) if os.path.lexists(path) else None
        return self._entries[path]


def _manifest(stem: str, count: int) -> str:
    return f".{stem}@{count}.json"


def _entries(path: str) -> dict[str, object]:
    """The entries of a manifest by file name."""
    content, target = read_json(path, "records", DataError, "a manifest of a set of records")
    try:
        if content["format"] != FORMAT:
            raise ValueError(f"format {content['format']!r:.40}")
        return {str(entry["name"]): entry for entry in content["files"]}
    except (ValueError, TypeError, LookupError, RecursionError) as fault:
        raise DataError(
            f"records: {target} is not a manifest of a record set: {fault!r:.80}; write the set again, or delete the "
            "manifest if the files beside it are whole"
        ) from None


def _named(raw: bytes) -> Iterable[str]:
    """The file names in an older manifest."""
    content: Any = json.loads(raw)
    return [entry["name"] for entry in content["files"] if SHARD.fullmatch(entry["name"])]
