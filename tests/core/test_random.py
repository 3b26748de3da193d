"""Random numbers: Threefry against published vectors, the two laws against what they promise."""

from __future__ import annotations

from math import erf, exp, pi, sqrt

import numpy as np
import pytest

import meshlib as mtf
from layouts import Dimension, Shape
from meshlib.core.dtypes import as_dtype
from meshlib.core.initializers import draw, fold, make_key
from meshlib.core.random import threefry2x32
from tests.cases import Array
from tests.oracle import random_words, threefry

# Random123, tests/kat_vectors, threefry2x32 with 20 rounds: counter, key, result.
ONES = 0xFFFFFFFF
KNOWN = (
    ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
    ((ONES, ONES), (ONES, ONES), (0x1CB996FC, 0xBB002BE7)),
    ((0x243F6A88, 0x85A308D3), (0x13198A2E, 0x03707344), (0xC4923A9C, 0x483DF7A0)),
)
COUNT = 200_000
LAWS = {"uniform": ("uniform", -1.0, 3.0), "normal": ("normal", 0.5, 2.0)}


@pytest.mark.parametrize(("counter", "key", "wanted"), KNOWN)
def test_published_vectors(counter: tuple[int, int], key: tuple[int, int], wanted: tuple[int, int]) -> None:
    high, low = (np.array([word], np.uint32) for word in counter)
    x, y = threefry2x32(key, high, low)
    assert (int(x[0]), int(y[0])) == wanted
    assert threefry(key, counter) == wanted  # the tests' own, which the rows of random operations go by


def test_many_counters_agree_with_the_integer_version() -> None:
    rng = np.random.default_rng(0)
    words = rng.integers(0, 2**32, (50, 2), dtype=np.uint64).astype(np.uint32)
    key = (0xDEADBEEF, 0x12345678)
    x, y = threefry2x32(key, words[:, 0], words[:, 1])
    for n, (high, low) in enumerate(words.tolist()):
        assert (int(x[n]), int(y[n])) == threefry(key, (high, low))


def test_counters_are_not_written_to() -> None:
    high, low = np.zeros(4, np.uint32), np.arange(4, dtype=np.uint32)
    threefry2x32((1, 2), high, low)
    assert high.tolist() == [0] * 4
    assert low.tolist() == [0, 1, 2, 3]


def sample(law: str, dtype: str = "float64", seed: int = 3, name: str = "sample", count: int = COUNT) -> Array:
    """Many numbers of one stream."""
    return draw(LAWS[law], fold(make_key(seed, name), 0), [count], [0], [count], as_dtype(dtype)).astype(np.float64)


def test_positions_beyond_32_bits_use_the_high_word() -> None:
    """A block at a far offset is what single positions give: no wrap at 2**32."""
    key, whole = make_key(0, "far", 0), [2**20, 2**20]
    block = draw(("uniform", 0.0, 1.0), key, whole, [2**13, 5], [1, 3], as_dtype("float64"))
    for n in range(3):
        position = 2**13 * 2**20 + 5 + n
        x, _ = threefry(key, (position >> 32, position & ONES))
        assert block[0, n] == (x >> 8) / 2**24


def test_key_names_seed_name_and_step() -> None:
    assert len({make_key(s, n, t) for s in range(4) for n in ("a", "b", "a/b") for t in range(4)}) == 48
    assert make_key(1, "2", 3) != make_key(12, "", 3)
    first = [x for x, _ in random_words("sample", [4], seed=3)]
    assert np.array_equal((sample("uniform", count=4) + 1) / 4 * 2**24, [x >> 8 for x in first])


# ---------------------------------------------------------------- statistics; bounds at 5 standard errors


def test_uniform_mean_and_variance() -> None:
    x = sample("uniform")
    assert abs(x.mean() - 1) < 5 * sqrt(16 / 12 / COUNT)
    fourth = 16**2 / 80  # E (x - mean)**4 of a uniform of width 4
    assert abs(x.var() - 16 / 12) < 5 * sqrt((fourth - (16 / 12) ** 2) / COUNT)


def test_normal_mean_and_variance() -> None:
    x = sample("normal")
    assert abs(x.mean() - 0.5) < 5 * 2 / sqrt(COUNT)
    assert abs(x.var() - 4) < 5 * 4 * sqrt(2 / COUNT)
    standard = (x - 0.5) / 2
    assert abs((standard**3).mean()) < 5 * sqrt(15 / COUNT)
    assert abs((standard**4).mean() - 3) < 5 * sqrt(96 / COUNT)


def kolmogorov_smirnov(x: Array, cdf: Array) -> float:
    """sqrt(n) times the largest distance of the empirical distribution; `cdf` at the sorted x."""
    n = x.size
    above = np.arange(1, n + 1) / n - cdf
    below = cdf - np.arange(n) / n
    return float(max(above.max(), below.max()) * sqrt(n))


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("law", LAWS)
def test_distribution(law: str, seed: int) -> None:
    """The limit 1.95 is passed with probability 2 exp(-2 * 1.95**2) = 0.001; the seeds are fixed."""
    x = np.sort(sample(law, seed=seed))
    cdf = (x + 1) / 4 if law == "uniform" else np.array([(1 + erf((v - 0.5) / 2 / sqrt(2))) / 2 for v in x])
    assert kolmogorov_smirnov(x, cdf) < 1.95


@pytest.mark.parametrize("law", LAWS)
def test_neighbours_do_not_correlate(law: str) -> None:
    x = sample(law)
    x = (x - x.mean()) / x.std()
    for lag in (1, 2, 3, 64, 128, 1000):
        assert abs((x[lag:] * x[:-lag]).mean()) < 5 / sqrt(COUNT)
    other = sample(law, seed=4)
    assert abs((x * (other - other.mean()) / other.std()).mean()) < 5 / sqrt(COUNT)


def test_bits_are_balanced() -> None:
    x, y = threefry2x32((5, 6), np.zeros(COUNT, np.uint32), np.arange(COUNT, dtype=np.uint32))
    for words in (x, y, x ^ y):
        for bit in range(32):
            assert abs(float(((words >> np.uint32(bit)) & np.uint32(1)).mean()) - 0.5) < 5 * 0.5 / sqrt(COUNT)


# ---------------------------------------------------------------- bounds


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize(
    ("low", "high"), [(0.0, 1.0), (-1.0, 3.0), (0.25, 0.5), (-3.0, -1.0), (0.1, 0.3), (100.0, 101.0), (-0.05, 0.05)]
)
def test_uniform_stays_within_its_bounds(low: float, high: float, dtype: str) -> None:
    """maxval is never drawn, however coarse the dtype: neither by scaling nor by rounding."""
    kind = as_dtype(dtype)
    x = draw(("uniform", low, high), make_key(0, "bounds", 0), [COUNT], [0], [COUNT], kind)
    assert float(x.max()) < high
    assert float(x.min()) >= low
    assert np.array_equal(x.astype(kind.public).astype(x.dtype), x)
    assert len(np.unique(x)) > 1 or dtype == "bfloat16"


def test_uniform_of_the_largest_word(monkeypatch: pytest.MonkeyPatch) -> None:
    full = np.full(3, ONES, np.uint32)
    monkeypatch.setattr("meshlib.core.initializers.threefry2x32", lambda key, high, low: (full, full))
    for name in ("float64", "float32", "bfloat16"):
        for low, high in ((0.0, 1.0), (-1.0, 0.0), (0.1, 0.3), (1e6, 1e6 + 1), (-0.3, -0.1), (0.0, 1e-30)):
            x = draw(("uniform", low, high), (0, 0), [3], [0], [3], as_dtype(name))
            assert (x.astype(np.float64) < high).all(), (name, low, high)
            assert (x.astype(np.float64) >= low).all() or (name, low) == ("bfloat16", 1e6), (name, low, high)
    extreme = draw(("normal", 0.0, 1.0), (0, 0), [3], [0], [3], as_dtype("float64"))
    assert np.isfinite(extreme).all()


def test_normal_is_finite_for_the_smallest_word(monkeypatch: pytest.MonkeyPatch) -> None:
    none = np.zeros(3, np.uint32)
    monkeypatch.setattr("meshlib.core.initializers.threefry2x32", lambda key, high, low: (none, none))
    x = draw(("normal", 0.0, 1.0), (0, 0), [3], [0], [3], as_dtype("float32"))
    assert np.isfinite(x).all()
    assert abs(x[0] - sqrt(2 * 24 * np.log(2))) < 1e-6  # the largest radius, at angle 0


def test_a_block_is_cut_from_the_whole() -> None:
    key, sizes = make_key(0, "cut", 0), [6, 4, 10]
    for law in LAWS.values():
        whole = draw(law, key, sizes, [0, 0, 0], sizes, as_dtype("float32"))
        block = draw(law, key, sizes, [2, 1, 5], [3, 2, 5], as_dtype("float32"))
        assert np.array_equal(block, whole[2:5, 1:3, 5:10])


def test_scalar_and_negative_limits() -> None:
    assert draw(("uniform", 0.0, 1.0), (1, 2), [], [], [], as_dtype("float32")).shape == ()
    x = mtf.initializers.glorot_uniform()((1, 2), Shape("i:100;o:200"), as_dtype("float64"))
    assert abs(x.var() - 2 / 300) < 0.02 * 2 / 300
    x = mtf.initializers.scaled_normal(Shape("i:100").dims)((1, 2), Shape("i:100;o:200"), as_dtype("float64"))
    assert abs(x.var() - 0.01) < 0.05 * 0.01


def test_dropout_keeps_the_mean() -> None:
    with mtf.Graph():
        x = mtf.ones(Shape("a:1000;b:100"))
        y = mtf.dropout(x, True, keep_prob=0.8)
    out = mtf.simulate(mtf.lower({"y": y}, mesh="p:4", layout="a:p")).step()["y"]
    assert set(np.unique(out)) == {np.float32(0), np.float32(1.25)}
    assert abs((out > 0).mean() - 0.8) < 5 * sqrt(0.16 / out.size)
    with mtf.Graph():
        x = mtf.ones(Shape("a:4"))
        assert mtf.dropout(x, False, keep_prob=0.5) is x
        assert mtf.dropout(x, True, rate=0.0) is x


# ---------------------------------------------------------------- initial values


def initial(start: mtf.initializers.Initializer, dtype: str = "float32") -> np.ndarray:
    with mtf.Graph():
        program = mtf.lower({"w": mtf.variable("w", [Dimension("i", 60), Dimension("j", 300)], start, dtype)})
    return np.asarray(mtf.simulate(program).state["w"], np.float64)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_a_truncated_normal_is_a_normal_without_its_ends(dtype: str) -> None:
    found = (initial(mtf.initializers.truncated_normal(3.0, 0.5), dtype) - 3) / 0.5
    assert np.abs(found).max() <= (2.01 if dtype == "bfloat16" else 2 + 1e-6)
    # Mean square of a standard normal within 2: 1 - 4 pdf(2) / P(|z| < 2).
    pdf, inside = exp(-2) / sqrt(2 * pi), erf(sqrt(2))
    assert abs(found.mean()) < 0.03
    assert abs((found**2).mean() - (1 - 4 * pdf / inside)) < 0.02
    for bound in (0.5, 1.0, 1.5):  # the law in between
        assert abs((np.abs(found) < bound).mean() - erf(bound / sqrt(2)) / inside) < 0.015
    # What was not drawn again is what random_normal draws.
    plain = (initial(mtf.initializers.random_normal(3.0, 0.5), dtype) - 3) / 0.5
    kept = np.isclose(plain, found, atol=0.02)
    assert 0.95 < kept.mean() < 0.96
    assert np.abs(plain[~kept]).min() > 1.98


@pytest.mark.parametrize("distribution", ["normal", "untruncated_normal", "uniform"])
@pytest.mark.parametrize(("mode", "n"), [("fan_in", 60), ("fan_out", 300), ("fan_avg", 180)])
def test_variance_scaling(mode: str, n: int, distribution: str) -> None:
    found = initial(mtf.initializers.variance_scaling(2.0, mode, distribution))
    assert abs(found.var() * n / 2 - 1) < 0.03
    assert abs(found.mean()) < 0.03 * found.std()
    other = {"fan_in": 300, "fan_out": 60, "fan_avg": 180}[mode]
    turned = initial(mtf.initializers.variance_scaling(2.0, mode, distribution, [Dimension("j", 300)]))
    assert abs(turned.var() * other / 2 - 1) < 0.03
    furthest = {"normal": 2 / 0.8796, "untruncated_normal": 6, "uniform": sqrt(3)}[distribution]
    assert np.abs(found).max() <= furthest * sqrt(2 / n) * 1.0001


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((0.0,), "scale must be positive, got 0.0"),
        ((1.0, "fan_average"), "mode must be 'fan_in' or .*; did you mean 'fan_avg'"),
        ((1.0, "fan_in", "gauss"), "distribution must be 'normal' or"),
        ((1.0, "fan_in", "normal", ["i"]), "expected Dimensions, got str 'i'"),
    ],
)
def test_bad_arguments_of_variance_scaling(arguments: tuple, words: str) -> None:
    with pytest.raises(mtf.GraphError, match=rf"variance_scaling \(test_random.py:\d+\).*{words}"):
        mtf.initializers.variance_scaling(*arguments)


@pytest.mark.parametrize(
    ("draw", "words"),
    [
        (
            lambda: mtf.random_uniform([], 0, 1e300),
            r"random_uniform \(test_random.py:\d+\): the number 1e\+300 does not",
        ),
        (
            lambda: mtf.random_normal([], -1e39),
            r"random_normal \(test_random.py:\d+\): the number -1e\+39 does not fit f",
        ),
        (lambda: mtf.initializers.truncated_normal(0, -1), r"truncated_normal \(.*stddev must not be negative, got -1"),
    ],
)
def test_bounds_that_can_not_be_are_refused(draw, words):
    with mtf.Graph(), pytest.raises(mtf.MeshlibError, match=words):
        draw()
