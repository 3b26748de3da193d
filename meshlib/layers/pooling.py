"""Pooling over the dims before the last."""

from __future__ import annotations

from collections.abc import Sequence

from meshlib.core.graph import Tensor
from meshlib.ops.images.pooling import pool_before_last


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
