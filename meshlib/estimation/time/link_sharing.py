"""Collectives in flight at the same time share the links that they cross.

Links serve the packets of all that is on its way in turn. What has less left to send than those before it is through
first, in at most twice its own time, and they end later by its time; what has more waits behind them, which by the
time at which it ends is the same. So a gather of scales passes a gather of weights, and bytes on a link are conserved.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hardware.network import Cost

ROUNDING = 1e-9  # equal shares of a link stay in their order, whatever sums of floats make of them


@dataclass(eq=False, slots=True)
class Sending:
    """A collective on its way: the number of its event, and by how much the last one that passed it has delayed it."""

    event: int
    late_seconds: float = 0.0


@dataclass(slots=True)
class _Turn:
    sending: Sending
    begin: float
    end: float


@dataclass(slots=True)
class LinkTimes:
    """For each place of the network, what is being sent there from when to when, in the order in which it ends."""

    turns: dict[int, list[_Turn]] = field(default_factory=dict)
    blocked: dict[int, float] = field(default_factory=dict)  # place -> until when a loop has it

    def block(self, place: int, until: float) -> None:
        """A loop sends there, and nothing beside it."""
        self.blocked[place] = max(until, self.blocked.get(place, 0.0))

    def free(self, place: int) -> float:
        """When a place has nothing more to send."""
        turns = self.turns.get(place)
        return max(turns[-1].end if turns else 0.0, self.blocked.get(place, 0.0))

    def send(self, event: int, cost: Cost, ready: float) -> tuple[float, float, list[Sending]]:
        """A collective that is ready at a time: (when it starts, what sharing costs it, whom it has passed)."""
        ready = max([ready, *(self.blocked.get(place, 0.0) for place, _ in cost.busy_seconds)])
        start, shared = ready, 0.0
        ahead: dict[int, int] = {}
        for place, busy in cost.busy_seconds:
            turns = self.turns.setdefault(place, [])
            while turns and turns[0].end <= ready:
                del turns[0]
            ahead[place] = n = _waits_for(turns, busy, ready)
            if n:
                start = max(start, turns[n - 1].end)
            if n < len(turns) and turns[n].begin < start + busy:
                shared = max(shared, busy)
        sending = Sending(event)
        passed = dict[Sending, float]()
        for place, busy in cost.busy_seconds:
            turns = self.turns[place]
            for turn in turns[ahead[place] :]:
                turn.end += busy
                turn.begin += busy if turn.begin > start else 0.0
                passed[turn.sending] = max(passed.get(turn.sending, 0.0), busy)
            turns.insert(ahead[place], _Turn(sending, start, start + busy))
        for other, seconds in passed.items():
            other.late_seconds = seconds
        return start, shared, list(passed)


def _waits_for(turns: list[_Turn], busy: float, ready: float) -> int:
    """How many of those on their way are through before one that needs the link for `busy` seconds."""
    for n in reversed(range(len(turns))):
        if turns[n].end - max(ready, turns[n].begin) <= busy * (1 + ROUNDING):
            return n + 1
    return 0
