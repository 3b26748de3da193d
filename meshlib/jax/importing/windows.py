"""Primitives that slice, pad and concatenate."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod

import jax
import numpy as np

from layouts import Dimension
from meshlib.core.graph import Tensor
from meshlib.jax.importing.axes import Axes, Axis
from meshlib.jax.importing.code import Array, CodeStep, Var
from meshlib.jax.importing.ranges import Part, Run, concatenated, pads_of, restored, restored_range, runs_of
from meshlib.jax.importing.table import RULES, give, rule, same_axes
from meshlib.jax.importing.writing import StepWriter, renamed
from meshlib.ops.movement.dynamic_slices import dynamic_slice, update_slice
from meshlib.ops.movement.runs import concat, pad, slice, strided_slice
from meshlib.ops.movement.shape import broadcast, reshape, stack, transpose
from meshlib.ops.pointwise.arithmetic import maximum, minimum
from meshlib.ops.pointwise.casts import cast

# ---------------------------------------------------------------- slices


def _cut(w: StepWriter, t: Tensor, old: Axis, new: Axis, run: Run) -> Tensor:
    """A slice along one axis, under the dims of another; where the axis is a product, of its major dim if possible."""
    begin, size, stride = run
    dims, new_dims = w.axes.dims(old), w.axes.dims(new)
    if all(w.dim(d) not in t.shape for d in dims):
        return t
    if stride == 1 and len(dims) > 1:
        inner = prod(d.size for d in dims[1:])
        tail = dims[1:]
        same = new_dims[len(new_dims) - len(tail) :] == tail
        if same and not begin % inner and not size % inner:
            return _cut_dim(
                w, t, w.dim(dims[0]), new_dims[: len(new_dims) - len(tail)], (begin // inner, size // inner, 1)
            )
    t = w.merge(t, old)
    one = w.whole_dim(old)
    again = restored_range(t, begin, Dimension(one.name, size)) if stride == 1 else None
    t = strided_slice(t, begin, size, stride, one.name) if again is None else again
    whole = w.whole_dim(new)
    t = renamed(t, {one.name: whole.name}) if one.name != whole.name else t
    return w.apart(t, new)


def _cut_dim(w: StepWriter, t: Tensor, d: Dimension, left: Sequence[Axis], run: Run) -> Tensor:
    if d not in t.shape:
        return t
    t = slice(t, run[0], run[1], d.name)
    if not left:
        return _dropped(t, d.name)
    (new,) = [w.dim(a) for a in left]
    return renamed(t, {d.name: new.name}) if new.name != d.name else t


def _dropped(t: Tensor, name: str) -> Tensor:
    """Remove a dim of size 1."""
    return reshape(t, [d for d in t.shape if d.name != name])


def _slice_axes(axes: Axes, step: CodeStep) -> None:
    x, out = step.ins[0], step.outs[0]
    give(axes, out, [_run_axis(axes, step, x, n, run) for n, run in enumerate(runs_of(step))])


def _run_axis(axes: Axes, step: CodeStep, x: Var, n: int, run: Run) -> Axis:
    """The axis of a slice: the sliced axis if the slice is whole, its minor dims if it is a tile of the axis."""
    begin, size, stride = run
    if size == x.shape[n]:
        return x.axes[n]
    new_axis = axes.new(size)
    if size <= 1:
        return new_axis
    if stride == 1 and begin % size == 0 and x.shape[n] % size == 0 and _tiles(x, n, size):
        whole = [axes.new(x.shape[n] // size), axes.new(size)]
        if axes.tie_runs([x.axes[n]], whole):
            axes.tiles.append((whole[0], whole[1]))
            return whole[1]
    axes.kin.append((new_axis, x.axes[n]))
    return new_axis


def _tiles(x: Var, n: int, size: int) -> bool:
    """True if the axis is produced by a matmul, cut into equal tiles, and the tiles are used separately.

    Such as queries, keys and values, or gate and up projection, of one matmul: each index of a tile is then on one
    device under any layout. Halves that are concatenated again, as in rotary embeddings, are slices of one dim instead.
    """
    maker = x.maker
    while maker is not None and maker.kind in RULES and RULES[maker.kind].by_element:
        maker = next((y.maker for y in maker.ins if y.shape == x.shape and y.maker is not None), None)
    if maker is None or maker.kind != "dot_general":
        return False
    cuts = [user for user in x.users if user.kind in ("slice", "split")]
    if len(cuts) != len(x.users):
        return False
    return all(_cuts_a_part(user, x, n, size) for user in cuts) and not any(
        _is_rejoined(out, n) for user in cuts for out in user.outs
    )


def _cuts_a_part(user: CodeStep, x: Var, n: int, size: int) -> bool:
    """True if a split or slice cuts axis `n` into parts of this size, and no other axis."""
    if user.kind == "split":
        return int(user.params["axis"]) == n and {*map(int, user.params["sizes"])} == {size}
    return all(
        begin % size == 0 and count == size if at == n else count == x.shape[at]
        for at, (begin, count, _) in enumerate(runs_of(user))
    )


def _is_rejoined(x: Var, n: int) -> bool:
    """True if a value is concatenated with others along an axis, after element-wise steps."""
    waiting, seen = [x], {x}
    while waiting:
        for user in waiting.pop().users:
            if user.kind == "concatenate" and int(user.params["dimension"]) == n:
                return True
            if user.kind in RULES and RULES[user.kind].by_element:
                new = [y for y in user.outs if y.shape == x.shape and y not in seen]
                seen.update(new)
                waiting += new
    return False


def _slice(w: StepWriter, step: CodeStep) -> Tensor:
    x, out = step.ins[0], step.outs[0]
    t = w.tensor(x)
    for n, run in enumerate(runs_of(step)):
        if run[1] != x.shape[n]:
            t = _cut(w, t, x.axes[n], out.axes[n], run)
    return t


rule(
    "slice",
    axes=_slice_axes,
    write=_slice,
    fold=lambda step, x: x[tuple(np.s_[b : b + (n - 1) * s + 1 : s] for b, n, s in runs_of(step))],
)


def _split_axes(axes: Axes, step: CodeStep) -> None:
    x, at = step.ins[0], int(step.params["axis"])
    sizes = [int(n) for n in step.params["sizes"]]
    for out, begin, size in zip(step.outs, accumulate([0, *sizes]), sizes, strict=False):
        new_axis = _run_axis(axes, step, x, at, (begin, size, 1))
        give(axes, out, [new_axis if n == at else a for n, a in enumerate(x.axes)])


def _split(w: StepWriter, step: CodeStep) -> list[Tensor | None]:
    x, at = step.ins[0], int(step.params["axis"])
    sizes = [int(n) for n in step.params["sizes"]]
    t = w.tensor(x)
    return [
        _cut(w, t, x.axes[at], out.axes[at], (begin, size, 1)) if size else None
        for out, begin, size in zip(step.outs, accumulate([0, *sizes]), sizes, strict=False)
    ]


rule("split", axes=_split_axes, write=_split)


# ---------------------------------------------------------------- padding


def _pad_axes(axes: Axes, step: CodeStep) -> None:
    x, out = step.ins[0], step.outs[0]
    new_axes = []
    for a, size, pads in zip(x.axes, out.shape, pads_of(step), strict=True):
        new_axes.append(a if not any(pads) else axes.new(size))
        if any(pads):
            axes.kin.append((new_axes[-1], a))
    give(axes, out, new_axes)


def _pad_fault(step: CodeStep) -> str | None:
    return None if step.ins[1].number is not None else "with a value that is computed"


def _pad(w: StepWriter, step: CodeStep) -> Tensor:
    x, out = step.ins[0], step.outs[0]
    t, value = w.tensor(x), step.ins[1].number.item()
    for n, pads in enumerate(pads_of(step)):
        if any(pads):
            t, old = w.merge(t, x.axes[n]), w.whole_dim(x.axes[n])
            t = _padded(t, old, pads, value)
            new = w.whole_dim(out.axes[n])
            t = w.apart(renamed(t, {old.name: new.name}) if old.name != new.name else t, out.axes[n])
    return t


def _padded(t: Tensor, d: Dimension, pads: tuple[int, int, int], value: float) -> Tensor:
    """`t` padded between elements along a dim, then padded or cut at both ends."""
    before, after, between = pads
    size = d.size
    if between:
        rest = [e for e in t.shape if e != d]
        apart = Dimension(f"{d.name}_apart", between + 1)
        t = broadcast(t, [*rest, d])
        t = pad(reshape(t, [*rest, d, Dimension(apart.name, 1)]), [0, between], apart.name, value)
        size = (d.size - 1) * (between + 1) + 1
        t = slice(reshape(t, [*rest, Dimension(d.name, d.size * apart.size)]), 0, size, d.name)
    begin, end = max(0, -before), size - max(0, -after)
    t, before, after = slice(t, begin, end - begin, d.name), max(0, before), max(0, after)
    parts = concatenated([value, t, value], [before, end - begin, after])
    whole = restored(parts, Dimension(d.name, before + end - begin + after), t)
    return pad(t, [before, after], d.name, value) if whole is None else whole


def _pad_known(step: CodeStep, x: Array, value: Array) -> Array:
    with jax.ensure_compile_time_eval():
        return np.asarray(jax.lax.pad(x, value, step.params["padding_config"]))


rule("pad", axes=_pad_axes, write=_pad, fault=_pad_fault, fold=_pad_known)


# ---------------------------------------------------------------- concatenation


def _joined(step: CodeStep) -> list[Var]:
    """The non-empty operands."""
    return [x for x in step.ins if 0 not in x.shape]


def _concat_axes(axes: Axes, step: CodeStep) -> None:
    out, at = step.outs[0], int(step.params["dimension"])
    base = max(_joined(step), key=lambda x: x.data)
    joined = axes.new(out.shape[at])
    give(axes, out, [joined if n == at else a for n, a in enumerate(base.axes)])
    for x in _joined(step):
        for n, a in enumerate(x.axes):
            if n != at:
                axes.tie(a, out.axes[n])
    axes.kin += [(joined, x.axes[at]) for x in _joined(step) if x.shape[at] > 1]
    # Rotated halves are concatenated to the axis they were cut from.
    whole = _cut_from(base, at)
    if whole is not None and whole.size == joined.size:
        axes.tie(joined, whole)


def _cut_from(x: Var, at: int) -> Axis | None:
    """The axis that a value's axis was sliced from, looking through a few element-wise steps."""
    maker = x.maker
    for _ in range(8):
        if maker is None:
            return None
        if maker.kind in ("slice", "split"):
            return maker.ins[0].axes[at]
        if maker.kind not in RULES or not RULES[maker.kind].by_element:
            return None
        maker = next((y.maker for y in maker.ins if y.shape == x.shape and y.maker is not None), None)
    return None


def _concat(w: StepWriter, step: CodeStep) -> Tensor:
    out, at = step.outs[0], int(step.params["dimension"])
    one = w.whole_dim(out.axes[at])
    others = [a for n, a in enumerate(out.axes) if n != at]
    parts, joined = [], _joined(step)
    for x in joined:
        # Along the concatenated axis each operand keeps its own dims; elsewhere it takes those of the result.
        target = [a if n == at else b for n, (a, b) in enumerate(zip(x.axes, out.axes, strict=True))]
        t = w.rename_apart(x, target, at, one.name)
        parts.append(t)
    held = [d for d in w.shape(others) if any(d in t.shape for t in parts)]
    if all(x.shape[at] == 1 for x in joined):
        parts = [transpose(broadcast(_dropped(t, one.name) if one.name in t.shape else t, held), held) for t in parts]
        return w.apart(stack(parts, one.name), out.axes[at])
    parts = [broadcast(t, [*held, Dimension(one.name, x.shape[at])]) for t, x in zip(parts, joined, strict=True)]
    whole = restored(concatenated(parts, [x.shape[at] for x in joined]), one, parts[0])
    return w.apart(concat(parts, one.name) if whole is None else whole, out.axes[at])


rule(
    "concatenate",
    axes=_concat_axes,
    write=_concat,
    fold=lambda step, *xs: np.concatenate(xs, int(step.params["dimension"])),
)


def _stack_axes(axes: Axes, step: CodeStep) -> None:
    out, at = step.outs[0], int(step.params["axis"])
    base = max(step.ins, key=lambda x: x.data)
    give(axes, out, [*base.axes[:at], axes.new(len(step.ins)), *base.axes[at:]])
    for x in step.ins:
        for a, b in zip(x.axes, [*out.axes[:at], *out.axes[at + 1 :]], strict=True):
            axes.tie(b, a)


def _stack(w: StepWriter, step: CodeStep) -> Tensor:
    out, at = step.outs[0], int(step.params["axis"])
    others = [a for n, a in enumerate(out.axes) if n != at]
    parts = [w.under(x, others) if x.number is None else w.tensor(x) for x in step.ins]
    held = [d for d in w.shape(others) if any(d in t.shape for t in parts)]
    if len(parts) == 1:
        return parts[0]
    return w.apart(stack([broadcast(t, held) for t in parts], w.whole_dim(out.axes[at]).name), out.axes[at])


rule("stack", axes=_stack_axes, write=_stack)


def _unstack_axes(axes: Axes, step: CodeStep) -> None:
    at = int(step.params["axis"])
    for out in step.outs:
        give(axes, out, [a for n, a in enumerate(step.ins[0].axes) if n != at])


def _unstack(w: StepWriter, step: CodeStep) -> list[Tensor | None]:
    x = step.ins[0]
    axis = x.axes[int(step.params["axis"])]
    t = w.tensor(x)
    if not any(d in t.shape for d in w.shape([axis])):
        return [t] * len(step.outs)
    return [w.element(t, axis, n) for n in range(len(step.outs))]


rule("unstack", axes=_unstack_axes, write=_unstack)


def _tile_axes(axes: Axes, step: CodeStep) -> None:
    x, out = step.ins[0], step.outs[0]
    new_axes = []
    for a, count in zip(x.axes, map(int, step.params["reps"]), strict=True):
        new_axes.append(a if count == 1 else Axis(count * a.size, parts=(axes.new(count), a)))
    give(axes, out, new_axes)


rule("tile", axes=_tile_axes, write=lambda w, step: w.tensor(step.ins[0]))


# ---------------------------------------------------------------- dynamic slices


def _starts(step: CodeStep, first: int) -> list[Var]:
    return step.ins[first:]


def _dynamic_slice_axes(axes: Axes, step: CodeStep) -> None:
    x, out = step.ins[0], step.outs[0]
    new_axes = [a if a.size == n else axes.new(n) for a, n in zip(x.axes, out.shape, strict=True)]
    axes.kin += [(new, old) for new, old in zip(new_axes, x.axes, strict=True) if new is not old and new.size > 1]
    give(axes, out, new_axes)


def _begin(w: StepWriter, start: Var, last: int) -> Tensor | int:
    """Start of a slice, clamped to the array, as in JAX."""
    if start.number is not None:
        return int(min(max(start.number, 0), last))
    return minimum(maximum(cast(w.tensor(start), "int32"), 0), last)


def _dynamic_slice(w: StepWriter, step: CodeStep) -> Tensor:
    x, out = step.ins[0], step.outs[0]
    t = w.tensor(x)
    for n, start in enumerate(_starts(step, 1)):
        size = out.shape[n]
        if size == x.shape[n]:
            continue
        begin = _begin(w, start, x.shape[n] - size)
        if isinstance(begin, int):
            t = _cut(w, t, x.axes[n], out.axes[n], (begin, size, 1))
            continue
        t, one, new = w.merge(t, x.axes[n]), w.whole_dim(x.axes[n]), w.whole_dim(out.axes[n])
        t = dynamic_slice(t, begin, size, one)
        t = w.apart(renamed(t, {one.name: new.name}) if one.name != new.name else t, out.axes[n])
    return t


rule("dynamic_slice", axes=_dynamic_slice_axes, write=_dynamic_slice)


def _update_axes(axes: Axes, step: CodeStep) -> None:
    x, part, out = step.ins[0], step.ins[1], step.outs[0]
    same_axes(axes, CodeStep(step.kind, [x], [out], {}, step.place))
    for a, b in zip(part.axes, out.axes, strict=True):
        if a.size == b.size:
            axes.tie(a, b)


def _update(w: StepWriter, step: CodeStep) -> Tensor:
    x, part, out = step.ins[0], step.ins[1], step.outs[0]
    cut = [n for n in range(len(x.shape)) if part.shape[n] != x.shape[n]]
    if not cut:
        return w.under(part, out.axes)
    (at,) = cut  # updates along several axes are rewritten as one per axis: see `rewrites`
    one = w.whole_dim(out.axes[at])
    t = w.whole(x, out.axes, at)
    p = w.rename_apart(
        part, [a if n == at else b for n, (a, b) in enumerate(zip(part.axes, out.axes, strict=True))], at, one.name
    )
    missing = [d for d in w.shape([a for n, a in enumerate(out.axes) if n != at]) if d in p.shape and d not in t.shape]
    t = broadcast(t, [*missing, *t.shape])  # in the order of `t`, so that the large operand is not transposed
    p = broadcast(p, [Dimension(one.name, part.shape[at]) if d == one else d for d in t.shape])
    size, count = x.shape[at], part.shape[at]
    begin, whole = _begin(w, step.ins[2 + at], size - count), None
    if isinstance(begin, int) and 2 * count > size:  # smaller parts are written in place
        end = begin + count
        whole = restored([Part(0, begin, t), Part(begin, end, p, begin), Part(end, size, t)], one, t)
    return w.apart(update_slice(t, p, one, begin) if whole is None else whole, out.axes[at])


rule("dynamic_update_slice", axes=_update_axes, write=_update)
