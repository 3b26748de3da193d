"""Drawn shapes and scenes are what they say; folders and IDX files are read; faults are named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from meshlib.core.errors import DataError
from meshlib.data.samples import CLASSES, draw_scenes, draw_shapes
from meshlib.data.samples import drawn_shapes as drawn_images
from meshlib.data.samples import image_folders as image_data
from tests.paths import SHARED

MNIST = SHARED / "data" / "mnist"


def test_shapes_are_the_same_for_a_seed_and_of_all_classes() -> None:
    images, labels = draw_shapes(40, 24, seed=3)
    again, _ = draw_shapes(40, 24, seed=3)
    other, _ = draw_shapes(40, 24, seed=4)
    np.testing.assert_array_equal(images, again)
    assert np.abs(images - other).max() > 0.5
    assert (images.shape, images.dtype, labels.dtype) == ((40, 24, 24, 3), np.float32, np.int32)
    assert np.bincount(labels).tolist() == [4] * len(CLASSES)
    assert 0 <= images.min() <= images.max() <= 1
    np.testing.assert_allclose(images * 255, np.rint(images * 255), atol=1e-4)


@pytest.mark.parametrize("name", CLASSES)
def test_a_shape_differs_from_all_others_under_any_turn(name: str) -> None:
    """Outlines at the same size and any angle: no two classes cover nearly the same pixels."""
    y, x = np.indices((48, 48)) / 24 - 1 + 1 / 48
    own = drawn_images.SHAPES[name](x, y) > 0
    assert own.any()
    for other in CLASSES:
        for angle in np.arange(24) * np.pi / 12 if other != name else ():
            turned = x * np.cos(angle) + y * np.sin(angle), y * np.cos(angle) - x * np.sin(angle)
            there = drawn_images.SHAPES[other](*turned) > 0
            assert (own ^ there).sum() > 0.1 * (own | there).sum(), (name, other)


def test_boxes_hold_what_was_drawn() -> None:
    """In a scene without noise what changes when an object is painted is its box."""
    rng = np.random.default_rng(0)
    for label in range(len(CLASSES)):
        canvas = np.full((40, 40, 3), 0.5)
        box = drawn_images._paint(rng, canvas, label, np.array([19.3, 22.1]), 11.0)
        changed = np.abs(canvas - 0.5).max(axis=-1)
        strong = changed >= changed.max() / 2 - 1e-9
        rows, columns = np.flatnonzero(strong.any(axis=1)), np.flatnonzero(strong.any(axis=0))
        assert box.tolist() == [rows[0], columns[0], rows[-1] + 1, columns[-1] + 1]
    scenes = draw_scenes(30, 48, seed=1, most=4, kinds=5)
    assert {len(b) for b in scenes.boxes} >= {1, 2, 3}
    for boxes, classes in zip(scenes.boxes, scenes.classes, strict=True):
        assert len(boxes) == len(classes) >= 1
        assert classes.max() < 5
        assert boxes.min() >= 0
        assert boxes.max() <= 48
        assert (boxes[:, 2:] - boxes[:, :2]).min() >= 3


def test_a_folder_of_classes(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="pictures need Pillow")
    for kind, colour in (("blue", (0, 0, 255)), ("red", (255, 0, 0))):
        (tmp_path / kind).mkdir()
        for n in range(5):
            pixels = np.zeros((20, 30, 3), np.uint8)
            pixels[:, 2:28] = colour  # the middle square, and what its edge is blended with
            image.fromarray(pixels).save(tmp_path / kind / f"{n}.png")
    (tmp_path / "red" / "notes.txt").write_text("no picture")
    found = image_data.load_images(tmp_path, side=8)
    assert found.classes == ("blue", "red")
    assert (len(found.train_images), len(found.test_images)) == (8, 2)
    assert "2 classes, 8 train, 2 test" in found.source
    for picture, label in zip(found.train_images, found.train_labels, strict=True):
        np.testing.assert_array_equal(picture, np.broadcast_to([label, 0, 1 - label], (8, 8, 3)))
    for part in ("train", "val"):
        for kind in ("blue", "red"):
            (tmp_path / "split" / part).mkdir(parents=True, exist_ok=True)
            (tmp_path / "split" / part / kind).symlink_to(tmp_path / kind)
    parted = image_data.load_images(tmp_path / "split", side=8)
    assert (len(parted.train_images), len(parted.test_images)) == (10, 10)
    normal = parted.normalised(parted.train_images)
    np.testing.assert_allclose(normal.mean(axis=(0, 1, 2)), 0, atol=1e-5)
    np.testing.assert_allclose(normal.std(axis=(0, 1, 2))[[0, 2]], 1, rtol=1e-4)


@pytest.mark.skipif(not MNIST.is_dir(), reason="the MNIST files are not beside this checkout")
def test_idx_files_are_squares_of_one_channel() -> None:
    found = image_data.load_images(MNIST)
    assert found.train_images.shape == (8000, 28, 28, 1)
    assert found.classes == tuple("0123456789")


def test_faults_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nothing there"):
        image_data.load_images(tmp_path / "none")
    with pytest.raises(DataError, match="one for each class; found an empty folder"):
        image_data.load_images(tmp_path)
    pytest.importorskip("PIL.Image", reason="pictures need Pillow")
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "a.png").write_bytes(b"no png")
    with pytest.raises(DataError, match=r"a\.png: expected a picture"):
        image_data.load_images(tmp_path)
