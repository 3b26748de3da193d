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


B, L, M, H = (mtf.Dimension(n, k) for n, k in (("batch", 4), ("length", 6), ("memory_length", 60), ("heads", 2)))


def bias_by(queries, keys, causal):
    """[heads, batch, length, memory_length] for positions [batch, length] and [batch, memory_length]."""
    one = [[[bucket(int(j - i), not causal, 16, 40) for j in k] for i in q] for q, k in zip(queries, keys, strict=True)]
    return np.array([one, np.array(one) + 16])


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("layout", ["", "batch:p;heads:q", "length:p;memory_length:q", "batch:q"])
def test_queries_at_an_offset_and_packed_sequences(causal, layout):
    with mtf.Graph():
        table = {"buckets": 16, "max_distance": 40, "causal": causal}
        start, each = mtf.input("start", [], "int32"), mtf.input("each", [B], "int32")
        packed = [mtf.input("q", [B, L], "int32"), mtf.input("k", [M, B], "int32")]
        made = {
            "number": mtf.layers.relative_position_bias(L, M, H, **table, name="a", positions=7),
            "scalar": mtf.layers.relative_position_bias(L, M, H, **table, name="b", positions=start),
            "each": mtf.layers.relative_position_bias(L, M, H, **table, name="c", positions=each),
            "packed": mtf.layers.relative_position_bias(
                L, M, H, **table, name="d", positions=packed[0], memory_positions=packed[1]
            ),
        }
        assert [len(y.shape) for y in made.values()] == [3, 3, 4, 4]
        x = mtf.input("x", [B, L, mtf.Dimension("d", 8)])
        memory = mtf.input("memory", [B, M, mtf.Dimension("d", 8)])
        head = mtf.Dimension("head_dim", 4)
        for bias in (made["scalar"], made["packed"]):  # taken by attention as it is
            mtf.layers.multihead_attention(
                x,
                memory,
                None,
                head,
                H,
                scores=mtf.layers.Scores(bias=bias, kernel="materialised"),
                name=bias.name.partition("/")[0] + "_attn",
            )
        program = mtf.lower(made, mesh="p:2;q:2", layout=layout)
    rng = np.random.default_rng(1)
    feeds = {
        "start": 31,
        "each": rng.integers(0, 50, 4),
        "q": rng.integers(0, 60, (4, 6)),
        "k": rng.integers(0, 60, (60, 4)),
    }
    sim = mtf.simulate(program, executor="exact")
    for name in "abcd":
        sim.state[name] = np.arange(32, dtype=np.float32).reshape(2, 16)
    found = sim.step(feeds)
    rows, keys = np.arange(6), np.tile(np.arange(60), (4, 1))
    np.testing.assert_array_equal(found["number"], bias_by([rows + 7], keys[:1], causal)[:, 0])
    np.testing.assert_array_equal(found["scalar"], bias_by([rows + 31], keys[:1], causal)[:, 0])
    np.testing.assert_array_equal(found["each"], bias_by(feeds["each"][:, None] + rows, keys, causal))
    np.testing.assert_array_equal(found["packed"], bias_by(feeds["q"], feeds["k"].T, causal))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (lambda: {"positions": mtf.zeros([B, L])}, r"positions of 'length:6' must be int32 with it.*got zeros: f32"),
        (lambda: {"positions": mtf.zeros([M], "int32")}, "without 'memory_length:60'"),
        (lambda: {"memory_positions": mtf.zeros([B], "int32")}, "positions of 'memory_length:60' must be int32 with"),
        (lambda: {"memory_positions": 3}, "expected a tensor, got int 3"),
        (lambda: {"positions": 0.5}, "the number 0.5 does not fit int32"),
    ],
)
def test_positions_of_other_kinds_are_refused(given, words):
    with mtf.Graph(), pytest.raises(mtf.ShapeError, match=words):
        mtf.layers.relative_position_bias(L, M, H, **given())


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
