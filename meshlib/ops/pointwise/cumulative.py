"""Cumulative sums, products and linear recurrences along a dim.

Along a split dim each device works on its own block and needs only a summary of the preceding blocks: their totals, or
the linear function by which each block maps its initial to its final state.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from layouts import Dimension, Shape
from meshlib.core.arguments import flag
from meshlib.core.errors import ShapeError
from meshlib.core.graph import Operation, Tensor, TensorType, find_dim
from meshlib.core.opdef import Array, Block, Factor, Kind, Linear, Role, Summary, Work, operation
from meshlib.ops.building import build, check_adds, named_factors, tensor, vector_work
from meshlib.ops.movement.indexing import range as positions
from meshlib.ops.movement.runs import shift
from meshlib.ops.pointwise.arithmetic import equal, where


def _roles(op: Operation) -> tuple[Factor, ...]:
    return named_factors(op, {op.attrs["dim"]: Role.SUMMARY})


def _axis(block: Block) -> int:
    return block.out.shape.index(block.attrs["dim"])


def _without(t: TensorType, dim: str) -> TensorType:
    return TensorType(Shape([d for d in t.shape if d.name != dim]), t.dtype)


def _shape(types: tuple[TensorType, ...], attrs: Mapping[str, Any]) -> TensorType:
    if any(t != types[0] for t in types):
        raise ShapeError(f"operands must have one type, got {' and '.join(map(str, types))}")
    check_adds(types[0].dtype)
    return types[0]


def _preceding(gathered: Array, index: int, reverse: bool) -> Array:
    """The summaries of the preceding blocks, in order."""
    return gathered[index + 1 :][::-1] if reverse else gathered[:index]


# ---------------------------------------------------------------- cumsum


def _cumsum_local(block: Block, x: Array) -> Array:
    axis, reverse = _axis(block), block.attrs["reverse"]
    out = block.result()
    source, target = (np.flip(x, axis), np.flip(out, axis)) if reverse else (x, out)
    np.cumsum(source, axis=axis, out=target)
    if block.attrs["exclusive"]:
        inside = (np.s_[:],) * axis
        target[(*inside, np.s_[1:])] = target[(*inside, np.s_[:-1])].copy()
        target[(*inside, np.s_[:1])] = 0
    return out


def _cumsum_finish(block: Block, gathered: tuple[Array, ...], index: int, x: Array) -> Array:
    out = _cumsum_local(block, x)
    for total in _preceding(gathered[0], index, block.attrs["reverse"]):
        np.add(out, np.expand_dims(total, _axis(block)), out=out)
    return out


CUMSUM = operation(
    "cumsum",
    kind=Kind.INDEXED,
    shape=_shape,
    roles=_roles,
    local=_cumsum_local,
    grad=lambda op, dy: [_cumsum(dy, op.attrs["dim"], op.attrs["exclusive"], not op.attrs["reverse"], None)],
    linear=lambda op: Linear((0,)),
    work=vector_work,
    lower=Summary(
        lambda block, x: (np.add.reduce(x, axis=_axis(block)),),
        _cumsum_finish,
        lambda types, attrs: (_without(types[0], attrs["dim"]),),
    ),
)


def _cumsum(x: Tensor, dim: str, exclusive: bool, reverse: bool, name: str | None) -> Tensor:
    return build(CUMSUM, [x], {"dim": dim, "exclusive": exclusive, "reverse": reverse}, name)


def cumsum(
    x: Tensor, dim: Dimension | str, exclusive: bool = False, reverse: bool = False, name: str | None = None
) -> Tensor:
    """y[i] = x[0] + ... + x[i] along `dim`; without x[i] if `exclusive`; from the other end if `reverse`.

    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.cumsum(mtf.input("x", "d:4"), mtf.Dimension("d", 4))
      >>> print(mtf.simulate(mtf.lower({"y": y})).step(x=[3.0, 1.0, 2.0, 0.0])["y"])
      [3. 4. 6. 6.]
    """
    d = find_dim(tensor(x, "cumsum"), dim, "cumsum")
    apart, backwards = flag(exclusive, "cumsum", "exclusive"), flag(reverse, "cumsum", "reverse")
    return _cumsum(x, d.name, apart, backwards, name)


# ---------------------------------------------------------------- linear recurrence


def _recur(block: Block, a: Array, x: Array, carry: Array | None) -> Array:
    axis, reverse = _axis(block), block.attrs["reverse"]
    out = block.result()
    a, x, y = (np.moveaxis(v, axis, 0) for v in (a, x, out))
    h = np.zeros(y.shape[1:], y.dtype) if carry is None else carry
    steps = range(len(y) - 1, -1, -1) if reverse else range(len(y))
    for i in steps:
        h = a[i] * h + x[i]
        y[i] = h
    return out


def _recurrence_summary(block: Block, a: Array, x: Array) -> tuple[Array, ...]:
    end = _recur(block, a, x, None)
    last = 0 if block.attrs["reverse"] else -1
    return np.multiply.reduce(a, axis=_axis(block)), np.take(end, last, axis=_axis(block))


def _recurrence_finish(block: Block, gathered: tuple[Array, ...], index: int, a: Array, x: Array) -> Array:
    factors, ends = (_preceding(g, index, block.attrs["reverse"]) for g in gathered)
    carry = np.zeros(gathered[1].shape[1:], gathered[1].dtype)
    for factor, end in zip(factors, ends, strict=True):
        carry = factor * carry + end
    return _recur(block, a, x, carry)


def _recurrence_grad(op: Operation, dy: Tensor) -> list[Tensor | None]:
    # g[i] = dy[i] + a[i + 1] g[i + 1]: the reversed recurrence; the cotangent of a is g[i] h[i - 1].
    a, dim = op.inputs[0], op.attrs["dim"]
    onward = 1 if op.attrs["reverse"] else -1
    g = linear_recurrence(shift(a, onward, dim, wrap=False), dy, dim, reverse=not op.attrs["reverse"])
    return [g * shift(op.output, -onward, dim, wrap=False), g]


RECURRENCE = operation(
    "linear_recurrence",
    kind=Kind.INDEXED,
    shape=_shape,
    roles=_roles,
    local=lambda block, a, x: _recur(block, a, x, None),
    grad=_recurrence_grad,
    linear=lambda op: Linear((1,)),
    work=lambda ins, out, attrs: Work(0, 2 * out.shape.size),
    lower=Summary(
        _recurrence_summary, _recurrence_finish, lambda types, attrs: (_without(types[0], attrs["dim"]),) * 2
    ),
)


def linear_recurrence(
    a: Tensor, x: Tensor, dim: Dimension | str, reverse: bool = False, name: str | None = None
) -> Tensor:
    """h[i] = a[i] h[i - 1] + x[i] along `dim`, from h = 0; from the other end if `reverse`: a diagonal state space.

    Args:
      a, x: one shape and float dtype.
      dim: may be split: each device then sends a product and a last value of its block.
    Returns: all h, of that shape and dtype.
    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     a, x = mtf.input("a", "t:3"), mtf.input("x", "t:3")
      ...     h = mtf.linear_recurrence(a, x, "t")
      >>> print(mtf.simulate(mtf.lower({"h": h})).step(a=[0.0, 0.5, 0.5], x=[4.0, 1.0, 0.0])["h"])
      [4.  3.  1.5]

    Source: Blelloch, "Prefix sums and their applications", 1990, section 1.4.
    """
    d = find_dim(tensor(x, "linear_recurrence"), dim, "linear_recurrence")
    attrs = {"dim": d.name, "reverse": flag(reverse, "linear_recurrence", "reverse")}
    return build(RECURRENCE, [tensor(a, "linear_recurrence"), x], attrs, name)


def cumprod(
    x: Tensor, dim: Dimension | str, exclusive: bool = False, reverse: bool = False, name: str | None = None
) -> Tensor:
    """y[i] = x[0] * ... * x[i] along `dim`; without x[i] if `exclusive`; from the other end if `reverse`.

    Written as the recurrence y[i] = x[i] y[i - 1], so that the gradient is right where elements are zero.
    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.cumprod(mtf.input("x", "d:4"), mtf.Dimension("d", 4))
      >>> print(mtf.simulate(mtf.lower({"y": y})).step(x=[3.0, 1.0, 2.0, 0.0])["y"])
      [3. 3. 6. 0.]
    """
    d = find_dim(tensor(x, "cumprod"), dim, "cumprod")
    reverse = flag(reverse, "cumprod", "reverse")
    first = equal(positions(d), d.size - 1 if reverse else 0)
    if flag(exclusive, "cumprod", "exclusive"):
        x = where(first, 1, shift(x, -1 if reverse else 1, d, wrap=False))
    return linear_recurrence(x, where(first, x, 0), d, reverse, name)
