"""One training step of a Transformer: loss, gradients, updates, also with 1F1B or zero-bubble pipeline schedules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from layouts import Dimension
from meshlib import layers, optimize
from meshlib.core.arguments import at, divisors_near, flag, whole
from meshlib.core.errors import GraphError, nearest
from meshlib.core.garbage import uncollected
from meshlib.core.graph import Operation, Tensor, scope
from meshlib.models.blocks import StackBlocks
from meshlib.models.config import TransformerConfig
from meshlib.models.model import Builder, transformer
from meshlib.models.stages import STAGE, Pipeline
from meshlib.ops.control.remat import Policy, Remat
from meshlib.ops.control.sources import input
from meshlib.ops.control.state import assign
from meshlib.optimize.base import LearningRate, Optimizer

Tensors = dict[str, Tensor]
LOADS = "loads of "  # prefix of router names among the outputs of microbatches
OFFLOAD = "offload"  # remat policy: full recomputation, with layer inputs kept on the host


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


OPTIMIZERS: MappingProxyType[str, Callable[..., Optimizer]] = MappingProxyType(
    {
        "adafactor": lambda rate, **options: optimize.AdafactorOptimizer(learning_rate=rate, **options),
        "adam": optimize.AdamOptimizer,
        "adamw": optimize.AdamWOptimizer,
        "lion": optimize.LionOptimizer,
        "sgd": optimize.SgdOptimizer,
    }
)


@uncollected
def train_step(
    config: TransformerConfig,
    batch: int,
    length: int,
    optimizer: str | Optimizer = "adamw",
    remat: Policy = "full",
    scan: bool = True,
    learning_rate: LearningRate = 1e-3,
    max_norm: float | None = None,
    encoder_length: int | None = None,
    predictions: int | None = None,
    pipeline: Pipeline | None = None,
    packed: bool = False,
    accumulation: int = 1,
    loss_blocks: int = 1,
    slots_on_host: bool = False,
) -> tuple[dict[str, Tensor], list[Operation]]:
    """The outputs and updates of one training step of a model; call it inside a graph.

    Args:
      config, batch, length, remat, scan, encoder_length, predictions, pipeline, packed, loss_blocks: as in
        `transformer`.
      optimizer: an `mtf.optimize.Optimizer`, or the name of one: "adamw", "adam", "adafactor", "lion", "sgd".
      learning_rate: for an optimizer given by name: a number, a tensor, or a schedule.
      max_norm: clip the global norm of all gradients to this.
      accumulation: number of sequential microbatches whose gradients are accumulated: see
        `mtf.serialize_training_step`.
      slots_on_host: whether an optimizer given by name stores its slots in the memory of the host.
    Returns: the outputs "loss", and for mixtures of experts "auxiliary_loss", which is part of it, and "dropped", the
      number of dropped choices; and the updates, for `mtf.lower`. Updates are computed in float32 whatever
      config.numerics stores. Biases that choose experts are updated by the loads of the step, see
      `mtf.layers.balanced_bias`.
    Raises: GraphError for an invalid optimizer, and as in `transformer`.
    Example:
      >>> import meshlib as mtf
      >>> tiny = mtf.models.preset("llama2-7b").reduced()
      >>> with mtf.Graph():
      ...     outputs, updates = mtf.models.train_step(tiny, batch=8, length=16)
      ...     program = mtf.lower(outputs, updates, mesh="fsdp:4", layout=mtf.models.layout("fsdp", tiny, "fsdp:4"))
      >>> sorted(program.inputs), program.outputs["loss"].tensor.shape
      (['targets', 'tokens'], Shape(''))
    """
    checked_optimizer = _optimizer(optimizer, learning_rate, slots_on_host)
    if whole(accumulation, "train_step", "accumulation", 1) > 1:
        rest = {"encoder_length": encoder_length, "predictions": predictions, "pipeline": pipeline, "packed": packed}
        wrong = [name for name, value in rest.items() if value]
        if wrong or (isinstance(config, TransformerConfig) and config.kind != "decoder"):
            what = f"{wrong[0]}={rest[wrong[0]]!r:.60}" if wrong else f"a model of kind {config.kind!r}"
            raise GraphError(
                f"{at('train_step')}: accumulation={accumulation} is for plain decoders; leave it out, or {what}"
            )
        return _accumulated(
            config, (batch, length), checked_optimizer, remat, scan, max_norm, accumulation, loss_blocks
        )
    if isinstance(pipeline, Pipeline) and pipeline.by_tasks:
        rest = {"encoder_length": encoder_length, "predictions": predictions, "packed": packed, "scan": not scan}
        wrong = [name for name, value in rest.items() if value] + (["loss_blocks"] if loss_blocks != 1 else [])
        if wrong:
            raise GraphError(f"{at('train_step')}: schedule={pipeline.schedule!r} has no {wrong[0]}; leave it out")
        grads, of_tasks, tokens = gradients_by_tasks(config, (batch, length), pipeline, remat)
        return of_tasks, _applied(checked_optimizer, grads, tokens, max_norm)
    model = transformer(
        config, batch, length, remat, scan, encoder_length, predictions, True, pipeline, packed, loss_blocks
    )
    updates = checked_optimizer.minimize(model.loss, max_norm=max_norm)
    outputs = {"loss": model.loss, "auxiliary_loss": model.auxiliary_loss, "dropped": model.dropped}
    return {name: y for name, y in outputs.items() if y is not None}, [*updates, *_balanced(config, model.loads)]


def _balanced(config: TransformerConfig, loads: Mapping[str, Tensor]) -> list[Operation]:
    """Updates of the biases that choose experts, if there are any."""
    if config.experts is None or not config.experts.routing.bias:
        return []
    variables = next(iter(loads.values())).graph.variables
    held = {name: variables[f"{name}/bias"].output for name in loads}
    return [assign(held[name], layers.balanced_bias(held[name], load)) for name, load in loads.items()]


def _accumulated(
    config: TransformerConfig,
    sizes: tuple[int, int],
    optimizer: Optimizer,
    remat: Policy,
    scan: bool,
    max_norm: float | None,
    accumulation: int,
    loss_blocks: int,
) -> tuple[dict[str, Tensor], list[Operation]]:
    """A step in microbatches with accumulated losses and gradients, and one update."""
    batch, length = Dimension("batch", sizes[0]), Dimension("length", sizes[1])
    if batch.size % accumulation:
        raise GraphError(
            f"{at('train_step')}: accumulation must divide the batch: {batch.size} % {accumulation} = "
            f"{batch.size % accumulation}; use {divisors_near(batch.size, accumulation)}"
        )
    features = {name: input(name, [batch, length], "int32") for name in ("tokens", "targets")}
    small = Dimension("batch", batch.size // accumulation)

    def model_fn(parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        builder = Builder(config, small, remat, scan, True, loss_blocks=loss_blocks, given=parts)
        builder.check_blocks(length.size)
        model = builder.build(length.size, length.size, None)
        outputs = {"loss": model.loss, "auxiliary_loss": model.auxiliary_loss, "dropped": model.dropped}
        return {name: y for name, y in outputs.items() if y is not None} | {
            f"{LOADS}{name}": load for name, load in model.loads.items()
        }

    grads, outputs = optimize.serialize_training_step(features, model_fn, batch, accumulation)
    updates = _applied(optimizer, grads, features["tokens"], max_norm)
    loads = {name.removeprefix(LOADS): outputs.pop(name) for name in [*outputs] if name.startswith(LOADS)}
    return outputs, [*updates, *_balanced(config, loads)]


def _applied(optimizer: Optimizer, grads: Sequence[Tensor], tokens: Tensor, max_norm: float | None) -> list[Operation]:
    """The updates of all variables, from gradients clipped by global norm."""
    clipped: Sequence[Tensor | None] = grads
    if max_norm is not None:
        clipped, _ = optimize.clip_by_global_norm(grads, max_norm)
    return list(optimizer.apply_grads(clipped, tokens.graph.trainable_variables))


def _optimizer(optimizer: object, learning_rate: LearningRate, slots_on_host: object) -> Optimizer:
    on_host = flag(slots_on_host, "train_step", "slots_on_host")
    if isinstance(optimizer, Optimizer):
        if on_host:
            raise GraphError(
                f"{at('train_step')}: slots_on_host is for optimizers by name; give it to {optimizer!r:.60}"
            )
        return optimizer
    if not isinstance(optimizer, str) or optimizer not in OPTIMIZERS:
        hint = nearest(optimizer, OPTIMIZERS) if isinstance(optimizer, str) else ""
        raise GraphError(
            f"{at('train_step')}: optimizer must be an mtf.optimize.Optimizer or one of {', '.join(OPTIMIZERS)}, "
            f"got {optimizer!r:.80}{hint}"
        )
    return OPTIMIZERS[optimizer](learning_rate, slots_on_host=on_host)


def transformer_builder(
    config: TransformerConfig, batch: int | None, length: int | None
) -> Callable[..., tuple[Mapping[str, Tensor], Sequence[Operation]]]:
    """A builder of the training step of a model.

    Its options are those of `step_arguments`.
    """

    def build(**choices: Any) -> tuple[Mapping[str, Tensor], Sequence[Operation]]:
        return train_step(config, **step_arguments({"batch": batch, "length": length, **choices}))

    return build


def step_arguments(options: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `train_step` from options: its arguments, "offload" for remat, and fields of a pipeline.

    `stages`, `microbatches` (4 for each stage unless given) and `schedule` become `pipeline=Pipeline(...)`.

    Raises: GraphError for microbatches or a schedule without stages, and as `Pipeline`.

    >>> step_arguments({"batch": 8, "stages": 2, "remat": "full"})["pipeline"].microbatches
    8
    """
    arguments = dict(options)
    if arguments.get("remat") == OFFLOAD:
        arguments["remat"] = Remat(offload_carries=True)
    stages, microbatches = arguments.pop("stages", 1), arguments.pop("microbatches", None)
    schedule = arguments.pop("schedule", "gpipe")
    if stages != 1:
        count = 4 * whole(stages, "Pipeline", "stages", 1) if microbatches is None else microbatches
        arguments["pipeline"] = Pipeline(stages=stages, microbatches=count, schedule=schedule)
    elif microbatches not in (None, 1):
        raise GraphError("microbatches are for a pipeline: give its stages, too, or one microbatch")
    elif schedule != "gpipe":
        raise GraphError("a schedule is for a pipeline: give its stages, too, or leave the schedule out")
    return arguments


def source_texts(options: Mapping[str, Any]) -> list[str]:
    """Arguments of `train_step` as Python source, from options as of `step_arguments`.

    >>> source_texts({"remat": "offload", "accumulation": 4})
    ['remat=mtf.Remat(save=(), offload=(), offload_carries=True)', 'accumulation=4']
    """
    homes = {Remat: "mtf.", Pipeline: "mtf.models."}
    return [f"{name}={homes.get(type(value), '')}{value!r}" for name, value in step_arguments(options).items()]
