"""Sources for users: arrays, IDX files, records, texts, folders of images."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from layouts.checking import some
from meshlib.core.arguments import at, examples_of
from meshlib.core.errors import DataError, FeedError, nearest
from meshlib.core.file_versions import at_one_moment
from meshlib.data.batching import Array, Batch, Example
from meshlib.data.pipeline import Data, whole_number
from meshlib.data.sources import Arrays, Decode, Folder, Records, TextLines
from meshlib.records.example import BYTES_LIST, FLOAT_LIST, Decoder, Value, packed_rows
from meshlib.records.framing import checked_on_fault
from meshlib.records.images import read_idx, read_image
from meshlib.records.sets import Paths, files_of

KINDS = ("image", "bytes", "text")


@dataclass(frozen=True)
class Field:
    """Conversion of a feature of a `tf.train.Example` to a field.

    Args:
      dtype: dtype of the array, from a float or integer list, or from raw little-endian bytes; or "image", an encoded
        image decoded to uint8; or "text" or "bytes".
      shape: shape of the array; () for a single number, text or bytes. None keeps a list of any length. Several texts
        or bytes are an array of objects. For an image, (side, side, channels): the central square is resized to it; by
        default the original size with three channels.
      name: name of the feature, if different from the field's.
    Example:
      >>> import meshlib as mtf
      >>> pixels = mtf.data.Field("image", (32, 32, 3), name="image/encoded")  # fields={"pixels": pixels, ...}
      >>> pixels.shape
      (32, 32, 3)
    """

    dtype: str
    shape: tuple[int, ...] | None = ()
    name: str | None = None

    def __post_init__(self) -> None:
        what = at("data.Field")
        if self.name is not None and not isinstance(self.name, str):
            raise FeedError(f"{what}: name must be that of a feature, got {self.name!r:.80}")
        if self.dtype == "image":
            if self.shape not in ((), None) and not _is_square(self.shape):
                raise FeedError(f"{what}: the shape of an image must be (side, side, 1 or 3), got {self.shape!r:.80}")
            return
        try:
            known = isinstance(self.dtype, str) and (self.dtype in KINDS or np.dtype(self.dtype).kind in "fiub")
        except TypeError:
            known = False
        if not known:
            words = [*KINDS, "float32", "int32", "int64", "uint8", "bool"]
            raise FeedError(
                f"{what}: dtype must be that of numbers, 'image', 'text' or 'bytes', got {self.dtype!r:.80}"
                f"{nearest(self.dtype, words)}"
            )
        sizes = self.shape
        if sizes is not None and not (
            isinstance(sizes, tuple) and all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in sizes)
        ):
            raise FeedError(f"{what}: shape must be a tuple of sizes, or None, got {self.shape!r:.80}")

    def value(self, name: str, given: Value) -> Any:
        """The value of the field. Raises DataError if the feature does not match."""
        if self.dtype in KINDS:
            return self._of_bytes(name, given)
        dtype = self._dtype
        if isinstance(given, list):
            raw = given[0] if len(given) == 1 else b""
            if len(given) > 1 or len(raw) % dtype.itemsize:
                raise DataError(f"'{name}' is {_type(given)}, expected bytes of an array of {dtype}")
            values = np.frombuffer(raw, self._stored)
            values = values if self._stored == dtype else values.astype(dtype)
        elif self.shape == () and len(given) == 1 and dtype.kind in "iu" and given.dtype.kind == "i":
            number = int(given[0])
            if not self._bounds[0] <= number <= self._bounds[1]:
                raise DataError(f"'{name}' holds {number}, which does not fit {dtype}")
            return dtype.type(number)
        else:
            values = self._cast(name, given, dtype)
        if self.shape is None:
            return values
        if values.size != self._size:
            raise DataError(f"'{name}' has {values.size} elements, expected {self._size} of shape {self.shape}")
        return values.reshape(self.shape) if self.shape else values.reshape(())[()]

    def _of_bytes(self, name: str, given: Value) -> Any:
        """Images, texts or bytes, one or several."""
        if not isinstance(given, list):
            raise DataError(f"'{name}' is {_type(given)}, expected bytes for {self.dtype}")
        wanted = None if self.shape is None and self.dtype != "image" else 1 if self.dtype == "image" else self._size
        if wanted not in (None, len(given)):
            raise DataError(f"'{name}' is {_type(given)}, expected {wanted} for {self.dtype}")
        if self.dtype == "image":
            if not self.shape:
                return read_image(given[0])
            height, width, channels = self.shape
            return read_image(given[0], (height, width), channels)
        texts: list[Any] = given
        if self.dtype == "text":
            try:
                texts = [one.decode() for one in given]
            except UnicodeDecodeError as fault:
                raise DataError(f"'{name}' is not UTF-8: byte {fault.start} of {len(fault.object)}") from None
        if self.shape == ():
            return texts[0]
        objects = np.empty(len(texts), object)
        objects[:] = texts
        return objects if self.shape is None else objects.reshape(self.shape)

    def column(self, kind: int, rows: Array) -> Array | None:
        """The values of many examples, [n, ...], from their bytes, uint8 [n, width], of one kind of list.

        None if one does not match or has another encoding: then `value` reads each, or raises.
        """
        dtype = self._dtype
        values: Array | None
        if kind == BYTES_LIST:
            if rows.shape[1] != self._size * dtype.itemsize:
                return None
            values = np.ascontiguousarray(rows).view(self._stored)
        elif kind == FLOAT_LIST:
            if rows.shape[1] != 4 * self._size or dtype.kind != "f":
                return None
            values = np.ascontiguousarray(rows).view("<f4")
        else:
            values = packed_rows(rows, self._size)
            if values is None:
                return None
            if (
                dtype.kind in "iu"
                and values.size
                and not (self._bounds[0] <= values.min() and values.max() <= self._bounds[1])
            ):
                return None
            if dtype.kind == "b" and (values & ~1).any():
                return None
        return values.astype(dtype, copy=False).reshape(len(rows), *(self.shape or ()))

    @cached_property
    def _dtype(self) -> np.dtype[Any]:
        return np.dtype(self.dtype)

    @cached_property
    def _stored(self) -> np.dtype[Any]:
        return self._dtype.newbyteorder("<")

    @cached_property
    def _size(self) -> int:
        return prod(self.shape or ())

    @cached_property
    def _bounds(self) -> tuple[int, int]:
        bounds = np.iinfo(self._dtype)
        return int(bounds.min), int(bounds.max)

    def _cast(self, name: str, given: Array, dtype: np.dtype[Any]) -> Array:
        """Numbers in another dtype, which must be able to represent them."""
        if given.dtype.kind == "f" and dtype.kind != "f":
            raise DataError(f"'{name}' is {_type(given)}, expected integers for {dtype}")
        converted = given.astype(dtype)
        if dtype.kind in "iub":
            wrong = (converted.astype(np.int64) != given) | ((given < 0) & (dtype.kind == "u"))
            if wrong.any():
                raise DataError(f"'{name}' holds {given[wrong][0]}, which does not fit {dtype}")
        return converted


def _is_square(shape: object) -> bool:
    """True if `shape` is (side, side, 1 or 3)."""
    if not isinstance(shape, tuple) or len(shape) != 3 or not all(isinstance(n, int) for n in shape):
        return False
    return bool(shape[0] >= 1 and shape[0] == shape[1] and shape[2] in (1, 3))


def _type(value: Value) -> str:
    if isinstance(value, list):
        return f"a list of {len(value)} bytes values"
    return f"{len(value)} numbers of {value.dtype}"


class _Decoder:
    """Decoder of examples from records, vectorised if all fields have a shape and a numeric dtype."""

    def __init__(self, fields: Mapping[str, Field]) -> None:
        self.fields = [(name, field.name or name, field) for name, field in fields.items()]
        self.decode = Decoder()
        self.stacks = all(field.dtype not in KINDS and field.shape is not None for field in fields.values())

    def columns(self, records: Sequence[bytes]) -> Batch | None:
        """The fields of many examples, stacked; None unless all have the same encoding and match their fields."""
        by_length: dict[int, list[int]] = {}
        for n, data in enumerate(records):
            by_length.setdefault(len(data), []).append(n)
        parts = []
        for length, rows in by_length.items():
            layout = self.decode.layout(records[rows[0]])
            if layout is None:
                return None
            table = np.frombuffer(b"".join([records[n] for n in rows]), np.uint8).reshape(len(rows), length)
            if not layout.fits(table):
                return None
            places = {name: (kind, span) for name, kind, span in layout.values}
            if any(key not in places for _, key, _ in self.fields):
                return None
            part = {}
            for name, key, field in self.fields:
                kind, (begin, end) = places[key]
                column = field.column(kind, table[:, begin:end])
                if column is None:
                    return None
                part[name] = column
            parts.append((rows, part))
        if len(parts) == 1:
            return parts[0][1]
        joined = {name: np.empty((len(records), *x.shape[1:]), x.dtype) for name, x in parts[0][1].items()}
        for rows, part in parts:
            for name, column in part.items():
                joined[name][rows] = column
        return joined

    def __call__(self, data: bytes) -> Example:
        features = self.decode(data)
        example = {}
        for name, key, field in self.fields:
            if key not in features:
                raise DataError(f"no feature '{key}'{nearest(key, features)}; it has {', '.join(features) or 'none'}")
            example[name] = field.value(key, features[key])
        return example


class _Raw:
    """Records as bytes."""

    stacks = False

    def __call__(self, data: bytes) -> Example:
        return {"record": data}

    def columns(self, records: Sequence[bytes]) -> Batch | None:
        """None: bytes are not stacked."""
        return None


def records(
    paths: Paths, fields: Mapping[str, Field] | None = None, *, interleave: int = 1, on_fault: str = "error"
) -> Data:
    """The records of files.

    Args:
      paths: a file, "name@10", a pattern such as "train-*", a folder, or a list of these; gzip and zlib are detected by
        the first bytes. Files are read at random positions; compressed ones sequentially, with one more pass to count.
      fields: fields of each record, a `tf.train.Example`, name -> Field; without, examples are {"record": bytes}.
      interleave: read this many files in turns, one record each, instead of one file after the other.
      on_fault: "error", or "skip": skip and count (`feed.stats.skipped`) damaged records.
    Raises: DataError for missing or damaged files, FeedError for invalid arguments.
    Example:
      >>> import tempfile
      >>> import meshlib as mtf
      >>> made = [mtf.records.encode({"label": n, "pixels": bytes([n, n])}) for n in range(5)]
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     _ = mtf.records.write(f"{folder}/small@2", made)
      ...     fields = {"label": mtf.data.Field("int32"), "pixels": mtf.data.Field("uint8", (2,))}
      ...     for batch in mtf.data.records(f"{folder}/small@2", fields, interleave=2).batch(2):
      ...         print(batch["label"], batch["pixels"].tolist())
      [0 1] [[0, 0], [1, 1]]
      [2 3] [[2, 2], [3, 3]]
    """
    checked_on_fault(on_fault)
    whole_number("records", "interleave", interleave, 1)
    read: Decode = _Raw()
    if fields is not None:
        wrong = not isinstance(fields, Mapping) or not fields
        if wrong or not all(isinstance(n, str) and isinstance(f, Field) for n, f in fields.items()):
            raise FeedError(f"{at('data.records')}: fields must map names to mtf.data.Field, got {fields!r:.80}")
        read = _Decoder(fields)
    source = at_one_moment(
        lambda: Records(files_of(paths), read, interleave, on_fault, _source_name(paths)), "data.records", DataError
    )
    return _checked(source.name, Data(source))


def arrays(arrays: Mapping[str, Array]) -> Data:
    """Rows of arrays: name -> array with examples along the first dim; in memory, or `np.memmap`.

    Raises: FeedError with all faults of the arrays.
    Example:
      >>> import numpy as np
      >>> import meshlib as mtf
      >>> data = mtf.data.arrays({"x": np.arange(5)}).batch(2, remainder="pad")
      >>> [(batch["x"].tolist(), batch["mask"].tolist()) for batch in data]
      [([0, 1], [1.0, 1.0]), ([2, 3], [1.0, 1.0]), ([4, 4], [1.0, 0.0])]
      >>> feed = iter(data)
      >>> _ = next(feed)
      >>> feed.state()["next"]
      2
    """
    what = at("data.arrays")
    faults, _ = examples_of(arrays)
    if faults:
        raise FeedError(f"{what}: {'; '.join(faults)}")
    return Data(Arrays(dict(arrays)))


def idx(paths: Mapping[str, str | os.PathLike[str]]) -> Data:
    """IDX files like MNIST's, optionally gzipped: name -> path, such as {"images": ..., "labels": ...}; loaded
    unchanged.

    Raises: DataError for an invalid file; FeedError for unequal numbers of examples.
    Example:
      >>> import tempfile
      >>> from pathlib import Path
      >>> import meshlib as mtf
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     path = Path(folder, "labels.idx")
      ...     _ = path.write_bytes(bytes([0, 0, 8, 1, 0, 0, 0, 3, 7, 2, 1]))  # uint8, one dim, of 3
      ...     [int(example["y"]) for example in mtf.data.idx({"y": path})]
      [7, 2, 1]
    """
    if not isinstance(paths, Mapping) or not paths:
        raise FeedError(
            f"{at('data.idx')}: expected a dict of names to paths, got {type(paths).__name__} {paths!r:.80}"
        )
    return arrays({name: read_idx(path) for name, path in paths.items()})


def text(paths: Paths, field: str = "text") -> Data:
    """The lines of UTF-8 texts, each {"text": line}; empty ones are skipped.

    Raises: DataError for files that can't be read.
    Example:
      >>> import tempfile
      >>> from pathlib import Path
      >>> import meshlib as mtf
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     path = Path(folder, "lines.txt")
      ...     _ = path.write_text("to be\\n\\nor not\\n")
      ...     [example["text"] for example in mtf.data.text(str(path))]
      ['to be', 'or not']
    """
    if not isinstance(field, str) or not field:
        raise FeedError(f"{at('data.text')}: field must be a name, got {field!r:.80}")
    source = at_one_moment(lambda: TextLines(files_of(paths), field, _source_name(paths)), "data.text", DataError)
    return _checked(source.name, Data(source))


def folder(path: str | os.PathLike[str], side: int, channels: int = 3) -> Data:
    """Images in folders named after their classes, class/name.png: `image` uint8 [side, side, channels], `label` int32.

    The central square of each is resized to `side`. Labels number the folders in the order of their names.
    Raises: DataError for a folder without images; MissingError without Pillow.
    Example:
      >>> import tempfile
      >>> from pathlib import Path
      >>> import meshlib as mtf
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     for name in ("cat/a.png", "cat/b.png", "dog/a.png"):
      ...         Path(folder, name).parent.mkdir(exist_ok=True)
      ...         Path(folder, name).touch()
      ...     len(mtf.data.folder(folder, side=32))
      3
    """
    whole_number("folder", "side", side, 1)
    whole_number("folder", "channels", channels, 1)
    if channels not in (1, 3):
        raise FeedError(f"{at('data.folder')}: channels must be 1 or 3, got {channels}")
    if not isinstance(path, str | os.PathLike) or not Path(path).is_dir():
        raise DataError(f"data: expected a folder of classes, found none at {path!r:.80}")
    source = Folder(Path(path), side, channels)
    return _checked(f"{source.name} of class/name.png", Data(source))


def _source_name(paths: Paths) -> str:
    """The name of the source in messages and in the state of an iterator."""
    if isinstance(paths, str | os.PathLike):
        return os.path.basename(os.fspath(paths)) or os.fspath(paths)
    return some([os.path.basename(os.fspath(p)) for p in paths], 1)


def _checked(name: str, data: Data) -> Data:
    if not len(data):
        raise DataError(f"data: {name} has no examples; check the path and what is in it")
    return data
