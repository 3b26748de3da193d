"""mtf.verify, tested by sabotage: sound programs pass, and of a broken one the broken operation is named."""

from __future__ import annotations

import dataclasses
import importlib
import re
from collections.abc import Iterator
from contextlib import contextmanager

import ml_dtypes
import numpy as np
import pytest

import meshlib as mtf
from layouts import Mesh
from meshlib.core.dtypes import BFLOAT16, E4M3, E5M2, FLOAT32, FLOAT64, DType
from meshlib.core.graph import Operation, Tensor
from meshlib.core.opdef import OPERATIONS, Linear, OpDef, Role
from meshlib.program.records import Program
from tests.effort import some

exact = importlib.import_module("meshlib.simulation.exact")
fast = importlib.import_module("meshlib.simulation.fast")
lowering = importlib.import_module("meshlib.lowering.one_layout")
verification = importlib.import_module("meshlib.verification")
feeds = importlib.import_module("meshlib.verification.candidates")
rounding = importlib.import_module("meshlib.verification.rounding")

BATCH, INNER, HIDDEN, CLASSES = (mtf.Dimension(*d) for d in (("batch", 8), ("inner", 6), ("hidden", 4), ("classes", 6)))
MESH = "r:2;c:2"
Net = tuple[dict[str, Tensor], list[Operation]]


def network(train: bool = False) -> Net:
    """Two layers with biases, a loss that feels every logit."""
    x, labels = mtf.input("x", [BATCH, INNER]), mtf.input("labels", [BATCH], "int32")
    w1, b1 = mtf.variable("w1", [INNER, HIDDEN]), mtf.variable("b1", [HIDDEN], 0.0)
    w2 = mtf.variable("w2", [HIDDEN, CLASSES])
    h = mtf.sigmoid(mtf.einsum([x, w1], output_shape=[BATCH, HIDDEN], name="first") + b1)
    logits = mtf.einsum([h, w2], output_shape=[BATCH, CLASSES], name="second")
    picked = mtf.one_hot(labels, CLASSES, name="picked")
    loss = mtf.reduce_sum(mtf.square(logits - picked), name="loss")
    return {"loss": loss}, mtf.optimize.MomentumOptimizer(0.05, 0.5).minimize(loss) if train else []


def looped() -> Net:
    """A recurrence, whose body contracts and sums."""
    x, w = mtf.input("x", [BATCH, HIDDEN]), mtf.variable("w", [HIDDEN, mtf.Dimension("out", 4)])

    def body(v: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        made = mtf.einsum([v, w], output_shape=[BATCH, mtf.Dimension("out", 4)], name="inside")
        v = mtf.rename_dimension(mtf.tanh(made), "out", "hidden")
        return v, total + mtf.reduce_sum(v, name="sum_inside")

    y, total = mtf.while_loop(3, body, [x, mtf.constant(0.0)])
    return {"y": y, "total": total}, []


@contextmanager
def sabotaged(name: str, **fields: object) -> Iterator[None]:
    """An operation with other fields in its record for a while."""
    record: OpDef = OPERATIONS[name]
    before = {k: getattr(record, k) for k in fields}
    try:
        for k, v in fields.items():
            object.__setattr__(record, k, v)
        yield
    finally:
        for k, v in before.items():
            object.__setattr__(record, k, v)


def without_offsets(name: str):
    """The operation's `local` as if every block were the first."""
    local = OPERATIONS[name].local

    def wrong(block, *arrays):
        return local(block._replace(offsets=dict.fromkeys(block.offsets, 0)), *arrays)

    return wrong


def with_roles(name: str, old: Role, new: Role):
    """The operation's roles with one mistaken for another."""
    roles = OPERATIONS[name].roles
    return lambda op: tuple(dataclasses.replace(f, role=new) if f.role is old else f for f in roles(op))


# ---------------------------------------------------------------- sound programs


SOUND = [(True, "exact"), (False, "fast"), (True, "fast"), (False, "exact")]


@pytest.mark.parametrize(("train", "executor"), some(SOUND, SOUND[:2]))
def test_a_sound_program_passes_under_every_layout(train: bool, executor: str) -> None:
    with mtf.Graph():
        outputs, updates = network(train)
        found = mtf.verify(outputs, updates, layouts=12, mesh=MESH, executor=executor)
    assert found.ok, str(found)
    assert len(found.rows) == 12
    assert not found.notes
    found.raise_for_failures()
    names = ("new w1", "new b1", "new w2/momentum") if train else ("d w1", "d b1", "d w2", "d x")
    assert {"loss", *names} <= set(found.compared)
    assert found.steps == (2 if train else 1)
    assert any(r.collectives for r in found.rows)
    assert any("+" in r.layout for r in found.rows)
    assert any("?" in r.layout for r in found.rows)
    assert all(r.error <= r.allowed < 1e-4 for r in found.rows)


def test_the_allowed_difference_is_near_rounding_and_far_from_faults() -> None:
    """float32: 1e-7 is what rounding makes of it, and what is allowed stays within a factor of 1,000 of that."""
    with mtf.Graph():
        outputs, _ = network()
        (row,) = mtf.verify(outputs, layouts=[(MESH, "hidden:r;inner:c")]).rows
    assert 0 < row.error < 1e-6
    assert row.allowed < 1e-4


@pytest.mark.parametrize(("dtype", "most"), [("float64", 1e-12), ("bfloat16", 0.5)])
def test_what_is_allowed_follows_the_dtype(dtype: str, most: float) -> None:
    with mtf.Graph():
        x = mtf.input("x", [BATCH, INNER], dtype)
        w = mtf.variable("w", [INNER, HIDDEN], dtype=dtype)
        y = mtf.einsum([x, w], output_shape=[BATCH, HIDDEN])
        found = mtf.verify({"y": y}, layouts="all", mesh="r:2")
    assert found.ok, str(found)
    assert all(0 < r.allowed < most for r in found.rows)


def test_cancellation_is_no_fault_but_what_is_behind_it_is_not_lost() -> None:
    """The sum of x - mean(x) is rounding alone; the tolerance must not be relative to it."""
    with mtf.Graph():
        x = mtf.input("x", [mtf.Dimension("n", 64)])
        rest = mtf.reduce_sum(x - mtf.reduce_mean(x))
        found = mtf.verify({"rest": rest, "scale": mtf.reduce_sum(x)}, layouts="all", mesh=MESH)
    assert found.ok, str(found)
    assert any("'rest' proves little" in n for n in found.notes)
    assert not any("'scale'" in n for n in found.notes)


def test_loops_and_random_numbers_pass() -> None:
    with mtf.Graph():
        outputs, _ = looped()
        outputs["noisy"] = mtf.dropout(outputs["y"], True, keep_prob=0.5)
        found = mtf.verify(outputs, layouts=8, mesh=MESH)
    assert found.ok, str(found)
    assert len(found.rows) == 8


def test_default_precision_is_compared_more_coarsely() -> None:
    with mtf.Graph():
        outputs, updates = network(True)
        pairs = [(MESH, "batch:r;hidden:c")]
        fine = mtf.verify(outputs, updates, layouts=pairs)
        coarse = mtf.verify(outputs, updates, layouts=pairs, precision="default")
    assert fine.ok
    assert coarse.ok
    assert coarse.rows[0].allowed > 10 * fine.rows[0].allowed


def test_the_graph_is_left_as_it_was() -> None:
    with mtf.Graph() as graph:
        outputs, _ = network()
        before = [*graph.operations], dict(graph.inputs), dict(graph.gradient_of), dict(graph._counts)
        mtf.verify(outputs, layouts=[(MESH, "batch:r")])
        assert before == (graph.operations, graph.inputs, graph.gradient_of, graph._counts)
        lowered = mtf.lower(outputs, mtf.optimize.SgdOptimizer(0.1).minimize(outputs["loss"]))
    assert set(lowered.inputs) == {"x", "labels"}


def test_a_constraint_that_names_axes_does_not_disturb_the_unsharded_program() -> None:
    with mtf.Graph():
        x = mtf.input("x", [BATCH, INNER])
        y = mtf.reduce_sum(mtf.constrain(mtf.tanh(x), "inner:c"))
        assert mtf.verify({"y": y}, layouts="all", mesh=MESH).ok


# ---------------------------------------------------------------- sabotage of operations


def first(found: object) -> list:
    assert not found.ok
    divergences = [r.divergence for r in found.failures]
    assert all(d is not None for d in divergences), str(found)
    return divergences


def test_a_lost_offset_is_traced_to_its_operation() -> None:
    with mtf.Graph(), sabotaged("one_hot", local=without_offsets("one_hot")):
        outputs, _ = network()
        found = mtf.verify(outputs, layouts=[(MESH, "classes:c"), (MESH, "batch:r")])
    good = [r.ok for r in found.rows]
    assert good == [False, True]  # without a split of classes there is no offset to lose
    (d,) = first(found)
    assert (d.op, d.kind, d.phase) == ("picked", "one_hot", "forward")
    assert re.fullmatch(r"test_verify.py:\d+", d.source)
    assert d.layout == "classes:c"
    assert d.mesh == MESH
    assert d.coordinate["c"] == 1  # the first block has no offset
    assert len(d.devices) == 1
    assert d.index["classes"] >= 3  # 6 classes in two blocks
    assert {d.found, d.wanted} == {0.0, 1.0}
    text = str(found)
    for part in ("1 NOT equal", "one_hot 'picked'", d.source, "classes@c", f"core {d.devices[0]} (r=0, c=1)"):
        assert part in text
    with pytest.raises(mtf.ProgramError, match="first to diverge: one_hot 'picked'"):
        found.raise_for_failures()


def test_the_core_and_index_are_the_ones_that_were_changed() -> None:
    """One element on one core: batch 5 lies in the second of two blocks, hidden 3 in the second of two."""
    local = OPERATIONS["sigmoid"].local

    def wrong(block, x):
        y = np.array(local(block, x))
        if (block.offsets.get("batch"), block.offsets.get("hidden")) == (4, 2):
            y[1, 1] += 0.5
        return y

    with mtf.Graph(), sabotaged("sigmoid", local=wrong):
        outputs, _ = network()
        found = mtf.verify(outputs, layouts=[(MESH, "batch:r;hidden:c")])
    (d,) = first(found)
    assert d.kind == "sigmoid"
    assert d.devices == (3,)
    assert d.coordinate == {"r": 1, "c": 1}
    assert d.index == {"batch": 5, "hidden": 3}
    assert d.found - d.wanted == pytest.approx(0.5)


def test_a_partial_sum_taken_for_whole_is_traced_to_the_contraction() -> None:
    with mtf.Graph(), sabotaged("einsum", roles=with_roles("einsum", Role.SUM, Role.PARALLEL)):
        outputs, _ = network()
        found = mtf.verify(outputs, layouts=[(MESH, "inner:c"), (MESH, "hidden:c"), (MESH, "classes:c")])
    assert [d.op for d in first(found)] == ["first", "second", "second/grad/einsum"]


def test_a_nonlinear_operation_that_claims_to_be_linear_is_named() -> None:
    """exp of parts is not the parts of exp; the sum behind it is less to reduce, so the parts go through."""
    with mtf.Graph():
        x = mtf.input("x", [BATCH, HIDDEN])
        w = mtf.variable("w", [HIDDEN, CLASSES])
        y = mtf.reduce_sum(mtf.exp(mtf.einsum([x, w], output_shape=[BATCH, CLASSES])), reduced_dim=CLASSES)
        kept = mtf.assign(mtf.variable("kept", [BATCH]), y)
        with sabotaged("exp", linear=lambda op: Linear((0,))):
            found = mtf.verify({}, [kept], layouts=[("c:2", "hidden:c")])
    (d,) = first(found)
    assert d.kind == "exp"
    assert d.devices == (0, 1)  # a pending sum: parts together
    assert "parts together" in str(d)


def test_a_fault_in_the_backward_is_named_there() -> None:
    """relu's gradient under a lost collective shows in the backward only: the forward is sound."""
    with mtf.Graph():
        outputs, _ = network()
        roles = OPERATIONS["einsum"].roles

        def wrong(op: Operation):
            found = roles(op)
            if op.region == "backward":
                found = tuple(dataclasses.replace(f, role=Role.PARALLEL) for f in found)
            return found

        with sabotaged("einsum", roles=wrong):
            found = mtf.verify(outputs, layouts=[(MESH, "batch:r")])
    (d,) = first(found)
    assert d.phase == "backward"
    assert d.op.startswith(("first/grad", "second/grad"))


def test_a_fault_in_the_update_is_named_there() -> None:
    with mtf.Graph():
        outputs, updates = network(True)
        local = OPERATIONS["subtract"].local

        def wrong(block, *arrays):
            y = local(block, *arrays)
            return y + 1 if block.operation.region == "update" and block.offsets.get("hidden") else y

        with sabotaged("subtract", local=wrong):
            found = mtf.verify(outputs, updates, layouts=[(MESH, "hidden:c"), (MESH, "batch:c")])
    assert [r.ok for r in found.rows] == [False, True]
    (d,) = first(found)
    assert (d.phase, d.kind) == ("update", "subtract")
    assert any("'new w" in text for text in found.failures[0].wrong)


def test_a_fault_in_the_body_of_a_loop_is_named_with_its_trip() -> None:
    """A sum that forgets the second block in the second trip only."""
    local = OPERATIONS["reduce_sum"].local

    def wrong(block, x):
        y = local(block, x)
        lost = block.engine.trips == (1,) and block.offsets.get("batch") and "inside" in block.operation.name
        return y * 0 if lost else y

    with mtf.Graph():
        outputs, _ = looped()
        with sabotaged("reduce_sum", local=wrong):
            found = mtf.verify(outputs, layouts=[("r:2", "batch:r")])
    (d,) = first(found)
    assert d.op.endswith("sum_inside")
    assert d.trip == 1
    assert ", trip 1" in str(d)


def test_a_loop_whose_contraction_is_broken_is_named_in_its_first_trip() -> None:
    with mtf.Graph():
        outputs, _ = looped()
        with sabotaged("einsum", roles=with_roles("einsum", Role.SUM, Role.PARALLEL)):
            found = mtf.verify(outputs, layouts=[("r:2", "hidden:r")])
    (d,) = first(found)
    assert d.op.endswith("inside")
    assert d.trip == 0


# ---------------------------------------------------------------- sabotage of collectives and passes


def test_a_ring_that_forgets_a_member_is_named_as_the_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    results = exact.group_results

    def without_half(kind: str, parts: list[np.ndarray], *rest: object) -> list[np.ndarray]:
        return 2 * results(kind, parts[: len(parts) // 2], *rest)

    monkeypatch.setattr(exact, "group_results", without_half)
    with mtf.Graph():
        outputs, _ = network()
        found = mtf.verify(outputs, layouts=[(MESH, "hidden:c")])
    (d,) = first(found)
    assert (d.kind, d.op) == ("all_reduce", "second")
    assert "all_reduce of einsum 'second'" in str(d)
    assert "over c" in str(d)


def test_a_pass_that_exchanges_operands_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the checker off, a pass that swaps the operands of a subtraction."""

    def swap(program: Program) -> Program:
        made = [
            dataclasses.replace(i, inputs=i.inputs[::-1]) if i.opcode == "subtract" and program.mesh.size > 1 else i
            for i in program.instructions
        ]
        return program.with_instructions(made)

    monkeypatch.setattr(lowering, "check_program", lambda program, *args, **kwargs: program)
    monkeypatch.setattr(lowering, "PASSES", (*lowering.PASSES, swap))
    with mtf.Graph():
        x, y = mtf.input("x", [BATCH]), mtf.input("y", [BATCH])
        found = mtf.verify({"d": mtf.tanh(mtf.subtract(x, y))}, layouts=[("r:2", "batch:r")])
    (d,) = first(found)
    assert d.kind == "subtract"


def test_a_pass_that_the_checker_refuses_is_a_failing_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def lose(program: Program) -> Program:
        kept = [i for i in program.instructions if i.opcode != "all_reduce"]
        return program.with_instructions(kept)

    monkeypatch.setattr(lowering, "PASSES", (lose, *lowering.PASSES))
    with mtf.Graph():
        outputs, _ = network()
        found = mtf.verify(outputs, layouts=[(MESH, "hidden:c"), (MESH, "")])
    assert [r.ok for r in found.rows] == [False, True]
    assert "after lose" in found.failures[0].fault


def test_cores_that_disagree_are_a_failing_row_with_a_first_operation() -> None:
    """tanh adds the core's batch offset to a value that the other axis replicates: cores differ bit by bit."""
    local = OPERATIONS["tanh"].local
    with mtf.Graph():
        y = mtf.tanh(mtf.input("x", [BATCH]))
        calls = []

        def wrong(block, x):
            calls.append(block)
            return local(block, x) + np.float32(0.25 * (len(calls) % 2))

        with sabotaged("tanh", local=wrong):
            found = mtf.verify({"y": y}, layouts=[("r:2", "")], rtol=1e-6)
    assert not found.ok
    assert "hold the same block" in found.failures[0].fault


def test_a_fault_of_the_fast_executor_alone_names_no_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    finished = fast.finished

    def wrong(op: Operation, *rest):
        results = finished(op, *rest)
        return tuple(y * 2 for y in results) if op.opdef.name == "tanh" else results

    monkeypatch.setattr(fast, "finished", wrong)
    with mtf.Graph():
        y = mtf.tanh(mtf.input("x", [BATCH]))
        found = mtf.verify({"y": y}, layouts=[("r:2", "batch:r")], executor="fast")
    (row,) = found.failures
    assert row.divergence is None
    assert "no operation diverges by itself in the exact executor" in str(row)


def test_equally_pending_terms_added_first_are_no_divergence() -> None:
    """q, k, v: partial sums of the n-ary sum carry its name, and are compared with the sum of their own terms."""
    with mtf.Graph():
        x, z = mtf.input("x", [BATCH, HIDDEN]), mtf.input("z", [BATCH, CLASSES])
        ws = [mtf.variable(f"w{n}", [HIDDEN, CLASSES]) for n in range(3)]
        parts = [mtf.einsum([x, w], output_shape=[BATCH, CLASSES]) for w in ws]
        y = mtf.square(mtf.add_n([*parts, z]))
        with sabotaged("square", local=lambda block, v: v * v * (1 if block.out.shape.size == 48 else 2)):
            found = mtf.verify({"y": y}, layouts=[(MESH, "hidden:c;batch:r")])
    (d,) = first(found)
    assert d.kind == "square"


# ---------------------------------------------------------------- inputs and state


def test_indices_are_drawn_below_the_dims_they_are_looked_up_in() -> None:
    """A table of 3 rows, through a reshape, a rename and a clip: 0, 1 and 2 all occur, nothing else."""
    table, words = mtf.Dimension("table", 3), mtf.Dimension("words", 40)
    with mtf.Graph():
        i, free = mtf.input("i", [words], "int32"), mtf.input("free", [words], "int32")
        looked = mtf.gather(mtf.variable("t", [table, HIDDEN]), mtf.rename_dimension(i, "words", "w"), table)
        program = mtf.lower([looked, mtf.cast(free, "float32")])
    fed = feeds.draw_feeds(program, program.inputs, {}, 0, 0)
    assert set(fed["i"]) == {0, 1, 2}
    assert set(fed["free"]) == set(range(8))


def test_indices_that_the_program_shifts_are_drawn_again_from_less() -> None:
    """i + 2 must stay below 4."""
    with mtf.Graph():
        i = mtf.input("i", [BATCH], "int32")
        found = mtf.verify({"y": mtf.one_hot(i + 2, mtf.Dimension("table", 4))}, layouts="all", mesh="r:2")
    assert found.ok, str(found)


def test_given_inputs_are_used_and_checked() -> None:
    with mtf.Graph():
        y = mtf.sqrt(mtf.input("x", [BATCH]))
        good = mtf.verify({"y": y}, (), {"x": np.arange(1.0, 9.0)}, [("r:2", "batch:r")])
        assert good.ok
        assert not good.notes
        drawn = mtf.verify({"y": y}, layouts=[("r:2", "batch:r")])
        assert any("'y' is not finite" in n for n in drawn.notes)
        with pytest.raises(mtf.FeedError, match=r"unknown input 'xx'; did you mean 'x'\?"):
            mtf.verify({"y": y}, (), {"xx": np.ones(8)}, [("r:2", "")])
        with pytest.raises(mtf.FeedError, match=r"expected shape \[8\]"):
            mtf.verify({"y": y}, (), {"x": np.ones(7)}, [("r:2", "")])
        index = mtf.one_hot(mtf.input("i", [BATCH], "int32"), CLASSES)
        with pytest.raises(mtf.FeedError, match="index 9 is out of range"):
            mtf.verify({"y": index}, (), {"i": np.full(8, 9)}, [("r:2", "")])


def test_zero_variables_get_noise_and_given_ones_stay() -> None:
    with mtf.Graph():
        b = mtf.variable("b", [HIDDEN], 0.0)
        y = mtf.input("x", [BATCH, HIDDEN]) * b
        assert not mtf.verify({"y": y}, layouts=[("r:2", "")]).notes
        zero = mtf.verify({"y": y}, layouts=[("r:2", "")], state={"b": np.zeros(4)})
    assert any("'y' is zero everywhere" in n for n in zero.notes)


def test_a_layout_that_is_good_for_all_but_the_gradients_is_compared_without_them() -> None:
    """Rules for slots hold for gradients: there 'hidden' wants the axis that 'inner' has."""
    with mtf.Graph():
        x, w = mtf.input("x", [BATCH, INNER]), mtf.variable("w", [INNER, HIDDEN])
        y = mtf.einsum([x, w], output_shape=[BATCH, HIDDEN])
        found = mtf.verify({"y": y}, layouts=[("c:2", "inner:c;slots/hidden:c"), ("c:2", "inner:c")])
    assert [r.ok for r in found.rows] == [True, True]
    (note,) = found.notes
    assert note.startswith("gradients are not compared under inner:c;slots/hidden:c: ")
    assert "d w" in found.compared


def test_what_has_no_gradient_is_a_note() -> None:
    with mtf.Graph():
        x = mtf.input("x", [BATCH])
        found = mtf.verify({"y": mtf.sign(x)}, layouts=[("r:2", "batch:r")])
    assert found.ok
    assert found.compared == ("y",)


def test_rtol_replaces_the_derived_difference() -> None:
    with mtf.Graph():
        outputs, _ = network()
        pairs = [(MESH, "batch:r;inner:c")]
        assert not mtf.verify(outputs, layouts=pairs, rtol=0.0).ok
        loose = mtf.verify(outputs, layouts=pairs, rtol=0.01)
    assert loose.ok
    assert loose.rows[0].allowed == pytest.approx(0.01)


# ---------------------------------------------------------------- layouts


def legal(mesh: str, number: int | None = None, seed: int = 0) -> list[str]:
    with mtf.Graph() as graph:
        network()
        return [str(x) for x in verification.legal_layouts(graph.operations, Mesh(mesh), number, seed)]


def test_all_layouts_are_legal_and_different_and_hold_every_kind() -> None:
    found = legal(MESH)
    assert len(found) == len(set(found)) > 90
    # Axes of one size: of two layouts that only exchange them, one is kept.
    for one, other in (("batch:r", "batch:c"), ("batch:r+c", "batch:c+r"), ("batch:r;hidden:r?", "batch:c;hidden:c?")):
        assert (one in found) != (other in found)
    assert {"", "batch:r", "batch:r;hidden:c", "batch:r+c", "batch:c+r", "batch:r;hidden:r?"} <= set(legal("r:2;c:4"))
    assert not any(re.search(r"(inner|classes):r\+c(;|$)", x) for x in found)  # 6 does not divide by 4
    with mtf.Graph():
        outputs, updates = network()
        for text in found:
            assert mtf.check(outputs, updates, MESH, text).ok


def test_illegal_layouts_are_not_drawn() -> None:
    assert set(legal("r:3")) == {"", "inner:r", "classes:r", "inner:r;classes:r?"}  # these two never meet
    assert legal("r:5") == [""]
    assert legal("r:1;c:1") == [""]


def test_a_number_of_layouts_is_drawn_from_all_by_the_seed() -> None:
    some, others = legal(MESH, 10, seed=1), legal(MESH, 10, seed=2)
    assert len(set(some)) == len(set(others)) == 10
    assert some != others
    assert some == legal(MESH, 10, seed=1)
    assert set(some) <= set(legal(MESH))
    assert len(legal("r:3", 100)) == 4
    many = legal("a:2;b:2;c:2;d:2;e:2", 5)  # too many to look through all
    assert len(set(many)) == 5
    with pytest.raises(mtf.GraphError, match="give a number of them to draw"):
        legal("a:2;b:2;c:2;d:2;e:2")


def test_wrong_arguments_are_named() -> None:
    with mtf.Graph():
        y = mtf.tanh(mtf.input("x", [BATCH]))
        for arguments, message in (
            ({}, "got layouts=24 and no mesh"),
            ({"layouts": 3}, "give layouts=\\[\\(mesh, layout\\)"),
            ({"layouts": ["batch:r"]}, "'batch:r' is not a pair"),
            ({"layouts": [], "mesh": "r:2"}, "the list of layouts is empty"),
            ({"layouts": 0, "mesh": "r:2"}, "'all', a number of at least 1, or a list, got 0"),
            ({"mesh": "r:2", "precision": "low"}, "precision must be"),
            ({"mesh": "r:2", "executor": "slow"}, "executor must be"),
            ({"mesh": "r:2", "steps": 0}, "steps must be at least 1"),
            ({"mesh": "r:2", "rtol": -1}, "rtol must not be negative, got -1"),
            ({"mesh": "r:2", "inputs": [1]}, "inputs must be a dict"),
        ):
            with pytest.raises(mtf.MeshlibError, match=message):
                mtf.verify({"y": y}, **arguments)
        with pytest.raises(mtf.LayoutError, match="8 % 3 = 2"):
            mtf.verify({"y": y}, layouts=[("r:3", "batch:r")])


def test_the_table_has_a_line_per_layout() -> None:
    with mtf.Graph():
        outputs, _ = network()
        found = mtf.verify(outputs, mesh=MESH, layouts=["batch:r", "hidden:c"])
    head, *lines = found.table().splitlines()
    assert head.split() == ["mesh", "layout", "collectives", "sent", "a", "core", "largest", "error", "allowed", "in"]
    assert [line.split()[:3] for line in lines] == [["ok", MESH, "batch:r"], ["ok", MESH, "hidden:c"]]
    assert str(found).startswith("2 layouts against the unsharded program: all equal up to rounding")


@pytest.mark.parametrize("dtype", [FLOAT64, FLOAT32, BFLOAT16, E4M3, E5M2], ids=str)
def test_rounding_changes_a_value_by_half_of_its_types_step(dtype: DType) -> None:
    assert rounding._unit(dtype) == float(ml_dtypes.finfo(dtype.public).eps) / 2


def test_overflow_is_a_value_and_a_note() -> None:
    with mtf.Graph():
        y = mtf.reduce_sum(mtf.square(mtf.input("x", [BATCH])), name="y")
    report = mtf.verify(y, layouts=[("r:2", "batch:r")], inputs={"x": np.full(8, 7e18, np.float32)})
    assert report.ok
    assert "'y' is not finite" in str(report)
