"""Fused attention on JAX: the vendor's kernel where it applies, otherwise chunks of queries without the full scores.

All operations share one loop over chunks of queries. Where keys are split, a device uses summaries of the other
devices' keys (see `meshlib.ops.fused_attention.split_sequence`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshlib.jax.context import Array, Index
from meshlib.jax.rows.fused_attention import fused, fused_gradients, implementation
from meshlib.jax.rows.products import dot, operand
from meshlib.jax.table import RowContext, SplitRow, aligned, row

CHUNK = 1 << 22  # scores held at once
Names = tuple[str, ...]


class JaxAttention:
    """One device's operands as q [batch, group, length, key] and k, v [batch, memory, key or value]."""

    def __init__(self, part: RowContext, arrays: tuple[Array, ...], with_cotangent: bool) -> None:
        self.part, self.context = part, part.context
        attrs, named = part.attrs, part.names
        self.length, self.memory, self.key, self.value = (
            attrs[n] for n in ("length", "memory_length", "key_dim", "value_dim")
        )
        q, k = named[:2]
        self.batch: Names = tuple(n for n in q if n in k and n != self.key)
        self.group: Names = tuple(n for n in q if n not in k and n != self.length)
        self.sizes = {n: s for x, names in zip(arrays, named, strict=True) for n, s in zip(names, x.shape, strict=True)}
        self.count, self.groups = (prod(self.sizes[n] for n in names) for names in (self.batch, self.group))
        self.queries, self.keys = self.sizes[self.length], self.sizes[self.memory]
        self.q = self._rows(arrays[0], q, self.key)
        self.k, self.v = (
            aligned(x, names, (*self.batch, self.memory, last)).reshape(self.count, self.keys, -1)
            for x, names, last in ((arrays[1], k, self.key), (arrays[2], named[2], self.value))
        )
        self.dy = self._rows(arrays[3], named[3], self.value) if with_cotangent else None
        self.first_query = self._first(0, self.length)
        self.first_key = self._first(1, self.memory)
        self.type = jnp.float64 if self.q.dtype == jnp.float64 else jnp.float32
        self.mask = self._combined_mask(list(zip(arrays, named, strict=True))[4 if with_cotangent else 3 :])

    def _combined_mask(self, masks: Sequence[tuple[Array, Names]]) -> Array | None:
        """Mask, segment ids and bias as one array: bool, or with a bias the values to add to scores."""
        shown = [(x, names) for x, names in masks if x.dtype == jnp.bool_]
        mask = self._mask(*shown[0]) if shown else None
        numbers = [self._mask(x, names) for x, names in masks if x.dtype == jnp.int32]
        if numbers:
            same = numbers[0] == numbers[1]
            mask = same if mask is None else mask & same
        for bias in (self._mask(x, names) for x, names in masks if jnp.issubdtype(x.dtype, jnp.floating)):
            added = bias.astype(self.type)
            mask = added if mask is None else jnp.where(mask, added, -jnp.inf)
        return mask

    def _first(self, n: int, dim: str) -> Index:
        """The global index of the first query or key of this block or window."""
        lead = self.part.lead(n, dim)
        return self.part.offsets.get(dim, 0) if lead is None else self.part.offsets[self.length] + lead

    def _rows(self, x: Array, names: Names, last: str) -> Array:
        rows = aligned(x, names, (*self.batch, *self.group, self.length, last))
        return rows.reshape(self.count, self.groups, self.queries, -1)

    def _mask(self, mask: Array, names: Names) -> Array:
        """The mask as [batch, group, length, memory], with size 1 for missing dims."""
        parts = (self.batch, self.group, (self.length,), (self.memory,))
        shown = aligned(mask, names, tuple(n for part in parts for n in part))
        full, merged = [], []
        for part in parts:
            sizes = [self.sizes[n] if any(n in names for n in part) else 1 for n in part]
            full += sizes
            merged.append(prod(sizes))
        return jnp.broadcast_to(shown, full).reshape(merged)

    def product(self, subscripts: str, a: Array, b: Array) -> Array:
        """An einsum of operands in the MXU's input dtype."""
        a, b = (operand(x, self.context) for x in (a, b))
        ins, out = subscripts.split("->")
        left, right = ins.split(",")
        batch = [c for c in out if c in left and c in right]
        summed = [c for c in left if c in right and c not in out]
        dims = (
            (tuple(left.index(c) for c in summed), tuple(right.index(c) for c in summed)),
            (tuple(left.index(c) for c in batch), tuple(right.index(c) for c in batch)),
        )
        names = [*batch, *(c for c in left if c not in batch + summed), *(c for c in right if c not in batch + summed)]
        return aligned(dot(a, b, dims), names, tuple(out))

    def weights(self, q: Array, start: Index, mask: Array | None) -> tuple[Array, Array, Array]:
        """For a chunk of queries: exp(scores - maximum), its sums (1 if all keys are masked), log(sum(exp(scores))).

        [batch, group, queries, keys] and twice [..., 1].
        """
        attrs = self.part.attrs
        s = self.product("bgqd,bkd->bgqk", q, self.k) * self.type(attrs["scale"])
        i = self.first_query + start + jnp.arange(q.shape[2])[:, None]
        j = self.first_key + jnp.arange(self.keys)[None, :]
        seen = None
        if attrs["causal"]:
            seen = j <= i
        if attrs["window"] is not None:
            near = jnp.abs(i - j) < attrs["window"]
            seen = near if seen is None else seen & near
        if self.part.runs[1]:  # a window may extend beyond the sequence
            size = self.part.operation.inputs[1].shape.dim(self.memory).size
            there = (j >= 0) & (j < size) & (i >= 0) & (i < size)
            seen = there if seen is None else seen & there
        if mask is not None and mask.dtype != jnp.bool_:  # a bias, -inf for masked keys
            s, mask = s + mask, None
        for hides in (seen, mask):
            if hides is not None:
                s = jnp.where(hides, s, -jnp.inf)
        peak = jnp.max(s, axis=-1, keepdims=True)
        peak = jnp.where(jnp.isneginf(peak), 0, peak)
        p = jnp.exp(s - peak)
        total = jnp.sum(p, axis=-1, keepdims=True)
        return p, jnp.where(total == 0, 1, total), peak + jnp.log(total)

    def probabilities(self, q: Array, start: Index, mask: Array | None, received: Array | None) -> tuple[Array, Array]:
        """Softmax over this block's keys, rescaled to all keys if `received` is given; and this block's log-sum-exp."""
        p, total, level = self.weights(q, start, mask)
        return p * (_share(level, received) / total), level

    def walk(self, step: Callable[..., Any], *by_row: Array) -> Any:
        """Run `step(start, mask, q, dy, *by_row)` on chunks of queries: (results to concatenate, results to sum).

        `by_row` are [batch, group, length, ...].
        """
        rows = max(1, min(self.queries, CHUNK // max(1, self.count * self.groups * self.keys)))
        while self.queries % rows:
            rows -= 1
        given = [self.q, *([] if self.dy is None else [self.dy]), *by_row]
        long_mask = self.mask is not None and self.mask.shape[2] > 1
        if long_mask:
            given.append(self.mask)

        def run(start: Index, parts: list[Array]) -> Any:
            mask = parts.pop() if long_mask else self.mask
            dy = None if self.dy is None else parts[1]
            return step(start, mask, parts[0], dy, *parts[1 if self.dy is None else 2 :])

        if rows == self.queries:
            return run(0, list(given))

        def turn(sums: Any, n: Array) -> Any:
            parts = [lax.dynamic_slice_in_dim(x, n * rows, rows, 2) for x in given]
            stacked, more = run(n * rows, parts)
            return tuple(a + b for a, b in zip(sums, more, strict=True)), stacked

        zeros = self._zeros(run, given, rows)
        sums, pieces = lax.scan(turn, zeros, jnp.arange(self.queries // rows, dtype=jnp.int32))
        # [chunks, batch, group, rows, ...] -> [batch, group, length, ...]
        joined = tuple(jnp.moveaxis(y, 0, 2).reshape(*y.shape[1:3], self.queries, *y.shape[4:]) for y in pieces)
        return joined, sums

    def _zeros(self, run: Callable[..., Any], given: list[Array], rows: int) -> Any:
        parts = [jax.ShapeDtypeStruct((*x.shape[:2], rows, *x.shape[3:]), x.dtype) for x in given]
        _, sums = jax.eval_shape(lambda *xs: run(0, list(xs)), *parts)
        return tuple(jnp.zeros(s.shape, s.dtype) for s in sums)

    def of_rows(self, x: Array, last: str | None, to: Names) -> Array:
        """[batch, group, length, ...] with dims in the order `to`."""
        names = (*self.batch, *self.group, self.length, *([] if last is None else [last]))
        sizes = [self.sizes[n] for n in names[: len(self.batch) + len(self.group) + 1]]
        return aligned(x.reshape(*sizes, *([] if last is None else [x.shape[-1]])), names, to)

    def of_keys(self, x: Array, last: str, to: Names) -> Array:
        """[batch, memory, ...] with dims in the order `to`."""
        names = (*self.batch, self.memory, last)
        return aligned(x.reshape(*(self.sizes[n] for n in names[:-1]), x.shape[-1]), names, to)

    def received_rows(self, x: Array) -> Array:
        """A number per query as [batch, group, length, 1], the shape of `weights`."""
        names = tuple(n for n in self.part.names[0] if n != self.key)
        rows = aligned(x, names, (*self.batch, *self.group, self.length))
        return rows.reshape(self.count, self.groups, self.queries, 1)


def _share(level: Array, received: Array | None) -> Array:
    """This block's share of each query's softmax."""
    return jnp.ones_like(level) if received is None else jnp.where(jnp.isneginf(level), 0, jnp.exp(level - received))


# ---------------------------------------------------------------- the result


def _result(part: RowContext, arrays: tuple[Array, ...], received: Array | None = None) -> Array:
    kernel = JaxAttention(part, arrays, with_cotangent=False)
    name = implementation(kernel) if received is None else None
    if name is not None:
        y = fused(kernel, name)
        return kernel.of_rows(y, kernel.value, part.out.shape.names)

    def step(start: Index, mask: Array | None, q: Array, dy: Any, *levels: Array) -> Any:
        p, total, level = kernel.weights(q, start, mask)
        context = kernel.product("bgqk,bke->bgqe", p, kernel.v) / total
        return (context * _share(level, *levels or (None,)),), ()

    (y,), _ = kernel.walk(step, *([] if received is None else [kernel.received_rows(received)]))
    return kernel.of_rows(y, kernel.value, part.out.shape.names)


def _levels(part: RowContext, *arrays: Array) -> tuple[Array, ...]:
    kernel = JaxAttention(part, arrays, with_cotangent=False)
    (levels,), _ = kernel.walk(lambda start, mask, q, dy: ((kernel.weights(q, start, mask)[2],), ()))
    return (kernel.of_rows(levels, None, part.out.shape.names),)


# ---------------------------------------------------------------- gradients


def _gradients(
    part: RowContext, arrays: tuple[Array, ...], query: bool, received: tuple[Array, Array] | None = None
) -> Any:
    """dq, or (dk, dv)."""
    kernel = JaxAttention(part, arrays, with_cotangent=True)
    name = implementation(kernel) if received is None else None
    if name is not None:
        dq, dk, dv = fused_gradients(kernel, name)
        return _in_operand_dims(kernel, (dq,) if query else (), () if query else (dk, dv))
    scale = kernel.type(part.attrs["scale"])

    def step(start: Index, mask: Array | None, q: Array, dy: Array, *told: Array) -> Any:
        p, _ = kernel.probabilities(q, start, mask, told[0] if told else None)
        dp = kernel.product("bgqe,bke->bgqk", dy, kernel.v)
        mean = told[1] if told else jnp.sum(p * dp, axis=-1, keepdims=True)
        ds = p * (dp - mean) * scale
        if query:
            return (kernel.product("bgqk,bkd->bgqd", ds, kernel.k),), ()
        return (), (kernel.product("bgqk,bgqd->bkd", ds, q), kernel.product("bgqk,bgqe->bke", p, dy))

    by_row, sums = kernel.walk(step, *([] if received is None else map(kernel.received_rows, received)))
    return _in_operand_dims(kernel, by_row, sums)


def _in_operand_dims(kernel: JaxAttention, by_row: tuple[Array, ...], sums: tuple[Array, ...]) -> Any:
    """dq with the dims of q, or dk and dv with those of k and v."""
    names = kernel.part.names
    if by_row:
        return kernel.of_rows(by_row[0], kernel.key, names[0])
    lasts = (kernel.key, kernel.value)
    return tuple(kernel.of_keys(x, last, n) for x, last, n in zip(sums, lasts, names[1:3], strict=True))


def _levels_and_means(part: RowContext, *arrays: Array) -> tuple[Array, ...]:
    kernel = JaxAttention(part, arrays, with_cotangent=True)

    def step(start: Index, mask: Array | None, q: Array, dy: Array) -> Any:
        p, level = kernel.probabilities(q, start, mask, None)
        dp = kernel.product("bgqe,bke->bgqk", dy, kernel.v)
        return (level, jnp.sum(p * dp, axis=-1, keepdims=True)), ()

    statistics, _ = kernel.walk(step)
    return tuple(kernel.of_rows(x, None, part.out.shape.names) for x in statistics)


def _combined(levels: Array, means: Array | None = None) -> tuple[Array, ...]:
    """Log-sum-exp and means over all blocks' keys, from those of each block on the leading dim."""
    peak = jnp.max(levels, axis=0)
    peak = jnp.where(jnp.isneginf(peak), 0, peak)
    whole = peak + jnp.log(jnp.sum(jnp.exp(levels - peak), axis=0))
    if means is None:
        return (whole,)
    shares = jnp.where(jnp.isneginf(levels), 0, jnp.exp(levels - whole))
    return whole, jnp.sum(shares * means, axis=0)


# ---------------------------------------------------------------- rows


def _attention(part: RowContext, *arrays: Array) -> Array:
    return _result(part, arrays)


def _grad_query(part: RowContext, *arrays: Array) -> Array:
    cotangent: Array = _gradients(part, arrays, query=True)
    return cotangent


def _grad_memory(part: RowContext, *arrays: Array) -> tuple[Array, Array]:
    cotangents: tuple[Array, Array] = _gradients(part, arrays, query=False)
    return cotangents


def _attention_after(part: RowContext, received: tuple[Array], index: Index, *arrays: Array) -> Array:
    return _result(part, arrays, received[0])


def _grad_query_after(part: RowContext, received: tuple[Array, Array], index: Index, *arrays: Array) -> Any:
    return _gradients(part, arrays, True, received)


def _grad_memory_after(part: RowContext, received: tuple[Array, Array], index: Index, *arrays: Array) -> Any:
    return _gradients(part, arrays, False, received)


row("attention", native=True, split=SplitRow(_levels, _attention_after, _combined))(_attention)
row("attention_grad_query", native=True, split=SplitRow(_levels_and_means, _grad_query_after, _combined))(_grad_query)
row("attention_grad_memory", native=True, split=SplitRow(_levels_and_means, _grad_memory_after, _combined))(
    _grad_memory
)
row("attention_window", native=True)(_attention)
row("attention_window_grad_query", native=True)(_grad_query)


@row("attention_window_grad_memory", native=True)
def _window_grad_memory(part: RowContext, *arrays: Array) -> tuple[Array, Array]:
    """Gradients of this block's keys and values, for the window that was gathered."""
    memory = part.attrs["memory_length"]
    rows_here = part.out.shape.dim(memory).size
    begin = -(part.lead(1, memory) or 0)
    own_parts = []
    for x, names in zip(_grad_memory(part, *arrays), part.names[1:3], strict=True):
        own_parts.append(lax.slice_in_dim(x, begin, begin + rows_here, axis=names.index(memory)))
    return own_parts[0], own_parts[1]
