"""Training steps of a model as a function of options, for plans and searches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from meshlib.core.arguments import whole
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
