"""Training on eight JAX devices under many layouts: the collectives that the program has, the weights that it makes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

pytest.importorskip("jax", reason="needs JAX: pip install -e '.[jax]'")

import meshlib as mtf
from tests.effort import some
from tests.jax.lowered import exchanges, in_program, in_text

STEPS = 3
WEIGHTS = 1e-6  # of float32 weights after plain gradient steps, of the largest of each array

MLP = (
    ("rows:2;cols:4", "batch:rows;hidden:cols"),
    ("data:8", "batch:data"),
    ("model:8", "hidden:model"),
    ("data:8", "batch:data;hidden:data?"),
    ("data:2;fsdp:4", "batch:data+fsdp;hidden:fsdp?"),
    ("data:8", "batch:data;slots/hidden:data"),
    ("a:2;b:2;c:2", "batch:c+a;hidden:b;pixels:b?"),
    ("cols:4;rows:2", "hidden:rows+cols;pixels:cols?"),
)


def mlp(optimizer: mtf.optimize.base.Optimizer) -> tuple[dict[str, mtf.Tensor], list[mtf.Operation]]:
    """Three layers with dropout; a batch of 16."""
    batch, pixels, hidden = mtf.Dimension("batch", 16), mtf.Dimension("pixels", 24), mtf.Dimension("hidden", 32)
    classes = mtf.Dimension("classes", 8)
    x = mtf.input("x", [batch, pixels])
    labels = mtf.input("labels", [batch], dtype="int32")
    h = mtf.layers.dense(x, hidden, activation=mtf.tanh, name="first")
    h = mtf.dropout(h, True, rate=0.25)
    logits = mtf.layers.dense(h, classes, name="last")
    losses = mtf.layers.softmax_cross_entropy_with_logits(logits, mtf.one_hot(labels, classes), classes)
    loss = mtf.reduce_mean(losses)
    return {"loss": loss}, optimizer.minimize(loss)


def compared(program: mtf.Program, feeds: Callable[[int], dict[str, np.ndarray]], tolerance: float = WEIGHTS) -> None:
    sim, run = mtf.simulate(program, seed=3), mtf.on_jax(program, seed=3, checked=False)
    assert in_text(run.compiled()) == in_program(program) + exchanges(program)
    for name in sim.state:
        assert np.array_equal(sim.state[name], run.state[name]), name
    for n in range(STEPS):
        wanted, found = sim.step(feeds(n)), run.step(feeds(n))
        assert abs(float(found["loss"]) - float(wanted["loss"])) <= 2e-6 * abs(float(wanted["loss"]))
    assert int(run.state["step"]) == int(sim.state["step"])
    for name in sim.state:
        a, b = (np.asarray(s.state[name], np.float64) for s in (run, sim))
        assert np.abs(a - b).max() <= tolerance * max(1e-3, np.abs(b).max()), name


@pytest.mark.parametrize(("mesh", "layout"), MLP)
def test_mlp(mesh: str, layout: str) -> None:
    rng = np.random.default_rng(0)
    data = [(rng.normal(size=(16, 24)), rng.integers(0, 8, 16)) for _ in range(STEPS)]
    with mtf.Graph():
        outputs, updates = mlp(mtf.optimize.SgdOptimizer(0.3))
    program = mtf.lower(outputs, updates, mesh, layout, precision="highest")
    compared(program, lambda n: {"x": data[n][0], "labels": data[n][1]})


TRANSFORMER = (
    ("data:2;tensor:4", "data+tensor"),
    ("data:8", "data"),
    ("tensor:8", "tensor"),
    ("fsdp:8", "fsdp"),
    ("fsdp:2;tensor:4", "fsdp+tensor"),
    ("data:8", "zero1"),
    ("data:2;tensor:4", "data+sequence"),
    ("data:2;context:4", "data+context"),
)
# scan, remat, optimizer, dropout
WAYS = (
    (True, "full", "sgd", 0.0),
    (False, "none", "sgd", 0.0),
    (False, "full", "sgd", 0.25),
    (True, "matmuls", "adamw", 0.25),
)
ALL = [(mesh, layout, way) for mesh, layout in TRANSFORMER for way in WAYS]


@pytest.mark.parametrize(
    ("mesh", "layout", "way"), some(ALL, [(*TRANSFORMER[4], WAYS[0]), (*TRANSFORMER[6], WAYS[2]), (*TRANSFORMER[7], WAYS[3])])
)
def test_transformer(mesh: str, layout: str, way: tuple[bool, str, str, float]) -> None:
    scan, remat, optimizer, dropout = way
    config = mtf.models.TransformerConfig(
        name="tiny", layers=2, d_model=16, heads=8, head_dim=4, d_ff=32, vocab=32, norm="rms", position="rotary", dropout=dropout
    )
    rng = np.random.default_rng(0)
    text = rng.integers(0, 32, (STEPS, 8, 17))
    with mtf.Graph():
        outputs, updates = mtf.models.train_step(config, 8, 16, optimizer, remat, scan, learning_rate=0.1 if optimizer == "sgd" else 1e-3)
    rules = mtf.models.layout(layout, config, mesh)
    program = mtf.lower(outputs, updates, mesh=mesh, layout=rules, precision="highest")
    # The first steps of Adam follow the signs of gradients, of which tiny ones are rounding.
    tolerance = WEIGHTS if optimizer == "sgd" else 5e-3
    compared(program, lambda n: {"tokens": text[n][:, :-1], "targets": text[n][:, 1:]}, tolerance)
