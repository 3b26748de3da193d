"""Models of images in plain float64 NumPy, written apart from the library: windows one after the other."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
State = dict[str, Array]


def convolved(x: Array, kernel: Array, stride: int = 1, pad: int | None = None) -> Array:
    """x[n, h, w, c], kernel[k, k, c, d]; `pad` rows and columns of zeros on each side, (k - 1) / 2 unless given."""
    k = kernel.shape[0]
    pad = (k - 1) // 2 if pad is None else pad
    padded = np.pad(x, ((0, 0), (pad, pad), (pad, pad), (0, 0)))
    rows, columns = ((n - k) // stride + 1 for n in padded.shape[1:3])
    out = np.empty((len(x), rows, columns, kernel.shape[-1]))
    for i in range(rows):
        for j in range(columns):
            window = padded[:, i * stride : i * stride + k, j * stride : j * stride + k]
            out[:, i, j] = np.tensordot(window, kernel, 3)
    return out


def pooled(x: Array) -> Array:
    """Maxima of 3x3 with stride 2, padded by one."""
    padded = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)), constant_values=-np.inf)
    rows, columns = ((n - 3) // 2 + 1 for n in padded.shape[1:3])
    out = np.empty((len(x), rows, columns, x.shape[-1]))
    for i in range(rows):
        for j in range(columns):
            out[:, i, j] = padded[:, 2 * i : 2 * i + 3, 2 * j : 2 * j + 3].max(axis=(1, 2))
    return out


def relu(x: Array) -> Array:
    return np.maximum(x, 0)


def normed(x: Array, p: State, name: str, training: bool) -> Array:
    mean, variance = x.mean((0, 1, 2)), x.var((0, 1, 2))
    if not training:
        mean, variance = p[f"{name}/moving_mean"], p[f"{name}/moving_variance"]
    return (x - mean) / np.sqrt(variance + 1e-5) * p[f"{name}/scale"] + p[f"{name}/bias"]


def resnet(
    p: State, x: Array, blocks: tuple[int, ...], bottleneck: bool, version: str, large: bool, training: bool
) -> Array:
    """Logits, by the papers: the strides of a block as `version` has them."""

    def norm(y: Array, name: str) -> Array:
        return normed(y, p, name, training)

    x = convolved(x, p["stem/conv/kernel"], 2 if large else 1)
    if version != "2":
        x = relu(norm(x, "stem/norm"))
    x = pooled(x) if large else x
    for s, count in enumerate(blocks, start=1):
        for b in range(1, count + 1):
            scope = f"stage{s}/block{b}"
            stride = 2 if b == 1 and s > 1 else 1
            strides = [stride, 1]
            if bottleneck:
                strides = [stride, 1, 1] if version == "1" else [1, stride, 1]
            y = first = relu(norm(x, f"{scope}/norm1")) if version == "2" else x
            for n, step in enumerate(strides, start=1):
                if version == "2" and n > 1:
                    y = relu(norm(y, f"{scope}/norm{n}"))
                y = convolved(y, p[f"{scope}/conv{n}/kernel"], step)
                if version != "2":
                    y = norm(y, f"{scope}/norm{n}")
                    y = relu(y) if n < len(strides) else y
            shortcut = x
            if f"{scope}/shortcut/kernel" in p:
                shortcut = convolved(first, p[f"{scope}/shortcut/kernel"], stride)
                shortcut = shortcut if version == "2" else norm(shortcut, f"{scope}/shortcut_norm")
            x = y + shortcut if version == "2" else relu(y + shortcut)
    x = relu(norm(x, "last_norm")) if version == "2" else x
    return x.mean((1, 2)) @ p["head/kernel"] + p["head/bias"]
