"""A deterministic schedule of the program's order over the engines of one device.

The core runs one fusion group at a time, in the program's order (`kernel_times`), while HBM prefetches (`hbm_engine`).
A collective starts when its operands are ready, shares its resources (chip, torus axes, DCN) with concurrent transfers
(`link_sharing`), and delays only the first group that uses its result. Small collectives are merged
(`combined_collectives`). Overlap policies of a compiler (`meshlib.core.compiler`):

    none                collectives and kernels run one after the other
    independent         a collective overlaps with work that does not depend on it
    collective matmul   also, a large all_gather that feeds products, and a large reduce_scatter or all_reduce of a
                        kernel's result, run in one piece per device of the group: consumer and producer are pipelined
                        by pieces. Consecutive products of one gathered value share its window: only the last of them
                        waits for the last piece

Work whose operands are in flight and that no large work depends on (a weight update by its gradient) blocks nothing:
it is postponed until they have arrived. A collective that the program issues early starts when the core reaches the
product that follows it. A collective is chained if the first product after it needs its result, or if no product
follows; only chained ones are cut in pieces. Overlap has a cost: the core loses a share of the time in which links are
busy with unchained collectives (`Physics.early_exposed`), and HBM bandwidth goes to their bytes. Time in which the core
stalls pays for both, so overlap never costs more than it hides. Collectives on SparseCores
(`Compiler.sparse_core_collectives`) cost the core nothing.

Copies to and from the host run asynchronously, a loop trip early or late, and block nothing; but a program, or a trip,
lasts at least as long as its copies take in either direction. Those of an update (optimizer state in host memory) begin
with the update, since memory may be full before it; they are serial in each direction, and a result is copied out after
its operands were copied in.

A loop is its body's schedule, repeated `trips` times; trips overlap only if they are unrolled (`unrolled_loops`): a
transfer may then end in the next trip. Some trips of a pipeline are a bubble, in which idle stages compute discarded
values.

Sources: Wang et al., "Overlap communication with dependent computation via decomposition", ASPLOS 2023 (collective
matmul); openxla/xla latency_hiding_scheduler (start and done).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hardware.collective_kinds import COLLECTIVE_KINDS
from hardware.memory import hbm_seconds, pcie_seconds
from hardware.network import Cost
from hardware.placement import Placement
from layouts.step_kinds import STEP_KINDS
from meshlib.core.compiler import Compiler
from meshlib.core.graph import UPDATE
from meshlib.core.loop_record import TimedTask, Timing
from meshlib.core.shown import Brief
from meshlib.estimation.time.hbm_engine import Hbm
from meshlib.estimation.time.kernel_times import KernelTime, Times
from meshlib.estimation.time.link_sharing import LinkTimes, Moved
from meshlib.estimation.time.physics import Physics
from meshlib.estimation.work.communication import Communication, Network, launch_seconds
from meshlib.estimation.work.kernels import Kernel
from meshlib.estimation.work.units import HOST_COPIES, Unit, UnitPlan


class Event(NamedTuple):
    """Something that runs from `start` to `end`, in seconds from the start of the program or trip."""

    start: float
    end: float
    first: int  # number of its first instruction
    region: str
    kernel: Kernel | None = None
    time: KernelTime | None = None
    move: Communication | None = None
    cost: Cost | None = None
    loop: StepSchedule | None = None
    trips: float = 1  # for a branch: share of the enclosing loop's trips in which a device runs it
    active: float = 1.0  # for a loop: share of its work that counts
    branch: str | None = None  # kind of branch
    stages: Sequence[Sequence[TimedTask]] = ()  # for a loop whose pipeline stages wait for each other: tasks of each
    copy: tuple[str, int] | None = None  # (direction, bytes) of a copy to or from the host
    name: str = ""
    source: str = ""

    @property
    def on_core(self) -> bool:
        """True if it occupies the core: a fusion group or a loop."""
        return self.time is not None or self.loop is not None

    @property
    def seconds(self) -> float:
        """Seconds from start to end."""
        return self.end - self.start

    def runs(self, times: int) -> int:
        """Number of runs of a loop's body, if its surroundings run `times` times."""
        return round(times * self.trips)


@dataclass(slots=True, repr=False)
class StepSchedule(Brief):
    """The events of a program in the order of placement, and totals in seconds.

    `busy`: busy seconds per engine ("mxu", "vpu", "hbm", a network resource by number); `serial_seconds`: the time
    without any overlap; `exposed_seconds`: time in which a transfer runs and the core is idle, `host_exposed_seconds`
    that of copies to and from the host; `core_seconds`: the end of the last kernel, though transfers may still run;
    `spare_seconds`: idle HBM time usable for prefetching the next trip; `bubble_seconds`: core time spent in pipeline
    bubbles, whose results are discarded.
    """

    events: list[Event] = field(default_factory=list)
    seconds: float = 0.0
    busy: dict[str | int, float] = field(default_factory=dict)
    serial_seconds: float = 0.0
    exposed_seconds: float = 0.0
    host_exposed_seconds: float = 0.0
    core_seconds: float = 0.0
    spare_seconds: float = 0.0
    bubble_seconds: float = 0.0

    @property
    def host_seconds(self) -> float:
        """Seconds of copies to or from the host, the longer direction."""
        return max(self.busy.get(direction, 0.0) for direction in HOST_COPIES)

    def use(self, engine: str | int, seconds: float) -> None:
        """Add busy time of an engine."""
        self.busy[engine] = self.busy.get(engine, 0.0) + seconds


def schedule(
    plan: UnitPlan, times: Times, network: Network, compiler: Compiler, spare_seconds: float | None = None
) -> StepSchedule:
    """The schedule of a plan from 0, under a compiler's policy of overlap and loop unrolling.

    `spare_seconds`: HBM time before the start usable for prefetching; None for a program.
    """
    return _SchedulePass(plan, times, network, compiler, spare_seconds).run()


def scheduled(plan: UnitPlan, placement: Placement, physics: Physics, compiler: Compiler) -> StepSchedule:
    """The schedule of a whole program on one device; a single kernel has the chip for itself."""
    times = Times(placement.slice.chip, physics, alone=plan.kernels == 1)
    return schedule(plan, times, Network(placement), compiler)


class _SchedulePass:
    def __init__(
        self, plan: UnitPlan, times: Times, network: Network, compiler: Compiler, spare_seconds: float | None
    ) -> None:
        self.plan, self.times, self.network, self.compiler = plan, times, network, compiler
        self.overlap, self.unrolled = compiler.overlap, compiler.unrolled_loops
        self.schedule = StepSchedule()
        self.core = 0.0  # time at which the core becomes free
        self.owed_seconds = 0.0  # core time owed to concurrent collectives; waiting of the core pays for it
        self.ready: dict[int, float] = {}
        self.links = LinkTimes()
        self.pieces: dict[int, Event] = {}  # values that a collective matmul may consume or produce in pieces
        self.sent: dict[int, tuple[int, ...]] = {}  # event number of a collective -> values that it delivers
        self.hbm = Hbm(times.ahead_seconds, spare_seconds)
        self.postponed: list[Unit] = []  # postponed units, and the values that they produce
        self.awaited: set[int] = set()
        self.windows: dict[int, float] = {}  # gathered value -> seconds of the products that have consumed its pieces
        self.brought: dict[int, float] = {}  # value -> time at which everything it depends on has come from the host
        self.update_copies: dict[str, float] = {}  # direction -> end of its last copy during the update

    def run(self) -> StepSchedule:
        for unit in self.plan.units:
            if self.postponed:
                self._run_postponed()
            if not self._postpone(unit):
                self._place(unit)
        schedule = self.schedule
        later = sum(self.times.of(u.kernel).seconds for u in self.postponed if u.kernel)
        schedule.core_seconds = self.core + max(self.owed_seconds, self.hbm.owed_seconds) + later
        while self.postponed:
            self._place_postponed(min(self.postponed, key=self._earliest_start))
        end = max([self.core + self.owed_seconds, *(e.end for e in schedule.events if e.copy is None)])
        self.hbm.idle(end - self.core)
        schedule.spare_seconds = self.hbm.spare_seconds or 0.0
        schedule.seconds = end + self.hbm.owed_seconds
        sent = [(e.start, e.end) for e in schedule.events if e.move is not None]
        computed = [e for e in schedule.events if e.on_core]
        # A group that awaits the last piece of its operand computes at its end.
        busy = [(e.end - e.time.seconds if e.time else e.start, e.end) for e in computed]
        schedule.exposed_seconds += uncovered(sent, busy)
        copies = max(schedule.host_seconds, *self.update_copies.values(), 0.0)
        schedule.host_exposed_seconds += max(0.0, copies - schedule.seconds)
        schedule.seconds = max(schedule.seconds, copies)
        return schedule

    def _postpone(self, unit: Unit) -> bool:
        """Postpone a unit whose operands are in flight, if no large unit depends on it; returns whether it did."""
        if unit.leads_on or self.overlap == "none":
            return False
        if self.awaited.isdisjoint(unit.inputs) and (unit.kernel is None or self._operands_ready(unit) <= self.core):
            return False
        self.postponed.append(unit)
        self.awaited.update(unit.outputs)
        return True

    def _earliest_start(self, unit: Unit) -> float:
        """Earliest start of a postponed unit."""
        return math.inf if not self.awaited.isdisjoint(unit.inputs) else self._operands_ready(unit)

    def _run_postponed(self) -> None:
        """Run postponed units whose operands have arrived."""
        for unit in [*self.postponed]:
            if self._earliest_start(unit) <= self.core:
                self._place_postponed(unit)

    def _place_postponed(self, unit: Unit) -> None:
        self.postponed.remove(unit)
        self.awaited.difference_update(unit.outputs)
        self._place(unit)

    def _place(self, unit: Unit) -> None:
        if unit.body is not None:
            self._loop(unit, unit.body)
        elif unit.kernel is not None:
            self._kernel(unit, unit.kernel)
        elif unit.host_bytes is not None:
            self._copy(unit, *unit.host_bytes)
        else:
            self._collective(unit)

    def _operands_ready(self, unit: Unit) -> float:
        """Time at which all operands of a unit are available."""
        ready, times = 0.0, self.ready
        for x in unit.inputs:
            time = times.get(x, 0.0)
            if time > ready:
                ready = time
        return ready

    def _event(self, unit: Unit, start: float, end: float, **what: Any) -> Event:
        """Record an event of a unit."""
        what.setdefault("name", unit.name)
        event = Event(start, end, unit.number, unit.region, source=unit.source, **what)
        self.schedule.events.append(event)
        return event

    def _host_arrival(self, unit: Unit) -> float:
        """Time at which everything that a unit's operands depend on has come from the host."""
        return max((self.brought.get(x, 0.0) for x in unit.inputs), default=0.0)

    def _copy(self, unit: Unit, direction: str, size: int) -> None:
        seconds = pcie_seconds(self.times.chip, size)
        self.ready.update(dict.fromkeys(unit.outputs, self._operands_ready(unit)))
        start = self.schedule.busy.get(direction, 0.0)
        if unit.region == UPDATE:
            start = max(
                self._operands_ready(unit), self._host_arrival(unit), self.update_copies.get(direction, self.core)
            )
            self.update_copies[direction] = start + seconds
            self.brought.update(dict.fromkeys(unit.outputs, start + seconds))
        self.schedule.use(direction, seconds)
        self.schedule.serial_seconds += seconds
        self._event(unit, start, start + seconds, copy=(direction, size))

    def _collective(self, unit: Unit) -> None:
        (move,) = unit.moves
        ready = max(self.core if unit.early else 0.0, self._operands_ready(unit))
        kernel = self._summed_kernel(unit, move) if unit.chained else None
        if kernel is not None:
            ready = kernel.start + kernel.seconds / move.group
        in_pieces = unit.chained and self.compiler.cuts_in_pieces(move.larger_bytes)
        compiled = self.network.as_sum(move) if self.compiler.torus_sums and not in_pieces else move
        cost = self.network.cost(compiled)
        event = self._send(unit, move, cost, ready)
        if kernel is not None:
            end = kernel.end + event.seconds / move.group
            if event.end < end:  # its last piece has to wait
                event = self.schedule.events[-1] = event._replace(end=end)
        elif self.overlap != "none" and not unit.chained and not self.compiler.offloads(move.kind, self.times.chip):
            self.owed_seconds += self.times.physics.early_exposed * cost.on_wire.seconds
        if self.overlap != "none":
            once = hbm_seconds(self.times.chip, move.larger_bytes)
            self.hbm.owe(COLLECTIVE_KINDS[compiled.kind].hbm_passes * once)
            if compiled is not move and STEP_KINDS[move.kind].gathers:
                self.owed_seconds += once  # a kernel writes the zeros around each block
        self.sent[len(self.schedule.events) - 1] = unit.outputs
        for y in unit.outputs:
            self.ready[y] = event.end
            if STEP_KINDS[move.kind].gathers and in_pieces:
                self.pieces[y] = event

    def _send(self, unit: Unit, move: Communication, cost: Cost, ready: float) -> Event:
        seconds = cost.seconds + launch_seconds(cost, self.times.chip)
        if self.overlap == "none":
            ready = max(ready, self.core)
        # A collective shares links with those in flight.
        start, sent, delayed = self.links.send(len(self.schedule.events), cost, ready)
        for other in delayed:
            self._delay(other)
        end = sent + seconds - cost.seconds
        if self.overlap == "none":
            self.core = end
        for place, busy in cost.busy_seconds:
            self.schedule.use(place, busy)
        self.schedule.serial_seconds += seconds
        name = f"{move.kind} of {move.name}"
        return self._event(unit, start, end, move=move, cost=cost, name=name)

    def _delay(self, moved: Moved) -> None:
        """Move the end of a collective that now shares its links with another."""
        event = self.schedule.events[moved.event]
        later = event._replace(start=moved.begin, end=event.end + moved.late_seconds)
        self.schedule.events[moved.event] = later
        for y in self.sent.get(moved.event, ()):
            self.ready[y] = later.end
            if self.pieces.get(y) is event:
                self.pieces[y] = later

    def _kernel(self, unit: Unit, kernel: Kernel) -> None:
        if self.brought:
            self.brought.update(dict.fromkeys(unit.outputs, self._host_arrival(unit)))
        if kernel.free:
            self.ready.update(dict.fromkeys(unit.outputs, self._operands_ready(unit)))
            return
        waits, window = self._waits(unit)
        for move in unit.moves:
            waits = max(waits, self._send(unit, move, self.network.cost(move), waits).end)
        time = self.times.of(kernel)
        start = max(self._pay_debt(), waits)
        time = self.hbm.run(time, self.core, start)
        end = computed = start + time.seconds
        for x, gather, group in window:
            taken = self.windows[x] = self.windows.get(x, 0.0) + time.seconds
            if x in unit.closes:  # the last piece arrives and passes through all products of the window
                end = max(end, gather.end + taken / group)
        self.hbm.idle(end - computed)
        self.core = end
        event = self._event(unit, start, end, kernel=kernel, time=time)
        busy = self.schedule.busy
        for engine, seconds in (("mxu", time.mxu_seconds), ("vpu", time.vpu_seconds), ("hbm", time.hbm_seconds)):
            busy[engine] = busy.get(engine, 0.0) + seconds
        self.schedule.serial_seconds += time.upper_seconds
        self._finish(unit, event)

    def _pay_debt(self) -> float:
        """Set the core time owed to concurrent collectives to 0; returns when the core has paid it."""
        paid, self.owed_seconds = self.core + self.owed_seconds, 0.0
        return paid

    def _waits(self, unit: Unit) -> tuple[float, list[tuple[int, Event, int]]]:
        """Earliest start of a group, and operands consumed in pieces: (value, collective, number of pieces)."""
        if not unit.product:
            return self._operands_ready(unit), []
        waits, window = 0.0, []
        for x in unit.inputs:
            piece = self.pieces.get(x)
            if piece is not None and piece.move is not None:
                waits = max(waits, piece.start + piece.seconds / piece.move.group)
                window.append((x, piece, piece.move.group))
            else:
                waits = max(waits, self.ready.get(x, 0.0))
        return waits, window

    def _finish(self, unit: Unit, event: Event) -> None:
        for y in unit.outputs:
            self.ready[y] = event.end
            if event.kernel is not None:
                self.pieces[y] = event

    def _summed_kernel(self, unit: Unit, move: Communication) -> Event | None:
        """The kernel whose sum a reduction can consume in pieces."""
        if not STEP_KINDS[move.kind].reduces or len(unit.inputs) != 1:
            return None
        if not self.compiler.cuts_in_pieces(move.larger_bytes):
            return None
        producer = self.pieces.get(unit.inputs[0])
        return producer if producer is not None and producer.kernel is not None else None

    def _loop(self, unit: Unit, plan: UnitPlan) -> None:
        body = schedule(plan, self.times, self.network, self.compiler, 0.0)
        if body.spare_seconds and unit.trips > 1:  # spare HBM time at the end of a trip prefetches for the next
            body = schedule(plan, self.times, self.network, self.compiler, body.spare_seconds)
        period, tail = body.seconds, 0.0
        if self.unrolled:
            period = max(
                [body.core_seconds, body.host_seconds, *(s for e, s in body.busy.items() if isinstance(e, int))]
            )
            tail = max(0.0, body.seconds - period)
        seconds, idle = unit.trips * period, 0.0
        stages = _stage_runs(unit.timing, body)
        if stages:
            seconds = max(row[-1].end for row in stages)
            idle = seconds - sum(run.end - run.start for row in stages for run in row) / len(stages)
        # The body's collectives do not overlap those in flight.
        places = [e for e in body.busy if isinstance(e, int)]
        start = max([self._pay_debt(), self._operands_ready(unit), *map(self.links.free, places)])
        self.core = start + seconds
        for place in places:
            self.links.block(place, self.core)
        event = self._event(
            unit, start, self.core + tail, loop=body, trips=unit.trips, active=unit.active, branch=unit.branch,
            stages=stages if idle > 0.0 else (),
        )  # fmt: skip
        for engine, busy in body.busy.items():
            self.schedule.use(engine, unit.trips * busy)
        self.schedule.serial_seconds += unit.trips * body.serial_seconds
        bare = body.exposed_seconds - tail if self.unrolled else body.exposed_seconds
        self.schedule.exposed_seconds += unit.trips * max(0.0, bare)
        self.schedule.bubble_seconds += idle
        if not idle and (unit.branch is None or unit.trips == 1):
            self.schedule.bubble_seconds += seconds * (1 - unit.active) + unit.trips * unit.active * body.bubble_seconds
        self.schedule.host_exposed_seconds += unit.trips * body.host_exposed_seconds
        self._finish(unit, event)


def _stage_runs(timing: Timing | None, body: StepSchedule) -> Sequence[Sequence[TimedTask]]:
    """Per stage, the tasks of a loop whose devices run different branches per trip; () if they run the same ones.

    `body` is an average trip.
    """
    branches = [e for e in body.events if e.branch is not None and e.loop is not None]
    if timing is None or any(e.trips == 1 for e in branches):  # all of them run in each trip
        return ()
    rest = body.seconds - sum(e.seconds for e in branches)
    return timing.stage_runs({e.branch or "": e.loop.seconds for e in branches if e.loop}, max(0.0, rest))


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
