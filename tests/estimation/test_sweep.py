"""Scaling over slices: what grows, what stays, what is refused."""

from __future__ import annotations

import builtins
import dataclasses

import pytest

import meshlib as mtf
from hardware import CHIPS, Slice

D = mtf.Dimension


def build(slice_: Slice, batch: int | None = None) -> mtf.Program:
    """Data-parallel; 256 examples a core unless the batch is fixed."""
    rows, inner = D("batch", batch or 256 * slice_.devices), D("inner", 1024)
    with mtf.Graph():
        w = mtf.variable("w", [inner, D("outer", 4096)])
        loss = mtf.reduce_mean(mtf.square(mtf.einsum([mtf.input("x", [rows, inner]), w])))
        train = mtf.optimize.SgdOptimizer(0.1).minimize(loss)
        return mtf.lower({"loss": loss}, train, mesh=f"data:{slice_.devices}", layout="batch:data")


NAMES = ["v3-8", "v3-32", "v3-128"]


def test_a_batch_that_grows_with_the_slice_scales_and_a_fixed_one_does_not():
    weak, strong = mtf.scaling(build, NAMES), mtf.scaling(lambda s: build(s, 2048), NAMES)
    assert weak.efficiency[0] == strong.efficiency[0] == 1
    assert all(e > 0.6 for e in weak.efficiency)
    assert strong.efficiency[-1] < 0.5 < weak.efficiency[-1]
    for made in (weak, strong):
        for e, speed, share in zip(made.estimates, made.speedup, made.efficiency, strict=True):
            assert speed == pytest.approx(share * e.slice.devices / 8)
    text = str(weak)
    for name in NAMES:
        assert name in text
    assert "* modelled; all others exact" in text


def test_bad_arguments(tmp_path, monkeypatch):
    with pytest.raises(mtf.GraphError, match="must take a Slice, got 3"):
        mtf.scaling(3, NAMES)
    with pytest.raises(mtf.GraphError, match="slices is empty"):
        mtf.scaling(build, [])
    with pytest.raises(mtf.MeshlibError, match="slices must be a list"):
        mtf.scaling(build, "v3-8")
    with pytest.raises(mtf.SliceError, match="v3-8"):
        mtf.scaling(build, ["v3-9"])
    with pytest.raises(mtf.SliceError, match="32 devices"):
        mtf.scaling(lambda s: build(Slice("v3-8")), ["v3-32"])
    made = mtf.scaling(build, ["v3-8"])
    with pytest.raises(mtf.GraphError, match=r"ax must be matplotlib Axes, or the path of a file, got int 3"):
        made.plot(3)
    real = builtins.__import__

    def absent(name, *args, **named):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **named)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(mtf.GraphError, match="needs matplotlib"):
        made.plot(tmp_path / "scaling.png")


def test_plot(tmp_path):
    pytest.importorskip("matplotlib", reason="needs matplotlib, the extra 'plot'")
    made = mtf.scaling(build, NAMES)
    made.plot(tmp_path / "scaling.png")
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")
    made.plot(str(tmp_path / "scaling.svg"))
    text = (tmp_path / "scaling.svg").read_text()
    steps = [f"{e.step_seconds * 1e6:.3g} us" for e in made.estimates]
    for word in (
        *NAMES,
        *steps,
        "hbm",
        "ici",
        "step time by bound (modelled)",
        "memory that a device needs (modelled)",
        "100 %",
    ):
        assert f"<!-- {word}" in text, word
    for name in ("nowhere/scaling.png", "scaling.nosuchformat"):
        with pytest.raises(mtf.GraphError, match="can't be written"):
            made.plot(tmp_path / name)


def test_plot_of_what_does_no_product_and_does_not_fit(tmp_path):
    pytest.importorskip("matplotlib", reason="needs matplotlib, the extra 'plot'")

    def build(slice_):
        with mtf.Graph():
            x = mtf.input("x", [D("batch", 2**33), D("one", 8)])
            return mtf.lower({"y": mtf.relu(x)}, mesh=f"data:{slice_.devices}", layout="batch:data")

    made = mtf.scaling(build, ["v3-8", "v5e-8"])
    assert not any(e.fits for e in made.estimates)
    assert made.efficiency == (0.0, 0.0)
    made.plot(tmp_path / "scaling.svg")
    assert "<!-- 0 %" in (tmp_path / "scaling.svg").read_text()


def test_one_chip_kind_may_have_no_price():
    free = Slice("v3-8", dataclasses.replace(CHIPS["v3"], usd_per_chip_hour=None))
    text = str(mtf.scaling(build, [free, "v3-32"]))
    head, first, second, *_ = text.splitlines()
    assert "1,000 steps*" in head
    assert "$" not in first
    assert "$" in second
