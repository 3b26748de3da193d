"""Repeated runs in listings and tables: layers that are written one after another are shown once, with "x32".

What differs in the numbers of its names alone is alike. Of rows of a table, alike ones are one row wherever they stand;
of a listing, whose order matters, a run of lines that repeats is shown once where it begins.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple, TypeVar

T = TypeVar("T")

LEAST_SAVED = 24  # lines that folding a run must save
PERIODS = 64  # distances to equal lines that are tried as the period of a run


class RepeatedLines(NamedTuple):
    """`times` adjacent repetitions of `length` lines, from line `first` on."""

    first: int
    length: int
    times: int


@lru_cache(maxsize=1 << 14)
def name_pattern(name: str) -> str:
    """A name without its numbers.

    >>> name_pattern("layer_12/attention/q/kernel")
    'layer_/attention/q/kernel'
    """
    return re.sub(r"\d+", "", name)


def alike(rows: Iterable[T], key: Callable[[T], Hashable]) -> list[list[T]]:
    """Rows in groups of equal keys, in the order of the first of each.

    >>> alike(["w1", "x", "w2"], name_pattern)
    [['w1', 'w2'], ['x']]
    """
    groups: dict[Hashable, list[T]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return list(groups.values())


def times_text(text: str, times: int) -> str:
    """A text, with "x32" where it stands for so many.

    >>> times_text("w", 1), times_text("w", 32)
    ('w', 'w x32')
    """
    return text if times == 1 else f"{text} x{times}"


def runs(keys: Sequence[Hashable], least_saved: int = LEAST_SAVED) -> Iterator[RepeatedLines]:
    """All lines in order, as runs: those that repeat and save at least `least_saved` lines, others one by one.

    Of several runs that begin at a line it is the one that saves most, of equal ones that with the shortest period.

    >>> list(runs("xababab", least_saved=4))
    [RepeatedLines(first=0, length=1, times=1), RepeatedLines(first=1, length=2, times=3)]
    """
    numbers: dict[Hashable, int] = {}
    lines = [numbers.setdefault(key, len(numbers)) for key in keys]
    places: dict[int, list[int]] = {}
    for n in reversed(range(len(lines))):
        places.setdefault(lines[n], []).append(n)
    ends: dict[int, int] = {}  # by distance: up to where lines are equal to those so far behind them
    at = 0
    while at < len(lines):
        places[lines[at]].pop()
        best = RepeatedLines(at, 1, 1)
        for other in places[lines[at]][: -PERIODS - 1 : -1]:
            length = other - at
            if ends.get(length, 0) <= at:
                ends[length] = _end(lines, at, length)
            run = RepeatedLines(at, length, (ends[length] - at) // length + 1)
            if _saved(run) >= least_saved and _saved(run) > _saved(best):
                best = run
        yield best
        for n in range(at + 1, at + best.length * best.times):
            places[lines[n]].pop()
        at += best.length * best.times


def _end(lines: Sequence[int], first: int, distance: int) -> int:
    """The first line from `first` on that differs from the one so far behind it."""
    end = first
    while end + distance < len(lines) and lines[end] == lines[end + distance]:
        end += 1
    return end


def _saved(run: RepeatedLines) -> int:
    return run.length * (run.times - 1)
