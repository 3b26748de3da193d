"""Draws of `jax.random` that come back to uniform ones between 0 and 1."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshlib.jax.importing.code import Step
from meshlib.jax.importing.rewrites.table import Function, rewrite


def _uniform(step: Step) -> Function | None:
    if all(x.number is not None for x in step.ins[1:3]):
        return None

    def run(key: Any, low: Any, high: Any) -> Any:
        shape, dtype = step.params["jaxpr"].out_avals[0].shape, step.params["jaxpr"].out_avals[0].dtype
        return jax.random.uniform(key, shape, dtype) * (high - low) + low

    return run


rewrite("jit:_uniform", _uniform)


def _truncated_normal(step: Step) -> Function:
    (out,) = step.params["jaxpr"].out_avals

    def run(key: Any, low: Any, high: Any) -> Any:
        a, b = (lax.erf(x.astype(jnp.float32) / math.sqrt(2)) for x in (low, high))
        drawn = math.sqrt(2) * lax.erf_inv(a + jax.random.uniform(key, out.shape) * (b - a))
        return jnp.clip(drawn, low, high).astype(out.dtype)

    return run


rewrite("jit:_truncated_normal", _truncated_normal)


def _shuffle(step: Step) -> Function:
    """In the order of drawn numbers."""
    (sort,) = (eqn for eqn in step.params["jaxpr"].eqns if eqn.primitive.name == "sort")
    at = sort.params["dimension"]

    def run(key: Any, x: Any) -> Any:
        return lax.sort((jax.random.uniform(key, x.shape), x), dimension=at, num_keys=1)[1]

    return run


rewrite("jit:_shuffle", _shuffle)
