"""Models in plain JAX beyond Transformers: convolutions, recurrent states, graphs; and one with caps and windows."""

from __future__ import annotations

import numpy as np

from tests.jax.importing.models import tokens, weights


def loss_of(logits, y):
    import jax
    import jax.numpy as jnp

    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), y[..., None], -1))


def plain_resnet():
    import jax
    import jax.numpy as jnp
    from jax import lax

    def conv(x, w, stride=1):
        return lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def norm(x, p):
        mean, var = x.mean((0, 1, 2)), x.var((0, 1, 2))
        return (x - mean) * lax.rsqrt(var + 1e-5) * p["scale"] + p["bias"], (mean, var)

    def loss(params, images, labels):
        x, first = norm(conv(images, params["stem"], 2), params["n0"])
        x = lax.reduce_window(jax.nn.relu(x), -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
        h = jax.nn.relu(norm(conv(x, params["c1"], 2), params["n1"])[0])
        h, _ = norm(conv(h, params["c2"]), params["n2"])
        x = jax.nn.relu(h + conv(x, params["skip"], 2))
        return loss_of(x.mean((1, 2)) @ params["head"], labels), first

    norms = {f"n{n}": {"scale": 1 + weights(c), "bias": weights(c)} for n, c in enumerate((8, 16, 16))}
    convs = {"stem": weights(5, 5, 3, 8), "c1": weights(3, 3, 8, 16), "c2": weights(3, 3, 16, 16)}
    params = {**norms, **convs, "skip": weights(1, 1, 8, 16), "head": weights(16, 10)}
    layouts = [("data:2", "batch:data"), ("data:4", "batch:data"), ("data:2;model:2", "batch:data;features:model")]
    return loss, (params, weights(4, 16, 16, 3), tokens(4, below=10)), {
        "images": "batch rows columns _", "params.c1": "_ _ _ features"
    }, layouts  # fmt: skip


def plain_state_space():
    """A selective state space, as in Mamba: a causal convolution by shifts, a scan over time."""
    import jax
    import jax.numpy as jnp
    from jax import lax

    def loss(params, x):
        batch, length, _ = x.shape
        u, gate = jnp.split(x @ params["up"], 2, -1)
        padded = jnp.pad(u, ((0, 0), (3, 0), (0, 0)))
        u = jax.nn.silu(sum(padded[:, n : n + length] * params["taps"][n] for n in range(4)))
        step = jax.nn.softplus(u @ params["step"])
        decay = jnp.exp(step[..., None] * -jnp.exp(params["a"]))
        given = step[..., None] * (u @ params["b"])[:, :, None] * u[..., None]
        read = u @ params["c"]

        def trip(h, now):
            h = now[0] * h + now[1]
            return h, (h * now[2][:, None]).sum(-1)

        first = jnp.zeros((batch, u.shape[-1], read.shape[-1]))
        _, y = lax.scan(trip, first, tuple(t.swapaxes(0, 1) for t in (decay, given, read)))
        return jnp.mean(((y.swapaxes(0, 1) + u) * jax.nn.silu(gate) @ params["down"]) ** 2)

    sizes = {
        "up": (16, 64), "taps": (4, 32), "step": (32, 32), "b": (32, 4), "c": (32, 4), "a": (32, 4), "down": (32, 16)
    }  # fmt: skip
    names = {"x": "batch length d_model", "params.down": "d_ff d_model"}
    layouts = [("data:2", "batch:data"), ("fsdp:4", "batch:fsdp;d_model:fsdp?"), ("seq:2", "length:seq")]
    return loss, ({n: weights(*s) for n, s in sizes.items()}, weights(4, 8, 16)), names, layouts


def plain_graph():
    """Messages along edges: sums and softmax by target."""
    import jax
    import jax.numpy as jnp

    def loss(params, nodes, source, target, labels):
        h, count = nodes @ params["in"], nodes.shape[0]
        messages = jax.nn.relu(jnp.concatenate([h[source], h[target]], -1) @ params["m"])
        degree = jax.ops.segment_sum(jnp.ones(source.shape), target, count)
        mean = jax.ops.segment_sum(messages, target, count) / jnp.maximum(degree, 1)[:, None]
        score = jax.nn.leaky_relu((h[source] * h[target]).sum(-1))
        e = jnp.exp(score - jax.ops.segment_max(score, target, count)[target])
        share = e / jax.ops.segment_sum(e, target, count)[target]
        h = h + mean @ params["o"] + jax.ops.segment_sum(share[:, None] * h[source], target, count)
        return loss_of(h @ params["out"], labels)

    params = {"in": weights(5, 16), "m": weights(32, 32), "o": weights(32, 16), "out": weights(16, 3)}
    target = np.concatenate([np.arange(12), tokens(8, below=12)]).astype("int32")
    args = params, weights(12, 5), tokens(20, below=12), target, tokens(12, below=3)
    names = {"nodes": "nodes _", "source": "edges", "target": "edges", "params.m": "_ d_ff"}
    return loss, args, names, [("data:2", "edges:data"), ("data:4", "nodes:data"), ("a:2;b:2", "edges:a;d_ff:b")]


def plain_gemma():
    """Scores with a cap, whole and local attention in turns, in one scan."""
    import jax
    import jax.numpy as jnp
    from jax import lax

    def loss(params, ids, y):
        x = params["table"][ids] * 4.0
        at = jnp.arange(ids.shape[1])
        causal = at[:, None] >= at[None]
        local = causal & (at[:, None] - at[None] < 3)

        def layer(x, given):
            p, is_local = given
            h = x * lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6) * (1 + p["n"])
            q, k, v = (jnp.einsum("bld,dhk->blhk", h, p[n]) for n in "qkv")
            k, v = (jnp.repeat(t, 2, 2) for t in (k, v))
            scores = 20 * jnp.tanh(jnp.einsum("bqhd,bkhd->bhqk", q, k) / 40)
            scores = jnp.where(jnp.where(is_local, local, causal)[None, None], scores, jnp.finfo(x.dtype).min)
            x = x + jnp.einsum("bhqk,bkhd,hdm->bqm", jax.nn.softmax(scores), v, p["o"])
            gate, up = jnp.einsum("bld,cdf->cblf", x, p["up"])
            return x + (jax.nn.gelu(gate) * up) @ p["down"], None

        x, _ = lax.scan(jax.checkpoint(layer), x, (params["layers"], jnp.array([True, False])))
        return loss_of(10 * jnp.tanh(x @ params["table"].T / 10), y)

    sizes = {
        "n": (16,), "q": (16, 4, 4), "k": (16, 2, 4), "v": (16, 2, 4), "o": (4, 4, 16), "up": (2, 16, 32),
        "down": (32, 16),
    }  # fmt: skip
    params = {"table": weights(24, 16), "layers": {n: weights(2, *s) for n, s in sizes.items()}}
    names = {"ids": "batch length", "params.table": "vocab d_model", "params.layers.down": "layers d_ff d_model",
             "params.layers.q": "layers d_model heads head_dim"}  # fmt: skip
    layouts = [
        ("data:2;model:2", "batch:data;heads:model;d_ff:model"),
        ("fsdp:4", "batch:fsdp;d_model:fsdp?"),
        ("seq:2;data:2", "length:seq;batch:data"),
    ]
    return loss, (params, tokens(4, 8), tokens(4, 8)), names, layouts


FURTHER = {f.__name__: f for f in (plain_resnet, plain_state_space, plain_graph, plain_gemma)}
