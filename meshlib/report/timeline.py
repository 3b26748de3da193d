"""The schedule of a step as lanes: the core, each link, copies to the host, and waits of the core.

A loop is one box over all its trips; a picture of one trip follows for each loop with a visible share of the step.
The heights of a loop's parts are the shares of its time by bottleneck.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from hardware.chips import Chip
from hardware.placement import places
from meshlib.core.folding import name_pattern, runs
from meshlib.core.text import seconds_text
from meshlib.estimation import Estimate
from meshlib.estimation.result import engine_name
from meshlib.estimation.time.attribution import divided, exposed
from meshlib.estimation.time.scheduling import Event, StepSchedule
from meshlib.estimation.views.profile import UNIT_OF, UNITS
from meshlib.estimation.views.rows import kernel_bound
from meshlib.estimation.work.units import HOST_COPIES
from meshlib.report.links import PageAnchors
from meshlib.report.markup import legend, paragraph, tag, text
from meshlib.report.svg import Picture, Scale, shortened

CORE, WAITS = "core", "waits"
WORTH = 0.02  # share of the step; shorter loops get no picture
MOST_LOOPS = 4
ROW, GAP = 26.0, 6.0
NARROW = 0.6  # pixels; narrower bars are merged with their neighbours
MOST_BARS = 900  # per picture; above this, wider bars are merged, too


@dataclass(frozen=True)
class Bar:
    """A bar on a lane from `begin` to `end`, seconds; for a loop, `parts` are the shares of its time by unit."""

    lane: str
    begin: float
    end: float
    unit: str
    name: str
    about: str
    parts: tuple[tuple[str, float], ...] = ()


def lanes_of(est: Estimate) -> list[str]:
    """Lanes of a slice's picture, top to bottom."""
    network = [engine_name(place) for place, size in places(est.slice) if size > 1]
    copies = [direction for direction in HOST_COPIES if est.engine_seconds.get(engine_name(direction))]
    return [CORE, *network, *copies, WAITS]


def bars_of(schedule: StepSchedule, chip: Chip) -> list[Bar]:
    """The bars of a schedule, or of one trip of a loop body; nested loops are one bar on each lane that they use."""
    bars: list[Bar] = []
    for event in schedule.events:
        if event.loop is not None:
            bars += _loop(event, event.loop, chip)
        elif event.move is not None and event.cost is not None:
            about = f"{event.move.kind} over {'+'.join(event.move.axes)} of {event.name}, {event.source}"
            for place, busy in event.cost.busy_seconds:
                unit = UNIT_OF["dcn" if engine_name(place) == "dcn" else "ici"]
                bars.append(Bar(engine_name(place), event.start, event.start + busy, unit, event.name, about))
        elif event.copy is not None:
            bars.append(Bar(engine_name(event.copy[0]), event.start, event.end, "host", event.name, event.name))
        elif event.time is not None:
            unit = UNIT_OF[kernel_bound(event.time)]
            about = f"{event.name}, {event.source}, {event.region}, bound by {unit}"
            bars.append(Bar(CORE, event.start, event.end, unit, event.name, about))
    for begin, end, event in exposed(schedule):
        bars.append(Bar(WAITS, begin, end, "waits", event.name, f"the core waits for {event.name}"))
    return sorted(bars, key=lambda bar: bar.begin)


def _loop(event: Event, body: StepSchedule, chip: Chip) -> Iterator[Bar]:
    seconds = dict.fromkeys(UNITS, 0.0)
    for _, bound, taken in divided(body, chip):
        seconds[UNIT_OF[bound]] += taken
    whole = body.seconds or 1.0
    name = f"{event.name} \u00d7{event.trips:.3g}"
    about = f"{event.name}: {event.trips:.3g} trips of {seconds_text(body.seconds)}, {event.source}"
    parts = tuple((unit, taken / whole) for unit, taken in seconds.items() if taken)
    yield Bar(CORE, event.start, event.end, "loop", name, about, parts)
    for engine, busy in body.busy.items():
        lane = engine_name(engine)
        if not isinstance(engine, str) or engine in HOST_COPIES:
            unit = "host" if isinstance(engine, str) else "DCN" if lane == "dcn" else "ICI"
            share = min(1.0, busy / whole)
            yield Bar(lane, event.start, event.end, "loop", name, f"{about}; busy {share:.0%}", ((unit, share),))
    if body.exposed_seconds:
        share = min(1.0, body.exposed_seconds / whole)
        tooltip = f"{about}; the core waits {share:.0%} of it"
        yield Bar(WAITS, event.start, event.end, "loop", name, tooltip, (("waits", share),))


def loops_of(schedule: StepSchedule, times: int = 1) -> Iterator[tuple[Event, StepSchedule, int]]:
    """Every loop of a schedule, nested ones included, with its total number of trips per step."""
    for event in schedule.events:
        if event.loop is not None:
            yield event, event.loop, event.runs(times)
            yield from loops_of(event.loop, event.runs(times))


@dataclass(frozen=True)
class RepeatedPart:
    """One of `times` adjacent, equal parts of a schedule, such as unrolled layers; seconds of the step."""

    name: str
    times: int
    begin: float
    seconds: float


def layers_of(schedule: StepSchedule) -> list[RepeatedPart]:
    """One part from the middle of each run of equal parts that takes a visible share of the step."""
    events = schedule.events
    parts = []
    for run in runs([(name_pattern(e.name), e.region, e.loop is None, e.move is None) for e in events]):
        if run.times > 2:
            first = run.first + run.length * (run.times // 2)
            begin, end = (min(e.start for e in events[n : n + run.length]) for n in (first, first + run.length))
            if run.times * (end - begin) >= WORTH * schedule.seconds:
                own = events[first : first + run.length]
                regions = " and ".join(sorted({e.region for e in own}))
                name = f"{own[0].name} to {own[-1].name}, {regions}"
                parts.append(RepeatedPart(name, run.times, begin, end - begin))
    return parts[:MOST_LOOPS]


def timeline(est: Estimate, anchors: PageAnchors) -> str:
    """The pictures of a step, and of one trip of each of its large loops."""
    chip, lanes = est.slice.chip, lanes_of(est)
    waits = f"{seconds_text(est.exposed_comm_seconds)} of {seconds_text(est.step_seconds)}"
    head = paragraph(
        f"One step on one device, all seconds modelled; the core waits for collectives {text(waits)}. "
        "A loop is one box over all its trips, its colours the shares of its time; one trip of it follows below."
    )
    used = {unit.lower() for unit, seconds in est.profile().seconds.items() if seconds}
    shown = [unit for unit in UNITS if unit.lower() in used]
    keys = legend([*((f"u-{unit.lower()}", unit) for unit in shown), ("u-waits", "exposed communication")])
    pictures = [_picture(bars_of(est.schedule, chip), lanes, est.schedule.seconds, anchors, "step")]
    large = [loop for loop in loops_of(est.schedule) if loop[1].seconds * loop[2] >= WORTH * est.step_seconds]
    large = sorted(large, key=lambda loop: -loop[1].seconds * loop[2])[:MOST_LOOPS]
    for event, body, trips in sorted(large, key=lambda loop: loop[0].start):
        title = f"One trip of {event.name}, {event.region} (\u00d7{trips:,}, {seconds_text(body.seconds)} each)"
        pictures.append(tag("h3", text(title)) + _picture(bars_of(body, chip), lanes, body.seconds, anchors, "trip"))
    for layer in layers_of(est.schedule):
        title = f"One of {layer.times} alike parts, {layer.name} ({seconds_text(layer.seconds)} each)"
        bars = [b for b in bars_of(est.schedule, chip) if b.end > layer.begin > b.begin - layer.seconds]
        moved = [replace(b, begin=b.begin - layer.begin, end=b.end - layer.begin) for b in bars]
        pictures.append(tag("h3", text(title)) + _picture(moved, lanes, layer.seconds, anchors, "part"))
    return "\n".join([head, keys, *pictures])


def _picture(bars: Sequence[Bar], lanes: Sequence[str], seconds: float, anchors: PageAnchors, what: str) -> str:
    picture = Picture(
        1000, 44 + len(lanes) * (ROW + GAP), (6, 12, 32, 84), f"timeline of a {what} by engine", wide=True
    )
    across = Scale((0.0, max(seconds, 1e-12)), (picture.left, picture.right))
    picture.axis_below(across, lambda t: seconds_text(t) if t else "0", f"time in the {what} ≈", across.ticks(8))
    by_lane = {lane: [bar for bar in bars if bar.lane == lane] for lane in lanes}
    narrow = NARROW
    while narrow < ROW and sum(1 for own in by_lane.values() for _ in _visible(own, across, narrow)) > MOST_BARS:
        narrow *= 2
    for n, (lane, own) in enumerate(by_lane.items()):
        y = picture.top + n * (ROW + GAP)
        picture.text(picture.left - 8, y + ROW / 2 + 4, lane, anchor="end")
        picture.rect(picture.left, y, picture.right - picture.left, ROW, "lane")
        for bar in _visible(own, across, narrow):
            _draw(picture, bar, across, y, anchors, what)
    return str(picture)


def _visible(bars: Sequence[Bar], across: Scale, narrow: float) -> Iterator[Bar]:
    """The bars of a lane, with runs of bars narrower than `narrow` pixels merged into one.

    Only runs of one unit are merged, unless the picture is crowded: then a run has the colour of its largest unit.
    """
    run: list[Bar] = []
    crowded = narrow > NARROW

    def joined() -> Iterator[Bar]:
        if run:
            about = run[0].about if len(run) == 1 else f"{len(run)} short ones"
            units: dict[str, float] = {}
            for bar in run:
                units[bar.unit] = units.get(bar.unit, 0.0) + bar.end - bar.begin
            yield Bar(run[0].lane, run[0].begin, run[-1].end, max(units, key=units.__getitem__), run[0].name, about)
        run.clear()

    for bar in bars:
        wide = across(bar.end) - across(bar.begin) >= narrow or bar.parts
        if run:
            apart = across(bar.begin) - across(run[-1].end) > max(1.0, narrow)
            full = crowded and across(run[-1].end) - across(run[0].begin) >= narrow
            if wide or apart or full or (bar.unit != run[0].unit and not crowded):
                yield from joined()
        if wide:
            yield bar
        else:
            run.append(bar)
    yield from joined()


def _draw(picture: Picture, bar: Bar, across: Scale, y: float, anchors: PageAnchors, what: str) -> None:
    x = max(picture.left, across(bar.begin))  # bars may reach beyond a part of a step
    width = max(0.4, min(picture.right, across(bar.end)) - x)
    title = f"{bar.about}: {seconds_text(bar.end - bar.begin)}"
    href, op = anchors.href(bar.name), anchors.op(bar.name)
    if bar.parts:
        below = y + ROW
        for unit, share in bar.parts:
            below -= share * ROW
            picture.rect(x, below, width, share * ROW, f"u-{unit.lower()}", f"{title}; {unit} {share:.0%}")
        picture.rect(x, y, width, ROW, "outline", title)
        label = shortened(bar.name, width - 8) if bar.lane == CORE else ""
    else:
        picture.rect(x, y + 3, width, ROW - 6, f"u-{bar.unit.lower()}", title, href, op)
        label = shortened(bar.name, width - 8) if bar.lane == CORE and width > 60 else ""
        if op and bar.lane == CORE:
            anchors.show(bar.name, "timeline", "timeline")
    if label:
        picture.text(x + width / 2, y + ROW / 2 + 4, label, "on", "middle")
