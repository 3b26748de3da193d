"""Primitives that rearrange axes, and those that work along them: reductions, running sums, sorting."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from layouts import Dimension
from meshlib.core.graph import Tensor
from meshlib.jax.importing.axes import Axes, Axis, equal_groups
from meshlib.jax.importing.code import DTYPES, Array, CodeStep
from meshlib.jax.importing.table import fresh, give, rule, same_axes
from meshlib.jax.importing.writing import StepWriter
from meshlib.ops.control.state import stop_gradient
from meshlib.ops.movement.indexing import gather
from meshlib.ops.movement.indexing import range as positions
from meshlib.ops.movement.ranking import argmax, argsort, top_k
from meshlib.ops.movement.runs import slice
from meshlib.ops.movement.shape import rename_dimension, reshape, transpose
from meshlib.ops.pointwise.arithmetic import exp, floordiv, log, multiply, negative, pow
from meshlib.ops.pointwise.casts import cast
from meshlib.ops.pointwise.cumulative import cumprod, cumsum
from meshlib.ops.pointwise.reductions import reduce_all, reduce_any, reduce_max, reduce_min, reduce_sum

# ---------------------------------------------------------------- the same values


def _as_it_is(w: StepWriter, step: CodeStep) -> Tensor:
    return w.tensor(step.ins[0])


def _broadcast_axes(axes: Axes, step: CodeStep) -> None:
    x, out = step.ins[0], step.outs[0]
    new_axes = [axes.new(n) for n in out.shape]
    for n, to in enumerate(step.params["broadcast_dimensions"]):
        if x.axes and x.shape[n] == out.shape[to]:
            new_axes[int(to)] = x.axes[n]
    give(axes, out, new_axes)


def _broadcast_fold(step: CodeStep, x: Array, *more: Array) -> Array:
    sizes = [1] * len(step.outs[0].shape)
    for n, to in enumerate(step.params["broadcast_dimensions"]):
        sizes[int(to)] = x.shape[n]
    return np.broadcast_to(x.reshape(sizes), step.outs[0].shape)


rule("broadcast_in_dim", axes=_broadcast_axes, write=_as_it_is, fold=_broadcast_fold)


def _transpose_axes(axes: Axes, step: CodeStep) -> None:
    give(axes, step.outs[0], [step.ins[0].axes[int(n)] for n in step.params["permutation"]])


rule(
    "transpose",
    axes=_transpose_axes,
    write=_as_it_is,
    fold=lambda step, x: x.transpose([int(n) for n in step.params["permutation"]]),
)


def _squeeze_axes(axes: Axes, step: CodeStep) -> None:
    gone = {int(n) % len(step.ins[0].shape) for n in step.params["dimensions"]}
    give(axes, step.outs[0], [a for n, a in enumerate(step.ins[0].axes) if n not in gone])


def _to_shape(step: CodeStep, x: Array) -> Array:
    return x.reshape(step.outs[0].shape)


rule("squeeze", axes=_squeeze_axes, write=_as_it_is, fold=_to_shape)


def _expand_axes(axes: Axes, step: CodeStep) -> None:
    out, old = step.outs[0], iter(step.ins[0].axes)
    new = {int(n) % len(out.shape) for n in step.params["dimensions"]}
    give(axes, out, [axes.new(1) if n in new else next(old) for n in range(len(out.shape))])


rule("expand_dims", axes=_expand_axes, write=_as_it_is, fold=_to_shape)


def _reshape_axes(axes: Axes, step: CodeStep) -> None:
    x, out = step.ins[0], step.outs[0]
    olds = [a for a in x.axes if a.size > 1]
    new_axes = [axes.new(n) for n in out.shape]
    news = [a for a in new_axes if a.size > 1]
    swap: dict[Axis, Axis] = {}
    for left, right in equal_groups(olds, news):
        if len(left) == len(right) == 1:
            swap[right[0]] = left[0]
    new_axes = [swap.get(a, a) for a in new_axes]
    give(axes, out, new_axes)
    for left, right in equal_groups(olds, [a for a in new_axes if a.size > 1]):
        if len(left) != 1 or len(right) != 1:
            axes.tie_runs(left, right)
            a, b = left[0].size, right[0].size
            if not a % b or not b % a:  # a split dim stays the major part
                axes.kin.append((right[0], left[0]))


def _reshape(w: StepWriter, step: CodeStep) -> Tensor:
    x, out = step.ins[0], step.outs[0]
    return w.under(x, out.axes)


rule("reshape", axes=_reshape_axes, write=_reshape, fold=_to_shape)


# ---------------------------------------------------------------- reductions


def _reduced(step: CodeStep) -> list[int]:
    return [int(n) for n in step.params["axes"]]


def _reduce_axes(axes: Axes, step: CodeStep) -> None:
    gone = _reduced(step)
    for out in step.outs:
        give(axes, out, [a for n, a in enumerate(step.ins[0].axes) if n not in gone])


def _reducing(function: Any, fold: Any, times: Any = None) -> dict[str, Any]:
    """Rule of a reduction; `times` accounts for dims along which the operand is constant."""

    def write(w: StepWriter, step: CodeStep) -> Tensor:
        x = step.ins[0]
        t, gone = w.tensor(x), w.shape([x.axes[n] for n in _reduced(step)])
        reduced: Tensor = function(t, reduced_dim=[d for d in gone if d in t.shape])
        missing = prod(d.size for d in gone if d not in t.shape)
        return reduced if times is None or missing == 1 else w.as_tensor(times(reduced, missing), step.outs[0])

    return {"axes": _reduce_axes, "write": write, "fold": lambda step, x: fold(x, axis=tuple(_reduced(step)))}


def _product(t: Tensor, reduced_dim: Sequence[Dimension]) -> Tensor:
    for d in reduced_dim:
        last = slice(cumprod(t, d), d.size - 1, 1, d.name)
        t = reduce_sum(last, reduced_dim=Dimension(d.name, 1))
    return t


rule("reduce_sum", **_reducing(reduce_sum, np.sum, multiply))
rule("reduce_max", **_reducing(reduce_max, np.max))
rule("reduce_min", **_reducing(reduce_min, np.min))
rule("reduce_and", **_reducing(reduce_all, np.all))
rule("reduce_or", **_reducing(reduce_any, np.any))
rule("reduce_prod", **_reducing(_product, np.prod, lambda t, n: pow(t, float(n))))


def _argmax(w: StepWriter, step: CodeStep) -> Tensor:
    x, (at,) = step.ins[0], _reduced(step)
    dims = [w.dim(d) for d in w.axes.dims(x.axes[at])]
    t = w.whole(x, x.axes, at) if len(dims) < 2 else w.full(w.under(x, x.axes), x.axes)
    if t.dtype.name == "bool":
        t = cast(t, "int32")
    t = t if step.kind == "argmax" else negative(t)
    if len(dims) < 2:
        return argmax(t, w.whole_dim(x.axes[at]))
    indices = _top_k_of_product(t, dims, Dimension("one", 1))[1]
    return reshape(indices, indices.shape.dims[:-1])


rule("argmax argmin", axes=_reduce_axes, write=_argmax)


# ---------------------------------------------------------------- along one axis


def _running(function: Any) -> Any:
    def write(w: StepWriter, step: CodeStep) -> Tensor:
        x, at = step.ins[0], int(step.params["axis"])
        one = w.whole_dim(x.axes[at])
        running = function(w.whole(x, x.axes, at), one, reverse=bool(step.params["reverse"]))
        return w.apart(running, x.axes[at])

    return write


rule("cumsum", axes=same_axes, write=_running(cumsum))
rule("cumprod", axes=same_axes, write=_running(cumprod))


def _log_of_sums(t: Tensor, dim: Dimension, reverse: bool) -> Tensor:
    peak = stop_gradient(reduce_max(t, reduced_dim=dim))
    return log(cumsum(exp(t - peak), dim, reverse=reverse)) + peak


rule("cumlogsumexp", axes=same_axes, write=_running(_log_of_sums))


def _reverse(w: StepWriter, step: CodeStep) -> Tensor:
    x = step.ins[0]
    t = w.tensor(x)
    for at in map(int, step.params["dimensions"]):
        one = w.whole_dim(x.axes[at])
        if all(d not in t.shape for d in w.shape([x.axes[at]])):
            continue
        t = w.merge(t, x.axes[at])
        aside = Dimension(f"{one.name}_reversed", one.size)
        t = gather(t, (one.size - 1) - positions(aside), one)
        t = w.apart(rename_dimension(t, aside.name, one.name), x.axes[at])
    return t


rule("rev", axes=same_axes, write=_reverse, fold=lambda step, x: np.flip(x, tuple(map(int, step.params["dimensions"]))))


def _sort(w: StepWriter, step: CodeStep) -> list[Tensor | None]:
    at, axes = int(step.params["dimension"]), step.outs[0].axes
    one = w.whole_dim(axes[at])
    sorted_dim = f"{one.name}_sorted"
    tensors = [w.whole(x, axes, at) for x in step.ins]
    order = rename_dimension(argsort(_widest(tensors[0]), one), one.name, sorted_dim)
    results: list[Tensor | None] = []
    for t in tensors:
        in_order = order if t.operation.opdef.name == "range" else gather(t, order, one)
        in_order = rename_dimension(in_order, sorted_dim, one.name)
        results.append(w.apart(in_order, axes[at]))
    return results


def _widest(t: Tensor) -> Tensor:
    return cast(t, "int32") if t.dtype.name == "bool" else t


rule("sort", axes=same_axes, write=_sort)


def _top_k_axes(axes: Axes, step: CodeStep) -> None:
    x, at = step.ins[0], _top_k_axis(step)
    k = axes.new(int(step.params["k"]))
    for out in step.outs:
        give(axes, out, [k if n == at else a for n, a in enumerate(x.axes)])


def _top_k_axis(step: CodeStep) -> int:
    return int(step.params.get("axis", -1)) % len(step.ins[0].shape)


def _top_k_of_product(t: Tensor, dims: Sequence[Dimension], k: Dimension) -> tuple[Tensor, Tensor]:
    """The largest elements over several dims, in row-major order: those along the last dim, then those among them.

    The dims need not be merged, so they may stay split, as the beams and the vocabulary of a beam search.
    """
    *major, minor = dims
    rest = [d for d in t.shape if d not in dims]
    each = Dimension(f"{k.name}_each", k.size)
    candidates = Dimension(f"{k.name}_candidates", prod(d.size for d in major) * k.size)
    values, within = (reshape(transpose(y, [*rest, *major, each]), [*rest, candidates]) for y in top_k(t, minor, each))
    values, chosen = top_k(values, candidates, k)
    return values, floordiv(chosen, k.size) * minor.size + gather(within, chosen, candidates)


def _top_k(w: StepWriter, step: CodeStep) -> list[Tensor | None]:
    x, at, out = step.ins[0], _top_k_axis(step), step.outs[0]
    dims, k = [w.dim(d) for d in w.axes.dims(x.axes[at])], w.whole_dim(out.axes[at])
    if len(dims) > 1 and k.size < dims[-1].size:
        values, indices = _top_k_of_product(w.full(w.under(x, x.axes), x.axes), dims, k)
    else:
        values, indices = top_k(w.whole(x, x.axes, at), w.whole_dim(x.axes[at]), k)
    return [w.apart(t, out.axes[at]) for t in (values, indices)]


rule("top_k", axes=_top_k_axes, write=_top_k)


# ---------------------------------------------------------------- positions


def _iota(w: StepWriter, step: CodeStep) -> Tensor:
    """Row-major positions; for an axis that is a product, those of each dim times its stride."""
    dims = w.axes.dims(step.outs[0].axes[int(step.params["dimension"])])
    stride, index = prod(d.size for d in dims), None
    for d in dims:
        stride //= d.size
        part = positions(w.dim(d))
        part = part if stride == 1 else part * stride
        index = part if index is None else index + part
    if index is None:
        return w.as_tensor(0, step.outs[0])
    return cast(index, DTYPES[step.outs[0].dtype])


rule("iota", axes=lambda axes, step: fresh(axes, step.outs[0]), write=_iota)
