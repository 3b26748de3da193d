"""Order by several keys, and reductions over the axis of a `vmap` that has a name."""

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
        for n in reversed(range(keys)):  # the last key first; equal elements stay in their order
            operands = tuple(lax.sort((operands[n], *operands), dimension=at, num_keys=1, is_stable=True))[1:]
        return operands

    return run


rewrite("sort", _sort)


def _over_axes(step: CodeStep) -> Function | None:
    axes = step.params["axes"]
    if not all(isinstance(a, int) for a in axes):
        return None  # of a mesh: what collectives there are is for the layout to say
    reduce = {"psum": lax.reduce_sum, "pmax": lax.reduce_max, "pmin": lax.reduce_min}[step.kind]
    return lambda *xs: [reduce(x, axes) for x in xs]


rewrite("psum pmax pmin", _over_axes)
