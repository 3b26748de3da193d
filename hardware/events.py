"""A deterministic event simulation of messages over the links of a torus.

The model: a link carries one message at a time, first come first served; b bytes occupy it for b / B
seconds and arrive L seconds later, whole (store and forward). Messages that become ready in the same
instant queue in the order of their numbers. Time is counted in integer ticks of which b / B and L are
whole multiples, so equal times are equal and every run is the same.

Payloads really move: a message copies a region of its sender's memory when it becomes ready and stores
it, or combines it, at its target when it arrives.

Source: the event model that `hardware.collectives` has closed forms for.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hardware.checks import HardwareError, amount, whole
from hardware.torus import Torus
from hardware.unknown_names import Attributes

Array = NDArray[Any]
Region = tuple[int | slice | NDArray[np.int64], ...]


@dataclass(frozen=True)
class Links:
    """Rates of a network's links: bytes per second in each direction, seconds per hop.

    Raises: HardwareError for a rate that is not positive and finite, or a negative hop time.
    Example:
      >>> from hardware import Links
      >>> Links(45e9, 1e-6).seconds(45_000)
      2e-06
    """

    bytes_per_second: float
    hop_seconds: float = 1e-6

    def __post_init__(self) -> None:
        amount("bytes_per_second", self.bytes_per_second, positive=True)
        amount("hop_seconds", self.hop_seconds)

    def seconds(self, size_bytes: float, hops: int = 1) -> float:
        """Time of one message over `hops` links, store and forward."""
        size = amount("size_bytes", size_bytes)
        return whole("hops", hops) * (self.hop_seconds + size / self.bytes_per_second)


def check_links(links: object) -> None:
    """Refuse anything but `Links`.

    Raises: HardwareError that shows how to write them.
    """
    if not isinstance(links, Links):
        raise HardwareError(f"links are given as Links(bytes_per_second, hop_seconds), not {links!r}")


@dataclass(slots=True)
class Message:
    """A message: a region of one node's memory sent to another node.

    Attributes:
      source, target: numbers of the sending and the receiving node.
      route: the links from the source to the target, in order.
      read: the region of the source's memory that is sent, as an index of its array.
      write: the region of the target's memory that is written, of the same shape.
      size_bytes: bytes on the wire, possibly a fraction.
      after: numbers of the plan's messages that must have arrived before this one is sent.
      combine: function of the payload and the target's data, such as np.add; None overwrites the data.
      stage: number of the message's stage. In a plan with barriers a stage starts once the one before has ended on
        every node.
    """

    source: int
    target: int
    route: tuple[int, ...]
    read: Region
    write: Region
    size_bytes: Fraction
    after: tuple[int, ...] = ()
    combine: Callable[[Array, Array], Array] | None = None
    stage: int = 0


@dataclass
class MessagePlan:
    """The messages of one collective, and the memory of every node: [nodes][...]."""

    memory: list[Array]
    messages: list[Message] = field(default_factory=list)
    barrier: bool = False


@dataclass(frozen=True)
class Crossing:
    """One message on one link: when it occupies the link (from, until), and when it arrives at the far end; seconds."""

    link: int
    begin_seconds: float
    end_seconds: float
    arrival_seconds: float
    size_bytes: float


@dataclass(frozen=True)
class Traffic(Attributes):
    """Result of a simulation.

    Attributes:
      exact_seconds: when the last message has arrived.
      plan_seconds: when the last message of each plan has arrived.
      link_bytes: number of a link -> bytes that it carried; links without traffic are left out.
      messages: number of link crossings; a message over three links counts three times.
      crossings: every crossing, if the simulation was asked to record them.
    """

    exact_seconds: Fraction
    plan_seconds: tuple[float, ...]
    link_bytes: dict[int, Fraction]
    messages: int
    crossings: tuple[Crossing, ...] = ()

    @property
    def seconds(self) -> float:
        """Time from start to the last arrival."""
        return float(self.exact_seconds)

    @property
    def max_link_bytes(self) -> float:
        """Bytes on the busiest link."""
        return float(max(self.link_bytes.values(), default=0))

    @property
    def total_link_bytes(self) -> float:
        """Bytes over all links together."""
        return float(sum(self.link_bytes.values()))


class _Clock:
    """Integer clock ticks for one pair of rates and the sizes of all messages."""

    def __init__(self, links: Links, sizes: set[Fraction]) -> None:
        byte = 1 / _decimal(links.bytes_per_second)
        hop = _decimal(links.hop_seconds)
        units = [size * byte for size in sizes]
        self.per_second = math.lcm(hop.denominator, *(unit.denominator for unit in units))
        self.hop = int(hop * self.per_second)
        self.of_size = {size: int(unit * self.per_second) for size, unit in zip(sizes, units, strict=True)}


def _decimal(x: float) -> Fraction:
    """The exact decimal value of a float as written: 1e-6 is 1 / 1,000,000."""
    return Fraction(repr(float(x)))


def simulate(torus: Torus, links: Links, plans: Sequence[MessagePlan], record: bool = False) -> Traffic:
    """Run all plans at once over the links of one torus, from time 0; their memories are changed.

    Args:
      torus: the network; `links`: its rates.
      plans: collectives that share the links.
      record: keep each crossing of a link, for `hardware.films`.
    Returns: Traffic.
    Raises: HardwareError for a negative size, or messages that wait for each other.
    Example:
      >>> plan = MessagePlan([np.array([7.0]), np.array([0.0])])
      >>> torus = Torus((2,), wrap=False)
      >>> plan.messages.append(Message(0, 1, torus.route(0, 1), (0,), (0,), Fraction(45_000)))
      >>> simulate(torus, Links(45e9), [plan]).seconds, plan.memory[1].tolist()
      (2e-06, [7.0])

    Source: module docstring.
    """
    check_links(links)
    run = _EventRun(links, plans, record)
    run.start()
    while run.heap:
        run.instant()
    waiting = sum(run.left)
    if waiting:
        raise HardwareError(f"{waiting} messages wait for each other and never start")
    second = run.clock.per_second
    return Traffic(
        exact_seconds=Fraction(max(run.ends, default=0), second),
        plan_seconds=tuple(end / second for end in run.ends),
        link_bytes=run.link_bytes,
        messages=run.crossings,
        crossings=tuple(
            Crossing(link, begin / second, end / second, (end + run.clock.hop) / second, float(size))
            for link, begin, end, size in run.recorded or ()
        ),
    )


class _EventRun:
    """State of one simulation: the heap of arrivals, the times at which links become free, and pending dependencies."""

    def __init__(self, links: Links, plans: Sequence[MessagePlan], record: bool = False) -> None:
        self.plans = plans
        self.recorded: list[tuple[int, int, int, Fraction]] | None = [] if record else None
        self.messages = [(p, message) for p, plan in enumerate(plans) for message in plan.messages]
        if any(message.size_bytes < 0 for _, message in self.messages):
            raise HardwareError("a message has a negative number of bytes")
        self.clock = _Clock(links, {message.size_bytes for _, message in self.messages})
        self.heap: list[tuple[int, int, int]] = []  # (time, message, hop that ends)
        self.free: dict[int, int] = {}
        self.link_bytes: dict[int, Fraction] = {}
        self.crossings = 0
        self.payload: list[Array | None] = [None] * len(self.messages)
        self.ends = [0] * len(plans)
        self.left = [len(plan.messages) for plan in plans]
        self._wire()

    def _wire(self) -> None:
        """Dependencies between messages; with barriers also the remaining stages (last first) and their messages."""
        self.followers: list[list[int]] = [[] for _ in self.messages]
        self.waits = [len(message.after) for _, message in self.messages]
        self.stages: list[list[list[int]]] = []
        self.stage_left = [0] * len(self.plans)
        first = 0
        for plan in self.plans:
            members: dict[int, list[int]] = {}
            for number, message in enumerate(plan.messages, start=first):
                for earlier in message.after:
                    self.followers[first + earlier].append(number)
                if plan.barrier:
                    members.setdefault(message.stage, []).append(number)
                    self.waits[number] += 1  # the barrier counts as one dependency
            self.stages.append([members[stage] for stage in sorted(members, reverse=True)])
            first += len(plan.messages)

    def start(self) -> None:
        ready = [n for n, waits in enumerate(self.waits) if not waits]
        for p in range(len(self.plans)):
            ready += self._open(p)
        for number in sorted(ready):
            self._leave(0, number)

    def instant(self) -> None:
        """Process the next point in time: all arrivals first, then departures in order."""
        now = self.heap[0][0]
        forward, ready = [], []
        while self.heap and self.heap[0][0] == now:
            _, number, hop = heapq.heappop(self.heap)
            if hop < len(self.messages[number][1].route):
                forward.append((number, hop))
            else:
                ready += self._arrive(now, number)
        for number, hop in sorted([*forward, *((number, 0) for number in ready)]):
            if hop:
                self._cross(now, number, hop)
            else:
                self._leave(now, number)

    def _leave(self, now: int, number: int) -> None:
        p, message = self.messages[number]
        self.payload[number] = np.array(self.plans[p].memory[message.source][message.read])
        self._cross(now, number, 0)

    def _cross(self, now: int, number: int, hop: int) -> None:
        message = self.messages[number][1]
        if not message.route:
            heapq.heappush(self.heap, (now, number, 0))
            return
        link, size = message.route[hop], message.size_bytes
        done = max(now, self.free.get(link, 0)) + self.clock.of_size[size]
        self.free[link] = done
        self.link_bytes[link] = self.link_bytes.get(link, Fraction(0)) + size
        self.crossings += 1
        if self.recorded is not None:
            self.recorded.append((link, done - self.clock.of_size[size], done, size))
        heapq.heappush(self.heap, (done + self.clock.hop, number, hop + 1))

    def _arrive(self, now: int, number: int) -> list[int]:
        p, message = self.messages[number]
        memory, payload = self.plans[p].memory[message.target], self.payload[number]
        assert payload is not None
        self.payload[number] = None
        if message.combine is not None:
            payload = message.combine(payload, memory[message.write])
        memory[message.write] = payload
        self.ends[p] = now
        self.left[p] -= 1
        ready = self._awaited(self.followers[number])
        self.stage_left[p] -= 1  # never reaches 0 without barriers
        return ready if self.stage_left[p] else ready + self._open(p)

    def _open(self, p: int) -> list[int]:
        """Open the next stage of a plan, if there is one; returns the messages that become ready."""
        if not self.stages[p]:
            return []
        members = self.stages[p].pop()
        self.stage_left[p] = len(members)
        return self._awaited(members)

    def _awaited(self, numbers: Sequence[int]) -> list[int]:
        """Count one dependency of these messages as met; returns those without further dependencies."""
        for number in numbers:
            self.waits[number] -= 1
        return [number for number in dict.fromkeys(numbers) if not self.waits[number]]
