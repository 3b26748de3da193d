"""Reductions over dims: sum, mean, max, min, all, any; logsumexp, softmax and log_softmax composed of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from layouts import Dimension, Shape
from meshlib.core.arguments import at
from meshlib.core.dtypes import BOOL
from meshlib.core.errors import ShapeError
from meshlib.core.graph import Operation, Tensor, TensorType, find_dim
from meshlib.core.opdef import Array, Block, Kind, Linear, OpDef, Role, ShapeRule, Total, Work, operation
from meshlib.ops.building import (
    as_dims,
    build,
    check_adds,
    floats,
    not_differentiable,
    reducing_factors,
    size_of,
    tensor,
)
from meshlib.ops.control.state import stop_gradient
from meshlib.ops.pointwise.arithmetic import add, equal, exp, log, multiply, subtract
from meshlib.ops.pointwise.casts import cast


def _shape(types: tuple[TensorType, ...], attrs: Mapping[str, Any]) -> TensorType:
    (x,) = types
    out: Shape = attrs["shape"]
    for d in out:
        if d.name not in x.shape:
            raise ShapeError(f"output dim '{d.name}' is not a dim of the operand {x.shape}")
        if d not in x.shape:
            raise ShapeError(f"output dim '{d.name}' has size {d.size}, but {x.shape.dim(d.name).size} in the operand")
    return TensorType(out, x.dtype)


def _number_shape(types: tuple[TensorType, ...], attrs: Mapping[str, Any]) -> TensorType:
    check_adds(types[0].dtype)
    return _shape(types, attrs)


def _ordered_shape(types: tuple[TensorType, ...], attrs: Mapping[str, Any]) -> TensorType:
    if types[0].dtype is BOOL:
        raise ShapeError("needs numbers, got bool; cast first, as in mtf.cast(x, 'int32')")
    return _shape(types, attrs)


def _flag_shape(types: tuple[TensorType, ...], attrs: Mapping[str, Any]) -> TensorType:
    if types[0].dtype is not BOOL:
        raise ShapeError(f"needs bool, got {types[0].dtype.name}; compare first, as in mtf.not_equal(x, 0)")
    return _shape(types, attrs)


def _define(
    name: str, ufunc: np.ufunc, role: Role, grad: Callable[..., Any], shape: ShapeRule = _number_shape, **traits: Any
) -> OpDef:
    def local(block: Block, x: Array) -> Array:
        names, out_names = block.inputs[0].shape.names, block.out.shape.names
        axes = tuple(i for i, n in enumerate(names) if n not in out_names)
        out_order = tuple(n for n in names if n in out_names)
        out = block.result()
        if out_order == out_names:
            ufunc.reduce(x, axis=axes, out=out)
        else:
            np.copyto(out, ufunc.reduce(x, axis=axes).transpose([out_order.index(n) for n in out_names]))
        return out

    return operation(
        name,
        kind=Kind.REDUCTION,
        shape=shape,
        roles=lambda op: reducing_factors(op, role),
        local=local,
        grad=grad,
        work=lambda ins, out, attrs: Work(0, ins[0].shape.size),
        **traits,
    )


def _sum_grad(op: Operation, dy: Tensor) -> list[Tensor | None]:
    from meshlib.ops.movement.shape import broadcast

    return [broadcast(dy, op.inputs[0].shape)]


def _extreme_grad(op: Operation, dy: Tensor) -> list[Tensor | None]:
    # Ties share the cotangent equally, so that the gradient does not depend on the order of blocks.
    x, y = op.inputs[0], op.output
    chosen = cast(equal(x, y), dy.dtype)
    return [chosen * (dy / reduce_sum(chosen, output_shape=y.shape))]


_SUM = _define("reduce_sum", np.add, Role.SUM, _sum_grad, linear=lambda op: Linear((0,)), form=lambda op: Total())
_MAX = _define("reduce_max", np.maximum, Role.MAX, _extreme_grad, _ordered_shape, exact=True)
_MIN = _define("reduce_min", np.minimum, Role.MIN, _extreme_grad, _ordered_shape, exact=True)
# False < True: over a split dim "all" is a pending minimum and "any" a pending maximum, of one byte per element.
_ALL = _define("reduce_all", np.logical_and, Role.MIN, not_differentiable, _flag_shape, exact=True)
_ANY = _define("reduce_any", np.logical_or, Role.MAX, not_differentiable, _flag_shape, exact=True)


def _reduce(
    kind: OpDef,
    x: Tensor,
    output_shape: Shape | Sequence[Dimension] | None,
    reduced_dim: Dimension | Sequence[Dimension] | None,
    name: str | None,
) -> Tensor:
    tensor(x, kind.name)
    if output_shape is not None and reduced_dim is not None:
        raise ShapeError(f"{at(kind.name)}: give output_shape or reduced_dim, not both")
    if output_shape is not None:
        out = Shape(as_dims(output_shape, f"{kind.name} output_shape", [x]))
    elif reduced_dim is not None:
        gone = as_dims(reduced_dim, f"{kind.name} reduced_dim", [x])
        for d in gone:
            find_dim(x, d, f"{kind.name} reduced_dim")
        out = Shape([d for d in x.shape if d not in gone])
    else:
        out = Shape([])
    if out == x.shape:
        return x
    if len(out) == len(x.shape):
        from meshlib.ops.movement.shape import transpose

        return transpose(x, out, name)
    return build(kind, [x], {"shape": out}, name)


class Reduction(Protocol):
    """Signature of a public reduction."""

    def __call__(
        self,
        x: Tensor,
        disable_positional_args: None = None,
        output_shape: Shape | Sequence[Dimension] | None = None,
        reduced_dim: Dimension | Sequence[Dimension] | None = None,
        name: str | None = None,
    ) -> Tensor: ...


def _public(kind: OpDef, doc: str, example: str) -> Reduction:
    """A public reduction; `example` is its result on [[1, 2], [3, 4]], or on bools [[1, 1], [1, 0]], by rows."""

    def function(
        x: Tensor,
        disable_positional_args: None = None,
        output_shape: Shape | Sequence[Dimension] | None = None,
        reduced_dim: Dimension | Sequence[Dimension] | None = None,
        name: str | None = None,
    ) -> Tensor:
        _named_only(kind.name, disable_positional_args)
        return _reduce(kind, x, output_shape, reduced_dim, name)

    function.__name__ = function.__qualname__ = kind.name
    dtype, feed = (', "bool"', "[[True, True], [True, False]]") if kind in (_ALL, _ANY) else ("", "[[1, 2], [3, 4]]")
    function.__doc__ = f"""{doc}

    Returns: a tensor with the dims of `output_shape`, or those of x without `reduced_dim`.
    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.{kind.name}(mtf.input("x", "a:2;b:2"{dtype}), output_shape="a:2")
      >>> print(mtf.simulate(mtf.lower({{"y": y}})).step(x={feed})["y"])
      {example}
    """
    return function


reduce_sum = _public(
    _SUM,
    """Sum over `reduced_dim`, or over all dims that are not in `output_shape`; over all dims without either.

    `disable_positional_args` must stay None: as in Mesh TensorFlow it makes the two ways be named.""",
    "[3. 7.]",
)
reduce_max = _public(_MAX, "Maximum over dims, chosen as in `reduce_sum`; ties share the gradient equally.", "[2. 4.]")
reduce_min = _public(_MIN, "Minimum over dims, chosen as in `reduce_sum`; ties share the gradient equally.", "[1. 3.]")
reduce_all = _public(_ALL, "True if all elements are, over dims chosen as in `reduce_sum`; bool.", "[ True False]")
reduce_any = _public(_ANY, "True if some element is, over dims chosen as in `reduce_sum`; bool.", "[ True  True]")


def reduce_mean(
    x: Tensor,
    disable_positional_args: None = None,
    output_shape: Shape | Sequence[Dimension] | None = None,
    reduced_dim: Dimension | Sequence[Dimension] | None = None,
    name: str | None = None,
) -> Tensor:
    """Mean over dims, chosen as in `reduce_sum`; float dtypes.

    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.reduce_mean(mtf.input("x", "a:2;b:2"), reduced_dim=mtf.Dimension("b", 2))
      >>> print(mtf.simulate(mtf.lower({"y": y})).step(x=[[1.0, 2.0], [3.0, 4.0]])["y"])
      [1.5 3.5]
    """
    _named_only("reduce_mean", disable_positional_args)
    total = _reduce(_SUM, floats(x, "reduce_mean"), output_shape, reduced_dim, None if name is None else f"{name}/sum")
    return multiply(total, size_of(total.shape.dims) / size_of(x.shape.dims), name=name)


def _named_only(what: str, positional: object) -> None:
    if positional is not None:
        raise ShapeError(
            f"{at(what)}: name the second argument, output_shape=... or reduced_dim=..., got {positional!r:.80}"
        )


def reduce_logsumexp(
    x: Tensor, reduced_dim: Dimension, extra_logit: float | Tensor | None = None, name: str | None = None
) -> Tensor:
    """log(sum(exp(x))) over `reduced_dim`, without overflow; `extra_logit` counts as one more element.

    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.reduce_logsumexp(mtf.input("x", "d:4"), mtf.Dimension("d", 4))
      >>> print(mtf.simulate(mtf.lower({"y": y})).step(x=[3.0, 1.0, 2.0, 0.0])["y"].round(4))
      3.4402
    """
    peak = stop_gradient(reduce_max(x, reduced_dim=reduced_dim))
    if extra_logit is not None:
        from meshlib.ops.pointwise.arithmetic import maximum

        peak = stop_gradient(maximum(peak, extra_logit))
    total = reduce_sum(exp(x - peak), reduced_dim=reduced_dim)
    if extra_logit is not None:
        total = total + exp(extra_logit - peak)
    return add(log(total), peak, name=name)


def log_softmax(
    x: Tensor, reduced_dim: Dimension, extra_logit: float | Tensor | None = None, name: str | None = None
) -> Tensor:
    """x - logsumexp(x) over `reduced_dim`.

    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.log_softmax(mtf.input("x", "d:2"), mtf.Dimension("d", 2))
      >>> print(mtf.simulate(mtf.lower({"y": y})).step(x=[0.0, 0.0])["y"].round(4))
      [-0.6931 -0.6931]
    """
    return subtract(x, reduce_logsumexp(x, reduced_dim, extra_logit), name=name)


def softmax(
    x: Tensor, reduced_dim: Dimension, extra_logit: float | Tensor | None = None, name: str | None = None
) -> Tensor:
    """exp(x) normalised to sum 1 over `reduced_dim`.

    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.softmax(mtf.input("x", "d:2"), mtf.Dimension("d", 2))
      >>> print(mtf.simulate(mtf.lower({"y": y})).step(x=[0.0, 0.0])["y"])
      [0.5 0.5]
    """
    return exp(log_softmax(x, reduced_dim, extra_logit), name)
