"""Anchors of a feature pyramid, and their targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

from meshlib.core.arguments import at, number, whole
from meshlib.core.errors import ShapeError
from meshlib.models.images.detection.boxes import (
    Array,
    Integers,
    as_boxes,
    as_vector,
    box_iou,
    decode_boxes,
    encode_boxes,
    suppress,
)
from meshlib.models.images.detection.precision import Objects

NOTHING, UNDECIDED = -1, -2  # classes of anchors without an object, and of ignored ones


@dataclass(frozen=True)
class Targets:
    """Targets of anchors: classes [n] (-1: background, -2: ignored), and codes [n, 4] of the box (0 without one).

    Example:
      >>> import numpy as np
      >>> import meshlib as mtf
      >>> targets = mtf.detection.Targets(np.array([1, -1]), np.zeros((2, 4)))
      >>> int((targets.classes >= 0).sum())
      1
    """

    classes: Integers
    codes: Array

    @property
    def objects(self) -> int:
        """The number of anchors with an object, by which losses are divided."""
        return int((self.classes >= 0).sum())


@dataclass(frozen=True)
class Anchors:
    """The anchors of an image at each level l of a pyramid, whose positions are 2^l pixels apart.

    Each position has one anchor per scale and ratio, with area (base * scale * 2^l)^2 and height / width = ratio.

    Args:
      height, width: size of the image in pixels.
      levels: levels of the pyramid; level l has ceil(height / 2^l) rows.
      scales: relative scales per octave.
      ratios: heights over widths.
      base: side of an anchor of scale and ratio 1, relative to the distance of positions.
    Raises: ShapeError for sizes that are not positive.
    Source: Lin et al. (RetinaNet), arXiv:1708.02002, section 4.
    Example:
      >>> import meshlib as mtf
      >>> anchors = mtf.detection.Anchors(64, 64, levels=(3, 4), scales=(1.0,), ratios=(1.0,))
      >>> anchors.boxes.shape, anchors.boxes[0].tolist()  # 8 x 8 + 4 x 4 of them, the first 32 wide around (4, 4)
      ((80, 4), [-12.0, -12.0, 20.0, 20.0])
    """

    height: int
    width: int
    levels: Sequence[int] = (3, 4, 5, 6, 7)
    scales: Sequence[float] = (1.0, 2 ** (1 / 3), 2 ** (2 / 3))
    ratios: Sequence[float] = (0.5, 1.0, 2.0)
    base: float = 4.0

    def __post_init__(self) -> None:
        what = "Anchors"
        sizes = [whole(n, what, "height and width") for n in (self.height, self.width)]
        levels = [whole(n, what, "each level") for n in self.levels]
        rest = [number(x, what, "scales, ratios and base") for x in (*self.scales, *self.ratios, self.base)]
        if min(sizes) < 1 or not levels or min(levels) < 0 or not self.scales or not self.ratios or min(rest) <= 0:
            raise ShapeError(
                f"{at(what)}: sizes, scales, ratios and base must be positive, levels not negative, none of them "
                f"empty; got {self}"
            )

    @property
    def each(self) -> int:
        """The number of anchors per position."""
        return len(self.scales) * len(self.ratios)

    def places(self, level: int) -> tuple[int, int]:
        """Rows and columns of the feature map of a level."""
        return -(-self.height // 2**level), -(-self.width // 2**level)

    @cached_property
    def boxes(self) -> Array:
        """All anchors [n, 4], by level, row, column, scale, ratio: the order of a head's merged outputs."""
        roots = np.sqrt(np.array(self.ratios, np.float64))
        sides = np.stack([roots, 1 / roots], axis=-1)  # height, width of each ratio
        sizes = (np.array(self.scales)[:, None, None] * sides * self.base).reshape(-1, 2)
        boxes_of_levels = []
        for level in self.levels:
            rows, columns = self.places(level)
            centres = (np.indices((rows, columns)).transpose(1, 2, 0).reshape(-1, 1, 2) + 0.5) * 2**level
            half = sizes[None] * 2**level / 2
            boxes_of_levels.append(np.concatenate([centres - half, centres + half], axis=-1).reshape(-1, 4))
        return np.concatenate(boxes_of_levels)

    def targets(self, boxes: ArrayLike, classes: ArrayLike, positive: float = 0.5, negative: float = 0.4) -> Targets:
        """The targets of each anchor for the objects of an image.

        The target is the object with the largest overlap, if it is at least `positive`; background, if it is below
        `negative`; in between the anchor is ignored. The anchors with the largest overlap of an object always get it,
        so that no object is missed.

        Args:
          boxes: [m, 4].
          classes: [m] of integers from 0.
          positive, negative: thresholds of intersection over union.
        Raises: ShapeError for shapes that do not fit.
        """
        what = "Anchors.targets"
        own = as_boxes(boxes, what, "boxes")
        kinds = as_vector(classes, len(own), what, "classes").astype(np.int64)
        target_classes = np.full(len(self.boxes), NOTHING, np.int64)
        codes = np.zeros((len(self.boxes), 4))
        if not len(own):
            return Targets(target_classes, codes)
        overlaps = box_iou(self.boxes, own)
        best, most = overlaps.argmax(axis=1), overlaps.max(axis=1)
        target_classes[most >= negative] = UNDECIDED
        chosen = most >= positive
        for one in range(len(own)):  # the first on ties; a later object may take an earlier one's anchor
            anchor = int(overlaps[:, one].argmax())
            if overlaps[anchor, one] > 0:
                chosen[anchor], best[anchor] = True, one
        target_classes[chosen] = kinds[best[chosen]]
        codes[chosen] = encode_boxes(own[best[chosen]], self.boxes[chosen])
        return Targets(target_classes, codes)

    def decode(
        self, scores: ArrayLike, codes: ArrayLike, least: float = 0.05, iou: float = 0.5, limit: int = 100
    ) -> Objects:
        """The objects detected in one image.

        Args:
          scores: [n, classes], probabilities: classes are detected independently.
          codes: [n, 4], see `encode_boxes`.
          least: least score.
          iou: overlap above which the less likely of two boxes of a class is suppressed.
          limit: largest number of boxes; the most likely are kept.
        Raises: ShapeError for shapes that do not fit.
        """
        what = "Anchors.decode"
        score = np.asarray(scores, np.float64)
        if score.ndim != 2 or len(score) != len(self.boxes):
            raise ShapeError(f"{at(what)}: scores must be [{len(self.boxes)}, classes], got {list(score.shape)}")
        boxes = decode_boxes(codes, self.boxes, (self.height, self.width))
        parts = []
        for kind in range(score.shape[1]):
            likely = np.flatnonzero(score[:, kind] >= least)
            best = likely[suppress(boxes[likely], score[likely, kind], iou, limit)]
            parts.append(Objects(boxes[best], np.full(len(best), kind), score[best, kind]))
        return Objects.joined(parts).best(limit)
