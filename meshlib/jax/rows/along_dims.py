"""JAX rows of running sums, recurrences and sorting along a dim; a split dim uses one summary per block."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax

from meshlib.core.opdef import Factor
from meshlib.jax.context import Array, Index
from meshlib.jax.table import RowContext, SplitRow, row


def _axis(part: RowContext) -> int:
    return part.names[0].index(part.attrs["dim"])


def _precede(part: RowContext, count: int, index: Index) -> Array:
    """For each of `count` blocks, whether it precedes this one in the direction of the sum."""
    blocks = jnp.arange(count)
    return blocks > index if part.attrs["reverse"] else blocks < index


# ---------------------------------------------------------------- running sums


def _total(part: RowContext, x: Array) -> tuple[Array, ...]:
    return (jnp.sum(x, axis=_axis(part)).astype(x.dtype),)


def _cumsum(part: RowContext, x: Array) -> Array:
    axis, reverse = _axis(part), part.attrs["reverse"]
    y = lax.cumsum(x, axis=axis, reverse=reverse)
    if not part.attrs["exclusive"]:
        return y
    pads = [(0, 0, 0)] * x.ndim
    pads[axis] = (-1, 1, 0) if reverse else (1, -1, 0)
    return lax.pad(y, jnp.zeros((), x.dtype), pads)


def _cumsum_after(part: RowContext, received: tuple[Array], index: Index, x: Array) -> Array:
    (totals,) = received
    before = _precede(part, totals.shape[0], index).reshape(-1, *(1,) * (totals.ndim - 1))
    total = jnp.sum(jnp.where(before, totals, jnp.zeros((), totals.dtype)), axis=0).astype(x.dtype)
    return _cumsum(part, x) + jnp.expand_dims(total, _axis(part))


# `finish` takes (part, summaries of all blocks, this block's index, *operands).
row("cumsum", split=SplitRow(_total, _cumsum_after))(_cumsum)


# ---------------------------------------------------------------- linear recurrences


def _then(first: tuple[Array, Array], second: tuple[Array, Array]) -> tuple[Array, Array]:
    """Composition of two maps h -> a h + x."""
    return first[0] * second[0], second[0] * first[1] + second[1]


def _maps(part: RowContext, a: Array, x: Array) -> tuple[Array, Array]:
    """Map from the state before the block to the state at each index."""
    factors, values = lax.associative_scan(_then, (a, x), axis=_axis(part), reverse=part.attrs["reverse"])
    return factors, values


def _recurrence(part: RowContext, a: Array, x: Array) -> Array:
    return _maps(part, a, x)[1]


def _whole_map(part: RowContext, a: Array, x: Array) -> tuple[Array, ...]:
    last = 0 if part.attrs["reverse"] else -1
    return tuple(jnp.take(m, last, axis=_axis(part)) for m in _maps(part, a, x))


def _recurrence_after(part: RowContext, received: Sequence[Array], index: Index, a: Array, x: Array) -> Array:
    factors, ends = received
    count = factors.shape[0]
    before = _precede(part, count, index)
    carry = jnp.zeros_like(ends[0])
    for n in range(count)[:: -1 if part.attrs["reverse"] else 1]:
        carry = jnp.where(before[n], factors[n] * carry + ends[n], carry)
    mine, values = _maps(part, a, x)
    return mine * jnp.expand_dims(carry, _axis(part)) + values


row("linear_recurrence", split=SplitRow(_whole_map, _recurrence_after))(_recurrence)


# ---------------------------------------------------------------- order


def _best(x: Array, k: int) -> Array:
    """Indices of the k largest along the last axis, largest first; ties by index, NaN first."""
    if jnp.issubdtype(x.dtype, jnp.floating):
        x = jnp.where(jnp.isnan(x), jnp.nan, x) + 0.0  # NaN without its sign, and -0 equal to 0
    return lax.top_k(x, k)[1]


def _candidates(part: RowContext, x: Array, k: int) -> tuple[Array, Array]:
    """The k largest values (or all) of this block along the ranked dim, and their global indices; that dim is last."""
    x = jnp.moveaxis(x, _axis(part), -1)
    factors: tuple[Factor, ...] = part.operation.opdef.roles(part.operation)
    start = sum(part.offsets[f.name] for f in factors if f.operands[0] == part.attrs["dim"])
    chosen = _best(x, min(k, x.shape[-1]))
    return jnp.take_along_axis(x, chosen, -1), chosen.astype(jnp.int32) + start


def _best_of(received: Sequence[Array], k: int) -> tuple[Array, Array]:
    # Candidates in block order, so that equal values keep their index order.
    values, indices = (jnp.moveaxis(x, 0, -2).reshape(*x.shape[1:-1], -1) for x in received)
    chosen = _best(values, k)
    return jnp.take_along_axis(values, chosen, -1), jnp.take_along_axis(indices, chosen, -1)


def _top_k(part: RowContext, x: Array) -> tuple[Array, Array]:
    return _candidates(part, x, part.attrs["k_dim"].size)


def _top_k_after(part: RowContext, received: Sequence[Array], index: Index, x: Array) -> tuple[Array, Array]:
    return _best_of(received, part.attrs["k_dim"].size)


def _largest(part: RowContext, x: Array) -> tuple[Array, Array]:
    return _candidates(part, x, 1)


def _argmax_after(part: RowContext, received: Sequence[Array], index: Index, x: Array) -> Array:
    return _best_of(received, 1)[1][..., 0]


row("top_k", split=SplitRow(_top_k, _top_k_after))(_top_k)


@row("argmax", split=SplitRow(_largest, _argmax_after))
def _argmax(part: RowContext, x: Array) -> Array:
    return _candidates(part, x, 1)[1][..., 0]


@row("argsort")
def _argsort(part: RowContext, x: Array) -> Array:
    if part.attrs["descending"]:
        x = -x if jnp.issubdtype(x.dtype, jnp.floating) else ~x
    return jnp.argsort(x, axis=_axis(part), stable=True).astype(jnp.int32)
