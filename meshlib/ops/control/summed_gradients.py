"""Gradients accumulated over the trips of a loop: which tensors are summed, and how variables' gradients follow."""

from __future__ import annotations

from collections.abc import Sequence

from meshlib.core.arguments import at
from meshlib.core.dtypes import FLOAT32, FLOAT64
from meshlib.core.errors import GraphError
from meshlib.core.graph import BACKWARD, Graph, Operation, Tensor, region
from meshlib.core.opdef import Kind
from meshlib.ops.gradients import gradients
from meshlib.ops.pointwise.casts import CAST, cast


def led_to(graph: Graph) -> set[Tensor]:
    """The tensors of a root graph that depend on trainable variables, and these variables."""
    leads = set(graph.trainable_variables)
    for op in graph.operations:
        if any(x in leads for x in op.inputs):
            leads.update(op.outputs)
    return leads


def wide(x: Tensor) -> Tensor:
    """`x` cast to the dtype of accumulation."""
    return cast(x, FLOAT32) if x.dtype.is_float and x.dtype is not FLOAT64 else x


def variable_gradients(
    graph: Graph, loop: Operation, sources: Sequence[Tensor], totals: Sequence[Tensor], what: str, scale: float = 1.0
) -> list[Tensor]:
    """The gradients of all trainable variables from sums over the trips of a loop, computed once after it.

    Args:
      loop: has the results `totals`, the sums of d loss / d source for the `sources`, tensors of `graph`.
      what: the public function, for messages.
      scale: factor of all gradients.
    Raises: GraphError for a trainable variable that the loss does not depend on.
    """
    roots = []
    for outer, total in zip(sources, totals, strict=True):
        root = _uncast(outer)
        if root.operation.opdef.kind is Kind.VARIABLE:
            _shard_like_slots(loop, total, root.operation)
        roots.append(root)
    trainable = graph.trainable_variables
    with region(BACKWARD):
        scaled = totals if scale == 1 else [t * scale for t in totals]
        seeds = [cast(t, r.dtype) for t, r in zip(scaled, roots, strict=True)]
    of_variables = gradients(roots, trainable, seeds) if roots else [None] * len(trainable)
    missing = [f"'{v.name}' ({v.operation.source})" for v, g in zip(trainable, of_variables, strict=True) if g is None]
    if missing:
        raise GraphError(
            f"{at(what)}: the loss does not depend on {', '.join(missing)}; declare untrained variables with "
            "trainable=False"
        )
    return [g for g in of_variables if g is not None]


def _shard_like_slots(loop: Operation, total: Tensor, variable: Operation) -> None:
    """Give an accumulated gradient the sharding of the variable's slots, in the loop and after it."""
    assert loop.loop is not None
    number = loop.outputs.index(total)
    for t in (loop.loop.given.inits[number], loop.loop.made.finals[number], total):
        t.graph.gradient_of[t] = variable


def _uncast(x: Tensor) -> Tensor:
    """The float tensor that `x` is a cast of: its gradient is accumulated before rounding to the narrow type."""
    while x.operation.opdef is CAST and x.operation.inputs[0].dtype.is_float:
        x = x.operation.inputs[0]
    return x
