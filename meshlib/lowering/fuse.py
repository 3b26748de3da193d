"""Fusion groups: which values never reach HBM.

A group runs as one kernel: at most one matmul with element-wise work before and after it, or element-wise work that
ends in a reduction. Going backwards, an instruction joins the group of its users if they are all in one group; it then
runs directly before them, which no dependency can forbid.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from meshlib.operation import Kind
from meshlib.program.instructions import Compute, Instruction, Move, Value
from meshlib.program.records import Program

_FUSIBLE = (Kind.ELEMENTWISE, Kind.VIEW, Kind.SOURCE)


@dataclass(eq=False)
class Group:
    """Instructions that run as one kernel, in order."""

    members: list[Instruction] = field(default_factory=list)
    matmuls: int = 0
    reductions: int = 0
    open: bool = False  # whether producers may join


def fusion_groups(program: Program) -> list[list[Instruction]]:
    """The program's instructions as groups, in the order of their last members."""
    pinned = {*program.outputs.values(), *program.updates.values()}
    users: dict[Value, set[int]] = {}
    groups: list[Group] = []
    for instruction in reversed(program.instructions):
        joined = _joinable(instruction, users, groups, pinned)
        if joined is None:
            joined = len(groups)
            groups.append(Group(open=_opens(instruction)))
        group = groups[joined]
        group.members.append(instruction)
        kind = _kind(instruction)
        group.matmuls += kind is Kind.CONTRACTION
        group.reductions += kind is Kind.REDUCTION
        for x in instruction.inputs:
            users.setdefault(x, set()).add(joined)
    return [g.members[::-1] for g in reversed(groups)]


def _kind(instruction: Instruction) -> Kind | None:
    """The kind of a computation, a local cut counting as a view; None for what is no kernel of its own."""
    if isinstance(instruction, Move) and not instruction.is_collective:
        return Kind.VIEW
    if isinstance(instruction, Compute) and not instruction.exchanges:
        return instruction.operation.kind.kind
    return None


def _opens(instruction: Instruction) -> bool:
    kind = _kind(instruction)
    return kind in (*_FUSIBLE, Kind.CONTRACTION, Kind.REDUCTION)


def _joinable(
    instruction: Instruction, users: dict[Value, set[int]], groups: list[Group], pinned: set[Value]
) -> int | None:
    kind = _kind(instruction)
    if kind is None or any(y in pinned for y in instruction.outputs):
        return None
    into = {g for y in instruction.outputs for g in users.get(y, ())}
    if len(into) != 1:
        return None
    (number,) = into
    group = groups[number]
    if not group.open:
        return None
    if kind in _FUSIBLE:
        return number
    if kind is Kind.CONTRACTION and group.matmuls == group.reductions == 0:
        return number
    return None
