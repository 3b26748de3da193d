"""Every layer, forward and gradient, against float64 NumPy, and under many layouts on the exact executor.

References (tests/layers/layers_reference.py) are written apart from the library; their gradients are central
differences. Inputs and variables have random values, so that no scale of one or bias of zero hides anything.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import pytest

import meshlib as mtf
import tests.layers.layers_reference as ref
from layouts import Dimension, Shape
from meshlib.core.dtypes import BFLOAT16
from meshlib.core.graph import Tensor
from meshlib.layers import RotaryScaling, Scores
from meshlib.program.records import Program
from tests.core.public import public_names
from tests.effort import deep, draws, some
from tests.oracle import (
    UNSHARDED,
    Array,
    Layout,
    assert_close,
    directions,
    draw_layout,
    needed,
    numeric_slope,
    run,
    uniform,
)

Keywords = dict[str, Any]

B, L, M, D = Dimension("batch", 4), Dimension("length", 4), Dimension("memory_length", 6), Dimension("d_model", 8)
H, G, K, F, V = (
    Dimension("heads", 2),
    Dimension("group", 2),
    Dimension("head_dim", 4),
    Dimension("d_ff", 6),
    Dimension("vocab", 12),
)
OTHER = Dimension("d_model", 6)


@dataclass(frozen=True)
class Layer:
    """A layer as a test takes it.

    inputs     name -> dims and dtype (float: that of the test; an integer n: int32 below n; bool)
    build      (numerics as a keyword, **tensors) -> result; the variables it makes are drawn, too
    reference  (values by name, inputs and variables) -> array
    """

    name: str
    inputs: dict[str, tuple[list[Dimension], object]]
    build: Callable[..., Tensor]
    reference: Callable[[dict[str, Array]], Array]

    def __str__(self) -> str:
        return self.name


@dataclass
class Built:
    """A layer as a program: its result and the gradients of its float inputs and variables."""

    layer: Layer
    dtype: str
    outputs: dict[str, Tensor] = field(default_factory=dict)
    feeds: dict[str, Array] = field(default_factory=dict)
    state: dict[str, Array] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(zlib.crc32(self.layer.name.encode()))
        with mtf.Graph() as graph:
            given = {}
            for name, (dims, kind) in self.layer.inputs.items():
                dtype = kind if isinstance(kind, type) else "int32"
                dtype = self.dtype if dtype is float else "bool" if dtype is bool else dtype
                given[name] = mtf.input(name, dims, dtype)
                self.feeds[name] = drawn(rng, Shape(dims).sizes, kind)
            numerics = mtf.Numerics("float64" if self.dtype == "float64" else "float32", activation_dtype=self.dtype)
            y = self.layer.build({"numerics": numerics}, **given)
            c = mtf.input("cotangent", y.shape, y.dtype)
            self.feeds["cotangent"] = drawn(rng, y.shape.sizes, float)
            self.state = {n: drawn(rng, v.output.shape.sizes, float) for n, v in graph.variables.items()}
            floats = {n: x for n, x in given.items() if x.dtype.is_float}
            floats |= {v.name: v for v in graph.trainable_variables}
            found = mtf.gradients([y], list(floats.values()), [c])
            self.outputs = {"y": y}
            for name, dx in zip(floats, found, strict=True):
                assert dx is not None, name
                self.outputs[f"d {name}"] = dx
        self.session = mtf.Session(self.outputs)
        self.programs: dict[tuple[str, str, str], Program] = {}

    def lower(self, layout: Layout | None = None, precision: str = "highest") -> Program:
        how = (layout.mesh_text, layout.rules_text, precision) if layout else (UNSHARDED, "", precision)
        if how not in self.programs:
            self.programs[how] = self.session.lower(*how)
        return self.programs[how]

    def run(self, program: Program, executor: str = "exact") -> dict[str, Array]:
        (out,) = run(program, self.feeds, executor, state=self.state)
        return {n: np.asarray(x, np.float64) for n, x in out.items()}

    def directions(self) -> dict[str, Array]:
        """Along which gradients are compared: every element of each counts in each of a few, in depth by itself."""
        rng = np.random.default_rng(zlib.crc32(self.layer.name.encode()) + 2)
        return {n: directions(rng, dx.shape.sizes, deep()) for n, dx in self.outputs.items() if n != "y"}

    def wanted(self) -> dict[str, Array]:
        """By the reference: the result, and central differences of it times the cotangent, along each direction."""
        values = {**{n: x for n, x in self.feeds.items() if n != "cotangent"}, **self.state}
        names, arrays = list(values), list(values.values())

        def f(*xs: Array) -> Array:
            return self.layer.reference(dict(zip(names, xs, strict=True)))

        found = {"y": f(*arrays)}
        for name, along in self.directions().items():
            which = names.index(name.removeprefix("d "))
            slopes = [numeric_slope(f, arrays, which, self.feeds["cotangent"], d) for d in along]
            found[name] = np.array(slopes)
        return found


def drawn(rng: np.random.Generator, shape: tuple[int, ...], kind: object) -> Array:
    """Floats of order one, away from zero; indices; flags, of which each row has a true one."""
    if kind is bool:
        flags = rng.random(shape) < 0.6
        flags[..., 0] = True
        return flags
    if isinstance(kind, int):
        return rng.integers(0, kind, shape).astype(np.int32)
    return np.asarray(rng.uniform(0.2, 1.2, shape) * rng.choice([-1.0, 1.0, 1.0], shape))


LAYERS: list[Layer] = []


def layer(
    name: str, inputs: dict[str, tuple[list[Dimension], object]], build: Callable[..., Tensor]
) -> Callable[[Callable[[dict[str, Array]], Array]], Callable[[dict[str, Array]], Array]]:
    """Add a layer; the decorated function is its reference."""

    def add(reference: Callable[[dict[str, Array]], Array]) -> Callable[[dict[str, Array]], Array]:
        LAYERS.append(Layer(name, inputs, build, reference))
        return reference

    return add


X = {"x": ([B, L, D], float)}


# ---------------------------------------------------------------- products, norms


@layer("dense", {"x": ([B, H, K], float)}, lambda w, x: mtf.layers.dense(x, [F, G], [K, H], activation=mtf.tanh, **w))
def dense(p: dict[str, Array]) -> Array:
    return np.tanh(np.einsum("bhk,khfg->bfg", p["x"], p["dense/kernel"]) + p["dense/bias"])


@layer("dense onto itself", {"x": ([B, H, K], float)}, lambda w, x: mtf.layers.dense(x, [K, H], [H, K], **w))
def dense_onto_itself(p: dict[str, Array]) -> Array:
    return np.einsum("bhk,hklg->blg", p["x"], p["dense/kernel"]) + p["dense/bias"]


@layer("dense of another size", X, lambda w, x: mtf.layers.dense(x, OTHER, use_bias=False, activation=mtf.tanh, **w))
def dense_of_another_size(p: dict[str, Array]) -> Array:
    return np.tanh(p["x"] @ p["dense/kernel"])


@layer(
    "dense of experts",
    {"x": ([H, B, K], float)},
    lambda w, x: mtf.layers.dense(x, [F], [K], activation=mtf.tanh, expert_dims=[H], **w),
)
def dense_of_experts(p: dict[str, Array]) -> Array:
    each = zip(p["x"], p["dense/kernel"], p["dense/bias"], strict=True)
    return np.stack([np.tanh(x @ kernel + bias) for x, kernel, bias in each])


@layer("dense_relu_dense", X, lambda w, x: mtf.layers.dense_relu_dense(x, F, 0.25, [L], **w))
def dense_relu_dense(p: dict[str, Array]) -> Array:
    h = np.maximum(p["x"] @ p["dense_relu_dense/wi/kernel"], 0)
    kept = (uniform("dense_relu_dense/dropout", (4, 6)) < 0.75) / 0.75
    return (h * kept[:, None]) @ p["dense_relu_dense/wo/kernel"]


@layer("feed_forward gelu", X, lambda w, x: mtf.layers.feed_forward(x, F, "gelu", use_bias=True, **w))
def feed_forward(p: dict[str, Array]) -> Array:
    w = {n.removeprefix("feed_forward/"): x for n, x in p.items()}
    return ref.gelu(p["x"] @ w["wi/kernel"] + w["wi/bias"]) @ w["wo/kernel"] + w["wo/bias"]


@layer("feed_forward gated", X, lambda w, x: mtf.layers.feed_forward(x, F, "silu", gated=True, name="ff", **w))
def gated(p: dict[str, Array]) -> Array:
    return (ref.silu(p["x"] @ p["ff/wi_gate/kernel"]) * (p["x"] @ p["ff/wi/kernel"])) @ p["ff/wo/kernel"]


@layer("layer_norm", {"x": ([B, D, L], float)}, lambda w, x: mtf.layers.layer_norm(x, D, 1e-2, **w))
def layer_norm(p: dict[str, Array]) -> Array:
    rows = p["x"].swapaxes(1, 2)
    return ref.layer_norm(rows, p["layer_norm/scale"], p["layer_norm/bias"], 1e-2).swapaxes(1, 2)


@layer("rms_norm", X, lambda w, x: mtf.layers.rms_norm(x, D, 1e-2, **w))
def rms_norm(p: dict[str, Array]) -> Array:
    return ref.rms_norm(p["x"], p["rms_norm/scale"], 1e-2)


# ---------------------------------------------------------------- norms over sets

P, J, C, Z = Dimension("height", 4), Dimension("width", 2), Dimension("channels", 6), Dimension("classes", 3)
PICTURE = {"x": ([B, P, J, C], float)}
ROUGH = {"epsilon": 0.3}  # of few numbers the variance may be near zero


@layer("batch_norm of all", PICTURE, lambda w, x: mtf.layers.batch_norm(x, C, True, **ROUGH, **w)[0])
def batch_norm(p: dict[str, Array]) -> Array:
    return (
        ref.standard(p["x"], [np.s_[:, :, :, c] for c in range(6)], 0.3) * p["batch_norm/scale"] + p["batch_norm/bias"]
    )


@layer("batch_norm of halves", PICTURE, lambda w, x: mtf.layers.batch_norm(x, C, True, 2, **ROUGH, **w)[0])
def batch_norm_of_groups(p: dict[str, Array]) -> Array:
    sets = [np.s_[g : g + 2, :, :, c] for g in (0, 2) for c in range(6)]
    return ref.standard(p["x"], sets, 0.3) * p["batch_norm/scale"] + p["batch_norm/bias"]


@layer(
    "batch_norm along rows, unscaled",
    PICTURE,
    lambda w, x: mtf.layers.batch_norm(x, [C, J], True, P, use_scale=False, **ROUGH, **w)[0],
)
def batch_norm_of_dims(p: dict[str, Array]) -> Array:
    sets = [np.s_[:, i, j, c] for i, j, c in np.ndindex(4, 2, 6)]
    return ref.standard(p["x"], sets, 0.3) + p["batch_norm/bias"].T


@layer(
    "batch_norm in use", PICTURE, lambda w, x: mtf.layers.batch_norm(x, C, False, epsilon=2.0, use_bias=False, **w)[0]
)
def batch_norm_in_use(p: dict[str, Array]) -> Array:
    q = {n.removeprefix("batch_norm/"): v for n, v in p.items()}
    return (p["x"] - q["moving_mean"]) / np.sqrt(q["moving_variance"] + 2.0) * q["scale"]


@layer(
    "conditional_batch_norm of classes",
    {**PICTURE, "labels": ([B], Z.size)},
    lambda w, x, labels: mtf.layers.conditional_batch_norm(x, C, labels, Z, True, **ROUGH, **w)[0],
)
def conditional_batch_norm(p: dict[str, Array]) -> Array:
    y = ref.standard(p["x"], [np.s_[:, :, :, c] for c in range(6)], 0.3)
    scale, bias = (p[f"conditional_batch_norm/{part}/kernel"][p["labels"]] for part in ("scale", "bias"))
    return y * (1 + scale[:, None, None]) + bias[:, None, None]


@layer(
    "conditional_batch_norm of vectors, of halves",
    {**PICTURE, "z": ([B, Z], float)},
    lambda w, x, z: mtf.layers.conditional_batch_norm(x, C, z, Z, True, 2, kernel_transform=mtf.tanh, **ROUGH, **w)[0],
)
def conditional_batch_norm_of_vectors(p: dict[str, Array]) -> Array:
    y = ref.standard(p["x"], [np.s_[g : g + 2, :, :, c] for g in (0, 2) for c in range(6)], 0.3)
    scale, bias = (p["z"] @ np.tanh(p[f"conditional_batch_norm/{part}/kernel"]) for part in ("scale", "bias"))
    return y * (1 + scale[:, None, None]) + bias[:, None, None]


@layer("group_norm", PICTURE, lambda w, x: mtf.layers.group_norm(x, C, 3, **ROUGH, **w))
def group_norm(p: dict[str, Array]) -> Array:
    sets = [np.s_[b, :, :, c : c + 2] for b in range(4) for c in (0, 2, 4)]
    return ref.standard(p["x"], sets, 0.3) * p["group_norm/scale"] + p["group_norm/bias"]


@layer("group_norm of all channels", PICTURE, lambda w, x: mtf.layers.group_norm(x, C, 1, 0.3, [B, J], **w))
def group_norm_of_all(p: dict[str, Array]) -> Array:
    y = ref.standard(p["x"], [np.s_[b, :, j] for b, j in np.ndindex(4, 2)], 0.3)
    return y * p["group_norm/scale"] + p["group_norm/bias"]


@layer("group_norm of single channels", PICTURE, lambda w, x: mtf.layers.group_norm(x, C, 6, **ROUGH, **w))
def group_norm_of_each(p: dict[str, Array]) -> Array:
    y = ref.standard(p["x"], [np.s_[b, :, :, c] for b, c in np.ndindex(4, 6)], 0.3)
    return y * p["group_norm/scale"] + p["group_norm/bias"]


def spectral(w: Keywords, x: Tensor) -> Tensor:
    kernel = w["numerics"].variable("kernel", [P, D, C], 0.0, x.dtype)
    made, _ = mtf.layers.spectral_norm(kernel + 2.0, C, True, 14)  # one singular value far above the others
    return mtf.einsum([x, made], output_shape=[B, C])


@layer("spectral_norm", {"x": ([B, P, D], float)}, spectral)
def spectral_norm(p: dict[str, Array]) -> Array:
    kernel = 2.0 + p["kernel"].reshape(32, 6)
    return p["x"].reshape(4, 32) @ kernel / np.linalg.svd(kernel, compute_uv=False)[0]


@layer(
    "image_attention",
    PICTURE,
    lambda w, x: mtf.layers.image_attention(x, [P, J], C, 4, 2, kernel_transform=lambda k: k * 0.5, **w),
)
def image_attention(p: dict[str, Array]) -> Array:
    q, k, v, o = (0.5 * p[f"image_attention/{part}/kernel"] for part in ("query", "key", "value", "out"))
    x, out = p["x"], np.empty(p["x"].shape)
    for b in range(4):
        memory = [np.s_[b, i : i + 2] for i in (0, 2)]
        keys, values = (np.stack([(x[m] @ kernel).max(axis=(0, 1)) for m in memory]) for kernel in (k, v))
        for i, j in np.ndindex(4, 2):
            out[b, i, j] = ref.softmax(keys @ (x[b, i, j] @ q)) @ values @ o
    return x + p["image_attention/gain"] * out


# ---------------------------------------------------------------- words and positions


def tied(w: Keywords, ids: Tensor) -> Tensor:
    table = mtf.layers.embedding_weights(V, D, **w)
    x = mtf.tanh(mtf.layers.embedding(ids, V, D, weights=table))
    return mtf.einsum([x, table], output_shape=[B, L, V])


@layer("embedding tied", {"ids": ([B, L], V.size)}, tied)
def embedding(p: dict[str, Array]) -> Array:
    table = p["embedding"]
    out = np.empty((4, 4, 12))
    for b, n in np.ndindex(4, 4):
        out[b, n] = table @ np.tanh(table[p["ids"][b, n]])
    return out


@layer("rotary", {"x": ([L, B, K], float)}, lambda w, x: mtf.layers.rotary(x, L, K, 7.0))
def rotary(p: dict[str, Array]) -> Array:
    return np.stack([ref.rotary(p["x"][:, b], 7.0) for b in range(4)], axis=1)


@layer(
    "rotary with a RotaryScaling",
    {"x": ([L, B, K], float)},
    lambda w, x: mtf.layers.rotary(x, L, K, 7.0, scaling=RotaryScaling(4.0, 1.0, 3.0, 12)),
)
def rotary_slowed(p: dict[str, Array]) -> Array:
    """A pair that turns t times in 12 tokens is slowed down by 4 below one turn, not at all from three on."""
    length, _, dim = p["x"].shape
    out = np.empty_like(p["x"])
    for n in range(dim // 2):
        frequency = 7.0 ** (-2 * n / dim)
        turns = 12 * frequency / (2 * np.pi)
        kept = 0.0 if turns < 1 else 1.0 if turns > 3 else (turns - 1) / 2
        angle = (np.arange(length) * frequency * (kept + (1 - kept) / 4))[:, None]
        a, b = p["x"][..., n], p["x"][..., n + dim // 2]
        out[..., n], out[..., n + dim // 2] = (
            a * np.cos(angle) - b * np.sin(angle),
            a * np.sin(angle) + b * np.cos(angle),
        )
    return out


@layer(
    "rotary of given positions",
    {"x": ([B, L, H, K], float), "at": ([B, L], 9)},
    lambda w, x, at: mtf.layers.rotary(x, "length", "head_dim", positions=at),
)
def rotary_at(p: dict[str, Array]) -> Array:
    out = np.empty(p["x"].shape)
    for b, h in np.ndindex(4, 2):
        out[b, :, h] = ref.rotary(p["x"][b, :, h], 10000.0, p["at"][b])
    return out


def positioned(w: Keywords, x: Tensor) -> Tensor:
    learned = mtf.layers.learned_positions(L, D, 8, **w)
    return x * learned + mtf.layers.sinusoidal_positions(L, D, x.dtype)


@layer("positions", X, positioned)
def positions(p: dict[str, Array]) -> Array:
    return p["x"] * p["positions"][:4] + ref.sinusoids(4, 8)


@layer(
    "relative_position_bias",
    {"x": ([H, L, M], float)},
    lambda w, x: x * mtf.layers.relative_position_bias(L, M, H, 8, 5, **w),
)
def relative(p: dict[str, Array]) -> Array:
    out = np.empty((2, 4, 6))
    for h, i, j in np.ndindex(2, 4, 6):
        out[h, i, j] = p["x"][h, i, j] * p["relative_position_bias"][h, ref.bucket(i, j, 8, 5, True)]
    return out


# ---------------------------------------------------------------- loss


@layer(
    "cross entropy of labels",
    {"x": ([B, L, V], float), "labels": ([B, L], V.size)},
    lambda w, x, labels: mtf.layers.softmax_cross_entropy_with_logits(x, labels, V, 0.25, 0.125),
)
def labelled(p: dict[str, Array]) -> Array:
    out = np.empty((4, 4))
    for b, n in np.ndindex(4, 4):
        target = np.full(12, 0.125 / 12)
        target[p["labels"][b, n]] += 0.875
        out[b, n] = ref.cross_entropy(p["x"][b, n], target, 0.25)
    return out


@layer(
    "cross entropy of distributions",
    {"x": ([B, V], float), "t": ([V, B], float)},
    lambda w, x, t: mtf.layers.softmax_cross_entropy_with_logits(x, t, V, label_smoothing=0.25),
)
def distributed(p: dict[str, Array]) -> Array:
    return np.array([ref.cross_entropy(p["x"][b], 0.75 * p["t"][:, b] + 0.25 / 12) for b in range(4)])


EACH = {"x": ([B, V], float), "t": ([V, B], float)}


@layer("focal_loss", EACH, lambda w, x, t: mtf.layers.focal_loss(x * 3.0, mtf.sigmoid(t), 0.3, 1.5))
def focal_loss(p: dict[str, Array]) -> Array:
    out = np.empty((4, 12))
    for b, v in np.ndindex(4, 12):
        q, t = 1 / (1 + np.exp(-3 * p["x"][b, v])), 1 / (1 + np.exp(-p["t"][v, b]))
        out[b, v] = -t * 0.3 * (1 - q) ** 1.5 * np.log(q) - (1 - t) * 0.7 * q**1.5 * np.log(1 - q)
    return out


@layer("smooth_l1_loss", EACH, lambda w, x, t: mtf.layers.smooth_l1_loss(x, t, 0.75))
def smooth_l1_loss(p: dict[str, Array]) -> Array:
    out = np.empty((4, 12))
    for b, v in np.ndindex(4, 12):
        d = abs(p["x"][b, v] - p["t"][v, b])
        out[b, v] = d**2 / 1.5 if d < 0.75 else d - 0.375
    return out


@layer("hinge_loss", EACH, lambda w, x, t: mtf.layers.hinge_loss(x, t) + mtf.layers.hinge_loss(x, -1.0))
def hinge_loss(p: dict[str, Array]) -> Array:
    return np.maximum(1 - p["x"] * p["t"].T, 0) + np.maximum(1 + p["x"], 0)


# ---------------------------------------------------------------- attention


@layer(
    "dot_product_attention",
    {
        "q": ([B, L, H, K], float),
        "k": ([M, B, K], float),
        "v": ([B, M, F], float),
        "bias": ([H, L, M], float),
        "mask": ([B, M], bool),
    },
    lambda w, q, k, v, bias, mask: mtf.layers.dot_product_attention(
        q, k, v, L, M, K, F, mask, bias, 0.25, [L], extra_logit=0.5, window=3, scale=0.75
    ),
)
def dot_product(p: dict[str, Array]) -> Array:
    out = np.empty((4, 4, 2, 6))
    keep = (uniform("dropout", (4, 2, 6)) < 0.75) / 0.75
    for b, h in np.ndindex(4, 2):
        mask, kept = (np.broadcast_to(x, (4, 6)) for x in (p["mask"][b], keep[b, h]))
        q, k, v, bias = p["q"][b, :, h], p["k"][:, b], p["v"][b], p["bias"][h]
        out[b, :, h] = ref.head(q, k, v, False, 3, 0.75, bias, mask, 0.5, kept)
    return out


def projected(p: dict[str, Array], part: str, source: Array, biased: bool = False) -> Array:
    """source[batch, length, channels] as [batch, length, heads ..., head_dim]."""
    y = np.tensordot(source, p[f"multihead_attention/{part}/kernel"], axes=(2, 0))
    return y + p[f"multihead_attention/{part}/bias"] if biased else y


@layer(
    "multihead_attention grouped",
    X,
    lambda w, x: mtf.layers.multihead_attention(
        x,
        None,
        None,
        K,
        [G, H],
        memory_heads=H,
        scores=Scores(causal=True, window=3, rotary_base=5.0, qk_norm=True),
        use_bias=True,
        **w,
    ),
)
def grouped(p: dict[str, Array]) -> Array:
    q, k, v = (projected(p, part, p["x"], True) for part in "qkv")
    out = np.tile(p["multihead_attention/out/bias"], (4, 4, 1))
    for b, g, h in np.ndindex(4, 2, 2):
        turned = [
            ref.rotary(ref.rms_norm(y, p[f"multihead_attention/{part}_norm/scale"]), 5.0)
            for part, y in (("q", q[b, :, g, h]), ("k", k[b, :, h]))
        ]
        out[b] += ref.head(*turned, v[b, :, h], True, 3) @ p["multihead_attention/out/kernel"][g, h]
    return out


def crossed(w: Keywords, x: Tensor, memory: Tensor, mask: Tensor, kernel: str, bias: Tensor | None = None) -> Tensor:
    return mtf.layers.multihead_attention(
        x, memory, mask, K, H, memory_heads=[], scores=Scores(bias=bias, kernel=kernel), **w
    )


CROSS = {**X, "memory": ([B, M, F], float), "mask": ([B, M], bool)}


@layer(
    "multihead_attention to memory, materialised",
    {**CROSS, "bias": ([H, L, M], float)},
    lambda w, x, memory, mask, bias: crossed(w, x, memory, mask, "materialised", bias),
)
@layer(
    "multihead_attention to memory, fused, biased",
    {**CROSS, "bias": ([H, L, M], float)},
    lambda w, x, memory, mask, bias: crossed(w, x, memory, mask, "flash", bias),
)
@layer("multihead_attention to memory, fused", CROSS, lambda w, x, memory, mask: crossed(w, x, memory, mask, "flash"))
def multi_query(p: dict[str, Array]) -> Array:
    q, k, v = (projected(p, part, p[source]) for part, source in (("q", "x"), ("k", "memory"), ("v", "memory")))
    out = np.zeros((4, 4, 8))
    for b, h in np.ndindex(4, 2):
        bias, mask = p["bias"][h] if "bias" in p else None, np.broadcast_to(p["mask"][b], (4, 6))
        out[b] += ref.head(q[b, :, h], k[b], v[b], bias=bias, mask=mask) @ p["multihead_attention/out/kernel"][h]
    return out


def alone(w: Keywords, x: Tensor, mask: Tensor, kernel: str) -> Tensor:
    return mtf.layers.multihead_attention(
        x, None, mask, K, H, scores=Scores(causal=True, rotary_base=100.0, kernel=kernel), **w
    )


ALONE = {**X, "mask": ([B, L, Dimension("memory_length", 4)], bool)}


@layer("multihead_attention of one sequence, materialised", ALONE, lambda w, x, mask: alone(w, x, mask, "materialised"))
@layer("multihead_attention of one sequence, fused", ALONE, lambda w, x, mask: alone(w, x, mask, "flash"))
def one_sequence(p: dict[str, Array]) -> Array:
    q, k, v = (projected(p, part, p["x"]) for part in "qkv")
    out = np.zeros((4, 4, 8))
    for b, h in np.ndindex(4, 2):
        turned = (ref.rotary(y[b, :, h], 100.0) for y in (q, k))
        made = ref.head(*turned, v[b, :, h], causal=True, mask=p["mask"][b])
        out[b] += made @ p["multihead_attention/out/kernel"][h]
    return out


@layer(
    "multihead_attention with shared keys and values",
    X,
    lambda w, x: mtf.layers.multihead_attention(
        x, None, None, K, H, share_kv=True, scores=Scores(qk_norm=True, scale=0.3), **w
    ),
)
def shared(p: dict[str, Array]) -> Array:
    q, v = (projected(p, part, p["x"]) for part in "qk")
    out = np.zeros((4, 4, 8))
    for b, h in np.ndindex(4, 2):
        normed = [
            ref.rms_norm(y[b, :, h], p[f"multihead_attention/{part}_norm/scale"]) for part, y in (("q", q), ("k", v))
        ]
        out[b] += ref.head(*normed, v[b, :, h], scale=0.3) @ p["multihead_attention/out/kernel"][h]
    return out


def far_out(w: Keywords, x: Tensor, t: Tensor) -> Tensor:
    return mtf.layers.sigmoid_cross_entropy_with_logits(x * 30.0, t)  # far out: no exponential overflows


@layer("sigmoid_cross_entropy_with_logits", {"x": ([B, V], float), "t": ([V, B], float)}, far_out)
def binary(p: dict[str, Array]) -> Array:
    z, t = p["x"] * 30.0, p["t"].T
    return -t * -np.logaddexp(0, -z) - (1 - t) * -np.logaddexp(0, z)


T, R, W, E = Dimension("length", 8), Dimension("height", 6), Dimension("width", 4), Dimension("value_dim", 2)
NEAR = {"q": ([B, H, T, K], float), "k": ([T, B, K], float), "v": ([B, T, E], float), "ids": ([B, T], 2)}


def nearby(w: Keywords, q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    return mtf.layers.local_attention_1d(q, k, v, T, K, E, True, 4, 3, ids, 0.75)  # across two blocks of 2


@layer("local_attention_1d", NEAR, nearby)
def near_before(p: dict[str, Array]) -> Array:
    out, i = np.empty((4, 2, 8, 2)), np.arange(8)
    for b, h in np.ndindex(4, 2):
        seen = (i[:, None] - i < 3) & (i <= i[:, None]) & (p["ids"][b][:, None] == p["ids"][b])
        out[b, h] = ref.head(p["q"][b, h], p["k"][:, b], p["v"][b], mask=seen, scale=0.75)
    return out


@layer(
    "local_attention_1d both ways",
    {n: NEAR[n] for n in "qkv"},
    lambda w, q, k, v: mtf.layers.local_attention_1d(q, k, v, T, K, E, False, 2, 2),
)
def near_around(p: dict[str, Array]) -> Array:
    out, i = np.empty((4, 2, 8, 2)), np.arange(8)
    apart = i - i[:, None]
    for b, h in np.ndindex(4, 2):
        out[b, h] = ref.head(p["q"][b, h], p["k"][:, b], p["v"][b], mask=(apart > -2) & (apart <= 2))
    return out


IMAGE = {"q": ([R, W, E], float), "k": ([W, E, R], float), "v": ([R, W, E], float)}


def points(w: Keywords, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return mtf.layers.local_attention_2d(q, k, v, R, W, E, None, causal, (3, 2), 2)  # blocks of 2 x 2


def image(p: dict[str, Array], causal: bool) -> Array:
    out = np.empty((6, 4, 2))
    keys, values = p["k"].transpose(2, 0, 1).reshape(24, 2), p["v"].reshape(24, 2)
    rows, columns = np.divmod(np.arange(24), 4)
    for r, c in np.ndindex(6, 4):
        seen = (rows - r > -2) & (rows - r <= 2) & (columns - c > -2) & (columns - c <= 2)
        if causal:
            seen &= (rows < r) | ((rows == r) & (columns <= c))
        out[r, c] = ref.head(p["q"][r, c][None], keys, values, mask=seen[None])[0]
    return out


@layer("local_attention_2d", IMAGE, lambda w, **p: points(w, **p, causal=False))
def image_around(p: dict[str, Array]) -> Array:
    return image(p, False)


@layer("local_attention_2d from above", IMAGE, lambda w, **p: points(w, **p, causal=True))
def image_above(p: dict[str, Array]) -> Array:
    return image(p, True)


@layer(
    "masked_local_attention_1d",
    {"x": ([T, D], float)},
    lambda w, x: mtf.layers.masked_local_attention_1d(x, E, H, 3, length_per_split=4, **w),
)
def near_heads(p: dict[str, Array]) -> Array:
    q, k, v = (np.einsum("ld,dhe->hle", p["x"], p[f"masked_local_attention_1d/{part}"]) for part in "qkv")
    made = [ref.head(q[h], k[h], v[h], causal=True, window=3) for h in range(2)]
    return np.einsum("hle,dhe->ld", made, p["masked_local_attention_1d/o"])


def latent(w: Keywords, x: Tensor, q_rank: Dimension | None) -> Tensor:
    dims = mtf.layers.LatentDims(H, Dimension("rank", 4), K, Dimension("head_dim", 2), F, q_rank)
    return mtf.layers.latent_attention(x, dims, q_rank is None, 5.0, None if q_rank is None else 0.75, 1e-2, **w)


def latent_heads(p: dict[str, Array], causal: bool, scale: float) -> Array:
    """Keys of [own, shared] and values, made of the latent vector, one head after the other."""
    w = {n.removeprefix("latent_attention/"): x for n, x in p.items()}
    out = np.zeros(p["x"].shape)
    for b, h in np.ndindex(4, 2):
        x = p["x"][b]
        narrow = ref.rms_norm(x @ w["latent/kernel"], w["latent_norm/scale"], 1e-2)
        queries = x
        if "q_latent/kernel" in w:
            queries = ref.rms_norm(x @ w["q_latent/kernel"], w["q_latent_norm/scale"], 1e-2)
        q = [queries @ w["q_nope/kernel"][:, h], ref.rotary(queries @ w["q_rope/kernel"][:, h], 5.0)]
        k = [narrow @ w["k_nope/kernel"][:, h], ref.rotary(x @ w["k_rope/kernel"], 5.0)]
        v = narrow @ w["v/kernel"][:, h]
        out[b] += ref.head(np.hstack(q), np.hstack(k), v, causal, scale=scale) @ w["out/kernel"][h]
    return out


@layer("latent_attention", X, lambda w, x: latent(w, x, None))
def latent_of_the_input(p: dict[str, Array]) -> Array:
    return latent_heads(p, True, 6**-0.5)


@layer("latent_attention of narrow queries", X, lambda w, x: latent(w, x, Dimension("q_rank", 2)))
def latent_of_narrow_queries(p: dict[str, Array]) -> Array:
    return latent_heads(p, False, 0.75)


@layer("us_einsum", {"x": ([B, H, K], float), "y": ([K, H, F], float)}, lambda w, x, y: mtf.layers.us_einsum([x, y]))
def unit_scaled(p: dict[str, Array]) -> Array:
    return np.einsum("bhk,khf->bf", p["x"], p["y"]) / 8**0.5


# ---------------------------------------------------------------- the tests


@cache
def in_float64(name: str) -> Built:
    """A layer as several tests run it."""
    return Built(next(one for one in LAYERS if one.name == name), "float64")


each_layer = pytest.mark.parametrize("one", LAYERS, ids=str)


def test_every_layer_is_here() -> None:
    pools = {"max_pool2d", "max_pool3d", "avg_pool2d", "avg_pool3d"}  # tests/core/test_functions.py
    names = " ".join(one.name for one in LAYERS) + " softmax_cross_entropy_with_logits embedding_weights "
    names += "learned_positions sinusoidal_positions clip_activation_gradient"
    convolutions = {n for n in public_names(mtf.layers) if n.startswith("conv") or n == "separable_conv"}
    in_images = {*convolutions}  # tests/ops/test_images.py, tests/models/test_images.py
    experts = {"moe", "Mixture", "Routing", "balanced_bias"}  # tests/layers/test_experts.py
    parts = {"Scores", "LatentDims", "latent_queries", "latent_memory"}  # of the attentions above
    others = {"pipeline", "schedule", "Held"}  # tests/layers/test_pipeline.py, tests/models/test_serving.py
    others |= {"pipeline_training_step", "split_layers", "stage_layers"}  # tests/layers/test_pipeline_steps.py
    assert {n for n in public_names(mtf.layers) if n not in names} == {*pools, *in_images, *experts, *parts, *others}


@each_layer
def test_value_and_gradients(one: Layer) -> None:
    b = in_float64(one.name)
    wanted, program = b.wanted(), b.lower()
    for executor in ("exact", "fast"):
        found = b.run(program, executor)
        assert_close({"y": found["y"]}, {"y": wanted["y"]}, 1e-11, one)
        assert all(dx.shape == b.outputs[name].shape.sizes for name, dx in found.items())
        for name, along in b.directions().items():
            found[name] = np.tensordot(along, found[name], found[name].ndim)
        assert_close(found, wanted, 3e-8, one)


@each_layer
def test_layouts_change_nothing(one: Layer) -> None:
    b = in_float64(one.name)
    wanted = b.run(b.lower())
    for layout in legal_layouts(b):
        program = b.lower(layout)
        assert_close(b.run(program), wanted, 1e-10, f"{one} under {layout}")
        assert_close(b.run(program, "fast"), wanted, 1e-10, f"{one} under {layout}, fast")


def legal_layouts(b: Built) -> list[Layout]:
    """Different legal layouts of the values and variables on meshes of 1 to 3 axes; those that split most dims."""
    rng = np.random.default_rng(zlib.crc32(b.layer.name.encode()) + 1)
    shapes = [t.shape for t in needed(b.outputs.values())]
    names = list(dict.fromkeys(d.name for s in shapes for d in s))
    legal: dict[str, Layout] = {}
    count = draws(1, 30)
    while len(legal) < 4 * count:
        layout = draw_layout(rng, names)
        if layout.rules and layout.allows(shapes):
            legal[str(layout)] = layout
    return sorted(legal.values(), key=lambda x: len(x.rules))[-count:]


@pytest.mark.parametrize("one", some(LAYERS, LAYERS[::2]), ids=str)
def test_bfloat16_keeps_the_dtype_and_comes_close(one: Layer) -> None:
    b, wide = Built(one, "bfloat16"), copy.copy(in_float64(one.name))
    for x in (*b.feeds.values(), *b.state.values()):
        if x.dtype.kind == "f":
            x[...] = x.astype(BFLOAT16.public).astype(np.float64)
    wide.feeds, wide.state = b.feeds, b.state
    found, wanted = b.run(b.lower(precision="default")), wide.run(wide.lower())
    in_float32 = ("cross entropy", "sigmoid_cross", "focal", "smooth", "hinge", "embedding", "positions", "relative")
    assert b.outputs["y"].dtype.name == "bfloat16" or one.name.startswith(in_float32)
    assert_close(found, wanted, 0.06, one)


# ---------------------------------------------------------------- stacked in a loop, names, messages


def block(x: Tensor, kernel: str) -> Tensor:
    """One layer of a Transformer."""
    h = mtf.layers.rms_norm(x, D, name="before_attention")
    scores = Scores(causal=True, rotary_base=50.0, kernel=kernel)
    x = x + mtf.layers.multihead_attention(h, None, None, K, [G, H], memory_heads=H, scores=scores)
    h = mtf.layers.layer_norm(x, D, name="before_feed_forward")
    return x + mtf.layers.feed_forward(h, F, "silu", gated=True)


SCANNED = [
    ("flash", "p:1", "", "none"),
    ("flash", "p:2;q:2", "batch:p;length:q;d_model:p?", "matmuls"),
    ("flash", "p:2", "heads:p", mtf.Remat(save=("q", "context"))),
    ("materialised", "p:2;q:2", "heads:p;d_ff:p;length:q", "full"),
]


@pytest.mark.parametrize(("kernel", "mesh", "layout", "remat"), some(SCANNED, SCANNED[2:]))
def test_scanned_layers_are_those_one_after_the_other(kernel: str, mesh: str, layout: str, remat: Any) -> None:
    """Two layers, their variables stacked by the scan, against the same written twice: values and gradients."""
    depth = Dimension("layers", 2)
    rng = np.random.default_rng(2)
    feeds = {"x": drawn(rng, (4, 4, 8), float), "cotangent": drawn(rng, (4, 4, 8), float)}
    stacked: dict[str, Array] = {}
    found = []
    for scanned in (True, False):
        with mtf.Graph() as graph:
            x, c = mtf.input("x", [B, L, D]), mtf.input("cotangent", [B, L, D])
            if scanned:
                (y,), _ = mtf.scan(
                    lambda c, s: ((block(c[0], kernel),), ()), [x], dim=depth, stack_variables=True, remat=remat
                )
            else:
                y = x
                for n in range(2):
                    with mtf.scope(str(n)):
                        y = block(y, kernel)
            variables = list(graph.trainable_variables)
            grads = mtf.gradients([y], [x, *variables], [c])
        state = {v.name: v.shape.sizes for v in variables}
        if scanned:
            stacked = {n: drawn(rng, shape, float) for n, shape in state.items()}
            assert {shape[0] for shape in state.values()} == {2}
        values = stacked if scanned else {n: stacked[n.partition("/")[2]][int(n[0])] for n in state}
        outputs = {"y": y, "dx": grads[0], **{f"d {v.name}": dx for v, dx in zip(variables, grads[1:], strict=True)}}
        program = mtf.lower(outputs, mesh=mesh, layout=layout, precision="highest")
        found.append(run(program, feeds, state=values)[0])
    loop, plain = found
    for name in [n for n in loop if n.startswith("d ")]:
        plain[name] = np.stack([plain.pop(f"d {n}/{name[2:]}") for n in range(2)])
    assert_close(loop, plain, 2e-5, (kernel, layout))


def test_a_dim_that_meets_itself_has_a_name_for_rules() -> None:
    """Columns of the kernel over q: no sum over devices, and the result is where rules for d_model say."""
    with mtf.Graph() as graph:
        x = mtf.input("x", [B, D])
        y = mtf.layers.dense(x, D, use_bias=False, name="out")
    assert (y.name, y.shape) == ("out", x.shape)
    assert graph.variables["out/kernel"].output.shape == Shape("d_model:8;d_model_out:8")
    program = mtf.lower({"y": y}, mesh="p:2;q:2", layout="batch:p;d_model_out:q")
    assert [c.kind for c in program.collectives] == ["all_gather"]
    program = mtf.lower({"y": y}, mesh="q:2", layout="d_model:q")
    assert [c.kind for c in program.collectives] == ["reduce_scatter"]


@pytest.mark.parametrize("kernel", ["flash", "materialised"])
def test_values_bear_the_names_that_rematerialisation_goes_by(kernel: str) -> None:
    with mtf.Graph() as graph:
        x = mtf.input("x", [B, L, D])
        block(x, kernel)
        mtf.layers.multihead_attention(x, mtf.input("memory", [B, M, F]), None, K, H, use_bias=True, name="cross")
    named = {op.name: op for op in graph.operations}
    for scope in ("multihead_attention", "cross"):
        kept = {part: named[f"{scope}/{part}"] for part in ("q", "k", "v", "context", "out")}
        context = kept["context"]
        if kernel == "flash" or scope == "cross":
            made = [x.operation for x in context.inputs]
            made = [op.inputs[0].operation if op.name.endswith("/renamed") else op for op in made]
            assert made == [kept[part] for part in "qkv"]
        assert kept["out"].output.shape == x.shape
    # Nothing else ends in one of these names, so that nothing is kept twice.
    ends = [op.name.rpartition("/")[2] for op in graph.operations]
    for part in ("q", "k", "v", "context", "out"):
        assert ends.count(part) == 2, part
    assert [ends.count(part) for part in ("wi", "wi_gate", "wo")] == [1, 1, 1]


def self_attention(x: Tensor, **options: Any) -> Tensor:
    return mtf.layers.multihead_attention(x, None, None, K, H, **options)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda x: mtf.layers.layer_norm(x, OTHER), "dim 'd_model' has size 8 in x.*but 6 was given"),
        (lambda x: mtf.layers.rms_norm(x, V), "x: f32.* has no dim 'vocab'"),
        (lambda x: mtf.layers.rms_norm(x, D, -1.0), "epsilon must not be negative, got -1.0"),
        (lambda x: mtf.layers.layer_norm(mtf.cast(x, "int32"), D), "needs a float tensor"),
        (lambda x: mtf.layers.feed_forward(x, F, "sigmoid"), "activation must be 'gelu' or .* got 'sigmoid'"),
        (lambda x: mtf.layers.feed_forward(x, L), "new_dims length:4 are in .* already; rename one side"),
        (
            lambda x: mtf.layers.dense(mtf.rename_dimension(x, "length", "d_model_out"), D),
            "new_dims d_model_out:8 are in .* already",
        ),
        (lambda x: mtf.layers.feed_forward(x, F, dropout=0.5, dropout_broadcast_dims=[V]), "vocab:12 are not in"),
        (lambda x: mtf.layers.rotary(x, L, Dimension("d_model", 7)), "size 8 in x.*but 7 was given"),
        (lambda x: mtf.layers.rotary(mtf.slice(x, 0, 7, "d_model"), L, "d_model"), "d_model:7 can't be cut"),
        (lambda x: mtf.layers.rotary(x, L, D, base=0), "base must be positive, got 0"),
        (lambda x: mtf.layers.rotary(x, L, D, 0.5, scaling=RotaryScaling(4, 1, 9, 9, "pairs")), "above 1, got 0.5"),
        (lambda x: RotaryScaling(4.0, ramp="pairs"), "pairs needs an original_length .* got None and 1"),
        (lambda x: RotaryScaling(4.0, ramp="waves"), "ramp must be turns or pairs, got 'waves'"),
        (lambda x: mtf.layers.learned_positions(L, D, 3), "the variable has 3 positions, but length:4 needs 4"),
        (lambda x: mtf.layers.embedding(x, V, F), r"indices must be int32, got float32(.|\n)*x: f32"),
        (lambda x: mtf.layers.multihead_attention(x, None, None, K, Dimension("batch", 2)), "batch:2 are in x"),
        (lambda x: self_attention(x, memory_heads=[G]), r"group:2 are not in heads \[heads:2\]"),
        (lambda x: self_attention(x, scores=Scores(kernel="flush")), "did you mean 'flash'"),
        (lambda x: self_attention(x, scores="flash"), "layers.Scores.*got str 'flash'"),
        (lambda x: Scores(bias=0.5), "expected a tensor, got float 0.5"),
        (
            lambda x: self_attention(x, scores=Scores(bias=mtf.ones([H, L], "int32"))),
            r"the bias must be of a float type, got ones: i32\[heads:2, length:4\]",
        ),
        (lambda x: self_attention(x, scores=Scores(bias=mtf.ones([H, K]))), "the bias has 'head_dim', the elements"),
        (lambda x: mtf.layers.dense(x, F, numerics="bfloat16"), "must be an mtf.Numerics .*got str 'bfloat16'"),
        (lambda x: mtf.Numerics("int32"), "variable_dtype must be a float dtype, got int32"),
        (lambda x: mtf.Numerics("float31"), "unknown dtype 'float31'.*did you mean 'float32'"),
        (lambda x: mtf.Numerics(precision="int4"), "'fp8' or 'fp8_full', got 'int4'"),
        (
            lambda x: self_attention(x, dropout=0.1),
            "never has the scores and can't take dropout 0.1 of the weights; use 'materialised'",
        ),
        (
            lambda x: mtf.layers.multihead_attention(x, None, mtf.ones([B, L]), K, H),
            "the mask must be bool, got float32",
        ),
        (
            lambda x: self_attention(x, scores=Scores(bias=mtf.ones([H, V]), kernel="materialised")),
            "the bias has vocab:12, which q and k lack",
        ),
        (lambda x: self_attention(x, scores=Scores(bias=mtf.ones([H, V]))), "the bias has vocab:12, which q and k"),
        (
            lambda x: mtf.layers.softmax_cross_entropy_with_logits(x, mtf.zeros([B, D], "int32"), D),
            r"labels must have the dims of the logits but the vocab's(.|\n)*x: f32\[batch:4, length:4, d_model:8\]",
        ),
        (
            lambda x: mtf.layers.softmax_cross_entropy_with_logits(x, mtf.zeros([B, L, D], "bfloat16"), D),
            "targets must be int32 labels or a distribution in the dtype of the logits",
        ),
        (
            lambda x: mtf.layers.softmax_cross_entropy_with_logits(x, x, D, label_smoothing=1.0),
            r"label_smoothing must be in \[0, 1\), got 1.0",
        ),
        (lambda x: mtf.layers.local_attention_1d(x, x, x, L, D, radius=0), "radius must be at least 1, got 0"),
        (lambda x: mtf.layers.local_attention_1d(x, x, x, L, D, length_dim_num_splits=3), "has no 3 equal parts"),
        (lambda x: mtf.layers.local_attention_1d(x, x, x, M, D), "x: f32.* has no dim 'memory_length'"),
        (
            lambda x: mtf.layers.local_attention_1d(x, x, x, L, D, sequence_id=mtf.zeros([B], "int32")),
            "sequence_id must be int32 with length:4, got zeros: i32",
        ),
        (lambda x: mtf.layers.local_attention_2d(x, x, x, B, L, D, num_splits=2), "two numbers, of height and width"),
        (lambda x: mtf.layers.masked_local_attention_1d(x, K, H, 2, 3), "length_per_split 3 does not divide length:4"),
        (lambda x: mtf.layers.clip_activation_gradient(x, 0), "rms_norm must be positive, got 0"),
        (lambda x: mtf.layers.clip_activation_gradient(mtf.cast(x, "int32")), "needs a float tensor, got cast"),
        (lambda x: mtf.layers.us_einsum([mtf.cast(x, "int32")] * 2), "us_einsum .*needs float operands, got int32"),
        (
            lambda x: mtf.layers.sigmoid_cross_entropy_with_logits(x, mtf.zeros([B, D])),
            r"floats of the same dims and dtype(.|\n)*x: f32\[batch:4, length:4, d_model:8\](.|\n)*zeros: f32",
        ),
    ],
)  # fmt: skip
def test_messages(build: Callable[[Tensor], Tensor], words: str) -> None:
    with mtf.Graph(), pytest.raises(mtf.MeshlibError, match=words) as caught:
        build(mtf.input("x", [B, L, D]))
    assert "test_layers.py:" in str(caught.value)


WEIGHTED = [x for x in LAYERS if x.name.startswith(("dense", "feed", "layer_norm", "rms_norm", "multihead"))]


@pytest.mark.parametrize(("given", "made"), [(None, "float32"), ("bfloat16", "bfloat16"), ("float64", "float64")])
@pytest.mark.parametrize("precision", ["default", "highest", "int8"])
@pytest.mark.parametrize("one", WEIGHTED, ids=str)
def test_numerics_reach_variables_results_and_products(one: Layer, given: str, made: str, precision: str) -> None:
    """Whatever the dtype of the inputs: a layer with variables computes in what its numerics say."""
    numerics = mtf.Numerics("float32", "bfloat16", given, precision)
    with mtf.Graph() as graph:
        inputs = {
            name: mtf.input(name, dims, {float: "float32", bool: "bool"}.get(kind, "int32"))
            for name, (dims, kind) in one.inputs.items()
        }
        y = one.build({"numerics": numerics}, **inputs)
    for variable in graph.variables.values():
        assert (variable.attrs["public_dtype"].name, variable.output.dtype.name) == ("float32", "bfloat16")
    assert y.dtype.name == made
    products = [op for op in graph.operations if op.opdef.name in ("einsum", "quantized_einsum")]
    weights = [op for op in products if "/kernel" in op.inputs[1].name]
    assert len(weights) == sum(name.endswith("kernel") for name in graph.variables)
    assert {op.attrs["precision"] for op in weights} <= {precision}
    assert {op.attrs["precision"] for op in products if op not in weights} <= {"default"}


def test_tables_are_of_the_activations_dtype_or_of_their_slices() -> None:
    with mtf.Graph():
        for given, made in ((None, "bfloat16"), ("float32", "float32")):
            numerics = mtf.Numerics("float32", "bfloat16", given)
            with mtf.scope(made):
                tables = [
                    mtf.layers.embedding_weights(V, D, numerics),
                    mtf.layers.learned_positions(L, D, 8, numerics),
                    mtf.layers.relative_position_bias(L, M, H, 8, 5, numerics=numerics),
                ]
            assert [t.dtype.name for t in tables] == 3 * [made]


def test_numerics_of_names_and_of_types_are_equal() -> None:
    assert mtf.Numerics(np.float64, activation_dtype=np.dtype("float32")) == mtf.Numerics("float64", None, "float32")


@pytest.mark.parametrize("layout", ["", "batch:p", "d_model:q", "batch:q;length:p"])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-12), ("bfloat16", 0.01)])
def test_the_gradient_of_an_activation_is_clipped_by_its_root_mean_square(
    dtype: str, tolerance: float, layout: str
) -> None:
    with mtf.Graph():
        x, c = mtf.input("x", [B, L, D], dtype), mtf.input("c", [B, L, D], dtype)
        y = mtf.layers.clip_activation_gradient(mtf.square(x), 0.5, name="y")
        assert y.name == "y"
        (dx,) = mtf.gradients([y], [x], [c])
        program = mtf.lower({"y": y, "dx": dx}, mesh="p:2;q:2", layout=layout)
    rng = np.random.default_rng(2)
    for scale in (0.25, 4.0, 0.0):  # below the limit nothing changes
        fed = {"x": rng.normal(size=(4, 4, 8)), "c": rng.normal(size=(4, 4, 8)) * scale}
        for executor in ("exact", "fast"):
            (out,) = run(program, fed, executor)
            dy = fed["c"]
            wanted = dy * 0.5 / max(0.5, np.sqrt(np.mean(dy**2))) * 2 * fed["x"]
            assert_close({"y": np.float64(out["y"])}, {"y": fed["x"] ** 2}, tolerance, layout)
            assert_close({"dx": np.float64(out["dx"])}, {"dx": wanted}, 2 * tolerance, (scale, layout))


def test_a_label_out_of_range_is_named() -> None:
    with mtf.Graph():
        x, labels = mtf.input("x", [B, V]), mtf.input("labels", [B], "int32")
        program = mtf.lower(mtf.layers.softmax_cross_entropy_with_logits(x, labels, V))
    with pytest.raises(mtf.FeedError, match=r"index 12 is out of range for dim vocab:12 \(0 to 11\)"):
        mtf.simulate(program).step(x=np.zeros((4, 12)), labels=[0, 1, 12, 3])


@pytest.mark.parametrize(
    "options", [{"scores": Scores(qk_norm=True)}, {"share_kv": True}, {"scores": Scores(rotary_base=100.0)}, {}]
)
def test_what_attention_takes_and_makes_has_names(options):
    x, memory = (mtf.Dimension("channels", 4), mtf.Dimension("length", 3)), mtf.Dimension("keys", 5)
    with mtf.Graph() as graph:
        queries = mtf.input("x", [x[1], x[0]])
        source = mtf.input("memory", [memory, x[0]])
        head = mtf.Dimension("head_dim", 2), mtf.Dimension("heads", 2)
        mtf.layers.multihead_attention(queries, source, None, *head, **options, name="a")
    names = [op.name for op in graph.operations]
    assert {"a/q", "a/k", "a/v", "a/context", "a/out"} <= set(names), names
    kernel = next(op for op in graph.operations if op.name == "a/context")
    assert [t.name for t in kernel.inputs] == ["a/q", "a/k", "a/v"]


@pytest.mark.parametrize("bad", ["k", "v"])
def test_local_attention_names_what_lacks_the_length(bad: str) -> None:
    given = {n: [E, K] if n == bad else [T, K] for n in "qkv"}
    with (
        mtf.Graph(),
        pytest.raises(mtf.GraphError, match=rf"local_attention_1d \(.*\): {bad}: .* has no dim '{T.name}'"),
    ):
        mtf.layers.local_attention_1d(*(mtf.input(n, dims) for n, dims in given.items()), T, K)
