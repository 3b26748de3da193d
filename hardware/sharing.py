"""Collectives in flight at the same time on shared links, as a fluid: who progresses how fast from when to when.

A collective that keeps a place (a torus axis, DCN, ...) busy for some of the time that it takes alone loads that place
by busy * v when it progresses at v, the share of it that is done per second; alone v is 1 / seconds. The loads of a
place add up to at most 1. At a place that is full, bandwidth is divided

    "proportional"   by what each one sends: all progress at the same v. Links that serve whole messages in turn do
                     this to rings in step with each other, each of which has one message at every link
    "equal"          equally, so that a small one is through in at most twice its time: links that serve packets in turn

and who cannot use their share, because another place or their own hops hold them up, leave it to the others (max-min).
Two that begin together at one place, of a <= b seconds there, both end after a + b where sharing is proportional; after
2a and a + b where it is equal. The schedule of an estimate takes equal shares.

Sources: Bertsekas and Gallager, "Data Networks", 1992, section 6.5.2 (max-min fairness by progressive filling);
`hardware.events` for messages in turn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from hardware.checks import amount, one_of
from hardware.errors import HardwareError
from hardware.network import Cost

Policy = Literal["proportional", "equal"]
POLICIES: tuple[str, ...] = get_args(Policy)

_FULL = 1 - 1e-9  # of a place's rate: sums of floats


@dataclass(frozen=True)
class SharedSpan:
    """A time in which nobody begins or ends: `progress` is the share of each collective that is done per second."""

    begin_seconds: float
    end_seconds: float
    progress: tuple[float, ...]


@dataclass(frozen=True)
class Shared:
    """Collectives on shared links.

    Attributes:
      ends: when each ends, in seconds, in the order given.
      spans: who progresses how fast, from the first start to the last end.
    """

    ends: tuple[float, ...]
    spans: tuple[SharedSpan, ...]

    @property
    def seconds(self) -> float:
        """When the last one ends."""
        return max(self.ends, default=0.0)


def shared(costs: Sequence[Cost], starts: Sequence[float] | None = None, policy: Policy = "proportional") -> Shared:
    """When collectives end that are in flight at the same time.

    Args:
      costs: of each alone, as `hardware.collective_cost` returns.
      starts: when each is ready, in seconds; by default all at 0.
      policy: how a full place divides its bandwidth, see the module docstring.
    Returns: Shared.
    Raises: HardwareError for other costs, a wrong number of starts, negative ones, or an unknown policy.
    Example:
      >>> gathers = [Cost(seconds, ((0, seconds),), 1, "-") for seconds in (1.0, 3.0)]
      >>> shared(gathers).ends, shared(gathers, policy="equal").ends
      ((4.0, 4.0), (2.0, 4.0))
      >>> shared([gathers[0], Cost(2.0, ((1, 2.0),), 1, "-")]).ends  # another axis of the torus
      (1.0, 2.0)

    Source: module docstring.
    """
    if not isinstance(costs, (list, tuple)) or not all(isinstance(cost, Cost) for cost in costs):
        raise HardwareError(f"costs must be a list of Cost, as collective_cost returns, not {costs!r:.80}")
    given = [0.0] * len(costs) if starts is None else [amount("starts", start) for start in starts]
    if len(given) != len(costs):
        raise HardwareError(f"shared has {len(costs)} collectives and {len(given)} starts; give one for each")
    one_of("policy of shared links", policy, POLICIES)
    left = [1.0] * len(costs)
    ends, spans = list(given), list[SharedSpan]()
    now = min(given, default=0.0)
    waiting = {n for n, cost in enumerate(costs) if cost.seconds > 0}
    while waiting:
        active = [n for n in sorted(waiting) if given[n] <= now]
        coming = min((given[n] for n in waiting if given[n] > now), default=math.inf)
        speeds = _speeds([costs[n] for n in active], policy)
        lasts = [left[n] / speed for n, speed in zip(active, speeds, strict=True)]
        until = min([now + last for last in lasts], default=math.inf)
        until = min(until, coming)
        progress = [0.0] * len(costs)
        for n, speed, last in zip(active, speeds, lasts, strict=True):
            progress[n] = speed
            left[n] -= speed * (until - now)
            if now + last <= until:
                ends[n] = until
                waiting.discard(n)
        spans.append(SharedSpan(now, until, tuple(progress)))
        now = until
    return Shared(tuple(ends), tuple(spans))


def _speeds(costs: Sequence[Cost], policy: str) -> list[float]:
    """The progress of each per second: all rise together until a place is full or one is as fast as it is alone."""
    needs = [dict(cost.busy_seconds) for cost in costs]
    largest = [max(need.values(), default=0.0) or cost.seconds for need, cost in zip(needs, costs, strict=True)]
    weights = [1.0 if policy == "proportional" else 1 / busy for busy in largest]
    speeds, rising = [0.0] * len(costs), set(range(len(costs)))
    while rising:
        steps = [(1 / costs[n].seconds - speeds[n]) / weights[n] for n in rising]
        for place in {place for n in rising for place, busy in needs[n].items() if busy}:
            used = sum(need.get(place, 0.0) * speed for need, speed in zip(needs, speeds, strict=True))
            rate = sum(needs[n].get(place, 0.0) * weights[n] for n in rising)
            steps.append((1 - used) / rate)
        step = max(0.0, min(steps))
        for n in rising:
            speeds[n] += step * weights[n]
        full = {
            place for place in {p for need in needs for p in need}
            if sum(need.get(place, 0.0) * speed for need, speed in zip(needs, speeds, strict=True)) >= _FULL
        }  # fmt: skip
        rising -= {
            n for n in rising
            if speeds[n] >= _FULL / costs[n].seconds or any(busy and place in full for place, busy in needs[n].items())
        }  # fmt: skip
    return speeds
