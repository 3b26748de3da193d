"""Image layers: convolutions with variables, and attention of a feature map to a pooled copy of itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from layouts import Dimension, Shape
from meshlib.core import initializers
from meshlib.core.arguments import at, flag, items, whole
from meshlib.core.errors import ShapeError
from meshlib.core.graph import Tensor, find_dim, scope
from meshlib.core.names import free_name
from meshlib.core.text import counted
from meshlib.layers.numerics import DEFAULT, Numerics, as_numerics
from meshlib.layers.projection import projection
from meshlib.ops.building import as_dim, as_dims, floats
from meshlib.ops.fused_attention.attention import attention
from meshlib.ops.images.convolution import conv1d, conv2d, conv3d
from meshlib.ops.images.pooling import pool
from meshlib.ops.movement.shape import rename_dimension, reshape, transpose
from meshlib.ops.pointwise.arithmetic import add, multiply
from meshlib.ops.pointwise.casts import cast

Kernel = Callable[[Tensor], Tensor]
CONVOLUTIONS = {1: conv1d, 2: conv2d, 3: conv3d}


def conv(
    x: Tensor,
    output_dim: Dimension,
    filter_size: int | Sequence[int] = 3,
    stride: int | Sequence[int] = 1,
    padding: str | int | Sequence[int] = "SAME",
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    use_bias: bool = True,
    spatial: Sequence[Dimension | str] | None = None,
    kernel_initializer: initializers.Initializer | None = None,
    kernel_transform: Kernel | None = None,
    numerics: Numerics = DEFAULT,
    name: str = "conv",
) -> Tensor:
    """A convolution layer over one to three dims, with kernel and bias.

    Args:
      x: [..., spatial dims, channels], float.
      output_dim: the output channels. If it has the name of the input channels, it is `channels_out` (for example) in
        the kernel and the sum, a name that layout rules may use, and has its own name in the result.
      filter_size, stride, dilation: one number, or one per spatial dim.
      padding: "SAME", "VALID" or numbers, as in `mtf.conv2d`.
      groups: number of channel groups, each convolved separately.
      use_bias: whether to add a bias, initially zeros.
      spatial: the dims to convolve over; by default all between the first and the last.
      kernel_initializer: initializer of the kernel; by default normal with variance 2 / fan-in.
      kernel_transform: applied to the kernel, for example spectral norm.
      numerics: dtypes of variables and activations; precision of the products.
      name: scope of the variables `kernel`, [filter_height, filter_width, channels, output_dim] (before them
        filter_depth for three dims, filter_width alone for one), and `bias`; name of the result.
    Returns: the dims of x in order, spatial dims divided by strides, `output_dim` in place of the channels.
    Raises: ShapeError for numbers or dims that do not fit.
    Example:
      >>> import meshlib as mtf
      >>> D = mtf.Dimension
      >>> with mtf.Graph():
      ...     x = mtf.input("x", [D("batch", 8), D("height", 32), D("width", 32), D("channels", 3)])
      ...     print(mtf.layers.conv(x, D("channels", 16), 3, stride=2).shape)
      [batch:8, height:16, width:16, channels:16]

    Source: initial values: He et al., arXiv:1502.01852, equation 10.
    """
    what = "conv"
    x, places, channels = _image(x, spatial, numerics, what)
    out = as_dim(output_dim, what)
    sizes = _each(filter_size, places, what, "filter_size")
    count = whole(groups, what, "groups")
    if count < 1 or channels.size % count:
        raise ShapeError(f"{at(what)}: groups={count} does not divide the {channels.size} of '{channels.name}'", x)
    # A 1x1 convolution is a product over the channels, without windows.
    plain = {*sizes, *_each(stride, places, what, "stride"), count} == {1} and padding in ("SAME", "VALID", 0)
    own = out if out.name not in x.shape else Dimension(f"{out.name}_out", out.size)
    if own.name in x.shape:
        raise ShapeError(f"{at(what)}: '{own.name}' is already a dim of x; give output_dim another name", x)
    window = _window(sizes)
    inner = Dimension(channels.name, channels.size // count)
    start = kernel_initializer or initializers.variance_scaling(2.0, "fan_in", "normal", [*window, inner])
    with scope(name):
        kernel = numerics.variable("kernel", [*window, inner, own], start, x.dtype)
        bias = numerics.variable("bias", [own], 0.0, x.dtype) if flag(use_bias, what, "use_bias") else None
        kernel = kernel if kernel_transform is None else kernel_transform(kernel)
    last = f"{name}/sum" if own != out else name
    product = last if bias is None else f"{name}/product"
    if plain:
        y = numerics.product(x, kernel, Shape([own if d == channels else d for d in x.shape]), product)
    else:
        pairs: dict[Dimension | str, Dimension | str] = {d.name: w.name for d, w in zip(places, window, strict=True)}
        precision = numerics.unquantised.precision
        y = CONVOLUTIONS[len(places)](
            x, kernel, stride, padding, dilation, count, spatial=pairs, precision=precision, name=product
        )
    y = y if bias is None else add(y, bias, name=last)
    return y if own == out else rename_dimension(y, own.name, out.name, name)


def separable_conv(
    x: Tensor,
    output_dim: Dimension,
    filter_size: int | Sequence[int] = 3,
    stride: int | Sequence[int] = 1,
    padding: str | int | Sequence[int] = "SAME",
    use_bias: bool = True,
    spatial: Sequence[Dimension | str] | None = None,
    numerics: Numerics = DEFAULT,
    name: str = "separable_conv",
) -> Tensor:
    """A depthwise convolution followed by a product over the channels.

    Arguments, result and errors as in `conv`; the scopes of the variables are `depthwise`, without a bias, and
    `pointwise`. Source: Chollet, arXiv:1610.02357.
    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.layers.separable_conv(mtf.input("x", "batch:1;h:2;w:2;c:1"), mtf.Dimension("out", 8))
      >>> print(mtf.simulate(mtf.lower({"y": y})).step(x=[[[[1.0], [2.0]], [[3.0], [4.0]]]])["y"].shape)
      (1, 2, 2, 8)
    """
    what = "separable_conv"
    x, places, channels = _image(x, spatial, numerics, what)
    sizes = _each(filter_size, places, what, "filter_size")
    window = _window(sizes)
    start = initializers.variance_scaling(1.0, "fan_in", "normal", window)
    with scope(name):
        with scope("depthwise"):
            kernel = numerics.variable("kernel", [*window, channels], start, x.dtype)
        pairs: dict[Dimension | str, Dimension | str] = {d.name: w.name for d, w in zip(places, window, strict=True)}
        y = CONVOLUTIONS[len(places)](
            x, kernel, stride, padding, spatial=pairs, group_dims=[channels], name="depthwise"
        )
        names = [d.name for d in places]
        return conv(y, output_dim, 1, use_bias=use_bias, spatial=names, numerics=numerics, name="pointwise")


def _image(
    x: Tensor, spatial: Sequence[Dimension | str] | None, numerics: Numerics, what: str
) -> tuple[Tensor, tuple[Dimension, ...], Dimension]:
    """The operand in the dtype of `numerics`, its spatial dims, and its channels."""
    x = as_numerics(numerics, what).cast(floats(x, what))
    names = x.shape.dims[1:-1] if spatial is None else items(spatial, what, "spatial")
    places = tuple(find_dim(x, d, what) for d in names)
    channels = next((d for d in reversed(x.shape.dims) if d not in places), None)
    if not 1 <= len(set(places)) == len(places) <= 3 or channels is None:
        raise ShapeError(f"{at(what)}: needs one to three different spatial dims beside the channels", x)
    return x, places, channels


def _window(sizes: Sequence[int]) -> list[Dimension]:
    """The window dims of a kernel, whose names do not depend on the spatial dims of x."""
    names = ("filter_depth", "filter_height", "filter_width")[-len(sizes) :]
    return [Dimension(name, size) for name, size in zip(names, sizes, strict=True)]


def _each(value: object, places: Sequence[Dimension], what: str, argument: str) -> list[int]:
    """One number per spatial dim."""
    given = [value] * len(places) if isinstance(value, int) else items(value, what, argument)
    numbers = [whole(n, what, f"each of {argument}") for n in given]
    if len(numbers) != len(places) or min(numbers) < 1:
        raise ShapeError(f"{at(what)}: {argument} must be {counted(len(places), 'positive number')}, got {value!r:.80}")
    return numbers


def image_attention(
    x: Tensor,
    spatial: Sequence[Dimension],
    channels: Dimension,
    key_size: int | None = None,
    value_size: int | None = None,
    pooling: int = 2,
    kernel_transform: Kernel | None = None,
    numerics: Numerics = DEFAULT,
    name: str = "image_attention",
) -> Tensor:
    """x + gain * (attention of all positions of x to those of max-pooled x): the block of SAGAN and BigGAN.

    softmax over memory positions of query . key, without a scale; queries, keys, values and output are 1x1
    convolutions without biases.

    Args:
      x: float, with `spatial` dims and `channels`.
      spatial: the dims of the positions, one or several.
      channels: contracted by the kernels.
      key_size: size of queries and keys; by default an eighth of the channels, and at least 1.
      value_size: size of values; by default half of the channels, and at least 1.
      pooling: window of max pooling of keys and values along each spatial dim, which it must divide. 1: none.
      kernel_transform: applied to each kernel, for example spectral norm.
      numerics: dtypes of variables and activations.
      name: scope of `query/kernel`, `key/kernel`, `value/kernel`, `out/kernel` and `gain`, a number, initially zero.
    Returns: the type of x, or that of `numerics`. Positions are merged into one dim, named as the first of them, for
      the attention: if several spatial dims are split, only the first stays split.
    Raises: ShapeError for dims that x lacks, or that pooling does not divide.
    Example:
      >>> import meshlib as mtf
      >>> D = mtf.Dimension
      >>> with mtf.Graph() as graph:
      ...     x = mtf.input("x", [D("batch", 2), D("height", 8), D("width", 8), D("channels", 16)])
      ...     y = mtf.layers.image_attention(x, [D("height", 8), D("width", 8)], D("channels", 16))
      >>> y.shape == x.shape, graph.variables["image_attention/query/kernel"].output.shape.size
      (True, 32)

    Source: Zhang et al., "Self-attention generative adversarial networks", arXiv:1805.08318, section 3; with pooling:
      Brock et al., arXiv:1809.11096.
    """
    what = "image_attention"
    x = as_numerics(numerics, what).cast(floats(x, what))
    places = tuple(find_dim(x, d, what) for d in as_dims(spatial, what))
    depth = find_dim(x, channels, what)
    if not places or depth in places:
        raise ShapeError(f"{at(what)}: spatial must be dims of x other than the channels", x)
    others = [d for d in x.shape if d not in places and d != depth]
    window = whole(pooling, what, "pooling")
    sizes = {
        "key": max(depth.size // 8, 1) if key_size is None else whole(key_size, what, "key_size"),
        "value": max(depth.size // 2, 1) if value_size is None else whole(value_size, what, "value_size"),
    }
    key, value = (Dimension(free_name(f"{depth.name}_{part}", x.shape.names), size) for part, size in sizes.items())

    def flat(y: Tensor, last: Dimension, prefix: str) -> Tensor:
        """A feature map with its positions as one dim: [others, positions, last]."""
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
