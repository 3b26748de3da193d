"""Labelled images: a folder of images by class, MNIST's IDX files, or drawn shapes of ten classes.

A folder has one subfolder per class, of .png and .jpg files; or such folders under `train` and `test` (or `val`).
Otherwise a fifth of the images is held out for testing. Requires Pillow, the extra `images`.

Each drawn shape has a random colour and pose (position, size, angle, stretch), on a shaded, noisy background; only its
outline determines its class. The same seed gives the same images.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import einops
import numpy as np
from numpy.typing import NDArray

from meshlib.core.errors import DataError
from meshlib.data.samples.mnist_digits import SIDE, load_digits
from meshlib.records import images as pictures

Array = NDArray[np.float64]
Images = NDArray[np.float32]
Labels = NDArray[np.int32]
Outline = Callable[[Array, Array], Array]  # (x, y) in radii of the shape -> depth inside, negative outside

NOISE = 0.06  # standard deviation of pixel noise, relative to full brightness
DRAWN_TRAIN = 8_000


def _polygon(corners: int) -> Outline:
    """A regular polygon with its first corner at the right."""
    angles = (np.arange(corners) + 0.5) * 2 * np.pi / corners

    def inside(x: Array, y: Array) -> Array:
        reach = [x * np.cos(a) + y * np.sin(a) for a in angles]
        depth_inside: Array = np.cos(np.pi / corners) - np.maximum.reduce(reach)
        return depth_inside

    return inside


def _star(points: int, depth: float, sharp: bool) -> Outline:
    """An outline whose radius oscillates around the centre, in straight lines or waves."""

    def inside(x: Array, y: Array) -> Array:
        turn = np.arctan2(y, x) * points / (2 * np.pi)
        wave = 1 - 2 * np.abs(turn - np.round(turn)) if sharp else 0.5 + 0.5 * np.cos(2 * np.pi * turn)
        depth_inside: Array = 1 - depth * (1 - wave) - np.hypot(x, y)
        return depth_inside * 0.6  # the edge is slanted: nearer than along the radius

    return inside


def _disc(x: Array, y: Array) -> Array:
    depth_inside: Array = 1 - np.hypot(x, y)
    return depth_inside


SHAPES: dict[str, Outline] = {
    "disc": _disc,
    "ring": lambda x, y: np.minimum(_disc(x, y), np.hypot(x, y) - 0.5),
    "crescent": lambda x, y: np.minimum(_disc(x, y), np.hypot(x - 0.5, y) - 0.75),
    "half": lambda x, y: np.minimum(_disc(x, y), x + 0.1),
    "triangle": _polygon(3),
    "square": _polygon(4),
    "frame": lambda x, y: np.minimum(_polygon(4)(x, y), 0.3 - _polygon(4)(x, y)),
    "cross": lambda x, y: np.maximum(
        np.minimum(0.28 - np.abs(x), 0.95 - np.abs(y)), np.minimum(0.28 - np.abs(y), 0.95 - np.abs(x))
    ),
    "star": _star(5, 0.6, sharp=True),
    "clover": _star(3, 0.55, sharp=False),
}
CLASSES = tuple(SHAPES)


@dataclass(frozen=True)
class Scenes:
    """Images [n, side, side, 3] in 0..1, with the boxes [m, 4] (top, left, bottom, right) and classes [m] of each."""

    images: Images
    boxes: tuple[Array, ...]
    classes: tuple[NDArray[np.int64], ...]


def draw_shapes(count: int, side: int = 32, seed: int = 0) -> tuple[Images, Labels]:
    """One shape per image, classes evenly distributed: [count, side, side, 3] in 0..1, classes [count]."""
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.arange(count) % len(CLASSES)).astype(np.int32)
    images = np.empty((count, side, side, 3), np.float32)
    for image, label in zip(images, labels, strict=True):
        canvas = _ground(rng, side)
        radius = rng.uniform(0.26, 0.42) * side
        centre = side / 2 + rng.uniform(-0.14, 0.14, 2) * side
        _paint(rng, canvas, int(label), centre, radius)
        image[...] = _with_noise(rng, canvas)
    return images, labels


def draw_scenes(count: int, side: int = 64, seed: int = 0, most: int = 3, kinds: int = len(CLASSES)) -> Scenes:
    """Scenes of 1 to `most` shapes of the first `kinds` classes, whose boxes overlap by at most a tenth of their
    area."""
    rng = np.random.default_rng(seed)
    images = np.empty((count, side, side, 3), np.float32)
    boxes, classes = [], []
    for image in images:
        canvas, own, names = _ground(rng, side), np.zeros((0, 4)), []
        for _ in range(int(rng.integers(1, most + 1))):
            label = int(rng.integers(kinds))
            radius = rng.uniform(0.1, 0.24) * side
            centre = rng.uniform(radius, side - radius, 2)
            trial = canvas.copy()
            box = _paint(rng, trial, label, centre, radius)
            if len(own) and _largest_overlap(box, own) > 0.1:
                continue
            canvas, own = trial, np.concatenate([own, box[None]])
            names.append(label)
        image[...] = _with_noise(rng, canvas)
        boxes.append(own)
        classes.append(np.array(names, np.int64))
    return Scenes(images, tuple(boxes), tuple(classes))


def _ground(rng: np.random.Generator, side: int) -> Array:
    """A colour gradient over the image."""
    angle = rng.uniform(0, 2 * np.pi)
    y, x = np.indices((side, side)) / side - 0.5
    share = (0.5 + x * np.cos(angle) + y * np.sin(angle)).clip(0, 1)[..., None]
    first, second = rng.uniform(0, 1, (2, 3))
    mixture: Array = first * share + second * (1 - share)
    return mixture


def _paint(rng: np.random.Generator, canvas: Array, label: int, centre: Array, radius: float) -> Array:
    """Draw a shape onto the canvas; returns its box, the pixels that it covers at least half."""
    angle, stretch = rng.uniform(0, 2 * np.pi), rng.uniform(0.8, 1.25)
    y, x = (np.indices(canvas.shape[:2]) + 0.5 - centre[:, None, None]) / radius
    across, along = x * np.cos(angle) + y * np.sin(angle), y * np.cos(angle) - x * np.sin(angle)
    depth = SHAPES[CLASSES[label]](across * stretch**0.5, along / stretch**0.5)
    cover = np.clip(0.5 + depth * radius, 0, 1)[..., None]
    ground = (canvas * cover).sum(axis=(0, 1)) / cover.sum()
    while True:  # a colour distinct from the background
        colour = rng.uniform(0, 1, 3)
        if np.abs(colour - ground).max() > 0.35:
            break
    canvas[...] = canvas * (1 - cover) + colour * cover
    rows, columns = (np.flatnonzero((cover[..., 0] >= 0.5).any(axis=axis)) for axis in (1, 0))
    return np.array([rows[0], columns[0], rows[-1] + 1, columns[-1] + 1], np.float64)


def _largest_overlap(box: Array, others: Array) -> float:
    """Largest overlap with other boxes, relative to the smaller box."""
    shared = np.minimum(box[2:], others[:, 2:]) - np.maximum(box[:2], others[:, :2])
    area, areas = np.prod(box[2:] - box[:2]), np.prod(others[:, 2:] - others[:, :2], axis=1)
    return float((np.prod(np.maximum(shared, 0), axis=1) / np.minimum(area, areas)).max())


def _with_noise(rng: np.random.Generator, canvas: Array) -> Any:
    """Images with noise added, quantised to 1/255 as in an image file."""
    noisy = canvas + rng.normal(0, NOISE, canvas.shape)
    return np.rint(255 * noisy.clip(0, 1)) / 255


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
