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


def read_image(
    file: str | os.PathLike[str] | bytes, side: int | tuple[int, int] | None = None, channels: int = 3
) -> Image:
    """A picture as uint8 [height, width, channels], channels 3 (red, green, blue) or 1.

    Args:
      file: a path, or the bytes of a file.
      side: pixels along each side, or height and width: to these the largest middle part of that form is brought
        (bilinear, as Pillow does). As it is unless given.
      channels: 1 or 3.
    Raises: DataError if it is none; MissingError without Pillow.
    """
    try:
        import PIL.Image
    except ImportError:
        raise MissingError("files of pictures need Pillow: pip install 'meshlib-tpu[images]'") from None
    pillow: Any = PIL.Image
    what = "the image" if isinstance(file, bytes) else os.fspath(file)
    try:
        with pillow.open(io.BytesIO(file) if isinstance(file, bytes) else file) as picture:
            mode = "RGB" if channels == 3 else "L"
            height, width = side if isinstance(side, tuple) else (side or 0, side or 0)
            if side is not None:
                picture.draft(mode, (width, height))  # a JPEG is decoded at an eighth to the whole of its size
            made = picture.convert(mode)
            if side is not None and made.size != (width, height):
                across, down = (
                    min(made.width, made.height * width / height),
                    min(made.height, made.width * height / width),
                )
                left, top = (made.width - across) // 2, (made.height - down) // 2
                box = (left, top, left + across, top + down)
                made = made.resize((width, height), pillow.Resampling.BILINEAR, box)
            pixels = np.asarray(made)
    except (pillow.UnidentifiedImageError, OSError, ValueError, SyntaxError, pillow.DecompressionBombError) as fault:
        raise DataError(f"{what}: expected a picture, found: {fault}") from None
    return pixels.reshape(*pixels.shape[:2], channels)
