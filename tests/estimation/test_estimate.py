"""Properties of estimates over random programs and layouts, policies, loops, memory that does not fit."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import meshlib as mtf
from hardware import CHIPS, Slice, placements
from meshlib.core.opdef import Kind
from meshlib.core.text import bytes_text
from meshlib.estimation import Physics
from meshlib.estimation.time.kernel_times import KernelTime
from meshlib.estimation.time.scheduling import uncovered
from meshlib.program.analysis.work import local_work
from meshlib.program.instructions import Compute, Instruction, Loop
from meshlib.program.records import walk
from tests.compilers import BY_OVERLAP, IN_PIECES, INDEPENDENT
from tests.effort import draws
from tests.estimation.test_trace import check_trace
from tests.simulation.test_property_programs import Written, programs

D = mtf.Dimension


def any_size(devices: int, **figures: object) -> Slice:
    """A slice of that many chips in a line: for meshes of every size."""
    chip = dataclasses.replace(CHIPS["v5e"], pod_shape=(16,), max_slice_chips=16, wrap_axis=8, **figures)
    return Slice(f"v5e-{devices}", chip)


# ---------------------------------------------------------------- random programs


def free_ops(program: mtf.Program) -> int:
    """Vector operations counted for instructions that take none when they run on their own."""
    inside = sum(i.trips * free_ops(i.body) for i in program.instructions if isinstance(i, Loop))
    free = [i for i in program.instructions if i.opcode in ("constant", "broadcast", "reshape") or sums_one(i)]
    return inside + sum(local_work(program, i).vpu_ops for i in free)


def sums_one(i: Instruction) -> bool:
    """Whether each sum, or maximum, of its block is of one element: a dim that is split to the last."""
    reduces = isinstance(i, Compute) and i.operation.opdef.kind is Kind.REDUCTION
    return reduces and i.inputs[0].local_size == i.outputs[0].local_size


@settings(max_examples=draws(8, 1000))
@given(programs(), st.sampled_from([*BY_OVERLAP.values()]))
def test_bounds_and_counts_of_random_programs(p: Written, compiler: mtf.Compiler) -> None:
    program = mtf.lower(p.outputs, p.updates, p.mesh, p.layout)
    est = mtf.estimate(program, any_size(program.mesh.size), compiler)
    assert 0 < est.lower_seconds <= est.step_seconds * (1 + 1e-9)
    assert est.step_seconds <= est.upper_seconds * (1 + 1e-9)
    # Exact figures are those of the program, counted elsewhere.
    assert est.flops == program.work.mxu_flops
    # Constants of one element are there when the program starts; reshapes that leave tiles alone and sums of one
    # element do nothing. What several kernels recompute counts for each.
    assert program.work.vpu_ops - free_ops(program) <= est.vpu_ops
    # Of several exchanges each row has the busiest sender's bytes; these may be different devices.
    sent = sum(r.sent_bytes * r.count for r in est.rows)
    exchanges = any(i.transfers and not i.is_collective for i, _, _ in walk(program))
    assert sent == pytest.approx(program.sent_bytes) or (exchanges and sent > program.sent_bytes)
    assert est.memory.exact_peak_bytes == program.memory.peak_bytes
    assert est.memory.peak_bytes >= est.memory.exact_peak_bytes
    assert max(est.memory.timeline_bytes, default=0) <= est.memory.peak_bytes
    for total, parts in zip(est.memory.timeline_bytes, est.memory.timeline_by_kind, strict=True):
        assert total == sum(parts)
        assert min(parts) >= 0
    assert sum(est.memory.by_kind.values()) == est.memory.peak_bytes
    assert 0 <= est.exposed_comm_seconds <= est.comm_seconds * (1 + 1e-9)
    assert 0 <= est.mfu <= est.hfu * (1 + 1e-9) <= 1 + 1e-6
    assert sum(est.bound_seconds.values()) == pytest.approx(est.step_seconds)
    assert est.table()
    check_trace(est)


@settings(max_examples=draws(4, 400))
@given(programs(), st.sampled_from(["hbm_bytes_per_second", "ici_bytes_per_second", "clock_hz"]))
def test_a_faster_machine_is_never_slower(p: Written, figure: str) -> None:
    program = mtf.lower(p.outputs, p.updates, p.mesh, p.layout)
    for compiler in BY_OVERLAP.values():
        slow = mtf.estimate(program, any_size(program.mesh.size), compiler)
        twice = any_size(program.mesh.size, **{figure: 2 * getattr(CHIPS["v5e"], figure)})
        fast = mtf.estimate(program, twice, compiler)
        assert fast.step_seconds <= slow.step_seconds * (1 + 1e-9)


@settings(max_examples=draws(4, 400))
@given(programs())
def test_overlap_never_costs(p: Written) -> None:
    program = mtf.lower(p.outputs, p.updates, p.mesh, p.layout)
    where = any_size(program.mesh.size)
    none, independent, _ = (mtf.estimate(program, where, c).step_seconds for c in BY_OVERLAP.values())
    assert independent <= none * (1 + 1e-9)


# ---------------------------------------------------------------- overlap


def layers(count: int, mesh: str, layout: str, size: int = 4096, batch: int = 8192) -> mtf.Program:
    """A chain of products, forward only, in bfloat16."""
    dims = [D("in", size), D("out", size)]
    with mtf.Graph():
        x = mtf.input("x", [D("batch", batch), dims[0]], "bfloat16")
        for n in range(count):
            a, b = dims[n % 2], dims[(n + 1) % 2]
            x = mtf.einsum([x, mtf.variable(f"w{n}", [a, b], dtype="bfloat16")], [D("batch", batch), b], name=f"mm{n}")
        return mtf.lower({"y": x}, mesh=mesh, layout=layout)


FSDP = "batch:data;in:data?"


def test_fully_sharded_weights_are_gathered_while_the_layer_before_runs():
    program = layers(8, "data:8", "batch:data;variables/in:data")
    assert {c.kind for c in program.collectives} == {"all_gather"}
    none = mtf.estimate(program, "v3-8", compiler=mtf.NO_OVERLAP)
    est = mtf.estimate(program, "v3-8", physics=Physics().without_losses())
    gathers = [e for e in est.schedule.events if e.move is not None]
    products = [e for e in est.schedule.events if e.kernel is not None]
    assert est.step_seconds < none.step_seconds
    # One gather ahead and no more: the next but one starts when this one's product does.
    for gather, product in zip(gathers[2:], products[1:], strict=False):
        assert gather.start >= product.start
    assert gathers[1].end <= products[1].start


def test_collective_matmul_starts_with_the_first_piece():
    program = layers(1, "data:8", "batch:data;variables/in:data")
    plain, pieces = (mtf.estimate(program, "v3-8", c) for c in (INDEPENDENT, IN_PIECES))
    gather = next(e for e in plain.schedule.events if e.move is not None)
    product = next(e for e in plain.schedule.events if e.kernel is not None)
    assert plain.step_seconds == pytest.approx(gather.seconds + product.seconds + 0.5e-6)
    longer, shorter = sorted((gather.seconds, product.seconds), reverse=True)
    assert pieces.step_seconds == pytest.approx(longer + shorter / 8 + 0.5e-6)


def test_collective_matmul_of_a_reduce_scatter():
    with mtf.Graph():
        x = mtf.input("x", [D("b", 8192), D("k", 8192)], "bfloat16")
        w = mtf.variable("w", [D("k", 8192), D("n", 4096)], dtype="bfloat16")
        y = mtf.constrain(mtf.einsum([x, w], [D("b", 8192), D("n", 4096)]), "n:m")
        program = mtf.lower({"y": mtf.einsum([y, y], [D("n", 4096)])}, mesh="m:8", layout="k:m")
    assert "reduce_scatter" in {c.kind for c in program.collectives}
    plain, pieces = (mtf.estimate(program, "v3-8", c) for c in (INDEPENDENT, IN_PIECES))
    assert pieces.step_seconds < plain.step_seconds


def test_union_of_intervals():
    assert uncovered([], [(0, 1)]) == 0
    assert uncovered([(0, 1), (0, 1)], []) == 1
    assert uncovered([(0, 2)], [(0, 1), (0.5, 1.5)]) == 0.5


# ---------------------------------------------------------------- loops, exchanges


def test_a_loop_costs_its_body_as_often_as_it_runs():
    def build(trips: int) -> mtf.Estimate:
        inner, other, steps = D("k", 512), D("n", 512), D("layers", trips)
        with mtf.Graph():
            x = mtf.input("x", [D("b", 256), inner])
            w = mtf.variable("w", [steps, inner, other])

            def body(carries, slices):
                y = mtf.einsum([carries[0], slices[0]], [D("b", 256), other], name="mm")
                return [mtf.rename_dimension(mtf.relu(y), "n", "k")], []

            (y,), _ = mtf.scan(body, [x], [w], steps)
            no_overhead = dataclasses.replace(mtf.XLA_TPU, step_overhead_seconds=0)
            return mtf.estimate(mtf.lower({"y": y}, mesh="m:8", layout="n:m"), "v3-8", no_overhead)

    two, six = build(2), build(6)
    assert six.flops == 3 * two.flops
    assert {r.count for r in six.rows if r.name.endswith("mm")} == {6}
    assert six.step_seconds == pytest.approx(3 * two.step_seconds, rel=0.1)
    assert six.sent_bytes == pytest.approx(3 * two.sent_bytes)
    check_trace(six)


def test_slices_joined_by_the_data_centre_network():
    """The gradient crosses DCN; what stays within a slice does not."""

    def build(layout: str) -> mtf.Estimate:
        rows, inner, outer = D("b", 2**14), D("k", 4096), D("n", 4096)
        with mtf.Graph():
            w = mtf.variable("w", [inner, outer])
            loss = mtf.reduce_mean(mtf.square(mtf.einsum([mtf.input("x", [rows, inner]), w])))
            train = mtf.optimize.SgdOptimizer(0.1).minimize(loss)
            return mtf.estimate(mtf.lower({"loss": loss}, train, "pods:2;data:16", layout), "2*v5e-16")

    across, within = build("b:pods+data"), build("b:data")
    gradient = next(r for r in across.rows if r.payload_bytes == 4096 * 4096 * 4)
    # Reduced within a slice first: a chip's share of 1/16 goes over its NIC, out and back.
    assert gradient.dcn_seconds == pytest.approx(2 * 0.5 * gradient.payload_bytes / 16 / (3.125e9 / 2))
    assert across.bound_seconds["dcn"] > 0
    assert "dcn" not in within.engine_seconds
    assert within.useful_flops == within.flops / 2
    check_trace(across)


def test_what_moves_inside_an_instruction_is_paid():
    with mtf.Graph():
        x = mtf.input("x", [D("b", 1024), D("t", 4096)])
        program = mtf.lower({"y": mtf.cumsum(x, D("t", 4096))}, mesh="m:8", layout="t:m")
    assert any(i.transfers and not i.is_collective for i in program.instructions)
    est = mtf.estimate(program, "v3-8")
    (row,) = (r for r in est.rows if r.kind == "collective")
    assert row.opcode == "all_gather"
    assert row.sent_bytes == program.sent_bytes
    assert est.exposed_comm_seconds == pytest.approx(row.seconds)


@pytest.mark.parametrize("how", ["recompute", "scan"])
def test_what_is_computed_again_is_not_useful(how: str) -> None:
    """Forward, again, and two products backward: 4 executed for each 3 that the model asks for."""
    inner, other, steps = D("k", 512), D("n", 512), D("layers", 4)

    def layer(x: mtf.Tensor, w: mtf.Tensor) -> mtf.Tensor:
        return mtf.rename_dimension(mtf.sin(mtf.einsum([x, w], [D("b", 256), other])), "n", "k")

    with mtf.Graph():
        x = mtf.variable("x", [D("b", 256), inner])
        if how == "scan":
            w = mtf.variable("w", [steps, inner, other])
            (y,), _ = mtf.scan(lambda c, s: ([layer(c[0], s[0])], []), [x], [w], steps)
        else:
            w = mtf.variable("w", [inner, other])
            y = mtf.recompute_grad(lambda x: mtf.square(layer(x, w)), [x])
        loss = mtf.reduce_sum(mtf.sin(y))
        program = mtf.lower({"loss": loss}, mtf.optimize.SgdOptimizer(0.1).minimize(loss), "m:8", "b:m")
    est = mtf.estimate(program, "v3-8")
    one = 2 * (256 // 8) * 512 * 512 * (4 if how == "scan" else 1)
    assert est.flops == 4 * one
    assert est.useful_flops == 3 * one
    assert est.mfu == pytest.approx(0.75 * est.hfu)


# ---------------------------------------------------------------- memory


def test_what_does_not_fit_says_what_would_help():
    size = 32768
    with mtf.Graph():
        x = mtf.input("x", [D("batch", 64), D("d", size)])
        w = mtf.variable("table", [D("d", size), D("f", size)])
        loss = mtf.reduce_mean(mtf.square(mtf.einsum([x, w], [D("batch", 64), D("f", size)])))
        train = mtf.optimize.AdamOptimizer(1e-3).minimize(loss)
        program = mtf.lower({"loss": loss}, train, mesh="data:8", layout="batch:data")
    est = mtf.estimate(program, "v3-8")
    assert not est.fits
    table_bytes = size * size * 4
    assert est.memory.peak_bytes > 4 * table_bytes
    message = est.memory.message
    assert "does not fit: each device of v3-8 has 15.48 GiB (16621523436 bytes)" in message
    assert f"({est.memory.peak_bytes} bytes" in message
    needed = est.memory.needed_bytes
    too_much = bytes_text(needed - est.memory.capacity_bytes)
    assert f"needs {bytes_text(needed)}* ({needed / est.memory.capacity_bytes:.1%}), {too_much}* too much" in message
    assert "table/adam" in message or "table/" in message
    assert "test_estimate.py:" in message
    sharded = next(r for r in est.memory.remedies if "layout rule 'd:data?'" in r.what)
    # Variable and two slots: 7/8 of each goes. The gradient is a partial sum there, which nothing can split. For the
    # product x is gathered then, which is less than the table.
    assert sharded.gain_bytes == 3 * table_bytes * 7 // 8 - 64 * size * 4
    zero = next(r for r in est.memory.remedies if "ZeRO-1" in r.what)
    assert zero.gain_bytes == 2 * table_bytes * 7 // 8
    assert message in est.table()
    # The first remedy, carried out: it saves about what was said.
    done = mtf.estimate(mtf.lower({"loss": loss}, train, mesh="data:8", layout="batch:data;f:data?"), "v3-8")
    assert done.memory.peak_bytes < est.memory.peak_bytes - sharded.gain_bytes // 2


def test_tiles_cost_what_they_cost():
    with mtf.Graph():
        y = mtf.relu(mtf.input("x", [D("b", 4096), D("one", 1)]))
        est = mtf.estimate(mtf.lower({"y": y}, mesh="m:8", layout="b:m"), "v3-8")
    # 512 numbers a device lie along the lanes, whichever dim is named last; of [3, 5] every tile has room to spare.
    assert est.memory.peak_bytes == est.memory.exact_peak_bytes == 2 * 512 * 4
    with mtf.Graph():
        y = mtf.relu(mtf.input("x", [D("b", 24), D("five", 5)]))
        est = mtf.estimate(mtf.lower({"y": y}, mesh="m:8", layout="b:m"), "v3-8")
    assert (est.memory.exact_peak_bytes, est.memory.peak_bytes) == (2 * 3 * 5 * 4, 2 * 4 * 128 * 4)


# ---------------------------------------------------------------- device count, placements, bad arguments


def test_an_estimate_does_not_depend_on_the_number_of_devices():
    """The same local work on 8 and on 2,048 cores: same rows but for the collectives' time."""
    small = mtf.estimate(layers(4, "data:8", "batch:data", batch=8 * 64), "v3-8")
    large = mtf.estimate(layers(4, "data:2048", "batch:data", batch=2048 * 64), "v3-2048")
    assert small.step_seconds == large.step_seconds
    assert small.memory.peak_bytes == large.memory.peak_bytes
    assert [r.seconds for r in small.rows] == [r.seconds for r in large.rows]


def test_the_placement_is_the_best_for_the_programs_own_demands():
    program = layers(2, "data:2;model:4", "batch:data;in:model", batch=512)
    best = mtf.estimate(program, "v3-8", compiler=mtf.NO_OVERLAP)
    found = [
        mtf.estimate(program, "v3-8", compiler=mtf.NO_OVERLAP, placement=p).step_seconds
        for p in placements(Slice("v3-8"), {"data": 2, "model": 4})
    ]
    assert len(found) > 1
    assert best.step_seconds == pytest.approx(min(found))


def test_bad_arguments():
    program = layers(1, "data:8", "batch:data")
    with pytest.raises(mtf.GraphError, match=r"expected a program from mtf\.lower, got int 3"):
        mtf.estimate(3, "v3-8")
    with pytest.raises(mtf.SliceError, match=r"8 positions, but slice v3-32 has 32 devices"):
        mtf.estimate(program, "v3-32")
    with pytest.raises(mtf.SliceError, match="v3-8"):
        mtf.estimate(program, "v3-9")
    with pytest.raises(mtf.SliceError, match="3"):
        mtf.estimate(program, 3)
    with pytest.raises(mtf.GraphError, match=r"compiler must be an mtf.Compiler, got str 'gspmd'; it is mtf.COMPILERS"):
        mtf.estimate(program, "v3-8", "gspmd")
    other = next(placements(Slice("v3-8"), {"rows": 8}))
    with pytest.raises(mtf.SliceError, match=r"\{'rows': 8\} over v3-8"):
        mtf.estimate(program, "v3-8", placement=other)
    with pytest.raises(mtf.SliceError, match=r"must be a hardware\.Placement"):
        mtf.estimate(program, "v3-8", placement="best")
    linkless = dataclasses.replace(CHIPS["v5e"], ici_links=0)
    with pytest.raises(mtf.SliceError, match=r"cannot run on v5e-16: chip 'v5e' has no links"):
        mtf.estimate(layers(1, "m:16", "in:m"), Slice("v5e-16", linkless))
    with pytest.raises(mtf.SliceError, match=r"v1-1: chip 'v1' has no published bf16 rate"):
        mtf.estimate(layers(1, "m:1", ""), "v1-1")
    est = mtf.estimate(program, "v3-8")
    with pytest.raises(mtf.GraphError, match="expected an Estimate, got str 'x'"):
        est.compare("x")
    with pytest.raises(mtf.GraphError, match="rows must be a number of rows or None, got -1"):
        est.table(-1)
    with pytest.raises(mtf.GraphError, match="steps must not be negative, got -2"):
        est.usd(-2)
    with pytest.raises(mtf.GraphError, match=r"the path must be text.*got int 3"):
        est.save_trace(3)


# ---------------------------------------------------------------- views


def test_table_marks_every_figure_and_names_lines():
    est = mtf.estimate(layers(3, "data:2;model:4", "batch:data;in:model"), "v3-8")
    text = est.table(2)
    for line in text.splitlines()[1:9]:
        assert ("exact" in line) != ("modelled" in line), line
    assert "more rows" in text
    assert "test_estimate.py:" in text
    assert "mm1" in est.table(None)
    assert str(est) == est.table()
    assert repr(est).startswith("<Estimate on v3-8: ")


def test_roofline_and_comparison():
    wide, narrow = (mtf.estimate(layers(1, "data:8", "batch:data", batch=b), "v3-8") for b in (65536, 64))
    (point,) = wide.roofline()
    assert point.flops == 2 * 8192 * 4096 * 4096
    assert point.hbm_bytes == 2 * (2 * 8192 * 4096 + 4096 * 4096)
    assert point.intensity == point.flops / point.hbm_bytes
    assert point.attainable_flops_per_second == 61.5e12
    assert 0.85 * 61.5e12 < point.flops_per_second < 61.5e12
    assert (wide.bound, narrow.bound) == ("mxu", "hbm")
    text = wide.compare(narrow)
    assert "modelled" in text
    assert "exact" in text
    assert f"{narrow.flops / wide.flops:.3g}x" in text


def test_padding_that_decides_is_said() -> None:
    def message(last: int) -> str:
        with mtf.Graph():
            dims = [mtf.Dimension("many", 2**26), mtf.Dimension("few", last)]
            program = mtf.lower({"y": mtf.reduce_sum(mtf.variable("x", dims))}, mesh="all:8")
        return mtf.estimate(program, "v3-8").memory.message

    # Five rows take the place of eight; four do not, however they are named.
    assert "the peak, 2 GiB, takes 1.25 GiB without padding: blocks that do not fill tiles of 8 x 128" in message(5)
    assert message(5).startswith("fits: needs 2")
    assert message(4).startswith("fits: needs 1")
    assert "padding" not in message(4)


def test_padding_that_does_not_matter_is_not_said() -> None:
    with mtf.Graph():
        x = mtf.variable("x", [mtf.Dimension("many", 2**26), mtf.Dimension("few", 128)])
        program = mtf.lower({"y": mtf.reduce_sum(x)}, mesh="all:8")
    message = mtf.estimate(program, "v3-8").memory.message
    assert "does not fit" in message
    assert "without padding" not in message


def test_the_upper_bound_adds_up_all_engines() -> None:
    """Matrix unit, vector unit, HBM and launches one after the other; here the vector unit takes most."""
    assert KernelTime(1.0, 2.0, 4.0, 8.0, 16.0, 32.0).upper_seconds == 1 + 2 + 4 + 16
    with mtf.Graph():
        y = mtf.input("x", [mtf.Dimension("rows", 4096), mtf.Dimension("cols", 1024)])
        for _ in range(40):
            y = mtf.tanh(y)
        est = mtf.estimate(mtf.lower({"y": mtf.reduce_mean(y)}), "v5e-1")
    parts = [r.count * (r.mxu_seconds + r.vpu_seconds + r.hbm_seconds + r.launch_seconds) for r in est.rows]
    assert est.upper_seconds == pytest.approx(sum(parts), abs=1e-6)  # the step itself is launched, too
    assert sum(r.count * r.vpu_seconds for r in est.rows) > 0.5 * est.upper_seconds
