"""Attribution of a schedule: every second of the step is assigned to exactly one bottleneck.

    a kernel runs                   launch to latency, the rest to the unit that bounds it (`kernel_bound`)
    a transfer runs, no kernel      the collective that began first: its links to ici, the network between slices to
                                    dcn, hops and launch to latency; in the order latency, ici, dcn
    after the last kernel           remaining HBM traffic of collectives to hbm
    copies run longer               pcie

A loop is attributed as its body, trip by trip.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from hardware.chips import Chip
from meshlib.estimation.time.scheduling import Event, StepSchedule
from meshlib.estimation.views.rows import kernel_bound, kernel_latency, network_parts

ROUNDING = 1e-12  # of a step: shorter moments are rounding errors of sums
Span = tuple[float, float]


class Moment(NamedTuple):
    """From `begin` to `end` (seconds in its schedule) the step is limited by `bound`, one of `BOUNDS`.

    `event` is what runs; for a loop, whose body is attributed separately, `bound` is "".
    """

    begin: float
    end: float
    bound: str
    event: Event | None


def moments(schedule: StepSchedule, chip: Chip) -> Iterator[Moment]:
    """The moments of one schedule in order, without gaps; a loop is one moment."""
    return (m for m in _moments(schedule, chip) if m.end - m.begin > ROUNDING * m.end)


def _moments(schedule: StepSchedule, chip: Chip) -> Iterator[Moment]:
    """The same with moments that are shorter than rounding errors."""
    waits = {begin: (end, event) for begin, end, event in exposed(schedule)}
    starts = sorted(waits)
    at = 0.0
    for event in sorted((e for e in schedule.events if e.on_core), key=lambda e: (e.start, e.end)):
        begin = max(at, computes_from(event))
        yield from _idle(at, begin, waits, starts, chip, "latency")
        end = max(begin, event.end)
        if event.loop is not None:
            yield Moment(begin, end, "", event)
        else:
            yield from _kernel(event, begin, end)
        at = end
    own_copies = schedule.host_exposed_seconds - sum(
        e.trips * e.loop.host_exposed_seconds for e in schedule.events if e.loop is not None
    )
    copies = min(max(0.0, own_copies), max(0.0, schedule.seconds - at))
    end = schedule.seconds
    yield from _idle(at, end - copies, waits, starts, chip, "hbm")
    yield Moment(end - copies, end, "pcie", next((e for e in schedule.events if e.copy), None))


def divided(schedule: StepSchedule, chip: Chip, times: float = 1) -> Iterator[tuple[Event | None, str, float]]:
    """(event, bound, seconds) for everything, loops expanded; the sum is `times` the schedule's seconds."""
    for m in moments(schedule, chip):
        if m.event is not None and m.event.loop is not None and not m.bound:
            yield from divided(m.event.loop, chip, times * m.event.trips)
            if m.event.stages:  # devices wait for others that run longer branches
                yield m.event, "latency", times * (m.event.seconds - m.event.trips * m.event.loop.seconds)
        else:
            yield m.event, m.bound, times * (m.end - m.begin)


def computes_from(event: Event) -> float:
    """When the core begins to compute; a kernel that awaits the last piece of its operand computes at its end."""
    return event.end - event.time.seconds if event.time else event.start


def exposed(schedule: StepSchedule) -> Iterator[tuple[float, float, Event]]:
    """Intervals in which something is sent and the core computes nothing, with the collective that began first."""
    gaps = _gaps([(computes_from(e), e.end) for e in schedule.events if e.on_core])
    starts = [begin for begin, _ in gaps]
    done = 0.0
    for e in sorted((e for e in schedule.events if e.move is not None), key=lambda e: e.start):
        begin = max(done, e.start)
        for a, b in gaps[max(0, bisect_right(starts, begin) - 1) : bisect_right(starts, e.end)]:
            if min(b, e.end) > max(a, begin):
                yield max(a, begin), min(b, e.end), e
        done = max(done, e.end)


def _gaps(intervals: Sequence[Span]) -> list[Span]:
    """Gaps between intervals, from 0 on."""
    gaps, last = [], 0.0
    for begin, end in sorted(intervals):
        if begin > last:
            gaps.append((last, begin))
        last = max(last, end)
    return [*gaps, (last, float("inf"))]


def _kernel(event: Event, begin: float, end: float) -> Iterator[Moment]:
    assert event.time is not None
    started = min(end, begin + kernel_latency(event.time))
    yield Moment(begin, started, "latency", event)
    yield Moment(started, end, kernel_bound(event.time), event)


def _idle(
    begin: float, end: float, waits: dict[float, tuple[float, Event]], starts: Sequence[float], chip: Chip, rest: str
) -> Iterator[Moment]:
    """Moments of an interval in which the core computes nothing: collectives in flight, otherwise `rest`."""
    at = begin
    for start in starts[bisect_right(starts, begin) - 1 if bisect_right(starts, begin) else 0 :]:
        stop, event = waits[start]
        if start >= end:
            break
        first, last = max(at, start), min(end, stop)
        if last <= first:
            continue
        yield Moment(at, first, rest, None)
        yield from _exposed_moments(event, first, last, chip)
        at = last
    yield Moment(at, end, rest, None)


def _exposed_moments(event: Event, begin: float, end: float, chip: Chip) -> Iterator[Moment]:
    """Moments of an exposed collective: latency, ICI, DCN."""
    assert event.cost is not None
    ici, dcn, latency = network_parts(event.cost, chip)
    whole = ici + dcn + latency
    at = begin
    for bound, seconds in (("latency", latency), ("ici", ici), ("dcn", dcn)):
        if seconds:
            after = at + (end - begin) * seconds / whole
            yield Moment(at, after, bound, event)
            at = after
