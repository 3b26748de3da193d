"""Batched ragged_dot with groups per batch element, as one ragged_dot over the rows and groups of all elements.

Rows of an element that belong to no group get a group of zero weights, so that the next element's rows begin
where its groups do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from meshlib.jax.importing.code import CodeStep
from meshlib.jax.importing.rewrites.table import Function, rewrite


def batched_ragged_dot(params: Mapping[str, Any], primitive: Any) -> Callable[..., Any]:
    """ragged_dot_general as a function for `vmap` over any operand axes, with groups per batch element."""

    def product(*operands: Any) -> Any:
        return primitive.bind(*operands, **params)

    def of_batch(count: int, batched: Sequence[bool], *operands: Any) -> tuple[Any, bool]:
        whole = [
            x if has_axis else jnp.broadcast_to(x, (count, *x.shape))
            for x, has_axis in zip(operands, batched, strict=True)
        ]
        return _merged(params["ragged_dot_dimension_numbers"], batched_ragged_dot(params, primitive), *whole), True

    mapped: Any = jax.custom_batching.custom_vmap(product)
    mapped.def_vmap(of_batch)
    function: Callable[..., Any] = mapped
    return function


def _merged(numbers: Any, product: Callable[..., Any], x: Any, w: Any, sizes: Any) -> Any:
    """The products of a batch, which is the leading axis of all operands; `numbers` are those of one element."""
    (contracted, of_w), (batch, _) = numbers.dot_dimension_numbers
    (rows,), groups = numbers.lhs_ragged_dimensions, tuple(numbers.rhs_group_dimensions)
    count, length = x.shape[0], x.shape[rows + 1]
    rest = length - sizes.sum(-1, keepdims=True, dtype=sizes.dtype)
    all_sizes = jnp.concatenate([sizes, rest], 1).reshape(-1)
    x = _joined(x, rows)
    if groups:
        at = groups[0]
        w = _joined(jnp.pad(w, [(0, int(n == at + 1)) for n in range(w.ndim)]), at)
        y = product(x, w, all_sizes)
        free = [n for n in range(x.ndim) if n not in {*contracted, *batch}]
        return _parted(y, len(batch) + free.index(rows), count)
    w = _joined(w, of_w[contracted.index(rows)])
    return _parted(product(x, w, all_sizes), 0, count)[:, :-1]


def _joined(x: Any, at: int) -> Any:
    """Merge the leading axis into axis `at` of the rest, as its major part."""
    moved = jnp.moveaxis(x, 0, at)
    return moved.reshape(*moved.shape[:at], -1, *moved.shape[at + 2 :])


def _parted(y: Any, at: int, count: int) -> Any:
    """The inverse of `_joined`."""
    return jnp.moveaxis(y.reshape(*y.shape[:at], count, -1, *y.shape[at + 1 :]), at, 0)


def _groups_per_element(step: CodeStep) -> Function | None:
    numbers = step.params["ragged_dot_dimension_numbers"]
    (contracted, of_w), batches = numbers.dot_dimension_numbers
    if len(step.ins) != 3 or len(step.ins[2].shape) != 2 or any(tuple(axes)[:1] != (0,) for axes in batches):
        return None

    def without_first(axes: Sequence[int]) -> tuple[int, ...]:
        return tuple(n - 1 for n in axes if n)

    one = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(
            (without_first(contracted), without_first(of_w)),
            (without_first(batches[0]), without_first(batches[1])),
        ),
        lhs_ragged_dimensions=without_first(numbers.lhs_ragged_dimensions),
        rhs_group_dimensions=without_first(numbers.rhs_group_dimensions),
    )
    precision, dtype = step.params["precision"], step.params["preferred_element_type"]

    def product(x: Any, w: Any, sizes: Any) -> Any:
        return jax.lax.ragged_dot_general(x, w, sizes, one, precision=precision, preferred_element_type=dtype)

    at = 0 if numbers.rhs_group_dimensions else 1  # if rows are contracted, the group axis precedes the batch

    return lambda x, w, sizes: [jnp.moveaxis(_merged(one, product, x, w, sizes), 0, at)]


rewrite("ragged_dot_general", _groups_per_element)
