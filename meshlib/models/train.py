"""One training step of a Transformer: loss, gradients, updates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from layouts import Dimension
from meshlib import layers, optimize
from meshlib.core.arguments import at, flag, whole
from meshlib.core.errors import GraphError, nearest
from meshlib.core.garbage import uncollected
from meshlib.core.graph import Operation, Tensor
from meshlib.models.config import TransformerConfig
from meshlib.models.model import Builder, transformer
from meshlib.models.stages import Pipeline
from meshlib.models.task_steps import gradients_by_tasks
from meshlib.ops.control.remat import Policy
from meshlib.ops.control.sources import input
from meshlib.ops.control.state import assign
from meshlib.optimize.base import LearningRate, Optimizer

LOADS = "loads of "  # prefix of router names among the outputs of microbatches
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
            f"{batch.size % accumulation}"
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
