"""Memory of a device over the step: a stacked area by kind, with the buffers that are live at the marked peak."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from meshlib.core.folding import alike, times_text
from meshlib.core.text import bytes_text, seconds_text
from meshlib.estimation import DeviceMemory, Estimate
from meshlib.program.analysis.memory import KINDS, Live, likeness
from meshlib.report.links import PageAnchors
from meshlib.report.markup import EXACT, MODELLED, folding_table, legend, paragraph, scoped, section, tag, text
from meshlib.report.svg import Picture, Scale, binary_ticks

COLUMNS = 400  # moments that a picture can resolve
FAR = 10  # times the peak: a larger capacity is not drawn
SHOWN = 12  # buffers of the peak that are not folded away


@dataclass(frozen=True)
class MemoryMoment:
    """Peak bytes of each of `KINDS` (exact) from `begin` to `end`, seconds of the step (modelled)."""

    begin: float
    end: float
    kinds: tuple[int, ...]

    @property
    def total(self) -> int:
        """Total of all kinds."""
        return sum(self.kinds)


def memory_over_time(est: Estimate) -> list[MemoryMoment]:
    """Memory while each fusion group or loop runs, in the order of the program: a group that the schedule postpones
    delays what follows it. Groups that start at the same time are merged.
    """
    usage, events = est.memory.timeline_by_kind, [e for e in est.schedule.events if e.on_core]
    if not usage:
        return []
    firsts = sorted({e.first for e in events} | {len(usage)})
    last = dict(pairwise(firsts))
    moments: list[MemoryMoment] = []
    for event in sorted(events, key=lambda e: e.first):
        begin, end = event.start, event.end
        if moments:
            begin, end = max(begin, moments[-1].begin), max(end, moments[-1].end)
        numbers = range(event.first, last.get(event.first, event.first + 1))
        kinds = max((usage[n] for n in numbers if n < len(usage)), key=sum, default=usage[-1])
        if moments and begin <= moments[-1].begin:
            kinds = max(kinds, moments.pop().kinds, key=sum)
        elif moments:
            moments[-1] = MemoryMoment(moments[-1].begin, begin, moments[-1].kinds)
        moments.append(MemoryMoment(begin, end, kinds))
    return moments


def memory(est: Estimate, anchors: PageAnchors) -> str:
    """The section of memory."""
    m = est.memory
    head = paragraph(
        f"Peak {text(bytes_text(m.peak_bytes))} {EXACT}, tile padding included, at {text(m.at)}; the compiled step "
        f"needs {text(bytes_text(m.needed_bytes))} {MODELLED} of {text(bytes_text(m.capacity_bytes))} on each device."
    )
    shown = [(f"k-{n}", kind) for n, kind in enumerate(KINDS) if any(moment[n] for moment in m.timeline_by_kind)]
    remedies = [text(remedy) for remedy in m.remedies] if not m.fits else []
    listed = "<ul>" + "".join(f"<li>{r}</li>" for r in remedies) + "</ul>" if remedies else ""
    return section(
        "memory",
        "Memory over the step",
        head,
        legend(shown),
        area(est),
        listed,
        f'<h3 id="live">What is live at the peak</h3>{live_table(m.live, anchors)}',
    )


def bar(by_kind: Mapping[str, int], whole: int, added: int = 0) -> str:
    """Memory at the peak by kind, and what compilation adds, as one bar of `whole` bytes."""
    sizes = [(f"k-{n}", kind, by_kind.get(kind, 0)) for n, kind in enumerate(KINDS)]
    parts = "".join(
        f'<i class="{class_}" style="width:{100 * size / max(1, whole):.2f}%" title="{name} {bytes_text(size)}"></i>'
        for class_, name, size in [*sizes, ("k-added", "added by the compiler ≈", added)]
        if size
    )
    return tag("div", parts, class_="bar", role="img", aria_label="memory at the peak by kind")


def device_bar(m: DeviceMemory) -> str:
    """The bar of what the compiled step needs, relative to the memory of a device."""
    return bar(m.by_kind, max(m.capacity_bytes, m.needed_bytes), m.needed_bytes - m.peak_bytes)


def area(est: Estimate, linked: bool = True, size: tuple[float, float] = (1000, 280)) -> str:
    """The picture of memory over the step; `linked`: its peak links to the table of live buffers."""
    m, moments = est.memory, _sampled(memory_over_time(est), est.schedule.seconds)
    far = m.peak_bytes * FAR < m.capacity_bytes  # what is live would be a line at the bottom
    top = m.peak_bytes * 1.25 if far else max(m.peak_bytes, m.capacity_bytes) * 1.06
    picture = Picture(*size, label="memory of one device over the step, stacked by kind", wide=True)
    across = Scale((0.0, max(est.schedule.seconds, 1e-12)), (picture.left, picture.right))
    up = Scale((0.0, float(top)), (picture.bottom, picture.top))
    picture.axis_left(up, bytes_text, binary_ticks(up))
    picture.axis_below(
        across, lambda t: seconds_text(t) if t else "0", "time in the step ≈", across.ticks(round(size[0] / 125))
    )
    floor = [0.0] * len(moments)
    for n, kind in enumerate(KINDS):
        ceiling = [low + moment.kinds[n] for low, moment in zip(floor, moments, strict=True)]
        if any(moment.kinds[n] for moment in moments):
            over = [(across(t), up(c)) for m_, c in zip(moments, ceiling, strict=True) for t in (m_.begin, m_.end)]
            under = [(across(t), up(c)) for m_, c in zip(moments, floor, strict=True) for t in (m_.begin, m_.end)]
            picture.path([*over, *reversed(under)], f"k-{n} area", closed=True, title=kind)
        floor = ceiling
    capacity = f"capacity {bytes_text(m.capacity_bytes)}"
    if far:
        picture.text(picture.left + 6, picture.top + 14, f"{capacity} =, above this picture")
    else:
        y = up(m.capacity_bytes)
        picture.line(picture.left, y, picture.right, y, "limit", capacity)
        picture.text(picture.left + 6, y - 4, f"{capacity} =", "over")
    if moments:
        peak = max(moments, key=lambda moment: moment.total)
        middle = across((peak.begin + peak.end) / 2)
        picture.circle(
            middle,
            up(peak.total),
            5,
            "peak",
            f"peak {bytes_text(m.peak_bytes)} at {m.at}",
            href="#live" if linked else "",
        )
        anchor = "end" if middle > picture.right - 100 else "start"
        beside = -9 if anchor == "end" else 9
        picture.text(middle + beside, max(up(peak.total) + 16, picture.top + 12), "peak =", "over", anchor=anchor)
    return str(picture)


def _sampled(moments: list[MemoryMoment], seconds: float) -> list[MemoryMoment]:
    """Moments at least as wide as a column; of those that share a column, the largest."""
    width = seconds / COLUMNS
    columns: list[MemoryMoment] = []
    for moment in moments:
        if columns and moment.end - columns[-1].begin <= width:
            kinds = max(columns[-1].kinds, moment.kinds, key=sum)
            columns[-1] = MemoryMoment(columns[-1].begin, moment.end, kinds)
        else:
            columns.append(moment)
    return columns


def live_table(buffers: Sequence[Live], anchors: PageAnchors) -> str:
    """Buffers at the peak, largest first, one row per group of unrolled layers; all but a dozen are folded."""
    rows = []
    for group in alike(buffers, likeness):
        live = group[0]
        href, shown = anchors.href(live.name), scoped(times_text(live.name, len(group)))
        name = f'<a href="{href}">{shown}</a>' if href else shown
        for one in group:
            anchors.show(one.name, "memory at the peak", "live")
        kind = f'<i class="key k-{KINDS.index(live.kind)}"></i>{text(live.kind)}'
        rows.append((text(bytes_text(live.bytes)), kind, name, text(live.type), text(live.source)))
    head = (f"bytes {EXACT} each", "kind", "tensor", "type, with what it is split over", "line")
    return folding_table(head, rows, SHOWN, " buffers", (0,), long=(2, 3), short=(1, 4))
