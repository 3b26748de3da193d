"""Labelled images: a folder of images by class, MNIST's IDX files, or drawn shapes.

A folder has one subfolder per class, of .png and .jpg files; or such folders under `train` and `test` (or `val`).
Otherwise a fifth of the images is held out for testing. Requires Pillow, the extra `images`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import einops
import numpy as np
from numpy.typing import NDArray

from meshlib.core.errors import DataError
from meshlib.data.samples.drawn_shapes import CLASSES, draw_shapes
from meshlib.data.samples.mnist_digits import SIDE, load_digits
from meshlib.records import images as pictures

Images = NDArray[np.float32]
Labels = NDArray[np.int32]

DRAWN_TRAIN = 8_000


@dataclass(frozen=True)
class ImageData:
    """Images float32 [n, height, width, channels] in 0..1, with labels int32 [n], indices into `classes`."""

    train_images: Images
    train_labels: Labels
    test_images: Images
    test_labels: Labels
    classes: tuple[str, ...]
    source: str

    def normalised(self, images: Images) -> Images:
        """Images scaled so that the training set's channels have mean 0 and standard deviation 1."""
        sample = self.train_images[:2000]
        mean = einops.reduce(sample, "n height width c -> c", "mean")
        deviation = np.sqrt(einops.reduce((sample - mean) ** 2, "n height width c -> c", "mean"))
        scaled: Images = (images - mean) / np.maximum(deviation, np.float32(1e-3))
        return scaled


def load_images(data: str | Path | None, side: int = 32, seed: int = 0, count: int | None = None) -> ImageData:
    """The images of a folder, of IDX files, or drawn ones without a folder.

    Args:
      data: folder of classes, or of IDX files; None: `$MESHLIB_IMAGES`, otherwise drawn shapes.
      side: size of drawn images, and to which images of a folder are resized; IDX files keep theirs.
      seed: of drawn images, and of the split of a folder without a test set.
      count: number of drawn training images, by default 8,000; a quarter as many for testing.
    Raises: DataError with expected and actual content.
    """
    folder = data if data is not None else os.environ.get("MESHLIB_IMAGES")
    if folder:
        path = Path(folder).expanduser()
        if not path.is_dir():
            raise DataError(f"{path}: expected a folder of images or IDX files, found {_what(path)}")
        has_idx = any("idx" in name.name for name in path.iterdir() if name.is_file())
        return _idx(path, seed) if has_idx else _folder(path, side, seed)
    train = DRAWN_TRAIN if count is None else count
    test = max(train // 4, 1)
    images, labels = draw_shapes(train + test, side, seed)
    source = f"shapes drawn by the program with seed {seed}: {train} train, {test} test"
    return ImageData(images[:train], labels[:train], images[train:], labels[train:], CLASSES, source)


def read_image(path: str | Path, side: int, channels: int = 3) -> Images:
    """An image as float32 [side, side, channels] in 0..1: its central square, resized.

    Raises: DataError if it is not an image, MissingError if Pillow is not installed.
    """
    return pictures.read_image(path, (side, side), channels).astype(np.float32) / np.float32(255)


def _idx(path: Path, seed: int) -> ImageData:
    digits = load_digits(path, seed=seed)

    def square(images: NDArray[Any]) -> Images:
        return einops.rearrange(images, "n (height width) -> n height width 1", height=SIDE)

    classes = tuple(str(n) for n in range(int(digits.train_labels.max()) + 1))
    train, test = square(digits.train_images), square(digits.test_images)
    return ImageData(train, digits.train_labels, test, digits.test_labels, classes, digits.source)


def _folder(path: Path, side: int, seed: int) -> ImageData:
    inside = {p.name: p for p in sorted(path.iterdir()) if p.is_dir()}
    tested = next((inside[name] for name in ("test", "val", "validation") if name in inside), None)
    if tested is not None and "train" in inside:
        classes = tuple(sorted(p.name for p in inside["train"].iterdir() if p.is_dir()))
        train, test = (_read_classes(part, classes, side) for part in (inside["train"], tested))
    else:
        classes = tuple(inside)
        images, labels = _read_classes(path, classes, side)
        order = np.random.default_rng(seed).permutation(len(labels))
        first, rest = np.split(order, [len(order) * 4 // 5])
        train, test = (images[first], labels[first]), (images[rest], labels[rest])
    if not len(train[1]) or not len(test[1]):
        raise DataError(f"{path}: expected images to train and to test on, found {len(train[1])} and {len(test[1])}")
    source = f"images in {path}: {len(classes)} classes, {len(train[1])} train, {len(test[1])} test"
    return ImageData(*train, *test, classes, source)


def _read_classes(path: Path, classes: Sequence[str], side: int) -> tuple[Images, Labels]:
    files = [
        (name, number)
        for number, kind in enumerate(classes)
        for name in sorted((path / kind).glob("*"))
        if name.suffix.lower() in pictures.IMAGE_ENDINGS
    ]
    if not files:
        kinds = " ".join(pictures.IMAGE_ENDINGS)
        raise DataError(f"{path}: expected folders of {kinds} files, one for each class; found {_what(path)}")
    images = np.stack([read_image(name, side) for name, _ in files])
    return images, np.array([number for _, number in files], np.int32)


def _what(path: Path) -> str:
    if not path.exists():
        return "nothing there"
    return ", ".join(sorted(os.listdir(path))[:8]) or "an empty folder" if path.is_dir() else "a file"
