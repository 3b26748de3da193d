"""Requests to a server: arrival times, prompt lengths, and requested output lengths."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import exp, log
from typing import Any, TypeAlias

import numpy as np

from meshlib.core.arguments import at, number, whole
from meshlib.core.errors import GraphError

WHAT = "Arrivals"
Lengths: TypeAlias = int | str | Sequence[int] | Mapping[int, float]
Array = np.ndarray[Any, Any]
MOST_TOKENS = 1 << 22
MOST_REQUESTS = 1_000_000
_NORMAL_99 = 2.3263478740408408  # standard deviations from the median to the 99th percentile of a normal distribution
_RANGE, _LOGNORMAL = re.compile(r"(\d+)-(\d+)"), re.compile(r"(\d+)~(\d+)")
_FORMS = 'a number, "100-2000" (all alike), "200~1500" (median and 99th percentile), {length: weight}, or a list'


@dataclass(frozen=True)
class Arrivals:
    """The load of a server.

    Args:
      rate: mean requests per second of a Poisson process.
      prompts, outputs: tokens of a request's prompt, and tokens it asks for: a number; text, "100-2000" for uniform
        lengths or "200~1500" for a log-normal distribution by its median and 99th percentile; a mapping of lengths to
        weights, such as a measured histogram; or a list from which lengths are drawn.
      requests: number of simulated requests.
      seed: seed of the random arrivals and lengths.
      steady: whether requests arrive at equal intervals instead of at random.
    Raises: GraphError for a value of the wrong kind.
    Example:
      >>> import meshlib as mtf
      >>> load = mtf.Arrivals(rate=2.0, prompts="200~1500", outputs=128, requests=4)
      >>> load.outputs_drawn.tolist(), len(load.seconds), load.longest >= 128
      ([128, 128, 128, 128], 4, True)
      >>> mtf.Arrivals.trace([(0.0, 512, 64), (0.5, 100, 30)]).rate
      2.0
    """

    rate: float
    prompts: Lengths = 512
    outputs: Lengths = 128
    requests: int = 1000
    seed: int = 0
    steady: bool = False
    recorded: tuple[tuple[float, int, int], ...] | None = None

    def __post_init__(self) -> None:
        if not number(self.rate, WHAT, "rate") > 0:
            raise GraphError(f"{at(WHAT)}: rate must be above 0 requests a second, got {self.rate}")
        if whole(self.requests, WHAT, "requests", low=1) > MOST_REQUESTS:
            raise GraphError(f"{at(WHAT)}: requests must be at most {MOST_REQUESTS:,}, got {self.requests:,}")
        whole(self.seed, WHAT, "seed", low=0)
        if self.recorded is None:
            for name in ("prompts", "outputs"):
                _distribution(getattr(self, name), name)

    @classmethod
    def trace(cls, rows: Sequence[tuple[float, int, int]] | str | os.PathLike[str]) -> Arrivals:
        """Recorded requests.

        Args:
          rows: (seconds, prompt tokens, output tokens) of each, in order of time, or the path of a text file of such
            rows, separated by commas; a header line is skipped.
        Raises: GraphError for a malformed row, by its number.
        """
        parsed_rows = _read(rows) if isinstance(rows, str | os.PathLike) else list(rows)
        recorded = [_recorded(row, n) for n, row in enumerate(parsed_rows, start=1)]
        if len(recorded) < 2:
            raise GraphError(f"{at(WHAT)}: a trace needs at least 2 requests, got {len(recorded)}")
        seconds = [row[0] for row in recorded]
        late = next((n for n in range(1, len(seconds)) if seconds[n] < seconds[n - 1]), None)
        if late is not None or seconds[-1] <= seconds[0]:
            where = f"request {1 if late is None else late + 1}"
            raise GraphError(
                f"{at(WHAT)}: requests of a trace must be in order of time and not all at once; see {where}"
            )
        rate = (len(recorded) - 1) / (seconds[-1] - seconds[0])
        return cls(rate, requests=len(recorded), recorded=tuple(recorded))

    def scaled(self, factor: float) -> Arrivals:
        """The same requests at `factor` times the rate."""
        if not number(factor, f"{WHAT}.scaled", "factor") > 0:
            raise GraphError(f"{at(WHAT)}: factor must be above 0, got {factor}")
        recorded = None if self.recorded is None else tuple((s / factor, p, n) for s, p, n in self.recorded)
        changed = {"rate": self.rate * factor, "recorded": recorded}
        return Arrivals(**{**{name: getattr(self, name) for name in self.__dataclass_fields__}, **changed})

    # ------------------------------------------------------------ samples

    @cached_property
    def seconds(self) -> Array:
        """Arrival time of each request, from 0, at the given rate."""
        if self.recorded is not None:
            return np.array([row[0] for row in self.recorded])
        if self.steady:
            return np.arange(self.requests) / self.rate
        return np.cumsum(self._random(0).exponential(1 / self.rate, self.requests))

    @cached_property
    def prompts_drawn(self) -> Array:
        """Prompt tokens of each request."""
        return self._drawn(1, self.prompts)

    @cached_property
    def outputs_drawn(self) -> Array:
        """Output tokens of each request."""
        return self._drawn(2, self.outputs)

    @property
    def longest(self) -> int:
        """Tokens of prompt plus output of the longest request."""
        return int((self.prompts_drawn + self.outputs_drawn).max())

    def _random(self, stream: int) -> np.random.Generator:
        return np.random.default_rng((self.seed, stream))

    def _drawn(self, stream: int, lengths: Lengths) -> Array:
        if self.recorded is not None:
            return np.array([row[stream] for row in self.recorded])
        values, weights = _distribution(lengths, "lengths")
        if weights is None and len(values) == 2:
            median, spread = values
            drawn = np.exp(log(median) + spread * self._random(stream).standard_normal(self.requests))
            return np.clip(np.rint(drawn), 1, MOST_TOKENS).astype(int)
        return self._random(stream).choice(np.array(values, int), self.requests, p=weights)

    def __str__(self) -> str:
        prompts, outputs = (
            str(x) if isinstance(x, int | str) else f"{x.min():,} to {x.max():,}"
            for x in (
                (self.prompts_drawn, self.outputs_drawn)
                if self.recorded is not None or not isinstance(self.prompts, int | str)
                else (self.prompts, self.outputs if isinstance(self.outputs, int | str) else self.outputs_drawn)
            )
        )
        return f"{self.rate:g} requests/s, prompts of {prompts} tokens, outputs of {outputs}"


def _distribution(lengths: object, name: str) -> tuple[list[float], Array | None]:
    """Lengths and their probabilities; for a log-normal distribution its median and spread, and None."""
    if isinstance(lengths, int) and not isinstance(lengths, bool):
        return [_length(lengths, name)], np.ones(1)
    if isinstance(lengths, str):
        return _from_text(lengths, name)
    if isinstance(lengths, Mapping):
        values = [_length(length, name) for length in lengths]
        weights = np.array([number(w, WHAT, f"weight of {name}") for w in lengths.values()])
        if not len(weights) or weights.min() < 0 or weights.sum() <= 0:
            raise GraphError(f"{at(WHAT)}: weights of {name} must not be negative, and not all 0, got {lengths!r:.80}")
        return values, weights / weights.sum()
    if isinstance(lengths, Sequence) and len(lengths):
        values = [_length(length, name) for length in lengths]
        return values, np.full(len(values), 1 / len(values))
    raise GraphError(f"{at(WHAT)}: {name} must be {_FORMS}, got {lengths!r:.80}")


def _from_text(text: str, name: str) -> tuple[list[float], Array | None]:
    if text.isdigit():
        return [_length(int(text), name)], np.ones(1)
    if (both := _RANGE.fullmatch(text.strip())) is not None:
        low, high = (_length(int(n), name) for n in both.groups())
        if low <= high:
            return list(range(int(low), int(high) + 1)), np.full(int(high - low) + 1, 1 / (high - low + 1))
    if (both := _LOGNORMAL.fullmatch(text.strip())) is not None:
        median, high = (_length(int(n), name) for n in both.groups())
        if median < high:
            return [median, log(high / median) / _NORMAL_99], None
    raise GraphError(f"{at(WHAT)}: {name} must be {_FORMS}, the smaller number first, got {text!r:.80}")


def _length(length: object, name: str) -> float:
    if not 1 <= whole(length, WHAT, name) <= MOST_TOKENS:
        raise GraphError(f"{at(WHAT)}: {name} must be 1 to {MOST_TOKENS:,} tokens, got {length}")
    return int(length)  # type: ignore[call-overload,no-any-return]


def _recorded(row: object, n: int) -> tuple[float, int, int]:
    try:
        values: Sequence[Any] = row  # type: ignore[assignment]
        request = float(values[0]), int(values[1]), int(values[2])
    except (TypeError, ValueError, IndexError, KeyError):
        request = (-1.0, 0, 0)
    if not (0 <= request[0] < exp(40) and 1 <= request[1] <= MOST_TOKENS and 1 <= request[2] <= MOST_TOKENS):
        raise GraphError(
            f"{at(WHAT)}: request {n} of a trace must be (seconds, prompt tokens, output tokens), got {row!r:.80}"
        )
    return request


def _read(path: str | os.PathLike[str]) -> list[list[str]]:
    try:
        with open(path, encoding="utf-8") as file:
            lines = [line.strip() for line in file.read(64 << 20).splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as fault:
        said = fault.strerror if isinstance(fault, OSError) else fault
        remedy = "give a file of lines seconds, prompt tokens, output tokens"
        raise GraphError(f"{at(WHAT)}: the trace {os.fspath(path)!r} can't be read: {said}; {remedy}") from None
    rows = [line.split(",") for line in lines]
    named = bool(rows) and not rows[0][0].strip().replace(".", "", 1).isdigit()
    return rows[1:] if named else rows
