"""Margins: halo rows stored with a block, so that several operations share one exchange.

A value gets margins from `Widen`, which receives them from neighbouring blocks; from a local slice of an unsplit value;
or from an element-wise operation, or a shift, of operands with margins, which then computes the block and its margins.
Consumers that need less slice it off locally.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from layouts import Sharding
from meshlib.core.graph import Operation, Tensor
from meshlib.core.opdef import ON_MXU, Factor, Halo, Kind, Role
from meshlib.program.exchanges import RUNS, TOGETHER, runs


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
Split = Mapping[str, int]  # split factor -> number of blocks


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
