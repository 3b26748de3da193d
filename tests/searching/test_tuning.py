"""Tuning of MaxText runs: what a search over keys finds, with prices of our own and with the library's."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("yaml")

from hardware.slices import Slice
from meshlib.core.errors import GraphError
from meshlib.models import MaxTextRun, read_maxtext
from meshlib.models.maxtext.settings import parsed
from meshlib.searching import tuning
from meshlib.searching.tuning import Tried, changed, tune

TINY = "base_emb_dim=64 base_num_query_heads=4 base_num_kv_heads=4 base_mlp_dim=128 head_dim=16 vocab_size=256 "
SMALL = TINY + "base_num_decoder_layers=2 max_target_length=64 per_device_batch_size=4"
WHERE = Slice("v5e-16")


@pytest.fixture
def run(tmp_path: Path) -> MaxTextRun:
    file = tmp_path / "base.yml"
    file.write_text("run_name: ''\n")
    return read_maxtext(file, parsed(SMALL.split()))


def priced(run: MaxTextRun, where: Slice, compiler: object) -> Tried:
    """Steps of 10 s: tensor parallelism over 2 saves 1, minimal 2 more; accumulation costs 1 and saves memory."""
    s = run.settings
    tensor, policy = s["ici_tensor_parallelism"], s["remat_policy"]
    seconds = 10.0 - (tensor == 2) - 2 * (policy == "minimal") + (run.accumulation > 1)
    peak = 12.0 + 6 * (policy == "minimal") - 4 * (run.accumulation > 1)
    return Tried(run, seconds, peak, peak <= 16)


def test_each_change_is_named_with_what_it_gains(run: MaxTextRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "_tried", priced)
    found = tune(run, WHERE)
    assert (found.given.step_seconds, found.best.step_seconds, found.best.fits) == (10, 9, True)
    assert [dict(change.keys) for change in found.changes] == [{"ici_tensor_parallelism": 2}]
    assert str(found.changes[0]).startswith("ici_tensor_parallelism=2: -10.0 % step*, +0 B")
    assert found.best.run.overrides["ici_tensor_parallelism"] == 2
    assert found.as_json()["changes"][0]["keys"] == {"ici_tensor_parallelism": 2}


def test_what_does_not_fit_is_made_to_fit_first(run: MaxTextRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "_tried", priced)
    found = tune(changed(run, {"remat_policy": "minimal", "ici_tensor_parallelism": 2}), WHERE)
    assert not found.given.fits
    assert found.best.fits
    assert "now fits" in str(found.changes[0])
    assert "NO" in str(found)


def test_changes_that_later_ones_make_superfluous_are_taken_back(
    run: MaxTextRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """State on the host saves 2 of 20 and costs 1 s; accumulation alone saves enough."""

    def price(run: MaxTextRun, where: Slice, compiler: object) -> Tried:
        on_host = run.settings["optimizer_memory_host_offload"]
        seconds = 10.0 + on_host + 0.5 * (run.accumulation > 1)
        peak = 20.0 - 2 * on_host - 8 * (run.accumulation > 1)
        return Tried(run, seconds, peak, peak <= 16)

    monkeypatch.setattr(tuning, "_tried", price)
    result = tune(run, WHERE)
    assert (result.best.step_seconds, result.best.needed_bytes) == (10.5, 12)
    (change,) = result.changes
    assert "gradient_accumulation_steps" in change.keys
    assert (change.before, change.after) == (result.given, result.best)


def test_tokens_of_a_step_stay_the_same(run: MaxTextRun) -> None:
    sequences = run.batch(WHERE)
    offered = [*tuning._batches(run, WHERE, sequences)]
    assert len(offered) >= 3
    for keys in offered:
        assert keys["per_device_batch_size"] * 16 * keys["gradient_accumulation_steps"] == sequences, keys


def test_knobs_offer_sizes_that_divide(run: MaxTextRun) -> None:
    meshes = [changed(run, keys).mesh(WHERE) for keys in tuning._meshes(run, WHERE, 64)]
    assert {mesh.size for mesh in meshes} == {16}
    assert any("tensor" in mesh for mesh in meshes)
    policies = [changed(run, keys).remat for keys in tuning._policies(run, WHERE, 64)]
    assert len(set(map(repr, policies))) >= 12


def test_real_prices_never_make_a_run_slower(run: MaxTextRun, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ({"ici_tensor_parallelism": 4}, {"ici_data_parallelism": 4}, {"remat_policy": "minimal"})
    monkeypatch.setattr(tuning, "KNOBS", [lambda *_, keys=keys: iter([keys]) for keys in options])
    tuned = tune(run, WHERE)
    assert tuned.tried >= 1 + len(options)
    assert tuned.best.step_seconds < tuned.given.step_seconds
    again = tuning._tried(read_maxtext(Path(run.settings.path), tuned.best.run.overrides), WHERE, tuning.XLA_TPU)
    assert again.step_seconds == tuned.best.step_seconds


def test_runs_that_nothing_helps_say_why(run: MaxTextRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "_tried", lambda run, where, compiler: Tried(run, fault="it is broken"))
    with pytest.raises(GraphError, match="it is broken"):
        tune(run, WHERE)
