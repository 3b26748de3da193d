"""A pipeline is the same layers without one: values, gradients and updates, in float64 to rounding; what it costs."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest

import meshlib as mtf
from meshlib.estimation import Physics
from tests.effort import deep, some
from tests.estimation.worked.common import ring
from tests.oracle import Layout, assert_close, draw_layout, needed

D = mtf.Dimension
WIDE = mtf.Numerics(variable_dtype="float64", activation_dtype="float64")
BATCH, WIDTH, INNER = D("batch", 24), D("width", 4), D("inner", 6)
Array = np.ndarray[Any, Any]


def layer(x: mtf.Tensor) -> mtf.Tensor:
    """x + tanh(x W + b) U + c"""
    h = mtf.layers.dense(x, INNER, activation=mtf.tanh, numerics=WIDE, name="wi")
    return x + mtf.layers.dense(h, WIDTH, numerics=WIDE, name="wo")


def scanned(x: mtf.Tensor, count: int, remat: str = "full") -> mtf.Tensor:
    """`count` layers."""
    body: Callable[..., Any] = lambda carries, _: ((layer(carries[0]),), ())  # noqa: E731
    (y,), _ = mtf.scan(body, [x], dim=D("layers", count), stack_variables=True, remat=remat)
    return y


def step(apply: Callable[[mtf.Tensor], mtf.Tensor]) -> tuple[dict[str, mtf.Tensor], list[mtf.Operation]]:
    """Loss and one step of AdamW of what `apply` makes of the input."""
    x = mtf.input("x", [BATCH, WIDTH], "float64")
    y = apply(x)
    loss = mtf.reduce_mean(mtf.square(y - 0.3))
    (dx,) = mtf.gradients([loss], [x])
    assert dx is not None
    return {"y": y, "loss": loss, "dx": dx}, mtf.optimize.AdamWOptimizer(0.05).minimize(loss)


def pair(stages: int, microbatches: int, repeats: int, per_stage: int, mesh: str, layout: str, **options: Any) -> Any:
    """The program without a pipeline on one core, and with it."""
    with mtf.Graph():
        plain = mtf.lower(*step(lambda x: scanned(x, per_stage * stages * repeats)), precision="highest")
    with mtf.Graph():
        made = step(
            lambda x: mtf.layers.pipeline(lambda h: scanned(h, per_stage), x, stages, microbatches, repeats, **options)
        )
        return plain, mtf.lower(*made, mesh=mesh, layout=layout, precision="highest")


def assert_equal_steps(plain: mtf.Program, piped: mtf.Program, executor: str, steps: int = 2) -> None:
    """Both from the same state on the same input."""
    reference, sim = mtf.simulate(plain), mtf.simulate(piped, executor=executor)
    for name in reference.state:
        if name != "step":
            np.testing.assert_array_equal(reference.state[name].ravel(), sim.state[name].ravel(), err_msg=name)
    x = np.random.default_rng(0).normal(size=(BATCH.size, WIDTH.size))
    for _ in range(steps):
        wanted, found = reference.step(x=x), sim.step(x=x)
        for name in wanted:
            np.testing.assert_allclose(found[name], wanted[name], rtol=1e-11, atol=1e-12, err_msg=name)
    for name in reference.state:
        wanted_state = reference.state[name].ravel()
        np.testing.assert_allclose(sim.state[name].ravel(), wanted_state, rtol=1e-8, atol=1e-9, err_msg=name)


# stages, microbatches, repeats, mesh, layout
CASES = [
    (2, 4, 1, "pipe:2", "stage:pipe"),
    (2, 4, 2, "pipe:2;data:2", "stage:pipe;batch:data"),
    (4, 1, 1, "pipe:4", "stage:pipe"),
    (4, 6, 1, "pipe:2;data:2", "stage:pipe;batch:data;width:data?"),
    (4, 4, 2, "pipe:4;tensor:2", "stage:pipe;inner:tensor"),
    (4, 3, 2, "pipe:4", "stage:pipe"),
    (2, 1, 3, "pipe:2", "stage:pipe"),
    (8, 3, 2, "pipe:8", "stage:pipe"),
    (8, 8, 1, "pipe:4;data:3", "stage:pipe;batch:data"),
    (4, 12, 3, "pipe:2;data:2", "stage:pipe;batch:data;slots/width:data"),
    (1, 4, 2, "data:2", "batch:data"),
    (4, 4, 1, "data:2", "batch:data"),
    (8, 12, 2, "pipe:2;data:2;tensor:2", "stage:pipe;batch:data;inner:tensor;variables/width:data?"),
]


@pytest.mark.parametrize("case", some(CASES, [CASES[1], CASES[3]]), ids=str)
def test_a_pipeline_is_its_layers_one_after_the_other(case: tuple[Any, ...]) -> None:
    stages, microbatches, repeats, mesh, layout = case
    plain, piped = pair(stages, microbatches, repeats, 1 if stages > 2 else 2, mesh, layout)
    assert_equal_steps(plain, piped, "fast")
    if deep() or case == CASES[1]:
        assert_equal_steps(plain, piped, "exact", steps=1)


@pytest.mark.parametrize("remat", ["none", "matmuls", mtf.Remat(save=["wi"])])
def test_whatever_a_stage_keeps(remat: Any) -> None:
    """`wi` is named in loops of the stage alone, so that a policy of names is given to a stage without one."""
    if isinstance(remat, str):
        plain, piped = pair(4, 4, 2, 1, "pipe:4", "stage:pipe", remat=remat)
    else:
        with mtf.Graph():
            plain = mtf.lower(*step(lambda x: scanned(x, 4)), precision="highest")
        with mtf.Graph():
            made = step(lambda x: mtf.layers.pipeline(layer, x, 4, 4, remat=remat))
            piped = mtf.lower(*made, mesh="pipe:4", layout="stage:pipe", precision="highest")
    assert_equal_steps(plain, piped, "fast")


def test_microbatches_that_x_counts_already_may_lie_on_the_axis_of_the_stages() -> None:
    micro, small = D("microbatch", 4), D("batch", 6)

    def apply(x: mtf.Tensor) -> mtf.Tensor:
        x = mtf.transpose(mtf.reshape(x, [small, micro, WIDTH]), [micro, small, WIDTH])
        y = mtf.layers.pipeline(lambda h: scanned(h, 1), x, stages=4, microbatches=micro)
        return mtf.reshape(mtf.transpose(y, [small, micro, WIDTH]), [BATCH, WIDTH])

    with mtf.Graph():
        plain = mtf.lower(*step(lambda x: scanned(x, 4)), precision="highest")
    with mtf.Graph():
        piped = mtf.lower(*step(apply), mesh="pipe:4", layout="stage:pipe;microbatch:pipe", precision="highest")
    assert_equal_steps(plain, piped, "exact", steps=1)


def by_hand(state: dict[str, Array], x: Array, rate: float) -> tuple[Array, Array, dict[str, Array]]:
    """In float64: the layers one after the other, the gradient of mean((y - 0.3)**2) to x, variables after SGD."""
    stacks = {n: v.reshape(-1, *v.shape[v.ndim - (1 if n.endswith("bias") else 2) :]) for n, v in state.items()}
    named = ("wi/kernel", "wi/bias", "wo/kernel", "wo/bias")
    per_layer = list(zip(*(stacks[n] for n in named), strict=True))
    run, kept = x, []
    for w, b, u, c in per_layer:
        h = np.tanh(run @ w + b)
        kept.append((run, h))
        run = run + h @ u + c
    y, d = run, 2 * (run - 0.3) / run.size
    for (w, b, u, c), (before, h) in zip(reversed(per_layer), reversed(kept), strict=True):
        inner = (d @ u.T) * (1 - h * h)
        out, d = d, d + inner @ w.T
        for variable, gradient in ((w, before.T @ inner), (b, inner.sum(0)), (u, h.T @ out), (c, out.sum(0))):
            variable -= rate * gradient  # views of `stacks`
    return y, d, stacks


GRID = [(s, m, r) for s in (2, 4, 8) for r in (1, 2) for m in (1, 2, 3, s, s + 1, 2 * s)]
DRAWN = [(2, 1, 1), (4, 3, 2), (4, 5, 1)]


@pytest.mark.parametrize("case", some(GRID, DRAWN), ids=str)
def test_a_pipeline_is_its_layers_by_hand(case: tuple[int, int, int]) -> None:
    """Value, gradient and updated variables of every schedule under drawn layouts, in float64 to rounding."""
    stages, microbatches, repeats = case
    batch = D("batch", 2 * microbatches)
    rng = np.random.default_rng(stages * 100 + microbatches * 10 + repeats)

    def layers_of_one(h: mtf.Tensor) -> mtf.Tensor:
        return scanned(h, 1)

    with mtf.Graph() as graph:
        x = mtf.input("x", [batch, WIDTH], "float64")
        y = mtf.layers.pipeline(layers_of_one, x, stages, microbatches, repeats)
        loss = mtf.reduce_mean(mtf.square(y - 0.3))
        (dx,) = mtf.gradients([loss], [x])
        assert dx is not None
        updates = mtf.optimize.SgdOptimizer(0.7).minimize(loss)
        state = {v.name: 0.5 * rng.normal(size=v.shape.sizes) for v in graph.trainable_variables}
        programs = [
            mtf.lower({"y": y, "dx": dx}, updates, mesh=drawn.mesh_text, layout=drawn.rules_text, precision="highest")
            for drawn in legal_layouts(graph, rng, 6 if deep() else 2)
        ]
    fed = rng.normal(size=(batch.size, WIDTH.size))
    wanted_y, wanted_dx, wanted = by_hand({n: v.copy() for n, v in state.items()}, fed, 0.7)
    for program in programs:
        sim = mtf.simulate(program)
        for name, value in state.items():
            sim.state[name] = value
        found = sim.step(x=fed)
        found.update((name, sim.state[name].reshape(stack.shape)) for name, stack in wanted.items())
        assert_close(found, {"y": wanted_y, "dx": wanted_dx, **wanted}, 1e-13, f"{case} {program.layout}")


def legal_layouts(graph: mtf.Graph, rng: np.random.Generator, count: int) -> list[Layout]:
    """Drawn layouts that can be, of which each lays the stages over an axis."""
    shapes = [t.shape for t in needed(graph.operations)]
    found: list[Layout] = []
    while len(found) < count:
        drawn = draw_layout(rng, ["stage", "batch", "width", "inner", "microbatch"])
        if any(dim == "stage" for dim, *_ in drawn.rules) and drawn.allows(shapes):
            found.append(drawn)
    return found


# ---------------------------------------------------------------- what a stage may do


def test_a_stage_that_makes_nan_of_zeros_in_a_bubble_spoils_nothing() -> None:
    def stage(x: mtf.Tensor) -> mtf.Tensor:
        w = mtf.variable("w", [WIDTH], 1.5, "float64")
        return x * w / mtf.sqrt(mtf.reduce_sum(mtf.square(x), reduced_dim=WIDTH))  # 0 / 0

    with mtf.Graph():
        x = mtf.input("x", [BATCH, WIDTH], "float64")
        y = mtf.layers.pipeline(stage, x, stages=2, microbatches=3)
        updates = mtf.optimize.SgdOptimizer(0.1).minimize(mtf.reduce_sum(mtf.square(y - 0.5)))
        program = mtf.lower({"y": y}, updates, mesh="pipe:2", layout="stage:pipe")
    fed = np.random.default_rng(1).normal(size=(BATCH.size, WIDTH.size))
    for executor in ("exact", "fast"):
        sim = mtf.simulate(program, executor=executor)
        y_found = sim.step(x=fed)["y"]
        np.testing.assert_allclose(y_found, 1.5 * fed / np.linalg.norm(fed, axis=1, keepdims=True), rtol=1e-12)
        assert np.isfinite(sim.state["w"]).all()


def test_nor_the_gradient_of_what_stages_read_beside() -> None:
    def stage(x: mtf.Tensor, beside: mtf.Tensor) -> mtf.Tensor:
        return x * beside / mtf.sqrt(mtf.reduce_sum(mtf.square(x), reduced_dim=WIDTH))  # 0 / 0

    with mtf.Graph():
        x, beside = (mtf.input(name, [BATCH, WIDTH], "float64") for name in ("x", "beside"))
        y = mtf.layers.pipeline(stage, x, stages=2, microbatches=3, beside=[beside])
        (d,) = mtf.gradients([mtf.reduce_sum(y * x)], [beside])
        assert d is not None
        program = mtf.lower({"d": d}, mesh="pipe:2", layout="stage:pipe")
    rng = np.random.default_rng(1)
    fed, m = rng.normal(size=(BATCH.size, WIDTH.size)), 1 + rng.random((BATCH.size, WIDTH.size))

    def loss(m: Array) -> Array:
        once = fed * m / np.linalg.norm(fed, axis=1, keepdims=True)
        return once * m / np.linalg.norm(once, axis=1, keepdims=True) * fed

    direction = rng.normal(size=m.shape)
    slope = (loss(m + 1e-6 * direction) - loss(m - 1e-6 * direction)).sum() / 2e-6
    for executor in ("exact", "fast"):
        found = mtf.simulate(program, executor=executor).step(x=fed, beside=m)["d"]
        assert np.sum(found * direction) == pytest.approx(slope, rel=1e-8)


@pytest.mark.parametrize(("microbatches", "repeats"), [(4, 1), (3, 2), (4, 2)])
def test_what_stages_sum_and_read_beside(microbatches: int, repeats: int) -> None:
    """Sums over microbatches and repeats, for each stage; a mask that goes with each microbatch."""
    rng = np.random.default_rng(2)
    fed = {"x": rng.normal(size=(12, 4)), "mask": rng.integers(0, 2, (12, 4)).astype(bool)}

    def stage(x: mtf.Tensor, mask: mtf.Tensor) -> tuple[mtf.Tensor, list[mtf.Tensor]]:
        w = mtf.variable("w", [WIDTH], mtf.initializers.random_normal(1.0), "float64")
        y = mtf.where(mask, x * w, x + 1.0)
        return y, [mtf.reduce_sum(y * w, reduced_dim=[d for d in y.shape if d.name in ("batch", "width")])]

    with mtf.Graph():
        batch = D("batch", 12)
        x, mask = mtf.input("x", [batch, WIDTH], "float64"), mtf.input("mask", [batch, WIDTH], "bool")
        y, (total,) = mtf.layers.pipeline(stage, x, 2, microbatches, repeats, beside=[mask])
        loss = mtf.reduce_sum(y) + mtf.reduce_sum(total)
        (dw,) = mtf.gradients([loss], list(y.graph.trainable_variables))
        program = mtf.lower({"y": y, "total": total, "dw": dw}, mesh="pipe:2", layout="stage:pipe")
    for executor in ("exact", "fast"):
        sim = mtf.simulate(program, executor=executor)
        w = sim.state["w"].reshape(repeats, 2, 4)
        run, totals, before = fed["x"], np.zeros(2), []
        for r in range(repeats):
            for s in range(2):
                before.append(run)
                run = np.where(fed["mask"], run * w[r, s], run + 1.0)
                totals[s] += (run * w[r, s]).sum()
        found = sim.step(fed)
        np.testing.assert_allclose(found["y"], run, rtol=1e-12)
        np.testing.assert_allclose(found["total"], totals, rtol=1e-12)
        # Backwards by hand.
        dy, dw_found = np.ones_like(run), np.zeros_like(w)
        for r in reversed(range(repeats)):
            for s in reversed(range(2)):
                x_in = before.pop()
                out = np.where(fed["mask"], x_in * w[r, s], x_in + 1.0)
                dy = dy + w[r, s]
                dw_found[r, s] = out.sum(0) + np.where(fed["mask"], dy * x_in, 0).sum(0)
                dy = np.where(fed["mask"], dy * w[r, s], dy)
        np.testing.assert_allclose(found["dw"].reshape(w.shape), dw_found, rtol=1e-10)


def test_dropout_is_the_same_under_every_layout() -> None:
    def stage(x: mtf.Tensor) -> mtf.Tensor:
        return mtf.dropout(layer(x), True, rate=0.5)

    with mtf.Graph():
        made = step(lambda x: mtf.layers.pipeline(stage, x, 2, 4, 2, remat="full"))
        found = [
            mtf.simulate(mtf.lower(*made, mesh=mesh, layout=layout, precision="highest"), seed=3, executor=executor)
            for mesh, layout, executor in (
                ("pipe:1", "", "fast"),
                ("pipe:1", "", "exact"),
                ("pipe:2;data:3", "stage:pipe;batch:data", "fast"),
            )
        ]
    x = np.random.default_rng(0).normal(size=(BATCH.size, WIDTH.size))
    results = [sim.step(x=x) for sim in found]
    for result in results[1:]:
        np.testing.assert_allclose(result["y"], results[0]["y"], rtol=1e-12)
        np.testing.assert_allclose(result["dx"], results[0]["dx"], rtol=1e-9, atol=1e-14)
    assert 0.2 < np.mean(results[0]["y"] == 0) < 0.8


# ---------------------------------------------------------------- what it costs


def test_devices_hold_the_weights_gradients_and_slots_of_their_stages() -> None:
    plain, piped = pair(4, 4, 1, 2, "pipe:4", "stage:pipe")
    whole = {name: v.local_bytes for name, v in plain.variables.items() if name != "step"}
    assert {name: 4 * v.local_bytes for name, v in piped.variables.items() if name != "step"} == whole
    assert piped.memory.by_kind["variables"] < plain.memory.by_kind["variables"] / 3.9


@pytest.mark.parametrize("repeats", [1, 2])
def test_memory_grows_by_the_saved_inputs_and_a_share_of_the_stream(repeats: int) -> None:
    """Per microbatch: a stage's inputs, `repeats` of them, and 1 / stages of a microbatch for the stream and for x."""
    stages, small, width = 4, D("batch", 64), D("width", 256)

    def peak(count: int) -> int:
        micro = D("microbatch", count)
        with mtf.Graph():
            x = mtf.input("x", [micro, small, width])
            y = mtf.layers.pipeline(lambda h: mtf.layers.dense(h, width, name="w"), x, stages, micro, repeats)
            updates = mtf.optimize.SgdOptimizer(0.1).minimize(mtf.reduce_mean(mtf.square(y)))
            program = mtf.lower(None, updates, mesh="pipe:4", layout="stage:pipe;microbatch:pipe")
        return program.memory.peak_bytes

    block = small.size * width.size * 4
    growth = (peak(32) - peak(16)) / 16 / block
    assert growth == pytest.approx(repeats + 2 / stages, abs=0.02)


@pytest.mark.parametrize(("stages", "microbatches", "repeats"), [(4, 4, 1), (4, 8, 2), (4, 1, 1), (4, 2, 3), (2, 1, 2)])
def test_the_fast_executor_computes_what_works_alone(stages: int, microbatches: int, repeats: int) -> None:
    """Forward and, given what was kept, backward."""
    seen: dict[str, int] = {"forward": 0, "backward": 0}

    def counted(way: str) -> Callable[[Array], Array]:
        def count(x: Array) -> Array:
            seen[way] += x.size
            return x

        return count

    def back(op: mtf.Operation, dys: list[mtf.Tensor]) -> list[mtf.Tensor]:
        return [mtf.slicewise(counted("backward"), dys, splittable_dims=list(dys[0].shape))]

    def stage(h: mtf.Tensor) -> mtf.Tensor:
        h = mtf.slicewise(counted("forward"), [h], splittable_dims=list(h.shape), grad_function=back)
        return h * mtf.variable("w", [WIDTH], 1.0)

    with mtf.Graph():
        x = mtf.input("x", [D("batch", 8), WIDTH])
        y = mtf.layers.pipeline(stage, x, stages, microbatches, repeats, remat="none")
        (dx,) = mtf.gradients([mtf.reduce_sum(mtf.square(y)) * 0.5], [x])
        assert dx is not None
        program = mtf.lower({"y": y, "dx": dx})
    fed = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    found = mtf.simulate(program).step(x=fed)
    np.testing.assert_array_equal(found["y"], fed)
    np.testing.assert_array_equal(found["dx"], fed)
    least = stages * repeats * fed.size
    if microbatches % stages == 0 or repeats == 1 or microbatches == 1:
        assert seen == {"forward": least, "backward": least}
    else:  # what lies between those that work is computed too
        trips = mtf.layers.schedule(stages, microbatches, repeats).trips
        assert least <= seen["forward"] == seen["backward"] < trips * stages * fed.size / microbatches


@pytest.mark.parametrize(("stages", "microbatches", "repeats"), [(4, 8, 1), (4, 8, 2), (2, 1, 1), (8, 16, 1)])
def test_a_step_takes_one_and_the_bubble_of_its_work(stages: int, microbatches: int, repeats: int) -> None:
    """On chips that lose nothing, between which microbatches move at once."""
    wide, inner = D("wide", 8192), D("inner", 65536)
    numerics = mtf.Numerics(variable_dtype="bfloat16", activation_dtype="bfloat16")

    def stage(x: mtf.Tensor) -> mtf.Tensor:
        h = mtf.layers.dense(x, inner, use_bias=False, numerics=numerics, name="wi")
        return mtf.layers.dense(h, wide, use_bias=False, numerics=numerics, name="wo")

    with mtf.Graph():
        x = mtf.input("x", [D("batch", 32768 * microbatches), wide], "bfloat16")
        y = mtf.layers.pipeline(stage, x, stages, microbatches, repeats, remat="none")
        program = mtf.lower(
            None,
            mtf.optimize.SgdOptimizer(0.1).minimize(mtf.reduce_mean(y)),
            mesh=f"pipe:{stages}",
            layout="stage:pipe",
        )
    chips = ring("v5p", stages, ici_bytes_per_second=1e15)
    est = mtf.estimate(program, chips, physics=Physics().without_losses())
    bubble = mtf.layers.schedule(stages, microbatches, repeats).bubble
    assert bubble == pytest.approx((stages - 1) / (repeats * microbatches))
    matmuls = 3 * 2 * 2 * 32768 * microbatches * wide.size * inner.size * repeats  # of a stage's device
    assert est.useful_flops == pytest.approx(matmuls, rel=1e-9)
    seconds = matmuls / est.slice.peak_flops_per_device
    assert est.step_seconds == pytest.approx((1 + bubble) * seconds, rel=0.025)  # moves in HBM too
    assert est.mfu == pytest.approx(1 / (1 + bubble), rel=0.025)
    assert est.hfu == pytest.approx(1.0, rel=0.025)
    assert est.bubble_seconds == pytest.approx(bubble * seconds, rel=0.025)
    assert f"{est.bubble_share:.1%} of the step" in str(est)
    assert any(f"{stages} stages, {microbatches} microbatch" in note for note in program.notes)


# ---------------------------------------------------------------- the schedule


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 8])
def test_every_run_of_layers_takes_every_microbatch_in_its_turn(stages: int) -> None:
    for microbatches, repeats in product([1, 2, 3, 4, 7, 8, 16], [1, 2, 3]):
        plan = mtf.layers.schedule(stages, microbatches, repeats)
        when: dict[tuple[int, int, int], int] = {}
        for trip, row in enumerate(plan.turns):
            assert len(row) == stages
            for stage, turn in enumerate(row):
                if turn is not None:
                    key = turn.microbatch, turn.repeat, stage
                    assert key not in when
                    when[key] = trip
        assert len(when) == stages * microbatches * repeats
        for (micro, repeat, stage), trip in when.items():
            if stage:  # arrives one trip after the stage before
                assert when[micro, repeat, stage - 1] == trip - 1
            elif repeat:  # and from the last to the first
                assert when[micro, repeat - 1, stages - 1] == trip - 1
        assert plan.trips == max(when.values()) + 1
        if repeats == 1 or microbatches % stages == 0:
            assert plan.trips == repeats * microbatches + stages - 1
            assert plan.bubble == pytest.approx((stages - 1) / (repeats * microbatches))
        assert plan.active("stage").share == pytest.approx(1 / (1 + plan.bubble))


def test_a_schedule_is_shown() -> None:
    shown = str(mtf.layers.schedule(2, 4, 2)).splitlines()
    assert shown == [
        "2 stages, 4 microbatches, each 2 times round: 9 trips, 1 of them idle, 12.5% of the work",
        "trip      0   1   2   3   4   5   6   7   8",
        "stage 0  0a  1a  0b  1b  2a  3a  2b  3b   .",
        "stage 1   .  0a  1a  0b  1b  2a  3a  2b  3b",
        "a to b: the run of layers that a stage applies; . idle",
    ]


# ---------------------------------------------------------------- bad input


def refuse(match: str, error: type[Exception] = mtf.MeshlibError, **given: Any) -> None:
    with mtf.Graph():
        x = mtf.input("x", [D("batch", 6), WIDTH])
        arguments: dict[str, Any] = {"stage_fn": lambda h: h * 2.0, "x": x, "stages": 2, "microbatches": 3, **given}
        with pytest.raises(error, match=match):
            mtf.layers.pipeline(**arguments)


def test_bad_input_is_told() -> None:
    refuse("stage_fn must be a function", stage_fn=3)
    refuse("stages must be at least 1, got 0", stages=0)
    refuse("stages must be an integer, got float 2.5", stages=2.5)
    refuse("repeats must be at least 1, got -1", repeats=-1)
    refuse("can't be cut into 4 equal microbatches: 6 % 4 = 2", microbatches=4)
    refuse("has no dim 'micro'", microbatches=D("micro", 3))
    refuse("has a dim 'batch'; rename it", stages=D("batch", 2))
    refuse("expected a tensor|must be a tensor", x=3.0)
    refuse("remat must be", remat=3)
    refuse("types must stay the same", stage_fn=lambda h: mtf.reduce_sum(h, reduced_dim=WIDTH))
    refuse("a pair of it and a list of tensors to sum", stage_fn=lambda h: None)
    refuse("must be float and have the dim stage:2", stage_fn=lambda h: (h, [mtf.reduce_sum(h)]))
    refuse("'w' has the dim stage:2 of the loop", stage_fn=lambda h: h * mtf.variable("w", [D("stage", 2)]))
    with pytest.raises(mtf.GraphError, match="microbatches must be at least 1, got 0"):
        mtf.layers.schedule(2, 0)
