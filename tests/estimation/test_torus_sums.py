"""Gathers and reductions over a whole torus, which libtpu sends as sums of blocks among zeros."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import meshlib as mtf
from hardware import Slice
from hardware.memory import hbm_seconds
from hardware.network import collective_cost

D = mtf.Dimension
WIDE = 4096
GATHERED = 2 * WIDE * WIDE  # bytes
SUMS = replace(mtf.XLA_TPU, torus_sums=True)


def step(slice_: str, mesh: str, compiler: mtf.Compiler) -> tuple[mtf.Estimate, dict[str, Any]]:
    """A training step that gathers a variable and scatters its gradient, and the rows of both."""
    batch, wide, out = D("batch", 65536), D("wide", WIDE), D("out", WIDE)
    with mtf.Graph():
        w = mtf.variable("w", [wide, out], dtype="bfloat16")
        y = mtf.einsum([mtf.input("x", [batch, wide], "bfloat16"), w])
        loss = mtf.reduce_mean(mtf.square(mtf.cast(y, "float32")))
        updates = mtf.optimize.SgdOptimizer(0.1).minimize(loss)
        program = mtf.lower(updates=updates, mesh=mesh, layout="batch:fsdp;wide:fsdp?", compiler=compiler)
    estimate = mtf.estimate(program, slice_, compiler)
    return estimate, {r.opcode: r for r in estimate.rows if r.axes == ("fsdp",)}


@pytest.mark.parametrize(
    ("slice_", "mesh", "summed"),
    [
        ("v5p-4x4x4", "fsdp:64", True),
        ("2*v5p-4x4x4", "data:2;fsdp:64", True),
        ("v5p-4x4x8", "fsdp:32;tensor:4", False),  # not the whole torus
        ("v5p-2x4x4", "fsdp:32", False),  # an axis of two chips does not wrap
        ("v5e-16x16", "fsdp:256", False),  # two axes
    ],
)
def test_gathers_over_a_whole_torus_take_as_long_as_all_reduces(slice_: str, mesh: str, summed: bool) -> None:
    """As libtpu 0.0.19.1 and 0.0.42.1 compile them over a whole torus: tests/benchmarks/torus_gathers.py."""
    before, own = step(slice_, mesh, mtf.XLA_TPU)
    after, rows = step(slice_, mesh, SUMS)
    launch = Slice(slice_).chip.collective_launch_seconds
    assert rows.keys() == own.keys() == {"all_gather", "reduce_scatter"}
    for opcode, row in rows.items():
        cost = collective_cost(after.placement, "all_reduce" if summed else opcode, ("fsdp",), GATHERED)
        assert row.seconds == pytest.approx(cost.seconds + launch, rel=1e-9)
    assert (after.step_seconds > before.step_seconds) == summed


def test_the_core_writes_zeros_around_each_block() -> None:
    """Of a gather that other work hides, and that costs the core nothing else, this is what remains."""
    batch, wide, out, hidden = D("batch", 2**20), D("wide", WIDE), D("out", WIDE), D("hidden", WIDE)
    with mtf.Graph():
        x = mtf.input("x", [batch, out], "bfloat16")
        h = mtf.sin(mtf.einsum([x, mtf.variable("v", [out, hidden], dtype="bfloat16")], [batch, hidden]))
        y = mtf.einsum([h, mtf.variable("w", [hidden, wide], dtype="bfloat16")], [batch, wide])
        program = mtf.lower({"y": y}, mesh="fsdp:64", layout="batch:fsdp;wide:fsdp?")
    free = replace(mtf.Physics(), early_exposed=0.0)
    before, after = (mtf.estimate(program, "v5p-4x4x4", c, physics=free) for c in (mtf.XLA_TPU, SUMS))
    zeros = hbm_seconds(Slice("v5p-4x4x4").chip, GATHERED)
    assert after.step_seconds - before.step_seconds == pytest.approx(zeros, rel=0.01)


def test_windowed_einsums_have_no_sums() -> None:
    in_pieces = replace(SUMS, windowed_einsum_bytes=0)
    (_, own), (_, rows) = (step("v5p-4x4x4", "fsdp:64", replace(in_pieces, torus_sums=t)) for t in (False, True))
    assert {k: r.seconds for k, r in rows.items()} == {k: r.seconds for k, r in own.items()}
