"""One operation on given blocks, and checks of its result, for both executors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from meshlib.core.engine import Engine
from meshlib.core.errors import ProgramError
from meshlib.core.graph import Operation, TensorType
from meshlib.core.opdef import Block, Summary

Array = np.ndarray[Any, Any]


def compute(
    op: Operation,
    inputs: tuple[TensorType, ...],
    outs: tuple[TensorType, ...],
    arrays: Sequence[Array],
    offsets: Mapping[str, int],
    engine: Engine,
    buffer: Array | None,
    starts: tuple[Mapping[str, int], ...] = (),
) -> tuple[Array, ...]:
    """Run `local` on one block; results are rounded to the dtypes of their local types."""
    block = Block(op, inputs, outs[0], offsets, engine, buffer, starts)
    return finished(op, outs, op.opdef.local(block, *arrays))


def summarised(
    op: Operation,
    outs: tuple[TensorType, ...],
    blocks: Sequence[Block],
    arrays: Sequence[Sequence[Array]],
    told: bool = True,
    shared: Sequence[int] = (),
) -> list[tuple[Array, ...]]:
    """Run an operation split along a dim whose blocks (given in order) exchange summaries.

    `told`: False if the exchange was lost; then every block sees the first summary only. `shared`: per array of the
    summary, the axis along which each block receives only its own part, if any.
    """
    lower = op.opdef.lower
    assert isinstance(lower, Summary)
    summaries = [lower.summarise(block, *xs) for block, xs in zip(blocks, arrays, strict=True)]
    received = lower.received(summaries if told else summaries[:1])
    count = len(blocks)
    cut = [[np.split(x, count, 1 + axis) for x, axis in zip(received, shared, strict=True)]] if shared else []
    parts = [tuple(x[n] for x in cut[0]) if cut else received for n in range(count)]
    results = [lower.finish(b, parts[n], n, *xs) for n, (b, xs) in enumerate(zip(blocks, arrays, strict=True))]
    return [finished(op, outs, ys) for ys in results]


def finished(op: Operation, outs: tuple[TensorType, ...], result: Array | tuple[Array, ...]) -> tuple[Array, ...]:
    """Results of `local` or `finish`, checked against the declared types and rounded."""
    if not isinstance(result, tuple):
        return (_finished(op, outs[0], result),)
    return tuple(_finished(op, out, y) for out, y in zip(outs, result, strict=True))


def _finished(op: Operation, out: TensorType, y: Array) -> Array:
    if y.shape != out.shape.sizes or y.dtype != out.dtype.storage:
        raise ProgramError(f"{op} made {y.dtype}{list(y.shape)}, not the declared {out}")
    if out.dtype.is_rounded and not op.opdef.exact:
        return out.dtype.rounded(y, out=y if y.flags.writeable else None)
    return y
