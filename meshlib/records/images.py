"""Image files, decoded with Pillow, the extra `images`."""

from __future__ import annotations

import io
import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshlib.core.errors import DataError, MissingError
from meshlib.core.files import open_file

Image = NDArray[np.uint8]
MOST_BYTES, MOST_PIXELS = 2**28, 2**26  # limits of a file, and of its decoded content
IMAGE_ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif")


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
