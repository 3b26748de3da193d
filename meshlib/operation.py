"""One frozen record per operation: everything the library ever needs to know of it.

Adding an operation touches its definition and one row of `tests/cases.py`. The partitioner, the executors, the
gradients and the estimates are written once, against this record. Idea of roles: Shardy's factors; here the named
dimensions are the factors.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import gcd, prod
from typing import Any

import numpy as np

from layouts import Dimension, Shape
from meshlib.arrays import new_array
from meshlib.dtypes import DType
from meshlib.engine import Engine
from meshlib.errors import LayoutError, ShapeError
from meshlib.graph import Graph, Operation, Tensor, TensorType, checked_op_name, innermost
from meshlib.origin import source_line

Array = np.ndarray[Any, Any]


class Kind(enum.Enum):
    """What an operation is to a core: which engine it runs on, and with what it fuses."""

    RESIDENT = "resident"  # nothing runs: its value is fed, or stays between steps
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
    SUMMARY = "summary"  # every block needs a summary of all blocks; see Summary

    @property
    def reduces(self) -> bool:
        """Whether a split leaves a pending reduction."""
        return self in (Role.SUM, Role.MAX, Role.MIN)


@dataclass(frozen=True)
class Factor:
    """A dimension of the operation's iteration space: its name in each operand and output (None where absent)."""

    name: str
    size: int  # a split must divide it
    operands: tuple[str | None, ...]
    outputs: tuple[str | None, ...]
    role: Role


@dataclass(frozen=True)
class Linear:
    """In which operands an operation is linear, so that pending sums may pass.

    `together=False`: in each of `operands` alone (one of them may be pending on an axis, as in a product);
    `together=True`: jointly (all of them must be pending on the axis, as in a sum). `terms=True` says besides that
    the operation *is* the sum of its operands, so that equally pending ones may be added first.
    """

    operands: tuple[int, ...]
    together: bool = False
    terms: bool = False


NONLINEAR = Linear(())
EVERY = sys.maxsize  # operands, of `overwrites`


@dataclass(frozen=True)
class Halo:
    """How an operation runs along a split dim when a block needs elements that lie elsewhere: these move, no others.

    needs   (operation, operand, start, stop) -> (begin, end): the run of the operand's dim that indices
            [start, stop) of the result need; what lies outside the operand is padding
    wrap    Operation -> whether runs go round the end of the dim instead
    """

    needs: Callable[[Operation, int, int, int], tuple[int, int]]
    wrap: Callable[[Operation], bool] = lambda op: False


@dataclass(frozen=True)
class Summary:
    """How an operation runs along a split dim when a block needs a small summary of the other blocks.

    summarise  (Block, *arrays) -> tuple of arrays: what this block tells the others
    finish     (Block, gathered, index, *arrays) -> result: `gathered` has, per array of the summary, those of all
               blocks on a new leading axis; `index` is this block's place among them
    types      (operand types, attrs) -> types of the summary, all local
    """

    summarise: Callable[..., tuple[Array, ...]]
    finish: Callable[..., Array | tuple[Array, ...]]
    types: Callable[[tuple[TensorType, ...], Mapping[str, Any]], tuple[TensorType, ...]]


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
class Block:
    """What `local` is told besides its operands' blocks.

    `inputs` and `out` are the local types of operands and result (an n-ary sum may run on some of its operands only);
    `offsets` the global index at which this block starts, per factor; `buffer` an array to write the result into, or
    None; `engine` the arithmetic and the random key.
    """

    operation: Operation
    inputs: tuple[TensorType, ...]
    out: TensorType
    offsets: Mapping[str, int]
    engine: Engine
    buffer: Array | None = None
    starts: tuple[int, ...] = ()  # of a Halo: the global index at which each operand's run begins

    @property
    def attrs(self) -> Mapping[str, Any]:
        """The operation's attributes."""
        return self.operation.attrs

    def result(self) -> Array:
        """The array to write the result into: C-contiguous, of the local output shape."""
        if self.buffer is not None:
            return self.buffer
        return new_array(self.out.shape.sizes, self.out.dtype.storage)


def no_work(ins: Sequence[TensorType], out: TensorType, attrs: Mapping[str, Any]) -> Work:
    """Of what is there already, of other names for it, and of copies that no core makes."""
    return Work(0, 0)


def vector_work(ins: Sequence[TensorType], out: TensorType, attrs: Mapping[str, Any]) -> Work:
    """One lane operation per element of the result."""
    return Work(0, out.shape.size)


ShapeRule = Callable[[tuple[TensorType, ...], Mapping[str, Any]], TensorType | tuple[TensorType, ...]]
GradRule = Callable[..., Sequence["Tensor | None"]]


def not_differentiable(op: Operation, dy: Tensor) -> Sequence[Tensor | None]:
    """The gradient rule of operations that pass no gradient: comparisons, indices, random numbers."""
    return [None] * len(op.inputs)


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

    Traits, each of which `tests/test_traits.py` tries on the numbers of `local`, as it does `kind` and `roles`:

    linear      Operation -> Linear
    lower       how it runs along dims of role HALO or SUMMARY
    storage     which memory holds the result
    overwrites  how many of the first operands the result may be written over, each element over that at its position
    home        what says where the result lies
    remade      whether it is made anew under whatever sharding is wanted, if its operands are single numbers
    repeated    whether each kernel that reads the result makes it anew, if an operand is no wider
    exact       whether it rounds nothing: operands in bfloat16 make a result that is
    unique      whether two of them with the same operands and attributes differ
    reads_part  whether it reads of operand 0 only what goes into the result
    indices     the operand that holds indices into the dim of attribute `dim`
    scores      of fused attention, what a pair of query and key takes
    show        (Operation, whole values of all operands but the first) -> None: what the host does with them each time
                it runs
    """

    name: str
    kind: Kind
    shape: ShapeRule
    roles: Callable[[Operation], tuple[Factor, ...]]
    local: Callable[..., Array]
    grad: GradRule
    work: Callable[[tuple[TensorType, ...], TensorType, Mapping[str, Any]], Work]
    linear: Callable[[Operation], Linear] = lambda op: NONLINEAR
    lower: Halo | Summary | None = None
    storage: Storage = Storage.FRESH
    overwrites: int = 0
    home: Home = Home.RULES
    remade: bool = False
    repeated: bool = False
    exact: bool = False
    unique: bool = False
    reads_part: bool = False
    indices: int | None = None
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
        return _record, (self.name,)


OPERATIONS: dict[str, OpDef] = {}


def _record(name: str) -> OpDef:
    return OPERATIONS[name]


def operation(name: str, **fields: Any) -> OpDef:
    """Define and register an operation: the fields of `OpDef`."""
    record = OpDef(name=name, **fields)
    if name in OPERATIONS:
        raise ValueError(f"operation {name!r} is defined twice")
    OPERATIONS[name] = record
    return record


def build(kind: OpDef, inputs: Sequence[Tensor], attrs: Mapping[str, Any], name: str | None = None) -> Tensor:
    """Check the operands, add the operation to their graph and return its first output."""
    return build_all(kind, inputs, attrs, name)[0]


def build_all(
    kind: OpDef, inputs: Sequence[Tensor], attrs: Mapping[str, Any], name: str | None = None
) -> tuple[Tensor, ...]:
    """Check the operands, add the operation to their graph and return its outputs."""
    checked_op_name(name, kind.name)
    types = tuple(x.type for x in inputs)
    try:
        made = kind.shape(types, attrs)
    except (ShapeError, LayoutError) as fault:
        operands = "".join(f"\n  {x}" for x in inputs)
        raise ShapeError(f"{kind.name}{f' {name!r}' if name else ''} ({source_line()}): {fault}{operands}") from None
    graph = innermost(inputs, kind.name)
    outs = made if isinstance(made, tuple) else (made,)
    return graph.add(kind, [graph.adopt(x) for x in inputs], outs, attrs, name).outputs


def build_source(
    graph: Graph,
    kind: OpDef,
    attrs: Mapping[str, Any],
    name: str | None = None,
    exact_name: str | None = None,
) -> Operation:
    """Add an operation without operands to `graph`."""
    made = kind.shape((), attrs)
    return graph.add(kind, (), made if isinstance(made, tuple) else (made,), attrs, name, exact_name)


def as_tensor(x: object, like: Tensor | None, what: str) -> Tensor:
    """`x` itself if it is a tensor, else a constant of the neighbour's dtype."""
    if isinstance(x, Tensor):
        return x
    if isinstance(x, bool | int | float | np.generic) and like is not None:
        from meshlib.ops.sources import scalar

        return scalar(x, like)
    wanted = "a tensor" if like is None else "a tensor or a number"
    hint = "; feed arrays through mtf.input" if isinstance(x, np.ndarray) else ""
    raise ShapeError(f"{what} ({source_line()}): expected {wanted}, got {type(x).__name__} {x!r:.80}{hint}")


def tensor(x: object, what: str) -> Tensor:
    """`x`, checked to be a tensor."""
    return as_tensor(x, None, what)


def as_dims(dims: object, what: str) -> tuple[Dimension, ...]:
    """Dims from a Dimension, a Shape, or a list of Dimensions."""
    if isinstance(dims, Dimension):
        return (dims,)
    if isinstance(dims, Shape):
        return tuple(dims)
    if isinstance(dims, Sequence | set | frozenset) and not isinstance(dims, str):
        for d in dims:
            if not isinstance(d, Dimension):
                raise ShapeError(f"{what} ({source_line()}): expected Dimensions, got {type(d).__name__} {d!r:.80}")
        # A set has no order of its own that would be the same in the next run.
        ordered = dims if isinstance(dims, Sequence) else sorted(dims, key=lambda d: d.name)
        try:
            return tuple(Shape(tuple(ordered)))
        except LayoutError as fault:
            raise ShapeError(f"{what} ({source_line()}): {fault}") from None
    raise ShapeError(
        f"{what} ({source_line()}): expected a Dimension or a list of them, got {type(dims).__name__} {dims!r:.80}"
    )


def as_dim(dim: object, what: str) -> Dimension:
    """`dim`, checked to be one Dimension."""
    if isinstance(dim, Dimension):
        return dim
    raise ShapeError(f"{what} ({source_line()}): expected a Dimension, got {type(dim).__name__} {dim!r:.80}")


def union(shapes: Sequence[Shape]) -> Shape:
    """The dims of all shapes, in order of first appearance; a larger shape that holds all others keeps its order.

    Raises ShapeError where one name comes with two sizes.
    """
    sizes: dict[str, int] = {}
    for s in shapes:
        for d in s:
            if sizes.setdefault(d.name, d.size) != d.size:
                raise ShapeError(
                    f"dim '{d.name}' has two sizes, {sizes[d.name]} and {d.size}; "
                    "rename one with mtf.rename_dimension, or make them equal"
                )
    for s in shapes:
        if len(s) == len(sizes):
            return s
    return Shape(list(sizes.items()))


def same_dtype(types: Sequence[TensorType]) -> DType:
    """The common dtype; mixing is an error, because a silent cast would hide its cost."""
    dtypes = list(dict.fromkeys(t.dtype for t in types))
    if len(dtypes) > 1:
        names = " and ".join(d.name for d in dtypes)
        raise ShapeError(f"operands have dtypes {names}; cast one, as in mtf.cast(x, '{dtypes[0].name}')")
    return dtypes[0]


def named_factors(op: Operation, special: Mapping[str, Role] | None = None) -> tuple[Factor, ...]:
    """Factors by name: a dim is one factor wherever its name occurs; PARALLEL unless `special` says otherwise."""
    special = special or {}
    # A dim whose size changes (slice, concat, ...) can only be split by what divides it everywhere.
    sizes: dict[str, int] = {}
    for t in (*op.inputs, *op.outputs):
        for d in t.shape:
            sizes[d.name] = gcd(sizes.get(d.name, 0), d.size)
    return tuple(
        Factor(
            n,
            size,
            tuple(n if n in x.shape else None for x in op.inputs),
            tuple(n if n in y.shape else None for y in op.outputs),
            special.get(n, Role.PARALLEL),
        )
        for n, size in sizes.items()
    )


def align(x: Array, names: Sequence[str], to: Sequence[str]) -> Array:
    """View of `x` with its dims in the order `to`, length-1 axes where it has none: broadcasting by name."""
    if tuple(names) == tuple(to):
        return x
    order = [names.index(n) for n in to if n in names]
    x = x.transpose(order)
    return x.reshape([x.shape[[names[i] for i in order].index(n)] if n in names else 1 for n in to])


def size_of(dims: Sequence[Dimension]) -> int:
    """Product of the sizes."""
    return prod(d.size for d in dims)
