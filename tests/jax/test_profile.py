"""What JAX's profiler sees of a step, by the instructions of the program."""

from __future__ import annotations

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="the extra 'jax' is not installed")

import meshlib as mtf  # noqa: E402
from hardware import Slice  # noqa: E402
from hardware.chips import CHIPS  # noqa: E402

D = mtf.Dimension


def test_measured_by_instruction_beside_the_estimate() -> None:
    batch, d, f, trips = D("batch", 512), D("d", 512), D("f", 1024), D("trips", 3)
    with mtf.Graph():
        x = mtf.input("x", [batch, d])
        w = mtf.variable("w", [d, f])
        h = mtf.einsum([x, w], [batch, f], name="wide")
        back = mtf.einsum([h, w], [batch, d], name="narrow")

        def trip(carries, _):
            return [mtf.tanh(carries[0], name="in_loop")], []

        (y,), _ = mtf.scan(trip, [back], dim=trips, name="loop")
        program = mtf.lower({"y": mtf.reduce_sum(y)}, mesh="rows:2;cols:2", layout="batch:rows;f:cols")
    run = mtf.on_jax(program)
    seen = run.profile({"x": np.ones((512, 512), np.float32)}, steps=2)
    taken = seen.by("operation")
    assert taken["wide"] > 0
    assert taken["narrow"] > 0
    as_one = " call(" in run.compiled().compiled.as_text()  # JAX 0.11 on CPUs: a small loop is timed as a whole
    assert as_one or any("in_loop" in name for name in taken)
    assert "all_reduce" in seen.by("kind")
    assert seen.device_seconds <= 2 * seen.step_seconds  # of each device
    assert as_one or seen.other_seconds <= 0.5 * seen.device_seconds
    line = next(o.source for o in program.instructions[0].operation.graph.operations if o.name == "wide")
    assert seen.by("line")[line] == pytest.approx(taken["wide"])
    est = mtf.estimate(program, Slice("v5e-4", CHIPS["v5e"]))
    found = {p.name: p for p in est.profile(seen).by("kind")}
    assert found["einsum"].measured_seconds >= taken["wide"] + taken["narrow"]
    assert found["einsum"].total_seconds > 0
    total = sum(p.measured_seconds or 0.0 for p in found.values())
    assert total + seen.other_seconds == pytest.approx(seen.device_seconds)


def test_faults_are_named() -> None:
    with mtf.Graph():
        x = mtf.input("x", [D("batch", 4)])
        run = mtf.on_jax(mtf.lower({"y": mtf.exp(x)}))
    with pytest.raises(mtf.GraphError, match=r"feeds must be arrays by name, got list"):
        run.profile([1])
    with pytest.raises(mtf.GraphError, match=r"steps must be at least 1, got 0"):
        run.profile({"x": np.ones(4)}, steps=0)
    with pytest.raises(mtf.FeedError, match="x"):
        run.profile({})
