"""Boxes: overlap, encoding relative to anchors, non-maximum suppression."""

from __future__ import annotations

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
      >>> import meshlib as mtf
      >>> mtf.detection.box_iou([[0, 0, 2, 2]], [[1, 0, 3, 2], [5, 5, 6, 6]]).round(3).tolist()  # 2 / 6
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
      >>> import meshlib as mtf
      >>> mtf.detection.encode_boxes([[0, 0, 4, 8]], [[0, 0, 4, 4]]).round(3).tolist()  # 2 to the right, twice as wide
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
    Example:
      >>> import meshlib as mtf
      >>> mtf.detection.decode_boxes([[0.0, 0.5, 0.0, 0.0]], [[0, 0, 4, 4]]).tolist()  # half a width to the right
      [[0.0, 2.0, 4.0, 6.0]]
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
      >>> import meshlib as mtf
      >>> mtf.detection.suppress([[0, 0, 4, 4], [0, 0, 4, 5], [8, 8, 9, 9]], [0.5, 0.75, 0.25]).tolist()
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
