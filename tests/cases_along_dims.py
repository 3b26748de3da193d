"""Rows for the operations that work along a dim: runs, running sums, ranking, stacking, scan. See `tests/cases.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import meshlib as mtf
from layouts import Shape
from meshlib.core.graph import Tensor
from meshlib.ops.pointwise.cumulative import linear_recurrence
from tests.cases import Array, Input, dims, distinct, flags, positive, row, signed, whole

N = dims("n:12")[0]
Along = Callable[[Array], Array]


def shifted(x: Array, offset: int, wrap: bool) -> Array:
    """x[a, n, b] moved along n."""
    out = np.zeros_like(x)
    for n in range(x.shape[1]):
        to = n + offset
        if wrap or 0 <= to < x.shape[1]:
            out[:, to % x.shape[1]] = x[:, n]
    return out


def folded(x: Array, step: Callable[[Any, Any], Any], first: float, exclusive: bool, reverse: bool) -> Array:
    """Running fold along axis 1, written as a loop."""
    out, total = np.empty_like(x), np.full_like(x[:, 0], first)
    order = range(x.shape[1])
    for n in reversed(order) if reverse else order:
        if exclusive:
            out[:, n] = total
        total = step(total, x[:, n])
        if not exclusive:
            out[:, n] = total
    return out


def ranked(x: Array, k: int) -> tuple[Array, Array]:
    """The k largest along axis 1 and their indices, as last axis, by sorting pairs."""
    values = np.empty((*x[:, 0].shape, k), x.dtype)
    indices = np.empty(values.shape, np.int32)
    for a, b in np.ndindex(x.shape[0], x.shape[2]):
        pairs = sorted((-x[a, n, b], n) for n in range(x.shape[1]))[:k]
        values[a, b] = [-v for v, _ in pairs]
        indices[a, b] = [n for _, n in pairs]
    return values, indices


# ---------------------------------------------------------------- slice, pad, shift, concat

for _variant, _begin, _size in (("middle", 2, 8), ("one", 7, 1), ("even parts", 4, 4), ("front", 0, 6)):
    row(
        "slice",
        f"along {_variant}",
        {"x": signed("a:4;n:12;b:2")},
        lambda f, x, b=_begin, s=_size: mtf.slice(x, b, s, "n"),
        lambda x, b=_begin, s=_size: x[:, b : b + s],
        "x",
    )
row(
    "slice",
    "strided",
    {"x": signed("a:4;n:12;b:2")},
    lambda f, x: mtf.strided_slice(x, 2, 4, 3, "n"),
    lambda x: x[:, 2::3][:, :4],
    "x",
)
row(
    "slice",
    "strided with filling",
    {"x": signed("a:4;n:7")},
    lambda f, x: mtf.strided_slice(x, 0, 4, 2, "n"),
    lambda x: x[:, ::2],
    "x",
)
row(
    "slice",
    "one of a split",
    {"x": signed("a:4;n:12")},
    lambda f, x: mtf.split(x, N, [4, 2, 6])[2] + mtf.split(x, N, 2)[0],
    lambda x: x[:, 6:] + x[:, :6],
    "x",
)
for _variant, _paddings, _value in (("zeros", [4, 8], 0.0), ("value", [0, 4], 1.5), ("odd", [3, 1], 0.0)):
    row(
        "pad",
        f"along {_variant}",
        {"x": signed("a:4;n:12;b:2")},
        lambda f, x, p=_paddings, v=_value: mtf.pad(x, p, "n", v),
        lambda x, p=_paddings, v=_value: np.pad(x, [(0, 0), tuple(p), (0, 0)], constant_values=v),
        "x",
    )
for _offset, _wrap in ((1, False), (-5, False), (3, True), (-1, True), (25, True), (12, False)):
    row(
        "shift",
        f"{_offset} {'round' if _wrap else 'out'}",
        {"x": signed("a:4;n:12;b:2")},
        lambda f, x, o=_offset, w=_wrap: mtf.shift(x, o, N, w),
        lambda x, o=_offset, w=_wrap: shifted(x, o, w),
        "x",
    )
row("shift", "int32", {"x": whole("a:4;n:12")}, lambda f, x: mtf.shift(x, 2, N, True), lambda x: np.roll(x, 2, 1))
row("shift", "bool", {"x": flags("a:4;n:12")}, lambda f, x: mtf.shift(x, -1, N, True), lambda x: np.roll(x, -1, 1))
row(
    "concat",
    "three",
    {"x": signed("a:4;n:8;b:2"), "y": signed("a:4;n:4;b:2"), "z": signed("a:4;n:12;b:2")},
    lambda f, x, y, z: mtf.concat([x, y, z], "n"),
    lambda x, y, z: np.concatenate([x, y, z], axis=1),
    "xyz",
)
row(
    "concat",
    "itself",
    {"x": signed("n:6;a:4")},
    lambda f, x: mtf.concat([x, x], "n"),
    lambda x: np.concatenate([x, x]),
    "x",
)
row("concat", "int32", {"x": whole("n:6"), "y": whole("n:2")}, lambda f, x, y: mtf.concat([x, y], "n"),
    lambda x, y: np.concatenate([x, y]))  # fmt: skip
for _wrap in (False, True):
    for _halo in (1, 3, 5):
        row(
            "concat",
            f"halo {_halo} {'round' if _wrap else 'out'}",
            {"x": signed("a:4;n:3;b:2")},
            lambda f, x, w=_wrap, h=_halo: mtf.halo_exchange(x, dims("a:4")[0], dims("n:3")[0], h, w),
            lambda x, w=_wrap, h=_halo: with_halo(x, h, h, w),
            "x",
        )
row(
    "concat",
    "left halo",
    {"x": signed("a:4;n:3;b:2")},
    lambda f, x: mtf.left_halo_exchange(x, dims("a:4")[0], dims("n:3")[0], 4),
    lambda x: with_halo(x, 4, 0, False),
    "x",
)


def with_halo(x: Array, left: int, right: int, wrap: bool) -> Array:
    """Blocks a of size n as windows of the sequence they make up."""
    a, n, b = x.shape
    line = x.reshape(a * n, b)
    out = np.zeros((a, left + n + right, b))
    for i, j in np.ndindex(a, left + n + right):
        at = i * n + j - left
        if wrap or 0 <= at < a * n:
            out[i, j] = line[at % (a * n)]
    return out


# ---------------------------------------------------------------- running sums and products

for _exclusive in (False, True):
    for _reverse in (False, True):
        _variant = f"{'exclusive' if _exclusive else 'inclusive'}{' reverse' if _reverse else ''}"
        row(
            "cumsum",
            _variant,
            {"x": signed("a:4;n:12;b:2")},
            lambda f, x, e=_exclusive, r=_reverse: mtf.cumsum(x, N, e, r),
            lambda x, e=_exclusive, r=_reverse: folded(x, np.add, 0, e, r),
            "x",
        )
        row(
            "linear_recurrence",
            f"product {_variant}",
            {"x": signed("a:4;n:12;b:2")},
            lambda f, x, e=_exclusive, r=_reverse: mtf.cumprod(x, N, e, r),
            lambda x, e=_exclusive, r=_reverse: folded(x, np.multiply, 1, e, r),
            "x",
        )
row("cumsum", "int32", {"x": whole("n:12;a:4")}, lambda f, x: mtf.cumsum(x, N), lambda x: np.cumsum(x, axis=0))
for _reverse in (False, True):
    row(
        "linear_recurrence",
        "backwards" if _reverse else "forwards",
        {"m": signed("a:4;n:12"), "x": signed("a:4;n:12")},
        lambda f, m, x, r=_reverse: linear_recurrence(m, x, N, r),
        lambda m, x, r=_reverse: recurrence(m, x, r),
        "mx",
    )


def recurrence(m: Array, x: Array, reverse: bool) -> Array:
    """h[n] = m[n] h[n - 1] + x[n], as sums of products."""
    out = np.zeros_like(x)
    size = x.shape[1]
    for n in range(size):
        for k in range(n, size) if reverse else range(n + 1):
            between = m[:, n:k] if reverse else m[:, k + 1 : n + 1]
            out[:, n] += x[:, k] * np.prod(between, axis=1)
    return out


# ---------------------------------------------------------------- ranking

row(
    "top_k",
    "values",
    {"x": distinct("a:4;n:12;b:2")},
    lambda f, x: mtf.top_k(x, N, dims("k:3")[0])[0],
    lambda x: ranked(x, 3)[0],
    "x",
)
row(
    "top_k",
    "more than a block",
    {"x": distinct("a:4;n:12;b:2")},
    lambda f, x: mtf.top_k(x, N, dims("n:8")[0])[0],
    lambda x: ranked(x, 8)[0],
    "x",
)
row(
    "top_k",
    "indices with ties",
    {"x": whole("a:4;n:12;b:2", 1, 4)},
    lambda f, x: mtf.top_k(x, N, dims("k:5")[0])[1],
    lambda x: ranked(x, 5)[1],
)
row(
    "argmax",
    "with ties",
    {"x": whole("a:4;n:12;b:2", 1, 4)},
    lambda f, x: mtf.argmax(x, N),
    lambda x: x.argmax(axis=1),
)
row(
    "top_k",
    "first and third",
    {"x": distinct("a:4;n:12;b:2")},
    lambda f, x: mtf.top_1(x, N)[0] - mtf.nth_largest_element(x, 2, N) * 2.0,
    lambda x: np.sort(x, 1)[:, -1] - 2 * np.sort(x, 1)[:, -3],
    "x",
)
row(
    "top_k",
    "second smallest",
    {"x": distinct("a:4;n:12;b:2")},
    lambda f, x: mtf.nth_smallest_element(x, 1, N),
    lambda x: np.sort(x, axis=1)[:, 1],
    "x",
)
for _descending in (False, True):
    row(
        "argsort",
        "down" if _descending else "up",
        {"x": whole("a:4;n:12;b:2", 1, 5)},
        lambda f, x, d=_descending: mtf.argsort(x, N, d),
        lambda x, d=_descending: np.argsort(-x if d else x, axis=1, kind="stable"),
    )
    row(
        "argsort",
        f"sort {'down' if _descending else 'up'}",
        {"x": distinct("a:4;n:12;b:2")},
        lambda f, x, d=_descending: mtf.sort(x, N, d),
        lambda x, d=_descending: -np.sort(-x, axis=1) if d else np.sort(x, axis=1),
        "x",
    )


# ---------------------------------------------------------------- stacking, parts by index

for _axis in (0, 1, 2):
    row(
        "stack",
        f"as dim {_axis}",
        {"x": signed("a:4;b:6"), "y": signed("a:4;b:6")},
        lambda f, x, y, n=_axis: mtf.stack([x, y, x * y, mtf.sin(x)], "s", n),
        lambda x, y, n=_axis: np.stack([x, y, x * y, np.sin(x)], axis=n),
        "xy",
    )
row(
    "gather",
    "unstacked",
    {"x": signed("a:4;n:12")},
    lambda f, x: mtf.unstack(x, N)[5] * mtf.unstack(x, N)[0],
    lambda x: x[:, 5] * x[:, 0],
    "x",
)
row(
    "gather",
    "dynamic slice",
    {"x": signed("a:4;n:12;b:2"), "i": whole("", 1, 8)},
    lambda f, x, i: mtf.dynamic_slice(x, i, 4, N),
    lambda x, i: x[:, int(i) : int(i) + 4],
    "x",
)
row(
    "update_slice",
    "one start",
    {"x": signed("a:4;n:12;b:2"), "y": signed("a:4;n:4;b:2"), "i": whole("", -3, 11)},
    lambda f, x, y, i: mtf.update_slice(x, y, N, i, out_of_range="drop"),
    lambda x, y, i: _updated(x, y, np.full(4, i)),
    "xy",
)
row(
    "update_slice",
    "one start, within the dim",
    {"x": signed("a:4;n:12;b:2"), "y": signed("b:2;n:4;a:4"), "i": whole("", 0, 9)},
    lambda f, x, y, i: mtf.update_slice(x, y, N, i),
    lambda x, y, i: _updated(x, y.transpose(2, 1, 0), np.full(4, i)),
    "xy",
)
row(
    "update_slice",
    "each row its own",
    {"x": signed("a:4;n:12;b:2"), "y": signed("a:4;n:4;b:2"), "i": whole("a:4", -3, 11)},
    lambda f, x, y, i: mtf.update_slice(x, y, N, i, out_of_range="drop"),
    lambda x, y, i: _updated(x, y, i),
    "xy",
)
row(
    "update_slice",
    "each row its own, within the dim",
    {"x": signed("a:4;n:12;b:2"), "y": signed("a:4;n:4;b:2"), "i": whole("a:4", 0, 9)},
    lambda f, x, y, i: mtf.update_slice(x, y, N, i),
    lambda x, y, i: _updated(x, y, i),
    "xy",
)
row(
    "update_slice",
    "a minor dim",
    {"x": signed("a:4;b:2;n:12"), "y": signed("n:1;b:2;a:4"), "i": whole("b:2", 0, 12)},
    lambda f, x, y, i: mtf.update_slice(x, y, N, i, out_of_range="drop"),
    lambda x, y, i: _updated(x.transpose(1, 2, 0), y.transpose(1, 0, 2), i).transpose(2, 0, 1),
    "xy",
)
row(
    "update_slice",
    "one of each row",
    {"x": signed("a:4;n:12;b:2"), "y": signed("b:2;a:4"), "i": whole("a:4", -3, 11)},
    lambda f, x, y, i: mtf.update_slice(x, y, N, i, out_of_range="drop"),
    lambda x, y, i: _updated(x, y.T[:, None], i),
    "xy",
)


def _updated(x: Array, y: Array, starts: Array) -> Array:
    """Rows of `y` put into rows of `x` along the second dim, each from its own start; what falls outside is lost."""
    z = x.copy()
    for a, start in enumerate(starts):
        for j in range(y.shape[1]):
            if 0 <= start + j < x.shape[1]:
                z[a, start + j] = y[a, j]
    return z


def _placed(x: Array, rows: Array, indices: Array) -> Array:
    """x[a, n, b] with rows[i, j, a, b] at indices[i, j] of n, one after the other; what has no place is lost."""
    z = x.copy()
    for place in np.ndindex(*indices.shape):
        if 0 <= indices[place] < x.shape[1]:
            z[:, indices[place]] = rows[place]
    return z


_PLACES = Input(Shape("i:2;j:2"), lambda rng, shape: rng.permutation(16)[:4].reshape(shape) - 2, "int32")
_INSIDE = Input(Shape("i:2"), lambda rng, shape: rng.permutation(12)[:2], "int32")
row(
    "update_rows",
    "some outside",
    {"x": signed("a:4;n:12;b:2"), "r": signed("i:2;j:2;a:4;b:2"), "at": _PLACES},
    lambda f, x, r, at: mtf.update_rows(x, r, at, N, out_of_range="drop"),
    _placed,
    "xr",
)
row(
    "update_rows",
    "a major dim",
    {"x": signed("n:12;b:2"), "r": signed("b:2;i:2"), "at": _INSIDE},
    lambda f, x, r, at: mtf.update_rows(x, r, at, N),
    lambda x, r, at: _placed(x[None], r.T[:, None], at)[0],
    "xr",
)


# ---------------------------------------------------------------- scan


def _step(c: tuple[Tensor, ...], s: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    y = mtf.tanh(c[0]) * s[0] + c[0] * 0.5
    return (y,), (mtf.reduce_sum(y * s[0], reduced_dim=dims("b:6")[0]),)


def _scan(c: Array, x: Array, reverse: bool) -> tuple[Array, Array]:
    out = np.zeros((x.shape[1], x.shape[0]))
    order = range(x.shape[1])
    for n in reversed(order) if reverse else order:
        c = np.tanh(c) * x[:, n] + c * 0.5
        out[n] = (c * x[:, n]).sum(axis=1)
    return c, out


for _reverse in (False, True):
    for _part in (0, 1):
        row(
            "scan",
            f"{'stacked' if _part else 'last'}{' reverse' if _reverse else ''}",
            {"c": signed("a:4;b:6"), "x": signed("a:4;n:12;b:6")},
            lambda f, c, x, r=_reverse, p=_part: mtf.scan(_step, [c], [x], N, r)[p][0],
            lambda c, x, r=_reverse, p=_part: _scan(c, x, r)[p],
            "cx",
        )
row(
    "scan",
    "while_loop",
    {"x": positive("a:4;b:6"), "w": signed("b:6")},
    lambda f, x, w: mtf.while_loop(3, lambda v: mtf.sin(v) * w + x, [x])[0],
    lambda x, w: np.sin(np.sin(np.sin(x) * w + x) * w + x) * w + x,
    "xw",
)
