"""T5's buckets of distances against their formula."""

from __future__ import annotations

import numpy as np
import pytest

import meshlib as mtf
from tests.models.reference import bucket


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("buckets", "furthest"), [(32, 128), (8, 20), (16, 40)])
def test_buckets_are_those_of_the_formula(causal, buckets, furthest):
    rows, keys, heads = mtf.Dimension("length", 150), mtf.Dimension("memory_length", 160), mtf.Dimension("heads", 2)
    with mtf.Graph():
        y = mtf.layers.relative_position_bias(rows, keys, heads, buckets, furthest, causal)
        sim = mtf.simulate(mtf.lower({"y": y}, mesh="p:2;q:2", layout="length:p;heads:q"), executor="exact")
    sim.state["relative_position_bias"] = np.arange(2 * buckets, dtype=np.float32).reshape(2, buckets)
    wanted = [[bucket(j - i, not causal, buckets, furthest) for j in range(160)] for i in range(150)]
    found = sim.step()["y"]
    np.testing.assert_array_equal(found[0], wanted)
    np.testing.assert_array_equal(found[1], np.array(wanted) + buckets)
    assert len(np.unique(wanted)) >= buckets - 1  # bidirectional: a distance of 0 is never ahead


@pytest.mark.parametrize(
    ("buckets", "furthest", "causal", "words"),
    [
        (1, 128, True, "at least 2, and max_distance above 0, got 1 and 128"),
        (7, 128, False, "even and at least 4, and max_distance above 1, got 7 and 128"),
        (32, 8, False, "max_distance above 8, got 32 and 8"),
    ],
)
def test_too_few_buckets_are_refused(buckets, furthest, causal, words):
    d = mtf.Dimension
    with mtf.Graph(), pytest.raises(mtf.ShapeError, match=words):
        mtf.layers.relative_position_bias(
            d("length", 4), d("memory_length", 4), d("heads", 2), buckets, furthest, causal
        )
