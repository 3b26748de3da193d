"""Gradients that stay pending through several loops: on JAX as simulated, with the collectives of the program."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("jax", reason="needs JAX: pip install -e '.[jax]'")

import meshlib as mtf
from tests.effort import some
from tests.jax.lowered import exchanges, in_program, in_text
from tests.lowering.minima_tables import ROWS

NAMES = (
    "pipelines_of_microbatches_step",
    "scanned_layers_of_microbatches_step",
    "scanned_layers_of_microbatches_with_split_slots_step",
    "scanned_layers_of_microbatches_hybrid_sharded_step",
    "layers_of_microbatches_fully_sharded_step",
)


@pytest.mark.parametrize("name", some(NAMES, NAMES[:1]))
def test_pending_sums_of_nested_loops(name: str) -> None:
    with mtf.Graph():
        case = ROWS[name]("float32")
        program = mtf.lower(case.outputs, case.updates, case.mesh, case.layout, precision="highest")
    rng = np.random.default_rng(0)
    feeds = {n: rng.uniform(-1, 1, v.tensor.shape.sizes) for n, v in program.inputs.items()}
    sim, run = mtf.simulate(program, seed=1), mtf.on_jax(program, seed=1)
    assert in_text(run.compiled()) == in_program(program) + exchanges(program)
    wanted, found = sim.step(feeds), run.step(feeds)
    for n in program.updates:
        wanted[n], found[n] = sim.state[n], run.state[n]
    for n, y in wanted.items():
        np.testing.assert_allclose(found[n], y, rtol=1e-5, atol=1e-5 * np.abs(y).max(), err_msg=n)
