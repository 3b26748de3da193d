"""Arithmetic on cost tables of a factor graph: sums, minima, marginals and dominated values.

A table has one axis per variable; an entry is a cost, infinite where the values exclude each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import inf, prod
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.intp]

DOMINANCE_ENTRIES = 400_000  # entries in comparisons of a variable's values
SAMPLES = 8  # neighbours' values under which values are compared first


def marginal(table: Floats, axis: int) -> Floats:
    """The minimum of a table for each value along an axis."""
    size = table.shape[axis]
    blocks = table.reshape(-1, size, prod(table.shape[axis + 1 :]))
    least: Floats = np.minimum.reduce(np.minimum.reduce(blocks, axis=0), axis=1)
    return least


def marginals(table: Floats) -> list[Floats]:
    """The minimum of a table for each value, along each of its axes."""
    if table.ndim == 1:
        return [table]
    first = np.minimum.reduce(table.reshape(len(table), -1), axis=1)
    return [first, *marginals(np.minimum.reduce(table, axis=0))]


def add_along(table: Floats, values: Sequence[Floats]) -> None:
    """Add a vector along each axis of a table, in place."""
    first, *others = values
    if others:
        table += sum([x.reshape(-1, *[1] * (len(others) - 1 - n)) for n, x in enumerate(others)], np.zeros(()))
    table += first.reshape(-1, *[1] * len(others))


def dominated(axes: Sequence[int], tables: Sequence[Floats]) -> NDArray[np.bool_]:
    """Mask of a variable's values that another value dominates; `axes` are its axes in `tables`."""
    size = tables[0].shape[axes[0]] if tables else 0
    nothing = np.zeros(size, np.bool_)
    if sum([size * table.size for table in tables]) > DOMINANCE_ENTRIES:
        return nothing
    views = [table.swapaxes(0, axis) for axis, table in zip(axes, tables, strict=True)]
    # Values that fail under a few of the neighbours' values need no full comparison.
    samples = views[0][_samples(views[0].shape)]
    for view in views[1:]:
        samples = samples + view[_samples(view.shape)]
    maybe = np.logical_and.reduce(samples[:, None] <= samples + 1e-12 * abs(samples), axis=2)
    maybe.flat[:: size + 1] = False
    some, others = maybe.nonzero()
    if not len(some):
        return nothing
    worst = np.zeros(len(some))  # largest excess over the other value
    for view in views:
        table = view.reshape(size, -1)
        if np.isfinite(table).all():
            worst += np.maximum.reduce(table[some] - table[others], axis=1)
            continue
        with np.errstate(invalid="ignore"):
            more = table[some] - table[others]
        more[np.isnan(more)] = -inf  # both infeasible
        step = np.maximum.reduce(more, axis=1)
        ruled_out = np.isposinf(worst) | np.isposinf(step)
        worst = np.where(ruled_out, inf, np.where(ruled_out, 0, worst) + np.where(ruled_out, 0, step))
    maybe[some, others] = worst <= 0
    ties = maybe & maybe.T
    maybe &= ~ties | (np.arange(size)[:, None] < np.arange(size)[None, :])  # of equal values the first stays
    gone: NDArray[np.bool_] = np.any(maybe, axis=0)
    return gone


@lru_cache(maxsize=1 << 12)
def _samples(shape: tuple[int, ...]) -> tuple[slice | Ints, ...]:
    """Index of a few evenly spaced entries of each row of a table."""
    places = np.linspace(0, prod(shape[1:]) - 1, SAMPLES).astype(np.intp)
    if len(shape) == 1:
        return (np.arange(shape[0])[:, None].repeat(SAMPLES, 1),)
    return (slice(None), *np.unravel_index(places, shape[1:]))


def minimum(sizes: tuple[int, ...], axes: Sequence[tuple[int, ...]], tables: Sequence[Floats]) -> Floats:
    """Sum of tables, minimised over the first variable."""
    total = _in_place(tables[0], axes[0], sizes) if tables else np.zeros(())
    for own, table in zip(axes[1:], tables[1:], strict=True):
        total = total + _in_place(table, own, sizes)
    whole = total if total.shape == sizes else np.broadcast_to(total, sizes)
    return np.asarray(np.minimum.reduce(whole, axis=0))


def _in_place(table: Floats, own: tuple[int, ...], sizes: tuple[int, ...]) -> Floats:
    """A view of a table that broadcasts against one over all variables."""
    order, shape = _aligned(own, sizes)
    return (table if order is None else table.transpose(order)).reshape(shape)


@lru_cache(maxsize=1 << 12)
def _aligned(own: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[tuple[int, ...] | None, tuple[int, ...]]:
    """(permutation, or None; shape) that aligns a table with a larger one for addition."""
    order = tuple(sorted(range(len(own)), key=own.__getitem__))
    in_order = order == tuple(range(len(own)))
    return None if in_order else order, tuple([n if k in own else 1 for k, n in enumerate(sizes)])
