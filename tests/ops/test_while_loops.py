"""Loops that a condition ends: values, layouts, executors, verification, JAX, memory; what they refuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import meshlib as mtf
from meshlib.core.graph import Tensor
from tests.models.common import Array
from tests.oracle import run

B, D, E = mtf.Dimension("batch", 4), mtf.Dimension("d", 8), mtf.Dimension("e", 8)


def newton(most: int = 20) -> dict[str, Tensor]:
    """Square roots by Newton's steps until all of a batch are near; and how many steps that took."""
    a = mtf.input("a", [B, D])

    def going(n: Tensor, x: Tensor) -> Tensor:
        return mtf.greater(mtf.reduce_max(mtf.abs(x * x - a)), 1e-3)

    def step(n: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return n + 1, (x + a / x) * 0.5, mtf.reduce_sum(x, output_shape=[B])

    n, x, total = mtf.while_loop(
        going, step, [mtf.constant(0, dtype="int32"), mtf.ones([B, D])], has_accumulators=True, most_trips=most
    )
    return {"n": n, "x": x, "total": total}


def by_hand(a: Array, most: int = 20) -> dict[str, Any]:
    n, x, total = 0, np.ones_like(a), np.zeros(len(a))
    while n < most and np.abs(x * x - a).max() > 1e-3:
        total += x.sum(axis=1)
        n, x = n + 1, (x + a / x) / 2
    return {"n": n, "x": x, "total": total}


LAYOUTS = [("p:1", ""), ("p:2;q:2", "batch:p;d:q"), ("p:4", "batch:p")]


def lowered(mesh: str, layout: str, most: int = 20) -> mtf.Program:
    with mtf.Graph():
        return mtf.lower(newton(most), mesh=mesh, layout=layout, precision="highest")


@pytest.mark.parametrize("executor", ["fast", "exact"])
@pytest.mark.parametrize(("mesh", "layout"), LAYOUTS)
def test_trips_end_with_the_condition(mesh: str, layout: str, executor: str) -> None:
    sim = mtf.simulate(lowered(mesh, layout), executor=executor)
    for scale in (1.0, 50.0, 4000.0):  # ever more trips
        a = scale * np.random.default_rng(0).uniform(0.5, 2, (4, 8))
        found, wanted = sim.step(a=a), by_hand(a)
        assert found["n"] == wanted["n"]
        for name in ("x", "total"):
            np.testing.assert_allclose(found[name], wanted[name], rtol=1e-5)
    assert sim.step(a=np.ones((4, 8)))["n"] == 0  # none at all


def test_trips_end_at_the_bound() -> None:
    a = 1e4 * np.ones((4, 8))
    (out,) = run(lowered("p:2", "batch:p", most=3), {"a": a})
    assert out["n"] == 3
    np.testing.assert_allclose(out["x"], by_hand(a, 3)["x"], rtol=1e-5)


def test_what_it_costs_is_that_of_the_bound() -> None:
    most, few = lowered("p:4", "batch:p", 20), lowered("p:4", "batch:p", 10)
    assert "at most 20 trips" in str(most)
    assert most.memory.peak_bytes == few.memory.peak_bytes
    (inside,) = (c for c in most.collectives if c.count > 1)  # the condition's maximum, of all devices
    assert (inside.kind, inside.count, inside.payload_bytes) == ("all_reduce", 20, 4)


def test_layouts_are_verified() -> None:
    with mtf.Graph():
        outputs = newton()
        a = np.random.default_rng(0).uniform(3, 30, (4, 8))
        report = mtf.verify(outputs, inputs={"a": a}, layouts=LAYOUTS[1:])
    report.raise_for_failures()


def test_the_same_on_jax() -> None:
    pytest.importorskip("jax")
    a = np.random.default_rng(0).uniform(3, 30, (4, 8)).astype(np.float32)
    found = mtf.on_jax(lowered("p:1", "")).step(a=a)
    wanted = by_hand(a)
    assert found["n"] == wanted["n"]
    np.testing.assert_allclose(found["total"], wanted["total"], rtol=1e-5)


def test_wrong_indices_in_a_trip_are_told_on_jax() -> None:
    pytest.importorskip("jax")
    with mtf.Graph():
        x = mtf.input("x", [D])
        _, total = mtf.while_loop(
            lambda n, total: mtf.less(n, 10),
            lambda n, total: (n + 3, total + mtf.gather(x, n, D)),
            [mtf.constant(0, dtype="int32"), mtf.constant(0.0)],
            most_trips=8,
        )
        program = mtf.lower({"total": total})
    with pytest.raises(mtf.FeedError, match="index 9 is out of range"):
        mtf.on_jax(program).step(x=np.ones(8))
    with pytest.raises(mtf.FeedError, match="index 9 is out of range"):
        mtf.simulate(program).step(x=np.ones(8))


def test_tokens_in_one_program() -> None:
    """A decoder as a loop: it ends when all have drawn the stop token; the cache is a carry, written in place."""
    length, vocab = mtf.Dimension("length", 16), mtf.Dimension("vocab", 8)
    table = np.random.default_rng(2).permutation(8)  # each token is followed by another one
    with mtf.Graph():
        first = mtf.input("first", [B], "int32")
        after = mtf.constant(table.astype(np.int32), [vocab], dtype="int32")

        def going(n: Tensor, token: Tensor, written: Tensor) -> Tensor:
            return mtf.reduce_any(mtf.logical_not(mtf.reduce_any(mtf.equal(written, 3), reduced_dim=length)))

        def step(n: Tensor, token: Tensor, written: Tensor) -> list[Tensor]:
            return [n + 1, mtf.gather(after, token, vocab), mtf.update_slice(written, token, length, n)]

        begin = [mtf.constant(0, dtype="int32"), first, mtf.zeros([B, length], dtype="int32") - 1]
        n, _, written = mtf.while_loop(going, step, begin, most_trips=16)
        program = mtf.lower({"n": n, "written": written}, mesh="p:2", layout="batch:p")
    (out,) = run(program, {"first": np.array([0, 1, 2, 5])})
    rows = []
    for token in (0, 1, 2, 5):
        row = [token]
        while len(row) < 16:
            row.append(int(table[row[-1]]))
        rows.append(row)
    trips = max(row.index(3) if 3 in row else 15 for row in rows) + 1
    assert out["n"] == trips
    np.testing.assert_array_equal(out["written"][:, :trips], np.array(rows)[:, :trips])
    assert (out["written"][:, trips:] == -1).all()


def test_bad_loops() -> None:
    with mtf.Graph():
        x = mtf.input("x", [D])
        with pytest.raises(mtf.GraphError, match="a condition needs most_trips"):
            mtf.while_loop(lambda v: mtf.reduce_any(mtf.less(v, 1.0)), lambda v: v, [x])
        with pytest.raises(mtf.GraphError, match="has no condition, got most_trips=4"):
            mtf.while_loop(3, lambda v: v, [x], most_trips=4)
        with pytest.raises(mtf.ShapeError, match=r"the condition must be bool without dims, got .*mtf.reduce_all"):
            mtf.while_loop(lambda v: mtf.less(v, 1.0), lambda v: v, [x], most_trips=4)
        with pytest.raises(mtf.GraphError, match="at least 1, got 0"):
            mtf.while_loop(lambda v: mtf.reduce_any(mtf.less(v, 1.0)), lambda v: v, [x], most_trips=0)
        (y,) = mtf.while_loop(lambda v: mtf.reduce_any(mtf.less(v, 1.0)), lambda v: v * 2.0, [x], most_trips=4)
        with pytest.raises(mtf.GraphError, match="has no gradient: its number of trips is known only at run time"):
            mtf.gradients([mtf.reduce_sum(y)], [x])
