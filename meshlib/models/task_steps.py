"""Loss and gradients of a decoder with 1F1B or zero-bubble pipeline schedules."""

from __future__ import annotations

from collections.abc import Sequence

from layouts import Dimension
from meshlib import layers
from meshlib.core.arguments import at
from meshlib.core.errors import GraphError
from meshlib.core.graph import Tensor, scope
from meshlib.models.blocks import StackBlocks
from meshlib.models.config import TransformerConfig
from meshlib.models.model import Builder
from meshlib.models.stages import STAGE, Pipeline
from meshlib.ops.control.remat import Policy
from meshlib.ops.control.sources import input

Tensors = dict[str, Tensor]


def gradients_by_tasks(
    config: TransformerConfig, sizes: tuple[int, int], pipeline: Pipeline, remat: Policy
) -> tuple[list[Tensor], Tensors, Tensor]:
    """Gradients of all variables of a decoder, its outputs, and its input tokens.

    Args:
      sizes: sequences in the batch, and tokens per sequence.
    Raises: GraphError for models that the schedule does not support, and as in `Pipeline.check`.
    """
    if config.kind != "decoder" or config.experts is not None or config.dropout:
        what = "experts" if config.experts is not None else "dropout" if config.dropout else f"kind {config.kind!r}"
        raise GraphError(
            f"{at('train_step')}: schedule={pipeline.schedule!r} is for decoders without experts and dropout; "
            f"{config.name} has {what}: take Pipeline(schedule='gpipe')"
        )
    pipeline.check(config, sizes[0])
    batch, length = Dimension("batch", sizes[0]), Dimension("length", sizes[1])
    features = {name: input(name, [batch, length], "int32") for name in ("tokens", "targets")}
    model = _Staged(config, Dimension("batch", batch.size // pipeline.microbatches), length, pipeline, remat)
    grads, outputs = layers.pipeline_training_step(
        features, model.first, model.stage, model.last, batch, Dimension(STAGE, pipeline.stages),
        pipeline.microbatches, pipeline.repeats, pipeline.schedule, pipeline.remat,
    )  # fmt: skip
    return grads, outputs, features["tokens"]


class _Staged:
    """The parts of a decoder that the first, all and the last stage run."""

    def __init__(
        self, config: TransformerConfig, small: Dimension, length: Dimension, pipeline: Pipeline, remat: Policy
    ) -> None:
        self.config, self.pipeline, self.remat = config, pipeline, remat
        self.builder = Builder(config, small, remat, scan=True, training=True)
        assert self.builder.table is not None  # created outside the loop: the head may read it too
        bias = self.builder.position_bias(length, True) if config.position == "relative" else None
        self.blocks = StackBlocks(config, True, True, bias)

    def first(self, features: Tensors) -> Tensor:
        """The embedding, and layers at the front outside the pipeline."""
        x = self.builder.embedded(features["tokens"], self.blocks)
        front = range(min(self.config.dense_front, self.config.layers))
        return self.builder.run_of_layers(self.blocks, x, front, "dense_layers", trips_from=2)

    def stage(self, x: Tensor, _: Tensors) -> Tensor:
        """The layers of a stage."""
        counts = self.pipeline.split(self.config) if self.pipeline.repeats == 1 else ()
        numbers = range(self.config.dense_front, self.config.layers)
        if len(set(counts)) > 1:
            kinds = [self.config.kind_of(n) for n in numbers[: self.config.period]]
            with scope("layers"):
                return layers.stage_layers(lambda h: self._pattern(h, kinds), x, counts, self.remat)
        run = numbers[: self.pipeline.layers_of(len(numbers))]
        return self.builder.run_of_layers(self.blocks, x, run, "layers", trips_from=1)

    def _pattern(self, x: Tensor, kinds: Sequence[object]) -> Tensor:
        for n, kind in enumerate(kinds):
            if len(kinds) == 1:
                x, _ = self.blocks.layer(x, kind)  # type: ignore[arg-type]
            else:
                with scope(f"layer_{n}"):
                    x, _ = self.blocks.layer(x, kind)  # type: ignore[arg-type]
        return x

    def last(self, x: Tensor, features: Tensors) -> Tensor:
        """The head, and the loss per token."""
        if self.config.norm_position != "post":
            x = self.blocks.norm(x, "final_norm")
        logits = self.builder.logits(x)
        with scope("loss"):
            return self.builder.losses(logits, features["targets"])
