"""Steps that nothing waits for: dispatched, donated, compiled once, and from a cache on disk."""

# ruff: noqa: E402 (whatever needs JAX comes after a look whether it is there)

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="needs JAX: pip install -e '.[jax]'")

import meshlib as mtf
from meshlib.jax import asynchronous, running
from meshlib.jax.step import Step
from tests.jax.models import mlp, mlp_feeds


@pytest.fixture(scope="module")
def program() -> mtf.Program:
    return mlp("rows:2;cols:4", "batch:rows;hidden:cols")


def waits(*_: Any) -> NoReturn:
    raise AssertionError("waited for a step")


def test_an_unchecked_step_waits_for_nothing_until_a_result_is_read(
    program: mtf.Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked, free = (mtf.on_jax(program, checked=c) for c in (True, False))
    expected = [checked.step(feeds)["loss"] for feeds in mlp_feeds()]
    with monkeypatch.context() as patch:
        patch.setattr(jax, "block_until_ready", waits)
        patch.setattr(asynchronous, "whole", waits)
        results = [free.step(feeds) for feeds in mlp_feeds()]
        with pytest.raises(AssertionError, match="waited for a step"):
            _ = results[0]["loss"]
        with pytest.raises(AssertionError, match="waited for a step"):
            checked.step(mlp_feeds()[0])
    for found, wanted in zip(results, expected, strict=True):
        np.testing.assert_array_equal(found["loss"], wanted)


def test_results_are_a_dict_of_numpy_arrays(program: mtf.Program) -> None:
    run = mtf.on_jax(program, checked=False)
    readers = (
        dict, lambda r: {**r}, lambda r: dict(r.items()), lambda r: r.copy(), lambda r: pickle.loads(pickle.dumps(r)),
        lambda r: {"loss": r.get("loss")}, lambda r: {"loss": r.pop("loss")},
        lambda r: {"loss": next(iter(r.values()))},
    )  # fmt: skip
    for read in readers:
        found = read(run.step(mlp_feeds()[0]))
        assert [type(x) for x in found.values()] == [np.ndarray]
        assert found["loss"].dtype == np.float32
    assert run.step(mlp_feeds()[0]).get("lost") is None


def test_the_state_is_donated(program: mtf.Program) -> None:
    for checked in (False, True):
        run = mtf.on_jax(program, checked=checked)
        run.step(mlp_feeds()[0])
        before = {n: x for n, x in run.state.arrays.items() if isinstance(x, jax.Array)}
        run.step(mlp_feeds()[1])
        assert before
        assert all(x.is_deleted() != checked for x in before.values())


def test_a_program_is_compiled_once(program: mtf.Program, monkeypatch: pytest.MonkeyPatch) -> None:
    lowered: list[int] = []
    lower = Step.lowered
    monkeypatch.setattr(Step, "lowered", lambda self: lowered.append(1) or lower(self))
    run = mtf.on_jax(program, checked=False)
    for feeds in mlp_feeds() * 2:
        run.step(feeds)
    assert lowered == [1]


def test_seconds_of_steps_that_are_not_waited_for(program: mtf.Program) -> None:
    run = mtf.on_jax(program, checked=False)
    assert run.step_seconds is None
    for feeds in mlp_feeds() * 3:
        run.step(feeds)
    seconds = run.step_seconds
    assert seconds is not None
    assert 0 < seconds < 10
    assert run.step_seconds == seconds  # nothing new


def test_programs_that_print_wait(capsys: pytest.CaptureFixture[str]) -> None:
    with mtf.Graph():
        x = mtf.input("x", "n:4")
        p = mtf.lower({"y": mtf.Print(mtf.exp(x), [x], "here: ")})
    mtf.on_jax(p, checked=False).step(x=np.zeros(4))
    assert "here" in "".join(capsys.readouterr())


def test_the_compilation_cache_on_disk_serves_steps(program: mtf.Program, tmp_path: Path) -> None:
    names = {
        "jax_compilation_cache_dir": str(tmp_path),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in names}
    from jax.experimental.compilation_cache import compilation_cache

    try:
        for name, value in names.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        feeds = mlp_feeds()[0]
        first = running.on_jax(program, checked=False).step(feeds)["loss"]
        written = {f.name: f.stat().st_mtime_ns for f in tmp_path.iterdir() if f.name.endswith("-cache")}
        again = running.on_jax(program, checked=False).step(feeds)["loss"]
        assert {f.name: f.stat().st_mtime_ns for f in tmp_path.iterdir() if f.name.endswith("-cache")} == written
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
    assert written
    np.testing.assert_array_equal(first, again)
