"""Variables made in the body of a scan: one of each for all trips, or one per trip, stacked."""

from __future__ import annotations

import numpy as np
import pytest

import meshlib as mtf
from meshlib.core import initializers

LAYERS, BATCH = mtf.Dimension("layers", 3), mtf.Dimension("batch", 2)
A, B = mtf.Dimension("a", 4), mtf.Dimension("b", 6)


def network(scanned: bool) -> tuple[mtf.Tensor, list[mtf.Operation]]:
    """tanh(x W + c) U, three times, and a step of gradient descent."""
    x = mtf.input("x", [BATCH, A])

    def layer(x: mtf.Tensor) -> mtf.Tensor:
        with mtf.scope("inner"):
            w = mtf.variable("w", [A, B], initializers.scaled_normal(A))
        c = mtf.variable("c", [B], initializers.random_normal())
        u = mtf.variable("u", [B, A], initializers.scaled_normal(B), activation_dtype="float32")
        h = mtf.tanh(mtf.einsum([x, w], output_shape=[BATCH, B]) + c)
        return x + mtf.einsum([h, u], output_shape=[BATCH, A])

    if scanned:
        with mtf.scope("model"):
            (y,), _ = mtf.scan(lambda carry, _: ((layer(carry[0]),), ()), [x], dim=LAYERS, stack_variables=True)
    else:
        y = x
        for n in range(LAYERS.size):
            with mtf.scope(f"model/{n}"):
                y = layer(y)
    loss = mtf.reduce_sum(mtf.square(y))
    return loss, mtf.optimize.SgdOptimizer(0.1).minimize(loss)


def lowered(scanned: bool, **where: str) -> mtf.Program:
    with mtf.Graph():
        loss, updates = network(scanned)
        return mtf.lower({"loss": loss}, updates, precision="highest", **where)


def test_stacked_variables_have_the_dim_of_the_loop_first():
    shapes = {name: str(slot.tensor.shape) for name, slot in lowered(True).variables.items()}
    assert shapes == {
        "model/inner/w": "[layers:3, a:4, b:6]",
        "model/c": "[layers:3, b:6]",
        "model/u": "[layers:3, b:6, a:4]",
    }


@pytest.mark.parametrize("where", [{}, {"mesh": "p:2;q:2", "layout": "batch:p;variables/a:q;b:q?"}])
def test_a_scan_of_stacked_variables_is_the_unrolled_loop(where):
    x = np.random.default_rng(0).normal(size=(2, 4)).astype(np.float32)
    scanned = mtf.simulate(lowered(True, **where), executor="exact")
    unrolled = mtf.simulate(lowered(False))
    for n in range(LAYERS.size):
        for name in ("inner/w", "c", "u"):
            unrolled.state[f"model/{n}/{name}"] = scanned.state[f"model/{name}"][n]
    for _ in range(2):
        found, wanted = scanned.step(x=x), unrolled.step(x=x)
        np.testing.assert_allclose(found["loss"], wanted["loss"], rtol=1e-5)
    for name in ("inner/w", "c", "u"):
        stacked = np.stack([unrolled.state[f"model/{n}/{name}"] for n in range(LAYERS.size)])
        np.testing.assert_allclose(scanned.state[f"model/{name}"], stacked, rtol=1e-4, atol=1e-6)


def test_each_trip_starts_with_values_of_its_own_of_the_same_law():
    with mtf.Graph():
        x = mtf.input("x", [mtf.Dimension("in", 400)])

        def body(carry, _):
            w = mtf.variable("w", [mtf.Dimension("in", 400), mtf.Dimension("out", 400)])
            return carry, (mtf.einsum([x, w]),)

        _, (y,) = mtf.scan(body, [mtf.constant(0.0)], dim=mtf.Dimension("layers", 2), stack_variables=True)
        sim = mtf.simulate(mtf.lower({"y": y}))
    w = sim.state["w"]
    assert w.shape == (2, 400, 400)
    assert abs(np.corrcoef(w[0].ravel(), w[1].ravel())[0, 1]) < 0.02
    for values in w:
        assert values.std() == pytest.approx(np.sqrt(2 / 800), rel=0.02)


def test_without_stacking_all_trips_share_a_variable():
    with mtf.Graph() as graph:
        x = mtf.input("x", [A])
        mtf.scan(lambda c, _: ((c[0] * mtf.variable("w", [A]),), ()), [x], dim=LAYERS)
    assert str(graph.variables["w"].output.shape) == "[a:4]"


def test_loops_that_both_stack_put_the_outer_dim_first():
    outer = mtf.Dimension("outer", 2)
    with mtf.Graph() as graph:
        x = mtf.input("x", [A])

        def inner(c, _):
            return (c[0] + mtf.variable("w", [A], initializers.random_normal()),), ()

        def body(c, _):
            return mtf.scan(inner, c, dim=LAYERS, stack_variables=True)[0], ()

        (y,), _ = mtf.scan(body, [x], dim=outer, stack_variables=True)
        assert str(graph.variables["w"].output.shape) == "[outer:2, layers:3, a:4]"
        sim = mtf.simulate(mtf.lower({"y": y}))
    found = sim.step(x=np.zeros(4))["y"]
    np.testing.assert_allclose(found, sim.state["w"].sum(axis=(0, 1)), rtol=1e-5)


def test_a_variable_with_the_dim_of_the_loop_is_refused():
    with mtf.Graph(), pytest.raises(mtf.ShapeError, match="'w' has the dim layers:3 of the loop"):
        mtf.scan(
            lambda c, _: (c, (mtf.variable("w", [LAYERS]),)), [mtf.constant(0.0)], dim=LAYERS, stack_variables=True
        )
