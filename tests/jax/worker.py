"""One of two processes with four CPU devices each: trains, saves and loads together with the other.

python tests/jax/worker.py INDEX PORT FOLDER EXAMPLE ...
"""

from __future__ import annotations

import copy
import os
import sys
from contextlib import redirect_stdout
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))
if __name__ == "__main__":  # who looks for doctests imports this file, too
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "").replace("device_count=8", "device_count=4")

import jax
import numpy as np

import meshlib as mtf
from tests.jax.examples_run import EXAMPLES
from tests.jax.models import mlp, mlp_feeds


def trained(run: mtf.jax.OnJax, feeds: list[dict[str, np.ndarray]], folder: Path, name: str) -> None:
    """Two steps, a checkpoint, a third step; then again from the checkpoint, which must be the same."""
    losses = [float(run.step(fed)["loss"]) for fed in feeds[:2]]
    path = folder / f"{name}.safetensors"
    mtf.save(run, path)
    losses.append(float(run.step(feeds[2])["loss"]))
    other = copy.copy(run)  # which is compiled already
    mtf.load(path, other)
    assert float(other.step(feeds[2])["loss"]) == losses[2]
    for variable in run.state:
        assert np.array_equal(run.state[variable], other.state[variable]), variable
    with np.testing.assert_raises(mtf.CheckpointError):  # in both processes, though one alone can't write
        mtf.save(run, folder / "absent" / "file")
    if jax.process_index() == 0:
        np.savez(folder / f"{name}.npz", loss=losses, **{n.replace("/", "|"): run.state[n] for n in run.state})
    else:
        _ = [run.state[n] for n in run.state]  # reading takes both


def looped(begun: mtf.jax.OnJax, folder: Path) -> None:
    """`mtf.train` with a folder that both see: stopped after five steps, gone on with by runs of their own."""
    fed = mlp_feeds()
    options = {"folder": folder / "run", "save_every": 2, "keep": 2, "log_every": 2, "progress": False}
    for steps in (5, 8):
        run = copy.copy(begun)
        part = mtf.train(run, [fed[n % 3] for n in range(9)], steps, steps_per_run=2, **options)
        assert (part.step, part.stopped) == (steps, "steps")
    data = mtf.data.arrays({n: np.concatenate([f[n] for f in fed]) for n in fed[0]})
    read: list[int] = []
    columns = data.source.columns
    object.__setattr__(data.source, "columns", lambda numbers: read.extend(numbers) or columns(numbers))
    size = len(fed[0]["x"])
    other = copy.copy(begun)
    mtf.train(other, data.batch(size).repeat(), 8, progress=False)  # each prepares the rows that its devices hold
    assert len(read) == 8 * size // 2, len(read)
    for variable in run.state:
        np.testing.assert_allclose(other.state[variable], run.state[variable], rtol=1e-4, atol=1e-6)
    forward = mlp("rows:2;cols:4", "batch:rows;hidden:cols", training=False)
    found = []
    for measure, rows_read in ((None, 3 * size // 2), (_summed, 3 * size)):  # a function may look at all rows
        read.clear()
        evaluation = mtf.Evaluation(program=forward, data=data.batch(size), every=1, measure=measure)
        found.append(evaluation(run)["loss"])
        assert len(read) == rows_read, len(read)
    np.testing.assert_allclose(found[0], found[1], rtol=1e-6)
    rows = [row["loss"] for row in part.history.rows]
    arrays = {n.replace("/", "|"): run.state[n] for n in run.state}
    np.savez(folder / f"looped.{jax.process_index()}.npz", rows=rows, **arrays)


def _summed(outputs: dict[str, np.ndarray], batch: dict[str, np.ndarray]) -> dict[str, float]:
    count = len(batch["x"])
    return {"loss": float(outputs["loss"]) * count, "count": count}


def main(index: int, port: int, folder: Path, *names: str) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=index)
    assert (len(jax.devices()), len(jax.local_devices())) == (8, 4)
    begun = mtf.on_jax(mlp("rows:2;cols:4", "batch:rows;hidden:cols"), seed=3)
    begun.compiled()  # for all copies
    trained(copy.copy(begun), mlp_feeds(), folder, "mlp")
    looped(begun, folder)
    for name in names:
        with open(folder / f"{name}.{index}.txt", "w") as out, redirect_stdout(out):
            assert EXAMPLES[name](folder, "--on", "jax") == 0
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), *sys.argv[4:])
