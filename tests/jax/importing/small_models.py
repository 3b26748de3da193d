"""A table of small models: how to register one, and those from plain JAX and optax."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.jax.importing.models import tokens

LAYOUTS = [("data:2;model:2", "batch:data?;wide:model?"), ("data:4", "batch:data?"), ("model:2", "wide:model?")]
rng = np.random.default_rng(7)


@dataclass(frozen=True)
class Model:
    """A loss of parameters and data, what it needs installed, and names of axes: "batch" and "wide" are split."""

    make: Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]
    names: dict[str, str]
    needs: tuple[str, ...] = ()


MODELS: dict[str, Model] = {}
Made = Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]


def model(needs: str = "", **names: str) -> Callable[[Made], Made]:
    """Register the model that a function makes; `params__w` names the axes of the array `params.w`."""

    def registered(make: Made) -> Made:
        own = {key.replace("__", "."): value for key, value in names.items()}
        MODELS[make.__name__] = Model(make, own, tuple(needs.split()))
        return make

    return registered


def drawn(*shape: int, scale: float = 0.4) -> Any:
    return rng.normal(0, scale, shape).astype(np.float32)


BATCH, D, WIDE = 4, 6, 8
X = drawn(BATCH, D, scale=1)
SEQUENCE = drawn(BATCH, 5, D, scale=1)


def two_layers(*further: tuple[str, tuple[int, ...]]) -> dict[str, Any]:
    return {"w": drawn(D, WIDE), "v": drawn(WIDE, D)} | {name: drawn(*shape) for name, shape in further}


# ---------------------------------------------------------------- plain JAX


@model(x="batch d", params__w="d wide")
def quantised_with_straight_through():
    import jax
    import jax.numpy as jnp

    @jax.custom_vjp
    def through(x):
        return jnp.round(x * 4) / 4

    through.defvjp(lambda x: (through(x), jnp.abs(x) < 1), lambda inside, dy: (jnp.where(inside, dy, 0),))
    return lambda params, x: ((jnp.tanh(through(x) @ through(params["w"])) @ params["v"]) ** 2).sum(), (two_layers(), X)


@model(x="batch d", params__w="d wide")
def domain_adversary():
    import jax
    import jax.numpy as jnp

    @jax.custom_gradient
    def reversed_(x):
        return x, lambda dy: (-0.3 * dy,)

    def loss(params, x):
        h = jnp.tanh(x @ params["w"])
        return (h @ params["v"]).mean() + jax.nn.softplus(reversed_(h) @ params["u"]).mean()

    return loss, (two_layers(("u", (WIDE,))), X)


@model(x="batch d", params__w="d wide")
def spiking_network():
    import jax
    import jax.numpy as jnp

    @jax.custom_jvp
    def spike(v):
        return (v > 0).astype(v.dtype)

    spike.defjvps(lambda dv, _, v: dv / (1 + 10 * jnp.abs(v)) ** 2)

    def loss(params, x):
        def step(v, _):
            v = 0.9 * v + x @ params["w"]
            s = spike(v - 1)
            return v - s, s

        _, spikes = jax.lax.scan(step, jnp.zeros((x.shape[0], WIDE)), None, length=4)
        return ((spikes.mean(0) @ params["v"]) ** 2).mean()

    return loss, (two_layers(), X)


@model(x="batch length d", params__b="states d wide")
def state_space_of_complex_numbers():
    """S5: a diagonal complex state, read back as its real part."""
    import jax
    import jax.numpy as jnp

    def loss(params, x):
        decay = jnp.exp(jax.lax.complex(-jnp.exp(params["log"]), params["turn"]))
        b, c = (jax.lax.complex(params[n][0], params[n][1]) for n in "bc")
        u = x @ b
        states = jax.lax.associative_scan(
            lambda p, q: (p[0] * q[0], q[0] * p[1] + q[1]), (jnp.broadcast_to(decay, u.shape), u), axis=1
        )[1]
        return ((states @ c).real ** 2).mean()

    params = {"log": drawn(WIDE), "turn": drawn(WIDE), "b": drawn(2, D, WIDE), "c": drawn(2, WIDE, D)}
    return loss, (params, SEQUENCE)


@model(x="batch d", params__w="experts d wide")
def experts_by_grouped_products():
    import jax
    import jax.numpy as jnp

    def loss(params, x):
        scores = jax.nn.softmax(x @ params["gate"])
        chosen = jnp.argmax(scores, -1)
        order = jnp.argsort(chosen)
        sizes = jnp.bincount(chosen, length=3)
        h = jnp.tanh(jax.lax.ragged_dot(x[order], params["w"], sizes))
        y = jax.lax.ragged_dot(h, params["v"], sizes) * jnp.take_along_axis(scores, chosen[:, None], -1)[order]
        return (y**2).sum()

    return loss, ({"gate": drawn(D, 3), "w": drawn(3, D, WIDE), "v": drawn(3, WIDE, D)}, X)


@model(x="batch d", params__w="d wide")
def gaussian_process():
    import jax
    import jax.numpy as jnp

    def loss(params, x, y):
        h = jnp.tanh(x @ params["w"])
        k = jnp.exp(-((h[:, None] - h[None]) ** 2).sum(-1)) + 0.1 * jnp.eye(len(x))
        root = jnp.linalg.cholesky(k)
        a = jax.scipy.linalg.solve_triangular(root, y, lower=True)
        return 0.5 * (a**2).sum() + jnp.log(jnp.diagonal(root)).sum()

    return loss, (two_layers(), X, drawn(BATCH))


@model(x="batch d", params__w="d wide")
def kalman_filter():
    import jax
    import jax.numpy as jnp

    def loss(params, x):
        a, c = params["a"], params["w"][:2, :3].T

        def step(held, y):
            m, p = a @ held[0], a @ held[1] @ a.T + 0.1 * jnp.eye(3)
            s = c.T @ p @ c + jnp.eye(2)
            gain = jnp.linalg.solve(s, c.T @ p).T
            error = y[:2] - c.T @ m
            return (m + gain @ error, p - gain @ c.T @ p), error @ jnp.linalg.solve(s, error)

        return jax.lax.scan(step, (jnp.zeros(3), jnp.eye(3)), x)[1].sum()

    return loss, (two_layers(("a", (3, 3))), X)


@model(x="batch d", params__w="d wide")
def contrastive_pairs():
    import jax
    import jax.numpy as jnp

    def loss(params, x, y):
        a, b = (h / jnp.linalg.norm(h, axis=-1, keepdims=True) for h in (x @ params["w"], y @ params["w"]))
        logits = a @ b.T * jnp.exp(params["t"])
        return -(jnp.diagonal(jax.nn.log_softmax(logits)) + jnp.diagonal(jax.nn.log_softmax(logits.T))).mean()

    return loss, (two_layers(("t", ())), X, drawn(BATCH, D))


@model(x="batch d", params__w="d wide")
def learning_to_learn():
    """MAML: a step of gradient descent inside the loss."""
    import jax
    import jax.numpy as jnp

    def inner(params, x):
        return ((jnp.tanh(x @ params["w"]) @ params["v"] - x) ** 2).mean()

    def loss(params, x, y):
        slope = jax.grad(inner)(params, x)
        return inner(jax.tree.map(lambda p, g: p - 0.1 * g, params, slope), y)

    return loss, (two_layers(), X, drawn(BATCH, D))


@model(x="batch length d", params__w="d wide")
def long_convolution():
    """Hyena: a filter as long as the sequence, by FFT."""
    import jax.numpy as jnp

    def loss(params, x):
        u = x @ params["w"]
        size = 2 * x.shape[1]
        filters = params["f"] * jnp.exp(-jnp.arange(x.shape[1])[:, None] / 3)
        y = jnp.fft.irfft(jnp.fft.rfft(u, size, 1) * jnp.fft.rfft(filters, size, 0), size, 1)[:, : x.shape[1]]
        return ((y * u) ** 2).mean()

    return loss, (two_layers(("f", (5, WIDE))), SEQUENCE)


@model(x="batch d", params__w="d wide")
def neural_ode():
    import jax
    import jax.numpy as jnp

    def loss(params, x):
        def slope(y):
            return jnp.tanh(y @ params["w"]) @ params["v"]

        def step(_, y):
            a = slope(y)
            b = slope(y + 0.1 * a)
            c = slope(y + 0.1 * b)
            return y + 0.2 / 6 * (a + 2 * b + 2 * c + slope(y + 0.2 * c))

        return (jax.lax.fori_loop(0, 3, step, x) ** 2).mean()

    return loss, (two_layers(), X)


@model(x="batch length d", params__w="d wide", t="batch length")
def random_field():
    """The likelihood of a chain of labels."""
    import jax
    import jax.numpy as jnp

    def loss(params, x, t):
        scores = jax.nn.relu(x @ params["w"]) @ params["u"]
        given = jnp.take_along_axis(scores, t[..., None], -1)[..., 0].sum(1)
        given += params["m"][t[:, :-1], t[:, 1:]].sum(1)

        def step(a, s):
            return jax.nn.logsumexp(a[:, :, None] + params["m"], axis=1) + s, None

        last, _ = jax.lax.scan(step, scores[:, 0], jnp.moveaxis(scores[:, 1:], 1, 0))
        return (jax.nn.logsumexp(last, -1) - given).mean()

    return loss, (two_layers(("u", (WIDE, 3)), ("m", (3, 3))), SEQUENCE, tokens(BATCH, 5, below=3))


@model(x="batch d", params__w="d wide")
def policy_with_clipped_ratios():
    import jax
    import jax.numpy as jnp

    def loss(params, x, action, before, gain):
        h = jnp.tanh(x @ params["w"])
        new = jnp.take_along_axis(jax.nn.log_softmax(h @ params["v"]), action[:, None], -1)[:, 0]
        ratio = jnp.exp(new - before)
        return -jnp.minimum(ratio * gain, jnp.clip(ratio, 0.8, 1.2) * gain).mean() + ((h @ params["u"]) ** 2).mean()

    return loss, (two_layers(("u", (WIDE,))), X, tokens(BATCH, below=D), drawn(BATCH), drawn(BATCH))


@model(x="batch d", params__w="d wide")
def density_of_a_mixture():
    import jax
    import jax.numpy as jnp

    def loss(params, x, y):
        h = jnp.tanh(x @ params["w"])
        mean, log_scale, weight = jnp.split(h @ params["v"], 3, -1)
        parts = jax.scipy.stats.norm.logpdf(y[:, None], mean, jnp.exp(log_scale)) + jax.nn.log_softmax(weight)
        return -jax.nn.logsumexp(parts, -1).mean()

    return loss, (two_layers(), X, drawn(BATCH))


@model(x="batch d", params__w="half wide")
def coupling_flow():
    import jax.numpy as jnp

    def loss(params, x):
        a, b = jnp.split(x, 2, -1)
        scale, move = jnp.split(jnp.tanh(a @ params["w"]) @ params["v"], 2, -1)
        z = jnp.concatenate([a, b * jnp.exp(scale) + move], -1)
        return (0.5 * (z**2).sum(-1) - scale.sum(-1)).mean()

    return loss, ({"w": drawn(D // 2, WIDE), "v": drawn(WIDE, D)}, X)


@model(x="batch d", params__w="d wide")
def equilibrium_with_an_implicit_gradient():
    import jax
    import jax.numpy as jnp

    def cell(w, x, z):
        return jnp.tanh(x + 0.3 * z @ w)

    @jax.custom_vjp
    def solved(w, x):
        return jax.lax.fori_loop(0, 8, lambda _, z: cell(w, x, z), jnp.zeros_like(x))

    def forward(w, x):
        z = solved(w, x)
        return z, (w, x, z)

    def backward(kept, dz):
        w, x, z = kept
        pull = jax.vjp(cell, w, x, z)[1]
        u = jax.lax.fori_loop(0, 8, lambda _, u: dz + pull(u)[2], dz)
        return pull(u)[:2]

    solved.defvjp(forward, backward)
    return lambda params, x: (solved(params["s"], x @ params["w"]) ** 2).mean(), (two_layers(("s", (WIDE, WIDE))), X)


@model(x="batch length d", params__w="d wide")
def linear_attention():
    import jax
    import jax.numpy as jnp

    def loss(params, x):
        q, k, v = (jax.nn.elu(x @ params["w"]) + 1, jax.nn.elu(x @ params["k"]) + 1, x @ params["w"])
        state = jnp.cumsum(k[..., :, None] * v[..., None, :], axis=1)
        return (
            jnp.einsum("btk,btkv->btv", q, state) / jnp.einsum("btk,btk->bt", q, jnp.cumsum(k, 1))[..., None]
        ).mean()

    return loss, (two_layers(("k", (D, WIDE))), SEQUENCE)


@model(x="batch d", params__w="d wide")
def autoencoder_with_noise_that_is_given():
    import jax.numpy as jnp

    def loss(params, x, noise):
        mean, log_var = jnp.split(x @ params["w"], 2, -1)
        z = mean + jnp.exp(0.5 * log_var) * noise
        return ((z @ params["v"] - x) ** 2).sum() - 0.5 * (1 + log_var - mean**2 - jnp.exp(log_var)).sum()

    return loss, ({"w": drawn(D, 2 * WIDE), "v": drawn(WIDE, D)}, X, drawn(BATCH, WIDE))


@model(x="batch d", params__w="d wide")
def preferences():
    """DPO."""
    import jax
    import jax.numpy as jnp

    def loss(params, x, good, bad):
        logits = jax.nn.log_softmax(jnp.tanh(x @ params["w"]) @ params["v"])
        still = jax.lax.stop_gradient(jax.nn.log_softmax(jnp.tanh(x @ params["w"] * 0.9) @ params["v"]))
        gains = [jnp.take_along_axis(logits - still, y[:, None], -1) for y in (good, bad)]
        return -jax.nn.log_sigmoid(gains[0] - gains[1]).mean()

    return loss, (two_layers(), X, tokens(BATCH, below=D), tokens(BATCH, below=D))
