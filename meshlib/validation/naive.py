"""The naive rule: every run has the median MFU of comparable runs.

Step time = model FLOPs / (median utilisation * peak), the median over runs of the same chip and precision; for a chip
that is left out, over runs of all other chips at that precision (all others where none has it).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from meshlib.validation.runs import Run


def naive_seconds(run: Run, runs: Sequence[Run]) -> float:
    """Predicted by the median utilisation of runs on the same chip and precision, this run included."""
    return _by_median(run, [r for r in runs if r.chip == run.chip and r.eight_bit == run.eight_bit])


def naive_without_chip_seconds(run: Run, runs: Sequence[Run]) -> float | None:
    """Predicted by the median utilisation of other chips' runs; None without any."""
    others = [r for r in runs if r.chip != run.chip]
    return _by_median(run, [r for r in others if r.eight_bit == run.eight_bit] or others) if others else None


def _by_median(run: Run, like: Sequence[Run]) -> float:
    reached = statistics.median(r.utilisation for r in like)
    return run.measured_seconds * run.utilisation / reached
