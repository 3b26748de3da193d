"""NumPy kernel of fused attention on one device's blocks, in tiles of rows.

If keys are split, `received` has the statistics of all blocks: see `meshlib.ops.fused_attention.split_sequence`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import numpy as np

from meshlib.core.arrays import Cut, cuts
from meshlib.core.dtypes import BOOL, INT32
from meshlib.core.graph import TensorType
from meshlib.core.opdef import Array, Block, Halo
from meshlib.ops.building import align

# Scores computed at once: element-wise work on them stays in the second-level cache.
_CHUNK = 1 << 17
_PAYING_QUERIES = 32  # queries per batch item from which a transposed copy of the keys pays off

Names = tuple[str, ...]
Received = tuple[Array, Array]  # over all blocks: log(sum(exp(scores))), mean of the weights' cotangents


def seen_keys(start: Any, stop: Any, memory: int, causal: bool, window: int | None) -> tuple[Any, Any]:
    """The range of keys that queries [start, stop) see; of several ranges if start and stop are arrays."""
    low = 0 * start if window is None else np.maximum(0, start - window + 1)
    high = np.minimum(memory, stop if causal else memory if window is None else stop + window - 1)
    return low, high


@dataclass(frozen=True)
class KeysAndValues:
    """Keys and values of some batch items, [batch, memory, dim], with the number of queries per item."""

    batch: Cut
    k: Array
    v: Array
    queries: int

    @cached_property
    def k_columns(self) -> Array:
        """The keys, [batch, dim, memory]."""
        return self._columns(self.k)

    @cached_property
    def v_columns(self) -> Array:
        """The values, [batch, dim, memory]."""
        return self._columns(self.v)

    def _columns(self, x: Array) -> Array:
        """`x` transposed, as a copy if enough queries use it: BLAS is twice as fast on contiguous columns."""
        columns = x.swapaxes(1, 2)
        return columns if self.queries < _PAYING_QUERIES else np.ascontiguousarray(columns)


@dataclass(frozen=True)
class Rows:
    """Queries of these batch items, with their cotangents, [batch, group and queries, dim], and the keys that they
    see."""

    queries: slice
    keys: slice  # in this block
    q: Array
    dy: Array
    hidden: Array | None  # bool, broadcasts to `shape`: pairs excluded from the softmax
    bias: Array | None  # broadcasts to `shape`: added to the scaled scores
    shape: tuple[int, ...]  # [batches ..., groups ..., queries, keys]


class LocalAttention:
    """One device's operands as views [batches ..., groups ..., length, key] and [batches ..., memory, key or value]."""

    def __init__(self, block: Block, arrays: tuple[Array, ...], with_cotangent: bool) -> None:
        self.block, self.engine = block, block.engine
        names = [block.attrs[n] for n in ("length", "memory_length", "key_dim", "value_dim")]
        self.length, self.memory, self.key, self.value = names
        q, k = (t.shape.names for t in block.inputs[:2])
        self.batch: Names = tuple(n for n in q if n in k and n != self.key)
        self.group: Names = tuple(n for n in q if n not in k and n != self.length)
        rows = (*self.batch, *self.group, self.length)
        named = [t.shape.names for t in block.inputs]
        self.q = align(arrays[0], named[0], (*rows, self.key))
        self.k = align(arrays[1], named[1], (*self.batch, self.memory, self.key))
        self.v = align(arrays[2], named[2], (*self.batch, self.memory, self.value))
        self.dy = align(arrays[3], named[3], (*rows, self.value)) if with_cotangent else None
        count = 4 if with_cotangent else 3
        pairs = (*rows, self.memory)
        self._take_optional(arrays[count:], block.inputs[count:], pairs)
        # Halo ranges of a window begin at `starts`.
        runs = isinstance(block.operation.opdef.lower, Halo)
        self.first_query = block.start(0, self.length) if runs else block.offsets[self.length]
        self.first_key = block.start(1, self.memory) if runs else block.offsets[self.memory]
        whole = block.operation.inputs[1].shape.dim(self.memory).size
        # whether a query may see no key in this block
        self.blind = len(arrays) > count or self.k.shape[-2] < whole

    def _take_optional(self, arrays: Sequence[Array], types: Sequence[TensorType], pairs: Names) -> None:
        """Set mask, segment ids of queries and of keys, and bias, identified by dtype."""
        aligned = [(align(x, t.shape.names, pairs), t.dtype) for x, t in zip(arrays, types, strict=True)]
        self.mask = next((x for x, dtype in aligned if dtype is BOOL), None)
        self.segments = [x for x, dtype in aligned if dtype is INT32]
        self.bias = next((x for x, dtype in aligned if dtype.is_wide_float), None)

    def batches(self) -> Iterator[KeysAndValues]:
        """Ranges of batch items with about `_CHUNK` scores each."""
        count = len(self.batch)
        groups, length = prod(self.q.shape[count:-2]), self.q.shape[-2]
        scores = groups * min(length, self._most_rows()) * self.k.shape[-2]
        for cut in cuts(self.q.shape[:count], max(1, _CHUNK // scores)):
            k, v = self._operand(self.k[cut], count), self._operand(self.v[cut], count)
            yield KeysAndValues(cut, k, v, groups * length)

    def rows(self, memory: KeysAndValues) -> Iterator[Rows]:
        """The queries of these batch items, range by range."""
        count, length = len(self.batch), self.q.shape[-2]
        causal, window = self.block.attrs["causal"], self.block.attrs["window"]
        step = self._most_rows()
        for start in range(0, length, step):
            queries = slice(start, min(start + step, length))
            first, last = self.first_query + queries.start, self.first_query + queries.stop
            here = self.first_key
            low, high = (n - here for n in seen_keys(first, last, here + self.k.shape[-2], causal, window))
            keys = slice(max(low, 0), max(low, high, 0))
            q, *more = (x[memory.batch][..., queries, :] for x in (self.q, self.dy) if x is not None)
            merged = [self._operand(x, count) for x in (q, *more)]
            shape = (*q.shape[:-1], keys.stop - keys.start)
            hidden = self._hidden(np.arange(first, last)[:, None], here + np.arange(keys.start, keys.stop))
            part = (*memory.batch, *(slice(None) for _ in self.group), queries, keys)
            bias = None if self.bias is None else _broadcast_part(self.bias, part)
            yield Rows(queries, keys, merged[0], merged[-1], self._masked(hidden, part), bias, shape)

    def _most_rows(self) -> int:
        scores: int = prod(self.q.shape[len(self.batch) : -2]) * self.k.shape[-2]
        return max(1, _CHUNK // scores)

    def _operand(self, x: Array, count: int) -> Array:
        """A part as an MXU operand: [batch, rows, dim], contiguous."""
        dense = np.ascontiguousarray(x).reshape(prod(x.shape[:count]), -1, x.shape[-1])
        return self.engine.mxu_operand(dense, False)

    def _hidden(self, i: Array, j: Array) -> Array | None:
        hidden = np.zeros((i.shape[0], j.size), bool)
        if self.block.attrs["causal"]:
            hidden |= j > i
        if self.block.attrs["window"] is not None:
            hidden |= np.abs(i - j) >= self.block.attrs["window"]
        return hidden if hidden.any() else None

    def _masked(self, hidden: Array | None, part: Cut) -> Array | None:
        if self.mask is not None:
            unseen = ~_broadcast_part(self.mask, part)
            hidden = unseen if hidden is None else unseen | hidden
        if self.segments:
            q, k = (_broadcast_part(x, part) for x in self.segments)
            hidden = q != k if hidden is None else (q != k) | hidden
        return hidden

    def product(self, a: Array, b: Array) -> Array:
        """a @ b on the MXU, per batch item; zeros if the contracted dim is empty, as when no key is visible."""
        out = np.empty((a.shape[0], a.shape[1], b.shape[2]), a.dtype)
        if a.size and b.size:
            self.engine.matmul(a, b, out)
        else:
            out.fill(0)
        return out

    def row_sized(self) -> Array:
        """An array of one number per query: [batches ..., groups ..., length, 1], in the dtype of sums."""
        return np.zeros((*self.q.shape[:-1], 1), self.q.dtype)

    def weights(self, rows: Rows, memory: KeysAndValues) -> tuple[Array, Array, Array]:
        """exp(scores - maximum), its sums over the keys, and log(sum(exp(scores))), -inf where a query sees no key.

        Shapes: [batch, group and queries, keys] and twice [..., 1]; an empty sum is returned as 1.
        """
        s = self.product(rows.q, memory.k_columns[:, :, rows.keys])
        np.multiply(s, s.dtype.type(self.block.attrs["scale"]), out=s)
        if rows.bias is not None:
            scores = s.reshape(rows.shape)
            np.add(scores, rows.bias, out=scores)
        if rows.hidden is not None:
            np.copyto(s.reshape(rows.shape), -np.inf, where=rows.hidden)
        peak = _row_maximum(s)
        if self.blind:
            peak[np.isneginf(peak)] = 0
        np.subtract(s, peak, out=s)
        np.exp(s, out=s)
        total = s @ np.ones((s.shape[2], 1), s.dtype)  # several times as fast as a sum over short rows
        level = peak + np.log(total)
        if self.blind:
            total[total == 0] = 1
        return s, total, level

    def share(self, level: Array, received: Array, rows: Rows, memory: KeysAndValues) -> Array:
        """This block's share of each query's softmax, from log(sum(exp(scores))) of this block and of all blocks."""
        whole = self.of_rows(received, rows, memory)
        return np.where(np.isneginf(level), 0, np.exp(level - whole))

    def of_rows(self, x: Array, rows: Rows, memory: KeysAndValues) -> Array:
        """The part of a `row_sized` array for these rows: [batch, group and queries, 1]."""
        part: Array = x[memory.batch][..., rows.queries, :]
        return part.reshape(memory.k.shape[0], -1, 1)

    def probabilities(self, rows: Rows, memory: KeysAndValues, received: Array | None = None) -> tuple[Array, Array]:
        """Softmax weights over this block's keys, or over all keys given `received`; and log(sum(exp(scores)))."""
        p, total, level = self.weights(rows, memory)
        scale = 1 / total if received is None else self.share(level, received, rows, memory) / total
        np.multiply(p, scale, out=p)
        return p, level

    def weight_cotangents(self, p: Array, rows: Rows, memory: KeysAndValues) -> tuple[Array, Array]:
        """The cotangents of the probabilities, and their mean over this block's keys: [..., keys] and [..., 1]."""
        dp = self.product(rows.dy, memory.v_columns[:, :, rows.keys])
        return dp, np.einsum("bij,bij->bi", p, dp)[..., None]

    def cotangents(self, rows: Rows, memory: KeysAndValues, received: Received | None) -> tuple[Array, Array]:
        """The probabilities, and the cotangents of the scores."""
        p, _ = self.probabilities(rows, memory, received and received[0])
        ds, mean = self.weight_cotangents(p, rows, memory)
        np.subtract(ds, mean if received is None else self.of_rows(received[1], rows, memory), out=ds)
        np.multiply(ds, p, out=ds)
        np.multiply(ds, ds.dtype.type(self.block.attrs["scale"]), out=ds)
        return p, self.engine.made_inside(ds)


def _broadcast_part(x: Array, part: Cut) -> Array:
    """The part of a mask or bias in `part`; dims that it lacks have size 1 and broadcast."""
    return x[tuple(c if n > 1 else slice(None) for c, n in zip(part, x.shape, strict=True))]


def _row_maximum(x: Array) -> Array:
    """The maximum of each row, with the dim kept; short rows are transposed, because NumPy is slow on them."""
    short = x.shape[-1] <= 32
    columns = np.ascontiguousarray(np.moveaxis(x, -1, 0)) if short else np.moveaxis(x, -1, 0)
    peak: Array = np.maximum.reduce(columns, axis=0, initial=-np.inf)[..., None]
    return peak


def put(out: Array, cut: Cut, queries: slice, result: Array) -> None:
    """Write the result for some queries of one batch range into `out`."""
    part = out[cut][..., queries, :]
    part[...] = result.reshape(part.shape)


def local_result(block: Block, *arrays: Array) -> Array:
    """Attention of this device's queries over its keys."""
    return result(block, arrays, None)


def result(block: Block, arrays: tuple[Array, ...], received: Array | None) -> Array:
    """Attention of this device's queries; with split keys its share, given the statistics `received` of all blocks."""
    kernel = LocalAttention(block, arrays, with_cotangent=False)
    out = block.result()
    y = align(out, block.out.shape.names, (*kernel.batch, *kernel.group, kernel.length, kernel.value))
    for memory in kernel.batches():
        for rows in kernel.rows(memory):
            weights, total, level = kernel.weights(rows, memory)
            context = kernel.product(kernel.engine.made_inside(weights), memory.v[:, rows.keys])
            np.divide(context, total, out=context)
            if received is not None:
                np.multiply(context, kernel.share(level, received, rows, memory), out=context)
            put(y, memory.batch, rows.queries, context)
    return out


def local_grad_query(block: Block, *arrays: Array) -> Array:
    """The cotangent of this device's queries."""
    return _shared_gradients(block, arrays)[0]


def local_grad_memory(block: Block, *arrays: Array) -> tuple[Array, Array]:
    """The cotangents of keys and values, summed over this device's queries."""
    _, dk, dv = _shared_gradients(block, arrays)
    return dk, dv


def _shared_gradients(block: Block, arrays: tuple[Array, ...]) -> tuple[Array, Array, Array]:
    """dq, dk, dv, computed once for the two gradient operations on the same operands."""
    shared, attrs = block.engine.shared, block.attrs
    if shared is None:
        return gradients(block, arrays)
    length, memory = attrs["length"], attrs["memory_length"]
    places = (block.offsets[length], block.start(0, length), block.start(1, memory))
    options = (attrs["causal"], attrs["window"], attrs["scale"], *places)
    key = ("attention", block.engine.trips, *options, *map(id, arrays))
    if key in shared:
        stored_gradients: tuple[Array, Array, Array] = shared.pop(key)[0]
        return stored_gradients
    new_gradients = gradients(block, arrays)
    shared[key] = new_gradients, arrays  # references keep the ids of the operands from being reused
    return new_gradients


def gradients(block: Block, arrays: tuple[Array, ...], received: Received | None = None) -> tuple[Array, Array, Array]:
    """The cotangents of queries, keys and values; with split keys, given the statistics `received` from all blocks."""
    kernel = LocalAttention(block, arrays, with_cotangent=True)
    dq, dk, dv = (np.empty(x.shape, x.dtype) for x in arrays[:3])
    q, k, v = (t.shape.names for t in block.inputs[:3])
    dq_rows = align(dq, q, (*kernel.batch, *kernel.group, kernel.length, kernel.key))
    dk_rows = align(dk, k, (*kernel.batch, kernel.memory, kernel.key))
    dv_rows = align(dv, v, (*kernel.batch, kernel.memory, kernel.value))
    for memory in kernel.batches():
        k_sum, v_sum = np.zeros(memory.k.shape, memory.k.dtype), np.zeros(memory.v.shape, memory.v.dtype)
        for rows in kernel.rows(memory):
            p, ds = kernel.cotangents(rows, memory, received)
            put(dq_rows, memory.batch, rows.queries, kernel.product(ds, memory.k[:, rows.keys]))
            k_sum[:, rows.keys] += kernel.product(ds.swapaxes(1, 2), rows.q)
            v_sum[:, rows.keys] += kernel.product(kernel.engine.made_inside(p).swapaxes(1, 2), rows.dy)
        put(dk_rows, memory.batch, slice(None), k_sum)
        put(dv_rows, memory.batch, slice(None), v_sum)
    return dq, dk, dv
