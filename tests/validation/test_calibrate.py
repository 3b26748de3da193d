"""Fitting: constants that made the measurements are found again, outliers do not matter, nothing unknown is learnt."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

import meshlib as mtf
from meshlib.estimation import Physics
from meshlib.estimation.time.physics import CALIBRATED
from meshlib.validation.calibrate import Case, fit, left_out

TRUTH = dataclasses.replace(CALIBRATED, product_rate=0.8, block_edge=700.0, score_vpu_ops=9.0, slice_jitter=0.03)


def cases(count: int = 40, noise: float = 0.0, wild: int = 0) -> list[Case]:
    """Times that are sums of parts, each of which one constant makes longer or shorter."""
    rng = np.random.default_rng(0)
    made = []
    for n in range(count):
        parts = rng.uniform(0.2, 1.0, 4)

        def predict(p: Physics, parts: np.ndarray = parts) -> float:
            a, b, c, d = parts
            return float((a / p.product_rate + b * 800 / p.block_edge + c * p.score_vpu_ops / 7) * (
                1 + p.jitter(2) * 10 * d
            ))  # fmt: skip

        measured = predict(TRUTH) * math.exp(noise * rng.standard_normal())
        made.append(Case(f"run {n}", f"chip {n % 4}", measured * (3.0 if n < wild else 1.0), predict))
    return made


def test_the_constants_behind_the_measurements_are_found():
    found = fit(cases(400))
    for name in ("product_rate", "block_edge", "score_vpu_ops", "slice_jitter"):
        assert getattr(found, name) == pytest.approx(getattr(TRUTH, name), rel=0.05), name


def test_what_no_measurement_depends_on_stays_at_its_prior():
    assert fit(cases()).early_exposed == pytest.approx(Physics.field("early_exposed").metadata["prior"][0])


def test_a_few_wild_measurements_change_little():
    plain, wild = fit(cases(200, 0.02)), fit(cases(200, 0.02, wild=10))
    assert wild.product_rate == pytest.approx(plain.product_rate, rel=0.05)


def test_each_chip_is_left_out_once():
    made = cases(80)
    found = left_out(made, fit(made))
    assert set(found) == {f"chip {n}" for n in range(4)}
    for n in range(4):
        others = [c for c in made if c.group != f"chip {n}"]
        assert found[f"chip {n}"].product_rate == pytest.approx(fit(others).product_rate, rel=0.03)
        # The chip's own measurements have no say.
        spoilt = [dataclasses.replace(c, measured_seconds=5.0) if c.group == f"chip {n}" else c for c in made]
        assert left_out(spoilt, TRUTH)[f"chip {n}"] == left_out(made, TRUTH)[f"chip {n}"]


def test_too_little_to_fit_to():
    with pytest.raises(mtf.GraphError, match="no measured cases"):
        fit([])
    with pytest.raises(mtf.GraphError, match=r"all 3 cases are of one group, \['a'\]"):
        left_out([dataclasses.replace(c, group="a") for c in cases(3)], TRUTH)


def test_constants_say_what_they_are():
    for name in Physics.fitted():
        about = Physics.field(name).metadata
        assert about["unit"]
        assert about["cause"]
        low, high = about["range"]
        assert low <= about["prior"][0] <= high
        assert low <= getattr(CALIBRATED, name) <= high
    with pytest.raises(mtf.GraphError, match=r"product_rate must be in \[0.5, 1.1\] .*, got 2"):
        Physics(product_rate=2.0)
    with pytest.raises(mtf.GraphError, match="did you mean 'block_edge'"):
        Physics.field("block_edg")
    with pytest.raises(mtf.GraphError, match="number"):
        Physics(product_rate="fast")  # type: ignore[arg-type]
