"""Folding of repeated runs in listings and tables: identical layers are shown once, with "x32".

Names that differ only in their numbers are alike. Alike rows of a table are merged wherever they are; in a listing,
whose order matters, a repeated run of lines is shown once, where it begins.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple, TypeVar

T = TypeVar("T")

LEAST_SAVED = 24  # least number of lines that folding a run must save
PERIODS = 64  # distances to equal lines tried as the period of a run


class RepeatedLines(NamedTuple):
    """`times` consecutive repetitions of `length` lines, beginning at line `first`."""

    first: int
    length: int
    times: int


@lru_cache(maxsize=1 << 14)
def name_pattern(name: str) -> str:
    """A name with its numbers removed.

    >>> name_pattern("layer_12/attention/q/kernel")
    'layer_/attention/q/kernel'
    """
    return re.sub(r"\d+", "", name)


def alike(rows: Iterable[T], key: Callable[[T], Hashable]) -> list[list[T]]:
    """Rows grouped by equal keys; groups in the order of their first rows.

    >>> alike(["w1", "x", "w2"], name_pattern)
    [['w1', 'w2'], ['x']]
    """
    groups: dict[Hashable, list[T]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return list(groups.values())


def times_text(text: str, times: int) -> str:
    """`text`, followed by "x32" if it stands for several.

    >>> times_text("w", 1), times_text("w", 32)
    ('w', 'w x32')
    """
    return text if times == 1 else f"{text} x{times}"


def runs(keys: Sequence[Hashable], least_saved: int = LEAST_SAVED) -> Iterator[RepeatedLines]:
    """Partition of the lines into runs: repetitions that save at least `least_saved` lines, and single lines.

    Of several runs that begin at a line the one that saves most is taken, on ties the one with the shortest period.

    >>> list(runs("xababab", least_saved=4))
    [RepeatedLines(first=0, length=1, times=1), RepeatedLines(first=1, length=2, times=3)]
    """
    numbers: dict[Hashable, int] = {}
    lines = [numbers.setdefault(key, len(numbers)) for key in keys]
    positions: dict[int, list[int]] = {}
    for n in reversed(range(len(lines))):
        positions.setdefault(lines[n], []).append(n)
    ends: dict[int, int] = {}  # distance -> line up to which lines equal those `distance` later
    at = 0
    while at < len(lines):
        positions[lines[at]].pop()
        best = RepeatedLines(at, 1, 1)
        for next_equal in positions[lines[at]][: -PERIODS - 1 : -1]:
            length = next_equal - at
            if ends.get(length, 0) <= at:
                ends[length] = _first_difference(lines, at, length)
            run = RepeatedLines(at, length, (ends[length] - at) // length + 1)
            if _saved_lines(run) >= least_saved and _saved_lines(run) > _saved_lines(best):
                best = run
        yield best
        for n in range(at + 1, at + best.length * best.times):
            positions[lines[n]].pop()
        at += best.length * best.times


def _first_difference(lines: Sequence[int], first: int, distance: int) -> int:
    """The first line from `first` on that differs from the one `distance` lines later."""
    end = first
    while end + distance < len(lines) and lines[end] == lines[end + distance]:
        end += 1
    return end


def _saved_lines(run: RepeatedLines) -> int:
    return run.length * (run.times - 1)
