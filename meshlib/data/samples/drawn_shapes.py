"""Drawn images: shapes of ten classes, alone or several in a scene with boxes.

Each shape has a random colour and pose (position, size, angle, stretch), on a shaded, noisy background; only its
outline determines its class. The same seed gives the same images.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Images = NDArray[np.float32]
Labels = NDArray[np.int32]
Outline = Callable[[Array, Array], Array]  # (x, y) in radii of the shape -> depth inside, negative outside

NOISE = 0.06  # standard deviation of pixel noise, relative to full brightness


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
