"""Random programs on JAX in float64, against the exact executor: those of the property tests, and chains of shifts."""

# ruff: noqa: E402 (whatever needs JAX comes after a look whether it is there)

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, seed, settings

jax = pytest.importorskip("jax", reason="needs JAX: pip install -e '.[jax]'")

import meshlib as mtf
from meshlib.program.records import Program
from tests.effort import deep, draws
from tests.lowering.test_halos import drawn
from tests.oracle import Array, assert_close, draw_layout, run
from tests.simulation.test_property_programs import Written, programs

DEVICES = 8
SHARDS = 2  # which run beside each other
TOGETHER = 6  # programs that are compiled together


def compared(program: Program, feeds: dict[str, Array], about: str) -> None:
    fed = {name: feeds[name] for name in program.inputs}
    (wanted,) = run(program, feeds)
    with jax.enable_x64(True):
        devices = mtf.on_jax(program)
        found = {**devices.step(fed), **{f"new {name}": devices.state[name] for name in program.updates}}
    first = {n for n in wanted if not n.startswith("new ")}
    assert_close({n: found[n] for n in first}, {n: wanted[n] for n in first}, 1e-9, about, floor=1.0)
    assert_close(found, wanted, 1e-4, about, floor=1.0)  # optimizers compute in float32


@pytest.mark.parametrize("shard", range(SHARDS))
def test_programs_of_the_property_tests(shard: int) -> None:
    equal: set[str] = set()  # what Hypothesis draws twice, or nearly, is compiled once

    def check(p: Written) -> None:
        program = mtf.lower(p.outputs, p.updates, p.mesh, p.layout, precision="highest")
        assume(1 < program.mesh.size <= DEVICES)
        text = str(program)
        if text not in equal:  # no assume: the same draws would be valid once and invalid later
            compared(program, p.feeds, repr(p))
            equal.add(text)

    # By default most are short, and several run as one: what takes long is to compile, not to run.
    rows = (
        (draws(2, 2000), 1, {"most": draws(5, 12)}),
        (draws(36, 2000), TOGETHER, {"most": draws(1, 3), "least": 1}),
    )
    for number, together, size in rows:
        found = settings(max_examples=number // together // SHARDS)(given(programs(**size, count=together))(check))
        (found if deep() else seed(shard)(found))()  # in depth other programs each time


def test_chains_of_shifts_along_split_dims() -> None:
    rng, tried = np.random.default_rng(5), 0
    while tried < draws(3, 200):
        outputs, feeds = drawn(rng)
        layout = draw_layout(rng, ["h", "w", "h", "w", "a"])
        try:
            program = mtf.lower(outputs, mesh=layout.mesh_text, layout=layout.rules_text, precision="highest")
        except mtf.LayoutError:
            continue
        if program.mesh.size <= DEVICES and program.collectives:
            compared(program, feeds, str(layout))
            tried += 1
