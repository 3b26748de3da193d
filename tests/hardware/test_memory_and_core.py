"""Padding, bandwidths, vector and matrix time of one device."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hardware import core, memory
from hardware.checks import HardwareError
from hardware.chips import CHIPS
from hardware.core import Matmul, Work, time_of
from hardware.mxu import MXU


@pytest.mark.parametrize(
    ("shape", "itemsize", "tile"),
    [  # layouts as XLA prints them in programs for TPUs
        ((1024, 1024), 4, (8, 128)),
        ((1024, 1024), 2, (8, 128)),
        ((4, 256), 4, (4, 128)),
        ((1, 256), 2, (2, 128)),
        ((1, 256), 4, (1, 128)),
        ((10,), 4, (128,)),
        ((300,), 4, (512,)),
        ((5000,), 4, (1024,)),
        ((), 4, (128,)),
        ((128,), 2, (256,)),
        ((4,), 2, (256,)),
        ((4,), 1, (512,)),
        ((5000,), 2, (1024,)),
    ],
)
def test_tiles(shape, itemsize, tile):
    assert memory.tile_of(shape, itemsize) == tile


def test_padding():
    assert memory.padded_shape((3, 5), 4, tile=(2, 2)) == (4, 6)
    assert memory.padded_bytes((4096, 1), 4) == 4096 * 128 * 4
    assert memory.padded_bytes((8, 128, 128), 2) == 8 * 128 * 128 * 2
    assert memory.padded_bytes((), 4) == 512
    assert memory.padded_bytes((0, 128), 4) == 0


@given(st.lists(st.integers(1, 300), max_size=4), st.sampled_from([1, 2, 4, 8]))
def test_padding_only_grows_and_is_idempotent(shape, itemsize):
    padded = memory.padded_shape(shape, itemsize)
    assert all(a >= b for a, b in zip(padded, shape or [1], strict=True))
    tile = memory.tile_of(shape, itemsize)
    assert all(a % b == 0 for a, b in zip(padded[-len(tile) :], tile, strict=True))
    assert memory.padded_shape(padded, itemsize) == padded
    assert memory.padded_bytes(shape, itemsize) >= math.prod(shape) * itemsize


def test_rates_are_per_device():
    assert memory.hbm_rate(CHIPS["v3"]) == 450e9
    assert memory.hbm_rate(CHIPS["v4"]) == 1200e9
    assert memory.vmem_rate(CHIPS["v5e"]) == pytest.approx(18e12, rel=0.01)
    assert memory.vmem_bytes(CHIPS["v5p"]) == 2 * 64 * 2**20
    assert core.vpu_rate(CHIPS["v2"]) == 700e6 * 8 * 128 * 2
    assert core.vpu_rate(CHIPS["v6e"], "bfloat16") == 2 * core.vpu_rate(CHIPS["v6e"])
    assert core.vpu_rate(CHIPS["v5e"], "bfloat16") == core.vpu_rate(CHIPS["v5e"])


@pytest.mark.parametrize("name", [name for name in CHIPS if name != "v1"])
def test_large_matmuls_reach_their_share_of_the_peak(name):
    chip = CHIPS[name]
    product = Matmul(8192, 8192, 8192)
    reached = product.flops / core.matmul_seconds(chip, product) * chip.devices_per_chip
    assert reached / chip.peak_flops() == pytest.approx(chip.mxu_efficiency, abs=0.01)  # as measured


def test_narrow_types_and_passes():
    chip, product = CHIPS["v5e"], Matmul(4096, 4096, 4096)
    slow = core.matmul_seconds(chip, product)
    fast = core.matmul_seconds(chip, Matmul(4096, 4096, 4096, dtype="int8"))
    assert slow / fast == pytest.approx(393 / 197)
    six = Matmul(4096, 4096, 4096, passes=core.FLOAT32_PASSES)
    assert core.matmul_seconds(chip, six) == pytest.approx(6 * slow)


@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(1, 5000), st.integers(1, 4))
def test_matmul_cycles_bounds(m, k, n, batch):
    """Never above one array's closed form, never below perfect use of all; same for both operands."""
    chip = CHIPS["v5e"]
    cycles = core.matmul_cycles(chip, Matmul(m, k, n, batch))
    assert cycles >= batch * m * k * n / (4 * 128 * 128)
    rows = -(-m // 8) * 8
    assert cycles <= batch * MXU().cycles(rows, k, n)
    assert cycles == core.matmul_cycles(chip, Matmul(n, k, m, batch))


def test_utilisation_of_small_m_and_of_a_narrow_output():
    chip = CHIPS["v4"]
    full = core.matmul_seconds(chip, Matmul(8192, 8192, 8192))
    assert core.matmul_seconds(chip, Matmul(8192, 8192, 128)) == pytest.approx(full / 64, rel=0.05)
    assert core.matmul_seconds(chip, Matmul(8192, 8192, 8)) == pytest.approx(full / 64, rel=0.05)
    assert core.matmul_seconds(chip, Matmul(8192, 8192, 129)) == pytest.approx(full / 32, rel=0.5)


def test_rows_come_in_eights():
    for m in (1001, 1008):
        assert core.matmul_cycles(CHIPS["v2"], Matmul(m, 128, 128)) == 1008 + 2 * 128 + 128 - 2


def test_a_product_with_a_vector_runs_on_the_vector_unit():
    time = time_of(CHIPS["v2"], Work((Matmul(4096, 8192, 1),), vpu_ops=10))
    assert time.mxu_seconds == 0
    assert time.vpu_seconds == pytest.approx((2 * 4096 * 8192 + 10) / core.vpu_rate(CHIPS["v2"]))


def test_intensity_is_that_of_a_device():
    assert core.critical_intensity(CHIPS["v3"]) == pytest.approx(61.5e12 / 450e9)
    assert core.critical_intensity(CHIPS["v3"], "ici") == pytest.approx(61.5e12 / (2 * 82e9 * 0.9 / 2))
    assert core.critical_intensity(CHIPS["v7"], "dcn") == pytest.approx(2307e12 / 12.5e9)


def test_bounds():
    chip = CHIPS["v5e"]
    assert time_of(chip, Work((Matmul(4096, 4096, 4096),), hbm_bytes=1e8)).bound == "mxu"
    assert time_of(chip, Work(vpu_ops=1e12, hbm_bytes=1e8)).bound == "vpu"
    assert time_of(chip, Work(hbm_bytes=1e9)).bound == "hbm"
    tiny = time_of(chip, Work(hbm_bytes=100))
    assert tiny.bound == "launch"
    assert tiny.seconds > chip.launch_seconds
    both = time_of(chip, Work(mxu_flops=197e9, vpu_ops=1e9, hbm_bytes=1e8))
    assert both.mxu_seconds == pytest.approx(1e-3 / 0.96)
    assert both.lower_seconds < both.seconds < both.upper_seconds


@pytest.mark.parametrize(
    ("call", "part"),
    [
        (lambda: memory.tile_of((3, -1), 4), "shape[1] of (3, -1) must be an integer >= 0, not -1"),
        (lambda: memory.tile_of((3, 1), 3), "itemsize must be 0.5, 1, 2, 4 or 8 bytes, not 3"),
        (lambda: memory.padded_shape((3,), 4, (8, 128)), "tile (8, 128) has more dims than the array (3,)"),
        (lambda: memory.hbm_seconds(CHIPS["v4"], -1), "size_bytes must be a finite number >= 0"),
        (lambda: core.vpu_rate(CHIPS["v4"], "int8"), "dtype of the vector unit 'int8'; use one of float32"),
        (lambda: core.vpu_seconds(CHIPS["v4"], float("inf")), "not inf"),
        (lambda: Matmul(1, 0, 1), "Matmul k must be an integer >= 1, not 0"),
        (lambda: Work(hbm_bytes=float("nan")), "Work hbm_bytes must be a finite number"),
        (lambda: Work(vpu_ops=-1), "Work vpu_ops"),
        (lambda: Work((3,)), "Work matmuls must be a tuple of Matmul(m, k, n), not (3,)"),
        (lambda: Work(vpu_dtype="f64"), "dtype of the vector unit 'f64'; use one of float32, bfloat16"),
        (lambda: Matmul(1, 1, 1, dtype="f32"), "unknown MXU dtype 'f32'; use one of bf16, int8, fp8, int4"),
        (lambda: time_of("v33", Work()), "unknown chip 'v33'; known chips are v1"),
        (lambda: time_of("v3", 3), "time_of needs a Work(matmuls, ...), not 3"),
        (lambda: core.critical_intensity(CHIPS["v4"], "disk"), "unknown memory 'disk'; use one of hbm, vmem"),
        (lambda: core.critical_intensity(CHIPS["v1"], "ici", "int8"), "chip 'v1' has no ici"),
        (lambda: core.matmul_seconds(CHIPS["v2"], Matmul(1, 1, 1, dtype="int8")), "no published int8 rate"),
        (lambda: core.compute_bound_rows(0, 1, 10), "k must be an integer >= 1"),
    ],
)
def test_bad_input(call, part):
    with pytest.raises(HardwareError) as fault:
        call()
    assert part in str(fault.value)
