"""Training steps of a model as a function of options, for plans and searches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from meshlib.core.errors import GraphError
from meshlib.core.graph import Operation, Tensor
from meshlib.models.config import TransformerConfig
from meshlib.models.stages import Pipeline
from meshlib.models.train import train_step
from meshlib.ops.control.remat import Remat

OFFLOAD = "offload"  # remat policy: full recomputation, with layer inputs kept on the host


def transformer_builder(
    config: TransformerConfig, batch: int | None, length: int | None
) -> Callable[..., tuple[Mapping[str, Tensor], Sequence[Operation]]]:
    """A builder of the training step of a model.

    Its options are arguments of `train_step`; "offload" for remat; and stages, microbatches and schedule of a pipeline.
    """

    def build(**choices: Any) -> tuple[Mapping[str, Tensor], Sequence[Operation]]:
        sizes = {"batch": batch, "length": length} | choices
        if sizes.get("remat") == OFFLOAD:
            sizes["remat"] = Remat(offload_carries=True)
        stages, microbatches = sizes.pop("stages", 1), sizes.pop("microbatches", None)
        schedule = sizes.pop("schedule", "gpipe")
        if stages != 1:
            sizes["pipeline"] = Pipeline(
                stages=stages,
                microbatches=4 * stages if microbatches is None else microbatches,
                schedule=schedule,
            )
        elif microbatches not in (None, 1):
            raise GraphError("microbatches are for a pipeline: with one stage give 1")
        elif schedule != "gpipe":
            raise GraphError("a schedule is for a pipeline: with one stage leave it 'gpipe'")
        return train_step(config, **sizes)

    return build
