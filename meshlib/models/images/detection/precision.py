"""Mean average precision of detected boxes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from meshlib.core.arguments import at, number
from meshlib.core.errors import ShapeError
from meshlib.models.images.detection.boxes import Array, Integers, as_boxes, as_vector, box_iou

COCO_THRESHOLDS = tuple(float(x) for x in np.linspace(0.5, 0.95, 10))
RECALLS = np.linspace(0, 1, 101)  # recalls at which COCO reads precision


@dataclass(frozen=True)
class Objects:
    """Objects of one image: boxes [n, 4], classes [n], and scores [n] of detections (1 for ground truth).

    Example:
      >>> import numpy as np
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
      >>> import meshlib as mtf
      >>> truth = [mtf.detection.Objects([[0, 0, 4, 4], [8, 8, 12, 12]], [0, 0])]
      >>> found = [mtf.detection.Objects([[0, 0, 4, 4], [20, 20, 24, 24]], [0, 0], [0.75, 0.5])]
      >>> round(mtf.detection.average_precision(found, truth, 0), 3)  # precision 1 up to recall 1/2, then 0: 51 of 101
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
    Example:
      >>> import meshlib as mtf
      >>> truth = [mtf.detection.Objects([[0, 0, 4, 4], [8, 8, 12, 12]], [0, 1])]
      >>> mtf.detection.mean_average_precision([mtf.detection.Objects([[0, 0, 4, 4]], [0], [0.75])], truth)  # 1 and 0
      0.5
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
