"""Small models to train, and what to feed them."""

from __future__ import annotations

import numpy as np

import meshlib as mtf

STEPS = 3
Feeds = list[dict[str, np.ndarray]]


def mlp(mesh: str, layout: str, training: bool = True) -> mtf.Program:
    """Two layers with dropout, a batch of 16; plain gradient steps, or the loss alone."""
    batch, pixels, hidden = mtf.Dimension("batch", 16), mtf.Dimension("pixels", 24), mtf.Dimension("hidden", 32)
    classes = mtf.Dimension("classes", 8)
    with mtf.Graph():
        x = mtf.input("x", [batch, pixels])
        labels = mtf.input("labels", [batch], dtype="int32")
        h = mtf.layers.dense(x, hidden, activation=mtf.tanh, name="first")
        logits = mtf.layers.dense(mtf.dropout(h, training, rate=0.25), classes, name="last")
        losses = mtf.layers.softmax_cross_entropy_with_logits(logits, mtf.one_hot(labels, classes), classes)
        loss = mtf.reduce_mean(losses)
        updates = mtf.optimize.SgdOptimizer(0.3).minimize(loss) if training else ()
    return mtf.lower({"loss": loss}, updates, mesh, layout, precision="highest")


def mlp_feeds() -> Feeds:
    rng = np.random.default_rng(0)
    return [{"x": rng.normal(size=(16, 24)), "labels": rng.integers(0, 8, 16)} for _ in range(STEPS)]


def transformer(
    mesh: str, layout: str, scan: bool = True, remat: str = "full", optimizer: str = "sgd", dropout: float = 0.0
) -> mtf.Program:
    """Two layers of a decoder, all in float32."""
    config = mtf.models.TransformerConfig(
        name="tiny",
        layers=2,
        d_model=16,
        heads=8,
        head_dim=4,
        d_ff=32,
        vocab=32,
        norm="rms",
        position="rotary",
        dropout=dropout,
        numerics=mtf.Numerics(activation_dtype="float32"),
    )
    rate = 0.1 if optimizer == "sgd" else 1e-3
    with mtf.Graph():
        outputs, updates = mtf.models.train_step(config, 8, 16, optimizer, remat, scan, learning_rate=rate)
    rules = mtf.models.layout(layout, config, mesh)
    return mtf.lower(outputs, updates, mesh=mesh, layout=rules, precision="highest")


def transformer_feeds() -> Feeds:
    text = np.random.default_rng(0).integers(0, 32, (STEPS, 8, 17))
    return [{"tokens": rows[:, :-1], "targets": rows[:, 1:]} for rows in text]


def pipeline(mesh: str, layout: str, repeats: int = 1) -> mtf.Program:
    """A decoder of four layers in two stages, microbatches laid over them too."""
    config = mtf.models.TransformerConfig(
        name="tiny", layers=4, d_model=16, heads=4, head_dim=4, d_ff=32, vocab=64, position="rotary",
        numerics=mtf.Numerics(),
    )  # fmt: skip
    with mtf.Graph():
        cut = mtf.models.Pipeline(stages=2, microbatches=4, repeats=repeats)
        outputs, updates = mtf.models.train_step(config, 16, 8, "sgd", learning_rate=0.5, pipeline=cut)
    return mtf.lower(outputs, updates, mesh, layout, precision="highest")


def pipeline_by_tasks(mesh: str, layout: str, schedule: str, repeats: int = 1) -> mtf.Program:
    """Layers in two stages whose forwards and backwards run as a schedule says."""
    batch, width = mtf.Dimension("batch", 16), mtf.Dimension("width", 8)
    with mtf.Graph() as graph:
        x = mtf.input("x", [batch, width])
        grads, outputs = mtf.layers.pipeline_training_step(
            {"x": x}, lambda f: mtf.layers.dense(f["x"], width, name="first"),
            lambda h, f: h + mtf.layers.dense(h, width, activation=mtf.tanh, name="stage"),
            lambda h, f: mtf.square(mtf.layers.dense(h, width, name="last") - f["x"]),
            batch, 2, 4, repeats, schedule, remat="none",
        )  # fmt: skip
        updates = mtf.optimize.SgdOptimizer(0.5).apply_grads(grads, graph.trainable_variables)
    return mtf.lower(outputs, updates, mesh, layout, precision="highest")


def pipeline_feeds() -> Feeds:
    text = np.random.default_rng(0).integers(0, 64, (STEPS, 16, 9))
    return [{"tokens": rows[:, :-1], "targets": rows[:, 1:]} for rows in text]
