"""The loop of training: what it keeps, where it stops, and that who goes on ends where nobody had stopped."""

from __future__ import annotations

import copy
import json
import os
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import meshlib as mtf
from meshlib.training.feeding import examples_of, feeding_of
from meshlib.training.history import TIMES
from tests.effort import draws
from tests.paths import ROOT

X = np.random.default_rng(0).random((24, 3), np.float32)
Y = (X @ np.array([1.0, -2.0, 0.5], np.float32)).astype(np.float32)
EXAMPLES = {"x": X, "y": Y}


def loss_of(batch_size: int) -> mtf.Tensor:
    batch, inner = mtf.Dimension("batch", batch_size), mtf.Dimension("inner", 3)
    x, y, w = mtf.input("x", [batch, inner]), mtf.input("y", [batch]), mtf.variable("w", [inner], 0.0)
    return mtf.reduce_mean(mtf.square(mtf.einsum([x, w], output_shape=[batch]) - y), name="loss")


def program(rate: float = 0.1, **options: Any) -> mtf.Program:
    with mtf.Graph():
        loss = loss_of(8)
        updates = mtf.optimize.MomentumOptimizer(rate, 0.9).minimize(loss)
        return mtf.lower({"loss": loss}, updates, precision="highest", **options)


def evaluation(every: int, **options: Any) -> mtf.Evaluation:
    with mtf.Graph():
        made = mtf.lower({"loss": loss_of(6)}, precision="highest")
    return mtf.Evaluation(program=made, data=mtf.data.arrays(EXAMPLES).batch(6), every=every, **options)


def data(seed: int = 0) -> mtf.data.Data:
    return mtf.data.arrays(EXAMPLES).shuffle(seed).batch(8).repeat()


def state(run: mtf.Simulation) -> dict[str, list[float]]:
    return {name: run.state[name].tolist() for name in run.state}


def without_times(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name not in TIMES} for row in rows]


def test_the_loop_is_its_steps() -> None:
    sim, other = mtf.simulate(program()), mtf.simulate(program())
    told: list[dict[str, Any]] = []
    trained = mtf.train(sim, data(), 25, log_every=10, report=told.append, progress=False)
    feed, losses = iter(data()), []
    for _ in range(25):
        losses.append(float(other.step(next(feed))["loss"]))
    assert state(sim) == state(other)
    means = [np.mean(losses[a:b]) for a, b in ((0, 10), (10, 20), (20, 25))]
    assert [row["step"] for row in told] == [10, 20, 25]
    np.testing.assert_allclose([row["loss"] for row in told], means, rtol=1e-6)
    assert told == trained.history.rows
    assert (trained.stopped, trained.step, trained.stats.batches) == ("steps", 25, 25)


def test_evaluation_is_on_the_same_variables_over_all_examples() -> None:
    trained = mtf.train(program(), data(), 6, evaluation=evaluation(3), log_every=3, progress=False)
    w = trained.run.state["w"]
    steps, values = trained.history.column("eval_loss")
    assert steps == [3, 6]
    np.testing.assert_allclose(values[-1], np.mean((X @ w - Y) ** 2), rtol=1e-5)
    assert trained.best == {"step": steps[np.argmin(values)], "value": min(values)}
    own = evaluation(3, measure=lambda outputs, batch: {"twice": 2 * outputs["loss"], "count": 1})
    assert own(trained.run)["twice"] == pytest.approx(2 * values[-1])


@pytest.mark.parametrize(
    ("on", "kind"), [("simulation", "data"), ("simulation", "batches"), ("simulation", "iterable"), ("jax", "data")]
)
def test_going_on_ends_where_nobody_had_stopped(tmp_path: Path, kind: str, on: str) -> None:
    if on == "jax":
        pytest.importorskip("jax", reason="the extra 'jax'")
    lowered = program(mesh="rows:2", layout="batch:rows")
    begun = mtf.simulate(lowered, seed=1) if on == "simulation" else mtf.on_jax(lowered, seed=1)
    if on == "jax":
        begun.compiled()  # for all runs

    def run() -> mtf.Simulation:
        return copy.copy(begun)

    def batches() -> Any:
        if kind == "data":
            return data().prefetch(2)
        made = mtf.Batches(EXAMPLES, 8, shuffle_seed=0)
        return made if kind == "batches" else (batch for batch in made)

    options: dict[str, Any] = {"log_every": 4, "progress": False, "save_every": 5, "keep": 2}
    whole = mtf.train(run(), batches(), 17, folder=tmp_path / "a", evaluation=evaluation(3), **options)
    for steps in (6, 11, 17):
        part = mtf.train(run(), batches(), steps, folder=tmp_path / "b", evaluation=evaluation(3), **options)
    assert state(part.run) == state(whole.run)
    assert part.best == whole.best
    kept = ["step_000000015.safetensors", "step_000000017.safetensors"]
    for folder in ("a", "b"):
        names = sorted(p.name for p in (tmp_path / folder).iterdir())
        assert names == ["best.safetensors", "history.csv", "history.jsonl", *kept]
    assert (tmp_path / "a" / "best.safetensors").read_bytes() == (tmp_path / "b" / "best.safetensors").read_bytes()
    again = mtf.train(run(), batches(), 17, folder=tmp_path / "b", **options)
    assert (again.step, state(again.run)) == (17, state(whole.run))


def test_killed_runs_end_alike(tmp_path: Path) -> None:
    if not hasattr(os, "fork"):
        pytest.skip("there is no fork here")
    command = [sys.executable, "-m", "tests.storage.killed", str(tmp_path), str(draws(2, 100))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["kills"] >= 2


def test_history_is_cut_where_a_run_goes_on(tmp_path: Path) -> None:
    options: dict[str, Any] = {"folder": tmp_path, "log_every": 2, "save_every": 100, "progress": False}
    mtf.train(program(), data(), 4, **options)
    with (tmp_path / "history.jsonl").open("a") as file:  # rows of steps that were lost, the last cut off
        file.write('{"step": 6, "loss": 1.0}\n{"step": 8, "lo')
    trained = mtf.train(program(), data(), 8, **options)
    whole = mtf.train(program(), data(), 8, log_every=2, progress=False)
    assert without_times(trained.history.rows) == without_times(whole.history.rows)
    assert without_times(mtf.training.read_history(tmp_path / "history.jsonl")) == without_times(whole.history.rows)
    table = (tmp_path / "history.csv").read_text().splitlines()
    assert table[0].startswith("step,loss,")
    assert len(table) == 5


def test_it_stops_when_nothing_gets_better(tmp_path: Path) -> None:
    trained = mtf.train(
        program(rate=0.0), data(), 50, evaluation=evaluation(2), patience=3, folder=tmp_path, progress=False
    )
    assert (trained.stopped, trained.step, trained.best["step"]) == ("early", 8, 2)
    again = mtf.train(
        program(rate=0.0), data(), 50, evaluation=evaluation(2), patience=3, folder=tmp_path, progress=False
    )
    assert (again.stopped, again.step) == ("early", 8)


def test_a_figure_that_is_no_number_is_never_the_best() -> None:
    values = iter([np.nan, 2.0, np.nan, 1.0])
    figure = evaluation(2, measure=lambda _, batch: {"loss": next(values) * 6, "count": 6})
    alone = mtf.data.arrays({name: x[:6] for name, x in EXAMPLES.items()}).batch(6)
    trained = mtf.train(program(rate=0.0), data(), 8, evaluation=replace(figure, data=alone), progress=False)
    assert trained.best == {"step": 8, "value": 1.0}


def test_it_stops_with_the_data() -> None:
    trained = mtf.train(program(), mtf.data.arrays(EXAMPLES).batch(8).repeat(2), 50, progress=False)
    assert (trained.stopped, trained.step) == ("data", 6)


def with_nan(at: tuple[int, ...]) -> list[dict[str, np.ndarray]]:
    made = [dict(b) for b in mtf.data.arrays(EXAMPLES).batch(8).repeat(8)]
    for n in at:
        made[n] = {**made[n], "x": np.full((8, 3), 3e38, np.float32)}
    return made


def fragile() -> mtf.Program:
    """Of large x it makes a NaN."""
    with mtf.Graph():
        batch, inner = mtf.Dimension("batch", 8), mtf.Dimension("inner", 3)
        x, y, w = mtf.input("x", [batch, inner]), mtf.input("y", [batch]), mtf.variable("w", [inner], 0.5)
        p = mtf.einsum([mtf.square(x, name="squared"), w], output_shape=[batch])
        loss = mtf.reduce_mean(mtf.square(p - p * 0.5 - y), name="loss")
        return mtf.lower({"loss": loss}, mtf.optimize.SgdOptimizer(0.01).minimize(loss), precision="highest")


@pytest.mark.parametrize("on", ["simulation", "jax"])
def test_a_step_that_makes_a_nan_is_skipped_or_ends_the_run(on: str) -> None:
    if on == "jax":
        pytest.importorskip("jax", reason="the extra 'jax'")
    made = fragile()
    start = mtf.simulate if on == "simulation" else mtf.on_jax
    sim, other = start(made), start(made)
    trained = mtf.train(sim, with_nan((2, 5)), 9, on_nan="skip", progress=False)
    for n, batch_of_n in enumerate(with_nan(())[:9]):
        if n not in (2, 5):
            other.step(batch_of_n)
    assert state(sim) == state(other)
    assert [s["step"] for s in trained.skipped] == [3, 6]
    assert all("squared" in s["why"] for s in trained.skipped)
    with pytest.raises(mtf.NotFiniteError, match="squared"):
        mtf.train(start(made), with_nan((2,)), 9, progress=False)
    with pytest.raises(mtf.NotFiniteError):
        mtf.train(start(made), with_nan(tuple(range(20))), 20, on_nan="skip", progress=False)


def test_steps_that_devices_run_at_once_are_the_same_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("jax", reason="the extra 'jax'")
    lowered = program(mesh="rows:2", layout="batch:rows")
    singly, together = mtf.on_jax(lowered, seed=1), mtf.on_jax(lowered, seed=1)
    options: dict[str, Any] = {"log_every": 4, "progress": False, "evaluation": evaluation(8)}
    one = mtf.train(singly, data(), 18, **options)
    called: list[int] = []
    several = together.several
    monkeypatch.setattr(together, "several", lambda feeds: called.append(len(feeds)) or several(feeds))
    part = mtf.train(together, data(), 18, steps_per_run=4, folder=tmp_path, **options)
    assert called == [4, 4, 4, 4, 2]
    assert part.step == int(together.state["step"]) == 18
    for name in ("w", "w/momentum"):
        np.testing.assert_allclose(together.state[name], singly.state[name], rtol=1e-6)
    for a, b in zip(without_times(part.history.rows), without_times(one.history.rows), strict=True):
        assert a == pytest.approx(b, rel=1e-5)
    monkeypatch.setattr("meshlib.training.loop.TOGETHER_BYTES", 2 * (8 * 3 * 4 + 8 * 4))
    called.clear()
    mtf.train(together, data(), 24, steps_per_run=6, folder=tmp_path, **options)
    assert called == [2, 2, 2]
    ending = mtf.train(together, mtf.data.arrays(EXAMPLES).batch(8), 24, steps_per_run=9, progress=False)
    assert (ending.stopped, ending.step) == ("data", 3)


def test_of_steps_at_once_the_one_with_a_nan_is_found() -> None:
    pytest.importorskip("jax", reason="the extra 'jax'")
    lowered = fragile()
    singly, together = mtf.on_jax(lowered), mtf.on_jax(lowered)
    for run, at_once in ((singly, 1), (together, 4)):
        trained = mtf.train(run, with_nan((2, 5)), 8, on_nan="skip", steps_per_run=at_once, progress=False)
        assert [s["step"] for s in trained.skipped] == [3, 6]
    np.testing.assert_allclose(together.state["w"], singly.state["w"], rtol=1e-6)


@pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_an_interrupt_saves_first(tmp_path: Path, number: int, error: type[BaseException]) -> None:
    def batches(last: int) -> Any:
        for n, batch in enumerate(data()):
            if n == last:
                os.kill(os.getpid(), number)
            yield batch

    before = signal.getsignal(number)
    with pytest.raises(error):
        mtf.train(program(), batches(3), 9, folder=tmp_path, progress=False)
    assert signal.getsignal(number) is before
    assert [p.name for p in tmp_path.glob("step_*")] == ["step_000000004.safetensors"]
    trained = mtf.train(program(), batches(99), 9, folder=tmp_path, progress=False)
    assert state(trained.run) == state(mtf.train(program(), data(), 9, progress=False).run)


def test_a_picture_of_it(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need the extra 'plot'")
    trained = mtf.train(program(), data(), 9, evaluation=evaluation(3), log_every=3, progress=False)
    trained.history.plot(tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(mtf.GraphError, match="no row has"):
        trained.history.plot(tmp_path / "a.png", ["accuracy"])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: mtf.train(3, data(), 1), "run must be a run from mtf.simulate or mtf.on_jax, got 3"),
        (lambda: mtf.train(evaluation(1).program, data(), 1), "updates no variable, so there is nothing to train"),
        (lambda: mtf.train(program(), data(), 0), "steps must be at least 1, got 0"),
        (lambda: mtf.train(program(), data(), 1.5), "steps must be an integer"),
        (lambda: mtf.train(program(), 3, 1), "data must be mtf.data, or an iterable of dicts, got 3"),
        (lambda: mtf.train(program(), mtf.data.arrays(EXAMPLES), 1), "are examples, not batches"),
        (lambda: mtf.train(program(), data(), 1, on_nan="skp"), "did you mean 'skip'"),
        (lambda: mtf.train(program(), data(), 1, better="less"), "better must be 'lower' or 'higher'"),
        (lambda: mtf.train(program(), data(), 1, patience=2), "patience needs evaluations; give evaluation="),
        (lambda: mtf.train(program(), data(), 1, save_every=2), "save_every needs a folder"),
        (lambda: mtf.train(program(), data(), 1, report=3), "report must be a function"),
        (
            lambda: mtf.train(mtf.simulate(program(), check_nan=False), data(), 1, on_nan="skip"),
            "needs a run that checks",
        ),
        (
            lambda: mtf.train(program(), data(), 1, evaluation=evaluation(1), best="accuracy"),
            "not 'accuracy'; choose one with best=",
        ),
        (lambda: mtf.train(program(), data(), 1, evaluation=program()), "must be an mtf.Evaluation"),
        (lambda: evaluation(0), "every must be an integer >= 1"),
        (lambda: mtf.Evaluation(program=program(), data=iter([]), every=1), "start over"),
        (lambda: mtf.Evaluation(program=program(), data=data(), every=1), "repeat forever"),
        (lambda: mtf.train(program(), [{"x": X[:8]}], 1), "missing feed 'y'"),
        (lambda: mtf.train(program(), data(), 1, folder="/dev/null/no"), "folder ./dev/null/no. can't be created"),
    ],
)
def test_one_clear_error(call: Callable[[], object], message: str) -> None:
    with pytest.raises(mtf.MeshlibError, match=message):
        call()


def test_a_folder_of_something_else(tmp_path: Path) -> None:
    mtf.save(mtf.simulate(program()), tmp_path / "step_000000003.safetensors")
    with pytest.raises(mtf.CheckpointError, match=r"step_000000003.safetensors was not written by mtf\.train"):
        mtf.train(program(), data(), 5, folder=tmp_path)
    other = tmp_path / "other"
    mtf.train(program(), data(), 2, folder=other, progress=False)
    with pytest.raises(mtf.FeedError, match="the state belongs to other data"):
        mtf.train(program(), data(seed=1), 5, folder=other, progress=False)
    path = other / "step_000000002.safetensors"
    path.write_bytes(path.read_bytes().replace(b'\\"step\\": 2', b'\\"step\\": 3'))
    with pytest.raises(mtf.CheckpointError, match="damaged: the note 'training'"):
        mtf.train(program(), data(), 5, folder=other, progress=False)


def test_an_output_is_not_named_as_a_column_of_the_history() -> None:
    with mtf.Graph():
        loss = loss_of(8)
        made = mtf.lower({"step": loss}, mtf.optimize.SgdOptimizer(0.1).minimize(loss))
    with pytest.raises(mtf.GraphError, match="the history has its own 'step'"):
        mtf.train(made, mtf.data.arrays(EXAMPLES).batch(8), 1)


def test_a_run_does_not_go_on_with_data_of_another_kind(tmp_path: Path) -> None:
    data = mtf.data.arrays(EXAMPLES).batch(8).repeat()
    mtf.train(program(), data, 1, folder=tmp_path)
    with pytest.raises(mtf.FeedError, match=r"their state has next, pending, of.*, that of these batches"):
        mtf.train(program(), [{name: value[:8] for name, value in EXAMPLES.items()}] * 3, 2, folder=tmp_path)


def test_rows_that_only_fill_a_batch_up_do_not_count() -> None:
    made = evaluation(1)
    padded = replace(made, data=mtf.data.arrays(EXAMPLES).take(9).batch(6, remainder="pad"))
    with pytest.raises(mtf.FeedError, match="3 of 6 rows are padding"):
        padded(mtf.simulate(program()))


def masked_evaluation(name: str, **options: Any) -> mtf.Evaluation:
    """Means over the rows that count, by a program that takes the mask."""
    batch, inner = mtf.Dimension("batch", 6), mtf.Dimension("inner", 3)
    with mtf.Graph():
        x, y, w = mtf.input("x", [batch, inner]), mtf.input("y", [batch]), mtf.variable("w", [inner], 0.0)
        counts = mtf.input(name, [batch])
        squares = mtf.square(mtf.einsum([x, w], output_shape=[batch]) - y) * counts
        loss = mtf.reduce_sum(squares) / mtf.reduce_sum(counts)
        made = mtf.lower({"loss": loss}, precision="highest")
    return mtf.Evaluation(program=made, every=1, **options)


@pytest.mark.parametrize("kind", ["data", "iterable"])
def test_the_mask_may_have_any_name(kind: str) -> None:
    name = "mask" if kind == "iterable" else "counts"
    part = {n: x[:9] for n, x in EXAMPLES.items()}
    padded = mtf.data.arrays(part).batch(6, remainder="pad", mask=name)
    batches: Any = padded if kind == "data" else list(padded)
    run = mtf.simulate(program())
    assert masked_evaluation(name, data=batches)(run)["loss"] == pytest.approx(np.mean(Y[:9] ** 2), rel=1e-5)
    with pytest.raises(mtf.FeedError, match=rf"3 of 6 rows are padding, .* no input '{name}'"):
        replace(evaluation(1), data=batches)(run)


def test_rows_that_count_are_counted_whoever_makes_the_batches() -> None:
    part = {n: x[:9] for n, x in EXAMPLES.items()}
    padded = mtf.data.arrays(part).batch(6, remainder="pad", mask="counts")
    for made in (padded, iter(padded), mtf.Batches(part, 6, remainder="pad", mask="counts", epochs=1)):
        feeding = feeding_of(made)
        assert [examples_of(feeding, next(feeding)) for _ in range(2)] == [6, 3]
    feeding = feeding_of([{**part, "mask": np.array([1.0] * 4 + [0.0] * 5)}])
    assert examples_of(feeding, next(feeding)) == 4


def test_a_field_called_mask_is_none_of_rows() -> None:
    examples = {**EXAMPLES, "mask": np.zeros((24, 2, 2), np.float32)}  # of a picture, say
    trained = mtf.train(program(), mtf.data.arrays(examples).batch(8), 3, log_every=3, progress=False)
    assert trained.history.rows[0]["examples_per_second"] > 0
    figures = replace(evaluation(1), data=mtf.data.arrays(examples).batch(6))(mtf.simulate(program()))
    assert figures["loss"] == pytest.approx(np.mean(Y**2), rel=1e-5)


def test_the_best_by_one_figure_is_not_compared_with_another(tmp_path: Path) -> None:
    data = mtf.data.arrays(EXAMPLES).batch(8).repeat()
    low = mtf.train(program(), data, 2, folder=tmp_path, evaluation=evaluation(1)).best
    high = mtf.train(program(), data, 3, folder=tmp_path, evaluation=evaluation(1), better="higher").best
    assert low is not None
    assert high is not None
    assert (low["step"], high["step"]) == (2, 3)


def test_what_is_no_batch_folder_or_list_of_names(tmp_path: Path) -> None:
    with pytest.raises(mtf.FeedError, match="batch 0 must be a dict"):
        mtf.train(program(), [(X, Y)], 1)
    with pytest.raises(mtf.FeedError, match="examples, not batches"):
        mtf.train(program(), iter(mtf.data.arrays(EXAMPLES)), 1)
    with pytest.raises(mtf.CheckpointError, match="folder must be the path"):
        mtf.train(program(), mtf.data.arrays(EXAMPLES).batch(8), 1, folder=5)  # type: ignore[arg-type]
    with pytest.raises(mtf.GraphError, match="must be a list of names"):
        mtf.training.History().plot(tmp_path / "x.png", "loss")  # type: ignore[arg-type]


def test_an_evaluation_of_what_is_no_run_or_by_what_measures_nothing() -> None:
    with pytest.raises(mtf.GraphError, match="run must be a run from"):
        evaluation(1)(5)  # type: ignore[arg-type]
    with pytest.raises(mtf.GraphError, match="measure must return names and sums, got 5"):
        evaluation(1, measure=lambda found, batch: 5)(mtf.simulate(program()))


def test_a_folder_takes_one_run_at_a_time(tmp_path: Path) -> None:
    def batches() -> Any:
        for n, batch in enumerate(data()):
            if n == 2:
                command = [sys.executable, "-c", f"import os; print(open({str(tmp_path / 'train.pid')!r}).read())"]
                assert int(subprocess.check_output(command)) == os.getpid()
                message = rf"train: process {os.getpid()} trains in the folder {tmp_path} already"
                with pytest.raises(mtf.CheckpointError, match=message):
                    mtf.train(program(), data(), 9, folder=tmp_path, progress=False)
            yield batch

    options: dict[str, Any] = {"folder": tmp_path, "log_every": 1, "progress": False}
    (tmp_path / "train.pid").write_text("1234567")  # of a run that was killed
    (tmp_path / ".step_000000003.safetensors.0123abcd.saving").write_bytes(b"half")
    trained = mtf.train(program(), batches(), 5, **options)
    assert [row["step"] for row in trained.history.rows] == [1, 2, 3, 4, 5]
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["history.csv", "history.jsonl", "step_000000005.safetensors"]
    with pytest.raises(mtf.FeedError):
        mtf.train(program(), data(seed=1), 9, **options)
    assert not (tmp_path / "train.pid").exists()


def test_a_damaged_checkpoint_is_passed_over_if_asked(tmp_path: Path) -> None:
    """Every bit of the header, the notes and the variables is drawn from; the run ends as one that nothing befell."""
    options: dict[str, Any] = {"save_every": 2, "keep": 3, "log_every": 2, "progress": False}
    mtf.train(program(), data(), 4, folder=tmp_path / "whole", **options)
    content = {path.name: path.read_bytes() for path in (tmp_path / "whole").glob("*.*")}
    final = state(mtf.train(program(), data(), 6, progress=False).run)
    newest, rng = "step_000000004.safetensors", np.random.default_rng(0)
    lowered, passed = program(), 0
    for n in range(draws(25, 5000)):
        folder = tmp_path / "again"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for name, raw in content.items():
            (folder / name).write_bytes(raw)
        damaged = bytearray(content[newest])
        bit = int(rng.integers(8 * len(damaged)))
        damaged[bit // 8] ^= 1 << bit % 8
        (folder / newest).write_bytes(damaged)
        try:
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                trained = mtf.train(lowered, data(), 6, folder=folder, on_damage="previous", **options)
        except mtf.CheckpointError as fault:
            raise AssertionError(f"draw {n}, byte {bit // 8}: {fault}") from fault
        assert state(trained.run) == final
        assert (folder / "step_000000004.damaged").exists() == bool(told)
        passed += bool(told)
    assert passed > n // 2
    (folder / newest).write_bytes(content[newest][:-1])
    (folder / "step_000000006.safetensors").unlink()
    with pytest.raises(mtf.CheckpointError, match=r"on_damage='previous' continues from step_000000002\.safetensors"):
        mtf.train(lowered, data(), 6, folder=folder, **options)
    (folder / newest).unlink()
    (folder / newest).symlink_to(folder / "gone")  # what can't be read is no better than what is damaged
    with pytest.raises(mtf.CheckpointError, match=r"gone can't be read: .*'previous' continues from step_000000002"):
        mtf.train(lowered, data(), 6, folder=folder, **options)
    with pytest.warns(UserWarning, match=r"gone can't be read: .*; training continues from step_000000002"):
        assert mtf.train(lowered, data(), 6, folder=folder, on_damage="previous", **options).step == 6
    (folder / "step_000000006.safetensors").unlink()
    (folder / newest).unlink(missing_ok=True)
    (folder / newest).write_bytes(content[newest][:-1])
    (folder / "step_000000002.safetensors").write_bytes(b"")
    with pytest.raises(mtf.CheckpointError, match="all 2 checkpoints of the folder are damaged"):
        mtf.train(lowered, data(), 6, folder=folder, on_damage="previous", **options)
    raw = content[newest]
    for name in ("training", "__metadata__/training"):  # the name of the note, and that of its sum
        (folder / newest).write_bytes(raw.replace(f'"{name}"'.encode(), f'"{name[:-1]}h"'.encode()).replace(
            f'"crc32/{name}"'.encode(), f'"crc31/{name}"'.encode()))  # fmt: skip
        with pytest.raises(mtf.CheckpointError, match="is damaged: "):
            mtf.train(lowered, data(), 6, folder=folder, **options)
