"""What devices send each other inside one instruction: runs of a split dim, or summaries of blocks.

An operation whose blocks need a little of the others' (a slice, a shift, a running sum along a split dim) is one
instruction that says what moves: less than any reshard of its operands would.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from layouts import Sharding
from meshlib.graph import Operation, TensorType
from meshlib.operation import Factor, Halo, Role, Summary

Axes = tuple[str, ...]
TOGETHER = (Role.HALO, Role.SUMMARY, Role.SHARE)  # of factors whose blocks need each other


@dataclass(frozen=True, slots=True)
class Exchange:
    """One collective inside an instruction. `operand` is -1 for a summary, which is made of all operands.

    An all_gather tells everybody the summaries along `dim`; an all_to_all tells each device its share of `to_dim`.
    `by_block` is what each device along `axes` sends; `sent_bytes` the most of that. Of several exchanges the busiest
    device may be neither's: see `busiest_bytes`.
    """

    kind: str
    axes: Axes
    dim: str
    operand: int
    payload_bytes: int
    by_block: tuple[int | float, ...]
    to_dim: str | None = None

    @property
    def sent_bytes(self) -> int | float:
        """Bytes that the busiest device sends."""
        return max(self.by_block)


@dataclass(frozen=True, slots=True)
class Run:
    """A piece of a dim: indices [begin, end), all within one source block."""

    source: int
    begin: int
    end: int


def runs(begin: int, end: int, size: int, block: int, wrap: bool) -> Iterator[Run]:
    """The indices [begin, end) of a dim cut at its blocks; outside [0, size) they are padding, or go round.

    >>> list(runs(-1, 3, 4, 2, wrap=True))
    [Run(source=1, begin=3, end=4), Run(source=0, begin=0, end=2), Run(source=1, begin=2, end=3)]
    """
    at = begin if wrap else max(begin, 0)
    stop = end if wrap else min(end, size)
    while at < stop:
        here = at % size
        source = here // block
        length = min((source + 1) * block - here, stop - at)
        yield Run(source, here, here + length)
        at += length


def split_factor(factors: Sequence[Factor], axes: Mapping[str, Axes]) -> Factor | None:
    """The factor that is split though its blocks need each other, if any."""
    return next((f for f in factors if f.role in TOGETHER and axes.get(f.name)), None)


def plan_exchanges(
    op: Operation,
    factors: Sequence[Factor],
    axes: Mapping[str, Axes],
    operands: Sequence[Sharding],
    out: Sharding,
) -> tuple[Exchange, ...]:
    """What an operation sends under an assignment of axes, besides the reshards of its operands."""
    factor = split_factor(factors, axes)
    if factor is None:
        return ()
    over = axes[factor.name]
    count = out.mesh.group_size(over)
    if isinstance(op.kind.lower, Summary):
        types = tuple(TensorType(s.local_shape, x.dtype) for s, x in zip(operands, op.inputs, strict=True))
        payload = sum(t.dtype.size_bytes(t.shape.size) for t in op.kind.lower.types(types, op.attrs))
        along = next(d for d in factor.operands if d is not None)
        if factor.shares is not None:
            sent: tuple[int | float, ...] = ((count - 1) * (payload // count),) * count
            return (Exchange("all_to_all", over, along, -1, payload, sent, factor.shares),)
        if op.kind.lower.combine is not None:  # by a ring, or as all_to_all, combining, all_gather: the same bytes
            sent = (2 * (count - 1) * payload / count,) * count
            return (Exchange("all_reduce", over, along, -1, payload, sent),)
        return (Exchange("all_gather", over, along, -1, payload, ((count - 1) * payload,) * count),)
    assert isinstance(op.kind.lower, Halo)
    name = factor.outputs[0]
    assert name is not None
    made = op.output.shape.dim(name).size // count
    found = []
    for i, (s, x) in enumerate(zip(operands, op.inputs, strict=True)):
        dim = factor.operands[i]
        if dim is None:
            continue
        size = x.shape.dim(dim).size
        row = prod(s.local_shape.sizes) // (size // count)
        given = tuple(x.dtype.size_bytes(n * row) for n in _given_away(op, i, made, count, size))
        if any(given):
            found.append(Exchange("collective_permute", over, dim, i, max(given), given))
    return tuple(found)


def busiest_bytes(exchanges: Iterable[tuple[Exchange, int]]) -> int | float:
    """Bytes sent by the device that sends most in all of them, each given with how often it runs.

    Exact along one set of mesh axes, and along several that have none in common: some device is the busiest on each.
    """
    totals: dict[Axes, tuple[int | float, ...]] = {}
    for e, times in exchanges:
        before = totals.get(e.axes, (0,) * len(e.by_block))
        totals[e.axes] = tuple(a + times * b for a, b in zip(before, e.by_block, strict=True))
    return sum(map(max, totals.values()))


def _given_away(op: Operation, operand: int, made: int, count: int, size: int) -> list[int]:
    """How many indices each block gives to others."""
    assert isinstance(op.kind.lower, Halo)
    block, wrap = size // count, op.kind.lower.wrap(op)
    sent = [0] * count
    for j in range(count):
        begin, end = op.kind.lower.needs(op, operand, j * made, (j + 1) * made)
        for run in runs(begin, end, size, block, wrap):
            if run.source != j:
                sent[run.source] += run.end - run.begin
    return sent
