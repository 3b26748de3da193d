"""The constants that ship are those that a fit to the published runs returns."""

from __future__ import annotations

import pytest

from meshlib.estimation import CALIBRATED, Physics
from meshlib.validation.calibrate import Case, fit
from meshlib.validation.runs import ROWS
from meshlib.validation.training import prepare
from meshlib.validation.validating import check_row
from tests.effort import deep


@pytest.mark.skipif(not deep(), reason="lowers all published runs: a deep run only")
def test_a_refit_returns_what_ships() -> None:
    """To a tenth of the spread that each constant's cause allows; from the priors, and from what ships."""
    checked = [row for row in map(check_row, ROWS) if row.run is not None and not row.apart]
    prepared = [prepare(row.run) for row in checked if row.run is not None]
    cases = [Case(p.run.name, p.run.chip, p.run.measured_seconds, p.seconds) for p in prepared]
    again = fit(cases)
    for name in Physics.fitted():
        _, spread = Physics.field(name).metadata["prior"]
        assert getattr(again, name) == pytest.approx(getattr(CALIBRATED, name), abs=0.1 * spread), name
