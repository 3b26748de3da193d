"""Table of JAX rows: one function of local blocks per operation. Users register their own with the same decorator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
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
    """Windows of a dim: the global index at which each block's window begins, and the number of this block."""

    begins: tuple[int, ...]
    index: Index


@dataclass(frozen=True)
class RowContext:
    """Context of a row, besides the blocks of its operands.

    names    the dims of each operand
    outs     types of the results' blocks
    offsets  factor -> global index at which this block starts
    runs     for each operand, the dims along which it is a window that the result needs (see `opdef.Halo`);
             elements outside the dim are undefined
    own      for each operand with margins, the part that is not a margin
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
        """Type of the first result's block."""
        return self.outs[0]

    def lead(self, operand: int, dim: str) -> int | None:
        """Offset of an operand's window from the result, where both dims have one size; None for a block."""
        run = self.runs[operand].get(dim)
        return None if run is None else run.begins[0]

    def positions(self, dim: str, size: int) -> Array:
        """Global indices of this block of the result along `dim`, of length `size`."""
        return self.offsets[dim] + jnp.arange(size, dtype=jnp.int32)


@dataclass(frozen=True)
class SplitRow:
    """Execution of an operation along a dim whose blocks exchange summaries: the JAX counterpart of `opdef.Summary`."""

    summarise: Function
    finish: Function
    combine: Function | None = None


@dataclass(frozen=True)
class JaxRow:
    """JAX's execution of an operation on one device's blocks.

    local   (RowContext, *arrays) -> array, or a tuple of them
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
    """Decorator that registers a function of one device's blocks as the JAX row of an operation.

    The function takes a `RowContext` (attributes, names of dims, global offsets) and an array per operand, and returns
    the block of the result. bfloat16 comes as float32 unless `native`; results are rounded to their declared dtype.

    Args:
      name: of the operation, as it was given to `meshlib.core.opdef.operation`.
      native: see above.
      split: how it runs along a split dim of role SUMMARY or SHARE.
      stacks: whether the function takes `trip=`, an index: operand 0 then is a stack of blocks, and so is the result.
    Raises: GraphError for an unknown operation, or one that has a row.
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
    """JAX dtype in which arrays are stored."""
    return jnp.dtype(dtype.public)


def widest(dtype: DType) -> Any:
    """Dtype of computations: float32 for bfloat16 and fp8, to which results are rounded once."""
    return jnp.float32 if dtype.is_rounded else storage(dtype)


def widened(x: Array) -> Array:
    """bfloat16 and fp8 as float32, other dtypes unchanged."""
    return x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4 else x


def rounded(x: Array) -> Array:
    """float32 rounded to bfloat16 precision by an operation that compilers do not remove, unlike a pair of casts."""
    return lax.reduce_precision(x, 8, 7)


def as_declared(op: Operation, out: TensorType, y: Any) -> Array:
    """The result of a row, converted to its declared type."""
    if not isinstance(y, jax.Array):
        y = jnp.asarray(y)
    if y.shape != out.shape.sizes:
        raise ProgramError(f"{op} made {y.dtype}{list(y.shape)} on JAX, not the declared {out}")
    if y.dtype != storage(out.dtype) and (out.dtype is BOOL or y.dtype == jnp.bool_):
        raise ProgramError(f"{op} made {y.dtype} on JAX, not the declared {out}")
    return stored(y, out.dtype)


def stored(y: Array, dtype: DType) -> Array:
    """`y` in the JAX dtype in which arrays of `dtype` are stored, rounded once."""
    y = rounded(y) if dtype is BFLOAT16 and y.dtype == jnp.float32 else y
    return y.astype(storage(dtype))


def run_row(part: RowContext, function: Function, arrays: Sequence[Array], *first: Any) -> tuple[Array, ...]:
    """Run a row's function on blocks; results have their declared types."""
    op = part.operation
    native = row_of(op).native or op.opdef.exact
    # XLA does not sort int4; the cast is fused
    given = [x.astype(jnp.int8) if x.dtype == jnp.int4 else x for x in arrays]
    given = given if native else [widened(x) for x in given]
    returned = function(part, *first, *given)
    results = returned if isinstance(returned, tuple) else (returned,)
    return tuple(as_declared(op, out, y) for out, y in zip(part.outs, results, strict=True))


def aligned(x: Array, names: Sequence[str], to: Sequence[str]) -> Array:
    """`x` with dims in the order `to`, of length 1 where missing: broadcasting by name."""
    names, to = tuple(names), tuple(to)
    if names == to:
        return x
    order = [names.index(n) for n in to if n in names]
    sizes = [x.shape[names.index(n)] if n in names else 1 for n in to]
    return jnp.transpose(x, order).reshape(sizes)
