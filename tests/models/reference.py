"""Transformers in plain NumPy, float64, written from their papers; what the tests of the models compare with.

One sequence after the other, one head after the other: slow and plain. `Weights` looks variables up by the names that
the library gives them; the mathematics shares nothing with it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from tests.layers.experts_reference import mixture

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

    def all(self) -> dict[str, Array]:
        """By the rest of their names."""
        names = [n.removeprefix(self.prefix) for n in self.values if n.startswith(self.prefix)]
        return {name: self[name] for name in names}

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


def rms_of_all(x: Array, scale: Array, epsilon: float) -> Array:
    """RMS norm over all axes but the first."""
    flat = rms(x.reshape(len(x), -1), scale.reshape(-1), epsilon)
    return flat.reshape(x.shape)


def rms(x: Array, scale: Array, epsilon: float) -> Array:
    """RMS norm over the last axis."""
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * scale


def activated(x: Array, name: str) -> Array:
    """The activation functions."""
    if name == "relu":
        return np.maximum(x, 0)
    if name == "silu":
        return x / (1 + np.exp(-x))
    if name == "gelu_exact":
        return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def slowed(frequency: float, scaling: Any) -> float:
    """Of one pair, as Llama 3.1 slows it, case by case."""
    wave_length = 2 * math.pi / frequency
    if wave_length < scaling.original_length / scaling.high:
        return frequency
    if wave_length > scaling.original_length / scaling.low:
        return frequency / scaling.factor
    kept = (scaling.original_length / wave_length - scaling.low) / (scaling.high - scaling.low)
    return kept * frequency + (1 - kept) * frequency / scaling.factor


def rotated(x: Array, theta: float, scaling: Any = None) -> Array:
    """Rotary positions of x [length, head_dim]: feature i turns with feature i + head_dim / 2."""
    length, dim = x.shape
    frequencies = [theta ** (-2 * i / dim) for i in range(dim // 2)]
    if scaling is not None:
        frequencies = [slowed(f, scaling) for f in frequencies]
    angle = np.outer(np.arange(length), frequencies)
    a, b = x[:, : dim // 2], x[:, dim // 2 :]
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle)], axis=1)


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


# ------------------------------------------------------------ layers


def projected(x: Array, w: Weights) -> Array:
    """x [length, features] by a kernel [features, ...]."""
    y = np.tensordot(x, w["kernel"], 1)
    return y + w["bias"] if "bias" in w else y


def seen(query: int, key: int, causal: bool, window: int | None) -> bool:
    """Whether a query sees a key."""
    distance = query - key
    return not (causal and distance < 0) and (window is None or abs(distance) < window)


def attention(
    x: Array,
    memory: Array,
    w: Weights,
    config: Any,
    causal: bool,
    window: int | None = None,
    theta: float | None = None,
    bias: Array | None = None,
) -> Array:
    """Attention of x [length, d_model] to memory [memory length, d_model], one head after the other."""
    q, k = projected(x, w.under("q")), projected(memory, w.under("k"))
    v = projected(memory, w.under("v")) if "v/kernel" in w else k
    if k.ndim == 2:  # one head of keys and values for all
        k, v = k[:, None], v[:, None]
    heads_of_keys = k.shape[1]
    if q.ndim == 3 and heads_of_keys == 1:
        q = q[:, :, None]  # [length, group, 1, head_dim]
    elif q.ndim == 3:
        q = q[:, None]
    if config.qk_norm_over_heads:
        q, k = (rms_of_all(y, w[f"{part}_norm/scale"], 1e-6) for part, y in (("q", q), ("k", k)))
    elif config.qk_norm:
        q, k = rms(q, w["q_norm/scale"], 1e-6), rms(k, w["k_norm/scale"], 1e-6)
    hidden = np.array([[not seen(i, j, causal, window) for j in range(len(memory))] for i in range(len(x))])
    scale = q.shape[-1] ** -0.5 if config.attention_scale is None else config.attention_scale
    context = np.empty_like(q)
    for group in range(q.shape[1]):
        for head in range(heads_of_keys):
            one, other = q[:, group, head], k[:, head]
            if theta is not None:
                scaling = config.rope_scaling if window is None else None
                one, other = rotated(one, theta, scaling), rotated(other, theta, scaling)
            scores = one @ other.T * scale
            if bias is not None:
                scores = scores + bias[head]
            context[:, group, head] = softmaxed(np.where(hidden, -np.inf, scores)) @ v[:, head]
    kernel = w["out/kernel"]
    y = context.reshape(len(x), -1) @ kernel.reshape(-1, kernel.shape[-1])
    return y + w["out/bias"] if "out/bias" in w else y


def latent_attention(x: Array, w: Weights, config: Any, causal: bool) -> Array:
    """DeepSeek-V2, equations 1 to 19: keys and values of a head are products of the token's latent vector."""
    of, queries = config.latent, x
    if of.q_rank is not None:
        queries = rms(projected(x, w.under("q_latent")), w["q_latent_norm/scale"], config.norm_epsilon)
    latent = rms(projected(x, w.under("latent")), w["latent_norm/scale"], config.norm_epsilon)
    shared = rotated(projected(x, w.under("k_rope")), config.rope_theta)
    hidden = np.array([[not seen(i, j, causal, None) for j in range(len(x))] for i in range(len(x))])
    out = np.zeros_like(x)
    for head in range(config.heads):
        plain, turned = (queries @ w[f"{name}/kernel"][:, head] for name in ("q_nope", "q_rope"))
        scores = plain @ (latent @ w["k_nope/kernel"][:, head]).T
        scores = scores + rotated(turned, config.rope_theta) @ shared.T
        weights = softmaxed(np.where(hidden, -np.inf, scores / math.sqrt(of.nope_dim + of.rope_dim)))
        out += weights @ (latent @ w["v/kernel"][:, head]) @ w["out/kernel"][head]
    return out


def experts(x: Array, w: Weights, config: Any, losses: list[float]) -> Array:
    """A mixture of experts on one sequence, which is a group; its loss is added to `losses`."""
    routing = config.experts.routing
    made, (said,) = mixture(x[None], w.all(), routing, config.activation)
    losses.append(routing.loss_coef * said.balance + routing.z_loss * said.z)
    return made[0]


def feed_forward(x: Array, w: Weights, config: Any) -> Array:
    """Plain or gated."""
    h = projected(x, w.under("wi"))
    h = (
        activated(projected(x, w.under("wi_gate")), config.activation) * h
        if config.gated
        else (activated(h, config.activation))
    )
    return projected(h, w.under("wo"))


def layer(
    x: Array,
    w: Weights,
    config: Any,
    causal: bool,
    window: int | None,
    bias: Array | None,
    memory: Array | None,
    losses: list[float],
) -> Array:
    """One layer on one sequence [length, d_model]."""
    theta = None
    if config.position == "rotary":
        theta = config.rope_theta
        if window is not None and config.local_rope_theta is not None:
            theta = config.local_rope_theta
    blocks = [("attention", lambda h: attention(h, h, w.under("attention"), config, causal, window, theta, bias))]
    if memory is not None:
        cross = w.under("cross_attention")
        blocks.append(("cross_attention", lambda h: attention(h, memory, cross, config, False)))
    if config.latent is not None:
        blocks = [("attention", lambda h: latent_attention(h, w.under("attention"), config, causal))]
    if "moe/router/kernel" in w:
        blocks.append(("feed_forward", lambda h: experts(h, w.under("moe"), config, losses)))
    else:
        blocks.append(("feed_forward", lambda h: feed_forward(h, w.under("feed_forward"), config)))
    if config.parallel:
        h = normed(x, w.under("norm"), config)
        return x + sum(block(h) for _, block in blocks)
    for name, block in blocks:
        own = w.under(f"{name}_norm")
        if config.norm_position == "post":
            x = normed(x + block(x), own, config)
        elif config.norm_position == "output":
            x = x + normed(block(x), own, config)
        elif config.post_norms and (config.attention_post_norm or name == "feed_forward"):
            x = x + normed(block(normed(x, own, config)), w.under(f"{name}_post_norm"), config)
        else:
            x = x + block(normed(x, own, config))
    return x * w["layer_scale"] if config.layer_scale else x


def stack(
    x: Array,
    w: Weights,
    config: Any,
    count: int,
    causal: bool,
    bias: Array | None,
    losses: list[float],
    memory: Array | None = None,
) -> Array:
    """All layers, under the names of scanned or of unrolled ones, and the last norm."""
    every = 1 if config.experts is None else config.experts.every
    period, front = math.lcm(len(config.windows), every), 0 if config.experts is None else config.experts.first_dense
    for n in range(count):
        trip, place = divmod(n - front, period)
        one = f"layers/layer_{place}" if period > 1 else "layers"
        unrolled = any(name.startswith(f"{w.prefix}layer_{n}/") for name in w.values)
        own = w.under(f"layer_{n}") if unrolled else w.under(one, trip)
        x = layer(x, own, config, causal, config.windows[n % len(config.windows)], bias, memory, losses)
    return normed(x, w.under("final_norm"), config) if config.norm_position != "post" else x


def relative_bias(table: Array, length: int, config: Any, causal: bool) -> Array:
    """T5's bias [heads, length, length] of the table [heads, buckets]."""
    out = np.empty((config.heads, length, length))
    for i in range(length):
        for j in range(length):
            place = bucket(j - i, not causal, config.relative_buckets, config.relative_max_distance)
            out[:, i, j] = table[:, place]
    return out


def embedded(tokens: Array, w: Weights, config: Any, segments: Array | None) -> Array:
    """One sequence of tokens to [length, d_model]."""
    x = w["embedding"][tokens]
    if config.scale_embedding:
        x = x * math.sqrt(config.d_model)
    if config.position == "learned":
        x = x + w["positions"][: len(tokens)]
    if config.position == "sinusoidal":
        x = x + sinusoids(len(tokens), config.d_model)
    if segments is not None:
        x = x + w["segment_embedding"][segments]
    return normed(x, w.under("embedding_norm"), config) if config.embedding_norm else x


def logits_of(x: Array, w: Weights, config: Any) -> Array:
    """[tokens, d_model] to [tokens, vocab]."""
    if config.head == "transform":
        x = activated(projected(x, w.under("head/transform")), config.activation)
        x = normed(x, w.under("head/norm"), config)
    if config.scale_logits:
        x = x / math.sqrt(config.d_model)
    y = x @ (w["embedding"].T if config.tied else w["head/kernel"])
    if config.head == "transform":
        y = y + w["head/bias"]
    return config.logit_cap * np.tanh(y / config.logit_cap) if config.logit_cap else y


def forward(config: Any, values: Mapping[str, Array], feeds: Mapping[str, Array], training: bool = False) -> float:
    """The loss of a batch; dropout must be 0."""
    w = Weights({name: np.asarray(value, np.float64) for name, value in values.items()})
    rows: list[Array] = []
    losses: list[float] = []
    for n, tokens in enumerate(feeds["tokens"]):
        segments = feeds["segments"][n] if "segments" in feeds else None
        own, memory = w, None

        def bias(part: Weights, length: int, causal: bool) -> Array | None:
            if config.position != "relative":
                return None
            return relative_bias(part["relative_position_bias"], length, config, causal)

        if "sources" in feeds:
            sources = feeds["sources"][n]
            encoder, own = w.under("encoder"), w.under("decoder")
            x = embedded(sources, w, config, None)
            memory = stack(x, encoder, config, config.encoder_layers, False, bias(encoder, len(sources), False), losses)
        causal = config.kind != "encoder"
        x = embedded(tokens, w, config, segments)
        x = stack(x, own, config, config.layers, causal, bias(own, len(tokens), causal), losses, memory)
        if "positions" in feeds:
            x = x[feeds["positions"][n]]
        rows.append(logits_of(x, w, config))
    smoothing = config.label_smoothing if training else 0.0
    beside = sum(losses) / len(rows) if training else 0.0
    return smoothed_loss(np.stack(rows), np.asarray(feeds["targets"]), smoothing, config.z_loss) + beside
