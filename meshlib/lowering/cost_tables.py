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
    blocks = table.reshape(prod(table.shape[:axis]), table.shape[axis], -1)
    first, second = (2, 0) if len(blocks) < blocks.shape[2] else (0, 1)  # the longer axis first
    least: Floats = np.minimum.reduce(np.minimum.reduce(blocks, axis=first), axis=second)
    return least


def dominated(axes: Sequence[int], tables: Sequence[Floats]) -> NDArray[np.bool_]:
    """Mask of a variable's values that another value dominates; `axes` are its axes in `tables`."""
    size = tables[0].shape[axes[0]] if tables else 0
    nothing = np.zeros(size, np.bool_)
    if not tables or size * sum([table.size for table in tables]) > DOMINANCE_ENTRIES:
        return nothing
    rows = [
        (table.swapaxes(0, axis) if axis else table).reshape(size, -1) for axis, table in zip(axes, tables, strict=True)
    ]
    # Values that fail under a few of the neighbours' values need no full comparison.
    few = sum([table[:, _samples(table.shape[1])] for table in rows], np.zeros(()))
    maybe = np.logical_and.reduce(few[:, None] <= few + 1e-12 * abs(few), axis=2)
    maybe.flat[:: size + 1] = False
    some, others = maybe.nonzero()
    if not len(some):
        return nothing
    worst = np.zeros(len(some))  # largest excess over the other value
    with np.errstate(invalid="ignore"):
        for table in rows:
            more = table[some] - table[others]
            step = np.maximum.reduce(more, axis=1)
            if np.logical_or.reduce(np.isnan(step)):
                more[np.isnan(more)] = -inf  # both infeasible
                step = np.maximum.reduce(more, axis=1)
            worst += step  # not a number where one table rules the other value out
    maybe[some, others] = worst <= 0
    ties = maybe & maybe.T
    if np.logical_or.reduce(ties, axis=None):  # of equal values the first stays
        maybe &= ~ties | (np.arange(size)[:, None] < np.arange(size))
    gone: NDArray[np.bool_] = np.logical_or.reduce(maybe, axis=0)
    return gone


@lru_cache(maxsize=1 << 12)
def _samples(count: int) -> Ints:
    """A few evenly spaced columns of a table."""
    return np.array([n * (count - 1) // (SAMPLES - 1) for n in range(SAMPLES)])


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
