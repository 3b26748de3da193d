"""JAX rows of indexing operations. An index out of range is an error, or yields NaN without checks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod

import jax.numpy as jnp
from jax import lax

from meshlib.estimation.work.row_moves import is_small_table
from meshlib.jax.context import Array
from meshlib.jax.table import RowContext, aligned, rounded, row, widest
from meshlib.ops.movement.indexing import index_count

Names = tuple[str, ...]
LANES = 128
MOST_BLOCKS = 64  # of a cache, each written by a kernel of its own
MOST_SELECTED, FEW_INDICES = 2048, 16  # numbers to choose from; indices of each run of numbers
LARGEST = 2.0**127  # a power of two that bfloat16 has


def _checked(part: RowContext, n: int, indices: Array) -> Array | None:
    """Which indices are out of range, if that is an error; reported to the host."""
    if part.attrs["out_of_range"] != "error":
        return None
    own = part.own[n]
    part.context.check_indices(part.operation, indices if own is None else indices[own])
    return (indices < 0) | (indices >= index_count(part.operation))


def _poison(y: Array, wrong: Array | None) -> Array:
    """NaN for indices out of range, so that unchecked errors show in the result."""
    if wrong is None or not jnp.issubdtype(y.dtype, jnp.floating):
        return y
    return jnp.where(wrong, jnp.asarray(jnp.nan, y.dtype), y)


@row("one_hot")
def _one_hot(part: RowContext, indices: Array) -> Array:
    dim, size = part.attrs["dim"].name, part.out.shape.sizes[-1]
    wrong = _checked(part, 0, indices)
    dtype = widest(part.out.dtype)
    hit = indices[..., None] == part.positions(dim, size)
    y = jnp.where(hit, jnp.asarray(part.attrs["on"], dtype), jnp.asarray(part.attrs["off"], dtype))
    return _poison(y, None if wrong is None else wrong[..., None])


@row("gather")
def _gather(part: RowContext, weights: Array, indices: Array) -> Array:
    dim, (w_names, i_names), out = part.attrs["dim"].name, part.names, part.out.shape.names
    axis = w_names.index(dim)
    wrong = _checked(part, 1, indices)
    local = indices - part.offsets[dim]
    hit = (local >= 0) & (local < weights.shape[axis])
    chosen = jnp.where(hit, local, 0)
    if part.context.platform == "tpu" and {*w_names} <= {*i_names, dim} and _fuses(weights, chosen, axis):
        looked_up = _selected(weights, chosen, part.names, dim, out)
    else:  # whole rows; one table per index of the dims that both operands have
        shared, rest = ([n for n in w_names if n != dim and (n in i_names) == both] for both in (True, False))
        tables = jnp.transpose(weights, [w_names.index(n) for n in (*shared, dim, *rest)])
        narrow = not shared and is_small_table(len(tables), prod(tables.shape[1:]))
        if part.context.platform == "tpu" and narrow and tables.dtype == jnp.float32:
            looked_up = _by_product(tables, chosen)
        else:
            of_tables = (aligned(jnp.arange(weights.shape[w_names.index(n)]), (n,), i_names) for n in shared)
            looked_up = tables.at[(*of_tables, chosen)].get(mode="clip")
        looked_up = aligned(looked_up, (*i_names, *rest), out)
    y = jnp.where(aligned(hit, i_names, out), looked_up, jnp.zeros((), looked_up.dtype))
    return _poison(y, None if wrong is None else aligned(wrong, i_names, out))


def _fuses(weights: Array, chosen: Array, axis: int) -> bool:
    """Whether numbers are better selected than gathered: from few, or for few indices of each run of numbers.

    A gather of v5p takes 8 bundles for a number, which has to be in memory, a selection 4 for 1,024 to choose from.
    """
    size = weights.shape[axis]
    return bool(size <= MOST_SELECTED or chosen.size * size <= FEW_INDICES * weights.size)


def _selected(weights: Array, chosen: Array, names: Sequence[Names], dim: str, out: Names) -> Array:
    """One element per row as a masked sum along `dim`, which XLA fuses with its neighbours, other than a gather."""
    w_names, i_names = names
    space = (*i_names, dim)
    rows, at = aligned(weights, w_names, space), jnp.arange(weights.shape[w_names.index(dim)])
    hit = chosen[..., None] == at
    selected = jnp.sum(jnp.where(hit, rows, jnp.zeros((), rows.dtype)), axis=-1).astype(weights.dtype)
    return aligned(selected, i_names, out)


def _by_product(table: Array, chosen: Array) -> Array:
    """Rows of a small float32 table as a product with one-hots, which a TPU fuses; a gather would store each row in
    whole lanes.

    Exact but for what a TPU flushes to zero: a number is the sum of three of bfloat16. They are quartered, so that one
    finite number stands for each infinity and one for NaN, which a product would spread to other rows.
    """
    rest = jnp.where(jnp.isnan(table), 1.5 * LARGEST, jnp.clip(table / 4, -LARGEST, LARGEST))
    terms = []
    for _ in range(3):
        terms.append(rounded(rest))
        rest = rest - terms[-1]
    hit = chosen[..., None] == jnp.arange(3 * len(table)) % len(table)
    y = jnp.tensordot(
        hit.astype(jnp.bfloat16), jnp.concatenate(terms).astype(jnp.bfloat16), 1, preferred_element_type=jnp.float32
    )
    return jnp.where(jnp.abs(y) > LARGEST, jnp.nan, y * 4)


@row("scatter_add")
def _scatter_add(part: RowContext, updates: Array, indices: Array) -> Array:
    """Scatter-add as rows of one table: [index dims of the result and `dim`, other dims of the result]."""
    dim, (u_names, i_names), out = part.attrs["dim"].name, part.names, part.out.shape
    sizes = dict(zip((*u_names, *i_names), (*updates.shape, *indices.shape), strict=True)) | {
        d.name: d.size for d in out
    }
    stray = tuple(n for n in u_names if n not in i_names and n not in out.names)
    if stray:
        updates = jnp.sum(updates, axis=tuple(u_names.index(n) for n in stray)).astype(updates.dtype)
        u_names = tuple(n for n in u_names if n not in stray)
    batch = tuple(n for n in i_names if n in out.names)
    free_names = tuple(n for n in u_names if n not in i_names)
    wrong = _checked(part, 1, indices)
    local = indices - part.offsets[dim]
    hit = (local >= 0) & (local < sizes[dim])
    small = not batch and is_small_table(sizes[dim], prod(sizes[n] for n in free_names))
    if part.context.platform == "tpu" and small:
        table = _summed_by_row(updates, u_names, jnp.where(hit, local, -1), i_names, sizes[dim])
    else:
        place = jnp.zeros((1,) * len(i_names), jnp.int32)
        for n in batch:
            place = place * sizes[n] + aligned(jnp.arange(sizes[n], dtype=jnp.int32), (n,), i_names)
        rows = prod(sizes[n] for n in (*batch, dim))
        place = jnp.where(hit, jnp.broadcast_to(place * sizes[dim], indices.shape) + local, rows).ravel()
        space = (*i_names, *free_names)
        given = jnp.broadcast_to(aligned(updates, u_names, space), [sizes[n] for n in space]).reshape(place.size, -1)
        table = jnp.zeros((rows, given.shape[1]), updates.dtype).at[place].add(given, mode="drop")
    names = (*batch, dim, *free_names)
    y = aligned(table.reshape([sizes[n] for n in names]), names, out.names)
    return _poison(y, None if wrong is None else jnp.any(wrong))


def _summed_by_row(updates: Array, u_names: Names, place: Array, i_names: Names, rows: int) -> Array:
    """For each row of a small table the masked sum of its updates, which a TPU fuses; a scatter-add would store each
    update in whole lanes.

    For T5's position biases, 8 heads and 2,048 x 2,048 positions on v5e: 2.3 M cycles for 8.6 M, and 16 MiB for 2 GiB.
    """
    space = (*u_names, *(n for n in i_names if n not in u_names))
    axes = tuple(space.index(n) for n in i_names)
    updates, place = aligned(updates, u_names, space), aligned(place, i_names, space)
    return jnp.stack([jnp.sum(updates, axis=axes, where=place == n) for n in range(rows)])


@row("update_rows")
def _update_rows(part: RowContext, x: Array, rows: Array, indices: Array) -> Array:
    """One scatter that drops rows outside this block."""
    wrong = _checked(part, 2, indices)
    dim, (names, r_names, i_names) = part.attrs["dim"].name, part.names
    if wrong is not None and jnp.issubdtype(rows.dtype, jnp.floating):
        rows = _poison(rows, jnp.any(wrong))
        indices = jnp.clip(indices, 0, index_count(part.operation) - 1)
    size, place = x.shape[names.index(dim)], indices - part.offsets[dim]
    place = jnp.where((place >= 0) & (place < size), place, size)
    rest = [n for n in names if n != dim]
    order = [names.index(n) for n in (dim, *rest)]
    moved = jnp.transpose(rows, [r_names.index(n) for n in (*i_names, *rest)])
    updated = jnp.transpose(x, order).at[place].set(moved, mode="drop")
    return jnp.transpose(updated, [order.index(n) for n in range(len(order))])


@row("update_slice", stacks=True)
def _update_slice(part: RowContext, x: Array, new: Array, start: Array, trip: Array | None = None) -> Array:
    """One scatter that drops elements outside this block; a plain update for an unsplit dim at a single position.

    The scatter indexes all dims down to the last one that is indexed or split, so that the block keeps its dim order:
    otherwise XLA transposes a whole cache to write one token.
    """
    wrong = _checked(part, 2, start)
    dim, run, (names, n_names, s_names) = part.attrs["dim"].name, part.attrs["run"].name, part.names
    if run not in n_names:
        new, n_names = new[..., None], (*n_names, run)
    if wrong is not None and jnp.issubdtype(new.dtype, jnp.floating):  # NaN, written to the last valid position
        new = _poison(new, aligned(wrong, s_names, n_names))
        start = jnp.clip(start, 0, index_count(part.operation) - 1)
    outer = () if trip is None else (trip,)  # index of this block in the stack
    sizes, count = dict(zip(names, x.shape[len(outer) :], strict=True)), new.shape[n_names.index(run)]
    moved = jnp.transpose(new, [n_names.index(run if n == dim else n) for n in names])
    size = sizes[dim]
    if not s_names and size == part.attrs["dim"].size and part.attrs["out_of_range"] == "error":
        begin = [*outer, *(start if n == dim else 0 for n in names)]
        begin = [jnp.asarray(n, start.dtype) for n in begin]
        return lax.dynamic_update_slice(x, moved[None] if outer else moved, begin)
    place = start[..., None] + jnp.arange(count, dtype=jnp.int32) - part.offsets[dim]
    narrow = names[-2:] == (dim, names[-1]) and sizes[names[-1]] % LANES and not size % LANES
    if part.context.platform == "tpu" and narrow and count == 1 and place.size <= MOST_BLOCKS:
        return _update_blocks(x, moved, place[..., 0], outer, (names, s_names))
    place = jnp.where((place >= 0) & (place < size), place, size)  # JAX would wrap negative indices
    indexed = names[: 1 + max(names.index(n) for n in (dim, *s_names))]
    space = tuple(run if n == dim else n for n in indexed)
    places = tuple(
        aligned(place, (*s_names, run), space) if n == dim else aligned(jnp.arange(sizes[n]), (n,), space)
        for n in indexed
    )
    return x.at[(*outer, *places)].set(moved, mode="drop")


def _update_blocks(x: Array, new: Array, place: Array, outer: Sequence[Array], names: Sequence[Names]) -> Array:
    """One position of each sequence, written together with the block of `LANES` positions around it.

    A TPU lays positions in lanes where the features after them would fill lanes in part. A scatter, and a slice of one
    position, ask for features in lanes: the whole cache is copied before and after a step, and padded.
    """
    x_names, s_names = names
    sizes = dict(zip(x_names, x.shape[len(outer) :], strict=True))
    dim = x_names[-2]
    for index in product(*(range(n) for n in place.shape)):
        at = dict(zip(s_names, index, strict=True))
        begin = jnp.clip(place[index], 0, sizes[dim] - 1) // LANES * LANES
        corner = [*outer, *(begin if n == dim else at.get(n, 0) for n in x_names)]
        corner = [jnp.asarray(n, place.dtype) for n in corner]
        block_sizes = [*[1] * len(outer), *(1 if n in at else LANES if n == dim else sizes[n] for n in x_names)]
        hit = aligned(begin + jnp.arange(LANES) == place[index], (dim,), x_names)
        one = new[tuple(slice(at[n], at[n] + 1) if n in at else slice(None) for n in x_names)]
        block = jnp.where(hit, one, lax.dynamic_slice(x, corner, block_sizes))
        x = lax.dynamic_update_slice(x, block, corner)
    return x
