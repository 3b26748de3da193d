"""Recognition of flags computed from positions: conditions, one-hots, causal masks and windows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from layouts import Dimension, Shape
from meshlib.core.dtypes import BOOL, INT32
from meshlib.core.graph import Operation, Tensor
from meshlib.jax.importing.code import Array
from meshlib.jax.importing.table import Operand
from meshlib.ops.control.sources import constant
from meshlib.ops.movement.indexing import RANGE, one_hot
from meshlib.ops.movement.indexing import range as positions
from meshlib.ops.pointwise.arithmetic import greater_equal, logical_and, logical_not
from meshlib.ops.pointwise.casts import cast

# Scores this low have no weight in a softmax with others: exp(-10000 + 9900) is 0 in float32.
HIDING = -1e4


def op_of(t: Tensor) -> Operation:
    """The operation that computes a tensor; for a tensor captured by a loop, the one outside."""
    while (body := t.graph.loop_body) is not None and body.captured.get(body.outside.get(t, t)) is t:
        t = body.outside[t]
    return t.operation


def number_of(x: Operand) -> Any:
    """The number that all elements of a constant tensor equal; None for other tensors."""
    if not isinstance(x, Tensor):
        return x
    op = op_of(x)
    return op.attrs["value"] if op.opdef.name == "constant" else None


def condition_of(x: Operand, y: Operand, holds: Callable[[Any, Any], Any]) -> Tensor | None:
    """The flags that a comparison reduces to, if it compares a selection between two numbers with a third number."""
    if isinstance(y, Tensor):
        return condition_of(y, x, lambda a, b: holds(b, a)) if not isinstance(x, Tensor) else None
    if not isinstance(x, Tensor):
        return None
    op = op_of(x)
    if op.opdef.name == "where":
        flags, (if_true, if_false) = op.inputs[0], map(number_of, op.inputs[1:])
    elif op.opdef.name == "cast" and op.inputs[0].dtype is BOOL:
        flags, if_true, if_false = op.inputs[0], 1, 0
    elif x.dtype is BOOL:
        flags, if_true, if_false = x, True, False
    else:
        return None
    if if_true is None or if_false is None:
        return None
    yes, no = bool(holds(if_true, y)), bool(holds(if_false, y))
    if yes == no:
        return None
    return flags if yes else negated(flags)


def negated(flags: Tensor) -> Tensor:
    """Logical negation."""
    op = op_of(flags)
    return op.inputs[0] if op.opdef.name == "logical_not" else logical_not(flags)


def hot(x: Tensor, dtype: str) -> Tensor | None:
    """The one-hot that a cast of `index == position` computes; None for other tensors."""
    op = op_of(x)
    if op.opdef.name != "equal":
        return None
    for index, place in (op.inputs, op.inputs[::-1]):
        if op_of(place).opdef is RANGE and index.dtype is INT32 and place.shape[0] not in index.shape:
            return one_hot(index, place.shape[0], dtype=dtype, out_of_range="zero")
    return None


# ---------------------------------------------------------------- known elements


def known(array: Array, shape: Shape, dtype: str) -> Tensor:
    """A tensor with known elements: bands of flags and ranges are computed from positions, others are a table."""
    array = array.reshape(shape.sizes)
    if array.ndim == 2 and array.dtype == np.bool_ and (ends := _band(array)) is not None:
        most_ahead, behind = ends
        rows, keys = map(positions, shape)
        sides = [] if most_ahead is None else [greater_equal(_plus(rows, most_ahead), keys)]
        sides += [] if behind is None else [greater_equal(_plus(keys, behind), rows)]
        return sides[0] if len(sides) == 1 else logical_and(sides[0], sides[1])
    if array.ndim == 1 and array.dtype.kind in "iu" and np.array_equal(array, np.arange(array.size)):
        return cast(positions(shape[0]), dtype)
    return constant(array, shape, dtype)


def _band(array: Array) -> tuple[int | None, int | None] | None:
    """(m, n) of a band of flags, true from n columns behind a row to m ahead of it; None for no limit."""
    rows, columns = array.shape
    offsets = np.subtract.outer(np.arange(rows), np.arange(columns)) * -1
    held = offsets[array]
    if not held.size or held.size == array.size:
        return None
    far, near = int(held.max()), int(held.min())
    if not np.array_equal(array, (offsets <= far) & (offsets >= near)):
        return None
    return None if far == columns - 1 else far, None if near == 1 - rows else -near


def _plus(t: Tensor, number: int) -> Tensor:
    return t + number if number else t


# ---------------------------------------------------------------- positions


@dataclass(frozen=True)
class Affine:
    """A linear combination of positions along dims, plus a number."""

    times: tuple[tuple[str, int], ...]
    plus: int

    def __sub__(self, other: Affine) -> Affine:
        return self.added(other, -1)

    def added(self, other: Affine, sign: int) -> Affine:
        """The sum or difference."""
        times = dict(self.times)
        for name, count in other.times:
            times[name] = times.get(name, 0) + sign * count
        return Affine(tuple(sorted((n, c) for n, c in times.items() if c)), self.plus + sign * other.plus)


def affine(t: Tensor) -> Affine | None:
    """An int32 tensor as a linear combination of positions, if it is one."""
    op = op_of(t)
    name = op.opdef.name
    if name == "constant" and float(op.attrs["value"]).is_integer():
        return Affine((), int(op.attrs["value"]))
    if name == "range":
        return Affine(((t.shape[0].name, 1),), 0)
    if name in ("cast", "identity", "broadcast", "transpose", "stop_gradient") and not t.dtype.is_narrow_integer:
        return affine(op.inputs[0])
    if name == "negative":
        inner = affine(op.inputs[0])
        return None if inner is None else Affine((), 0).added(inner, -1)
    if name in ("add", "subtract"):
        a, b = map(affine, op.inputs)
        return None if a is None or b is None else a.added(b, 1 if name == "add" else -1)
    if name == "rename_dimension":
        inner = affine(op.inputs[0])
        if inner is None:
            return None
        swap = {op.attrs["old"]: op.attrs["new"]}
        return Affine(tuple(sorted((swap.get(n, n), c) for n, c in inner.times)), inner.plus)
    return None


@dataclass(frozen=True)
class Seen:
    """Keys visible to queries: causal or not, within a window, and where all of `masks` hold."""

    causal: bool
    window: int | None
    masks: tuple[Tensor, ...]


def seen_by(flags: list[Tensor], length: Dimension, memory: Dimension) -> Seen:
    """The combined meaning of flags over queries and keys."""
    behind: int | None = None  # how far back a query sees, at most
    most_ahead: int | None = None
    masks: list[Tensor] = []
    for flag in (part for f in flags for part in conjuncts(f)):
        reach = _reach(flag, length.name, memory.name)
        if reach is None:
            masks.append(flag)
        elif reach[0] == "behind":
            behind = reach[1] if behind is None else min(behind, reach[1])
        else:
            most_ahead = reach[1] if most_ahead is None else min(most_ahead, reach[1])
    causal = most_ahead == 0
    if most_ahead is None and behind is None:
        return Seen(False, None, tuple(masks))
    if causal and behind is None:
        return Seen(True, None, tuple(masks))
    if behind is not None and behind >= 0 and (causal or most_ahead == behind):
        return Seen(causal, behind + 1, tuple(masks))
    return Seen(False, None, tuple(flags))


def conjuncts(flag: Tensor) -> Iterator[Tensor]:
    """The flags whose conjunction a flag is."""
    op = op_of(flag)
    if op.opdef.name == "logical_and":
        for part in op.inputs:
            yield from conjuncts(part)
    elif op.opdef.name in ("broadcast", "transpose", "identity"):
        yield from conjuncts(op.inputs[0])
    elif number_of(flag) is not True and number_of(flag) != 1:
        yield flag


_SIGNS = {"greater_equal": (1, 0), "greater": (1, -1), "less_equal": (-1, 0), "less": (-1, -1)}


def _reach(flag: Tensor, length: str, memory: str) -> tuple[str, int] | None:
    """("behind", n) or ("ahead", n) of a flag that limits how far a query sees: memory - length <= n, or reversed."""
    op, negated, names = op_of(flag), False, dict[str, str]()
    while op.opdef.name in ("logical_not", "rename_dimension"):
        if op.opdef.name == "logical_not":
            negated = not negated
        else:
            names[op.attrs["old"]] = names.get(op.attrs["new"], op.attrs["new"])
        op = op_of(op.inputs[0])
    if op.opdef.name not in _SIGNS:
        return None
    a, b = map(affine, op.inputs)
    if a is None or b is None:
        return None
    # the flag as value >= 0
    sign, plus = _SIGNS[op.opdef.name]
    value = Affine((), plus).added(a - b, sign)
    if negated:  # not (v >= 0) is -v - 1 >= 0
        value = Affine((), -1).added(value, -1)
    times = {names.get(n, n): c for n, c in value.times}
    if times == {length: 1, memory: -1}:
        return "ahead", value.plus
    if times == {length: -1, memory: 1}:
        return "behind", value.plus
    return None


def lowest(value: Any) -> bool:
    """True if a number is so low that it masks a score, as its replacement or as a bias."""
    return value is not None and bool(np.asarray(value) <= HIDING)
