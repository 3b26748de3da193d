"""`OpDef`: one frozen record per operation with everything the library knows about it.

Adding an operation touches its definition and one row of `tests/cases.py`. The partitioner, the executors, the
gradients and the estimates are written once, against this record. Idea of roles: Shardy's factors; here the named
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
    """What an operation is to a core: which engine it runs on, and with what it fuses."""

    INPUT = "input"  # nothing runs: its value is fed, or what a trip of a loop is given
    VARIABLE = "variable"  # nothing runs: its value stays between steps
    COMMIT = "commit"  # nothing runs: its operand is what stays after the step
    SOURCE = "source"  # makes a value from nothing but attributes
    ELEMENTWISE = "elementwise"  # each output element from the elements at the same position
    CONTRACTION = "contraction"  # runs on the MXU
    KERNEL = "kernel"  # runs on the MXU as a kernel of its own: nothing fuses with it
    REDUCTION = "reduction"  # runs on the VPU, smaller output
    VIEW = "view"  # elements of operand 0, of either sign, under other names or in another order
    INDEXED = "indexed"  # addresses elements by value
    COPY = "copy"  # between the memories of device and host
    LOOP = "loop"  # holds a body of its own


ON_MXU = (Kind.CONTRACTION, Kind.KERNEL)
RESIDENT = (Kind.INPUT, Kind.VARIABLE)
# What a kernel that reads the result can make on the way, in at most so many lane operations an element: as long as
# reading 4 bytes of it takes. v5e: 8 x 128 lanes x 4 ALUs at 1.5 GHz are 6.1e12 a second, 819e9 bytes a second are
# 0.2e12 values of float32.
THROUGH = (Kind.ELEMENTWISE, Kind.VIEW, Kind.SOURCE)
MOST_OPS = 32
# Lane operations per element. Arithmetic takes one; transcendental functions are short polynomials or table look-ups
# with refinement in the vector unit. Modelled, not published: see `Work`.
TRANSCENDENTAL_OPS = 8


class Storage(enum.Enum):
    """Which memory holds a result."""

    FRESH = "fresh"  # memory of its own
    VIEW = "view"  # NumPy shows elements of operand 0, or one number, where they are; a core moves them
    RESHAPED = "reshaped"  # a view in the same row-major order: a core moves nothing where tiles stay as they are
    ALIAS = "alias"  # operand 0's, under another name: nothing runs


class Home(enum.Enum):
    """What says where a result lies when nothing else asks for it."""

    RULES = "rules"  # the layout's rules about its dims
    OPERAND = "operand"  # it lies where operand 0 does: the same value, which another type or memory must not move
    GIVEN = "given"  # its own attribute `layout`, which binds it


class Role(enum.Enum):
    """What splitting a factor over a mesh axis does to an operation."""

    PARALLEL = "parallel"  # every block works alone
    SUM = "sum"  # every block leaves a partial sum
    MAX = "max"
    MIN = "min"
    WHOLE = "whole"  # must not be split
    HALO = "halo"  # every block needs a run of its operands that may lie on other devices; see Halo
    OVERLAP = "overlap"  # every block leaves a partial sum, for which it needs such runs; see Halo
    SUMMARY = "summary"  # every block needs a summary of all blocks; see Summary
    SHARE = "share"  # every block leaves a partial sum, for which it needs a summary of all blocks; see Summary

    @property
    def pending(self) -> str | None:
        """The kind of reduction that a split leaves pending, if any."""
        if self in (Role.SHARE, Role.OVERLAP):
            return "sum"
        return self.value if self in (Role.SUM, Role.MAX, Role.MIN) else None

    @property
    def reduces(self) -> bool:
        """Whether a split leaves a pending reduction."""
        return self.pending is not None


@dataclass(frozen=True)
class Factor:
    """A dimension of the operation's iteration space: its name in each operand and output (None where absent).

    Two factors that name one dim are two ways to split it, of which one is taken. A SUMMARY that names a dim of the
    operands and another of the results shares the latter out, besides what splits that already: see Summary.
    """

    name: str
    size: int  # a split must divide it
    operands: tuple[str | None, ...]
    outputs: tuple[str | None, ...]
    role: Role
    lead: int = -1  # of an OVERLAP: the operand by whose blocks the work is cut

    @property
    def shares(self) -> str | None:
        """The dim of the results that a SUMMARY along another dim shares out among its blocks, if any."""
        name = self.outputs[0]
        return name if self.role is Role.SUMMARY and name not in self.operands else None


@dataclass(frozen=True)
class Linear:
    """In which operands an operation is linear, so that pending sums may pass.

    `together=False`: in each of `operands` alone (one of them may be pending on an axis, as in a product);
    `together=True`: jointly (all of them must be pending on the axis, as in a sum).
    """

    operands: tuple[int, ...]
    together: bool = False


@dataclass(frozen=True)
class PowerProduct:
    """A result that is a number times its operands, each to an integer power, element by element."""

    powers: tuple[int, ...]
    number: float = 1.0


@dataclass(frozen=True)
class Combination:
    """A result that is the sum of its operands, each times a number, element by element."""

    numbers: tuple[float, ...]


@dataclass(frozen=True)
class Total:
    """A result that is the sum of the product of its operands over the dims that its attribute `shape` lacks."""


Form: TypeAlias = PowerProduct | Combination | Total

NONLINEAR = Linear(())
EVERY = sys.maxsize  # operands, of `overwrites`


@dataclass(frozen=True)
class Halo:
    """How an operation runs along split dims when a block needs elements that lie elsewhere: these move, no others.

    needs   (operation, factor, operand, start, stop) -> (begin, end): the run of the operand's dim that indices
            [start, stop) of the result need, or of the operand that leads an OVERLAP; what lies outside the operand is
            padding
    wrap    Operation -> whether runs go round the end of the dim instead
    reads   of the same arguments, the parts of that run that are read, in order, where they may not be all of it
    """

    needs: Callable[[Operation, Factor, int, int, int], tuple[int, int]]
    wrap: Callable[[Operation], bool] = lambda op: False
    reads: Callable[[Operation, Factor, int, int, int], Sequence[tuple[int, int]]] | None = None

    def parts(self, op: Operation, factor: Factor, operand: int, start: int, stop: int) -> Sequence[tuple[int, int]]:
        """The parts of a run that are read: these move, no others."""
        reads = self.reads
        return (
            [self.needs(op, factor, operand, start, stop)] if reads is None else reads(op, factor, operand, start, stop)
        )

    @staticmethod
    def length(op: Operation, factor: Factor) -> int:
        """The size of the dim whose indices `needs` is asked for: blocks are cut of it."""
        out = factor.outputs[0]
        if out is not None:
            return op.output.shape.dim(out).size
        dim = factor.operands[factor.lead]
        assert dim is not None
        return op.inputs[factor.lead].shape.dim(dim).size


@dataclass(frozen=True)
class Summary:
    """How an operation runs along a split dim when a block needs a small summary of the other blocks.

    Along a factor that has the split dim in the operands and another dim in the results, each device hears of the
    summaries only what belongs to its share of that other dim, and finishes that: it moves less than all to all.

    summarise  (Block, *arrays) -> tuple of arrays: what this block tells the others
    finish     (Block, gathered, index, *arrays) -> result: `gathered` has, per array of the summary, those of all
               blocks on a new leading axis; `index` is this block's place among them
    types      (operand types, attrs) -> types of the summary, all local; each has every dim that is shared
                out
    combine    (*gathered) -> one summary of all these blocks, whatever their order, which `finish` is given in place
               of theirs: an all_reduce makes it, where all of them would have to be gathered
    """

    summarise: Callable[..., tuple[Array, ...]]
    finish: Callable[..., Array | tuple[Array, ...]]
    types: Callable[[tuple[TensorType, ...], Mapping[str, Any]], tuple[TensorType, ...]]
    combine: Callable[..., tuple[Array, ...]] | None = None

    def heard(self, told: Sequence[tuple[Array, ...]]) -> tuple[Array, ...]:
        """What `finish` is given of the summaries of all blocks, in their order."""
        gathered = tuple(np.stack(parts) for parts in zip(*told, strict=True))
        return gathered if self.combine is None else self.combine(*gathered)


@dataclass(frozen=True)
class Scores:
    """What a kernel of fused attention does per pair of query and key, in matrix products over dims of one head.

    contracted  attributes that name the dims which products contract over, making scores or their cotangents
    turned      attributes that name the dims of products which scores, or their cotangents, go into
    repeated    how many of all these products the forward pass has made already
    backward    whether it is a gradient, whose lane operations are others
    spared      whether a chip whose kernels make both gradients at once contracts nothing here
    """

    contracted: tuple[str, ...]
    turned: tuple[str, ...]
    repeated: int = 0
    backward: bool = False
    spared: bool = False


@dataclass(frozen=True)
class Work:
    """What one device does: multiply-adds count two flops; `vpu_ops` are lane operations."""

    mxu_flops: int
    vpu_ops: int

    @staticmethod
    def total(parts: Iterable[Work], times: int = 1) -> Work:
        """All of these, so many times."""
        parts = tuple(parts)
        return Work(times * sum(w.mxu_flops for w in parts), times * sum(w.vpu_ops for w in parts))


@dataclass(frozen=True)
class Product:
    """What a CONTRACTION is on one device: [batch, rows, contracted] x [batch, contracted, columns].

    taps     of how many such products of slices of the operands each element of the result is the sum
    beside   how many of the taps follow each other in the operands, so that they may share the rows of the array
    packs    whether items of the batch may share the array, on its diagonal
    swapped  whether operand 0 has the columns
    groups   how many groups the rows are sorted into, each with a matrix [contracted, columns] of its own; or what is
             contracted, if `groups_summed`, each with a result [rows, columns] of its own
    runs     how many such sorted runs of equal length there are
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
    """What `local` is told besides its operands' blocks; a named tuple, because every operation of a step makes one.

    `inputs` and `out` are the local types of operands and result; `offsets` the global index at which this block
    starts, per factor; `buffer` an array to write the result into, or None; `engine` the arithmetic and the random key.
    """

    operation: Operation
    inputs: tuple[TensorType, ...]
    out: TensorType
    offsets: Mapping[str, int]
    engine: Engine
    buffer: Array | None = None
    starts: tuple[Mapping[str, int], ...] = ()  # of a Halo, per operand: where its run of each split dim begins

    @property
    def attrs(self) -> Mapping[str, Any]:
        """The operation's attributes."""
        return self.operation.attrs

    def start(self, operand: int, dim: str) -> int:
        """The global index at which an operand's run of a dim begins: 0 where it came whole."""
        return self.starts[operand].get(dim, 0) if self.starts else 0

    def result(self) -> Array:
        """The array to write the result into: C-contiguous, of the local output shape."""
        if self.buffer is not None:
            return self.buffer
        return new_array(self.out.shape.sizes, self.out.dtype.storage)


ShapeRule = Callable[[tuple[TensorType, ...], Mapping[str, Any]], TensorType | tuple[TensorType, ...]]
GradRule = Callable[..., Sequence["Tensor | None"]]


@dataclass(frozen=True, eq=False)
class OpDef:
    """The record. What has no default is required; the defaults of the traits promise nothing.

    name    the operation's name in listings
    kind    which engine it runs on, and with what it fuses
    shape   (operand types, attrs) -> output type, or a tuple of types, of which the first has every dim that may be
            split; raises ShapeError with names and sizes
    roles   Operation -> its factors, each with what a split does; every dim of every operand is in one
    local   (Block, *arrays) -> array: NumPy on one device's blocks
    grad    (Operation, cotangent of each output) -> a cotangent or None per operand, as operations on the unsharded
            graph
    work    (operand types, output type, attrs) -> Work, all local

    Traits, each of which `tests/ops/test_traits.py` tries on the numbers of `local`, as it does `kind` and `roles`:

    linear      Operation -> Linear
    form        Operation -> what its result is in terms of arithmetic, operands broadcast by name, but for rounding;
                None where that is no product, no sum
    lower       how it runs along dims of role HALO or OVERLAP, or SUMMARY or SHARE
    storage     which memory holds the result
    overwrites  how many of the first operands the result may be written over, each element over that at its position
    home        what says where the result lies
    remade      whether it is made anew under whatever sharding is wanted, if its operands are single numbers
    repeated    whether each kernel that reads the result makes it anew, if an operand is no wider
    exact       whether it rounds nothing: operands in bfloat16 make a result that is
    unique      whether two of them with the same operands and attributes differ
    reads_part  whether it reads of operand 0 only what goes into the result
    read_share  of a CONTRACTION, (operand, operand types, output type, attrs) -> the share of that operand that is read
                on the mean, all local: 1 but where data decide what is left out
    writes_part whether the result is operand 0 but where operand 1 goes: over operand 0 it writes operand 1 alone
    indices     the operand that holds indices into the dim of attribute `dim`
    product     of a CONTRACTION, (operand types, output type, attrs) -> Product, all local
    scores      of fused attention, what a pair of query and key takes
    show        (Operation, whole values of all operands but the first) -> None: what the host does with them each time
                it runs; the result is the first, and without others nothing is done
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
    scores: Scores | None = None
    show: Callable[[Operation, Sequence[Array]], None] | None = None

    @property
    def cheap(self) -> bool:
        """Whether making the result again from its operand is as good as keeping it: a cast, or a view."""
        if self.kind is Kind.VIEW:
            return self.home is not Home.GIVEN
        return self.kind is Kind.ELEMENTWISE and self.home is Home.OPERAND

    def __reduce__(self) -> tuple[object, tuple[str]]:
        # There is one record of each name: copies of a program refer to the same.
        return record_of, (self.name,)


OPERATIONS: dict[str, OpDef] = {}


def record_of(name: str) -> OpDef:
    """The record of an operation. Those of the library that were not used yet are defined first."""
    if name not in OPERATIONS:
        import_module("meshlib.ops.catalogue")  # by name: the operations import this module
    return OPERATIONS[name]


def operation(name: str, **of: Any) -> OpDef:
    """Define and register an operation: the fields of `OpDef`."""
    record = OpDef(name=name, **of)
    if name in OPERATIONS:
        raise ValueError(f"operation {name!r} is defined twice")
    OPERATIONS[name] = record
    return record


def variant(record: OpDef, name: str, **other: Any) -> OpDef:
    """Define and register an operation that is another one but for these fields."""
    same = {f.name: getattr(record, f.name) for f in fields(record)}
    return operation(**{**same, "name": name, **other})
