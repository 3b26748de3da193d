"""Collectives of a schedule in flight at the same time share the links that they cross.

`hardware.sharing` has the fluid: no link carries more than its rate, and none idles while it has work. Collectives go
in the order of issue, but one that has less left to send than those before it passes them. Both share then, so that it
is through in at most twice its own time, and they end later by its time. So a gather of scales passes a gather of
weights. A collective loads links at full rate from its start; its hops come after that and hold up nobody. A loop has
its places for itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hardware.network import Cost
from hardware.sharing import SharedLinks


@dataclass(frozen=True, slots=True)
class Moved:
    """What sending one more collective changes of another: the number of its event, and its new begin and end."""

    event: int
    begin: float
    late_seconds: float


@dataclass(slots=True)
class LinkTimes:
    """What is being sent from when to when."""

    links: SharedLinks = field(default_factory=SharedLinks)
    events: list[int] = field(default_factory=list)  # number of the event of each collective
    blocked: dict[int, float] = field(default_factory=dict)  # place -> until when a loop has it

    def block(self, place: int, until: float) -> None:
        """A loop sends there, and nothing beside it."""
        self.blocked[place] = max(until, self.blocked.get(place, 0.0))

    def free(self, place: int) -> float:
        """When a place has nothing more to send."""
        return max(self.links.free(place), self.blocked.get(place, 0.0))

    def send(self, event: int, cost: Cost, ready: float) -> tuple[float, float, list[Moved]]:
        """A collective that is ready at a time: (when it starts, when it ends, whom it delays)."""
        ready = max([ready, *(self.blocked.get(place, 0.0) for place, _ in cost.busy_seconds)])
        wire = max((busy for _, busy in cost.busy_seconds), default=0.0)
        moved = self.links.issue(replace(cost, seconds=wire), ready)
        self.events.append(event)
        delayed = [Moved(self.events[n], self.links.begins[n], late) for n, late in moved.items()]
        return self.links.begins[-1], self.links.ends[-1] + cost.seconds - wire, delayed
