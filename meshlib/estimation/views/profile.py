"""Profile of a step: time by unit, by kind of operation, by the user's line.

Every interval of the step is attributed to its bottleneck (`meshlib.estimation.time.attribution`), so shares add up to
the step. Busy times of units are listed as well: units work concurrently, so these do not add up.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from hardware.network import KINDS
from hardware.placement import DCN
from meshlib.core.arguments import at, choice, whole
from meshlib.core.compiler import Compiler
from meshlib.core.drawing import Panel, plotted
from meshlib.core.errors import GraphError
from meshlib.core.shown import Shown
from meshlib.core.source_lines import UNKNOWN_LINE
from meshlib.core.text import clipped, counted, ending, grid, seconds_text, wrapped
from meshlib.estimation.time.attribution import divided
from meshlib.estimation.time.scheduling import Event, StepSchedule
from meshlib.estimation.work.plan import kernels_of
from meshlib.program.instructions import Loop
from meshlib.program.records import Program

if TYPE_CHECKING:
    from meshlib.estimation.result import Estimate

LATENCY = "latency"  # launches, hops, the fixed cost of a step: no unit works
# Bottleneck of the schedule -> unit.
UNIT_OF = {
    **{"mxu": "MXU", "vpu": "VPU", "hbm": "HBM", "ici": "ICI", "dcn": "DCN"},
    **{"pcie": "host", "input": "host", "latency": LATENCY},
}
UNITS = tuple(dict.fromkeys(UNIT_OF.values()))
VIEWS = ("kind", "line", "operation", "phase")
AIM = 0.70  # of the MXU: "we try to shoot for about 70 percent", Training with TPUs, Google Cloud Next 2018
NAME = 40  # width of a name in a table
FEW = 4  # programs with at most this many lines also show operations
MOSTLY, WORTH = 0.5, 0.05  # of a step
BAR = 30  # width of a whole step
OVERHEAD, INPUT, SLOWEST, TRAFFIC = "step overhead", "input", "slowest slice", "memory of collectives"


@dataclass(frozen=True)
class ProfilePart:
    """One entry of a profile. Modelled except `measured_seconds`.

    Attributes:
      name: the operation; in a view by kind, line or phase, that kind, line or phase.
      kind: the kind of operation, such as "einsum" or "all_reduce"; "" for several kinds.
      source: the user's line; "" for several lines.
      phase: "forward", "backward" or "update"; "" for several phases.
      seconds: the part of the step attributed to it, by the unit (`UNITS`) that limits it.
      busy_seconds: for each unit, the time in which it works on this entry, overlapped or not.
      measured_seconds: measured device time, overlapped or not; None without a measurement.
    """

    name: str
    kind: str = ""
    source: str = ""
    phase: str = ""
    seconds: Mapping[str, float] = field(default_factory=dict)
    busy_seconds: Mapping[str, float] = field(default_factory=dict)
    measured_seconds: float | None = None

    @property
    def total_seconds(self) -> float:
        """Seconds of the step, over all bottlenecks."""
        return sum(self.seconds.values())


@dataclass(frozen=True)
class Measured:
    """Measured device times of a step, from JAX's profiler. Created by `OnJax.profile`.

    Attributes:
      step_seconds: duration of a step under the profiler, from feeds to results.
      seconds: device time, the mean over devices, by (name, kind, line, phase) of the instruction.
      other_seconds: device time of work that belongs to no instruction, or to one of several.
      devices: the devices, in words.
      steps: number of steps profiled.
    """

    step_seconds: float
    seconds: Mapping[tuple[str, str, str, str], float]
    other_seconds: float
    devices: str
    steps: int

    @property
    def device_seconds(self) -> float:
        """Busy seconds of a device per step."""
        return sum(self.seconds.values()) + self.other_seconds

    def by(self, view: str) -> dict[str, float]:
        """Seconds by "kind", "line", "operation" or "phase"."""
        place = {"operation": 0, "kind": 1, "line": 2, "phase": 3}[choice(view, "Measured.by", "view", VIEWS)]
        seconds_of: dict[str, float] = defaultdict(float)
        for key, seconds in self.seconds.items():
            seconds_of[key[place]] += seconds
        return dict(seconds_of)

    def of(self, est: Estimate) -> Measured:
        """The same by the events of an estimate; fused instructions count for their group."""
        owner = dict(_owners(est.program, est.schedule))
        seconds: dict[tuple[str, str, str, str], float] = defaultdict(float)
        for key, taken in self.seconds.items():
            seconds[owner.get(key[0], key)] += taken
        return replace(self, seconds=dict(seconds))

    def __str__(self) -> str:
        total = self.device_seconds
        cells = [("kind", "measured", "share")]
        for name, seconds in sorted(self.by("kind").items(), key=lambda item: -item[1]):
            cells.append((name, seconds_text(seconds), f"{seconds / total:.1%}"))
        if self.other_seconds:
            cells.append(("(of no instruction)", seconds_text(self.other_seconds), f"{self.other_seconds / total:.1%}"))
        head = (
            f"{self.devices}: {seconds_text(self.step_seconds)} a step, of it {seconds_text(total)} of work on each "
            f"device; mean of {self.steps}"
        )
        return "\n".join([head, *grid(cells, right=(1, 2))])


@dataclass(frozen=True, eq=False, repr=False)
class Profile(Shown):
    """Time of a step by bottleneck. Created by `Estimate.profile`. Modelled except measured times.

    Attributes:
      step_seconds: duration of the step.
      seconds: the step's time by the unit that limits it: MXU, VPU, HBM, ICI, DCN, host (preparing input, copies over
        PCIe), and latency, in which no unit works (launches of kernels and collectives, hops, the fixed cost of a
        step). The entries add up to `step_seconds`.
      busy_seconds: for each unit, the time in which it works; for ICI that of the busiest axis.
      parts: one entry per operation, the longest first.
      title: slice, mesh and layout in one line.
      compiler: the compiler whose schedule is modelled.
      measured: the measured profile of the same step on real devices; None without one.
    """

    step_seconds: float
    seconds: Mapping[str, float]
    busy_seconds: Mapping[str, float]
    parts: tuple[ProfilePart, ...]
    title: str
    compiler: Compiler
    measured: Measured | None = None

    @property
    def mxu_share(self) -> float:
        """Share of the step during which the MXU works; a talk of 2018 aims at 0.7."""
        return self.busy_seconds["MXU"] / self.step_seconds if self.step_seconds else 0.0

    def share(self, unit: str) -> float:
        """Share of the step that a unit bounds.

        Raises: GraphError for an unknown unit.
        """
        name = choice(unit, "Profile.share", "unit", UNITS)
        return self.seconds[name] / self.step_seconds if self.step_seconds else 0.0

    def by(self, view: str) -> list[ProfilePart]:
        """The parts grouped by "kind", "line", "operation" or "phase", slowest first.

        Raises: GraphError for another view.
        """
        choice(view, "Profile.by", "view", VIEWS)
        groups: dict[str, list[ProfilePart]] = defaultdict(list)
        for part in self.parts:
            groups[_key(part, view)].append(part)
        measured = self.measured.by(view) if self.measured is not None else {}
        for name in measured:
            groups.setdefault(name, [])
        groups_of_parts = [_together(name, members, measured.get(name)) for name, members in groups.items()]
        return sorted(groups_of_parts, key=lambda p: (-p.total_seconds, -(p.measured_seconds or 0.0), p.name))

    def table(self, rows: int | None = 12) -> str:
        """The profile as text: units, kinds of operations, lines, operations; `rows` of each, None shows all.

        Raises: GraphError where rows is neither a number nor None.
        """
        if rows is not None and whole(rows, "Profile.table", "rows") < 0:
            raise GraphError(f"{at('Profile.table')}: rows must not be negative, got {rows}")
        blocks = [self._units(), self._view("kind", "kind", rows)]
        if any(p.source and p.source[0] != "(" and p.source != UNKNOWN_LINE for p in self.parts):
            blocks.append(self._view("line", "your line", rows))
        if len(self.by("line")) <= FEW:  # a library model is a single line of the user's program
            blocks.append(self._view("operation", "operation", rows))
        blocks.append(["* modelled: shares of the step, each moment given to what bounds it", *self._measured_lines()])
        return "\n\n".join("\n".join(lines) for lines in blocks)

    def plot(self, ax: Any = None, view: str | None = None) -> Any:
        """Draw one bar per line of the program and kind of operation, divided by unit; needs matplotlib.

        Args:
          ax: matplotlib Axes for one of the two, or the path of a file (.png, .svg, .pdf) for both; by default a new
            figure of both.
          view: on Axes that are given: "kind", "line", "operation" or "phase".
        Returns: the Axes, of a whole figure both.
        Raises: GraphError where matplotlib is missing, the file cannot be written, or for another view.
        """
        if view is not None:
            choice(view, "Profile.plot", "view", VIEWS)
        first = "line" if len(self.by("line")) > FEW else "operation"
        views = dict.fromkeys((view or first, "kind"))
        works = f"{seconds_text(self.step_seconds)} a step, the MXU works {self.mxu_share:.0%} of it"
        title = "\n".join([*wrapped(self.title, "", ";"), works])
        return plotted(
            "Profile.plot", ax, [self._panel(name) for name in views], (9, 3 * len(views)), len(views), title
        )

    def __str__(self) -> str:
        return self.table()

    def __repr__(self) -> str:
        step = f"{seconds_text(self.step_seconds)}* a step, the MXU works {self.mxu_share:.1%}*"
        return clipped(f"<Profile: {step}; {self.title}>")

    def _units(self) -> list[str]:
        cells = [("", "bounds*", "works*", "")]
        for unit in UNITS:
            busy = self.busy_seconds.get(unit, 0.0)
            if self.seconds[unit] or busy:
                works = "" if unit == LATENCY else self._percent(busy)
                cells.append(
                    (f"  {unit}", self._percent(self.seconds[unit]), works, "#" * round(BAR * self.share(unit)))
                )
        advice = f"; aim at about {AIM:.0%}" * (self.mxu_share < AIM)
        if self.share(LATENCY) > MOSTLY:
            advice = "; larger blocks on each device would hide latency"
        return [
            *wrapped(self.title, "", ";"),
            f"compiler: {self.compiler}",
            f"{seconds_text(self.step_seconds)} a step*, of which each unit",
            *grid(cells, right=(1, 2)),
            *self._waits(),
            f"the MXU works {self.mxu_share:.1%} of the step{advice}",
        ]

    def _waits(self) -> list[str]:
        """The components of latency in one line, if latency bounds a significant part of the step."""
        if self.share(LATENCY) < WORTH:
            return []
        causes: dict[str, float] = defaultdict(float)
        for p in self.parts:
            fixed = "the fixed cost of a step" if p.name == OVERHEAD else "starts of kernels"
            causes["starts and hops of collectives" if p.kind in KINDS else fixed] += p.seconds.get(LATENCY, 0.0)
        shares = [f"{cause} {self._percent(s)}" for cause, s in sorted(causes.items(), key=lambda c: -c[1]) if s]
        return [f"latency, in which no unit works: {', '.join(shares)}"]

    def _percent(self, seconds: float) -> str:
        share = seconds / self.step_seconds if self.step_seconds else 0.0
        return f"{share:.1%}" if share >= 0.0005 else "-"

    def _view(self, view: str, title: str, rows: int | None) -> list[str]:
        parts = [p for p in self.by(view) if p.total_seconds or p.measured_seconds]
        shown, rest = (parts, []) if rows is None else (parts[:rows], parts[rows:])
        units = [u for u in UNITS if self.seconds[u]]
        cells = [self._head(title, units), *(self._cells(ending(p.name, NAME), [p], units) for p in shown)]
        if rest:
            cells.append(self._cells(f"... {len(rest)} more", rest, units))
        return grid(cells, right=range(1, len(cells[0])))

    def _head(self, title: str, units: Sequence[str]) -> tuple[str, ...]:
        measured = ("measured", "share") if self.measured is not None else ()
        return (title, "time*", "share*", *units, *measured)

    def _cells(self, name: str, parts: Sequence[ProfilePart], units: Sequence[str]) -> tuple[str, ...]:
        total = sum(p.total_seconds for p in parts)
        by_unit = [sum(p.seconds.get(unit, 0.0) for p in parts) for unit in units]
        cells = [name, seconds_text(total) if total else "-", self._percent(total)]
        cells += [self._percent(s) for s in by_unit]
        if self.measured is not None:
            measured_seconds = sum(p.measured_seconds or 0.0 for p in parts)
            whole_seconds = self.measured.device_seconds
            cells += (
                [seconds_text(measured_seconds), f"{measured_seconds / whole_seconds:.1%}"]
                if measured_seconds
                else ["-", "-"]
            )
        return tuple(cells)

    def _measured_lines(self) -> list[str]:
        if self.measured is None:
            return []
        m = self.measured
        other = f", of which {seconds_text(m.other_seconds)} belong to no instruction" if m.other_seconds else ""
        return [
            f"measured on {m.devices}, mean of {counted(m.steps, 'step')}: {seconds_text(m.step_seconds)} a step under "
            f"the profiler, {seconds_text(m.device_seconds)} of work on each device{other}"
        ]

    def _panel(self, view: str) -> Panel:
        from meshlib.report.plots import colour

        def panel(axes: Any) -> None:
            shown = [p for p in self.by(view)[:10] if self._percent(p.total_seconds) != "-"][::-1]
            left = [0.0] * len(shown)
            for unit in UNITS:
                share = [100 * p.seconds.get(unit, 0.0) / self.step_seconds for p in shown]
                face = colour(f"u-{unit.lower()}")
                axes.barh([p.name for p in shown], share, left=left, label=unit if any(share) else None, color=face)
                left = [a + b for a, b in zip(left, share, strict=True)]
            axes.set_title(f"by {view}", fontsize=9, loc="left")
            axes.set_xlabel("% of the step (modelled)", fontsize=8)
            axes.tick_params(labelsize=8)
            axes.spines[["top", "right"]].set_visible(False)
            axes.legend(fontsize=8, frameon=False, loc="lower right")

        return panel


def profile(est: Estimate, measured: object = None) -> Profile:
    """`Estimate.profile`."""
    if measured is not None and not isinstance(measured, Measured):
        raise GraphError(
            f"{at('Estimate.profile')}: measured must be what run.profile(...) of an mtf.on_jax run returns, "
            f"got {type(measured).__name__} {measured!r:.80}"
        )
    seconds_of: dict[tuple[str, str, str, str], tuple[dict[str, float], dict[str, float]]] = {}

    def part(*key: str) -> tuple[dict[str, float], dict[str, float]]:
        return seconds_of.setdefault((*key, *("",) * (4 - len(key))), (defaultdict(float), defaultdict(float)))  # type: ignore[arg-type]

    for event, bound, seconds in divided(est.schedule, est.slice.chip):
        part(*_named(event))[0][UNIT_OF[bound]] += seconds
    for event, times in _events(est.schedule):
        for unit, seconds in _busy(event):
            part(*_named(event))[1][unit] += times * seconds
    for name, unit, seconds in (
        (OVERHEAD, LATENCY, est.step_overhead_seconds),
        (SLOWEST, "DCN", est.jitter_seconds),
        (INPUT, "host", est.input_wait_seconds),
    ):
        if seconds:
            part(name, name, f"({name})")[0][unit] += seconds
    if est.input is not None:
        part(INPUT, INPUT, f"({INPUT})")[1]["host"] += est.input.seconds
    parts = [ProfilePart(*key, dict(seconds), dict(busy)) for key, (seconds, busy) in seconds_of.items()]
    parts.sort(key=lambda p: -p.total_seconds)
    totals = {unit: sum(p.seconds.get(unit, 0.0) for p in parts) for unit in UNITS}
    title = f"{est.slice.name}, mesh {est.program.mesh}, layout {est.program.layout or '(none)'}"
    seen = None if measured is None else measured.of(est)
    return Profile(est.step_seconds, totals, _working(est), tuple(parts), title, est.compiler, seen)


def _owners(program: Program, schedule: StepSchedule) -> Iterator[tuple[str, tuple[str, str, str, str]]]:
    """(scope of an instruction, (name, kind, line, phase) of the event that runs it)."""
    events = {e.first: e for e in schedule.events}
    for members in kernels_of(program):
        event = events.get(members[0].group)
        if event is None:
            continue
        for i in members:
            if isinstance(i, Loop):
                if event.loop is not None:
                    yield from _owners(i.body, event.loop)
            else:
                yield i.scope, _named(event)


def _working(est: Estimate) -> dict[str, float]:
    """Busy seconds of each unit per step."""
    engines = est.engine_seconds
    links = [seconds for name, seconds in engines.items() if name.startswith("ici") or name == "core to core"]
    copies = max(engines.get("to_host", 0.0), engines.get("from_host", 0.0))
    return {
        "MXU": engines.get("mxu", 0.0),
        "VPU": engines.get("vpu", 0.0),
        "HBM": engines.get("hbm", 0.0),
        "ICI": max(links, default=0.0),
        "DCN": engines.get("dcn", 0.0),
        "host": max(copies, est.input.seconds if est.input is not None else 0.0),
    }


def _events(schedule: StepSchedule, times: int = 1) -> Iterator[tuple[Event, int]]:
    """All events except loops, with the number of runs."""
    for event in schedule.events:
        if event.loop is not None:
            yield from _events(event.loop, event.runs(times))
        else:
            yield event, times


def _named(event: Event | None) -> tuple[str, str, str, str]:
    """(name, kind, line, phase) of an event; None is HBM's remaining traffic for collectives."""
    if event is None:
        return TRAFFIC, TRAFFIC, f"({TRAFFIC})", ""
    kind = (
        event.kernel.opcode if event.kernel else event.move.kind if event.move else event.copy[0] if event.copy else ""
    )
    return event.name, kind, event.source, event.region


def _busy(event: Event) -> list[tuple[str, float]]:
    """Busy seconds of each unit for an event."""
    if event.time is not None:
        time = event.time
        return [("MXU", time.mxu_seconds), ("VPU", time.vpu_seconds), ("HBM", time.hbm_seconds)]
    if event.cost is not None:
        inside = max((s for place, s in event.cost.busy_seconds if place != DCN), default=0.0)
        return [("ICI", inside), ("DCN", sum(s for place, s in event.cost.busy_seconds if place == DCN))]
    return [("host", event.seconds)]


def _key(part: ProfilePart, view: str) -> str:
    return {"kind": part.kind, "line": part.source, "operation": part.name, "phase": part.phase or part.kind}[view]


def _together(name: str, parts: Sequence[ProfilePart], measured: float | None) -> ProfilePart:
    def one(values: Iterator[str]) -> str:
        distinct = set(values)
        return distinct.pop() if len(distinct) == 1 else ""

    def total(which: str) -> dict[str, float]:
        sums: dict[str, float] = defaultdict(float)
        for part in parts:
            for unit, seconds in getattr(part, which).items():
                sums[unit] += seconds
        return dict(sums)

    return ProfilePart(
        name,
        one(p.kind for p in parts),
        one(p.source for p in parts),
        one(p.phase for p in parts),
        total("seconds"),
        total("busy_seconds"),
        measured,
    )
