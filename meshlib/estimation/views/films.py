"""A step as a film of its torus: links coloured by load over consecutive intervals, and the longest work in each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from hardware.films import MOST_FRAMES, Film, FilmFrame, axis_loads, ring_loads
from hardware.placement import places
from meshlib.core.arguments import at, whole
from meshlib.core.errors import GraphError
from meshlib.core.text import seconds_text
from meshlib.estimation.result import engine_name
from meshlib.estimation.views.trace import trace_events

if TYPE_CHECKING:
    from meshlib.estimation.result import Estimate


def step_film(est: Estimate, frames: int) -> Film:
    """`Estimate.film`."""
    count, torus, ring = whole(frames, "Estimate.film", "frames", 1), est.slice.torus, est.slice.ring
    if count > MOST_FRAMES:
        raise GraphError(f"{at('Estimate.film')}: frames must be at most {MOST_FRAMES:,}, got {count:,}")
    if ring:  # draw the chips at their physical coordinates
        torus = est.slice.single.torus
    failed = frozenset(torus.node(place) for place in est.slice.failed)
    tracks: dict[str, int | None] = {engine_name(place): place for place, _ in places(est.slice) if place >= 0}
    tracks["core"] = None
    events = trace_events(est)
    named = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    spans = [
        _TimelineSpan(tracks[named[e["tid"]]], e["ts"] * 1e-6, (e["ts"] + e["dur"]) * 1e-6, e["name"])
        for e in events if e["ph"] == "X" and named[e["tid"]] in tracks
    ]  # fmt: skip
    length = est.step_seconds / count
    pictures = []
    for n in range(count):
        begin, busy = n * length, dict[int, float]()
        for span in spans:
            if span.axis is not None and (shared := span.within(begin, begin + length)):
                busy[span.axis] = min(1.0, busy.get(span.axis, 0.0) + shared / length)
        title = f"{seconds_text(begin)} to {seconds_text(begin + length)} of {seconds_text(est.step_seconds)}"
        loads = ring_loads(torus, ring, busy.get(0, 0.0)) if ring else axis_loads(torus, busy)
        pictures.append(FilmFrame(torus, f"{title}\n{_work(spans, begin, begin + length)}", loads, failed=failed))
    return Film(tuple(pictures))


class _TimelineSpan(NamedTuple):
    """An operation on the core (`axis` None) or a collective on a torus axis, from `begin` to `end`."""

    axis: int | None
    begin: float
    end: float
    name: str

    def within(self, begin: float, end: float) -> float:
        """Seconds of the span within an interval."""
        return max(0.0, min(end, self.end) - max(begin, self.begin))


def _work(spans: Sequence[_TimelineSpan], begin: float, end: float) -> str:
    """The longest operation and the longest collective of an interval."""
    longest = []
    for on_core, what in ((True, "core"), (False, "links")):
        run = [(span.within(begin, end), span.name) for span in spans if (span.axis is None) == on_core]
        seconds, name = max(run, default=(0.0, ""))
        longest.append(f"{what}: {name if seconds else 'idle'}")
    return "\n".join(longest)
