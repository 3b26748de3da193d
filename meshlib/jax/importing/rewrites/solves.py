"""Linear systems whose solver JAX was given as a function."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from jax.extend.core import jaxpr_as_fun

from meshlib.jax.importing.code import Step
from meshlib.jax.importing.rewrites.table import Function, rewrite


def _solve(step: Step) -> Function:
    """The solver alone: what it solves, and how it is transposed, matters to derivatives."""
    counts, solve = step.params["const_lengths"], step.params["jaxprs"].solve
    _, first, stop, end = accumulate((counts.matvec, counts.vecmat, counts.solve, counts.transpose_solve))

    def run(*operands: Any) -> Any:
        return jaxpr_as_fun(solve)(*operands[first:stop], *operands[end:])

    return run


rewrite("custom_linear_solve", _solve, own_lines=True)
