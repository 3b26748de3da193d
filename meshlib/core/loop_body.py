"""What a graph is to a loop whose body it is: the graph around it, and what stands inside for tensors from there."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from layouts import Dimension
    from meshlib.core.graph import Graph, Tensor


@dataclass(eq=False)
class LateCarry:
    """A carry of a loop: what it is before the first trip, None for zeros, and what a trip makes of it.

    around: of a branch, the late carry of the loop around of which it makes the end.
    """

    begin: Tensor | None
    end: Tensor
    around: Tensor | None = None


@dataclass(eq=False)
class LoopBody:
    """State of a graph that is a loop's body.

    Attributes:
      parent: the graph that holds the loop.
      scope_around: the scope around the loop, which variables made in the body take their names from: they belong to
        the program, not to the loop.
      captured: what the body takes from outside, each with its stand-in inside.
      outside: of each stand-in, also of a slice, what it stands for.
      late: carries that were asked for while the body was written (`late_carry`), by their stand-ins.
      working: whether each of the indices that `LoopRecord.active` speaks of works in this trip.
      stacks, stacked: of a loop with a variable of its own in each trip, the loop's dim, and those variables, each with
        the slice that stands for it inside.
      held, chosen, choices: of a loop that runs the stages of a pipeline, the dims that variables made in the body have
        first, of which each trip sees all; but of the one in `chosen` the index that this says of each stage; and those
        variables, each with what a trip sees of it.
    """

    parent: Graph
    scope_around: tuple[str, ...] = ()
    captured: dict[Tensor, Tensor] = field(default_factory=dict)
    outside: dict[Tensor, Tensor] = field(default_factory=dict)
    late: dict[Tensor, LateCarry] = field(default_factory=dict)
    working: Tensor | None = None
    stacks: Dimension | None = None
    stacked: dict[Tensor, Tensor] = field(default_factory=dict)
    held: tuple[Dimension, ...] = ()
    chosen: tuple[Dimension, Tensor] | None = None
    choices: dict[Tensor, Tensor] = field(default_factory=dict)

    @property
    def first_dims(self) -> tuple[Dimension, ...]:
        """The dims that variables made in the body have before their own, by this loop."""
        return self.held if self.stacks is None else (self.stacks, *self.held)
