"""The clocked array against references, against a PE-by-PE oracle, and against the closed form."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hardware import registers
from hardware.checks import HardwareError
from hardware.mxu import MODES, MXU
from hardware.numerics import mxu_matmul
from tests.hardware import reference

CASES = reference.held("systolic_cases.json")
STATES = reference.held("systolic_3x3_batch3.json")


def operands(m, k, n, seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((m, k)).astype(dtype), rng.standard_normal((k, n)).astype(dtype)


def check_run(mxu, m, k, n, mode, rate=1, seed=0):
    x, w = operands(m, k, n, seed)
    run = mxu.run(w, x, mode, rate)
    assert run.cycles == mxu.cycles(m, k, n, mode, rate)
    assert run.tiles == mxu.tiles(k, n)
    assert run.y.tobytes() == mxu_matmul(x, w, mxu.rows).tobytes()
    start = mxu.schedule(m, run.tiles, mode, rate).start
    deep = -(-k // mxu.rows)
    block, column = np.divmod(np.arange(n), mxu.columns)
    last = np.array(start)[(block + 1) * deep - 1] + column + mxu.rows - 1
    assert np.array_equal(run.output_cycle, last + np.arange(m)[:, None])
    return run.cycles


@pytest.mark.parametrize("mode", MODES)
def test_every_reference_case(mode):
    cases = CASES["cases"]
    done = 0
    for case in cases:
        if mode in case:
            mxu = MXU(case["R"], case["C"])
            assert mxu.tiles(case["K"], case["N"]) == case["tiles"]
            assert check_run(mxu, case["M"], case["K"], case["N"], mode) == case[mode], case
            done += 1
    assert done >= 19


def test_three_by_three_register_by_register():
    data = STATES
    w, x = np.array(data["W"]).T, np.array(data["X"])
    run = MXU(3, 3).run(w, x, "noload", states=True)
    assert run.y.tolist() == data["Y"]
    assert len(run.states) == len(data["cycles"]) == run.cycles

    def shown(values, vectors):
        """Nested lists with None where nothing is."""
        return np.where(np.asarray(vectors) < 0, None, np.asarray(values, object)).tolist()

    for state, want in zip(run.states, data["cycles"], strict=True):
        assert state.cycle == want["cycle"]
        assert state.busy == want["busy"]
        assert shown(state.activation, state.vector) == want["a"]
        assert shown(state.vector, state.vector) == want["a_vector"]
        assert shown(state.partial, state.vector) == want["p"]
        for r, entry in enumerate(want["feed"]):
            got = (state.feed_vector[r], state.feed[r])
            assert entry is None or (entry["x"], entry["value"]) == (f"x{r} of vector {got[0]}", got[1])
            assert (entry is None) == (got[0] < 0)
        for c, entry in enumerate(want["out"]):
            got = (state.out_vector[c], state.out[c])
            assert entry is None or (entry["y"], entry["value"]) == (f"y{c} of vector {got[0]}", got[1])
            assert (entry is None) == (got[0] < 0)


def oracle_states(mxu, w, x, mode, rate):
    """One PE at a time: registers of every cycle, from the schedule and the rules alone."""
    rows, columns, m = mxu.rows, mxu.columns, len(x)
    deep, wide = -(-w.shape[0] // rows), -(-w.shape[1] // columns)
    tiles = [(i, j) for j in range(wide) for i in range(deep)]
    plan = mxu.schedule(m, len(tiles), mode, rate)
    pad_w = np.zeros((deep * rows, wide * columns))
    pad_w[: w.shape[0], : w.shape[1]] = w
    pad_x = np.zeros((m, deep * rows))
    pad_x[:, : x.shape[1]] = x
    tile_of = [pad_w[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns] for i, j in tiles]
    weight, shadow, p, a = (np.zeros((rows, columns)) for _ in range(4))
    if mode == "noload":
        weight[...] = tile_of[0]
    for t in range(plan.cycles):
        new_p, new_a, new_shadow = p.copy(), a.copy(), shadow.copy()
        for r in range(rows):
            for c in range(columns):
                feed = 0.0
                for number, start in enumerate(plan.start):
                    if t == start + r + c and mode != "noload":
                        weight[r, c] = shadow[r, c]
                    if c == 0 and 0 <= t - start - r < m:
                        feed = pad_x[t - start - r, tiles[number][0] * rows + r]
                    since = t - plan.load[number] - plan.skew * c
                    if since in plan.shifts and r <= plan.shifts.index(since) and mode != "noload":
                        above = tile_of[number][rows - 1 - plan.shifts.index(since), c] if r == 0 else shadow[r - 1, c]
                        new_shadow[r, c] = above
                new_a[r, c] = feed if c == 0 else a[r, c - 1]
                new_p[r, c] = (p[r - 1, c] if r else 0.0) + weight[r, c] * new_a[r, c]
        p, a, shadow = new_p, new_a, new_shadow
        yield a, p, weight.copy(), shadow


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 4), st.integers(1, 4), st.integers(1, 5), st.integers(1, 9), st.integers(1, 9),
    st.sampled_from(MODES), st.sampled_from([1, Fraction(1, 2), 0.7]),
)  # fmt: skip
def test_every_register_against_the_oracle(rows, columns, m, k, n, mode, rate):
    if mode == "noload":
        k, n = min(k, rows), min(n, columns)
    check_registers(rows, columns, m, k, n, mode, rate)


@pytest.mark.parametrize("mode", ["serial", "shadow", "shadow_unskewed"])
@pytest.mark.parametrize("rate", [1, Fraction(1, 2), 0.7, 0.3])
@pytest.mark.parametrize(("rows", "columns", "m"), [(4, 3, 2), (3, 5, 1), (5, 2, 7)])
def test_every_register_while_tiles_follow_each_other(rows, columns, m, mode, rate):
    check_registers(rows, columns, m, 2 * rows + 1, 2 * columns, mode, rate)


def check_registers(rows, columns, m, k, n, mode, rate):
    mxu = MXU(rows, columns)
    x, w = operands(m, k, n, seed=k, dtype=np.float64)
    run = mxu.run(w, x, mode, rate, states=True)
    for state, (a, p, weight, shadow) in zip(run.states, oracle_states(mxu, w, x, mode, rate), strict=True):
        assert np.array_equal(state.activation, a)
        assert np.array_equal(state.partial, p)
        assert np.array_equal(state.weight, weight)
        assert np.array_equal(state.shadow, shadow)


@pytest.mark.parametrize("mode", MODES)
def test_cycles_are_read_alone_and_in_any_order(mode):
    x, w = operands(5, 3, 4, seed=3)
    run = MXU(3, 4).run(w, x, mode, states=True)
    for cycle in (2, 7, 6, run.cycles - 1, 0, 3):
        alone, among = run.state(cycle), run.states[cycle]
        assert all(np.array_equal(value, vars(among)[name]) for name, value in vars(alone).items())
    with pytest.raises(HardwareError, match=f"cycle {run.cycles} is not one of the {run.cycles} cycles"):
        run.state(run.cycles)
    with pytest.raises(HardwareError, match="cycle must be an integer >= 0, not -1"):
        run.state(-1)


@settings(max_examples=80, deadline=None)
@given(
    st.integers(1, 9), st.integers(1, 9), st.integers(1, 20), st.integers(1, 30), st.integers(1, 30),
    st.sampled_from(MODES), st.sampled_from([1, 0.3, 0.5, Fraction(2, 3), 0.19]), st.integers(0, 99),
)  # fmt: skip
def test_clocked_equals_closed_form_and_matmul(rows, columns, m, k, n, mode, rate, seed):
    if mode == "noload":
        k, n = min(k, rows), min(n, columns)
    check_run(MXU(rows, columns), m, k, n, mode, rate, seed)


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 9), st.integers(1, 9), st.integers(1, 9))
def test_integers_are_exact(rows, columns, m, k, n):
    rng = np.random.default_rng(m)
    x, w = rng.integers(-128, 128, (m, k), np.int8), rng.integers(-128, 128, (k, n), np.int8)
    assert np.array_equal(MXU(rows, columns).run(w, x).y, x.astype(np.int64) @ w.astype(np.int64))


def test_long_streams_are_cut_in_waves(monkeypatch):
    monkeypatch.setattr(registers, "_WAVE_ELEMENTS", 64)
    check_run(MXU(4, 4), 301, 4, 4, "noload")
    check_run(MXU(2, 3), 70, 9, 7, "shadow")
    check_run(MXU(2, 100), 3, 4, 130, "serial")  # a row is wider than a wave


def test_any_rate_above_zero_is_a_rate():
    assert MXU(4, 4).load_cycles(1e-9) == 4 * 10**9
    assert MXU(3, 3).load_cycles(0.3) == 10
    assert MXU(4, 4).cycles(1, 1, 1, "serial", 1e-7) == 4 * 10**7 + 7


def test_exposed_shift():
    mxu = MXU(128, 128)
    assert mxu.exposed_cycles(m=128, k=1280, n=128) == 128  # only the first load
    assert mxu.exposed_cycles(m=64, k=1280, n=128) == 128 + 9 * 64
    assert mxu.exposed_cycles(m=64, k=128, n=128, mode="noload") == 0
    slow = mxu.cycles(m=64, k=1280, n=128, weight_rows_per_cycle=0.25)
    assert slow == 512 + 9 * 512 + 64 + 254


def test_tpu_v1_ridge_point():
    """TPU v1 needs about 1350 multiply-adds per byte of weights: Jouppi et al. 2017, section 4."""
    rate = 34e9 / 700e6 / 256  # DDR3 bytes/s over clock and bytes per row
    load = MXU(256, 256).load_cycles(rate)
    assert 1300 < load < 1400
    assert MXU(256, 256).exposed_cycles(load, 2560, 256, weight_rows_per_cycle=rate) == load


@pytest.mark.parametrize(("shift", "other"), [(15.9, 17.5), (13.4, 31.9), (15.8, 17.9), (17.1, 10.3)])
def test_tpu_v1_published_counters(shift, other):
    """Weight shift takes 19 % of matrix cycles in all four applications that wait for weights.

    Percent of all cycles for MLP0, MLP1, LSTM0, LSTM1, `other` being non-matrix cycles: Jouppi et al. 2017,
    table 3, from memory.
    """
    counters = MXU(256, 256).counters(200, 25600, 2560, weight_rows_per_cycle=34e9 / 700e6 / 256)
    total = counters.active + counters.shift + counters.stall
    assert counters.shift / total == pytest.approx(shift / (100 - other), abs=0.01)
    assert counters.shift / total == pytest.approx(0.19, abs=0.005)


def test_tpu_v1_published_activity_of_its_largest_application():
    """MLP0 (batch 200): active 12.7 %, weight stall 53.9 %, of 82.5 % matrix cycles; table 3, from memory."""
    counters = MXU(256, 256).counters(200, 25600, 2560, weight_rows_per_cycle=34e9 / 700e6 / 256)
    total = counters.active + counters.shift + counters.stall
    assert counters.active / total == pytest.approx(12.7 / 82.5, rel=0.05)
    assert counters.stall / total == pytest.approx(53.9 / 82.5, rel=0.03)


@settings(deadline=None)
@given(
    st.integers(1, 9), st.integers(1, 9), st.integers(1, 20), st.integers(1, 30), st.integers(1, 30),
    st.sampled_from(MODES[1:]), st.sampled_from([1, 0.3, 0.5]),
)  # fmt: skip
def test_counters_add_up_and_count_what_the_schedule_does(rows, columns, m, k, n, mode, rate):
    mxu = MXU(rows, columns)
    counters = mxu.counters(m, k, n, mode, rate)
    count = mxu.tiles(k, n)
    assert sum(vars(counters).values()) == mxu.cycles(m, k, n, mode, rate)
    assert min(vars(counters).values()) >= 0
    start = mxu.schedule(m, count, mode, rate).start
    entering = {cycle for s in start for cycle in range(s, s + m)}
    assert counters.active == len(entering)
    if mode != "serial":
        assert counters.shift + counters.stall == start[-1] + m - len(entering)
    assert counters.stall == 0 or rate < 1 or mode == "shadow_unskewed"


def test_utilisation():
    mxu = MXU()
    assert mxu.utilisation(4096, 4096, 4096) > 0.99
    assert 0.49 < mxu.utilisation(64, 12800, 1280) < 0.5  # M below R: min(1, M / R)
    assert mxu.utilisation(4096, 1280, 1) == pytest.approx(1 / 128, rel=0.02)


@pytest.mark.parametrize(
    ("call", "part"),
    [
        (lambda: MXU(0, 4), "MXU rows must be an integer >= 1, not 0"),
        (lambda: MXU(4, 2.0), "MXU columns must be an integer >= 1, not 2.0"),
        (lambda: MXU().cycles(0, 1, 1), "m must be an integer >= 1, not 0"),
        (lambda: MXU().cycles(1, -3, 1), "k must be an integer >= 1, not -3"),
        (lambda: MXU().cycles(1, 1, 1, "fast"), "unknown weight mode 'fast'; use one of noload, serial"),
        (lambda: MXU().cycles(1, 129, 1, "noload"), "holds one tile of weights, not 2"),
        (
            lambda: MXU().cycles(1, 1, 1, "serial", 0),
            "weight_rows_per_cycle must be a finite number > 0, not 0",
        ),
        (lambda: MXU().cycles(1, 1, 1, "serial", float("nan")), "not nan"),
        (lambda: MXU().cycles(1, 1, 1, "serial", 1.5), "must be in (0, 1], not 1.5"),
        (lambda: MXU().run([[1], [2, 3]], np.ones((1, 2))), "x and weights must be arrays"),
        (lambda: MXU().run(np.ones((3, 2)), np.ones((2, 2))), "got x (2, 2), weights (3, 2)"),
        (lambda: MXU().run(np.ones(3), np.ones((2, 3))), "got x (2, 3), weights (3,)"),
        (lambda: MXU().run(np.ones((0, 2)), np.ones((2, 0))), "all >= 1"),
        (lambda: MXU().run(np.ones((2, 2), complex), np.ones((2, 2))), "weights complex128"),
        (lambda: MXU(2, 2).run(np.ones((3, 2)), np.ones((2, 3)), "noload"), "one tile"),
    ],
)
def test_bad_input(call, part):
    with pytest.raises(HardwareError) as fault:
        call()
    assert part in str(fault.value)
