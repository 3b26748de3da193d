"""Small models of modules: Flax (linen and nnx), Equinox, Haliax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.jax.importing.libraries import drawn as filled
from tests.jax.importing.small_models import BATCH, MODELS, SEQUENCE, WIDE, D, Model, X, drawn

IMAGES = drawn(BATCH, 6, 6, 3, scale=1)


def _linen(make: Callable[[Any], Any], x: Any, **names: str) -> Model:
    def made() -> Any:
        import flax.linen as nn
        import jax

        module = make(nn)
        variables = filled(jax.eval_shape(lambda: module.init(jax.random.key(0), x)))

        def loss(variables: Any, x: Any) -> Any:
            y, _ = module.apply(variables, x, mutable=["batch_stats"])
            return sum((leaf**2).mean() for leaf in jax.tree.leaves(y))

        return loss, (variables, x)

    return Model(made, {"x": "batch" + " _" * (np.ndim(x) - 1), **names}, ("flax",))


def _stacked(nn: Any) -> Any:
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return x + nn.Dense(D)(nn.gelu(nn.Dense(WIDE)(nn.RMSNorm()(x)))), None

    class Layers(nn.Module):
        @nn.compact
        def __call__(self, x):
            layer = nn.scan(nn.remat(Layer), variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
            return layer()(x, None)[0]

    return Layers()


WIDE_KERNEL = {"*.layers_0.kernel": "_ wide"}
MODELS.update({
    "linen_perceptron": _linen(lambda nn: nn.Sequential([nn.Dense(WIDE), nn.gelu, nn.Dense(3)]), X, **WIDE_KERNEL),
    "linen_images": _linen(
        lambda nn: nn.Sequential([
            nn.Conv(WIDE, (3, 3)), nn.BatchNorm(use_running_average=False), nn.relu,
            lambda h: nn.max_pool(h, (2, 2), (2, 2)), nn.GroupNorm(2), nn.ConvTranspose(4, (2, 2), strides=(2, 2)),
        ]), IMAGES, **{"*.layers_0.kernel": "_ _ _ wide"},
    ),
    "linen_depthwise": _linen(
        lambda nn: nn.Sequential([nn.Conv(6, (3, 3), feature_group_count=3), nn.swish, nn.Conv(2, (1, 1))]), IMAGES
    ),
    "linen_lstm": _linen(lambda nn: nn.RNN(nn.OptimizedLSTMCell(WIDE)), SEQUENCE),
    "linen_gru_both_ways": _linen(lambda nn: nn.Bidirectional(nn.RNN(nn.GRUCell(4)), nn.RNN(nn.GRUCell(4))), SEQUENCE),
    "linen_attention": _linen(lambda nn: nn.SelfAttention(2, qkv_features=WIDE), SEQUENCE),
    "linen_stacked": _linen(_stacked, SEQUENCE),
    "linen_weight_norm": _linen(lambda nn: nn.WeightNorm(nn.Dense(WIDE)), X),
    "linen_einsum": _linen(lambda nn: nn.Einsum((5, D, WIDE), "btd,tde->bte"), SEQUENCE),
})  # fmt: skip


def _nnx(make: Callable[[Any, Any], Any], x: Any, **names: str) -> Model:
    def made() -> Any:
        import jax
        from flax import nnx

        module = make(nnx, nnx.Rngs(0))
        shape, params, rest = nnx.split(module, nnx.Param, ...)

        def loss(params: Any, rest: Any, x: Any) -> Any:
            y = nnx.merge(shape, params, rest)(x)
            return sum((leaf**2).mean() for leaf in jax.tree.leaves(y))

        return loss, (filled(params), rest, x)

    return Model(made, {"x": "batch" + " _" * (np.ndim(x) - 1), **names}, ("flax",))


def _nnx_stacked(nnx: Any, rngs: Any) -> Any:
    class Layer(nnx.Module):
        def __init__(self, rngs):
            self.up, self.down = nnx.Linear(D, WIDE, rngs=rngs), nnx.Linear(WIDE, D, rngs=rngs)
            self.dropout = nnx.Dropout(0.0, rngs=rngs)

        def __call__(self, x):
            return x + self.dropout(self.down(nnx.silu(self.up(x))))

    class Layers(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.vmap(Layer, in_axes=0, out_axes=0)(rngs.fork(split=3))

        def __call__(self, x):
            return nnx.scan(lambda layer, h: layer(h), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(self.layers, x)

    return Layers(rngs)


MODELS.update(
    {
        "nnx_perceptron": _nnx(
            lambda nnx, r: nnx.Sequential(nnx.Linear(D, WIDE, rngs=r), nnx.gelu, nnx.Linear(WIDE, 3, rngs=r)), X
        ),
        "nnx_images": _nnx(
            lambda nnx, r: nnx.Sequential(
                nnx.Conv(3, WIDE, (3, 3), use_bias=False, rngs=r), nnx.BatchNorm(WIDE, rngs=r), nnx.relu
            ),
            IMAGES,
        ),
        "nnx_attention": _nnx(lambda nnx, r: nnx.MultiHeadAttention(2, D, decode=False, rngs=r), SEQUENCE),
        "nnx_recurrent": _nnx(lambda nnx, r: nnx.RNN(nnx.GRUCell(D, WIDE, rngs=r), rngs=r), SEQUENCE),
        "nnx_low_rank": _nnx(lambda nnx, r: nnx.LoRA(D, 2, WIDE, base_module=nnx.Linear(D, WIDE, rngs=r), rngs=r), X),
        "nnx_stacked": _nnx(_nnx_stacked, X),
    }
)


def _equinox(make: Callable[[Any, Any], Any], x: Any, **names: str) -> Model:
    def made() -> Any:
        import equinox as eqx
        import jax

        arrays, still = eqx.partition(make(eqx, jax.random.key(0)), eqx.is_array)
        module = filled(arrays)

        def loss(module: Any, x: Any) -> Any:
            return (jax.vmap(eqx.combine(module, still))(x) ** 2).mean()

        return loss, (module, x)

    return Model(made, {"x": "batch" + " _" * (np.ndim(x) - 1), **names}, ("equinox",))


def _equinox_loop(eqx: Any, key: Any) -> Any:
    class Loop(eqx.Module):
        cell: Any

        def __call__(self, x):
            import jax
            import jax.numpy as jnp

            start = (jnp.zeros(WIDE), jnp.zeros(WIDE))
            return jax.lax.scan(lambda held, row: (self.cell(row, held), None), start, x)[0][0]

    return Loop(eqx.nn.LSTMCell(D, WIDE, key=key))


def _equinox_attention(eqx: Any, key: Any) -> Any:
    class Attention(eqx.Module):
        inner: Any
        norm: Any

        def __call__(self, x):
            import jax

            h = jax.vmap(self.norm)(x)
            return x + eqx.filter_checkpoint(self.inner)(h, h, h)

    return Attention(eqx.nn.MultiheadAttention(2, D, key=key), eqx.nn.LayerNorm(D))


MODELS.update({
    "equinox_perceptron": _equinox(
        lambda eqx, k: eqx.nn.MLP(D, 3, WIDE, 2, key=k), X, **{"*.layers.0.weight": "wide _"}
    ),
    "equinox_images": _equinox(
        lambda eqx, k: eqx.nn.Sequential([
            eqx.nn.Conv2d(6, WIDE, (3, 1), key=k), eqx.nn.Lambda(lambda h: h / (1 + abs(h))), eqx.nn.AvgPool2d(2),
            eqx.nn.GroupNorm(2, WIDE),
        ]), IMAGES,
    ),
    "equinox_loop": _equinox(_equinox_loop, SEQUENCE),
    "equinox_attention": _equinox(_equinox_attention, SEQUENCE),
    "equinox_embedding": _equinox(
        lambda eqx, k: eqx.nn.Sequential([eqx.nn.Lambda(lambda n: n), eqx.nn.Embedding(9, WIDE, key=k)]),
        np.arange(BATCH, dtype=np.int32),
    ),
})  # fmt: skip


def _haliax(make: Callable[[Any, Any, Any], Any]) -> Model:
    def made() -> Any:
        import haliax as hax
        import jax

        axes = {n: hax.Axis(n, size) for n, size in (("batch", BATCH), ("d", D), ("wide", WIDE), ("layers", 3))}
        init, apply = make(hax, hax.nn, axes)
        module = filled(jax.eval_shape(lambda: init(jax.random.key(0))))
        return lambda module, x: hax.mean(hax.square(apply(module, x))).scalar(), (
            module, hax.named(X, (axes["batch"], axes["d"]))
        )  # fmt: skip

    return Model(made, {}, ("haliax",))


def _haliax_stacked(hax: Any, nn: Any, axes: Any) -> Any:
    import equinox as eqx
    import jax

    class Layer(eqx.Module):
        up: Any
        down: Any

        @staticmethod
        def init(key):
            a, b = jax.random.split(key)
            d, wide = axes["d"], axes["wide"]
            return Layer(nn.Linear.init(d, wide, key=a), nn.Linear.init(wide, d, key=b))

        def __call__(self, x):
            return x + self.down(hax.tanh(self.up(x)))

    stack = nn.Stacked if hasattr(nn, "Stacked") else None

    def init(key: Any) -> Any:
        return stack.init(axes["layers"], Layer, gradient_checkpointing=True)(jax.random.split(key, 3))

    return init, lambda module, x: module.fold(x)


MODELS.update({
    "haliax_perceptron": _haliax(lambda hax, nn, a: (
        lambda k: nn.MLP.init(a["d"], a["wide"].alias("out"), 8, 2, key=k), lambda m, x: m(x)
    )),
    "haliax_norm": _haliax(lambda hax, nn, a: (
        lambda k: (nn.LayerNorm.init(a["d"]), nn.Linear.init(a["d"], a["wide"], key=k)),
        lambda m, x: hax.nn.softmax(m[1](m[0](x)), a["wide"]),
    )),
    "haliax_stacked": _haliax(_haliax_stacked),
})  # fmt: skip
