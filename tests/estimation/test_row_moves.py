"""Rows that kernels look up and add one by one, beside what libtpu compiles; tiles of grouped products on cores."""

from __future__ import annotations

from dataclasses import replace

import pytest

import meshlib as mtf
from hardware import CHIPS, Matmul
from hardware.blocking import result_seconds
from hardware.slices import Slice
from meshlib.estimation import Physics
from meshlib.estimation.work.row_moves import RowSums

D = mtf.Dimension
SLICES = {"v5e": "v5e-1", "v5p": "v5p-8", "v6e": "v6e-1", "v7": "v7-8"}  # the smallest
IDEAL = Physics().without_losses()
WIDTHS = (1024, 2048, 4096, 7168)
# Bundles of a row of bfloat16 numbers, 65,536 rows to as many destinations: tests/benchmarks/row_moves.py.
GATHERED = {"v5e": (15, 24, 41, 66), "v5p": (15, 24, 41, 66), "v6e": (13, 18, 30, None)}
ADDED = {"v5e": (22, 53, 121, 353), "v5p": (22, 42, 85, 209)}
MASKED = {"v5e": 274158, "v5p": 135408, "v6e": 212804}  # stated cycles: 16 heads, 512 x 512 positions, 32 rows
ADDED_2025 = {4096: 290, 5120: 2227, 7168: 981}  # v5p, libtpu 0.0.19.1
# (chip, dtype, kind, tile of rows, depth, columns) -> bundles of a step of megablox' kernels, libtpu 0.0.42.1
TILES = {
    ("v7", "fp8", 512, 4096, 1536): 10957,
    ("v7", "fp8", 512, 1536, 4096): 11084,
    ("v7", "fp8", 1024, 1024, 1536): 5962,
    ("v7", "fp8", 768, 512, 4096): 5592,
    ("v7", "fp8", 1024, 512, 1024): 2216,
    ("v6e", "int8", 512, 4096, 1536): 12592,
    ("v6e", "int8", 1024, 1024, 1536): 7301,
}


def estimated(y: mtf.Tensor, chip: str, compiler: mtf.Compiler = mtf.XLA_TPU) -> mtf.Estimate:
    """The same on each device of a slice."""
    program = mtf.lower({"y": y}, mesh=f"copies:{Slice(SLICES[chip]).devices}")
    return mtf.estimate(program, SLICES[chip], compiler, physics=IDEAL)


def looked_up(width: int, chip: str, rows: int = 8192, table: int = 65536) -> mtf.Estimate:
    r, v, c = D("r", rows), D("v", table), D("c", width)
    with mtf.Graph():
        y = mtf.gather(mtf.input("t", [v, c], "bfloat16"), mtf.input("i", [r], "int32"), v)
        return estimated(y, chip)


def added(width: int, chip: str, compiler: mtf.Compiler = mtf.XLA_TPU) -> mtf.Estimate:
    r, v, c = D("r", 65536), D("v", 65536), D("c", width)
    with mtf.Graph():
        y = mtf.scatter_add(mtf.input("u", [r, c], "bfloat16"), mtf.input("i", [r], "int32"), v, [v, c])
        return estimated(y, chip, compiler)


def core_cycles(estimate: mtf.Estimate, chip: str) -> float:
    return estimate.rows[0].vpu_seconds * CHIPS[chip].clock_hz * CHIPS[chip].cores_per_device


@pytest.mark.parametrize("chip", GATHERED)
def test_cycles_of_a_gathered_row(chip: str) -> None:
    for width, bundles in zip(WIDTHS, GATHERED[chip], strict=True):
        if bundles is not None:
            cycles = core_cycles(looked_up(width, chip), chip) / 8192
            assert cycles == pytest.approx(width / 128 + 9, rel=0.1)
            assert 0.95 <= cycles / bundles <= (1.15 if chip != "v6e" else 1.42)


@pytest.mark.parametrize("chip", ADDED)
def test_cycles_of_an_added_row(chip: str) -> None:
    for width, bundles in zip(WIDTHS, ADDED[chip], strict=True):
        cycles = RowSums(65536, width, 65536, False).cycles(CHIPS[chip]) / 65536
        assert 0.7 <= cycles / bundles <= 1.07
        # by one core, whatever the device has; the rest of its work is small
        one_core = added(width, chip).rows[0].vpu_seconds * CHIPS[chip].clock_hz
        assert one_core == pytest.approx(65536 * cycles, rel=0.1)


@pytest.mark.parametrize("chip", MASKED)
def test_cycles_of_masked_sums(chip: str) -> None:
    """Updates of a table of 32 rows of 16 numbers, as of position biases; a scatter-add of user code is none."""
    h, q, k, v = D("h", 16), D("q", 512), D("k", 512), D("v", 32)

    def summed(rows: list[mtf.Dimension], compiler: mtf.Compiler = mtf.XLA_TPU) -> float:
        with mtf.Graph():
            y = mtf.scatter_add(mtf.input("u", [h, q, k]), mtf.input("i", [q, k], "int32"), v, [v, *rows])
            return core_cycles(estimated(y, chip, compiler), chip)

    device_cycles = summed([h]) / CHIPS[chip].cores_per_device
    assert 0.9 <= device_cycles / MASKED[chip] <= 1.3
    assert summed([h], mtf.GSPMD) < 0.1 * summed([h])
    assert summed([q, h]) < 0.1 * summed([h])


def test_compilers_of_2025_added_rows_more_slowly() -> None:
    for width, bundles in ADDED_2025.items():
        assert RowSums(65536, width, 65536, True).cycles(CHIPS["v5p"]) / 65536 == pytest.approx(bundles, rel=0.1)
    now, old = (
        core_cycles(added(4096, "v5p", replace(mtf.XLA_TPU, row_sums=kind)), "v5p")
        for kind in ("scatter", "scatter 2025")
    )
    assert old > 3 * now


def test_rows_are_taken_once_for_each_block_of_destinations() -> None:
    """Eight rows for each destination touch an eighth of the blocks."""
    few, many = (RowSums(65536, 4096, n, False).cycles(CHIPS["v5e"]) / 65536 for n in (8192, 65536))
    assert few - 41 == pytest.approx((many - 41) / 8, rel=0.01)


def test_sparse_cores_of_v7_copy_rows() -> None:
    """`gather_offload_async` in what libtpu compiles: the core is free."""
    row = looked_up(4096, "v7").rows[0]
    assert row.vpu_seconds * CHIPS["v7"].clock_hz < 0.1 * 8192 * 41
    assert row.hbm_seconds > 0


def test_a_gather_copies_words_of_both_rows_that_share_them() -> None:
    """A copy of a bfloat16 row moves 512 bytes for each 128 numbers, as often as the row is looked up."""
    row = looked_up(4096, "v5p", rows=131072).rows[0]
    assert row.traffic_bytes == pytest.approx(131072 * 4096 * (4 + 2) + 4 * 131072, rel=0.01)
    small = looked_up(1024, "v5p", rows=131072, table=4096).rows[0]  # 8 MiB: held in VMEM
    assert small.traffic_bytes == pytest.approx(1024 * 2 * (4096 + 131072) + 4 * 131072, rel=0.01)


def test_kernels_take_each_register_of_results_from_the_array() -> None:
    for (chip, dtype, rows, depth, columns), bundles in TILES.items():
        tile = Matmul(rows, depth, columns, dtype=dtype)
        cycles = result_seconds(CHIPS[chip], tile) * CHIPS[chip].clock_hz
        assert 0.84 <= cycles / bundles <= 1.13, (chip, rows, depth, columns)


def grouped(chip: str, d: int, f: int, quantised: bool = False, compiler: mtf.Compiler = mtf.XLA_TPU) -> float:
    rows, e, d_in, f_out = D("r", 65536), D("e", 16), D("d", d), D("f", f)
    with mtf.Graph():
        x, w = mtf.input("x", [rows, d_in], "bfloat16"), mtf.input("w", [e, d_in, f_out], "bfloat16")
        sizes = mtf.input("sizes", [e], "int32")
        if quantised:
            y = mtf.quantized_ragged_dot(x, w, sizes, rows, e, dtype="fp8")
        else:
            y = mtf.ragged_dot(x, w, sizes, rows, e)
        return sum(row.mxu_seconds for row in estimated(y, chip, compiler).rows)


def test_cores_share_tiles_of_columns() -> None:
    """Five tiles of 1,024 columns over both cores of v5p take as long as six; one core of v5e takes five."""
    for chip, ratio in (("v5p", 6 / 4), ("v5e", 5 / 4)):
        assert grouped(chip, 2048, 5120) / grouped(chip, 2048, 4096) == pytest.approx(ratio, rel=0.01)
    whole = replace(mtf.XLA_TPU, ragged_tile_width=0)
    ratio = grouped("v5p", 2048, 5120, compiler=whole) / grouped("v5p", 2048, 4096, compiler=whole)
    assert ratio == pytest.approx(5 / 4, rel=0.01)


def test_columns_of_a_gradient_of_weights_are_their_outputs() -> None:
    """`tgmm` divides the last dim of [experts, inputs, outputs]."""

    def gradient(chip: str, d: int, f: int) -> float:
        rows, e, d_in, f_out = D("r", 65536), D("e", 16), D("d", d), D("f", f)
        with mtf.Graph():
            x, w = mtf.input("x", [rows, d_in], "bfloat16"), mtf.variable("w", [e, d_in, f_out], dtype="bfloat16")
            y = mtf.ragged_dot(x, w, mtf.input("sizes", [e], "int32"), rows, e)
            (dw,) = mtf.gradients([y], [w], [mtf.input("dy", [rows, f_out], "bfloat16")])
            return sum(row.mxu_seconds for row in estimated(dw, chip).rows)

    assert gradient("v5e", 2048, 5120) == pytest.approx(gradient("v5e", 5120, 2048), rel=0.01)
    assert gradient("v5p", 2048, 5120) == pytest.approx(6 / 5 * gradient("v5p", 5120, 2048), rel=0.01)


def test_grouped_products_in_eight_bits_gain_little_on_v7() -> None:
    """Results leave the array at the rate of products in bfloat16; products of XLA gain twice."""
    gain = grouped("v7", 4096, 2048) / grouped("v7", 4096, 2048, quantised=True)
    assert gain == pytest.approx(1 / CHIPS["v7"].mxu_efficiency, rel=0.03)
    without = replace(mtf.XLA_TPU, ragged_tile_width=0)
    gain = grouped("v7", 4096, 2048, compiler=without) / grouped("v7", 4096, 2048, True, without)
    assert gain == pytest.approx(2, rel=0.03)
