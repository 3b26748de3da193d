"""Sampling of an index from logits."""

from __future__ import annotations

from layouts import Dimension
from meshlib.core.arguments import at, number, whole
from meshlib.core.errors import ShapeError
from meshlib.core.graph import Tensor, find_dim
from meshlib.ops.building import floats, tensor
from meshlib.ops.movement.ranking import argmax, nth_largest_element, sort
from meshlib.ops.pointwise.binary import greater_equal, less
from meshlib.ops.pointwise.casts import cast
from meshlib.ops.pointwise.cumulative import cumsum
from meshlib.ops.pointwise.random import random_uniform
from meshlib.ops.pointwise.reductions import reduce_min, softmax
from meshlib.ops.pointwise.selection import where
from meshlib.ops.pointwise.unary import log, negative


def sample_with_temperature(
    x: Tensor,
    dim: Dimension,
    temperature: float = 1.0,
    name: str | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
) -> Tensor:
    """An index along `dim`, drawn with probability softmax(x / temperature); the largest element's at temperature 0.

    The argmax of x - temperature log(-log u), u uniform, in float32. The same draw under every layout.

    Args:
      x: logits, float.
      dim: dim of x.
      temperature: >= 0.
      name: name of the result.
      top_k: restrict to this many largest logits, and ties with the last of them.
      top_p: restrict to the smallest set of largest logits (after top_k) whose probabilities sum to at least this, and
        ties with the last of them; in (0, 1].
    Returns: int32, the dims of x except `dim`.
    Raises: ShapeError for numbers out of range.
    Example:
      >>> import meshlib as mtf
      >>> rows, vocab = mtf.Dimension("rows", 1000), mtf.Dimension("vocab", 4)
      >>> with mtf.Graph():
      ...     x = mtf.broadcast(mtf.log(mtf.cast(mtf.range(vocab), "float32") + 1.0), [rows, vocab])
      ...     y = mtf.sample_with_temperature(x, vocab, top_p=0.6)  # of 0.1, 0.2, 0.3, 0.4 the two largest
      >>> sorted(set(mtf.simulate(mtf.lower({"y": y})).step()["y"].tolist()))
      [2, 3]

    Source: Gumbel, "Statistical theory of extreme values", 1954; the trick is folklore. top_k: Fan et al.,
      arXiv:1805.04833; top_p: Holtzman et al., arXiv:1904.09751.
    """
    what = "sample_with_temperature"
    d = find_dim(tensor(x, what), dim, what)
    floats(x, what)
    if number(temperature, what, "temperature") < 0:
        raise ShapeError(f"{at(what)}: temperature must not be negative, got {temperature}")
    if top_k is not None and not 1 <= whole(top_k, what, "top_k") <= d.size:
        raise ShapeError(f"{at(what)}: top_k must be in 1 to {d.size}, the size of dim {d}, got {top_k}")
    if top_p is not None and not 0 < number(top_p, what, "top_p") <= 1:
        raise ShapeError(f"{at(what)}: top_p must be in (0, 1], got {top_p}")
    if temperature == 0:
        return argmax(x, d, name)
    if top_k is not None and top_k < d.size:
        x = where(greater_equal(x, nth_largest_element(x, top_k - 1, d)), x, _NEVER)
    if top_p is not None and top_p < 1:
        x = where(greater_equal(x, _top_p_threshold(x, d, temperature, top_p)), x, _NEVER)
    # Excludes 0 and 1, where the logarithms are infinite.
    noise = negative(log(negative(log(random_uniform(x.shape, 1e-9, 1.0, name="gumbel")))))
    return argmax(cast(x, "float32") + noise * temperature, d, name)


_NEVER = -1e30  # logit of excluded elements


def _top_p_threshold(x: Tensor, dim: Dimension, temperature: float, top_p: float) -> Tensor:
    """The smallest logit of the top-p set."""
    ordered = sort(cast(x, "float32"), dim, descending=True)
    chances = softmax(ordered * (1 / temperature), dim)
    before = cumsum(chances, dim, exclusive=True)
    return cast(reduce_min(where(less(before, top_p), ordered, -_NEVER), reduced_dim=dim), x.dtype)
