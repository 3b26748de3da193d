"""Element-wise operations of two tensors, broadcast by name: arithmetic, comparisons, bounds; the sum of a list."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from layouts import Dimension, Shape
from meshlib.core.arguments import at, items
from meshlib.core.errors import ShapeError
from meshlib.core.graph import Operation, Tensor
from meshlib.core.opdef import TRANSCENDENTAL_OPS, Array, Combination, Linear, PowerProduct, ShapeRule
from meshlib.ops.building import as_tensor, build, tensor
from meshlib.ops.pointwise.elementwise import (
    COMPARED,
    FLAGS,
    FLOATS,
    INTEGERS,
    NUMBERS,
    ORDERED,
    Binary,
    broadcast_to,
    define,
    described,
    reduce_to,
)
from meshlib.ops.pointwise.selection import where
from meshlib.ops.pointwise.unary import log, square
from meshlib.ops.rules import not_differentiable

Side = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


_EXAMPLES: dict[ShapeRule, tuple[str, list[tuple[Any, Any]]]] = {
    FLAGS: ("bool", [(True, True), (True, False)]),
    INTEGERS: ("int32", [(7, 2), (2, 3)]),
}


def _binary(
    name: str,
    doc: str,
    function: Callable[..., Any],
    *sides: Side,
    note: str = "",
    ops: int = 1,
    shape: ShapeRule = NUMBERS,
    **traits: Any,
) -> Binary:
    """Define an operation; `sides(x1, x2, y, dy)` are the cotangents of x1 and x2, before they are summed down."""

    def grad(op: Operation, dy: Tensor) -> list[Tensor | None]:
        x1, x2 = op.inputs
        return [reduce_to(side(x1, x2, op.output, dy), x.shape) for side, x in zip(sides, op.inputs, strict=True)]

    kind = define(name, function, grad if sides else not_differentiable, shape, ops, **traits)

    def public(
        x1: Tensor | float,
        x2: Tensor | float,
        output_shape: Shape | Sequence[Dimension] | None = None,
        name: str | None = None,
    ) -> Tensor:
        like = x1 if isinstance(x1, Tensor) else x2 if isinstance(x2, Tensor) else None
        operands = [as_tensor(x, like, kind.name) for x in (x1, x2)]
        return broadcast_to(build(kind, operands, {}, name), output_shape)

    public.__name__ = public.__qualname__ = name
    of_one_dtype, pair = _EXAMPLES.get(shape, ("one dtype", [(7.0, 2.0), (2.0, 2.0)]))
    public.__doc__ = described(
        f"{doc}, broadcast by name{note}", name, function,
        dict(zip(("x1", "x2"), pair, strict=True)),
        f"  x1, x2: tensors of {of_one_dtype}, or one of them a number; dims are matched by name.\n"
        "  output_shape: the dims of the result in this order; by default those of x1, then the other dims of x2.",
    )  # fmt: skip
    return public


_compare = partial(_binary, note="; bool", shape=COMPARED)
_of_bits = partial(_binary, note="; int32", shape=INTEGERS, repeated=True)
_WHOLE = "; a negative x2, or one above 31, moves all of them out; int32"
_together: dict[str, Any] = {"linear": lambda op: Linear((0, 1), together=True), "repeated": True}

less = _compare("less", "x1 < x2", np.less)
less_equal = _compare("less_equal", "x1 <= x2", np.less_equal)
greater = _compare("greater", "x1 > x2", np.greater)
greater_equal = _compare("greater_equal", "x1 >= x2", np.greater_equal)
equal = _compare("equal", "x1 == x2", np.equal)
not_equal = _compare("not_equal", "x1 != x2", np.not_equal)
logical_and = _binary("logical_and", "x1 and x2", np.logical_and, note="; bool", shape=FLAGS)
logical_or = _binary("logical_or", "x1 or x2", np.logical_or, note="; bool", shape=FLAGS)
bitwise_and = _of_bits("bitwise_and", "The bits that are set in both operands", np.bitwise_and)
bitwise_or = _of_bits("bitwise_or", "The bits that are set in either operand", np.bitwise_or)
bitwise_xor = _of_bits("bitwise_xor", "The bits that are set in one operand alone", np.bitwise_xor)
left_shift = _of_bits("left_shift", "The bits of x1 moved up by x2", np.left_shift, note="; zeros from below" + _WHOLE)
right_shift = _of_bits(
    "right_shift", "The bits of x1 moved down by x2", np.right_shift, note="; copies of its sign from above" + _WHOLE
)
add = _binary(
    "add",
    "x1 + x2",
    np.add,
    lambda x1, x2, y, dy: dy,
    lambda x1, x2, y, dy: dy,
    form=lambda op: Combination((1.0, 1.0)),
    **_together,
)
subtract = _binary(
    "subtract",
    "x1 - x2",
    np.subtract,
    lambda x1, x2, y, dy: dy,
    lambda x1, x2, y, dy: -dy,
    form=lambda op: Combination((1.0, -1.0)),
    **_together,
)
sub = subtract  # Mesh TensorFlow's name
multiply = _binary(
    "multiply",
    "x1 * x2",
    np.multiply,
    lambda x1, x2, y, dy: dy * x2,
    lambda x1, x2, y, dy: dy * x1,
    linear=lambda op: Linear((0, 1)),
    form=lambda op: PowerProduct((1, 1)),
    repeated=True,
)
divide = _binary(
    "divide",
    "x1 / x2",
    np.divide,
    lambda x1, x2, y, dy: dy / x2,
    lambda x1, x2, y, dy: -(dy * y / x2),
    note="; float dtypes",
    ops=TRANSCENDENTAL_OPS,
    shape=FLOATS,
    linear=lambda op: Linear((0,)),
    form=lambda op: PowerProduct((1, -1)),
    repeated=True,
)
maximum = _binary(
    "maximum",
    "The larger",
    np.maximum,
    lambda x1, x2, y, dy: where(greater_equal(x1, x2), dy, 0.0),
    lambda x1, x2, y, dy: where(greater_equal(x1, x2), 0.0, dy),
    note="; at a tie the gradient goes to x1",
    shape=ORDERED,
    exact=True,
)
minimum = _binary(
    "minimum",
    "The smaller",
    np.minimum,
    lambda x1, x2, y, dy: where(less_equal(x1, x2), dy, 0.0),
    lambda x1, x2, y, dy: where(less_equal(x1, x2), 0.0, dy),
    note="; at a tie the gradient goes to x1",
    shape=ORDERED,
    exact=True,
)
pow: Binary = _binary(
    "pow",
    "x1 to the power x2",
    np.power,
    lambda x1, x2, y, dy: dy * x2 * pow(x1, x2 - 1),
    lambda x1, x2, y, dy: dy * y * log(where(greater(x1, 0), x1, 1)),
    note="; float dtypes",
    ops=2 * TRANSCENDENTAL_OPS,
    shape=FLOATS,
)
floordiv = _binary(
    "floordiv",
    "floor(x1 / x2)",
    np.floor_divide,
    note="; int32 stays int32; passes no gradient",
    ops=TRANSCENDENTAL_OPS,
)
mod = _binary(
    "mod",
    "x1 - x2 floor(x1 / x2)",
    np.mod,
    lambda x1, x2, y, dy: dy,
    lambda x1, x2, y, dy: -(dy * floordiv(x1, x2)),
    note="; of the sign of x2, as in Python",
    ops=TRANSCENDENTAL_OPS,
)


def _add_all(x: Array, y: Array, *more: Array, out: Array) -> None:
    np.add(x, y, out=out)
    for z in more:
        np.add(out, z, out=out)


# As much work as pairwise sums: one less than there are operands.
_ADD_N = define(
    "add_n",
    _add_all,
    lambda op, dy: [reduce_to(dy, x.shape) for x in op.inputs],
    NUMBERS,
    linear=lambda op: Linear(tuple(range(len(op.inputs))), together=True),
    form=lambda op: Combination((1.0,) * len(op.inputs)),
    overwrites=2,  # the others are read after the first sum is written
)


def add_n(xs: Sequence[Tensor], name: str | None = None) -> Tensor:
    """The sum of a list of tensors, broadcast by name. Pending sums among them are reduced once, together.

    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.add_n([mtf.input("x", "d:2"), mtf.ones("d:2"), mtf.ones("d:2")])
      >>> print(mtf.simulate(mtf.lower({"y": y})).step(x=[3.0, 4.0])["y"])
      [5. 6.]
    """
    xs = items(xs, "add_n", "xs")
    if not xs:
        raise ShapeError(f"{at('add_n')}: needs at least one tensor, got an empty list")
    if len(xs) == 1:
        return tensor(xs[0], "add_n")
    return build(_ADD_N, [tensor(x, "add_n") for x in xs], {}, name)


def squared_difference(
    x1: Tensor | float,
    x2: Tensor | float,
    output_shape: Shape | Sequence[Dimension] | None = None,
    name: str | None = None,
) -> Tensor:
    """(x1 - x2)^2, broadcast by name.

    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.squared_difference(mtf.input("x", "d:2"), 1.0)
      >>> print(mtf.simulate(mtf.lower({"y": y})).step(x=[3.0, 4.0])["y"])
      [4. 9.]
    """
    return square(subtract(x1, x2, output_shape), name)


def clip_by_value(
    x: Tensor, clip_value_min: Tensor | float, clip_value_max: Tensor | float, name: str | None = None
) -> Tensor:
    """`x`, but at least `clip_value_min` and at most `clip_value_max`, broadcast by name; gradient 1 at both bounds.

    Raises: ShapeError if both bounds are numbers and the lower one is the larger.
    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.clip_by_value(mtf.input("x", "d:2"), 0.0, 3.5)
      >>> print(mtf.simulate(mtf.lower({"y": y})).step(x=[3.0, 4.0])["y"])
      [3.  3.5]
    """
    like = tensor(x, "clip_by_value")
    low, high = (as_tensor(v, like, "clip_by_value") for v in (clip_value_min, clip_value_max))
    if not isinstance(clip_value_min, Tensor) and not isinstance(clip_value_max, Tensor):
        bounds = [v.operation.attrs["value"] for v in (low, high)]
        if bounds[0] > bounds[1]:
            raise ShapeError(f"{at('clip_by_value')}: clip_value_min is {bounds[0]}, but clip_value_max {bounds[1]}")
    return minimum(maximum(x, low), high, name=name)
