"""Schedule units: fusion groups, collectives, copies and loops, with their operands and results."""

from __future__ import annotations

from dataclasses import dataclass

from hardware.network import Cost
from meshlib.core.loop_record import Timing
from meshlib.estimation.work.communication import Communication
from meshlib.estimation.work.kernels import Kernel

HOST_COPIES = ("to_host", "from_host")


@dataclass(slots=True)
class Unit:
    """A fusion group, collective, copy to or from the host, or loop.

    Attributes:
      number: that of its first instruction, which is also the number of the fusion group.
      inputs, outputs: numbers of external values that it reads, and of its results.
      moves: priced transfers; exactly one for a collective.
      kernel: of a fusion group; body, trips: of a loop; active: the share of its work outside the bubbles of a
        pipeline; host_bytes: bytes copied to or from the host, by direction.
      branch: the kind of a branch, whose `trips` are the share of enclosing trips in which a device runs it; timing:
        duration of a loop with such branches.
      early: a collective that is issued before the last product that it does not depend on.
      chained: a collective whose result the next product needs, or that no product follows.
      product: whether it contains a matrix product, fused attention not counted.
      leads_on: whether it is a product, attention or loop, or one depends on it.
      closes: gathered operands that no further product of the same window reads.
    """

    number: int
    name: str
    source: str
    region: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    moves: tuple[tuple[Communication, Cost], ...] = ()
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
        """Whether it is a product, attention or loop, which can hide collectives."""
        return self.product or self.body is not None or (self.kernel is not None and self.kernel.attention is not None)

    @property
    def is_collective(self) -> bool:
        """Whether it is a collective without computation."""
        return bool(self.moves) and self.kernel is None


@dataclass(frozen=True)
class UnitPlan:
    """The units of a program or loop body, in order, without references to the program."""

    units: tuple[Unit, ...]

    @property
    def kernels(self) -> int:
        """Number of fusion groups, with those of loops counted once."""
        inside = sum(u.body.kernels for u in self.units if u.body is not None)
        return inside + sum(u.kernel is not None and not u.kernel.free for u in self.units)
