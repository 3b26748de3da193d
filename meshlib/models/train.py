"""One training step of a Transformer: loss, gradients, updates."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType

from meshlib import layers, optimize
from meshlib.core.arguments import at
from meshlib.core.errors import GraphError, nearest
from meshlib.core.garbage import uncollected
from meshlib.core.graph import Operation, Tensor
from meshlib.models.config import TransformerConfig
from meshlib.models.model import Transformer, transformer
from meshlib.models.stages import Pipeline
from meshlib.ops.control.remat import Policy
from meshlib.ops.control.state import assign
from meshlib.optimize.base import LearningRate, Optimizer

OPTIMIZERS: MappingProxyType[str, Callable[[LearningRate], Optimizer]] = MappingProxyType(
    {
        "adafactor": lambda rate: optimize.AdafactorOptimizer(learning_rate=rate),
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
) -> tuple[dict[str, Tensor], list[Operation]]:
    """What one training step of a model is lowered from; call it inside a graph.

    Args:
      config, batch, length, remat, scan, encoder_length, predictions, pipeline, packed: as of `transformer`.
      optimizer: an `mtf.optimize.Optimizer`, or the name of one: "adamw", "adam", "adafactor", "lion", "sgd".
      learning_rate: of an optimizer given by name: a number, a tensor, or a schedule.
      max_norm: clip all gradients together to this norm.
    Returns: the outputs, with the "loss", and of mixtures of experts "auxiliary_loss", which is part of it, and
      "dropped", how many choices of tokens found no room; and the updates: what `mtf.lower` takes. Variables are
      updated in float32 whatever config.numerics keeps them in. Biases that choose experts go by the loads of the
      step, see `mtf.layers.balanced_bias`.
    Raises: GraphError for an optimizer that is none, and as `transformer`.
    Example:
      >>> import meshlib as mtf
      >>> tiny = mtf.models.preset("llama2-7b").reduced()
      >>> with mtf.Graph():
      ...     outputs, updates = mtf.models.train_step(tiny, batch=8, length=16)
      ...     program = mtf.lower(outputs, updates, mesh="fsdp:4", layout=mtf.models.layout("fsdp", tiny, "fsdp:4"))
      >>> sorted(program.inputs), program.outputs["loss"].tensor.shape
      (['targets', 'tokens'], Shape(''))
    """
    made = _optimizer(optimizer, learning_rate)
    model = transformer(config, batch, length, remat, scan, encoder_length, predictions, True, pipeline, packed)
    updates = made.minimize(model.loss, max_norm=max_norm)
    outputs = {"loss": model.loss, "auxiliary_loss": model.auxiliary_loss, "dropped": model.dropped}
    return {name: y for name, y in outputs.items() if y is not None}, [*updates, *_balanced(model)]


def _balanced(model: Transformer) -> list[Operation]:
    """Updates of the biases that choose experts, where there are some."""
    experts = model.config.experts
    if experts is None or not experts.routing.bias:
        return []
    held = {name: model.loss.graph.variables[f"{name}/bias"].output for name in model.loads}
    return [assign(held[name], layers.balanced_bias(held[name], load)) for name, load in model.loads.items()]


def _optimizer(optimizer: object, learning_rate: LearningRate) -> Optimizer:
    if isinstance(optimizer, Optimizer):
        return optimizer
    if not isinstance(optimizer, str) or optimizer not in OPTIMIZERS:
        hint = nearest(optimizer, OPTIMIZERS) if isinstance(optimizer, str) else ""
        raise GraphError(
            f"{at('train_step')}: optimizer must be an mtf.optimize.Optimizer or one of {', '.join(OPTIMIZERS)}, "
            f"got {optimizer!r:.80}{hint}"
        )
    return OPTIMIZERS[optimizer](learning_rate)
