"""Ranges of an axis put back together to its length, as in `u.at[1:-1].add(u[2:] - u[:-2])` or a padded stencil.

The blocks of a split axis do not divide the length of a range such as `u[1:-1]`. Functions of ranges are therefore
computed over the whole axis, each range as a shift of the value that it was cut from, and the parts of the result are
selected by position. Outside a range a shift has zeros; operands of functions that may not be finite there, or whose
gradients may not be, have ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple, TypeAlias

import numpy as np

from layouts import Dimension, Shape
from meshlib.core.graph import Operation, Tensor
from meshlib.core.opdef import Kind
from meshlib.jax.importing.code import CodeStep
from meshlib.ops.building import build
from meshlib.ops.control.sources import CONSTANT, beside, constant_like, constant_shaped
from meshlib.ops.movement.indexing import RANGE
from meshlib.ops.movement.indexing import range as positions
from meshlib.ops.movement.runs import CONCAT, PAD, SHIFT, SLICE, shift
from meshlib.ops.movement.shape import BROADCAST, RENAME, RESHAPE, TRANSPOSE, broadcast, rename_dimension
from meshlib.ops.movement.tables import TABLE, table
from meshlib.ops.pointwise.arithmetic import less, subtract, where
from meshlib.ops.pointwise.casts import cast

# Operations that are finite, with their gradients, where operands are zero.
_FINITE = (
    *("abs", "add", "add_n", "cast", "ceil", "cos", "equal", "erf", "floor", "greater", "greater_equal", "less"),
    *("less_equal", "logical_and", "logical_not", "logical_or", "maximum", "minimum", "multiply", "negative"),
    *("not_equal", "relu", "relu_grad", "round", "sigmoid", "sign", "sin", "square", "subtract", "tanh", "where"),
)
_ALONG_ANOTHER = (SLICE, SHIFT, PAD)  # along one dim; element by element along all others


Run: TypeAlias = tuple[int, int, int]  # (first index, count, stride)


class Part(NamedTuple):
    """Elements [begin, end) of a result: element i is element i - `offset` of a value, or a number."""

    begin: int
    end: int
    value: Tensor | float
    offset: int = 0


class _Range(NamedTuple):
    """Elements of a tensor from `begin` on, along one dim of it."""

    whole: Tensor
    dim: str
    begin: int


def runs_of(step: CodeStep) -> list[Run]:
    """The range of each axis that a slice takes."""
    starts, limits = step.params["start_indices"], step.params["limit_indices"]
    strides = step.params["strides"] or [1] * len(starts)
    return [(int(a), -(-(int(b) - int(a)) // int(s)), int(s)) for a, b, s in zip(starts, limits, strides, strict=True)]


def pads_of(step: CodeStep) -> list[tuple[int, int, int]]:
    """(before, after, between elements) of each axis that a pad adds."""
    return [(int(low), int(high), int(between)) for low, high, between in step.params["padding_config"]]


def concatenated(values: Sequence[Tensor | float], sizes: Sequence[int]) -> list[Part]:
    """The parts of a concatenation."""
    ends = list(accumulate(sizes))
    return [Part(end - n, end, x, end - n) for x, n, end in zip(values, sizes, ends, strict=True)]


def restored(parts: Sequence[Part], dim: Dimension, like: Tensor) -> Tensor | None:
    """A result that consists of parts along a dim, each computed over the whole dim; None if that is impossible.

    It is possible if every part is a function of ranges of values with the whole dim. Unless they are one shift of a
    value, such as `jnp.roll`, a part must be longer than half the dim: it is computed over the whole of it.

    Args:
      parts: all parts, in order, some of them possibly empty; tensors have the dim, with any number of elements.
      like: a tensor with the dtype and, but for the size of `dim`, the dims of the result.
    """
    parts = [p for p in parts if p.begin < p.end]
    result = _shifted(parts, dim)
    longest = max([p.end - p.begin for p in parts if isinstance(p.value, Tensor)], default=0)
    if result is None and 2 * longest > dim.size:
        result = _selected(parts, dim, like)
    return None if result is None else broadcast(result, like.shape.resize(dim.name, dim.size))


def _shifted(parts: Sequence[Part], dim: Dimension) -> Tensor | None:
    """The shift of one tensor that equals the parts, if any: zeros enter, or the elements of the other end."""
    tensors = [(p, p.value) for p in parts if isinstance(p.value, Tensor)]
    moves = {}
    for p, t in tensors:
        cut = _range(t, dim.name, dim.size)
        if cut is None:
            return None
        moves[cut.whole, cut.dim, (p.offset - cut.begin) % dim.size] = p.offset - cut.begin
    if len(moves) != 1:
        return None
    (((whole, name, _), offset),) = moves.items()
    inside = tensors[0][0].begin, tensors[-1][0].end
    if all(p.value == 0 for p in parts if not isinstance(p.value, Tensor)) and inside == (
        max(0, offset),
        dim.size + min(0, offset),
    ):
        return _renamed(shift(whole, offset, name, wrap=False), name, dim.name)
    wraps = len(tensors) == len(parts)
    return _renamed(shift(whole, offset, name, wrap=True), name, dim.name) if wraps else None


def restored_range(t: Tensor, begin: int, dim: Dimension) -> Tensor | None:
    """Elements of a concatenated or padded tensor from `begin` on; see `restored`."""
    pieces = _pieces(t, dim.name)
    if len(pieces) == 1:
        return None
    moved = [Part(max(p.begin - begin, 0), min(p.end - begin, dim.size), p.value, p.offset - begin)
             for p in concatenated(*zip(*pieces, strict=True))]  # fmt: skip
    return restored(moved, dim, t)


def _pieces(t: Tensor, name: str) -> list[tuple[Tensor | float, int]]:
    """The parts from which a tensor was concatenated and padded along a dim, with sizes."""
    op = t.operation
    while op.opdef is TRANSPOSE:
        op = op.inputs[0].operation
    if op.opdef is CONCAT and op.attrs["dim"] == name:
        return [piece for x in op.inputs for piece in _pieces(x, name)]
    if op.opdef is PAD and op.attrs["dim"] == name:
        before, after = ((op.attrs["value"], op.attrs[side]) for side in ("before", "after"))
        return [before, *_pieces(op.inputs[0], name), after]
    return [(t, t.shape.dim(name).size)]


def _selected(parts: Sequence[Part], dim: Dimension, like: Tensor) -> Tensor | None:
    """The parts, selected by position."""
    result: Tensor | None = None
    for p in reversed(parts):
        if isinstance(p.value, Tensor):
            size = p.value.shape.dim(dim.name).size
            whole = _Whole(dim, size == 1).of(p.value, dim.name, p.offset)
        else:
            whole = constant_like(p.value, like, like.dtype)
        if whole is None:
            return None
        result = whole if result is None else where(less(positions(dim), p.end), whole, result)
    return result


def _range(t: Tensor, name: str | None, size: int) -> _Range | None:
    """The tensor, with a dim of this size, of which a tensor is a range, if it is one without further operations.

    `name`: the dim of the range; None if a single element was taken and its dim dropped.
    """
    count = 1 if name is None else t.shape.dim(name).size
    cut: tuple[Tensor, str | None, int] | None = (t, name, 0)
    first: _Range | None = None
    while cut is not None:
        t, name, begin = cut
        if name is not None and t.shape.dim(name).size == size:
            first = _Range(t, name, begin)
        cut = _cut_from(t, name, begin, count)
    return first


def _cut_from(t: Tensor, name: str | None, begin: int, count: int) -> tuple[Tensor, str | None, int] | None:
    """(operand, dim, first element) where `count` elements of an operation's result are elements of that operand."""
    op = t.operation
    if name is not None and op.opdef in (CONCAT, PAD, SLICE, SHIFT) and op.attrs["dim"] == name:
        for x, start in zip(op.inputs, _starts(op, name), strict=True):
            if start <= begin and begin + count <= start + x.shape.dim(name).size:
                return x, name, begin - start
        return None
    if op.opdef is RENAME:
        return op.inputs[0], op.attrs["old"] if op.attrs["new"] == name else name, begin
    if op.opdef is RESHAPE and name is None:
        gone = _dropped(op.inputs[0], t)
        return None if gone is None else (op.inputs[0], gone, begin)
    if op.opdef is RESHAPE and name == _dropped(t, op.inputs[0]):
        return op.inputs[0], None, begin
    if op.opdef not in (TRANSPOSE, BROADCAST) or (count > 1 and name not in op.inputs[0].shape):
        return None
    return op.inputs[0], name if name in op.inputs[0].shape else None, begin


def _starts(op: Operation, name: str) -> list[int]:
    """The index in the result at which each operand of a concat, pad, slice or shift begins."""
    if op.opdef is CONCAT:
        return [p.begin for p in concatenated(op.inputs, [x.shape.dim(name).size for x in op.inputs])]
    of = {PAD: "before", SLICE: "begin", SHIFT: "offset"}[op.opdef]
    return [-op.attrs[of] if op.opdef is SLICE else op.attrs[of]]


def _dropped(x: Tensor, y: Tensor) -> str | None:
    """The dim of one element that a reshape of `x` to `y` drops, if it does nothing else."""
    gone = [d for d in x.shape if d not in y.shape]
    return gone[0].name if len(gone) == 1 and gone[0].size == 1 and len(x.shape) == len(y.shape) + 1 else None


def _renamed(t: Tensor, old: str, new: str) -> Tensor | None:
    """`t` with a dim renamed; None if it has another dim of that name."""
    return None if old != new and new in t.shape else rename_dimension(t, old, new)


class _Whole:
    """Computes functions of ranges over a whole dim.

    `single`: whether the ranges have one element, whose dim may have been dropped.
    """

    def __init__(self, dim: Dimension, single: bool) -> None:
        self.dim, self.single = dim, single
        self._known: dict[tuple[Tensor, str | None, int], Tensor | None] = {}

    def of(self, t: Tensor, name: str | None, offset: int) -> Tensor | None:
        """`t` over the whole dim, which is `name` in `t`: element i there is element i - `offset` of `t`.

        Returned without the dim if it does not vary along it; None if it is not a function of ranges.
        """
        key = (t, name, offset)
        if key not in self._known:
            whole = t if name is not None and name not in t.shape else self._moved(t, name, offset)
            self._known[key] = t if whole is None and name is None else whole
        return self._known[key]

    def _moved(self, t: Tensor, name: str | None, offset: int) -> Tensor | None:
        cut = _range(t, name, self.dim.size)
        if cut is not None:
            return _renamed(shift(cut.whole, offset - cut.begin, cut.dim, wrap=False), cut.dim, self.dim.name)
        if name != self.dim.name and self.dim.name in t.shape:
            return None
        op = t.operation
        if not op.inputs:
            return None if name is None else self._source(t, name, offset)
        if op.opdef in (TRANSPOSE, BROADCAST):
            dropped = self.single and name is not None and name not in op.inputs[0].shape
            return self.of(op.inputs[0], None if dropped else name, offset)
        if op.opdef is RESHAPE and name is None:
            gone = _dropped(op.inputs[0], t)
            return None if gone is None else self.of(op.inputs[0], gone, offset)
        if op.opdef is RENAME and op.attrs["new"] == name:
            return self.of(op.inputs[0], op.attrs["old"], offset)
        if op.opdef is SLICE and op.attrs["dim"] == name:
            return self.of(op.inputs[0], name, offset - op.attrs["begin"])
        return self._by_element(t, name, offset)

    def _by_element(self, t: Tensor, name: str | None, offset: int) -> Tensor | None:
        """An operation whose element at a position along the dim depends on those of its operands there."""
        op = t.operation
        along = op.attrs["old"] if op.opdef is RENAME else op.attrs["dim"] if op.opdef in _ALONG_ANOTHER else None
        by_element = op.opdef.kind is Kind.ELEMENTWISE and op.opdef.name != "one_hot"
        if not by_element and along in (None, name):
            return None
        wholes = [w for w in [self.of(x, name, offset) for x in op.inputs] if w is not None]
        if len(wholes) < len(op.inputs):
            return None
        if along is not None and along not in wholes[0].shape:
            return wholes[0]
        if along is None and op.opdef.name not in _FINITE:
            size = 1 if name is None else t.shape.dim(name).size
            wholes = [self._inside(w, offset, size) for w in wholes]
        return build(op.opdef, wholes, op.attrs)

    def _inside(self, whole: Tensor, offset: int, size: int) -> Tensor:
        """A value with ones outside of `size` elements from `offset` on."""
        if self.dim.name not in whole.shape:
            return whole
        one, at = constant_like(1, whole, whole.dtype), positions(self.dim)
        return where(less(at, offset), one, where(less(at, offset + size), whole, one))

    def _source(self, t: Tensor, name: str, offset: int) -> Tensor | None:
        """Constants, positions, and known elements, which are repeated at both ends."""
        op = t.operation
        if op.opdef is CONSTANT:
            return constant_shaped(op.attrs["value"], Shape([d for d in t.shape if d.name != name]), t)
        if op.opdef is RANGE:
            return cast(subtract(positions(self.dim), offset), t.dtype)
        if op.opdef is not TABLE:
            return None
        axis, array = t.shape.index(name), op.attrs["value"].array
        at = np.clip(np.arange(self.dim.size) - offset, 0, array.shape[axis] - 1)
        dims = [self.dim if d.name == name else d for d in t.shape]
        return table(beside(t), np.take(array, at, axis), Shape(dims), t.dtype, None)
