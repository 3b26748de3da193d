"""The safetensors format: headers and tensors.

    8 bytes             length of the header, little-endian
    header              JSON {name: {"dtype", "shape", "data_offsets"}, "__metadata__": {text: text}}, then blanks
    the rest            the tensors' bytes, little-endian, C order, without gaps

Source of the format: github.com/huggingface/safetensors, README.md and safetensors/src/tensor.rs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, NoReturn

import ml_dtypes
import numpy as np

from meshlib.core.documents import parse_json
from meshlib.core.errors import CheckpointError, DamagedError, nearest
from meshlib.core.files import open_file

Array = np.ndarray[Any, Any]

# The format's names of this library's dtypes, and the bits per element of all of its dtypes.
CODES = {
    **{"float64": "F64", "float32": "F32", "bfloat16": "BF16", "int32": "I32", "bool": "BOOL"},
    **{"int8": "I8", "int4": "I8", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"},
}
BITS = {
    **dict.fromkeys(("C64", "F64", "I64", "U64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("BOOL", "I8", "U8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E5M2FNUZ", "F8_E4M3FNUZ"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
HEADER_LIMIT_BYTES = 100_000_000  # limit of other readers
ALIGNMENT_BYTES = 8  # alignment of the first tensor; the others follow by descending itemsize
METADATA = "__metadata__"
# NumPy dtypes of the format's dtypes; the others have none.
_READ: dict[str, Any] = {
    **{"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1"},
    **{"U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1", "BOOL": "?", "BF16": ml_dtypes.bfloat16},
    **{"F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2},
}
_WRITTEN = {np.dtype(dtype): code for code, dtype in _READ.items()}


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor in a file; `begin` and `end` are relative to the end of the header."""

    code: str
    shape: tuple[int, ...]
    begin: int
    end: int

    def __str__(self) -> str:
        return f"{self.code} {list(self.shape)}"


@dataclass(frozen=True, slots=True)
class Header:
    """A parsed header; `data_start` is the offset of the tensors."""

    entries: dict[str, Entry]
    metadata: dict[str, str]
    data_start: int


# ---------------------------------------------------------------- headers


def header_bytes(what: str, entries: Mapping[str, Entry], metadata: Mapping[str, str]) -> bytes:
    """The header with its length; offsets in entries are relative to its end."""
    table: dict[str, object] = {METADATA: metadata}
    for name, e in entries.items():
        table[name] = {"dtype": e.code, "shape": e.shape, "data_offsets": (e.begin, e.end)}
    try:
        text = json.dumps(table, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError as fault:
        raise CheckpointError(f"{what}: a variable's name can't be written as UTF-8: {fault}") from None
    text += b" " * (-len(text) % ALIGNMENT_BYTES)
    if len(text) > HEADER_LIMIT_BYTES:
        raise CheckpointError(
            f"{what}: the header of {len(entries)} tensors has {len(text)} bytes; readers accept {HEADER_LIMIT_BYTES}"
        )
    return len(text).to_bytes(8, "little") + text


def read_header(file: BinaryIO, target: str, what: str) -> Header:
    """The header of an open file, with all offsets checked against each other and the file size."""

    def fail(fault: str) -> NoReturn:
        raise DamagedError(f"{what}: {target} is not a complete safetensors file: {fault}")

    size = os.fstat(file.fileno()).st_size
    if size < 8:
        fail(f"it has {size} bytes, and the length of the header alone takes 8")
    length = int.from_bytes(file.read(8), "little")
    if length > HEADER_LIMIT_BYTES:
        fail(f"the first 8 bytes give a header of {length} bytes, more than the format's {HEADER_LIMIT_BYTES}")
    if length > size - 8:
        fail(f"the header should have {length} bytes, but only {size - 8} follow its length: truncated")
    raw = file.read(length)
    if raw[:1] != b"{":
        fail(f"the header should begin with '{{', but begins with {raw[:8]!r}")
    table = parse_json(raw, lambda fault: fail(f"the header: {fault}"))
    metadata = table.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        fail(f"{METADATA} should map text to text, but is {metadata!r:.80}")
    data_bytes = size - 8 - length
    entries = {name: _entry(name, item, data_bytes, fail) for name, item in table.items()}
    at, before = 0, ""
    for name, e in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if e.begin < at:
            fail(f"tensor '{name}' begins at byte {e.begin} and overlaps tensor '{before}', which ends at {at}")
        if e.begin > at:
            fail(f"bytes {at} to {e.begin}, before tensor '{name}', belong to no tensor")
        at, before = e.end, name
    if at != data_bytes:
        fail(f"{data_bytes - at} trailing bytes: the tensors take {at} bytes, and {data_bytes} follow the header")
    return Header(entries, metadata, 8 + length)


def _entry(name: str, item: object, data_bytes: int, fail: Callable[[str], NoReturn]) -> Entry:
    if not isinstance(item, dict) or set(item) != {"dtype", "shape", "data_offsets"}:
        fail(f"tensor '{name}' should have dtype, shape and data_offsets, but is {item!r:.80}")
    code, shape, offsets = item["dtype"], item["shape"], item["data_offsets"]
    if not isinstance(code, str) or code not in BITS:
        fail(f"tensor '{name}' has the unknown dtype {code!r:.40}{nearest(code, BITS)}; known: {', '.join(BITS)}")
    if not _counts(shape):
        fail(f"tensor '{name}' has the shape {shape!r:.80}, which is not a list of integers >= 0")
    if not _counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        fail(f"tensor '{name}' has data_offsets {offsets!r:.80}, which are no [begin, end] with 0 <= begin <= end")
    begin, end = offsets
    if end > data_bytes:
        fail(f"tensor '{name}' should end at byte {end}, but only {data_bytes} bytes follow the header: truncated")
    bits = BITS[code] * _product(shape, 8 * data_bytes + 1)
    if bits != 8 * (end - begin):
        fail(
            f"tensor '{name}' {code} {shape!r:.80} does not take the {end - begin} bytes of its offsets "
            f"[{begin}, {end}]" + (f", but {bits / 8:.10g}" if bits < 8 * data_bytes else "")
        )
    return Entry(code, tuple(shape), begin, end)


def _counts(values: object) -> bool:
    return isinstance(values, list) and all(type(n) is int and n >= 0 for n in values)


def _product(sizes: list[int], limit: int) -> int:
    """The product, or a number above `limit`: adversarial sizes are not multiplied out."""
    if 0 in sizes:
        return 0
    total = 1
    for size in sizes:
        total *= size
        if total > limit:
            break
    return total


# ---------------------------------------------------------------- tensors


class Tensors(Mapping[str, Array]):
    """The tensors of a file by name, each read on access, in its own dtype.

    Raises: CheckpointError if the file is not a complete safetensors file, or a tensor has a dtype that NumPy lacks.
    """

    def __init__(self, path: object, what: str) -> None:
        self.path, self.what = path, what
        with open_file(path, what, CheckpointError) as (file, target):
            self.header, self.target = read_header(file, target, what), target

    def __getitem__(self, name: str) -> Array:
        entry = self.header.entries[name]
        if entry.code not in _READ:
            raise CheckpointError(f"{self.what}: {self.target}: tensor '{name}' is {entry}, which NumPy lacks")
        with open_file(self.path, self.what, CheckpointError) as (file, target):
            file.seek(self.header.data_start + entry.begin)
            raw = file.read(entry.end - entry.begin)
        if len(raw) != entry.end - entry.begin:
            raise CheckpointError(f"{self.what}: {target} became shorter while it was read: tensor '{name}'")
        return np.frombuffer(raw, _READ[entry.code]).reshape(entry.shape)

    def __iter__(self) -> Any:
        return iter(self.header.entries)

    def __len__(self) -> int:
        return len(self.header.entries)


def write_tensors(file: BinaryIO, arrays: Mapping[str, Array], what: str) -> int:
    """Write arrays as one file; returns the total bytes of all tensors.

    Raises: CheckpointError for a dtype that the format lacks.
    """
    entries, begin = {}, 0
    for name in sorted(arrays, key=lambda n: (-arrays[n].itemsize, n)):
        array = arrays[name]
        code = _WRITTEN.get(array.dtype.newbyteorder("<"))
        if code is None:
            raise CheckpointError(f"{what}: tensor '{name}' is {array.dtype}, which the format lacks")
        entries[name] = Entry(code, array.shape, begin, begin + array.nbytes)
        begin += array.nbytes
    file.write(header_bytes(what, entries, {"format": "pt"}))
    for name, entry in entries.items():
        file.write(np.ascontiguousarray(arrays[name], _READ[entry.code]).tobytes())
    return begin
