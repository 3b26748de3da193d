"""A schedule as Chrome-trace JSON: one track for each engine, HBM as counters. Opens in ui.perfetto.dev.

Times are whole nanoseconds, written in microseconds as the format asks. Slices are "X" events (begin and duration in
one), sorted by time; on one track none overlaps another. A loop shows its trips, up to a limit, then one slice for the
rest of them.

Source: "Trace Event Format", the Chromium project, 2016; perfetto.dev docs on JSON traces.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hardware.placement import places
from meshlib.errors import GraphError
from meshlib.estimate.plan import HOST_COPIES
from meshlib.estimate.result import engine_name
from meshlib.estimate.schedule import Event, Schedule
from meshlib.files import replace_file
from meshlib.lower.memory import KINDS

if TYPE_CHECKING:
    from meshlib.estimate.plan import HOST_COPIES
from meshlib.estimate.result import Estimate

CORE = "core"
_TRIP_LIMIT = 256


@dataclass(frozen=True, slots=True)
class Span:
    """Something on a track: nanoseconds from the start of the step."""

    track: str
    name: str
    begin: int
    end: int
    args: dict[str, Any]


def trace_events(est: Estimate) -> list[dict[str, Any]]:
    """The events of the trace, as the JSON holds them: names of tracks first, then everything by time."""
    tracks = [
        CORE,
        "mxu",
        "vpu",
        "hbm",
        *(engine_name(place) for place, size in places(est.slice) if size > 1),
        *HOST_COPIES,
    ]
    number = {name: n for n, name in enumerate(tracks, start=1)}
    events: list[dict[str, Any]] = [
        _named("process_name", f"one device of {est.slice.name} (modelled times, exact counts)", 0)
    ]
    for name, n in number.items():
        events.append(_named("thread_name", name, n))
        events.append({"ph": "M", "pid": 1, "tid": n, "name": "thread_sort_index", "args": {"sort_index": n}})
    timed: list[dict[str, Any]] = []
    for s in _slices(est.schedule, 0.0):
        if s.end > s.begin:
            timed.append(
                {
                    "ph": "X", "pid": 1, "tid": number[s.track], "name": s.name, "cat": s.track,
                    "ts": s.begin / 1000, "dur": (s.end - s.begin) / 1000, "args": s.args,
                }
            )  # fmt: skip
    timed += _counters(est)
    return events + sorted(timed, key=lambda e: (e["ts"], e.get("tid", 0)))


def _named(what: str, name: str, thread: int) -> dict[str, Any]:
    return {"ph": "M", "pid": 1, "tid": thread, "name": what, "args": {"name": name}}


def _slices(made: Schedule, at: float) -> Iterator[Span]:
    for e in made.events:
        begin, end = at + e.start, at + e.end
        if e.loop is not None:
            yield from _loop_slices(e, at)
        elif e.move is not None:
            assert e.cost is not None
            args = {
                "payload_bytes (exact)": e.move.payload_bytes,
                "sent_bytes (exact)": e.move.sent_bytes,
                "axes": "+".join(e.move.axes),
                "reason": e.move.reason,
                "line": e.source,
                "phase": e.region,
            }
            for place, _ in e.cost.busy_seconds:
                yield _slice(engine_name(place), e.name, begin, end, args)
        elif e.copy is not None:
            args = {"bytes (exact)": e.copy[1], "line": e.source, "phase": e.region}
            yield _slice(engine_name(e.copy[0]), e.name, begin, end, args)
        else:
            yield from _kernel_slices(e, begin, end)


def _kernel_slices(e: Event, begin: float, end: float) -> Iterator[Span]:
    kernel, time = e.kernel, e.time
    assert kernel is not None
    assert time is not None
    args = {
        "mxu_flops (exact)": kernel.mxu_flops,
        "vpu_ops (exact)": kernel.vpu_ops,
        "hbm_bytes (exact)": kernel.hbm_bytes,
        "line": e.source,
        "phase": e.region,
    }
    yield _slice(CORE, e.name, begin, end, args)
    start = begin + time.launch_seconds
    for track, seconds in (("mxu", time.mxu_seconds), ("vpu", time.vpu_seconds), ("hbm", time.hbm_seconds)):
        yield _slice(track, e.name, start, min(end, start + seconds), args)


def _loop_slices(e: Event, at: float) -> Iterator[Span]:
    assert e.loop is not None
    shown = min(e.trips, max(1, _TRIP_LIMIT // max(1, len(e.loop.events))), _TRIP_LIMIT)
    for trip in range(shown):
        yield from _slices(e.loop, at + e.start + trip * e.loop.seconds)
    if shown < e.trips:
        rest = at + e.start + shown * e.loop.seconds
        args = {"trips": e.trips - shown, "line": e.source, "phase": e.region}
        yield _slice(CORE, f"{e.name}: {e.trips - shown} more trips", rest, at + e.end, args)


def _slice(track: str, name: str, begin: float, end: float, args: dict[str, Any]) -> Span:
    return Span(track, name, round(begin * 1e9), round(end * 1e9), args)


def _counters(est: Estimate) -> Iterator[dict[str, Any]]:
    """HBM by kind when each group starts."""
    memory = est.memory.timeline_by_kind
    last = -1
    for e in sorted((e for e in est.schedule.events if e.move is None), key=lambda e: e.start):
        if e.first < len(memory) and round(e.start * 1e9) > last:
            last = round(e.start * 1e9)
            args = dict(zip(KINDS, memory[e.first], strict=True))
            yield {"ph": "C", "pid": 1, "name": "HBM bytes (exact)", "ts": last / 1000, "args": args}


def save_trace(est: Estimate, path: str | Path) -> None:
    """`Estimate.save_trace`."""
    if not isinstance(path, str | os.PathLike):
        raise GraphError(f"save_trace: expected a path, got {type(path).__name__} {path!r:.80}")
    target = Path(path)
    text = json.dumps({"traceEvents": trace_events(est), "displayTimeUnit": "ns"})
    try:
        replace_file(os.path.abspath(target), lambda file: file.write(text.encode()))
    except OSError as fault:
        raise GraphError(f"save_trace: cannot write {target}: {fault.strerror or fault}") from None
