"""Functions of the bits of numbers: counts of bits, and the next number that a dtype can represent."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from meshlib.jax.importing.code import CodeStep
from meshlib.jax.importing.integers import bits_of
from meshlib.jax.importing.rewrites.table import Function, rewrite


def _ones(x: Any) -> Any:
    """The number of bits that are set in int32, added up in pairs, fours and eights (Hacker's Delight, section 5-1)."""
    x = x - (lax.shift_right_logical(x, jnp.int32(1)) & 0x55555555)
    x = (x & 0x33333333) + (lax.shift_right_logical(x, jnp.int32(2)) & 0x33333333)
    x = (x + lax.shift_right_logical(x, jnp.int32(4))) & 0x0F0F0F0F
    return lax.shift_right_logical(x * 0x01010101, jnp.int32(24))


def _of_words(count: Function) -> Any:
    """`count` of the bits of an integer dtype as int32, without copies of the sign."""

    def rewritten(step: CodeStep) -> Function:
        held = bits_of(step.ins[0].dtype)

        def run(x: Any) -> Any:
            word = x.astype("int32") & (2**held - 1) if held < 32 else x.astype("int32")
            return count(word, held).astype(x.dtype)

        return run

    return rewritten


def _leading_zeros(x: Any, held: int) -> Any:
    for far in (1, 2, 4, 8, 16):  # set all bits below the highest one
        x = x | lax.shift_right_logical(x, jnp.int32(far))
    return held - _ones(x)


def _next(x: Any, y: Any) -> Any:
    """Floats of one sign are ordered like their bits."""
    whole = jnp.int32 if x.dtype == jnp.float32 else jnp.int16
    bits = lax.bitcast_convert_type(x, whole)
    away = (x < y) == (x > 0)
    moved = lax.bitcast_convert_type(jnp.where(away, bits + 1, bits - 1).astype(whole), x.dtype)
    least = lax.bitcast_convert_type(jnp.ones_like(bits), x.dtype)
    moved = jnp.where(x == 0, jnp.where(y < 0, -least, least), moved)
    return jnp.where((x != x) | (y != y), x + y, jnp.where(x == y, y, moved))


rewrite("population_count", _of_words(lambda x, held: _ones(x)))
rewrite("clz", _of_words(_leading_zeros))
rewrite("nextafter", lambda step: _next)
