"""Fused attention as one kernel: softmax(q k' + masks) v, whose scores never reach HBM.

Three operations: the result, and its gradients for the queries and for keys and values, each of which recomputes the
scores, as flash kernels do. Queries, heads and batches may be split over devices. So may keys and values: devices then
exchange one number per query (two for gradients), the logarithm of the sum of exp(scores), and each computes a share of
the result from its own keys, a pending sum. If keys and values are smaller than these and the result, they are gathered
instead. Self-attention through a window has its own operations, which exchange halos of keys and values. Source: Dao et
al., arXiv:2205.14135; Splash attention in jax-ml/jax: jax/experimental/pallas/ops/tpu/splash_attention; shares of split
keys: Liu et al., arXiv:2310.01889.

Numerics are those of the MXU: float32 operands of products are rounded to bfloat16, including probabilities and their
cotangents; scores, sums and softmax are float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np

from layouts import Dimension, Shape
from meshlib.core.arguments import at, flag, items, number, whole
from meshlib.core.dtypes import BOOL, INT32
from meshlib.core.errors import ShapeError
from meshlib.core.graph import Operation, Tensor, TensorType, find_dim
from meshlib.core.opdef import TRANSCENDENTAL_OPS, Factor, Kind, Linear, Role, ScoreProducts, Work, operation, variant
from meshlib.ops.building import build, build_all, named_factors, same_dtype, tensor, union
from meshlib.ops.contraction.einsum import einsum
from meshlib.ops.control.state import stop_gradient
from meshlib.ops.fused_attention.kernel import local_grad_memory, local_grad_query, local_result, seen_keys
from meshlib.ops.fused_attention.split_sequence import (
    SPLIT_GRAD_MEMORY,
    SPLIT_GRAD_QUERY,
    SPLIT_RESULT,
    WINDOW_GRAD_MEMORY,
    WINDOW_RESULT,
    joined_factors,
    window_grad_memory,
)
from meshlib.ops.gradients import composed_gradient
from meshlib.ops.movement.indexing import range as positions
from meshlib.ops.pointwise.arithmetic import equal, exp, greater_equal, less, logical_and, where
from meshlib.ops.pointwise.casts import cast
from meshlib.ops.pointwise.reductions import reduce_max, reduce_sum

# length, memory_length, key_dim, value_dim, as attributes
Dims = tuple[Dimension | str, Dimension | str, Dimension | str, Dimension | str | None]

# Kernels compute scores in tiles of queries x keys; fully masked tiles are skipped.
TILE = 512

# Lane operations per score, modelled: scale, mask, maximum, difference, exponential, sum; in gradients also the
# cotangents of scores from those of probabilities.
_OPS = TRANSCENDENTAL_OPS + 5
_GRAD_OPS = TRANSCENDENTAL_OPS + 7


@lru_cache(maxsize=4096)
def executed_share(
    length: int, memory: int, causal: bool, window: int | None, tile: tuple[int, int] = (TILE, TILE)
) -> Fraction:
    """The share of query-key pairs computed by a kernel that skips tiles of (queries, keys) masked by causality or a
    window.

    >>> executed_share(1024, 1024, True, None), executed_share(4096, 4096, False, None)
    (Fraction(3, 4), Fraction(1, 1))
    >>> float(executed_share(10**9, 10**9, True, None))  # a tile of every row beyond half of all pairs
    0.500000256
    """
    pairs, (rows, columns) = 0, tile
    many = rows * max(1, min(1 << 20, 2**62 // memory))  # rows of tiles at once, whose sums are int64
    for part in range(0, length, many):
        start = np.arange(part, min(part + many, length), rows)
        stop = np.minimum(start + rows, length)
        low, high = seen_keys(start, stop, memory, causal, window)
        tiles = np.minimum(memory, -(-high // columns) * columns) - low // columns * columns
        pairs += rows * int(tiles[:-1].sum()) + int(stop[-1] - start[-1]) * int(tiles[-1])
    return Fraction(pairs, length * memory)


# ---------------------------------------------------------------- types, roles, work


def _check(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> None:
    """Raise ShapeError unless the shapes of q, k and v agree."""
    q, k, v = (t.shape for t in types[:3])
    length, memory, key, value = (attrs[n] for n in ("length", "memory_length", "key_dim", "value_dim"))
    if not same_dtype(types[:3]).is_wide_float:
        raise ShapeError(f"needs float operands, got {types[0].dtype.name}; cast them with mtf.cast")
    if length in k:
        raise ShapeError(
            f"k has the queries' dim '{length}'; rename it with mtf.rename_dimension(k, '{length}', 'memory_length'), "
            "and that of v"
        )
    if memory in q:
        raise ShapeError(f"q has the keys' dim '{memory}'; only k and v may have it")
    strange = [str(d) for d in k if d.name not in q and d.name != memory]
    if strange:
        raise ShapeError(f"k has {', '.join(strange)}, which q lacks; q, k share batch dims and '{key}'")
    wanted = {d for d in k if d.name != key} | {v.dim(value)}
    if set(v) != wanted or (value != key and value in q):
        replaced = "" if value == key else f", with '{value}' in place of '{key}'"
        raise ShapeError(f"v must have the dims of k{replaced}: k {k}, v {v}")
    union([q, k, v])
    rows, memory_size, window = q.dim(length).size, k.dim(memory).size, attrs["window"]
    if window is not None and rows > memory_size + window - 1:
        raise ShapeError(f"the last of {rows} queries sees none of {memory_size} keys through a window of {window}")


def _check_further(x: TensorType, q: Shape, k: Shape, key: str) -> None:
    """Raise ShapeError unless x, a mask, segment ids or a bias, has dims of the scores."""
    what = "bias" if x.dtype.is_wide_float else "mask"
    stray = [str(d) for d in x.shape if d not in q and d not in k]
    if stray:
        raise ShapeError(f"the {what} has {', '.join(stray)}, which q and k lack")
    if key in x.shape:
        raise ShapeError(f"the {what} has '{key}', the elements of a head; scores have none")


def seen_masks(masks: Sequence[Tensor]) -> list[Tensor]:
    """The masks of a kernel as bool tensors: masks unchanged, pairs of segment ids compared."""
    bool_masks = [m for m in masks if m.dtype is BOOL]
    numbers = [m for m in masks if m.dtype is INT32]
    return [*bool_masks, *([equal(numbers[0], numbers[1])] if numbers else [])]


def biases(further: Sequence[Tensor]) -> list[Tensor]:
    """The bias among the further operands of a kernel, as a list of at most one."""
    return [x for x in further if x.dtype.is_wide_float]


def _out_shape(q: Shape, v: Shape, attrs: Mapping[str, Any]) -> Shape:
    return Shape([v.dim(attrs["value_dim"]) if d.name == attrs["key_dim"] else d for d in q])


def attention_type(types: tuple[TensorType, ...], attrs: Mapping[str, Any]) -> TensorType:
    """The type of the result for q, k, v, masks and a bias; raises ShapeError if they do not fit."""
    _check(types, attrs)
    q, k, v = (t.shape for t in types[:3])
    for x in types[3:]:
        _check_further(x, q, k, attrs["key_dim"])
    return TensorType(_out_shape(q, v, attrs), types[0].dtype)


def _whole(op: Operation) -> dict[str, Role]:
    return dict.fromkeys((op.attrs[n] for n in ("key_dim", "value_dim")), Role.WHOLE)


def _query_roles(op: Operation) -> tuple[Factor, ...]:
    return named_factors(op, {op.attrs["memory_length"]: Role.SHARE, **_whole(op)})


def _memory_roles(op: Operation) -> tuple[Factor, ...]:
    return named_factors(op, {**_summed(op), op.attrs["memory_length"]: Role.SUMMARY, **_whole(op)})


def _summed(op: Operation) -> dict[str, Role]:
    """Dims of queries alone, over which the gradients of keys and values sum."""
    return {d.name: Role.SUM for d in op.inputs[0].shape if d.name not in op.inputs[1].shape}


def _window_roles(out: str) -> Callable[[Operation], tuple[Factor, ...]]:
    """The roles of window attention whose result has the dim named by attribute `out`."""

    def roles(op: Operation) -> tuple[Factor, ...]:
        return joined_factors(op, out, {**(_summed(op) if out == "memory_length" else {}), **_whole(op)})

    return roles


def seen_pairs(q: Shape, k: Shape, attrs: Mapping[str, Any]) -> int:
    """Query-key pairs in the computed tiles; a window reaches keys beyond its own block."""
    keys = k.dim(attrs["memory_length"]).size if attrs["keys"] is None else attrs["keys"]
    share: Fraction = attrs["share"]
    points: int = prod(d.size for d in q if d.name != attrs["key_dim"]) * keys
    return points * share.numerator // share.denominator


def _work(over_key: int, over_value: int, ops: int, operands: int) -> Callable[..., Work]:
    """The work of `over_key` products over the key dim and `over_value` over the value dim, with `ops` lane operations
    per score and one more for a bias, which follows the first `operands` and the masks.

    With `causal` or a window it counts the executed share of tiles. If `length` or `memory_length` is split, devices
    differ, and this is their mean, which kernels reach if they distribute the rows evenly.
    """

    def work(ins: tuple[TensorType, ...], out: TensorType, attrs: Mapping[str, Any]) -> Work:
        q, k, v = (t.shape for t in ins[:3])
        key, value = q.dim(attrs["key_dim"]).size, v.dim(attrs["value_dim"]).size
        computed = seen_pairs(q, k, attrs)
        passes = 6 if attrs.get("precision") == "highest" and ins[0].dtype.itemsize >= 4 else 1  # as in einsum
        added = sum(x.dtype.is_wide_float for x in ins[operands:])
        return Work(2 * computed * (over_key * key + over_value * value) * passes, computed * (ops + added))

    return work


# ---------------------------------------------------------------- gradients


def _grad(op: Operation, dy: Tensor) -> list[Tensor | None]:
    q, k, v, *further = op.inputs
    of_query, of_memory = (WINDOW_QUERY, WINDOW_MEMORY) if op.opdef is WINDOW else (GRAD_QUERY, GRAD_MEMORY)
    dq = build(of_query, [q, k, v, dy, *further], op.attrs)
    dk, dv = build_all(of_memory, [q, k, v, dy, *further], op.attrs)
    # The cotangents of a bias are those of the scores, which no fused kernel writes.
    of_bias = _composed_gradient(op.attrs, [q, k, v, dy], further)[3:] if biases(further) else []
    return [dq, dk, dv, *([None] * (len(further) - len(of_bias))), *of_bias]


def visible(length: Dimension, memory: Dimension, causal: bool, window: int | None) -> Tensor | None:
    """Mask bool [length, memory] of the keys that each query sees; None for all. A source of the current graph."""
    i, j = positions(length), positions(memory)
    seen = None
    if causal:
        seen = greater_equal(i, j)
    if window is not None:
        near = less(i - j, window)
        seen = near if seen is None else logical_and(seen, near)
        if not causal:
            seen = logical_and(seen, less(j - i, window))
    return seen


def _composed_gradient(attrs: Mapping[str, Any], inputs: Sequence[Tensor], further: Sequence[Tensor]) -> list[Tensor]:
    """dq, dk, dv and the bias's cotangent from q, k, v and dy, composed of operations with gradients of any order."""
    q, k, v, dy = inputs
    mask, added = [x for x in further if not x.dtype.is_wide_float], biases(further)
    length, memory = q.shape.dim(attrs["length"]), k.shape.dim(attrs["memory_length"])
    pairs = Shape([*(d for d in q.shape if d.name != attrs["key_dim"]), memory])
    scores = einsum([q, k], output_shape=pairs) * attrs["scale"]
    for bias in added:
        scores = scores + cast(bias, scores.dtype)
    with scores.graph:
        seen = visible(length, memory, attrs["causal"], attrs["window"])
        masks = [m for m in (seen, *seen_masks(mask)) if m is not None]
    for seen in masks:
        scores = where(seen, scores, -1e30)
    weights = exp(scores - stop_gradient(reduce_max(scores, reduced_dim=memory)))
    for seen in masks:
        weights = where(seen, weights, 0.0)
    total = reduce_sum(weights, reduced_dim=memory)
    p = weights / (where(greater_equal(0.0, total), 1.0, total) if mask else total)
    dp = einsum([dy, v], output_shape=pairs)
    of_scores = p * (dp - reduce_sum(p * dp, reduced_dim=memory))
    ds = of_scores * attrs["scale"]
    return [
        einsum([ds, k], output_shape=q.shape),
        einsum([ds, q], output_shape=k.shape),
        einsum([p, dy], output_shape=v.shape),
        *(cast(reduce_sum(of_scores, output_shape=x.shape), x.dtype) for x in added),
    ]


def _second(op: Operation, which: slice, dys: Sequence[Tensor | None]) -> list[Tensor | None]:
    added = biases(op.inputs[4:])
    masks = op.inputs[4 : len(op.inputs) - len(added)]
    sides = composed_gradient(
        lambda *xs: _composed_gradient(op.attrs, xs[:4], [*masks, *xs[4:]])[which], [*op.inputs[:4], *added], dys
    )
    return [*sides[:4], *(None for _ in masks), *sides[4:]]


_BOTH = ("key_dim", "value_dim")  # the scores, recomputed, and their cotangents

ATTENTION = operation(
    "attention",
    kind=Kind.KERNEL,
    shape=attention_type,
    roles=_query_roles,
    local=local_result,
    lower=SPLIT_RESULT,
    grad=_grad,
    linear=lambda op: Linear((2,)),
    work=_work(1, 1, _OPS, 3),
    scores=ScoreProducts(contracted=("key_dim",), turned=("value_dim",)),
)
GRAD_QUERY = operation(
    "attention_grad_query",
    kind=Kind.KERNEL,
    shape=lambda types, attrs: types[0],
    roles=_query_roles,
    local=local_grad_query,
    lower=SPLIT_GRAD_QUERY,
    grad=lambda op, dz: _second(op, slice(0, 1), [dz]),
    linear=lambda op: Linear((2, 3)),
    work=_work(2, 1, _GRAD_OPS, 4),
    scores=ScoreProducts(_BOTH, turned=("key_dim",), repeated=1, backward=True, spared=True),
)
GRAD_MEMORY = operation(
    "attention_grad_memory",
    kind=Kind.KERNEL,
    shape=lambda types, attrs: (types[1], types[2]),
    roles=_memory_roles,
    local=local_grad_memory,
    lower=SPLIT_GRAD_MEMORY,
    grad=lambda op, dk, dv: _second(op, slice(1, 3), [dk, dv]),
    linear=lambda op: Linear((3,)),
    work=_work(2, 2, _GRAD_OPS, 4),
    scores=ScoreProducts(_BOTH, turned=_BOTH, repeated=2, backward=True),
)
# Self-attention through a window: if both dims are split alike, halos are exchanged.
WINDOW = variant(ATTENTION, "attention_window", roles=_window_roles("length"), lower=WINDOW_RESULT)
WINDOW_QUERY = variant(GRAD_QUERY, "attention_window_grad_query", roles=_window_roles("length"), lower=WINDOW_RESULT)
WINDOW_MEMORY = variant(
    GRAD_MEMORY,
    "attention_window_grad_memory",
    roles=_window_roles("memory_length"),
    local=window_grad_memory,
    lower=WINDOW_GRAD_MEMORY,
)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    length: Dimension | str,
    memory_length: Dimension | str,
    key_dim: Dimension | str,
    value_dim: Dimension | str | None = None,
    causal: bool = False,
    window: int | None = None,
    scale: float | None = None,
    mask: Tensor | None = None,
    name: str | None = None,
    segments: tuple[Tensor, Tensor] | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """softmax over memory_length of (scale q k + bias), times v, as one kernel whose scores never reach HBM.

    Q[B, G, i, d], K[B, j, d], V[B, j, e]  ->  Y[B, G, i, e] = sum over j of P[B, G, i, j] V[B, j, e]

    Args:
      q: queries [..., length, key_dim], float.
      k: keys [..., memory_length, key_dim]; dims shared with q are batch dims. Dims of q alone are groups, such as
        several query heads per key head.
      v: values, the dims of k with `value_dim` in place of `key_dim`.
      length, memory_length: sequence dims of the queries, and of keys and values.
      key_dim, value_dim: dims of one head; `value_dim` is `key_dim` by default.
      causal: query i sees keys j <= i only.
      window: query i sees keys j with i - j < window, and j - i < window unless causal.
      scale: factor of the scores; 1 / sqrt(size of key_dim) by default.
      mask: bool, with dims of q and k: False hides a key. A query that sees no key yields zeros.
      name: of the operation, in listings.
      segments: int32 segment ids of queries (dims of q, with `length`) and of keys (dims of k, with `memory_length`): a
        query sees only keys of its segment, as for several texts packed into one sequence. The kernel reads one id per
        query and per key instead of a mask of all pairs.
      bias: float, with dims of q and k except `key_dim`: added to the scaled scores, such as `relative_position_bias`.
        Only its gradient materialises scores in HBM.
    Returns: [..., length, value_dim] in the order of q, dtype of q.
    Split keys are not gathered if that sends less: one number per query and head is reduced over the devices (two for
    each gradient), and the result is a pending sum. For self-attention through a window, with `length` and
    `memory_length` split alike, halos of keys and values are exchanged, unless a mask has both dims.

    Cost: 2 matrix products forward, 3 for the queries' gradient, 4 for those of keys and values, each of 2 flops per
      query, key and element of a head; tiles of 512 x 512 hidden by `causal` or `window` are skipped. Masks and
      segments are known only at run time: tiles that they hide are computed and counted.
    Raises: ShapeError for dims that do not fit, GraphError for a dim that an operand lacks.
    Example:
      >>> import meshlib as mtf
      >>> length, memory, d = mtf.Dimension("length", 4), mtf.Dimension("memory_length", 4), mtf.Dimension("d", 2)
      >>> with mtf.Graph():
      ...     q, k, v = mtf.zeros([length, d]), mtf.zeros([memory, d]), mtf.ones([memory, d])
      ...     y = mtf.attention(q, k, v, length, memory, d, causal=True)
      >>> print(y.shape, mtf.simulate(mtf.lower({"y": y})).step()["y"].sum())
      [length:4, d:2] 8.0

    Source: Dao et al., "FlashAttention", arXiv:2205.14135.
    """
    attrs = arguments("attention", q, k, v, (length, memory_length, key_dim, value_dim), causal, window, scale)
    masks = [] if mask is None else [checked_mask(mask, q, k, "attention")]
    if segments is not None:
        masks += checked_segments(segments, q, k, attrs, "attention")
    if bias is not None:
        if not tensor(bias, "attention").dtype.is_wide_float:
            raise ShapeError(f"{at('attention')}: the bias must be of a float type, got {bias}")
        masks.append(bias)
    rows, keys = q.shape.dim(attrs["length"]).size, k.shape.dim(attrs["memory_length"]).size
    # A mask with both dims: no halo of either covers what a block needs.
    both = any({attrs["length"], attrs["memory_length"]} <= {*m.shape.names} for m in masks)
    near = window is not None and rows == keys and not both
    attrs["keys"] = keys if near else None
    return build(WINDOW if near else ATTENTION, [q, k, v, *masks], attrs, name)


def checked_mask(mask: Tensor, q: Tensor, k: Tensor, what: str) -> Tensor:
    """`mask`, which must be bool."""
    if tensor(mask, what).dtype is not BOOL:
        raise ShapeError(
            f"{at(what)}: the mask must be bool, got {mask.dtype.name}; compare first, as in mtf.not_equal(x, 0)",
            q,
            k,
            mask,
        )
    return mask


def checked_segments(
    segments: object, q: Tensor, k: Tensor, attrs: Mapping[str, Any], what: str
) -> tuple[Tensor, Tensor]:
    """The segment ids of queries and keys. Raises: ShapeError if `segments` is not such a pair."""
    given = items(segments, what, "segments")
    if len(given) != 2:
        raise ShapeError(f"{at(what)}: segments must be a pair, of queries and of keys, got {len(given)} tensors")
    for x, of, dim in zip(given, (q, k), (attrs["length"], attrs["memory_length"]), strict=True):
        if tensor(x, what).dtype is not INT32 or dim not in x.shape or any(d not in of.shape for d in x.shape):
            raise ShapeError(f"{at(what)}: segments must be int32 of dims of {of}, '{dim}' among them, got {x}")
    return given[0], given[1]


def arguments(
    what: str, q: Tensor, k: Tensor, v: Tensor, dims: Dims, causal: bool, window: int | None, scale: float | None
) -> dict[str, Any]:
    """The arguments of `attention`, each checked, as attributes of its operation."""
    length, memory_length, key_dim, value_dim = dims
    rows, keys = find_dim(tensor(q, what), length, what), find_dim(tensor(k, what), memory_length, what)
    key = find_dim(k, find_dim(q, key_dim, what), what)
    value = find_dim(tensor(v, what), key_dim if value_dim is None else value_dim, what)
    if window is not None and whole(window, what, "window") < 1:
        raise ShapeError(f"{at(what)}: window must be at least 1, got {window}")
    hidden = flag(causal, what, "causal")
    return {
        "length": rows.name,
        "memory_length": keys.name,
        "key_dim": key.name,
        "value_dim": value.name,
        "causal": hidden,
        "window": window,
        "scale": key.size**-0.5 if scale is None else number(scale, what, "scale"),
        "share": executed_share(rows.size, keys.size, hidden, window),
    }
