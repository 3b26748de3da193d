"""The physical terms one by one: each is seen in a program made for it, against a formula or a bound."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import meshlib as mtf
from hardware import CHIPS, Slice
from hardware.memory import pcie_seconds
from meshlib.core.opdef import ScoreProducts
from meshlib.estimation import Physics, Row
from meshlib.estimation.work.products import Attention
from tests.compilers import IN_PIECES, INDEPENDENT

D = mtf.Dimension
IDEAL = Physics().without_losses()
BATCH, WIDE, INNER = D("batch", 4096), D("wide", 4096), D("inner", 4096)


def chain(products: int, mesh: str = "chips:1", layout: str = "") -> mtf.Program:
    """That many products one after the other, in bfloat16."""
    with mtf.Graph():
        x = mtf.input("x", [BATCH, WIDE], "bfloat16")
        for n in range(products):
            last = x.shape.names[-1]
            new = INNER if last == "wide" else WIDE
            w = mtf.variable(f"w{n}", [x.shape.dim(last), new], dtype="bfloat16")
            x = mtf.einsum([x, w], [BATCH, new], name=f"mm{n}")
        return mtf.lower({"y": x}, mesh=mesh, layout=layout)


def computed(est: mtf.Estimate) -> list[Row]:
    return [r for r in est.rows if r.kind == "compute"]


# ---------------------------------------------------------------- products


def test_a_product_alone_is_a_micro_benchmark():
    (alone,) = computed(mtf.estimate(chain(1), "v5e-1"))
    lossless = dataclasses.replace(IDEAL, lone_passes=Physics().lone_passes)
    (ideal,) = computed(mtf.estimate(chain(1), "v5e-1", physics=lossless))
    assert alone == ideal  # none of the losses of kernels among others


def test_products_among_others_are_slower_and_read_again_by_blocks():
    physics = Physics(product_rate=0.8, block_edge=512.0)
    one, two = computed(mtf.estimate(chain(2), "v5e-1", physics=physics))
    ideal, _ = computed(mtf.estimate(chain(2), "v5e-1", physics=IDEAL))
    # Of 4096 rows, 128 stream at the pace of the array. 16 MiB of VMEM hold the sums of 512 x 512, two copies of the
    # result, and two of operands 3584 deep.
    sums = 2 * 4096**2 / 1024 * (4096 / 3584) / 1.5e9
    assert one.mxu_seconds == pytest.approx(ideal.mxu_seconds * (1 / 32 + 31 / 32 / 0.8) + 31 / 32 * sums)
    # Each operand of 4096 x 4096 is read for each of 4096 / 512 blocks of the other's dim. What the first product
    # passes to the second stays in VMEM, and the result of that is written once.
    assert one.traffic_bytes == 2 * 4096**2 * (8 + 8)
    assert two.traffic_bytes == 2 * 4096**2 * (8 + 1)


# ---------------------------------------------------------------- groups


def softmax_program() -> mtf.Program:
    rows, columns = D("rows", 8192), D("columns", 2048)
    with mtf.Graph():
        x = mtf.input("x", [rows, columns], "bfloat16")
        y = mtf.cast(mtf.softmax(mtf.cast(x, "float32"), columns), "bfloat16")
        return mtf.lower({"y": y}, mesh="chips:1")


def test_a_softmax_runs_row_by_row():
    """Three passes over the rows, each ending in a reduction, but one kernel: what it reads and writes is x and y."""
    est = mtf.estimate(softmax_program(), "v5e-1", physics=IDEAL)
    (row,) = computed(est)
    assert row.hbm_bytes == 2 * 2 * 8192 * 2048


def test_a_reduction_over_rows_ends_a_kernel():
    """Sums over the major dim need all of it before anybody can read them."""
    rows, columns = D("rows", 8192), D("columns", 2048)
    with mtf.Graph():
        x = mtf.input("x", [rows, columns], "bfloat16")
        total = mtf.reduce_sum(mtf.sin(x), reduced_dim=rows)
        program = mtf.lower({"y": mtf.sin(mtf.exp(x) * total)}, mesh="chips:1")
    first, second = computed(mtf.estimate(program, "v5e-1", physics=IDEAL))
    assert first.hbm_bytes == 2 * (8192 * 2048 + 2048)
    assert second.hbm_bytes == 2 * (2 * 8192 * 2048 + 2048)


def test_a_widened_value_is_read_as_it_is_stored():
    """Two readers of float32(x), which no single kernel can serve: both read x in two bytes."""
    rows, columns = D("rows", 8192), D("columns", 2048)
    with mtf.Graph():
        x = mtf.sin(mtf.input("x", [rows, columns], "bfloat16"))
        wide = mtf.cast(x, "float32") * 0.5
        total = mtf.reduce_sum(mtf.exp(wide), reduced_dim=rows)
        program = mtf.lower({"y": mtf.reduce_sum(mtf.cos(wide * total), reduced_dim=columns)}, mesh="chips:1")
    est = mtf.estimate(program, "v5e-1", physics=IDEAL)
    # x in, sin(x) out; then sin(x) in once more, with the sums and the result. Nothing of the size of `wide`.
    assert est.hbm_bytes == 2 * 3 * 8192 * 2048 + 4 * (2 * 2048 + 8192)


def test_common_memory_of_a_chip_catches_what_passes():
    rows, columns = D("rows", 4096), D("columns", 2048)
    with mtf.Graph():
        x = mtf.input("x", [rows, columns], "bfloat16")
        total = mtf.reduce_sum(mtf.sin(x), reduced_dim=rows, name="first")
        wide = mtf.exp(x) * total
        program = mtf.lower({"y": mtf.reduce_sum(wide, reduced_dim=rows) + total}, mesh="chips:1")
    with_cmem = CHIPS["v4"]
    without = dataclasses.replace(with_cmem, cmem_bytes=0)
    traffic = [
        sum(r.traffic_bytes for r in mtf.estimate(program, Slice("v4-1x1x1", c), physics=IDEAL).rows)
        for c in (dataclasses.replace(c, pod_shape=(1, 1, 1), max_slice_chips=1, wrap_cube=None)
                  for c in (with_cmem, without))
    ]  # fmt: skip
    assert traffic[0] < traffic[1]


# ---------------------------------------------------------------- attention


def attention(
    key: int, causal: bool = False, chip: str = "v6e", length: int = 4096, train: bool = False
) -> mtf.Estimate:
    """One head of fused attention; or its gradients."""
    rows, memory, dim = D("length", length), D("memory_length", length), D("d", key)
    with mtf.Graph():
        q = mtf.variable("q", [rows, dim], dtype="bfloat16")
        k, v = (mtf.variable(n, [memory, dim], dtype="bfloat16") for n in "kv")
        y = mtf.attention(q, k, v, rows, memory, dim, causal=causal)
        outputs = {"y": y}
        if train:
            found = mtf.gradients([mtf.reduce_sum(mtf.sin(y))], [q, k, v])
            outputs = {f"d{n}": g for n, g in zip("qkv", found, strict=True)}
        return mtf.estimate(mtf.lower(outputs, mesh="chips:1"), f"{chip}-1" if chip != "v7" else v7_core())


def v7_core() -> Slice:
    chip = dataclasses.replace(
        CHIPS["v7"], pod_shape=(1,), max_slice_chips=1, wrap_cube=None, devices_per_chip=1, name_counts="chips"
    )
    return Slice("v7-1", chip)


def kernel(est: mtf.Estimate, opcode: str) -> Row:
    (found,) = (r for r in est.rows if r.opcode == opcode)
    return found


def test_heads_narrower_than_the_array_fill_half_of_it_where_they_are_contracted():
    narrow, wide = (kernel(attention(size), "attention") for size in (128, 256))
    assert wide.mxu_flops == 2 * narrow.mxu_flops
    # Scores take 256 rows of the array either way; of the values' product the head streams.
    assert narrow.mxu_seconds / wide.mxu_seconds == pytest.approx((256 + 128) / (256 + 256))
    assert narrow.vpu_seconds == wide.vpu_seconds


def test_softmax_takes_vector_work_per_score():
    found = kernel(attention(256), "attention")
    scores = 4096 * 4096
    assert found.vpu_seconds == pytest.approx(scores * Physics().score_vpu_ops / (8 * 128 * 4 * CHIPS["v6e"].clock_hz))
    longer, shorter = sorted((found.mxu_seconds, found.vpu_seconds), reverse=True)
    assert found.seconds == pytest.approx(longer + 0.5 * shorter + found.launch_seconds)


def test_causal_tiles_are_skipped():
    whole, half = (kernel(attention(128, causal), "attention") for causal in (False, True))
    # Of 8 x 8 tiles of 512 the 36 on and below the diagonal.
    assert half.mxu_flops / whole.mxu_flops == pytest.approx(36 / 64)
    # The kernels of v6e take 1024 queries at once: of 4 x 8 tiles 2 + 4 + 6 + 8.
    assert half.vpu_seconds / whole.vpu_seconds == pytest.approx(20 / 32)


def test_both_gradients_in_one_pass_on_later_chips():
    split, together = (attention(128, chip=chip, train=True) for chip in ("v6e", "v7"))
    for est, products in ((split, 4 * 256 + 4 * 256 + 6 * 128), (together, 4 * 256 + 6 * 128)):
        rows = [kernel(est, f"attention_grad_{side}") for side in ("query", "memory")]
        chip = est.slice.chip
        rate = chip.peak_flops("bf16") * chip.mxu_efficiency * Physics().product_rate
        assert sum(r.mxu_seconds for r in rows) == pytest.approx(4096 * 4096 * products / rate)


# ---------------------------------------------------------------- overlap


def test_what_runs_beside_the_core_costs_it_a_share():
    """Weights gathered while the product before runs: hidden, but for the core's part in it."""
    program = chain(6, "data:8", "batch:data;variables/wide:data;variables/inner:data?")
    slice_ = "v3-8"
    free, half = (
        mtf.estimate(program, slice_, physics=dataclasses.replace(IDEAL, early_exposed=share)) for share in (0.0, 0.5)
    )
    beside = [e for e in free.schedule.events if e.move is not None][1:]
    lost = sum(0.5 * max(busy for _, busy in e.cost.busy_seconds) for e in beside)
    assert half.step_seconds >= free.step_seconds
    assert half.step_seconds == pytest.approx(free.step_seconds + lost, rel=0.25)


@pytest.mark.parametrize("sparse_cores", [0, 4])
def test_sparse_cores_run_collectives_at_no_cost_to_the_core(sparse_cores):
    """Gathers given to them cost what they do to a core that loses nothing; other kinds change nothing."""
    program = chain(6, "data:8", "batch:data;variables/wide:data;variables/inner:data?")
    slice_ = Slice("v3-8", dataclasses.replace(CHIPS["v3"], sparse_cores_per_chip=sparse_cores))

    def seconds(share, *kinds):
        compiler = dataclasses.replace(INDEPENDENT, sparse_core_collectives=kinds)
        physics = dataclasses.replace(IDEAL, early_exposed=share)
        return mtf.estimate(program, slice_, compiler, physics=physics).step_seconds

    free, half = seconds(0.0), seconds(0.5)
    assert free < half == seconds(0.5, "all_reduce")
    assert seconds(0.5, "all_gather") == (free if sparse_cores else half)


@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter"])
def test_sums_in_pieces_hide_but_for_the_last(kind):
    """x[b, k@m] w[k@m, n]: of the sum over m an eighth comes after its product, or all that takes longer than it."""
    rows, depth, columns = D("b", 8192), D("k", 8192), D("n", 4096)
    with mtf.Graph():
        x = mtf.input("x", [rows, depth], "bfloat16")
        y = mtf.einsum([x, mtf.variable("w", [depth, columns], dtype="bfloat16")], [rows, columns])
        y = mtf.constrain(y, "" if kind == "all_reduce" else "n:m")
        program = mtf.lower({"y": mtf.einsum([y, y], [columns], name="after")}, mesh="m:8", layout="k:m")
    est = mtf.estimate(program, "v3-8", IN_PIECES)
    sent = next(e for e in est.schedule.events if e.move is not None and e.move.kind == kind)
    product = next(e for e in est.schedule.events if e.time is not None)
    whole = sent.cost.seconds + CHIPS["v3"].collective_launch_seconds
    assert sent.end == pytest.approx(max(product.start + product.seconds / 8 + whole, product.end + whole / 8))


def test_slices_wait_for_each_other():
    with mtf.Graph():
        x = mtf.input("x", [D("batch", 4096), D("d", 4096)])
        program = mtf.lower({"y": mtf.sin(x)}, mesh="pods:4;data:16", layout="batch:pods+data")
    est = mtf.estimate(program, "4*v5e-16", physics=Physics(slice_jitter=0.01))
    assert est.jitter_seconds == pytest.approx(0.02 * est.schedule.seconds)
    assert est.bound_seconds["dcn"] == pytest.approx(est.jitter_seconds)


# ---------------------------------------------------------------- the host


def test_copies_to_the_host_bound_a_trip():
    layers, rows, wide, narrow = D("layers", 8), D("batch", 16384), D("d", 1024), D("h", 128)

    def build(remat: mtf.Remat | str) -> mtf.Estimate:
        with mtf.Graph():
            x = mtf.variable("x", [rows, wide], dtype="bfloat16")
            w1 = mtf.variable("w1", [layers, wide, narrow], dtype="bfloat16")
            w2 = mtf.variable("w2", [layers, narrow, wide], dtype="bfloat16")

            def body(carries, slices):
                (y,) = carries
                h = mtf.einsum([y, slices[0]], [rows, narrow], name="h")
                return [y + mtf.einsum([mtf.sin(h), slices[1]], [rows, wide], name="out")], []

            (y,), _ = mtf.scan(body, [x], [w1, w2], layers, remat=remat)
            grads = mtf.gradients([mtf.reduce_sum(mtf.sin(mtf.cast(y, "float32")))], [w1, w2])
            return mtf.estimate(mtf.lower(list(grads), mesh="chips:1"), "v5e-1")

    kept, moved = build("full"), build(mtf.Remat(offload_carries=True))
    size = 8 * 2 * 16384 * 1024
    assert moved.program.to_host_bytes == moved.program.from_host_bytes == size
    copies = [r for r in moved.rows if r.kind == "copy"]
    assert sum(r.payload_bytes * r.count for r in copies if r.opcode == "to_host") == size
    assert moved.step_seconds >= 2 * pcie_seconds(CHIPS["v5e"], size)
    assert moved.bound_seconds["pcie"] > 0
    assert kept.bound_seconds["pcie"] == 0
    assert sum(moved.bound_seconds.values()) == pytest.approx(moved.step_seconds)
    assert "to_host" in moved.table(None)


# ---------------------------------------------------------------- softmax of materialised scores


def scored(dtype: str, train: bool) -> mtf.Program:
    """Attention with its scores as a value of the program, or its gradients."""
    batch, rows, memory, dim = D("batch", 8), D("length", 512), D("memory_length", 512), D("d", 64)
    with mtf.Graph():
        q = mtf.input("q", [batch, rows, dim], "bfloat16")
        k, v = (mtf.input(n, [batch, memory, dim], "bfloat16") for n in "kv")
        y = mtf.layers.dot_product_attention(q, k, v, rows, memory, dim, softmax_dtype=dtype)
        if train:
            return mtf.lower(mtf.gradients([mtf.reduce_sum(mtf.sin(y))], [q, k, v]), mesh="chips:1")
        return mtf.lower({"y": y}, mesh="chips:1")


def test_a_narrow_softmax_is_nearly_the_same_and_moves_less():
    rng = np.random.default_rng(0)
    feeds = {n: rng.standard_normal((8, 512, 64)).astype(np.float32) for n in "qkv"}
    wide, narrow = (
        np.asarray(mtf.simulate(scored(dtype, train=False)).step(**feeds)["y"], np.float32)
        for dtype in ("float32", "bfloat16")
    )
    assert not np.array_equal(wide, narrow)
    assert np.abs(wide - narrow).max() < 0.02
    traffic = [
        mtf.estimate(scored(dtype, train=True), "v5e-1", physics=IDEAL).hbm_bytes for dtype in ("float32", "bfloat16")
    ]
    # Either way the kernels that read the weights make them of the scores: what differs is a statistic of each row.
    assert 0 < traffic[0] - traffic[1] < 8 * 512 * 512


def test_the_sum_of_one_element_each_is_no_work():
    """A psum over a dim of which each device has one: the collective alone, no copy of its operand."""
    parts, rows = mtf.Dimension("parts", 4), mtf.Dimension("rows", 1 << 20)
    with mtf.Graph():
        total = mtf.reduce_sum(mtf.input("x", [parts, rows, mtf.Dimension("columns", 128)]), reduced_dim=parts)
    est = mtf.estimate(mtf.lower({"y": total}, mesh="group:4", layout="parts:group"), "v5e-4")
    assert sum(r.seconds for r in est.rows if r.kind == "compute") == 0


def test_no_engine_gives_more_than_it_has():
    """On v7 attention makes both gradients at once, so that one of them finds its scores there."""
    batch, length, heads, dim = (mtf.Dimension(*d) for d in (("batch", 8), ("length", 4096), ("heads", 8), ("d", 128)))
    with mtf.Graph():
        q, k, v = (mtf.input(n, [batch, heads, length, dim], "bfloat16") for n in "qkv")
        k, v = (mtf.rename_dimension(x, "length", "memory") for x in (k, v))
        y = mtf.attention(q, k, v, length, "memory", dim, causal=True)
        gradients = mtf.gradients([mtf.reduce_sum(mtf.cast(y, "float32"))], [q, k, v])
        program = mtf.lower(dict(zip("qkv", gradients, strict=True)), mesh="chips:8")
    for slice_ in ("v7-8", "v5e-8"):
        est = mtf.estimate(program, slice_)
        assert sum(r.opcode.startswith("attention") for r in est.rows) == 2
        assert max(r.utilisation for r in est.rows) <= 1


def test_attention_computes_whole_tiles():
    """4,096 queries that see those before them: 36 of 64 tiles of 512, 3 of 4 of 2,048; of near ones 15, and all 3."""
    causal = Attention(ScoreProducts((), ()), 36 * 512**2, 128, 128, 1, 4096, 4096, True)
    near = Attention(ScoreProducts((), ()), 15 * 512**2, 128, 128, 1, 4096, 4096, True, window=512)
    assert (causal.scores_in((512, 512)), causal.scores_in((2048, 2048))) == (36 * 512**2, 3 * 2048**2)
    assert (near.scores_in((512, 512)), near.scores_in((2048, 2048))) == (15 * 512**2, 3 * 2048**2)


def test_few_rows_stream_at_the_pace_of_the_array():
    """A product of no more rows than the array has is not slowed by others; one of many is, but for as many rows."""

    def product(rows: int, physics: Physics) -> float:
        with mtf.Graph():
            x = mtf.input("x", [mtf.Dimension("rows", rows), mtf.Dimension("k", 4096)], "bfloat16")
            w = mtf.variable("w", [mtf.Dimension("k", 4096), mtf.Dimension("n", 4096)], dtype="bfloat16")
            y = mtf.einsum([x, w], [mtf.Dimension("rows", rows), mtf.Dimension("n", 4096)])
            program = mtf.lower({"y": y, "z": mtf.reduce_sum(mtf.sin(mtf.cast(y, "float32")))})
        (row,) = (r for r in mtf.estimate(program, "v5e-1", physics=physics).rows if r.mxu_flops)
        return row.mxu_seconds

    rate = Physics().product_rate
    for rows in (16, 120, 128, 512, 8192):
        ideal = product(rows, IDEAL)
        slowed = product(rows, dataclasses.replace(IDEAL, product_rate=rate)) / ideal
        pace = 128 / max(128, min(rows, 4096))
        assert slowed == pytest.approx(pace + (1 - pace) / rate, rel=1e-6), rows
        assert (product(rows, dataclasses.replace(IDEAL, block_edge=512.0)) > ideal) == (rows > 128)


def test_fused_work_of_the_vector_unit_is_hidden_in_part():
    """Of the shorter of the product and the curve computed in its kernel, half."""
    with mtf.Graph():
        x, w = mtf.input("x", [BATCH, WIDE], "bfloat16"), mtf.variable("w", [WIDE, INNER], dtype="bfloat16")
        y = mtf.gelu(mtf.einsum([x, w], [BATCH, INNER], name="up"))
        program = mtf.lower({"y": y, "z": mtf.reduce_sum(mtf.cast(y, "float32"))}, mesh="chips:1")
    times = {}
    for overlap in (1.0, 0.5):
        physics = dataclasses.replace(IDEAL, vector_overlap=overlap)
        (row,) = (r for r in computed(mtf.estimate(program, "v5e-1", physics=physics)) if r.mxu_flops)
        times[overlap] = row.seconds
    assert row.vpu_seconds < row.mxu_seconds
    share = 1 - 128 / 4096
    assert times[0.5] - times[1.0] == pytest.approx(share * row.vpu_seconds / 2, rel=1e-6)
