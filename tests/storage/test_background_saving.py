"""Checkpoints that are written while training goes on: what they hold, who waits for them, where errors surface."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import meshlib as mtf
from meshlib.core import files
from meshlib.simulation.state import State
from meshlib.training.checkpoints import Background
from tests.training.test_training import data, evaluation, program, state

OPTIONS: dict[str, Any] = {"log_every": 1, "progress": False}


class Disk:
    """A disk that is slow, or full, for checkpoints of some steps: writing one waits for `free`."""

    def __init__(self, steps: tuple[int, ...], full: bool = False) -> None:
        self.names = [f"step_{step:09d}" for step in steps]
        self.full, self.free, self.reached = full, threading.Event(), threading.Event()

    def changing(self, call: str, path: str) -> None:
        if call == "write" and any(name in path for name in self.names):
            self.reached.set()
            assert self.free.wait(60)
            if self.full:
                raise OSError(28, "No space left on device")


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Disk]:
    made = Disk(*request.param)
    monkeypatch.setattr(files, "changing", made.changing)
    yield made
    made.free.set()


def batches(at: int, then: Any) -> Iterator[Any]:
    """The data; before the batch of step `at` is made, `then` is called."""
    for n, batch in enumerate(data(), start=1):
        if n == at:
            then()
        yield batch


def reference(steps: int, folder: Path) -> dict[str, bytes]:
    """What the files are of a run of so many steps with no disk that is slow."""
    mtf.train(program(), batches(0, None), steps, folder=folder, save_every=2, keep=9, **OPTIONS)
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


@pytest.mark.parametrize("disk", [((2,),)], indirect=True)
def test_steps_go_on_and_the_checkpoint_is_of_its_own_step(disk: Disk, tmp_path: Path) -> None:
    written = tmp_path / "slow" / "step_000000002.safetensors"

    def then() -> None:  # step 2 is over, and so are three more
        assert disk.reached.wait(60)
        assert not written.exists()
        disk.free.set()

    disk.free.set()
    whole = reference(6, tmp_path / "whole")
    disk.free.clear()
    mtf.train(program(), batches(4, then), 6, folder=tmp_path / "slow", save_every=2, keep=9, **OPTIONS)
    made = {path.name: path.read_bytes() for path in (tmp_path / "slow").glob("*.safetensors")}
    assert made == whole
    assert sorted(whole) == [f"step_{n:09d}.safetensors" for n in (2, 4, 6)]


@pytest.mark.parametrize("disk", [((2,),)], indirect=True)
def test_one_is_in_flight(disk: Disk, tmp_path: Path) -> None:
    """The checkpoint of step 4 waits for that of step 2, whose memory it takes; the step after it does not run."""
    disk.free.set()
    whole = reference(6, tmp_path / "whole")
    disk.free.clear()
    reached: list[int] = []
    timer = threading.Timer(0.3, disk.free.set)

    def report(row: dict[str, Any]) -> None:
        if row["step"] == 2:
            timer.start()
        reached.append(row["step"] if disk.free.is_set() else -row["step"])

    options = {"folder": tmp_path / "slow", "save_every": 2, "keep": 9, "report": report, **OPTIONS}
    mtf.train(program(), batches(0, None), 6, **options)
    assert reached == [-1, -2, -3, -4, 5, 6]
    assert {path.name: path.read_bytes() for path in (tmp_path / "slow").glob("*.safetensors")} == whole


@pytest.mark.parametrize("disk", [((6,), True)], indirect=True)
def test_an_error_surfaces_at_the_next_step(disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only when the next checkpoint is to be written, at step 12."""
    taken: list[int] = []
    tasks: list[Any] = []
    start = Background.start

    def started(background: Background, task: Any) -> None:
        start(background, task)
        tasks.append(background._task)

    monkeypatch.setattr(Background, "start", started)

    def then() -> None:
        assert disk.reached.wait(60)
        disk.free.set()
        while not any(task.done() and task.exception() for task in tasks):
            time.sleep(0.001)

    with pytest.raises(mtf.CheckpointError, match=r"step_000000006\.safetensors can't be written: No space left"):
        mtf.train(
            program(), batches(7, then), 99, folder=tmp_path, save_every=6,
            report=lambda row: taken.append(row["step"]), **OPTIONS,
        )  # fmt: skip
    assert taken[-1] in (6, 7)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["history.jsonl"]
    disk.names = []
    trained = mtf.train(program(), batches(0, None), 8, folder=tmp_path, save_every=2, **OPTIONS)
    assert state(trained.run) == state(mtf.train(program(), data(), 8, progress=False).run)


@pytest.mark.parametrize("disk", [((3,), True)], indirect=True)
def test_an_error_of_the_last_checkpoint_surfaces_at_the_end(disk: Disk, tmp_path: Path) -> None:
    disk.free.set()
    with pytest.raises(mtf.CheckpointError, match="No space left"):
        mtf.train(program(), data(), 3, folder=tmp_path, **OPTIONS)
    assert not (tmp_path / "train.pid").exists()


@pytest.mark.parametrize("disk", [((2,), True)], indirect=True)
def test_an_error_beside_that_of_a_step_is_a_note_of_it(disk: Disk, tmp_path: Path) -> None:
    def then() -> None:
        disk.free.set()
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine") as caught:
        mtf.train(program(), batches(3, then), 9, folder=tmp_path, save_every=2, **OPTIONS)
    assert any("No space left" in note for note in caught.value.__notes__)


@pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
@pytest.mark.parametrize("disk", [((2, 4),)], indirect=True)
def test_an_interrupt_waits_for_what_is_being_written(
    number: int, error: type[BaseException], disk: Disk, tmp_path: Path
) -> None:
    """It comes in step 4, while the checkpoint of step 2 is being written: both are there afterwards."""

    def then() -> None:
        assert disk.reached.wait(60)
        os.kill(os.getpid(), number)
        threading.Timer(0.2, disk.free.set).start()

    disk.free.set()
    whole = reference(4, tmp_path / "whole")
    disk.free.clear()
    disk.reached.clear()
    with pytest.raises(error):
        mtf.train(program(), batches(4, then), 99, folder=tmp_path / "slow", save_every=2, keep=9, **OPTIONS)
    made = {path.name: path.read_bytes() for path in (tmp_path / "slow").glob("*.safetensors")}
    assert made == whole
    assert not list((tmp_path / "slow").glob(".*"))


@pytest.mark.parametrize("disk", [((3,), True)], indirect=True)
def test_an_interrupt_whose_checkpoint_fails_says_so(disk: Disk, tmp_path: Path) -> None:
    disk.free.set()
    with pytest.raises(mtf.CheckpointError, match="No space left"):
        mtf.train(
            program(), batches(3, lambda: os.kill(os.getpid(), signal.SIGTERM)), 9, folder=tmp_path, **OPTIONS
        )  # fmt: skip


def test_the_best_and_the_checkpoint_of_a_step_share_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[str] = []
    copy_to = State.copy_to

    def noted(self: State, name: str, out: np.ndarray[Any, Any]) -> None:
        copies.append(name)
        copy_to(self, name, out)

    monkeypatch.setattr(State, "copy_to", noted)
    sim = mtf.simulate(program())
    mtf.train(sim, data(), 2, folder=tmp_path, save_every=2, evaluation=evaluation(2), **OPTIONS)
    assert sorted(copies) == sorted(sim.state)
    best, last = mtf.simulate(program()), mtf.simulate(program())
    mtf.load(tmp_path / "best.safetensors", best)
    mtf.load(tmp_path / "step_000000002.safetensors", last)
    assert state(best) == state(last) == state(sim)


def test_the_error_of_a_task_is_raised_once() -> None:
    free = threading.Event()
    with Background() as background:
        background.start(lambda: free.wait(60) and int("of the task"))
        background.check()  # it has not ended
        free.set()
        with pytest.raises(ValueError, match="of the task"):
            background.wait()
        background.check()
        background.start(lambda: None)
