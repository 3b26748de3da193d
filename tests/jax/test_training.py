"""Training on eight JAX devices under many layouts: the collectives that the program has, the weights that it makes."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("jax", reason="needs JAX: pip install -e '.[jax]'")

import meshlib as mtf
from meshlib.program.instructions import Loop
from meshlib.program.records import walk
from tests.effort import some
from tests.jax.lowered import exchanges, in_program, in_text
from tests.jax.models import (
    Feeds,
    mlp,
    mlp_feeds,
    pipeline,
    pipeline_by_tasks,
    pipeline_feeds,
    transformer,
    transformer_feeds,
)

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


def compared(program: mtf.Program, feeds: Feeds, tolerance: float = WEIGHTS) -> None:
    sim, run = mtf.simulate(program, seed=3), mtf.on_jax(program, seed=3, checked=False)
    assert in_text(run.compiled()) == in_program(program) + exchanges(program)
    for name in sim.state:
        assert np.array_equal(sim.state[name], run.state[name]), name
    for fed in feeds:
        wanted, found = sim.step(fed), run.step(fed)
        assert abs(float(found["loss"]) - float(wanted["loss"])) <= 2e-6 * abs(float(wanted["loss"]))
    assert int(run.state["step"]) == int(sim.state["step"])
    for name in sim.state:
        a, b = (np.asarray(s.state[name], np.float64) for s in (run, sim))
        assert np.abs(a - b).max() <= tolerance * max(1e-3, np.abs(b).max()), name


@pytest.mark.parametrize(("mesh", "layout"), some(MLP, [MLP[0], MLP[3], MLP[6]]))
def test_mlp(mesh: str, layout: str) -> None:
    compared(mlp(mesh, layout), mlp_feeds())


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


@pytest.mark.parametrize(("mesh", "layout", "way"), some(ALL, [(*TRANSFORMER[7], WAYS[3])]))
def test_transformer(mesh: str, layout: str, way: tuple[bool, str, str, float]) -> None:
    scan, remat, optimizer, dropout = way
    program = transformer(mesh, layout, scan, remat, optimizer, dropout)
    # The first steps of Adam follow the signs of gradients, of which tiny ones are rounding.
    compared(program, transformer_feeds(), WEIGHTS if optimizer == "sgd" else 5e-3)


PIPELINES = (
    ("pipe:2;data:2;tensor:2", "stage:pipe;microbatch:pipe;batch:data;heads:tensor;d_ff:tensor", 1),
    ("pipe:2;fsdp:4", "stage:pipe;batch:fsdp;d_model:fsdp?", 2),
)


@pytest.mark.parametrize(("mesh", "layout", "repeats"), some(PIPELINES, PIPELINES[1:]))
def test_pipeline(mesh: str, layout: str, repeats: int) -> None:
    compared(pipeline(mesh, layout, repeats), pipeline_feeds())


TASKS = (
    ("pipe:2;data:2", "stage:pipe;batch:data", "1f1b", 1),
    ("pipe:2;tensor:2", "stage:pipe;width_out:tensor", "1f1b", 2),
    ("pipe:2;data:4", "stage:pipe;batch:data", "zb-h1", 1),
)


@pytest.mark.parametrize("row", some(TASKS, [TASKS[2]]), ids=lambda row: f"{row[2]} {row[3]}")
def test_pipeline_by_tasks(row: tuple[str, str, str, int]) -> None:
    feeds = [{"x": np.random.default_rng(n).normal(size=(16, 8)).astype(np.float32)} for n in range(2)]
    program = pipeline_by_tasks(*row)
    assert all(i.splits_branch for i in branches(program))
    compared(program, feeds)


def branches(program: mtf.Program) -> list[Loop]:
    """The branches of all loops."""
    loops = [visit.instruction for visit in walk(program)]
    of_loops = [i for i in loops if isinstance(i, Loop) and i.record.branch is not None]
    assert of_loops
    return of_loops
