"""Training steps by 1F1B, interleaved, zero-bubble and GPipe schedules: numbers, what is in flight, idle time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import meshlib as mtf
from meshlib.estimation import Physics
from meshlib.layers.pipeline_task_schedule import BACKWARD, FORWARD, WEIGHTS, waits_for
from meshlib.layers.pipeline_task_schedule import KINDS as SCHEDULES
from meshlib.program.instructions import Loop
from meshlib.program.records import walk
from tests.effort import draws, each
from tests.estimation.worked.common import ring
from tests.oracle import draw_layout, needed

D = mtf.Dimension
WIDE = mtf.Numerics(variable_dtype="float64", activation_dtype="float64")
BATCH, GIVEN, WIDTH, INNER, OUT = D("batch", 24), D("given", 5), D("width", 4), D("inner", 6), D("out", 3)
Array = np.ndarray[Any, Any]


def first(features: dict[str, mtf.Tensor]) -> mtf.Tensor:
    return mtf.layers.dense(features["x"], WIDTH, numerics=WIDE, name="first")


def layer(h: mtf.Tensor) -> mtf.Tensor:
    inner = mtf.layers.dense(h, INNER, activation=mtf.tanh, numerics=WIDE, name="wi")
    return h + mtf.layers.dense(inner, WIDTH, numerics=WIDE, name="wo")


def scanned(h: mtf.Tensor, count: int) -> mtf.Tensor:
    (y,), _ = mtf.scan(lambda c, _: ((layer(c[0]),), ()), [h], dim=D("layers", count), stack_variables=True)
    return y


def last(y: mtf.Tensor, features: dict[str, mtf.Tensor]) -> mtf.Tensor:
    z = mtf.layers.dense(y, OUT, numerics=WIDE, name="last")
    return mtf.square(z - features["target"])


@dataclass(frozen=True)
class Case:
    kind: str
    stages: int
    microbatches: int
    repeats: int
    layers: int  # of a run of a stage; 0: one, without a loop
    remat: str

    @classmethod
    def drawn(cls, rng: np.random.Generator) -> Case:
        kind = str(rng.choice(["1f1b", "1f1b", "zb-h1", "zb-h2", "gpipe"]))
        stages = int(rng.choice([1, 2, 3, 4]))
        repeats = int(rng.choice([1, 2])) if kind in ("1f1b", "gpipe") else 1
        counts = [m for m in (1, 2, 3, 4, 6, 8) if kind == "gpipe" or repeats == 1 or m % stages == 0]
        remat = str(rng.choice(["full", "none", "matmuls"]))
        return cls(kind, stages, int(rng.choice(counts)), repeats, int(rng.choice([0, 1, 2])), remat)

    def step(self) -> tuple[dict[str, mtf.Tensor], list[mtf.Operation]]:
        """What is lowered, of the current graph."""
        x, target = mtf.input("x", [BATCH, GIVEN], "float64"), mtf.input("target", [BATCH, OUT], "float64")
        stage = (lambda h, _: scanned(h, self.layers)) if self.layers else (lambda h, _: layer(h))
        grads, outputs = mtf.layers.pipeline_training_step(
            {"x": x, "target": target}, first, stage, last, BATCH, self.stages, self.microbatches, self.repeats,
            schedule=self.kind, remat=self.remat,
        )  # fmt: skip
        variables = x.graph.trainable_variables
        return outputs, mtf.optimize.SgdOptimizer(0.7).apply_grads(grads, variables)


def by_hand(state: dict[str, Array], x: Array, target: Array) -> tuple[float, dict[str, Array]]:
    """The loss of all layers one after the other, and variables after a step of SGD."""
    of = {n: v.copy() for n, v in state.items()}
    flat = {n: of[n].reshape(-1, *of[n].shape[-(2 if n.endswith("kernel") else 1) :]) for n in of if n[0] == "w"}
    stacks = [flat[n] for n in ("wi/kernel", "wi/bias", "wo/kernel", "wo/bias")]
    run, before = x @ of["first/kernel"] + of["first/bias"], []
    for w, b, u, c in zip(*stacks, strict=True):
        h = np.tanh(run @ w + b)
        before.append((run, h))
        run = run + h @ u + c
    z = run @ of["last/kernel"] + of["last/bias"] - target
    dz = 2 * z / z.size
    d = dz @ of["last/kernel"].T
    grads = {"last/kernel": run.T @ dz, "last/bias": dz.sum(0)}
    for (w, b, u, c), (taken, h) in zip(reversed(list(zip(*stacks, strict=True))), reversed(before), strict=True):
        inner = (d @ u.T) * (1 - h * h)
        out, d = d, d + inner @ w.T
        for variable, g in ((w, taken.T @ inner), (b, inner.sum(0)), (u, h.T @ out), (c, out.sum(0))):
            variable -= 0.7 * g
    grads |= {"first/kernel": x.T @ d, "first/bias": d.sum(0)}
    return float(np.mean(z * z)), {n: of[n] - 0.7 * grads[n] if n in grads else of[n] for n in of}


def assert_as_by_hand(case: Case, seed: int) -> None:
    rng = np.random.default_rng(seed)
    with mtf.Graph() as graph:
        outputs, updates = case.step()
        shapes = [t.shape for t in needed(graph.operations)]
        while not (drawn := draw_layout(rng, ["stage", "batch", "width", "inner", "out"])).allows(shapes):
            pass
        program = mtf.lower(outputs, updates, mesh=drawn.mesh_text, layout=drawn.rules_text, precision="highest")
    state = {v.name: 0.5 * rng.normal(size=v.shape.sizes) for v in graph.trainable_variables}
    fed = {"x": rng.normal(size=(BATCH.size, GIVEN.size)), "target": rng.normal(size=(BATCH.size, OUT.size))}
    loss, after = by_hand(state, fed["x"], fed["target"])
    sim = mtf.simulate(program, executor="exact" if seed == 3 else "fast")
    for name, value in state.items():
        sim.state[name] = value
    assert float(sim.step(fed)["loss"]) == pytest.approx(loss, rel=1e-13), f"{case} {drawn}"
    for name, value in after.items():
        np.testing.assert_allclose(sim.state[name], value, rtol=1e-12, atol=1e-13, err_msg=f"{name} {case} {drawn}")


FIXED = [Case("1f1b", 2, 4, 2, 1, "none"), Case("1f1b", 4, 4, 2, 0, "matmuls"), Case("zb-h2", 3, 6, 1, 2, "none")]
DRAWN = [Case.drawn(np.random.default_rng(n)) for n in range(draws(6, 200))]
CASES = {f"{n} {case}": (case, n) for n, case in enumerate([*FIXED, *DRAWN])}


@each("case, seed", CASES, parts=3)
def test_a_step_is_its_layers_by_hand(case: Case, seed: int) -> None:
    assert_as_by_hand(case, seed)


def test_the_sample_has_every_schedule() -> None:
    assert {case.kind for case, _ in CASES.values()} == {kind for kind, _ in KINDS} == {*SCHEDULES}


# ---------------------------------------------------------------- stages of different sizes

UNEVEN = {
    "1f1b": ((1, 2), 4, "1f1b", "none", "pipe:2;data:3", "stage:pipe;batch:data"),
    "zb-h1": ((1, 2, 1), 6, "zb-h1", "matmuls", "pipe:3;tensor:2", "stage:pipe;inner:tensor"),
}


@pytest.mark.parametrize("name", UNEVEN)
def test_stages_may_have_different_numbers_of_layers(name: str) -> None:
    counts, microbatches, kind, remat, mesh, layout = UNEVEN[name]
    with mtf.Graph() as graph:
        x, target = mtf.input("x", [BATCH, GIVEN], "float64"), mtf.input("target", [BATCH, OUT], "float64")
        grads, outputs = mtf.layers.pipeline_training_step(
            {"x": x, "target": target}, first, lambda h, _: mtf.layers.stage_layers(layer, h, counts, remat), last,
            BATCH, len(counts), microbatches, schedule=kind, remat=remat,
        )  # fmt: skip
        updates = mtf.optimize.SgdOptimizer(0.7).apply_grads(grads, graph.trainable_variables)
        program = mtf.lower(outputs, updates, mesh=mesh, layout=layout, precision="highest")
    loops = [v.instruction for v in walk(program) if isinstance(v.instruction, Loop)]
    assert all(i.splits_branch for i in loops if i.record.branch is not None)
    assert sum(i.record.branch.kind.startswith("layer") for i in loops if i.record.branch is not None) >= 2
    rng, most = np.random.default_rng(1), max(counts)
    state = {v.name: 0.5 * rng.normal(size=v.shape.sizes) for v in graph.trainable_variables}
    rows = [s * most + n for s, count in enumerate(counts) for n in range(count)]

    def of_rows(name: str, value: Array) -> Array:
        return value.reshape(-1, *value.shape[2:])[rows] if name[0] == "w" else value

    fed = {"x": rng.normal(size=(BATCH.size, GIVEN.size)), "target": rng.normal(size=(BATCH.size, OUT.size))}
    loss, after = by_hand({n: of_rows(n, v) for n, v in state.items()}, fed["x"], fed["target"])
    sim = mtf.simulate(program)
    for name, value in state.items():
        sim.state[name] = value
    assert float(sim.step(fed)["loss"]) == pytest.approx(loss, rel=1e-13)
    for name, value in after.items():
        np.testing.assert_allclose(of_rows(name, sim.state[name]), value, rtol=1e-12, atol=1e-13, err_msg=name)
        room = np.setdiff1d(np.arange(most * len(counts)), rows)
        if name[0] == "w":  # what no stage has stays as it starts
            unused = sim.state[name].reshape(-1, *state[name].shape[2:])[room]
            np.testing.assert_array_equal(unused, state[name].reshape(-1, *state[name].shape[2:])[room])


def test_layers_are_split_with_the_embedding_and_the_head_as_layers() -> None:
    assert mtf.layers.split_layers(126, 16) == (7, *(8,) * 14, 7)  # Llama 3.1 405B, arXiv:2407.21783
    for layers in range(1, 40):
        for stages in range(1, layers + 1):
            try:
                counts = mtf.layers.split_layers(layers, stages)
            except mtf.GraphError:
                assert (layers + 2) // stages < 2
                continue
            units = [n + (s == 0) + (s == stages - 1) for s, n in enumerate(counts)]
            assert sum(counts) == layers
            assert max(units) - min(units) <= 1
    with pytest.raises(mtf.GraphError, match=r"3 layers in 3 stages, .* leave a stage without any"):
        mtf.layers.split_layers(3, 3)
    with pytest.raises(mtf.GraphError, match="layers must be at least 1, got 0"):
        mtf.layers.split_layers(0, 3)
    with mtf.Graph(), pytest.raises(mtf.ShapeError, match="must be the 3 stages that counts has"):
        mtf.layers.stage_layers(layer, mtf.zeros([D("stage", 2), WIDTH]), (1, 2, 3))


# ---------------------------------------------------------------- schedules

KINDS = [("gpipe", 1), ("gpipe", 2), ("1f1b", 1), ("1f1b", 2), ("1f1b", 4), ("zb-h1", 1), ("zb-h2", 1)]
PLANS = {f"{kind} {v} {p}x{m}": (kind, v, p, m) for kind, v in KINDS for p in (2, 3, 4, 8) for m in (2 * p, 4 * p)}


def plan_of(kind: str, repeats: int, stages: int, microbatches: int) -> Any:
    return mtf.layers.schedule(stages, microbatches, repeats, kind)


@each("kind, v, p, m", PLANS)
def test_idle_time_and_memory_are_those_of_the_papers(kind: str, v: int, p: int, m: int) -> None:
    """Megatron, arXiv:2104.04473: (p-1)/(v m), memory of p microbatches, interleaved 1 + (p-1)/(p v) times as much.
    Zero bubble, arXiv:2401.10241, table 2: (p-1)(F + B - W) with p, and (p-1)(F + B - 2 W) with 2 p - 1."""
    plan = plan_of(kind, v, p, m)
    f = b = w = 1.0  # tasks of zero bubbles have equal times in the paper's drawings
    bubble = {"zb-h1": p - 1, "zb-h2": 0}.get(kind, (p - 1) * 3)
    assert plan.bubble_seconds(f, b, w) == pytest.approx(bubble)
    assert plan.bubble == pytest.approx(bubble / (3 * v * m))
    most = {"gpipe": v * m, "zb-h1": p, "zb-h2": 2 * p - 1}.get(kind, p if v == 1 else p * v + p - 1)
    assert max(plan.in_flight) == most
    if kind == "1f1b" and v == 1:
        assert plan.in_flight == tuple(range(p, 0, -1))
        assert plan.bubble_seconds(1.0, 3.0) == pytest.approx((p - 1) * 4)  # whatever a backward takes


@each(
    "kind, v, p, m", {**PLANS, **{f"{k} {p}x{m}": (k, 1, p, m) for k in ("1f1b", "zb-h1") for p, m in [(4, 1), (5, 3)]}}
)
def test_each_task_runs_once_when_what_it_takes_is_there(kind: str, v: int, p: int, m: int) -> None:
    plan = plan_of(kind, v, p, m)
    kinds = [FORWARD, BACKWARD, *([WEIGHTS] if plan.splits else [])]
    assert sorted(plan.tick_of) == sorted(
        (k, i, r, s) for k in kinds for i in range(m) for r in range(v) for s in range(p)
    )
    for stage, row in enumerate(zip(*plan.ticks, strict=True)):
        for tick, task in enumerate(row):
            if task is not None:
                assert all(plan.tick_of[key] < tick for key in waits_for(task, stage, p, v))


def test_a_schedule_is_shown() -> None:
    assert str(plan_of("zb-h1", 1, 2, 2)).splitlines() == [
        "zb-h1: 2 stages, 2 microbatches: 16.7% of the work idle, at most 2 in flight",
        "stage   0   1   2   3   4   5   6",
        "0      F0  F1   .  B0  W0  B1  W1",
        "1       .  F0  B0  F1  B1  W0  W1",
        "F forward, B backward, W weights; . idle; each task drawn as one tick",
    ]


def test_a_schedule_is_drawn_by_stage_and_time(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need the extra 'plot'")
    plan = plan_of("zb-h1", 1, 3, 6)
    axes = plan.plot(tmp_path / "schedule.svg", forward=1.0, backward=2.0, weights=1.0)
    assert "<svg" in (tmp_path / "schedule.svg").read_text()
    assert [t.get_text() for t in axes.get_yticklabels()] == ["stage 0", "stage 1", "stage 2"]
    assert axes.get_xlim()[1] == plan.seconds(1.0, 2.0, 1.0)
    assert [t.get_text() for t in axes.get_legend().get_texts()] == ["forward", "backward", "weights"]


# ---------------------------------------------------------------- what it costs


def chain(kind: str, microbatches: int, small: int, wide: int, inner: int, stages: int = 4, remat: str = "none") -> Any:
    """A program of two products a stage, in bfloat16, of `small` rows in a microbatch."""
    batch, width, hidden = D("batch", small * microbatches), D("width", wide), D("inner", inner)
    numerics = mtf.Numerics(variable_dtype="bfloat16", activation_dtype="bfloat16")

    def stage(h: mtf.Tensor, _: object) -> mtf.Tensor:
        h = mtf.layers.dense(h, hidden, use_bias=False, numerics=numerics, name="wi")
        return mtf.layers.dense(h, width, use_bias=False, numerics=numerics, name="wo")

    with mtf.Graph() as graph:
        x = mtf.input("x", [batch, D("one", 1)], "bfloat16")
        grads, outputs = mtf.layers.pipeline_training_step(
            {"x": x}, lambda f: mtf.layers.dense(f["x"], width, numerics=numerics, name="first"), stage,
            lambda y, f: mtf.cast(y, "float32"), batch, stages, microbatches, schedule=kind, remat=remat,
        )  # fmt: skip
        updates = mtf.optimize.SgdOptimizer(0.1).apply_grads(grads, graph.trainable_variables)
    return mtf.lower(outputs, updates, mesh=f"pipe:{stages}", layout="stage:pipe")


def test_memory_is_what_is_in_flight() -> None:
    """Of each stage its inputs and the product inside, and cotangents that have arrived: of GPipe those of the last
    stage for all microbatches, of 1F1B one."""
    block, tables = 64 * 256 * 2, 2**13  # bytes of a microbatch; of which slot is read in which tick

    def held(kind: str, microbatches: int) -> int:
        return chain(kind, microbatches, 64, 256, 256).memory.by_kind["activations"]

    assert held("gpipe", 8) == pytest.approx(3 * 8 * block, abs=tables)
    for microbatches in (8, 12):
        assert held("1f1b", microbatches) == pytest.approx((4 + 4 + 1) * block, abs=tables)
    # What gradients of weights are made of: the input, the product and both cotangents, of 4 microbatches.
    assert held("zb-h1", 8) == pytest.approx((4 + 4 + 1 + 4 * 4) * block, abs=tables)


@pytest.mark.parametrize(("kind", "share"), [("1f1b", 3 / 8), ("zb-h1", 1 / 8)])
def test_a_step_takes_its_work_and_the_bubble(kind: str, share: float) -> None:
    """On chips that lose nothing, between which microbatches move at once; copies to and from slots take HBM time."""
    program = chain(kind, 8, 32768, 8192, 65536)
    est = mtf.estimate(program, ring("v5p", 4, ici_bytes_per_second=1e15), physics=Physics().without_losses())
    matmuls = 3 * 2 * 2 * 32768 * 8 * 8192 * 65536  # of a stage's device
    seconds = matmuls / est.slice.peak_flops_per_device
    assert est.useful_flops == pytest.approx(matmuls, rel=1e-4)
    assert est.flops == pytest.approx(matmuls, rel=1e-4)
    assert est.bubble_seconds == pytest.approx(share * seconds, rel=0.15)
    assert est.step_seconds == pytest.approx((1 + share) * seconds, rel=0.08)
    assert sum(est.bound_seconds.values()) == pytest.approx(est.step_seconds)


def test_gradients_are_reduced_once_a_step() -> None:
    for microbatches in (2, 4):
        with mtf.Graph():
            program = mtf.lower(
                *Case("1f1b", 2, microbatches, 1, 2, "full").step(), "pipe:2;data:2", "stage:pipe;batch:data"
            )
        sums = [c for c in program.collectives if "data" in c.axes]
        assert {c.count for c in sums} == {1}
        moved = {c.axes for c in program.collectives if c.count > 1}
        assert moved == {("pipe",)}
        assert {c.kind for c in program.collectives if c.count > 1} == {"collective_permute"}


# ---------------------------------------------------------------- bad input


def refuse(match: str, **given: Any) -> None:
    with mtf.Graph():
        x = mtf.input("x", [D("batch", 6), WIDTH])
        arguments: dict[str, Any] = {
            "features": {"x": x}, "first_fn": lambda f: f["x"], "stage_fn": lambda h, f: h * mtf.variable("w", [WIDTH]),
            "last_fn": lambda y, f: y, "batch_dim": x.shape[0], "stages": 2, "microbatches": 3, **given,
        }  # fmt: skip
        with pytest.raises(mtf.MeshlibError, match=match):
            mtf.layers.pipeline_training_step(**arguments)


def test_bad_input_is_told() -> None:
    refuse("features must be a dict", features=[])
    refuse("stage_fn must be a function, got 3", stage_fn=3)
    refuse("batch_dim must be a Dimension, got 'batch'", batch_dim="batch")
    refuse("no feature has the dim rows:6", batch_dim=D("rows", 6))
    refuse("can't be cut into 4 equal microbatches: 6 % 4 = 2", microbatches=4)
    refuse("stages must be at least 1, got 0", stages=0)
    refuse("schedule must be .*1f1b", schedule="2f2b")
    refuse("use 4 microbatches, or repeats=1", repeats=2)
    refuse("zero-bubble schedules have repeats=1, got 2", repeats=2, schedule="zb-h1")
    refuse("can't offload to the host", remat=mtf.Remat(offload=["h"]))
    refuse("types must stay the same", stage_fn=lambda h, f: mtf.cast(h, "bfloat16"))
    refuse("must return a float tensor of the dim stage:2", first_fn=lambda f: mtf.ones([WIDTH]))
    refuse("must be float and have the dim stage:2", last_fn=lambda y, f: mtf.reduce_mean(y))
    refuse("the loss does not depend on the output of the stages", last_fn=lambda y, f: mtf.zeros_like(y))
    refuse("a dict with 'loss'", last_fn=lambda y, f: {"y": y})
    refuse("draws random numbers", stage_fn=lambda h, f: mtf.dropout(h, True, rate=0.5))
    refuse("has a dim 'batch'; rename it|has a dim 'stage'", stages=D("batch", 2))
