"""Draws of `jax.random` in terms of uniform draws in [0, 1)."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshlib.jax.importing.code import CodeStep
from meshlib.jax.importing.rewrites.table import Function, rewrite
from meshlib.jax.importing.table import rule


def _uniform(step: CodeStep) -> Function | None:
    if all(x.number is not None for x in step.ins[1:3]):
        return None

    def run(key: Any, low: Any, high: Any) -> Any:
        shape, dtype = step.params["jaxpr"].out_avals[0].shape, step.params["jaxpr"].out_avals[0].dtype
        return jax.random.uniform(key, shape, dtype) * (high - low) + low

    return run


rewrite("jit:_uniform", _uniform)


def _truncated_normal(step: CodeStep) -> Function:
    (out,) = step.params["jaxpr"].out_avals

    def run(key: Any, low: Any, high: Any) -> Any:
        a, b = (lax.erf(x.astype(jnp.float32) / math.sqrt(2)) for x in (low, high))
        drawn = math.sqrt(2) * lax.erf_inv(a + jax.random.uniform(key, out.shape) * (b - a))
        return jnp.clip(drawn, low, high).astype(out.dtype)

    return run


rewrite("jit:_truncated_normal", _truncated_normal)


def _shuffle(step: CodeStep) -> Function:
    """Shuffle along an axis, by sorting random keys."""
    (sort,) = (eqn for eqn in step.params["jaxpr"].eqns if eqn.primitive.name == "sort")
    at = sort.params["dimension"]

    def run(key: Any, x: Any) -> Any:
        return lax.sort((jax.random.uniform(jax.random.split(key)[1], x.shape), x), dimension=at, num_keys=1)[1]

    return run


rewrite("jit:_shuffle", _shuffle)


# Each round accepts at least 95 % of the remaining candidates.
_ROUNDS = 6


def _gamma(step: CodeStep) -> Function | None:
    """Gamma samples by Marsaglia and Tsang: the first accepted of several candidates.

    Source: G. Marsaglia and W. W. Tsang, A simple method for generating gamma variables, 2000.
    """
    if step.ins[1].data:
        return None  # JAX's samples are differentiable in the shape parameter; these are not
    logarithms = bool(step.params["log_space"])

    def run(key: Any, alpha: Any) -> Any:
        shape = alpha.shape
        whole = jnp.where(alpha < 1, alpha + 1, alpha)
        d = whole - 1 / 3
        drawn = jnp.zeros(shape, alpha.dtype)  # log v; used if no candidate is accepted
        last, *keys = jax.random.split(key, 2 * _ROUNDS + 1)
        for of_normal, of_uniform in zip(keys[::2], keys[1::2], strict=True):
            x = jax.random.normal(of_normal, shape, alpha.dtype)
            root = 1 + x / jnp.sqrt(9 * d)
            log_v = 3 * jnp.log(jnp.maximum(root, 1e-7))
            limit = 0.5 * x * x + d - d * jnp.exp(log_v) + d * log_v
            accepted = (root > 0) & (jnp.log(jax.random.uniform(of_uniform, shape, alpha.dtype)) < limit)
            drawn = jnp.where(accepted, log_v, drawn)
        smaller = jnp.log1p(-jax.random.uniform(last, shape, alpha.dtype)) / alpha
        log_sample = jnp.log(d) + drawn + jnp.where(alpha < 1, smaller, 0)
        return log_sample if logarithms else jnp.exp(log_sample)

    return run


rewrite("random_gamma", _gamma)
rule(
    "random_gamma",
    axes=None,
    write=None,
    fault=lambda step: "with a shape parameter that is computed from arguments, of which it has a derivative",
)
