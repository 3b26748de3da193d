"""Grouped products, as of experts whose tokens are sorted: each row of a group goes through that group's matrix."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from meshlib.jax.importing.code import Step
from meshlib.jax.importing.rewrites.table import Function, rewrite


def _ragged(step: Step) -> Function | None:
    """A sum over groups, in each of which the rows of others are zero: exact, with the work of a product per group.

    Rows beyond the last group give zero. The groups stay an axis of the product, which a layout may split.
    """
    numbers = step.params["ragged_dot_dimension_numbers"]
    (contract, other), (batch, of_other) = numbers.dot_dimension_numbers
    (ragged,) = numbers.lhs_ragged_dimensions
    if len(step.ins) != 3 or len(step.ins[2].shape) != 1 or ragged in batch:
        return None

    def run(x: Any, y: Any, sizes: Any) -> Any:
        ends = jnp.cumsum(sizes)
        rows = np.arange(x.shape[ragged], dtype="int32")
        here = (rows >= (ends - sizes)[:, None]) & (rows < ends[:, None])
        shape = [len(sizes)] + [1] * x.ndim
        shape[1 + ragged] = x.shape[ragged]
        own = jnp.where(here.reshape(shape), x, 0)
        left, batched = [n + 1 for n in contract], ([n + 1 for n in batch], list(of_other))
        kind = step.params["preferred_element_type"]
        if ragged in contract:  # a matrix for each group, as in the gradient of the weights
            product = lax.dot_general(own, y, ((left, list(other)), batched), preferred_element_type=kind)
            return jnp.moveaxis(product, len(batch), 0)
        pairs = [0, *left], [*numbers.rhs_group_dimensions, *other]
        return lax.dot_general(own, y, (pairs, batched), preferred_element_type=kind)

    return run


rewrite("ragged_dot_general", _ragged)
