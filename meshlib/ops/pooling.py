"""Pooling: maxima, means or sums of windows that tile a dim.

A dim of n elements in windows of w is reshaped to [n / w, w], and the windows are reduced. Axes stay on the major part
of a reshaped dim, so a split dim is pooled where it lies, without communication, as long as no window is cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from layouts import Dimension, Shape
from meshlib.checks import at, choice, items, whole
from meshlib.errors import ShapeError
from meshlib.graph import Tensor, find_dim
from meshlib.names import free_name
from meshlib.ops.building import tensor
from meshlib.ops.reduce import reduce_max, reduce_mean, reduce_min, reduce_sum
from meshlib.ops.shape import reshape

_REDUCTIONS = {"max": reduce_max, "min": reduce_min, "avg": reduce_mean, "sum": reduce_sum}


def pool(
    x: Tensor,
    windows: Mapping[Dimension | str, int],
    reduction: str = "max",
    strides: Mapping[Dimension | str, int] | None = None,
    name: str | None = None,
) -> Tensor:
    """One element for each window of a dim or several: y[i] = reduction of x[i w], ..., x[i w + w - 1].

    Args:
      x: any number dtype; float for "avg".
      windows: window per dim, or per name; it must divide the dim.
      reduction: "max" (ties share the gradient equally), "min", "avg" or "sum".
      strides: equal to `windows`, which is also the default: windows that overlap or leave gaps are an error.
      name: of the result.
    Returns: the dims of x in their order and under their names, each pooled one smaller by its window; dtype of x.
    Raises: ShapeError for a window that does not divide, for strides that are not the windows.
    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     x = mtf.input("x", [mtf.Dimension("batch", 8), mtf.Dimension("length", 12)])
      ...     print(mtf.pool(x, {"length": 3}, "avg").shape)
      [batch:8, length:4]
    """
    what = "pool"
    reduction = choice(reduction, what, "reduction", tuple(_REDUCTIONS))
    tensor(x, what)
    sizes = _per_dim(x, windows, "window")
    steps = sizes if strides is None else _per_dim(x, strides, "stride")
    _check_windows(x, sizes, steps)
    sizes = {d: w for d, w in sizes.items() if w > 1}
    if not sizes:
        return x
    parts: list[Dimension] = []
    for d in x.shape:
        window = sizes.get(d, 1)
        parts.append(Dimension(d.name, d.size // window))
        if window > 1:
            parts.append(Dimension(free_name(f"{d.name}_window", x.shape), window))
    out = Shape([(d.name, d.size // sizes.get(d, 1)) for d in x.shape])
    chosen = f"{reduction}_pool" if name is None else name
    return _REDUCTIONS[reduction](reshape(x, parts), output_shape=out, name=chosen)


def _per_dim(x: Tensor, given: object, argument: str) -> dict[Dimension, int]:
    if not isinstance(given, Mapping):
        raise ShapeError(f"{at('pool')}: {argument}s must be a dict of {argument} per dim, got {given!r:.80}")
    return {find_dim(x, d, "pool"): whole(n, "pool", f"the {argument} of '{d}'") for d, n in given.items()}


def _check_windows(x: Tensor, windows: Mapping[Dimension, int], strides: Mapping[Dimension, int]) -> None:
    faults = []
    for d, window in windows.items():
        stride = strides.get(d, window)
        if window < 1:
            faults.append(f"the window of dim '{d.name}' must be at least 1, got {window}")
        elif stride != window:
            how = "overlap" if stride < window else "leave gaps"
            faults.append(
                f"windows of {window} at stride {stride} {how} in dim '{d.name}'; only strides equal to the windows "
                "are supported"
            )
        elif d.size % window:
            padded = -(-d.size // window) * window
            faults.append(
                f"{window} does not divide dim '{d.name}' of size {d.size}; pad it to {padded} or slice it to "
                f"{padded - window}"
            )
    faults += [f"dim '{d.name}' has a stride, but no window" for d in strides if d not in windows]
    if faults:
        raise ShapeError(f"{at('pool')}: {'; '.join(faults)}\n  {x}")


def pool_before_last(x: Tensor, ksize: Sequence[int], reduction: str, what: str, name: str) -> Tensor:
    """Pool the dims before the last, as images [batch ..., height, width, channels] have them: a window for each."""
    given = [whole(k, what, "each of ksize") for k in items(ksize, what, "ksize")]
    dims = {"2d": 2, "3d": 3}[what[-2:]]
    if len(given) != dims:
        raise ShapeError(f"{at(what)}: ksize must have {dims} numbers, got {given}")
    if len(tensor(x, what).shape) <= dims:
        raise ShapeError(f"{at(what)}: needs {dims} dims before the last, the channels, got {x}")
    return pool(x, dict(zip(x.shape.dims[-dims - 1 : -1], given, strict=True)), reduction, name=name)
