"""Fourier transforms as products with DFT matrices, on real and imaginary parts.

A transform of n points is a product with n x n roots of unity. Where n is large and has divisors it is written as two
rounds of smaller ones, over the rows and the columns of the points as a matrix, between which each element is turned:
n (n1 + n2) multiply-adds in place of n n, for n = n1 n2. So it runs on the MXU, any other dim may be split, and
estimates count what these products take; chips and libraries with transforms of their own take other time.

Source: Cooley and Tukey, Math. Comp. 19 (1965); four-step form: Bailey, J. Supercomputing 4 (1990).
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isqrt
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

Array = Any
Parts = tuple[Array, Array]

LARGEST = 256  # points of a transform that is one product: fills two MXU tiles per side


def fft(params: Mapping[str, Any], x: Array | Parts) -> Any:
    """`lax.fft` over the last axes: complex to complex (both directions), real to complex, complex to real."""
    kind, lengths = params["fft_type"], params["fft_lengths"]
    last, n = x[0].ndim - 1 if isinstance(x, tuple) else x.ndim - 1, lengths[-1]
    others = range(last - len(lengths) + 1, last)
    backwards = kind in (lax.FftType.IFFT, lax.FftType.IRFFT)
    parts = x if isinstance(x, tuple) else (x, None)
    if kind is lax.FftType.RFFT:
        parts = tuple(y[..., : n // 2 + 1] for y in _along(parts, last, False))
    elif kind is lax.FftType.IRFFT:
        for axis in others:
            parts = _along(parts, axis, True)
        return _along(_hermitian(parts, n), last, True)[0]
    else:
        parts = _along(parts, last, backwards)
    for axis in others:
        parts = _along(parts, axis, backwards)
    return parts


def _hermitian(x: Parts, n: int) -> Parts:
    """All n points of a real signal's transform, from its first half."""
    a, b = x
    # Only the real part of the constant and middle (if any) terms counts.
    b = b * (2 * np.arange(b.shape[-1]) % n != 0).astype(b.dtype)
    inner = slice(1, (n + 1) // 2)
    return jnp.concatenate([a, a[..., inner][..., ::-1]], -1), jnp.concatenate([b, -b[..., inner][..., ::-1]], -1)


def _along(x: tuple[Array, Array | None], axis: int, backwards: bool) -> Parts:
    """The transform along one axis; the inverse divides by the number of points."""
    a, b = x
    n = a.shape[axis]
    b = None if b is None else jnp.moveaxis(b, axis, -1)
    a, b = _transform(jnp.moveaxis(a, axis, -1), b, 1 if backwards else -1)
    if backwards:
        a, b = a / n, b / n
    return jnp.moveaxis(a, -1, axis), jnp.moveaxis(b, -1, axis)


def _transform(a: Array, b: Array | None, sign: int) -> Parts:
    """Sum over j of x[j] exp(sign 2 pi i j k / n), along the last axis; b is None where x is real."""
    n = a.shape[-1]
    rows = 1 if n <= LARGEST else max(d for d in range(1, isqrt(n) + 1) if n % d == 0)
    if rows == 1:
        return _times_roots(a, b, _roots(n, n, n, sign, a.dtype))
    columns = n // rows
    shape = (*a.shape[:-1], rows, columns)

    def by_columns(part: Array) -> Array:
        return jnp.swapaxes(part.reshape(shape), -1, -2)

    a, b = _transform(by_columns(a), None if b is None else by_columns(b), sign)  # over rows: [columns, k1]
    c, s = _roots(columns, rows, n, sign, a.dtype)
    a, b = jnp.swapaxes(a * c - b * s, -1, -2), jnp.swapaxes(a * s + b * c, -1, -2)
    a, b = _transform(a, b, sign)  # over columns: [k1, k2], where k = k1 + rows * k2
    return jnp.swapaxes(a, -1, -2).reshape(*shape[:-2], n), jnp.swapaxes(b, -1, -2).reshape(*shape[:-2], n)


def _roots(height: int, width: int, n: int, sign: int, dtype: Any) -> tuple[Any, Any]:
    """cos and sin of sign 2 pi j k / n, with j k reduced modulo n first to keep all digits."""
    angles = sign * 2 * np.pi * (np.outer(np.arange(height), np.arange(width)) % n) / n
    return np.cos(angles).astype(dtype), np.sin(angles).astype(dtype)


def _times_roots(a: Array, b: Array | None, roots: tuple[Any, Any]) -> Parts:
    def times(x: Array, y: Any) -> Array:
        return jnp.matmul(x, y, precision=lax.Precision.HIGHEST)

    c, s = roots
    if b is None:
        return times(a, c), times(a, s)
    return times(a, c) - times(b, s), times(a, s) + times(b, c)
