"""Which instructions run as one kernel, for the time: the program's fusion groups, and row by row more of them joined.

A fusion group of the program ends in a reduction, because somebody may need all of its result first. But what a
softmax or a norm makes of one row depends on that row alone, and rows fit VMEM. So element-wise groups and reductions
over minor dims, of which one reads what another makes, run as one kernel: what passes between them takes no HBM
traffic. (It is still a buffer in the memory figure, which is that of the program's groups.)
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from meshlib.operation import Kind
from meshlib.program.records import Instruction, Program, Value

_BY_ROW = (Kind.ELEMENTWISE, Kind.REDUCTION, Kind.VIEW, Kind.SOURCE)
_SOURCES = (Kind.SOURCE, Kind.RESIDENT)
_NO_KERNEL = ("input", "variable", "assign")


def kernel_groups(program: Program) -> list[list[Instruction]]:
    """The program's groups in their order; those joined stand where the first of them does."""
    groups: list[list[Instruction]] = []
    open_: list[bool] = []  # whether others may join
    maker: dict[Value, tuple[int, Instruction]] = {}
    for _, members in groupby(program.instructions, key=lambda i: i.group):
        group = list(members)
        by_row = all(_is_by_row(i) for i in group)
        place = _place(group, maker, open_) if by_row else None
        if place is None:
            place = len(groups)
            groups.append([])
            open_.append(by_row)
        groups[place] += group
        # Sources hold nobody up: they are made anew where they are needed.
        maker.update({y: (place, i) for i in group for y in i.outputs if i.operation.kind.kind not in _SOURCES})
    return groups


def kept_inside(program: Program, groups: Sequence[Sequence[Instruction]]) -> set[Value]:
    """Values that are made and used inside one of the groups only."""
    users: dict[Value, set[int]] = {}
    for n, group in enumerate(groups):
        for i in group:
            for x in i.inputs:
                users.setdefault(x, set()).add(n)
    held = {*program.outputs.values(), *program.updates.values(), *program.inputs.values(), *program.variables.values()}
    return {
        y for n, group in enumerate(groups) for i in group for y in i.outputs if y not in held and users.get(y) == {n}
    }


def _place(group: list[Instruction], maker: dict[Value, tuple[int, Instruction]], open_: list[bool]) -> int | None:
    """The group that makes the last of what this one reads, if they can run row by row together."""
    read = [maker[x] for i in group for x in i.inputs if x in maker]
    last = max((place for place, _ in read), default=-1)
    if last < 0 or not open_[last]:
        return None
    whole = any(place == last and not _keeps_rows(i) for place, i in read)
    return None if whole else last


def _is_by_row(i: Instruction) -> bool:
    if i.is_reshard or i.body is not None or i.exchanges or i.opcode in _NO_KERNEL:
        return False
    return i.operation.kind.kind in _BY_ROW


def _keeps_rows(i: Instruction) -> bool:
    """Whether each row of the result needs one row of the operands: no reduction, or one over minor dims."""
    if i.operation.kind.kind is not Kind.REDUCTION:
        return True
    names = i.inputs[0].tensor.shape.names
    kept = [n for n in names if n in i.outputs[0].tensor.shape]
    return list(names[: len(kept)]) == kept
