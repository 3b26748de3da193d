"""Resizing of images: nearest or bilinear interpolation, one dim at a time.

Along a dim each element of the result is a weighted sum of a few elements of the operand, its taps. The cotangent has
the transposed taps: for each element of the operand the elements of the result of which it is a tap.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from layouts import Dimension
from meshlib.core.arguments import at, choice, whole
from meshlib.core.errors import ShapeError
from meshlib.core.graph import Operation, Tensor, TensorType
from meshlib.core.opdef import Array, Block, Factor, Halo, Kind, Linear, Role, Work, operation
from meshlib.ops.building import build, floats, named_factors
from meshlib.ops.images.sliding import Range, dims_of

METHODS = ("nearest", "bilinear")
Taps = tuple[Array, Array]  # indices and weights, [result, taps]; taps of weight 0 have any nearby index


@lru_cache(maxsize=256)
def taps(method: str, old: int, new: int, back: bool) -> Taps:
    """The taps of each of `new` elements among `old`; with `back` the transposed taps, of each old one among the new.

    Element i has its centre at (i + 1/2) old / new, in units of old elements, whose centres lie at j + 1/2.

    >>> taps("bilinear", 2, 4, False)[1].tolist()
    [[0.25, 0.75], [0.75, 0.25], [0.25, 0.75], [0.75, 0.25]]
    """
    centre = (2 * np.arange(new) + 1) * old  # in units of 1 / (2 new)
    if method == "nearest":
        index, weight = (centre // (2 * new))[:, None], np.ones((new, 1))
    else:
        low, rest = np.divmod(centre - new, 2 * new)
        index = np.clip(low[:, None] + [0, 1], 0, old - 1)
        weight = np.stack([1 - rest / (2 * new), rest / (2 * new)], 1)
    return _transposed(index, weight, old) if back else (index, weight)


def _transposed(index: Array, weight: Array, old: int) -> Taps:
    rows, columns = weight.nonzero()
    order = np.argsort(index[rows, columns], kind="stable")
    rows, columns = rows[order], columns[order]
    old_index, counts = index[rows, columns], np.bincount(index[rows, columns], minlength=old)
    ends = counts.cumsum()
    # Elements without taps get one of weight 0 next to those of their neighbour.
    near = np.where(ends > 0, rows[ends - 1], 0)
    tap_index, weights_of = np.repeat(near[:, None], counts.max(), axis=1), np.zeros((old, counts.max()))
    place = old_index, np.arange(len(rows)) - (ends - counts)[old_index]
    tap_index[place], weights_of[place] = rows, weight[rows, columns]
    return tap_index, weights_of


def taps_of(op: Operation) -> Taps:
    """The taps of an operation for its whole result."""
    sizes = [x.shape.dim(op.attrs["dim"]).size for x in (op.inputs[0], op.output)]
    old, new = sizes[::-1] if op.attrs["back"] else sizes
    return taps(op.attrs["method"], old, new, op.attrs["back"])


def _needs(op: Operation, factor: Factor, operand: int, start: int, stop: int) -> Range:
    index = taps_of(op)[0][start:stop]
    return int(index.min()), int(index.max()) + 1


def _local(block: Block, x: Array) -> Array:
    dim, out = block.attrs["dim"], block.result()
    axis = block.out.shape.index(dim)
    begin, rows_here = block.offsets[dim], out.shape[axis]
    index, weight = (a[begin : begin + rows_here] for a in taps_of(block.operation))
    shape = [-1 if n == axis else 1 for n in range(x.ndim)]
    for k in range(index.shape[1]):
        tap = np.take(x, index[:, k] - block.start(0, dim), axis=axis)
        if block.attrs["method"] != "nearest" or block.attrs["back"]:
            tap *= weight[:, k].astype(x.dtype).reshape(shape)
        if k:
            np.add(out, tap, out=out)
        else:
            out[...] = tap
    return out


def _work(ins: tuple[TensorType, ...], out: TensorType, attrs: Mapping[str, Any]) -> Work:
    per_element = 1 if attrs["method"] == "nearest" else 4  # two products and two sums
    return Work(0, per_element * (ins[0] if attrs["back"] else out).shape.size)


def _grad(op: Operation, dy: Tensor) -> list[Tensor | None]:
    back = {"size": op.inputs[0].shape.dim(op.attrs["dim"]).size, "back": not op.attrs["back"]}
    return [build(INTERPOLATE, [dy], {**op.attrs, **back})]


INTERPOLATE = operation(
    "interpolate",
    kind=Kind.INDEXED,
    shape=lambda types, attrs: TensorType(types[0].shape.resize(attrs["dim"], attrs["size"]), types[0].dtype),
    roles=lambda op: named_factors(op, {op.attrs["dim"]: Role.HALO}),
    local=_local,
    grad=_grad,
    work=_work,
    linear=lambda op: Linear((0,)),
    lower=Halo(_needs),
)


def resize(
    x: Tensor, sizes: Mapping[Dimension | str, int], method: str = "bilinear", name: str | None = None
) -> Tensor:
    """An image resized to a larger or smaller size.

    Args:
      x: float.
      sizes: the new size per dim, or per name.
      method: "nearest", or "bilinear": weighted means of the two nearest elements along each dim. Pixel centres are at
        half-integers; beyond the outermost centres values are constant. Downscaling does not average (no
        antialiasing).
      name: name of the last operation; there is one per resized dim.
    Returns: x's dims with new sizes; x's dtype.
    Raises: ShapeError for sizes below 1 and unknown dims.
    Example:
      >>> import numpy as np
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     x = mtf.constant(np.array([0.0, 4.0]), mtf.Dimension("width", 2))
      ...     y = mtf.resize(x, {"width": 4})
      >>> mtf.simulate(mtf.lower({"y": y})).step()["y"].tolist()
      [0.0, 1.0, 3.0, 4.0]

    Source: tf.image.resize of TensorFlow 2; jax.image.resize with antialias=False.
    """
    what = "resize"
    method = choice(method, what, "method", METHODS)
    for d, given in dims_of(floats(x, what), sizes, what, "sizes"):
        size = whole(given, what, f"the size of '{d.name}'")
        if size < 1:
            raise ShapeError(f"{at(what)}: the size of '{d.name}' must be at least 1, got {size}", x)
        if size != d.size:
            attrs = {"dim": d.name, "size": size, "method": method, "back": False}
            x = build(INTERPOLATE, [x], attrs, what if name is None else name)
    return x
