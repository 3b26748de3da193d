"""The host side of object detection, in NumPy: anchors, targets, decoding, suppression, average precision.

A box is (top, left, bottom, right) in pixels; several boxes are an array [n, 4].
"""

import typing as _typing

if _typing.TYPE_CHECKING:
    from meshlib.models.images.detection.anchors import Anchors as Anchors
    from meshlib.models.images.detection.anchors import Targets as Targets
    from meshlib.models.images.detection.boxes import box_iou as box_iou
    from meshlib.models.images.detection.boxes import decode_boxes as decode_boxes
    from meshlib.models.images.detection.boxes import encode_boxes as encode_boxes
    from meshlib.models.images.detection.boxes import suppress as suppress
    from meshlib.models.images.detection.precision import COCO_THRESHOLDS as COCO_THRESHOLDS
    from meshlib.models.images.detection.precision import Objects as Objects
    from meshlib.models.images.detection.precision import average_precision as average_precision
    from meshlib.models.images.detection.precision import mean_average_precision as mean_average_precision
else:
    from meshlib.core.explained_calls import explained_calls as _explained_calls
    from meshlib.core.lazy_imports import lazy_names as _lazy_names

    __getattr__, __dir__ = _lazy_names(__name__, _explained_calls(__name__))
