"""Custom gradients: `custom_gradient`, and `recompute_grad`, which trades memory for recomputation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from meshlib.core.arguments import at, items
from meshlib.core.errors import GraphError
from meshlib.core.graph import Operation, Tensor, innermost
from meshlib.core.replay import Rewrite
from meshlib.ops.building import tensor
from meshlib.ops.control.remat import Policy, checked_policy, kept_values
from meshlib.ops.control.state import identity

Function = Callable[..., Any]


def recompute_grad(function: Function, explicit_inputs: Sequence[Tensor], remat: Policy = "full") -> Any:
    """function(*explicit_inputs), recomputed for its gradient instead of keeping intermediate values.

    Args:
      function: takes the inputs. Captured values that are not in `explicit_inputs` get gradients too.
      explicit_inputs: tensors kept until the backward pass.
      remat: policy for further kept values, as in `scan`. The backward pass recomputes the rest, gathers included.
    Returns: the result of `function`: a tensor, or a list or tuple of them.
    Raises: GraphError for an unknown policy.
    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     x = mtf.input("x", "d:2")
      ...     y = mtf.recompute_grad(lambda x: mtf.square(mtf.exp(x)), [x])
      ...     (dx,) = mtf.gradients([mtf.reduce_sum(y)], [x])
      >>> print(mtf.simulate(mtf.lower({"dx": dx})).step(x=[0.0, 0.0])["dx"])
      [2. 2.]
    """
    policy = checked_policy(remat, "recompute_grad")
    return _with_gradient(function, explicit_inputs, "recompute_grad", None, policy)


def custom_gradient(function: Function, gradient: Function, explicit_inputs: Sequence[Tensor]) -> Any:
    """function(*explicit_inputs) with a custom gradient rule.

    Args:
      function: takes the inputs, returns a tensor, or a list or tuple of them.
      gradient: takes a list of the inputs, a list of the used results in the order in which they are returned, and a
        list of their cotangents; returns a cotangent or None per input. It applies to all results, even to those that
        are inputs or do not depend on any.
      explicit_inputs: the inputs that get gradients; captured values get none.
    Example: gradient reversal.
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     x = mtf.input("x", [mtf.Dimension("d", 2)])
      ...     y = mtf.custom_gradient(lambda v: v, lambda inputs, outputs, dys: [mtf.negative(dys[0])], [x])
      ...     (dx,) = mtf.gradients(mtf.reduce_sum(mtf.square(y)), [x])
      >>> mtf.simulate(mtf.lower({"dx": dx})).step(x=[1.0, 2.0])["dx"].tolist()
      [-2.0, -4.0]
    """
    if not callable(gradient):
        raise GraphError(f"{at('custom_gradient')}: gradient must be a function, got {gradient!r:.80}")
    return _with_gradient(function, explicit_inputs, "custom_gradient", gradient)


def gradient_of_residuals(
    function: Callable[..., tuple[Sequence[Tensor], Sequence[Tensor]]],
    gradient: Callable[[Sequence[Tensor], Sequence[Tensor | None]], Sequence[Tensor | None]],
    explicit_inputs: Sequence[Tensor],
) -> list[Tensor]:
    """function(*explicit_inputs), which also returns the residuals that its gradient reads.

    Args:
      function: takes the inputs, returns a list of results and a list of residuals, which may be any tensors. An
        enclosing checkpoint or loop recomputes or keeps residuals like any value.
      gradient: takes the residuals and a cotangent or None per result; returns a cotangent or None per input. It must
        not refer to other tensors.
      explicit_inputs: the inputs that get gradients.
    Returns: the results.
    """
    residuals: list[Tensor] = []

    def results(*inputs: Tensor) -> list[Tensor]:
        outputs, read = function(*inputs)
        residuals.extend(read)
        return list(outputs)

    computed: list[Tensor] = _with_gradient(results, explicit_inputs, "custom_gradient", gradient, residuals=residuals)
    return computed


def _with_gradient(
    function: Function,
    explicit_inputs: Sequence[Tensor],
    what: str,
    gradient: Function | None,
    remat: Policy = "full",
    residuals: Sequence[Tensor] | None = None,
) -> Any:
    if not callable(function):
        raise GraphError(f"{at(what)}: expected a function of tensors, got {function!r:.80}")
    inputs = [tensor(x, what) for x in items(explicit_inputs, what, "explicit_inputs")]
    if not inputs:
        raise GraphError(f"{at(what)}: explicit_inputs must be a non-empty list of tensors, got []")
    graph = innermost(inputs, what)
    inputs = [graph.adopt(x) for x in inputs]
    count = len(graph.operations)
    outputs = function(*inputs)
    results = [outputs] if isinstance(outputs, Tensor) else items(outputs, what, "what the function returns")
    for y in results:
        if tensor(y, what).graph not in graph.around:
            raise GraphError(f"{at(what)}: the function must return tensors of the graph of its inputs, got {y}")
    saved = tuple(kept_values(graph.operations[count:], remat, what))
    own = [] if gradient is None else _distinct(results, graph.operations[count:])
    run = tuple(graph.operations[count:])
    if run:
        read = None if residuals is None else tuple(residuals)
        graph.rewrites.append(Rewrite(run, tuple(inputs), tuple(own), gradient, saved, read))
    if gradient is None:
        return outputs
    return own[0] if isinstance(outputs, Tensor) else tuple(own) if isinstance(outputs, tuple) else own


def _distinct(results: Sequence[Tensor], run: Sequence[Operation]) -> list[Tensor]:
    """The results as distinct tensors computed by `run`: inputs and repeated results are wrapped in `identity`."""
    reads = ("variable", "input")
    computed = {y for op in run if op.opdef.name not in reads for y in op.outputs}
    own: list[Tensor] = []
    for y in results:
        own.append(y if y in computed and y not in own else identity(y))
    return own
