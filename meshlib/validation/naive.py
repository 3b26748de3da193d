"""Naive predictions of training runs: the median utilisation of other runs, whatever the program or the layout."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from meshlib.validation.runs import Run


def naive_seconds(run: Run, runs: Sequence[Run]) -> float | None:
    """Predicted by the median utilisation of runs on the same chip in the same precision, this run included."""
    like = [r.utilisation for r in runs if r.chip == run.chip and r.eight_bit == run.eight_bit]
    return at_median(run.measured_seconds * run.utilisation, like)


def naive_without_chip_seconds(run: Run, runs: Sequence[Run]) -> float | None:
    """Predicted by the median utilisation of other chips' runs, those in the same precision if there are any; None
    without other chips.
    """
    others = [r for r in runs if r.chip != run.chip]
    alike = [r for r in others if r.eight_bit == run.eight_bit]
    return at_median(run.measured_seconds * run.utilisation, [r.utilisation for r in alike or others])


def at_median(work: float, utilisations: Sequence[float]) -> float | None:
    """Seconds of `work`, in seconds at the peak of the slice, at the median of utilisations; None without any."""
    return work / statistics.median(utilisations) if utilisations else None
