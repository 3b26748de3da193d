"""Fused attention along a split sequence: exchanges between blocks.

With split keys each device works on its own block and exchanges one number per query, the logarithm of the sum of
exp(scores), which weighs its share of the softmax; for gradients also the mean of the weights' cotangents. Through a
window a query sees nearby keys only: if queries and keys are split alike, a halo of keys is exchanged, and for the
gradients of keys and values one of queries.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from layouts import Shape
from meshlib.core.dtypes import FLOAT32, FLOAT64
from meshlib.core.graph import Operation, TensorType
from meshlib.core.opdef import Array, Block, Factor, Halo, Role, Summary
from meshlib.ops.building import named_factors
from meshlib.ops.fused_attention.kernel import LocalAttention, gradients, local_grad_memory, put, result

# ---------------------------------------------------------------- keys split over devices


def _levels(block: Block, *arrays: Array) -> tuple[Array, ...]:
    """log(sum(exp(scores))) per query over the keys of this block."""
    kernel = LocalAttention(block, arrays, with_cotangent=False)
    levels = kernel.row_sized()
    for memory in kernel.batches():
        for rows in kernel.rows(memory):
            put(levels, memory.batch, rows.queries, kernel.weights(rows, memory)[2])
    return (levels,)


def _levels_and_means(block: Block, *arrays: Array) -> tuple[Array, ...]:
    """The result of `_levels`, and the mean of the weights' cotangents under this block's softmax."""
    kernel = LocalAttention(block, arrays, with_cotangent=True)
    levels, means = kernel.row_sized(), kernel.row_sized()
    for memory in kernel.batches():
        for rows in kernel.rows(memory):
            p, level = kernel.probabilities(rows, memory)
            _, mean = kernel.weight_cotangents(p, rows, memory)
            put(levels, memory.batch, rows.queries, level)
            put(means, memory.batch, rows.queries, mean)
    return levels, means


def _combined(levels: Array, means: Array | None = None) -> tuple[Array, ...]:
    """The statistics of all blocks together."""
    whole = np.logaddexp.reduce(levels, axis=0)
    if means is None:
        return (whole,)
    shares = np.where(np.isneginf(levels), 0, np.exp(levels - whole))
    return whole, np.add.reduce(shares * means, axis=0)


def _summary_types(count: int) -> Callable[[tuple[TensorType, ...], Mapping[str, Any]], tuple[TensorType, ...]]:
    """Types of a summary of `count` numbers per query, in float32 unless all operands are float64."""

    def types(ins: tuple[TensorType, ...], attrs: Mapping[str, Any]) -> tuple[TensorType, ...]:
        rows = Shape([d for d in ins[0].shape if d.name != attrs["key_dim"]])
        return (TensorType(rows, FLOAT64 if ins[0].dtype is FLOAT64 else FLOAT32),) * count

    return types


SPLIT_RESULT = Summary(
    _levels, lambda block, received, index, *arrays: result(block, arrays, received[0]), _summary_types(1), _combined
)
SPLIT_GRAD_QUERY = Summary(
    _levels_and_means,
    lambda block, received, index, *arrays: gradients(block, arrays, received)[0],
    _summary_types(2),
    _combined,
)
SPLIT_GRAD_MEMORY = replace(
    SPLIT_GRAD_QUERY, finish=lambda block, received, index, *arrays: gradients(block, arrays, received)[1:]
)


# ---------------------------------------------------------------- windows over queries and keys that are split alike


def joined_factors(op: Operation, out: str, special: Mapping[str, Role]) -> tuple[Factor, ...]:
    """Factors with queries and keys as one, whose blocks need halos of each other; the result has the dim `out`."""
    length, memory = op.attrs["length"], op.attrs["memory_length"]
    apart = [f for f in named_factors(op, special) if f.name not in (length, memory)]
    operands = tuple(next((n for n in (length, memory) if n in x.shape), None) for x in op.inputs)
    size = op.inputs[0].shape.dim(length).size
    return (Factor(length, size, operands, (op.attrs[out],) * len(op.outputs), Role.HALO), *apart)


def _visible_range(op: Operation) -> tuple[int, int]:
    """The number of keys before and after its own position that a query sees."""
    far: int = op.attrs["window"] - 1
    return far, 0 if op.attrs["causal"] else far


def _query_halo(op: Operation, factor: Factor, operand: int, start: int, stop: int) -> tuple[int, int]:
    """Halo of queries [start, stop): these queries, and the keys that they see."""
    before, after = (0, 0) if op.attrs["length"] in op.inputs[operand].shape else _visible_range(op)
    return start - before, stop + after


def _key_halo(op: Operation, factor: Factor, operand: int, start: int, stop: int) -> tuple[int, int]:
    """Halo of keys [start, stop): the queries that see them, and all keys that those queries see, for their softmax."""
    before, after = _visible_range(op)
    start, stop = start - after, stop + before
    return (start, stop) if op.attrs["length"] in op.inputs[operand].shape else (start - before, stop + after)


WINDOW_RESULT = Halo(_query_halo)
WINDOW_GRAD_MEMORY = Halo(_key_halo)


def window_grad_memory(block: Block, *arrays: Array) -> tuple[Array, Array]:
    """The cotangents of this block's keys and values, cut from those of the halo."""
    length, memory = block.attrs["length"], block.attrs["memory_length"]
    begin, length_here = block.offsets[length] - block.start(1, memory), block.out.shape.dim(memory).size
    own_parts = []
    for x, t in zip(local_grad_memory(block, *arrays), block.inputs[1:3], strict=True):
        own = (np.s_[:],) * t.shape.index(memory) + (np.s_[begin : begin + length_here],)
        own_parts.append(np.ascontiguousarray(x[own]))
    return own_parts[0], own_parts[1]
