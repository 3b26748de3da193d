"""Primitives that address elements by index: gather and scatter, as embeddings, losses and permutations use them."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np

from layouts import Shape
from meshlib.graph import Tensor
from meshlib.jax.importing.axes import Axes, Axis
from meshlib.jax.importing.code import Step, Var
from meshlib.jax.importing.table import give, rule, same_axes
from meshlib.jax.importing.writing import Writer
from meshlib.ops.elementwise import add, cast, equal, maximum, minimum, where
from meshlib.ops.index import gather, scatter_add
from meshlib.ops.index import range as positions
from meshlib.ops.reduce import reduce_sum
from meshlib.ops.shape import broadcast

# ---------------------------------------------------------------- which axes the indices go into


@dataclass(frozen=True)
class _Lookup:
    """Indices along one axis of a table; other axes are whole, or go along with an axis of the indices.

    `indices` is the value that holds them, `spread` for each of its axes that of the index space, or None if it is
    not there; `along` pairs axes of the table with those of the index space, which has `sizes`.
    """

    indices: Var
    axis: int
    along: dict[int, int]
    sizes: tuple[int, ...]
    spread: tuple[int | None, ...]


def _is_positions(x: Var, axis: int) -> bool:
    """Whether a value counts 0, 1, ... along an axis and is the same along others."""
    while True:
        step = x.maker
        if x.const is not None:
            shape = [1] * len(x.shape)
            shape[axis] = x.shape[axis]
            return bool(np.array_equal(x.elements, np.broadcast_to(np.arange(x.shape[axis]).reshape(shape), x.shape)))
        if step is None:
            return False
        if step.kind == "iota":
            return int(step.params["dimension"]) == axis
        if step.kind == "broadcast_in_dim":
            to = [int(n) for n in step.params["broadcast_dimensions"]]
            if axis not in to or step.ins[0].shape[to.index(axis)] != x.shape[axis]:
                return False
            x, axis = step.ins[0], to.index(axis)
        elif step.kind == "reshape":
            old, new = ([n for n, size in enumerate(v.shape) if size > 1] for v in (step.ins[0], x))
            if [step.ins[0].shape[n] for n in old] != [x.shape[n] for n in new] or axis not in new:
                return False
            x, axis = step.ins[0], old[new.index(axis)]
        elif step.kind == "select_n" and len(step.ins) == 3:
            x = _unwrapped(x)
            if x.maker is step:
                return False
        elif step.kind in ("convert_element_type", "copy"):
            x = step.ins[0]
        else:
            return False


def _unwrapped(x: Var) -> Var:
    """Indices as they are given, of which JAX counts negative ones from the end: select(i < 0, i, i + n)."""
    step = x.maker
    if step is None or step.kind != "select_n" or len(step.ins) != 3:
        return x
    test, as_given, wrapped = step.ins
    ok = test.maker is not None and test.maker.kind == "lt" and test.maker.ins[0] is as_given
    plus = wrapped.maker is not None and wrapped.maker.kind == "add" and wrapped.maker.ins[0] is as_given
    return as_given if ok and plus else x


def _components(x: Var) -> list[tuple[Var, tuple[int | None, ...]]]:
    """The indices into each axis, of a value whose last axis holds one each; with where its own axes lie."""
    rank = len(x.shape) - 1
    if x.shape[-1] == 1:
        return [(x, (*range(rank), None))]
    step = x.maker
    if step is not None and step.kind == "concatenate" and int(step.params["dimension"]) == rank:
        if all(y.shape[-1] == 1 for y in step.ins):
            return [(y, (*range(rank), None)) for y in step.ins]
    return []


def _lookup(step: Step, table: Var, indices: Var, axes: tuple[int, ...], batch: dict[int, int]) -> _Lookup | str:
    """How `axes` of a table are looked up in; a text if in a way that is not there."""
    sizes = indices.shape[:-1]
    parts = _components(indices)
    if len(parts) != len(axes):
        return f"with {len(axes)} indices at once, computed together"
    along = dict(batch)
    left = []
    for axis, (part, spread) in zip(axes, parts, strict=True):
        here = [n for n, size in enumerate(sizes) if size == table.shape[axis] and n not in along.values()]
        found = next((n for n in here if len(axes) > 1 and _is_positions(part, n)), None)
        if found is None:
            left.append((axis, part, spread))
        else:
            along[axis] = found
    if len(left) != 1:
        return f"with {len(left)} indices at once, along axes {[axis for axis, _, _ in left]}"
    ((axis, part, spread),) = left
    return _Lookup(part, axis, along, sizes, spread)


def _of_gather(step: Step) -> _Lookup | str:
    x, indices = step.ins
    d = step.params["dimension_numbers"]
    axes = tuple(map(int, d.start_index_map))
    sizes = [int(n) for n in step.params["slice_sizes"]]
    batch = dict(zip(map(int, d.operand_batching_dims), map(int, d.start_indices_batching_dims), strict=True))
    if {*axes} != {*map(int, d.collapsed_slice_dims)}:
        return f"of runs of {[sizes[a] for a in axes]} elements"
    if any(n != x.shape[a] for a, n in enumerate(sizes) if a not in axes and a not in batch):
        return f"of parts, {sizes} of {list(x.shape)}"
    return _lookup(step, x, indices, axes, batch)


def _gather_fault(step: Step) -> str | None:
    found = _of_gather(step)
    return found if isinstance(found, str) else None


# ---------------------------------------------------------------- gather


def _gather_axes(axes: Axes, step: Step) -> None:
    x, out = step.ins[0], step.outs[0]
    found = _of_gather(step)
    assert isinstance(found, _Lookup)
    offsets = [int(n) for n in step.params["dimension_numbers"].offset_dims]
    index_axes = _index_axes(axes, found)
    whole = [a for n, a in enumerate(x.axes) if n != found.axis and n not in found.along]
    kept = [axes.new(a.size) for a in whole]
    looked = axes.new(x.shape[found.axis])
    axes.hold(axes.space(), [*index_axes, *kept, looked])
    _tie_indices(axes, found, index_axes)
    for n, at in found.along.items():
        axes.tie(index_axes[at], x.axes[n])
    for label, axis in zip([*kept, looked], [*whole, x.axes[found.axis]], strict=True):
        axes.tie(label, axis)
    rest, indexed = iter(kept), iter(index_axes)
    give(axes, out, [next(rest) if n in offsets else next(indexed) for n in range(len(out.shape))])
    step.labels = [looked, *index_axes, *kept]


def _index_axes(axes: Axes, found: _Lookup) -> list[Axis]:
    return [axes.new(n) for n in found.sizes]


def _tie_indices(axes: Axes, found: _Lookup, made: list[Axis]) -> None:
    for own, at in enumerate(found.spread):
        if at is not None and found.indices.shape[own] == made[at].size:
            axes.tie(made[at], found.indices.axes[own])


def _indices(w: Writer, found: _Lookup, index_axes: list[Axis], size: int, clip: bool) -> Tensor:
    own = [a if at is None else index_axes[at] for a, at in zip(found.indices.axes, found.spread, strict=True)]
    t = cast(w.under(found.indices, own), "int32")
    return minimum(maximum(t, 0), size - 1) if clip else t


def _gather(w: Writer, step: Step) -> Tensor:
    x = step.ins[0]
    found = _of_gather(step)
    assert isinstance(found, _Lookup)
    looked, index_axes = step.labels[0], step.labels[1 : 1 + len(found.sizes)]
    kept = iter(step.labels[1 + len(found.sizes) :])
    target = [
        looked if n == found.axis else index_axes[found.along[n]] if n in found.along else next(kept)
        for n in range(len(x.shape))
    ]
    table = w.whole(x, target, found.axis)
    clip = "CLIP" in str(step.params["mode"])
    indices = _indices(w, found, index_axes, x.shape[found.axis], clip)
    one = w.whole_dim(looked)
    if x.shape[found.axis] == 1:
        return reduce_sum(table, reduced_dim=one)
    return gather(table, indices, one)


rule("gather", axes=_gather_axes, write=_gather, fault=_gather_fault)


# ---------------------------------------------------------------- scatter


def _of_scatter(step: Step) -> _Lookup | str:
    x, indices, updates = step.ins
    d = step.params["dimension_numbers"]
    axes = tuple(map(int, d.scatter_dims_to_operand_dims))
    batch = dict(zip(map(int, d.operand_batching_dims), map(int, d.scatter_indices_batching_dims), strict=True))
    if {*axes} != {*map(int, d.inserted_window_dims)}:
        return "of runs of elements"
    windows = [int(n) for n in d.update_window_dims]
    whole = [n for n in range(len(x.shape)) if n not in axes and n not in batch]
    if any(updates.shape[a] != x.shape[n] for a, n in zip(windows, whole, strict=True)):
        return f"of parts, {list(updates.shape)} into {list(x.shape)}"
    found = _lookup(step, x, indices, axes, batch)
    if step.kind == "scatter" and isinstance(found, _Lookup) and prod(found.sizes) != prod(
        found.sizes[at] for at in found.along.values()
    ):
        return "of several elements at once, which may meet"
    return found


def _scatter_axes(axes: Axes, step: Step) -> None:
    x, _, updates = step.ins
    out = step.outs[0]
    found = _of_scatter(step)
    assert isinstance(found, _Lookup)
    same_axes(axes, Step(step.kind, [x], [out], {}, step.place))
    index_axes = _index_axes(axes, found)
    kept = [a for n, a in enumerate(out.axes) if n != found.axis and n not in found.along]
    labels = [axes.new(a.size) for a in kept]
    looked = axes.new(x.shape[found.axis])
    axes.hold(axes.space(), [*index_axes, *labels, looked])
    for label, axis in zip([*labels, looked], [*kept, out.axes[found.axis]], strict=True):
        axes.tie(label, axis)
    for n, at in found.along.items():
        axes.tie(index_axes[at], out.axes[n])
    _tie_indices(axes, found, index_axes)
    windows = [int(n) for n in step.params["dimension_numbers"].update_window_dims]
    rest, indexed = iter(labels), iter(index_axes)
    for n, a in enumerate(updates.axes):
        axes.tie(next(rest) if n in windows else next(indexed), a)
    step.labels = [looked, *index_axes, *labels]


def _scatter(w: Writer, step: Step) -> Tensor:
    x, _, updates = step.ins
    out = step.outs[0]
    found = _of_scatter(step)
    assert isinstance(found, _Lookup)
    looked, index_axes = step.labels[0], step.labels[1 : 1 + len(found.sizes)]
    labels = step.labels[1 + len(found.sizes) :]
    windows = [int(n) for n in step.params["dimension_numbers"].update_window_dims]
    rest, indexed = iter(labels), iter(index_axes)
    of_updates = [next(rest) if n in windows else next(indexed) for n in range(len(updates.shape))]
    kept = iter(labels)
    target = [
        looked if n == found.axis else index_axes[found.along[n]] if n in found.along else next(kept)
        for n in range(len(x.shape))
    ]
    table = w.whole(x, target, found.axis)
    given = w.under(updates, of_updates)
    indices = _indices(w, found, index_axes, x.shape[found.axis], clip=False)
    one = w.whole_dim(looked)
    if step.kind == "scatter":
        made = where(equal(positions(one), indices), given, table)
    else:
        summed = [d for d in w.shape(index_axes) if d not in w.shape(target)]
        given = broadcast(given, [d for d in w.shape(of_updates)])
        shape = Shape([*(d for d in w.shape(target) if d in given.shape), one])
        indices = broadcast(indices, Shape([*(d for d in indices.shape), *(d for d in summed if d not in indices.shape)]))
        made = add(table, scatter_add(given, indices, one, shape, out_of_range="zero"))
    made = w.apart(made, looked)
    return w.rename(made, w.axes.flat(target), w.axes.flat(out.axes))


def _scatter_fault(step: Step) -> str | None:
    found = _of_scatter(step)
    return found if isinstance(found, str) else None


rule("scatter scatter-add scatter_add", axes=_scatter_axes, write=_scatter, fault=_scatter_fault)
