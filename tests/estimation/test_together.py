"""Things at once: small collectives, shared links, windows, HBM that fetches ahead. Each in a program made for it."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import meshlib as mtf
from hardware import CHIPS
from hardware.memory import hbm_seconds
from hardware.network import Cost, collective_cost
from meshlib.estimation import Physics
from meshlib.estimation.time.hbm_engine import Hbm
from meshlib.estimation.time.kernel_times import Times
from meshlib.estimation.time.link_sharing import LinkTimes
from meshlib.estimation.time.scheduling import schedule
from meshlib.estimation.work.communication import Network
from meshlib.estimation.work.plan import plan_of
from tests.compilers import IN_PIECES, INDEPENDENT
from tests.effort import draws

D = mtf.Dimension
IDEAL = Physics().without_losses()
V5E = CHIPS["v5e"]
LAUNCH = V5E.collective_launch_seconds


def collectives(est: mtf.Estimate) -> list:
    return [e for e in est.schedule.events if e.move is not None]


def test_hbm_owes_what_idle_time_has_not_served() -> None:
    """Of 7 seconds, read and written by way of half of VMEM, 2 are served, then 4, then the last."""
    hbm = Hbm(most_seconds=1.0)
    hbm.owe(2.0)  # which VMEM holds
    assert hbm.owed_seconds == 0.0
    hbm.owe(3.0)
    hbm.owe(4.0)
    owed = []
    for seconds in (2.0, 4.0, 5.0):
        hbm.idle(seconds)
        owed.append(hbm.owed_seconds)
    assert owed == [5.0, 1.0, 0.0]


# ---------------------------------------------------------------- small collectives


def biased(count: int, width: int) -> mtf.Estimate:
    """x plus that many vectors, of which each of four chips holds a quarter."""
    rows, columns = D("rows", 4096), D("columns", width)
    with mtf.Graph():
        x = mtf.input("x", [rows, columns])
        for n in range(count):
            x = mtf.sin(x) + mtf.variable(f"bias{n}", [columns])
        program = mtf.lower({"y": x}, mesh="chips:4", layout="rows:chips;variables/columns:chips")
    return mtf.estimate(program, "v5e-4", physics=IDEAL)


def test_small_gathers_share_a_launch_and_the_hops():
    est = biased(5, 1024)
    assert len(est.program.collectives) == 5
    (sent,) = collectives(est)
    assert sent.name.endswith("and 4 more")
    alone = collective_cost(est.placement, "all_gather", ["chips"], 5 * 4 * 1024).seconds
    assert sent.seconds == pytest.approx(LAUNCH + alone)
    (row,) = (r for r in est.rows if r.kind == "collective")
    assert row.sent_bytes == pytest.approx(est.sent_bytes)


def test_large_gathers_stay_apart():
    """8 MiB take longer to send than to start: combined they could not be taken piece by piece."""
    assert len(collectives(biased(3, 2 << 20))) == 3


def test_those_who_wait_for_each_other_are_not_combined():
    rows, columns = D("rows", 512), D("columns", 128)
    with mtf.Graph():
        x = mtf.input("x", [rows, columns])
        first = mtf.reduce_sum(x, reduced_dim=rows)
        second = mtf.reduce_sum(mtf.sin(x) * first, reduced_dim=rows)
        program = mtf.lower({"y": second}, mesh="chips:4", layout="rows:chips")
    one, two = collectives(mtf.estimate(program, "v5e-4"))
    assert two.start > one.end


# ---------------------------------------------------------------- links


def cost(seconds: float, place: int = 0) -> Cost:
    return Cost(seconds, ((place, seconds),), 1, "-")


def test_a_short_one_passes_a_long_one():
    """It has the link in turn with the other: twice its own time, and the other ends later by it."""
    links = LinkTimes()
    assert links.send(0, cost(10.0), 0.0) == (0.0, 10.0, [])
    start, end, delayed = links.send(1, cost(0.5), 2.0)
    assert (start, end) == (2.0, 3.0)
    assert [(moved.event, moved.begin, moved.late_seconds) for moved in delayed] == [(0, 0.0, 0.5)]
    # What needs longer than is left of the first waits for its end; another place is free.
    assert links.send(2, cost(9.0), 3.0)[0] == 10.5
    assert links.send(3, cost(9.0, place=1), 3.0)[0] == 3.0


def test_equal_ones_keep_their_order():
    """Whatever sums of floats make of their ends: none of three thirds passes the one before it."""
    links = LinkTimes()
    starts = [links.send(n, cost(1 / 3), 0.1 + n / 100)[0] for n in range(3)]
    assert starts == pytest.approx([0.1, 0.1 + 1 / 3, 0.1 + 2 / 3])
    assert links.send(3, cost(1 / 3), 0.2)[2] == []


@settings(max_examples=draws(30, 500))
@given(st.lists(st.tuples(st.integers(1, 20), st.integers(0, 30)), min_size=1, max_size=8))
def test_bytes_on_a_link_are_conserved(given_):
    """Whoever passes whom, the link is busy for the sum of all from the last time on at which it was idle."""
    links, busy_until = LinkTimes(), 0.0
    for n, (busy, ready) in enumerate(sorted(given_, key=lambda pair: pair[1])):
        links.send(n, cost(float(busy)), float(ready))
        busy_until = max(busy_until, ready) + busy
        assert links.free(0) == pytest.approx(busy_until)


def test_scales_do_not_wait_for_weights():
    """A gather of 64 MiB, then one of 4 KiB on the same links, whose user runs long before the large one has ended."""
    rows, k, n = D("rows", 4096), D("k", 8192), D("n", 4096)
    with mtf.Graph():
        x = mtf.input("x", [rows, n], "bfloat16")
        large = mtf.einsum(
            [mtf.input("z", [rows, k], "bfloat16"), mtf.variable("w", [k, n], dtype="bfloat16")], [rows, n]
        )
        small = mtf.sin(x) * mtf.variable("scale", [n], dtype="bfloat16")
        layout = "rows:chips;variables/n:chips"
        program = mtf.lower({"a": large, "b": small}, mesh="chips:4", layout=layout)
    sent = sorted(collectives(mtf.estimate(program, "v5e-4", physics=IDEAL)), key=lambda e: e.move.payload_bytes)
    assert len(sent) == 2
    small_one, large_one = sent
    assert small_one.end < 1e-4 < large_one.end


# ---------------------------------------------------------------- windows


def window(products: int) -> mtf.Estimate:
    """x[b@m, k] gathered for that many products with w[k, n@m]."""
    rows, k, n = D("rows", 16384), D("k", 4096), D("n", 4096)
    with mtf.Graph():
        x = mtf.input("x", [rows, k], "bfloat16")
        found = {}
        for i in range(products):
            w = mtf.variable(f"w{i}", [k, n], dtype="bfloat16")
            found[f"y{i}"] = mtf.einsum([x, w], [rows, n], name=f"mm{i}")
        program = mtf.lower(
            {key: mtf.constrain(y, "n:chips") for key, y in found.items()}, mesh="chips:4",
            layout="n:chips;activations/rows:chips?",
        )  # fmt: skip
    return mtf.estimate(program, "v5e-4", IN_PIECES, physics=IDEAL)


def test_products_of_one_gathered_operand_share_a_window():
    """The last piece goes through all of them; before, all of them have hidden the gather."""
    for products in (1, 2, 3):
        est = window(products)
        kernels = [e for e in est.schedule.events if e.time is not None and e.kernel.matmuls]
        (gather,) = (e for e in collectives(est) if e.move.kind == "all_gather")
        taken = sum(e.time.seconds for e in kernels)
        begin = gather.start + gather.seconds / 4
        assert kernels[-1].end == pytest.approx(max(begin + taken, gather.end + taken / 4), rel=1e-6)


# ---------------------------------------------------------------- HBM


def decoding(layers: int, batch: int = 8) -> mtf.Program:
    """A chain of products with few rows, each with a weight of its own."""
    rows, a, b = D("rows", batch), D("a", 4096), D("b", 4096)
    with mtf.Graph():
        x = mtf.input("x", [rows, a], "bfloat16")
        for n in range(layers):
            i, o = (a, b) if n % 2 == 0 else (b, a)
            x = mtf.einsum([x, mtf.variable(f"w{n}", [i, o], dtype="bfloat16")], [rows, o], name=f"mm{n}")
        return mtf.lower({"y": x}, mesh="chips:1")


def test_a_chain_of_small_products_takes_as_long_as_its_bytes():
    """Launches and first pieces hide behind what HBM streams for the products before."""
    est = mtf.estimate(decoding(16), "v5e-1")
    rows = [r for r in est.rows if r.kind == "compute"]
    streamed = hbm_seconds(V5E, sum(r.traffic_bytes for r in rows))
    assert streamed <= est.step_seconds <= streamed + 2 * V5E.launch_seconds + 1.5e-6
    assert sum(r.seconds + r.hidden_seconds for r in rows) == pytest.approx(
        streamed + 16 * V5E.launch_seconds, rel=1e-3
    )
    assert est.compute_seconds == pytest.approx(est.step_seconds - 0.5e-6)


def test_what_is_fetched_ahead_is_no_more_than_vmem_holds():
    small = dataclasses.replace(V5E, vmem_bytes_per_core=1 << 20)
    slow = mtf.estimate(decoding(16), mtf.estimate(decoding(1), "v5e-1").slice)
    tight = mtf.estimate(decoding(16), dataclasses.replace(slow.slice, chip=small))
    assert tight.step_seconds > slow.step_seconds


def test_collectives_take_hbm_from_products_that_need_it():
    """Weights gathered beside products that are bound by HBM: what arrives is written, what leaves is read."""
    rows, a, b = D("rows", 65536), D("a", 4096), D("b", 4096)
    with mtf.Graph():
        x = mtf.input("x", [rows, a], "bfloat16")
        for n in range(6):
            i, o = (a, b) if n % 2 == 0 else (b, a)
            x = mtf.einsum([x, mtf.variable(f"w{n}", [i, o], dtype="bfloat16")], [rows, o], name=f"mm{n}")
        program = mtf.lower({"y": x}, mesh="chips:4", layout="rows:chips;variables/a:chips;variables/b:chips?")
    # Blocks so small that products read for longer than they compute.
    est = mtf.estimate(program, "v6e-4", physics=dataclasses.replace(IDEAL, block_edge=256.0))
    assert {c.kind for c in program.collectives} == {"all_gather"}
    kernels = [r for r in est.rows if r.kind == "compute"]
    assert all(r.bound == "hbm" for r in kernels)
    moved = sum(2 * e.move.larger_bytes for e in collectives(est)[1:])
    traffic = sum(r.traffic_bytes for r in kernels)
    first = collectives(est)[0].end
    assert est.step_seconds == pytest.approx(first + hbm_seconds(est.slice.chip, traffic + moved), rel=0.02)


# ---------------------------------------------------------------- kernels


def test_the_update_of_a_weight_is_one_kernel():
    """AdamW reads gradient, weight and two slots, and writes the latter three: 28 bytes an element."""
    rows, columns = D("rows", 4096), D("columns", 2048)
    with mtf.Graph():
        w = mtf.variable("w", [rows, columns])
        grad = mtf.input("grad", [rows, columns])
        train = mtf.optimize.AdamWOptimizer(1e-3).apply_grads([grad], [w])
        est = mtf.estimate(mtf.lower(updates=train, mesh="chips:1"), "v5e-1")
    large = [r for r in est.rows if r.hbm_bytes > 1000]
    assert [r.hbm_bytes for r in large] == [pytest.approx(28 * 4096 * 2048, rel=1e-6)]


@pytest.mark.parametrize(("length", "reads"), [(1 << 14, 1), (1 << 22, 3)])
def test_a_softmax_whose_rows_exceed_vmem_reads_them_again(length, reads):
    """The maximum, then the sum, then the quotient each need all of a row."""
    rows, columns = D("rows", 8), D("columns", length)
    with mtf.Graph():
        y = mtf.softmax(mtf.input("x", [rows, columns]), columns)
        est = mtf.estimate(mtf.lower({"y": y}, mesh="chips:1"), "v5e-1", physics=IDEAL)
    (row,) = (r for r in est.rows if r.kind == "compute")
    assert row.hbm_bytes == 2 * 4 * 8 * length
    assert row.traffic_bytes == (reads + 1) * 4 * 8 * length


def quantised(eight: bool, chips: int = 1) -> mtf.Estimate:
    rows, k, n = D("rows", 8192), D("k", 4096), D("n", 4096)
    with mtf.Graph():
        x, w = mtf.input("x", [rows, k], "bfloat16"), mtf.variable("w", [k, n], dtype="bfloat16")
        y = mtf.quantized_einsum([x, w], [rows, n]) if eight else mtf.einsum([x, w], [rows, n])
        program = mtf.lower({"y": mtf.sin(y)}, mesh=f"chips:{chips}", layout="rows:chips;variables/n:chips")
    return mtf.estimate(program, f"v5e-{chips}", physics=IDEAL)


def test_operands_in_eight_bits_are_quantised_in_a_pass_of_their_own():
    """Two bytes an element read, one written; then the product reads one. The scales, and the weights, which were read
    for them before, are in VMEM still."""
    row = next(r for r in quantised(True).rows if r.mxu_flops)
    elements = 8192 * 4096 + 4096 * 4096
    assert row.traffic_bytes == (3 + 1) * elements + 2 * 8192 * 4096 - 2 * 4096 * 4096
    assert row.seconds >= row.mxu_seconds + hbm_seconds(V5E, 3 * elements)


def test_what_is_gathered_for_products_in_eight_bits_is_narrow():
    wide, narrow = (next(e for e in collectives(quantised(eight, 4)) if e.move.payload_bytes > 1 << 20)
                    for eight in (False, True))  # fmt: skip
    assert wide.move.payload_bytes == narrow.move.payload_bytes
    assert dict(narrow.cost.busy_seconds)[0] == pytest.approx(dict(wide.cost.busy_seconds)[0] / 2)


def test_numbers_drawn_to_round_cotangents_pass_through_memory():
    """Four bytes written and four read of each element of dy, for each of its two products; none in the forward."""
    rows, k, n = D("rows", 1024), D("k", 512), D("n", 256)
    with mtf.Graph():
        x, w = mtf.input("x", [rows, k], "bfloat16"), mtf.variable("w", [k, n], dtype="bfloat16")
        loss = mtf.reduce_sum(mtf.sin(mtf.quantized_einsum([x, w], [rows, n])))
        dx, dw = mtf.gradients([loss], [x, w])
        program = mtf.lower({"loss": loss, "dx": dx, "dw": dw})
    plain, noisy = (
        [u.kernel.quantised_bytes for u in plan_of(program, compiler).units if u.product]
        for compiler in (mtf.XLA_TPU, replace(mtf.XLA_TPU, rounding_noise_bytes=4))
    )
    assert [b - a for a, b in zip(plain, noisy, strict=True)] == [0, 2 * 4 * 1024 * 256, 2 * 4 * 1024 * 256]


@pytest.mark.parametrize("chip", ["v4-8", "v5e-4", "v6e-4"])
def test_no_engine_works_beyond_its_rate(chip):
    config = mtf.models.preset("gpt2").replace(layers=1)
    with mtf.Graph():
        outputs, updates = mtf.models.train_step(config, batch=8, length=1024)
        program = mtf.lower(outputs, updates, mesh="data:4", layout="batch:data")
    for row in mtf.estimate(program, chip).rows:
        assert 0 <= row.utilisation <= 1 + 1e-9, row


# ---------------------------------------------------------------- trips


def test_what_a_trip_sends_may_end_in_the_next_where_layers_are_written_out():
    """A gradient's reduction at the end of each trip: a loop waits for it, layers written out only for the last."""
    rows, wide, layers = D("rows", 16384), D("wide", 2048), D("layers", 8)
    with mtf.Graph():
        x = mtf.input("x", [rows, wide], "bfloat16")
        w = mtf.variable("w", [layers, wide, D("out", 2048)], dtype="bfloat16")

        def body(carries, slices):
            y = mtf.einsum([carries[0], slices[0]], [rows, D("out", 2048)])
            return [mtf.rename_dimension(mtf.sin(y), "out", "wide")], []

        (y,), _ = mtf.scan(body, [x], [w], layers)
        train = mtf.optimize.SgdOptimizer(0.1).minimize(mtf.reduce_mean(mtf.square(mtf.cast(y, "float32"))))
        program = mtf.lower(updates=train, mesh="chips:4", layout="rows:chips")
    est = mtf.estimate(program, "v5e-4", physics=IDEAL)
    plan, times, network = plan_of(program, INDEPENDENT), Times(V5E, IDEAL), Network(est.placement)
    rolled, out = (schedule(plan, times, network, replace(INDEPENDENT, unrolled_loops=way)) for way in (False, True))
    backward = [e for e in rolled.events if e.loop is not None][-1].loop
    tail = backward.seconds - backward.core_seconds
    assert tail > 0
    assert rolled.seconds - out.seconds == pytest.approx(7 * tail, rel=0.15)
