"""mtf.testing: what passes, and what the messages of failures say."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

import meshlib as mtf
from hardware.slices import Slice
from meshlib.core.opdef import OPERATIONS
from meshlib.program.records import Program

testing = mtf.testing
D = mtf.Dimension
BATCH, D_IN, D_OUT = D("batch", 8), D("d_in", 16), D("d_out", 4)


def network(batch: mtf.Dimension = BATCH) -> tuple[mtf.Tensor, list]:
    x, w = mtf.input("x", [batch, D_IN]), mtf.variable("w1", [D_IN, D_OUT])
    y = mtf.tanh(mtf.einsum([x, w], output_shape=[batch, D_OUT], name="y"))
    loss = mtf.reduce_sum(mtf.square(y), name="loss")
    return loss, mtf.optimize.SgdOptimizer(0.1).minimize(loss)


@pytest.fixture(scope="module")
def program() -> Program:
    """Data parallel over 2: the loss of 4 bytes, the gradient of 16 x 4 x 4 = 256."""
    with mtf.Graph():
        loss, train = network()
        return mtf.lower({"loss": loss}, train, "rows:2;cols:1", "batch:rows")


# ---------------------------------------------------------------- assert_collectives


def test_expected_collectives_pass_in_any_form_and_order(program: Program) -> None:
    for expected in (
        [("all_reduce", "rows", 256), ("all_reduce", "rows", 4)],
        [("all_reduce", ["rows"]), ("all_reduce", "rows", 256)],
        ["all_reduce over rows", "all_reduce over rows of loss"],
        ["all_reduce over rows of w1", ("all_reduce", ("rows",), 4)],
        ["2 x all_reduce over rows"],
    ):
        testing.assert_collectives(program, expected)


def test_the_vague_entry_does_not_take_the_place_of_the_exact_one(program: Program) -> None:
    """Greedy matching would give the first entry the gradient and leave the second with the loss."""
    for expected in (
        [("all_reduce", "rows"), ("all_reduce", "rows", 4)],
        [("all_reduce", "rows"), ("all_reduce", "rows", 256)],
    ):
        testing.assert_collectives(program, expected)
        testing.assert_collectives(program, expected[::-1])


def test_a_missing_and_an_unexpected_collective_are_shown_with_the_reason(program: Program) -> None:
    with pytest.raises(AssertionError) as caught:
        testing.assert_collectives(program, [("all_reduce", "rows", 512), "all_reduce over rows of loss"])
    text = str(caught.value)
    lines = text.splitlines()
    assert lines[0] == "other collectives than expected: 1 missing, 1 unexpected"
    assert lines[1] == "  - all_reduce over rows, payload 512 B"
    assert lines[2].startswith("      nearest: all_reduce over rows of ")
    assert lines[2].endswith("(gradient of w1), payload 256 B")
    assert lines[3].startswith("  + all_reduce over rows of ")
    assert "test_testing.py:" in lines[3]
    assert "because einsum" in lines[4]
    assert "sums over 'batch', split over rows" in lines[4]
    assert "'w1' needs the whole gradient" in lines[4]
    assert "avoid: leave 'batch' unsplit over rows (rule batch:rows)" in lines[5]
    assert lines[6] == "    all_reduce over rows of loss, payload 4 B"
    assert lines[7] == "  mesh rows:2;cols:1   layout batch:rows"


def test_one_too_many_and_one_too_few(program: Program) -> None:
    with pytest.raises(AssertionError, match="1 missing, 0 unexpected\n  - all_reduce over rows"):
        testing.assert_collectives(program, ["3 x all_reduce over rows"])
    with pytest.raises(AssertionError, match="0 missing, 2 unexpected"):
        testing.assert_collectives(program, [])
    with pytest.raises(AssertionError, match="1 missing, 2 unexpected"):
        testing.assert_collectives(program, ["all_gather over rows of w1"])


def test_a_gradient_reduced_before_its_last_operation_goes_by_the_variable_too() -> None:
    """The sum is reduced where it is smallest; it is w's gradient all the same."""
    with mtf.Graph():
        x, w = mtf.input("x", [BATCH, D_IN]), mtf.variable("w", [D_OUT, D_IN])
        y = mtf.einsum([x, mtf.transpose(w, [D_IN, D_OUT])], output_shape=[BATCH, D_OUT])
        train = mtf.optimize.SgdOptimizer(0.1).minimize(mtf.reduce_sum(mtf.square(y)))
        program = mtf.lower({}, train, "rows:2", "batch:rows")
    testing.assert_collectives(program, ["all_reduce over rows of w"])


def test_collectives_in_loops_and_inside_operations_count_once() -> None:
    with mtf.Graph():
        x, w = mtf.input("x", [BATCH, D("d", 4)]), mtf.variable("w", [D("d", 4), D("out", 4)])
        (y,) = mtf.while_loop(
            3, lambda v: mtf.rename_dimension(mtf.einsum([v, w], [BATCH, D("out", 4)]), "out", "d"), [x]
        )
        program = mtf.lower({"y": y, "sums": mtf.cumsum(x, D("d", 4))}, mesh="p:2", layout="d:p")
    entries = [(c.kind, c.axes, c.payload_bytes) for c in program.collectives]
    assert max(c.count for c in program.collectives) == 3
    testing.assert_collectives(program, entries)
    assert len(testing._values(program)) == len(entries)


def test_entries_that_are_no_collectives_are_refused(program: Program) -> None:
    for entry, message in (
        ("all_reduce of w1", "is not a tuple"),
        (("all_reduce",), "is not a tuple"),
        (7, "is not a tuple"),
        (("all_redcue", "rows"), "did you mean 'all_reduce'"),
        ("slice over rows", "'slice' is none of"),
        (("all_reduce", "row"), "no axis 'row' in mesh rows:2;cols:1; did you mean 'rows'"),
        (("all_reduce", ()), "no axis"),
        (("all_reduce", "rows", 4.5), "payload_bytes must be a number of bytes"),
        ("all_reduce over rows of w11", "the program has no tensor 'w11'; did you mean 'w1'"),
    ):
        with pytest.raises(mtf.GraphError, match=message):
            testing.assert_collectives(program, [entry])
    with pytest.raises(mtf.GraphError, match="must be a list"):
        testing.assert_collectives(program, "all_reduce over rows")
    with pytest.raises(mtf.GraphError, match=r"expected a program from mtf.lower"):
        testing.assert_collectives("program", [])


# ---------------------------------------------------------------- assert_layout_invariant


def test_layout_invariant_passes_and_returns_what_was_verified() -> None:
    with mtf.Graph():
        loss, train = network()
        found = testing.assert_layout_invariant({"loss": loss}, train, "p:2", 3, seed=4)
        assert len(found.rows) == 3
        assert found.seed == 4
        pairs = [("p:2", "batch:p"), ("q:4", "d_in:q")]
        assert [r.mesh for r in testing.assert_layout_invariant({"loss": loss}, layouts=pairs).rows] == ["p:2", "q:4"]


def test_layout_invariant_fails_with_the_first_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    record = OPERATIONS["tanh"]
    wrong = dataclasses.replace(record, local=lambda block, x: x * (2 if block.offsets.get("batch") else 1))
    with mtf.Graph():
        x = mtf.input("x", [BATCH])
        y = mtf.tanh(x, name="bent")
        object.__setattr__(y.operation, "opdef", wrong)
        testing.assert_layout_invariant({"y": y}, mesh="p:2", layouts=[""])
        with pytest.raises(AssertionError) as caught:
            testing.assert_layout_invariant({"y": y}, mesh="p:2", layouts=["", "batch:p"])
    text = str(caught.value)
    assert text.startswith("2 layouts against the unsharded program: 1 NOT equal\nmesh p:2   layout batch:p")
    assert "first to diverge: tanh 'bent' (test_testing.py:" in text
    assert "core 1 (p=1), at batch=" in text


# ---------------------------------------------------------------- assert_fits


def large(gib: float) -> Program:
    """One variable of `gib` GiB a core, and one small one. A v3 core has 16 GiB."""
    rows = D("rows_of_table", int(gib * 2**20))
    with mtf.Graph():
        table = mtf.variable("table", [rows, D("d", 2048)])
        small = mtf.variable("small", [D("d", 2048)])
        y = mtf.reduce_sum(table * small)
        return mtf.lower({"y": y}, mesh="p:8", layout="rows_of_table:p")


def test_what_fits_passes() -> None:
    testing.assert_fits(large(15), "v3-8")
    testing.assert_fits(large(15), Slice("v3-8"))


def test_what_does_not_fit_says_how_much_is_missing_and_what_is_large() -> None:
    program = large(17)
    with pytest.raises(AssertionError) as caught:
        testing.assert_fits(program, "v3-8")
    text = str(caught.value)
    need, room = mtf.estimate(program, "v3-8").memory.needed_bytes, Slice("v3-8").usable_hbm_bytes_per_device
    assert room == 16 * 2**30 - int(0.52 * 2**30)
    assert need > 17 * 2**30
    assert "does not fit v3-8" in text
    assert f"({need} bytes)" in text
    assert f"({room} bytes)" in text
    assert "largest live tensors" in text
    largest = text.splitlines()[3]
    assert largest.split()[:4] == ["17", "GiB", "variables", "table:"]
    assert "test_testing.py:" in largest
    assert text.endswith("mesh p:8   layout rows_of_table:p")


def test_fits_refuses_slices_that_make_no_sense(program: Program) -> None:
    with pytest.raises(mtf.SliceError, match="mesh rows:2;cols:1 has 2 positions, but slice v3-8 has 8 devices"):
        testing.assert_fits(program, "v3-8")
    with pytest.raises(mtf.SliceError):
        testing.assert_fits(program, "v99-8")
    with pytest.raises(mtf.GraphError, match="give a slice"):
        testing.assert_fits(program, None)


# ---------------------------------------------------------------- assert_sent_at_most


def test_sent_bytes_are_compared_exactly(program: Program) -> None:
    """2 x 1/2 x 256 for the gradient, 2 x 1/2 x 4 for the loss."""
    testing.assert_sent_at_most(program, 260)
    with pytest.raises(AssertionError) as caught:
        testing.assert_sent_at_most(program, 259)
    text = str(caught.value)
    assert "(260 bytes), more than 259 B (259 bytes) by 1 B; the largest of 2 collectives:" in text
    first = text.splitlines()[1]
    assert first.startswith("  256 B  all_reduce over rows of ")
    assert "(gradient of w1)" in first
    assert "because einsum" in text
    for wrong in (-1, True, "260", float("nan")):
        with pytest.raises(mtf.GraphError, match="bytes must be a number"):
            testing.assert_sent_at_most(program, wrong)


# ---------------------------------------------------------------- snapshots, counts, sizes as text


def test_a_snapshot_shows_what_changed(program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "net.txt"
    with pytest.raises(AssertionError, match="there is no snapshot"):
        testing.assert_snapshot(program, path)
    testing.assert_snapshot(program, path, update=True)
    testing.assert_snapshot(program, path)
    assert "backward all_reduce over rows: 1 x y/grad/einsum_1, sends 256 bytes\n" in path.read_text()
    with mtf.Graph():
        loss, train = network()
        other = mtf.lower({"loss": loss}, train, "rows:2;cols:1", "batch:rows;d_in:rows?")
    line = "net.txt: layout batch:rows -> batch:rows;d_in:rows?; "
    with pytest.raises(AssertionError, match=re.escape(line)):
        testing.assert_snapshot(other, path)
    with mtf.Graph():
        loss, train = network(mtf.Dimension("batch", 16))
        larger = mtf.lower({"loss": loss}, train, "rows:2;cols:1", "batch:rows")
    flops = 2 * 4 * 16 * 4  # of a row of cores: batch / 2, d_in, d_out; forward, and for the gradient of w1
    said = rf"dims batch:8 -> batch:16; computes {2 * flops:,} FLOPs.* -> {4 * flops:,} FLOPs.*; holds [\d,]+ bytes"
    with pytest.raises(AssertionError, match=f"net.txt: {said}"):
        testing.assert_snapshot(larger, path)
    with pytest.raises(AssertionError, match=r"-layout batch:rows\n  \+layout batch:rows;d_in:rows\?") as caught:
        testing.assert_snapshot(other, path)
    assert "+backward reduce_scatter over rows" in str(caught.value)
    monkeypatch.setenv("MESHLIB_UPDATE_SNAPSHOTS", "1")
    testing.assert_snapshot(other, path)
    monkeypatch.delenv("MESHLIB_UPDATE_SNAPSHOTS")
    testing.assert_snapshot(other, path)
    with pytest.raises(mtf.GraphError):
        testing.assert_snapshot(program, tmp_path / "nowhere" / "net.txt", update=True)


def test_collectives_may_be_counted_by_kind(program: Program) -> None:
    testing.assert_collectives(program, {"all_reduce": 2})
    testing.assert_collectives(program, {"all_reduce": 2, "all_gather": 0})
    with pytest.raises(AssertionError, match=r"found \{'all_reduce': 2\}[\s\S]*because"):
        testing.assert_collectives(program, {"all_reduce": 3})
    for bad in ({"all_reduced": 2}, {"all_reduce": -1}, {"all_reduce": "2"}):
        with pytest.raises(mtf.GraphError, match="must be a kind with a number"):
            testing.assert_collectives(program, bad)


def test_bytes_as_text(program: Program) -> None:
    testing.assert_sent_at_most(program, "1 KiB")
    with pytest.raises(AssertionError, match="more than 128 B"):
        testing.assert_sent_at_most(program, "0.125 KiB")
    for bad in ("1 KB", "KiB", "", "1 2 B", "-1 B", "nan B"):
        with pytest.raises(mtf.GraphError, match="such as '1 KiB'"):
            testing.assert_sent_at_most(program, bad)
