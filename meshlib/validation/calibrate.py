"""Fitting of the constants of `Physics` to measured times, with each chip left out in turn.

Least absolute errors of log(predicted / measured), large ones counted linearly (Huber), by Gauss-Newton steps on
slopes that are measured one constant at a time. Each constant is held to what its cause makes plausible (its prior,
with a spread): one that the measurements do not determine keeps that value instead of absorbing what is not modelled.

Leaving out a chip fits the constants to all others and predicts that chip. Slopes are shared between these fits;
residuals are measured again where the constants have moved.

Source: Huber, "Robust estimation of a location parameter", 1964.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshlib.core.errors import GraphError
from meshlib.estimation import CALIBRATED, Physics

# Typical error of a row; beyond it, errors count linearly.
EXPECTED_ERROR = 0.04
STEP = 0.1  # of a constant's prior spread: finite difference for slopes
ROUNDS = 8
SHARES = (1.0, 0.5, 0.25, 0.1)  # fractions of a Gauss-Newton step to try
ENOUGH = 0.01  # of the loss: the fit stops after a round that gains less

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Case:
    """A measured time and its prediction: `predict(physics)` in seconds; `group` is the chip."""

    name: str
    group: str
    measured_seconds: float
    predict: Callable[[Physics], float]

    def residual(self, physics: Physics) -> float:
        """log(predicted / measured)."""
        return math.log(self.predict(physics) / self.measured_seconds)


def fit(cases: Sequence[Case]) -> Physics:
    """The constants that predict the cases best; constants that are not fitted stay as they are.

    Raises: GraphError without cases.
    """
    if not cases:
        raise GraphError("fit: no measured cases to fit the constants to")
    physics = CALIBRATED
    for _ in range(ROUNDS):
        step = _huber_step(_Slopes.of(cases, physics), range(len(cases)))
        physics, gain = _line_search(cases, physics, step)
        if gain < ENOUGH:
            break
    return physics


def left_out(cases: Sequence[Case], fitted: Physics, mapped: Callable[..., Iterable[Any]] = map) -> dict[str, Physics]:
    """Leave-one-out fits: for each group, constants fitted to the cases of all other groups, starting from `fitted`.

    `mapped` applies a function to each item, as `map` does, perhaps in other processes.

    Raises: GraphError if there is one group only.
    """
    groups = list(dict.fromkeys(c.group for c in cases))
    if len(groups) < 2:
        raise GraphError(f"left_out: all {len(cases)} cases are of one group, {groups}; nothing would remain to fit to")
    shared = _Slopes.of(cases, fitted, mapped)
    others = {group: [n for n, c in enumerate(cases) if c.group != group] for group in groups}
    near = {group: _huber_step(shared, others[group]) for group in groups}
    residuals = mapped(lambda group: [cases[n].residual(near[group]) for n in others[group]], groups)
    return {
        group: _huber_step(_Slopes(near[group], np.array(moved), shared.slopes[others[group]]), range(len(moved)))
        for group, moved in zip(groups, residuals, strict=True)
    }


def _line_search(cases: Sequence[Case], here: Physics, there: Physics) -> tuple[Physics, float]:
    """Line search: the best of some points between two sets of constants, and its gain."""
    names = Physics.fitted()
    best, least = here, _loss(cases, here)
    start = least
    for share in SHARES:
        at = {n: getattr(here, n) + share * (getattr(there, n) - getattr(here, n)) for n in names}
        physics = replace(here, **at)
        loss = _loss(cases, physics)
        if loss < least:
            best, least = physics, loss
    return best, start - least


def _loss(cases: Sequence[Case], physics: Physics) -> float:
    """Huber loss of all residuals, plus squared distances of the constants from their priors, in units of spread."""
    total = 0.0
    for c in cases:
        r = abs(c.residual(physics)) / EXPECTED_ERROR
        total += r * r if r < 1 else 2 * r - 1
    for name in Physics.fitted():
        prior, spread = Physics.field(name).metadata["prior"]
        total += ((getattr(physics, name) - prior) / spread) ** 2
    return total


@dataclass(frozen=True)
class _Slopes:
    """Residuals of the cases at some constants, and their derivatives by each fitted constant."""

    physics: Physics
    residuals: Floats  # [cases]
    slopes: Floats  # [cases, constants]

    @classmethod
    def of(cls, cases: Sequence[Case], physics: Physics, mapped: Callable[..., Iterable[Any]] = map) -> _Slopes:
        names = Physics.fitted()
        now, moved = (np.array([of(physics, name) for name in names]) for of in (getattr, _moved))
        at = [physics, *(replace(physics, **{name: float(x)}) for name, x in zip(names, moved, strict=True))]
        residuals = np.array([*mapped(lambda case: [case.residual(p) for p in at], cases)])
        here = residuals[:, 0]
        return cls(physics, here, (residuals[:, 1:] - here[:, None]) / (moved - now))


def _moved(physics: Physics, name: str) -> float:
    """A constant a little higher, or lower at the end of its range, for its slope."""
    about, now = Physics.field(name).metadata, getattr(physics, name)
    step = STEP * about["prior"][1]
    return float(now - step if now + step > about["range"][1] else now + step)


def _huber_step(at: _Slopes, chosen: Sequence[int] | range) -> Physics:
    """One linearised Huber fit of the constants to the chosen cases."""
    names = Physics.fitted()
    about = [Physics.field(n).metadata for n in names]
    now = np.array([getattr(at.physics, n) for n in names])
    prior, spread = np.array([a["prior"] for a in about]).T
    low, high = np.array([a["range"] for a in about]).T
    rows = list(chosen)
    residuals, slopes = at.residuals[rows], at.slopes[rows] * spread
    # In spreads from `now`; slopes are valid only nearby.
    least, most = np.maximum((low - now) / spread, -1.5), np.minimum((high - now) / spread, 1.5)
    moved: Floats = np.zeros(len(names))
    for _ in range(30):
        errors = residuals + slopes @ moved
        weights = np.sqrt(1 / np.maximum(np.abs(errors), EXPECTED_ERROR) / EXPECTED_ERROR)
        left = np.concatenate([slopes * weights[:, None], np.eye(len(names))])
        right = np.concatenate([-residuals * weights, (prior - now) / spread])
        moved = _bounded(left, right, least, most)
    values: Mapping[str, float] = dict(zip(names, np.clip(now + moved * spread, low, high).tolist(), strict=True))
    return replace(at.physics, **values)


def _bounded(left: Floats, right: Floats, least: Floats, most: Floats) -> Floats:
    """Least squares within bounds: variables that leave them are fixed at the bound, and the rest solved again."""
    solution = np.zeros(left.shape[1])
    free = np.ones(left.shape[1], bool)
    while free.any():
        solved = np.linalg.lstsq(left[:, free], right - left[:, ~free] @ solution[~free], rcond=None)[0]
        solution[free] = solved
        outside = free & ((solution < least) | (solution > most))
        solution = np.clip(solution, least, most)
        if not outside.any():
            break
        free &= ~outside
    return solution
