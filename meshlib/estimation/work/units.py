"""Schedule units: fusion groups, collectives, copies and loops, with their operands and results."""

from __future__ import annotations

from dataclasses import dataclass

from meshlib.core.loop_record import Timing
from meshlib.core.shown import Brief
from meshlib.estimation.work.communication import Communication
from meshlib.estimation.work.kernels import Kernel

HOST_COPIES = ("to_host", "from_host")


@dataclass(slots=True)
class Unit:
    """A fusion group, collective, copy to or from the host, or loop.

    Attributes:
      number: number of its fusion group, which its first instruction has too.
      name, source, region: those of its main operation.
      inputs, outputs: numbers of the values that it reads from other units, and of its results.
      moves: its transfers; a collective has exactly one.
      kernel: the work of a fusion group; None for other units.
      body, trips: the plan of a loop's body, and how often the body runs. For a branch, `trips` is the share of the
        enclosing trips in which a device runs it.
      active: share of a loop's work that falls outside the bubbles of a pipeline.
      timing: how the duration of a loop with branches follows from theirs.
      branch: the kind of a branch; None for other units.
      host_bytes: direction of a copy to or from the host, and its bytes.
      early: whether the collective is issued before the last product on which it does not depend.
      chained: whether the next product needs the collective's result, or no product follows it.
      product: whether it contains a matrix product; fused attention does not count.
      leads_on: whether it is a product, attention or loop, or one of these depends on it.
      closes: gathered operands that no later product of the same window reads.
    """

    number: int
    name: str
    source: str
    region: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    moves: tuple[Communication, ...] = ()
    kernel: Kernel | None = None
    body: UnitPlan | None = None
    trips: float = 1
    active: float = 1.0
    timing: Timing | None = None
    branch: str | None = None
    host_bytes: tuple[str, int] | None = None
    early: bool = False
    chained: bool = False
    product: bool = False
    leads_on: bool = False
    closes: frozenset[int] = frozenset()

    @property
    def is_large(self) -> bool:
        """True if it is a product, attention or loop, which can hide collectives."""
        return self.product or self.body is not None or (self.kernel is not None and self.kernel.attention is not None)

    @property
    def is_collective(self) -> bool:
        """True if it is a collective without computation."""
        return bool(self.moves) and self.kernel is None


@dataclass(frozen=True, repr=False)
class UnitPlan(Brief):
    """The units of a program or loop body, in order, without references to the program."""

    units: tuple[Unit, ...]

    @property
    def kernels(self) -> int:
        """Number of fusion groups, with those of loops counted once."""
        inside = sum(u.body.kernels for u in self.units if u.body is not None)
        return inside + sum(u.kernel is not None and not u.kernel.free for u in self.units)
