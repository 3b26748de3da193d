"""Instructions that hold a body: while_loop with a fixed number of trips."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import meshlib as mtf
from meshlib.program.checker import check_program
from meshlib.simulation.engine import Engine
from meshlib.simulation.fast import FastExecutor

B, W = mtf.Dimension("batch", 8), mtf.Dimension("d", 16)
OUT = mtf.Dimension("d_out", 16)
LAYOUTS = (
    ("m:2;n:2", ""),
    ("m:2;n:2", "batch:m;d:n"),
    ("m:4", "d_out:m"),
    ("m:4", "batch:m;d:m?"),
    ("m:2;n:2", "d:m+n"),
)


def recurrence(trips: int = 3, noise: bool = False) -> tuple[mtf.Tensor, mtf.Tensor, mtf.Tensor]:
    """x <- tanh(x w) + 0.5 x, and a running sum, with w from outside; an op on w alone is hoisted."""
    x = mtf.input("x", [B, W])
    w = mtf.variable("w", [W, OUT]) * 0.5

    def body(value: mtf.Tensor, total: mtf.Tensor) -> tuple[mtf.Tensor, mtf.Tensor]:
        y = mtf.rename_dimension(mtf.tanh(mtf.einsum([value, w], [B, OUT])), "d_out", "d") + value * 0.5
        return (mtf.dropout(y, True, keep_prob=0.75) if noise else y), total + mtf.reduce_sum(y)

    y, total = mtf.while_loop(trips, body, [x, mtf.constant(0.0)])
    return x, y, total


def expected(x: np.ndarray, w: np.ndarray, trips: int) -> tuple[np.ndarray, float]:
    total = 0.0
    for _ in range(trips):
        x = np.tanh(x @ (w * 0.5)) + 0.5 * x
        total += x.sum()
    return x, total


@pytest.mark.parametrize("executor", ["exact", "fast"])
@pytest.mark.parametrize(("mesh", "layout"), LAYOUTS)
def test_equals_numpy_under_every_layout(mesh: str, layout: str, executor: str) -> None:
    with mtf.Graph():
        _, y, total = recurrence()
    program = mtf.lower({"y": y, "total": total}, mesh=mesh, layout=layout, precision="highest")
    sim = mtf.simulate(program, seed=5, executor=executor)
    x = np.random.default_rng(0).normal(size=(8, 16))
    result = sim.step(x=x)
    wanted, wanted_total = expected(x, sim.state["w"].astype(float), 3)
    np.testing.assert_allclose(result["y"], wanted, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(result["total"], wanted_total, rtol=1e-5)


def test_random_numbers_differ_by_trip_not_by_layout() -> None:
    x = np.random.default_rng(1).normal(size=(8, 16))
    found = []
    for mesh, layout in LAYOUTS:
        with mtf.Graph():
            _, y, _ = recurrence(noise=True)
        program = mtf.lower({"y": y}, mesh=mesh, layout=layout, precision="highest")
        found.append(mtf.simulate(program, seed=5, executor="exact").step(x=x)["y"])
    for other in found[1:]:
        np.testing.assert_array_equal(other == 0, found[0] == 0)
        np.testing.assert_allclose(other, found[0], rtol=1e-5, atol=1e-6)
    with mtf.Graph():
        start = mtf.constant(0.0, [B])
        draws = mtf.while_loop(2, lambda new, old: (mtf.random_uniform([B]), new), [start, start])
    first, second = mtf.simulate(mtf.lower(draws)).step().values()
    assert not np.array_equal(first, second)


def test_collectives_are_counted_by_trips() -> None:
    with mtf.Graph():
        x = mtf.input("x", [B, W])
        w = mtf.variable("w", [W, OUT])
        (y,) = mtf.while_loop(5, lambda v: mtf.rename_dimension(mtf.einsum([v, w], [B, OUT]), "d_out", "d"), [x])
    program = mtf.lower({"y": y}, mesh="m:4", layout="d_out:m")
    (gather,) = program.collectives  # each trip's result [8, 16 / 4] is made whole again
    assert (gather.kind, gather.count, gather.payload_bytes, gather.sent_bytes) == ("all_gather", 5, 8 * 4 * 4, 384)
    assert program.sent_bytes == 5 * 384


def test_nested_loops() -> None:
    with mtf.Graph():
        x = mtf.input("x", [B])
        y = mtf.input("y", [B])
        outer = mtf.while_loop(3, lambda v: mtf.while_loop(2, lambda u: u + y, [v])[0] * 2.0, [x])
    program = mtf.lower({"z": outer[0]}, mesh="m:2", layout="batch:m")
    for executor in ("exact", "fast"):
        z = mtf.simulate(program, executor=executor).step(x=np.ones(8), y=np.full(8, 2.0))["z"]
        np.testing.assert_array_equal(z, np.full(8, (((1 + 4) * 2 + 4) * 2 + 4) * 2))


def test_a_body_that_ignores_or_passes_on_its_carries() -> None:
    with mtf.Graph():
        x, y = mtf.input("x", [B]), mtf.input("y", [B])
        swapped = mtf.while_loop(3, lambda a, b: (b, a), [x, y])
        constant = mtf.while_loop(2, lambda a: y, [x])
    program = mtf.lower({"a": swapped[0], "b": swapped[1], "c": constant[0]}, mesh="m:2", layout="batch:m")
    for executor in ("exact", "fast"):
        r = mtf.simulate(program, executor=executor).step(x=np.arange(8.0), y=np.arange(8.0, 16.0))
        np.testing.assert_array_equal(r["a"], np.arange(8.0, 16.0))
        np.testing.assert_array_equal(r["b"], np.arange(8.0))
        np.testing.assert_array_equal(r["c"], np.arange(8.0, 16.0))


def test_memory_holds_the_body_on_top() -> None:
    with mtf.Graph():
        d = mtf.Dimension("d", 1000)
        x = mtf.input("x", [d])
        (y,) = mtf.while_loop(2, lambda v: mtf.sin(v) + mtf.reduce_max(v), [x])
    memory = mtf.lower({"y": y}).memory
    assert 3 * 4000 <= memory.peak_bytes <= 3 * 4000 + 64  # x, the result, the body's own result
    assert "while_loop" in memory.at


def test_bad_loops() -> None:
    with mtf.Graph():
        x = mtf.input("x", [B])
        with pytest.raises(mtf.GraphError, match=r"trips must be an integer of at least 1, got 0"):
            mtf.while_loop(0, lambda v: v, [x])
        with pytest.raises(mtf.ShapeError, match=r"body turns x: f32\[batch:8\] into .*bf16"):
            mtf.while_loop(2, lambda v: mtf.cast(v, "bfloat16"), [x])
        with pytest.raises(mtf.GraphError, match=r"body must return 1 tensors"):
            mtf.while_loop(2, lambda v: (v, v), [x])
        (y,) = mtf.while_loop(2, lambda v: v * 2.0, [x])
        with pytest.raises(mtf.ShapeError, match=r"x: f32\[batch:8\] has no dim time:3"):
            mtf.scan(lambda c, s: (c, s), [x], [x], mtf.Dimension("time", 3))
        with pytest.raises(mtf.GraphError, match=r"must return a pair"):
            mtf.scan(lambda c, s: c[0], [x], [], B)
        with pytest.raises(mtf.LayoutError, match=r"8 % 3"):
            mtf.lower({"y": y}, mesh="m:3", layout="batch:m")


def test_the_checker_looks_inside() -> None:
    with mtf.Graph():
        _, y, _ = recurrence()
    program = mtf.lower({"y": y}, mesh="m:4", layout="d_out:m")
    number, loop = next((n, i) for n, i in enumerate(program.instructions) if i.body is not None)
    assert loop.body is not None
    kept = [i for i in loop.body.instructions if i.opcode != "all_gather"]
    broken = list(program.instructions)
    broken[number] = replace(loop, body=loop.body.with_instructions(kept))
    with pytest.raises(mtf.ProgramError, match="is never made"):
        check_program(program.with_instructions(broken), "sabotage")


def test_reverse_is_a_flag() -> None:
    time = mtf.Dimension("time", 2)
    with mtf.Graph(), pytest.raises(mtf.GraphError, match="reverse must be True or False, got str 'no'"):
        mtf.scan(lambda c, s: (c, ()), [mtf.constant(0.0)], [mtf.zeros([time])], time, reverse="no")


def sums_kept_twice(x: mtf.Tensor) -> dict[str, mtf.Tensor]:
    """Running sums, returned twice, and kept for the gradient: one value of the body is stacked three times."""

    def body(c: tuple[mtf.Tensor, ...], s: tuple[mtf.Tensor, ...]) -> tuple[list[mtf.Tensor], list[mtf.Tensor]]:
        y = mtf.tanh(c[0] + s[0])
        return [y], [y, y]

    (last,), (a, b) = mtf.scan(body, [mtf.zeros([W])], [x], B, remat="none")
    (dx,) = mtf.gradients([mtf.reduce_sum(last * last) + mtf.reduce_sum(a) * 2.0], [x])
    assert dx is not None
    return {"a": a, "b": b, "dx": dx}


@pytest.mark.parametrize("executor", ["exact", "fast"])
@pytest.mark.parametrize(("mesh", "layout"), [("m:1", ""), ("m:4", "d:m")])
def test_every_stack_of_a_value_is_filled(mesh: str, layout: str, executor: str) -> None:
    data = np.random.default_rng(2).normal(size=(8, 16))
    with mtf.Graph():
        program = mtf.lower(sums_kept_twice(mtf.input("x", [B, W])), mesh=mesh, layout=layout)
    sim = mtf.simulate(program, executor=executor)
    for x in (data, -data):  # the second step must not find what the first left
        made = sim.step(x=x)
        y, total = np.zeros((8, 16)), np.zeros(16)
        for t in range(8):
            y[t] = total = np.tanh(total + x[t])
        dx, above = np.zeros((8, 16)), 2 * y[7]
        for t in reversed(range(8)):
            dx[t] = above = (above + 2) * (1 - y[t] ** 2)
        for name, wanted in {"a": y, "b": y, "dx": dx}.items():
            np.testing.assert_allclose(made[name], wanted, rtol=1e-5, atol=1e-6)


def test_what_a_step_reads_before_it_is_written_is_nan() -> None:
    """The tests run on poisoned buffers: an executor that skips a write shows."""
    with mtf.Graph():
        x = mtf.input("x", [W])
        program = mtf.lower({"y": mtf.exp(mtf.sin(x) * 2.0)})
    executor = FastExecutor(program)
    for missing in ("", "sin"):
        executor.nodes[:] = [n for n in executor.nodes if n.instruction.opcode != missing]
        outputs, _ = executor.run({}, {"x": np.ones(16, np.float32)}, Engine(0, 0, highest=False, in_order=False))
        wanted = np.nan if missing else np.exp(2 * np.sin(1))
        np.testing.assert_allclose(outputs["y"], np.full(16, wanted), rtol=1e-6)
