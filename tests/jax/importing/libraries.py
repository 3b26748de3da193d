"""Transformers as people write them in Flax (linen and nnx), Equinox and Haliax."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.jax.importing.models import tokens

LAYOUTS = [
    ("data:2;model:2", "batch:data;heads:model;d_ff:model"),
    ("fsdp:4", "batch:fsdp;d_model:fsdp?"),
    ("seq:2;model:2", "length:seq;heads:model;d_ff:model"),
]


def drawn(shapes: Any) -> Any:
    """Arrays of these shapes, of NumPy's numbers: what a library draws takes longer to compile than the test to run."""
    import jax

    rng = np.random.default_rng(0)

    def filled(leaf: Any) -> Any:
        if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.key(0)
        if jax.numpy.issubdtype(leaf.dtype, jax.numpy.inexact):
            return jax.numpy.asarray(rng.normal(0, 0.3, leaf.shape), leaf.dtype)
        return jax.numpy.zeros(leaf.shape, leaf.dtype)

    return jax.tree_util.tree_map(filled, shapes)


def linen():
    import flax.linen as nn
    import jax
    import jax.numpy as jnp

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, mask):
            h = nn.LayerNorm()(x)
            x = x + nn.MultiHeadDotProductAttention(num_heads=4, qkv_features=16)(h, h, mask=mask)
            return x + nn.Dense(16)(nn.gelu(nn.Dense(32)(nn.LayerNorm()(x))))

    class Model(nn.Module):
        @nn.compact
        def __call__(self, t):
            table = nn.Embed(24, 16)
            x = table(t) + nn.Embed(8, 16, name="pos")(jnp.arange(t.shape[1]))
            mask = nn.make_causal_mask(t)
            for n in range(2):
                x = Block(name=f"layer_{n}")(x, mask)
            return table.attend(nn.LayerNorm()(x))

    model = Model()

    def loss(params, t, y):
        logits = model.apply(params, t)
        return jnp.mean(jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, y[..., None], -1)[..., 0])

    names = {
        "t": "batch length",
        "*.layer_*.MultiHeadDotProductAttention_0.query.kernel": "d_model heads head_dim",
        "*.Dense_0.kernel": "d_model d_ff",
    }
    t, y = tokens(4, 8), tokens(4, 8)
    return loss, (drawn(jax.eval_shape(lambda: model.init(jax.random.key(0), t))), t, y), names, LAYOUTS


def nnx():
    import jax
    import jax.numpy as jnp
    from flax import nnx

    class Block(nnx.Module):
        def __init__(self, rngs):
            self.ln1, self.ln2 = nnx.LayerNorm(16, rngs=rngs), nnx.LayerNorm(16, rngs=rngs)
            self.att = nnx.MultiHeadAttention(4, 16, decode=False, rngs=rngs)
            self.w1, self.w2 = nnx.Linear(16, 32, rngs=rngs), nnx.Linear(32, 16, rngs=rngs)

        def __call__(self, x):
            x = x + self.att(self.ln1(x), mask=nnx.make_causal_mask(jnp.ones(x.shape[:2])))
            return x + self.w2(nnx.relu(self.w1(self.ln2(x))))

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.emb, self.block = nnx.Embed(24, 16, rngs=rngs), Block(rngs)
            self.out = nnx.Linear(16, 24, use_bias=False, rngs=rngs)

        def __call__(self, t):
            return self.out(self.block(self.emb(t)))

    graph, shapes = nnx.split(nnx.eval_shape(lambda: Model(nnx.Rngs(0))))
    state = drawn(shapes)

    def loss(state, t, y):
        logs = jax.nn.log_softmax(nnx.merge(graph, state)(t))
        return -(logs * jax.nn.one_hot(y, 24)).sum(-1).mean()

    names = {
        "t": "batch length",
        "*.att.query.kernel*": "d_model heads head_dim",
        "*.w1.kernel*": "d_model d_ff",
    }
    return loss, (state, tokens(4, 8), tokens(4, 8)), names, LAYOUTS


def equinox():
    import equinox as eqx
    import jax
    import jax.numpy as jnp

    class Block(eqx.Module):
        att: eqx.nn.MultiheadAttention
        ln1: eqx.nn.LayerNorm
        ln2: eqx.nn.LayerNorm
        mlp: eqx.nn.MLP

        def __init__(self, key):
            a, b = jax.random.split(key)
            self.att = eqx.nn.MultiheadAttention(4, 16, key=a)
            self.mlp = eqx.nn.MLP(16, 16, 32, 1, activation=jax.nn.silu, key=b)
            self.ln1, self.ln2 = eqx.nn.LayerNorm(16), eqx.nn.LayerNorm(16)

        def __call__(self, x):
            h = jax.vmap(self.ln1)(x)
            x = x + self.att(h, h, h, mask=jnp.tril(jnp.ones((x.shape[0], x.shape[0]), bool)))
            return x + jax.vmap(self.mlp)(jax.vmap(self.ln2)(x))

    class Model(eqx.Module):
        emb: eqx.nn.Embedding
        block: Block
        out: eqx.nn.Linear

        def __init__(self, key):
            a, b, c = jax.random.split(key, 3)
            self.emb, self.block = eqx.nn.Embedding(24, 16, key=a), Block(b)
            self.out = eqx.nn.Linear(16, 24, key=c)

        def __call__(self, t):
            return jax.vmap(self.out)(self.block(jax.vmap(self.emb)(t)))

    def loss(model, t, y):  # the model itself, with its functions, is an argument
        logs = jax.nn.log_softmax(jax.vmap(model)(t))
        return -jnp.take_along_axis(logs, y[..., None], -1).mean()

    names = {
        "t": "batch length",
        "*.mlp.layers.0.weight": "d_ff d_model",
        "*.query_proj.weight": "(heads head_dim) d_model",
    }
    return loss, (Model(jax.random.key(0)), tokens(4, 8), tokens(4, 8)), names, LAYOUTS


def haliax():
    import equinox as eqx
    import haliax as hax
    import haliax.nn as hnn
    import jax

    sizes = {"batch": 4, "position": 8, "embed": 16, "heads": 4, "head_size": 4, "vocab": 24, "mlp": 32, "layers": 2}
    batch, position, embed, heads, head_size, vocab, mlp, layers = (hax.Axis(n, s) for n, s in sizes.items())

    class Block(eqx.Module):
        q: hnn.Linear
        k: hnn.Linear
        v: hnn.Linear
        o: hnn.Linear
        up: hnn.Linear
        down: hnn.Linear
        ln1: hnn.LayerNorm
        ln2: hnn.LayerNorm

        @staticmethod
        def init(key):
            keys = jax.random.split(key, 6)
            linear = [hnn.Linear.init(embed, (heads, head_size), key=key, use_bias=False) for key in keys[:3]]
            linear.append(hnn.Linear.init((heads, head_size), embed, key=keys[3], use_bias=False))
            linear += [hnn.Linear.init(embed, mlp, key=keys[4]), hnn.Linear.init(mlp, embed, key=keys[5])]
            return Block(*linear, hnn.LayerNorm.init(embed), hnn.LayerNorm.init(embed))

        def __call__(self, x):
            h, keys = self.ln1(x), {"position": "key_position"}
            q, k, v = self.q(h), self.k(h).rename(keys), self.v(h).rename(keys)
            mask = hax.nn.attention.causal_mask(position, position.alias("key_position"))
            x = x + self.o(hax.nn.attention.dot_product_attention("key_position", "head_size", q, k, v, mask=mask))
            return x + self.down(hnn.gelu(self.up(self.ln2(x))))

    class Model(eqx.Module):
        emb: hnn.Embedding
        layers: hnn.Stacked

        def __call__(self, t):
            return hax.dot(self.layers.fold(self.emb(t)), self.emb.weight, axis=embed)

    def made():
        keys = jax.random.split(jax.random.key(1), 2)
        stacked = hnn.Stacked.init(layers, Block, gradient_checkpointing=True)(key=keys)
        return Model(hnn.Embedding.init(vocab, embed, key=jax.random.key(0)), stacked)

    shapes, static = eqx.partition(eqx.filter_eval_shape(made), lambda x: isinstance(x, jax.ShapeDtypeStruct))
    params = drawn(shapes)

    def loss(params, t, y):
        logits = eqx.combine(params, static)(hax.named(t, (batch, position)))
        hot = hnn.one_hot(hax.named(y, (batch, position)), vocab)
        return hnn.cross_entropy_loss(logits, vocab, hot, reduction=hax.mean).scalar()

    layouts = [
        ("data:2;model:2", "batch:data;heads:model;mlp:model"),
        ("fsdp:4", "batch:fsdp;embed:fsdp?"),
        ("seq:2;model:2", "position:seq;heads:model"),
    ]
    # The parameters bear the names of their axes.
    return loss, (params, tokens(4, 8), tokens(4, 8)), {"t": "batch position"}, layouts


LIBRARIES = {
    "linen": (("flax",), linen),
    "nnx": (("flax",), nnx),
    "equinox": (("equinox",), equinox),
    "haliax": (("haliax",), haliax),
}
