"""Two processes with four CPU devices each, joined by jax.distributed: the same numbers, and one checkpoint."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("jax", reason="needs JAX: pip install -e '.[jax]'")

import meshlib as mtf
from tests.jax.models import mlp, mlp_feeds, transformer, transformer_feeds

WORKER = Path(__file__).with_name("worker.py")


def test_two_processes_train_save_and_load(tmp_path: Path) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    workers = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(n), str(port), str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for n in range(2)
    ]
    try:
        said = [w.communicate(timeout=240)[0] for w in workers]
    finally:
        for w in workers:
            w.kill()
    assert [w.returncode for w in workers] == [0, 0], "\n".join(said)[-4000:]
    models = {
        "mlp": (mlp("rows:4;cols:2", "batch:cols;hidden:rows"), mlp_feeds()),
        "transformer": (transformer("data:4", "data"), transformer_feeds()),
    }
    for name, (program, feeds) in models.items():
        found = np.load(tmp_path / f"{name}.npz")
        sim = mtf.simulate(program, seed=3)  # another mesh and layout
        losses = [float(sim.step(fed)["loss"]) for fed in feeds]
        np.testing.assert_allclose(found["loss"], losses, rtol=2e-6)
        for variable in sim.state:
            wanted = sim.state[variable]
            np.testing.assert_allclose(
                found[variable.replace("/", "|")], wanted, atol=2e-6 * max(1, np.abs(wanted).max())
            )
        resumed = mtf.simulate(program, seed=8)
        mtf.load(tmp_path / f"{name}.safetensors", resumed)  # sums and all
        assert float(resumed.step(feeds[2])["loss"]) == pytest.approx(losses[2], rel=2e-6)
    assert not list(tmp_path.glob(".*saving"))
