"""The heap of a compiled step: live ranges of its buffers, and gaps between them.

A buffer keeps one place for as long as it is live, and the next large one may fit none of the holes that smaller ones
left. Buffers are placed one by one, each into the smallest hole that takes it: in the order of the program, or those
that are live longest first. The lower of these heaps counts.

Source: openxla/xla: xla/service/heap_simulator/heap_simulator.h (GlobalDecreasingSizeBestFitHeap, its orders kTemporal
and kSpatial, and ChooseBestHeapAlgorithm); places in the compiler's reports of memory, such as that of GPT-2 large on
two slices, whose embedding's gradient of 245 MiB is on top of a hole of 180 MiB. The reported total of that program is
213 MiB above what is live at its peak, 2,099 MiB. If HBM is limited to 3.0, 2.7, 2.5 and 2.3 GiB, it is 338, 195, 10
and 11 MiB above it: gaps close where memory is short, and only there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from math import inf
from typing import NamedTuple

import numpy as np

from meshlib.program.analysis.buffers import START, Buffer, MemoryPlan
from meshlib.program.analysis.memory import Size
from meshlib.program.instructions import Instruction, Loop
from meshlib.program.records import Program

SMALL = 1 / 500  # of the peak: smaller buffers fill holes, and are not placed

Scratch = Callable[[Program, Instruction], int]  # scratch bytes of an instruction
Extra = Callable[[Program, MemoryPlan], Iterable[tuple[Buffer, int]]]  # buffers with additional bytes
Spans = Callable[[Program, MemoryPlan], Mapping[Buffer, tuple[int, int]]]  # first and last instructions of buffers


class LiveRange(NamedTuple):
    """Bytes that are live from instruction `begin` until before `end`; a loop counts as its body's instructions."""

    size_bytes: int
    begin: int
    end: int


def live_ranges(
    program: Program, size: Size, scratch: Scratch, extra: Extra, spans: Spans, loop: Loop | None = None, first: int = 0
) -> Iterator[LiveRange]:
    """Live ranges of all buffers of a program, those of its loops' bodies included.

    Args:
      size: bytes of a buffer by its owner; extra: additional bytes of some buffers.
      spans: first and last instructions of buffers, where they differ from the plan's.
      scratch: bytes of an instruction while it runs, besides its operands and results.
      loop, first: of a body, the loop, whose operands are counted outside, and the number of its first instruction.
    """
    begins = [*accumulate(map(_length, program.instructions), initial=first)]
    plan = (program if loop is None else loop).memory_plan
    taken = {b: size(b.owner) if loop is None or b.begin != START else 0 for b in plan.buffers}
    for b, more_bytes in extra(program, plan):
        taken[b] = taken.get(b, 0) + more_bytes
    compiled = spans(program, plan)
    for b, taken_bytes in taken.items():
        begin, end = compiled.get(b, (b.begin, b.end))
        yield LiveRange(taken_bytes, begins[max(begin, 0)], begins[min(end + 1, len(begins) - 1)])
    for n, i in enumerate(program.instructions):
        if more_bytes := scratch(program, i):
            yield LiveRange(more_bytes, begins[n], begins[n + 1])
        if isinstance(i, Loop):
            yield from live_ranges(i.body, size, scratch, extra, spans, i, begins[n])


def _length(i: Instruction) -> int:
    return sum(map(_length, i.body.instructions)) if isinstance(i, Loop) else 1


def peak_bytes(ranges: Sequence[LiveRange]) -> int:
    """The most bytes that are live at once.

    >>> peak_bytes([LiveRange(4, 0, 2), LiveRange(2, 1, 3), LiveRange(3, 2, 3)])
    6
    """
    change = [0] * (2 + max((r.end for r in ranges), default=0))
    for size_bytes, begin, end in ranges:
        change[begin] += size_bytes
        change[end] -= size_bytes
    return max(accumulate(change))


def gap_bytes(ranges: Sequence[LiveRange], spare_bytes: float = inf) -> int:
    """Height of the heap above the peak. Buffers that are live throughout leave no gaps.

    Args:
      spare_bytes: memory beyond the peak; gaps that exceed it are closed as far as the order by size does so.

    >>> ranges = [LiveRange(3, 0, 4), LiveRange(2, 2, 6), LiveRange(4, 3, 9), LiveRange(4, 5, 7)]
    >>> gap_bytes(ranges), gap_bytes(ranges, spare_bytes=2)
    (3, 0)
    """
    last = max((r.end for r in ranges), default=0)
    moving = [r for r in ranges if r.begin > 0 or r.end < last]
    least = SMALL * peak_bytes(moving)
    large = [r for r in moving if r.size_bytes > least]
    large_bytes = peak_bytes(large)
    orders = (lambda r: (r.begin, -r.size_bytes)), (lambda r: (r.begin - r.end, -r.size_bytes, r.begin))
    gaps = min(_height(sorted(large, key=order)) for order in orders) - large_bytes
    if gaps <= spare_bytes:
        return gaps
    by_size = sorted(large, key=lambda r: (-r.size_bytes, r.begin - r.end, r.begin))
    return min(gaps, _height(by_size) - large_bytes)


def _height(ranges: Sequence[LiveRange]) -> int:
    """Height of the heap if buffers are placed in this order, each into the smallest hole that takes it."""
    begins, ends, places, tops = (np.zeros(len(ranges), np.int64) for _ in range(4))
    for n, (size_bytes, begin, end) in enumerate(ranges):
        beside = (begins[:n] < end) & (ends[:n] > begin)
        order = np.argsort(places[:n][beside], kind="stable")
        floors = np.concatenate([[0], np.maximum.accumulate(tops[:n][beside][order])])
        holes = np.concatenate([places[:n][beside][order], [np.iinfo(np.int64).max]]) - floors
        place = floors[np.where(holes >= size_bytes, holes, np.iinfo(np.int64).max).argmin()]
        begins[n], ends[n], places[n], tops[n] = begin, end, place, place + size_bytes
    return int(tops.max(initial=0))
