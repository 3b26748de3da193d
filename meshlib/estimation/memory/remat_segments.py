"""Segments of a forward pass that the backward pass recomputes one at a time.

At a cut all is kept that the rest of the forward pass reads of what came before; of what lies between two cuts nothing
is, until its turn comes. So it takes what all cuts keep, and the largest piece besides (Chen et al., arXiv:1604.06174).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from meshlib.core.graph import FORWARD
from meshlib.program.instructions import Instruction, Loop, Resident, Value
from meshlib.program.records import Program

_HALVINGS = 12  # of the bytes that a piece may keep


@dataclass(frozen=True)
class Segments:
    """A forward pass in pieces.

    Attributes:
      pieces: how many; spared: what is kept no more of it, but for the largest piece, which stands for that of which
        it is the turn; more_bytes: what is kept at cuts and was not before.
    """

    pieces: int
    spared: frozenset[Value]
    more_bytes: int


def segments(program: Program, size: Callable[[Value], int]) -> Segments | None:
    """The pieces that take least in all, where a value takes `size` bytes; None where the whole takes no more."""
    forward = [i for i in program.instructions if _runs_forward(i)]
    kept = _kept(program)
    producer = {y: n for n, i in enumerate(forward) for y in i.outputs}
    read = {x: n for n, i in enumerate(forward) for x in i.inputs if x in producer}  # the last one that reads it
    crossing = [0] * (len(forward) + 1)  # bytes that a cut after instruction n keeps, as differences
    for v, last in read.items():
        crossing[producer[v]] += size(v)
        crossing[last] -= size(v)
    for n in range(1, len(crossing)):
        crossing[n] += crossing[n - 1]
    held = [sum(size(y) for y in i.outputs if y in kept) for i in forward]
    best, least = [], sum(held)
    for halving in range(1, _HALVINGS + 1):
        cuts = _cuts(crossing, held, sum(held) >> halving)
        total = sum(crossing[n] for n in cuts) + max(_of_pieces(held, cuts))
        if total < least:
            best, least = cuts, total
    if not best:
        return None
    across = {v for v, last in read.items() if any(producer[v] <= n < last for n in best)}
    sizes = _of_pieces(held, best)
    edges = [-1, *best, len(forward) - 1]
    largest = max(range(len(sizes)), key=sizes.__getitem__)
    stays = {y for i in forward[edges[largest] + 1 : edges[largest + 1] + 1] for y in i.outputs}
    return Segments(len(sizes), frozenset(kept - across - stays), sum(size(v) for v in across - kept))


def _runs_forward(i: Instruction) -> bool:
    return i.region == FORWARD and not isinstance(i, Resident | Loop)


def _kept(program: Program) -> frozenset[Value]:
    """What the forward pass keeps in memory for the backward pass, but for what loops keep."""
    order = program.instructions
    within = (b for b in program.buffers if b.begin >= 0 and b.end < len(order))
    return frozenset(b.owner for b in within if _runs_forward(order[b.begin]) and order[b.end].region != FORWARD)


def _cuts(crossing: list[int], held: list[int], most: int) -> list[int]:
    """Cuts after these instructions, each where least crosses, before a piece keeps more than `most` bytes."""
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


def _of_pieces(held: list[int], cuts: list[int]) -> list[int]:
    """Bytes that each piece keeps."""
    return [sum(held[a + 1 : b + 1]) for a, b in pairwise([-1, *cuts, len(held) - 1])]
