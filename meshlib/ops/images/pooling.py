"""Pooling: maxima, minima, means or sums of windows that slide along dims.

Windows that tile a dim of n elements, w each, are a reshape to [n / w, w] and a reduction: axes stay on the major part
of a reshaped dim, so a split dim is pooled without communication as long as no window is cut. Windows that overlap,
leave gaps or reach into padding are `reduce_window`: a split dim needs halos.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from layouts import Dimension, Shape
from meshlib.core.arguments import at, choice, flag, items, whole
from meshlib.core.dtypes import INT32
from meshlib.core.errors import ShapeError
from meshlib.core.graph import Tensor, innermost
from meshlib.core.names import free_name
from meshlib.ops.building import build_source, floats, tensor
from meshlib.ops.control.custom_gradients import custom_gradient
from meshlib.ops.images.reduce_window import Slides, reduce_window
from meshlib.ops.images.sliding import Padding, PerDim, Slide, dims_of, numbers_per_dim, paddings_per_dim, window_sizes
from meshlib.ops.movement.indexing import RANGE
from meshlib.ops.movement.shape import reshape, transpose
from meshlib.ops.movement.tables import table
from meshlib.ops.pointwise.arithmetic import add_n, equal, multiply, where
from meshlib.ops.pointwise.reductions import reduce_max, reduce_mean, reduce_min, reduce_sum

_REDUCTIONS = {"max": reduce_max, "min": reduce_min, "avg": reduce_mean, "sum": reduce_sum}
Windows = Mapping[Dimension | str, int]


def pool(
    x: Tensor,
    windows: Windows,
    reduction: str = "max",
    strides: PerDim | None = None,
    name: str | None = None,
    *,
    padding: Padding = "VALID",
    dilation: PerDim = 1,
    count_padding: bool = False,
) -> Tensor:
    """One element for each window of a dim or several: y[i] = reduction of x[i s - before + k d], k < w.

    Args:
      x: any number dtype; float for "avg".
      windows: window w per dim, or per name.
      reduction: "max", "min", "avg" or "sum"; the gradient of a maximum or minimum goes to the first element that
        attains it, in row-major order of the dims of x.
      strides: distance s between windows; by default w, so that windows tile the dim.
      name: name of the result.
      padding: "VALID" (windows inside only), "SAME" (one per s elements), or elements before and after, as in
        `conv2d`. Padding is ignored, except in means with `count_padding`.
      dilation: distance d between the elements of a window.
      count_padding: whether means count padding as zeros.
    Returns: the dims of x in order, pooled dims with their new sizes; dtype of x.
    Raises: ShapeError for windows that do not fit, see only padding, or tile a dim with a remainder.
    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     x = mtf.input("x", mtf.Shape("batch:8;height:112;width:112;channels:64").dims)
      ...     print(mtf.pool(x, {"height": 3, "width": 3}, "max", 2, padding="SAME").shape)
      [batch:8, height:56, width:56, channels:64]

    Source: tf.nn.pool.
    """
    what = "pool"
    reduction = choice(reduction, what, "reduction", tuple(_REDUCTIONS))
    return _pool(
        what, x, windows, reduction, strides, name, padding, dilation, flag(count_padding, what, "count_padding")
    )


def max_pool(
    x: Tensor,
    windows: Windows,
    strides: PerDim | None = None,
    padding: Padding = "VALID",
    dilation: PerDim = 1,
    name: str | None = None,
) -> Tensor:
    """The maximum of each window; arguments as in `pool`.

    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.max_pool(mtf.input("x", "batch:1;h:2;w:2;c:1"), {"h": 2, "w": 2})
      >>> print(mtf.simulate(mtf.lower({"y": y})).step(x=[[[[1.0], [2.0]], [[3.0], [4.0]]]])["y"].ravel())
      [4.]
    """
    return _pool("max_pool", x, windows, "max", strides, name, padding, dilation, False)


def avg_pool(
    x: Tensor,
    windows: Windows,
    strides: PerDim | None = None,
    padding: Padding = "VALID",
    dilation: PerDim = 1,
    count_padding: bool = False,
    name: str | None = None,
) -> Tensor:
    """The mean of each window; arguments as in `pool`.

    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.avg_pool(mtf.input("x", "batch:1;h:2;w:2;c:1"), {"h": 2, "w": 2})
      >>> print(mtf.simulate(mtf.lower({"y": y})).step(x=[[[[1.0], [2.0]], [[3.0], [4.0]]]])["y"].ravel())
      [2.5]
    """
    counted = flag(count_padding, "avg_pool", "count_padding")
    return _pool("avg_pool", x, windows, "avg", strides, name, padding, dilation, counted)


def _pool(
    what: str,
    x: Tensor,
    windows: Windows,
    reduction: str,
    strides: PerDim | None,
    name: str | None,
    padding: Padding,
    dilation: PerDim,
    count_padding: bool,
) -> Tensor:
    sizes_of_dims = dims_of(floats(x, what) if reduction == "avg" else tensor(x, what), windows, what, "windows")
    dims = [d for d, _ in sizes_of_dims]
    sizes = numbers_per_dim(dict(sizes_of_dims), dims, what, "window")
    steps = sizes if strides is None else numbers_per_dim(strides, dims, what, "stride")
    dilations = numbers_per_dim(dilation, dims, what, "dilation")
    paddings = paddings_per_dim(padding, dims, what)
    given = list(zip(dims, sizes, steps, dilations, paddings, strict=True))
    chosen = f"{reduction}_pool" if name is None else name
    tiles = all(w == s and (d == 1 or w == 1) and _no_padding(p, dim, w) for dim, w, s, d, p in given)
    rests = [
        f"{w} does not divide dim '{dim.name}' of size {dim.size}; pad it to {-(-dim.size // w) * w} or slice it to "
        f"{dim.size // w * w}, or give strides to leave the rest out"
        for dim, w, *_ in given
        if dim.size % w
    ]
    if tiles and rests and strides is None:
        raise ShapeError(f"{at(what)}: {'; '.join(rests)}", x)
    if tiles and not rests:
        return _tiled(x, dict(zip(dims, sizes, strict=True)), reduction, chosen)
    all_slides = []
    for d, window, stride, step, around in given:
        count, (before, _) = window_sizes(d.size, window, stride, step, around)
        all_slides.append((d.name, Slide(stride, step, 1, before, d.size, window, count)))
    slides = tuple(all_slides)
    _check_windows(what, x, slides)
    if reduction != "avg":
        return reduce_window(x, slides, reduction, chosen)
    return _mean(reduce_window(x, slides, "sum", chosen), slides, count_padding)


def _no_padding(padding: object, dim: Dimension, window: int) -> bool:
    """True if windows that tile a dim, possibly with a remainder, do not reach into padding."""
    return padding in ("VALID", (0, 0)) or (padding == "SAME" and dim.size % window == 0)


def _tiled(x: Tensor, windows: Mapping[Dimension, int], reduction: str, name: str) -> Tensor:
    """Windows that tile their dims, as reductions over separate window dims."""
    windows = {d: w for d, w in windows.items() if w > 1}
    if not windows:
        return x
    parts: list[Dimension] = []
    for d in x.shape:
        window = windows.get(d, 1)
        parts.append(Dimension(d.name, d.size // window))
        if window > 1:
            parts.append(Dimension(free_name(f"{d.name}_window", x.shape), window))
    out = Shape([(d.name, d.size // windows.get(d, 1)) for d in x.shape])

    return reduce_tiles(reshape(x, parts), out, reduction, name)


def reduce_tiles(x: Tensor, out: Shape, reduction: str, name: str) -> Tensor:
    """x reduced to `out` over window dims; the gradient of a maximum goes to the first element that attains it."""
    reduce = _REDUCTIONS[reduction]
    if reduction not in ("max", "min") or not x.dtype.is_float:
        return reduce(x, output_shape=out, name=name)

    def gradient(inputs: list[Tensor], results: list[Tensor], cotangents: list[Tensor]) -> list[Tensor]:
        (x,), (y,), (dy,) = inputs, results, cotangents
        window = [d for d in x.shape if d not in out]
        graph = innermost([x], "range")
        count, parts = 1, []
        for d in reversed(window):
            parts.append(multiply(build_source(graph, RANGE, {"dim": d, "dtype": INT32}, None).output, count))
            count *= d.size
        position = add_n(parts)  # in row-major order
        first = reduce_min(where(equal(x, y), position, count, x.shape), output_shape=out)
        return [transpose(where(equal(position, first), dy, 0.0), x.shape)]

    reduced: Tensor = custom_gradient(lambda x: reduce(x, output_shape=out, name=name), gradient, [x])
    return reduced


def _check_windows(what: str, x: Tensor, slides: Slides) -> None:
    faults = []
    for dim, s in slides:
        if s.out < 1:
            faults.append(f"no window of {s.second} fits dim '{dim}' of size {s.first}; pad more")
        elif min(_counts(s, (0, s.out - 1))) < 1 or min(_counts(s)) < 1:  # the end windows first: padding may be long
            faults.append(f"some windows of {s.second} along dim '{dim}' of size {s.first} see padding only; pad less")
    if faults:
        raise ShapeError(f"{at(what)}: {'; '.join(faults)}", x)


def _counts(s: Slide, of: Sequence[int] | None = None) -> list[int]:
    """The number of elements inside the dim for each window, or for the windows `of`."""
    (part,) = s.plain()
    counts: list[int] = part.taps_inside(s.first, of).tolist()
    return counts


def _mean(total: Tensor, slides: Slides, count_padding: bool) -> Tensor:
    """Sums of windows divided by the number of elements: one number, or one per window of a dim."""
    share, apart = 1.0, []
    for dim, s in slides:
        counts = [s.second] * s.out if count_padding else _counts(s)
        if len(set(counts)) == 1:
            share /= counts[0]
        else:
            apart.append((Dimension(dim, s.out), 1 / np.array(counts, np.float64)))
    if share != 1:
        total = multiply(total, share)
    for d, shares in apart:
        total = multiply(total, table(innermost([total], "constant"), shares, Shape([d]), total.dtype, None))
    return total


def pool_before_last(x: Tensor, ksize: Sequence[int], reduction: str, what: str, name: str) -> Tensor:
    """Pool the dims before the last, as in images [batch ..., height, width, channels]; one window size per dim."""
    given = [whole(k, what, "each of ksize") for k in items(ksize, what, "ksize")]
    dims = {"2d": 2, "3d": 3}[what[-2:]]
    if len(given) != dims:
        raise ShapeError(f"{at(what)}: ksize must have {dims} numbers, got {given}")
    if len(tensor(x, what).shape) <= dims:
        raise ShapeError(f"{at(what)}: needs {dims} dims before the last, the channels, got {x}")
    return pool(x, dict(zip(x.shape.dims[-dims - 1 : -1], given, strict=True)), reduction, name=name)
