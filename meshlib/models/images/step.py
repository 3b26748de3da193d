"""One training step, and one evaluation step on the same variables, of a model that classifies images."""

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
from meshlib.ops.pointwise.binary import equal
from meshlib.ops.pointwise.casts import cast
from meshlib.ops.pointwise.reductions import reduce_mean, reduce_sum
from meshlib.optimize.base import Optimizer

ImageConfig = ResNetConfig | ViTConfig


def classifier(config: ImageConfig, images: Tensor, is_training: bool) -> tuple[Tensor, list[Operation]]:
    """Logits [batch, classes] of images in float32, and the updates of what a model keeps of its batches."""
    if isinstance(config, ResNetConfig):
        return resnet(config, images, is_training)
    return vit(config, images, is_training)


@uncollected
def image_step(
    config: ImageConfig,
    batch: int | Sequence[Dimension],
    optimizer: Optimizer,
    max_norm: float | None = None,
) -> tuple[dict[str, Tensor], list[Operation]]:
    """What one training step of a model of images is lowered from; call it inside a graph.

    Its inputs are images, float32 [batch, height, width, image_channels], and labels, int32 [batch].

    Args:
      config: of the model.
      batch: examples of one step, all cores together; or dims, the last called batch, such as [replicas, batch], which
        the inputs have: of a ResNet with groups=replicas the batch norm is that of groups of cores.
      optimizer: of all variables; `mtf.optimize.NORMS_AND_BIASES` names those that are not decayed.
      max_norm: clip all gradients together to this norm.
    Returns: the outputs "loss", with label smoothing, and "accuracy" of the batch, and the updates, those of moving
      averages included: what `mtf.lower` takes.
    Raises: GraphError for a batch or optimizer that is none.
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
    """What an evaluation step is lowered from; call it inside a graph of its own, with the batch that it likes.

    Its inputs are images and labels as of `image_step`, and mask, float32 [batch]: 1 for examples that count, 0 for
    those that fill the last batch up (`mtf.Batches(..., remainder="pad")` makes it).

    Returns: "loss", the sum of the cross entropies of what counts, "right", how many of them are classified right, and
      "count", how many there are.
    Raises: GraphError for a batch that is none.
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
