"""Images in blocks: space_to_depth and depth_to_space; convolutions of [..., h_blocks, w_blocks, h, w, c].

The blocks are merged into dims named after the block dims, so that axes which split these split the image, and the
convolution exchanges halos itself. The result is that of the whole image, cut into blocks again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from layouts import Dimension
from meshlib.core.arguments import at, items, whole
from meshlib.core.errors import ShapeError
from meshlib.core.graph import Tensor, find_dim
from meshlib.core.names import free_name
from meshlib.core.text import counted
from meshlib.ops.building import tensor
from meshlib.ops.images.convolution import conv2d, conv3d
from meshlib.ops.images.sliding import Padding, PerDim
from meshlib.ops.movement.shape import reshape, transpose


def space_to_depth(
    x: Tensor,
    block_size: int,
    spatial: Sequence[Dimension | str] | None = None,
    depth_dim: Dimension | str | None = None,
    name: str | None = None,
) -> Tensor:
    """Move squares of an image to channels: [..., height, width, c] -> [..., height / b, width / b, b * b * c].

    Args:
      x: any dtype.
      block_size: b, the edge of a square.
      spatial: the dims to cut; the two before the last by default.
      depth_dim: the dim that takes the elements of a square, row by row, each with its channels; the last by default.
      name: name of the operation.
    Returns: x's dims with new sizes.
    Raises: ShapeError if b does not divide a dim.
    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     x = mtf.input("x", mtf.Shape("batch:8;height:224;width:224;rgb:3").dims)
      ...     print(mtf.space_to_depth(x, 2).shape)
      [batch:8, height:112, width:112, rgb:12]

    Source: tf.nn.space_to_depth; with b = 2 it makes the first layer of a network fill the MXU better (Kumar et al.,
    "Scale MLPerf-0.6 models on Google TPU-v3 Pods", arXiv:1909.09756).
    """
    what = "space_to_depth"
    block, dims, depth = _arguments(what, x, block_size, spatial, depth_dim)
    uneven = [str(d) for d in dims if d.size % block]
    if uneven:
        raise ShapeError(f"{at(what)}: squares of {block} do not divide dim {' and '.join(uneven)}; pad it", x)
    inner = {d.name: Dimension(free_name(f"{d.name}_block", x.shape.names), block) for d in dims}
    parts: list[Dimension] = []
    for d in x.shape:
        parts += [Dimension(d.name, d.size // block), inner[d.name]] if d.name in inner else [d]
    outer = [d for d in parts if d not in inner.values()]
    place = outer.index(depth)
    moved = [*outer[:place], *(inner[d.name] for d in dims), depth, *outer[place + 1 :]]
    joined = Dimension(depth.name, depth.size * block ** len(dims))
    return reshape(
        transpose(reshape(x, parts), moved),
        [*outer[:place], joined, *outer[place + 1 :]],
        what if name is None else name,
    )


def depth_to_space(
    x: Tensor,
    block_size: int,
    spatial: Sequence[Dimension | str] | None = None,
    depth_dim: Dimension | str | None = None,
    name: str | None = None,
) -> Tensor:
    """Move channels to squares of an image: [..., height, width, b * b * c] -> [..., height * b, width * b, c].

    The inverse of `space_to_depth` with these arguments. Raises: ShapeError if the channels do not divide.
    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.depth_to_space(mtf.input("x", "batch:1;h:1;w:1;c:4"), 2)
      >>> print(mtf.simulate(mtf.lower({"y": y})).step(x=[[[[1.0, 2.0, 3.0, 4.0]]]])["y"].ravel())
      [1. 2. 3. 4.]
    """
    what = "depth_to_space"
    block, dims, depth = _arguments(what, x, block_size, spatial, depth_dim)
    elements = block ** len(dims)
    if depth.size % elements:
        raise ShapeError(f"{at(what)}: dim {depth} does not hold squares of {elements} elements", x)
    inner = {d.name: Dimension(free_name(f"{d.name}_block", x.shape.names), block) for d in dims}
    rest = Dimension(depth.name, depth.size // elements)
    parts: list[Dimension] = []
    moved: list[Dimension] = []
    merged_dims: list[Dimension] = []
    for d in x.shape:
        parts += [*(inner[s.name] for s in dims), rest] if d == depth else [d]
        moved += [d, inner[d.name]] if d.name in inner else [rest if d == depth else d]
        merged_dims.append(Dimension(d.name, d.size * block) if d.name in inner else rest if d == depth else d)
    return reshape(transpose(reshape(x, parts), moved), merged_dims, what if name is None else name)


def _arguments(
    what: str, x: Tensor, block_size: int, spatial: Sequence[Dimension | str] | None, depth_dim: Dimension | str | None
) -> tuple[int, list[Dimension], Dimension]:
    block = whole(block_size, what, "block_size")
    if block < 1:
        raise ShapeError(f"{at(what)}: block_size must be at least 1, got {block}")
    if (spatial is None or depth_dim is None) and len(tensor(x, what).shape) < 3:
        raise ShapeError(f"{at(what)}: needs two spatial dims and channels, got {x}")
    given = x.shape.dims[-3:-1] if spatial is None else items(spatial, what, "spatial")
    dims = [find_dim(x, d, what) for d in given]
    depth = x.shape.dims[-1] if depth_dim is None else find_dim(x, depth_dim, what)
    if not dims or len({*dims, depth}) < len(dims) + 1:
        raise ShapeError(f"{at(what)}: spatial dims and depth_dim must be different dims of {x}")
    return block, dims, depth


def conv2d_with_blocks(
    x: Tensor,
    filters: Tensor,
    stride: PerDim = 1,
    padding: Padding = "SAME",
    h_blocks_dim: Dimension | None = None,
    w_blocks_dim: Dimension | None = None,
    name: str | None = None,
) -> Tensor:
    """`conv2d` of an image in blocks: [..., h_blocks, w_blocks, h, w, channels]; either block dim may be missing.

    Stride and padding refer to the whole image, as lists. Raises: ShapeError if its result can't be cut into as
    many blocks.
    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     x, filters = mtf.input("x", "h_blocks:2;h:4;w:8;c:3"), mtf.ones("kh:3;kw:3;c:3;out:8")
      ...     y = mtf.conv2d_with_blocks(x, filters, h_blocks_dim=mtf.Dimension("h_blocks", 2))
      ...     program = mtf.lower({"y": y}, mesh="rows:2", layout="h_blocks:rows")
      >>> print(y.shape, {c.kind for c in program.collectives})
      [h_blocks:2, h:4, w:8, out:8] {'collective_permute'}
    """

    def conv(whole: Tensor) -> Tensor:
        return conv2d(whole, filters, stride, padding, name=name)

    return in_whole("conv2d_with_blocks", x, 2, (h_blocks_dim, w_blocks_dim), conv)


def conv3d_with_blocks(
    x: Tensor,
    filters: Tensor,
    stride: PerDim = 1,
    padding: Padding = "SAME",
    d_blocks_dim: Dimension | None = None,
    h_blocks_dim: Dimension | None = None,
    name: str | None = None,
) -> Tensor:
    """`conv3d` of a volume in blocks: [..., d_blocks, h_blocks, d, h, w, channels]; see `conv2d_with_blocks`.

    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     x, filters = mtf.input("x", "d_blocks:2;d:4;h:8;w:8;c:1"), mtf.ones("kd:3;kh:3;kw:3;c:1;out:8")
      ...     y = mtf.conv3d_with_blocks(x, filters, stride=[1, 2, 2], d_blocks_dim=mtf.Dimension("d_blocks", 2))
      >>> print(y.shape)
      [d_blocks:2, d:4, h:4, w:4, out:8]
    """

    def conv(whole: Tensor) -> Tensor:
        return conv3d(whole, filters, stride, padding, name=name)

    return in_whole("conv3d_with_blocks", x, 3, (d_blocks_dim, h_blocks_dim), conv)


def in_whole(
    what: str, x: Tensor, count: int, blocks: Sequence[Dimension | None], conv: Callable[[Tensor], Tensor]
) -> Tensor:
    """`conv` applied to x with its blocks merged, and the result cut into blocks again.

    Args:
      what: the caller, for messages.
      x: [..., the block dims ..., `count` spatial dims, channels].
      count: number of spatial dims.
      blocks: block dim of each of the first spatial dims; None for one without blocks.
      conv: keeps the names of spatial dims, and the channels last.
    """
    if len(tensor(x, what).shape) <= count:
        raise ShapeError(f"{at(what)}: needs {counted(count, 'spatial dim')} before the last, the channels, got {x}")
    inner = x.shape.dims[-count - 1 : -1]
    by_name = {d.name: find_dim(x, b, what) for d, b in zip(inner, blocks, strict=False) if b is not None}
    if not by_name:
        return conv(x)
    if not {*by_name.values()}.isdisjoint((*inner, x.shape[-1])):
        raise ShapeError(f"{at(what)}: the dims that count blocks must not be spatial dims or the channels of {x}")
    outer = [d for d in x.shape.dims[: -count - 1] if d not in by_name.values()]
    y = conv(_joined_blocks(x, inner, outer, by_name))
    return _cut_again(what, x, y, inner, outer, by_name)


def _joined_blocks(
    x: Tensor, inner: Sequence[Dimension], outer: Sequence[Dimension], by_name: Mapping[str, Dimension]
) -> Tensor:
    """x as [outer, whole spatial dims, channels]; `by_name`: spatial dim -> the dim that counts its blocks."""
    beside = [d for s in inner for d in ([by_name[s.name]] if s.name in by_name else []) + [s]]
    whole = [Dimension(by_name[s.name].name, by_name[s.name].size * s.size) if s.name in by_name else s for s in inner]
    return reshape(transpose(x, [*outer, *beside, x.shape[-1]]), [*outer, *whole, x.shape[-1]])


def _cut_again(
    what: str,
    x: Tensor,
    y: Tensor,
    inner: Sequence[Dimension],
    outer: Sequence[Dimension],
    by_name: Mapping[str, Dimension],
) -> Tensor:
    """A result for whole spatial dims, cut into as many blocks as x has, with dims in the order of x."""
    count = len(inner)
    parts, block_dims = [*y.shape.dims[: len(outer)]], y.shape.dims[len(outer) : len(outer) + count]
    for d, s in zip(block_dims, inner, strict=True):
        b = by_name.get(s.name)
        if b is not None and d.size % b.size:
            raise ShapeError(f"{at(what)}: dim '{s.name}' of the result, {d.size} long, is not {b.size} blocks", x)
        parts += [d] if b is None else [b, Dimension(s.name, d.size // b.size)]
    channels = y.shape.dims[len(outer) + count :]
    counts = list(by_name.values())
    last = [d for d in parts if d not in counts and d not in outer]
    order = [d for d in x.shape.dims[: -count - 1] if d in (*outer, *counts)]
    return transpose(reshape(y, [*parts, *channels]), [*order, *last, *channels])
