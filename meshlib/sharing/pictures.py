"""Preprocessing of pictures for an exported model: normalisation, and files as arrays."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshlib.core.arguments import at, items, number
from meshlib.core.errors import DataError, FeedError, GraphError
from meshlib.records.images import read_image

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class ImageInput:
    """Normalisation of pixels, (pixel - mean) / deviation for pixels in 0 to 1, and names of classes.

    Args:
      mean, deviation: one number for all channels, or one per channel.
      classes: their names, in the order of the logits; by default their numbers.
    Raises: GraphError for other values.
    Example:
      >>> import meshlib as mtf
      >>> import numpy as np
      >>> mtf.ImageInput((0.5,), (0.25,)).normalised(np.full((1, 1, 1), 255, np.uint8)).tolist()
      [[[2.0]]]
    """

    mean: tuple[float, ...] = (0.0,)
    deviation: tuple[float, ...] = (1.0,)
    classes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        what = "ImageInput"
        for name in ("mean", "deviation"):
            given = tuple(number(x, what, name) for x in items(getattr(self, name), what, name))
            if not given or (name == "deviation" and min(given) <= 0):
                raise GraphError(f"{at(what)}: {name} must be a positive number for each channel, got {given}")
            object.__setattr__(self, name, given)
        names = tuple(items(self.classes, what, "classes"))
        if not all(isinstance(name, str) for name in names):
            raise GraphError(f"{at(what)}: classes must be names, got {names!r:.80}")
        object.__setattr__(self, "classes", names)

    def check(self, channels: int, classes: int, what: str) -> None:
        """Raise GraphError unless these fit a model of this many channels and classes."""
        for name in ("mean", "deviation"):
            count = len(getattr(self, name))
            if count not in (1, channels):
                raise GraphError(f"{at(what)}: images has {count} numbers of {name}, the model {channels} channels")
        if self.classes and len(self.classes) != classes:
            raise GraphError(f"{at(what)}: images names {len(self.classes)} classes, the model has {classes}")

    def normalised(self, pixels: Array) -> Array:
        """Pixels [height, width, channels], integers of 0 to 255 or floats of 0 to 1, as float32."""
        scaled = pixels / np.float32(255) if pixels.dtype.kind in "ui" else pixels
        normalised_pixels: Array = ((scaled - np.array(self.mean)) / np.array(self.deviation)).astype(np.float32)
        return normalised_pixels


def pixels_of(picture: object, sizes: Sequence[int], what: str) -> Array:
    """A picture as an array [height, width, channels]: such an array as it is, or an image file resized to it.

    A file is cropped at its centre to the aspect ratio, as in training: see `meshlib.records.images.read_image`.
    Raises: FeedError for an array of another shape or range, a file that is not a picture; MissingError without Pillow.
    """
    height, width, channels = sizes
    if isinstance(picture, np.ndarray):
        if picture.shape == (height, width) and channels == 1:
            picture = picture[..., None]
        if picture.shape != (height, width, channels) or picture.dtype.kind not in "uif":
            raise FeedError(
                f"{what}: expected a picture of shape {[height, width, channels]}, integers of 0 to 255 or floats of 0 "
                f"to 1, got {picture.dtype} {list(picture.shape)}"
            )
        low, high = (picture.min(), picture.max()) if picture.size else (0, 0)
        most = 1 if picture.dtype.kind == "f" else 255
        if not (low >= 0 and high <= most):
            raise FeedError(
                f"{what}: the picture holds {low} to {high}; {picture.dtype} must be 0 to {most}, see mtf.ImageInput"
            )
        return picture
    if not isinstance(picture, str | os.PathLike | bytes):
        raise FeedError(
            f"{what}: expected the path of a picture, its bytes or an array, got {type(picture).__name__} "
            f"{picture!r:.80}"
        )
    if channels not in (1, 3):
        raise FeedError(f"{what}: files of pictures have 1 or 3 channels, the model {channels}; give it an array")
    try:
        return read_image(picture, (height, width), channels)
    except DataError as fault:
        raise FeedError(f"{what}: {fault}") from None
