"""NumPy for fused attention on one device's blocks: batched products over tiles of rows, so that memory stays small."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import numpy as np

from meshlib.graph import TensorType
from meshlib.operation import Array, Block, align

# Scores held at once: what is done to them element by element stays in the second-level cache.
_CHUNK = 1 << 18

Names = tuple[str, ...]


def seen_keys(start: int, stop: int, memory: int, causal: bool, window: int | None) -> tuple[int, int]:
    """The run of keys that queries [start, stop) see among them."""
    low = 0 if window is None else max(0, start - window + 1)
    high = min(memory, stop) if causal else memory if window is None else min(memory, stop + window - 1)
    return low, high


@dataclass(frozen=True)
class Tile:
    """Some rows of scores: batches, queries, and the keys that these queries see among them."""

    batch: slice
    queries: slice
    keys: slice
    hidden: Array | None  # bool, broadcasts with [batch, group, queries, keys]: what stays out of the softmax


class Kernel:
    """One device's q, k, v (and cotangent) as [batch, group, length, key] and [batch, memory, key or value]."""

    def __init__(self, block: Block, arrays: tuple[Array, ...], with_cotangent: bool) -> None:
        self.block, self.engine = block, block.engine
        names = [block.attrs[n] for n in ("length", "memory_length", "key_dim", "value_dim")]
        self.length, self.memory, self.key, self.value = names
        q, k = (t.shape.names for t in block.inputs[:2])
        self.batch: Names = tuple(n for n in q if n in k and n != self.key)
        self.group: Names = tuple(n for n in q if n not in k and n != self.length)
        self.sizes = {d.name: d.size for t in block.inputs for d in t.shape}
        rows, memory = (self.batch, self.group, (self.length,)), (self.batch, (self.memory,))
        self.q = self._operand(0, arrays, (*rows, (self.key,)))
        self.k = self._operand(1, arrays, (*memory, (self.key,)))
        self.v = self._operand(2, arrays, (*memory, (self.value,)))
        if with_cotangent:
            self.dy = self._operand(3, arrays, (*rows, (self.value,)))
        count = 4 if with_cotangent else 3
        self.mask = self._arranged_mask(block.inputs[count], arrays[count]) if len(arrays) > count else None

    def _size(self, names: Names) -> int:
        return prod(self.sizes[n] for n in names)

    def _operand(self, n: int, arrays: tuple[Array, ...], groups: tuple[Names, ...]) -> Array:
        order = [name for names in groups for name in names]
        x = align(self.engine.mxu_operand(arrays[n], False), self.block.inputs[n].shape.names, order)
        return x.reshape([self._size(names) for names in groups])

    def _arranged_mask(self, of: TensorType, mask: Array) -> Array:
        names = of.shape.names
        order = (*self.batch, *self.group, self.length, self.memory)
        x = align(mask, names, order)
        for part in (self.batch, self.group):  # dims that are merged are all there, or none is
            if any(n in names for n in part):
                x = np.broadcast_to(x, [self.sizes[n] if n in part else s for n, s in zip(order, x.shape, strict=True)])
        count, middle = len(self.batch), len(self.batch) + len(self.group)
        return x.reshape([prod(x.shape[:count]), prod(x.shape[count:middle]), *x.shape[middle:]])

    def tiles(self) -> Iterator[Tile]:
        """Rows of at most `_CHUNK` scores, if one row has no more."""
        batch, group, length, _ = self.q.shape
        memory = self.k.shape[1]
        causal, window = self.block.attrs["causal"], self.block.attrs["window"]
        offset = self.block.offsets[self.length]
        rows = max(1, min(length, _CHUNK // (group * memory)))
        for start in range(0, length, rows):
            stop = min(start + rows, length)
            low, high = seen_keys(offset + start, offset + stop, memory, causal, window)
            hidden = self._hidden(np.arange(offset + start, offset + stop)[:, None], np.arange(low, high))
            many = max(1, _CHUNK // (group * (stop - start) * (high - low)))
            for first in range(0, batch, many):
                tile = slice(first, first + many), slice(start, stop), slice(low, high)
                yield Tile(*tile, self._masked(hidden, *tile))

    def _hidden(self, i: Array, j: Array) -> Array | None:
        causal, window = self.block.attrs["causal"], self.block.attrs["window"]
        hidden = np.zeros((i.shape[0], j.size), bool)
        if causal:
            hidden |= j > i
        if window is not None:
            hidden |= np.abs(i - j) >= window
        return hidden[None, None] if hidden.any() else None

    def _masked(self, hidden: Array | None, batch: slice, queries: slice, keys: slice) -> Array | None:
        if self.mask is None:
            return hidden
        cuts = (batch, slice(None), queries, keys)
        # A dim that the mask lacks has size 1 and broadcasts.
        part = self.mask[tuple(c if n > 1 else slice(None) for c, n in zip(cuts, self.mask.shape, strict=True))]
        return ~part if hidden is None else ~part | hidden

    def rows(self, x: Array, tile: Tile) -> Array:
        """The tile's rows of q or a cotangent: [batch, group and queries, dim]."""
        part = x[tile.batch, :, tile.queries]
        return part.reshape(part.shape[0], -1, part.shape[3])

    def product(self, a: Array, b: Array) -> Array:
        """a @ b on the MXU, batch by batch."""
        out = np.empty((a.shape[0], a.shape[1], b.shape[2]), a.dtype)
        self.engine.matmul(a, b, out)
        return out

    def weights(self, tile: Tile) -> tuple[Array, Array]:
        """exp(scores - maximum), and its sums over the keys: [batch, group and queries, keys] and [..., 1]."""
        s = self.product(self.rows(self.q, tile), self.k[tile.batch, tile.keys].swapaxes(1, 2))
        np.multiply(s, s.dtype.type(self.block.attrs["scale"]), out=s)
        if tile.hidden is not None:
            shape = (s.shape[0], self.q.shape[1], -1, s.shape[2])
            np.copyto(s.reshape(shape), -np.inf, where=tile.hidden)
        peak = s.max(axis=2, keepdims=True)
        if self.mask is not None:
            peak[np.isneginf(peak)] = 0  # a query that sees no key
        np.subtract(s, peak, out=s)
        np.exp(s, out=s)
        total = s.sum(axis=2, keepdims=True)
        if self.mask is not None:
            total[total == 0] = 1
        return s, total

    def cotangents(self, tile: Tile) -> tuple[Array, Array]:
        """The probabilities and the cotangents of the scores before scaling."""
        p, total = self.weights(tile)
        np.divide(p, total, out=p)
        dp = self.product(self.rows(self.dy, tile), self.v[tile.batch, tile.keys].swapaxes(1, 2))
        inner = np.einsum("bij,bij->bi", p, dp)[..., None]
        np.subtract(dp, inner, out=dp)
        np.multiply(dp, p, out=dp)
        np.multiply(dp, dp.dtype.type(self.block.attrs["scale"]), out=dp)
        return p, self.engine.made_inside(dp)

    def restored(self, made: Array, groups: tuple[Names, ...], to: Names) -> Array:
        """An array of merged dims with its dims apart, in the order `to`."""
        names = tuple(n for part in groups for n in part)
        return align(made.reshape([self.sizes[n] for n in names]), names, to)

    def finished(self, made: Array, last: str) -> Array:
        """Rows [batch, group, length, last] as the block's result."""
        out = self.block.result()
        groups = (self.batch, self.group, (self.length,), (last,))
        np.copyto(out, self.restored(made, groups, self.block.out.shape.names))
        return out


def local_result(block: Block, *arrays: Array) -> Array:
    """The attention of this device's queries."""
    kernel = Kernel(block, arrays, with_cotangent=False)
    made = np.empty((*kernel.q.shape[:3], kernel.v.shape[2]), kernel.q.dtype)
    for tile in kernel.tiles():
        weights, total = kernel.weights(tile)
        y = kernel.product(kernel.engine.made_inside(weights), kernel.v[tile.batch, tile.keys])
        np.divide(y, total, out=y)
        part = made[tile.batch, :, tile.queries]
        part[...] = y.reshape(part.shape)
    return kernel.finished(made, kernel.value)


def local_grad_query(block: Block, *arrays: Array) -> Array:
    """The cotangent of this device's queries."""
    kernel = Kernel(block, arrays, with_cotangent=True)
    made = np.empty(kernel.q.shape, kernel.q.dtype)
    for tile in kernel.tiles():
        _, ds = kernel.cotangents(tile)
        part = made[tile.batch, :, tile.queries]
        part[...] = kernel.product(ds, kernel.k[tile.batch, tile.keys]).reshape(part.shape)
    return kernel.finished(made, kernel.key)


def local_grad_memory(block: Block, *arrays: Array) -> tuple[Array, Array]:
    """The cotangents of keys and values, summed over this device's queries."""
    kernel = Kernel(block, arrays, with_cotangent=True)
    dk, dv = np.zeros(kernel.k.shape, kernel.k.dtype), np.zeros(kernel.v.shape, kernel.v.dtype)
    for tile in kernel.tiles():
        p, ds = kernel.cotangents(tile)
        p = kernel.engine.made_inside(p)
        dk[tile.batch, tile.keys] += kernel.product(ds.swapaxes(1, 2), kernel.rows(kernel.q, tile))
        dv[tile.batch, tile.keys] += kernel.product(p.swapaxes(1, 2), kernel.rows(kernel.dy, tile))
    k, v = block.inputs[1], block.inputs[2]
    groups = (kernel.batch, (kernel.memory,))
    return (
        np.ascontiguousarray(kernel.restored(dk, (*groups, (kernel.key,)), k.shape.names)),
        np.ascontiguousarray(kernel.restored(dv, (*groups, (kernel.value,)), v.shape.names)),
    )
