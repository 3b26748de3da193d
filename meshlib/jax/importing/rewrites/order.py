"""Sorting by several keys, reshapes that read axes in another order, and reductions by any function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import jaxpr_as_fun

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


# ---------------------------------------------------------------- reductions by any associative function


def _joined(join: Function, values: tuple[Any, ...]) -> tuple[Any, ...]:
    """The elements along the first axis joined, half with half."""
    while (size := values[0].shape[0]) > 1:
        half = size // 2
        pairs = join(*(v[:half] for v in values), *(v[half : 2 * half] for v in values))
        values = tuple(jnp.concatenate([v, x[2 * half :]]) for v, x in zip(pairs, values, strict=True))
    return tuple(v[0] for v in values)


def by_element(closed: Any) -> Function:
    """The function of arrays that computes a function of numbers by element."""

    def join(*values: Any) -> Any:
        flat = [v.reshape(-1) for v in jnp.broadcast_arrays(*values)]
        shape = jnp.broadcast_shapes(*(v.shape for v in values))
        return [v.reshape(shape) for v in jax.vmap(jaxpr_as_fun(closed))(*flat)]

    return join


def _first_axes(x: Any, dims: Sequence[int]) -> Any:
    """The axes `dims` as one, the first."""
    x = jnp.moveaxis(x, dims, range(len(dims)))
    return x.reshape(-1, *x.shape[len(dims) :])


def _reduced(step: CodeStep) -> Function:
    dims, join = step.params["dimensions"], by_element(step.params["jaxpr"])

    def run(*operands: Any) -> Any:
        half = len(operands) // 2
        joined = _joined(join, tuple(_first_axes(x, dims) for x in operands[:half]))
        return join(*operands[half:], *joined)

    return run


_OF_BITS = {"reduce_and": jnp.bitwise_and, "reduce_or": jnp.bitwise_or, "reduce_xor": jnp.bitwise_xor}


def _bits(step: CodeStep) -> Function | None:
    join = _OF_BITS[step.kind]
    if step.ins[0].dtype == "bool" and step.kind != "reduce_xor":
        return None
    return lambda x: _joined(lambda a, b: (join(a, b),), (_first_axes(x, step.params["axes"]),))[0]


rewrite("reduce", _reduced)
rewrite(" ".join(_OF_BITS), _bits)


def _reordered(step: CodeStep) -> Function | None:
    order = step.params["dimensions"]  # as `vmap` of a convolution gives it
    return None if order is None else lambda x: lax.reshape(lax.transpose(x, order), step.params["new_sizes"])


rewrite("reshape", _reordered)


def _of_nothing(step: CodeStep) -> Function | None:
    """The zeros of a product over an axis of no elements."""

    def run(*xs: Any) -> Any:
        out = jax.eval_shape(lambda *operands: lax.dot_general_p.bind(*operands, **step.params), *xs)
        return jnp.zeros(out.shape, out.dtype)

    return run if any(0 in x.shape for x in step.ins) else None


rewrite("dot_general", _of_nothing)
rewrite("empty empty2", lambda step: lambda: jnp.zeros(step.params.get("shape", ()), step.params["dtype"]))
