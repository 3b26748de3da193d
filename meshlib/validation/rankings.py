"""Pairs of published runs of one model on one chip: whether predictions have the measured order.

A plan is a choice between runs, so their order matters more than their times. Runs are compared by what each chip does
in a second: model FLOPs, or images. Pairs on the same machine differ in layout, batch, precision or software; others
differ in the number of chips. Rates measured within `TIE` of each other have no order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshlib.validation.validating import Checked

TIE = 0.01
_DIMS = ("layers", "d_model", "q_heads", "head_dim", "d_ff", "vocab", "experts")


@dataclass(frozen=True)
class RankedPair:
    """Two runs of one model on one chip; `faster` was measured to be the faster one.

    Attributes:
      faster, slower: names of the rows.
      same_machine: whether both had as many chips, in as many slices.
      measured_ratio, predicted_ratio: rate of `faster` over that of `slower`; the first is above 1.
    """

    faster: str
    slower: str
    same_machine: bool
    measured_ratio: float
    predicted_ratio: float

    @property
    def is_right(self) -> bool:
        """True if the predicted order is the measured one."""
        return self.predicted_ratio > 1

    def __str__(self) -> str:
        ratios = f"measured x{self.measured_ratio:.3f}, predicted x{self.predicted_ratio:.3f}"
        return f"{self.faster} before {self.slower}: {ratios}"


def ranked_pairs(rows: Iterable[Checked]) -> tuple[RankedPair, ...]:
    """All pairs of training runs of one model on one chip with a measured order."""
    groups: dict[object, list[Checked]] = {}
    for row in rows:
        if row.error is not None and (row.run is not None or row.images is not None):
            groups.setdefault((row.chip, _model(row)), []).append(row)
    pairs = (_pair(a, b) for group in groups.values() for a, b in combinations(group, 2))
    return tuple(pair for pair in pairs if pair.measured_ratio > 1 + TIE)


def share_right(pairs: Sequence[RankedPair]) -> float:
    """Share of pairs in the measured order; nan without any."""
    return sum(pair.is_right for pair in pairs) / len(pairs) if pairs else float("nan")


def _model(row: Checked) -> object:
    if row.run is not None:
        return tuple(row.run.model.get(dim) for dim in _DIMS)
    assert row.images is not None
    return row.images.config


def _pair(a: Checked, b: Checked) -> RankedPair:
    if _rate(a, a.measured_seconds) < _rate(b, b.measured_seconds):
        a, b = b, a
    measured = _rate(a, a.measured_seconds) / _rate(b, b.measured_seconds)
    predicted = _rate(a, a.predicted_seconds) / _rate(b, b.predicted_seconds)
    return RankedPair(a.name, b.name, _machine(a) == _machine(b), measured, predicted)


def _rate(row: Checked, seconds: float | None) -> float:
    """Model FLOPs or images per chip and second."""
    assert seconds is not None
    if row.run is not None:
        return row.run.model_flops / row.run.slice.chips / seconds
    assert row.images is not None
    return row.images.steps * row.images.batch / row.images.slice.chips / seconds


def _machine(row: Checked) -> tuple[int, int]:
    run = row.run or row.images
    assert run is not None
    return run.slice.chips, run.slice.slices
