"""Boxes: overlap, encoding relative to anchors, non-maximum suppression, and mean average precision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from meshlib.core.arguments import at, number, whole
from meshlib.core.errors import ShapeError

Array = NDArray[np.float64]
Integers = NDArray[np.int64]

# Larger exponents would give boxes of over 60 times their anchor: log(1000 / 16), as in Detectron.
LARGEST_LOG = float(np.log(1000 / 16))


def as_boxes(value: ArrayLike, what: str, argument: str) -> Array:
    """`value` as float64 [n, 4]; raises ShapeError for another shape, or boxes that end before they begin."""
    try:
        boxes = np.asarray(value, np.float64)
    except (TypeError, ValueError):
        raise ShapeError(f"{at(what)}: {argument} must be an array of numbers [n, 4], got {value!r:.80}") from None
    boxes = boxes.reshape(0, 4) if boxes.size == 0 else boxes
    if boxes.ndim != 2 or boxes.shape[1] != 4:
        raise ShapeError(f"{at(what)}: {argument} must be of shape [n, 4], got {list(boxes.shape)}")
    bad = np.flatnonzero(~(boxes[:, 2:] >= boxes[:, :2]).all(axis=1))
    if bad.size:
        raise ShapeError(
            f"{at(what)}: box {bad[0]} of {argument} is {boxes[bad[0]].tolist()}; it must be (top, left, bottom, "
            "right) with bottom >= top and right >= left"
        )
    return boxes


def as_vector(value: ArrayLike, count: int, what: str, argument: str) -> NDArray[Any]:
    """`value` as one number per box, for `count` boxes."""
    vector = np.asarray(value)
    if vector.shape != (count,) or vector.dtype.kind not in "iuf":
        raise ShapeError(
            f"{at(what)}: {argument} must be {count} numbers, one for each box, got {vector.dtype} of shape "
            f"{list(vector.shape)}"
        )
    return vector


def box_iou(a: ArrayLike, b: ArrayLike) -> Array:
    """Intersection over union of all pairs of a [n, 4] and b [m, 4]: [n, m]; 0 for boxes without area.

    Raises: ShapeError for other shapes, or boxes that end before they begin.
    Example:
      >>> box_iou([[0, 0, 2, 2]], [[1, 0, 3, 2], [5, 5, 6, 6]]).round(3).tolist()  # 2 / 6
      [[0.333, 0.0]]
    """
    first, second = as_boxes(a, "box_iou", "a"), as_boxes(b, "box_iou", "b")
    ends = np.minimum(first[:, None, 2:], second[None, :, 2:])
    starts = np.maximum(first[:, None, :2], second[None, :, :2])
    shared = np.prod(np.maximum(ends - starts, 0), axis=-1)
    areas = [np.prod(x[:, 2:] - x[:, :2], axis=-1) for x in (first, second)]
    union = areas[0][:, None] + areas[1][None, :] - shared
    overlap: Array = np.divide(shared, union, out=np.zeros_like(shared), where=union > 0)
    return overlap


def encode_boxes(boxes: ArrayLike, anchors: ArrayLike) -> Array:
    """Regression targets of a detector: [n, 4] of (dy / height, dx / width, log height ratio, log width ratio) to
    anchors.

    dy, dx: from the anchor's centre to the box's, relative to the anchor's height and width.
    Raises: ShapeError unless both are [n, 4] of positive height and width.
    Source: Girshick et al., arXiv:1311.2524, appendix C.
    Example:
      >>> encode_boxes([[0, 0, 4, 8]], [[0, 0, 4, 4]]).round(3).tolist()  # 2 to the right, twice as wide
      [[0.0, 0.5, 0.0, 0.693]]
    """
    what = "encode_boxes"
    own, base = as_boxes(boxes, what, "boxes"), as_boxes(anchors, what, "anchors")
    if own.shape != base.shape:
        raise ShapeError(f"{at(what)}: {len(own)} boxes for {len(base)} anchors; give one box for each")
    for x, name in ((own, "boxes"), (base, "anchors")):
        if not (x[:, 2:] > x[:, :2]).all():
            raise ShapeError(f"{at(what)}: {name} must have a positive height and width")
    sizes, base_sizes = own[:, 2:] - own[:, :2], base[:, 2:] - base[:, :2]
    moved = (own[:, :2] + sizes / 2 - base[:, :2] - base_sizes / 2) / base_sizes
    return np.concatenate([moved, np.log(sizes / base_sizes)], axis=1)


def decode_boxes(codes: ArrayLike, anchors: ArrayLike, image: tuple[int, int] | None = None) -> Array:
    """The boxes [n, 4] from `codes`, the inverse of `encode_boxes`; clipped to an image (height, width).

    Logarithms are clipped to log(1000 / 16). Raises: ShapeError for other shapes.
    """
    what = "decode_boxes"
    given, base = np.asarray(codes, np.float64), as_boxes(anchors, what, "anchors")
    if given.shape != base.shape:
        raise ShapeError(
            f"{at(what)}: codes must have the shape of the anchors, {list(base.shape)}, got {list(given.shape)}"
        )
    base_sizes = base[:, 2:] - base[:, :2]
    centres = base[:, :2] + base_sizes / 2 + given[:, :2] * base_sizes
    half = np.exp(np.minimum(given[:, 2:], LARGEST_LOG)) * base_sizes / 2
    boxes = np.concatenate([centres - half, centres + half], axis=1)
    return boxes if image is None else np.clip(boxes, 0, np.array([*image, *image], np.float64))


def suppress(boxes: ArrayLike, scores: ArrayLike, iou: float = 0.5, limit: int = 100) -> Integers:
    """Non-maximum suppression: indices of the boxes to keep, best first, without those overlapping a better kept one.

    Args:
      boxes: [n, 4].
      scores: [n]; ties go to the first.
      iou: largest overlap, in [0, 1].
      limit: largest number of boxes.
    Returns: indices of the kept boxes.
    Raises: ShapeError for other shapes.
    Example:
      >>> suppress([[0, 0, 4, 4], [0, 0, 4, 5], [8, 8, 9, 9]], [0.5, 0.75, 0.25]).tolist()
      [1, 2]
    """
    what = "suppress"
    own = as_boxes(boxes, what, "boxes")
    score = as_vector(scores, len(own), what, "scores")
    least, count = number(iou, what, "iou"), whole(limit, what, "limit")
    if not 0 <= least <= 1 or count < 1:
        raise ShapeError(f"{at(what)}: iou must be in [0, 1] and limit at least 1, got {least:g} and {count}")
    left = np.argsort(-score, kind="stable")
    best_boxes: list[int] = []
    while left.size and len(best_boxes) < count:
        best, left = left[0], left[1:]
        best_boxes.append(int(best))
        left = left[box_iou(own[best : best + 1], own[left])[0] <= least]
    return np.array(best_boxes, np.int64)


COCO_THRESHOLDS = tuple(float(x) for x in np.linspace(0.5, 0.95, 10))
RECALLS = np.linspace(0, 1, 101)  # recalls at which COCO reads precision


@dataclass(frozen=True)
class Objects:
    """Objects of one image: boxes [n, 4], classes [n], and scores [n] of detections (1 for ground truth).

    Example:
      >>> import meshlib as mtf
      >>> detected = mtf.detection.Objects(np.array([[0.0, 0.0, 4.0, 4.0]]), np.array([1]), np.array([0.9]))
      >>> detected.boxes.shape
      (1, 4)
    """

    boxes: Array
    classes: Integers
    scores: Array

    def __init__(self, boxes: ArrayLike, classes: ArrayLike, scores: ArrayLike | None = None) -> None:
        own = as_boxes(boxes, "Objects", "boxes")
        kinds = as_vector(np.asarray(classes, np.float64 if len(own) == 0 else None), len(own), "Objects", "classes")
        given = (
            np.ones(len(own))
            if scores is None
            else as_vector(np.asarray(scores, np.float64), len(own), "Objects", "scores")
        )
        object.__setattr__(self, "boxes", own)
        object.__setattr__(self, "classes", kinds.astype(np.int64))
        object.__setattr__(self, "scores", given.astype(np.float64))

    def __len__(self) -> int:
        return len(self.boxes)

    @staticmethod
    def joined(parts: Sequence[Objects]) -> Objects:
        """The concatenation of several sets."""
        if not parts:
            return Objects(np.zeros((0, 4)), np.zeros(0))
        rows = ([getattr(p, name) for p in parts] for name in ("boxes", "classes", "scores"))
        return Objects(*(np.concatenate(r) for r in rows))

    def best(self, limit: int) -> Objects:
        """The `limit` objects with the highest scores, best first; ties keep their order."""
        order = np.argsort(-self.scores, kind="stable")[:limit]
        return Objects(self.boxes[order], self.classes[order], self.scores[order])

    def of_class(self, kind: int) -> Objects:
        """The objects of one class."""
        own = self.classes == kind
        return Objects(self.boxes[own], self.classes[own], self.scores[own])


def average_precision(found: Sequence[Objects], true: Sequence[Objects], kind: int, iou: float = 0.5) -> float:
    """Average precision of one class: the mean over recalls 0, 0.01, ..., 1 of the best precision at that recall or
    more.

    Detections of all images are ordered by score. Each matches the unmatched true object of its image with the largest
    overlap, if that is at least `iou`; otherwise it is a false positive.

    Args:
      found, true: detections and ground truth per image.
      kind: the class.
      iou: threshold of intersection over union.
    Returns: in [0, 1]; NaN if there is no true object of the class.
    Raises: ShapeError for unequal numbers of images.
    Source: COCO: https://cocodataset.org/#detection-eval, without its crowds and sizes.
    Example:
      >>> truth = [Objects([[0, 0, 4, 4], [8, 8, 12, 12]], [0, 0])]
      >>> found = [Objects([[0, 0, 4, 4], [20, 20, 24, 24]], [0, 0], [0.75, 0.5])]
      >>> round(average_precision(found, truth, 0), 3)  # precision 1 up to recall 1/2, then 0: 51 of 101
      0.505
    """
    what = "average_precision"
    least = number(iou, what, "iou")
    if len(found) != len(true):
        raise ShapeError(f"{at(what)}: detected objects of {len(found)} images, but true objects of {len(true)}")
    count = sum(int((t.classes == kind).sum()) for t in true)
    if not count:
        return float("nan")
    scores, right = [np.zeros(0)], [np.zeros(0, bool)]
    for f, t in zip(found, true, strict=True):
        own = f.of_class(kind)
        own = own.best(len(own))
        scores.append(own.scores)
        right.append(_matched(own, t.of_class(kind), least))
    order = np.argsort(-np.concatenate(scores), kind="stable")
    hits = np.cumsum(np.concatenate(right)[order])
    precision = hits / np.arange(1, len(hits) + 1)
    best_from_here = np.maximum.accumulate(precision[::-1])[::-1]
    # The first detection with this recall; hits are integers, so that rounding can't shift it.
    places = np.searchsorted(hits, np.ceil(RECALLS * count - 1e-9), side="left")
    return float(np.append(best_from_here, 0.0)[places].mean())


def mean_average_precision(
    found: Sequence[Objects], true: Sequence[Objects], iou: float | Sequence[float] = 0.5
) -> float:
    """Mean of `average_precision` over the classes of true objects, and over thresholds.

    Args:
      found, true: detections and ground truth per image.
      iou: one threshold, or several, such as `COCO_THRESHOLDS`.
    Raises: ShapeError for unequal numbers of images, or no true object.
    """
    thresholds = [iou] if isinstance(iou, int | float) else list(iou)
    kinds = sorted({int(k) for t in true for k in t.classes})
    if not kinds or not thresholds:
        raise ShapeError(f"{at('mean_average_precision')}: needs at least one true object and one threshold")
    return float(np.mean([[average_precision(found, true, k, least) for k in kinds] for least in thresholds]))


def _matched(detected: Objects, true: Objects, least: float) -> NDArray[np.bool_]:
    """Bool per detection, best first: True if it matches a true object that no better one has matched."""
    overlaps = box_iou(detected.boxes, true.boxes)
    is_match = np.zeros(len(detected), bool)
    for n in range(len(detected) if len(true) else 0):
        best_true = int(overlaps[n].argmax())
        if overlaps[n, best_true] >= least and overlaps[n, best_true] > 0:
            is_match[n] = True
            overlaps[:, best_true] = -1.0
    return is_match
