"""Concurrent collectives of a schedule share the links that they cross.

`hardware.sharing` is the fluid model: no link exceeds its rate, and none idles while it has work. Collectives are
served in the order of issue, except that one with less left to send passes earlier ones. While they share, it takes at
most twice its own time, and the earlier ones end later by its time. So a gather of scales passes a gather of weights. A
collective loads links at full rate from its start; the latency of its hops follows and delays nobody. A loop occupies
its places alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hardware.network import Cost
from hardware.sharing import SharedLinks


@dataclass(frozen=True, slots=True)
class Moved:
    """Effect of a new collective on an earlier one: the earlier event's number, and its new begin and end."""

    event: int
    begin: float
    late_seconds: float


@dataclass(slots=True)
class LinkTimes:
    """Collectives in flight over time."""

    links: SharedLinks = field(default_factory=SharedLinks)
    events: list[int] = field(default_factory=list)  # event number of each collective
    blocked: dict[int, float] = field(default_factory=dict)  # place -> time until which a loop occupies it

    def block(self, place: int, until: float) -> None:
        """Reserve a place for a loop."""
        self.blocked[place] = max(until, self.blocked.get(place, 0.0))

    def free(self, place: int) -> float:
        """Time at which a place becomes free."""
        return max(self.links.free(place), self.blocked.get(place, 0.0))

    def send(self, event: int, cost: Cost, ready: float) -> tuple[float, float, list[Moved]]:
        """Send a collective that is ready at a time: (start, end, collectives that it delays)."""
        for place, _ in cost.busy_seconds:
            ready = max(ready, self.blocked.get(place, 0.0))
        wire = cost.on_wire
        moved = self.links.issue(wire, ready)
        self.events.append(event)
        delayed = [Moved(self.events[n], self.links.begins[n], late) for n, late in moved.items()]
        return self.links.begins[-1], self.links.ends[-1] + cost.seconds - wire.seconds, delayed
