"""Variables reused by scope: the one that is there, its gradient the sum of all uses; another one is an error."""

from __future__ import annotations

import numpy as np
import pytest

import meshlib as mtf
from tests.oracle import run

B, D, N = mtf.Dimension("batch", 4), mtf.Dimension("d", 6), mtf.Dimension("layers", 3)


def tower(x: mtf.Tensor, name: str, reuse: bool) -> mtf.Tensor:
    with mtf.scope(name, reuse=reuse):
        return mtf.tanh(mtf.layers.dense(x, D))


@pytest.mark.parametrize("layout", ["", "batch:p", "d:p", "d_out:p"])
def test_a_tower_applied_twice_is_one_set_of_variables(layout: str) -> None:
    found = []
    for shared in (True, False):
        with mtf.Graph() as graph:
            x = mtf.input("x", [B, D], "float64")
            y = x
            for n in range(2):
                with mtf.scope("net"):
                    y = tower(y, "tower" if shared else f"tower_{n}", shared and n > 0)
            variables = graph.trainable_variables
            grads = mtf.gradients([mtf.reduce_sum(mtf.square(y))], variables)
            outputs = {"y": y, **{v.name: g for v, g in zip(variables, grads, strict=True)}}
            program = mtf.lower(outputs, mesh="p:2", layout=layout, precision="highest")
        rng = np.random.default_rng(3)
        drawn = {"kernel": rng.normal(size=(6, 6)), "bias": rng.normal(size=6)}
        state = {n: drawn[n.rpartition("/")[2]] for n in graph.variables}
        (out,) = run(program, {"x": rng.normal(size=(4, 6))}, state=state)
        found.append(out)
    one, two = found
    assert list(one) == ["y", "net/tower/dense/kernel", "net/tower/dense/bias"]
    np.testing.assert_array_equal(one["y"], two["y"])
    for part in ("kernel", "bias"):
        both = two[f"net/tower_0/dense/{part}"] + two[f"net/tower_1/dense/{part}"]
        np.testing.assert_allclose(one[f"net/tower/dense/{part}"], both, rtol=1e-6)


def test_reuse_ends_with_its_scope_and_holds_in_scopes_inside() -> None:
    with mtf.Graph() as graph:
        with mtf.scope("a"), mtf.scope("b"):
            w = mtf.variable("w", [D], 1.0, "float32", "bfloat16", trainable=False)
        with mtf.scope("a", reuse=True), mtf.scope("b"):
            again = mtf.variable("w", [D], 2.0, "float32", "bfloat16")
            wide = mtf.variable("w", [D], None, "float32", "bfloat16", "float32")
        assert again is w
        assert (wide.dtype.name, wide.operation.inputs) == ("float32", (w,))
        with mtf.scope("a"), mtf.scope("b"), pytest.raises(mtf.GraphError, match="'a/b/w' is declared twice"):
            mtf.variable("w", [D])
        with mtf.scope("a", reuse=True):  # slots are the optimizer's own
            v = mtf.reduce_sum(mtf.cast(w, "float32") * mtf.variable("b/w", [D], 1.0, "float32", "bfloat16", "float32"))
            mtf.optimize.AdamOptimizer(0.1).minimize(v, [w])
    assert list(graph.variables) == ["a/b/w", "step", "a/b/w/master", "a/b/w/adam_m", "a/b/w/adam_v"]


def test_reuse_in_the_body_of_a_loop() -> None:
    """Of a variable that the loop stacks, and of one that all trips share."""
    with mtf.Graph() as graph:
        x = mtf.input("x", [B, D], "float64")
        with mtf.scope("shared"):
            outer = mtf.variable("w", [D], 1.0, "float64")

        def body(carries: tuple[mtf.Tensor, ...], _: object) -> tuple[list[mtf.Tensor], list[mtf.Tensor]]:
            (h,) = carries
            for n in range(2):
                with mtf.scope("own", reuse=n > 0):
                    h = h * mtf.variable("w", [D], 1.0, "float64")
            with mtf.scope("shared", reuse=True):
                return [h + mtf.variable("w", [D], 1.0, "float64")], []

        (y,), _ = mtf.scan(body, [x], dim=N, stack_variables=True)
        (dw,) = mtf.gradients([mtf.reduce_sum(y)], [outer])
    assert {n: v.output.shape.sizes for n, v in graph.variables.items()} == {"shared/w": (6,), "own/w": (3, 6)}
    rng = np.random.default_rng(4)
    own, shared, fed = rng.normal(size=(3, 6)), rng.normal(size=6), rng.normal(size=(4, 6))
    wanted, slope = fed, np.zeros(6)
    for w in own:
        wanted, slope = wanted * w**2 + shared, slope * w**2 + 1
    for layout in ("", "batch:p", "d:p"):
        program = mtf.lower({"y": y, "dw": dw}, mesh="p:2", layout=layout)
        (out,) = run(program, {"x": fed}, state={"own/w": own, "shared/w": shared})
        np.testing.assert_allclose(out["y"], wanted, rtol=1e-12)
        np.testing.assert_allclose(out["dw"], 4 * slope, rtol=1e-12)


@pytest.mark.parametrize(
    ("declare", "words"),
    [
        (
            lambda: mtf.variable("v", [D]),
            r"variable \(test_reuse.py:\d+\): no variable 'a/v' to reuse; did you mean 'a/w'",
        ),
        (lambda: mtf.variable("w", [B]), r"'a/w' can't be reused as f32\[batch:4\], .*declared at .* as f32\[d:6\]"),
        (lambda: mtf.variable("w", [D], None, "float64"), r"as f64\[d:6\], read as f64: .* as f32\[d:6\], read as f32"),
        (lambda: mtf.variable("w", [D], None, "float32", "bfloat16"), r"can't be reused as bf16\[d:6\], read as f32"),
        (lambda: mtf.scope("b", reuse=1).__enter__(), r"scope 'b' \(test_reuse.py:\d+\): reuse must be True or False"),
    ],
)
def test_another_variable_is_not_reused(declare, words: str) -> None:
    with mtf.Graph():
        with mtf.scope("a"):
            mtf.variable("w", [D])
        with mtf.scope("a", reuse=True), pytest.raises(mtf.GraphError, match=words):
            declare()
