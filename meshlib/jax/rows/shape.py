"""JAX rows of operations that rename, reorder or move elements."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshlib.jax.context import Array
from meshlib.jax.table import RowContext, aligned, row


def _same(part: RowContext, x: Array, *more: Array) -> Array:
    return x


for _name in ("assign", "constrain", "identity", "print", "rename_dimension", "stop_gradient"):
    row(_name)(_same)


@row("transpose")
def _transpose(part: RowContext, x: Array) -> Array:
    return aligned(x, part.names[0], part.out.shape.names)


@row("broadcast")
def _broadcast(part: RowContext, x: Array) -> Array:
    return jnp.broadcast_to(aligned(x, part.names[0], part.out.shape.names), part.out.shape.sizes)


@row("reshape")
def _reshape(part: RowContext, x: Array) -> Array:
    return x.reshape(part.out.shape.sizes)


@row("rotate_half")
def _rotate_half(part: RowContext, x: Array) -> Array:
    first, second = jnp.split(x, 2, axis=part.names[0].index(part.attrs["dim"]))
    return jnp.concatenate([-second, first], axis=part.names[0].index(part.attrs["dim"]))


def _host(kind: str) -> Any:
    def local(part: RowContext, x: Array) -> Array:
        if part.context.platform == "cpu":  # whose memory is the host's
            return x
        return jax.device_put(x, jax.memory.Space.Host if kind == "to_host" else jax.memory.Space.Device)

    return local


row("to_host")(_host("to_host"))
row("from_host")(_host("from_host"))


@row("stack")
def _stack(part: RowContext, *xs: Array) -> Array:
    # A device with only part of the new dim takes only these tensors.
    dim, axis = part.attrs["dim"].name, part.attrs["axis"]
    whole = jnp.stack(xs, axis)
    return lax.dynamic_slice_in_dim(whole, part.offsets[dim], part.out.shape.dim(dim).size, axis)


# ---------------------------------------------------------------- slices and windows of a dim


def _placed(x: Array, axis: int, first: int, length: int, fill: Any) -> Array:
    """y[p] = x[p + first] for p < length, `fill` outside x."""
    pads = [(0, 0, 0)] * x.ndim
    pads[axis] = (-first, first + length - x.shape[axis], 0)
    return lax.pad(x, jnp.asarray(fill, x.dtype), pads)


def _moved(part: RowContext, n: int, x: Array, begin: int, fill: Any) -> tuple[Array, Array]:
    """Elements of operand `n` at an offset of `begin` from the result's; and which exist (bool, along the dim)."""
    dim = part.attrs["dim"]
    axis, length = part.out.shape.index(dim), part.out.shape.dim(dim).size
    place = part.positions(dim, length) + begin
    there = (place >= 0) & (place < part.operation.inputs[n].shape.dim(dim).size)
    there = there.reshape([-1 if a == axis else 1 for a in range(x.ndim)])
    lead = part.lead(n, dim)
    y = _placed(x, axis, begin - (lead or 0), length, fill)
    # Padding has filled a whole operand; elements of a window beyond the dim are undefined.
    return (y if lead is None else jnp.where(there, y, jnp.asarray(fill, x.dtype))), there


@row("slice")
def _slice(part: RowContext, x: Array) -> Array:
    dim, begin = part.attrs["dim"], part.attrs["begin"]
    axis, length = part.out.shape.index(dim), part.out.shape.dim(dim).size
    if (lead := part.lead(0, dim)) is not None:
        return _placed(x, axis, begin - lead, length, 0)
    start = part.offsets[f"{dim}'"]
    if isinstance(start, int):
        return _placed(x, axis, begin - start, length, 0)
    place = begin + jnp.arange(length) - start  # relative to this block, whose elements are partial results
    there = ((place >= 0) & (place < x.shape[axis])).reshape([-1 if a == axis else 1 for a in range(x.ndim)])
    return jnp.where(there, jnp.take(x, place, axis=axis, mode="clip"), jnp.zeros((), x.dtype))


@row("pad")
def _pad(part: RowContext, x: Array) -> Array:
    return _moved(part, 0, x, -part.attrs["before"], part.attrs["value"])[0]


@row("shift")
def _shift(part: RowContext, x: Array) -> Array:
    dim, offset = part.attrs["dim"], part.attrs["offset"]
    if not part.attrs["wrap"]:
        return _moved(part, 0, x, -offset, 0)[0]
    axis = part.out.shape.index(dim)
    lead = part.lead(0, dim)
    if lead is None:
        return jnp.roll(x, offset, axis)
    return _placed(x, axis, -offset - lead, part.out.shape.dim(dim).size, 0)


@row("concat")
def _concat(part: RowContext, *xs: Array) -> Array:
    axis, begin = part.out.shape.index(part.attrs["dim"]), 0
    if not any(part.runs):
        return jnp.concatenate(xs, axis)
    joined: Array | None = None
    for n, x in enumerate(xs):
        y, there = _moved(part, n, x, -begin, 0)
        joined = y if joined is None else jnp.where(there, y, joined)
        begin += part.operation.inputs[n].shape.dim(part.attrs["dim"]).size
    assert joined is not None
    return joined
