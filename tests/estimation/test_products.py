"""Products are no scaled-down roofline: fixed cost, padding, the operand held, blocks, streaming, the vector unit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import meshlib as mtf
from hardware import CHIPS, Matmul
from hardware.blocking import block_sum_seconds, matmul_blocks
from hardware.memory import vmem_bytes
from meshlib.estimation import Row

D = mtf.Dimension
SIZES = st.integers(1, 20_000)


def row(m: int, k: int, n: int, slice_: str = "v5e-1", dtype: str = "bfloat16", precision: str = "default") -> Row:
    with mtf.Graph():
        x, w = mtf.input("x", [D("m", m), D("k", k)], dtype), mtf.variable("w", [D("k", k), D("n", n)], dtype=dtype)
        y = mtf.einsum([x, w], [D("m", m), D("n", n)])
        (found,) = mtf.estimate(mtf.lower({"y": y}, mesh="chips:1", precision=precision), slice_).rows
    return found


@given(SIZES, SIZES, SIZES, st.sampled_from(["v2", "v4", "v5e", "v6e", "v7"]), st.sampled_from([2, 4]))
def test_blocks_fit_vmem_and_read_everything(m, k, n, chip, itemsize):
    blocks = matmul_blocks(CHIPS[chip], Matmul(m, k, n), itemsize)
    once = itemsize * k * (m + n)
    assert blocks.read_bytes >= once
    held = 4 * blocks.rows * blocks.columns + 2 * itemsize * blocks.depth * (blocks.rows + blocks.columns)
    assert held <= vmem_bytes(CHIPS[chip]) // 2
    assert blocks.exposed_bytes <= once + itemsize * m * n + itemsize * blocks.depth * (blocks.rows + blocks.columns)


@pytest.mark.parametrize(
    ("chip", "dtype", "steps", "core_hz"),
    [
        ("v5e", "bf16", 8192 / 1024, 1.5e9),  # 16 MiB: 4 of sums, 4 of results, 8 of pieces [1024, 1024]
        ("v5p", "bf16", 8192 / 1024, 2 * 1.75e9),  # two cores
        ("v5e", "int8", 8192 / 2560, 1.5e9),  # 4 of sums, 2 of results, 10 of pieces [1024, 2560]
        ("v6e", "bf16", 1, 1.75e9),  # 96 MiB: in one step
    ],
)
def test_sums_of_blocks_by_hand(chip: str, dtype: str, steps: float, core_hz: float) -> None:
    product = Matmul(4096, 8192, 16_384, batch=3, dtype=dtype)
    registers = 3 * 4096 * 16_384 / 1024
    assert block_sum_seconds(CHIPS[chip], product, 1024) == pytest.approx(2 * registers * steps / core_hz)


def test_the_launch_decides_small_ones():
    tiny = row(8, 128, 128)
    assert tiny.bound == "latency"
    assert tiny.launch_seconds == pytest.approx(2.4e-6 - 0.5e-6)  # two transfers start, less what its program costs
    assert tiny.seconds < 1.1 * row(8, 8, 8).seconds


def test_ragged_sizes_cost_whole_tiles():
    """The contracted dim is in every tile; a ragged row or column dim may be streamed instead."""
    wide, ragged = row(4096, 4096, 8192), row(4096, 4096 - 127, 8192)
    assert ragged.mxu_seconds == wide.mxu_seconds
    assert row(4096, 4096, 8192 - 127).mxu_seconds < wide.mxu_seconds
    assert ragged.mxu_flops < wide.mxu_flops
    assert ragged.utilisation < wide.utilisation


def test_either_operand_may_be_held():
    """Few rows or few columns: the other operand is held, so both cost the same."""
    assert row(8192, 4096, 128).mxu_seconds == row(128, 4096, 8192).mxu_seconds
    # With 32 rows an array of 128 waits for its weights: a quarter of 128 rows' work in as long a time.
    assert row(32, 8192, 8192).mxu_seconds == pytest.approx(row(128, 8192, 8192).mxu_seconds, rel=0.01)


def test_weights_that_do_not_fit_stream():
    """Few rows: the time is that of the weights over HBM; many rows: that of the MXU."""
    thin, thick = row(64, 8192, 32768), row(8192, 8192, 32768)
    assert thin.bound == "hbm"
    assert thin.seconds == pytest.approx(2 * 8192 * 32768 / 819e9 / 0.9, rel=0.1)
    assert thick.bound == "mxu"
    assert thick.traffic_bytes > thick.hbm_bytes  # operands are read again for each block


def test_nothing_hides_the_first_pieces():
    found = row(1024, 1024, 1024)
    assert found.seconds > found.launch_seconds + max(found.mxu_seconds, found.hbm_seconds)
    assert found.seconds <= found.launch_seconds + found.mxu_seconds + found.hbm_seconds


def test_a_vector_goes_to_the_vector_unit():
    found = row(8192, 8192, 1)
    assert found.mxu_seconds == 0
    assert found.vpu_seconds > 0
    assert found.bound == "hbm"


def test_float32_through_takes_six_passes():
    plain, precise = row(4096, 4096, 4096, dtype="float32"), row(4096, 4096, 4096, dtype="float32", precision="highest")
    assert precise.mxu_flops == 6 * plain.mxu_flops
    assert precise.mxu_seconds == pytest.approx(6 * plain.mxu_seconds)
    assert precise.useful_flops == plain.useful_flops


def test_bfloat16_lanes_of_later_chips():
    def vector(dtype: str, slice_: str) -> float:
        with mtf.Graph():
            y = mtf.relu(mtf.input("x", [D("a", 8192), D("b", 1024)], dtype))
            (found,) = mtf.estimate(mtf.lower({"y": y}, mesh="chips:1"), slice_).rows
        return found.vpu_seconds

    assert vector("float32", "v5e-1") == vector("bfloat16", "v5e-1")
    assert vector("float32", "v6e-1") == pytest.approx(2 * vector("bfloat16", "v6e-1"))


def test_eight_bits_are_measured_against_their_own_peak():
    """Twice the rate of bfloat16 on v5e; MFU stays that of the bf16 peak, as it is published."""

    def made(precision: str) -> mtf.Estimate:
        m, k, n = D("m", 8192), D("k", 8192), D("n", 8192)
        with mtf.Graph():
            x, w = mtf.input("x", [m, k], "bfloat16"), mtf.variable("w", [k, n], dtype="bfloat16")
            y = mtf.einsum([x, w], [m, n], precision=precision)
            return mtf.estimate(mtf.lower({"y": y}, mesh="chips:1"), "v5e-1")

    wide, narrow = made("default"), made("int8")
    assert narrow.mfu == pytest.approx(2 * wide.mfu, rel=0.03)
    (row,) = narrow.rows
    assert row.mxu_dtype == "int8"
    assert row.mxu_seconds == pytest.approx(wide.rows[0].mxu_seconds / 2, rel=0.01)
    assert row.utilisation == pytest.approx(wide.rows[0].utilisation, rel=0.03)
    assert narrow.roofline()[0].attainable_flops_per_second == CHIPS["v5e"].peak_int8_flops
    assert wide.roofline()[0].attainable_flops_per_second == 197e12
