"""Training and evaluation steps of image classifiers on the same variables."""

from __future__ import annotations

from collections.abc import Sequence

from layouts import Dimension, Shape
from meshlib import layers
from meshlib.core.arguments import at, whole
from meshlib.core.errors import GraphError
from meshlib.core.garbage import uncollected
from meshlib.core.graph import Operation, Tensor
from meshlib.models.images.resnet import ResNetConfig, resnet
from meshlib.models.images.tower import BATCH, image_dims
from meshlib.models.images.vit import ViTConfig, vit
from meshlib.ops.building import as_dims
from meshlib.ops.control.sources import input as given
from meshlib.ops.movement.ranking import argmax
from meshlib.ops.pointwise.arithmetic import equal
from meshlib.ops.pointwise.casts import cast
from meshlib.ops.pointwise.reductions import reduce_mean, reduce_sum
from meshlib.optimize.base import Optimizer

ImageConfig = ResNetConfig | ViTConfig


def classifier(config: ImageConfig, images: Tensor, is_training: bool) -> tuple[Tensor, list[Operation]]:
    """Logits [batch, classes] of images in float32, and the updates of moving averages."""
    if isinstance(config, ResNetConfig):
        return resnet(config, images, is_training)
    return vit(config, images, is_training)


@uncollected
def image_step(
    config: ImageConfig, batch: int | Sequence[Dimension], optimizer: Optimizer, max_norm: float | None = None
) -> tuple[dict[str, Tensor], list[Operation]]:
    """The outputs and updates of one training step of an image classifier; call it inside a graph.

    Its inputs are images, float32 [batch, height, width, image_channels], and labels, int32 [batch].

    Args:
      config: the model.
      batch: number of examples of one step, over all cores; or dims, the last named batch, such as [replicas, batch],
        of the inputs: a ResNet with groups=replicas then has batch norm per group of cores.
      optimizer: updates all variables; `mtf.optimize.NORMS_AND_BIASES` names those to exclude from weight decay.
      max_norm: clip the global norm of all gradients to this.
    Returns: the outputs "loss", with label smoothing, and "accuracy" of the batch, and the updates, including moving
      averages, for `mtf.lower`.
    Raises: GraphError for an invalid batch or optimizer.
    Example:
      >>> import meshlib as mtf
      >>> sizes = {"classes": 10, "height": 8, "width": 8, "features": 8}
      >>> small = mtf.models.ResNetConfig("small", (1,), False, stem="small", **sizes)
      >>> with mtf.Graph():
      ...     outputs, updates = mtf.models.image_step(small, 16, mtf.optimize.MomentumOptimizer(0.1))
      ...     program = mtf.lower(outputs, updates, mesh="data:4", layout="batch:data")
      >>> sorted(program.inputs), sorted(program.outputs)
      (['images', 'labels'], ['accuracy', 'loss'])
    """
    what = "image_step"
    if not isinstance(optimizer, Optimizer):
        raise GraphError(f"{at(what)}: optimizer must be an mtf.optimize.Optimizer, got {optimizer!r:.80}")
    images, labels = _inputs(config, batch, what)
    logits, updates = classifier(config, images, True)
    classes = logits.shape.dim("classes")
    losses = layers.softmax_cross_entropy_with_logits(logits, labels, classes, label_smoothing=config.label_smoothing)
    loss = reduce_mean(losses, name="loss")
    right = cast(equal(argmax(logits, classes), labels), "float32")
    outputs = {"loss": loss, "accuracy": reduce_mean(right, name="accuracy")}
    return outputs, optimizer.minimize(loss, max_norm=max_norm) + updates


def image_evaluation(config: ImageConfig, batch: int | Sequence[Dimension]) -> dict[str, Tensor]:
    """The outputs of an evaluation step; call it inside a separate graph, with any batch size.

    Its inputs are images and labels as in `image_step`, and mask, float32 [batch]: 1 for examples, 0 for padding of the
    last batch (as `mtf.Batches(..., remainder="pad")` provides).

    Returns: sums over unmasked examples: "loss" of cross entropies, "right" of correct classifications, and "count" of
      examples.
    Raises: GraphError for an invalid batch.
    Example:
      >>> import meshlib as mtf
      >>> sizes = {"classes": 10, "height": 8, "width": 8, "features": 8}
      >>> small = mtf.models.ResNetConfig("small", (1,), False, stem="small", **sizes)
      >>> with mtf.Graph():
      ...     program = mtf.lower(mtf.models.image_evaluation(small, 16), mesh="data:4", layout="batch:data")
      >>> sorted(program.inputs), sorted(program.outputs)
      (['images', 'labels', 'mask'], ['count', 'loss', 'right'])
    """
    images, labels = _inputs(config, batch, "image_evaluation")
    mask = given("mask", labels.shape)
    logits, _ = classifier(config, images, False)
    classes = logits.shape.dim("classes")
    losses = layers.softmax_cross_entropy_with_logits(logits, labels, classes)
    right = cast(equal(argmax(logits, classes), labels), "float32")
    return {
        "loss": reduce_sum(losses * mask, name="loss"),
        "right": reduce_sum(right * mask, name="right"),
        "count": reduce_sum(mask, name="count"),
    }


def _inputs(config: ImageConfig, batch: int | Sequence[Dimension], what: str) -> tuple[Tensor, Tensor]:
    if not isinstance(config, ImageConfig):
        raise GraphError(f"{at(what)}: expected a config of an image model, got {type(config).__name__} {config!r:.80}")
    examples: tuple[Dimension, ...]
    if isinstance(batch, Sequence):
        examples = as_dims(batch, what)
        if not examples or examples[-1].name != BATCH:
            raise GraphError(f"{at(what)}: the last dim of batch must be called '{BATCH}', got {Shape(examples)}")
    else:
        examples = (Dimension(BATCH, whole(batch, what, "batch", low=1)),)
    images = given("images", [*examples, *image_dims(config)])
    return images, given("labels", examples, "int32")
