"""Published runs that no constant was fitted to: read like the fitted ones, and none of them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from meshlib.estimation import CALIBRATED
from meshlib.validation.recipes import loss_blocks
from meshlib.validation.runs import HELD_OUT, ROWS, run_of
from meshlib.validation.training import prepare
from tests.effort import some

RUNS: list[dict[str, Any]] = json.loads(HELD_OUT.read_text(encoding="utf-8"))["rows"]
BY_NAME = {str(row["id"]): row for row in RUNS}
# Runs of the mechanisms that the fitted rows lack: experts split over an axis, layers of a kind in turn.
SAMPLE = ["mt-v5e-64b-1x", "rc-v6e-mixtral-8x22b", "rc-v5p-llama4-maverick"]


def measurement(row: dict[str, Any]) -> tuple[object, ...]:
    """What makes two rows the same run."""
    figures = row.get("measured") or {}
    return row["model"].get("name"), row["chip"], row.get("n_chips"), row.get("n_slices"), str(sorted(figures.items()))


def test_no_run_is_both_fitted_and_held_out() -> None:
    fitted = {str(row["id"]) for row in ROWS}, {measurement(row) for row in ROWS if isinstance(row.get("model"), dict)}
    assert not fitted[0] & {*BY_NAME}
    assert not fitted[1] & {measurement(row) for row in RUNS}
    assert len(BY_NAME) == len(RUNS) >= 50


def test_all_are_expressed_at_the_batch_that_they_state() -> None:
    for row in RUNS:
        run = run_of(row)
        size = run.batch, run.slice.chips, run.slice.slices
        assert size == (row["batch"]["global_sequences"], row["n_chips"], row["n_slices"]), row["id"]
        assert (run.apart, run.loss_blocks) == ("", loss_blocks(row)[0]), row["id"]


@pytest.mark.parametrize("name", some([*BY_NAME], SAMPLE))
def test_predictions_are_of_the_right_size(name: str) -> None:
    run = run_of(BY_NAME[name])
    assert 0.6 < prepare(run).seconds(CALIBRATED) / run.measured_seconds < 1.25
