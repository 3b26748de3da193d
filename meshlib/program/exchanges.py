"""Exchanges inside one instruction: halos of a split dim or summaries of blocks, and margins.

An operation whose blocks need a small part of other blocks (a slice, a shift, a cumulative sum along a split dim) is
one instruction with exchanges, which send less than any reshard of its operands.

Margins are halo rows stored with a block, so that several operations share one exchange. A value gets them from
`Widen`, which receives them from neighbouring blocks; from a local slice of an unsplit value; or from an element-wise
operation, or a shift, of operands with margins, which then computes the block and its margins. Consumers that need less
slice it off locally.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from layouts import Sharding
from layouts.step_kinds import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, COLLECTIVE_PERMUTE
from meshlib.core.graph import Operation, Tensor, TensorType
from meshlib.core.opdef import ON_MXU, Factor, Halo, Kind, Role, Summary

Axes = tuple[str, ...]
RUNS = (Role.HALO, Role.OVERLAP)  # roles of factors whose blocks need halos
TOGETHER = (*RUNS, Role.SUMMARY, Role.SHARE)  # roles of factors whose blocks exchange anything
Split = Mapping[str, int]  # split factor -> number of blocks


@dataclass(frozen=True, slots=True)
class Exchange:
    """One collective inside an instruction. `operand` is -1 for a summary, which is computed from all operands.

    An all_gather sends all summaries along `dim` to every device; an all_to_all sends each device its block of
    `to_dim`. `by_block` are the bytes that each device along `axes` sends; `sent_bytes` their maximum. For several
    exchanges the busiest device overall may be another one: see `busiest_bytes`.
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
        """Bytes sent by the busiest device."""
        return max(self.by_block)


@dataclass(frozen=True, slots=True)
class IndexRange:
    """A range of a dim: indices [begin, end), all within one source block."""

    source: int
    begin: int
    end: int


def runs(begin: int, end: int, size: int, block: int, wrap: bool) -> Iterator[IndexRange]:
    """The indices [begin, end) of a dim, split at its blocks; outside [0, size) they are padding, or wrap around.

    >>> list(runs(-1, 3, 4, 2, wrap=True))
    [IndexRange(source=1, begin=3, end=4), IndexRange(source=0, begin=0, end=2), IndexRange(source=1, begin=2, end=3)]
    """
    at = begin if wrap else max(begin, 0)
    stop = end if wrap else min(end, size)
    while at < stop:
        here = at % size
        source = here // block
        length = min((source + 1) * block - here, stop - at)
        yield IndexRange(source, here, here + length)
        at += length


def run_factors(factors: Sequence[Factor], axes: Mapping[str, Axes]) -> tuple[Factor, ...]:
    """The split factors whose blocks need halos, in the order in which these are exchanged."""
    return tuple([f for f in factors if f.role in RUNS and axes.get(f.name)])


def summary_factor(factors: Sequence[Factor], axes: Mapping[str, Axes]) -> Factor | None:
    """The split factor whose blocks exchange summaries, if any."""
    return next((f for f in factors if f.role in (Role.SUMMARY, Role.SHARE) and axes.get(f.name)), None)


def plan_exchanges(
    op: Operation, factors: Sequence[Factor], axes: Mapping[str, Axes], operands: Sequence[Sharding], out: Sharding
) -> tuple[Exchange, ...]:
    """The exchanges of an operation under an assignment of axes, besides reshards of its operands."""
    if (factor := summary_factor(factors, axes)) is not None:
        return _summaries(op, factor, axes[factor.name], operands)
    moving = run_factors(factors, axes)
    if not moving:
        return ()
    exchanges = []
    for i, (s, x) in enumerate(zip(operands, op.inputs, strict=True)):
        sizes = dict(zip(s.local_shape.names, s.local_shape.sizes, strict=True))  # including halos already received
        for f in moving:
            dim = f.operands[i]
            if dim is None:
                continue
            count = out.mesh.group_size(axes[f.name])
            rows = _NeededIndices(op, f, i, count)
            row = prod(n for name, n in sizes.items() if name != dim)
            given = tuple(x.dtype.size_bytes(n * row) for n in rows.given_away())
            if any(given):
                exchanges.append(Exchange(COLLECTIVE_PERMUTE.name, axes[f.name], dim, i, max(given), given))
            sizes[dim] = rows.longest
    return tuple(exchanges)


def _summaries(op: Operation, factor: Factor, over: Axes, operands: Sequence[Sharding]) -> tuple[Exchange, ...]:
    """Exchanges of summaries along a factor of role SUMMARY or SHARE."""
    lower = op.opdef.lower
    assert isinstance(lower, Summary)
    count = operands[0].mesh.group_size(over)
    types = tuple(TensorType(s.local_shape, x.dtype) for s, x in zip(operands, op.inputs, strict=True))
    payload = sum(t.dtype.size_bytes(t.shape.size) for t in lower.types(types, op.attrs))
    along = next(d for d in factor.operands if d is not None)
    kind = ALL_TO_ALL if factor.shares is not None else ALL_REDUCE if lower.combine is not None else ALL_GATHER
    # With `combine`, all_to_all, combining and all_gather send as many bytes as a ring.
    sent = (kind.sent_bytes(payload, count),) * count
    return (Exchange(kind.name, over, along, -1, payload, sent, factor.shares),)


def busiest_bytes(exchanges: Iterable[tuple[Exchange, int]]) -> int | float:
    """Bytes sent by the busiest device over all exchanges, each given with its number of runs.

    Exact for one set of mesh axes, and for disjoint sets, where one device is the busiest on each.
    """
    totals: dict[Axes, tuple[int | float, ...]] = {}
    for e, times in exchanges:
        before = totals.get(e.axes, (0,) * len(e.by_block))
        totals[e.axes] = tuple(a + times * b for a, b in zip(before, e.by_block, strict=True))
    return sum(map(max, totals.values()))


@dataclass(frozen=True)
class _NeededIndices:
    """The indices of an operand's split dim needed by each block of a factor."""

    op: Operation
    factor: Factor
    operand: int
    count: int

    def given_away(self) -> list[int]:
        """The number of indices that each block sends to others."""
        sent = [0] * self.count
        for j in range(self.count):
            for part in self._halo.parts(self.op, self.factor, self.operand, *self._block(j)):
                for run in self._cut(part):
                    if run.source != j:
                        sent[run.source] += run.end - run.begin
        return sent

    @property
    def longest(self) -> int:
        """The largest number of indices of a block with its halo: all devices allocate as many."""
        needed = [self._halo.needs(self.op, self.factor, self.operand, *self._block(j)) for j in range(self.count)]
        return max(sum(run.end - run.begin for run in self._cut(each)) for each in needed)

    @property
    def _halo(self) -> Halo:
        assert isinstance(self.op.opdef.lower, Halo)
        return self.op.opdef.lower

    def _block(self, block: int) -> tuple[int, int]:
        """The indices of the factor in a block."""
        rows_per_block = self._halo.length(self.op, self.factor) // self.count
        return block * rows_per_block, (block + 1) * rows_per_block

    def _cut(self, needed: tuple[int, int]) -> Iterator[IndexRange]:
        """Indices of the operand, split at its blocks."""
        dim = self.factor.operands[self.operand]
        assert dim is not None
        size = self.op.inputs[self.operand].shape.dim(dim).size
        return runs(*needed, size, size // self.count, self._halo.wrap(self.op))


@dataclass(frozen=True, slots=True)
class Margin:
    """Numbers of indices of a dim stored before and after a block.

    `wrap`: the ends of the dim are neighbours; otherwise the blocks at the ends have shorter margins.
    """

    dim: str
    before: int
    after: int
    wrap: bool

    def run(self, index: int, block: int, size: int) -> tuple[int, int]:
        """The range of indices of block number `index` with its margins; with `wrap` it may pass the ends of the
        dim."""
        begin, end = index * block - self.before, (index + 1) * block + self.after
        return (begin, end) if self.wrap else (max(begin, 0), min(end, size))

    def covers(self, other: Margin) -> bool:
        """True if this margin contains `other`."""
        enough = self.before >= other.before and self.after >= other.after
        return (self.dim, self.wrap) == (other.dim, other.wrap) and enough

    def joined(self, other: Margin | None) -> Margin:
        """The smallest margin that covers both."""
        if other is None:
            return self
        assert (self.dim, self.wrap) == (other.dim, other.wrap)
        return Margin(self.dim, max(self.before, other.before), max(self.after, other.after), self.wrap)

    def __str__(self) -> str:
        return f"{self.dim} {self.before}+{self.after}{' round' if self.wrap else ''}"


Margins = Mapping[str, Margin]  # by dim


def reach(op: Operation, factor: Factor, operand: int, count: int) -> tuple[int, int] | None:
    """The halo of a factor's block before and after its own range of an operand; negative if it needs less than its
    own.

    None if the halos of the `count` blocks differ.
    """
    lower, name = op.opdef.lower, factor.operands[operand]
    if not isinstance(lower, Halo) or factor.role not in RUNS or name is None:
        return None
    size, rows_per_block = op.inputs[operand].shape.dim(name).size, lower.length(op, factor) // count
    block, reaches = size // count, set()
    for j in range(count):
        begin, end = lower.needs(op, factor, operand, j * rows_per_block, (j + 1) * rows_per_block)
        reaches.add((j * block - begin, end - (j + 1) * block))
    if len(reaches) > 1:
        return None
    ((before, after),) = reaches
    if lower.wrap(op) and before > size // 2:  # wrapping around is shorter
        before, after = before - size, after + size
    return before, after


def takes_margins(op: Operation, factors: Sequence[Factor], split: Split) -> bool:
    """True if margins of the operands along the factors in `split` provide all halos."""
    apart = [f for f in factors if f.name in split and f.role in TOGETHER]
    return all(
        reach(op, f, n, split[f.name]) is not None for f in apart for n, dim in enumerate(f.operands) if dim is not None
    )


def keeps_margins(op: Operation, factors: Sequence[Factor], split: Split) -> bool:
    """True if the operation can also compute margins of its result with little work."""
    alike = op.opdef.kind is Kind.ELEMENTWISE or (isinstance(op.opdef.lower, Halo) and op.opdef.kind not in ON_MXU)
    if op.opdef.kind is Kind.VIEW and {*op.inputs[0].shape} == {*op.output.shape}:  # dims in another order
        alike = alike or all(f.role is Role.PARALLEL and f.operands[0] == f.outputs[0] for f in factors)
    return alike and len(op.outputs) == 1 and _is_aligned(op, factors, split) and takes_margins(op, factors, split)


def _is_aligned(op: Operation, factors: Sequence[Factor], split: Split) -> bool:
    """True if operands and result have the same size along each factor, so that halos shift with the index."""
    for f in factors:
        if f.name in split and f.role in RUNS:
            sizes = {x.shape.dim(dim).size for x, dim in zip(op.inputs, f.operands, strict=True) if dim is not None}
            if sizes != {Halo.length(op, f)} or f.outputs[0] is None:
                return False
    return True


def needed_margins(op: Operation, factors: Sequence[Factor], operand: int, margins: Margins, split: Split) -> Margins:
    """The margins that an operand needs for a result with `margins`, along the factors in `split`."""
    margins_of_dims: dict[str, Margin] = {}
    for f in factors:
        dim, out = f.operands[operand], f.outputs[0]
        if dim is None or f.name not in split:
            continue
        wanted = margins.get(out) if out is not None else None
        if f.role in RUNS and isinstance(op.opdef.lower, Halo):
            far = reach(op, f, operand, split[f.name])
            assert far is not None
            before, after = (n + far[k] for k, n in enumerate((wanted.before, wanted.after) if wanted else (0, 0)))
            wanted = Margin(dim, max(before, 0), max(after, 0), op.opdef.lower.wrap(op))
        elif wanted is not None:
            wanted = replace(wanted, dim=dim)  # the result's dim may have another name
        if wanted is not None and (wanted.before or wanted.after):
            margins_of_dims[dim] = wanted
    return margins_of_dims


def given_away(margin: Margin, count: int, size: int) -> list[int]:
    """The number of indices that each of `count` blocks sends to others for a margin."""
    block, sent = size // count, [0] * count
    for j in range(count):
        for run in runs(*margin.run(j, block, size), size, block, margin.wrap):
            if run.source != j:
                sent[run.source] += run.end - run.begin
    return sent


def row_size(t: Tensor, sharding: Sharding, margins: Sequence[Margin], dim: str) -> int:
    """Elements per index of a dim, in the largest block, with margins of other dims."""
    elements = sharding.local_size // sharding.local_shape.dim(dim).size
    for m in margins:
        block, size = sharding.local_shape.dim(m.dim).size, t.shape.dim(m.dim).size
        held = (m.run(j, block, size) for j in range(size // block))
        elements = elements // block * max(end - begin for begin, end in held)
    return elements


def fits(margin: Margin, t: Tensor, sharding: Sharding) -> bool:
    """True if blocks can have a margin: wrapped margins must not overlap."""
    size, block = t.shape.dim(margin.dim).size, sharding.local_shape.dim(margin.dim).size
    held = block + margin.before + margin.after
    return min(margin.before, margin.after) >= 0 and (held <= size or not margin.wrap)
