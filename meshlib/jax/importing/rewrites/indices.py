"""General gathers, scatters and slice updates as element-wise ones along a single flattened axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from meshlib.jax.importing.code import CodeStep
from meshlib.jax.importing.indexing import of_gather, of_scatter
from meshlib.jax.importing.rewrites.table import Function, rewrite


@dataclass(frozen=True)
class _TableAxes:
    """Axes of a table: batch axes shared with the indices, addressed axes, and the rest.

    `runs` has how many elements are taken from each address on, by axis; `windows` the axes that a window has, in the
    order in which results or updates have them.
    """

    batch: tuple[int, ...]
    looked: tuple[int, ...]
    rest: tuple[int, ...]
    windows: tuple[int, ...]
    runs: dict[int, int]

    @classmethod
    def of(cls, shape: Sequence[int], sizes: Sequence[int], mapped: Any, batch: Any, collapsed: Any) -> _TableAxes:
        batch, collapsed = tuple(map(int, batch)), {*map(int, collapsed)}
        # A window over the whole axis can only begin at its first element.
        free = [n for n in range(len(shape)) if n not in batch]
        looked = tuple(n for n in free if sizes[n] != shape[n] or (n in mapped and n in collapsed))
        rest = tuple(n for n in free if n not in looked)
        windows = tuple(n for n in free if n not in collapsed)
        return cls(batch, looked, rest, windows, {n: int(sizes[n]) for n in looked})

    @property
    def run_axes(self) -> tuple[int, ...]:
        """Addressed axes along which a window has several elements."""
        return tuple(n for n in self.looked if n in self.windows)

    def flat(self, table: Any) -> Any:
        """The table as [batch axes, flattened addressed axes, rest]."""
        table = lax.transpose(table, (*self.batch, *self.looked, *self.rest))
        first, last = len(self.batch), len(self.batch) + len(self.looked)
        return table.reshape(*table.shape[:first], prod(table.shape[first:last]), *table.shape[last:])

    def unflat(self, table: Any, shape: Sequence[int]) -> Any:
        """The inverse of `flat`."""
        order = (*self.batch, *self.looked, *self.rest)
        return lax.transpose(table.reshape([shape[n] for n in order]), np.argsort(order))

    def places(self, indices: Any, columns: dict[int, int], shape: Sequence[int], clip: bool, windows: bool) -> Any:
        """Position along the flattened axis of each element: [index axes, one per window axis]; -1 if out of range.

        `windows`: a window with one element out of range is out of range as a whole.
        """
        place, inside = jnp.zeros((), "int32"), jnp.ones((), bool)
        grow = len(self.run_axes)
        for n in self.looked:
            begin = indices[..., columns[n]].astype("int32") if n in columns else jnp.zeros((), "int32")
            size, run = shape[n], self.runs[n]
            if clip:
                begin = jnp.clip(begin, 0, size - run)
            begin = begin.reshape(*begin.shape, *[1] * grow)
            at = begin
            if n in self.run_axes:
                own = self.run_axes.index(n)
                at = begin + np.arange(run, dtype="int32").reshape(-1, *[1] * (grow - 1 - own))
            place = place * size + at
            if not clip and (size > 1 or len(self.looked) == 1):
                first, last = (begin, begin + (run - 1)) if windows else (at, at)
                inside = inside & (first >= 0) & (last < size)
        runs = [self.runs[n] for n in self.run_axes]
        full = (*indices.shape[:-1], *runs)
        return jnp.broadcast_to(place if clip else jnp.where(inside, place, -1), full)


def _clips(step: CodeStep) -> bool:
    return "CLIP" in str(step.params["mode"])


# ---------------------------------------------------------------- gather


def _gather(step: CodeStep) -> Function | None:
    if not isinstance(of_gather(step), str):
        return None
    d, shape, sizes = step.params["dimension_numbers"], step.ins[0].shape, step.params["slice_sizes"]
    columns = {int(a): n for n, a in enumerate(d.start_index_map)}
    batch = [int(n) for n in d.operand_batching_dims]
    axes = _TableAxes.of(shape, sizes, columns, batch, d.collapsed_slice_dims)
    along = [int(n) for n in d.start_indices_batching_dims]
    clip = _clips(step)

    def run(x: Any, indices: Any) -> Any:
        count = indices.ndim - 1
        own = [n for n in range(count) if n not in along]
        indices = lax.transpose(indices, (*along, *own, count))
        place = axes.places(indices, columns, shape, clip, windows=False)
        gathered = _taken(axes.flat(x), place, len(along))  # [batch, own, windows, rest]
        # result axes: window axes at their offsets, index axes in between
        of_index = dict(zip((*along, *own), range(count), strict=True))
        of_window = {n: count + k for k, n in enumerate((*axes.run_axes, *axes.rest))}
        offsets, order = [int(n) for n in d.offset_dims], []
        windows, indexed = iter(axes.windows), iter(range(count))
        for n in range(count + len(offsets)):
            order.append(of_window[next(windows)] if n in offsets else of_index[next(indexed)])
        return lax.transpose(gathered, order)

    return run


def _taken(table: Any, place: Any, along: int) -> Any:
    """table[b..., place[b..., ...], ...]"""
    if not along:
        return table.at[place].get(mode="fill", wrap_negative_indices=False)
    numbers = lax.GatherDimensionNumbers(
        offset_dims=tuple(range(place.ndim, place.ndim + table.ndim - along - 1)),
        collapsed_slice_dims=(along,),
        start_index_map=(along,),
        operand_batching_dims=tuple(range(along)),
        start_indices_batching_dims=tuple(range(along)),
    )
    sizes = [1] * (along + 1) + list(table.shape[along + 1 :])
    return lax.gather(table, place[..., None], numbers, sizes, mode="fill")


rewrite("gather", _gather)


# ---------------------------------------------------------------- scatter


_JOINED: dict[str, tuple[Any, Any]] = {
    "scatter-mul": (lax.mul, lambda x, axis: jnp.prod(x, axis)),
    "scatter-max": (lax.max, lambda x, axis: jnp.max(x, axis)),
    "scatter-min": (lax.min, lambda x, axis: jnp.min(x, axis)),
}


# How a scatter joins an element with its update; None if the update replaces it.
_JOINS: dict[str, Any] = {
    "scatter": None,
    "scatter-add": lax.add,
    "scatter_add": lax.add,
    **{kind: join for kind, (join, _) in _JOINED.items()},
}


def _scattered_axes(
    d: Any, x_shape: tuple[int, ...], updates_shape: tuple[int, ...], columns: dict[int, int]
) -> _TableAxes:
    """Table axes of a scatter's operand, with the window sizes of its updates."""
    batch, inserted = [int(n) for n in d.operand_batching_dims], {*map(int, d.inserted_window_dims)}
    free = [n for n in range(len(x_shape)) if n not in batch and n not in inserted]
    sizes = [1] * len(x_shape)
    for n, at in zip(free, map(int, d.update_window_dims), strict=True):
        sizes[n] = updates_shape[at]
    return _TableAxes.of(x_shape, sizes, columns, batch, inserted)


def _window_update(step: CodeStep) -> Function | None:
    """A scatter of one window to a known place, such as `x.at[1:-1].add(y)`, as an update of a slice."""
    (x_shape, indices, updates_shape), d = (v.shape for v in step.ins), step.params["dimension_numbers"]
    known = step.ins[1].elements
    if known is None or len(indices) != 1 or d.operand_batching_dims or len(updates_shape) != len(d.update_window_dims):
        return None
    left = iter(updates_shape)
    sizes = [1 if n in d.inserted_window_dims else next(left) for n in range(len(x_shape))]
    begins = [0] * len(x_shape)
    for n, begin in zip(d.scatter_dims_to_operand_dims, known.tolist(), strict=True):
        begins[n] = begin
    ends = [begin + size for begin, size in zip(begins, sizes, strict=True)]
    if min(begins) < 0 or any(end > n for end, n in zip(ends, x_shape, strict=True)):
        return None
    join = _JOINS[step.kind]

    def run(x: Any, indices: Any, updates: Any) -> Any:
        part = updates.reshape(sizes)
        part = part if join is None else join(lax.slice(x, begins, ends), part)
        return lax.dynamic_update_slice(x, part, [np.int32(n) for n in begins])

    return run


def _scatter(step: CodeStep) -> Function | None:
    window = _window_update(step)
    if window is not None:
        return window
    if step.kind not in _JOINED and not isinstance(of_scatter(step), str):
        return None
    d, (x_shape, _, updates_shape) = step.params["dimension_numbers"], (v.shape for v in step.ins)
    columns = {int(a): n for n, a in enumerate(d.scatter_dims_to_operand_dims)}
    of_windows = [int(n) for n in d.update_window_dims]
    axes = _scattered_axes(d, x_shape, updates_shape, columns)
    along = [int(n) for n in d.scatter_indices_batching_dims]
    apart = bool(step.params["unique_indices"])
    known = step.ins[1].elements

    def run(x: Any, indices: Any, updates: Any) -> Any:
        count = indices.ndim - 1
        own = [n for n in range(count) if n not in along]
        indices = lax.transpose(indices, (*along, *own, count))
        place = axes.places(indices, columns, x_shape, _clips(step), windows=True)
        # updates as [batch, own, windows, rest]
        rows = [n for n in range(len(updates_shape)) if n not in of_windows]
        where = dict(zip(axes.windows, of_windows, strict=True))
        updates = lax.transpose(updates, (*(rows[n] for n in (*along, *own)),
                                          *(where[n] for n in (*axes.run_axes, *axes.rest))))  # fmt: skip
        table, first = axes.flat(x), len(along)
        lead, rest = place.shape[:first], updates.shape[place.ndim :]
        place, updates = place.reshape(*lead, -1), updates.reshape(*lead, -1, *rest)
        unique = apart or place.shape[-1] == 1 or (known is not None and count == len(along))
        return axes.unflat(_put(step.kind, table, place, updates, first, unique), x_shape)

    return run


def _put(kind: str, table: Any, place: Any, updates: Any, along: int, unique: bool) -> Any:
    """Scatter `updates` [b..., m, ...] at positions [b..., m] of a table [b..., n, ...]."""
    if kind in _JOINED:
        join, reduce = _JOINED[kind]
        hit = place[..., None, :] == np.arange(table.shape[along], dtype="int32")[:, None]
        hit = hit.reshape(*hit.shape, *[1] * (table.ndim - along - 1))
        neutral = _neutral(kind, table.dtype)
        return join(table, reduce(jnp.where(hit, jnp.expand_dims(updates, along), neutral), along + 1))
    if kind != "scatter":
        return _added(table, place, updates, along)
    if not unique:  # for duplicates, the last update wins
        order = jnp.argsort(place, axis=-1, stable=True)
        place = jnp.take_along_axis(place, order, -1)
        follower = jnp.concatenate([place[..., 1:], jnp.full_like(place[..., :1], -2)], -1)
        place = jnp.where(place == follower, -1, place)
        rest = order.reshape(*order.shape, *[1] * (updates.ndim - order.ndim))
        updates = jnp.take_along_axis(updates, rest, along)
    held = _added(jnp.zeros(table.shape[: along + 1], "int32"), place, jnp.ones_like(place), along) > 0
    held = held.reshape(*held.shape, *[1] * (table.ndim - along - 1))
    if table.dtype == bool:
        new = _added(jnp.zeros(table.shape, "int32"), place, updates.astype("int32"), along) > 0
    else:
        new = _added(jnp.zeros_like(table), place, updates, along)
    return jnp.where(held, new, table)


def _neutral(kind: str, dtype: Any) -> Any:
    if kind == "scatter-mul":
        return np.ones((), dtype)
    if jnp.issubdtype(dtype, jnp.floating):
        return np.asarray(-np.inf if kind == "scatter-max" else np.inf, dtype)
    limits = jnp.iinfo(dtype)
    return np.asarray(limits.min if kind == "scatter-max" else limits.max, dtype)


def _added(table: Any, place: Any, updates: Any, along: int) -> Any:
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=tuple(range(along + 1, updates.ndim)),
        inserted_window_dims=(along,),
        scatter_dims_to_operand_dims=(along,),
        operand_batching_dims=tuple(range(along)),
        scatter_indices_batching_dims=tuple(range(along)),
    )
    return lax.scatter_add(table, place[..., None], updates, numbers, mode="drop")


def _subtracted(step: CodeStep) -> Function:
    return lambda x, indices, updates: lax.scatter_add_p.bind(x, indices, -updates, **step.params)


rewrite("scatter-sub scatter_sub", _subtracted)
rewrite("scatter scatter-add scatter_add scatter-mul scatter-max scatter-min", _scatter)


# ---------------------------------------------------------------- slice updates along several axes


def _update(step: CodeStep) -> Function | None:
    x, part = step.ins[:2]
    cut = [n for n, (a, b) in enumerate(zip(x.shape, part.shape, strict=True)) if a != b]
    if len(cut) < 2:
        return None
    first = cut[0]

    def run(x: Any, part: Any, *starts: Any) -> Any:
        """Cut the slice along one axis, update it along the others, and write it back."""
        zero = [np.int32(0)] * len(starts)
        there = [*zero[:first], starts[first], *zero[first + 1 :]]
        rest = [*starts[:first], np.int32(0), *starts[first + 1 :]]
        sizes = [part.shape[first] if n == first else size for n, size in enumerate(x.shape)]
        held = lax.dynamic_slice(x, there, sizes)
        return lax.dynamic_update_slice(x, lax.dynamic_update_slice(held, part, rest), there)

    return run


rewrite("dynamic_update_slice", _update)
