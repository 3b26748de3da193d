"""RetinaNet: a ResNet, a feature pyramid, and two heads applied at every anchor.

Class and box outputs are separate per level, [batch, height, width, anchors, ...], sharded like the features: nothing
is resharded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from layouts import Dimension
from meshlib import layers
from meshlib.core import initializers
from meshlib.core.arguments import at, choice, number, whole
from meshlib.core.errors import GraphError
from meshlib.core.graph import Operation, Tensor, scope
from meshlib.layers.norms import widened
from meshlib.models.config_parts import Config
from meshlib.models.images.detection import Anchors, Objects
from meshlib.models.images.resnet import ResNetConfig, features
from meshlib.models.images.tower import BATCH, CHANNELS, Tower, check_images, image_dims, late, spatial
from meshlib.ops.control.sources import input as given
from meshlib.ops.movement.indexing import one_hot
from meshlib.ops.movement.rearrange import rearrange, repeat
from meshlib.ops.pointwise.arithmetic import greater_equal, maximum, not_equal, relu, sigmoid
from meshlib.ops.pointwise.casts import cast
from meshlib.ops.pointwise.reductions import reduce_sum
from meshlib.optimize.base import Optimizer

UNDECIDED = -2  # as in `mtf.detection`
PRIOR = 0.01  # initial probability of an object at every anchor: Lin et al., section 4.1
SMALL = initializers.random_normal(0.0, 0.01)  # of the heads, ibidem


@dataclass(frozen=True)
class RetinaNetConfig(Config):
    """Configuration of a RetinaNet.

    Args:
      backbone: its last stages are the lowest levels; its height, width and channels are those of the images; its
        classes, smoothing and head are not used.
      classes: classes of objects.
      levels: consecutive levels of the pyramid; positions of level l are 2^l pixels apart.
      channels: channels of pyramid and heads. depth: convolutions of each head before the last.
      scales, ratios, base: of the anchors, see `mtf.detection.Anchors`.
      coarse_from: input of the first level above the backbone: its last stage, "features", as in the paper, or the
        level below, "pyramid".
      alpha, gamma: of the focal loss. beta: of the smooth L1 loss of boxes. box_weight: its weight in the sum.
    Raises: GraphError with all faults at once.
    Source: Lin et al., arXiv:1708.02002; pyramid: arXiv:1612.03144.
    Example:
      >>> import meshlib as mtf
      >>> mtf.models.RetinaNetConfig().parameters
      38176142
    """

    name: str = "retinanet-50"
    backbone: ResNetConfig = field(default_factory=lambda: ResNetConfig(height=640, width=640))
    classes: int = 90
    levels: tuple[int, ...] = (3, 4, 5, 6, 7)
    features: int = 256
    depth: int = 4
    scales: tuple[float, ...] = (1.0, 2 ** (1 / 3), 2 ** (2 / 3))
    ratios: tuple[float, ...] = (0.5, 1.0, 2.0)
    base: float = 4.0
    coarse_from: str = "features"
    alpha: float = 0.25
    gamma: float = 2.0
    beta: float = 0.1
    box_weight: float = 5.0

    def __post_init__(self) -> None:
        what = "RetinaNetConfig"
        if not isinstance(self.backbone, ResNetConfig):
            raise GraphError(f"{at(what)}: backbone must be a ResNetConfig, got {self.backbone!r:.80}")
        choice(self.coarse_from, what, "coarse_from", ("features", "pyramid"))
        faults = self.not_positive("classes", "features")
        if whole(self.depth, what, "depth") < 0:
            faults.append(f"depth={self.depth}")
        faults += [f"{n}={getattr(self, n)}" for n in ("beta", "box_weight") if number(getattr(self, n), what, n) <= 0]
        top = self.backbone_level(len(self.backbone.blocks))
        own = [whole(level, what, "each level") for level in self.levels]
        if not own or own != list(range(own[0], own[0] + len(own))):
            faults.append(f"levels={self.levels}, which are not consecutive")
        elif not self.backbone_level(1) <= own[0] <= top:
            faults.append(f"levels begin at {own[0]}, but the backbone has {self.backbone_level(1)} to {top}")
        for n in ("height", "width"):
            if getattr(self.backbone, n) % 2**top:
                faults.append(f"{n}={getattr(self.backbone, n)}, which {2**top} does not divide")
        if faults:
            raise GraphError(f"{at(what)}: {', '.join(faults)}")

    @property
    def height(self) -> int:
        """Height of images."""
        return self.backbone.height

    @property
    def width(self) -> int:
        """Width of images."""
        return self.backbone.width

    @property
    def channels(self) -> int:
        """Channels of images."""
        return self.backbone.channels

    @property
    def spatial_split(self) -> int:
        """Largest number of shards of height and width."""
        return self.backbone.spatial_split

    @property
    def split_dims(self) -> dict[str, int]:
        """The dims that the layout "channels" splits, with their largest numbers of shards."""
        return {CHANNELS: math.gcd(self.backbone.features, self.features)}

    def backbone_level(self, stage: int) -> int:
        """The level of a stage of the backbone, from 1."""
        return stage + (1 if self.backbone.stem == "imagenet" else -1)

    @property
    def anchors(self) -> Anchors:
        """The anchors of its images."""
        return Anchors(self.height, self.width, self.levels, self.scales, self.ratios, self.base)

    @property
    def parameters(self) -> int:
        """Trained parameters of backbone, pyramid and heads; convolutions of the latter two have biases."""
        f, each = self.features, self.anchors.each
        stage_widths = [stage[-1].steps[-1].made for stage in self.backbone.stages]
        own = [m for n, m in enumerate(stage_widths, start=1) if self.backbone_level(n) in self.levels]
        square = 9 * f * f + f
        coarse = len(self.levels) - len(own)
        first = 9 * (stage_widths[-1] if self.coarse_from == "features" else f) * f + f
        pyramid = sum(m * f + f for m in own) + len(own) * square + (first + (coarse - 1) * square if coarse else 0)
        heads = 2 * self.depth * square + (9 * f + 1) * each * (self.classes + 4)
        return self.backbone.backbone_parameters + pyramid + heads

    def feeds(self, images: ArrayLike, objects: Sequence[Objects]) -> dict[str, NDArray[Any]]:
        """The inputs of a training step: images [batch, height, width, channels], and the targets of all anchors."""
        arrays: dict[str, NDArray[Any]] = {"images": np.asarray(images, np.float32)}
        anchors = self.anchors
        targets = [anchors.targets(o.boxes, o.classes) for o in objects]
        classes, codes = np.stack([t.classes for t in targets]), np.stack([t.codes for t in targets])
        for level, part in self._parts().items():
            places = (len(targets), *anchors.places(level), anchors.each)
            arrays[f"classes{level}"] = classes[:, part].reshape(places).astype(np.int32)
            arrays[f"codes{level}"] = codes[:, part].reshape(*places, 4).astype(np.float32)
        return arrays

    def found(self, outputs: Mapping[str, NDArray[Any]], least: float = 0.05, iou: float = 0.5) -> list[Objects]:
        """The detected objects of each image from the outputs of `detection_outputs`, after decoding and
        suppression."""
        anchors = self.anchors
        count = len(outputs[f"scores{self.levels[0]}"])
        scores, codes = (
            np.concatenate(
                [np.asarray(outputs[f"{name}{level}"]).reshape(count, -1, size) for level in self.levels], axis=1
            )
            for name, size in (("scores", self.classes), ("codes", 4))
        )
        return [anchors.decode(s, c, least, iou) for s, c in zip(scores, codes, strict=True)]

    def _parts(self) -> dict[int, slice]:
        """The range of anchors of each level."""
        slice_of_level, begin, anchors = {}, 0, self.anchors
        for level in self.levels:
            end = begin + math.prod(anchors.places(level)) * anchors.each
            slice_of_level[level], begin = slice(begin, end), end
        return slice_of_level


@dataclass(frozen=True)
class HeadOutputs:
    """Outputs of the heads at one level: [batch, height, width, anchors, classes] and [..., coordinates]."""

    logits: Tensor
    codes: Tensor


def retinanet(
    config: RetinaNetConfig, images: Tensor, is_training: bool
) -> tuple[dict[int, HeadOutputs], list[Operation]]:
    """Class and box outputs per level in float32, and the updates of moving averages.

    Args:
      config: the model.
      images: [batch, height, width, image_channels] with the backbone's sizes, float; the caller normalises.
      is_training: whether batch norm uses statistics of the batch and returns updates.
    Raises: GraphError for images with other dims.
    Example:
      >>> import meshlib as mtf
      >>> tiny = mtf.models.ResNetConfig("tiny", (1, 1, 1), False, stem="small", height=16, width=16, features=4)
      >>> config = mtf.models.RetinaNetConfig("tiny", tiny, 2, levels=(2, 3), features=4, depth=1)
      >>> with mtf.Graph():
      ...     images = mtf.input("images", "batch:2;height:16;width:16;image_channels:3")
      ...     outputs, updates = mtf.models.retinanet(config, images, is_training=False)
      >>> {level: heads.codes.shape.size for level, heads in outputs.items()}
      {2: 1152, 3: 288}
    """
    check_images(config, images, "retinanet")
    b = config.backbone
    tower = Tower(is_training, b.numerics, b.groups, b.decay, b.epsilon)
    with scope("backbone"):
        stages = features(tower, b, images)
    with scope("pyramid"):
        pyramid = _pyramid(tower, config, stages)
    return {
        level: _heads(tower, config, x, reused=n > 0) for n, (level, x) in enumerate(pyramid.items())
    }, tower.updates


def _pyramid(tower: Tower, config: RetinaNetConfig, stages: Sequence[Tensor]) -> dict[int, Tensor]:
    by_level = {config.backbone_level(n): x for n, x in enumerate(stages, start=1)}
    own = [level for level in config.levels if level in by_level]
    merged: dict[int, Tensor] = {}
    for level in reversed(own):
        x = tower.conv(by_level[level], config.features, 1, use_bias=True, name=f"lateral{level}")
        merged[level] = x + _doubled(merged[level + 1], x) if level + 1 in merged else x
    pyramid = {level: tower.conv(merged[level], config.features, use_bias=True, name=f"level{level}") for level in own}
    x = stages[-1] if config.coarse_from == "features" else pyramid[own[-1]]
    for level in config.levels[len(own) :]:
        x = late(x, config.anchors.places(level), config.spatial_split)
        x = tower.conv(x if level == own[-1] + 1 else relu(x), config.features, 3, 2, True, name=f"level{level}")
        pyramid[level] = x
    return pyramid


def _doubled(x: Tensor, like: Tensor) -> Tensor:
    """Nearest-neighbour upsampling by two, with the dim names of the finer level."""
    names = [d.name for d in spatial(x)]
    finer = {f"{a} 2": b.name for a, b in zip(names, spatial(like), strict=True)}
    rows, columns = names
    return repeat(x, f"batch {rows} {columns} channels -> batch ({rows} 2) ({columns} 2) channels", names=finer)


def _heads(tower: Tower, config: RetinaNetConfig, x: Tensor, reused: bool) -> HeadOutputs:
    each = config.anchors.each
    bias = -math.log((1 - PRIOR) / PRIOR)
    heads = {}
    for part, size, dim, start in (("classes", config.classes, "classes", bias), ("boxes", 4, "coordinates", 0.0)):
        with scope(part, reuse=reused):
            y = x
            for n in range(config.depth):
                y = relu(tower.conv(y, config.features, use_bias=True, initializer=SMALL, name=f"conv{n + 1}"))
            y = tower.conv(y, each * size, initializer=SMALL, name="last")
            y = widened(y)
            y = rearrange(y, f"... (anchors {dim}) -> ... anchors {dim}", anchors=each)
            prior = tower.numerics.variable("last/bias", list(y.shape.dims[-2:]), start, y.dtype)
            heads[part] = y + prior
    return HeadOutputs(heads["classes"], heads["boxes"])


# ---------------------------------------------------------------- training and detection steps


def detection_step(
    config: RetinaNetConfig, batch: int, optimizer: Optimizer, max_norm: float | None = None
) -> tuple[dict[str, Tensor], list[Operation]]:
    """The outputs and updates of one training step; call it inside a graph. `config.feeds` provides its inputs.

    Args:
      config: the model.
      batch: number of images of one step, over all cores.
      optimizer, max_norm: as in `image_step`.
    Returns: the outputs "loss", "class_loss" and "box_loss", and the updates, including moving averages. Both losses
      are sums over anchors, divided by the number of anchors with an object, the second also by 4.
    Raises: GraphError for an invalid batch or optimizer.
    Example:
      >>> import meshlib as mtf
      >>> tiny = mtf.models.ResNetConfig("tiny", (1, 1, 1), False, stem="small", height=16, width=16, features=4)
      >>> config = mtf.models.RetinaNetConfig("tiny", tiny, 2, levels=(2, 3), features=4, depth=1)
      >>> with mtf.Graph():
      ...     outputs, updates = mtf.models.detection_step(config, 8, mtf.optimize.SgdOptimizer(0.01))
      ...     program = mtf.lower(outputs, updates, mesh="data:2", layout="batch:data")
      >>> sorted(program.inputs)
      ['classes2', 'classes3', 'codes2', 'codes3', 'images']
    """
    what = "detection_step"
    if not isinstance(optimizer, Optimizer):
        raise GraphError(f"{at(what)}: optimizer must be an mtf.optimize.Optimizer, got {optimizer!r:.80}")
    levels, updates = retinanet(config, _images(config, batch, what), True)
    object_counts, of_classes, of_boxes = [], [], []
    for level, level_outputs in levels.items():
        places = level_outputs.logits.shape.dims[:-1]
        classes = given(f"classes{level}", places, "int32")
        codes = given(f"codes{level}", [*places, level_outputs.codes.shape[-1]])
        wanted = one_hot(classes, level_outputs.logits.shape[-1], dtype=level_outputs.logits.dtype, out_of_range="zero")
        counts = cast(not_equal(classes, UNDECIDED), level_outputs.logits.dtype)
        holds = cast(greater_equal(classes, 0), level_outputs.codes.dtype)
        focal = layers.focal_loss(level_outputs.logits, wanted, config.alpha, config.gamma)
        of_classes.append(reduce_sum(focal * counts))
        off = layers.smooth_l1_loss(level_outputs.codes, cast(codes, level_outputs.codes.dtype), config.beta)
        of_boxes.append(reduce_sum(off * holds))
        object_counts.append(reduce_sum(holds))
    objects = maximum(sum(object_counts[1:], object_counts[0]), 1.0)
    class_loss = sum(of_classes[1:], of_classes[0]) / objects
    box_loss = sum(of_boxes[1:], of_boxes[0]) / (objects * 4.0)
    loss = class_loss + box_loss * config.box_weight
    outputs = {"loss": loss, "class_loss": class_loss, "box_loss": box_loss}
    return outputs, optimizer.minimize(loss, max_norm=max_norm) + updates


def detection_outputs(config: RetinaNetConfig, batch: int) -> dict[str, Tensor]:
    """The outputs of a detection program; call it inside a separate graph. `config.found` decodes them.

    Its input is images. Returns: for each level l "scores<l>", the probability of each class for each anchor, and
    "codes<l>". Raises: GraphError for an invalid batch.
    Example:
      >>> import meshlib as mtf
      >>> tiny = mtf.models.ResNetConfig("tiny", (1, 1, 1), False, stem="small", height=16, width=16, features=4)
      >>> config = mtf.models.RetinaNetConfig("tiny", tiny, 2, levels=(2, 3), features=4, depth=1)
      >>> with mtf.Graph():
      ...     outputs = mtf.models.detection_outputs(config, 8)
      >>> sorted(outputs)
      ['codes2', 'codes3', 'scores2', 'scores3']
    """
    levels, _ = retinanet(config, _images(config, batch, "detection_outputs"), False)
    outputs = {f"scores{level}": sigmoid(level_outputs.logits) for level, level_outputs in levels.items()}
    return outputs | {f"codes{level}": level_outputs.codes for level, level_outputs in levels.items()}


def _images(config: RetinaNetConfig, batch: int, what: str) -> Tensor:
    RetinaNetConfig.checked(config, what)
    return given("images", [Dimension(BATCH, whole(batch, what, "batch", low=1)), *image_dims(config)])
