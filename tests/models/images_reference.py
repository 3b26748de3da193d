"""Models of images in plain float64 NumPy, written apart from the library: windows one after the other."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.layers.layers_reference import gelu_exact, layer_norm

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


def vit(p: State, x: Array, layers: int, heads: int, patch: int, scanned: bool) -> Array:
    """Logits of a ViT, image by image and head by head."""
    out = []
    for image in x:
        rows, columns = image.shape[0] // patch, image.shape[1] // patch
        cut = [
            image[i * patch : (i + 1) * patch, j * patch : (j + 1) * patch].reshape(-1)
            for i in range(rows)
            for j in range(columns)
        ]
        tokens = np.stack(cut) @ p["patches/kernel"] + p["patches/bias"]
        y = np.concatenate([p["class_token"][None], tokens]) + p["positions"]
        for n in range(layers):
            own = {
                k.removeprefix("layers/" if scanned else f"layer{n}/"): (v[n] if scanned else v)
                for k, v in p.items()
                if k.startswith("layers/" if scanned else f"layer{n}/")
            }
            h, context = layer_normed(y, own, "attention_norm"), np.zeros(y.shape)
            q, k, v = (
                np.einsum("ld,dhe->lhe", h, own[f"attention/{s}/kernel"]) + own[f"attention/{s}/bias"] for s in "qkv"
            )
            for head in range(heads):
                scores = np.exp(q[:, head] @ k[:, head].T / q.shape[2] ** 0.5)
                weights = scores / scores.sum(1, keepdims=True)
                context += weights @ v[:, head] @ own["attention/out/kernel"][head]
            y = y + context + own["attention/out/bias"]
            h = layer_normed(y, own, "feed_forward_norm")
            h = gelu_exact(h @ own["feed_forward/wi/kernel"] + own["feed_forward/wi/bias"])
            y = y + h @ own["feed_forward/wo/kernel"] + own["feed_forward/wo/bias"]
        out.append(layer_normed(y, p, "final_norm")[0] @ p["head/kernel"] + p["head/bias"])
    return np.stack(out)


def layer_normed(x: Array, p: State, name: str) -> Array:
    return layer_norm(x, p[f"{name}/scale"], p[f"{name}/bias"], 1e-6)


def spectral(kernel: Array, u: Array) -> Array:
    """A kernel [..., columns of u] over its largest singular value, by one step from u."""
    rows = kernel.reshape(-1, u.size) if u.ndim == 1 else kernel.reshape(kernel.shape[0], -1)
    v = rows @ u.reshape(-1)
    v = v / np.sqrt((v**2).sum())
    new = rows.T @ v
    new = new / np.sqrt((new**2).sum())
    return kernel / (v @ rows @ new)


class Players:
    """Generator and discriminator of a BigGAN in use: weights by their names in the library, over singular values."""

    def __init__(self, state: State) -> None:
        self.p = state

    def kernel(self, name: str) -> Array:
        return spectral(self.p[f"{name}/kernel"], self.p[f"{name}/spectral_norm/u"])

    def conv(self, x: Array, name: str) -> Array:
        return convolved(x, self.kernel(name)) + self.p.get(f"{name}/bias", 0.0)

    def standard(self, x: Array, name: str) -> Array:
        return (x - self.p[f"{name}/moving_mean"]) / np.sqrt(self.p[f"{name}/moving_variance"] + 1e-4)

    def conditional(self, x: Array, condition: Array, name: str) -> Array:
        scale, bias = (condition @ self.kernel(f"{name}/{part}") for part in ("scale", "bias"))
        return relu(self.standard(x, name) * (1 + scale)[:, None, None] + bias[:, None, None])

    def attention(self, x: Array, name: str) -> Array:
        q, k, v, o = (self.kernel(f"{name}/{part}") for part in ("query", "key", "value", "out"))
        out = np.empty(x.shape)
        for n, image in enumerate(x):
            coarse = [
                (image @ w).reshape(image.shape[0] // 2, 2, image.shape[1] // 2, 2, -1).max((1, 3)) for w in (k, v)
            ]
            keys, values = (c.reshape(-1, c.shape[-1]) for c in coarse)
            for i, j in np.ndindex(*image.shape[:2]):
                scores = np.exp(keys @ (image[i, j] @ q))
                out[n, i, j] = scores / scores.sum() @ values @ o
        return x + self.p[f"{name}/gain"] * out

    def generated(self, z: Array, labels: Array, blocks: int, attention: int) -> Array:
        parts = np.split(z, blocks + 1, axis=1)
        first = np.tensordot(parts[0], self.kernel("generator/first"), 1) + self.p["generator/first/bias"]
        x = first
        for n in range(1, blocks + 1):
            condition = np.concatenate([self.p["generator/classes"][labels], parts[n]], axis=1)
            scope = f"generator/block{n}"
            y = self.conditional(x, condition, f"{scope}/norm1").repeat(2, axis=1).repeat(2, axis=2)
            y = self.conditional(self.conv(y, f"{scope}/conv1"), condition, f"{scope}/norm2")
            wide = self.conv(x, f"{scope}/shortcut").repeat(2, axis=1).repeat(2, axis=2)
            x = self.conv(y, f"{scope}/conv2") + wide
            x = self.attention(x, f"{scope}/image_attention") if x.shape[1] == attention else x
        y = self.standard(x, "generator/norm") * self.p["generator/norm/scale"] + self.p["generator/norm/bias"]
        return np.tanh(self.conv(relu(y), "generator/last"))

    def judged(self, x: Array, labels: Array, halves: list[bool], attention: int) -> Array:
        for n, half in enumerate(halves, start=1):
            scope = f"discriminator/block{n}"
            y = self.conv(x if n == 1 else relu(x), f"{scope}/conv1")
            y = self.conv(relu(y), f"{scope}/conv2")
            x = y + (self.conv(x, f"{scope}/shortcut") if f"{scope}/shortcut/kernel" in self.p else x)
            if half:
                x = x.reshape(len(x), x.shape[1] // 2, 2, x.shape[2] // 2, 2, -1).mean((2, 4))
                x = self.attention(x, f"{scope}/image_attention") if x.shape[1] == attention else x
        summed = relu(x).sum((1, 2))
        plain = summed @ self.kernel("discriminator/last") + self.p["discriminator/last/bias"]
        table = self.p["discriminator/projection/classes"]
        table = spectral(table, self.p["discriminator/projection/spectral_norm/u"])
        return plain[:, 0] + (table[labels] * summed).sum(1)


def unet(p: State, x: Array, levels: int) -> Array:
    """Logits of every pixel, in training."""

    def layer(y: Array, scope: str, conv: str, norm: str) -> Array:
        return relu(normed(convolved(y, p[f"{scope}/{conv}/kernel"]), p, f"{scope}/{norm}", True))

    def twice(y: Array, scope: str) -> Array:
        return layer(layer(y, scope, "conv1", "norm1"), scope, "conv2", "norm2")

    past = []
    for level in range(levels + 1):
        x = twice(x, f"down{level}")
        if level < levels:
            past.append(x)
            parts = [x[:, i::2, j::2] for i in (0, 1) for j in (0, 1)]
            x = np.maximum.reduce(parts)
    for level in reversed(range(levels)):
        x = layer(x.repeat(2, axis=1).repeat(2, axis=2), f"up{level}", "grown", "grown_norm")
        x = twice(np.concatenate([past[level], x], axis=-1), f"up{level}")
    return convolved(x, p["head/kernel"]) + p["head/bias"]


def resnet_stages(
    p: State, x: Array, blocks: tuple[int, ...], bottleneck: bool, version: str, large: bool, training: bool
) -> list[Array]:
    """What each stage makes, by the papers: the strides of a block as `version` has them."""

    def norm(y: Array, name: str) -> Array:
        return normed(y, p, name, training)

    x = convolved(x, p["stem/conv/kernel"], 2 if large else 1)
    if version != "2":
        x = relu(norm(x, "stem/norm"))
    x, found = pooled(x) if large else x, []
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
        found.append(x)
    if version == "2":
        found[-1] = relu(norm(x, "last_norm"))
    return found


def resnet(
    p: State, x: Array, blocks: tuple[int, ...], bottleneck: bool, version: str, large: bool, training: bool
) -> Array:
    """Logits."""
    last = resnet_stages(p, x, blocks, bottleneck, version, large, training)[-1]
    return last.mean((1, 2)) @ p["head/kernel"] + p["head/bias"]
