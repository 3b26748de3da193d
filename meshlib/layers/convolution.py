"""Convolution and pooling layers under Mesh TensorFlow's names and defaults: no bias, channels last."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from layouts import Dimension
from meshlib.core import initializers
from meshlib.core.arguments import at, items, whole
from meshlib.core.errors import ShapeError
from meshlib.core.graph import Tensor, scope
from meshlib.core.text import counted
from meshlib.layers.numerics import DEFAULT, Numerics, as_numerics
from meshlib.ops.building import as_dim, floats
from meshlib.ops.images import convolution
from meshlib.ops.images.blocks import in_whole
from meshlib.ops.images.convolution import PRECISIONS
from meshlib.ops.images.pooling import pool_before_last
from meshlib.ops.images.sliding import Padding
from meshlib.ops.movement.shape import rename_dimension

_WINDOWS = ("fd", "fh", "fw")  # names of filter dims; a layer has the last ones


def conv1d(
    x: Tensor,
    output_dim: Dimension,
    filter_size: int = 3,
    stride: int = 1,
    padding: Padding = "SAME",
    filter_initializer: initializers.Initializer | None = None,
    numerics: Numerics = DEFAULT,
    name: str = "conv1d",
) -> Tensor:
    """A convolution layer along the dim before the last: see `conv2d`.

    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.layers.conv1d(mtf.input("x", "batch:1;t:4;c:1"), mtf.Dimension("out", 8))
      >>> print(mtf.simulate(mtf.lower({"y": y})).step(x=[[[1.0]] * 4])["y"].shape)
      (1, 4, 8)
    """
    return _layer("conv1d", 1, x, output_dim, [filter_size], [stride], padding, filter_initializer, numerics, name)


def conv2d(
    x: Tensor,
    output_dim: Dimension,
    filter_size: Sequence[int] = (3, 3),
    strides: Sequence[int] = (1, 1),
    padding: Padding = "SAME",
    filter_initializer: initializers.Initializer | None = None,
    numerics: Numerics = DEFAULT,
    name: str = "conv2d",
) -> Tensor:
    """A convolution layer: `mtf.conv2d` with a filter variable.

    Args:
      x: [..., height, width, channels], float.
      output_dim: replaces the channels; if it has their name, it is `channels_out` (for example) in the filters and the
        product, a name that layout rules may use, and has its own name in the result.
      filter_size: rows and columns of the window.
      strides: one per spatial dim.
      padding: as in `mtf.conv2d`.
      filter_initializer: initializer of the filters; by default normal with variance 1 / (window * channels).
      numerics: dtypes of filters and activations, precision of the product.
      name: scope of the variable `kernel` [fh, fw, channels, output_dim], and name of the operation.
    Returns: [..., height / stride, width / stride, output_dim].
    Raises: ShapeError as `mtf.conv2d`.
    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     x = mtf.input("x", mtf.Shape("batch:8;height:56;width:56;channels:64").dims)
      ...     y = mtf.layers.conv2d(x, mtf.Dimension("channels", 128), strides=(2, 2))
      >>> print(y.shape)
      [batch:8, height:28, width:28, channels:128]

    Source: mesh_tensorflow.layers.conv2d.
    """
    return _layer("conv2d", 2, x, output_dim, filter_size, strides, padding, filter_initializer, numerics, name)


def conv3d(
    x: Tensor,
    output_dim: Dimension,
    filter_size: Sequence[int] = (3, 3, 3),
    strides: Sequence[int] = (1, 1, 1),
    padding: Padding = "SAME",
    filter_initializer: initializers.Initializer | None = None,
    numerics: Numerics = DEFAULT,
    name: str = "conv3d",
) -> Tensor:
    """A convolution layer along the three dims before the last: see `conv2d`; the window's dims are fd, fh, fw.

    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.layers.conv3d(mtf.input("x", "b:1;z:4;h:4;w:4;c:3"), mtf.Dimension("out", 8))
      >>> y.shape
      Shape('b:1;z:4;h:4;w:4;out:8')
    """
    return _layer("conv3d", 3, x, output_dim, filter_size, strides, padding, filter_initializer, numerics, name)


def conv2d_transpose(
    x: Tensor,
    output_dim: Dimension,
    filter_size: Sequence[int] = (2, 2),
    strides: Sequence[int] = (2, 2),
    padding: Padding = "SAME",
    filter_initializer: initializers.Initializer | None = None,
    numerics: Numerics = DEFAULT,
    name: str = "conv2d_transpose",
) -> Tensor:
    """`mtf.conv2d_transpose` with a filter variable, [fh, fw, output_dim, channels]: see `conv2d`.

    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.layers.conv2d_transpose(mtf.input("x", "batch:1;h:2;w:2;c:1"), mtf.Dimension("out", 8))
      >>> print(mtf.simulate(mtf.lower({"y": y})).step(x=[[[[1.0], [2.0]], [[3.0], [4.0]]]])["y"].shape)
      (1, 4, 4, 8)
    """
    what = "conv2d_transpose"
    return _layer(what, 2, x, output_dim, filter_size, strides, padding, filter_initializer, numerics, name)


def conv3d_transpose(
    x: Tensor,
    output_dim: Dimension,
    filter_size: Sequence[int] = (2, 2, 2),
    strides: Sequence[int] = (2, 2, 2),
    padding: Padding = "SAME",
    filter_initializer: initializers.Initializer | None = None,
    numerics: Numerics = DEFAULT,
    name: str = "conv3d_transpose",
) -> Tensor:
    """`mtf.conv3d_transpose` with a filter variable, [fd, fh, fw, output_dim, channels]: see `conv2d`.

    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.layers.conv3d_transpose(mtf.input("x", "b:1;z:4;h:4;w:4;c:3"), mtf.Dimension("out", 8))
      >>> y.shape
      Shape('b:1;z:8;h:8;w:8;out:8')
    """
    what = "conv3d_transpose"
    return _layer(what, 3, x, output_dim, filter_size, strides, padding, filter_initializer, numerics, name)


def conv2d_with_blocks(
    x: Tensor,
    output_dim: Dimension,
    filter_size: Sequence[int] = (3, 3),
    strides: Sequence[int] = (1, 1),
    padding: Padding = "SAME",
    h_blocks_dim: Dimension | None = None,
    w_blocks_dim: Dimension | None = None,
    filter_initializer: initializers.Initializer | None = None,
    numerics: Numerics = DEFAULT,
    name: str = "conv2d",
) -> Tensor:
    """`conv2d` of an image in blocks, [..., h_blocks, w_blocks, h, w, channels]: see `mtf.conv2d_with_blocks`.

    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.layers.conv2d_with_blocks(
      ...         mtf.input("x", "b:1;hb:2;wb:2;h:4;w:4;c:3"), mtf.Dimension("out", 8),
      ...         h_blocks_dim=mtf.Dimension("hb", 2), w_blocks_dim=mtf.Dimension("wb", 2),
      ...     )
      >>> y.shape
      Shape('b:1;hb:2;wb:2;h:4;w:4;out:8')
    """
    layer = output_dim, filter_size, strides, padding, filter_initializer, numerics, name
    return in_whole("conv2d_with_blocks", x, 2, (h_blocks_dim, w_blocks_dim), lambda whole: conv2d(whole, *layer))


def conv3d_with_blocks(
    x: Tensor,
    output_dim: Dimension,
    filter_size: Sequence[int] = (3, 3, 3),
    strides: Sequence[int] = (1, 1, 1),
    padding: Padding = "SAME",
    d_blocks_dim: Dimension | None = None,
    h_blocks_dim: Dimension | None = None,
    filter_initializer: initializers.Initializer | None = None,
    numerics: Numerics = DEFAULT,
    name: str = "conv3d",
) -> Tensor:
    """`conv3d` of a volume in blocks, [..., d_blocks, h_blocks, d, h, w, channels]: see `mtf.conv3d_with_blocks`.

    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.layers.conv3d_with_blocks(
      ...         mtf.input("x", "db:2;d:2;h:4;w:4;c:3"), mtf.Dimension("out", 8), d_blocks_dim=mtf.Dimension("db", 2)
      ...     )
      >>> y.shape
      Shape('db:2;d:2;h:4;w:4;out:8')
    """
    layer = output_dim, filter_size, strides, padding, filter_initializer, numerics, name
    return in_whole("conv3d_with_blocks", x, 3, (d_blocks_dim, h_blocks_dim), lambda whole: conv3d(whole, *layer))


def conv2d_transpose_with_blocks(
    x: Tensor,
    output_dim: Dimension,
    filter_size: Sequence[int] = (2, 2),
    strides: Sequence[int] = (2, 2),
    padding: Padding = "SAME",
    h_blocks_dim: Dimension | None = None,
    w_blocks_dim: Dimension | None = None,
    filter_initializer: initializers.Initializer | None = None,
    numerics: Numerics = DEFAULT,
    name: str = "conv2d_transpose",
) -> Tensor:
    """`conv2d_transpose` of an image in blocks: see `conv2d_with_blocks`.

    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.layers.conv2d_transpose_with_blocks(
      ...         mtf.input("x", "hb:2;h:4;w:4;c:3"), mtf.Dimension("out", 8), h_blocks_dim=mtf.Dimension("hb", 2)
      ...     )
      >>> y.shape
      Shape('hb:2;h:8;w:8;out:8')
    """
    layer = output_dim, filter_size, strides, padding, filter_initializer, numerics, name
    what, blocks = "conv2d_transpose_with_blocks", (h_blocks_dim, w_blocks_dim)
    return in_whole(what, x, 2, blocks, lambda whole: conv2d_transpose(whole, *layer))


def conv3d_transpose_with_blocks(
    x: Tensor,
    output_dim: Dimension,
    filter_size: Sequence[int] = (2, 2, 2),
    strides: Sequence[int] = (2, 2, 2),
    padding: Padding = "SAME",
    d_blocks_dim: Dimension | None = None,
    h_blocks_dim: Dimension | None = None,
    filter_initializer: initializers.Initializer | None = None,
    numerics: Numerics = DEFAULT,
    name: str = "conv3d_transpose",
) -> Tensor:
    """`conv3d_transpose` of a volume in blocks: see `conv3d_with_blocks`.

    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.layers.conv3d_transpose_with_blocks(
      ...         mtf.input("x", "db:2;d:2;h:4;w:4;c:3"), mtf.Dimension("out", 8), d_blocks_dim=mtf.Dimension("db", 2)
      ...     )
      >>> y.shape
      Shape('db:2;d:4;h:8;w:8;out:8')
    """
    layer = output_dim, filter_size, strides, padding, filter_initializer, numerics, name
    what, blocks = "conv3d_transpose_with_blocks", (d_blocks_dim, h_blocks_dim)
    return in_whole(what, x, 3, blocks, lambda whole: conv3d_transpose(whole, *layer))


def _layer(
    what: str,
    count: int,
    x: Tensor,
    output_dim: Dimension,
    filter_size: Sequence[int],
    strides: Sequence[int],
    padding: Padding,
    filter_initializer: initializers.Initializer | None,
    numerics: Numerics,
    name: str,
) -> Tensor:
    x = as_numerics(numerics, what).cast(floats(x, what))
    if len(x.shape) <= count:
        raise ShapeError(f"{at(what)}: needs {counted(count, 'spatial dim')} before the last, the channels, got {x}")
    if numerics.precision not in PRECISIONS:
        raise ShapeError(
            f"{at(what)}: convolutions have precision {' or '.join(PRECISIONS)}, not {numerics.precision!r}"
        )
    sizes = [whole(n, what, "each of filter_size") for n in items(filter_size, what, "filter_size")]
    if len(sizes) != count or min(sizes) < 1:
        raise ShapeError(f"{at(what)}: filter_size must have {count} numbers from 1 on, got {sizes}")
    if len(items(strides, what, "strides")) != count:
        raise ShapeError(f"{at(what)}: strides must have {count} numbers, got {strides!r:.80}")
    channels, out = x.shape[-1], as_dim(output_dim, f"{what} output_dim")
    own = Dimension(f"{out.name}_out", out.size) if out.name == channels.name else out
    windows = [Dimension(n, size) for n, size in zip(_WINDOWS[-count:], sizes, strict=True)]
    transposed = what.endswith("transpose")
    init = initializers.scaled_normal([*windows, channels]) if filter_initializer is None else filter_initializer
    with scope(name):
        kernel = numerics.variable(
            "kernel", [*windows, *([own, channels] if transposed else [channels, own])], init, x.dtype
        )
    product: Callable[..., Tensor] = getattr(convolution, what)
    y = product(
        x, kernel, strides, padding, precision=numerics.precision, name=name if own is out else f"{name}/product"
    )
    return y if own is out else rename_dimension(y, own.name, out.name, name)


def max_pool2d(x: Tensor, ksize: Sequence[int] = (2, 2), name: str = "max_pool2d") -> Tensor:
    """Max pooling with windows of `ksize` that tile the dims before the last of [batch ..., height, width, channels].

    Raises: ShapeError if a window does not divide its dim, with the size to pad it to.
    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.layers.max_pool2d(mtf.input("x", "batch:1;h:2;w:2;c:1"))
      >>> print(mtf.simulate(mtf.lower({"y": y})).step(x=[[[[1.0], [2.0]], [[3.0], [4.0]]]])["y"].ravel())
      [4.]
    """
    return pool_before_last(x, ksize, "max", "max_pool2d", name)


def max_pool3d(x: Tensor, ksize: Sequence[int] = (2, 2, 2), name: str = "max_pool3d") -> Tensor:
    """Max pooling with windows of `ksize` that tile the dims before the last of [batch ..., depth, height, width,
    channels].

    Raises: as in `max_pool2d`.
    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.layers.max_pool3d(mtf.input("x", "b:1;z:4;h:4;w:4;c:3"))
      >>> y.shape
      Shape('b:1;z:2;h:2;w:2;c:3')
    """
    return pool_before_last(x, ksize, "max", "max_pool3d", name)


def avg_pool2d(x: Tensor, ksize: Sequence[int] = (2, 2), name: str = "avg_pool2d") -> Tensor:
    """Mean pooling with the windows of `max_pool2d`; float dtypes.

    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.layers.avg_pool2d(mtf.input("x", "batch:1;h:2;w:2;c:1"))
      >>> print(mtf.simulate(mtf.lower({"y": y})).step(x=[[[[1.0], [2.0]], [[3.0], [4.0]]]])["y"].ravel())
      [2.5]
    """
    return pool_before_last(x, ksize, "avg", "avg_pool2d", name)


def avg_pool3d(x: Tensor, ksize: Sequence[int] = (2, 2, 2), name: str = "avg_pool3d") -> Tensor:
    """Mean pooling with the windows of `max_pool3d`; float dtypes.

    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.layers.avg_pool3d(mtf.input("x", "b:1;z:4;h:4;w:4;c:3"))
      >>> y.shape
      Shape('b:1;z:2;h:2;w:2;c:3')
    """
    return pool_before_last(x, ksize, "avg", "avg_pool3d", name)
