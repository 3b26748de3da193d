"""Pictures: decoded with Pillow, the extra `images`."""

from __future__ import annotations

import io
import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshlib.errors import DataError, MissingError

Image = NDArray[np.uint8]
IMAGE_ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif")


def _pillow() -> Any:
    try:
        import PIL.Image
    except ImportError:
        raise MissingError("pictures need Pillow: pip install 'meshlib-tpu[images]'") from None
    return PIL.Image


def read_image(file: str | os.PathLike[str] | bytes, side: int | None = None, channels: int = 3) -> Image:
    """A picture as uint8 [height, width, channels], channels 3 (red, green, blue) or 1.

    Args:
      file: a path, or the bytes of a file.
      side: the middle square, brought to so many pixels along each side; as it is unless given.
      channels: 1 or 3.
    Raises: DataError if it is none; MissingError without Pillow.
    """
    pillow = _pillow()
    what = "the image" if isinstance(file, bytes) else os.fspath(file)
    try:
        with pillow.open(io.BytesIO(file) if isinstance(file, bytes) else file) as picture:
            mode = "RGB" if channels == 3 else "L"
            if side is not None:
                picture.draft(mode, (side, side))  # a JPEG is decoded at an eighth to the whole of its size
            made = picture.convert(mode)
            if side is not None and made.size != (side, side):
                short = min(made.size)
                left, top = ((n - short) // 2 for n in made.size)
                box = (left, top, left + short, top + short)
                made = made.resize((side, side), pillow.Resampling.BILINEAR, box)
            pixels = np.asarray(made)
    except (pillow.UnidentifiedImageError, OSError, ValueError, SyntaxError, pillow.DecompressionBombError) as fault:
        raise DataError(f"{what}: expected a picture, found: {fault}") from None
    return pixels.reshape(*pixels.shape[:2], channels)
