"""Instructions that hold a body: while_loop with a fixed number of trips."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import meshlib as mtf
from meshlib.core.arrays import unwritten
from meshlib.core.engine import Engine
from meshlib.program.checker import check_program
from meshlib.program.instructions import Compute, Loop
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
        d, n, e = mtf.Dimension("d", 1000), mtf.Dimension("n", 100), mtf.Dimension("e", 1000)
        x, w = mtf.input("x", [n, d]), mtf.input("w", [d, e])
        turned = lambda v: mtf.rename_dimension(mtf.einsum([v, w], [n, e]), "e", "d")  # noqa: E731
        (y,) = mtf.while_loop(2, turned, [x])
    memory = mtf.lower({"y": y}).memory
    # x, w, what is carried, and the product, which is not written over what it reads.
    assert memory.peak_bytes == (100 * 1000 + 1000 * 1000 + 2 * 100 * 1000) * 4
    assert "while_loop" in memory.at


def test_a_loop_writes_over_what_it_carries() -> None:
    with mtf.Graph():
        d = mtf.Dimension("d", 1000)
        x = mtf.input("x", [d])
        (y,) = mtf.while_loop(2, lambda v: mtf.sin(v) + mtf.reduce_max(v), [x])
    memory = mtf.lower({"y": y}).memory
    assert 2 * 4000 <= memory.peak_bytes <= 2 * 4000 + 64  # x, and what is carried, over which each trip writes
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
    number, loop = next((n, i) for n, i in enumerate(program.instructions) if isinstance(i, Loop))
    kept = [i for i in loop.body.instructions if i.opcode != "all_gather"]
    broken = list(program.instructions)
    broken[number] = replace(loop, body=loop.body.with_instructions(kept))
    with pytest.raises(mtf.ProgramError, match="is never computed"):
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

    class Forgetful(FastExecutor):
        def bound(self, i):
            run = super().bound(i)
            if not isinstance(i, Compute) or i.opcode != missing:
                return run
            return lambda inputs, context: [unwritten(y) for y in run(inputs, context)]

    for missing in ("", "sin"):
        outputs, _ = Forgetful(program).step({}, {"x": np.ones(16, np.float32)}, Engine(0, 0, False, in_order=False))
        wanted = np.nan if missing else np.exp(2 * np.sin(1))
        np.testing.assert_allclose(outputs["y"], np.full(16, wanted), rtol=1e-6)


@pytest.mark.parametrize("executor", ["exact", "fast"])
@pytest.mark.parametrize(("mesh", "layout"), [("m:1", ""), ("m:4", "d:m"), ("m:2;n:2", "time:m;d:n")])
def test_what_a_body_makes_of_outer_tensors_is_made_in_every_trip(mesh: str, layout: str, executor: str) -> None:
    """A mask is drawn for each trip, as it is where x comes in by slices."""
    time, c = mtf.Dimension("time", 6), mtf.Dimension("d", 64)
    with mtf.Graph():
        x, xs = mtf.input("x", [c]), mtf.input("xs", [time, c])
        with mtf.scope("a"):
            _, (y,) = mtf.scan(lambda _, s: ([], [mtf.dropout(x, True, 0.5)]), [], [xs], time)
        with mtf.scope("a"):
            _, (z,) = mtf.scan(lambda _, s: ([], [mtf.dropout(s[0], True, 0.5)]), [], [xs], time)
        program = mtf.lower({"y": y, "z": z}, mesh=mesh, layout=layout)
    made = mtf.simulate(program, seed=3, executor=executor).step(x=np.ones(64), xs=np.ones((6, 64)))
    for name in ("y", "z"):
        kept = made[name] != 0
        assert 0.3 < kept.mean() < 0.7
        assert len({row.tobytes() for row in kept}) == 6
    with mtf.Graph():
        x = mtf.input("x", [c])
        (y,) = mtf.while_loop(2, lambda v: v + mtf.exp(x) * 2.0, [x])
    loop = y.operation.loop
    assert loop is not None
    assert [op.opdef.name for op in y.operation.graph.operations] == ["input", "scan"]
    assert [op.opdef.name for op in loop.body.operations].count("constant") == 1


def looped_from_outside(name: str) -> tuple[dict[str, mtf.Tensor], list[mtf.Tensor]]:
    """Inner loops whose operands all come from outside the outer one, but whose bodies need not."""
    x, z = mtf.input("x", [B], "float64"), mtf.input("z", [B], "float64")
    rows = mtf.input("rows", [W, B], "float64")
    if name == "alone":
        (y,) = mtf.while_loop(3, lambda v: v + mtf.while_loop(2, lambda u: u * 2.0, [z])[0], [x])
    elif name == "takes a carry":
        (y,) = mtf.while_loop(3, lambda v: mtf.sin(mtf.while_loop(2, lambda u: u * v, [z])[0]), [x])
    elif name == "takes a slice":

        def body(carries: tuple[mtf.Tensor, ...], slices: tuple[mtf.Tensor, ...]) -> tuple[list, list]:
            (inner,), (steps,) = mtf.scan(lambda c, s: ([c[0] * slices[0] + s[0]], [c[0] * z]), [z], [rows], W)
            return [mtf.tanh(carries[0] + inner)], [mtf.reduce_sum(steps)]

        (y,), (sums,) = mtf.scan(body, [x], [rows], W)
        return {"y": y + mtf.reduce_sum(sums)}, [x, z, rows]
    else:  # three deep, from the outermost graph
        (y,) = mtf.while_loop(
            2,
            lambda v: v + mtf.while_loop(2, lambda u: mtf.sin(mtf.while_loop(2, lambda t: t * z + u, [x])[0]), [z])[0],
            [x],
        )
    return {"y": y}, [x, z, rows]


def by_hand(name: str, x: np.ndarray, z: np.ndarray, rows: np.ndarray) -> np.ndarray:
    y = x
    if name == "alone":
        return x + 3 * 4 * z
    if name == "takes a carry":
        for _ in range(3):
            y = np.sin(z * y * y)
        return y
    if name == "takes a slice":
        total = 0.0
        for part in rows:
            inner = z
            for row in rows:
                total += np.sum(inner * z)
                inner = inner * part + row
            y = np.tanh(y + inner)
        return y + total
    for _ in range(2):
        u = z
        for _ in range(2):
            t = x
            for _ in range(2):
                t = t * z + u
            u = np.sin(t)
        y = y + u
    return y


@pytest.mark.parametrize(("mesh", "layout"), [("m:1", ""), ("m:4", "batch:m"), ("m:2;n:2", "batch:m;d:n")])
@pytest.mark.parametrize("name", ["alone", "takes a carry", "takes a slice", "three deep"])
def test_inner_loops_that_start_from_outer_values(name: str, mesh: str, layout: str) -> None:
    rng = np.random.default_rng(6)
    feeds = {"x": rng.normal(size=8), "z": rng.normal(size=8), "rows": 0.3 * rng.normal(size=(16, 8))}
    with mtf.Graph():
        outputs, wrt = looped_from_outside(name)
        grads = mtf.gradients(list(outputs.values()), wrt)
        used = mtf.add_n([mtf.reduce_sum(v) for v in wrt])
        found = {v.name: g for v, g in zip(wrt, grads, strict=True) if g is not None}
        program = mtf.lower({**outputs, **found, "used": used}, mesh=mesh, layout=layout)
    directions = {n: rng.normal(size=v.shape) for n, v in feeds.items()}
    above, below = (
        by_hand(name, **{n: v + way * directions[n] for n, v in feeds.items()}).sum() for way in (1e-6, -1e-6)
    )
    for executor in ("exact", "fast"):
        made = mtf.simulate(program, executor=executor).step(feeds)
        np.testing.assert_allclose(made["y"], by_hand(name, **feeds), rtol=1e-10)
        slope = sum(np.sum(made[n] * directions[n]) for n in found)
        np.testing.assert_allclose(slope, (above - below) / 2e-6, rtol=1e-6)


def test_variables_in_a_loop_follow_the_rules_of_variables() -> None:
    """Neither what a loop takes of a variable nor a slice of one is an activation."""
    layers = mtf.Dimension("layers", 2)
    rules = "activations/d:m;activations/d_out:m;variables/d:m;variables/d_out:n;variables/layers:m?"
    with mtf.Graph():
        x = mtf.input("x", [B])
        w, stack = mtf.variable("w", [W, OUT]), mtf.variable("stack", [layers, W, OUT])

        def body(carries: tuple[mtf.Tensor, ...], slices: tuple[mtf.Tensor, ...]) -> tuple[list, list]:
            return [carries[0] + mtf.reduce_sum(slices[0]) + mtf.reduce_sum(w)], []

        (y,), _ = mtf.scan(body, [x], [stack], layers)
        (dx,) = mtf.gradients([mtf.reduce_sum(y)], [x])  # whose loop takes the weights, and needs none
        wanted = {"y": y, "dx": dx}
        assert mtf.check(wanted, mesh="m:2;n:2", layout=rules).ok
        programs = [mtf.lower(wanted, mesh="m:2;n:2", layout=text, precision="highest") for text in (rules, "")]
        with pytest.raises(mtf.LayoutError) as bad:
            mtf.lower({"y": y}, mesh="m:2;n:2", layout="variables/d:m;variables/d_out:m")
    assert str(programs[0].variables["w"]) == "f32[d:16@m, d_out:16@n]"
    split, whole = (mtf.simulate(p, seed=1).step(x=np.ones(8)) for p in programs)
    for name, value in whole.items():
        np.testing.assert_allclose(split[name], value, rtol=1e-4)
    assert "'w'" in str(bad.value)
    assert "outer" not in str(bad.value)  # told once, of the variable


def test_a_tensor_of_a_body_is_no_output() -> None:
    leaked = []
    with mtf.Graph():
        x = mtf.input("x", [mtf.Dimension("d", 2)])
        y = mtf.while_loop(2, lambda c: leaked.append(mtf.tanh(c, name="inner")) or c * 2.0, [x])[0]
        leaked.append(leaked[0] + y)
    for t in leaked:
        with pytest.raises(mtf.GraphError, match=r"\(test_loops.py:\d+\) belongs to the body of a loop"):
            mtf.lower({"y": y, "leaked": t})
