"""The plan of buffers, run: whoever reads a value finds it in its buffer, in the one order that everybody uses."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import cache
from itertools import groupby, islice

import pytest

import meshlib as mtf
from meshlib.estimation.work.plan import plan_of
from meshlib.estimation.work.tiles import tiled_value_bytes
from meshlib.program.analysis.buffers import START, Buffer, fused_values, stored_values
from meshlib.program.analysis.memory import bytes_after, exact_size, kinds_after
from meshlib.program.instructions import Commit, Compute, Loop, Move, Resident, Value
from meshlib.program.records import Program, walk
from tests.effort import some

STEPS = [
    ("llama2-7b", "data:4", "data", True, "full"),
    ("llama2-7b", "fsdp:4", "fsdp", False, "none"),
    ("t5-small", "data:2;tensor:2", "data+tensor", True, "matmuls"),
    ("bert-large", "data:4", "zero1", False, "matmuls"),
    ("gemma3-12b", "tensor:4", "sequence", True, "none"),
]
each_step = pytest.mark.parametrize(
    "step", some(STEPS, [STEPS[0], STEPS[1], STEPS[3]]), ids=lambda s: f"{s[0]} {s[2]} {s[4]}"
)


@cache
def lowered(step: tuple[str, str, str, bool, str]) -> Program:
    name, mesh, layout, scan, remat = step
    config = mtf.models.preset(name).reduced()
    with mtf.Graph():
        outputs, updates = mtf.models.train_step(config, 8, 8, scan=scan, remat=remat)
        return mtf.lower(outputs, updates, mesh=mesh, layout=mtf.models.layout(layout, config, mesh))


def planned(program: Program, loop: Loop | None = None) -> tuple[Buffer, ...]:
    return program.buffers if loop is None else loop.buffers


def holders(program: Program, loop: Loop | None = None) -> dict[Value, Buffer]:
    """The buffer of each value, also of those that are only another name of what is there."""
    found = {v: b for b in planned(program, loop) for _, v in b.shown}
    for i in program.instructions:
        for y in i.outputs:
            if y not in found and i.inputs and i.inputs[0] in found:
                found.setdefault(y, found[i.inputs[0]])
    return found


def overwritten(program: Program, loop: Loop | None = None) -> Iterator[str]:
    """Reads of values that are not in memory any more: a kernel reads all its operands before it writes.

    What is made again is read where that lies of which it is made.
    """
    of, kept = holders(program, loop), stored_values(program, loop)
    fused = kept.fused - kept.inside
    held: dict[Buffer, set[str]] = {b: {b.owner.tensor.name} for b in planned(program, loop) if b.begin == START}
    for _, members in groupby(enumerate(program.instructions), key=lambda pair: pair[1].group):
        group = list(members)
        made = {y for _, i in group for y in i.outputs}
        for n, i in group:
            outside = [x for x in i.inputs if x not in made]
            for x in (v for read in outside for v in (kept.again[read].of if read in kept.again else (read,))):
                if x in made or x in fused or x.tensor.on_host or isinstance(i, Commit):
                    continue
                if not of[x].begin <= n <= of[x].end:
                    yield f"{i.opcode} reads {x.tensor.name}, whose buffer is not there"
                if x.tensor.name not in held[of[x]]:
                    yield f"{i.opcode} reads {x.tensor.name} where {held[of[x]]} is"
        for n, i in group:
            for y in i.outputs:
                if y in of and y not in fused and y not in kept.again and not isinstance(i, Resident):
                    b = of[y]
                    named = isinstance(i, Compute) and b.begin != n and y not in {v for _, v in b.shown}
                    held[b] = {*held.get(b, ()), y.tensor.name} if named else {y.tensor.name}
                    if is_alias(i):
                        held[b].add(i.inputs[0].tensor.name)


def is_alias(i: object) -> bool:
    return isinstance(i, Compute) and i.operation.opdef.storage.value == "alias"


@each_step
def test_whoever_reads_a_value_finds_it(step) -> None:
    program = lowered(step)
    assert not list(overwritten(program))
    for loop in (i for i, _, _ in walk(program) if isinstance(i, Loop)):
        assert not list(overwritten(loop.body, loop))


def test_a_buffer_that_is_used_again_too_early_is_seen() -> None:
    """A last use that is forgotten lets somebody write over the value: the check above finds it."""
    program = lowered(STEPS[3])
    seen = (broken for broken in islice(with_a_use_forgotten(program), 40) if any(True for _ in overwritten(broken)))
    assert len(list(islice(seen, 6))) == 6


def with_a_use_forgotten(program: Program) -> Iterator[Program]:
    fused, uses = fused_values(program), {}
    for n, i in enumerate(program.instructions):
        for x in i.inputs:
            uses.setdefault(x, []).append(n)
    for x, last in program.last_use.items():
        if uses.get(x, [last])[0] < last < len(program.instructions) and x not in fused:
            broken = dataclasses.replace(program)
            broken.__dict__["last_use"] = {**program.last_use, x: uses[x][0]}
            yield broken


@each_step
def test_time_and_memory_go_by_one_order(step) -> None:
    program = lowered(step)
    est = mtf.estimate(program, "v5e-4")
    groups = [i.group for i in program.instructions]
    assert groups == sorted(groups)
    assert all(program.instructions[g].group == g for g in set(groups))  # named by their first instruction
    computed = [e.first for e in est.schedule.events if e.on_core]
    assert set(computed) <= set(groups)
    # Products, attention and loops keep the program's order. Small things go with collectives: put off until what they
    # read has come if nothing large waits for them, or earlier, for a collective that is combined with others.
    leading = {u.number for u in plan_of(program, program.compiler).units if u.is_large}
    assert len(leading) > 1
    assert [n for n in computed if n in leading] == sorted(leading & set(computed))
    assert len(est.memory.timeline_bytes) == len(est.memory.moments) == len(groups)
    # What is issued early takes memory from there on.
    for n, i in enumerate(program.instructions):
        if isinstance(i, Move) and i.early:
            assert all(holders(program)[y].begin <= n <= holders(program)[y].end for y in i.outputs)


@each_step
@pytest.mark.parametrize("size", [exact_size, tiled_value_bytes], ids=["exact", "padded"])
def test_parts_add_up(step, size) -> None:
    program = lowered(step)
    after, kinds = bytes_after(program, size)[1:], kinds_after(program, size)
    assert after == [sum(parts) for parts in zip(*kinds.values(), strict=True)]
