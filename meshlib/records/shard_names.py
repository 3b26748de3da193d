"""Names of the files of a set of records: "train-00003-of-00010" is one of ten, "train@10" all of them."""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from pathlib import Path

from meshlib.core.errors import DataError
from meshlib.core.files import missing_file
from meshlib.records.sets import SHARD, ManifestSets, set_of

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def shard_names(name: str) -> list[str]:
    """The files of a set: those of "name@count", or the one file of any other name.

    >>> shard_names("train@2"), shard_names("train.records")
    (['train-00000-of-00002', 'train-00001-of-00002'], ['train.records'])

    Raises: DataError for 0 files, or more than five digits can number.
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
    """The files selected by one name: a folder, a file, a pattern, or a set such as "name@10".

    Raises: DataError for an empty folder, a pattern without a match, and a file missing from its set's manifest.
    """
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
        f"of {count} files {stem}-*-of-{count:05d}{end} {len(there)} were named, the first that lacks is "
        f"{min(set(range(count)) - there):05d}"
        for (stem, count, end), there in sets.items()
        if len(there) < count and len(present) > 1
    ]
