"""State of a graph that is the body of a loop: the enclosing graph and the stand-ins for its tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from layouts import Dimension
    from meshlib.core.graph import Graph, Tensor


@dataclass(eq=False)
class LateCarry:
    """A carry added while the body is traced: its initial value, None for zeros, and its value after a trip.

    around: for a branch, the late carry of the enclosing loop whose new value it computes.
    """

    begin: Tensor | None
    end: Tensor
    around: Tensor | None = None


@dataclass(eq=False)
class LoopBody:
    """State of a graph that is a loop's body.

    Attributes:
      parent: the graph of the loop operation.
      scope_around: the scope around the loop, in which variables created in the body are named: they belong to the
        program, not to the loop.
      captured: outer tensor -> its stand-in in the body.
      outside: stand-in, of a captured or sliced tensor -> the outer tensor.
      late: carries added while the body was traced (`late_carry`), by their stand-ins.
      working: for each index of the dim of `LoopRecord.active`, whether it is active in this trip.
      stacks, stacked: for a loop with a separate variable per trip, the loop's dim, and stacked variable -> its slice
        in the body.
      held, chosen, choices: for a loop over pipeline stages, the leading dims of variables created in the body; each
        trip sees all of them, except for a dim in `chosen`, of which it sees the index given per stage; and variable ->
        its part in a trip.
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
        """The leading dims that this loop gives to variables created in its body."""
        return self.held if self.stacks is None else (self.stacks, *self.held)
