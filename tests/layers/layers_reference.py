"""What the layers compute, in plain float64 NumPy: example by example and head by head, without the library."""

from __future__ import annotations

from math import erf, log, pi, tanh

import numpy as np

Array = np.ndarray

gelu = np.vectorize(lambda x: x / 2 * (1 + tanh((2 / pi) ** 0.5 * (x + 0.044715 * x**3))))
gelu_exact = np.vectorize(lambda x: x / 2 * (1 + erf(x / 2**0.5)))


def silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


def softmax(x: Array) -> Array:
    """Of one row."""
    e = np.exp(x - x.max())
    return e / e.sum()


def layer_norm(x: Array, scale: Array, bias: Array | float, epsilon: float) -> Array:
    """Over the last axis."""
    out = np.empty(x.shape)
    for at in np.ndindex(*x.shape[:-1]):
        row = x[at]
        mean = sum(row) / len(row)
        variance = sum((row - mean) ** 2) / len(row)
        out[at] = (row - mean) / (variance + epsilon) ** 0.5
    return out * scale + bias


def standard(x: Array, sets: list[object], epsilon: float) -> Array:
    """Each set of elements with mean 0 and variance 1, by an epsilon."""
    out = np.full(x.shape, np.nan)
    for one in sets:
        values = x[one]
        mean = values.sum() / values.size
        out[one] = (values - mean) / (((values - mean) ** 2).sum() / values.size + epsilon) ** 0.5
    return out


def rms_norm(x: Array, scale: Array, epsilon: float = 1e-6) -> Array:
    """Over the last axis."""
    out = np.empty(x.shape)
    for at in np.ndindex(*x.shape[:-1]):
        out[at] = x[at] / (x[at] @ x[at] / x.shape[-1] + epsilon) ** 0.5
    return out * scale


def rotary(x: Array, base: float, positions: Array | None = None) -> Array:
    """x[length, dim]: the pair (i, i + half) as a complex number, turned."""
    half = x.shape[1] // 2
    rows = np.arange(x.shape[0]) if positions is None else positions
    z = (x[:, :half] + 1j * x[:, half:]) * np.exp(1j * np.outer(rows, base ** -(np.arange(half) / half)))
    return np.concatenate([z.real, z.imag], axis=1)


def sinusoids(length: int, size: int) -> Array:
    out = np.empty((length, size))
    for n in range(length):
        for i in range(size // 2):
            angle = n / 10000 ** (2 * i / size)
            out[n, i], out[n, i + size // 2] = np.sin(angle), np.cos(angle)
    return out


def bucket(query: int, key: int, count: int, longest: int, bidirectional: bool) -> int:
    """T5's bucket of a distance, by its logarithm: distances 0, 1, ... have their own up to half of the buckets."""
    first, distance = 0, query - key
    if bidirectional:
        count //= 2
        first = count if distance < 0 else 0
        distance = abs(distance)
    elif distance < 0:
        distance = 0
    exact = count // 2
    if distance < exact:
        return first + distance
    wide = int(log(distance / exact) / log(longest / exact) * (count - exact) + 1e-9)
    return first + min(exact + wide, count - 1)


def head(
    q: Array,
    k: Array,
    v: Array,
    causal: bool = False,
    window: int | None = None,
    scale: float | None = None,
    bias: Array | None = None,
    mask: Array | None = None,
    extra: float | None = None,
    keep: Array | None = None,
) -> Array:
    """One head, query by query: q[i, d], k[j, d], v[j, e]; `keep` multiplies the weights."""
    out = np.zeros((len(q), v.shape[1]))
    for i in range(len(q)):
        seen = [
            j
            for j in range(len(k))
            if not (causal and j > i)
            and not (window is not None and abs(i - j) >= window)
            and (mask is None or mask[i, j])
        ]
        if not seen:
            continue
        scores = (k[seen] @ q[i]) * (k.shape[1] ** -0.5 if scale is None else scale)
        if bias is not None:
            scores = scores + bias[i, seen]
        weights = softmax(np.array([*scores, *([] if extra is None else [extra])]))[: len(seen)]
        out[i] = (weights if keep is None else weights * keep[i, seen]) @ v[seen]
    return out


def cross_entropy(logits: Array, target: Array, z_loss: float = 0.0) -> float:
    """Of one example and the distribution it should have."""
    log_z = log(sum(np.exp(logits)))
    return float(-sum(target * (logits - log_z)) + z_loss * log_z**2)
