"""Recognition of written-out softmax attention, at the product of probabilities and values, as a fused kernel.

softmax(scale q k' + masks) v, with any order of factors, dtype of the softmax, and form of the masks. Scores with a
bias, a cap or dropout stay written out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import reduce

import numpy as np

from layouts import Dimension, Shape
from meshlib.core.dtypes import DType
from meshlib.core.graph import Operation, Tensor
from meshlib.jax.importing.masks import HIDING, conjuncts, known, lowest, negated, number_of, op_of, seen_by
from meshlib.ops.fused_attention.attention import attention
from meshlib.ops.movement.shape import broadcast, rename_dimension, reshape
from meshlib.ops.pointwise.arithmetic import logical_and, not_equal
from meshlib.ops.pointwise.casts import cast

_SAME = ("cast", "identity", "broadcast", "transpose")


@dataclass
class _ScorePattern:
    """Scale and masks of the scores, collected backwards from the softmax; the least dtype of the result."""

    dtype: DType
    scale: float = 1.0
    flags: list[Tensor] = field(default_factory=list)


def fused(p: Tensor, v: Tensor, dtype: DType) -> Tensor | None:
    """The attention that computes `p` v, if `p` is a softmax over a dim of v; otherwise None.

    It is in `dtype`, in which its result is read, or in that of an operand if wider, so that nothing is rounded.
    The result has the dims of the queries and the feature dim of the values.
    """
    op, again = op_of(_bare(p)), []
    if op.opdef.name == "where" and number_of(op.inputs[2]) == 0:  # rows and keys that are masked once more
        p, again = op.inputs[1], [*conjuncts(op.inputs[0])]
    scores = _softmaxed(p)
    if scores is None:
        return None
    x, memory = scores
    pattern = _ScorePattern(dtype)
    product = _product(x, memory, pattern)
    if product is None or memory not in v.shape:
        return None
    shown = [part for flag in pattern.flags for part in conjuncts(flag)]
    if not all(any(_equal(flag, part) for part in shown) for flag in again):
        return None
    q, k, pairs = product
    return _written(q, k, v, [d for d in k.shape if d in q.shape and d not in pairs], memory, pattern)


# ---------------------------------------------------------------- from the softmax back to the scores


def _bare(t: Tensor, *further: str) -> Tensor:
    """A tensor without casts and annotations, and without the `further` operations."""
    while (op := op_of(t)).opdef.name in (*_SAME, *further) and op.inputs[0].dtype.is_float:
        t = op.inputs[0]
    return t


def _equal(a: Tensor, b: Tensor) -> bool:
    """True if two tensors are computed alike."""
    one, other = op_of(a), op_of(b)
    if len(one.outputs) > 1 or one is other:
        return a is b or len(one.outputs) == 1
    if one.opdef is not other.opdef or len(one.inputs) != len(other.inputs) or {*a.shape} != {*b.shape}:
        return False
    if not one.inputs and one.opdef.name not in ("constant", "table", "range"):
        return False  # inputs, variables and draws are equal to themselves alone
    attrs = [[getattr(x, "array", x) for x in op.attrs.values()] for op in (one, other)]
    same = one.attrs.keys() == other.attrs.keys() and all(map(np.array_equal, *attrs))
    return same and all(map(_equal, one.inputs, other.inputs))


def _softmaxed(p: Tensor) -> tuple[Tensor, Dimension] | None:
    """(scores, softmax dim) if `p` is a softmax."""
    op = op_of(_bare(p))
    if op.opdef.name == "exp":  # exp(x - log of the sum of exp(x))
        return _normalised_before(op.inputs[0])
    if op.opdef.name == "multiply":  # e * (1 / sum)
        for e, inverse in (op.inputs, op.inputs[::-1]):
            if op_of(_bare(inverse)).opdef.name == "reciprocal":
                return _ratio(e, op_of(_bare(inverse)).inputs[0])
    return _ratio(*op.inputs) if op.opdef.name == "divide" else None


def _ratio(e: Tensor, total: Tensor) -> tuple[Tensor, Dimension] | None:
    e, summed = _bare(e), op_of(_bare(total))
    if summed.opdef.name == "add" and (number_of(summed.inputs[1]) or 1) < 1e-6:  # guard against division by zero
        summed = op_of(_bare(summed.inputs[0]))
    if summed.opdef.name != "reduce_sum" or _bare(summed.inputs[0]) is not e or op_of(e).opdef.name != "exp":
        return None
    gone = [d for d in summed.inputs[0].shape if d not in summed.output.shape]
    return (_unshifted(op_of(e).inputs[0], gone[0]), gone[0]) if len(gone) == 1 else None


def _normalised_before(x: Tensor) -> tuple[Tensor, Dimension] | None:
    op = op_of(_bare(x))
    if op.opdef.name != "subtract":
        return None
    rest, log = op.inputs[0], op_of(_bare(op.inputs[1]))
    if log.opdef.name == "add":  # log(sum(exp(x - peak))) + peak
        log = op_of(_bare(next((y for y in log.inputs if op_of(_bare(y)).opdef.name == "log"), log.inputs[0])))
    if log.opdef.name != "log":
        return None
    summed = op_of(_bare(log.inputs[0]))
    if summed.opdef.name != "reduce_sum" or op_of(_bare(summed.inputs[0])).opdef.name != "exp":
        return None
    gone = [d for d in summed.inputs[0].shape if d not in summed.output.shape]
    if len(gone) != 1:
        return None
    inside, outside = (_unshifted(y, gone[0]) for y in (op_of(_bare(summed.inputs[0])).inputs[0], rest))
    return (inside, gone[0]) if inside is outside else None


def _unshifted(x: Tensor, memory: Dimension) -> Tensor:
    """Scores before subtraction of their maximum, which does not change the softmax."""
    op = op_of(_bare(x))
    if op.opdef.name == "subtract" and memory not in op.inputs[1].shape:
        peak = op_of(_bare(op.inputs[1], "stop_gradient"))
        while peak.opdef.name in ("maximum", "where"):  # guard for fully masked rows
            peak = op_of(
                _bare(next((y for y in peak.inputs if number_of(y) is None and y.dtype.is_float), peak.output))
            )
            if peak.opdef.name not in ("maximum", "where", "reduce_max"):
                break
        if peak.opdef.name == "reduce_max":
            return _bare(op.inputs[0])
    return _bare(x)


def _product(x: Tensor, memory: Dimension, pattern: _ScorePattern) -> tuple[Tensor, Tensor, Shape] | None:
    """(queries, keys, result shape) of the product that computes scores, apart from a scale and masks."""
    while True:
        x = _bare(x)
        op = op_of(x)
        name = op.opdef.name
        numbers = [number_of(y) for y in op.inputs]
        if name == "multiply" and (n := next((i for i in (0, 1) if numbers[i] is not None), None)) is not None:
            pattern.scale *= float(numbers[n])
            x = op.inputs[1 - n]
        elif name == "divide" and numbers[1]:
            pattern.scale /= float(numbers[1])
            x = op.inputs[0]
        elif name == "where" and _hides(numbers[2], pattern.scale):
            pattern.flags.append(op.inputs[0])
            x = op.inputs[1]
        elif name == "where" and _hides(numbers[1], pattern.scale):
            pattern.flags.append(negated(op.inputs[0]))
            x = op.inputs[2]
        elif name in ("add", "subtract") and (hidden := _hiding(op, pattern.scale)) is not None:
            x, flag = hidden
            pattern.flags.append(flag)
        elif name == "einsum":
            return _sides(op.inputs, op.output.shape, memory, pattern)
        else:
            return None


def _hiding(op: Operation, scale: float) -> tuple[Tensor, Tensor] | None:
    """For scores plus or minus a bias of 0 or very low values: the scores, and flags of the visible keys.

    The sum is multiplied by `scale` afterwards.
    """
    added = op.opdef.name == "add"
    for x, bias in (op.inputs, op.inputs[::-1])[: 2 if added else 1]:
        seen = _seen(bias, scale if added else -scale)
        if seen is not None:
            return _unmasked(x, seen), seen
    return None


def _seen(bias: Tensor, scale: float) -> Tensor | None:
    """Flags that are true where a bias is 0, if it masks everything else when multiplied by `scale`."""
    op = op_of(_bare(bias))
    if op.opdef.name == "where":
        flag, numbers = op.inputs[0], [number_of(y) for y in op.inputs[1:]]
        if numbers[0] == 0 and _hides(numbers[1], scale):
            return flag
        return negated(flag) if numbers[1] == 0 and _hides(numbers[0], scale) else None
    if op.opdef.name == "table":
        array = op.attrs["value"].array
        with bias.graph:
            whole = ((array == 0) | (scale * array <= HIDING)).all()
            return known(array == 0, op.output.shape, "bool") if whole else None
    if op.opdef.name == "multiply":
        for side, factor in (op.inputs, op.inputs[::-1]):
            if _hides(number_of(factor), scale) and (hidden := _indicated(side)) is not None:
                return negated(hidden)
    return None


def _hides(number: float | None, scale: float) -> bool:
    return number is not None and lowest(scale * number)


def _indicated(t: Tensor) -> Tensor | None:
    """The flags behind a 0/1 tensor; integers that are cast are taken to be 0 or 1."""
    op = op_of(_bare(t))
    numbers = [number_of(y) for y in op.inputs]
    if op.opdef.name == "subtract" and numbers[0] == 1:
        rest = _indicated(op.inputs[1])
        return None if rest is None else negated(rest)
    if op.opdef.name == "where" and sorted(n for n in numbers[1:] if n is not None) == [0, 1]:
        return op.inputs[0] if numbers[1] == 1 else negated(op.inputs[0])
    if op.opdef.name == "cast" and not op.inputs[0].dtype.is_float:
        (flags,) = op.inputs
        return flags if flags.dtype.name == "bool" else not_equal(flags, 0)
    return None


def _unmasked(x: Tensor, seen: Tensor) -> Tensor:
    """Scores before masked ones were also multiplied by 0, as in s m - 1e10 (1 - m)."""
    op = op_of(_bare(x))
    if op.opdef.name == "multiply":
        for scores, factor in (op.inputs, op.inputs[::-1]):
            if _indicated(factor) is seen:
                return scores
    return x


def _sides(
    sides: tuple[Tensor, ...], pairs: Shape, memory: Dimension, pattern: _ScorePattern
) -> tuple[Tensor, Tensor, Shape] | None:
    a, b = sides
    if (memory in a.shape) == (memory in b.shape):
        return None
    q, k = (b, a) if memory in a.shape else (a, b)
    return _unscaled(q, pattern), _unscaled(k, pattern), pairs


def _unscaled(x: Tensor, pattern: _ScorePattern) -> Tensor:
    """Queries or keys before scaling and before widening for their product."""
    while True:
        op = op_of(x)
        if op.opdef.name == "cast" and op.inputs[0].dtype.is_float and op.inputs[0].dtype.itemsize <= x.dtype.itemsize:
            x = op.inputs[0]
            continue
        numbers = [number_of(y) for y in op.inputs]
        if op.opdef.name == "multiply" and (n := next((i for i in (0, 1) if numbers[i] is not None), None)) is not None:
            pattern.scale *= float(numbers[n])
            x = op.inputs[1 - n]
        elif op.opdef.name == "divide" and numbers[1]:
            pattern.scale /= float(numbers[1])
            x = op.inputs[0]
        else:
            return x


# ---------------------------------------------------------------- the kernel


def _before_widening(v: Tensor) -> Tensor:
    """The operand of a cast to a wider float dtype; other tensors as they are."""
    op = op_of(v)
    source = op.inputs[0] if op.opdef.name == "cast" else v
    return source if source.dtype.is_float and source.dtype.itemsize < v.dtype.itemsize else v


def _value_dims(q: Tensor, k: Tensor, v: Tensor, contracted: list[Dimension]) -> list[Dimension]:
    """Feature dims of the values: those absent from keys, otherwise the keys' own; [] if queries have one of them."""
    own = [d for d in v.shape if d not in k.shape]
    if own:
        return own if {*own}.isdisjoint(q.shape) else []
    return contracted if {*contracted} <= {*v.shape} else []


def _written(
    q: Tensor, k: Tensor, v: Tensor, contracted: list[Dimension], memory: Dimension, pattern: _ScorePattern
) -> Tensor | None:
    v = _before_widening(v)
    of_values = _value_dims(q, k, v, contracted)
    lengths = [d for d in q.shape if d not in k.shape]
    batch = [d for d in k.shape if d not in contracted and d != memory]
    if not (contracted and of_values and lengths and {*batch} <= {*q.shape} and _fits(pattern, q, k)):
        return None
    length = _length(lengths, memory, pattern.flags)
    seen = seen_by(pattern.flags, length, memory)
    dtype = max((pattern.dtype, q.dtype, k.dtype, v.dtype), key=lambda t: t.itemsize)
    q, k, v = (cast(t, dtype) for t in (q, k, v))
    if len(v.shape) != len(batch) + 1 + len(of_values):
        v = broadcast(v, [*batch, memory, *of_values])
    key, value = _joined(contracted), _joined(of_values)
    q, k, v = _merged(q, contracted, key), _merged(k, contracted, key), _merged(v, of_values, value)
    if value.name == key.name and value != key:  # slices of one dim, which have its name
        v, value = rename_dimension(v, value.name, f"value_{value.name}"), Dimension(f"value_{value.name}", value.size)
    mask = reduce(logical_and, seen.masks) if seen.masks else None
    y = attention(q, k, v, length, memory, key, value, seen.causal, seen.window, pattern.scale, mask)
    if [value] != of_values:
        y = reshape(y, [*(d for d in y.shape if d != value), *of_values])
    return y


def _fits(pattern: _ScorePattern, q: Tensor, k: Tensor) -> bool:
    """True if the scale is finite, and flags have dims of queries and keys alone."""
    visible = {*q.shape.names, *k.shape.names}
    return math.isfinite(pattern.scale) and all({*f.shape.names} <= visible for f in pattern.flags)


def _length(lengths: list[Dimension], memory: Dimension, flags: list[Tensor]) -> Dimension:
    """The queries' dim: one that masks relate to the keys' dim, or one of equal size, or the largest."""
    if len(lengths) == 1:
        return lengths[0]
    for d in lengths:
        if seen_by(flags, d, memory).causal or seen_by(flags, d, memory).window:
            return d
    related = [d for d in lengths if d.name in memory.name]
    return (related or [d for d in lengths if d.size == memory.size] or sorted(lengths, key=lambda d: -d.size))[0]


def _joined(dims: list[Dimension]) -> Dimension:
    return dims[0] if len(dims) == 1 else Dimension("_".join(d.name for d in dims), math.prod(d.size for d in dims))


def _merged(t: Tensor, dims: list[Dimension], one: Dimension) -> Tensor:
    """`t` with several dims merged, in this order."""
    if len(dims) == 1:
        return t
    rest = [d for d in t.shape if d not in dims]
    return reshape(broadcast(t, [*rest, *dims]), [*rest, one])
