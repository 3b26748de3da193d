"""Two processes with four CPU devices each, joined by jax.distributed: the same numbers, and one checkpoint."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("jax", reason="needs JAX: pip install -e '.[jax]'")

import meshlib as mtf
from tests.effort import some
from tests.jax.examples_run import EXAMPLES
from tests.jax.models import mlp, mlp_feeds

WORKER = Path(__file__).with_name("worker.py")


def test_two_processes_train_save_and_load(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("MESHLIB_OFFLINE", "1"), ("XDG_CACHE_HOME", str(tmp_path))):  # digits that are drawn
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MESHLIB_MNIST", raising=False)
    (tmp_path / "text.txt").write_text("Layouts never change results, random numbers included. " * 60)
    names = some(list(EXAMPLES), [])  # whole examples take two processes half a minute
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    workers = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(n), str(port), str(tmp_path), *names],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for n in range(2)
    ]
    try:
        said = [w.communicate(timeout=400)[0] for w in workers]
    finally:
        for w in workers:
            w.kill()
    assert [w.returncode for w in workers] == [0, 0], "\n".join(said)[-4000:]

    # Another mesh and layout, simulated.
    program, feeds = mlp("rows:4;cols:2", "batch:cols;hidden:rows"), mlp_feeds()
    sim, found = mtf.simulate(program, seed=3), np.load(tmp_path / "mlp.npz")
    losses = [float(sim.step(fed)["loss"]) for fed in feeds]
    np.testing.assert_allclose(found["loss"], losses, rtol=2e-6)
    for variable in sim.state:
        wanted = sim.state[variable]
        error = np.abs(found[variable.replace("/", "|")] - wanted).max()
        assert error <= 2e-6 * max(1, np.abs(wanted).max()), variable
    resumed = mtf.simulate(program, seed=8)
    mtf.load(tmp_path / "mlp.safetensors", resumed)  # its sums are looked at
    assert float(resumed.step(feeds[2])["loss"]) == pytest.approx(losses[2], rel=2e-6)
    assert not list(tmp_path.glob(".*saving"))

    sim = mtf.simulate(program, seed=3)
    whole = mtf.train(sim, [feeds[n % 3] for n in range(9)], 8, log_every=1, progress=False)
    for n in range(2):
        found = np.load(tmp_path / f"looped.{n}.npz")
        for variable in sim.state:
            error = np.abs(found[variable.replace("/", "|")] - sim.state[variable]).max()
            assert error <= 1e-5 * max(1, np.abs(sim.state[variable]).max()), variable
    kept = ["step_000000007.safetensors", "step_000000008.safetensors"]  # two steps at once from the fifth on
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["history.csv", "history.jsonl", *kept]
    told_rows = mtf.training.read_history(tmp_path / "run" / "history.jsonl")
    assert [row["step"] for row in told_rows] == [2, 4, 5, 7, 8]
    assert told_rows[-1]["loss"] == pytest.approx(whole.history.rows[-1]["loss"], rel=1e-5)

    for name in names:
        assert EXAMPLES[name](tmp_path) == 0
        simulated = told(capsys.readouterr().out)
        assert len(simulated) >= 1
        for n in range(2):
            on_devices = (tmp_path / f"{name}.{n}.txt").read_text()
            assert told(on_devices) == pytest.approx(simulated, rel=2e-4)
            assert "a step, measured" in on_devices
            assert "modelled for measured-8" in on_devices


def told(out: str) -> list[float]:
    """The losses that an example prints, to four places."""
    return [float(x) for x in re.findall(r"^(?:epoch|step) +\d+  loss ([\d.]+)", out, re.MULTILINE)]
