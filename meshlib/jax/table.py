"""The operations on JAX: a row each, a function of local blocks. Other libraries' rows come by the same decorator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax

from meshlib.core.dtypes import BFLOAT16, BOOL, DType
from meshlib.core.errors import GraphError, ProgramError, nearest
from meshlib.core.graph import Operation, TensorType
from meshlib.core.opdef import OPERATIONS
from meshlib.jax.context import Array, Index, TraceContext

Names = tuple[str, ...]
Function = Callable[..., Any]


@dataclass(frozen=True)
class BlockRuns:
    """Where the runs of all blocks of a dim begin, in global indices, and which block this is."""

    begins: tuple[int, ...]
    index: Index


@dataclass(frozen=True)
class RowContext:
    """What a row is told besides its operands' blocks.

    names    the dims of each operand
    outs     types of the results' blocks
    offsets  per factor the global index at which this block starts
    runs     per operand the dims of which it comes as the very run that the result needs (see `operation.Halo`), what
             lies outside the dim being anything
    own      per operand what of it is no margin, if it has any
    """

    operation: Operation
    names: tuple[Names, ...]
    outs: tuple[TensorType, ...]
    offsets: Mapping[str, Index]
    context: TraceContext
    runs: tuple[Mapping[str, BlockRuns], ...]
    own: tuple[tuple[slice, ...] | None, ...]

    @property
    def attrs(self) -> Mapping[str, Any]:
        """The operation's attributes."""
        return self.operation.attrs

    @property
    def out(self) -> TensorType:
        """The type of the first result's block."""
        return self.outs[0]

    def lead(self, operand: int, dim: str) -> int | None:
        """How far a run begins after the result, where both dims have one size; None of a block."""
        run = self.runs[operand].get(dim)
        return None if run is None else run.begins[0]

    def positions(self, dim: str, size: int) -> Array:
        """The global indices of the result along `dim`, of which its block has `size`."""
        return self.offsets[dim] + jnp.arange(size, dtype=jnp.int32)


@dataclass(frozen=True)
class SplitRow:
    """How an operation runs along a dim whose blocks need a summary of each other: as `operation.Summary`, on JAX."""

    summarise: Function
    finish: Function
    combine: Function | None = None


@dataclass(frozen=True)
class JaxRow:
    """How JAX runs an operation on one device's blocks.

    local   (Part, *arrays) -> array, or a tuple of them
    native  whether bfloat16 operands come as they are, and not as float32
    split   how it runs along a dim of role SUMMARY or SHARE
    stacks  whether `local` takes `trip=`: operand 0 then is a stack of blocks, of which it updates that one
    """

    local: Function
    native: bool = False
    split: SplitRow | None = None
    stacks: bool = False


ROWS: dict[str, JaxRow] = {}


def row(
    name: str, *, native: bool = False, split: SplitRow | None = None, stacks: bool = False
) -> Callable[[Function], Function]:
    """Say how JAX runs an operation of your own: a decorator of a function of one device's blocks.

    The function takes a `RowContext` (attributes, names of dims, global offsets) and an array per operand, and returns
    the block of the result. bfloat16 comes as float32 unless `native`; results are rounded to their declared dtype.

    Args:
      name: of the operation, as it was given to `meshlib.core.opdef.operation`.
      native: see above.
      split: how it runs along a split dim of role SUMMARY or SHARE.
      stacks: whether the function takes `trip=`, an index: operand 0 then is a stack of blocks, and so is the result.
    Raises: GraphError for an operation that there is not, or that has a row.
    Example:
      >>> from meshlib.jax import row
      >>> row("tanh")
      Traceback (most recent call last):
      meshlib.core.errors.GraphError: row: operation 'tanh' has a row already
    """
    if name not in OPERATIONS:
        raise GraphError(f"row: there is no operation {name!r}{nearest(name, OPERATIONS)}; define it first")
    if name in ROWS:
        raise GraphError(f"row: operation {name!r} has a row already")

    def take(function: Function) -> Function:
        ROWS[name] = JaxRow(function, native, split, stacks)
        return function

    return take


def row_of(op: Operation) -> JaxRow:
    """The row of an operation. Raises: ProgramError if it has none."""
    row = ROWS.get(op.opdef.name)
    if row is None:
        raise ProgramError(
            f"{op}: operation '{op.opdef.name}' has no row for JAX; give it one, as in "
            f"@meshlib.jax.row({op.opdef.name!r}) before a function of (part, *arrays)"
        )
    return row


# ---------------------------------------------------------------- dtypes


def storage(dtype: DType) -> Any:
    """The dtype of arrays on JAX."""
    return jnp.dtype(dtype.public)


def widest(dtype: DType) -> Any:
    """The dtype in which values are made: float32 for bfloat16 and fp8, to which results are rounded once."""
    return jnp.float32 if dtype.is_rounded else storage(dtype)


def widened(x: Array) -> Array:
    """bfloat16 and fp8 as float32, others as they are."""
    return x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4 else x


def rounded(x: Array) -> Array:
    """float32 rounded to a bfloat16 number, which no compiler undoes as it does a pair of casts."""
    return lax.reduce_precision(x, 8, 7)


def as_declared(op: Operation, out: TensorType, y: Any) -> Array:
    """What a row made, in its declared type."""
    y = jnp.asarray(y)
    if y.shape != out.shape.sizes:
        raise ProgramError(f"{op} made {y.dtype}{list(y.shape)} on JAX, not the declared {out}")
    wanted = storage(out.dtype)
    if y.dtype == wanted:
        return y
    if out.dtype is BFLOAT16 and y.dtype == jnp.float32:
        return rounded(y).astype(wanted)
    if out.dtype is BOOL or y.dtype == jnp.bool_:
        raise ProgramError(f"{op} made {y.dtype} on JAX, not the declared {out}")
    return y.astype(wanted)


def run_row(part: RowContext, function: Function, arrays: Sequence[Array], *first: Any) -> tuple[Array, ...]:
    """A row's function on blocks, its results in their declared types."""
    op = part.operation
    native = row_of(op).native or op.opdef.exact
    given = [x.astype(jnp.int8) if x.dtype == jnp.int4 else x for x in arrays]  # XLA sorts no int4, and fuses this
    given = given if native else [widened(x) for x in given]
    returned = function(part, *first, *given)
    results = returned if isinstance(returned, tuple) else (returned,)
    return tuple(as_declared(op, out, y) for out, y in zip(part.outs, results, strict=True))


def aligned(x: Array, names: Sequence[str], to: Sequence[str]) -> Array:
    """`x` with its dims in the order `to`, of length 1 where it has none: broadcasting by name."""
    names, to = tuple(names), tuple(to)
    if names == to:
        return x
    order = [names.index(n) for n in to if n in names]
    sizes = [x.shape[names.index(n)] if n in names else 1 for n in to]
    return jnp.transpose(x, order).reshape(sizes)
