"""Reverse-mode gradients: ordinary operations on the unsharded graph, so that no collective needs one.

Gradient operations carry the source line of their forward operation. The cotangents of a value are summed in one n-ary
`add_n`; the lowering groups its operands by pending axes, so that each group is reduced once.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from contextvars import ContextVar

from meshlib.core.arguments import at, items
from meshlib.core.errors import GraphError, ShapeError
from meshlib.core.garbage import uncollected
from meshlib.core.graph import BACKWARD, Graph, Operation, Tensor, absolute_scope, innermost, region
from meshlib.core.opdef import RESIDENT, Kind
from meshlib.core.replay import Rewrite, replay
from meshlib.core.source_lines import written_at
from meshlib.ops.building import tensor
from meshlib.ops.control.remat import from_host
from meshlib.ops.control.sources import _constant
from meshlib.ops.control.state import identity
from meshlib.ops.movement.shape import broadcast
from meshlib.ops.pointwise.arithmetic import add_n

# Tensors that depend on the inputs of the gradients being built.
_depending: ContextVar[Container[Tensor]] = ContextVar("depending")


@uncollected
def gradients(
    ys: Sequence[Tensor] | Tensor, xs: Sequence[Tensor], grad_ys: Sequence[Tensor] | None = None
) -> list[Tensor | None]:
    """d(sum of ys) / dx for every x in `xs`; None where no y depends on x.

    Args:
      ys: float tensors of one graph.
      xs: tensors; variables are usual, any tensor works.
      grad_ys: cotangents of `ys`, with their shapes and dtypes of gradients; by default ones.
    Returns: per x a tensor of its shape and dtype (bfloat16 for fp8), or None.
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
    with graph, region(BACKWARD):
        cotangents = _seeds(graph, targets, grad_ys)
        _backpropagate(graph, graph.operations, cotangents, set(xs))
        return [_summed_cotangent(graph, x, cotangents) for x in xs]


def _seeds(graph: Graph, ys: Sequence[Tensor], grad_ys: Sequence[Tensor] | None) -> dict[Tensor, list[Tensor]]:
    if grad_ys is not None:
        grad_ys = [tensor(g, "gradients grad_ys") for g in items(grad_ys, "gradients", "grad_ys")]
    if grad_ys is not None and len(grad_ys) != len(ys):
        raise GraphError(f"{at('gradients')}: {len(ys)} ys, but {len(grad_ys)} grad_ys")
    cotangents: dict[Tensor, list[Tensor]] = {}
    for i, y in enumerate(ys):
        if not y.dtype.is_float:
            raise GraphError(f"{at('gradients')}: {y} ({y.operation.source}) is not a float tensor and has no gradient")
        with written_at(y.operation.source):
            seed = grad_ys[i] if grad_ys is not None else _constant(graph, 1, y.shape, y.dtype.of_cotangents, "ones")
        if seed.type != y.type.of_cotangents:
            raise ShapeError(f"{at('gradients')}: the cotangent {seed} does not have the type of {y}")
        cotangents.setdefault(y, []).append(seed)
    return cotangents


def _backpropagate(
    graph: Graph, operations: Sequence[Operation], cotangents: dict[Tensor, list[Tensor]], wanted: set[Tensor]
) -> None:
    """Propagate cotangents backwards through a sequence of operations of `graph`."""
    operations, swept = tuple(operations), set(operations)
    rewrites = [r for r in graph.rewrites if r.operations[0] in swept and r.operations[-1] in swept]
    ends = {r.operations[-1]: r for r in rewrites}  # the outermost rewrite that ends there
    depends = _depending_on(operations, rewrites, wanted)
    passed: set[Operation] = set()
    token = _depending.set(depends)
    try:
        for op in reversed(operations):
            if op in passed:
                continue
            rewrite = ends.get(op)
            if rewrite is None:
                sides = _gradients(op, cotangents, depends)
            else:
                passed.update(rewrite.operations)
                sides = _rewritten(graph, rewrite, cotangents, depends)
            for x, dx in sides:
                if x in depends and x.dtype.is_float:
                    cotangents.setdefault(x, []).append(dx)
    finally:
        _depending.reset(token)


Sides = list[tuple[Tensor, Tensor]]


def is_wanted(x: Tensor) -> bool:
    """True if the gradients being built need a cotangent of `x`, for rules that can skip it."""
    return x in _depending.get()


def _gradients(op: Operation, cotangents: dict[Tensor, list[Tensor]], depends: set[Tensor]) -> Sides:
    """The cotangents that one operation passes to its operands."""
    if not any(y in cotangents for y in op.outputs) or not any(x in depends for x in op.inputs):
        return []
    with absolute_scope(f"{op.name}/grad"), written_at(op.source):
        dys = [_total(y, cotangents) for y in op.outputs]
        pairs = zip(op.inputs, op.opdef.grad(op, *dys), strict=True)
        return [(x, dx) for x, dx in pairs if dx is not None]


def _rewritten(graph: Graph, rewrite: Rewrite, cotangents: dict[Tensor, list[Tensor]], depends: set[Tensor]) -> Sides:
    """The cotangents that a function with a custom gradient passes to its inputs; its inner values get none."""
    computed = (y for op in rewrite.operations if not _is_read(op) for y in op.outputs)
    results = [y for y in dict.fromkeys((*rewrite.results, *computed)) if y in cotangents]
    if not any(y in depends for y in results):
        return []
    first = results[0].operation
    with absolute_scope(f"{first.name}/grad"), written_at(first.source, default=True):
        dys = [add_n(cotangents[y]) for y in results]
        if rewrite.gradient is None:
            return _recomputed(graph, rewrite, results, dys)
        if rewrite.residuals is None:
            given = rewrite.gradient(list(rewrite.inputs), results, dys)
        else:
            given = _of_residuals(graph, rewrite, dict(zip(results, dys, strict=True)), cotangents)
        returned = items(given, "custom_gradient", "what gradient returns")
    if len(returned) != len(rewrite.inputs):
        raise GraphError(
            f"{at('custom_gradient')}: gradient must return {len(rewrite.inputs)} cotangents, got {len(returned)}"
        )
    sides = [
        (x, tensor(dx, "custom_gradient")) for x, dx in zip(rewrite.inputs, returned, strict=True) if dx is not None
    ]
    for x, dx in sides:
        if dx.type != x.type.of_cotangents:
            raise ShapeError(f"{at('custom_gradient')}: the cotangent {dx} does not have the type of {x}")
    return sides


def _of_residuals(
    graph: Graph, rewrite: Rewrite, dys: Mapping[Tensor, Tensor], cotangents: Mapping[Tensor, object]
) -> Sequence[Tensor | None]:
    if any(y in cotangents for op in rewrite.written for y in op.outputs):
        raise GraphError(
            f"{at('gradients')}: {rewrite.operations[0]} has a derivative rule, of which no second derivative can be "
            "taken here; take the first one in JAX, by jax.grad"
        )
    assert rewrite.gradient is not None
    assert rewrite.residuals is not None
    count = len(graph.operations)
    returned: Sequence[Tensor | None] = rewrite.gradient(rewrite.residuals, [dys.get(y) for y in rewrite.results])
    rewrite.written.extend(graph.operations[count:])
    return returned


def _is_read(op: Operation) -> bool:
    """True for variables and inputs, which recomputation reads instead of copying."""
    return op.opdef.kind in RESIDENT


def _recomputed(graph: Graph, rewrite: Rewrite, results: Sequence[Tensor], dys: Sequence[Tensor]) -> Sides:
    """Recompute the operations, and propagate cotangents through the copies to captured values."""
    reads = {y: y for op in rewrite.operations if _is_read(op) for y in op.outputs}
    recomputed = {y for op in rewrite.operations for y in op.outputs if y not in reads}
    outside = list(dict.fromkeys(x for op in rewrite.operations for x in op.inputs if x not in recomputed))
    known = {y: from_host(where) if where.on_host else where for y, where in rewrite.kept}
    count = len(graph.operations)
    again = replay(rewrite.operations, graph.rewrites[: graph.rewrites.index(rewrite)], reads, graph)
    graph.known.update((again[y], value) for y, value in known.items())
    cotangents: dict[Tensor, list[Tensor]] = {}
    for y, dy in zip(results, dys, strict=True):
        cotangents.setdefault(again[y], []).append(dy)
    _backpropagate(graph, graph.operations[count:], cotangents, set(outside))
    return [(x, add_n(cotangents[x])) for x in outside if x in cotangents]


def composed_gradient(
    function: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor], dys: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """The cotangents of `inputs` if the results of function(*inputs) have the cotangents `dys`.

    For operations whose gradient is defined by a composition of other operations, which can be differentiated further.
    """
    graph = innermost([*inputs, *(dy for dy in dys if dy is not None)], "gradients")
    count = len(graph.operations)
    stand_ins = [identity(x) for x in inputs]  # stops cotangents from flowing past the inputs
    cotangents: dict[Tensor, list[Tensor]] = {}
    for y, dy in zip(function(*stand_ins), dys, strict=True):
        if dy is not None:
            cotangents.setdefault(y, []).append(dy)
    _backpropagate(graph, graph.operations[count:], cotangents, set(stand_ins))
    return [add_n(cotangents[x]) if x in cotangents else None for x in stand_ins]


def _total(y: Tensor, cotangents: dict[Tensor, list[Tensor]]) -> Tensor | None:
    if y not in cotangents:
        return None
    dy = add_n(cotangents[y])
    cotangents[y] = [dy]
    return dy


def _depending_on(operations: Sequence[Operation], rewrites: Sequence[Rewrite], xs: set[Tensor]) -> set[Tensor]:
    """The tensors that depend on `xs`; results of a custom gradient depend on its inputs alone."""
    ruled = {op: r for r in rewrites if r.gradient is not None for op in r.operations}
    dependent = set(xs)
    for op in operations:
        inputs = ruled[op].inputs if op in ruled and not _is_read(op) else op.inputs
        if any(x in dependent for x in inputs):
            dependent.update(op.outputs)
    return dependent


def _summed_cotangent(graph: Graph, x: Tensor, cotangents: dict[Tensor, list[Tensor]]) -> Tensor | None:
    if x not in cotangents:
        return None
    with absolute_scope(f"{x.operation.name}/grad"), written_at(x.operation.source):
        dx = add_n(cotangents[x])
        if dx.shape != x.shape:
            dx = broadcast(dx, x.shape)
        if x.operation.opdef.kind is Kind.VARIABLE:
            dx = _marked_gradient(graph, dx, x.operation)
    return dx


def _marked_gradient(graph: Graph, dx: Tensor, variable: Operation) -> Tensor:
    """Mark `dx` as the gradient of `variable`, through `identity` if the value also has another use."""
    if dx.operation.region != BACKWARD or dx in graph.gradient_of:
        dx = identity(dx)
    graph.gradient_of[dx] = variable
    return dx
