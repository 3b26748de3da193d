"""Changes of several dims at once: replacing, combining, anonymising."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from layouts import Dimension, Shape
from meshlib.core.arguments import at
from meshlib.core.errors import ShapeError
from meshlib.core.graph import Tensor
from meshlib.ops.building import as_dims, tensor
from meshlib.ops.movement.shape import reshape
from meshlib.ops.rules import size_of

Dims = Dimension | Shape | Sequence[Dimension]


TensorOrShape = TypeVar("TensorOrShape", Tensor, Shape)


def replace_dimensions(tensor_or_shape: TensorOrShape, old_dim_or_dims: Dims, new_dim_or_dims: Dims) -> TensorOrShape:
    """A tensor or a shape with neighbouring dims replaced by others of the same number of elements.

    Args:
      tensor_or_shape: a tensor or shape with the dims.
      old_dim_or_dims: consecutive dims, in this order.
      new_dim_or_dims: their replacement; a tensor is reshaped.
    Returns: a tensor for a tensor, a shape for a shape.
    Raises: ShapeError if they are not consecutive, or the tensor's number of elements would change.
    Example:
      >>> import meshlib as mtf
      >>> n, a, b, c = (mtf.Dimension(name, size) for name, size in (("n", 6), ("a", 2), ("b", 3), ("c", 4)))
      >>> print(mtf.replace_dimensions(mtf.Shape([n, c]), n, [a, b]))
      [a:2, b:3, c:4]
    """
    what = "replace_dimensions"
    old, new = as_dims(old_dim_or_dims, what), as_dims(new_dim_or_dims, what)
    if isinstance(tensor_or_shape, Shape):
        return Shape(_replaced(tensor_or_shape, old, new, what))
    dims = _replaced(tensor(tensor_or_shape, what).shape, old, new, what)
    if size_of(old) != size_of(new):
        raise ShapeError(
            f"{at(what)}: {', '.join(map(str, old))} have {size_of(old)} elements in all, but "
            f"{', '.join(map(str, new))} have {size_of(new)}; both must have as many",
            tensor_or_shape,
        )
    return reshape(tensor_or_shape, dims)


def _replaced(shape: Shape, old: Sequence[Dimension], new: Sequence[Dimension], what: str) -> tuple[Dimension, ...]:
    """The dims of a shape with consecutive ones replaced."""
    if not old or not new:
        raise ShapeError(f"{at(what)}: needs at least one old and one new dim")
    begin = shape.dims.index(old[0]) if old[0] in shape else 0
    if shape.dims[begin : begin + len(old)] != tuple(old):
        raise ShapeError(
            f"{at(what)}: the dims {', '.join(map(str, old))} do not follow one another in {shape}; "
            "transpose it with mtf.transpose first"
        )
    return as_dims([*shape.dims[:begin], *new, *shape.dims[begin + len(old) :]], what)


def combined_dimension(dims: Sequence[Dimension], name: str | None = None) -> Dimension:
    """A dim with the product of the sizes of `dims`, named `name` or like the first of them.

    >>> combined_dimension([Dimension("heads", 8), Dimension("d_head", 64)], "d_attention")
    Dimension('d_attention', 512)
    """
    parts = as_dims(dims, "combined_dimension")
    if not parts:
        raise ShapeError(f"{at('combined_dimension')}: needs at least one dim")
    return Dimension(parts[0].name if name is None else name, size_of(parts))


def anonymous_shape(shape: Shape | Sequence[Dimension]) -> Shape:
    """`shape` with dims renamed to names that no layout rule has: `_anonymous_0`, `_anonymous_1`, ...

    >>> print(anonymous_shape(Shape("batch:4;hidden:6")))
    [_anonymous_0:4, _anonymous_1:6]
    """
    return Shape([(f"_anonymous_{n}", d.size) for n, d in enumerate(as_dims(shape, "anonymous_shape"))])


def anonymize(x: Tensor) -> Tensor:
    """`x` with the dims of `anonymous_shape`, and so replicated on every core.

    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.anonymize(mtf.input("x", "d:4"))
      >>> print(mtf.simulate(mtf.lower({"y": y})).step(x=[3.0, 1.0, 2.0, 0.0])["y"])
      [3. 1. 2. 0.]
    """
    return reshape(x, anonymous_shape(tensor(x, "anonymize").shape))
