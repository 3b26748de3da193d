"""Transformers in plain NumPy, float64, written from their papers; what the tests of the models compare with.

One sequence after the other, one head after the other: slow and plain. `Weights` looks variables up by the names that
the library gives them; the mathematics shares nothing with it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


class Weights:
    """Variables under a prefix, with the index of the trip for stacked ones."""

    def __init__(self, values: Mapping[str, Array], prefix: str = "", trip: int | None = None) -> None:
        self.values, self.prefix, self.trip = values, prefix, trip

    def __getitem__(self, name: str) -> Array:
        value = self.values[self.prefix + name]
        return value if self.trip is None else value[self.trip]

    def __contains__(self, name: str) -> bool:
        return self.prefix + name in self.values

    def under(self, part: str, trip: int | None = None) -> Weights:
        """Those whose names go on with `part`."""
        return Weights(self.values, f"{self.prefix}{part}/", self.trip if trip is None else trip)


# ------------------------------------------------------------ pieces


def normed(x: Array, w: Weights, config: Any) -> Array:
    """Layer norm or RMS norm over the last axis."""
    if config.norm == "rms":
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + config.norm_epsilon) * w["scale"]
    centred = x - x.mean(-1, keepdims=True)
    y = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + config.norm_epsilon) * w["scale"]
    return y + w["bias"] if "bias" in w else y


def rms(x: Array, scale: Array, epsilon: float) -> Array:
    """RMS norm over the last axis."""
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * scale


def activated(x: Array, name: str) -> Array:
    """The activation functions."""
    if name == "relu":
        return np.maximum(x, 0)
    if name == "silu":
        return x / (1 + np.exp(-x))
    if name == "tanh":
        return np.tanh(x)
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def rotated(x: Array, theta: float) -> Array:
    """Rotary positions of x [length, head_dim]: feature i turns with feature i + head_dim / 2."""
    length, dim = x.shape
    out = np.empty_like(x)
    for position in range(length):
        for i in range(dim // 2):
            angle = position * theta ** (-2 * i / dim)
            a, b = x[position, i], x[position, i + dim // 2]
            out[position, i] = a * math.cos(angle) - b * math.sin(angle)
            out[position, i + dim // 2] = a * math.sin(angle) + b * math.cos(angle)
    return out


def sinusoids(length: int, features: int) -> Array:
    """Vaswani et al. 2017, 3.5, with the sines in the first half of the features and the cosines in the second."""
    out = np.empty((length, features))
    half = features // 2
    for position in range(length):
        for i in range(half):
            angle = position / 10_000 ** (2 * i / features)
            out[position, i], out[position, half + i] = math.sin(angle), math.cos(angle)
    return out


def bucket(distance: int, bidirectional: bool, buckets: int, furthest: int) -> int:
    """T5's bucket of key position minus query position."""
    found = 0
    if bidirectional:
        buckets //= 2
        if distance > 0:
            found += buckets
        distance = abs(distance)
    else:
        distance = -min(distance, 0)
    exact = buckets // 2
    if distance < exact:
        return found + distance
    wide = exact + int(math.log(distance / exact) / math.log(furthest / exact) * (buckets - exact))
    return found + min(wide, buckets - 1)


def softmaxed(scores: Array) -> Array:
    """Over the last axis."""
    e = np.exp(scores - scores.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def smoothed_loss(logits: Array, targets: Array, smoothing: float, z_loss: float) -> float:
    """Mean cross entropy over tokens, targets mixed with the uniform distribution, plus z_loss log(Z)^2."""
    total = 0.0
    flat, wanted = logits.reshape(-1, logits.shape[-1]), targets.reshape(-1)
    for row, target in zip(flat, wanted, strict=True):
        log_z = row.max() + math.log(np.exp(row - row.max()).sum())
        distribution = np.full(len(row), smoothing / len(row))
        distribution[target] += 1 - smoothing
        total += float((distribution * (log_z - row)).sum()) + z_loss * log_z**2
    return total / len(flat)
