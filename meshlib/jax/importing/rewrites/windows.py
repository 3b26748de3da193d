"""Window convolutions, reductions and running extremes as sums, products and maxima of shifted values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr

from meshlib.jax.importing.code import CodeStep, Var
from meshlib.jax.importing.ranges import pads_of
from meshlib.jax.importing.rewrites.order import by_element
from meshlib.jax.importing.rewrites.table import Function, rewrite

Pads = Sequence[tuple[int, int]]


def _tap(x: Any, value: Any, at: Sequence[int], out: Sequence[int], strides: Sequence[int], pads: Pads) -> Any:
    """Each window's element at offset `at` along the last axes, `value` outside `x`."""
    first = x.ndim - len(at)
    config = [(0, 0, 0)] * first
    for offset, size, stride, (before, _), length in zip(at, out, strides, pads, x.shape[first:], strict=True):
        low = before - offset
        config.append((low, (size - 1) * stride + 1 - length - low, 0))
    moved = lax.pad(x, value, config)
    if all(s == 1 for s in strides):
        return moved
    return lax.slice(moved, [0] * x.ndim, moved.shape, [1] * first + list(strides))


# ---------------------------------------------------------------- reductions of windows


def _lowest(dtype: Any) -> Any:
    return np.array(-np.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).min, dtype)


def _highest(dtype: Any) -> Any:
    return np.array(np.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).max, dtype)


def _to_first(join: Function, before: Function) -> Any:
    """The larger or smaller of two values, with the gradient to the first if they are equal."""
    function = jax.custom_jvp(join)
    function.defjvp(lambda xs, dxs: (join(*xs), jnp.where(before(*xs), *dxs)))
    return function


_REDUCTIONS: dict[str, tuple[Any, Any]] = {
    "reduce_window_max": (_to_first(lax.max, lax.ge), _lowest),
    "reduce_window_min": (_to_first(lax.min, lax.le), _highest),
    "reduce_window_sum": (lax.add, lambda dtype: np.zeros((), dtype)),
}


def _windows(step: CodeStep) -> Function | None:
    p = step.params
    join, neutral = _REDUCTIONS.get(step.kind, (None, None))
    if join is None:
        if len(step.ins) != 2:
            return None
        several = by_element(ClosedJaxpr(p["jaxpr"], p["consts"]))

        def join(a: Any, b: Any) -> Any:
            return several(a, b)[0]

    windows, strides = p["window_dimensions"], p["window_strides"]
    spread, between = p["base_dilation"], p["window_dilation"]

    def run(x: Any, *begin: Any) -> Any:
        value = begin[0] if begin else neutral(x.dtype)
        x = lax.pad(x, value, [(0, 0, int(n) - 1) for n in spread])
        # Axis by axis and element by element: the first maximum in row-major order gets the gradient, as in JAX.
        for n in reversed(range(x.ndim)):
            size, stride, apart = int(windows[n]), int(strides[n]), int(between[n])
            before, after = map(int, p["padding"][n])
            if size == stride == 1 and not before and not after:
                continue
            x = jnp.moveaxis(x, n, -1)
            if size == stride and apart == 1 and not before and not after and not x.shape[-1] % size:
                tiles = x.reshape(*x.shape[:-1], -1, size)
                taps = [tiles[..., k] for k in range(size)]
                x = jnp.sum(tiles, axis=-1) if join is lax.add else reduce(join, taps)
            else:
                count = (x.shape[-1] + before + after - (size - 1) * apart - 1) // stride + 1
                taps = [_tap(x, value, [k * apart], [count], [stride], [(before, after)]) for k in range(size)]
                x = reduce(join, taps)
            x = jnp.moveaxis(x, -1, n)
        return join(*begin, x) if begin else x

    return run


rewrite(" ".join(["reduce_window", *_REDUCTIONS]), _windows)


def _pooled(step: CodeStep) -> Function:
    """The function whose derivative a step of JAX's derivatives of pools is."""
    p, plain = step.params, (1,) * len(step.params["window_dimensions"])
    kind = "reduce_window_max" if p["select_prim"] is lax.ge_p else "reduce_window_min"
    pool = _windows(replace(step, kind=kind, params={"base_dilation": plain, "window_dilation": plain, **p}))
    assert pool is not None
    return pool


rewrite("select_and_scatter_add", lambda step: lambda dy, x: jax.vjp(_pooled(step), x)[1](dy)[0])
rewrite("select_and_gather_add", lambda step: lambda dx, x: jax.jvp(_pooled(step), (x,), (dx,))[1])


# ---------------------------------------------------------------- running extremes


def _running(step: CodeStep) -> Function:
    join, value = (lax.max, _lowest) if step.kind == "cummax" else (lax.min, _highest)
    at, reverse = int(step.params["axis"]), bool(step.params["reverse"])

    def run(x: Any) -> Any:
        far = 1
        while far < x.shape[at]:  # doubling: each element is the extreme of the `far` before it
            config = [(0, 0, 0)] * x.ndim
            config[at] = (-far, far, 0) if reverse else (far, -far, 0)
            x, far = join(x, lax.pad(x, value(x.dtype), config)), 2 * far
        return x

    return run


rewrite("cummax cummin", _running)


# ---------------------------------------------------------------- gradients of rotations


def _padded_pieces(step: CodeStep) -> tuple[list[Var], int] | None:
    """Two zero-padded pieces that a sum places one after the other along an axis; None for other sums."""
    makers = [x.maker for x in step.ins if x.maker is not None and x.maker.kind == "pad"]
    if len(makers) != 2 or any(maker.ins[1].number != 0 for maker in makers):
        return None
    axes = {n for maker in makers for n, (low, high, _) in enumerate(pads_of(maker)) if low or high}
    if len(axes) != 1 or any(between for maker in makers for _, _, between in pads_of(maker)):
        return None
    (at,) = axes
    (first, low), (second, before) = sorted(
        ((maker.ins[0], pads_of(maker)[at][0]) for maker in makers), key=lambda piece: piece[1]
    )
    adjacent = low == 0 and before == first.shape[at] and before + second.shape[at] == step.ins[0].shape[at]
    return ([first, second], at) if adjacent else None


def _joined_pieces(step: CodeStep) -> Function | None:
    """The sum of two pieces of a rotated value, each padded back to its position, as a concatenation of them."""
    padded = _padded_pieces(step)
    if padded is None:
        return None
    (first, _), at = padded
    cut = first.shape[at]
    at_start = step.ins[0].maker is not None and step.ins[0].maker.ins[0] is first

    def run(a: Any, b: Any) -> Any:
        start, end = (a, b) if at_start else (b, a)
        return lax.concatenate(
            [lax.slice_in_dim(start, 0, cut, axis=at), lax.slice_in_dim(end, cut, end.shape[at], axis=at)], at
        )

    return run


rewrite("add add_any", _joined_pieces)
