"""The profiler view: every second of a step belongs to one unit, one operation, one line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import meshlib as mtf
from meshlib.estimation.time.attribution import ROUNDING, divided, moments
from meshlib.estimation.time.scheduling import StepSchedule
from meshlib.estimation.views.profile import UNITS, Measured, Profile
from tests.compilers import BY_OVERLAP, INDEPENDENT
from tests.estimation.test_trace import chain, layered

D = mtf.Dimension


def gapless(made: StepSchedule, est: mtf.Estimate) -> None:
    """The moments follow each other from 0 to the end."""
    at = 0.0
    for m in moments(made, est.slice.chip):
        assert m.begin == pytest.approx(at, rel=1e-9, abs=1e-15)
        assert m.end - m.begin > ROUNDING * m.end
        at = m.end
        if m.event is not None and m.event.loop is not None:
            gapless(m.event.loop, est)
    assert at == pytest.approx(made.seconds, rel=1e-9)


def offloaded() -> mtf.Program:
    """A layer whose activations wait on the host: copies over PCIe take longer than all else."""
    batch, d = D("batch", 4096), D("d", 256)
    with mtf.Graph():
        x = mtf.input("x", [batch, d], "bfloat16")

        def layer(x: mtf.Tensor) -> mtf.Tensor:
            kernel = mtf.variable("w", [d, D("f", 256)], dtype="bfloat16")
            h = mtf.sin(mtf.einsum([x, kernel], [batch, D("f", 256)], name="wi"))
            return mtf.einsum([h, kernel], [batch, d])

        y = mtf.recompute_grad(layer, [x], mtf.Remat(offload=["wi"]))
        train = mtf.optimize.SgdOptimizer(0.1).minimize(mtf.reduce_mean(mtf.square(y)))
        return mtf.lower({}, train, mesh="data:8", layout="batch:data")


@pytest.mark.parametrize("overlap", BY_OVERLAP)
@pytest.mark.parametrize("build", [chain, layered, offloaded])
def test_every_moment_belongs_to_one_unit(build, overlap) -> None:
    fed = mtf.HostInput(examples_per_second=1e6)
    est = mtf.estimate(build(), "v3-8", BY_OVERLAP[overlap])
    for one in (est, mtf.estimate(build(), "v3-8", BY_OVERLAP[overlap], input=fed)):
        gapless(one.schedule, one)
        found = one.profile()
        assert sum(found.seconds.values()) == pytest.approx(one.step_seconds, rel=1e-9)
        assert sum(map(found.share, UNITS)) == pytest.approx(1)
        for view in ("kind", "line", "operation", "phase"):
            assert sum(p.total_seconds for p in found.by(view)) == pytest.approx(one.step_seconds, rel=1e-9)
            for unit, busy in found.busy_seconds.items():
                together = sum(p.busy_seconds.get(unit, 0.0) for p in found.by(view))
                assert together >= busy * (1 - 1e-9)  # as much, but for several ICI axes at once
        assert sum(s for _, _, s in divided(one.schedule, one.slice.chip)) == pytest.approx(one.schedule.seconds)
        assert found.busy_seconds["MXU"] == one.engine_seconds["mxu"]
        assert found.seconds["host"] >= one.input_wait_seconds
    assert est.profile().seconds["host"] == pytest.approx(est.schedule.host_exposed_seconds)


def test_waiting_is_given_to_the_collective_that_is_waited_for() -> None:
    """A step of one gather that nothing hides, and one product: their times are those of their rows."""
    batch, d, f = D("batch", 8192), D("d", 4096), D("f", 4096)
    with mtf.Graph():
        x = mtf.input("x", [batch, d], "bfloat16")
        w = mtf.variable("w", [d, f], dtype="bfloat16")
        program = mtf.lower({"y": mtf.einsum([x, w])}, mesh="data:8", layout="batch:data;d:data?")
    est = mtf.estimate(program, "v3-8", mtf.NO_OVERLAP)
    found = est.profile()
    rows = {r.opcode: r for r in est.rows}
    gather, product = rows["all_gather"], rows["einsum"]
    by_kind = {p.name: p for p in found.by("kind")}
    assert by_kind["all_gather"].seconds["ICI"] == pytest.approx(gather.ici_seconds)
    assert by_kind["all_gather"].seconds["latency"] == pytest.approx(gather.latency_seconds)
    assert by_kind["einsum"].seconds["MXU"] == pytest.approx(product.seconds - product.latency_seconds)
    assert found.mxu_share == pytest.approx(product.mxu_seconds / est.step_seconds)
    assert found.seconds["ICI"] == pytest.approx(gather.ici_seconds)
    # Hidden, it works as long and bounds nothing.
    hidden = mtf.estimate(layered(), "v3-8", INDEPENDENT).profile()
    assert hidden.seconds["ICI"] < hidden.busy_seconds["ICI"]


def test_lines_are_the_users() -> None:
    with mtf.Graph():
        x = mtf.input("x", [D("batch", 8192), D("a", 1024)], "bfloat16")
        y = mtf.einsum([x, mtf.variable("w", [D("a", 1024), D("b", 1024)], dtype="bfloat16")])
        z = mtf.sin(y)
        program = mtf.lower({"y": y, "z": z}, mesh="data:8", layout="batch:data")
    lines = [p.name for p in mtf.estimate(program, "v3-8").profile().by("line")]
    assert lines[0].startswith("test_profile.py:")
    text = str(mtf.estimate(program, "v3-8").profile())
    assert "the MXU works" in text
    assert lines[0] in text


def test_measured_stands_beside() -> None:
    est = mtf.estimate(chain(), "v3-8")
    names = [p for p in est.profile().parts if p.kind == "einsum"]
    seen = Measured(2.0, {(p.name, p.kind, p.source, p.phase): 0.25 for p in names}, 0.5, "8 x chip", 3)
    found = est.profile(seen)
    by_kind = {p.name: p for p in found.by("kind")}
    assert by_kind["einsum"].measured_seconds == pytest.approx(0.25 * len(names))
    assert "measured on 8 x chip, mean of 3 steps: 2 s a step" in str(found)
    assert "500 ms of" in str(replace(seen, seconds={})) or "500 ms" in str(seen)
    assert str(found).count("measured") > 2


def test_rows_and_picture(tmp_path: Path) -> None:
    found = mtf.estimate(layered(), "v3-8").profile()
    assert isinstance(found, Profile)
    assert "more" in found.table(1)
    assert "more" not in found.table(None)
    pytest.importorskip("matplotlib", reason="a picture needs the extra 'plot'")
    found.plot(tmp_path / "profile.png")
    assert (tmp_path / "profile.png").read_bytes()[1:4] == b"PNG"


def test_faults_are_named() -> None:
    est = mtf.estimate(chain(), "v3-8")
    with pytest.raises(mtf.GraphError, match=r"measured must be what run\.profile.*got int 3"):
        est.profile(3)  # type: ignore[arg-type]
    with pytest.raises(mtf.GraphError, match=r"view must be 'kind' or 'line'.*got 'lines'.*'line'"):
        est.profile().by("lines")
    with pytest.raises(mtf.GraphError, match=r"unit must be 'MXU'.*got 'mxu'"):
        est.profile().share("mxu")
    with pytest.raises(mtf.GraphError, match=r"rows must not be negative, got -1"):
        est.profile().table(-1)


def test_a_step_that_waits_for_latency_says_so() -> None:
    b = mtf.Dimension("b", 8)
    with mtf.Graph():
        program = mtf.lower({"y": mtf.reduce_sum(mtf.input("x", [b]))}, mesh="d:8", layout="b:d")
    text = str(mtf.estimate(program, "v5e-8").profile())
    assert "  latency   100.0%" in text
    assert "latency, in which no unit works: starts and hops of collectives 88.0%, starts of kernels 8.0%, the " in text
    assert "larger blocks on each device would hide latency" in text
    assert "idle" not in text
    assert "aim at" not in text
