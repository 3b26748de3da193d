"""A server under load: discrete-event simulation over modelled step times.

Each event is a step of the server. A decoding step adds one token to every running sequence; sequences join at the next
step and leave when complete (continuous batching). Prompts are prefilled first come, first served, as many at once as
the layout has data-parallel groups, in chunks if longer than `chunk`; running sequences decode one token between
chunks. With a slice of its own, prefill runs concurrently with decoding, and caches are sent between the slices.

Source: Yu et al., "Orca", OSDI 2022 (continuous batching); Agrawal et al., "Sarathi-Serve", arXiv:2403.02310 (chunks);
Zhong et al., "DistServe", arXiv:2401.09670 (separate slices).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from meshlib.searching.arrivals import Arrivals

Array = np.ndarray[Any, Any]
Table = Sequence[tuple[int, float]]
BACKLOG = 0.05  # share of requests queued at the last arrival: above this, the server does not keep up


@dataclass(frozen=True)
class StepSeconds:
    """Modelled times of a server's steps, interpolated linearly between estimates.

    Attributes:
      decode: (sequences, seconds) of decoding steps; prefill: (tokens of a prompt, seconds) of prefilling `together`
        prompts at once; transfer: seconds to send the caches of one token to another slice.
    """

    decode: Table
    prefill: Table
    together: int = 1
    transfer: float = 0.0

    @property
    def slots(self) -> int:
        """Largest number of sequences decoded together."""
        return self.decode[-1][0]

    def decoding(self, sequences: int) -> float:
        """Seconds of a decoding step of this many sequences."""
        return between(self.decode, max(sequences, self.decode[0][0]))

    def reading(self, tokens: int, start: int = 0) -> float:
        """Seconds to prefill a prompt from one position to another."""
        whole = between(self.prefill, tokens)
        return whole if start == 0 else max(0.0, whole - between(self.prefill, start))


def between(table: Table, x: float) -> float:
    """Linear interpolation at x; proportional from 0 before the first row, extrapolated beyond the last.

    >>> rows = ((4, 2.0), (8, 3.0))
    >>> between(rows, 2), between(rows, 6), between(rows, 12)
    (1.0, 2.5, 4.0)
    """
    rows = [(0, 0.0), *table]
    n = min(max(bisect_left([row[0] for row in rows], x), 1), len(rows) - 1)
    (x0, y0), (x1, y1) = rows[n - 1], rows[n]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


@dataclass(frozen=True)
class ServedLoad:
    """Result of serving a load. Modelled; times are per request, in order of arrival.

    Attributes:
      name: name of the layout; arrivals: the load.
      started, first, last: seconds at which prefill starts, and at which the first and the last token are ready.
      busy_seconds: seconds spent in prefill and decoding.
      steps, chunk, separate: as in `serve_load`.
    Example:
      >>> import meshlib as mtf
      >>> load = mtf.Arrivals(rate=50, prompts=8, outputs=8, requests=100)
      >>> served = mtf.serving(mtf.models.preset("gpt2").reduced(), "v5e-1", batches=[8], arrivals=load)
      >>> result = served.loads[0]
      >>> result.keeps_up, result.first_token_seconds(99) > result.first_token_seconds(50) > 0
      (True, True)
    """

    name: str
    steps: StepSeconds
    arrivals: Arrivals
    chunk: int | None
    separate: bool
    started: Array
    first: Array
    last: Array
    busy_seconds: tuple[float, float]

    @property
    def slots(self) -> int:
        """Largest number of sequences decoded together."""
        return self.steps.slots

    @property
    def slices(self) -> int:
        """Number of slices: 2 if prompts are read on a separate one."""
        return 2 if self.separate else 1

    def scaled(self, factor: float) -> ServedLoad:
        """Result at `factor` times the load."""
        return serve_load(self.name, self.steps, self.arrivals.scaled(factor), self.chunk, self.separate)

    def first_token_seconds(self, percentile: float = 50) -> float:
        """Time to first token at a percentile of requests."""
        return float(np.percentile(self.first - self.arrivals.seconds, percentile))

    def token_seconds(self, percentile: float = 50) -> float:
        """Mean time per token after the first, at a percentile of requests."""
        later = self.arrivals.outputs_drawn - 1
        several = later > 0
        if not several.any():
            return 0.0
        return float(np.percentile((self.last - self.first)[several] / later[several], percentile))

    @property
    def span_seconds(self) -> float:
        """From first arrival to last token."""
        return float(self.last.max() - self.arrivals.seconds[0])

    @property
    def tokens_per_second(self) -> float:
        """Output tokens of all requests per second."""
        return float(self.arrivals.outputs_drawn.sum() / self.span_seconds)

    @property
    def requests_per_second(self) -> float:
        """Completed requests per second."""
        return len(self.last) / self.span_seconds

    @property
    def utilisation(self) -> tuple[float, float]:
        """Shares of time spent on prefill and on decoding."""
        read, decoded = (seconds / self.span_seconds for seconds in self.busy_seconds)
        return read, decoded

    @property
    def request_seconds(self) -> float:
        """Mean time from arrival to last token."""
        return float(np.mean(self.last - self.arrivals.seconds))

    @property
    def wait_seconds(self) -> float:
        """Mean time from arrival to start of prefill."""
        return float(np.mean(self.started - self.arrivals.seconds))

    @property
    def queue_length(self) -> float:
        """Mean number of requests waiting for prefill."""
        return float(np.sum(self.started - self.arrivals.seconds) / self.span_seconds)

    @cached_property
    def longest_queue(self) -> int:
        """Largest number of requests waiting for prefill."""
        waiting = np.arange(1, len(self.started) + 1) - np.searchsorted(np.sort(self.started), self.arrivals.seconds)
        return int(waiting.max())

    @property
    def keeps_up(self) -> bool:
        """True if requests are served as fast as they arrive: few are queued at the last arrival."""
        waiting = int(np.sum(self.first > self.arrivals.seconds[-1]))
        return waiting <= max(self.slots, BACKLOG * len(self.first))

    def within(self, first_token_seconds: float | None, token_seconds: float | None) -> bool:
        """True if it keeps up, and 99 % of requests meet the limits on first token and time per token."""
        return (
            self.keeps_up
            and (first_token_seconds is None or self.first_token_seconds(99) <= first_token_seconds)
            and (token_seconds is None or self.token_seconds(99) <= token_seconds)
        )


def serve_load(
    name: str, steps: StepSeconds, arrivals: Arrivals, chunk: int | None = None, separate: bool = False
) -> ServedLoad:
    """Simulate a server under a load.

    Args:
      name: name of its layout; steps: times of its steps.
      chunk: prompt tokens to prefill between decoding steps of running sequences; by default the whole prompt.
      separate: whether prefill runs on a slice of its own.
    Returns: a `ServedLoad`.
    Example:
      >>> load = Arrivals(rate=1.0, prompts=4, outputs=3, requests=2, steady=True)
      >>> steps = StepSeconds(decode=((1, 0.1), (8, 0.1)), prefill=((4, 0.5),))
      >>> result = serve_load("data:1", steps, load)
      >>> result.first.tolist(), result.last.round(3).tolist()
      ([0.5, 1.5], [0.7, 1.7])
    """
    server = _Server(steps, arrivals, chunk)
    return server.separate(name) if separate else server.together(name)


@dataclass(eq=False)
class _Server:
    steps: StepSeconds
    arrivals: Arrivals
    chunk: int | None
    reading_seconds: float = 0.0
    decoding_seconds: float = 0.0

    def __post_init__(self) -> None:
        count = len(self.arrivals.seconds)
        self.arrived: list[float] = self.arrivals.seconds.tolist()
        self.prompts: list[int] = self.arrivals.prompts_drawn.tolist()
        self.outputs: list[int] = self.arrivals.outputs_drawn.tolist()
        self.started, self.first, self.last = (np.zeros(count) for _ in range(3))

    # ------------------------------------------------------------ one slice

    def together(self, name: str) -> ServedLoad:
        """Prefill and decoding alternate on one slice."""
        now, coming, count = 0.0, 0, len(self.arrived)
        waiting: deque[int] = deque()
        batch = _Batch(self)
        reading: list[int] = []  # requests in prefill, and the position reached
        position = 0
        while coming < count or waiting or reading or batch.size:
            while coming < count and self.arrived[coming] <= now:
                waiting.append(coming)
                coming += 1
            if not reading and waiting and batch.size < self.steps.slots:
                room = min(self.steps.together, self.steps.slots - batch.size, len(waiting))
                reading, position = [waiting.popleft() for _ in range(room)], 0
                self.started[reading] = now
            if reading:
                longest = max(self.prompts[n] for n in reading)
                until = longest if self.chunk is None else min(longest, position + self.chunk)
                now += self._read(until, position)
                position = until
                if position == longest:
                    self.first[reading] = now
                    batch.join(reading, now)
                    reading = []
                elif batch.size:
                    now = batch.step(now, now)
            elif batch.size:
                now = batch.step(now, None if waiting or coming == count else self.arrived[coming])
            else:
                now = self.arrived[coming]
        return self._result(name, False)

    def _read(self, until: int, position: int) -> float:
        seconds = self.steps.reading(until, position)
        self.reading_seconds += seconds
        return seconds

    # ------------------------------------------------------------ two slices

    def separate(self, name: str) -> ServedLoad:
        """Prefill on one slice and decoding on another, to which caches are sent."""
        now, coming, count = 0.0, 0, len(self.arrived)
        ready: list[tuple[float, int]] = []
        while coming < count:
            now = max(now, self.arrived[coming])
            stop = min(count, coming + self.steps.together)
            reading = [n for n in range(coming, stop) if self.arrived[n] <= now]
            longest = max(self.prompts[n] for n in reading)
            self.started[reading] = now
            now += self._read(longest, 0)
            self.first[reading] = now
            ready += [(now + self.prompts[n] * self.steps.transfer, n) for n in reading]
            coming += len(reading)
        ready.sort()
        now, batch, coming = 0.0, _Batch(self), 0
        while coming < count or batch.size:
            while coming < count and ready[coming][0] <= now and batch.size < self.steps.slots:
                batch.join([ready[coming][1]], self.first[ready[coming][1]])
                coming += 1
            if batch.size:
                room = coming < count and batch.size < self.steps.slots
                now = batch.step(now, ready[coming][0] if room else None)
            elif coming < count:
                now = max(now, ready[coming][0])
        return self._result(name, True)

    def _result(self, name: str, separate: bool) -> ServedLoad:
        busy = self.reading_seconds, self.decoding_seconds
        times = self.started, self.first, self.last
        return ServedLoad(name, self.steps, self.arrivals, self.chunk, separate, *times, busy)


class _Batch:
    """The running sequences: their number, and the step after which each ends."""

    def __init__(self, server: _Server) -> None:
        self.server = server
        self.size = 0
        self._steps = 0  # decoding steps so far
        self._ending: dict[int, list[int]] = {}

    def join(self, requests: Sequence[int], now: float) -> None:
        """Add sequences that have their first token."""
        for n in requests:
            more = self.server.outputs[n] - 1
            if more == 0:
                self.server.last[n] = now
            else:
                self._ending.setdefault(self._steps + more, []).append(n)
                self.size += 1

    def step(self, now: float, until: float | None = None) -> float:
        """Run steps until a sequence ends or `until`, but at least one; returns the time afterwards.

        Without `until` nobody can join before a sequence ends.
        """
        seconds = self.server.steps.decoding(self.size)
        count = min(self._ending) - self._steps
        if until is not None:
            count = max(1, min(count, int((until - now) / seconds) + 1))
        return self._run(now, count, seconds)

    def _run(self, now: float, count: int, seconds: float) -> float:
        now += count * seconds
        self._steps += count
        self.server.decoding_seconds += count * seconds
        ended = self._ending.pop(self._steps, [])
        self.server.last[ended] = now
        self.size -= len(ended)
        return now
