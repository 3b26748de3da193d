"""Convolutions: a product if windows tile the input without overlap, otherwise the library's convolution."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from layouts import Dimension, Shape
from meshlib.core.graph import Tensor
from meshlib.jax.importing.axes import Axes, Axis
from meshlib.jax.importing.code import CodeStep
from meshlib.jax.importing.contraction import precision_of
from meshlib.jax.importing.table import give, rule
from meshlib.jax.importing.writing import StepWriter
from meshlib.ops.contraction.einsum import einsum
from meshlib.ops.images.convolve import convolve
from meshlib.ops.images.sliding import Slide, SlidingDims
from meshlib.ops.movement.shape import rename_dimension, reshape
from meshlib.ops.pointwise.casts import cast


@dataclass(frozen=True)
class _AxisPositions:
    """Positions of a convolution's axes in input, kernel and result; spatial axes in one order."""

    batch: int
    features: int
    space: tuple[int, ...]
    made: int  # kernel axis of output features
    summed: int
    window: tuple[int, ...]
    out: tuple[int, ...]  # result axes: batch, features, spatial axes


def _dims(step: CodeStep) -> _AxisPositions:
    numbers = step.params["dimension_numbers"]
    (batch, features, *space), (new_features, summed, *window) = numbers.lhs_spec, numbers.rhs_spec
    return _AxisPositions(batch, features, tuple(space), new_features, summed, tuple(window), tuple(numbers.out_spec))


def _is_patches(step: CodeStep) -> bool:
    """True if the windows tile the input without overlap."""
    p, (x, kernel), d = step.params, step.ins, _dims(step)
    sizes = [kernel.shape[n] for n in d.window]
    plain = p["feature_group_count"] == p["batch_group_count"] == 1
    plain = plain and {*p["lhs_dilation"], *p["rhs_dilation"]} <= {1} and not any(a or b for a, b in p["padding"])
    plain = plain and [*p["window_strides"]] == sizes
    return plain and not any(x.shape[n] % size for n, size in zip(d.space, sizes, strict=True))


def _axes(axes: Axes, step: CodeStep) -> None:
    """Set `labels`: group, contracted features, batch, output features, and the windows' axes."""
    (x, kernel), (out,), d, p = step.ins, step.outs, _dims(step), step.params
    of_features, of_batch = int(p["feature_group_count"]), int(p["batch_group_count"])
    group = axes.new(of_features * of_batch)
    summed, rows = axes.new(kernel.shape[d.summed]), axes.new(out.shape[d.out[0]])
    new_features = axes.new(kernel.shape[d.made] // group.size)
    windows = [axes.new(kernel.shape[n]) for n in d.window]
    places = [axes.new(out.shape[n]) for n in d.out[2:]]
    axes.hold(axes.space(), [group, summed, rows, new_features, *windows, *places])
    axes.tie_runs([group, rows] if of_batch > 1 else [rows], [x.axes[d.batch]])
    axes.tie_runs([group, summed] if of_features > 1 else [summed], [x.axes[d.features]])
    axes.tie_runs([group, new_features], [kernel.axes[d.made]])
    for label, n in ((summed, d.summed), *zip(windows, d.window, strict=True)):
        axes.tie(label, kernel.axes[n])
    for n, place, window in zip(d.space, places, windows, strict=True):
        if _is_patches(step):
            axes.tie_runs([place, window], [x.axes[n]])
        elif place.size == x.shape[n]:
            axes.tie(place, x.axes[n])
        else:
            axes.kin.append((place, x.axes[n]))
    features = new_features if group.size == 1 else Axis(group.size * new_features.size, parts=(group, new_features))
    axis_of = dict(zip(d.out, [rows, features, *places], strict=True))
    give(axes, out, [axis_of[n] for n in range(len(out.shape))])
    step.labels = [group, summed, rows, new_features, *windows]


def _write(w: StepWriter, step: CodeStep) -> Tensor:
    (x, kernel), (out,), d = step.ins, step.outs, _dims(step)
    group, summed, rows, new_features, *windows = step.labels
    places = [out.axes[n] for n in d.out[2:]]
    of_features = int(step.params["feature_group_count"]) > 1
    of_kernel: dict[int, list[Axis]] = {d.made: [group, new_features], d.summed: [summed]}
    of_kernel |= {n: [a] for n, a in zip(d.window, windows, strict=True)}
    of_x: dict[int, list[Axis]] = {d.batch: [rows] if of_features else [group, rows]}
    of_x[d.features] = [group, summed] if of_features else [summed]
    if _is_patches(step):
        of_x |= {n: [p, f] for n, p, f in zip(d.space, places, windows, strict=True)}
        a, b = _under(w, x, of_x), _under(w, kernel, of_kernel)
        return einsum([a, b], w.shape(out.axes), precision=precision_of(step))
    of_x |= {n: [x.axes[n]] for n in d.space}
    a, b = _under(w, x, of_x), _under(w, kernel, of_kernel)
    slid = _windows(w, step, windows, places)
    for n, axis, one in zip(d.space, windows, slid, strict=True):
        a, b = _named(w, a, x.axes[n], one.first), _named(w, b, axis, one.second)
    ends = {place: Dimension(one.out, place.size) for place, one in zip(places, slid, strict=True)}
    shape = Shape([e for y in out.axes for e in ([ends[y]] if y in ends else w.shape([y]))])
    dtype = max((a.dtype, b.dtype), key=lambda t: t.itemsize)
    y = convolve(cast(a, dtype), cast(b, dtype), slid, shape, precision_of(step))
    held = [e for z in out.axes for e in w.shape([z])]
    return y if [*y.shape] == held else reshape(y, held)


def _named(w: StepWriter, t: Tensor, axis: Axis, name: str) -> Tensor:
    """Replace an axis's dims by one dim of this name."""
    t, one = w.merge(t, axis), w.whole_dim(axis).name
    return t if one == name else rename_dimension(t, one, name)


def _under(w: StepWriter, x: Any, of: dict[int, list[Axis]]) -> Tensor:
    """An operand under the dims of the index space."""
    target = [a for n in range(len(x.shape)) for a in of[n]]
    return w.full(w.rename(w.tensor(x), w.axes.flat(x.axes), w.axes.flat(target)), target)


def _windows(w: StepWriter, step: CodeStep, windows: Sequence[Axis], places: Sequence[Axis]) -> list[SlidingDims]:
    """The sliding dims; those of axes of length 1 get temporary names."""
    (x, _), d, p = step.ins, _dims(step), step.params

    def name(axis: Axis, k: int, what: str) -> str:
        return w.whole_dim(axis).name if w.axes.dims(axis) else f"{what}_{k}"

    window_list = []
    for k, (n, window, place) in enumerate(zip(d.space, windows, places, strict=True)):
        slide = Slide(
            int(p["window_strides"][k]), int(p["rhs_dilation"][k]), int(p["lhs_dilation"][k]), int(p["padding"][k][0]),
            x.shape[n], window.size, place.size,
        )  # fmt: skip
        names = name(x.axes[n], k, "place"), name(window, k, "window"), name(place, k, "place")
        window_list.append(SlidingDims(*names, slide))
    return window_list


rule("conv_general_dilated", axes=_axes, write=_write)
