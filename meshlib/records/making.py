"""Folders of pictures, tables, IDX files and texts turned into records of `tf.train.Example`.

pictures  image (the file's own bytes), label, class       class/name.png
a table   a feature for each column, of one kind          .csv with a line of names; of "image", the file it names
IDX       image (raw bytes), label                         images and labels, as MNIST's
a text    text, a line each                                anything else

A column of a table is integers if all its values are, else floats if all are numbers, else text.
"""

from __future__ import annotations

import csv
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from meshlib.errors import DataError
from meshlib.records.example import encode
from meshlib.records.idx import read_idx
from meshlib.records.images import IMAGE_ENDINGS, read_image
from meshlib.records.writing import Writer

Features = dict[str, Any]
Progress = Callable[[int, int], object]
IMAGE = "image"
NUMBERS = (  # integers, and floats; text that float() takes besides, as "1_000", is none
    re.compile(r"\s*[+-]?[0-9]+\s*"),
    re.compile(r"\s*[+-]?(([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?|inf|nan)\s*", re.IGNORECASE),
)


def make(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    labels: str | os.PathLike[str] | None = None,
    compression: str | None = None,
    progress: Progress | None = None,
) -> tuple[int, list[str]]:
    """Write records of a folder of pictures, a table, IDX files or a text.

    Args:
      source: the folder or file; which kind it is, it says itself.
      target: a file, or "name@count" for several.
      labels: of IDX files of images, the IDX file of their labels.
      compression: None, "gzip" or "zlib".
      progress: is told how many are done, and of how many (of a text and a table, of bytes).
    Returns: how many records there are, and the paths of the files.
    Raises: DataError for a source that is none of these, or files that can't be read or written.
    """
    path = Path(source)
    told = progress or (lambda done, total: None)
    if path.is_dir():
        made = _of_pictures(path, told)
    elif not path.is_file():
        raise DataError(f"records: expected a folder or a file, found none at {os.fspath(source)!r:.80}")
    elif path.suffix.lower() == ".csv":
        made = _of_table(path, told)
    elif labels is not None or "idx" in path.name:
        made = _of_idx(path, labels, told)
    else:
        made = _of_text(path, told)
    given = {os.path.realpath(p) for p in (source, labels) if p is not None}
    with Writer(target, compression) as writer:
        for name in writer.paths:
            if os.path.realpath(name) in given:
                raise DataError(f"records: {name} is what is read; give the records another name")
        for features in made:
            writer.write(encode(features))
    return writer.count, writer.paths


def _of_pictures(path: Path, told: Progress) -> Iterator[Features]:
    classes = sorted(p for p in path.iterdir() if p.is_dir())
    files = [
        (file, label, folder.name)
        for label, folder in enumerate(classes)
        for file in sorted(folder.iterdir())
        if file.suffix.lower() in IMAGE_ENDINGS
    ]
    if not files:
        kinds = " ".join(IMAGE_ENDINGS)
        raise DataError(f"records: {path}: expected folders of {kinds} files, one for each class; found no such file")
    for n, (file, label, name) in enumerate(files, start=1):
        yield {IMAGE: _picture(file), "label": label, "class": name}
        told(n, len(files))


def _picture(file: Path) -> bytes:
    """The bytes of a file that is a picture."""
    try:
        data = file.read_bytes()
    except OSError as fault:
        raise DataError(f"records: {file} can't be read: {fault.strerror or fault}") from fault
    try:
        read_image(data)
    except DataError as fault:
        raise DataError(f"records: {file}: {fault}") from None
    return data


def _of_table(path: Path, told: Progress) -> Iterator[Features]:
    total = path.stat().st_size
    try:
        kinds = _kinds(path)
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = csv.DictReader(_counted(file, total, told))
            names = rows.fieldnames or []
            if not names or len(set(names)) < len(names):
                raise DataError(f"records: {path}: expected a first line of names, each once, found {names!r:.80}")
            for row in rows:
                if None in row or None in row.values():
                    raise DataError(f"records: {path}, line {rows.line_num}: expected {len(names)} values")
                made: Features = {name: kinds[name](row[name]) for name in names}
                if isinstance(made.get(IMAGE), str):
                    made[IMAGE] = _picture(path.parent / str(made[IMAGE]))
                yield made
    except (UnicodeDecodeError, csv.Error) as fault:
        raise DataError(f"records: {path} is no table in UTF-8: {fault}") from None


def _counted(lines: Any, total: int, told: Progress) -> Iterator[str]:
    done = 0
    for line in lines:
        yield line
        done += len(line.encode())
        told(done, total)


def _kinds(path: Path) -> dict[str, Callable[[str], int | float | str]]:
    """Of each column the narrowest kind that all its values are of: int64, float or text."""
    found: dict[str, int] = {}
    with path.open(encoding="utf-8-sig", newline="") as file:
        for row in csv.DictReader(file):
            for name, text in row.items():
                if isinstance(text, str) and found.get(name, 0) < len(NUMBERS):
                    found[name] = max(found.get(name, 0), _kind(text))
    kinds: list[Callable[[str], int | float | str]] = [int, float, str]
    return defaultdict(lambda: str, {name: kinds[kind] for name, kind in found.items()})


def _kind(text: str) -> int:
    """0 for an integer of 64 bits, 1 for another number, 2 for text."""
    for kind, number in enumerate(NUMBERS):
        if number.fullmatch(text):
            return kind if kind or -(1 << 63) <= int(text) < 1 << 63 else len(NUMBERS)
    return len(NUMBERS)


def _of_idx(path: Path, labels: str | os.PathLike[str] | None, told: Progress) -> Iterator[Features]:
    images = read_idx(path)
    found = None if labels is None else read_idx(labels, dims=1)
    if found is not None and len(found) != len(images):
        raise DataError(f"records: {labels}: expected {len(images)} labels, one per image, found {len(found)}")
    little = images.astype(images.dtype.newbyteorder("<"))
    for n, image in enumerate(little):
        yield {IMAGE: image.tobytes(), **({} if found is None else {"label": int(found[n])})}
        told(n + 1, len(images))


def _of_text(path: Path, told: Progress) -> Iterator[Features]:
    total, done = path.stat().st_size, 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            done += len(line)
            try:
                text = line.rstrip(b"\r\n").decode()
            except UnicodeDecodeError:
                what = f"line {number} is not UTF-8; expected a text, a .csv or an IDX file"
                raise DataError(f"records: {path}, {what}") from None
            if text.strip():
                yield {"text": text}
            told(done, total)
