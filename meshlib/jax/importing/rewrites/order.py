"""Sorting by several keys, reshapes that read axes in another order, and reductions over a named axis of `vmap`."""

from __future__ import annotations

from typing import Any

from jax import lax

from meshlib.jax.importing.code import CodeStep
from meshlib.jax.importing.rewrites.table import Function, rewrite


def _sort(step: CodeStep) -> Function | None:
    keys, at = int(step.params["num_keys"]), int(step.params["dimension"])
    if keys == 1:
        return None

    def run(*operands: Any) -> Any:
        for n in reversed(range(keys)):  # last key first; the sort is stable
            operands = tuple(lax.sort((operands[n], *operands), dimension=at, num_keys=1, is_stable=True))[1:]
        return operands

    return run


rewrite("sort", _sort)


def _over_axes(step: CodeStep) -> Function | None:
    axes = step.params["axes"]
    if not all(isinstance(a, int) for a in axes):
        return None  # a mesh axis: the layout decides on collectives
    reduce = {"psum": lax.reduce_sum, "pmax": lax.reduce_max, "pmin": lax.reduce_min}[step.kind]
    return lambda *xs: [reduce(x, axes) for x in xs]


rewrite("psum pmax pmin", _over_axes)


def _reordered(step: CodeStep) -> Function | None:
    order = step.params["dimensions"]  # as `vmap` of a convolution gives it
    return None if order is None else lambda x: lax.reshape(lax.transpose(x, order), step.params["new_sizes"])


rewrite("reshape", _reordered)
