"""Conversion of image folders, tables, IDX files and texts to records of `tf.train.Example`.

pictures  image (the file's own bytes), label, class       class/name.png
a table   a feature per column, of one kind               .csv with a header; for "image", the file that it names
IDX       image (raw bytes), label                         images and labels, like MNIST's
a text    text, one line each                              anything else

A column of a table is integers if all its values are, else floats if all are numbers, else text; `columns` overrides
this. The conversion is lossless: integers with leading zeros or a plus are text, as are the words nan and inf in
columns without numbers; so is a column with an integer that float32 cannot represent.
"""

from __future__ import annotations

import csv
import io
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from meshlib.core.errors import DataError, nearest
from meshlib.core.files import lines_of, open_file
from meshlib.records.example import encode
from meshlib.records.images import IMAGE_ENDINGS, MOST_BYTES, read_idx, read_image
from meshlib.records.writing import Writer

Features = dict[str, Any]
Progress = Callable[[int, int], object]
IMAGE = "image"
INTEGER = re.compile(r"\s*(0|-?[1-9][0-9]*)\s*")
NUMBER = re.compile(r"\s*-?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)(e[+-]?[0-9]+)?\s*", re.IGNORECASE)
NO_NUMBER = re.compile(r"\s*([+-]?inf|nan)\s*", re.IGNORECASE)
LONGEST_NUMBER = 60  # characters
KINDS: dict[str, Callable[[str], int | float | str]] = {"integer": int, "float": float, "text": str}


def _examples_of(
    path: Path, labels: str | os.PathLike[str] | None, columns: Mapping[str, str], progress: Progress
) -> tuple[str, Iterator[Features]]:
    """The kind of a source, and its examples."""
    if path.is_dir():
        return "a folder of pictures", _of_pictures(path, progress)
    if not path.is_file():
        raise DataError(f"records: expected a folder or a file, found none at {os.fspath(path)!r:.80}")
    if path.suffix.lower() == ".csv":
        return "a table", _of_table(path, columns, progress)
    if labels is not None or "idx" in path.name:
        return "IDX", _of_idx(path, labels, progress)
    return "a text", _of_text(path, progress)


def make(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    labels: str | os.PathLike[str] | None = None,
    columns: Mapping[str, str] | None = None,
    compression: str | None = None,
    progress: Progress | None = None,
) -> tuple[int, list[str]]:
    """Write records from a folder of images, a table, IDX files or a text.

    Args:
      source: the folder or file, whose kind is detected.
      target: a file, or "name@count" for several.
      labels: for an IDX file of images, the IDX file of their labels.
      columns: for a table, name -> "integer", "float" (stored as float32) or "text", overriding detection.
      compression: None, "gzip" or "zlib".
      progress: called with (done, total) records (for a text and a table, bytes).
    Returns: the number of records, and the paths of the files.
    Raises: DataError for an unknown or empty source, options for another kind of source, and files that can't be read
      or written.
    Example:
      >>> import tempfile
      >>> from pathlib import Path
      >>> import meshlib as mtf
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     _ = Path(folder, "people.csv").write_text("name,age\\nAda,36\\nAlan,41\\n")
      ...     count, _ = mtf.records.make(f"{folder}/people.csv", f"{folder}/people.records")
      ...     [mtf.records.decode(record)["age"].tolist() for record in mtf.records.read(f"{folder}/people.records")]
      [[36], [41]]
    """
    for name, value in (("source", source), *([("labels", labels)] if labels is not None else [])):
        if not isinstance(value, str | os.PathLike):
            raise DataError(f"records: {name} must be a path, got {type(value).__name__} {value!r:.80}")
    if progress is not None and not callable(progress):
        raise DataError(f"records: progress must be a function, got {progress!r:.80}")
    path = Path(source)
    kind, examples = _examples_of(path, labels, columns or {}, progress or (lambda done, total: None))
    for option, given_one, of in (("labels", labels is not None, "IDX"), ("columns", columns is not None, "a table")):
        if given_one and kind != of:
            raise DataError(f"records: {option} is for {of}; {path} is {kind}")
    given = {os.path.realpath(p) for p in (source, labels) if p is not None}
    with Writer(target, compression) as writer:
        for name in writer.paths:
            if os.path.realpath(name) in given:
                raise DataError(f"records: {name} is the file to read; give the records another name")
        for features in examples:
            writer.write(encode(features))
        if not writer.count:
            raise DataError(f"records: {path} is {kind} without a record")
    return writer.count, writer.paths


def _of_pictures(path: Path, progress: Progress) -> Iterator[Features]:
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
        progress(n, len(files))


def _picture(file: Path) -> bytes:
    """The bytes of a file, which must be an image."""
    with open_file(file, "records", DataError, MOST_BYTES) as (opened, _):
        data = opened.read()
    try:
        read_image(data)
    except DataError as fault:
        raise DataError(f"records: {file}: {fault}") from None
    return data


def _of_table(path: Path, columns: Mapping[str, str], progress: Progress) -> Iterator[Features]:
    total = path.stat().st_size
    try:
        kinds = _kinds(path, columns)
        with _text(path) as file:
            rows = csv.DictReader(_counted(file, total, progress))
            names = rows.fieldnames or []
            if not names or len(set(names)) < len(names):
                raise DataError(f"records: {path}: expected a first line of names, each once, found {names!r:.80}")
            for row in rows:
                if None in row or None in row.values():
                    raise DataError(f"records: {path}, line {rows.line_num}: expected {len(names)} values")
                features: Features = {name: _value(kinds[name], name, row[name], path, rows.line_num) for name in names}
                if isinstance(features.get(IMAGE), str):
                    features[IMAGE] = _picture(path.parent / str(features[IMAGE]))
                yield features
    except (UnicodeDecodeError, csv.Error) as fault:
        raise DataError(f"records: {path} is not a UTF-8 table: {fault}") from None


@contextmanager
def _text(path: Path) -> Iterator[Iterator[str]]:
    """The lines of an open table, with line ends."""
    with open_file(path, "records", DataError) as (file, _):
        yield _decoded(lines_of(file, path, "records", DataError))


def _decoded(lines: Iterable[bytes]) -> Iterator[str]:
    encoding = "utf-8-sig"  # of the first line; a file may begin with a UTF-8 byte order mark
    for line in lines:
        text, encoding = line.decode(encoding), "utf-8"
        yield from io.StringIO(text, newline="") if "\r" in text[:-2] else (text,)


def _counted(lines: Any, total: int, progress: Progress) -> Iterator[str]:
    done = 0
    for line in lines:
        yield line
        done += len(line.encode())
        progress(done, total)


def _kinds(path: Path, columns: Mapping[str, str]) -> dict[str, str]:
    """The kind of each column: as requested, otherwise the narrowest lossless one."""
    column_of: dict[str, _Column] = {}
    with _text(path) as file:
        table = csv.DictReader(file)
        column_of = {name: _Column() for name in table.fieldnames or []}
        if not isinstance(columns, Mapping):
            raise DataError(f"records: columns must be kinds by name, got {type(columns).__name__} {columns!r:.80}")
        for name, kind in columns.items():
            if name not in column_of:
                raise DataError(f"records: {path} has no column {name!r:.40}{nearest(name, column_of)}")
            if kind not in KINDS:
                raise DataError(f"records: column '{name}' must be {', '.join(KINDS)}, got {kind!r:.40}")
        asked = set(column_of) - set(columns)
        for row in table:
            for name in asked:
                if isinstance(text := row[name], str):
                    column_of[name].add(text)
    return {name: columns.get(name, column.kind) for name, column in column_of.items()}


@dataclass
class _Column:
    """Properties of a column's values so far."""

    integers: bool = True
    floats: bool = True
    numbers: bool = False
    exact: bool = True  # whether float32 represents its integers exactly

    def add(self, text: str) -> None:
        if not self.floats:
            return
        if len(text) > LONGEST_NUMBER:
            self.floats = False
        elif INTEGER.fullmatch(text):
            value = int(text)
            self.integers &= -(1 << 63) <= value < 1 << 63
            self.exact &= abs(value) <= 1 << 24 or (abs(value) < 1 << 128 and int(np.float32(value)) == value)
            self.numbers = True
        elif NUMBER.fullmatch(text):
            with np.errstate(over="ignore"):
                self.exact &= bool(np.isfinite(np.float32(text)))
            self.integers, self.numbers = False, True
        else:
            self.integers = False
            self.floats = NO_NUMBER.fullmatch(text) is not None

    @property
    def kind(self) -> str:
        if self.numbers and self.integers:
            return "integer"
        return "float" if self.numbers and self.floats and self.exact else "text"


def _value(kind: str, name: str, text: str, path: Path, line: int) -> int | float | str:
    try:
        if kind != "text" and "_" in text:  # accepted by Python
            raise ValueError
        value = KINDS[kind](text)
    except ValueError:
        raise DataError(f"records: {path}, line {line}: column '{name}' is {kind}, and has {text!r:.40}") from None
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
        raise DataError(f"records: {path}, line {line}: column '{name}' has {text:.40}, beyond 64 bits")
    return value


def _of_idx(path: Path, labels: str | os.PathLike[str] | None, progress: Progress) -> Iterator[Features]:
    images = read_idx(path)
    label_array = None if labels is None else read_idx(labels, dims=1)
    if label_array is not None and len(label_array) != len(images):
        raise DataError(f"records: {labels}: expected {len(images)} labels, one per image, found {len(label_array)}")
    little = images.astype(images.dtype.newbyteorder("<"))
    for n, image in enumerate(little):
        yield {IMAGE: image.tobytes(), **({} if label_array is None else {"label": int(label_array[n])})}
        progress(n + 1, len(images))


def _of_text(path: Path, progress: Progress) -> Iterator[Features]:
    total, done = path.stat().st_size, 0
    with open_file(path, "records", DataError) as (file, _):
        for number, line in enumerate(lines_of(file, path, "records", DataError), start=1):
            done += len(line)
            try:
                text = line.rstrip(b"\r\n").decode()
            except UnicodeDecodeError:
                what = f"line {number} is not UTF-8; expected a text, a .csv or an IDX file"
                raise DataError(f"records: {path}, {what}") from None
            if text.strip():
                yield {"text": text}
            progress(done, total)
