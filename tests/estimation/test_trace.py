"""Traces by Perfetto's rules: what tracks hold, loops, marks, counters; whole files."""

from __future__ import annotations

import gzip
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

import meshlib as mtf
from meshlib.estimation.views import trace
from tests.compilers import BY_OVERLAP

D = mtf.Dimension
ENGINES = ("mxu", "vpu", "hbm")


def check_trace(est: mtf.Estimate, text: str | None = None) -> list[dict]:
    """Perfetto's rules, and names that the user knows; returns the slices."""
    events = json.loads(text)["traceEvents"] if text else trace.trace_events(est)
    tracks = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert len(set(tracks.values())) == len(tracks)
    names = {r.name for r in est.rows}
    ends: dict[int, float] = {}
    flows: dict[int, dict[str, dict]] = {}
    last = 0.0
    for e in events:
        assert e["ph"] in "MXCsf"
        if e["ph"] == "M":
            continue
        assert e["ts"] >= last, "time goes on"
        last = e["ts"]
        if e["ph"] == "C":
            held = dict(e["args"])
            if e["name"] == trace.WORKING:
                assert 0 <= held["MXU"] <= 100
                continue
            assert held.pop("total") == sum(held.values()) <= est.memory.peak_bytes
            continue
        if e["ph"] in "sf":
            flows.setdefault(e["id"], {})[e["ph"]] = e
            continue
        assert e["cat"] == tracks[e["tid"]]
        assert e["dur"] > 0
        assert e["ts"] >= ends.get(e["tid"], 0.0) - 1e-6, f"{e['name']} overlaps on {e['cat']}"
        ends[e["tid"]] = e["ts"] + e["dur"]
        if e["cat"] not in (trace.PHASE, trace.BOUND, "loop", "loop, depth 2"):
            name = e["name"].removesuffix(" (again)")
            known = name in names or name.partition(" of ")[2] in names or "more trips" in name
            assert known or name == "step overhead", name
    if ends:
        assert max(ends.values()) == pytest.approx(est.step_seconds * 1e6, abs=2e-3)
    slices = [e for e in events if e["ph"] == "X"]
    check_flows(slices, flows)
    return slices


def check_flows(slices: list[dict], flows: dict[int, dict[str, dict]]) -> None:
    """Each begins with a slice of a collective and ends with one that starts later, as Perfetto binds them."""
    beginning = {(e["tid"], e["ts"]): e for e in slices}
    for flow in flows.values():
        origin, target = (beginning[flow[ph]["tid"], flow[ph]["ts"]] for ph in "sf")
        assert "sent_bytes (exact)" in origin["args"]
        assert origin["name"] == flow["s"]["name"]
        assert target["ts"] >= origin["ts"]
        assert flow["f"]["bp"] == "e"


def total(slices: list[dict], track: str) -> float:
    """Seconds on a track."""
    return sum(e["dur"] for e in slices if e["cat"] == track) * 1e-6


def chain(count: int = 4, mesh: str = "data:2;model:4", layout: str = "batch:data;in:model") -> mtf.Program:
    dims = [D("in", 4096), D("out", 4096)]
    with mtf.Graph():
        x = mtf.input("x", [D("batch", 8192), dims[0]], "bfloat16")
        for n in range(count):
            a, b = dims[n % 2], dims[(n + 1) % 2]
            x = mtf.einsum([x, mtf.variable(f"w{n}", [a, b], dtype="bfloat16")], [D("batch", 8192), b], name=f"mm{n}")
        return mtf.lower({"y": x}, mesh=mesh, layout=layout)


def layered(layers: int = 6) -> mtf.Program:
    """A training step of scanned feed-forward layers with weights gathered in every trip, and a microbatch loop."""
    batch, d, f, loop = D("batch", 4096), D("d", 1024), D("f", 4096), D("layers", layers)

    def layer(carries, slices):
        with mtf.scope("ffn"):
            h = mtf.sin(mtf.einsum([carries[0], slices[0]], [batch, f], name="wi"))
            return [carries[0] + mtf.einsum([h, slices[1]], [batch, d], name="wo")], []

    with mtf.Graph():
        x = mtf.input("x", [batch, d], "bfloat16")
        weights = [mtf.variable(n, [loop, *s], dtype="bfloat16") for n, s in (("wi", (d, f)), ("wo", (f, d)))]
        (y,), _ = mtf.scan(layer, [x], weights, loop, name="layers")
        loss = mtf.reduce_mean(mtf.square(y))
        train = mtf.optimize.SgdOptimizer(0.1).minimize(loss)
        return mtf.lower({"loss": loss}, train, mesh="data:4;model:2", layout="batch:data;f:model;d:data?")


def test_trace_is_whole_or_not_there(tmp_path: Path) -> None:
    est = mtf.estimate(chain(), "v3-8")
    path = tmp_path / "step.json"
    est.save_trace(path)
    check_trace(est, path.read_text())
    assert json.loads(path.read_text())["otherData"]["layout"] == "batch:data;in:model"
    assert [p.name for p in tmp_path.iterdir()] == ["step.json"]
    est.save_trace(tmp_path / "step.json.gz")
    check_trace(est, gzip.decompress((tmp_path / "step.json.gz").read_bytes()).decode())
    (tmp_path / "step.json.gz").unlink()
    est.save_trace(str(path))
    with pytest.raises(mtf.GraphError, match=r"nowhere.* can't be written"):
        est.save_trace(tmp_path / "nowhere" / "step.json")
    (tmp_path / "folder").mkdir()
    with pytest.raises(mtf.GraphError, match="can't be written"):
        est.save_trace(tmp_path / "folder")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["folder", "step.json"]
    with pytest.raises(mtf.GraphError, match=r"the path must be text.*got int 3"):
        est.save_trace(3)  # type: ignore[arg-type]


@pytest.mark.parametrize("overlap", BY_OVERLAP)
def test_tracks_hold_what_the_estimate_says(overlap: str) -> None:
    est = mtf.estimate(layered(), "v3-8", BY_OVERLAP[overlap])
    slices = check_trace(est)
    assert total(slices, trace.EXPOSED) == pytest.approx(est.exposed_comm_seconds, rel=0.01, abs=2e-8)
    assert total(slices, "mxu") == pytest.approx(est.engine_seconds["mxu"], rel=0.01)
    # Nothing works beyond its group.
    for engine in ENGINES:
        assert total(slices, engine) <= total(slices, trace.CORE)
    phases = [e["name"] for e in slices if e["cat"] == trace.PHASE]
    assert phases[0] == "forward"
    assert "update" in phases[-2:]  # after it comes the mean of the losses, for which nobody waits


def test_arrows_lead_from_what_is_sent_to_all_that_read_it() -> None:
    program = layered()
    events = trace.trace_events(mtf.estimate(program, "v3-8"))
    named = {
        (e["tid"], e["ts"]): e["name"].removesuffix(" (again)").rpartition(" of ")[2] for e in events if e["ph"] == "X"
    }
    begun = {e["id"]: named[e["tid"], e["ts"]] for e in events if e["ph"] == "s"}
    arrows = {(begun[e["id"]], named[e["tid"], e["ts"]]) for e in events if e["ph"] == "f"}
    readers: dict[str, set[str]] = {}  # of each collective, the operations of the groups that read it
    bodies = [program, *(i.body for i in program.instructions if hasattr(i, "body"))]
    for body in bodies:
        for sender in body.instructions:
            groups = {i.group for i in body.instructions if sender.is_collective and {*sender.outputs} & {*i.inputs}}
            names = {i.operation.name for i in body.instructions if i.group in groups}
            for sent in (sender.operation.name, *(x.tensor.name for x in sender.inputs)):
                readers.setdefault(sent, set()).update(names)
    assert len(arrows) >= 5
    for origin, target in arrows:
        assert target in readers[origin], (origin, target)
    assert any(name.startswith("layers/ffn") for _, name in arrows)


def test_loops_show_their_trips_and_what_runs_again() -> None:
    est = mtf.estimate(layered(), "v3-8")
    slices = check_trace(est)
    trips = [e["name"] for e in slices if e["cat"] == "loop"]
    assert trips[:6] == [f"layers {n}/6" for n in range(1, 7)]
    assert len(trips) == 12
    core = [e["name"] for e in slices if e["cat"] == trace.CORE]
    assert core.count("layers/ffn/wi") == 6
    assert core.count("layers/ffn/wi (again)") == 6


def test_a_long_loop_ends_in_one_slice_for_each_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    est = mtf.estimate(layered(200), "v3-8")
    monkeypatch.setattr(trace, "SLICE_LIMIT", 2000)
    slices = check_trace(est)
    assert len(slices) < 2500
    rest = [e for e in slices if "more trips" in e["name"]]
    assert {"core", "mxu", "hbm", "loop"} <= {e["cat"] for e in rest}
    for name in ("layers", "layers/grad/scan"):
        shown = sum(re.fullmatch(rf"{name} \d+/200", e["name"]) is not None for e in slices)
        assert {e["name"] for e in rest if e["name"].startswith(f"{name}:")} == {f"{name}: {200 - shown} more trips"}
    # What the engine does in the rest of the loop is that share of the slice.
    busy = total([e for e in slices if e not in rest], "mxu")
    share = "share of the time that it works (modelled)"
    busy += sum(e["dur"] * 1e-6 * e["args"][share] for e in rest if e["cat"] == "mxu")
    assert busy == pytest.approx(est.engine_seconds["mxu"], rel=0.01)


def test_memory_is_counted_from_the_first_group_to_the_end() -> None:
    est = mtf.estimate(layered(), "v3-8")
    counters = [e for e in trace.trace_events(est) if e["ph"] == "C" and e["name"] == trace.COUNTER]
    assert counters[0]["ts"] == 0
    assert counters[-1]["ts"] == pytest.approx(est.step_seconds * 1e6, abs=2e-3)
    assert max(e["args"]["total"] for e in counters) == max(est.memory.timeline_bytes)
    assert {"total", "variables", "activations", "gradients"} <= counters[0]["args"].keys()
    assert {e["name"] for e in counters} == {"HBM bytes (exact)"}


def test_the_fixed_cost_of_a_step_is_shown() -> None:
    est = mtf.estimate(chain(), "v3-8", replace(mtf.XLA_TPU, step_overhead_seconds=1e-3))
    (last,) = (e for e in check_trace(est) if e["name"] == "step overhead")
    assert last["dur"] == pytest.approx(1000, rel=1e-6)


def test_what_is_passed_on_a_link_stops_for_it() -> None:
    with mtf.Graph():
        est = mtf.estimate(mtf.lower({"x": mtf.input("x", [D("n", 4)])}, mesh="p:4"), "v5e-4")
    sent = [("large", 0, 10), ("small", 4, 6), ("least", 4, 5), ("alone", 20, 21)]
    spans = [trace.Span("ici axis 0", name, begin, end, {}) for name, begin, end in sent]
    core = trace.Span("core", "large", 0, 10, {})
    found = sorted((s.begin, s.end, s.name) for s in trace._serialised(est, [*spans, core]) if s.track != "core")
    assert found == [(0, 4, "large"), (4, 5, "least"), (5, 7, "small"), (7, 13, "large"), (20, 21, "alone")]
    assert core in trace._serialised(est, [*spans, core])
