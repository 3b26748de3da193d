"""Gather and scatter primitives, as in embeddings, losses and permutations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from layouts import Dimension, Shape
from meshlib.core.graph import Tensor
from meshlib.jax.importing.axes import Axes, Axis
from meshlib.jax.importing.code import CodeStep, Var
from meshlib.jax.importing.table import give, rule, same_axes
from meshlib.jax.importing.writing import StepWriter, renamed
from meshlib.ops.movement.indexing import gather, scatter_add
from meshlib.ops.movement.indexing import range as positions
from meshlib.ops.movement.shape import broadcast
from meshlib.ops.pointwise.arithmetic import (
    add,
    equal,
    greater_equal,
    less,
    logical_and,
    maximum,
    minimum,
    negative,
    subtract,
    where,
)
from meshlib.ops.pointwise.casts import cast
from meshlib.ops.pointwise.reductions import reduce_sum

# ---------------------------------------------------------------- indexed axes


@dataclass(frozen=True)
class _Lookup:
    """Indices along one axis of a table; other axes are whole, or batch axes shared with the indices.

    The indices are in `column` of the last axis of `indices`. `along`: batch axis of the table -> axis of the index
    space, which has `sizes`. Each index selects `run` elements from there on. `more`: (axis, indices, column) of
    further axes that are indexed together.
    """

    indices: Var
    column: int
    axis: int
    along: dict[int, int]
    sizes: tuple[int, ...]
    run: int = 1
    more: tuple[tuple[int, Var, int], ...] = ()


def _is_positions(x: Var, axis: int) -> bool:
    """True if a value counts 0, 1, ... along an axis and is constant along others."""
    while True:
        if x.const is not None:
            shape = [1] * len(x.shape)
            shape[axis] = x.shape[axis]
            positions = np.broadcast_to(np.arange(x.shape[axis]).reshape(shape), x.shape)
            return bool(np.array_equal(np.broadcast_to(x.const, x.shape), positions))
        step = x.maker
        if step is None:
            return False
        if step.kind == "iota":
            return int(step.params["dimension"]) == axis
        source = _same_along(x, axis, step)
        if source is None:
            return False
        x, axis = source


def _same_along(x: Var, axis: int, step: CodeStep) -> tuple[Var, int] | None:
    """The operand and axis from which a step's result copies the values along an axis; None for other steps."""
    operand = step.ins[0]
    if step.kind == "broadcast_in_dim":
        to = [int(n) for n in step.params["broadcast_dimensions"]]
        same = axis in to and operand.shape[to.index(axis)] == x.shape[axis]
        return (operand, to.index(axis)) if same else None
    if step.kind == "reshape":
        old, new = ([n for n, size in enumerate(v.shape) if size > 1] for v in (operand, x))
        same = [operand.shape[n] for n in old] == [x.shape[n] for n in new] and axis in new
        return (operand, old[new.index(axis)]) if same else None
    if step.kind == "select_n" and len(step.ins) == 3:
        source = _unwrapped(x)
        return None if source.maker is step else (source, axis)
    return (operand, axis) if step.kind in ("convert_element_type", "copy") else None


def _unwrapped(x: Var) -> Var:
    """The user's indices, of which JAX wraps negative ones: select(i < 0, i, i + n)."""
    step = x.maker
    if step is None or step.kind != "select_n" or len(step.ins) != 3:
        return x
    test, as_given, wrapped = step.ins
    ok = test.maker is not None and test.maker.kind == "lt" and test.maker.ins[0] is as_given
    plus = wrapped.maker is not None and wrapped.maker.kind == "add" and wrapped.maker.ins[0] is as_given
    return as_given if ok and plus else x


def _components(x: Var) -> list[tuple[Var, int]]:
    """For each indexed axis: the value that holds its indices, and the column there."""
    step = x.maker
    if step is not None and step.kind == "concatenate" and int(step.params["dimension"]) == len(x.shape) - 1:
        return [(y, n) for y in step.ins for n in range(y.shape[-1])]
    return [(x, n) for n in range(x.shape[-1])]


def _lookup(
    table: Var, indices: Var, axes: Sequence[int], columns: Sequence[int], batch: dict[int, int]
) -> _Lookup | str:
    """The indexing of `axes` of a table; a text for an unsupported form."""
    sizes, parts, along, left = indices.shape[:-1], _components(indices), dict(batch), []
    for axis, column in zip(axes, columns, strict=True):
        part, own = parts[column]
        here = [n for n, size in enumerate(sizes) if size == table.shape[axis] and n not in along.values()]
        positions_at = next((n for n in here if part.shape[-1] == 1 and _is_positions(part, n)), None)
        if positions_at is None or len(axes) == 1:
            left.append((axis, part, own))
        else:
            along[axis] = positions_at
    if not left:
        return f"at the diagonal of {table}"
    left.sort(key=lambda item: item[1].number is None)  # known indices first, which leave the smallest table
    (axis, part, own), *more = left
    return _Lookup(part, own, axis, along, sizes, more=tuple(more))


def _start_columns(x: Var, axes: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """The index columns that determine the start of a slice; in other columns it is always 0."""
    looked = [n for n, a in enumerate(axes) if sizes[a] != x.shape[a] or x.shape[a] == 1]
    if len(looked) > 1:  # an axis of length 1 needs no index
        looked = [n for n in looked if x.shape[axes[n]] > 1] or looked[:1]
    return looked


def of_gather(step: CodeStep) -> _Lookup | str:
    """A gather's indexing of its operand; a text for an unsupported form."""
    x, indices = step.ins
    d = step.params["dimension_numbers"]
    axes = tuple(map(int, d.start_index_map))
    sizes = [int(n) for n in step.params["slice_sizes"]]
    batch = dict(zip(map(int, d.operand_batching_dims), map(int, d.start_indices_batching_dims), strict=True))
    looked = _start_columns(x, axes, sizes)
    runs = {axes[n]: sizes[axes[n]] for n in looked}
    if any(n != x.shape[a] for a, n in enumerate(sizes) if a not in runs and a not in batch):
        return f"of parts, {sizes} of {list(x.shape)}"
    if not looked:
        return f"of all of {x}"
    lookup = _lookup(x, indices, [axes[n] for n in looked], looked, batch)
    if isinstance(lookup, str):
        return lookup
    if any(runs[a] != 1 for a in runs if a != lookup.axis or lookup.more):
        return f"of runs of {sizes} elements of {x}"
    return replace(lookup, run=runs[lookup.axis])


def _gather_fault(step: CodeStep) -> str | None:
    lookup = of_gather(step)
    return lookup if isinstance(lookup, str) else None


# ---------------------------------------------------------------- gather


def _gather_axes(axes: Axes, step: CodeStep) -> None:
    x, out = step.ins[0], step.outs[0]
    lookup = of_gather(step)
    assert isinstance(lookup, _Lookup)
    d = step.params["dimension_numbers"]
    offsets, collapsed = [int(n) for n in d.offset_dims], {int(n) for n in d.collapsed_slice_dims}
    index_axes = [axes.new(n) for n in lookup.sizes]
    looked, run = axes.new(x.shape[lookup.axis]), axes.new(lookup.run)
    free_axes = {n: axes.new(a.size) for n, a in enumerate(x.axes) if n != lookup.axis and n not in lookup.along}
    axes.hold(axes.space(), [*index_axes, *free_axes.values(), looked, run])
    _tie_indices(axes, lookup, index_axes)
    for n, at in lookup.along.items():
        axes.tie(index_axes[at], x.axes[n])
    for n, label in (*free_axes.items(), (lookup.axis, looked)):
        axes.tie(label, x.axes[n])
    axes.kin.append((run, looked))
    of_windows = {**free_axes, **{n: axes.new(1) for n, _, _ in lookup.more}, lookup.axis: run}
    windows = [n for n in range(len(x.shape)) if n not in collapsed and n not in {*map(int, d.operand_batching_dims)}]
    rest, indexed = (of_windows[n] for n in windows), iter(index_axes)
    give(axes, out, [next(rest) if n in offsets else next(indexed) for n in range(len(out.shape))])
    of_table = {**{n: index_axes[at] for n, at in lookup.along.items()}, **free_axes, lookup.axis: looked}
    step.labels = [run, *index_axes, *(of_table[n] for n in range(len(x.shape)))]


def _tie_indices(axes: Axes, lookup: _Lookup, labels: list[Axis]) -> None:
    for part in (lookup.indices, *(part for _, part, _ in lookup.more)):
        for own, label in zip(part.axes, labels, strict=False):
            if own.size == label.size:
                axes.tie(label, own)


def _indices(w: StepWriter, x: Var, column: int, index_axes: Sequence[Axis]) -> Tensor:
    """The indices in one column of a value, under the dims of the index space."""
    if x.number is not None:
        return cast(w.tensor(x), "int32")
    own = [a if a.size == 1 else label for a, label in zip(x.axes, index_axes, strict=False)]
    t = cast(w.under(x, [*own, x.axes[-1]]), "int32")
    return t if x.shape[-1] == 1 else w.element(t, x.axes[-1], column)


def _gather(w: StepWriter, step: CodeStep) -> Tensor:
    x = step.ins[0]
    lookup = of_gather(step)
    assert isinstance(lookup, _Lookup)
    count = len(lookup.sizes)
    run, index_axes, target = step.labels[0], step.labels[1 : 1 + count], step.labels[1 + count :]
    clip = "CLIP" in str(step.params["mode"])
    table = w.under(x, target)
    for axis, part, column in ((lookup.axis, lookup.indices, lookup.column), *lookup.more):
        table, one = w.merge(table, target[axis]), w.whole_dim(target[axis])
        indices = _indices(w, part, column, index_axes)
        if clip:
            indices = minimum(maximum(indices, 0), x.shape[axis] - lookup.run)
        if x.shape[axis] == 1:
            table = reduce_sum(table, reduced_dim=one)
        elif lookup.run == 1:
            table = _filled(table, indices, one, step.params["fill_value"])
        else:
            gathered = gather(table, indices + positions(Dimension("run_of_indices", lookup.run)), one)
            table = w.apart(renamed(gathered, {"run_of_indices": w.whole_dim(run).name}), run)
    return table


def _filled(table: Tensor, indices: Tensor, one: Dimension, fill: object) -> Tensor:
    """The elements at the indices; out of range, the user's `fill` if given."""
    if fill is None:
        return _looked_up(table, indices, one)
    number = np.asarray(fill).item()
    if not number:
        return gather(table, indices, one, out_of_range="zero")
    there = logical_and(greater_equal(indices, 0), less(indices, one.size))
    return where(there, gather(table, indices, one, out_of_range="zero"), number)


def _looked_up(table: Tensor, indices: Tensor, one: Dimension) -> Tensor:
    """The elements at the indices. For a difference with a value that is constant along `one`, such as log-softmax,
    only the first operand is gathered, so that the other differences are never computed."""
    op = table.operation
    if op.opdef.name == "cast" and op.inputs[0].dtype.is_float:
        return cast(_looked_up(op.inputs[0], indices, one), table.dtype)
    if op.opdef.name == "negative":
        return negative(_looked_up(op.inputs[0], indices, one))
    if op.opdef.name == "subtract" and one in op.inputs[0].shape and {*op.inputs[1].shape} <= {*indices.shape}:
        return subtract(_looked_up(op.inputs[0], indices, one), op.inputs[1])
    return gather(table, indices, one)


rule("gather", axes=_gather_axes, write=_gather, fault=_gather_fault)


# ---------------------------------------------------------------- scatter


def of_scatter(step: CodeStep) -> _Lookup | str:
    """A scatter's indexing of its operand; a text for an unsupported form."""
    x, indices, updates = step.ins
    d = step.params["dimension_numbers"]
    axes = tuple(map(int, d.scatter_dims_to_operand_dims))
    batch = dict(zip(map(int, d.operand_batching_dims), map(int, d.scatter_indices_batching_dims), strict=True))
    if {*axes} != {*map(int, d.inserted_window_dims)}:
        return f"of runs of elements, {list(updates.shape)} into {list(x.shape)}"
    windows = [int(n) for n in d.update_window_dims]
    whole = [n for n in range(len(x.shape)) if n not in axes and n not in batch]
    if any(updates.shape[a] != x.shape[n] for a, n in zip(windows, whole, strict=True)):
        return f"of parts, {list(updates.shape)} into {list(x.shape)}"
    lookup = _lookup(x, indices, axes, range(len(axes)), batch)
    if isinstance(lookup, _Lookup) and lookup.more:
        return f"with {1 + len(lookup.more)} indices at once, into {x}"
    if (
        step.kind == "scatter"
        and isinstance(lookup, _Lookup)
        and prod(lookup.sizes) != prod(lookup.sizes[at] for at in lookup.along.values())
    ):
        return "of several elements at once, which may meet"
    return lookup


def _scatter_axes(axes: Axes, step: CodeStep) -> None:
    x, _, updates = step.ins
    out = step.outs[0]
    lookup = of_scatter(step)
    assert isinstance(lookup, _Lookup)
    same_axes(axes, CodeStep(step.kind, [x], [out], {}, step.place))
    index_axes = [axes.new(n) for n in lookup.sizes]
    free_axes = [a for n, a in enumerate(out.axes) if n != lookup.axis and n not in lookup.along]
    labels = [axes.new(a.size) for a in free_axes]
    looked = axes.new(x.shape[lookup.axis])
    axes.hold(axes.space(), [*index_axes, *labels, looked])
    for label, axis in zip([*labels, looked], [*free_axes, out.axes[lookup.axis]], strict=True):
        axes.tie(label, axis)
    for n, at in lookup.along.items():
        axes.tie(index_axes[at], out.axes[n])
    _tie_indices(axes, lookup, index_axes)
    windows = [int(n) for n in step.params["dimension_numbers"].update_window_dims]
    rest, indexed = iter(labels), iter(index_axes)
    for n, a in enumerate(updates.axes):
        axes.tie(next(rest) if n in windows else next(indexed), a)
    step.labels = [looked, *index_axes, *labels]


def _scatter(w: StepWriter, step: CodeStep) -> Tensor:
    x, _, updates = step.ins
    out = step.outs[0]
    lookup = of_scatter(step)
    assert isinstance(lookup, _Lookup)
    looked, index_axes = step.labels[0], step.labels[1 : 1 + len(lookup.sizes)]
    labels = step.labels[1 + len(lookup.sizes) :]
    windows = [int(n) for n in step.params["dimension_numbers"].update_window_dims]
    rest, indexed = iter(labels), iter(index_axes)
    of_updates = [next(rest) if n in windows else next(indexed) for n in range(len(updates.shape))]
    free_labels = iter(labels)
    target = [
        looked if n == lookup.axis else index_axes[lookup.along[n]] if n in lookup.along else next(free_labels)
        for n in range(len(x.shape))
    ]
    table = w.whole(x, target, lookup.axis)
    given = w.under(updates, of_updates)
    indices = _indices(w, lookup.indices, lookup.column, index_axes)
    one = w.whole_dim(looked)
    if step.kind == "scatter":
        updated = where(equal(positions(one), indices), given, table)
    else:
        summed = [d for d in w.shape(index_axes) if d not in w.shape(target)]
        given = broadcast(given, list(w.shape(of_updates)))
        shape = Shape([*(d for d in w.shape(target) if d in given.shape), one])
        indices = broadcast(
            indices, Shape([*(d for d in indices.shape), *(d for d in summed if d not in indices.shape)])
        )
        updated = add(table, scatter_add(given, indices, one, shape, out_of_range="zero"))
    updated = w.apart(updated, looked)
    return w.rename(updated, w.axes.flat(target), w.axes.flat(out.axes))


def _scatter_fault(step: CodeStep) -> str | None:
    lookup = of_scatter(step)
    return lookup if isinstance(lookup, str) else None


rule("scatter scatter-add scatter_add", axes=_scatter_axes, write=_scatter, fault=_scatter_fault)
