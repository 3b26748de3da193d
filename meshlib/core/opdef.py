"""`OpDef`: one frozen record per operation with everything the library knows about it.

Adding an operation touches its definition and one row of `tests/cases.py`. The partitioner, the executors, the
gradients and the estimates are written once, against this record. Roles follow Shardy's factors; here the named
dimensions are the factors.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from importlib import import_module
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from meshlib.core.arrays import new_array
from meshlib.core.engine import Engine
from meshlib.core.graph import Operation, Tensor, TensorType

Array = np.ndarray[Any, Any]


class Kind(enum.Enum):
    """Execution class of an operation: the engine that it runs on and its rules of fusion."""

    INPUT = "input"  # nothing runs: fed from outside, or provided by a loop
    VARIABLE = "variable"  # nothing runs: persists between steps
    COMMIT = "commit"  # nothing runs: its operand becomes the state after the step
    SOURCE = "source"  # a value from attributes alone
    ELEMENTWISE = "elementwise"  # each output element from the operand elements at the same position
    CONTRACTION = "contraction"  # runs on the MXU
    KERNEL = "kernel"  # runs on the MXU as a separate kernel without fusion
    REDUCTION = "reduction"  # runs on the VPU, smaller output
    VIEW = "view"  # elements of operand 0, possibly negated, renamed or permuted
    INDEXED = "indexed"  # addresses elements by value
    COPY = "copy"  # between device and host memory
    LOOP = "loop"  # repeats a body


ON_MXU = (Kind.CONTRACTION, Kind.KERNEL)
RESIDENT = (Kind.INPUT, Kind.VARIABLE)
# Kinds that are recomputed inside consuming kernels (inlined), and their limit in lane operations per element: the time
# of reading 4 bytes. v5e: 8 x 128 lanes x 4 ALUs at 1.5 GHz do 6.1e12 operations/s; 819e9 bytes/s are 0.2e12 float32/s.
THROUGH = (Kind.ELEMENTWISE, Kind.VIEW, Kind.SOURCE)
MOST_OPS = 32
# Lane operations per element. Arithmetic takes one; transcendental functions are short polynomials or table look-ups
# with refinement in the vector unit. Modelled, not published: see `Work`.
TRANSCENDENTAL_OPS = 8


class Storage(enum.Enum):
    """Memory of a result."""

    FRESH = "fresh"  # a separate buffer
    VIEW = "view"  # a NumPy view of operand 0, or a broadcast number; on a core a copy
    RESHAPED = "reshaped"  # a view in the same row-major order: no copy on a core if the tiling is unchanged
    ALIAS = "alias"  # the buffer of operand 0: nothing runs


class Home(enum.Enum):
    """Source of a result's assigned sharding."""

    RULES = "rules"  # the layout rules of its dims
    OPERAND = "operand"  # the sharding of operand 0, for casts and copies of the same value
    GIVEN = "given"  # its attribute `layout`, which is binding


class Role(enum.Enum):
    """Effect of splitting a factor over a mesh axis."""

    PARALLEL = "parallel"  # blocks are independent
    SUM = "sum"  # each block yields a partial sum
    MAX = "max"
    MIN = "min"
    WHOLE = "whole"  # must not be split
    HALO = "halo"  # each block needs a range of its operands that may be on other devices; see Halo
    OVERLAP = "overlap"  # each block yields a partial sum, and needs such ranges for it; see Halo
    SUMMARY = "summary"  # each block needs a summary of all blocks; see Summary
    SHARE = "share"  # each block yields a partial sum, and needs a summary of all blocks for it; see Summary

    @property
    def pending(self) -> str | None:
        """The kind of reduction that a split leaves pending, if any."""
        if self in (Role.SHARE, Role.OVERLAP):
            return "sum"
        return self.value if self in (Role.SUM, Role.MAX, Role.MIN) else None

    @property
    def reduces(self) -> bool:
        """True if a split leaves a pending reduction."""
        return self.pending is not None


@dataclass(frozen=True)
class Factor:
    """A factor of the operation's iteration space: its dim in each operand and output (None where absent).

    Two factors with the same dim are alternative ways of splitting it. A SUMMARY with one dim in the operands and
    another in the results also splits the latter, in addition to its own sharding: see Summary.
    """

    name: str
    size: int  # divisible by the number of blocks
    operands: tuple[str | None, ...]
    outputs: tuple[str | None, ...]
    role: Role
    lead: int = -1  # for an OVERLAP: the operand whose blocks partition the work

    @property
    def shares(self) -> str | None:
        """The dim of the results that a SUMMARY along another dim splits among its blocks, if any."""
        name = self.outputs[0]
        return name if self.role is Role.SUMMARY and name not in self.operands else None


@dataclass(frozen=True)
class Linear:
    """Operands in which an operation is linear, so that pending sums may pass.

    `together=False`: in each of `operands` alone (one of them may be pending on an axis, as in a product);
    `together=True`: jointly (all of them must be pending on the axis, as in a sum).
    """

    operands: tuple[int, ...]
    together: bool = False


@dataclass(frozen=True)
class PowerProduct:
    """Result form: a constant times the elementwise product of operands raised to integer powers."""

    powers: tuple[int, ...]
    number: float = 1.0


@dataclass(frozen=True)
class Combination:
    """Result form: an elementwise linear combination of the operands."""

    numbers: tuple[float, ...]


@dataclass(frozen=True)
class Total:
    """Result form: the product of the operands, summed over the dims that the attribute `shape` lacks."""


Form: TypeAlias = PowerProduct | Combination | Total

NONLINEAR = Linear(())
EVERY = sys.maxsize  # all operands, for `overwrites`


@dataclass(frozen=True)
class Halo:
    """Execution along split dims for blocks that need elements of other devices; only these elements are sent.

    needs   (operation, factor, operand, start, stop) -> (begin, end): the range of the operand's dim needed for indices
            [start, stop) of the result, or of the leading operand of an OVERLAP; indices outside the operand are
            padding
    wrap    Operation -> whether ranges wrap around the end of the dim instead
    reads   (arguments of `needs`) -> the parts of that range that are read, in order, if not all of it
    """

    needs: Callable[[Operation, Factor, int, int, int], tuple[int, int]]
    wrap: Callable[[Operation], bool] = lambda op: False
    reads: Callable[[Operation, Factor, int, int, int], Sequence[tuple[int, int]]] | None = None

    def parts(self, op: Operation, factor: Factor, operand: int, start: int, stop: int) -> Sequence[tuple[int, int]]:
        """The parts of a range that are read, and so sent."""
        reads = self.reads
        return (
            [self.needs(op, factor, operand, start, stop)] if reads is None else reads(op, factor, operand, start, stop)
        )

    @staticmethod
    def length(op: Operation, factor: Factor) -> int:
        """The size of the dim that is cut into blocks [start, stop) for `needs`."""
        out = factor.outputs[0]
        if out is not None:
            return op.output.shape.dim(out).size
        dim = factor.operands[factor.lead]
        assert dim is not None
        return op.inputs[factor.lead].shape.dim(dim).size


@dataclass(frozen=True)
class Summary:
    """Execution along a split dim for blocks that need a small summary of the other blocks.

    Along a factor with the split dim in the operands and another dim in the results, each device receives only the part
    of the summaries for its block of that other dim, and computes that block: this sends less than an all_to_all.

    summarise  (Block, *arrays) -> tuple of arrays: this block's summary
    finish     (Block, gathered, index, *arrays) -> result: `gathered` stacks, per array of the summary, those of all
               blocks on a new leading axis; `index` is this block's index there
    types      (operand types, attrs) -> local types of the summary; each has every result dim that is split
    combine    (*gathered) -> one summary of all blocks, independent of their order, which `finish` receives instead:
               computed by an all_reduce instead of an all_gather
    """

    summarise: Callable[..., tuple[Array, ...]]
    finish: Callable[..., Array | tuple[Array, ...]]
    types: Callable[[tuple[TensorType, ...], Mapping[str, Any]], tuple[TensorType, ...]]
    combine: Callable[..., tuple[Array, ...]] | None = None

    def received(self, summaries: Sequence[tuple[Array, ...]]) -> tuple[Array, ...]:
        """The summaries of all blocks as `finish` receives them, in block order."""
        gathered = tuple(np.stack(parts) for parts in zip(*summaries, strict=True))
        return gathered if self.combine is None else self.combine(*gathered)


@dataclass(frozen=True)
class ScoreProducts:
    """Matrix products of a fused attention kernel per pair of query and key, over the dims of one head.

    contracted  attributes with the contracted dims of products that yield scores or their cotangents
    turned      attributes with the output dims of products that have scores or their cotangents as an operand
    repeated    number of these products that repeat the forward pass
    backward    whether it is a gradient, which has other lane operations
    spared      whether chips that compute both gradients in one kernel have no contraction here
    """

    contracted: tuple[str, ...]
    turned: tuple[str, ...]
    repeated: int = 0
    backward: bool = False
    spared: bool = False


@dataclass(frozen=True)
class Work:
    """Work of one device: multiply-adds count two flops; `vpu_ops` are lane operations."""

    mxu_flops: int
    vpu_ops: int

    @staticmethod
    def total(parts: Iterable[Work], times: int = 1) -> Work:
        """The sum of `parts`, `times` times."""
        parts = tuple(parts)
        return Work(times * sum(w.mxu_flops for w in parts), times * sum(w.vpu_ops for w in parts))


@dataclass(frozen=True)
class Product:
    """Matrix product of a CONTRACTION on one device: [batch, rows, contracted] x [batch, contracted, columns].

    taps     number of such products, of slices of the operands, summed into each element of the result
    beside   number of taps that are adjacent in the operands, so that they may share the rows of the array
    packs    whether batch items may share the array, on its diagonal
    swapped  whether operand 0 has the columns
    groups   number of groups into which the rows are sorted, each with its own matrix [contracted, columns]; with
             `groups_summed` the contracted index is sorted, and each group has its own result [rows, columns]
    runs     number of such sorted runs of equal length
    """

    batch: int
    rows: int
    contracted: int
    columns: int
    taps: int = 1
    beside: int = 1
    packs: bool = False
    swapped: bool = False
    groups: int = 1
    groups_summed: bool = False
    runs: int = 1


class Block(NamedTuple):
    """Context of `local` besides its operands' blocks; a named tuple, because every operation of a step creates one.

    `inputs` and `out` are the local types of operands and result; `offsets` the global index at which this block
    starts, per factor; `buffer` an array for the result, or None; `engine` the arithmetic and the random key.
    """

    operation: Operation
    inputs: tuple[TensorType, ...]
    out: TensorType
    offsets: Mapping[str, int]
    engine: Engine
    buffer: Array | None = None
    starts: tuple[Mapping[str, int], ...] = ()  # of a Halo, per operand: where its range of each split dim begins

    @property
    def attrs(self) -> Mapping[str, Any]:
        """The operation's attributes."""
        return self.operation.attrs

    def start(self, operand: int, dim: str) -> int:
        """The global index at which an operand's range of a dim begins: 0 if it is the whole dim."""
        return self.starts[operand].get(dim, 0) if self.starts else 0

    def result(self) -> Array:
        """A C-contiguous array of the local output shape for the result."""
        if self.buffer is not None:
            return self.buffer
        return new_array(self.out.shape.sizes, self.out.dtype.storage)


ShapeRule = Callable[[tuple[TensorType, ...], Mapping[str, Any]], TensorType | tuple[TensorType, ...]]
GradRule = Callable[..., Sequence["Tensor | None"]]


@dataclass(frozen=True, eq=False)
class OpDef:
    """Everything the library knows about one operation. Fields without a default are required; trait defaults are
    conservative.

    name    the operation's name in listings
    kind    execution class: engine and rules of fusion
    shape   (operand types, attrs) -> output type, or a tuple of types, of which the first has every dim that may be
            split; raises ShapeError with names and sizes
    roles   Operation -> its factors with their roles; every dim of every operand is in one
    local   (Block, *arrays) -> array: NumPy on one device's blocks
    grad    (Operation, cotangent of each output) -> a cotangent or None per operand, as operations on the unsharded
            graph
    work    (operand types, output type, attrs) -> Work, all local

    Traits; `tests/ops/test_traits.py` checks each, like `kind` and `roles`, against the numbers of `local`:

    linear      Operation -> Linear
    form        Operation -> its result as arithmetic on operands broadcast by name, up to rounding; None if it is
                neither a product nor a sum
    lower       execution along dims of role HALO or OVERLAP, or SUMMARY or SHARE
    storage     memory of the result
    overwrites  number of leading operands that the result may overwrite elementwise
    home        source of the result's assigned sharding
    remade      whether it is recomputed under any required sharding, if its operands are single numbers
    repeated    whether each consuming kernel recomputes it, if an operand is no wider
    exact       whether it rounds nothing: bfloat16 operands give results representable in bfloat16
    unique      whether two instances with the same operands and attributes differ, as random numbers do
    reads_part  whether it reads only the elements of operand 0 that enter the result
    read_share  for a CONTRACTION, (operand, operand types, output type, attrs) -> the mean share of that operand that
                is read, all local: below 1 only if data decide which parts are skipped
    writes_part whether the result is operand 0 with a part replaced by operand 1: in place it writes operand 1 alone
    indices     the operand with indices into the dim of attribute `dim`
    product     for a CONTRACTION, (operand types, output type, attrs) -> Product, all local
    scores      for fused attention, the products per pair of query and key
    show        (Operation, whole values of all operands but the first) -> None: host callback on each run; the result
                is the first operand, and without others there is no callback
    """

    name: str
    kind: Kind
    shape: ShapeRule
    roles: Callable[[Operation], tuple[Factor, ...]]
    local: Callable[..., Array | tuple[Array, ...]]
    grad: GradRule
    work: Callable[[tuple[TensorType, ...], TensorType, Mapping[str, Any]], Work]
    linear: Callable[[Operation], Linear] = lambda op: NONLINEAR
    form: Callable[[Operation], Form | None] = lambda op: None
    lower: Halo | Summary | None = None
    storage: Storage = Storage.FRESH
    overwrites: int = 0
    home: Home = Home.RULES
    remade: bool = False
    repeated: bool = False
    exact: bool = False
    unique: bool = False
    reads_part: bool = False
    read_share: Callable[[int, tuple[TensorType, ...], TensorType, Mapping[str, Any]], float] | None = None
    writes_part: bool = False
    indices: int | None = None
    product: Callable[[tuple[TensorType, ...], TensorType, Mapping[str, Any]], Product] | None = None
    scores: ScoreProducts | None = None
    show: Callable[[Operation, Sequence[Array]], None] | None = None

    @property
    def cheap(self) -> bool:
        """True if recomputing the result from its operand is as good as keeping it: a cast or a view."""
        if self.kind is Kind.VIEW:
            return self.home is not Home.GIVEN
        return self.kind is Kind.ELEMENTWISE and self.home is Home.OPERAND

    def __reduce__(self) -> tuple[object, tuple[str]]:
        # OpDefs are singletons by name: copies of a program refer to the same record.
        return record_of, (self.name,)


OPERATIONS: dict[str, OpDef] = {}


def record_of(name: str) -> OpDef:
    """The record of an operation by name; modules of the library that define operations are imported first."""
    if name not in OPERATIONS:
        import_module("meshlib.ops.catalogue")  # deferred: the modules of operations import this module
    return OPERATIONS[name]


def operation(name: str, **of: Any) -> OpDef:
    """Define and register an operation from the fields of `OpDef`."""
    record = OpDef(name=name, **of)
    if name in OPERATIONS:
        raise ValueError(f"operation {name!r} is defined twice")
    OPERATIONS[name] = record
    return record


def variant(record: OpDef, name: str, **other: Any) -> OpDef:
    """Define and register a copy of an operation with some fields changed."""
    same = {f.name: getattr(record, f.name) for f in fields(record)}
    return operation(**{**same, "name": name, **other})
