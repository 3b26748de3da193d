"""The 784-1024-10 network on v2-8 and v3-8 under three layouts, worked by hand.

Sizes: batch 512, float32 everywhere, MXU operands rounded to bfloat16 in one pass. SGD, no biases.
"""

from __future__ import annotations

import dataclasses
import math

import pytest

import meshlib as mtf
from hardware import CHIPS
from meshlib.estimation import Physics

B, P, H, C = 512, 784, 1024, 10
F32 = 4


def program(mesh: str, layout: str) -> mtf.Program:
    batch, pixels = mtf.Dimension("batch", B), mtf.Dimension("pixels", P)
    hidden, classes = mtf.Dimension("hidden", H), mtf.Dimension("classes", C)
    with mtf.Graph():
        images = mtf.input("images", [batch, pixels])
        labels = mtf.input("labels", [batch], dtype="int32")
        w1, w2 = mtf.variable("w1", [pixels, hidden]), mtf.variable("w2", [hidden, classes])
        h = mtf.relu(mtf.einsum([images, w1], output_shape=[batch, hidden], name="ffn_in"))
        logits = mtf.einsum([h, w2], output_shape=[batch, classes], name="ffn_out")
        losses = mtf.layers.softmax_cross_entropy_with_logits(logits, mtf.one_hot(labels, classes), classes)
        loss = mtf.reduce_mean(losses)
        train = mtf.optimize.SgdOptimizer(lr=0.1).minimize(loss)
        return mtf.lower({"loss": loss}, train, mesh=mesh, layout=layout)


DATA = ("cores:8", "batch:cores", 8, 1)
MODEL = ("cores:8", "hidden:cores", 1, 8)
TWO_D = ("rows:2;cols:4", "batch:rows;hidden:cols", 2, 4)
LAYOUTS = pytest.mark.parametrize(("mesh", "layout", "rows", "cols"), [DATA, MODEL, TWO_D])
SLICES = pytest.mark.parametrize("name", ["v2-8", "v3-8"])


@LAYOUTS
@SLICES
def test_flops(name, mesh, layout, rows, cols):
    """Forward x w1, h w2; backward dw1, dw2, dh; no dx. All axes split, so nothing is done twice."""
    est = mtf.estimate(program(mesh, layout), name)
    b, h = B // rows, H // cols
    assert est.flops == 2 * (2 * b * P * h) + 3 * (2 * b * h * C)
    assert est.useful_flops == est.flops
    peak = {"v2-8": 45.9e12 / 2, "v3-8": 123e12 / 2}[name]
    assert est.mfu == pytest.approx(est.flops / est.step_seconds / peak)
    assert est.hfu == est.mfu


def test_repeated_work_counts_once_in_mfu():
    est = mtf.estimate(program("cores:8", ""), "v3-8")
    assert est.flops == 2 * (2 * B * P * H) + 3 * (2 * B * H * C)
    assert est.useful_flops == est.flops / 8
    assert est.hfu == pytest.approx(8 * est.mfu)


@pytest.mark.parametrize(
    ("case", "wanted"),
    [
        # The gradients over 8 cores; w2's is small and goes with the loss.
        (DATA, {("all_reduce", P * H * F32), ("all_reduce", H * C * F32 + 4)}),
        # Only the logits, once: dx is not needed.
        (MODEL, {("all_reduce", B * C * F32)}),
        (
            TWO_D,
            {
                ("all_reduce", B // 2 * C * F32),
                # 803 kB are too many to go with others over two devices.
                ("all_reduce", P * H // 4 * F32),
                ("all_reduce", H // 4 * C * F32 + 4),
            },
        ),
    ],
)
@SLICES
def test_collectives(name, case, wanted):
    mesh, layout, *_ = case
    est = mtf.estimate(program(mesh, layout), name)
    rows = [r for r in est.rows if r.kind == "collective"]
    assert {(r.opcode, r.payload_bytes) for r in rows} == wanted
    groups = {"cores": 8, "rows": 2, "cols": 4}
    for r in rows:
        k = groups[r.axes[0]]
        assert r.sent_bytes == 2 * (k - 1) * r.payload_bytes / k
    assert est.sent_bytes == sum(r.sent_bytes for r in rows)


def tiles(rows: int, columns: int) -> int:
    """Bytes of a float32 array in tiles of 8 x 128."""
    return -(-rows // 8) * 8 * (-(-columns // 128) * 128) * F32


def stored(rows: int, columns: int) -> int:
    """The same the denser way round, as it lies in memory."""
    return min(tiles(rows, columns), tiles(columns, rows))


@LAYOUTS
@SLICES
def test_memory_peaks_when_the_first_layers_gradient_is_made(name, mesh, layout, rows, cols):
    """The product for dw1 reads relu's result and dh (relu's gradient is fused into it) while both are whole.

    Where a gradient needs no reduction the update is fused as well: new w1 is written over w1. Then the peak is where
    dh is made of the gradient of the logits, which stays for dw2.
    """
    est = mtf.estimate(program(mesh, layout), name)
    b, h = B // rows, H // cols
    fused = rows == 1
    arrays = [(P, h), (h, C), (b, P), (b, h), (b, h), *([(b, C)] if fused else [(P, h), (h, C)])]
    assert est.memory.exact_peak_bytes == F32 * (sum(m * n for m, n in arrays) + b + 1)  # labels; the loss
    assert est.memory.exact_peak_bytes == est.program.memory.peak_bytes
    padded_labels = max(128, b) * F32
    assert est.memory.peak_bytes == sum(stored(m, n) for m, n in arrays) + padded_labels + F32
    assert est.memory.by_kind["variables"] == stored(P, h) + stored(h, C)
    assert est.memory.by_kind["gradients"] == (0 if fused else stored(P, h) + stored(h, C))
    assert est.memory.by_kind["inputs"] == stored(b, P) + padded_labels
    assert est.fits
    assert est.memory.capacity_bytes == {"v2-8": 8, "v3-8": 16}[name] * 2**30 - int(0.52 * 2**30)  # offered to programs
    assert ("ffn_out/grad" if fused else "ffn_in/grad") in est.program.memory.at


@LAYOUTS
@SLICES
def test_time_of_the_first_layer(name, mesh, layout, rows, cols):
    """x[b, 784] w1[784, h] with relu: the MXU's tiles, HBM at the boundary, and what nothing hides.

    Of engines that lose nothing; among other kernels the MXU reaches a share of that rate.
    """
    usual = next(r for r in mtf.estimate(program(mesh, layout), name).rows if r.name == "ffn_in")
    est = mtf.estimate(program(mesh, layout), name, physics=Physics().without_losses())
    row = next(r for r in est.rows if r.name == "ffn_in")
    b, h = B // rows, H // cols
    mxus, clock, rate = {"v2-8": (1, 45.9e12 / 2 / 2**15, 350e9), "v3-8": (2, 123e12 / 4 / 2**15, 450e9)}[name]
    # Either operand held in 128 x 128 tiles, the other streams; two MXUs share tiles or rows; 382 = 3 x 128 - 2.
    ways = []
    for held, streamed in ((h, b), (b, h)):
        count = math.ceil(P / 128) * math.ceil(held / 128)
        ways.append((math.ceil(count / mxus), streamed))
        ways.append((count, streamed // mxus))
    cycles = min((n - 1) * max(t, 128) + t + 382 for n, t in ways)
    assert row.mxu_seconds == pytest.approx(((cycles - 382) / 0.96 + 382) / clock)
    pace = 128 / max(128, min(b, h))  # as many rows as the array has stream while the next weights shift in
    sums = 2 * b * h / 1024 / {"v2-8": 700e6, "v3-8": 940e6}[name]  # of one step: VMEM holds blocks 784 deep
    slowed = row.mxu_seconds * (pace + (1 - pace) / Physics().product_rate)
    assert usual.mxu_seconds == pytest.approx(slowed + (1 - pace) * sums)
    # A value used inside its group only (the product before relu) takes no bytes.
    assert row.hbm_bytes == F32 * (b * P + P * h + b * h)
    # One block column or an operand that stays: nothing is read again, only padding is added.
    assert row.traffic_bytes == stored(b, P) + stored(P, h) + stored(b, h)
    assert row.hbm_seconds == pytest.approx(row.traffic_bytes / rate / 0.9)
    assert row.vpu_seconds == pytest.approx(b * h / ({"v2-8": 700e6, "v3-8": 940e6}[name] * 8 * 128 * 2))
    assert row.seconds + row.hidden_seconds >= 1e-6 + max(row.mxu_seconds, row.hbm_seconds)
    assert row.seconds <= 1e-6 + row.mxu_seconds + row.hbm_seconds
    assert row.count == 1
    assert "test_mnist_by_hand.py" in row.source


@pytest.mark.parametrize(("name", "link"), [("v2-8", 62e9), ("v3-8", 82e9)])
def test_time_of_the_gradient_reduction(name, link):
    """8 cores: the two of a chip first, through HBM; then half of it over 2 x 2 chips, both axes at once."""
    est = mtf.estimate(program("cores:8", "batch:cores"), name)
    row = next(r for r in est.rows if r.payload_bytes == P * H * F32)
    hbm = {"v2-8": 700e9, "v3-8": 900e9}[name]
    size = P * H * F32
    within = 2 * (size / 2) / (hbm / 2 / 2)
    # Each core has half of each link, of which 90 % are reached; of S/2 bytes 3/8 cross each link, each way twice.
    over = 2 * (2 * 1e-6 + 3 / 8 * (size / 2) / (link * 0.9 / 2))
    assert row.seconds == pytest.approx(within + over + 5e-6)
    assert row.ici_seconds + row.latency_seconds == pytest.approx(row.seconds)


def test_step_is_the_sum_where_nothing_overlaps():
    est = mtf.estimate(program(*TWO_D[:2]), "v3-8", compiler=mtf.NO_OVERLAP)
    assert est.step_seconds == pytest.approx(sum(r.total_seconds for r in est.rows) + 0.5e-6)
    assert est.exposed_comm_seconds == pytest.approx(est.comm_seconds)
    assert est.compute_seconds + est.comm_seconds + 0.5e-6 == pytest.approx(est.step_seconds)


def test_independent_work_hides_a_reduction():
    whole = mtf.estimate(program(*TWO_D[:2]), "v3-8", compiler=mtf.NO_OVERLAP)
    est = mtf.estimate(program(*TWO_D[:2]), "v3-8")
    assert est.step_seconds < whole.step_seconds
    assert est.exposed_comm_seconds < whole.exposed_comm_seconds
    assert sum(est.bound_seconds.values()) == pytest.approx(est.step_seconds)


def test_price():
    est = mtf.estimate(program(*TWO_D[:2]), "v3-8")
    # v3-8: 4 chips at 2 dollars an hour.
    assert est.usd(1000) == pytest.approx(8.0 * 1000 * est.step_seconds / 3600)
    assert est.epoch_usd(60_000, 512) == pytest.approx(est.usd(118))
    free = dataclasses.replace(CHIPS["v3"], usd_per_chip_hour=None)
    from hardware import Slice

    other = mtf.estimate(program(*TWO_D[:2]), Slice("v3-8", free))
    with pytest.raises(mtf.SliceError, match="no list price of v3"):
        other.usd()
    with pytest.raises(mtf.MeshlibError, match=r"batch must be at least 1, got 0"):
        est.epoch_usd(60_000, 0)
