"""Self-attention of images: every position of a feature map to a coarser copy of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from layouts import Dimension, Shape
from meshlib.checks import at, whole
from meshlib.errors import ShapeError
from meshlib.graph import Tensor, find_dim, scope
from meshlib.layers.numerics import DEFAULT, Numerics, as_numerics
from meshlib.layers.projection import projection
from meshlib.names import free_name
from meshlib.ops.attention import attention
from meshlib.ops.building import as_dims, floats
from meshlib.ops.elementwise import cast, multiply
from meshlib.ops.pooling import pool
from meshlib.ops.shape import reshape, transpose


def image_attention(
    x: Tensor,
    spatial: Sequence[Dimension],
    channels: Dimension,
    key_size: int | None = None,
    value_size: int | None = None,
    pooling: int = 2,
    kernel_transform: Callable[[Tensor], Tensor] | None = None,
    numerics: Numerics = DEFAULT,
    name: str = "image_attention",
) -> Tensor:
    """x + gain * (attention of all positions of x to those of max-pooled x): the block of SAGAN and BigGAN.

    softmax over memory positions of query . key, without a scale; queries, keys, values and the way out are products
    with kernels over the channels (convolutions of 1x1), without biases.

    Args:
      x: float, with `spatial` dims and `channels`.
      spatial: the dims of the positions, one or several.
      channels: contracted by the kernels.
      key_size: of queries and keys; an eighth of the channels unless given, and at least 1.
      value_size: of values; half of the channels unless given, and at least 1.
      pooling: window of the maxima of keys and values along each spatial dim; it must divide them. 1: none.
      kernel_transform: applied to each of the kernels, as for spectral norm.
      numerics: dtypes of the variables and of what is computed.
      name: scope of `query/kernel`, `key/kernel`, `value/kernel`, `out/kernel` and `gain`, a number, zero at first.
    Returns: the type of x, or that of `numerics`. Positions are merged into one dim, named as the first of them, for
      the time of the attention: of several split spatial dims the first stays split.
    Raises: ShapeError for dims that x lacks, or that pooling does not divide.
    Source: Zhang et al., "Self-attention generative adversarial networks", arXiv:1805.08318, section 3; with pooling:
      Brock et al., arXiv:1809.11096.
    """
    what = "image_attention"
    x = as_numerics(numerics, what).cast(floats(x, what))
    places = tuple(find_dim(x, d, what) for d in as_dims(spatial, what))
    depth = find_dim(x, channels, what)
    if not places or depth in places:
        raise ShapeError(f"{at(what)}: spatial must be dims of x other than the channels\n  {x}")
    others = [d for d in x.shape if d not in places and d != depth]
    window = whole(pooling, what, "pooling")
    sizes = {
        "key": max(depth.size // 8, 1) if key_size is None else whole(key_size, what, "key_size"),
        "value": max(depth.size // 2, 1) if value_size is None else whole(value_size, what, "value_size"),
    }
    key, value = (Dimension(free_name(f"{depth.name}_{part}", x.shape.names), size) for part, size in sizes.items())

    def flat(y: Tensor, last: Dimension, prefix: str) -> Tensor:
        """[others, positions, last]: the positions of a feature map as one dim."""
        own = [y.shape.dim(d.name) for d in places]
        merged = Dimension(f"{prefix}{places[0].name}", Shape(own).size)
        return reshape(transpose(y, [*others, *own, last]), [*others, merged, last])

    def projected(part: str, dim: Dimension, source: Tensor, along: Dimension = depth) -> Tensor:
        return projection(source, dim, [along], False, None, numerics, part, part, kernel_transform)

    windows: dict[Dimension | str, int] = dict.fromkeys(places, window)
    with scope(name):
        q = flat(projected("query", key, x), key, "")
        k = flat(pool(projected("key", key, x), windows), key, "memory_")
        v = flat(pool(projected("value", value, x), windows), value, "memory_")
        context = attention(q, k, v, places[0].name, f"memory_{places[0].name}", key, value, scale=1.0)
        apart = reshape(context, [*others, *places, value])
        y = transpose(projected("out", depth, apart, value), x.shape)
        gain = numerics.variable("gain", [], 0.0, x.dtype)
        return x + multiply(y, cast(gain, x.dtype), x.shape)
