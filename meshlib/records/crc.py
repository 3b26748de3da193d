"""CRC-32C (Castagnoli) of many messages at once, in NumPy alone.

A CRC without its inversions is linear over GF(2): that of a message is the exclusive or of the contributions of its
bytes, each a function of the byte and the number of bytes after it. The initial inversion inverts the first four bytes.
So messages are cut into rows of ROW bytes, the first padded in front with zeros, which contribute nothing; a table
[position in a row, byte] gives the sum of each row; and the sum of a row is shifted past the following rows by the
linear maps of as many zero bytes, tabulated for all values of a digit in base 256.

Polynomial: 0x1EDC6F41, reflected 0x82F63B78; RFC 3720, appendix B.4, has check values. The mask is that of records
and of LevelDB: computing the CRC of data that contain CRCs is problematic, so stored ones are masked.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Bytes = bytes | bytearray | memoryview

POLYNOMIAL = 0x82F63B78
ROW = 1024  # bytes; its table takes 1 MiB
BLOCK_ROWS = 32  # rows per pass, so that looked up values stay in a processor's cache
MASK_DELTA = 0xA282EAD8
ONES = 0xFFFFFFFF


def crc32c(data: Bytes) -> int:
    """The CRC-32C of some bytes.

    >>> import meshlib as mtf
    >>> hex(mtf.records.crc32c(b"123456789")), hex(mtf.records.crc32c(bytes(32)))
    ('0xe3069283', '0x8a9136aa')
    """
    return int(crc32c_each([data])[0])


def masked(crc: int) -> int:
    """A sum as stored in records: rotated right by 15 bits, plus a constant.

    >>> hex(masked(0))
    '0xa282ead8'
    """
    return (((crc >> 15) | (crc << 17)) + MASK_DELTA) & ONES


def masked_crcs(messages: Sequence[Bytes]) -> Array:
    """The masked sums of messages, uint32 [n]."""
    sums = crc32c_each(messages)
    return ((sums >> 15) | (sums << np.uint32(17))) + np.uint32(MASK_DELTA)


def crc32c_each(messages: Sequence[Bytes]) -> Array:
    """The CRC-32C of each message, uint32 [n]: small messages are most efficient in large numbers."""
    lengths = np.array([len(m) for m in messages], np.int64)
    rows = np.maximum(-(-lengths // ROW), 1)
    ends = np.cumsum(rows)
    data = _in_rows(messages, lengths, ends * ROW)
    sums = _row_sums(data.reshape(-1, ROW))
    if len(sums) > len(lengths):
        sums = _shifted(sums, np.repeat(ends, rows) - 1 - np.arange(len(sums)))
        sums = np.bitwise_xor.reduceat(sums, ends - rows)
    for n in np.flatnonzero(lengths < 4):  # messages shorter than the inverted four bytes
        sums[n] ^= ONES >> 8 * int(lengths[n])
    return ~sums


def _in_rows(messages: Sequence[Bytes], lengths: Array, ends: Array) -> Array:
    """The messages in rows, each aligned at its end, with the first four bytes inverted; uint8 [ends[-1]]."""
    data = np.zeros(int(ends[-1]) if len(ends) else 0, np.uint8)
    if len(lengths) and (lengths == lengths[0]).all():
        length = int(lengths[0])
        table = data.reshape(len(lengths), -1)
        begin = table.shape[1] - length
        table[:, begin:] = np.frombuffer(b"".join(messages), np.uint8).reshape(len(lengths), length)
        table[:, begin : begin + 4] ^= 255
        return data
    for message, end, length in zip(messages, ends.tolist(), lengths.tolist(), strict=True):
        data[end - length : end] = np.frombuffer(message, np.uint8)
        data[end - length : min(end - length + 4, end)] ^= 255
    return data


def _row_sums(rows: Array) -> Array:
    """The contribution of each row of ROW bytes, without following rows."""
    lookup, starts = _row_table()
    sums = np.empty(len(rows), np.uint32)
    room = min(len(rows), BLOCK_ROWS)
    places, added = np.empty((room, ROW), np.intp), np.empty((room, ROW), np.uint32)
    for begin in range(0, len(rows), BLOCK_ROWS):
        part = rows[begin : begin + BLOCK_ROWS]
        np.add(part, starts, out=places[: len(part)])
        np.take(lookup, places[: len(part)], out=added[: len(part)], mode="clip")  # which skips bounds checks
        np.bitwise_xor.reduce(added[: len(part)], axis=1, out=sums[begin : begin + len(part)])
    return sums


def _shifted(sums: Array, following: Array) -> Array:
    """The sums of rows, each shifted past the following rows."""
    level = 0
    while following.any():
        sums = _apply_maps(_shifts(level), sums, following & 255)
        following, level = following >> 8, level + 1
    return sums


def _apply_maps(maps: Array, sums: Array, which: Array | int = 0) -> Array:
    """Apply linear maps of 32 bits, uint32 [maps, 4, 256], to sums, each by the map of its index."""
    octets = sums.astype("<u4").view(np.uint8).reshape(-1, 4)
    places = octets + (np.arange(4) * 256 + np.asarray(which)[..., None] * 1024)
    mapped: Array = np.bitwise_xor.reduce(maps.reshape(-1)[places], axis=-1)
    return mapped


@cache
def _byte_table() -> Array:
    """The sum of each single byte: uint32 [256]."""
    table: Array = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = (table >> 1) ^ np.where(table & 1, np.uint32(POLYNOMIAL), np.uint32(0))
    return table


@cache
def _zero_bytes(power: int) -> Array:
    """The map of appending 2**power zero bytes: uint32 [1, 4, 256], one entry per byte of a sum."""
    if power == 0:
        bits = np.arange(256, dtype=np.uint32)
        return np.stack([_byte_table()] + [bits << np.uint32(8 * n - 8) for n in (1, 2, 3)])[None]
    half = _zero_bytes(power - 1)
    return _apply_maps(half, half.reshape(-1)).reshape(half.shape)


@cache
def _shifts(level: int) -> Array:
    """The maps of appending 0 to 255 times ROW * 256**level zero bytes: uint32 [256, 4, 256]."""
    step = _zero_bytes(ROW.bit_length() - 1 + 8 * level)
    tables = np.empty((256, 4, 256), np.uint32)
    tables[0] = np.arange(256, dtype=np.uint32) << (8 * np.arange(4, dtype=np.uint32)[:, None])
    for n in range(1, 256):
        tables[n] = _apply_maps(step, tables[n - 1].reshape(-1)).reshape(4, 256)
    return tables


@cache
def _row_table() -> tuple[Array, Array]:
    """The contribution of a byte at each position of a row, uint32 [ROW * 256], and the start of each position's
    entries."""
    table = np.empty((ROW, 256), np.uint32)
    table[ROW - 1] = _byte_table()
    for place in range(ROW - 2, -1, -1):
        table[place] = _apply_maps(_zero_bytes(0), table[place + 1])
    return table.reshape(-1), np.arange(ROW, dtype=np.intp) * 256
