"""Convolutions of images and sequences in named dims: conv1d to conv3d, transposed, depthwise, in groups.

    x [..., height, width, channels]  filters [kh, kw, channels, out]  ->  y [..., height, width, out]

    y[i] = sum over taps f and channels of x[stride * i + dilation * f - before] * filters[f]

A spatial dim keeps its name and takes its new size, so one layout rule `height:rows` lays out a whole network.
Arguments follow tf.nn.convolution; dims are matched by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any, Protocol

from layouts import Dimension, Shape
from meshlib.core.arguments import at, choice, divisors_near, whole
from meshlib.core.errors import ShapeError
from meshlib.core.graph import Tensor, find_dim
from meshlib.core.names import free_name
from meshlib.ops.building import as_dims, floats
from meshlib.ops.images.convolve import convolve
from meshlib.ops.images.sliding import (
    Padding,
    PerDim,
    Slide,
    SlidingDims,
    dims_of,
    numbers_per_dim,
    paddings_per_dim,
    window_sizes,
)
from meshlib.ops.movement.shape import rename_dimension, replace_dimensions

Spatial = Mapping[Dimension | str, Dimension | str]
PRECISIONS = ("default", "highest")


@dataclass(frozen=True)
class _ConvolutionDims:
    """The dims of a convolution: spatial dims, the filter dim of each, input and output channels."""

    spatial: tuple[Dimension, ...]
    windows: tuple[Dimension, ...]
    channels: Dimension | None
    channels_out: tuple[Dimension, ...]


class Convolution(Protocol):
    """Signature of a public convolution."""

    def __call__(
        self,
        x: Tensor,
        filters: Tensor,
        stride: PerDim = 1,
        padding: Padding = "SAME",
        dilation: PerDim = 1,
        groups: int = 1,
        *,
        spatial: Spatial | None = None,
        group_dims: Sequence[Dimension] = (),
        precision: str = "default",
        name: str | None = None,
    ) -> Tensor: ...


def _public(what: str, count: int, doc: str) -> Convolution:
    """The public function `what` of `count` spatial dims."""

    def function(
        x: Tensor,
        filters: Tensor,
        stride: PerDim = 1,
        padding: Padding = "SAME",
        dilation: PerDim = 1,
        groups: int = 1,
        *,
        spatial: Spatial | None = None,
        group_dims: Sequence[Dimension] = (),
        precision: str = "default",
        name: str | None = None,
    ) -> Tensor:
        x, filters = floats(x, what), floats(filters, what)
        precision = choice(precision, what, "precision", PRECISIONS)
        groups = whole(groups, what, "groups")
        dims = _dims(what, count, x, filters, spatial, as_dims(group_dims, f"{what} group_dims"), groups)
        slides = _slides(
            dims,
            numbers_per_dim(stride, dims.spatial, what, "stride"),
            numbers_per_dim(dilation, dims.spatial, what, "dilation"),
            paddings_per_dim(padding, dims.spatial, what),
            what.endswith("_transpose"),
        )
        empty = [f"'{d.name}' ({d.size} long, window {f.size})"
                 for d, f, s in zip(dims.spatial, dims.windows, slides, strict=True) if s.out < 1]  # fmt: skip
        if empty:
            raise ShapeError(
                f"{at(what)}: no window fits dim {', '.join(empty)}; pad more, as with padding='SAME'", x, filters
            )
        windows = [
            SlidingDims(d.name, f.name, d.name, s) for d, f, s in zip(dims.spatial, dims.windows, slides, strict=True)
        ]
        name = what if name is None else name
        if groups == 1:
            return convolve(
                x, filters, windows, _result(x.shape, windows, dims.channels, dims.channels_out), precision, name
            )
        return _in_groups(x, filters, windows, dims, groups, precision, name)

    function.__name__ = function.__qualname__ = what
    function.__doc__ = doc
    return function


conv1d = _public(
    "conv1d",
    1,
    """A convolution along one dim: see `conv2d`, of which it has the arguments.

    x[..., length, channels], filters[k, channels, out]  ->  y[..., length, out]

    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.conv1d(mtf.input("x", "length:4;c:1"), mtf.ones("k:3;c:1;out:1"))
      >>> mtf.simulate(mtf.lower({"y": y})).step(x=[[1], [2], [3], [4]])["y"].ravel().tolist()
      [3.0, 6.0, 9.0, 7.0]
    """,
)
conv2d = _public(
    "conv2d",
    2,
    """A convolution along two dims: every output is the sum of a window of the input times the filters.

    x[..., height, width, channels], filters[kh, kw, channels, out]  ->  y[..., height, width, out]

    Args:
      x: float; its spatial dims are the two before the last, unless `spatial` says otherwise.
      filters: of x's dtype; the first two dims are the windows', unless `spatial` says otherwise. Of the others, one is
        x's channels, which are summed over; those that x lacks are the result's channels.
      stride: distance between windows: one for all dims, a list, or a dict by dim.
      padding: "SAME" (a window for every `stride` elements), "VALID" (windows inside only), or elements of zeros on
        both sides: a number, a pair per dim in a list, or a dict by dim.
      dilation: distance between the elements of a window, as `stride`.
      groups: into how many runs channels in and out are cut, each of which sees its own only; then filters have the
        channels of one group.
      spatial: {dim of x: dim of filters}.
      group_dims: dims of x and filters that the result keeps: each index is a convolution of its own (depthwise).
      precision: as of `einsum`, "default" or "highest".
      name: of the operation.
    Returns: x's dims in their order, spatial ones in their new sizes, out in place of the channels; x's dtype.
    Raises: ShapeError for dims that do not match, windows larger than what they slide over.
    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     image = mtf.input("image", mtf.Shape("batch:8;height:224;width:224;rgb:3").dims)
      ...     filters = mtf.variable("filters", mtf.Shape("kh:7;kw:7;rgb:3;channels:64").dims)
      ...     print(mtf.conv2d(image, filters, stride=2).shape)
      [batch:8, height:112, width:112, channels:64]

    Source: tf.nn.convolution; Mesh TensorFlow's Conv2dOperation.
    """,
)
conv3d = _public(
    "conv3d",
    3,
    """A convolution along three dims: see `conv2d`, of which it has the arguments.

    x[..., depth, height, width, channels], filters[kd, kh, kw, channels, out]  ->  y[..., depth, height, width, out]

    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     x = mtf.input("x", "batch:2;depth:8;height:8;width:8;channels:3")
      ...     filters = mtf.variable("filters", "kd:3;kh:3;kw:3;channels:3;out:16")
      ...     print(mtf.conv3d(x, filters, stride=[1, 2, 2]).shape)
      [batch:2, depth:8, height:4, width:4, out:16]
    """,
)
conv1d_transpose = _public(
    "conv1d_transpose",
    1,
    """A transposed convolution along one dim: see `conv2d_transpose`.

    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.conv1d_transpose(mtf.input("x", "length:2;c:1"), mtf.ones("k:2;out:1;c:1"), stride=2)
      >>> mtf.simulate(mtf.lower({"y": y})).step(x=[[1], [2]])["y"].ravel().tolist()
      [1.0, 1.0, 2.0, 2.0]
    """,
)
conv2d_transpose = _public(
    "conv2d_transpose",
    2,
    """A transposed convolution along two dims: what `conv2d` with these arguments gives its input as a gradient.

    x[..., height, width, channels], filters[kh, kw, out, channels]  ->  y[..., height * stride, width * stride, out]

    Args: as of `conv2d`; padding is that of the convolution of which this is the transposed one. A dim of n elements
      becomes n * stride long if padding is "SAME", (n - 1) * stride + max(window, stride) if it is "VALID", and
      (n - 1) * stride + window less its padding if that is given in numbers.
    Raises: as `conv2d`.
    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     x = mtf.input("x", mtf.Shape("batch:8;height:4;width:4;channels:512").dims)
      ...     filters = mtf.variable("filters", mtf.Shape("kh:4;kw:4;out:256;channels:512").dims)
      ...     print(mtf.conv2d_transpose(x, filters, stride=2).shape)
      [batch:8, height:8, width:8, out:256]

    Source: tf.nn.conv2d_transpose.
    """,
)
conv3d_transpose = _public(
    "conv3d_transpose",
    3,
    """A transposed convolution along three dims: see `conv2d_transpose`.

    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     x = mtf.input("x", "batch:2;depth:4;height:4;width:4;channels:16")
      ...     filters = mtf.variable("filters", "kd:2;kh:2;kw:2;out:3;channels:16")
      ...     print(mtf.conv3d_transpose(x, filters, stride=2).shape)
      [batch:2, depth:8, height:8, width:8, out:3]
    """,
)


_depthwise = _public("depthwise_conv2d", 2, "A convolution that keeps `group_dims`: see `conv2d`.")


def depthwise_conv2d(
    x: Tensor,
    filters: Tensor,
    stride: PerDim = 1,
    padding: Padding = "SAME",
    dilation: PerDim = 1,
    *,
    spatial: Spatial | None = None,
    precision: str = "default",
    name: str | None = None,
) -> Tensor:
    """A convolution with one or several filters per channel: `conv2d` that keeps the channels.

    x[..., height, width, channels], filters[kh, kw, channels]  ->  y[..., height, width, channels]

    Filters with another dim, [kh, kw, channels, multiplier], append it to the result's dims.
    Source: tf.nn.depthwise_conv2d, which merges the last two dims.
    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.depthwise_conv2d(mtf.input("x", "b:1;h:2;w:2;c:3"), mtf.ones("kh:2;kw:2;c:3"))
      >>> y.shape
      Shape('b:1;h:2;w:2;c:3')
    """
    shared_dims = [d for d in floats(filters, "depthwise_conv2d").shape if d in floats(x, "depthwise_conv2d").shape]
    return _depthwise(
        x, filters, stride, padding, dilation, spatial=spatial, group_dims=shared_dims, precision=precision, name=name
    )


def _slides(
    dims: _ConvolutionDims, strides: list[int], dilations: list[int], paddings: list[Any], transposed: bool
) -> list[Slide]:
    slides = []
    for d, f, stride, dilation, padding in zip(dims.spatial, dims.windows, strides, dilations, paddings, strict=True):
        if not transposed:
            out, (before, _) = window_sizes(d.size, f.size, stride, dilation, padding)
            slides.append(Slide(stride, dilation, 1, before, d.size, f.size, out))
            continue
        reach, last = (f.size - 1) * dilation + 1, (d.size - 1) * stride
        if padding == "SAME":
            output_size = d.size * stride
        else:
            output_size = last + (max(reach, stride) if padding == "VALID" else reach - sum(padding))
        _, (before, _) = window_sizes(max(1, output_size), f.size, stride, dilation, padding)
        slides.append(Slide(stride, dilation, 1, before, output_size, f.size, d.size).first_cotangent())
    return slides


def _result(
    shape: Shape, windows: Sequence[SlidingDims], channels: Dimension | None, channels_out: Sequence[Dimension]
) -> Shape:
    """The dims of x with new spatial sizes, and the output channels in place of the input channels or at the end."""
    sizes = {w.out: w.slide.out for w in windows}
    dims: list[Dimension] = []
    for d in shape:
        dims += (
            channels_out
            if channels is not None and d.name == channels.name
            else [Dimension(d.name, sizes.get(d.name, d.size))]
        )
    return Shape(dims if channels is not None else [*dims, *channels_out])


def _in_groups(
    x: Tensor,
    filters: Tensor,
    windows: Sequence[SlidingDims],
    dims: _ConvolutionDims,
    groups: int,
    precision: str,
    name: str,
) -> Tensor:
    """Channels reshaped to [group, channel in group]; the group keeps the name, so that layouts split it."""
    channels, (channels_out,) = dims.channels, dims.channels_out
    assert channels is not None
    used = (*x.shape, *filters.shape)
    inner, inner_out = (
        Dimension(free_name(f"{d.name}_in_group", used), d.size // groups) for d in (channels, channels_out)
    )
    group = Dimension(channels.name, groups)
    apart = replace_dimensions(x, channels, [group, inner])
    own = rename_dimension(filters, channels.name, inner.name)
    own = replace_dimensions(own, channels_out, [group, inner_out])
    y = convolve(apart, own, windows, _result(apart.shape, windows, inner, [inner_out]), precision, name)
    return replace_dimensions(y, [group, inner_out], channels_out)


# ---------------------------------------------------------------- identification of dims


def _dims(
    what: str,
    count: int,
    x: Tensor,
    filters: Tensor,
    spatial: Spatial | None,
    group_dims: Sequence[Dimension],
    groups: int,
) -> _ConvolutionDims:
    """The checked dims of a convolution. Raises: ShapeError that lists all faults."""
    dims, windows = _sliding_dims(what, count, x, filters, spatial)
    names = {d.name for d in dims}
    rest = [d for d in filters.shape if d not in windows and d not in group_dims and d.name not in names]
    shared = [d for d in rest if d.name in x.shape]
    channels_out = tuple(d for d in rest if d.name not in x.shape)
    channels = x.shape.dim(shared[0].name) if len(shared) == 1 else None
    faults = _name_faults(x, filters, dims, windows, group_dims)
    if len(shared) > 1:
        which = " and ".join(f"'{d.name}'" for d in shared)
        faults.append(f"filters share {which} with x, of which one can be the channels; name the others in group_dims")
    if not shared and not group_dims:
        faults.append(
            f"filters share no dim with x that could be the channels: theirs are {Shape(rest)}, those of x "
            f"{Shape(d for d in x.shape if d not in dims)}; rename one of them"
        )
    faults += _group_faults(channels, shared[0].size if shared else 0, channels_out, groups)
    if faults:
        raise ShapeError(f"{at(what)}: {'; '.join(faults)}", x, filters)
    return _ConvolutionDims(dims, windows, channels, channels_out)


def _sliding_dims(
    what: str, count: int, x: Tensor, filters: Tensor, spatial: Spatial | None
) -> tuple[tuple[Dimension, ...], tuple[Dimension, ...]]:
    """The `count` spatial dims of x, each with its filter dim."""
    if spatial is None:
        if len(x.shape) <= count or len(filters.shape) <= count:
            raise ShapeError(
                f"{at(what)}: x needs {count} spatial dim{'s' * (count > 1)} before its last, the channels, and "
                f"filters as many first; or say which they are, as in spatial={{'height': 'kh'}}",
                x,
                filters,
            )
        return tuple(x.shape.dims[-count - 1 : -1]), tuple(filters.shape.dims[:count])
    pairs = [(d, find_dim(filters, f, what)) for d, f in dims_of(x, spatial, what, "spatial")]
    if len(pairs) != count or len({f for _, f in pairs}) != count:
        raise ShapeError(f"{at(what)}: spatial must name {count} dims of x and filters each, got {spatial!r:.80}")
    return tuple(d for d, _ in pairs), tuple(f for _, f in pairs)


def _name_faults(
    x: Tensor, filters: Tensor, dims: Sequence[Dimension], windows: Sequence[Dimension], group_dims: Sequence[Dimension]
) -> list[str]:
    """Faults of names: filter dims that x has, spatial dims that the filters have, group dims that either lacks."""
    faults = [f"'{f.name}' of the window is a dim of x, too; rename it" for f in windows if f.name in x.shape]
    faults += [f"spatial dim '{d.name}' is in filters, too; rename it there" for d in dims if d.name in filters.shape]
    for d in group_dims:
        if d not in x.shape or d not in filters.shape or d in (*dims, *windows):
            faults.append(f"dim {d} of group_dims must be in x and in filters, and not slide")
    return faults


def _group_faults(
    channels: Dimension | None, of_filters: int, channels_out: Sequence[Dimension], groups: int
) -> list[str]:
    """Reasons why the channels can't be divided into `groups`; `of_filters` is the filters' size of `channels`."""
    if groups < 1:
        return [f"groups must be at least 1, got {groups}"]
    if groups > 1 and (channels is None or len(channels_out) != 1):
        return ["groups need one dim of channels in, and one out"]
    if channels is None:
        return []
    faults = []
    if channels.size % groups or any(d.size % groups for d in channels_out if groups > 1):
        both = (channels, *channels_out)
        fitting = divisors_near(gcd(*(d.size for d in both)), groups)
        faults.append(f"{groups} groups do not divide the channels {' and '.join(map(str, both))}; use {fitting}")
    elif of_filters * groups != channels.size:
        needed = f"{channels.size} / {groups} groups = {channels.size // groups}" if groups > 1 else str(channels.size)
        faults.append(f"filters have {of_filters} of the channels '{channels.name}', but need {needed}")
    return faults
