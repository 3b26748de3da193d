"""Drawing an index with given logits."""

from __future__ import annotations

from layouts import Dimension
from meshlib.checks import at, number
from meshlib.errors import ShapeError
from meshlib.graph import Tensor, find_dim
from meshlib.ops.building import floats, tensor
from meshlib.ops.elementwise import cast, log, negative
from meshlib.ops.ranking import argmax
from meshlib.ops.sources import random_uniform


def sample_with_temperature(x: Tensor, dim: Dimension, temperature: float = 1.0, name: str | None = None) -> Tensor:
    """An index along `dim`, drawn with probability softmax(x / temperature); the largest element's at temperature 0.

    The argmax of x - temperature log(-log u), u uniform, in float32. The same draw under every layout.

    Args:
      x: logits, float.
      dim: dim of x.
      temperature: >= 0.
      name: of the result.
    Returns: int32, the dims of x but `dim`.
    Source: Gumbel, "Statistical theory of extreme values", 1954; the trick is folklore.
    """
    what = "sample_with_temperature"
    d = find_dim(tensor(x, what), dim, what)
    floats(x, what)
    if number(temperature, what, "temperature") < 0:
        raise ShapeError(f"{at(what)}: temperature must not be negative, got {temperature}")
    if temperature == 0:
        return argmax(x, d, name)
    # Away from 0 and 1, where the logarithms are infinite.
    noise = negative(log(negative(log(random_uniform(x.shape, 1e-9, 1.0, name="gumbel")))))
    return argmax(cast(x, "float32") + noise * temperature, d, name)
