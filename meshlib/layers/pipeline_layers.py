"""Pipeline stages with different numbers of layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from layouts import Dimension, Shape
from meshlib.core.arguments import at, items, whole
from meshlib.core.dtypes import BOOL
from meshlib.core.errors import GraphError, ShapeError
from meshlib.core.graph import Operation, Tensor
from meshlib.core.loop_record import Active
from meshlib.core.replay import all_operations
from meshlib.ops.building import tensor
from meshlib.ops.control.branches import branch
from meshlib.ops.control.loops import scan
from meshlib.ops.control.remat import Policy, Remat, checked_policy
from meshlib.ops.movement.tables import table
from meshlib.ops.pointwise.arithmetic import where

WHAT = "stage_layers"
LAYER = "layer"  # the kind of the branch


def split_layers(layers: int, stages: int, first: int = 1, last: int = 1) -> tuple[int, ...]:
    """The number of layers per stage, with the extra work of the first and last stage counted as layers.

    Args:
      layers: layers of the whole model.
      first, last: cost of the embedding and the head, in layers.
    Raises: GraphError if a stage would have none.
    Example: Llama 3.1 405B, in 16 stages (arXiv:2407.21783, section 3.3.2).
      >>> mtf.layers.split_layers(126, 16)
      (7, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 7)
    """
    what = "split_layers"
    whole(layers, what, "layers", low=1)
    whole(stages, what, "stages", low=1)
    base, more = divmod(layers + whole(first, what, "first", low=0) + whole(last, what, "last", low=0), stages)
    counts = [base + (stage >= stages - more) for stage in range(stages)]
    counts[0] -= first
    counts[-1] -= last
    if min(counts) < 1:
        raise GraphError(
            f"{at(what)}: {layers} layers in {stages} stages, of which the first and the last have {first} and {last} "
            f"fewer, leave a stage without any: {counts}; use fewer stages"
        )
    return tuple(counts)


def stage_layers(
    layer_fn: Callable[[Tensor], Tensor], x: Tensor, counts: Sequence[int], remat: Policy = "full"
) -> Tensor:
    """The layers of a pipeline stage, `counts` of them: a loop whose last trips some stages skip.

    Args:
      layer_fn: one layer, as for `mtf.scan` with `stack_variables`: [stage, ...] to the same type.
      x: the stages' input; its first dim is that of the stages.
      counts: number of layers per stage. Variables are allocated for the largest; unused parts keep their
        initial values.
      remat: rematerialisation policy per layer, as in `mtf.scan`.
    Returns: the type of x.
    Time: a device with one stage skips the trips beyond its count.
    Raises: GraphError for counts below 1; ShapeError unless there is one per stage.
    Example: three layers in two stages.
      >>> batch, width = mtf.Dimension("batch", 8), mtf.Dimension("width", 16)
      >>> layer = lambda h: mtf.layers.dense(h, width, activation=mtf.tanh)
      >>> with mtf.Graph() as graph:
      ...     x = mtf.input("x", [batch, width])
      ...     grads, outputs = mtf.layers.pipeline_training_step(
      ...         {"x": x}, lambda f: f["x"], lambda h, f: mtf.layers.stage_layers(layer, h, [1, 2]),
      ...         lambda h, f: mtf.square(h), batch, stages=2, microbatches=4)
      >>> print(graph.variables["dense/kernel"].output.shape)
      [stage:2, layers:2, width:16, width_out:16]
    """
    policy = checked_policy(remat, WHAT)
    sizes = [whole(n, WHAT, "counts", low=1) for n in items(counts, WHAT, "counts")]
    stage = tensor(x, WHAT).shape[0] if len(tensor(x, WHAT).shape) else None
    if stage is None or stage.size != len(sizes):
        raise ShapeError(f"{at(WHAT)}: the first dim of {x} must be the {len(sizes)} stages that counts has")
    dim = Dimension("layers", max(sizes))
    has = np.array([[n < count for count in sizes] for n in range(dim.size)])
    if has.all():
        (y,), _ = scan(
            lambda carries, _: ((layer_fn(carries[0]),), ()), [x], dim=dim, stack_variables=True, remat=policy
        )
        return y
    active = Active(stage.name, tuple(tuple(map(int, np.nonzero(row)[0])) for row in has), stage.size)
    masks = table(x.graph, has, Shape([dim, stage]), BOOL, "has_layer")

    def body(carries: Sequence[Tensor], slices: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], tuple[()]]:
        (mask,) = slices

        def layer(given: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
            (h,) = given
            return [where(h.graph.adopt(mask), layer_fn(h), h, output_shape=h.shape)], []

        return branch(LAYER, layer, carries, mask, active, policy).carries, ()

    # Values of a layer that the policy keeps are results of the branch.
    keeps = isinstance(policy, Remat) or policy != "full"
    (y,), _ = scan(body, [x], [masks], dim, stack_variables=True, remat="none" if keeps else "full")
    return y


def loads_of(operations: Iterable[Operation], stages: int) -> list[float]:
    """The work of each stage relative to the largest, from its number of layers; empty if all are equal."""
    for op in all_operations(operations):
        record = None if op.loop is None else op.loop.branch
        if record is not None and record.kind == LAYER:
            counts = [sum(stage in row for row in record.active.indices) for stage in range(stages)]
            return [count / max(counts) for count in counts]
    return []
