"""Linear systems: factorisation and substitution column by column, and user-defined solvers."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import jaxpr_as_fun

from meshlib.jax.importing.code import CodeStep
from meshlib.jax.importing.rewrites.table import Function, rewrite


def _solve(step: CodeStep) -> Function:
    """The solver function alone; the matrix function and transpose of a custom solve matter only to derivatives."""
    counts, solve = step.params["const_lengths"], step.params["jaxprs"].solve
    _, first, stop, end = accumulate((counts.matvec, counts.vecmat, counts.solve, counts.transpose_solve))

    def run(*operands: Any) -> Any:
        return jaxpr_as_fun(solve)(*operands[first:stop], *operands[end:])

    return run


rewrite("custom_linear_solve", _solve, own_lines=True)


# ---------------------------------------------------------------- factorisations, one column per trip of a loop


def _eye(n: int, dtype: Any) -> Any:
    return np.eye(n, dtype=dtype)


def _cholesky(step: CodeStep) -> Function:
    def run(x: Any) -> Any:
        n = x.shape[-1]
        lower = jnp.tril(x)  # only the lower triangle is read
        x = lower + jnp.swapaxes(jnp.tril(x, -1), -1, -2)

        def trip(rest: Any, unit: Any) -> tuple[Any, Any]:
            column = jnp.where(jnp.cumsum(unit) > 0, (rest * unit).sum(-1), 0)
            column = column / jnp.sqrt((column * unit).sum(-1, keepdims=True))
            return rest - column[..., :, None] * column[..., None, :], column

        return jnp.moveaxis(lax.scan(trip, x, _eye(n, x.dtype))[1], 0, -1)

    return run


rewrite("cholesky", _cholesky)


def _triangular(step: CodeStep) -> Function:
    p = step.params

    def run(a: Any, b: Any) -> Any:
        lower = p["lower"] != p["transpose_a"]
        if p["transpose_a"]:
            a = jnp.swapaxes(a, -1, -2)
        if not p["left_side"]:
            a, b, lower = jnp.swapaxes(a, -1, -2), jnp.swapaxes(b, -1, -2), not lower
        n = a.shape[-1]
        diagonal = jnp.ones((n,), a.dtype) if p["unit_diagonal"] else (a * _eye(n, a.dtype)).sum(-1)
        a = jnp.tril(a, -1) if lower else jnp.triu(a, 1)

        def trip(rest: Any, of_column: Any) -> tuple[Any, Any]:
            column, size, unit = of_column
            x = (rest * unit[:, None]).sum(-2) / size[..., None]
            return rest - column[..., :, None] * x[..., None, :], x

        sizes = jnp.moveaxis(jnp.broadcast_to(diagonal, a.shape[:-1]), -1, 0)
        columns = (jnp.moveaxis(a, -1, 0), sizes, _eye(n, a.dtype))
        x = jnp.moveaxis(lax.scan(trip, b, columns, reverse=not lower)[1], 0, -2)
        return x if p["left_side"] else jnp.swapaxes(x, -1, -2)

    return run


rewrite("triangular_solve", _triangular)


def _swapped(x: Any, here: Any, there: Any, along: int) -> Any:
    """`x` with two rows of an axis exchanged, which two masks mark."""
    first, second = ((x * mask).sum(along, keepdims=True).astype(x.dtype) for mask in (here, there))
    return jnp.where(here, second, jnp.where(there, first, x))


def _permutation(step: CodeStep) -> Function:
    """The order of rows after their exchanges."""
    row = np.arange(step.params["permutation_size"], dtype="int32")

    def run(pivots: Any) -> Any:
        def trip(order: Any, exchange: Any) -> tuple[Any, None]:
            n, pivot = exchange
            return _swapped(order, row == n, row == pivot[..., None], -1), None

        steps = np.arange(pivots.shape[-1], dtype="int32"), jnp.moveaxis(pivots, -1, 0)
        return lax.scan(trip, jnp.broadcast_to(row, (*pivots.shape[:-1], row.size)), steps)[0]

    return run


rewrite("lu_pivots_to_permutation", _permutation)


def _lu(step: CodeStep) -> Function:
    def run(x: Any) -> Any:
        rows, columns = x.shape[-2:]
        row, column = np.arange(rows, dtype="int32"), np.arange(columns, dtype="int32")
        order = jnp.broadcast_to(row, x.shape[:-1])

        def trip(held: Any, n: Any) -> tuple[Any, Any]:
            x, order = held
            pivot = jnp.argmax(jnp.where(row >= n, jnp.abs((x * (column == n)).sum(-1)), -1), -1)[..., None]
            here, there = row == n, row == pivot
            x = _swapped(x, here[:, None], there[..., None], -2)
            order = _swapped(order, here, there, -1)
            top = (x * here[:, None]).sum(-2)
            factors = (x * (column == n)).sum(-1) / (top * (column == n)).sum(-1, keepdims=True)
            below = (row > n)[:, None]
            reduced = jnp.where(column > n, x - factors[..., None] * top[..., None, :], x)
            x = jnp.where(below, jnp.where(column == n, factors[..., None], reduced), x)
            return (x, order), pivot[..., 0].astype("int32")

        (x, order), pivots = lax.scan(trip, (x, order), np.arange(min(rows, columns), dtype="int32"))
        return x, jnp.moveaxis(pivots, 0, -1), order

    return run


rewrite("lu", _lu)


def _qr(step: CodeStep) -> Function | None:
    """Householder's reflections, with LAPACK's signs; the last column of a square matrix is left as it is."""
    if step.params["pivoting"]:
        return None

    def run(x: Any) -> Any:
        rows, columns = x.shape[-2:]
        row, column = np.arange(rows, dtype="int32"), np.arange(columns, dtype="int32")

        def trip(held: Any, n: Any) -> tuple[Any, None]:
            q, r = held
            below = jnp.where(row >= n, (r * (column == n)).sum(-1), 0)
            first = (below * (row == n)).sum(-1, keepdims=True)
            size = jnp.sqrt((below * below).sum(-1, keepdims=True))
            v = below + jnp.where(row == n, jnp.where(first < 0, -size, size), 0)
            length = jnp.where(jnp.any((below != 0) & (row > n), -1, keepdims=True), (v * v).sum(-1, keepdims=True), 0)
            unit = v * jnp.where(length > 0, 2 / jnp.where(length > 0, length, 1), 0)
            q = q - jnp.einsum("...ij,...j,...k->...ik", q, v, unit)
            return (q, r - jnp.einsum("...i,...j,...jk->...ik", unit, v, r)), None

        every = jnp.broadcast_to(_eye(rows, x.dtype), (*x.shape[:-2], rows, rows))
        count = min(rows, columns)
        q, r = lax.scan(trip, (every, x), np.arange(count, dtype="int32"))[0]
        return (q, jnp.triu(r)) if step.params["full_matrices"] else (q[..., :count], jnp.triu(r[..., :count, :]))

    return run


rewrite("qr", _qr)


def _tridiagonal(step: CodeStep) -> Function:
    def run(below: Any, diagonal: Any, above: Any, b: Any) -> Any:
        rows = [jnp.moveaxis(v, -1, 0)[..., None] for v in (below, diagonal, above)]

        def down(held: Any, row: Any) -> tuple[Any, Any]:
            ratio, rest = held
            low, middle, high, wanted = row
            pivot = middle - low * ratio
            held = high / pivot, (wanted - low * rest) / pivot
            return held, held

        def up(x: Any, row: Any) -> tuple[Any, Any]:
            ratio, rest = row
            return (rest - ratio * x,) * 2

        b = jnp.moveaxis(b, -2, 0)
        zero = jnp.zeros_like(rows[0][0]), jnp.zeros_like(b[0])
        return jnp.moveaxis(lax.scan(up, zero[1], lax.scan(down, zero, (*rows, b))[1], reverse=True)[1], 0, -2)

    return run


rewrite("tridiagonal_solve", _tridiagonal)
