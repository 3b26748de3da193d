"""The arithmetic of a TPU core and of a ring of cores, to the last bit.

Three facts determine every number of the simulated machine:

* float32 operands are rounded to bfloat16, nearest even, on their way into the MXU;
* a weight-stationary array of `rows` rows adds down a column, k = 0 .. rows-1, in float32, and the
  results of successive tiles are added to an accumulator in order (see `hardware.mxu`, whose clocked
  array gives the same bits);
* a ring reduce-scatter adds chunk c as it travels, beginning one member behind its owner.

NumPy's own `matmul` and `sum` use other orders (blocked, pairwise, fused), hence this module.

Eight-bit numbers of the MXU are int8, and fp8 with four exponent and three mantissa bits (e4m3); gradients may take the
wider range of fp8 with five bits of exponent. All are exact in bfloat16 and float32, where they are simulated; their
products are exact in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from hardware.checks import HardwareError, one_of
from hardware.exact_products import OperandCache, multiply_exactly

Array = NDArray[Any]

# Largest magnitude of each format; int8 without -128, so that it is symmetric.
LARGEST = {"int8": 127.0, "fp8": 448.0, "fp8_e5m2": 57344.0}
_FLOATS = {"fp8": ml_dtypes.float8_e4m3fn, "fp8_e5m2": ml_dtypes.float8_e5m2}
_ROUND_SMALL = 1 << 14  # elements below which the overhead of calls outweighs the passes over memory
_ROUND_CHUNK = 1 << 16  # elements: operand, result and scratch fit the second-level cache
_MATMUL_CHUNK = 1 << 15  # elements of products held at once: fit the second-level cache
_INNER_CHUNK = 1 << 12  # longest contiguous run of one product block


def round_to_eight_bits(x: Array, dtype: str) -> Array:
    """Round every element to the nearest number of the format (ties to even), saturating at its largest; NaN stays.

    Args:
      x: float32 or float64 array of any shape.
      dtype: "int8", whole numbers from -127 to 127, "fp8" or "fp8_e5m2", e4m3 and e5m2 of the Open Compute
        Project's specification.
    Returns: an array of x's shape and dtype.
    Raises: HardwareError for another dtype.
    Example:
      >>> round_to_eight_bits(np.array([0.5, 1.5, 2.6, 300.0]), "int8").tolist()
      [0.0, 2.0, 3.0, 127.0]
      >>> round_to_eight_bits(np.array([1.0625, 1.1, 300.0, 1e9]), "fp8").tolist()
      [1.0, 1.125, 288.0, 448.0]

    Source: OCP 8-bit floating point specification (OFP8), revision 1.0; jax-ml/ml_dtypes.
    """
    largest = LARGEST[one_of("eight-bit dtype", dtype, tuple(LARGEST))]
    near: Array = np.clip(x, -largest, largest)
    if dtype == "int8":
        return np.rint(near)
    with np.errstate(invalid="ignore"):
        return near.astype(_FLOATS[dtype]).astype(x.dtype)


_INFINITY = np.uint32(0x7F800000)
_SIGN, _MAGNITUDE, _QUIET_NAN = np.uint32(0x80000000), np.uint32(0x7FFFFFFF), np.uint32(0x7FC00000)
_SIXTEEN, _ONE, _JUST_BELOW_HALF = np.uint32(16), np.uint32(1), np.uint32(0x7FFF)
_UPPER_HALF = np.uint32(0xFFFF0000)

COMBINE: dict[str, Callable[..., Array]] = {"sum": np.add, "max": np.maximum, "min": np.minimum}


def round_to_bfloat16(x: Array, out: Array | None = None) -> NDArray[np.float32]:
    """Round every element to the nearest bfloat16 (ties to even), kept as float32.

    Bit for bit `x.astype(ml_dtypes.bfloat16).astype(np.float32)`: infinities stay, values beyond the
    largest bfloat16 become infinite, a NaN of any payload becomes the quiet NaN of its sign.

    Args:
      x: float32 array of any shape and strides.
      out: float32 array of x's shape to write to; may be x itself.
    Returns: `out`, or a new array of x's shape.
    Cost: six passes over cache-sized chunks; no floating-point flag is raised.
    Raises: HardwareError if x or out is not float32, their shapes differ, or out is read-only.
    Example:
      >>> round_to_bfloat16(np.float32([1.00390625, 1.01171875, 3.4e38])).tolist()
      [1.0, 1.015625, inf]

    Source: IEEE 754 round-half-even on the upper 16 bits; google/XNNPACK and jax-ml/ml_dtypes do the same.
    """
    x = _require_float32("x", x)
    if out is not None and _require_float32("out", out).shape != x.shape:
        raise HardwareError(f"round_to_bfloat16: out has shape {out.shape}, x has shape {x.shape}")
    if out is not None and not out.flags.writeable:
        raise HardwareError("round_to_bfloat16: out is read-only")
    if x.size <= _ROUND_SMALL:  # small arrays: two casts have the fewest calls, and round alike
        with np.errstate(invalid="ignore"):  # signalling NaNs are expected
            rounded = x.astype(ml_dtypes.bfloat16).astype(np.float32)
        if out is None:
            return rounded
        np.copyto(out, rounded)
        return out
    if out is None:
        out = np.empty(x.shape, np.float32)
    aligned = x.flags.c_contiguous and out.flags.c_contiguous
    if not aligned or (out is not x and np.may_share_memory(x, out)):
        dense = np.array(x, order="C")
        _round_dense(dense.reshape(-1), dense.reshape(-1))
        np.copyto(out, dense)
    else:
        _round_dense(x.reshape(-1), out.reshape(-1))
    return out


def _require_float32(name: str, x: Array) -> Array:
    if not isinstance(x, (np.ndarray, np.generic)) or x.dtype != np.float32:
        kind = getattr(x, "dtype", type(x).__name__)
        raise HardwareError(f"round_to_bfloat16: {name} must be a float32 array, not {kind}")
    return np.asarray(x)


def _round_dense(x: Array, out: Array) -> None:
    """Add half a unit, minus one where the last kept bit is 0 (ties to even), then truncate; chunk by chunk."""
    source, target = x.view(np.uint32), out.view(np.uint32)
    in_place = x is out or np.may_share_memory(x, out)
    scratch = np.empty(_ROUND_CHUNK if in_place else 0, np.uint32)
    with np.errstate(invalid="ignore"):
        for start in range(0, x.size, _ROUND_CHUNK):
            bits, result = source[start : start + _ROUND_CHUNK], target[start : start + _ROUND_CHUNK]
            work = scratch[: bits.size] if in_place else result
            has_nan = np.isnan(x[start : start + _ROUND_CHUNK].max())  # max() propagates any NaN
            if has_nan:
                nan = (bits & _MAGNITUDE) > _INFINITY
                quiet = (bits[nan] & _SIGN) | _QUIET_NAN
            np.right_shift(bits, _SIXTEEN, out=work)
            np.bitwise_and(work, _ONE, out=work)
            np.add(work, _JUST_BELOW_HALF, out=work)
            np.add(work, bits, out=work)
            np.bitwise_and(work, _UPPER_HALF, out=result)
            if has_nan:
                result[nan] = quiet


def mxu_matmul(
    a: Array, b: Array, rows: int = 128, operands: OperandCache | None = None, out: Array | None = None
) -> Array:
    """Matrix product in the order of addition of a weight-stationary array of `rows` rows.

    For every tile of `rows` consecutive k the partial sum begins at 0 and adds the products of
    k = 0 .. rows-1 in order, product and sum each rounded; the tiles' results are added to an
    accumulator, which begins at 0, tile by tile. Nothing is fused, paired or reordered.

    Args:
      a: [..., M, K], float32 or float64. Round it to bfloat16 first for the MXU's own operands.
      b: [..., K, N], same dtype; leading dims broadcast against those of a.
      rows: rows of the array, >= 1.
      operands: of several products that share arrays, see `hardware.exact_products`.
      out: [..., M, N] of the same dtype, C-contiguous, to write to.
    Returns: `out`, or a new array of that shape and dtype.
    Cost: 2 M N K element operations. Products of bfloat16 values go through BLAS (`hardware.exact_products`), which
      takes about a twentieth of the time of the ordered loop over other values; their bits are the same.
    Raises: HardwareError for other dtypes, ranks below 2, unequal K or batch dims that do not broadcast.
    Example:
      >>> row, column = np.float32([[1, 2**-24, 2**-24]]), np.ones((3, 1), np.float32)
      >>> bool(mxu_matmul(row, column)[0, 0] == 1)  # each small term is rounded away
      True
      >>> bool(mxu_matmul(row[:, ::-1], column)[0, 0] == 1)  # the small terms meet first
      False

    Source: Jouppi et al. 2017 (arXiv:1704.04760), section 2; `hardware.mxu` runs it clock by clock.
    """
    batch = _check_matmul(a, b, rows)
    depth, m, n = a.shape[-1], a.shape[-2], b.shape[-1]
    if b.ndim == 2 or all(size == 1 for size in b.shape[:-2]):
        left = a.reshape(1, math.prod(a.shape[:-1]), depth)  # weights without batch dims: batch dims become rows
        right = b.reshape(1, depth, n)
    else:
        left = np.broadcast_to(a, (*batch, m, depth)).reshape(math.prod(batch), m, depth)  # m, n and depth may be 0
        right = np.broadcast_to(b, (*batch, depth, n)).reshape(math.prod(batch), depth, n)
    result = _result(out, (*batch, m, n), a.dtype)
    target = result.reshape(left.shape[0], left.shape[1], n)
    if a.dtype == np.float32 and multiply_exactly(left, right, target, rows, _matmul_in_order, operands):
        return result
    first = np.ascontiguousarray(left.transpose(2, 0, 1))  # [K, B, M]
    second = np.ascontiguousarray(right.transpose(1, 0, 2))  # [K, B, N]
    if first.shape[2] > n:  # the longer side is the contiguous one; products commute exactly
        first, second, target = second, first, target.swapaxes(1, 2)
    _matmul_in_order(first, second, target, rows)
    return result


def _result(out: Array | None, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """`out` after a check, or a new array."""
    if out is None:
        return np.empty(shape, dtype)
    if out.shape != shape or out.dtype != dtype or not out.flags.c_contiguous:
        order = "" if out.flags.c_contiguous else ", not C-contiguous"
        raise HardwareError(
            f"mxu_matmul: out must be C-contiguous {dtype}{list(shape)}, got {out.dtype}{list(out.shape)}{order}"
        )
    return out


def _check_matmul(a: Array, b: Array, rows: int) -> tuple[int, ...]:
    """Check the operands; return the broadcast batch shape."""
    shapes = f"a {getattr(a, 'shape', a)}, b {getattr(b, 'shape', b)}"
    if not (isinstance(a, np.ndarray) and isinstance(b, np.ndarray)):
        raise HardwareError(f"mxu_matmul: operands must be arrays; got {type(a).__name__}, {type(b).__name__}")
    if a.dtype != b.dtype or a.dtype not in (np.float32, np.float64):
        raise HardwareError(f"mxu_matmul: operands must both be float32 or both float64, not {a.dtype} and {b.dtype}")
    if a.ndim < 2 or b.ndim < 2 or a.shape[-1] != b.shape[-2]:
        raise HardwareError(f"mxu_matmul: need a [..., M, K] and b [..., K, N] with one K; got {shapes}")
    if isinstance(rows, bool) or not isinstance(rows, (int, np.integer)) or rows < 1:
        raise HardwareError(f"mxu_matmul: rows must be an integer >= 1, not {rows!r}")
    try:
        return tuple(np.broadcast_shapes(a.shape[:-2], b.shape[:-2]))
    except ValueError:
        raise HardwareError(f"mxu_matmul: leading dims do not broadcast; got {shapes}") from None


def _matmul_in_order(first: Array, second: Array, out: Array, rows: int) -> None:
    """out[b, i, j] = ordered sum over k of first[k, b, i] * second[k, b, j], block by block."""
    batch, height, width = out.shape
    if 0 in out.shape:
        return
    block_width = min(width, _INNER_CHUNK)
    block_height = min(height, max(1, _MATMUL_CHUNK // block_width))
    block_batch = min(batch, max(1, _MATMUL_CHUNK // (block_width * block_height)))
    for b in range(0, batch, block_batch):
        for i in range(0, height, block_height):
            for j in range(0, width, block_width):
                bs, hs, ws = slice(b, b + block_batch), slice(i, i + block_height), slice(j, j + block_width)
                out[bs, hs, ws] = _ordered_block(first[:, bs, hs, None], second[:, bs, None, ws], rows)


def _ordered_block(first: Array, second: Array, rows: int) -> Array:
    """Sum of first[k] * second[k] over k, tile by tile; each operand [K, B, height or 1, width or 1]."""
    depth = first.shape[0]
    shape = (first.shape[1], first.shape[2], second.shape[3])
    area = shape[0] * shape[1] * shape[2]
    steps = max(1, min(rows, depth, _MATMUL_CHUNK // area))
    buffer = np.empty((steps + 1, *shape), first.dtype)  # slot 0 holds the running partial sum
    accumulator = np.zeros(shape, first.dtype)
    partial = np.empty(shape, first.dtype)
    for tile in range(0, depth, rows):
        stop = min(tile + rows, depth)
        partial[...] = 0
        for k in range(tile, stop, steps):
            count = min(steps, stop - k)
            np.multiply(first[k : k + count], second[k : k + count], out=buffer[1 : count + 1])
            if count == 1:
                np.add(partial, buffer[1], out=partial)
            else:
                buffer[0] = partial
                _add_in_order(buffer[: count + 1], partial)
        np.add(accumulator, partial, out=accumulator)
    return accumulator


def _add_in_order(terms: Array, out: Array) -> None:
    """Sum over the leading axis, first to last; NumPy sums pairwise along the contiguous axis only."""
    if out.size == 1:
        out[...] = np.add.accumulate(terms.reshape(-1))[-1]
    else:
        np.add.reduce(terms, axis=0, out=out)


def ring_reduce_scatter(
    parts: Sequence[Array], dim: int, op: str = "sum", carry: Callable[[Array], Array] | None = None
) -> list[Array]:
    """Reduce over the members of a ring; leave member c chunk c of dimension `dim`.

    Chunk c begins at member (c + 1) % k, is combined at each next member, and ends at member c. All chunks together are
    the result of an all_reduce: every member receives the same bits by the all-gather that follows.

    Args:
      parts: k >= 1 arrays of equal shape and dtype (float32, float64, an integer or bool), in ring order.
      dim: dimension that is cut in k chunks (as `np.array_split`, equal where k divides it).
      op: "sum", "max" or "min". Floats are added in their own dtype, each addition rounded. Of bools there is no
        sum; their max is "or", their min "and".
      carry: applied to every partial result before it is sent on, as `round_to_bfloat16` where the wire
        carries bfloat16; None sends it as it is.
    Returns: k new arrays of that dtype.
    Raises: HardwareError for an empty list, unequal shapes or dtypes, another dtype, an unknown op, a sum of bools, a
      dim that the arrays do not have.
    Example:
      >>> [chunk.tolist() for chunk in ring_reduce_scatter([np.int32([[1, 2]]), np.int32([[10, 20]])], dim=1)]
      [[[11]], [[22]]]

    Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms", JPDC 69(2), 2009.
    """
    arrays = _check_parts(parts, op)
    rank = arrays[0].ndim
    if isinstance(dim, bool) or not isinstance(dim, (int, np.integer)) or not -rank <= dim < rank:
        raise HardwareError(f"ring_reduce_scatter: dim {dim!r} is not one of the {rank} dims of {arrays[0].shape}")
    return _scattered(arrays, dim, op, carry)


def _scattered(arrays: list[Array], dim: int, op: str, carry: Callable[[Array], Array] | None) -> list[Array]:
    """The reduced chunk of every owner: contributions of owner+1, owner+2, ..., owner, combined in this order."""
    k, combine = len(arrays), COMBINE[op]
    chunks = []
    for owner, chunk in enumerate(_chunks(arrays[0].shape[dim], k)):
        of_owner = (np.s_[:],) * (dim % arrays[0].ndim) + (chunk,)
        total = np.array(arrays[(owner + 1) % k][of_owner])
        for step in range(2, k + 1):
            combine(total, arrays[(owner + step) % k][of_owner], out=total)
            if carry is not None:
                total = carry(total)
        chunks.append(total)
    return chunks


def _chunks(size: int, count: int) -> list[slice]:
    """The `count` parts of a dim as `np.array_split` cuts it: the first ones are longer by one where needed."""
    least, longer = divmod(size, count)
    begins = [n * least + min(n, longer) for n in range(count + 1)]
    return [slice(*ends) for ends in pairwise(begins)]


def _check_parts(parts: Sequence[Array], op: str) -> list[Array]:
    who, arrays = "ring_reduce_scatter", [np.asarray(part) for part in parts]
    if not arrays:
        raise HardwareError(f"{who}: parts is empty; a ring has at least one member")
    if op not in COMBINE:
        raise HardwareError(f"{who}: unknown op {op!r}; use one of {', '.join(COMBINE)}")
    kinds = {(part.shape, str(part.dtype)) for part in arrays}
    if len(kinds) > 1:
        listing = "; ".join(f"{shape} {dtype}" for shape, dtype in sorted(kinds))
        raise HardwareError(f"{who}: parts must have one shape and dtype; got {listing}")
    dtype = arrays[0].dtype
    if dtype not in (np.float32, np.float64) and dtype.kind not in "iub":
        raise HardwareError(f"{who}: dtype {dtype} is not float32, float64, an integer or bool")
    if dtype.kind == "b" and op == "sum":
        raise HardwareError(f"{who}: bools have no sum; use max for or, min for and")
    return arrays
