"""Lookups by indices whose inverse is known, so that the gradient is a lookup too, in place of a scatter-add.

Rows of x [groups..., dim, features...] are looked up by `index`, whose dims are those groups and dims of places, in any
order. `inverse` [groups..., dim, further...] has the places in which a row is, as numbers that count over the dims of
places in their order, or a number out of range. TPUs look rows up several times as fast as they add rows at positions.
"""

from __future__ import annotations

from collections.abc import Sequence

from layouts import Dimension
from meshlib.core.graph import Tensor
from meshlib.ops.control.custom_gradients import gradient_of_residuals
from meshlib.ops.movement.indexing import gather
from meshlib.ops.movement.shape import reshape, transpose
from meshlib.ops.pointwise.reductions import reduce_sum


def gather_with_inverse(
    x: Tensor, index: Tensor, dim: Dimension, inverse: Tensor, numbers: Dimension, name: str | None = None
) -> Tensor:
    """`gather` of x by `index`, with zeros for an index out of range.

    Args:
      numbers: a dim as large as the number of places, with a name that no operand has unless it is the dim of places.
    """
    places = tuple(index.shape)

    def looked_up(x: Tensor) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        return [gather(x, index, dim, name=name, out_of_range="zero")], [inverse]

    def gradient(residuals: Sequence[Tensor], dys: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        (inverse,), (dy,) = residuals, dys
        assert dy is not None
        return [reduce_sum(gather_places(dy, places, inverse, numbers), output_shape=x.shape)]

    return gradient_of_residuals(looked_up, gradient, [x])[0]


def gather_places(y: Tensor, places: Sequence[Dimension], inverse: Tensor, numbers: Dimension) -> Tensor:
    """The rows of y [groups... and places..., features...] by their numbers in `inverse`, zeros for those out of range.

    Args:
      places: the dims of groups and places.
    """
    groups = [d for d in inverse.shape if d in places]
    features = [d for d in y.shape if d not in places]
    ordered = transpose(y, [*groups, *(d for d in places if d not in groups), *features])
    return gather(reshape(ordered, [*groups, numbers, *features]), inverse, numbers, out_of_range="zero")
