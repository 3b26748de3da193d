"""The ranking of a search, as alternatives on a page."""

from __future__ import annotations

from meshlib.report.alternatives import Alternative
from meshlib.searching import Found


def alternatives_of(search: Found) -> list[Alternative]:
    """The estimated candidates, in the order of the ranking."""
    options = []
    for outcome in search.ranking:
        candidate, figures = outcome.candidate, outcome.figures
        assert figures is not None
        choices = " ".join(f"{name} {value}" for name, value in candidate.choices)
        name = f"{candidate.layout or '(nothing is split)'} on {candidate.mesh}"
        options.append(
            Alternative(
                name, figures.step_seconds, figures.peak_bytes, figures.fits, outcome is search.best, choices,
                search.why(outcome),
            )
        )  # fmt: skip
    return options
