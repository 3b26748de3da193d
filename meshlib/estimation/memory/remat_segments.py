"""Segments of a forward pass that the backward pass recomputes one at a time.

At a cut, all values are kept that the rest of the forward pass reads from before it; between cuts nothing is kept. So
the memory needed is that of all cuts, plus the largest segment while it is recomputed (Chen et al.,
arXiv:1604.06174).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from meshlib.core.graph import FORWARD
from meshlib.program.instructions import Instruction, Loop, Resident, Value
from meshlib.program.records import Program

_HALVINGS = 12  # segment sizes tried: 1/2, 1/4, ... 1/4096 of all saved bytes


@dataclass(frozen=True)
class Segments:
    """A forward pass in segments.

    Attributes:
      pieces: number of segments; spared: values no longer saved, except those of the largest segment, which represents
        the one being recomputed; more_bytes: values at cuts that were not saved before.
    """

    pieces: int
    spared: frozenset[Value]
    more_bytes: int


def segments(program: Program, size: Callable[[Value], int]) -> Segments | None:
    """The segments of least total memory, where a value has `size` bytes; None if the whole pass needs no more."""
    forward = [i for i in program.instructions if _runs_forward(i)]
    stored_values = _stored_values(program)
    producer = {y: n for n, i in enumerate(forward) for y in i.outputs}
    # value -> its last reader in the forward pass
    read = {x: n for n, i in enumerate(forward) for x in i.inputs if x in producer}
    crossing = _crossing_bytes(len(forward), [(producer[v], last, size(v)) for v, last in read.items()])
    held = [sum(size(y) for y in i.outputs if y in stored_values) for i in forward]
    best = _best_cuts(crossing, held)
    if not best:
        return None
    across = {v for v, last in read.items() if any(producer[v] <= n < last for n in best)}
    sizes = _piece_bytes(held, best)
    edges = [-1, *best, len(forward) - 1]
    largest = max(range(len(sizes)), key=sizes.__getitem__)
    stays = {y for i in forward[edges[largest] + 1 : edges[largest + 1] + 1] for y in i.outputs}
    return Segments(len(sizes), frozenset(stored_values - across - stays), sum(size(v) for v in across - stored_values))


def _runs_forward(i: Instruction) -> bool:
    return i.region == FORWARD and not isinstance(i, Resident | Loop)


def _stored_values(program: Program) -> frozenset[Value]:
    """Values of the forward pass that are stored for the backward pass, except in loops."""
    order = program.instructions
    within = (b for b in program.buffers if b.begin >= 0 and b.end < len(order))
    return frozenset(b.owner for b in within if _runs_forward(order[b.begin]) and order[b.end].region != FORWARD)


def _crossing_bytes(count: int, spans: Sequence[tuple[int, int, int]]) -> list[int]:
    """Bytes kept by a cut after each of `count` instructions; `spans`: producer, last reader, bytes of each value."""
    changes = [0] * count
    for begin, last, value_bytes in spans:
        changes[begin] += value_bytes
        changes[last] -= value_bytes
    return [*accumulate(changes)]


def _best_cuts(crossing: list[int], held: list[int]) -> list[int]:
    """The cuts of least total memory; none if the whole pass needs no more."""
    best, least = list[int](), sum(held)
    for halving in range(1, _HALVINGS + 1):
        cuts = _cuts(crossing, held, sum(held) >> halving)
        total = sum(crossing[n] for n in cuts) + max(_piece_bytes(held, cuts))
        if total < least:
            best, least = cuts, total
    return best


def _cuts(crossing: list[int], held: list[int], most: int) -> list[int]:
    """Cuts after these instructions: at the smallest crossing before a segment exceeds `most` bytes."""
    cuts: list[int] = []
    start, here, since = 0, -1, 0
    n = 0
    while n < len(held):
        since += held[n]
        if since > most and here >= start:
            cuts.append(here)
            n, start, here, since = here, here + 1, -1, 0
        elif here < start or crossing[n] <= crossing[here]:
            here = n
        n += 1
    return cuts


def _piece_bytes(held: list[int], cuts: list[int]) -> list[int]:
    """Bytes kept in each segment."""
    return [sum(held[a + 1 : b + 1]) for a, b in pairwise([-1, *cuts, len(held) - 1])]
