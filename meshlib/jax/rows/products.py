"""JAX rows of products in the program's precision: float32 operands are rounded to bfloat16 by default.

A TPU and a GPU multiply bfloat16 and add in float32. A CPU multiplies the rounded numbers in float32: the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from hardware.numerics import LARGEST
from meshlib.core.dtypes import INT32
from meshlib.core.engine import Engine
from meshlib.core.graph import TensorType
from meshlib.core.opdef import Block
from meshlib.jax.context import Array, TraceContext
from meshlib.jax.table import RowContext, aligned, rounded, row, widened
from meshlib.ops.contraction.einsum import EIGHT_BIT, Names, matmul_plan


def operand(x: Array, context: TraceContext, precise: bool = False) -> Array:
    """An operand in the MXU's input dtype."""
    if x.dtype == jnp.float32 and not (precise or context.highest):
        x = rounded(x) if context.platform == "cpu" else x.astype(jnp.bfloat16)
    return widened(x) if context.platform == "cpu" else x  # fp8 formats may be mixed in one product


def dot(a: Array, b: Array, dims: Any) -> Array:
    """`lax.dot_general`, accumulated in float32 (float64 for float64), in the operands' own precision."""
    summed = jnp.float64 if a.dtype == jnp.float64 else jnp.float32
    return lax.dot_general(a, b, dims, precision=lax.Precision.HIGHEST, preferred_element_type=summed)


def product(
    a: Array, b: Array, a_names: Names, b_names: Names, out: Names, multiply: Callable[..., Array] = dot
) -> Array:
    """Product summed over all dims absent from `out`, with dims matched by name."""
    plan = matmul_plan(a_names, b_names, out)
    if plan.swapped:
        a, b, a_names, b_names = b, a, b_names, a_names
    a, a_names = _without(a, a_names, plan.summed_a)
    b, b_names = _without(b, b_names, plan.summed_b)
    sizes = dict(zip((*a_names, *b_names), (*a.shape, *b.shape), strict=True))
    runs = [*_runs(a_names, out, b_names), *_runs(b_names, out, a_names), *_runs(a_names, b_names, out)]
    a, b = (_joined(x, names, runs) for x, names in ((a, a_names), (b, b_names)))
    a_names, b_names, summed = (_firsts(names, runs) for names in (a_names, b_names, plan.contracted))
    contracted = tuple(tuple(names.index(n) for n in summed) for names in (a_names, b_names))
    batch = tuple(tuple(names.index(n) for n in plan.batch) for names in (a_names, b_names))
    result = multiply(a, b, (contracted, batch))
    rest = (n for names in (a_names, b_names) for n in names if n not in plan.batch and n not in summed)
    whole = {run[0]: run for run in runs}
    order = [n for first in (*plan.batch, *rest) for n in whole.get(first, (first,))]
    return aligned(result.reshape([sizes[n] for n in order]), order, out)


def _runs(names: Names, partner: Names, other: Names) -> list[Names]:
    """Runs of dims adjacent in `names` and `partner`, without dims of `other`; a product merges each run into one dim.

    With heads and head_dim merged, XLA leaves stacked weights in their stored layout; otherwise it copies all layers'
    weights before the loop.
    """
    runs: list[Names] = []
    shared = [n for n in names if n in partner and n not in other]
    for n in shared:
        place = (names.index(n), partner.index(n))
        last = (names.index(runs[-1][-1]), partner.index(runs[-1][-1])) if runs else None
        if last is not None and place == (last[0] + 1, last[1] + 1):
            runs[-1] += (n,)
        else:
            runs.append((n,))
    return [run for run in runs if len(run) > 1]


def _firsts(names: Names, runs: Sequence[Names]) -> Names:
    """The names, with only the first of each run."""
    followers = {n for run in runs for n in run[1:]}
    return tuple(n for n in names if n not in followers)


def _joined(x: Array, names: Names, runs: Sequence[Names]) -> Array:
    """A block with each run of dims merged into one."""
    sizes = dict(zip(names, x.shape, strict=True))
    whole = {run[0]: run for run in runs}
    return x.reshape([prod(sizes[m] for m in whole.get(n, (n,))) for n in _firsts(names, runs)])


def _without(x: Array, names: Names, summed: Names) -> tuple[Array, Names]:
    if not summed:
        return x, names
    remaining = tuple(n for n in names if n not in summed)
    return jnp.sum(widened(x), axis=tuple(names.index(n) for n in summed)), remaining


@row("einsum", native=True)
def _einsum(part: RowContext, a: Array, b: Array) -> Array:
    names, out, precision = part.names, part.out.shape.names, part.attrs["precision"]
    if part.out.dtype is INT32:
        return _whole_product(part, a, b)
    if precision in EIGHT_BIT:
        return _eight_bits(part, widened(a), widened(b))
    a, b = (operand(x, part.context, precision == "highest") for x in (a, b))
    return product(a, b, names[0], names[1], out)


@row("quantized_einsum")
def _quantized(part: RowContext, a: Array, b: Array, *scales: Array) -> Array:
    names = part.names
    held = (x / aligned(s, names[n + 2], names[n]) for n, (x, s) in enumerate(zip((a, b), scales, strict=True)))
    y = _eight_bits(part, next(held), next(held), part.attrs["grids"])
    for n, s in enumerate(scales, start=2):
        y = y * aligned(s, names[n], part.out.shape.names)
    return y


def _eight_bits(part: RowContext, a: Array, b: Array, grids: tuple[str, str] | None = None) -> Array:
    """Product of operands rounded to eight-bit formats."""
    grid, names = part.attrs["precision"], part.names
    a, b = (rounded_to(x, g) for x, g in zip((a, b), grids or (grid, grid), strict=True))
    if grid == "int8" and part.context.platform != "cpu" and not _summed_first(part):
        whole = product(a.astype(jnp.int8), b.astype(jnp.int8), names[0], names[1], part.out.shape.names, _whole_dot)
        return whole.astype(a.dtype)
    return product(a, b, names[0], names[1], part.out.shape.names)


def _whole_product(part: RowContext, a: Array, b: Array) -> Array:
    """Product of int8 and int4, accumulated in int32."""
    wide = jnp.int32 if _summed_first(part) or part.context.platform == "cpu" else jnp.int8
    names = part.names
    return product(a.astype(wide), b.astype(wide), names[0], names[1], part.out.shape.names, _whole_dot)


def _whole_dot(a: Array, b: Array, dims: Any) -> Array:
    return lax.dot_general(a, b, dims, preferred_element_type=jnp.int32)


def _summed_first(part: RowContext) -> bool:
    plan = matmul_plan(part.names[0], part.names[1], part.out.shape.names)
    return bool(plan.summed_a or plan.summed_b)


def rounded_to(x: Array, grid: str) -> Array:
    """`x` clipped and rounded to the numbers of an eight-bit format ("int8", "fp8" or "fp8_e5m2"), in its own dtype."""
    near = jnp.clip(x, -LARGEST[grid], LARGEST[grid])
    return jnp.round(near) if grid == "int8" else near.astype(_FP8[grid]).astype(x.dtype)


_FP8 = {"fp8": jnp.float8_e4m3fn, "fp8_e5m2": jnp.float8_e5m2}


@row("slicewise")
def _slicewise(part: RowContext, *arrays: Array) -> Array:
    """A user's NumPy function, called back on the host for each block."""
    op, out, faults = part.operation, part.out, part.context.reported.faults

    def local(*blocks: Any) -> np.ndarray[Any, Any]:
        given = [np.asarray(x) for x in blocks]
        types = tuple(TensorType(x.shape, x.dtype) for x in op.inputs)
        try:
            return np.asarray(op.opdef.local(Block(op, types, out, {}, Engine(0, 0, True, False)), *given))
        except Exception as fault:
            faults.append(fault)  # raised after the step, because other devices wait for this one
            return np.zeros(out.shape.sizes, out.dtype.storage)

    return jax.pure_callback(local, jax.ShapeDtypeStruct(out.shape.sizes, out.dtype.storage), *arrays)
