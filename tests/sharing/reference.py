"""Llama, GPT-2 and T5 in plain NumPy, float64, on tensors by Hugging Face's names and in their shapes.

Written from their modelling code's conventions: `Linear` multiplies by the transpose of what is stored, `Conv1D` by it
as it is; heads lie beside each other in the rows; keys are repeated for the queries of their group; rotary positions
turn the first half of a head with the second.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Weights = Mapping[str, Array]


def linear(x: Array, w: Array) -> Array:
    return x @ w.T


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def rms(x: Array, w: Array, epsilon: float = 1e-6) -> Array:
    return w * x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon)


def layer_norm(x: Array, w: Array, b: Array, epsilon: float = 1e-5) -> Array:
    return w * (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + epsilon) + b


def heads_of(x: Array, count: int) -> Array:
    """[length, heads * head_dim] -> [heads, length, head_dim]."""
    return x.reshape(len(x), count, -1).transpose(1, 0, 2)


def attend(q: Array, k: Array, v: Array, causal: bool, scale: float, bias: Any = 0.0) -> Array:
    scores = q @ k.transpose(0, 2, 1) * scale + bias
    if causal:
        scores = np.where(np.tril(np.ones(scores.shape[-2:], bool)), scores, -np.inf)
    return (softmax(scores) @ v).transpose(1, 0, 2).reshape(q.shape[1], -1)


def gelu_new(x: Array) -> Array:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def slowed(frequency: float, scaling: Any) -> float:
    """Of one pair, by wave length, case by case."""
    if scaling is None:
        return frequency
    kind, factor = scaling.get("rope_type", scaling.get("type")), scaling["factor"]
    if kind == "linear":
        return frequency / factor
    wave_length, old = 2 * math.pi / frequency, scaling["original_max_position_embeddings"]
    if wave_length < old / scaling["high_freq_factor"]:
        return frequency
    if wave_length > old / scaling["low_freq_factor"]:
        return frequency / factor
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    smooth = (old / wave_length - low) / (high - low)
    return (1 - smooth) * frequency / factor + smooth * frequency


def turned_by_yarn(theta: float, dim: int, scaling: Any) -> tuple[Array, float]:
    """Frequencies of the pairs of a head, and what their sines and cosines are multiplied by."""
    length, factor = scaling["original_max_position_embeddings"], scaling["factor"]

    def pair_that_turns(times: float) -> float:
        return dim * math.log(length / (times * 2 * math.pi)) / (2 * math.log(theta))

    first = max(math.floor(pair_that_turns(scaling.get("beta_fast", 32))), 0)
    last = min(math.ceil(pair_that_turns(scaling.get("beta_slow", 1))), dim - 1)
    found = []
    for n in range(dim // 2):
        slow = np.clip((n - first) / max(last - first, 0.001), 0, 1)
        plain = theta ** (-2 * n / dim)
        found.append(plain / factor * slow + plain * (1 - slow))
    return np.array(found), scaling.get("attention_factor", 0.1 * math.log(factor) + 1)


def llama(
    w: Weights, tokens: Array, layers: int, heads: int, kv_heads: int, theta: float, epsilon: float, scaling: Any = None
) -> Array:
    x = w["model.embed_tokens.weight"][tokens]

    def turned(y: Array) -> Array:
        dim = y.shape[-1]
        amplitude = 1.0
        if scaling is not None and scaling.get("rope_type") == "yarn":
            inverse, amplitude = turned_by_yarn(theta, dim, scaling)
        else:
            inverse = np.array([slowed(1.0 / theta ** (n / dim), scaling) for n in range(0, dim, 2)])
        angles = np.outer(np.arange(len(tokens)), inverse)
        angles = np.concatenate([angles, angles], -1)
        half = np.concatenate([-y[..., dim // 2 :], y[..., : dim // 2]], -1)
        return amplitude * (y * np.cos(angles) + half * np.sin(angles))

    for n in range(layers):
        p = f"model.layers.{n}."
        h = rms(x, w[p + "input_layernorm.weight"], epsilon)
        q, k, v = (linear(h, w[f"{p}self_attn.{name}_proj.weight"]) for name in "qkv")
        if f"{p}self_attn.q_proj.bias" in w:
            q, k, v = (y + w[f"{p}self_attn.{name}_proj.bias"] for name, y in (("q", q), ("k", k), ("v", v)))
        q, k, v = turned(heads_of(q, heads)), turned(heads_of(k, kv_heads)), heads_of(v, kv_heads)
        k, v = (np.repeat(y, heads // kv_heads, axis=0) for y in (k, v))
        out = linear(attend(q, k, v, True, q.shape[-1] ** -0.5), w[p + "self_attn.o_proj.weight"])
        x = x + out + w.get(f"{p}self_attn.o_proj.bias", 0.0)
        h = rms(x, w[p + "post_attention_layernorm.weight"], epsilon)
        gate, up = (linear(h, w[f"{p}mlp.{name}_proj.weight"]) for name in ("gate", "up"))
        x = x + linear(gate / (1 + np.exp(-gate)) * up, w[p + "mlp.down_proj.weight"])
    x = rms(x, w["model.norm.weight"], epsilon)
    return linear(x, w["lm_head.weight"] if "lm_head.weight" in w else w["model.embed_tokens.weight"])


def gpt2(w: Weights, tokens: Array, layers: int, heads: int) -> Array:
    x = w["wte.weight"][tokens] + w["wpe.weight"][: len(tokens)]
    for n in range(layers):
        p = f"h.{n}."
        h = layer_norm(x, w[p + "ln_1.weight"], w[p + "ln_1.bias"])
        q, k, v = (
            heads_of(y, heads) for y in np.split(h @ w[p + "attn.c_attn.weight"] + w[p + "attn.c_attn.bias"], 3, 1)
        )
        y = attend(q, k, v, True, q.shape[-1] ** -0.5)
        x = x + y @ w[p + "attn.c_proj.weight"] + w[p + "attn.c_proj.bias"]
        h = layer_norm(x, w[p + "ln_2.weight"], w[p + "ln_2.bias"])
        h = gelu_new(h @ w[p + "mlp.c_fc.weight"] + w[p + "mlp.c_fc.bias"])
        x = x + h @ w[p + "mlp.c_proj.weight"] + w[p + "mlp.c_proj.bias"]
    return linear(layer_norm(x, w["ln_f.weight"], w["ln_f.bias"]), w["wte.weight"])


def t5_bucket(relative: int, bidirectional: bool, buckets: int, furthest: int) -> int:
    found = 0
    if bidirectional:
        buckets //= 2
        found, relative = (buckets if relative > 0 else 0), abs(relative)
    else:
        relative = max(-relative, 0)
    exact = buckets // 2
    if relative < exact:
        return found + relative
    large = exact + int(math.log(relative / exact) / math.log(furthest / exact) * (buckets - exact) + 1e-9)
    return found + min(large, buckets - 1)


def t5(
    w: Weights, sources: Array, tokens: Array, layers: int, heads: int, buckets: int, furthest: int, tied: bool
) -> Array:
    def bias(stack: str, length: int) -> Array:
        table = w[f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"]
        number = [
            [t5_bucket(k - q, stack == "encoder", buckets, furthest) for k in range(length)] for q in range(length)
        ]
        return table[np.array(number)].transpose(2, 0, 1)

    def attention(x: Array, memory: Array, p: str, causal: bool, scores: Any) -> Array:
        q, k, v = (
            heads_of(linear(y, w[f"{p}.{n}.weight"]), heads) for n, y in (("q", x), ("k", memory), ("v", memory))
        )
        return linear(attend(q, k, v, causal, 1.0, scores), w[f"{p}.o.weight"])

    def feed_forward(x: Array, p: str) -> Array:
        if f"{p}.wi.weight" in w:
            h = np.maximum(linear(x, w[f"{p}.wi.weight"]), 0)
        else:
            h = gelu_new(linear(x, w[f"{p}.wi_0.weight"])) * linear(x, w[f"{p}.wi_1.weight"])
        return linear(h, w[f"{p}.wo.weight"])

    def stack(name: str, ids: Array, memory: Array | None) -> Array:
        x, scores = w["shared.weight"][ids], bias(name, len(ids))
        for n in range(layers):
            p = f"{name}.block.{n}.layer."
            h = rms(x, w[f"{p}0.layer_norm.weight"])
            x = x + attention(h, h, f"{p}0.SelfAttention", memory is not None, scores)
            if memory is not None:
                h = rms(x, w[f"{p}1.layer_norm.weight"])
                x = x + attention(h, memory, f"{p}1.EncDecAttention", False, 0.0)
            last = 1 if memory is None else 2
            x = x + feed_forward(rms(x, w[f"{p}{last}.layer_norm.weight"]), f"{p}{last}.DenseReluDense")
        return rms(x, w[f"{name}.final_layer_norm.weight"])

    x = stack("decoder", tokens, stack("encoder", sources, None))
    return linear(x * x.shape[-1] ** -0.5, w["shared.weight"]) if tied else linear(x, w["lm_head.weight"])
