"""A group alone in its program: passes that reductions end, float32 blocks, loops, launches; bytes of gathers."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import meshlib as mtf
from hardware import CHIPS, Matmul
from hardware.core import matmul_cycles
from hardware.memory import hbm_seconds
from hardware.slices import Slice
from meshlib.estimation import Physics, Row
from meshlib.validation.micro import priced
from tests.effort import draws

D = mtf.Dimension
IDEAL = Physics().without_losses()
R, C = D("r", 4096), D("c", 2048)
BYTES = 4 * 4096 * 2048  # of a float32 operand


def alone(build, chip: str = "v5e-1", physics: Physics | None = None) -> Row:
    """The row of a program that is one group; `build` makes its result from nothing."""
    with mtf.Graph():
        program = mtf.lower({"y": build()}, mesh=f"chips:{Slice(chip).devices}")
    (row,) = mtf.estimate(program, chip, physics=physics or Physics()).rows
    return row


def operand(dtype: str = "float32", name: str = "x") -> mtf.Tensor:
    return mtf.input(name, [R, C], dtype)


def test_each_reduction_ends_a_pass():
    """A softmax: maximum, sum, its logarithm over the statistics, quotient; three of them read the operand."""
    row = alone(lambda: mtf.softmax(operand(), C))
    assert row.launch_seconds == pytest.approx(4e-6)
    # read by three passes, accumulated in two, written once
    assert row.traffic_bytes == pytest.approx((3 + 2 + 1) * BYTES)


def test_passes_of_a_layer_norm():
    """Mean, variance, result; the mean and the factor over the statistics."""
    row = alone(lambda: mtf.layers.layer_norm(operand(), C))
    assert row.launch_seconds == pytest.approx(5e-6)
    assert row.traffic_bytes == pytest.approx((3 + 2 + 1) * BYTES, rel=0.01)


def test_a_narrow_result_is_rounded_from_a_float32_block():
    wide, narrow = (alone(lambda t=t: mtf.relu(operand(t))).traffic_bytes for t in ("float32", "bfloat16"))
    assert wide == 2 * BYTES
    assert narrow == BYTES / 2 + BYTES / 2 + BYTES


def test_a_product_of_few_terms_takes_as_long_as_its_result():
    """[16384, 64] x [64, 4096] in bfloat16: XLA reports 14.4 cycles for 1024 results on v5e."""
    m, k, n = D("m", 16384), D("k", 64), D("n", 4096)
    row = alone(lambda: mtf.einsum([mtf.input("x", [m, k], "bfloat16"), mtf.input("w", [k, n], "bfloat16")], [m, n]))
    assert row.bound == "hbm"
    cycles = row.seconds * 1.5e9 / (16384 * 4096 / 1024)
    assert cycles == pytest.approx(14.4, rel=0.15)


def test_a_lone_instruction_does_not_overlap_with_copies():
    """exp is an instruction of its own, the curve of gelu a fusion: on v5e XLA reports 31 and 18.6 cycles for 1024."""
    plain, fused = (alone(lambda f=f: f(operand())).seconds for f in (mtf.exp, mtf.gelu))
    registers = BYTES / 4096
    assert plain * 1.5e9 / registers == pytest.approx(31, rel=0.12)
    assert fused * 1.5e9 / registers == pytest.approx(18.6, rel=0.12)
    loop = registers * CHIPS["v5e"].vector_loop_cycles / 1.5e9
    assert plain - fused == pytest.approx(loop, rel=0.01)


def test_a_slice_is_an_instruction_of_its_own():
    half = alone(lambda: mtf.slice(operand(), 0, 1024, "c"))
    loop = BYTES / 2 / 4096 * CHIPS["v5e"].vector_loop_cycles / 1.5e9
    assert half.traffic_bytes == BYTES
    assert half.seconds == pytest.approx(half.launch_seconds + half.hbm_seconds + loop)


def test_a_running_sum_takes_four_passes():
    row = alone(lambda: mtf.cumsum(operand(), C))
    assert row.traffic_bytes == 4 * 2 * BYTES
    assert row.launch_seconds == pytest.approx(4e-6)


def test_what_fits_a_window_overlaps():
    small = [D("r", 256), D("c", 1024)]
    row = alone(lambda: mtf.exp(mtf.input("x", small)))
    assert row.seconds == pytest.approx(row.launch_seconds + row.hbm_seconds)


def test_groups_among_others_move_what_crosses_their_boundaries():
    """A product before it: the softmax of BERT on measured chips reads its scores once."""
    n = D("n", 2048)
    with mtf.Graph():
        x, w = operand(), mtf.variable("w", [C, n])
        program = mtf.lower({"y": mtf.softmax(mtf.einsum([x, w], [R, n]), n)}, mesh="chips:1")
    rows = mtf.estimate(program, "v5e-1").rows
    assert rows[-1].traffic_bytes <= 2 * BYTES
    assert all(r.launch_seconds == 1e-6 for r in rows)


def test_streams_of_benchmarks_have_no_passes():
    """Programs that measure HBM are written to stream: a read takes its bytes at the rate of copies."""
    made = {"chip": "v5e", "model": {"op": "HBM read", "bytes": BYTES}, "measured": {"gbytes_per_s": 700.0}}
    found = priced(made)
    assert found.predicted_seconds == pytest.approx(found.measured_seconds, rel=0.1)


def product(batch: int, m: int, k: int, n: int, dtype: str, chip: str = "v5e-1") -> Row:
    dims = [D("batch", batch)] if batch > 1 else []
    left, right = [*dims, D("m", m), D("k", k)], [*dims, D("k", k), D("n", n)]
    result = [*dims, D("m", m), D("n", n)]
    return alone(lambda: mtf.einsum([mtf.input("x", left, dtype), mtf.input("w", right, dtype)], result), chip)


@pytest.mark.parametrize(
    ("batch", "m", "k", "n", "dtype", "microseconds"),
    [  # cycles that libtpu 0.0.42.1 reports for v5e, over its clock
        (1, 192, 4096, 4624, "bfloat16", 98.5),
        (1, 1152, 7040, 145, "bfloat16", 40.0),
        (1, 752, 496, 5248, "bfloat16", 66.6),
        (1, 520, 16, 7024, "bfloat16", 36.8),
        (1, 7622, 128, 512, "float32", 33.5),
        (64, 480, 368, 25, "bfloat16", 58.0),
    ],
)
def test_products_that_traffic_bounds_take_the_sum_of_both(batch, m, k, n, dtype, microseconds):
    row = product(batch, m, k, n, dtype)
    assert row.hbm_seconds > row.mxu_seconds
    assert row.seconds * 1e6 == pytest.approx(microseconds, rel=0.06)


def test_a_product_overlaps_as_it_outlasts_its_traffic():
    """More rows take no less time, from products that traffic bounds to products of twice its time."""
    rows = [product(1, m, 4096, 4096, "bfloat16") for m in range(128, 4097, 128)]
    assert rows[0].hbm_seconds > rows[0].mxu_seconds
    assert rows[-1].mxu_seconds > 2 * rows[-1].hbm_seconds
    assert [row.seconds for row in rows] == sorted(row.seconds for row in rows)


@pytest.mark.parametrize(("chip", "microseconds"), [("v5e-1", 2.64), ("v5p-2x2x1", 2.58), ("v6e-1", 2.63)])
def test_the_smallest_product_waits_for_two_transfers(chip, microseconds):
    """[40, 40] x [40, 128] in bfloat16, by libtpu 0.0.42.1."""
    assert product(1, 40, 40, 128, "bfloat16", chip).seconds * 1e6 + 0.5 == pytest.approx(microseconds, rel=0.06)


@pytest.mark.parametrize(
    ("chip", "batch", "m", "k", "n", "microseconds"),
    [  # cycles that libtpu 0.0.42.1 reports, over the clock: in bfloat16, with the batch in the lanes of all arrays
        ("v5e-1", 256, 24, 448, 728, 1933.0),
        ("v5e-1", 128, 256, 664, 400, 966.0),
        ("v5e-1", 256, 12, 60, 627, 146.9),
        ("v5e-1", 128, 328, 56, 16, 37.0),
        ("v6e-1", 256, 24, 448, 728, 1157.0),
        ("v5p-2x2x1", 256, 24, 448, 728, 763.0),
        ("v5p-2x2x1", 128, 256, 664, 400, 364.7),
    ],
)
def test_batches_in_the_lanes_leave_them(chip, batch, m, k, n, microseconds):
    assert product(batch, m, k, n, "bfloat16", chip).seconds * 1e6 == pytest.approx(microseconds, rel=0.16)


@given(st.integers(2, 300), *[st.integers(1, 4).map(lambda n: 128 * n)] * 3)
@settings(max_examples=draws(10, 200))
def test_matrices_of_whole_tiles_stay_as_they_are(batch, m, k, n):
    row = product(batch, m, k, n, "float32")
    assert row.traffic_bytes == 4 * batch * (m * k + k * n + m * n)
    assert row.hbm_seconds == pytest.approx(hbm_seconds(CHIPS["v5e"], row.traffic_bytes))


@pytest.mark.parametrize(("batch", "m", "k", "n", "cycles"), [(128, 16, 821, 16, 3840), (64, 40, 33, 25, 768)])
def test_small_matrices_of_a_batch_load_only_their_rows(batch, m, k, n, cycles):
    """Cycles of the product, beside copies, that libtpu 0.0.42.1 reports for v5e."""
    fill = matmul_cycles(CHIPS["v5e"], Matmul(8, 8, 8)) - 8
    assert matmul_cycles(CHIPS["v5e"], Matmul(m, k, n, batch)) - fill == pytest.approx(cycles, rel=0.2)


def gathered(rows: int, table: int, width: int) -> Row:
    r, v, c = D("r", rows), D("v", table), D("c", width)
    return alone(lambda: mtf.gather(mtf.input("t", [v, c]), mtf.input("i", [r], "int32"), v))


def test_a_gathered_row_is_read_as_often_as_it_is_looked_up():
    few, many = gathered(100, 32768, 1024), gathered(100_000, 32768, 1024)
    assert few.traffic_bytes == pytest.approx(2 * 4 * 1024 * 100, rel=0.1)
    assert many.traffic_bytes == pytest.approx(2 * 4 * 1024 * 100_000, rel=0.01)
    assert few.hbm_bytes == 2 * 4 * 1024 * 100 + 4 * 100  # exact: what is looked up


def test_rows_that_are_no_whole_lanes_are_laid_out_anew():
    """The table is read and written before rows are looked up; it and the result pass through float32 blocks."""
    row = gathered(104, 32768, 1000)
    assert row.traffic_bytes == pytest.approx(4 * 1000 * (3 * 32768 + 2 * 104), rel=0.01)
    assert row.launch_seconds == pytest.approx(3e-6)


def test_a_cut_of_a_table_looks_nothing_up():
    """The table is whole, its rows are wanted in parts: what is cut on behalf of the gather has no indices."""
    r, v, c = D("r", 4096), D("v", 1024), D("c", 1024)
    with mtf.Graph():
        y = mtf.gather(mtf.variable("t", [v, c]), mtf.input("i", [r], "int32"), v)
        made = {"y": mtf.constrain(y, "c:chips")}
        program = mtf.lower(made, mesh="chips:4", layout="activations/c:chips")
    read = sum(row.hbm_bytes for row in mtf.estimate(program, "v5e-4").rows)
    assert read <= 4 * 1024 * (2 * 1024 + 4096) + 2 * 4 * 4096  # table, its part written and read, result, indices


@settings(max_examples=draws(15, 300))
@given(
    st.integers(1, 3000),
    st.integers(1, 3000),
    st.sampled_from(["float32", "bfloat16"]),
    st.sampled_from(["relu", "exp", "softmax", "sum", "max", "norm", "add", "product"]),
    st.sampled_from(["v4-2x2x1", "v5e-1", "v6e-1"]),
)
def test_alone_is_never_faster_than_its_bytes_nor_slower_than_the_sum_of_its_parts(r, c, dtype, op, chip):
    rows, columns = D("r", r), D("c", c)

    def build() -> mtf.Tensor:
        x = mtf.input("x", [rows, columns], dtype)
        if op == "product":
            return mtf.einsum([x, mtf.input("w", [columns, D("n", 256)], dtype)], [rows, D("n", 256)])
        if op == "add":
            return x + mtf.input("y", [rows, columns], dtype)
        if op == "norm":
            return mtf.layers.rms_norm(x, columns)
        if op in ("sum", "max"):
            return {"sum": mtf.reduce_sum, "max": mtf.reduce_max}[op](x, reduced_dim=columns)
        return mtf.softmax(x, columns) if op == "softmax" else {"relu": mtf.relu, "exp": mtf.exp}[op](x)

    found, ideal = alone(build, chip), alone(build, chip, IDEAL)
    assert found.hbm_bytes == ideal.hbm_bytes
    assert found.seconds >= ideal.seconds * (1 - 1e-9)
    parts = found.mxu_seconds + found.vpu_seconds + found.hbm_seconds + found.launch_seconds
    assert found.hbm_seconds <= found.seconds <= parts * (1 + 1e-9)
