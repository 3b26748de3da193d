"""JAX rows of sources: constants, tables, ranges, and random numbers that match the simulation's.

Random words are Threefry's on both sides: the key is of seed and name, with step and trips folded in, and the counter
is the global position of an element. Uniform numbers in [0, 1), and so dropout masks, agree with the simulator to the
last bit. For other bounds and for normal numbers the simulator computes in float64, this module in float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import lax

from meshlib.core.initializers import limits
from meshlib.core.random import PARITY, ROTATIONS
from meshlib.jax.context import Array, Index
from meshlib.jax.table import RowContext, rounded, row, storage, widest
from meshlib.ops.pointwise.random import deciding_trips, stream_of


@row("input")
@row("variable")
def _resident(part: RowContext) -> Array:
    raise AssertionError(f"{part.operation} is there before the step")


@row("scan")
def _loop(part: RowContext, *arrays: Array) -> Array:
    raise AssertionError("the executor runs the body's instructions")


@row("constant")
def _constant(part: RowContext) -> Array:
    return jnp.full(part.out.shape.sizes, part.attrs["value"], widest(part.out.dtype))


@row("table")
def _table(part: RowContext) -> Array:
    whole = jnp.asarray(part.attrs["value"].array.astype(storage(part.out.dtype)))
    return lax.dynamic_slice(whole, [part.offsets[n] for n in part.out.shape.names], part.out.shape.sizes)


@row("range")
def _range(part: RowContext) -> Array:
    (d,) = part.out.shape
    place = part.positions(d.name, d.size)
    return place.astype(widest(part.out.dtype))


# ---------------------------------------------------------------- random numbers


def threefry2x32(key: tuple[Array, Array], high: Array, low: Array) -> tuple[Array, Array]:
    """Encrypt the counters (high, low), uint32, under `key`, as in `meshlib.core.initializers`."""
    words = (key[0], key[1], key[0] ^ key[1] ^ np.uint32(PARITY))
    x, y = high + words[0], low + words[1]
    for group in range(5):
        for r in ROTATIONS[group % 2]:
            x = x + y
            y = ((y << np.uint32(r)) | (y >> np.uint32(32 - r))) ^ x
        x = x + words[(group + 1) % 3]
        y = y + words[(group + 2) % 3] + np.uint32(group + 1)
    return x, y


def _positions(offsets: Sequence[Index], sizes: Sequence[int], whole: Sequence[int]) -> tuple[Array, Array]:
    """High and low words of the global row-major position of each element of a block."""
    high, low = jnp.zeros((), jnp.uint32), jnp.zeros((), jnp.uint32)
    stride = 1
    for axis in reversed(range(len(whole))):
        index = jnp.uint32(offsets[axis]) + jnp.arange(sizes[axis], dtype=jnp.uint32)
        more_high, more_low = _times(index.reshape([-1 if a == axis else 1 for a in range(len(whole))]), stride)
        low = low + more_low
        high = high + more_high + (low < more_low).astype(jnp.uint32)
        stride *= whole[axis]
    return jnp.broadcast_to(high, tuple(sizes)), jnp.broadcast_to(low, tuple(sizes))


def _times(x: Array, factor: int) -> tuple[Array, Array]:
    """High and low words of the 64-bit product of uint32 values and an integer."""
    upper, lower = np.uint32(factor >> 32 & 0xFFFFFFFF), factor & 0xFFFFFFFF
    a, b = x >> 16, x & np.uint32(0xFFFF)
    c, d = np.uint32(lower >> 16), np.uint32(lower & 0xFFFF)
    middle = a * d + (b * d >> 16)  # below 2^32
    carried = (middle & np.uint32(0xFFFF)) + b * c
    high = a * c + (middle >> 16) + (carried >> 16)
    return high + x * upper, x * np.uint32(lower)


@row("random")
@row("numbered_random")
def _random(part: RowContext, *numbers: Array) -> Array:
    context, op, out = part.context, part.operation, part.out
    base = context.keys[stream_of(op)]
    key = (base[0], base[1])
    for number in (context.step, *deciding_trips(op, context.trips), *numbers):
        key = threefry2x32(key, jnp.zeros((), jnp.uint32), number.astype(jnp.uint32))
    offsets = [part.offsets[n] for n in out.shape.names]
    x, y = threefry2x32(key, *_positions(offsets, out.shape.sizes, op.output.shape.sizes))
    kind, a, b = part.attrs["law"]
    number = jnp.float64 if out.dtype.name == "float64" else jnp.float32
    first, second = x >> 8, y >> 8  # 24 bits are exact in float32
    if kind == "uniform":
        value = number(a) + number(b - a) * (first.astype(number) * number(2.0**-24))
        if (a, b) == (0.0, 1.0):
            value = first.astype(number) * number(2.0**-24)
    else:
        radius = jnp.sqrt(-2 * _log_of_share(first + 1, number))
        value = number(a) + number(b) * (radius * _cosine_of_turns(second, number))
    if out.dtype.name == "bfloat16":
        value = rounded(value)
    if kind == "uniform" and a < b:
        value = jnp.clip(value, *(number(limit) for limit in limits(a, b, out.dtype)))
    return value.astype(storage(out.dtype))


def _log_of_share(n: Array, number: type) -> Array:
    """log(n / 2^24) for 1 <= n <= 2^24, accurate near 0, too."""
    short = (np.uint32(1 << 24) - n).astype(number) * number(2.0**-24)  # exact
    return jnp.where(n > 1 << 23, jnp.log1p(-short), jnp.log(n.astype(number) * number(2.0**-24)))


def _cosine_of_turns(n: Array, number: type) -> Array:
    """cos(2 pi n / 2^24), reduced in integers to an eighth of a turn, so that no angle is rounded."""
    eighth = np.uint32(1 << 21)
    octant, rest = n // eighth, n % eighth
    rest = jnp.where(octant % 2 == 1, eighth - rest, rest)
    angle = rest.astype(number) * number(2 * np.pi * 2.0**-24)
    across = (octant == 1) | (octant == 2) | (octant == 5) | (octant == 6)
    size = jnp.where(across, jnp.sin(angle), jnp.cos(angle))
    return jnp.where((octant >= 2) & (octant <= 5), -size, size)
