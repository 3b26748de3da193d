"""When everything runs: a deterministic schedule of the program's order over the engines of one device.

The core runs one fusion group at a time, in the program's order; MXU, VPU and HBM work at once within a group:

    seconds = launch + max(max(mxu, vpu) + exposed, hbm)

`exposed` is the HBM time that nothing can hide: the first pieces of a product and its last block. A collective starts
when its operands are ready and the places it crosses (chip, torus axes, DCN) are free, in the program's order, and
holds up only the first group that uses its result. Policies:

    none                each collective waits for the core, and the core for it
    independent         as above; work that does not depend on a collective hides it
    collective matmul   besides, an all_gather that feeds a product, and a reduce_scatter of one, run in as many pieces
                        as there are devices in the group: the first piece of one starts the other, the last ends it

What can be sent early is sent one product early: a collective that does not depend on the product before it is issued
when the core reaches that product (weights of the next layer arrive while this one computes), and no earlier. The
result that waits meanwhile is not in the memory figure, which is that of the program's order.

Not modelled: the HBM traffic of collectives (links are 5 to 20 times slower than HBM), the core's part in sums.

A loop is its body's schedule, `trips` times one after the other; trips do not overlap.

Sources: Wang et al., "Overlap communication with dependent computation via decomposition", ASPLOS 2023 (collective
matmul); openxla/xla latency_hiding_scheduler (start and done).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

from hardware.blocking import matmul_blocks
from hardware.chips import Chip
from hardware.core import Time, Work, time_of
from hardware.memory import hbm_seconds
from hardware.network import Cost
from meshlib.estimate.kernels import Kernel, forward_names, kernel_of
from meshlib.estimate.moves import Move, Network, moves_of
from meshlib.lower.memory import fused_values
from meshlib.lower.program import Instruction, Program, Value

POLICIES = ("none", "independent", "collective matmul")
# An all_gather of 256 KiB on four chips of v7 takes 21.9 us, of which wire and hops explain 11, and three sizes agree
# on the rest: starting every device of a group and waiting for the last. AI-Hypercomputer/tpu-recipes @c8cfe2f,
# microbenchmarks/ironwood/collectives/all_gather.md.
COLLECTIVE_LAUNCH_SECONDS = 10e-6


@dataclass(frozen=True, slots=True)
class KernelTime:
    """Modelled time of one fusion group. `traffic_bytes` are padded, with what a product reads again."""

    mxu_seconds: float
    vpu_seconds: float
    hbm_seconds: float
    exposed_seconds: float
    launch_seconds: float
    traffic_bytes: float

    @property
    def seconds(self) -> float:
        """Of the group run on its own."""
        return self.launch_seconds + self.busy_seconds

    @property
    def busy_seconds(self) -> float:
        """Without the launch."""
        return max(max(self.mxu_seconds, self.vpu_seconds) + self.exposed_seconds, self.hbm_seconds)

    @property
    def upper_seconds(self) -> float:
        """No overlap at all within the group."""
        return self.mxu_seconds + self.vpu_seconds + self.hbm_seconds + self.launch_seconds


@dataclass(frozen=True, slots=True)
class Event:
    """Something that runs from `start` to `end` (seconds from the start of the program, or of the trip)."""

    start: float
    end: float
    first: int  # number of its first instruction
    region: str
    kernel: Kernel | None = None
    time: KernelTime | None = None
    move: Move | None = None
    cost: Cost | None = None
    loop: Schedule | None = None
    trips: int = 1
    name: str = ""
    source: str = ""

    @property
    def seconds(self) -> float:
        """From start to end."""
        return self.end - self.start


@dataclass(slots=True)
class Schedule:
    """The events of a program in the order in which they were placed, and their totals in seconds.

    `busy` has, per engine ("mxu", "vpu", "hbm", a place of the network as its number), the seconds for which it works;
    `serial_seconds` is everything one after the other with no overlap anywhere; `exposed_seconds` the time in which
    something is being sent and the core computes nothing.
    """

    events: list[Event] = field(default_factory=list)
    seconds: float = 0.0
    busy: dict[str | int, float] = field(default_factory=dict)
    serial_seconds: float = 0.0
    exposed_seconds: float = 0.0

    def use(self, engine: str | int, seconds: float) -> None:
        """Count busy time."""
        self.busy[engine] = self.busy.get(engine, 0.0) + seconds


class Times:
    """Times of kernels on one chip, remembered by what they depend on: layers repeat."""

    def __init__(self, chip: Chip) -> None:
        self.chip = chip
        self._known: dict[tuple[object, ...], KernelTime] = {}

    def of(self, kernel: Kernel) -> KernelTime:
        """Modelled time of a kernel."""
        key = (kernel.matmuls, kernel.padded_vpu_ops, kernel.narrow_vpu_ops, kernel.padded_bytes, kernel.free)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._time(kernel)
        return found

    def _time(self, kernel: Kernel) -> KernelTime:
        if kernel.free:
            return KernelTime(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
        chip, again, exposed = self.chip, 0.0, 0.0
        for product, itemsize in kernel.matmuls:
            blocks = matmul_blocks(chip, product, itemsize)
            read_once = itemsize * product.batch * product.k * (product.m + product.n)
            again += blocks.read_bytes - read_once
            exposed += blocks.exposed_bytes
        traffic = kernel.padded_bytes + again
        # bfloat16 takes half the time where lanes work in it.
        ops = kernel.padded_vpu_ops - (kernel.narrow_vpu_ops / 2 if chip.vpu_bf16 else 0.0)
        time: Time = time_of(chip, Work(tuple(p for p, _ in kernel.matmuls), vpu_ops=ops, hbm_bytes=traffic))
        bare = hbm_seconds(chip, min(exposed, traffic)) if time.mxu_seconds else 0.0
        return KernelTime(time.mxu_seconds, time.vpu_seconds, time.hbm_seconds, bare, time.launch_seconds, traffic)


def schedule(
    program: Program, times: Times, network: Network, overlap: str, forward: frozenset[str] | None = None
) -> Schedule:
    """The schedule of a program from 0, or of a loop's body, with the `forward` names of the program around it."""
    return _Run(program, times, network, overlap, forward_names(program) if forward is None else forward).run()


@dataclass(slots=True)
class _Unit:
    """A fusion group, collective or loop; `early`: a collective that was moved before a product."""

    number: int
    members: list[Instruction]
    early: bool = False


class _Run:
    def __init__(self, program: Program, times: Times, network: Network, overlap: str, forward: frozenset[str]) -> None:
        self.program, self.times, self.network, self.overlap = program, times, network, overlap
        self.forward = forward
        self.fused = fused_values(program)
        self.made = Schedule()
        self.core = 0.0  # when the core is free
        self.ready: dict[Value, float] = {}
        self.free: dict[int, float] = {}  # place -> when it is free
        self.pieces: dict[Value, Event] = {}  # what a collective matmul may take or give piece by piece
        self.users = self._users() if overlap == "collective matmul" else {}

    def run(self) -> Schedule:
        for unit in self._order():
            first = unit.members[0]
            if first.is_collective:
                self._collective(unit.number, first, self.core if unit.early else 0.0)
            elif first.body is not None:
                self._loop(unit.number, first)
            else:
                self._kernel(unit.number, unit.members)
        made = self.made
        made.seconds = max([self.core, *(e.end for e in made.events)], default=0.0)
        sent = [(e.start, e.end) for e in made.events if e.move is not None]
        # A group that awaits the last piece of its operand computes at its end.
        busy = [(e.end - e.time.seconds if e.time else e.start, e.end) for e in made.events if e.move is None]
        made.exposed_seconds += uncovered(sent, busy)
        return made

    def _order(self) -> list[_Unit]:
        """Groups in the program's order, but collectives before the last product that they do not depend on."""
        units: list[_Unit] = []
        made: dict[Value, int] = {}  # value -> how many products came before it or made it
        waiting: list[_Unit] = []  # what has come since the last product, that product first
        products = number = 0
        for _, group in groupby(self.program.instructions, key=lambda i: i.group):
            members = list(group)
            unit = _Unit(number, members)
            number += len(members)
            depth = max((made.get(x, 0) for i in members for x in i.inputs), default=0)
            if any(i.opcode == "einsum" or i.body is not None for i in members):
                units += waiting
                waiting = []
                products += 1
                depth = products
            if members[0].is_collective and depth < products and self.overlap != "none":
                unit.early = True
                units.append(unit)
            else:
                waiting.append(unit)
                depth = max(depth, 0 if all(i.opcode in ("input", "variable") for i in members) else products)
            made.update({y: depth for i in members for y in i.outputs})
        return units + waiting

    def _collective(self, number: int, i: Instruction, earliest: float) -> None:
        (move,) = moves_of(self.program, i)
        ready = max([earliest, *(self.ready.get(x, 0.0) for x in i.inputs)])
        giver = self._giver(i, move)
        if giver is not None:
            ready = giver.start + giver.seconds / move.group
        event = self._send(number, move, i.region, ready, i.operation.source)
        end = event.end
        if giver is not None and event.end < giver.end + event.seconds / move.group:
            end = giver.end + event.seconds / move.group
            event = self._replaced(event, end)
        for y in i.outputs:
            self.ready[y] = end
            if move.kind == "all_gather":
                self.pieces[y] = event

    def _replaced(self, event: Event, end: float) -> Event:
        """The last event, lasting until `end`: its last piece had to wait."""
        longer = Event(
            event.start, end, event.first, event.region, move=event.move, cost=event.cost, name=event.name,
            source=event.source,
        )  # fmt: skip
        self.made.events[-1] = longer
        assert event.cost is not None
        for place, _ in event.cost.busy_seconds:
            self.free[place] = max(self.free.get(place, 0.0), end)
        return longer

    def _send(self, number: int, move: Move, region: str, ready: float, source: str) -> Event:
        cost = self.network.cost(move)
        seconds = cost.seconds + COLLECTIVE_LAUNCH_SECONDS
        places = [place for place, _ in cost.busy_seconds]
        start = max([ready, *(self.free.get(p, 0.0) for p in places)])
        if self.overlap == "none":
            start = max(start, self.core)
            self.core = start + seconds
        for p in places:
            self.free[p] = start + seconds
        for place, busy in cost.busy_seconds:
            self.made.use(place, busy)
        self.made.serial_seconds += seconds
        name = f"{move.kind} of {move.name}"
        event = Event(start, start + seconds, number, region, move=move, cost=cost, name=name, source=source)
        self.made.events.append(event)
        return event

    def _kernel(self, number: int, members: Sequence[Instruction]) -> None:
        inside = {y for i in members for y in i.outputs}
        operands = [x for i in members for x in i.inputs if x not in inside]
        kernel = kernel_of(self.program, members, self.fused, self.forward)
        if kernel.free:
            ready = max((self.ready.get(x, 0.0) for x in operands), default=0.0)
            for y in inside:
                self.ready[y] = ready
            return
        waits, floor = self._waits(members, operands)
        for i in members:
            for move in moves_of(self.program, i):
                waits = max(waits, self._send(number, move, i.region, waits, i.operation.source).end)
        time = self.times.of(kernel)
        start = max(self.core, waits)
        end = start + time.seconds
        for event, group in floor:
            end = max(end, event.end + time.seconds / group)
        self.core = end
        event = Event(
            start, end, number, kernel.region, kernel=kernel, time=time, name=kernel.name, source=kernel.source
        )
        self.made.events.append(event)
        for engine, seconds in (
            ("mxu", time.mxu_seconds), ("vpu", time.vpu_seconds), ("hbm", time.hbm_seconds)
        ):  # fmt: skip
            self.made.use(engine, seconds)
        self.made.serial_seconds += time.upper_seconds
        self._finish(inside, event)

    def _waits(
        self, members: Sequence[Instruction], operands: Sequence[Value]
    ) -> tuple[float, list[tuple[Event, int]]]:
        """When a group may start, and the collectives whose last piece it has to await before it ends."""
        waits, floor = 0.0, []
        taker = self.overlap == "collective matmul" and any(i.opcode == "einsum" for i in members)
        for x in operands:
            piece = self.pieces.get(x) if taker and len(self.users.get(x, ())) == 1 else None
            if piece is not None and piece.move is not None:
                waits = max(waits, piece.start + piece.seconds / piece.move.group)
                floor.append((piece, piece.move.group))
            else:
                waits = max(waits, self.ready.get(x, 0.0))
        return waits, floor

    def _finish(self, outputs: set[Value], event: Event) -> None:
        for y in outputs:
            self.ready[y] = event.end
            if self.users and event.kernel is not None and event.kernel.matmuls:
                self.pieces[y] = event

    def _giver(self, i: Instruction, move: Move) -> Event | None:
        """The product whose sum a reduce_scatter can take piece by piece."""
        if self.overlap != "collective matmul" or move.kind != "reduce_scatter" or len(i.inputs) != 1:
            return None
        found = self.pieces.get(i.inputs[0])
        return found if found is not None and found.kernel is not None else None

    def _loop(self, number: int, i: Instruction) -> None:
        assert i.body is not None
        body = schedule(i.body, self.times, self.network, self.overlap, self.forward)
        seconds = i.trips * body.seconds
        # What the body sends must not meet what is still on the way.
        places = [self.free.get(e, 0.0) for e in body.busy if isinstance(e, int)]
        start = max([self.core, *places, *(self.ready.get(x, 0.0) for x in i.inputs)])
        self.core = start + seconds
        op = i.operation
        event = Event(start, self.core, number, i.region, loop=body, trips=i.trips, name=op.name, source=op.source)
        self.made.events.append(event)
        for engine, busy in body.busy.items():
            self.made.use(engine, i.trips * busy)
            if isinstance(engine, int):
                self.free[engine] = max(self.free.get(engine, 0.0), self.core)
        self.made.serial_seconds += i.trips * body.serial_seconds
        self.made.exposed_seconds += i.trips * body.exposed_seconds
        self._finish(set(i.outputs), event)

    def _users(self) -> dict[Value, set[int]]:
        found: dict[Value, set[int]] = {}
        for i in self.program.instructions:
            for x in i.inputs:
                found.setdefault(x, set()).add(i.group)
        return found


def uncovered(intervals: Sequence[tuple[float, float]], covers: Sequence[tuple[float, float]]) -> float:
    """Length of the union of `intervals` minus the union of `covers`.

    >>> uncovered([(0.0, 4.0), (3.0, 6.0)], [(1.0, 2.0), (5.0, 9.0)])
    4.0
    """
    marks = [(a, 0, 1) for a, b in intervals if b > a] + [(b, 0, -1) for a, b in intervals if b > a]
    marks += [(a, 1, 1) for a, b in covers if b > a] + [(b, 1, -1) for a, b in covers if b > a]
    total, last, open_ = 0.0, 0.0, [0, 0]
    for at, which, change in sorted(marks):
        if open_[0] and not open_[1]:
            total += at - last
        last = at
        open_[which] += change
    return total
