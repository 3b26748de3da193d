"""The territory that cautions name is that of the published training runs that are judged."""

from __future__ import annotations

import pytest

from meshlib.estimation.views import cautions
from meshlib.validation.policies import NotExpressed
from meshlib.validation.runs import ROWS, Run, run_of


def judged() -> list[Run]:
    runs = []
    for row in ROWS:
        try:
            runs.append(run_of(row))
        except (NotExpressed, KeyError, TypeError, ValueError):
            continue
    return [run for run in runs if not run.apart]


def test_ranges_are_those_of_the_rows() -> None:
    runs = judged()
    tokens = [run.batch * run.length / run.slice.chips for run in runs]
    for figures, (least, most) in (
        ([run.slice.chips for run in runs], cautions.VALIDATED_CHIPS),
        ([run.length for run in runs], cautions.VALIDATED_LENGTHS),
        (tokens, cautions.VALIDATED_TOKENS_PER_CHIP),
    ):
        assert (min(figures), max(figures)) == (least, most)
    for precision, most in cautions.VALIDATED_MFU.items():
        measured = max(run.utilisation for run in runs if run.precision == precision)
        assert measured == pytest.approx(most, abs=0.001)
