"""Reshard steps as JAX collectives, and exchanges within one operation: windows of a split dim, and summaries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import jax.numpy as jnp
import numpy as np
from jax import lax

from layouts import Mesh, permute_pairs
from layouts.plan import Step, gathered_axes
from layouts.step_kinds import STEP_KINDS
from meshlib.jax.context import Array, Index, TraceContext
from meshlib.program.exchanges import runs

_REDUCE = {"sum": lax.psum, "max": lax.pmax, "min": lax.pmin}
_LOCAL = {"max": jnp.max, "min": jnp.min}


def move(step: Step, x: Array, context: TraceContext) -> Array:
    """One reshard step on this device's block. Bools, and fp8 values that are not added, are sent as bytes."""
    kind = STEP_KINDS[step.kind]
    if x.dtype == jnp.bool_ and not kind.is_local:
        return move(step, x.astype(jnp.uint8), context).astype(jnp.bool_)
    eight = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize == 1
    if eight and not kind.is_local and not kind.reduces:
        sent = move(step, lax.bitcast_convert_type(x, jnp.uint8), context)
        return lax.bitcast_convert_type(sent, x.dtype)
    return EMITTED[step.kind](step, x, context)


def _all_gather(step: Step, x: Array, context: TraceContext) -> Array:
    """All blocks of a group along a dim; its neighbours are merged, or XLA would copy stacked weights first."""
    if step.dim is None:
        return _gather_dims(step, x)
    dim, count = _dim(step), context.mesh.group_size(step.axes)
    before, size, after = x.shape[:dim], x.shape[dim], x.shape[dim + 1 :]
    flat = x.reshape(prod(before), size, prod(after))
    return lax.all_gather(flat, step.axes, axis=1, tiled=True).reshape(*before, size * count, *after)


def _gather_dims(step: Step, x: Array) -> Array:
    """All blocks of a group, concatenated along several dims."""
    sizes = [step.before.mesh.axis_size(a) for a in step.axes]
    blocks = lax.all_gather(x, step.axes, axis=0).reshape(*sizes, *x.shape)
    gone = dict(gathered_axes(step))
    order = []
    for n, name in enumerate(step.before.shape.names):
        order += [*(step.axes.index(a) for a in gone.get(name, ())), len(sizes) + n]
    return blocks.transpose(order).reshape(step.after.local_shape.sizes)


def _reduction(step: Step) -> str:
    return dict(step.before.pending)[step.axes[0]]


def _dim(step: Step) -> int:
    return step.before.shape.index(step.dim or "")


def _all_reduce(step: Step, x: Array, context: TraceContext) -> Array:
    return _REDUCE[_reduction(step)](x, step.axes)


def _reduce_scatter(step: Step, x: Array, context: TraceContext) -> Array:
    """This device's block of a reduction.

    The TPU compiler makes an all-reduce and a slice, twice the bytes, of a scatter along lanes whose blocks are no even
    number of tiles, or along rows that fill none. Such blocks are sent as rows of full tiles. Dims on either side of
    the scattered one are merged, and dropped if they are 1: the compiler scatters the second dim of matrices alone.
    """
    axes, dim, count = step.axes, _dim(step), context.mesh.group_size(step.axes)
    before, block, after = x.shape[:dim], x.shape[dim] // count, x.shape[dim + 1 :]
    if _reduction(step) != "sum":
        # JAX scatters sums alone. Each device's part is sent to its owner, which reduces it: the same bytes.
        parts = x.reshape(*before, count, block, *after)
        return _LOCAL[_reduction(step)](lax.all_to_all(parts, axes, dim, dim), axis=dim)
    on_tpu = context.platform == "tpu" and x.nbytes >= STAGED_BYTES
    if on_tpu and block % (2 * _LANES) and x.size // count % (8 * _LANES) == 0:
        flat, at = jnp.moveaxis(x.reshape(*before, count, block, *after), dim, 0).reshape(-1, _LANES), 0
    else:
        sizes = ([prod(before)] if prod(before) > 1 else []), ([prod(after)] if prod(after) > 1 else [])
        flat, at = x.reshape(*sizes[0], block * count, *sizes[1]), len(sizes[0])
    for axis, groups in scatter_stages(context.mesh, axes) if on_tpu else [(axes, None)]:
        flat = lax.psum_scatter(flat, axis, scatter_dimension=at, tiled=True, axis_index_groups=groups)
    return flat.reshape(*before, block, *after)


def _all_to_all(step: Step, x: Array, context: TraceContext) -> Array:
    to_dim = step.before.shape.index(step.to_dim or "")
    return lax.all_to_all(x, step.axes, to_dim, _dim(step), tiled=True)


def _permute(step: Step, x: Array, context: TraceContext) -> Array:
    # Over all axes of the mesh, because only then are devices numbered as in the pairs.
    return lax.ppermute(x, step.before.mesh.axes, permute_pairs(step.before, step.after))


def _slice(step: Step, x: Array, context: TraceContext) -> Array:
    dim = _dim(step)
    size = x.shape[dim] // context.mesh.group_size(step.axes)
    return lax.dynamic_slice_in_dim(x, context.index(step.axes) * size, size, dim)


def _mask(step: Step, x: Array, context: TraceContext) -> Array:
    return jnp.where(context.index(step.axes) == 0, x, jnp.zeros_like(x))


# The JAX function of each kind in `layouts.step_kinds.STEP_KINDS`.
EMITTED: dict[str, Callable[[Step, Array, TraceContext], Array]] = {
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_reduce": _all_reduce,
    "all_to_all": _all_to_all,
    "collective_permute": _permute,
    "slice": _slice,
    "mask": _mask,
}
STAGED_BYTES = 1 << 16  # below this, launching a second collective costs more than the bytes saved
_LANES = 128  # elements of a tile's row on a TPU; a tile has eight rows
Stage = tuple[tuple[str, ...], list[list[int]] | None]


def scatter_stages(mesh: Mesh, axes: tuple[str, ...]) -> list[Stage]:
    """The consecutive psum_scatters of a sum over `axes` on TPUs: (axes, groups of positions along one axis, or None).

    The TPU compiler makes an all-reduce and a slice of a scatter over all devices of a program, which sends twice the
    bytes. Over a part of them it scatters, and two stages send together what one would.

    >>> scatter_stages(Mesh("x:4"), ("x",))
    [(('x',), [[0, 2], [1, 3]]), (('x',), [[0, 1], [2, 3]])]
    >>> scatter_stages(Mesh("x:4;y:2"), ("x",))
    [(('x',), None)]
    """
    if mesh.group_size(axes) < mesh.size:
        return [(axes, None)]
    long = tuple(a for a in axes if mesh.axis_size(a) > 1)
    if len(long) > 1:
        return [((a,), None) for a in long]
    n = mesh.group_size(axes)
    inner = min((k for k in range(2, n) if n % k == 0 and k * k >= n), default=n)
    if inner == n:  # a prime number of devices
        return [(axes, None)]
    outer = n // inner
    across = [[i * inner + j for i in range(outer)] for j in range(inner)]
    within = [[i * inner + j for j in range(inner)] for i in range(outer)]
    return [(long, across), (long, within)]


# ---------------------------------------------------------------- windows of a split dim


@dataclass(frozen=True)
class _Piece:
    """Indices [begin, begin + length) of block `source`, sent to position `to` of block `target`'s window."""

    source: int
    target: int
    begin: int
    to: int
    length: int


def gathered_run(
    x: Array,
    axis: int,
    axes: tuple[str, ...],
    context: TraceContext,
    needs: Callable[[int], tuple[tuple[int, int], Sequence[tuple[int, int]]]],
    size: int,
    wrap: bool,
    received: bool = True,
) -> Array:
    """The window of a split dim that this device needs; elements outside the dim are undefined.

    Args:
      x: this device's block.
      axis: position of the split dim.
      axes: mesh axes that split it, major first.
      needs: block number along `axes` -> its window [begin, end), and the parts of it that are read; elements between
        these parts, and behind the end of shorter windows, are undefined.
      size: of the whole dim.
      wrap: whether windows wrap round the dim.
      received: False for windows of this device's own elements alone.
    """
    mesh, block = context.mesh, x.shape[axis]
    count = mesh.group_size(axes)
    spans = [needs(j) for j in range(count)]
    length = max(end - begin for (begin, end), _ in spans)
    pieces: list[_Piece] = []
    at_home: list[_Piece] = []
    for j, ((begin, _), parts_read) in enumerate(spans):
        for first, last in parts_read:
            at = first if wrap else max(first, 0)
            for run in runs(first, last, size, block, wrap):
                piece = _Piece(run.source, j, run.begin - run.source * block, at - begin, run.end - run.begin)
                (at_home if run.source == j else pieces).append(piece)
                at += piece.length
    index = context.index(axes)
    parts, table, width = [x], np.full((count, length), -1), block
    _fill(table, at_home, 0)
    for turn in _permutes(pieces if received else []):
        longest = max(p.length for p in turn)
        # devices without a piece send the same slice
        begins = np.full(count, min(turn[0].begin, block - longest), np.int32)
        for p in turn:
            begins[p.source] = min(p.begin, block - longest)
        sent = lax.dynamic_slice_in_dim(x, _at(begins, index), longest, axis)
        parts.append(lax.ppermute(sent, mesh.axes, _pairs(mesh, axes, turn)))
        # Where a shorter piece was clamped to the end of its block, it begins further inside the slice sent.
        _fill(table, [_Piece(p.source, p.target, p.begin - int(begins[p.source]), p.to, p.length) for p in turn], width)
        width += longest
    return _taken(jnp.concatenate(parts, axis) if len(parts) > 1 else x, axis, table, index)


def _fill(table: np.ndarray, pieces: Sequence[_Piece], width: int) -> None:
    for p in pieces:
        table[p.target, p.to : p.to + p.length] = width + p.begin + np.arange(p.length)


def _permutes(pieces: Sequence[_Piece]) -> list[list[_Piece]]:
    """Group pieces into permutes, in which each device sends and receives at most one; similar lengths together."""
    turns: list[list[_Piece]] = []
    apart = sorted(pieces, key=lambda p: (-p.length, p.to, p.target))
    for p in apart:
        for turn in turns:
            if all(p.source != q.source and p.target != q.target for q in turn):
                turn.append(p)
                break
        else:
            turns.append([p])
    return turns


def _pairs(mesh: Mesh, axes: tuple[str, ...], turn: Sequence[_Piece]) -> list[tuple[int, int]]:
    return [(group[p.source], group[p.target]) for group in mesh.groups(axes) for p in turn]


def _at(values: np.ndarray, index: Index) -> Index:
    """This block's entry in a table of one number per block."""
    return int(values[0]) if (values == values[0]).all() else jnp.asarray(values)[index]


def _taken(x: Array, axis: int, table: np.ndarray, index: Index) -> Array:
    """The elements along `axis` listed in this block's row of `table`; -1 is undefined."""
    wanted = table.max(axis=0)
    if ((table == wanted) | (table < 0)).all():  # one row fits all blocks
        wanted = np.maximum(wanted, 0)
        cuts = np.flatnonzero(np.diff(wanted) != 1) + 1
        if len(cuts) < 8:
            spans = [(int(s[0]), int(s[-1]) + 1) for s in np.split(wanted, cuts)]
            parts = [lax.slice_in_dim(x, begin, end, axis=axis) for begin, end in spans]
            return jnp.concatenate(parts, axis) if len(parts) > 1 else parts[0]
        return jnp.take(x, jnp.asarray(wanted), axis=axis, mode="clip")
    rows = jnp.asarray(np.maximum(table, 0).astype(np.int32))
    return jnp.take(x, rows[index], axis=axis, mode="clip")


# ---------------------------------------------------------------- summaries


def all_summaries(x: Array, axes: tuple[str, ...]) -> Array:
    """The summaries of all blocks, stacked on a new leading dim."""
    return lax.all_gather(x, axes, axis=0)


def shared_summaries(x: Array, axes: tuple[str, ...], dim: int, count: int) -> Array:
    """This device's share along `dim` of all blocks' summaries, stacked on a new leading dim."""
    parts = x.reshape(*x.shape[:dim], count, x.shape[dim] // count, *x.shape[dim + 1 :])
    return lax.all_to_all(jnp.moveaxis(parts, dim, 0), axes, 0, 0)


def combined_summaries(
    xs: Sequence[Array], axes: tuple[str, ...], count: int, combine: Callable[..., tuple[Array, ...]]
) -> tuple[Array, ...]:
    """The summaries of all blocks combined by `combine`: exchange shares, combine, gather. Bytes as an all_reduce."""
    shape, size = xs[0].shape, xs[0].size
    short = -size % count
    flat = [jnp.pad(x.reshape(-1), (0, short)).reshape(count, -1) for x in xs]
    shares = lax.all_to_all(jnp.stack(flat, 1), axes, 0, 0)
    mine = jnp.stack(combine(*(shares[:, n] for n in range(len(xs)))))
    whole = lax.all_gather(mine, axes, axis=1)
    return tuple(whole[n].reshape(-1)[:size].reshape(shape) for n in range(len(xs)))
