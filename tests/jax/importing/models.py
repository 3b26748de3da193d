"""Models as people write them in plain JAX: what the tests import."""

from __future__ import annotations

from typing import Any

import numpy as np

Layouts = list[tuple[str, str]]
RNG = np.random.default_rng(3)


def weights(*shape: int, scale: float = 0.3) -> Any:
    return RNG.normal(scale=scale, size=shape).astype("float32")


def tokens(*shape: int, below: int = 24) -> Any:
    return RNG.integers(0, below, shape).astype("int32")


def layer_norm(x, g, b, eps=1e-5):
    import jax.numpy as jnp

    m = x.mean(-1, keepdims=True)
    return (x - m) / jnp.sqrt(((x - m) ** 2).mean(-1, keepdims=True) + eps) * g + b


# ---------------------------------------------------------------- Llama: grouped queries, rotary, scan, checkpoint


def llama(heads: int, groups: int):
    import jax
    import jax.numpy as jnp

    def norm(x, w):
        wide = x.astype(jnp.float32)
        return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-5)).astype(x.dtype) * w

    def rope(x, theta=10_000.0):
        _, length, _, d = x.shape
        angle = jnp.arange(length)[:, None] / (theta ** (jnp.arange(0, d, 2) / d))[None]
        cos, sin = jnp.cos(angle)[None, :, None, :], jnp.sin(angle)[None, :, None, :]
        a, b = jnp.split(x, 2, axis=-1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)

    def layer(x, p):
        b, length, _ = x.shape
        h = norm(x, p["n1"])
        q = rope((h @ p["wq"]).reshape(b, length, heads, -1))
        k = rope((h @ p["wk"]).reshape(b, length, groups, -1))
        v = (h @ p["wv"]).reshape(b, length, groups, -1)
        k, v = (jnp.repeat(t, heads // groups, axis=2) for t in (k, v))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
        scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e30).astype(jnp.float32)
        p_ = jax.nn.softmax(scores, -1).astype(x.dtype)
        x = x + jnp.einsum("bhqk,bkhd->bqhd", p_, v).reshape(b, length, -1) @ p["wo"]
        h = norm(x, p["n2"])
        return x + (jax.nn.silu(h @ p["wg"]) * (h @ p["wu"])) @ p["wd"]

    def loss(params, tokens, targets):
        x = params["wte"][tokens]
        x, _ = jax.lax.scan(jax.checkpoint(lambda x, p: (layer(x, p), None)), x, params["layers"])
        logits = (norm(x, params["nf"]) @ params["head"]).astype(jnp.float32)
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits, -1), targets[..., None], -1))

    return loss


LLAMA_NAMES = {
    "tokens": "batch length",
    "targets": "batch length",
    "params.wte": "vocab d_model",
    "params.head": "d_model vocab",
    "params.layers.wk": "layers d_model (heads head_dim)",
    "params.layers.wg": "layers d_model d_ff",
}


def llama_params(make, layers=2, d=16, heads=4, groups=2, dim=4, ff=32, vocab=24):
    sizes = {
        "n1": (d,), "n2": (d,), "wq": (d, heads * dim), "wk": (d, groups * dim), "wv": (d, groups * dim),
        "wo": (heads * dim, d), "wg": (d, ff), "wu": (d, ff), "wd": (ff, d),
    }  # fmt: skip
    stacked = {name: make(layers, *size) for name, size in sizes.items()}
    return {"wte": make(vocab, d), "nf": make(d), "head": make(d, vocab), "layers": stacked}


def plain_llama():
    args = llama_params(weights), tokens(4, 8), tokens(4, 8)
    layouts = [
        ("data:2;model:2", "batch:data;heads:model;d_ff:model;vocab:model"),
        ("fsdp:4", "batch:fsdp;d_model:fsdp?"),
        ("seq:2;model:2", "length:seq;heads:model;d_ff:model"),
    ]
    return llama(4, 2), args, LLAMA_NAMES, layouts


# ---------------------------------------------------------------- T5: encoder and decoder, relative positions


def plain_t5():
    import jax
    import jax.numpy as jnp

    d, heads, dim, ff, vocab = 16, 4, 4, 32, 24

    def bucket(rel, both, buckets=8, furthest=16):
        found = 0
        if both:
            buckets //= 2
            found, rel = (rel > 0).astype(jnp.int32) * buckets, jnp.abs(rel)
        else:
            rel = -jnp.minimum(rel, 0)
        exact = buckets // 2
        far = jnp.log(rel.astype(jnp.float32) / exact + 1e-6) / np.log(furthest / exact) * (buckets - exact)
        return found + jnp.where(rel < exact, rel, jnp.minimum(exact + far.astype(jnp.int32), buckets - 1))

    def bias(table, length, both):
        rel = jnp.arange(length)[None, :] - jnp.arange(length)[:, None]
        return jnp.transpose(table[bucket(rel, both)], (2, 0, 1))[None]

    def attend(p, x, memory, b):
        q, k, v = (jnp.einsum("bld,dhk->blhk", t, p[n]) for t, n in ((x, "q"), (memory, "k"), (memory, "v")))
        scores = jnp.einsum("bqhk,bmhk->bhqm", q, k)
        return jnp.einsum("bhqm,bmhk,hkd->bqd", jax.nn.softmax(scores if b is None else scores + b), v, p["o"])

    def norm(x, g):
        return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6) * g

    def feed(p, x):
        return jax.nn.relu(x @ p["wi"]) @ p["wo"]

    def loss(params, src, tgt, labels):
        x, y, length = params["emb"][src], params["emb"][tgt], tgt.shape[1]
        p = params["enc"]
        h = norm(x, p["n1"])
        x = x + attend(p["sa"], h, h, bias(params["enc_rel"], src.shape[1], True))
        x = x + feed(p["ff"], norm(x, p["n2"]))
        p = params["dec"]
        h = norm(y, p["n1"])
        hidden = jnp.where(jnp.tril(jnp.ones((length, length))) == 1, 0.0, -1e9)
        y = y + attend(p["sa"], h, h, bias(params["dec_rel"], length, False) + hidden)
        y = y + attend(p["ca"], norm(y, p["n3"]), x, None)
        logits = ((y + feed(p["ff"], norm(y, p["n2"]))) * d**-0.5) @ params["emb"].T
        return jnp.mean(jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, labels[..., None], -1)[..., 0])

    def attention():
        return {**{n: weights(d, heads, dim) for n in "qkv"}, "o": weights(heads, dim, d)}

    def layer(*more):
        feed = {"wi": weights(d, ff), "wo": weights(ff, d)}
        return {"sa": attention(), "n1": weights(d), "n2": weights(d), "ff": feed, **dict(more)}

    params = {
        "emb": weights(vocab, d), "enc_rel": weights(8, heads), "dec_rel": weights(8, heads),
        "enc": layer(), "dec": layer(("ca", attention()), ("n3", weights(d))),
    }  # fmt: skip
    names = {
        "src": "batch length", "tgt": "batch length", "params.*.q": "d_model heads head_dim",
        "params.emb": "vocab d_model", "params.*.wi": "d_model d_ff",
    }  # fmt: skip
    layouts = [
        ("data:2;model:2", "batch:data;heads:model;d_ff:model;vocab:model"),
        ("fsdp:4", "batch:fsdp;d_model:fsdp?"),
        ("seq:2;model:2", "length:seq;heads:model"),
    ]
    return loss, (params, tokens(4, 8), tokens(4, 6), tokens(4, 6)), names, layouts


# ---------------------------------------------------------------- GPT-2: one product of queries, keys and values


def plain_gpt2():
    import jax
    import jax.numpy as jnp

    d, heads, vocab = 16, 4, 24

    def block(x, p):
        h = layer_norm(x, p["g1"], p["b1"])
        parts = jnp.split(h @ p["w_qkv"] + p["b_qkv"], 3, axis=-1)
        q, k, v = (t.reshape(*t.shape[:2], heads, -1).transpose(0, 2, 1, 3) for t in parts)
        scores = (q @ k.swapaxes(-1, -2)) / jnp.sqrt(q.shape[-1])
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:])) == 0, -jnp.inf, scores)
        e = jnp.exp(scores - scores.max(-1, keepdims=True))
        x = x + ((e / e.sum(-1, keepdims=True)) @ v).transpose(0, 2, 1, 3).reshape(x.shape) @ p["w_o"]
        return x + jax.nn.gelu(layer_norm(x, p["g2"], p["b2"]) @ p["w1"]) @ p["w2"]

    def loss(params, batch):
        given, wanted = batch[:, :-1], batch[:, 1:].reshape(-1)
        x = params["wte"][given] + params["wpe"][: given.shape[1]]
        for p in params["blocks"]:
            x = jax.checkpoint(block)(x, p)
        logits = (layer_norm(x, params["g"], params["b"]) @ params["wte"].T).reshape(-1, vocab)
        logs = logits - jax.scipy.special.logsumexp(logits, axis=-1, keepdims=True)
        return -logs[jnp.arange(wanted.size), wanted].mean()

    def made():
        norms = {n: weights(d) for n in ("g1", "b1", "g2", "b2")}
        return {
            **norms, "w_qkv": weights(d, 3 * d), "b_qkv": weights(3 * d), "w_o": weights(d, d),
            "w1": weights(d, 32), "w2": weights(32, d),
        }  # fmt: skip

    params = {"wte": weights(vocab, d), "wpe": weights(16, d), "g": weights(d), "b": weights(d), "blocks": [made()]}
    names = {
        "batch": "batch length", "params.wte": "vocab d_model", "params.blocks.*.w1": "d_model d_ff",
        "params.blocks.*.w_qkv": "d_model (three heads head_dim)",
    }  # fmt: skip
    layouts = [
        ("data:2;model:2", "batch:data;heads:model;d_ff:model"),
        ("fsdp:4", "batch:fsdp;d_model:fsdp?"),
        ("model:4", "heads:model;vocab:model"),
    ]
    return loss, (params, tokens(4, 9)), names, layouts


# ---------------------------------------------------------------- images: a mixer, a vision Transformer


def plain_mixer():
    import jax
    import jax.numpy as jnp

    d, patches, classes = 16, 9, 10

    def loss(params, img, label):
        b = img.shape[0]
        x = img.reshape(b, 3, 4, 3, 4, 3).transpose(0, 1, 3, 2, 4, 5).reshape(b, patches, 48) @ params["embed"]
        for p in params["blocks"]:
            h = layer_norm(x, p["g1"], p["b1"]).swapaxes(1, 2)
            x = x + (jax.nn.gelu(h @ p["t1"]) @ p["t2"]).swapaxes(1, 2)
            x = x + jax.nn.gelu(layer_norm(x, p["g2"], p["b2"]) @ p["c1"], approximate=False) @ p["c2"]
        logs = jax.nn.log_softmax(x.mean(1) @ params["head"])
        return -jnp.mean(jnp.sum(jax.nn.one_hot(label, classes) * logs, -1))

    def made():
        norms = {n: weights(d) for n in ("g1", "b1", "g2", "b2")}
        return {
            **norms, "t1": weights(patches, 8), "t2": weights(8, patches), "c1": weights(d, 32), "c2": weights(32, d),
        }  # fmt: skip

    params = {"embed": weights(48, d), "blocks": [made(), made()], "head": weights(d, classes)}
    names = {"img": "batch _ _ _", "params.blocks.*.c1": "d_model d_ff"}
    layouts = [
        ("data:2;model:2", "batch:data;d_ff:model"),
        ("fsdp:4", "batch:fsdp;d_model:fsdp?"),
        ("model:4", "d_ff:model"),
    ]
    return loss, (params, weights(4, 12, 12, 3), tokens(4, below=classes)), names, layouts


def plain_vit():
    import jax
    import jax.numpy as jnp

    d, heads = 16, 4

    def loss(params, img, label):
        b = img.shape[0]
        x = jax.lax.conv_general_dilated(
            img, params["conv"], (4, 4), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
        ).reshape(b, -1, d)
        x = jnp.concatenate([jnp.broadcast_to(params["cls"], (b, 1, d)), x], 1) + params["pos"]

        def block(x, p):
            h = layer_norm(x, p["g1"], p["b1"])
            q, k, v = ((h @ p[n]).reshape(b, -1, heads, d // heads) for n in "qkv")
            x = x + jax.nn.dot_product_attention(q, k, v).reshape(x.shape) @ p["o"]
            return x + jax.nn.silu(layer_norm(x, p["g2"], p["b2"]) @ p["w1"]) @ p["w2"], None

        x, _ = jax.lax.scan(block, x, params["blocks"])
        return -jax.nn.log_softmax(x[:, 0] @ params["head"])[jnp.arange(b), label].mean()

    n = 2
    blocks = {
        **{name: weights(n, d) for name in ("g1", "b1", "g2", "b2")}, **{name: weights(n, d, d) for name in "qkvo"},
        "w1": weights(n, d, 32), "w2": weights(n, 32, d),
    }  # fmt: skip
    params = {"conv": weights(4, 4, 3, d), "cls": weights(1, 1, d), "pos": weights(1, 10, d), "head": weights(d, 10)}
    names = {
        "img": "batch _ _ _",
        "params.blocks.w1": "layers d_model d_ff",
        "params.blocks.q": "layers d_model (heads head_dim)",
    }
    layouts = [
        ("data:2;model:2", "batch:data;d_ff:model;heads:model"),
        ("fsdp:4", "batch:fsdp;d_model:fsdp?"),
        ("model:4", "heads:model"),
    ]
    return loss, ({**params, "blocks": blocks}, weights(4, 12, 12, 3), tokens(4, below=10)), names, layouts


# ---------------------------------------------------------------- a recurrence over time


def plain_lstm():
    import jax
    import jax.numpy as jnp

    def loss(params, x, y):
        def cell(state, now):
            h, c = state
            i, f, g, o = jnp.split(now @ params["wx"] + h @ params["wh"] + params["b"], 4, -1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        start = (jnp.zeros((x.shape[0], 16)), jnp.zeros((x.shape[0], 16)))
        _, hs = jax.lax.scan(cell, start, x.swapaxes(0, 1))
        return jnp.mean((hs.swapaxes(0, 1) @ params["o"] - y) ** 2)

    params = {"wx": weights(8, 64), "wh": weights(16, 64), "b": weights(64), "o": weights(16, 3)}
    layouts = [("data:2", "batch:data"), ("fsdp:4", "batch:fsdp"), ("a:2;b:2", "batch:a;features:b")]
    return loss, (params, weights(4, 6, 8), weights(4, 6, 3)), {"x": "batch time features"}, layouts


PLAIN = {f.__name__: f for f in (plain_llama, plain_t5, plain_gpt2, plain_mixer, plain_vit, plain_lstm)}
