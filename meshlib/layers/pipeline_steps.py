"""Pipeline training steps in which stages run forwards and backwards of different microbatches at the same time.

The gradient of `mtf.layers.pipeline` is a second loop: all forwards run before the first backward. Here loss and
gradients are computed in one loop over the ticks of a schedule (`meshlib.layers.pipeline_task_schedule`): in each tick
a stage runs the forward of one microbatch, or the backward of another, or gradients of weights, or nothing. Residuals
are in buffers with as many slots as the schedule needs, whatever the number of microbatches.

The body of the loop has a branch per kind of task, which a device skips in ticks in which its stage runs another.
Between ticks activations are sent to the next stage, and gradients to the previous one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from layouts import Dimension
from meshlib.core.arguments import at, choice, whole
from meshlib.core.errors import GraphError
from meshlib.core.graph import Tensor
from meshlib.layers.pipeline_step_loop import StepLoop
from meshlib.layers.pipeline_task_schedule import KINDS, TaskSchedule
from meshlib.layers.pipeline_ticks import WHAT, CutFeatures, Features, Ticks
from meshlib.ops.control.remat import Policy, Remat, checked_policy

Tensors = dict[str, Tensor]


def pipeline_training_step(
    features: Features,
    first_fn: Callable[[Tensors], Tensor],
    stage_fn: Callable[..., Any],
    last_fn: Callable[[Tensor, Tensors], Tensor | Mapping[str, Tensor]],
    batch_dim: Dimension,
    stages: int | Dimension,
    microbatches: int,
    repeats: int = 1,
    schedule: str = "1f1b",
    remat: Policy = "full",
    reduction: str = "mean",
) -> tuple[list[Tensor], Tensors]:
    """Loss and gradients of a batch, computed in microbatches by pipeline stages.

    Args:
      features: inputs of the model by name; those with `batch_dim` are cut into microbatches, others are passed on
        unchanged.
      first_fn: takes the features of a microbatch, returns the input of the first stage, such as an embedding.
      stage_fn: one stage, as in `mtf.layers.pipeline`: takes a microbatch and its features, returns a microbatch of the
        same type, optionally with a dict of float tensors with the dim `stage`, of which "loss" is added to the loss.
      last_fn: takes the output of the last stage and the features; returns the loss, or a dict of tensors with "loss".
        Arguments and results of these functions have the dim `stage`, first in arguments; results are averaged over
        their other dims (or summed, see `reduction`).
      batch_dim, microbatches: the dim to cut, and the number of parts; cut as in `mtf.serialize_training_step`.
      stages: number of stages, or their dim; by default named "stage", for layout rules: `stage:pipe`.
      repeats: rounds of each microbatch, as in `mtf.layers.pipeline`.
      schedule: "1f1b" (with repeats: interleaved), "zb-h1", "zb-h2", "gpipe"; see `mtf.layers.schedule`.
      remat: policy for values kept from forward to backward besides the input, as in `mtf.scan`; none on the host.
      reduction: "mean" or "sum" of losses over examples.
    Returns: (grads, outputs), as `mtf.serialize_training_step`: gradients of all trainable variables of the graph, and
      the outputs of last_fn and stage_fn over the whole batch.
    Bytes: in each tick a microbatch to the next stage, and a gradient to the previous one. Gradients are reduced over a
      split batch once.
    Memory: inputs, and values kept by `remat`, for the microbatches in flight
      (`mtf.layers.schedule(..., kind=schedule).in_flight`); accumulated gradients of weights.
    Time: modelled with point-to-point transfers, for which only the receiving stage waits. This holds if each device
      has one stage; otherwise, and in the simulator, all branches run in each tick.
    Raises: GraphError, ShapeError for numbers that do not divide, functions that change types, or functions that draw
      random numbers, which would differ in the recomputation.
    Example:
      >>> import meshlib as mtf
      >>> batch, width = mtf.Dimension("batch", 8), mtf.Dimension("width", 16)
      >>> with mtf.Graph() as graph:
      ...     x = mtf.input("x", [batch, width])
      ...     grads, outputs = mtf.layers.pipeline_training_step(
      ...         {"x": x},
      ...         lambda features: features["x"],
      ...         lambda h, features: mtf.layers.dense(h, width, activation=mtf.tanh),
      ...         lambda h, features: mtf.square(h),
      ...         batch, stages=2, microbatches=4)
      ...     train = mtf.optimize.SgdOptimizer(0.1).apply_grads(grads, graph.trainable_variables)
      >>> program = mtf.lower(outputs, train, mesh="pipe:2", layout="stage:pipe")
      >>> print(graph.variables["dense/kernel"].output.shape, sorted(outputs))
      [stage:2, width:16, width_out:16] ['loss']
    """
    functions = {"first_fn": first_fn, "stage_fn": stage_fn, "last_fn": last_fn}
    for name, function in functions.items():
        if not callable(function):
            raise GraphError(f"{at(WHAT)}: {name} must be a function, got {function!r:.80}")
    policy = checked_policy(remat, WHAT)
    if isinstance(policy, Remat) and (policy.offload or policy.offload_carries):
        raise GraphError(f"{at(WHAT)}: remat can't offload to the host here; use save= instead of offload=")
    choice(reduction, WHAT, "reduction", ("mean", "sum"))
    stage = stages if isinstance(stages, Dimension) else Dimension("stage", whole(stages, WHAT, "stages", low=1))
    count, again = (whole(n, WHAT, what, low=1) for n, what in ((microbatches, "microbatches"), (repeats, "repeats")))
    plan = TaskSchedule(stage.size, count, again, choice(schedule, WHAT, "schedule", tuple(KINDS)))
    cut = CutFeatures.of(features, batch_dim, count, stage)
    assert plan.orders  # raises if the kind does not support these repeats
    step = StepLoop(first_fn, stage_fn, last_fn, Ticks(plan), stage, cut, policy, reduction)
    return step.run()
