"""A step as a film of its torus: links coloured by load over consecutive intervals."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hardware.films import Film, FilmFrame, axis_loads, ring_loads
from hardware.placement import places
from meshlib.core.arguments import whole
from meshlib.core.text import seconds_text
from meshlib.estimation.result import engine_name
from meshlib.estimation.views.trace import trace_events

if TYPE_CHECKING:
    from meshlib.estimation.result import Estimate


def step_film(est: Estimate, frames: int) -> Film:
    """`Estimate.film`."""
    count, torus, ring = whole(frames, "Estimate.film", "frames", 1), est.slice.torus, est.slice.ring
    if ring:  # draw the chips at their physical coordinates
        torus = est.slice.single.torus
    failed = frozenset(torus.node(place) for place in est.slice.failed)
    axes = {engine_name(place): place for place, _ in places(est.slice) if place >= 0}
    events = trace_events(est)
    track = {e["tid"]: axes.get(e["args"]["name"]) for e in events if e["name"] == "thread_name"}
    sent = [(track[e["tid"]], e["ts"] * 1e-6, (e["ts"] + e["dur"]) * 1e-6) for e in events if e["ph"] == "X"]
    length = est.step_seconds / count
    pictures = []
    for n in range(count):
        begin, busy = n * length, dict[int, float]()
        for axis, start, end in sent:
            shared = min(end, begin + length) - max(start, begin)
            if axis is not None and shared > 0:
                busy[axis] = min(1.0, busy.get(axis, 0.0) + shared / length)
        title = f"{seconds_text(begin)} to {seconds_text(begin + length)} of {seconds_text(est.step_seconds)}"
        loads = ring_loads(torus, ring, busy.get(0, 0.0)) if ring else axis_loads(torus, busy)
        pictures.append(FilmFrame(torus, title, loads, failed=failed))
    return Film(tuple(pictures))
