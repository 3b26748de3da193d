"""Which values are stored: one decision, which memory and time both read, as TPU compilers take it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import meshlib as mtf
from meshlib.estimation.work.hbm_traffic import boundary_of
from meshlib.estimation.work.plan import kernels_of
from meshlib.estimation.work.stored_values import Stored, held_values
from meshlib.program.analysis.buffers import written_inside
from meshlib.program.instructions import Loop, Resident, Value
from meshlib.program.records import Program

D = mtf.Dimension


def regions(program: Program, loop: Loop | None = None) -> Iterator[tuple[Program, Loop | None, frozenset[Value]]]:
    """A program and the bodies of its loops, each with what is written in place."""
    in_place = program.memory_plan.in_place if loop is None else frozenset[Value]()
    yield program, loop, in_place
    for i in program.instructions:
        if isinstance(i, Loop):
            for body, inner, _ in regions(i.body, i):
                yield body, inner, written_inside(inner, in_place) if inner is i else frozenset()


def trained(name: str, **shape: object) -> Program:
    config = mtf.models.preset(name).reduced(**shape)
    with mtf.Graph():
        outputs, updates = mtf.models.train_step(config, 8, 16, remat="full")
    return mtf.lower(outputs, updates, "fsdp:4", mtf.models.layout("fsdp", config, "fsdp:4"))


@pytest.mark.parametrize("name", ["llama2-7b", "gpt2", "mixtral-8x7b", "bert-base", "t5-small"])
def test_time_and_memory_store_the_same_values(name: str) -> None:
    """A kernel writes what has a buffer, and nothing else; what it reads has one."""
    different, values = [], 0
    for program, loop, in_place in regions(trained(name)):
        decision = (program if loop is None else loop).memory_plan.stored
        stored, held = Stored(program, loop), held_values(program)
        for members in kernels_of(program):
            if isinstance(members[0], Loop) or members[0].is_collective:
                continue
            made = {y for i in members if not isinstance(i, Resident) for y in i.outputs}
            uses = boundary_of(members, stored, in_place)
            written = {u.buffer for u in uses if u.written}
            of_memory = {y for y in made if y not in decision.unstored or y in decision.written}
            values += len(made)
            different += [y for y in written ^ of_memory if y.local_bytes > 8 and y in made]
            different += [u.buffer for u in uses if not u.written and u.buffer in decision.again.keys() - held]
    assert values > 100
    assert not different, different


def stored_names(program: Program) -> set[str]:
    unstored = program.memory_plan.stored.unstored
    return {y.tensor.operation.opdef.name for i in program.instructions for y in i.outputs if y not in unstored}


def read_twice(function: object) -> Program:
    """Something of x that two kernels need: a sum over rows, and a product with that sum."""
    rows, columns = D("rows", 1024), D("columns", 1024)
    with mtf.Graph():
        y = function(mtf.input("x", [rows, columns], "bfloat16"))  # type: ignore[operator]
        total = mtf.reduce_sum(y, reduced_dim=rows)
        return mtf.lower({"z": mtf.reduce_sum(y * total, reduced_dim=columns)})


@pytest.mark.parametrize("function", [mtf.exp, mtf.sigmoid, mtf.gelu, mtf.erf], ids=lambda f: f.__name__)
def test_what_is_as_fast_as_reading_is_recomputed(function: object) -> None:
    """The TPU compiler computes these in each kernel that reads them."""
    assert stored_names(read_twice(function)) <= {"input", "reduce_sum"}


@pytest.mark.parametrize("function", [mtf.sin, mtf.cos], ids=lambda f: f.__name__)
def test_sines_are_stored(function: object) -> None:
    """Their argument is reduced first: the TPU compiler computes the tables of rotary positions once."""
    assert function.__name__ in stored_names(read_twice(function))  # type: ignore[attr-defined]


def test_masks_of_dropout_are_drawn_again() -> None:
    """Both kernels draw the numbers: the TPU compiler's step of BERT large holds no mask."""
    assert stored_names(read_twice(lambda x: mtf.dropout(x, True, rate=0.1))) <= {"input", "reduce_sum"}
