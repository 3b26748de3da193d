"""Sabotage of lowered programs: whatever is dropped, exchanged or shifted must be noticed, by the checker and without.

Two proofs for each fault. With the checker on, `check_program` refuses the program. With the checker off, the exact
executor runs it: cores that should agree do not, or a block has another shape, or the numbers are not those of the
unsharded program. The programs have no zeros and no invariances to hide behind.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest

import meshlib as mtf
from layouts import Mesh, Sharding
from meshlib.core.opdef import OPERATIONS, Linear, OpDef, Role
from meshlib.lowering import passes
from meshlib.program.checker import check_program
from meshlib.program.instructions import Commit, Instruction, Move, Value
from meshlib.program.records import Program

exact = importlib.import_module("meshlib.simulation.exact")
lowering = importlib.import_module("meshlib.lowering.one_layout")

BATCH, INNER, HIDDEN, CLASSES = (mtf.Dimension(*d) for d in (("batch", 8), ("inner", 4), ("hidden", 8), ("classes", 6)))
A, B = mtf.Dimension("a", 8), mtf.Dimension("b", 8)
STEPS = 2  # the slots of the optimizer are zero in the first one

Numbers = dict[str, np.ndarray]
Sabotage = Callable[[Program], Iterator[Program]]


# ---------------------------------------------------------------- the programs


def training() -> tuple[dict[str, mtf.Tensor], list[mtf.Operation]]:
    """Two layers, a loss that feels every logit, momentum."""
    x, labels = mtf.input("x", [BATCH, INNER]), mtf.input("labels", [BATCH], "int32")
    w1, b1 = mtf.variable("w1", [INNER, HIDDEN]), mtf.variable("b1", [HIDDEN], 0.1)
    w2 = mtf.variable("w2", [HIDDEN, CLASSES])
    h = mtf.sigmoid(mtf.einsum([x, w1], output_shape=[BATCH, HIDDEN], name="first") + b1)
    logits = mtf.einsum([h, w2], output_shape=[BATCH, CLASSES], name="second")
    loss = mtf.reduce_sum(mtf.square(logits - mtf.one_hot(labels, CLASSES, 2.0, 0.5)), name="loss")
    return {"loss": loss, "logits": logits}, mtf.optimize.MomentumOptimizer(0.05, 0.5).minimize(loss)


def moving() -> tuple[dict[str, mtf.Tensor], list[mtf.Operation]]:
    """One value pinned to layouts that only exchanges, permutes and gathers lead between."""
    x, w = mtf.input("x", [A, B]), mtf.variable("w", [A, B])
    rows = mtf.constrain(mtf.sin(x), "a:r")
    turned = mtf.constrain(rows, "b:r", name="turned")
    crossed = mtf.constrain(mtf.cos(rows), "a:c", name="crossed")
    whole = mtf.constrain(mtf.sigmoid(w), "", name="whole")
    ordered = mtf.constrain(mtf.tanh(x), "a:c+r", name="ordered")
    outputs = {"turned": turned * 2, "crossed": crossed * 3, "whole": whole * 5, "ordered": ordered * 7}
    return outputs, [mtf.assign(w, turned + w)]


def beside() -> tuple[dict[str, mtf.Tensor], list[mtf.Operation]]:
    """A whole value added to partial sums, of which only a total is wanted: one core counts it."""
    x, w, c = mtf.input("x", [BATCH, INNER]), mtf.input("w", [INNER, HIDDEN]), mtf.input("c", [BATCH, HIDDEN])
    return {"total": mtf.reduce_sum(mtf.einsum([x, w], output_shape=[BATCH, HIDDEN]) + c)}, []


CASES = {
    "two axes": (training, "r:2;c:2", "batch:r;hidden:c"),
    "classes": (training, "r:2;c:2", "batch:r;classes:c"),
    "fully sharded": (training, "r:4", "batch:r;variables/inner:r?;variables/hidden:r?"),
    "joint axes": (training, "r:2;c:2", "batch:r+c;variables/hidden:r+c"),
    "slots": (training, "r:2", "batch:r;slots/hidden:r"),
    "moving": (moving, "r:2;c:2", "a:r+c"),
    "beside": (beside, "r:2;c:2", "inner:r"),
}


def lowered(case: str, mesh: str = "", layout: str = "") -> Program:
    build, own_mesh, own_layout = CASES[case]
    with mtf.Graph():
        outputs, updates = build()
        return mtf.lower(outputs, updates, mesh or own_mesh, own_layout if not mesh else layout, precision="highest")


@cache
def sound(case: str) -> Program:
    return lowered(case)


def numbers(program: Program) -> Numbers:
    """Outputs and state of a few steps in the exact executor."""
    rng = np.random.default_rng(7)
    sim = mtf.simulate(program, seed=3, executor="exact", check_nan=False)
    found: Numbers = {}
    for n in range(STEPS):
        feeds = {
            name: rng.integers(0, 6, v.tensor.shape.sizes) if v.tensor.dtype.name == "int32"
            else rng.normal(size=v.tensor.shape.sizes)
            for name, v in program.inputs.items()
        }  # fmt: skip
        found |= {f"{name} at {n}": y for name, y in sim.step(feeds).items()}
    return found | {name: sim.state[name] for name in program.variables}


@cache
def right(case: str) -> Numbers:
    """The numbers of the unsharded program, which has no collectives to sabotage."""
    build = CASES[case][0]
    # The constraints of `moving` name axes.
    program = lowered(case, "r:1;c:1" if build is moving else "one:1", "")
    assert not program.collectives
    return numbers(program)


def equal(got: Numbers, wanted: Numbers) -> bool:
    assert got.keys() == wanted.keys()
    return all(np.allclose(got[n], wanted[n], rtol=1e-3, atol=1e-4) for n in wanted)


def assert_noticed_when_run(program: Program, case: str) -> None:
    try:
        got = numbers(program)
    except (mtf.ProgramError, ValueError):  # cores disagree, or blocks do not fit each other
        return
    assert not equal(got, right(case)), f"the fault shows nowhere:\n{program}"


def assert_refused(program: Program) -> None:
    with pytest.raises(mtf.ProgramError, match="after sabotage"):
        check_program(program, "sabotage")


@pytest.mark.parametrize("case", CASES)
def test_without_sabotage_nothing_is_noticed(case):
    assert check_program(sound(case), "nothing") is sound(case)
    assert equal(numbers(sound(case)), right(case))


def test_the_programs_hold_every_kind_of_move():
    kinds = {i.opcode for case in CASES for i in sound(case).instructions if isinstance(i, Move)}
    assert kinds == {"all_gather", "reduce_scatter", "all_reduce", "all_to_all", "collective_permute", "slice", "mask"}


# ---------------------------------------------------------------- changing a program


def changed(program: Program, old: Instruction, *new: Instruction) -> Program:
    """`program` with `new` in place of `old`."""
    at = program.instructions.index(old)
    return program.with_instructions([*program.instructions[:at], *new, *program.instructions[at + 1 :]])


def renamed(program: Program, values: dict[Value, Value]) -> Program:
    """`program` with other values in all places."""

    def of(found: tuple[Value, ...]) -> tuple[Value, ...]:
        return tuple(values.get(v, v) for v in found)

    def named(table):
        return {name: values.get(v, v) for name, v in table.items()}

    return replace(
        program,
        instructions=tuple(replace(i, inputs=of(i.inputs), outputs=of(i.outputs)) for i in program.instructions),
        inputs=named(program.inputs),
        variables=named(program.variables),
        outputs=named(program.outputs),
        updates=named(program.updates),
    )


def moves(program: Program, *kinds: str) -> Iterator[tuple[Instruction, int]]:
    """Every reshard step of the given kinds: its instruction and its place in it."""
    for i in program.instructions:
        if isinstance(i, Move) and i.opcode in kinds:
            yield from ((i, n) for n in range(len(i.steps)))


def computations(program: Program, *names: str) -> Iterator[Instruction]:
    for i in program.instructions:
        if not isinstance(i, Move | Commit) and i.inputs and (not names or i.opcode in names):
            yield i


def without(items: tuple, n: int) -> tuple:
    return items[:n] + items[n + 1 :]


def with_step(program: Program, i: Instruction, n: int, **fields) -> Program:
    """`program` with fields of one step replaced."""
    step = replace(i.steps[n], **fields)
    return changed(program, i, replace(i, steps=(*i.steps[:n], step, *i.steps[n + 1 :])))


# ---------------------------------------------------------------- sabotages


def a_collective_dropped(program: Program) -> Iterator[Program]:
    """Its users take the operand as it was."""
    for i, n in moves(program, "all_reduce", "reduce_scatter", "all_gather", "all_to_all", "collective_permute"):
        rest = [without(part, n) for part in (i.inputs, i.outputs, i.steps, i.reasons)]
        kept = [replace(i, inputs=rest[0], outputs=rest[1], steps=rest[2], reasons=rest[3])] if rest[0] else []
        yield renamed(changed(program, i, *kept), {i.outputs[n]: i.inputs[n]})


def a_mask_dropped(program: Program) -> Iterator[Program]:
    """Every core adds a whole value to its part of a sum."""
    for i, n in moves(program, "mask"):
        x, y = i.inputs[n], i.outputs[n]
        rest = [without(part, n) for part in (i.inputs, i.outputs, i.steps, i.reasons)]
        kept = [replace(i, inputs=rest[0], outputs=rest[1], steps=rest[2], reasons=rest[3])] if rest[0] else []
        yield renamed(changed(program, i, *kept), {y: x})


def a_mask_over_the_wrong_axis(program: Program) -> Iterator[Program]:
    """All cores along the axis of the sum keep the value, or none of them."""
    for i, n in moves(program, "mask"):
        yield with_step(program, i, n, axes=tuple(a for a in program.mesh.axes if a not in i.steps[n].axes))


def a_reduction_of_another_kind(program: Program) -> Iterator[Program]:
    """The maximum where the sum is wanted."""
    for i, n in moves(program, "all_reduce", "reduce_scatter"):
        before = i.steps[n].before
        other = before.with_pending((axis, "max") for axis in before.pending_axes)
        yield with_step(program, i, n, before=other)


def an_all_reduce_that_only_permutes(program: Program) -> Iterator[Program]:
    """Another kind of collective, on blocks of the same shape."""
    for i, n in moves(program, "all_reduce"):
        if len(i.steps) == 1:
            yield with_step(program, i, n, kind="collective_permute")


def an_all_to_all_that_only_gathers(program: Program) -> Iterator[Program]:
    for i, n in moves(program, "all_to_all"):
        yield with_step(program, i, n, kind="all_gather")


def a_collective_over_the_wrong_axis(program: Program) -> Iterator[Program]:
    """The sum is taken over replicas, and the parts stay apart."""
    for i, n in moves(program, "all_reduce", "reduce_scatter", "all_gather", "all_to_all"):
        step = i.steps[n]
        others = tuple(a for a in program.mesh.axes if a not in step.axes)
        if others:
            kind = dict(step.before.pending).get(step.axes[0])
            fields = {"axes": others[:1]}
            if kind and len(step.axes) == 1:
                fields["before"] = Sharding(
                    step.before.shape, program.mesh, [()] * len(step.before.shape), {others[0]: kind}
                )
            yield with_step(program, i, n, **fields)


def a_slice_instead_of_a_reduce_scatter(program: Program) -> Iterator[Program]:
    """Every core keeps its part of its own terms."""
    for i, n in moves(program, "reduce_scatter"):
        yield with_step(program, i, n, kind="slice")


def two_axes_swapped_in_a_dims_order(program: Program) -> Iterator[Program]:
    """Blocks are put together, or cut, in another order."""
    for i, n in moves(program, "all_gather", "reduce_scatter", "slice"):
        if len(i.steps[n].axes) > 1:
            yield with_step(program, i, n, axes=i.steps[n].axes[::-1])


def two_axes_swapped_in_a_value(program: Program) -> Iterator[Program]:
    """A resident value is cut in another order than its users think."""
    for table in (program.inputs, program.variables):
        for v in table.values():
            if any(len(axes) > 1 for axes in v.sharding.axes):
                other = Value(v.tensor, v.sharding.with_axes([axes[::-1] for axes in v.sharding.axes]))
                yield renamed(program, {v: other})


def an_axis_assigned_to_another_factor(program: Program) -> Iterator[Program]:
    """one_hot then counts the classes from a wrong offset."""
    for i in computations(program, "one_hot"):
        split = dict(i.assignment)
        if "classes" in split.values():
            yield changed(program, i, replace(i, assignment=tuple((a, "batch") for a in split)))


def an_assignment_in_another_order(program: Program) -> Iterator[Program]:
    """The factor's axes exchanged, and the result's sharding with them."""
    for i in computations(program, "constrain"):
        if len(i.assignment) > 1 and len({f for _, f in i.assignment}) == 1:
            (y,) = i.outputs
            other = Value(y.tensor, y.sharding.with_axes([axes[::-1] for axes in y.sharding.axes]))
            lie = renamed(program, {y: other})
            at = program.instructions.index(i)
            mine = lie.instructions[at]
            # Whoever moves it next believes the lie.
            steps = {
                u: replace(u, steps=tuple(replace(s, before=other.sharding) if x is other else s
                                          for x, s in zip(u.inputs, u.steps, strict=True)))
                for u in lie.instructions if isinstance(u, Move) and other in u.inputs
            }  # fmt: skip
            if steps and all(u.opcode == "collective_permute" for u in steps):
                mine = replace(mine, assignment=i.assignment[::-1])
                yield lie.with_instructions(
                    [mine if n == at else steps.get(u, u) for n, u in enumerate(lie.instructions)]
                )


def pending_forgotten(program: Program) -> Iterator[Program]:
    """The maker of a partial sum calls it whole, and nobody reduces it."""
    for i, n in moves(program, "all_reduce"):
        x, y = i.inputs[n], i.outputs[n]
        rest = [without(part, n) for part in (i.inputs, i.outputs, i.steps, i.reasons)]
        kept = [replace(i, inputs=rest[0], outputs=rest[1], steps=rest[2], reasons=rest[3])] if rest[0] else []
        whole = Value(x.tensor, x.sharding.drop_pending())
        yield renamed(changed(program, i, *kept), {x: whole, y: whole})


def an_all_to_all_of_the_wrong_dims(program: Program) -> Iterator[Program]:
    for i, n in moves(program, "all_to_all"):
        step = i.steps[n]
        yield with_step(program, i, n, dim=step.to_dim, to_dim=step.dim)


def an_operand_from_before_its_reshard(program: Program) -> Iterator[Program]:
    """One of the users alone goes round the collective."""
    for i, n in moves(program, "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "collective_permute"):
        for user in computations(program):
            if i.outputs[n] in user.inputs:
                taken = tuple(i.inputs[n] if x is i.outputs[n] else x for x in user.inputs)
                yield changed(program, user, replace(user, inputs=taken))


def an_update_dropped(program: Program) -> Iterator[Program]:
    """The variable keeps its old value, though the program says it is written."""
    for i in program.instructions:
        if isinstance(i, Commit):
            name = i.variable
            smaller = changed(program, i)
            yield replace(smaller, updates={n: v for n, v in program.updates.items() if n != name} | {})


def an_update_of_the_wrong_value(program: Program) -> Iterator[Program]:
    """Written back is what was there before."""
    for name, v in program.updates.items():
        if name in program.variables and v.sharding == program.variables[name].sharding:
            yield replace(program, updates={**program.updates, name: program.variables[name]})


def an_output_from_before_its_reshard(program: Program) -> Iterator[Program]:
    for i, n in moves(program, "all_reduce"):
        for name, v in program.outputs.items():
            if v is i.outputs[n]:
                yield replace(program, outputs={**program.outputs, name: i.inputs[n]})


SABOTAGES: dict[Sabotage, tuple[str, ...]] = {
    a_collective_dropped: tuple(CASES),
    a_mask_dropped: ("beside",),
    a_mask_over_the_wrong_axis: ("beside",),
    a_reduction_of_another_kind: ("two axes", "classes", "fully sharded", "joint axes", "slots"),
    an_all_reduce_that_only_permutes: ("two axes", "classes", "fully sharded"),
    an_all_to_all_that_only_gathers: ("moving",),
    a_collective_over_the_wrong_axis: ("two axes", "classes", "moving"),
    a_slice_instead_of_a_reduce_scatter: ("fully sharded", "joint axes", "slots"),
    two_axes_swapped_in_a_dims_order: ("joint axes", "moving"),
    two_axes_swapped_in_a_value: ("joint axes", "moving"),
    an_axis_assigned_to_another_factor: ("classes",),
    an_assignment_in_another_order: ("moving",),
    pending_forgotten: ("two axes", "classes", "fully sharded"),
    an_all_to_all_of_the_wrong_dims: ("moving",),
    an_operand_from_before_its_reshard: tuple(c for c in CASES if c != "beside"),  # its total is fetched alone
    an_update_of_the_wrong_value: ("two axes", "fully sharded", "moving"),
    an_output_from_before_its_reshard: ("two axes", "classes"),
}


@pytest.mark.parametrize(
    ("sabotage", "case"),
    [(s, case) for s, cases in SABOTAGES.items() for case in cases],
    ids=lambda x: x if isinstance(x, str) else x.__name__,
)
def test_sabotage_is_noticed(sabotage, case):
    variants = list(sabotage(sound(case)))
    assert variants, "nothing to sabotage here"
    for program in variants:
        assert_refused(program)
        assert_noticed_when_run(program, case)


def test_the_program_itself_stays_sound():
    for case in CASES:
        for sabotage, cases in SABOTAGES.items():
            if case in cases:
                list(sabotage(sound(case)))
        check_program(sound(case), "looking on")


# ---------------------------------------------------------------- passes that spoil a program


def test_a_pass_that_drops_an_update(monkeypatch):
    def drop_the_last_update(program: Program) -> Program:
        *_, spoiled = an_update_dropped(program)
        return spoiled

    with pytest.raises(mtf.ProgramError, match=r"after drop_the_last_update: updates changed: w2"):
        check_program(drop_the_last_update(sound("two axes")), "drop_the_last_update", before=sound("two axes"))
    monkeypatch.setattr(lowering, "PASSES", (passes.remove_dead_code, drop_the_last_update))
    with pytest.raises(mtf.ProgramError, match=r"after drop_the_last_update: updates changed"):
        lowered("two axes")
    monkeypatch.setattr(lowering, "check_program", lambda program, *args, **options: program)
    assert_noticed_when_run(lowered("two axes"), "two axes")


def test_a_pass_that_forgets_the_write_alone(monkeypatch):
    for i in sound("two axes").instructions:
        if isinstance(i, Commit):
            with pytest.raises(mtf.ProgramError, match="are written"):
                check_program(changed(sound("two axes"), i), "sabotage")


def test_a_pass_that_moves_a_use_before_its_definition():
    program = sound("two axes")
    made = {y: n for n, i in enumerate(program.instructions) for y in i.outputs}
    tried = 0
    for n, i in enumerate(program.instructions):
        if isinstance(i, Move) or i.opcode in ("add", "sigmoid"):
            first = min(made[x] for x in i.inputs)
            order = [u for u in program.instructions if u is not i]
            order.insert(first, i)
            assert first < n
            spoiled = program.with_instructions(order)
            with pytest.raises(mtf.ProgramError, match="used before it is computed"):
                check_program(spoiled, "sabotage")
            with pytest.raises(KeyError):
                numbers(spoiled)
            tried += 1
    assert tried > 3


def test_a_value_made_twice():
    program = sound("two axes")
    for i in computations(program, "sigmoid"):
        with pytest.raises(mtf.ProgramError, match="computed twice"):
            check_program(changed(program, i, i, i), "sabotage")


@pytest.mark.parametrize("case", CASES)
def test_wrong_bytes_claimed(case):
    """Numbers don't feel them; the checker recomputes them, and the program's own figures move."""
    program = sound(case)
    for i, n in moves(program, "all_reduce", "reduce_scatter", "all_gather", "all_to_all", "collective_permute"):
        step = i.steps[n]
        for fields in (
            {"sent_bytes": step.sent_bytes + 4},
            {"sent_bytes": step.sent_bytes / 2},
            {"payload_bytes": step.payload_bytes + 4},
            {"sent_bytes": 0},
        ):
            spoiled = with_step(program, i, n, **fields)
            with pytest.raises(mtf.ProgramError, match=r"claims .* a ring sends"):
                check_program(spoiled, "sabotage")
            assert [(c.payload_bytes, c.sent_bytes) for c in spoiled.collectives] != [
                (c.payload_bytes, c.sent_bytes) for c in program.collectives
            ]


# ---------------------------------------------------------------- a machine or a table that is wrong


def indexed() -> tuple[dict[str, mtf.Tensor], list[mtf.Operation]]:
    """What asks for the global position of its block: each shows in an output, or in the update, of its own."""
    vocab = mtf.Dimension("vocab", 24)
    labels, table = mtf.input("labels", [BATCH], "int32"), mtf.variable("table", [vocab, HIDDEN])
    found = mtf.gather(table, labels * 4, vocab)
    outputs = {
        "gather": found,
        "one_hot": mtf.one_hot(labels * 4, vocab, 2.0, 0.5),
        "range": mtf.range(HIDDEN),
        "random": mtf.random_normal([vocab, HIDDEN]),
        "dropout": mtf.dropout(found + 3, True, keep_prob=0.5),
    }
    return outputs, mtf.optimize.SgdOptimizer(0.1).minimize(mtf.reduce_sum(mtf.square(found + 1)))


@pytest.mark.parametrize("shift", [1, -1])
def test_a_shifted_block_offset(shift, monkeypatch):
    """The program is sound, so only the numbers can tell: every offset but 0 comes out one element beside."""

    def run() -> Numbers:
        with mtf.Graph():
            outputs, updates = indexed()
            return numbers(mtf.lower(outputs, updates, "r:2;c:2", "vocab:r;hidden:c", precision="highest"))

    wanted = run()
    real = exact.compute

    def shifted(op, inputs, out, arrays, offsets, *rest):
        wrong = {name: offset and offset + shift for name, offset in offsets.items()}
        return real(op, inputs, out, arrays, wrong, *rest)

    monkeypatch.setattr(exact, "compute", shifted)
    got = run()
    assert not [n for n in wanted if np.allclose(got[n], wanted[n], rtol=1e-3) and n != "step"]


@dataclass(frozen=True)
class Fault:
    """A wrong function in place of a right one."""

    target: object
    name: str
    make: Callable
    cases: tuple[str, ...]


MACHINE_FAULTS = {
    "members of a gather reversed": Fault(
        exact,
        "_exchange",
        lambda real: lambda step, parts, *rest: real(step, parts[::-1] if step.kind == "all_gather" else parts, *rest),
        ("fully sharded", "joint axes", "slots", "moving"),
    ),
    "members of an all_to_all reversed": Fault(
        exact,
        "_exchange",
        lambda real: lambda step, parts, *rest: real(step, parts[::-1] if step.kind == "all_to_all" else parts, *rest),
        ("moving",),
    ),
    "parts of a reduce_scatter handed out in reversed order": Fault(
        exact,
        "group_results",
        lambda real: lambda kind, *args: real(kind, *args)[:: -1 if kind == "reduce_scatter" else 1],
        ("fully sharded", "joint axes", "slots"),
    ),
    "a member left out of a ring": Fault(
        exact,
        "group_results",
        lambda real: (
            lambda kind, parts, *rest: (
                real(kind, parts, *rest) if kind != "all_reduce" else [real(kind, parts[:-1], *rest)[0]] * len(parts)
            )
        ),
        ("two axes", "classes", "fully sharded"),
    ),
    "groups of the other axis": Fault(
        Mesh,
        "groups",
        lambda real: lambda self, axes: real(self, [a for a in self.axes if a not in axes] or axes),
        ("two axes", "classes", "moving"),
    ),
    "a permute the wrong way": Fault(
        exact,
        "permute_pairs",
        lambda real: lambda before, after: tuple((d, (s + 1) % 4) for s, d in real(before, after)),
        ("moving",),
    ),
}


@pytest.mark.parametrize(
    ("fault", "case"), [(name, case) for name, fault in MACHINE_FAULTS.items() for case in fault.cases]
)
def test_a_wrong_machine_is_noticed(fault, case, monkeypatch):
    """The checker can't know; the numbers do."""
    wrong = MACHINE_FAULTS[fault]
    program, _ = sound(case), right(case)
    monkeypatch.setattr(wrong.target, wrong.name, wrong.make(getattr(wrong.target, wrong.name)))
    assert_noticed_when_run(program, case)


@contextmanager
def defined(name: str, **fields) -> Iterator[None]:
    """Fields of an operation's record exchanged for a while."""
    kind: OpDef = OPERATIONS[name]
    before = {field: getattr(kind, field) for field in fields}
    try:
        for field, value in fields.items():
            object.__setattr__(kind, field, value)
        yield
    finally:
        for field, value in before.items():
            object.__setattr__(kind, field, value)


def with_role(name: str, old: Role, new: Role) -> Callable:
    """The roles of an operation, but `new` for `old`."""
    right_roles = OPERATIONS[name].roles
    return lambda op: tuple(replace(f, role=new) if f.role is old else f for f in right_roles(op))


@pytest.mark.parametrize(("name", "case"), [("einsum", "two axes"), ("einsum", "classes"), ("reduce_sum", "two axes")])
def test_a_role_changed_from_sum_to_parallel(name, case):
    """The partitioner believes that a split sum needs no reduction."""
    program, _ = sound(case), right(case)
    with defined(name, roles=with_role(name, Role.SUM, Role.PARALLEL)):
        assert_refused(program)
        spoiled = lowered(case)  # the checker goes by the same table, so it agrees
    assert_refused(spoiled)
    assert_noticed_when_run(spoiled, case)


def test_a_split_factor_that_must_stay_whole():
    program = sound("classes")
    with (
        defined("one_hot", roles=with_role("one_hot", Role.PARALLEL, Role.WHOLE)),
        pytest.raises(mtf.ProgramError, match="must stay whole"),
    ):
        check_program(program, "sabotage")


def test_linearity_claimed_where_there_is_none():
    """A sum that is still to be taken, let through a sigmoid."""
    place = ("r:2;c:2", "batch:r;inner:c")

    def layer() -> tuple[Program, np.ndarray]:
        with mtf.Graph():
            x, w = mtf.input("x", [BATCH, INNER]), mtf.variable("w", [INNER, HIDDEN])
            total = mtf.reduce_sum(mtf.sigmoid(mtf.einsum([x, w], output_shape=[BATCH, HIDDEN])), name="total")
            program = mtf.lower({"total": total}, (), *place, precision="highest")
        feed = np.random.default_rng(0).normal(size=(8, 4))
        return program, mtf.simulate(program, executor="exact").step(x=feed)["total"]

    honest, wanted = layer()
    with defined("sigmoid", linear=lambda op: Linear((0,))):
        spoiled, got = layer()
    assert any(i.opcode == "sigmoid" and i.inputs[0].sharding.pending for i in spoiled.instructions)
    assert_refused(spoiled)
    check_program(honest, "nothing")
    assert abs(got - wanted) > 0.1 * abs(wanted)
