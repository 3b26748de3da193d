"""Traversal of every instruction that a compiled module runs, with counts; enters loops, fusions and calls."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from meshlib.jax.hlo.loops import trip_count
from meshlib.jax.hlo.text import Computation, HloInstruction, Module

_BRANCHES = ("true_computation", "false_computation")


@dataclass(frozen=True)
class Frame:
    """A computation together with the instruction that calls it, and the caller's frame."""

    holder: Computation
    call: HloInstruction | None = None
    parent: Frame | None = None

    @property
    def is_fused(self) -> bool:
        """True if this is the body of a fusion."""
        return self.call is not None and self.call.opcode == "fusion"


class HloVisit(NamedTuple):
    """An instruction that runs `times` times per run (None: data-dependent); `branch`: in a conditional."""

    frame: Frame
    instruction: HloInstruction
    times: int | None
    branch: bool


def walk(module: Module) -> Iterator[HloVisit]:
    """All instructions in schedule order; those of a called computation follow the call."""
    yield from _within(module, Frame(module.computations[module.entry]), 1, False)


def _within(module: Module, frame: Frame, times: int | None, branch: bool) -> Iterator[HloVisit]:
    for i in frame.holder.instructions.values():
        yield HloVisit(frame, i, times, branch)
        for name, inner_times, inner_branch in _called(module, frame.holder, i, times, branch):
            if name in module.computations:
                yield from _within(module, Frame(module.computations[name], i, frame), inner_times, inner_branch)


def branches(conditional: HloInstruction) -> list[str]:
    """The computations of a conditional's branches; each reads one operand, behind the condition."""
    listed = conditional.attributes.partition("branch_computations={")[2].partition("}")[0]
    names = [conditional.called(role) for role in _BRANCHES] if not listed else listed.split(",")
    return [n.strip().lstrip("%") for n in names if n]


def _called(
    module: Module, holder: Computation, i: HloInstruction, times: int | None, branch: bool
) -> Iterator[tuple[str, int | None, bool]]:
    """The computations that an instruction runs, and how often."""
    if i.opcode == "while":
        trips = trip_count(module, holder, i)
        inner = None if times is None or trips is None else times * trips
        for role in ("body", "condition"):
            yield i.called(role) or "", inner, branch
    elif i.opcode == "conditional":
        for name in branches(i):
            yield name, times, True
    elif i.opcode in ("fusion", "call", "async-start", "custom-call"):
        for role in ("calls", "to_apply", "called_computations"):
            yield i.called(role) or "", times, branch
