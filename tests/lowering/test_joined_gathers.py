"""Gathers along several dims over several axes are one collective: bytes, numbers, and what the checker refuses."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import meshlib as mtf
from layouts.plan import Step, gathered_axes
from layouts.sharding import laid
from meshlib.core.errors import ProgramError
from meshlib.lowering.passes import join_gathers
from meshlib.program.checker import check_program
from meshlib.program.instructions import Move, Value
from meshlib.program.records import Program

D = mtf.Dimension
B, J, K = D("b", 8), D("j", 8), D("k", 4)
SIZE = 8 * 8 * 4 * 4  # bytes
LAYOUTS = (
    ("a:2;c:2", "b:a;j:c"),
    ("a:2;c:4", "j:c;b:a"),
    ("a:2;c:2;e:2", "b:a+c;j:e"),
    ("a:2;c:2;e:2", "k:c+a;j:e"),
    ("a:2;c:2;e:2", "b:e;j:c;k:a"),
)


def whole(mesh: str, rules: str) -> Program:
    with mtf.Graph():
        x = mtf.input("x", [B, J, K])
        return mtf.lower({"y": mtf.constrain(mtf.sin(x), "") * 2.0}, mesh=mesh, layout=rules)


def gather_of(program: Program) -> tuple[Move, Step]:
    (move,) = (i for i in program.instructions if isinstance(i, Move) and i.opcode == "all_gather")
    return move, move.steps[0]


@pytest.mark.parametrize(("mesh", "rules"), LAYOUTS)
def test_one_gather_of_all_dims(mesh: str, rules: str) -> None:
    program = whole(mesh, rules)
    devices = program.mesh.size
    (c,) = program.collectives
    assert (c.kind, set(c.axes), c.sent_bytes) == (
        "all_gather",
        set(program.mesh.axes),
        SIZE * (devices - 1) // devices,
    )
    _, step = gather_of(program)
    assert {name for name, _ in gathered_axes(step)} == {rule.partition(":")[0] for rule in rules.split(";")}
    x = np.random.default_rng(0).normal(size=(8, 8, 4)).astype(np.float32)
    for executor in ("exact", "fast"):
        found = mtf.simulate(program, executor=executor).step(x=x)["y"]
        np.testing.assert_allclose(found, 2 * np.sin(x), rtol=1e-5)


def test_what_is_wanted_half_gathered_too_is_gathered_in_turns() -> None:
    with mtf.Graph():
        y = mtf.sin(mtf.input("x", [B, J, K]))
        outputs = {"half": mtf.constrain(mtf.constrain(y, "j:c"), "j:c"), "whole": mtf.constrain(y, "")}
    program = mtf.lower(outputs, mesh="a:2;c:2", layout="b:a;j:c")
    assert [c.axes for c in program.collectives] == [("a",), ("c",)]


def test_reasons_and_listing_name_all_dims() -> None:
    program = whole(*LAYOUTS[0])
    (c,) = program.collectives
    assert "'b'" in c.reason
    assert "'j'" in c.reason
    assert "over a+c b j, sends" in str(program)


@pytest.mark.parametrize(
    "change",
    [
        {"axes": ("a",)},
        {"sent_bytes": 1},
        {"dim": "b"},
        {"axes": ("a", "c", "e")},
    ],
    ids=str,
)
def test_the_checker_refuses_another_step(change: dict[str, object]) -> None:
    program = whole("a:2;c:2;e:2", "b:a;j:c")
    move, step = gather_of(program)
    wrong = replace(move, steps=(replace(step, **change),))
    with pytest.raises(ProgramError):
        check_program(program.with_instructions([wrong if i is move else i for i in program.instructions]), "a change")


def test_the_order_of_the_axes_does_not_matter() -> None:
    program = whole(*LAYOUTS[0])
    move, step = gather_of(program)
    turned = replace(move, steps=(replace(step, axes=step.axes[::-1]),))
    other = program.with_instructions([turned if i is move else i for i in program.instructions])
    x = np.random.default_rng(0).normal(size=(8, 8, 4)).astype(np.float32)
    right, same = (mtf.simulate(p, executor="exact").step(x=x)["y"] for p in (program, other))
    np.testing.assert_array_equal(right, same)  # each block goes where its own coordinates say


def test_gathers_of_one_dim_axis_by_axis_are_one() -> None:
    """What is minor-most goes first; together they are what the lowering makes where it wants all at once."""
    dim = D("d", 8)
    with mtf.Graph():
        x = mtf.input("x", [B, dim])
        program = mtf.lower({"y": mtf.constrain(mtf.sin(x), "") * 2.0}, mesh="a:2;c:2", layout="d:c+a")
    move, step = gather_of(program)
    assert (step.dim, step.axes) == ("d", ("c", "a"))
    (begin,), (end,) = move.inputs, move.outputs
    half = laid(begin.tensor.shape, step.before.mesh, ((), ("c",)), ())
    between, own = Value(begin.tensor, half), begin.local_bytes
    first = Step("all_gather", ("a",), "d", None, step.before, half, own, own)
    second = Step("all_gather", ("c",), "d", None, half, step.after, 2 * own, 2 * own)
    moves = [replace(move, outputs=(between,), steps=(first,)), replace(move, inputs=(between,), steps=(second,))]
    turns = [i for one in program.instructions for i in (moves if one is move else [one])]
    apart = program.with_instructions(turns)
    check_program(apart, "by hand")
    joined = check_program(join_gathers(apart), "join_gathers", before=apart)
    assert gather_of(joined)[1] == step
    assert gather_of(joined)[0].outputs == (end,)


def test_gathers_in_turns_along_one_dim_are_one() -> None:
    """The batch of a decode step lies over two axes where it may: blocks come in the order of the sharding."""
    config = mtf.models.preset("palm-62b").reduced().replace(numerics=mtf.Numerics())
    with mtf.Graph():
        outputs, updates = mtf.models.decode_step(config, 8, 8)
        layout = "d_model:x;d_ff:yz;heads:yz;vocab:yz;batch:(x+yz)?"
        program = mtf.lower(outputs, updates, mesh="x:2;yz:4", layout=layout, precision="highest")
        alone = mtf.lower(outputs, updates, precision="highest")
    tokens = np.random.default_rng(0).integers(0, config.vocab, 8)
    found, wanted = (mtf.simulate(p, executor="exact").step(tokens=tokens)["logits"] for p in (program, alone))
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
