"""Fluid model of concurrent collectives on shared links: progress rates over time.

A collective progresses at a rate v, the share of it completed per second; alone v is 1 / seconds. It loads each place
(a torus axis, DCN, ...) by busy * v, busy being the seconds for which it occupies the place. The loads of a place add
up to at most 1. A full place divides its bandwidth

    "proportional"   in proportion to what each one sends: all progress at the same v. So do rings in step on links that
                     serve whole messages in turn, if each ring has one message at every link
    "equal"          equally, so that a small one takes at most twice its own time: links that serve packets in turn
    "in turn"        equally among the started ones. One starts as soon as all that were issued before it and cross the
                     same place have more left to send there, or have ended: a gather of scales passes a gather of
                     weights; one that is as large is queued. Queued ones use what the others leave, in order of issue

A share that one cannot use, because another place or its own hops limit it, goes to the others (max-min fairness). Two
that start together at one place, with a <= b seconds there, both end at a + b if sharing is proportional; at 2a and
a + b if it is equal; in turn the same if the longer one was issued first, otherwise at a and a + b. The schedule of an
estimate shares in turn.

Sources: Bertsekas and Gallager, "Data Networks", 1992, section 6.5.2 (max-min fairness by progressive filling);
`hardware.events` for messages in turn.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from hardware.checks import HardwareError, amount, one_of
from hardware.network import Cost

Policy = Literal["proportional", "equal", "in turn"]
POLICIES: tuple[str, ...] = get_args(Policy)

ROUNDING = 1e-9  # of a share: tolerance for sums of floats


@dataclass(frozen=True)
class SharedSpan:
    """An interval with constant rates: `progress` is the share of each collective completed per second."""

    begin_seconds: float
    end_seconds: float
    progress: tuple[float, ...]


@dataclass(frozen=True)
class Shared:
    """Collectives on shared links.

    Attributes:
      ends: end of each collective, in seconds, in the order given.
      spans: intervals of constant rates, from the first start to the last end.
    """

    ends: tuple[float, ...]
    spans: tuple[SharedSpan, ...]

    @property
    def seconds(self) -> float:
        """Time at which the last collective ends."""
        return max(self.ends, default=0.0)


def shared(costs: Sequence[Cost], starts: Sequence[float] | None = None, policy: Policy = "proportional") -> Shared:
    """End times of collectives in flight at the same time.

    Args:
      costs: cost of each collective alone, as from `hardware.collective_cost`, in order of issue.
      starts: seconds at which each is ready; by default all at 0.
      policy: how a full place divides its bandwidth, see the module docstring.
    Returns: Shared.
    Raises: HardwareError for other costs, a wrong number of starts, negative ones, or an unknown policy.
    Example:
      >>> gathers = [Cost(seconds, ((0, seconds),), 1, "-") for seconds in (1.0, 3.0)]
      >>> [shared(gathers, policy=policy).ends for policy in POLICIES]
      [(4.0, 4.0), (2.0, 4.0), (1.0, 4.0)]
      >>> shared([gathers[0], Cost(2.0, ((1, 2.0),), 1, "-")]).ends  # another axis of the torus
      (1.0, 2.0)

    Source: module docstring.
    """
    if not isinstance(costs, (list, tuple)) or not all(isinstance(cost, Cost) for cost in costs):
        raise HardwareError(f"costs must be a list of Cost, as collective_cost returns, not {costs!r:.80}")
    ready = [0.0] * len(costs) if starts is None else [amount("starts", start) for start in starts]
    if len(ready) != len(costs):
        raise HardwareError(f"shared has {len(costs)} collectives and {len(ready)} starts; give one start for each")
    one_of("policy of shared links", policy, POLICIES)
    links = SharedLinks(policy)
    for cost, start in zip(costs, ready, strict=True):
        links.issue(cost, start)
    spans = [
        SharedSpan(span.begin, after.begin, tuple(span.speeds.get(n, 0.0) for n in range(len(costs))))
        for span, after in zip(links.spans, links.spans[1:], strict=False)
    ]
    return Shared(tuple(links.ends), tuple(spans))


def together_seconds(costs: Sequence[Cost]) -> float:
    """Lower bound for several collectives at once: links are shared, so each place is busy for the sum of their times.

    Example:
      >>> from hardware import together_seconds
      >>> from hardware import Slice, best_placement, collective_cost
      >>> placement, _ = best_placement(Slice("v5e-256"), {"x": 16, "y": 16})
      >>> x, y = (collective_cost(placement, "all_gather", [axis], 1e9) for axis in "xy")
      >>> [round(together_seconds(pair) / x.seconds, 1) for pair in ([x, y], [x, x])]
      [1.0, 2.0]
    """
    if not isinstance(costs, (list, tuple)) or not all(isinstance(cost, Cost) for cost in costs):
        raise HardwareError(f"costs must be a list of Cost, as collective_cost returns, not {costs!r}")
    busy: dict[int, float] = {}
    for cost in costs:
        for place, seconds in cost.busy_seconds:
            busy[place] = busy.get(place, 0.0) + seconds
    return max([*busy.values(), *(cost.seconds for cost in costs)], default=0.0)


@dataclass(slots=True)
class _Span:
    """From `begin` to the next span: remaining share of each collective in flight at `begin`, speeds, place loads."""

    begin: float
    left: dict[int, float] = field(default_factory=dict)
    started: frozenset[int] = frozenset()
    speeds: dict[int, float] = field(default_factory=dict)
    loads: dict[int, float] = field(default_factory=dict)


@dataclass(slots=True)
class SharedLinks:
    """Collectives on shared links, issued one after the other; each changes the schedule from its start on.

    Attributes:
      policy: as in `shared`.
      begins, ends: seconds at which each collective is first sent and ends, in order of issue, given all issued so far.
      spans: the collectives in flight over time; the last span is empty.

    Example:
      >>> links = SharedLinks()
      >>> links.issue(Cost(10.0, ((0, 10.0),), 1, "-"), 0.0)
      {}
      >>> links.issue(Cost(0.5, ((0, 0.5),), 1, "-"), 2.0)  # passes the first one, which ends later by 0.5
      {0: 0.5}
      >>> links.begins, links.ends
      ([0.0, 2.0], [10.5, 3.0])
    """

    policy: Policy = "in turn"
    begins: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    spans: list[_Span] = field(default_factory=list)
    _ready: list[float] = field(default_factory=list)
    _seconds: list[float] = field(default_factory=list)
    _busy: list[dict[int, float]] = field(default_factory=list)

    def issue(self, cost: Cost, ready: float) -> dict[int, float]:
        """Issue a further collective that is ready at time `ready`.

        Returns: the numbers of earlier collectives whose end changes, and by how many seconds.
        """
        number = len(self.ends)
        self._ready.append(ready)
        self._seconds.append(cost.seconds)
        self._busy.append({place: busy for place, busy in cost.busy_seconds if busy})
        self.begins.append(math.inf if cost.seconds else ready)
        self.ends.append(ready)
        if not cost.seconds:
            return {}
        time, share = self._serve_queued(number) if self.policy == "in turn" and self.spans else (ready, 1.0)
        if not share:
            return {}
        left, started, coming = self._back_to(time)
        before = {n: self.ends[n] for n in (*left, *coming) if n != number}
        self._run(time, {**left, number: share}, started, coming)
        late = {n: self.ends[n] - end for n, end in before.items()}
        return {n: seconds for n, seconds in late.items() if abs(seconds) > ROUNDING * self._seconds[n]}

    def free(self, place: int) -> float:
        """Time at which a place has nothing more to send."""
        return max((end for end, busy in zip(self.ends, self._busy, strict=True) if place in busy), default=0.0)

    def _serve_queued(self, number: int) -> tuple[float, float]:
        """Let a queued collective use the bandwidth that all others leave, as long as one of them holds it back.

        Returns: the time at which it is no longer queued, and its remaining share then; 0: it has ended.
        """
        time, share, busy = self._ready[number], 1.0, self._busy[number]
        n = len(self.spans) - 1
        while n >= 0 and self.spans[n].begin > time:
            n -= 1
        if n < 0:
            return time, share
        if self.spans[n].begin < time and self.spans[n].left:
            span = self.spans[n]
            left = {m: max(0.0, part - span.speeds[m] * (time - span.begin)) for m, part in span.left.items()}
            n += 1
            self.spans.insert(n, _Span(time, left, span.started, dict(span.speeds), dict(span.loads)))
        for span, after in zip(self.spans[n:-1], self.spans[n + 1 :], strict=False):
            time = max(time, span.begin)
            if not any(self._holds(m, number, {m: left, number: share}) for m, left in span.left.items()):
                return time, share
            speed = self._spare(number, span.loads)
            held = self._held_seconds(number, {**span.left, number: share}, {**span.speeds, number: speed})
            until = min(after.begin, time + held)
            if speed * (until - time) >= share * (1 - ROUNDING):
                return time, share
            span.left[number], span.speeds[number] = share, speed
            for place, seconds in busy.items():
                span.loads[place] = span.loads.get(place, 0.0) + seconds * speed
            if speed * (until - time) > ROUNDING and math.isinf(self.begins[number]):
                self.begins[number] = time
            share -= speed * (until - time)
            if until < after.begin:
                return until, share
        return max(time, self.spans[-1].begin), share

    def _spare(self, number: int, loads: dict[int, float]) -> float:
        """Speed of a collective that uses only the bandwidth left by `loads`."""
        spare = [(1 - loads.get(place, 0.0)) / busy for place, busy in self._busy[number].items()]
        speed = min([1 / self._seconds[number], *spare])
        return speed if speed * self._seconds[number] > ROUNDING else 0.0

    def _back_to(self, time: float) -> tuple[dict[int, float], frozenset[int], list[int]]:
        """Discard the schedule from `time` on; returns remaining shares in flight, started ones, and later arrivals."""
        forgotten: set[int] = set()
        while self.spans and self.spans[-1].begin >= time:
            forgotten.update(self.spans.pop().left)
        span = self.spans[-1] if self.spans else _Span(time)
        passed = time - span.begin
        left = {n: share - span.speeds[n] * passed for n, share in span.left.items()}
        going = {n: share for n, share in left.items() if share > ROUNDING}  # the others end at this time
        return going, span.started, sorted(forgotten - set(left), key=self._ready.__getitem__)

    def _run(self, now: float, left: dict[int, float], started: frozenset[int], coming: list[int]) -> None:
        """Simulate from `now` until everything has been sent."""
        waiting = {n for n in (*left, *coming) if self.begins[n] >= now}
        while left or coming:
            while coming and self._ready[coming[0]] <= now:
                left[coming.pop(0)] = 1.0
            started = self._started(left, started)
            speeds, loads = self._speeds(left, started)
            self.spans.append(_Span(now, dict(left), started, speeds, loads))
            lasts = {n: share / speeds[n] for n, share in left.items() if speeds[n]}
            first = min(lasts.values(), default=math.inf)
            passing = [now + self._held_seconds(n, left, speeds) for n in left if n not in started]
            until = min(now + first, *(time for time in passing if time > now), math.inf)
            if coming and self._ready[coming[0]] <= until + first * ROUNDING:
                until = self._ready[coming[0]]
            passed = first if now + first <= until + first * ROUNDING else until - now
            for n, last in lasts.items():
                if n in waiting:
                    self.begins[n] = now
                    waiting.discard(n)
                if last <= passed * (1 + ROUNDING):
                    self.ends[n] = until
                    del left[n]
                else:
                    left[n] -= speeds[n] * passed
            now = until
        self.spans.append(_Span(now))

    def _started(self, left: dict[int, float], started: frozenset[int]) -> frozenset[int]:
        """The collectives in flight that get a share of full places; the others are queued behind them."""
        if self.policy != "in turn" or len(left) == 1:
            return frozenset(left)
        return frozenset(n for n in left if n in started or not any(m < n and self._holds(m, n, left) for m in left))

    def _holds(self, earlier: int, later: int, left: dict[int, float]) -> bool:
        """True if `later` is queued behind `earlier`: at a place they share, it has no less left to send."""
        one, other = self._busy[earlier], self._busy[later]
        return any(
            other[place] * left[later] >= busy * left[earlier] * (1 - ROUNDING)
            for place, busy in one.items() if place in other
        )  # fmt: skip

    def _held_seconds(self, number: int, left: dict[int, float], speeds: dict[int, float]) -> float:
        """Seconds until a queued collective has less left to send than those ahead of it; inf if these end first."""
        seconds, own = 0.0, self._busy[number]
        for m, share in left.items():
            for place, busy in self._busy[m].items():
                if m >= number or place not in own:
                    continue
                more = own[place] * left[number] - busy * share * (1 - 2 * ROUNDING)
                closing = own[place] * speeds[number] - busy * speeds[m] * (1 - 2 * ROUNDING)
                if more > 0:
                    seconds = max(seconds, more / closing if closing > 0 else math.inf)
        return max(seconds, ROUNDING * self._seconds[number])

    def _speeds(self, left: Collection[int], started: Collection[int]) -> tuple[dict[int, float], dict[int, float]]:
        """Progress per second of each collective in flight, and the loads of places."""
        loads: dict[int, float] = {}
        speeds = self._fair_speeds(started, loads)
        for n in sorted(set(left) - set(started)):
            speeds[n] = self._spare(n, loads)
            for place, busy in self._busy[n].items():
                loads[place] = loads.get(place, 0.0) + busy * speeds[n]
        return speeds, loads

    def _fair_speeds(self, numbers: Collection[int], loads: dict[int, float]) -> dict[int, float]:
        """Max-min fair speeds: all rise until a place is full or a collective is as fast as alone; adds to `loads`."""
        if len(numbers) == 1:
            (n,) = numbers
            loads.update({place: busy / self._seconds[n] for place, busy in self._busy[n].items()})
            return {n: 1 / self._seconds[n]}
        weights = dict.fromkeys(numbers, 1.0)
        if self.policy != "proportional":
            weights = {n: 1 / max(self._busy[n].values(), default=self._seconds[n]) for n in numbers}
        speeds, rising = dict.fromkeys(numbers, 0.0), set(numbers)
        while rising:
            rates: dict[int, float] = {}
            for n in rising:
                for place, busy in self._busy[n].items():
                    rates[place] = rates.get(place, 0.0) + busy * weights[n]
            steps = [(1 / self._seconds[n] - speeds[n]) / weights[n] for n in rising]
            step = max(0.0, min([*steps, *((1 - loads.get(place, 0.0)) / rate for place, rate in rates.items())]))
            for n in rising:
                speeds[n] += step * weights[n]
            for place, rate in rates.items():
                loads[place] = loads.get(place, 0.0) + step * rate
            full = {place for place in rates if loads[place] >= 1 - ROUNDING}
            rising = {
                n for n in rising
                if speeds[n] * self._seconds[n] < 1 - ROUNDING and full.isdisjoint(self._busy[n])
            }  # fmt: skip
        return speeds
