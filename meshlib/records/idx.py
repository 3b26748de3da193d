"""Arrays in IDX files, the format of MNIST: its description stands on the page of that set."""

from __future__ import annotations

import gzip
import math
import os
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshlib.core.errors import DataError
from meshlib.core.files import most_unpacked_bytes, open_file

# Third byte of the magic number -> big-endian element type (the format's description on the MNIST page).
IDX_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
GZIP_MAGIC = b"\x1f\x8b"


def read_idx(path: str | os.PathLike[str], dims: int | None = None) -> NDArray[Any]:
    """The array in an IDX file, gzipped or not; which, its first bytes say, not its name.

    Layout: 0, 0, element type, number of dimensions; one big-endian uint32 per dimension; the elements.

    Args:
      path: the file.
      dims: number of dimensions the file must have; None takes any.
    Returns: array in native byte order.
    Raises: DataError naming the file, what was expected and what was found.
    """
    raw = _read_bytes(path)
    magic = raw[:4]
    if len(magic) < 4 or magic[:2] != b"\0\0" or magic[2] not in IDX_TYPES or not 1 <= magic[3] <= 32:
        codes = "|".join(f"{code:02x}" for code in IDX_TYPES)
        actual_magic = magic.hex(" ") or "an empty file"
        raise DataError(f"{path}: wrong magic: expected hex 00 00 {codes} 01..20, found {actual_magic}")
    ndim = magic[3]
    if dims not in (None, ndim):
        raise DataError(f"{path}: wrong number of dimensions: expected {dims}, found {ndim}")
    header = 4 + 4 * ndim
    if len(raw) < header:
        raise DataError(f"{path}: truncated header: expected {header} bytes, found {len(raw)}")
    shape = tuple(int(n) for n in np.frombuffer(raw, ">u4", ndim, offset=4))
    if 0 in shape:
        raise DataError(f"{path}: expected at least 1 element, found 0 in shape {shape}")
    dtype = np.dtype(IDX_TYPES[magic[2]])
    expected, found_bytes = math.prod(shape) * dtype.itemsize, len(raw) - header
    if found_bytes != expected:
        fault = "truncated data" if found_bytes < expected else "trailing bytes"
        raise DataError(f"{path}: {fault}: expected {expected} bytes for shape {shape}, found {found_bytes}")
    return np.frombuffer(raw, dtype, offset=header).reshape(shape).astype(dtype.newbyteorder("="))


def _read_bytes(path: str | os.PathLike[str]) -> bytes:
    with open_file(path, "read_idx", DataError) as (file, _):
        packed = file.read(len(GZIP_MAGIC)) == GZIP_MAGIC
        size = os.fstat(file.fileno()).st_size
        file.seek(0)
        if not packed:
            return file.read()
        most = most_unpacked_bytes(size)
        try:
            with gzip.open(file) as unpacked:
                raw: bytes = unpacked.read(most + 1)
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(
                f"{path}: corrupt gzip: expected a whole stream, found: {error} (in {size} bytes)"
            ) from error
    if len(raw) > most:
        raise DataError(f"{path}: its {size:,} bytes unpack to more than {most:,}; if it is sound, gunzip it")
    return raw
