"""Small models whose loss contains a step of an optax optimizer, or one of its losses."""

from __future__ import annotations

from typing import Any

from tests.jax.importing.models import tokens
from tests.jax.importing.small_models import BATCH, MODELS, SEQUENCE, Model, X, drawn, model, two_layers

NAMES = {"x": "batch d", "params.w": "d wide"}


def _step(make: Any) -> Any:
    """The loss after one step of an optimizer, so that a gradient passes through all that it does."""

    def made() -> Any:
        import jax
        import jax.numpy as jnp
        import optax

        rule = make(optax)

        def inner(params: Any, x: Any) -> Any:
            return ((jnp.tanh(x @ params["w"]) @ params["v"] - x) ** 2).mean()

        def loss(params: Any, x: Any) -> Any:
            updates, _ = rule.update(jax.grad(inner)(params, x), rule.init(params), params)
            return inner(optax.apply_updates(params, updates), x)

        return loss, (two_layers(), X)

    return made


OPTIMIZERS = {
    "sgd": lambda o: o.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": lambda o: o.adam(1e-2, eps=1e-3),
    "adamw": lambda o: o.chain(o.clip_by_global_norm(0.1), o.adamw(1e-2, eps=1e-3)),
    "lamb": lambda o: o.lamb(1e-2, eps=1e-3),
    "rmsprop": lambda o: o.rmsprop(1e-2, eps=1e-3, centered=True),
    "yogi": lambda o: o.yogi(1e-2, eps=1e-3),
    "adabelief": lambda o: o.adabelief(1e-2, eps=1e-3),
    "novograd": lambda o: o.novograd(1e-2),
}
MODELS.update({f"optax_{n}": Model(_step(make), NAMES, ("optax",)) for n, make in OPTIMIZERS.items()})


@model("optax", x="batch d", params__w="d wide")
def optax_losses():
    import jax.numpy as jnp
    import optax

    def loss(params, x, y, t):
        h = jnp.tanh(x @ params["w"]) @ params["v"]
        return (
            optax.softmax_cross_entropy_with_integer_labels(h, t).mean()
            + optax.huber_loss(h, y).mean()
            + optax.cosine_distance(h, y, epsilon=1e-6).mean()
            + optax.sigmoid_binary_cross_entropy(h, jnp.round(jnp.clip(y, 0, 1))).mean()
            + optax.log_cosh(h, y).mean()
        )

    return loss, (two_layers(), X, drawn(BATCH, X.shape[1]), tokens(BATCH, below=6))


@model("optax", x="batch length d", params__w="d wide")
def optax_alignment():
    """Connectionist temporal classification."""
    import jax.numpy as jnp
    import optax

    def loss(params, x, labels):
        logits = jnp.tanh(x @ params["w"]) @ params["v"]
        none = jnp.zeros(labels.shape)
        return optax.ctc_loss(logits, jnp.zeros(x.shape[:2]), labels, none).mean()

    return loss, (two_layers(), SEQUENCE, 1 + tokens(BATCH, 2, below=5))
