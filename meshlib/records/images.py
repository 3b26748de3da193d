"""Files of images and arrays: what Pillow decodes, with the extra `images`, and IDX, the format of MNIST."""

from __future__ import annotations

import gzip
import io
import math
import os
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshlib.core.errors import DataError, MissingError
from meshlib.core.files import most_unpacked_bytes, open_file

Image = NDArray[np.uint8]
MOST_BYTES, MOST_PIXELS = 2**28, 2**26  # limits of a file, and of its decoded content
IMAGE_ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif")
# Third byte of the magic number -> big-endian element type (the format's description on the MNIST page).
IDX_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
GZIP_MAGIC = b"\x1f\x8b"
READ_BYTES = 1 << 20  # bytes per read


def _pillow() -> Any:
    try:
        import PIL.Image
    except ImportError:
        raise MissingError("pictures need Pillow: pip install 'meshlib-tpu[images]'") from None
    return PIL.Image


def read_image(file: str | os.PathLike[str] | bytes, size: tuple[int, int] | None = None, channels: int = 3) -> Image:
    """An image as uint8 [height, width, channels], channels 3 (red, green, blue) or 1.

    Args:
      file: a path, or the bytes of a file.
      size: (height, width) to which its central part of that aspect ratio is resized (bilinear); by default unchanged.
      channels: 1 or 3.
    Raises: DataError if it is not an image, or has more than 8 bits per channel; MissingError without Pillow.
    """
    pillow = _pillow()
    what = "the image" if isinstance(file, bytes) else os.fspath(file)
    try:
        content = file if isinstance(file, bytes) else _content(file)
        with pillow.open(io.BytesIO(content)) as picture:
            if picture.width * picture.height > MOST_PIXELS:
                raise ValueError(f"{picture.width} x {picture.height} pixels, more than {MOST_PIXELS:,}")
            if picture.mode[0] in "IF":  # they would be truncated
                raise ValueError(f"mode {picture.mode}, which has more than 8 bits a channel")
            mode = "RGB" if channels == 3 else "L"
            if size is not None:
                picture.draft(mode, size[::-1])  # a JPEG is decoded at 1/8 to 1/1 of its size
            converted = picture if picture.mode == mode else picture.convert(mode)
            if size is not None and converted.size != size[::-1]:
                height, width = size
                scale = min(converted.width / width, converted.height / height)
                left, top = ((n - scale * m) / 2 for n, m in zip(converted.size, (width, height), strict=True))
                box = (left, top, left + scale * width, top + scale * height)
                converted = converted.resize((width, height), pillow.Resampling.BILINEAR, box)
            pixels = np.asarray(converted)
    except (pillow.UnidentifiedImageError, OSError, ValueError, SyntaxError, pillow.DecompressionBombError) as fault:
        raise DataError(f"{what}: expected a picture, found: {fault}") from None
    return pixels.reshape(*pixels.shape[:2], channels)


def _content(file: str | os.PathLike[str]) -> bytes:
    with open_file(file, "the file", ValueError, MOST_BYTES) as (content, _):
        return content.read()


def read_idx(path: str | os.PathLike[str], dims: int | None = None) -> NDArray[Any]:
    """The array in an IDX file, optionally gzipped, which is detected from its first bytes.

    Layout: 0, 0, element type, number of dimensions; one big-endian uint32 per dimension; the elements.

    Args:
      path: the file.
      dims: number of dimensions the file must have; None takes any.
    Returns: array in native byte order.
    Raises: DataError with the file, and the expected and actual content.
    Example:
      >>> import meshlib as mtf
      >>> import tempfile
      >>> from pathlib import Path
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     path = Path(folder, "labels.idx")
      ...     _ = path.write_bytes(bytes([0, 0, 8, 1, 0, 0, 0, 3, 7, 2, 1]))  # uint8, one dim, of 3
      ...     mtf.records.read_idx(path).tolist()
      [7, 2, 1]
    """
    with open_file(path, "read_idx", DataError) as (file, _):
        packed = file.read(len(GZIP_MAGIC)) == GZIP_MAGIC
        size = os.fstat(file.fileno()).st_size
        file.seek(0)
        if not packed:
            return _array(file, path, dims, size, size)
        try:
            with gzip.open(file) as unpacked:
                return _array(unpacked, path, dims, None, most_unpacked_bytes(size))
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(
                f"{path}: corrupt gzip: expected a whole stream, found: {error} (in {size} bytes)"
            ) from error


def _array(stream: Any, path: object, dims: int | None, size: int | None, most_bytes: int) -> NDArray[Any]:
    """The array in a stream, read no further than its header specifies; `size`: that of the stream, if known."""
    dtype, shape = _header(stream, path, dims)
    header, expected_bytes = 4 + 4 * len(shape), math.prod(shape) * dtype.itemsize
    raw, actual_bytes = _idx_content(stream, header, expected_bytes, size, most_bytes)
    if header + actual_bytes > most_bytes:
        raise DataError(f"{path}: it unpacks to more than {most_bytes:,} bytes; if it is intact, gunzip it")
    if actual_bytes != expected_bytes:
        fault = "truncated data" if actual_bytes < expected_bytes else "trailing bytes"
        raise DataError(f"{path}: {fault}: expected {expected_bytes} bytes for shape {shape}, found {actual_bytes}")
    return np.frombuffer(raw, dtype).reshape(shape).astype(dtype.newbyteorder("="))


def _header(stream: Any, path: object, dims: int | None) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Dtype and shape of the array; `dims`: required number of dimensions."""
    magic = stream.read(4)
    if len(magic) < 4 or magic[:2] != b"\0\0" or magic[2] not in IDX_TYPES or not 1 <= magic[3] <= 32:
        codes = "|".join(f"{code:02x}" for code in IDX_TYPES)
        actual_magic = magic.hex(" ") or "an empty file"
        raise DataError(f"{path}: wrong magic: expected hex 00 00 {codes} 01..20, found {actual_magic}")
    ndim = magic[3]
    if dims not in (None, ndim):
        raise DataError(f"{path}: wrong number of dimensions: expected {dims}, found {ndim}")
    sizes = stream.read(4 * ndim)
    header = 4 + 4 * ndim
    if len(sizes) < 4 * ndim:
        raise DataError(f"{path}: truncated header: expected {header} bytes, found {4 + len(sizes)}")
    shape = tuple(int(n) for n in np.frombuffer(sizes, ">u4"))
    if 0 in shape:
        raise DataError(f"{path}: expected at least 1 element, found 0 in shape {shape}")
    return np.dtype(IDX_TYPES[magic[2]]), shape


def _idx_content(stream: Any, header: int, expected_bytes: int, size: int | None, most_bytes: int) -> tuple[bytes, int]:
    """The bytes after the header, and their number: bytes beyond the expected ones are counted, not stored."""
    raw = b""
    if size is None or size - header == expected_bytes:
        raw = stream.read(min(expected_bytes, most_bytes - header) + 1)
    actual_bytes = len(raw) if size is None else size - header
    while size is None and actual_bytes > expected_bytes and header + actual_bytes <= most_bytes:
        more = len(stream.read(READ_BYTES))
        actual_bytes += more
        if not more:
            break
    return raw, actual_bytes
