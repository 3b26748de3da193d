"""The order of published runs of one model: pairs, ties and machines by hand, and what the shipped rows reach."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshlib.validation.rankings import ranked_pairs, share_right
from meshlib.validation.runs import run_of
from meshlib.validation.validating import Checked
from tests.validation.rows import BY_NAME

RUN = run_of(BY_NAME["mt-v5e-16b-1x"])  # 10.33 s
FOUR = run_of(BY_NAME["mt-v5e-16b-4x"])
OTHER = run_of(BY_NAME["mt-v5e-32b-1x"])


def checked(name: str, measured: float, predicted: float, run=RUN) -> Checked:
    return Checked(name, "f", run.chip, predicted, measured, run=replace(run, measured_seconds=measured))


def test_pairs_by_hand() -> None:
    rows = [checked("a", 10.0, 9.0), checked("b", 11.0, 9.5), checked("c", 12.0, 9.2), checked("d", 5.0, 5.0, OTHER)]
    pairs = ranked_pairs(rows)
    assert [(p.faster, p.slower, p.is_right) for p in pairs] == [("a", "b", True), ("a", "c", True), ("b", "c", False)]
    assert pairs[2].measured_ratio == pytest.approx(12 / 11)
    assert pairs[2].predicted_ratio == pytest.approx(9.2 / 9.5)
    assert share_right(pairs) == pytest.approx(2 / 3)


def test_the_order_of_rows_does_not_matter() -> None:
    rows = [checked("a", 10.0, 9.0), checked("b", 11.0, 9.5)]
    assert ranked_pairs(rows) == ranked_pairs(rows[::-1])


def test_rates_are_those_of_a_chip() -> None:
    """Four slices take as long for four times the batch: the rate of a chip is that of their times."""
    (pair,) = ranked_pairs([checked("one", 10.33, 10.11), checked("four", 10.59, 10.53, FOUR)])
    assert (pair.faster, pair.same_machine) == ("one", False)
    assert pair.measured_ratio == pytest.approx(10.59 / 10.33)


def test_times_measured_within_a_percent_have_no_order() -> None:
    assert ranked_pairs([checked("a", 10.0, 9.0), checked("b", 10.09, 8.0)]) == ()
    assert share_right(()) != share_right(())
