"""One training step of a small decoder in plain NumPy, forward, backward and AdamW by hand, every array made once.

Pre-norm blocks of causal attention and a feed-forward layer with tanh GELU, layer norms without bias, learned
positions, a table that embeds and makes the logits. It shares nothing with the library but the names of the weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

Array = np.ndarray
F32 = np.float32
EPSILON = F32(1e-6)
SLOPE, CUBE = F32(math.sqrt(2 / math.pi)), F32(0.044715)


@dataclass(frozen=True)
class Sizes:
    """Dimensions of model and batch."""

    batch: int = 64
    length: int = 64
    d_model: int = 256
    heads: int = 8
    d_ff: int = 1024
    vocab: int = 512
    layers: int = 2

    @property
    def tokens(self) -> int:
        """Rows of an activation."""
        return self.batch * self.length


class Norm:
    """Layer norm with a scale."""

    def __init__(self, tokens: int, features: int) -> None:
        self.hat, self.y = np.empty((tokens, features), F32), np.empty((tokens, features), F32)
        self.mean, self.rate = np.empty((tokens, 1), F32), np.empty(tokens, F32)
        self.work = np.empty((tokens, features), F32)

    def forward(self, x: Array, scale: Array) -> Array:
        np.mean(x, axis=1, keepdims=True, out=self.mean)
        np.subtract(x, self.mean, out=self.hat)
        np.einsum("ij,ij->i", self.hat, self.hat, out=self.rate)
        np.divide(self.rate, F32(x.shape[1]), out=self.rate)
        np.add(self.rate, EPSILON, out=self.rate)
        np.sqrt(self.rate, out=self.rate)
        np.divide(F32(1), self.rate, out=self.rate)
        np.multiply(self.hat, self.rate[:, None], out=self.hat)
        return np.multiply(self.hat, scale, out=self.y)

    def backward(self, dy: Array, scale: Array, dscale: Array, dx: Array) -> None:
        """Adds to dx; destroys dy."""
        np.einsum("ij,ij->j", dy, self.hat, out=dscale)
        np.multiply(dy, scale, out=dy)
        np.mean(dy, axis=1, keepdims=True, out=self.mean)
        inner = np.einsum("ij,ij->i", dy, self.hat) / F32(dy.shape[1])
        np.subtract(dy, self.mean, out=dy)
        np.multiply(self.hat, inner[:, None], out=self.work)
        np.subtract(dy, self.work, out=dy)
        np.multiply(dy, self.rate[:, None], out=dy)
        np.add(dx, dy, out=dx)


class Attention:
    """Causal attention of all heads; keeps the probabilities."""

    def __init__(self, s: Sizes) -> None:
        self.s = s
        flat, pairs = (s.tokens, s.d_model), (s.batch, s.heads, s.length, s.length)
        self.q, self.k, self.v, self.context = (np.empty(flat, F32) for _ in range(4))
        self.dq, self.dk, self.dv, self.dcontext = (np.empty(flat, F32) for _ in range(4))
        self.p, self.dp = np.empty(pairs, F32), np.empty(pairs, F32)
        self.row = np.empty((*pairs[:3], 1), F32)
        self.hidden = np.triu(np.ones((s.length, s.length), bool), 1)
        self.scale = F32((s.d_model // s.heads) ** -0.5)

    def heads(self, x: Array) -> Array:
        """[batch, heads, length, head_dim], a view."""
        return x.reshape(self.s.batch, self.s.length, self.s.heads, -1).transpose(0, 2, 1, 3)

    def forward(self) -> None:
        np.matmul(self.heads(self.q), self.heads(self.k).swapaxes(2, 3), out=self.p)
        np.multiply(self.p, self.scale, out=self.p)
        np.copyto(self.p, F32(-np.inf), where=self.hidden)
        np.max(self.p, axis=3, keepdims=True, out=self.row)
        np.subtract(self.p, self.row, out=self.p)
        np.exp(self.p, out=self.p)
        np.sum(self.p, axis=3, keepdims=True, out=self.row)
        np.divide(self.p, self.row, out=self.p)
        np.matmul(self.p, self.heads(self.v), out=self.heads(self.context))

    def backward(self) -> None:
        dy = self.heads(self.dcontext)
        np.matmul(self.p.swapaxes(2, 3), dy, out=self.heads(self.dv))
        np.matmul(dy, self.heads(self.v).swapaxes(2, 3), out=self.dp)
        inner = np.einsum("bhij,bhij->bhi", self.dp, self.p)
        np.subtract(self.dp, inner[..., None], out=self.dp)
        np.multiply(self.dp, self.p, out=self.dp)
        np.multiply(self.dp, self.scale, out=self.dp)
        np.matmul(self.dp, self.heads(self.k), out=self.heads(self.dq))
        np.matmul(self.dp.swapaxes(2, 3), self.heads(self.q), out=self.heads(self.dk))


class Layer:
    """One block; `w` and `g` hold its weights and gradients by short name."""

    def __init__(self, s: Sizes, w: dict[str, Array], g: dict[str, Array]) -> None:
        self.w, self.g = w, g
        self.norm_1, self.norm_2 = Norm(s.tokens, s.d_model), Norm(s.tokens, s.d_model)
        self.attention = Attention(s)
        self.middle, self.out, self.small = (np.empty((s.tokens, s.d_model), F32) for _ in range(3))
        self.h, self.bent, self.y, self.work, self.dh = (np.empty((s.tokens, s.d_ff), F32) for _ in range(5))

    def forward(self, x: Array) -> Array:
        w, a = self.w, self.attention
        y = self.norm_1.forward(x, w["norm_1"])
        for name, out in (("q", a.q), ("k", a.k), ("v", a.v)):
            np.matmul(y, w[name], out=out)
        a.forward()
        np.matmul(a.context, w["out"], out=self.middle)
        np.add(self.middle, x, out=self.middle)
        y = self.norm_2.forward(self.middle, w["norm_2"])
        np.matmul(y, w["wi"], out=self.h)
        self._gelu()
        np.matmul(self.y, w["wo"], out=self.out)
        return np.add(self.out, self.middle, out=self.out)

    def _gelu(self) -> None:
        np.multiply(self.h, self.h, out=self.work)
        np.multiply(self.work, CUBE, out=self.work)
        np.add(self.work, F32(1), out=self.work)
        np.multiply(self.work, self.h, out=self.work)
        np.multiply(self.work, SLOPE, out=self.work)
        np.tanh(self.work, out=self.bent)
        np.add(self.bent, F32(1), out=self.y)
        np.multiply(self.y, self.h, out=self.y)
        np.multiply(self.y, F32(0.5), out=self.y)

    def _gelu_backward(self) -> None:
        """dh in place: dy (1 + t + h (1 - t^2) slope (1 + 3 cube h^2)) / 2."""
        t, work = self.bent, self.work
        np.multiply(self.h, self.h, out=work)
        np.multiply(work, 3 * CUBE * SLOPE, out=work)
        np.add(work, SLOPE, out=work)
        np.multiply(work, self.h, out=work)
        np.multiply(t, t, out=self.h)  # the last use of h
        np.subtract(F32(1), self.h, out=self.h)
        np.multiply(work, self.h, out=work)
        np.add(work, t, out=work)
        np.add(work, F32(1), out=work)
        np.multiply(work, F32(0.5), out=work)
        np.multiply(self.dh, work, out=self.dh)

    def backward(self, dx: Array) -> None:
        """In: the cotangent of the result; out: that of x, in the same array."""
        w, g, a = self.w, self.g, self.attention
        np.matmul(self.y.T, dx, out=g["wo"])
        np.matmul(dx, w["wo"].T, out=self.dh)
        self._gelu_backward()
        np.matmul(self.norm_2.y.T, self.dh, out=g["wi"])
        np.matmul(self.dh, w["wi"].T, out=self.small)
        self.norm_2.backward(self.small, w["norm_2"], g["norm_2"], dx)
        np.matmul(a.context.T, dx, out=g["out"])
        np.matmul(dx, w["out"].T, out=a.dcontext)
        a.backward()
        y = self.norm_1.y
        for name, d in (("q", a.dq), ("k", a.dk), ("v", a.dv)):
            np.matmul(y.T, d, out=g[name])
        np.matmul(a.dq, w["q"].T, out=self.small)
        for name, d in (("k", a.dk), ("v", a.dv)):
            np.matmul(d, w[name].T, out=a.context)  # its last use is over
            np.add(self.small, a.context, out=self.small)
        self.norm_1.backward(self.small, w["norm_1"], g["norm_1"], dx)


class AdamW:
    """Running means of one weight, and its step."""

    def __init__(self, w: Array) -> None:
        self.m, self.v = np.zeros_like(w), np.zeros_like(w)
        self.a, self.b = np.empty_like(w), np.empty_like(w)

    def step(self, w: Array, g: Array, t: int, lr: float, decay: float) -> None:
        np.multiply(self.m, F32(0.9), out=self.m)
        np.multiply(g, F32(0.1), out=self.a)
        np.add(self.m, self.a, out=self.m)
        np.multiply(self.v, F32(0.999), out=self.v)
        np.multiply(g, g, out=self.a)
        np.multiply(self.a, F32(0.001), out=self.a)
        np.add(self.v, self.a, out=self.v)
        root = math.sqrt(1 - 0.999**t)
        np.sqrt(self.v, out=self.a)
        np.add(self.a, F32(1e-8 * root), out=self.a)
        np.divide(self.m, self.a, out=self.a)
        np.multiply(self.a, F32(root / (1 - 0.9**t) * lr), out=self.a)
        np.multiply(w, F32(lr * decay), out=self.b)
        np.subtract(w, self.a, out=w)
        np.subtract(w, self.b, out=w)


class NumpyStep:
    """The whole step: `step(tokens, targets)` returns the loss and updates `weights`.

    weights: "table", "positions", "norm", and "0/q", "0/k", "0/v", "0/out", "0/norm_1", ... per layer.
    """

    def __init__(self, s: Sizes, weights: dict[str, Array], lr: float, decay: float) -> None:
        self.s, self.lr, self.decay, self.t = s, lr, decay, 0
        self.weights = {name: w.copy() for name, w in weights.items()}
        self.grads = {name: np.empty_like(w) for name, w in self.weights.items()}
        self.slots = {name: AdamW(w) for name, w in self.weights.items()}
        self.layers = [Layer(s, self._of(n, self.weights), self._of(n, self.grads)) for n in range(s.layers)]
        self.norm = Norm(s.tokens, s.d_model)
        self.x, self.dx, self.dy = (np.empty((s.tokens, s.d_model), F32) for _ in range(3))
        self.logits = np.empty((s.tokens, s.vocab), F32)

    @staticmethod
    def _of(n: int, arrays: dict[str, Array]) -> dict[str, Array]:
        return {name.split("/")[1]: a for name, a in arrays.items() if name.startswith(f"{n}/")}

    def __call__(self, tokens: Array, targets: Array) -> float:
        s, w, g = self.s, self.weights, self.grads
        rows, ids, labels = np.arange(s.tokens), tokens.reshape(-1), targets.reshape(-1)
        np.take(w["table"], ids, axis=0, out=self.x, mode="clip")
        placed = self.x.reshape(s.batch, s.length, s.d_model)
        np.add(placed, w["positions"], out=placed)
        x = self.x
        for layer in self.layers:
            x = layer.forward(x)
        y = self.norm.forward(x, w["norm"])
        loss = self._loss(y, rows, labels)
        np.matmul(self.logits.T, y, out=g["table"])
        np.matmul(self.logits, w["table"], out=self.dy)
        self.dx[...] = 0
        self.norm.backward(self.dy, w["norm"], g["norm"], self.dx)
        for layer in reversed(self.layers):
            layer.backward(self.dx)
        np.sum(self.dx.reshape(placed.shape), axis=0, out=g["positions"])
        np.add.at(g["table"], ids, self.dx)
        self.t += 1
        for name, slots in self.slots.items():
            slots.step(w[name], g[name], self.t, self.lr, self.decay)
        return loss

    def _loss(self, y: Array, rows: Array, labels: Array) -> float:
        """Logits become their own cotangent."""
        z = self.logits
        np.matmul(y, self.weights["table"].T, out=z)
        np.subtract(z, z.max(axis=1, keepdims=True), out=z)
        wanted = z[rows, labels]
        np.exp(z, out=z)
        total = z.sum(axis=1, keepdims=True)
        loss = float(np.mean(np.log(total[:, 0]) - wanted))
        np.divide(z, total, out=z)
        z[rows, labels] -= 1
        np.divide(z, F32(self.s.tokens), out=z)
        return loss
