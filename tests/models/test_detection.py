"""Anchors, boxes, suppression and average precision against slow loops written apart; messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import meshlib as mtf
from meshlib.models.images import detection
from meshlib.models.images.detection import Anchors, Objects
from tests.effort import draws

Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(8)


def boxes(count: int, rng: np.random.Generator, size: float = 20.0) -> Array:
    corner, sides = rng.uniform(0, size, (count, 2)), rng.uniform(1, size, (count, 2))
    return np.concatenate([corner, corner + sides], axis=1)


def iou(a: Array, b: Array) -> float:
    height = min(a[2], b[2]) - max(a[0], b[0])
    width = min(a[3], b[3]) - max(a[1], b[1])
    shared = max(height, 0) * max(width, 0)
    union = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - shared
    return shared / union if union else 0.0


def test_overlaps_and_codes() -> None:
    a, b = boxes(12, RNG), boxes(9, RNG)
    np.testing.assert_allclose(detection.box_iou(a, b), [[iou(x, y) for y in b] for x in a], rtol=1e-12)
    assert detection.box_iou(np.zeros((2, 4)), b).max() == 0
    codes = detection.encode_boxes(a[:9], b)
    for code, box, base in zip(codes, a, b, strict=False):
        height, width = base[2] - base[0], base[3] - base[1]
        assert code[0] == pytest.approx(((box[0] + box[2]) / 2 - (base[0] + base[2]) / 2) / height)
        assert code[1] == pytest.approx(((box[1] + box[3]) / 2 - (base[1] + base[3]) / 2) / width)
        assert np.exp(code[2:]) == pytest.approx([(box[2] - box[0]) / height, (box[3] - box[1]) / width])
    np.testing.assert_allclose(detection.decode_boxes(codes, b), a[:9], rtol=1e-12)
    assert detection.decode_boxes(codes, b, (10, 5)).max(axis=0).tolist() == [10, 5, 10, 5]


def test_anchors_are_where_the_paper_has_them() -> None:
    anchors = Anchors(40, 72, levels=(3, 5), scales=(1.0, 1.5), ratios=(0.5, 2.0))
    wanted = []
    for level in (3, 5):
        stride = 2**level
        for row in range(-(-40 // stride)):
            for column in range(-(-72 // stride)):
                for scale in (1.0, 1.5):
                    for ratio in (0.5, 2.0):
                        side = 4 * stride * scale
                        height, width = side * ratio**0.5, side / ratio**0.5
                        y, x = (row + 0.5) * stride, (column + 0.5) * stride
                        wanted.append([y - height / 2, x - width / 2, y + height / 2, x + width / 2])
    np.testing.assert_allclose(anchors.boxes, wanted, rtol=1e-12)
    assert anchors.each == 4
    # RetinaNet at 640 pixels: the number that is published for it.
    assert len(Anchors(640, 640).boxes) == 76_725


def test_targets_of_anchors() -> None:
    anchors = Anchors(64, 48, levels=(3, 4), base=2.0)
    for _ in range(draws(5, 100)):
        truth = boxes(int(RNG.integers(1, 5)), RNG, 24.0)
        kinds = RNG.integers(0, 3, len(truth))
        made = anchors.targets(truth, kinds)
        forced = {}
        for n, box in enumerate(truth):
            overlaps = [iou(a, box) for a in anchors.boxes]
            forced[int(np.argmax(overlaps))] = n
        objects = 0
        for place, anchor in enumerate(anchors.boxes):
            overlaps = [iou(anchor, box) for box in truth]
            best = forced.get(place, int(np.argmax(overlaps)))
            if place in forced or max(overlaps) >= 0.5:
                objects += 1
                assert made.classes[place] == kinds[best]
                decoded = detection.decode_boxes(made.codes[place : place + 1], anchors.boxes[place : place + 1])[0]
                np.testing.assert_allclose(decoded, truth[best], rtol=1e-9)
            else:
                assert made.classes[place] == (-2 if max(overlaps) >= 0.4 else -1)
                assert not made.codes[place].any()
        assert made.objects == objects >= len(set(forced))
    assert anchors.targets([], []).classes.tolist() == [-1] * len(anchors.boxes)


def test_suppression() -> None:
    for _ in range(draws(20, 500)):
        own, scores = boxes(int(RNG.integers(0, 20)), RNG), None
        scores = RNG.integers(0, 5, len(own)) / 4  # with ties
        kept: list[int] = []
        for n in sorted(range(len(own)), key=lambda n: (-scores[n], n)):
            if all(iou(own[n], own[k]) <= 0.3 for k in kept):
                kept.append(n)
        assert detection.suppress(own, scores, 0.3).tolist() == kept
        assert detection.suppress(own, scores, 0.3, 3).tolist() == kept[:3]


def slow_precision(found: list[Objects], true: list[Objects], kind: int, least: float) -> float:
    """Precision and recall counted anew for each number of found objects that count."""
    ranked = sorted(
        (-f.scores[n], image, n) for image, f in enumerate(found) for n in range(len(f)) if f.classes[n] == kind
    )
    total = sum(int(k == kind) for t in true for k in t.classes)
    points = []
    for upto in range(1, len(ranked) + 1):
        taken, hits = set(), 0
        for _, image, n in ranked[:upto]:
            rivals = [
                (iou(found[image].boxes[n], true[image].boxes[m]), -m)
                for m in range(len(true[image]))
                if true[image].classes[m] == kind and (image, m) not in taken
            ]
            if rivals and max(rivals)[0] >= least:
                taken.add((image, -max(rivals)[1]))
                hits += 1
        points.append((hits / total, hits / upto))
    return sum(max([p for r, p in points if r >= n / 100 - 1e-12], default=0.0) for n in range(101)) / 101


def test_average_precision() -> None:
    for _ in range(draws(8, 200)):
        true = [Objects(boxes(n, RNG), RNG.integers(0, 2, n)) for n in RNG.integers(1, 6, 3)]
        found = []
        for t in true:
            near = t.boxes + RNG.normal(0, 1.0, t.boxes.shape)
            near = np.concatenate([near[:, :2], np.maximum(near[:, 2:], near[:, :2] + 0.5)], axis=1)
            drawn = np.concatenate([near, near[:2] + 0.25, boxes(2, RNG)])
            kinds = RNG.integers(0, 2, len(drawn))
            kinds[: len(t)] = t.classes
            found.append(Objects(drawn, kinds, RNG.permutation(len(drawn)) / 10 + RNG.random() / 20))
        kinds_there = sorted({int(k) for t in true for k in t.classes})
        wanted = {k: {x: slow_precision(found, true, k, x) for x in (0.5, 0.75)} for k in kinds_there}
        for k, values in wanted.items():
            for least, value in values.items():
                assert detection.average_precision(found, true, k, least) == pytest.approx(value, abs=1e-12)
        mean = np.mean([list(v.values()) for v in wanted.values()])
        assert detection.mean_average_precision(found, true, (0.5, 0.75)) == pytest.approx(mean)
    assert np.isnan(detection.average_precision(found, true, 7))
    assert detection.mean_average_precision(true, true, detection.COCO_THRESHOLDS) == 1.0


def test_what_a_perfect_detector_says_is_decoded_to_the_truth() -> None:
    anchors = Anchors(64, 64, levels=(3, 4, 5))
    truth = Objects([[4, 4, 30, 40], [36, 20, 60, 60]], [1, 0])
    made = anchors.targets(truth.boxes, truth.classes)
    scores = np.zeros((len(anchors.boxes), 2))
    on = made.classes >= 0
    scores[on, made.classes[on]] = np.linspace(0.6, 0.9, on.sum())
    found = anchors.decode(scores, made.codes)
    assert len(found) == 2
    assert detection.mean_average_precision([found], [truth], 0.99) == 1.0


MESSAGES: list[tuple[Callable[[], object], str]] = [
    (lambda: detection.box_iou([[0, 0, 1]], [[0, 0, 1, 1]]), r"a must be of shape \[n, 4\], got \[1, 3\]"),
    (lambda: detection.box_iou("boxes", [[0, 0, 1, 1]]), "must be an array of numbers"),
    (lambda: detection.box_iou([[2, 0, 1, 1]], []), r"box 0 of a is \[2.0, 0.0, 1.0, 1.0\]"),
    (lambda: detection.encode_boxes([[0, 0, 1, 1]], np.ones((2, 4))), "1 boxes for 2 anchors"),
    (lambda: detection.encode_boxes([[0, 0, 1, 0]], [[0, 0, 1, 1]]), "positive height and width"),
    (
        lambda: detection.decode_boxes(np.zeros((3, 4)), [[0, 0, 1, 1]]),
        r"codes must have the shape of the anchors, \[1, 4\]",
    ),
    (lambda: detection.suppress([[0, 0, 1, 1]], [1.0, 2.0]), "scores must be 1 numbers"),
    (lambda: detection.suppress([[0, 0, 1, 1]], [1.0], 2.0), r"iou must be in \[0, 1\]"),
    (lambda: Anchors(0, 8), "must be positive"),
    (lambda: Anchors(8, 8, levels=()), "none of them empty"),
    (lambda: Anchors(8, 8).targets([[0, 0, 1, 1]], []), "classes must be 1 numbers"),
    (lambda: Anchors(8, 8).decode(np.zeros((3, 2)), np.zeros((3, 4))), r"scores must be \[45, classes\]"),
    (lambda: detection.average_precision([], [Objects([], [])], 0), "0 images, but true objects of 1"),
    (lambda: detection.mean_average_precision([], []), "at least one true object"),
]


@pytest.mark.parametrize(("call", "words"), MESSAGES)
def test_messages(call: Callable[[], object], words: str) -> None:
    with pytest.raises(mtf.MeshlibError, match=words) as raised:
        call()
    assert "test_detection.py:" in str(raised.value)
