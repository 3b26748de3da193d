"""Grids of images and box frames, written as PNG files without further packages."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from typing import Any

import einops
import numpy as np
from numpy.typing import NDArray

Picture = NDArray[Any]  # [height, width, 3] in 0..1


def grid(images: Picture, rows: int, grow: int = 1) -> Picture:
    """Images [rows * columns, height, width, 1 or 3] as one image, enlarged by `grow`, with gaps in between."""
    coloured = einops.repeat(images, "n h w 1 -> n h w 3") if images.shape[-1] == 1 else images
    larger = einops.repeat(coloured, "n h w c -> n (h a) (w b) c", a=grow, b=grow)
    framed = np.pad(larger, ((0, 0), (0, 2), (0, 2), (0, 0)), constant_values=1.0)
    tiled: Picture = einops.rearrange(framed, "(a b) h w c -> (a h) (b w) c", a=rows)
    return tiled


def frame(picture: Picture, box: NDArray[Any], colour: NDArray[Any]) -> None:
    """Draw the border of a box (top, left, bottom, right)."""
    height, width = picture.shape[:2]
    top, left, bottom, right = np.rint(box).astype(int) - (0, 0, 1, 1)
    top, bottom = np.clip((top, bottom), 0, height - 1)
    left, right = np.clip((left, right), 0, width - 1)
    picture[top, left : right + 1] = picture[bottom, left : right + 1] = colour
    picture[top : bottom + 1, left] = picture[top : bottom + 1, right] = colour


def write_png(path: str | Path, picture: Picture) -> None:
    """Write an image as a PNG file.

    Source: PNG specification, third edition, sections 5 and 11: signature, IHDR, IDAT (filter 0 for each row), IEND.
    """
    pixels = np.rint(255 * picture.clip(0, 1)).astype(np.uint8)
    height, width, channels = pixels.shape
    rows = np.concatenate([np.zeros((height, 1), np.uint8), pixels.reshape(height, width * channels)], axis=1)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = (chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(rows.tobytes())), chunk(b"IEND", b""))
    Path(path).write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(parts))
