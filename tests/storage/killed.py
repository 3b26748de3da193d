"""A run of training that is killed again and again: `python -m tests.storage.killed FOLDER KILLS [threads|processes]`.

A warm process forks runs that train, evaluate and save, and kills them with SIGKILL after random times; the next one
goes on in the same folder. What is left in the end, and every batch that was fed on the way, must be as of a run that
nobody killed. Worker processes must end after a kill, and no temporary file may be left in the end. It says
how many kills there were.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import meshlib as mtf
from meshlib.training.history import TIMES
from tests.running import children, is_running

STEPS, SAVE_EVERY = 60, 9
FIELDS = {"x": mtf.data.Field("float32", (4,)), "y": mtf.data.Field("float32")}


def network(batch_size: int, is_training: bool) -> mtf.Tensor:
    batch = mtf.Dimension("batch", batch_size)
    x, y = mtf.input("x", [batch, mtf.Dimension("inner", 4)]), mtf.input("y", [batch])
    h = mtf.layers.dense(x, mtf.Dimension("hidden", 6), activation=mtf.relu, name="h")
    h = mtf.dropout(h, is_training=is_training, rate=0.1)
    found = mtf.reduce_sum(mtf.layers.dense(h, mtf.Dimension("one", 1), name="o"), reduced_dim=mtf.Dimension("one", 1))
    return mtf.reduce_mean(mtf.square(found - y), name="loss")


def programs() -> tuple[mtf.Program, mtf.Program]:
    with mtf.Graph():
        loss = network(8, True)
        updates = mtf.optimize.AdamWOptimizer(0.01).minimize(loss)
        training = mtf.lower({"loss": loss}, updates, mesh="rows:2", layout="batch:rows")
    with mtf.Graph():
        return training, mtf.lower({"loss": network(4, False)})


def noisy(example: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {**example, "x": example["x"] + rng.random(4, np.float32)}


class Logged(mtf.data.Feed):
    """Writes down which batch is fed to which step."""

    path: Path

    def __next__(self) -> dict[str, Any]:
        number = self.stats.batches if not hasattr(self, "first") else self.first + self.stats.batches
        batch = super().__next__()
        told = hashlib.sha1(b"".join(batch[name].tobytes() for name in sorted(batch))).hexdigest()
        with self.path.open("a") as log:
            log.write(f"{number} {told}\n")
        return batch

    def state(self) -> dict[str, Any]:
        return {**super().state(), "batches": getattr(self, "first", 0) + self.stats.batches}

    def restore(self, state: Any) -> None:
        super().restore(state)
        self.first = state["batches"]


class Runs:
    def __init__(self, base: Path, kind: str) -> None:
        self.base = base
        rng = np.random.default_rng(0)
        made = ({"x": rng.random(4, np.float32), "y": n / 50} for n in range(37))
        mtf.records.write(base / "data@3", map(mtf.records.encode, made))
        self.training, self.evaluated = programs()
        source = mtf.data.records(base / "data@3", FIELDS, interleave=2)
        mapped = source.shuffle(1).map(noisy, seed=2).parallel(2, kind)
        self.data = mapped.batch(8, "pad").repeat().prefetch(2)
        self.held_out = source.batch(4)

    def train(self, name: str) -> None:
        feed = Logged(self.data)
        feed.path = self.base / f"{name}.log"
        evaluation = mtf.Evaluation(program=self.evaluated, data=self.held_out, every=7)
        sim = mtf.simulate(self.training, seed=3)
        mtf.train(
            sim, feed, STEPS, evaluation=evaluation, folder=self.base / name, save_every=SAVE_EVERY, keep=2, log_every=4
        )
        feed.close()

    def forked(self, name: str) -> int:
        pid = os.fork()
        if pid:
            return pid
        status = 1
        try:
            self.train(name)
            status = 0
        finally:
            os._exit(status)

    def killed(self, pid: int, after_seconds: float) -> bool:
        """Whether it was killed, and had not ended before."""
        end = time.monotonic() + after_seconds
        while time.monotonic() < end:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                assert status == 0, status
                return False
            time.sleep(0.002)
        workers = children(pid)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        end = time.monotonic() + 2
        while (left := [worker for worker in workers if is_running(worker)]) and time.monotonic() < end:
            time.sleep(0.01)
        assert not left, f"orphans: {left}"
        return True

    def left(self, name: str) -> tuple[list[bytes], list[dict[str, Any]]]:
        folder = self.base / name
        files = [folder / f"step_{STEPS:09d}.safetensors", folder / "best.safetensors"]
        rows = mtf.training.read_history(folder / "history.jsonl")
        return [f.read_bytes() for f in files], [{k: v for k, v in row.items() if k not in TIMES} for row in rows]

    def fed(self, name: str) -> list[list[str]]:
        lines = (self.base / f"{name}.log").read_text().split("\n")[:-1]
        return [line.split() for line in lines]


def main(base: Path, kills: int, kind: str = "threads") -> None:
    runs, draw = Runs(base, kind), random.Random(0)
    begun = time.monotonic()
    assert os.waitpid(runs.forked("whole"), 0)[1] == 0
    whole_seconds = time.monotonic() - begun
    wanted = dict(runs.fed("whole"))
    assert len(wanted) >= STEPS
    done = 0
    while done < kills:
        shutil.rmtree(base / "again", ignore_errors=True)
        (base / "again.log").unlink(missing_ok=True)
        while done < kills and runs.killed(runs.forked("again"), draw.random() * whole_seconds):
            done += 1
        assert os.waitpid(runs.forked("again"), 0)[1] == 0
        assert runs.left("again") == runs.left("whole")
        names = [sorted(path.name for path in (base / name).iterdir()) for name in ("again", "whole")]
        assert names[0] == names[1], names
        for number, told in runs.fed("again"):
            assert wanted[number] == told, f"batch {number}"
    print(json.dumps({"kills": done}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
