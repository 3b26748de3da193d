"""The host's part of object detection, in NumPy: anchors, targets, decoding, suppression, average precision.

A box is (top, left, bottom, right) in pixels, a set of them an array [n, 4].
"""

from typing import TYPE_CHECKING as _TYPE_CHECKING

if _TYPE_CHECKING:
    from meshlib.detection.anchors import Anchors as Anchors
    from meshlib.detection.anchors import Targets as Targets
    from meshlib.detection.boxes import box_iou as box_iou
    from meshlib.detection.boxes import decode_boxes as decode_boxes
    from meshlib.detection.boxes import encode_boxes as encode_boxes
    from meshlib.detection.boxes import suppress as suppress
    from meshlib.detection.precision import COCO_THRESHOLDS as COCO_THRESHOLDS
    from meshlib.detection.precision import Objects as Objects
    from meshlib.detection.precision import average_precision as average_precision
    from meshlib.detection.precision import mean_average_precision as mean_average_precision
else:
    from meshlib.calls import explained_calls as _explained_calls
    from meshlib.lazy import lazy_names as _lazy_names

    __getattr__, __dir__ = _lazy_names(__name__, _explained_calls(__name__))
