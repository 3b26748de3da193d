"""Reverse-mode gradients: ordinary operations on the unsharded graph, so that no collective needs one.

Cotangents of a value meet in one n-ary `add_n`; the lowering groups its operands by what they still have to be
summed over, so each group is reduced once.
"""

from __future__ import annotations

from collections.abc import Sequence

from meshlib.checks import at, items
from meshlib.errors import GraphError, ShapeError
from meshlib.graph import BACKWARD, Graph, Operation, Tensor, absolute_scope, region
from meshlib.operation import tensor
from meshlib.ops.elementwise import add_n
from meshlib.ops.shape import broadcast
from meshlib.ops.sources import _constant
from meshlib.ops.state import identity


def gradients(
    ys: Sequence[Tensor] | Tensor, xs: Sequence[Tensor], grad_ys: Sequence[Tensor] | None = None
) -> list[Tensor | None]:
    """d(sum of ys) / dx for every x in `xs`; None where no y depends on x.

    Args:
      ys: float tensors of one graph.
      xs: tensors; variables are usual, any tensor works.
      grad_ys: cotangents of `ys`, of their shapes; ones unless given.
    Returns: one tensor of x's shape and dtype, or None, per x.
    Raises: GraphError, ShapeError for tensors of another graph, dtype or shape.
    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     w = mtf.variable("w", [mtf.Dimension("d", 3)])
      ...     loss = mtf.reduce_sum(mtf.square(w))
      ...     (dw,) = mtf.gradients([loss], [w])
      >>> print(dw.shape)
      [d:3]
    """
    targets = [ys] if isinstance(ys, Tensor) else items(ys, "gradients", "ys")
    xs = items(xs, "gradients", "xs")
    if not targets:
        raise GraphError(f"{at('gradients')}: needs at least one y, got an empty list")
    graph = tensor(targets[0], "gradients").graph
    for t in (*targets, *xs):
        if tensor(t, "gradients").graph is not graph:
            raise GraphError(f"{at('gradients')}: {t} belongs to another graph than {targets[0]}")
    with region(BACKWARD):
        cotangents = _seeds(graph, targets, grad_ys)
        _sweep(graph, cotangents, set(xs))
        return [_gathered(graph, x, cotangents) for x in xs]


def _seeds(graph: Graph, ys: Sequence[Tensor], grad_ys: Sequence[Tensor] | None) -> dict[Tensor, list[Tensor]]:
    if grad_ys is not None:
        grad_ys = [tensor(g, "gradients grad_ys") for g in items(grad_ys, "gradients", "grad_ys")]
    if grad_ys is not None and len(grad_ys) != len(ys):
        raise GraphError(f"{at('gradients')}: {len(ys)} ys, but {len(grad_ys)} grad_ys")
    cotangents: dict[Tensor, list[Tensor]] = {}
    for i, y in enumerate(ys):
        if not y.dtype.is_float:
            raise GraphError(f"{at('gradients')}: {y} ({y.operation.source}) is no float tensor and has no gradient")
        seed = grad_ys[i] if grad_ys is not None else _constant(graph, 1, y.shape, y.dtype, "ones")
        if seed.shape != y.shape or seed.dtype is not y.dtype:
            raise ShapeError(f"{at('gradients')}: the cotangent {seed} does not have the type of {y}")
        cotangents.setdefault(y, []).append(seed)
    return cotangents


def _sweep(graph: Graph, cotangents: dict[Tensor, list[Tensor]], wanted: set[Tensor]) -> None:
    depends = _depending_on(graph, wanted)
    for op in reversed(tuple(graph.operations)):
        found = [y for y in op.outputs if y in cotangents]
        if not found or not op.inputs or not any(x in depends for x in op.inputs):
            continue
        with absolute_scope(f"{op.name}/grad"):
            dy = add_n(cotangents[op.output])
            cotangents[op.output] = [dy]
            for x, dx in zip(op.inputs, op.kind.grad(op, dy), strict=True):
                if dx is not None and x in depends and x.dtype.is_float:
                    cotangents.setdefault(x, []).append(dx)


def _depending_on(graph: Graph, xs: set[Tensor]) -> set[Tensor]:
    found = set(xs)
    for op in graph.operations:
        if any(x in found for x in op.inputs):
            found.update(op.outputs)
    return found


def _gathered(graph: Graph, x: Tensor, cotangents: dict[Tensor, list[Tensor]]) -> Tensor | None:
    if x not in cotangents:
        return None
    with absolute_scope(f"{x.operation.name}/grad"):
        dx = add_n(cotangents[x])
        if dx.shape != x.shape:
            dx = broadcast(dx, x.shape)
        if x.operation.kind.name == "variable":
            dx = _own(graph, dx, x.operation)
    return dx


def _own(graph: Graph, dx: Tensor, variable: Operation) -> Tensor:
    """Mark `dx` as the gradient of `variable`; a value that serves otherwise too gets a name of its own."""
    if dx.operation.region != BACKWARD or dx in graph.gradient_of:
        dx = identity(dx)
    graph.gradient_of[dx] = variable
    return dx
