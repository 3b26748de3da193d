"""Exclusive or, and `cond`, composed of comparisons and selections."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from layouts import Dimension, Shape
from meshlib.core.arguments import at
from meshlib.core.dtypes import BOOL
from meshlib.core.errors import ShapeError
from meshlib.core.graph import Tensor
from meshlib.ops.building import tensor
from meshlib.ops.pointwise.arithmetic import not_equal, where


def _flags(x: object, what: str) -> Tensor:
    flags = tensor(x, what)
    if flags.dtype is not BOOL:
        raise ShapeError(f"{at(what)}: needs a bool tensor, got {flags}; compare first, as in mtf.not_equal(x, 0)")
    return flags


def logical_xor(
    x1: Tensor, x2: Tensor, output_shape: Shape | Sequence[Dimension] | None = None, name: str | None = None
) -> Tensor:
    """Either x1 or x2, not both; broadcast by name; bool.

    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.logical_xor(mtf.input("x", "d:2", "bool"), mtf.input("y", "d:2", "bool"))
      >>> print(mtf.simulate(mtf.lower({"y": y})).step(x=[True, True], y=[True, False])["y"])
      [False  True]
    """
    return not_equal(_flags(x1, "logical_xor"), _flags(x2, "logical_xor"), output_shape, name)


Branch = Tensor | Sequence[Tensor]


def cond(
    pred: Tensor, true_fn: Callable[[], Branch], false_fn: Callable[[], Branch], name: str | None = None
) -> Tensor | list[Tensor]:
    """The result of `true_fn()` if `pred` is true, else that of `false_fn()`.

    Both branches are always computed and paid for: a program without control flow runs in lockstep on all cores. So a
    branch does not guard: its derivative may be infinite where it is not selected, and 0 times infinity is NaN (select
    a safe operand with `mtf.where` first). To update a variable in one branch only, assign the result:
    `mtf.assign(v, mtf.cond(pred, lambda: new, lambda: v))`.

    Args:
      pred: bool, without dims; `mtf.where` selects per element.
      true_fn, false_fn: functions without arguments, each of a tensor, or each of a list of as many.
      name: of the result, where it is one tensor.
    Returns: a tensor, or a list of them.
    Raises: ShapeError if the branches differ in number, shapes or dtypes.
    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     x = mtf.input("x", "d:2")
      ...     y = mtf.cond(mtf.greater(mtf.reduce_sum(x), 0.0), lambda: x, lambda: -x)
      >>> print(mtf.simulate(mtf.lower({"y": y})).step(x=[-3.0, 1.0])["y"])
      [ 3. -1.]
    """
    if len(_flags(pred, "cond").shape):
        raise ShapeError(f"{at('cond')}: pred must have no dims, got {pred}; mtf.where chooses element by element")
    branches = []
    for argument, function in (("true_fn", true_fn), ("false_fn", false_fn)):
        if not callable(function):
            raise ShapeError(f"{at('cond')}: {argument} must be a function, got {function!r:.80}; write lambda: x")
        branches.append(function())
    for argument, result in zip(("true_fn", "false_fn"), branches, strict=True):
        for x in [result] if not isinstance(result, list | tuple) else result:
            tensor(x, f"cond {argument}()")
    a, b = branches
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return _chosen(pred, a, b, name)
    if isinstance(a, Tensor) or isinstance(b, Tensor) or len(a) != len(b):
        one, other = ("a tensor" if isinstance(x, Tensor) else f"a list of {len(x)}" for x in branches)
        raise ShapeError(f"{at('cond')}: true_fn returns {one}, but false_fn {other}")
    return [_chosen(pred, x, y, None) for x, y in zip(a, b, strict=True)]


def _chosen(pred: Tensor, a: Tensor, b: Tensor, name: str | None) -> Tensor:
    if a.type != b.type:
        raise ShapeError(
            f"{at('cond')}: the branches return different types, {a.type} and {b.type}; give both one type"
        )
    return where(pred, a, b, name="cond" if name is None else name)
