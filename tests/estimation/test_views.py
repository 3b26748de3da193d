"""Estimates as a newcomer meets them: views, marks, money, wrong arguments, programs that do nothing."""

from __future__ import annotations

import dataclasses
import re

import pytest

import meshlib as mtf
from hardware import CHIPS, Slice
from meshlib.core.text import seconds_text, usd_text
from meshlib.estimation.views.difference import difference
from tests.estimation.test_trace import layered

D = mtf.Dimension


@pytest.fixture(scope="module")
def est() -> mtf.Estimate:
    return mtf.estimate(layered(), "v3-8")


@pytest.fixture(scope="module")
def idle() -> mtf.Estimate:
    """Of a program that only passes its input on."""
    with mtf.Graph():
        return mtf.estimate(mtf.lower({"y": mtf.input("x", [D("b", 8)])}, mesh="data:8"), "v3-8")


def test_memory_over_time(est):
    memory = est.memory
    lines = memory.over_time(6).splitlines()
    assert len(lines) == 1 + 6 + 1
    assert lines[-1] == "bytes of one device of v3-8 in tiles, exact for the program's order"
    for kind in ("total", "variables", "slots", "activations", "gradients"):
        assert kind in lines[0]
    # The peak is among the moments, with the longest bar.
    (full,) = (line for line in lines if "#" * 20 in line)
    assert "scan layers/grad/scan" in full
    assert re.search(r"\b(\d+ %)", full)
    assert len(memory.over_time(10**6).splitlines()) == len(memory.timeline_bytes) + 2
    assert repr(memory).startswith("<DeviceMemory: needs ")
    for rows in (0, -1, 1.5, "x"):
        with pytest.raises(mtf.MeshlibError, match="over_time"):
            memory.over_time(rows)


def test_every_line_says_what_is_exact_and_what_is_modelled(est):
    for line in est.table(0).splitlines()[1:9]:
        assert ("exact" in line) != ("modelled" in line), line
    for line in est.compare(est).splitlines()[3:]:
        assert line.split()[-1] in ("exact", "modelled", "assumed"), line
    assert "again: runs a second time" in est.table(None)
    phases = {line.split()[2] for line in est.table(None).splitlines() if line.startswith("layers/ffn/wi ")}
    assert phases == {"forward", "again"}


def test_money(est):
    assert est.usd(0) == 0
    assert est.usd(1000) == pytest.approx(1000 * est.usd())
    assert est.epoch_usd(1000, 512) == est.usd(2)
    assert usd_text(est.usd(1000)) in est.table(0)
    free = Slice("v3-8", dataclasses.replace(CHIPS["v3"], usd_per_chip_hour=None))
    unpriced = mtf.estimate(est.program, free)
    assert "$" not in unpriced.table()
    with pytest.raises(mtf.SliceError, match="no list price of v3"):
        unpriced.usd()
    for steps in ("x", 1.5, True, None):
        with pytest.raises(mtf.MeshlibError, match="steps must be an integer"):
            est.usd(steps)


def test_the_fixed_cost_of_a_step_adds_up(est):
    slow = mtf.estimate(est.program, "v3-8", dataclasses.replace(mtf.XLA_TPU, step_overhead_seconds=0.25))
    assert slow.step_seconds - est.step_seconds == pytest.approx(0.25 - 0.5e-6)
    assert slow.bound == "latency"
    assert slow.bound_seconds["latency"] > 0.25
    for seconds in (float("nan"), float("inf"), "1", -1e-9):
        with pytest.raises(mtf.GraphError, match="step_overhead_seconds"):
            dataclasses.replace(mtf.XLA_TPU, step_overhead_seconds=seconds)


def test_a_program_that_does_nothing(idle, est, tmp_path):
    assert idle.step_seconds == 0.5e-6
    assert (idle.flops, idle.mfu, idle.comm_seconds, idle.rows, idle.roofline()) == (0, 0.0, 0.0, (), [])
    assert idle.bound == "latency"
    assert idle.fits
    assert "new" in idle.compare(est)
    assert "0%" in idle.table()
    idle.save_trace(tmp_path / "idle.json")
    assert mtf.scaling(lambda _: idle.program, ["v3-8"]).efficiency == (0.0,)


def test_wrong_arguments(est, tmp_path):
    for rows in ("x", 1.5, True, -1):
        with pytest.raises(mtf.GraphError, match="rows must be a number of rows or None"):
            est.table(rows)
    with pytest.raises(mtf.GraphError, match="expected an Estimate, got NoneType None"):
        est.compare(None)
    for path in (None, b"x", 3):
        with pytest.raises(mtf.GraphError, match="the path must be text"):
            est.save_trace(path)
    with pytest.raises(mtf.GraphError, match="it is a folder"):
        est.save_trace(tmp_path)
    with pytest.raises(mtf.GraphError, match=r"expected a program from mtf\.lower, got int 3"):
        mtf.scaling(lambda _: 3, ["v3-8"])
    with pytest.raises(mtf.GraphError, match="physics must be"):
        mtf.estimate(est.program, "v3-8", physics=3)


def test_alike_rows_of_unrolled_layers_are_one() -> None:
    """Whose totals are those of all of them together."""
    d, e = mtf.Dimension("d", 16), mtf.Dimension("e", 32)
    with mtf.Graph():
        x = mtf.input("x", [mtf.Dimension("batch", 8), d])
        for n in range(7):
            wide = mtf.tanh(mtf.einsum([x, mtf.variable(f"in_{n}", [d, e])], output_shape=[x.shape[0], e]))
            x = x + mtf.einsum([wide, mtf.variable(f"out_{n}", [e, d])], output_shape=[x.shape[0], d])
    est = mtf.estimate(mtf.lower({"x": x}, mesh="m:4", layout="e:m"), "v5e-4")
    text = est.table(rows=None)
    (line,) = [row for row in text.splitlines() if row.startswith("all_reduce")]
    assert " x7 " in line
    total = sum(r.total_seconds for r in est.rows if r.opcode == "all_reduce")
    assert seconds_text(total) in line
    rows = text.partition("operation ")[2].partition("* modelled")[0].splitlines()[1:]
    folded = [int(found[1]) if (found := re.search(r" x(\d+)  ", row)) else 1 for row in rows]
    assert sum(folded) == len(est.rows)


class Parts:
    """An estimate whose step is divided as given."""

    def __init__(self, est: mtf.Estimate, **seconds: float) -> None:
        self.est, self.step_seconds = est, sum(seconds.values())
        self.bound_seconds = dict.fromkeys(est.bound_seconds, 0.0) | seconds

    def __getattr__(self, name: str) -> object:
        return getattr(self.est, name)


def test_a_difference_names_what_takes_back_much_of_its_cause(est):
    first, second = Parts(est, mxu=5.0, ici=1.0), Parts(est, mxu=2.0, ici=3.0)
    assert difference(first, second).endswith("because products take 3 s less, though it waits 2 s more for ICI.")
    assert "because products take 3 s more" in difference(second, first)
    assert difference(second, first).endswith(", though it waits 2 s less for ICI.")
    assert "though" not in difference(first, Parts(est, mxu=2.0, ici=1.1))


def test_jitter_leaves_the_schedule_as_it_is() -> None:
    with mtf.Graph():
        x, w = mtf.input("x", "batch:512;d:512"), mtf.variable("w", "d:512;f:512")
        program = mtf.lower(
            {"y": mtf.einsum([x, w], output_shape="batch:512;f:512")}, mesh="data:8", layout="batch:data"
        )
    est = mtf.estimate(program, "2*v5e-4")
    other = est.with_physics(dataclasses.replace(est.physics, slice_jitter=0.05))
    fresh = mtf.estimate(program, "2*v5e-4", physics=other.physics)
    assert other.schedule is est.schedule
    assert other.step_seconds == fresh.step_seconds > est.step_seconds
