"""Random numbers, the same under every layout; dropout, and sampling of an index from logits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from layouts import Dimension, Shape
from meshlib.core import initializers
from meshlib.core.arguments import at, fitting, number, whole
from meshlib.core.dtypes import as_dtype
from meshlib.core.errors import ShapeError
from meshlib.core.graph import Operation, Tensor, TensorType, current_graph, find_dim
from meshlib.core.opdef import Array, Block, Kind, Work, variant
from meshlib.ops.building import as_dims, build, build_source, floats, tensor
from meshlib.ops.control.sources import beside, source
from meshlib.ops.movement.ranking import argmax, nth_largest_element, sort
from meshlib.ops.pointwise.arithmetic import greater_equal, less, log, negative, where
from meshlib.ops.pointwise.casts import cast
from meshlib.ops.pointwise.cumulative import cumsum
from meshlib.ops.pointwise.reductions import reduce_min, softmax

T = TypeVar("T")
_NEVER = -1e30  # logit of excluded elements


def _random_local(block: Block, *numbers: Array) -> Array:
    names, out = block.out.shape.names, block.out
    whole = block.operation.output.shape.sizes
    offsets, op = [block.offsets[n] for n in names], block.operation
    key = block.engine.key(stream_of(op), deciding_trips(op, block.engine.trips))
    key = initializers.fold(key, *(int(x) for x in numbers))
    return initializers.draw(block.attrs["law"], key, whole, offsets, out.shape.sizes, out.dtype)


# Threefry-2x32 takes 20 rounds of 4 lane operations; half of them per value, since each call yields two words.
def _random_work(ins: tuple[TensorType, ...], out: TensorType, attrs: Mapping[str, Any]) -> Work:
    return Work(0, 80 * out.shape.size)


RANDOM = source("random", Kind.SOURCE, _random_local, _random_work, exact=True, unique=True)
NUMBERED = variant(
    RANDOM, "numbered_random", kind=Kind.ELEMENTWISE, grad=lambda op, dy: [None] * len(op.inputs), unique=False
)


def stream_of(operation: Operation) -> str:
    """The name that keys a draw's numbers: draws of one stream, shape and law are equal in equal trips of loops."""
    return str(operation.attrs.get("stream", operation.name))


def deciding_trips(operation: Operation, trips: Sequence[T]) -> list[T]:
    """The trips of the loops around a draw, outermost first, without those of loops over which it is constant."""
    constant_over = operation.attrs.get("constant_over", ())
    return [trip for n, trip in enumerate(trips) if len(trips) - 1 - n not in constant_over]


def drawn_from(
    shape: object,
    law: tuple[str, float, float],
    dtype: object,
    name: str | None,
    what: str,
    stream: str | None = None,
    constant_over: tuple[int, ...] = (),
    numbers: Sequence[Tensor] = (),
) -> Tensor:
    """Random numbers from a distribution, in a stream of their own unless one is given.

    `constant_over`: enclosing loops, counted from the innermost, all of whose trips draw the same numbers. `numbers`,
    int32 without dims, are folded into the key: draws of one stream are equal where their numbers are.
    """
    drawn = as_dtype(dtype)
    if not drawn.is_wide_float:
        raise ShapeError(f"{at(what)}: needs a float dtype to compute in, got {drawn.name}; cast the result")
    for bound in law[1:]:
        fitting(bound, drawn, what)
    attrs: dict[str, Any] = {"shape": Shape(as_dims(shape, what)), "dtype": drawn, "law": law}
    if stream is not None:
        attrs["stream"] = stream
    if constant_over:
        attrs["constant_over"] = constant_over
    if numbers:
        return build(NUMBERED, numbers, attrs, what if name is None else name)
    return build_source(current_graph(what), RANDOM, attrs, what if name is None else name).output


def random_uniform(
    shape: Shape | Sequence[Dimension],
    minval: float = 0.0,
    maxval: float = 1.0,
    dtype: object = "float32",
    name: str | None = None,
) -> Tensor:
    """Uniform numbers in [minval, maxval), drawn afresh at each step; the same under every layout.

    Threefry-2x32 keyed by (seed, scoped name of the operation, step), counted by global position.
    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.less(mtf.random_uniform("d:2", minval=0.0, maxval=1.0), 1.0)
      >>> print(mtf.simulate(mtf.lower({"y": y})).step()["y"])
      [ True  True]
    """
    what = "random_uniform"
    return drawn_from(
        shape, ("uniform", number(minval, what, "minval"), number(maxval, what, "maxval")), dtype, name, what
    )


def random_normal(
    shape: Shape | Sequence[Dimension],
    mean: float = 0.0,
    stddev: float = 1.0,
    dtype: object = "float32",
    name: str | None = None,
) -> Tensor:
    """Normal numbers with `mean` and `stddev`, drawn afresh at each step; the same under every layout.

    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.reduce_mean(mtf.random_normal("d:65536"))
      >>> print(mtf.simulate(mtf.lower({"y": y})).step()["y"].round(1))
      -0.0
    """
    what = "random_normal"
    return drawn_from(shape, ("normal", number(mean, what, "mean"), number(stddev, what, "stddev")), dtype, name, what)


def dropout(
    x: Tensor,
    is_training: bool,
    keep_prob: float | None = None,
    rate: float | None = None,
    noise_shape: Shape | Sequence[Dimension] | None = None,
    name: str | None = None,
) -> Tensor:
    """Keep each element with probability `keep_prob` (= 1 - `rate`) and scale it by 1 / keep_prob, else 0.

    One draw serves all elements along dims that are not in `noise_shape` (default: the shape of `x`). Without
    `is_training` it returns `x`. The mask does not depend on the layout.
    Raises: ShapeError unless exactly one of keep_prob and rate is given, in (0, 1] and [0, 1).
    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.reduce_any(mtf.equal(mtf.dropout(mtf.input("x", "d:4"), is_training=True, keep_prob=0.5), 6.0))
      >>> print(mtf.simulate(mtf.lower({"y": y})).step(x=[3.0, 3.0, 3.0, 3.0])["y"])
      True
    """
    tensor(x, "dropout")
    if not isinstance(is_training, bool | np.bool_):
        raise ShapeError(
            f"{at('dropout')}: is_training must be True or False, got {is_training!r:.80}; "
            "write dropout(x, True, rate=0.1) or dropout(x, True, keep_prob=0.9)"
        )
    if (keep_prob is None) == (rate is None):
        given = "neither" if rate is None else f"keep_prob={keep_prob!r} and rate={rate!r}"
        raise ShapeError(f"{at('dropout')}: give exactly one of keep_prob and rate, got {given}")
    keep = 1 - number(rate, "dropout", "rate") if keep_prob is None else number(keep_prob, "dropout", "keep_prob")
    if not 0 < keep <= 1:
        wanted = (
            f"rate must be in [0, 1), got {rate}" if keep_prob is None else f"keep_prob must be in (0, 1], got {keep}"
        )
        raise ShapeError(f"{at('dropout')}: {wanted}")
    floats(x, "dropout")
    if not is_training or keep == 1:
        return x
    noise = Shape(as_dims(noise_shape, "dropout noise_shape")) if noise_shape is not None else x.shape
    strange = [str(d) for d in noise if d not in x.shape]
    if strange:
        raise ShapeError(f"{at('dropout')}: noise_shape dims {', '.join(strange)} are not in {x}")
    attrs = {"shape": noise, "dtype": as_dtype("float32"), "law": ("uniform", 0.0, 1.0)}
    drawn = build_source(beside(x), RANDOM, attrs, "dropout" if name is None else name).output
    return x * (cast(less(drawn, keep), x.dtype) * (1 / keep))


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


def _top_p_threshold(x: Tensor, dim: Dimension, temperature: float, top_p: float) -> Tensor:
    """The smallest logit of the top-p set."""
    ordered = sort(cast(x, "float32"), dim, descending=True)
    chances = softmax(ordered * (1 / temperature), dim)
    before = cumsum(chances, dim, exclusive=True)
    return cast(reduce_min(where(less(before, top_p), ordered, -_NEVER), reduced_dim=dim), x.dtype)
