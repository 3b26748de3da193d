"""space_to_depth and depth_to_space: blocks of an image as channels, by reshapes and a transpose."""

from __future__ import annotations

from collections.abc import Sequence

from layouts import Dimension
from meshlib.core.arguments import at, items, whole
from meshlib.core.errors import ShapeError
from meshlib.core.graph import Tensor, find_dim
from meshlib.core.names import free_name
from meshlib.ops.building import tensor
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
