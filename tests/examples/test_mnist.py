"""The MNIST example: curves agree under all layouts, the accuracy is reached, the script runs."""

from __future__ import annotations

import numpy as np
import pytest

import meshlib as mtf
from examples import mnist
from meshlib.data.samples import mnist_digits as mnist_data
from tests.effort import some
from tests.paths import SHARED

REAL = SHARED / "data" / "mnist"
LAYOUTS = {
    "replicated": "",
    "data parallel": "batch:rows+cols",
    "model parallel": "hidden:rows+cols",
    "2-D": "batch:rows;hidden:cols",
}


def losses(mesh: str, layout: str, steps: int) -> np.ndarray:
    """The loss curve of a small network on drawn digits, in the exact executor at full precision."""
    images, labels = mnist_data.draw(steps * 16, seed=7)
    with mtf.Graph():
        loss, _ = mnist.network(16, 16)
        train = mtf.optimize.MomentumOptimizer(0.05, momentum=0.9).minimize(loss)
    program = mtf.lower({"loss": loss}, train, mesh=mesh, layout=layout, precision="highest")
    sim = mtf.simulate(program, seed=1, executor="exact")
    batches = zip(np.split(images, steps), np.split(labels, steps), strict=True)
    return np.array([float(sim.step(images=x, labels=y)["loss"]) for x, y in batches])


def test_curves_agree_under_all_layouts_and_are_not_the_unsharded_bits() -> None:
    tried = some([*LAYOUTS], ["replicated", "2-D"])
    curves = {name: losses("rows:2;cols:2", LAYOUTS[name], 35) for name in tried}
    alone = losses("one:1", "", 35)
    assert alone[-1] < 0.7 * alone[0]
    for name, curve in curves.items():
        np.testing.assert_allclose(curve, alone, rtol=1e-4, err_msg=name)
    # Replicas repeat the unsharded order of addition; split sums can't.
    np.testing.assert_array_equal(curves["replicated"], alone)
    for name in tried[1:]:
        assert not np.array_equal(curves[name], alone), name


@pytest.mark.skipif(not REAL.is_dir(), reason="the MNIST files are not beside this checkout")
def test_accuracy_on_real_digits_in_bfloat16(capsys: pytest.CaptureFixture[str]) -> None:
    assert mnist.main(["--data", str(REAL), "--epochs", "4", "--hidden", "512"]) == 0
    out = capsys.readouterr().out
    best = max(float(line.split("accuracy ")[1].split("%")[0]) for line in out.splitlines() if "accuracy" in line)
    assert best >= 94.0


def test_script_runs_on_drawn_digits(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHLIB_OFFLINE", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", "/nonexistent")
    monkeypatch.delenv("MESHLIB_MNIST", raising=False)
    assert mnist.main(["--epochs", "1", "--hidden", "64", "--precision", "float32", "--mesh", "model:8",
                       "--layout", "hidden:model"]) == 0  # fmt: skip
    out = capsys.readouterr().out
    assert "digits drawn by the program" in out
    assert "test accuracy" in out
    assert "all_reduce  model" in out
    assert "memory per core: peak" in out
    assert "v3-8" in out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--mesh", "rows:2;cols:2"], r"has 4 positions, but slice v3-8 has 8 devices"),
        (["--hidden", "10"], r"10 % 4 = 2"),
        (["--layout", "batch:rows;hiden:cols"], r"did you mean 'hidden'"),
        (["--data", "/nonexistent"], r"/nonexistent"),
        (["--slice", "v3-9"], r"v3-8"),
    ],
)
def test_wrong_flags_give_one_message(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    import re

    base = [] if "--data" in flags else ["--data", str(REAL)] if REAL.is_dir() else []
    assert mnist.main([*base, *flags]) == 2
    err = capsys.readouterr().err
    assert err.startswith("mnist.py: ")
    assert re.search(message, err)
    assert "Traceback" not in err
