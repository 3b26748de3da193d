"""A schedule as Chrome-trace JSON for ui.perfetto.dev: one track per engine, HBM as counters.

    phase            forward, backward, update
    loop             the trips of loops, a track for each depth
    core             fusion groups with their launches; the fixed cost of the step at the end
    mxu  vpu  hbm    when these engines work for them
    to_host, from_host   copies over PCIe
    ici ..., dcn     collectives on the places that they cross
    exposed          what is sent while the core computes nothing
    bound by         what each moment of the step waits for

Times are whole nanoseconds, written in microseconds as the format asks. Slices are "X" events (begin and duration in
one), sorted by time; on one track none overlaps another. Arrows ("s" and "f" events) lead from the start of a
collective to all that read what it brings. What runs a second time for the backward pass is marked "(again)". Loops
show all their trips; where that would be more than `SLICE_LIMIT` slices, the first trips and then, on each engine, one
slice for the rest.

Source: "Trace Event Format", the Chromium project, 2016; perfetto.dev docs on JSON traces.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from hardware.placement import places
from meshlib.core.errors import GraphError
from meshlib.core.files import replace_file
from meshlib.core.graph import FORWARD
from meshlib.core.text import counted
from meshlib.estimation.result import Estimate, engine_name
from meshlib.estimation.time.attribution import exposed, moments
from meshlib.estimation.time.scheduling import Event, StepSchedule
from meshlib.estimation.views.profile import LATENCY, UNIT_OF, UNITS
from meshlib.estimation.views.rows import names_of_forward
from meshlib.estimation.work.units import HOST_COPIES, UnitPlan
from meshlib.program.analysis.memory import KINDS

PHASE, LOOP, CORE, EXPOSED, BOUND = "phase", "loop", "core", "exposed", "bound by"
FLOW = "what is sent, to what reads it"
COUNTER = "HBM bytes (exact)"
WORKING = "MXU works, % (modelled)"
WINDOWS = 100  # windows per step for the counter of MXU utilisation
SLICE_LIMIT = 50_000
TRIPS_SHARE = "share of the time that it works (modelled)"  # of an engine, over trips not shown individually


Flows = Mapping[int, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Span:
    """A slice on a track: nanoseconds from the start of the step."""

    track: str
    name: str
    begin: int
    end: int
    args: dict[str, Any]
    opens: tuple[int, ...] = ()  # flows from here to the consumers of what it sends
    closes: tuple[int, ...] = ()


def trace_events(est: Estimate) -> list[dict[str, Any]]:
    """The trace's JSON events: track names first, then everything by time."""
    spans = _serialised(est, (s for s in _Writer(est).spans() if s.end > s.begin))
    number = {name: n for n, name in enumerate(_tracks(est, {s.track for s in spans}), start=1)}
    events = [_named("process_name", f"one device of {est.slice.name} (modelled times, exact counts)", 0)]
    for name, n in number.items():
        events.append(_named("thread_name", name, n))
        events.append({"ph": "M", "pid": 1, "tid": n, "name": "thread_sort_index", "args": {"sort_index": n}})
    timed: list[dict[str, Any]] = [
        {
            "ph": "X", "pid": 1, "tid": number[s.track], "name": s.name, "cat": s.track,
            "ts": s.begin / 1000, "dur": (s.end - s.begin) / 1000, "args": s.args,
        }
        for s in spans
    ]  # fmt: skip
    timed += _flow_events(spans, number)
    timed += _counters(est)
    timed += _working(est, [s for s in spans if s.track == "mxu"])
    return events + sorted(timed, key=lambda e: (e["ts"], e.get("tid", 0)))


def _flow_events(spans: Sequence[Span], number: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    """Arrows from the start of a collective to its consumers; a slice cut in pieces has them on the first piece."""
    opened: dict[int, Span] = {}
    for s in sorted(spans, key=lambda s: s.begin):
        for n in s.opens:
            opened.setdefault(n, s)
    for target in spans:
        for n in target.closes:
            if (origin := opened.get(n)) is not None:
                common = {"pid": 1, "id": n, "cat": FLOW, "name": origin.name}
                yield {"ph": "s", "ts": origin.begin / 1000, "tid": number[origin.track], **common}
                yield {"ph": "f", "bp": "e", "ts": target.begin / 1000, "tid": number[target.track], **common}


def _serialised(est: Estimate, spans: Iterable[Span]) -> list[Span]:
    """Link slices one at a time: a slice that a smaller one passes pauses, and its rest comes later."""
    network = {engine_name(place) for place, _ in places(est.slice)}
    pieces: list[Span] = []
    sent = defaultdict[str, list[Span]](list)
    for s in spans:
        (sent[s.track] if s.track in network else pieces).append(s)
    for track in sent.values():
        turns = [(s.begin, s.end, n, s) for n, s in enumerate(track)]
        heapify(turns)
        while turns:
            begin, end, n, s = heappop(turns)
            if turns and turns[0][0] < end:
                passing = turns[0]
                if passing[0] > begin:  # otherwise the shorter one comes first
                    pieces.append(replace(s, begin=begin, end=passing[0]))
                    heappush(turns, (passing[1], end + passing[1] - passing[0], n, s))
                    continue
                heappop(turns)
                heappush(turns, (end, passing[1] + end - begin, *passing[2:]))
            pieces.append(replace(s, begin=begin, end=end))
    return pieces


def _tracks(est: Estimate, used: set[str]) -> list[str]:
    """Track names from top to bottom, including idle engines."""
    loops = sorted(name for name in used if name.startswith(LOOP))
    network = [engine_name(place) for place, size in places(est.slice) if size > 1]
    phase, sent = ([name] if name in used else [] for name in (PHASE, EXPOSED))
    copies = [direction for direction in HOST_COPIES if direction in used]
    return [*phase, *loops, CORE, "mxu", "vpu", "hbm", *network, *copies, *sent, BOUND]


def _named(what: str, name: str, thread: int) -> dict[str, Any]:
    return {"ph": "M", "pid": 1, "tid": thread, "name": what, "args": {"name": name}}


class _Writer:
    """Writes the slices of an estimate's schedule."""

    def __init__(self, est: Estimate) -> None:
        self.est = est
        self.forward = names_of_forward(est.schedule)
        self.flows = 0

    def spans(self) -> Iterator[Span]:
        schedule = self.est.schedule
        yield from _phases(schedule)
        loops = sum(e.loop is not None for e in schedule.events)
        room = max(0, SLICE_LIMIT - _size(schedule, trips=False)) // max(1, loops)
        yield from self._schedule(self.est.plan, schedule, 0.0, room, 1)
        yield _span(BOUND, LATENCY, schedule.seconds, self.est.step_seconds, {})
        rest = {"seconds (assumed)": self.est.step_seconds - schedule.seconds}
        yield _span(CORE, "step overhead", schedule.seconds, self.est.step_seconds, rest)

    def _schedule(self, plan: UnitPlan, schedule: StepSchedule, at: float, room: int, depth: int) -> Iterator[Span]:
        opens, closes = self._flows(plan, schedule)
        bodies = {unit.number: unit.body for unit in plan.units}
        for e in schedule.events:
            unmarked = True
            for s in self._event(bodies.get(e.first), e, at, room, depth):
                if unmarked and s.end > s.begin:
                    s, unmarked = replace(s, opens=opens[e.first], closes=closes[e.first]), False
                yield s
        for begin, end, e in exposed(schedule):
            yield self._span(e, EXPOSED, at + begin, at + end)
        for unit, run in groupby(moments(schedule, self.est.slice.chip), key=lambda m: UNIT_OF.get(m.bound)):
            spans = [(m.begin, m.end) for m in run]
            if unit is not None:  # a loop is described by its trips
                yield _span(BOUND, unit, at + spans[0][0], at + spans[-1][1], {})

    def _event(self, body: UnitPlan | None, e: Event, at: float, room: int, depth: int) -> Iterator[Span]:
        if e.loop is not None:
            assert body is not None
            yield from self._loop(e, body, e.loop, at, room, depth)
        elif e.move is not None:
            yield from self._collective(e, at)
        elif e.copy is not None:
            yield self._span(e, engine_name(e.copy[0]), at + e.start, at + e.end, {"bytes (exact)": e.copy[1]})
        else:
            yield from self._kernel(e, at)

    def _flows(self, plan: UnitPlan, schedule: StepSchedule) -> tuple[Flows, Flows]:
        """Event number -> flows from collectives, and event number -> flows to their consumers."""
        opens, closes = defaultdict[int, tuple[int, ...]](tuple), defaultdict[int, tuple[int, ...]](tuple)
        shown = {e.first: e for e in schedule.events}
        bringing = {y: u.number for u in plan.units if (e := shown.get(u.number)) and e.move for y in u.outputs}
        for unit in plan.units:
            if unit.number in shown:
                for number in dict.fromkeys(bringing[x] for x in unit.inputs if x in bringing):
                    self.flows += 1
                    opens[number] += (self.flows,)
                    closes[unit.number] += (self.flows,)
        return opens, closes

    def _loop(self, e: Event, plan: UnitPlan, body: StepSchedule, at: float, room: int, depth: int) -> Iterator[Span]:
        track = LOOP if depth == 1 else f"{LOOP}, depth {depth}"
        if e.trips < 1:
            name = f"{e.name}, in {e.trips:.1%} of the trips"
            yield _span(track, name, at + e.start, at + e.end, {"line": e.source, "phase": e.region})
            return
        trips = round(e.trips)
        shown = min(trips, max(1, room // _size(body)))
        for trip in range(shown):
            begin = at + e.start + trip * body.seconds
            args = {"trips": trips, "line": e.source, "phase": e.region}
            yield _span(track, f"{e.name} {trip + 1}/{trips}", begin, begin + body.seconds, args)
            yield from self._schedule(plan, body, begin, room // shown, depth + 1)
        if shown == trips:
            return
        begin, end = at + e.start + shown * body.seconds, at + e.end
        name = f"{e.name}: {counted(trips - shown, 'more trip')}"
        yield _span(track, name, begin, end, {"trips": trips - shown, "line": e.source, "phase": e.region})
        for engine, busy in (("core", body.seconds), *body.busy.items()):
            share = {TRIPS_SHARE: busy / body.seconds if body.seconds else 0.0}
            yield _span(engine_name(engine), name, begin, end, share)

    def _collective(self, e: Event, at: float) -> Iterator[Span]:
        assert e.move is not None
        assert e.cost is not None
        args = {
            "payload_bytes (exact)": e.move.payload_bytes,
            "sent_bytes (exact)": e.move.sent_bytes,
            "axes": "+".join(e.move.axes),
            "reason": e.move.reason,
        }
        for place, busy in e.cost.busy_seconds:
            yield self._span(e, engine_name(place), at + e.start, at + e.start + busy, args)

    def _kernel(self, e: Event, at: float) -> Iterator[Span]:
        kernel, time = e.kernel, e.time
        assert kernel is not None
        assert time is not None
        args = {
            "mxu_flops (exact)": kernel.mxu_flops,
            "vpu_ops (exact)": kernel.vpu_ops,
            "hbm_bytes (exact)": kernel.hbm_bytes,
            "launch seconds (modelled)": time.launch_seconds,
        }
        begin, end = at + e.start, at + e.end
        yield self._span(e, CORE, begin, end, args)
        start = begin + time.launch_seconds
        for track, seconds in (("mxu", time.mxu_seconds), ("vpu", time.vpu_seconds), ("hbm", time.hbm_seconds)):
            yield self._span(e, track, start, min(end, start + seconds), args)

    def _span(self, e: Event, track: str, begin: float, end: float, args: Mapping[str, Any] | None = None) -> Span:
        """A slice of an event on one track."""
        name = f"{e.name} (again)" if e.region != FORWARD and e.name in self.forward else e.name
        return _span(track, name, begin, end, {**(args or {}), "line": e.source, "phase": e.region})


def _span(track: str, name: str, begin: float, end: float, args: dict[str, Any]) -> Span:
    return Span(track, name, round(begin * 1e9), round(end * 1e9), args)


def _size(schedule: StepSchedule, trips: bool = True) -> int:
    """Maximum number of slices of a schedule, with or without individual trips of its loops."""
    total = 1
    for e in schedule.events:
        if e.loop is not None:
            total += e.runs(1) * _size(e.loop) if trips else 0
        elif e.cost is not None:
            total += len(e.cost.busy_seconds) + 2
        elif e.time is not None:
            total += 2 + sum(s > 0 for s in (e.time.mxu_seconds, e.time.vpu_seconds, e.time.hbm_seconds))
    return total


def _phases(schedule: StepSchedule) -> Iterator[Span]:
    """Runs of one region on the core."""
    core = sorted((e for e in schedule.events if e.on_core), key=lambda e: e.start)
    begin = 0
    for n, (e, after) in enumerate(pairwise([*core, None]), start=1):
        assert e is not None
        if after is None or after.region != e.region:
            yield _span(PHASE, e.region, core[begin].start, e.end, {})
            begin = n


def _counters(est: Estimate) -> Iterator[dict[str, Any]]:
    """HBM in total and by kind, at the start of each group and at the end."""
    memory = est.memory.timeline_by_kind
    shown = [n for n, _ in enumerate(KINDS) if any(kinds[n] for kinds in memory)]
    last, held = -1, memory[-1] if memory else ()
    for e in sorted((e for e in est.schedule.events if e.on_core), key=lambda e: e.start):
        if e.first < len(memory) and round(e.start * 1e9) > last:
            last, held = round(e.start * 1e9), memory[e.first]
            yield _counted(last, held, shown)
    end = round(est.step_seconds * 1e9)
    if held and end > last:
        yield _counted(end, held, shown)


def _counted(at: int, held: Sequence[int], shown: Sequence[int]) -> dict[str, Any]:
    args = {"total": sum(held)} | {KINDS[n]: held[n] for n in shown}
    return {"ph": "C", "pid": 1, "name": COUNTER, "ts": at / 1000, "args": args}


def _working(est: Estimate, spans: Sequence[Span]) -> Iterator[dict[str, Any]]:
    """MXU utilisation in each window of the step."""
    width = max(1, -(-round(est.step_seconds * 1e9) // WINDOWS))
    worked = [0.0] * WINDOWS
    for s in spans:
        share = s.args.get(TRIPS_SHARE, 1.0)
        for n in range(s.begin // width, min(WINDOWS, -(-s.end // width))):
            worked[n] += share * (min(s.end, (n + 1) * width) - max(s.begin, n * width)) / width
    for n, share in enumerate(worked):
        yield {"ph": "C", "pid": 1, "name": WORKING, "ts": n * width / 1000, "args": {"MXU": round(100 * share, 1)}}


def save_trace(est: Estimate, path: str | Path) -> None:
    """`Estimate.save_trace`."""
    profile = est.profile()
    about: dict[str, object] = {
        "slice": str(est.slice), "mesh": str(est.program.mesh), "layout": str(est.program.layout),
        "compiler": str(est.compiler), "overlap": est.compiler.overlap,
        "figures": "bytes and counts exact, times modelled",
        "seconds of the step by what bounds it": {unit: profile.seconds[unit] for unit in UNITS},
        "share of the step for which the MXU works": profile.mxu_share,
    }  # fmt: skip
    trace = {"traceEvents": trace_events(est), "displayTimeUnit": "ns", "otherData": about}
    content = json.dumps(trace).encode()
    if str(path).endswith(".gz"):
        content = gzip.compress(content, mtime=0)
    replace_file(path, lambda file: file.write(content), "save_trace", GraphError)
