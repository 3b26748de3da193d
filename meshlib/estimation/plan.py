"""A program as the schedule sees it: units in their order, with kernels, moves and dependencies. No constants yet.

Making a plan walks the program once; scheduling a plan again, with other constants, takes a fraction of that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from hardware.network import Cost
from meshlib.estimation.kernels import Kernel, forward_names, kernel_of, resident_values
from meshlib.estimation.moves import Move, Network, moves_of
from meshlib.operation import Kind
from meshlib.program.buffers import fused_values
from meshlib.program.instructions import Compute, Instruction, Loop, Value
from meshlib.program.instructions import Move as Reshard
from meshlib.program.records import Program

HOST_COPIES = ("to_host", "from_host")


@dataclass(slots=True)
class Unit:
    """A fusion group, collective, copy to or from the host, or loop.

    Attributes:
      number: of its first instruction, which is that of the fusion group.
      inputs, outputs: numbers of the values that it reads from outside and makes.
      moves: what it sends, with the price of each; of a collective exactly one.
      kernel: of a fusion group; body, trips: of a loop; host_bytes: of a copy to or from the host, by its direction.
      early: a collective that is issued before the last product that it does not depend on.
      chained: a collective that the first product after it needs, or after which there is none.
      product: whether it holds a product written as einsum.
    """

    number: int
    name: str
    source: str
    region: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    moves: tuple[tuple[Move, Cost], ...] = ()
    kernel: Kernel | None = None
    body: Plan | None = None
    trips: int = 1
    host_bytes: tuple[str, int] | None = None
    early: bool = False
    chained: bool = False
    product: bool = False

    @property
    def is_collective(self) -> bool:
        """Whether it only sends."""
        return bool(self.moves) and self.kernel is None


@dataclass(frozen=True)
class Plan:
    """The units of a program, or of a loop's body, in order; nothing of the program itself."""

    units: tuple[Unit, ...]

    @property
    def kernels(self) -> int:
        """How many fusion groups run, loops' included once."""
        inside = sum(u.body.kernels for u in self.units if u.body is not None)
        return inside + sum(u.kernel is not None and not u.kernel.free for u in self.units)


def plan_of(program: Program, network: Network, forward: frozenset[str] | None = None) -> Plan:
    """The plan of a program, or of a loop's body with the `forward` names of the program around it."""
    planner = _Planner(program, network, forward_names(program) if forward is None else forward)
    units = [planner.unit(n, [*members]) for n, members in groupby(program.instructions, key=lambda i: i.group)]
    _note_chains(units)
    return Plan(tuple(units))


class _Planner:
    def __init__(self, program: Program, network: Network, forward: frozenset[str]) -> None:
        self.program, self.network, self.forward = program, network, forward
        self.numbers: dict[Value, int] = {}
        self.fused = fused_values(program)
        self.held = resident_values(program)

    def unit(self, number: int, members: Sequence[Instruction]) -> Unit:
        first = members[0]
        inside = {y for i in members for y in i.outputs}
        operands = dict.fromkeys(x for i in members for x in i.inputs if x not in inside)
        unit = Unit(
            number,
            first.operation.name,
            first.operation.source,
            first.region,
            tuple(self._number(x) for x in operands),
            tuple(self._number(y) for i in members for y in i.outputs),
        )
        if isinstance(first, Loop):
            unit.body = plan_of(first.body, self.network, self.forward)
            unit.trips = first.trips
            return unit
        if isinstance(first, Compute) and first.operation.kind.kind is Kind.COPY:
            unit.host_bytes = first.opcode, sum(y.local_bytes for i in members for y in i.outputs)
            return unit
        unit.early = isinstance(first, Reshard) and first.early
        unit.moves = tuple((m, self.network.cost(m)) for i in members for m in moves_of(self.program, i))
        if not first.is_collective:
            unit.kernel = kernel_of(self.program, members, self.fused, self.held, self.forward)
            unit.product = bool(unit.kernel.matmuls)
            unit.name, unit.source, unit.region = unit.kernel.name, unit.kernel.source, unit.kernel.region
        return unit

    def _number(self, value: Value) -> int:
        return self.numbers.setdefault(value, len(self.numbers))


def _note_chains(units: Sequence[Unit]) -> None:
    """Which collectives the first product after them needs, itself or through what runs in between; or the end."""
    needs: dict[int, frozenset[int]] = {}  # value -> places of the collectives since the last product behind it
    since: list[int] = []
    for place, unit in enumerate(units):
        behind = frozenset[int]().union(*(needs.get(x, frozenset()) for x in unit.inputs))
        if unit.product or unit.body is not None:
            for n in since:
                units[n].chained = n in behind
            needs, since, behind = {}, [], frozenset()
        if unit.is_collective and not unit.early:
            since.append(place)
            behind |= {place}
        needs.update(dict.fromkeys(unit.outputs, behind))
    for n in since:
        units[n].chained = True
