"""Scaling over slices: what grows, what stays, what is refused."""

from __future__ import annotations

import builtins

import pytest

import meshlib as mtf
from hardware import Slice

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
    with pytest.raises(mtf.GraphError, match="expected a path, got int 3"):
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
    pytest.importorskip("matplotlib")
    mtf.scaling(build, NAMES).plot(tmp_path / "scaling.png")
    assert (tmp_path / "scaling.png").stat().st_size > 1000
