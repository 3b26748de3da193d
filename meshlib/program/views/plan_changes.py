"""Operations with different strategies in two programs, to explain a change of plan between close sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from layouts.checking import some
from meshlib.core.graph import Operation
from meshlib.program.instructions import Compute
from meshlib.program.records import Program, walk

SHOWN = 3  # operations named in a note; others are counted


@dataclass(frozen=True)
class Replanned:
    """An operation of both programs with different strategies: `a` and `b` are the splits, "whole" for none."""

    operation: str
    name: str
    source: str
    phase: str
    a: str
    b: str

    def __str__(self) -> str:
        return f"{self.operation} '{self.name}' ({self.source})"


def replanned(a: Program, b: Program) -> tuple[Replanned, ...]:
    """Operations with different strategies, matched by name, phase and, for several runs, by order; in the order of
    a."""
    left, right = _ways(a), _ways(b)
    return tuple(
        Replanned(op.opdef.name, op.name, op.source, str(key[0]), split, right[key][1])
        for key, (op, split) in left.items()
        if key in right and right[key][1] != split
    )


def plan_notes(changes: Sequence[Replanned]) -> tuple[str, ...]:
    """One line per kind of change and phase, naming the first operations."""
    alike: dict[tuple[str, str, str], list[Replanned]] = {}
    for x in changes:
        alike.setdefault((x.phase, x.a, x.b), []).append(x)
    notes = []
    for (phase, before, after), members in alike.items():
        notes.append(f"{phase}: {_split(after)} in b, {_split(before)} in a: {some(members, SHOWN)}")
    return tuple(notes)


def _split(assignment: str) -> str:
    return "whole" if assignment == "whole" else f"split by {assignment}"


def _ways(program: Program) -> Mapping[tuple[object, ...], tuple[Operation, str]]:
    strategy_of: dict[tuple[object, ...], tuple[Operation, str]] = {}
    counts: dict[tuple[object, ...], int] = {}
    for i, _, _ in walk(program):
        if isinstance(i, Compute):
            op = i.operation
            key = (i.region, op.name, op.opdef.name)
            number = counts[key] = counts.get(key, 0) + 1
            by = sorted(f"{factor}@{axis}" for axis, factor in i.assignment)
            strategy_of[*key, number] = op, " ".join(by) or "whole"
    return strategy_of
