"""`tf.train.Example`, TensorFlow's format of examples: named lists of bytes, floats or integers.

    Example   { Features features = 1; }
    Features  { map<string, Feature> feature = 1; }           an entry is a message {key = 1; value = 2}
    Feature   { oneof { BytesList = 1; FloatList = 2; Int64List = 3; } }
    BytesList { repeated bytes value = 1; }
    FloatList { repeated float value = 1; }                   packed or unpacked, readers must accept both
    Int64List { repeated int64 value = 1; }

As the format prescribes, the last of duplicate keys counts, and unknown fields are skipped.

Source: tensorflow/tensorflow, tensorflow/core/example/{example,feature}.proto; protobuf.dev, "Encoding".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from meshlib.core.errors import DataError

Array = np.ndarray[Any, Any]
Span = tuple[int, int]
LAYOUTS = 64  # layouts kept by a decoder, one per length
Value = Array | list[bytes]  # float32 [n], int64 [n], or bytes

VARINT, FIXED64, BYTES, GROUP, GROUP_ENDS, FIXED32 = range(6)
BYTES_LIST, FLOAT_LIST, INT64_LIST = 1, 2, 3
VARINT_BYTES = 10  # longest varint, of 64 bits
NESTED = 100  # limit of nested groups, as in other readers


def decode(data: bytes) -> dict[str, Value]:
    """The features of an example: lists of bytes, or arrays, float32 [n] or int64 [n].

    A feature without any list is an empty list of bytes.
    Raises: DataError, with the byte position, for an invalid example.
    Example:
      >>> import meshlib as mtf
      >>> mtf.records.decode(mtf.records.encode({"label": 7, "name": "seven"}))
      {'label': array([7]), 'name': [b'seven']}
    """
    values: dict[str, Value] = {}
    for number, features in _messages(data, 0, len(data)):
        if number != 1:
            continue
        for inner, entry in _messages(data, *features):
            if inner == 1:
                key, value = "", None
                for field, span in _messages(data, *entry):
                    if field == 1:
                        key = _text(data, span)
                    elif field == 2:
                        value = _joined(value, _feature(data, span))
                values[key] = [] if value is None else value
    return values


class Decoder:
    """`decode` for many examples, fast if they have the same layout.

    It caches the positions of values of an example. Another one of the same length with the same bytes around these
    positions has its values there too.
    """

    def __init__(self) -> None:
        self._layouts: dict[int, Layout | None] = {}

    def __call__(self, data: bytes) -> dict[str, Value]:
        """The result of `decode`."""
        layout = self._layouts.get(len(data))
        if layout is not None and all(data[a:b] == same for a, b, same in layout.around):
            return {name: _value_at(data, kind, span) for name, kind, span in layout.values}
        features = decode(data)
        self.layout(data)
        return features

    def layout(self, data: bytes) -> Layout | None:
        """The layout of examples of this length, taken from the first one; None if there is none.

        Raises: DataError, with the byte position, for an invalid example.
        """
        if len(data) not in self._layouts and len(self._layouts) < LAYOUTS:
            self._layouts[len(data)] = _layout(data)
        return self._layouts.get(len(data))


class Layout(NamedTuple):
    """Positions of the values of an example: name, kind of list and range; and the bytes around them."""

    values: list[tuple[str, int, Span]]
    around: list[tuple[int, int, bytes]]

    def fits(self, table: Array) -> bool:
        """True if examples, uint8 [n, length], all have this layout."""
        return all((table[:, a:b] == np.frombuffer(same, np.uint8)).all() for a, b, same in self.around)


def _value_at(data: bytes, kind: int, span: Span) -> Value:
    begin, end = span
    if kind == BYTES_LIST:
        return [data[begin:end]]
    if kind == FLOAT_LIST:
        return np.frombuffer(data, "<f4", (end - begin) // 4, begin).astype(np.float32)
    return _packed(data, begin, end).view(np.int64)


def _layout(data: bytes) -> Layout | None:
    """The layout of an example whose features each have one value of bytes, or one range of packed numbers."""
    values: dict[str, tuple[str, int, Span]] = {}
    for number, features in _messages(data, 0, len(data)):
        for inner, entry in _messages(data, *features):
            fields = list(_messages(data, *entry))
            if (number, inner, [n for n, _ in fields]) != (1, 1, [1, 2]):
                return None
            name = _text(data, fields[0][1])
            lists = list(_fields(data, *fields[1][1]))
            held = [(n, list(_fields(data, *span))) for n, _, span in lists]
            if len(held) != 1 or held[0][0] > INT64_LIST or name in values:
                return None
            kind, runs = held[0]
            if (
                len(runs) != 1
                or runs[0][:2] != (1, BYTES)
                or (kind == FLOAT_LIST and (runs[0][2][1] - runs[0][2][0]) % 4)
            ):
                return None
            values[name] = (name, kind, runs[0][2])
    around, at = [], 0
    for begin, end in (*(span for _, _, span in values.values()), (len(data), len(data))):
        around.append((at, begin, data[at:begin]))
        at = end
    return Layout(list(values.values()), around)


def encode(features: Mapping[str, Any]) -> bytes:
    """An example of these features, in name order.

    Args:
      features: name -> bytes, text (written as UTF-8), numbers, or lists and arrays of one of these. Floats are stored
        as float32, integers and bools as int64; arrays are flattened in C order.
    Raises: DataError for anything else, and integers beyond 64 bits.
    Example:
      >>> import meshlib as mtf
      >>> record = mtf.records.encode({"label": 7, "pixels": [0.5, 1.0]})
      >>> len(record), mtf.records.decode(record)["pixels"].tolist()
      (42, [0.5, 1.0])
    """
    if not isinstance(features, Mapping):
        raise DataError(f"records.encode: expected a dict of names to values, got {type(features).__name__}")
    entries = []
    for name in sorted(features, key=str):
        if not isinstance(name, str):
            raise DataError(f"records.encode: the names of features must be text, got {name!r:.80}")
        entry = _field(1, name.encode()) + _field(2, _encoded(name, features[name]))
        entries.append(_field(1, entry))
    return _field(1, b"".join(entries))


# ---------------------------------------------------------------- writing


def _encoded(name: str, value: Any) -> bytes:
    """An encoded Feature."""
    if isinstance(value, str | bytes | bytearray):
        value = [value]
    if isinstance(value, Sequence) and value and all(isinstance(v, str | bytes | bytearray) for v in value):
        held = (_field(1, v.encode() if isinstance(v, str) else bytes(v)) for v in value)
        return _field(BYTES_LIST, b"".join(held))
    try:
        array = np.asarray(value)
    except ValueError:
        array = np.empty(0, object)
    kind = array.dtype.kind
    if isinstance(value, list | tuple) and not value:
        return _field(BYTES_LIST, b"")
    if kind == "f":
        return _field(FLOAT_LIST, _field(1, array.astype("<f4").tobytes()) if array.size else b"")
    if kind in "iub" and not (kind == "u" and array.size and array.max() >= 1 << 63):
        return _field(INT64_LIST, _field(1, _varints(array.astype(np.int64).reshape(-1))) if array.size else b"")
    raise DataError(
        f"records.encode: feature '{name}' must be bytes, text, numbers of at most 64 bits, or a list of one of these, "
        f"got {type(value).__name__} {value!r:.80}"
    )


def _field(number: int, data: bytes) -> bytes:
    return _varint(number << 3 | BYTES) + _varint(len(data)) + data


def _varint(n: int) -> bytes:
    encoded = bytearray()
    while n > 127:
        encoded.append(n & 127 | 128)
        n >>= 7
    encoded.append(n)
    return bytes(encoded)


def _varints(values: Array) -> bytes:
    """Varints of int64, negative ones in two's complement."""
    left = values.astype("<i8").view("<u8")
    octets = np.empty((len(left), VARINT_BYTES), np.uint8)
    for n in range(VARINT_BYTES):
        octets[:, n] = left & np.uint64(127)
        left = left >> np.uint64(7)
    counts = VARINT_BYTES - np.argmax(octets[:, ::-1] != 0, axis=1)
    counts[~octets.any(axis=1)] = 1
    places = np.arange(VARINT_BYTES)
    octets |= (places < counts[:, None] - 1).astype(np.uint8) << 7
    written: bytes = octets[places < counts[:, None]].tobytes()
    return written


# ---------------------------------------------------------------- reading


def _fail(at: int, what: str) -> DataError:
    return DataError(f"no tf.train.Example: byte {at}: {what}")


def _number(data: bytes, at: int, end: int) -> tuple[int, int]:
    """A varint, and the position after it."""
    if at < end and data[at] < 128:
        return data[at], at + 1
    number = shift = 0
    for n in range(at, min(at + VARINT_BYTES, end)):
        number |= (data[n] & 127) << shift
        shift += 7
        if data[n] < 128:
            return number & (1 << 64) - 1, n + 1
    raise _fail(at, "an unterminated varint")


def _fields(data: bytes, at: int, end: int) -> Iterator[tuple[int, int, Span]]:
    """The fields of a message: number, kind, and range of the value."""
    groups: list[int] = []
    while at < end:
        begin = at
        tag, at = _number(data, at, end)
        number, kind = tag >> 3, tag & 7
        if not number or number >= 1 << 29:
            raise _fail(begin, f"{number} is not the number of a field")
        start = at
        if kind == VARINT:
            _, at = _number(data, at, end)
        elif kind == BYTES:
            length, start = _number(data, at, end)
            at = start + length
        elif kind in (FIXED64, FIXED32):
            at += 8 if kind == FIXED64 else 4
        elif kind == GROUP:
            groups.append(number)
            if len(groups) > NESTED:
                raise _fail(begin, f"more than {NESTED} nested groups")
        elif kind == GROUP_ENDS:
            if not groups or groups.pop() != number:
                raise _fail(begin, f"the end of a group {number} that was not opened")
            continue
        else:
            raise _fail(begin, f"field {number} has the unknown wire type {kind}")
        if at > end:
            raise _fail(begin, f"field {number} ends at {at}, its message at {end}")
        if not groups:
            yield number, kind, (start, at)
    if groups:
        raise _fail(end, f"group {groups[-1]} is not closed")


def _messages(data: bytes, begin: int, end: int) -> Iterator[tuple[int, Span]]:
    """The fields of a message with bytes."""
    for number, kind, span in _fields(data, begin, end):
        if kind == BYTES:
            yield number, span


def _text(data: bytes, span: Span) -> str:
    try:
        return data[span[0] : span[1]].decode()
    except UnicodeDecodeError as fault:
        raise _fail(span[0] + fault.start, "a feature's name is not UTF-8") from None


def _feature(data: bytes, span: Span) -> Value | None:
    """The value of a feature: the last of several kinds; lists of one kind are concatenated."""
    value: Value | None = None
    for number, inner in _messages(data, *span):
        if number == BYTES_LIST:
            value = _joined(value, [data[a:b] for n, (a, b) in _messages(data, *inner) if n == 1])
        elif number == FLOAT_LIST:
            value = _joined(value, _floats(data, inner))
        elif number == INT64_LIST:
            value = _joined(value, _integers(data, inner))
    return value


def _joined(a: Value | None, b: Value | None) -> Value | None:
    if isinstance(a, list) and isinstance(b, list):
        return a + b
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and a.dtype == b.dtype:
        return np.concatenate([a, b])
    return a if b is None else b


def _floats(data: bytes, span: Span) -> Array:
    raw = b""
    for number, kind, (begin, end) in _fields(data, *span):
        if number == 1 and kind == FIXED32:
            raw += data[begin:end]
        elif number == 1 and kind == BYTES:
            if (end - begin) % 4:
                raise _fail(begin, f"packed floats of {end - begin} bytes, not a multiple of 4")
            raw += data[begin:end]
    return np.frombuffer(raw, "<f4").astype(np.float32)


def _integers(data: bytes, span: Span) -> Array:
    parts: list[Array] = []
    for number, kind, (begin, end) in _fields(data, *span):
        if number == 1 and kind == VARINT:
            parts.append(np.array([_number(data, begin, end)[0]], np.uint64))
        elif number == 1 and kind == BYTES:
            parts.append(_packed(data, begin, end))
    joined = parts[0] if len(parts) == 1 else np.concatenate(parts) if parts else np.empty(0, np.uint64)
    return joined.view(np.int64)


def _packed(data: bytes, begin: int, end: int) -> Array:
    """Packed varints: uint64 [n]."""
    if end - begin == 1 and data[begin] < 128:
        return np.array([data[begin]], np.uint64)
    if end - begin < 8:
        values, at = [], begin
        while at < end:
            value, at = _number(data, at, end)
            values.append(value)
        return np.array(values, np.uint64)
    octets = np.frombuffer(data, np.uint8, end - begin, begin)
    last = np.flatnonzero(octets < 128)
    starts = np.concatenate([[0], last[:-1] + 1]) if len(last) else np.zeros(1, np.int64)
    if not len(last) or last[-1] != len(octets) - 1:
        raise _fail(begin + int(last[-1] + 1 if len(last) else 0), "an unterminated varint")
    if (last - starts >= VARINT_BYTES).any():
        raise _fail(begin + int(starts[np.argmax(last - starts >= VARINT_BYTES)]), "an unterminated varint")
    return _joined_digits(octets, starts, last)


def _joined_digits(octets: Array, starts: Array, last: Array) -> Array:
    """The numbers, uint64, whose bytes run from `starts` to `last`, in base 128 with the least digit first."""
    places = (np.arange(len(octets)) - np.repeat(starts, last - starts + 1)).astype(np.uint64)
    numbers: Array = np.bitwise_or.reduceat((octets & 127).astype(np.uint64) << (np.uint64(7) * places), starts)
    return numbers


def packed_rows(rows: Array, count: int) -> Array | None:
    """Packed varints in rows of bytes, uint8 [n, width], as int64 [n, count]; None unless each row has `count` numbers.

    >>> packed_rows(np.array([[1, 2, 3], [0x80, 1, 5]], np.uint8), 2) is None
    True
    >>> packed_rows(np.array([[1, 0x80, 1], [0x80, 1, 5]], np.uint8), 2).tolist()
    [[1, 128], [128, 5]]
    """
    ends = rows < 128
    if not rows.size or not ends[:, -1].all() or (ends.sum(axis=1) != count).any():
        return None
    if rows.shape[1] == count:
        return rows.astype(np.int64)
    last = np.flatnonzero(ends)
    starts = np.concatenate([[0], last[:-1] + 1])
    if (last - starts >= VARINT_BYTES).any():
        return None
    return _joined_digits(rows.reshape(-1), starts, last).view(np.int64).reshape(len(rows), count)
