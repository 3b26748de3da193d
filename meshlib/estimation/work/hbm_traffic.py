"""HBM traffic of a fusion group: each buffer once, in whole tiles, and parts where only parts are read.

An operation that accesses part of an operand (gather, slice) reads that part; a gather of rows copies the 32-bit words
that contain them, of which narrower rows share one, as often as they are looked up; an in-place update writes a part.
Where readers recompute a value (`stored_values`), they read the values that it is computed from.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from typing import NamedTuple

from hardware.memory import LANES
from meshlib.core.opdef import Home, Kind
from meshlib.estimation.work.stored_values import Stored
from meshlib.program.analysis.work import local_types
from meshlib.program.instructions import Commit, Compute, Instruction, Move, Resident, Value

WORD_BITS = 32
HELD_TABLE_BYTES = 16 << 20  # a smaller table is copied to VMEM once: the compiler's default for a kernel


class Use(NamedTuple):
    """One buffer read or written by a group: exact and padded bytes.

    `written`: False if it is read; `passes`: whether it is a temporary between groups, which need not reside in HBM.
    """

    buffer: Value
    exact_bytes: int
    padded_bytes: int
    written: bool
    passes: bool


def boundary_of(members: Sequence[Instruction], stored: Stored, in_place: frozenset[Value]) -> list[Use]:
    """The buffers that a group reads, then those that it writes.

    `in_place`: results that update an operand in place and write only a part.
    """
    inside = {y for i in members for y in i.outputs}
    read: dict[Value, tuple[int, int]] = {}
    written: dict[Value, tuple[int, int]] = {}
    needed: set[Value] = set()  # results of members that a written value depends on
    shares: dict[Value, float] = {}  # result of a member -> share of it that is read
    for i in reversed(members):
        if isinstance(i, Resident | Commit):
            continue
        stays = i.outputs[0] in in_place
        part = i.inputs[1] if stays else None
        own = {y: stored.sizes(part or y) for y in i.outputs if stored.is_written(y)}
        if not own and needed.isdisjoint(i.outputs):
            continue
        written |= own
        for n, x in enumerate(i.inputs):
            needed.add(x)
            share = _share_read(i, n, shares)
            if x in inside:
                shares[x] = max(shares.get(x, share), share)
            if stays and n == 0:
                continue
            for b, bytes_read in _reads(i, n, share, inside, stored):
                read[b] = max(read.get(b, bytes_read), bytes_read)
    uses = [Use(b, *bytes_read, False, b not in stored.held) for b, bytes_read in read.items()]
    return uses + [Use(b, *bytes_read, True, b not in stored.held) for b, bytes_read in written.items()]


def _reads(
    i: Instruction, n: int, share: float, inside: Set[Value], stored: Stored
) -> Iterator[tuple[Value, tuple[int, int]]]:
    """Buffers from outside a group, and bytes, that are read for operand `n`; `share`: the share of it that is read."""
    x = i.inputs[n]
    recomputed = None if x in inside else stored.recomputed.get(x)
    for v in (x,) if recomputed is None else recomputed.of:
        if v not in inside:
            part_read = share if v.local_size == x.local_size else 1.0
            yield from _buffers_read(i, n if v is x else None, v, part_read, stored)


def _buffers_read(
    i: Instruction, n: int | None, x: Value, share: float, stored: Stored
) -> Iterator[tuple[Value, tuple[int, int]]]:
    """Buffers read for operand `n`, or for a value that it is recomputed from, including scales of narrow values."""
    exact, padded = stored.sizes(x) if n is None else _read(i, n, x, stored)
    yield stored.of(x), (round(exact * share), round(padded * share))
    for scale in stored.scales(x):
        yield scale, stored.sizes(scale)


def _share_read(i: Instruction, n: int, shares: Mapping[Value, float]) -> float:
    """Expected share of an operand that a product reads, where it depends on data; views pass it on."""
    if not isinstance(i, Compute):
        return 1.0
    if i.operation.opdef.kind is Kind.VIEW or i.operation.opdef.home is Home.OPERAND:
        return shares.get(i.outputs[0], 1.0)
    of = i.operation.opdef.read_share
    return 1.0 if of is None else of(n, *local_types(i), i.operation.attrs)


def _read(i: Instruction, n: int, x: Value, stored: Stored) -> tuple[int, int]:
    whole = stored.sizes(x)
    if n == 0 and (i.operation.opdef.reads_part or isinstance(i, Move)):  # as a move, a slice
        exact, padded = stored.sizes(i.outputs[0])
        row = row_looked_up(i, x)
        if row and row % LANES:  # relayout: the table is read and written
            return min(whole[0], exact), 2 * whole[1]
        if row and whole[1] > HELD_TABLE_BYTES:
            return exact, padded * WORD_BITS // i.outputs[0].tensor.dtype.bits
        return min(whole[0], exact), min(whole[1], padded)
    return whole


def row_looked_up(i: Instruction, x: Value) -> int:
    """Elements of the row that a gather's index selects, if the whole row is read; otherwise 0."""
    indices = i.operation.opdef.indices
    if indices is None or isinstance(i, Move):  # a move of its operand is not a lookup
        return 0
    named = {d.name for d in i.inputs[indices].tensor.shape} | {i.operation.attrs["dim"].name}
    own = [d.size for d in x.local_shape if d.name not in named]
    return own[0] if len(own) == 1 else 0
