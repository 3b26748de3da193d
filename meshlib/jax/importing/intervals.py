"""Intervals of integers that depend on data, such as `jnp.minimum(n, 3)`, which may bound the trips of a loop."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from meshlib.jax.importing.code import Var

Interval = tuple[float, float]
_ALL = (-math.inf, math.inf)
_DEPTH = 16  # makers that are followed


def _of_dtype(dtype: Any) -> Interval:
    if str(dtype) == "bool":
        return 0, 1
    # Of wide signed integers no result wraps: a loop by one that does would run for two thousand million trips.
    if str(dtype) in ("int32", "int64") or not str(dtype).startswith(("int", "uint")):
        return _ALL
    limits = jax.numpy.iinfo(dtype)
    return float(limits.min), float(limits.max)


def _wrapped(x: Interval, dtype: Any) -> Interval:
    """The interval of a result computed in a dtype: all its numbers where the exact result may not fit."""
    low, high = _of_dtype(dtype)
    return x if low <= x[0] and x[1] <= high else (low, high)


def _remainder(x: Interval, y: Interval) -> Interval:
    low, high = min(x[0], 0), max(x[1], 0)
    if y[0] <= 0 <= y[1]:  # the remainder of a division by zero is the dividend
        return low, high
    most = max(map(abs, y)) - 1
    return max(low, -most), min(high, most)


def _rounded(x: Interval) -> Interval:
    """The integers around an interval; whether a cast truncates or tests for zero does not matter."""
    return math.floor(x[0]) if math.isfinite(x[0]) else x[0], math.ceil(x[1]) if math.isfinite(x[1]) else x[1]


def _flag(certain: bool, possible: bool) -> Interval:
    return float(certain), float(possible)


_SAME = "broadcast_in_dim reshape squeeze expand_dims transpose slice copy rev reduce_max reduce_min"
_RULES: dict[str, Callable[..., Interval]] = {
    "add": lambda x, y: (x[0] + y[0], x[1] + y[1]),
    "sub": lambda x, y: (x[0] - y[1], x[1] - y[0]),
    "neg": lambda x: (-x[1], -x[0]),
    "max": lambda x, y: (max(x[0], y[0]), max(x[1], y[1])),
    "min": lambda x, y: (min(x[0], y[0]), min(x[1], y[1])),
    "clamp": lambda low, x, high: tuple(min(max(x[n], low[n]), high[n]) for n in (0, 1)),
    "rem": _remainder,
    "convert_element_type": _rounded,
    "select_n": lambda which, *cases: (min(c[0] for c in cases), max(c[1] for c in cases)),
    "lt": lambda x, y: _flag(x[1] < y[0], x[0] < y[1]),
    "le": lambda x, y: _flag(x[1] <= y[0], x[0] <= y[1]),
    "gt": lambda x, y: _flag(x[0] > y[1], x[1] > y[0]),
    "ge": lambda x, y: _flag(x[0] >= y[1], x[1] >= y[0]),
    "and": lambda x, y: (min(x[0], y[0]), min(x[1], y[1])),
    "or": lambda x, y: (max(x[0], y[0]), max(x[1], y[1])),
    **dict.fromkeys(_SAME.split(), lambda x: x),
}


def _interval(
    kind: str, params: Mapping[str, Any], shapes: Sequence[Sequence[int]], ins: Sequence[Interval]
) -> Interval:
    """The interval of a primitive's result; shapes and intervals of its operands."""
    if kind in ("argmax", "argmin"):
        return 0, math.prod(shapes[0][a] for a in params["axes"]) - 1
    if kind == "iota":
        return 0, params["shape"][params["dimension"]] - 1
    if kind == "reduce_sum":
        count = math.prod(shapes[0][a] for a in params["axes"])
        return ins[0][0] * count, ins[0][1] * count
    if kind in ("and", "or") and any(not 0 <= end <= 1 for x in ins for end in x):
        return _ALL  # of integers, bit by bit
    return _RULES[kind](*ins) if kind in _RULES else _ALL


def interval_of(x: Var, depth: int = _DEPTH) -> Interval:
    """The least and largest value that an array may have, by the steps that compute it."""
    known = x.elements if x.const is not None and not x.key else None if x.trips is None else x.trips[1]
    if known is not None:
        return _ends(known)
    low, high = _of_dtype(x.dtype)
    if x.maker is not None and depth and "int" in x.dtype:
        step = x.maker
        ins = [interval_of(y, depth - 1) for y in step.ins]
        low, high = _wrapped(_interval(step.kind, step.params, [y.shape for y in step.ins], ins), x.dtype)
    return low, high


def results_within(closed: Any, ins: Sequence[Interval]) -> list[Interval]:
    """The intervals of a jaxpr's results."""
    jaxpr = closed.jaxpr
    env = dict(zip(jaxpr.invars, ins, strict=True))
    env |= {v: _ends(value) for v, value in zip(jaxpr.constvars, closed.consts, strict=True)}

    def read(atom: Any) -> Interval:
        return _ends(atom.val) if hasattr(atom, "val") else env[atom]

    for eqn in jaxpr.eqns:
        operands = [read(v) for v in eqn.invars]
        if eqn.primitive.name == "jit":
            env.update(zip(eqn.outvars, results_within(eqn.params["jaxpr"], operands), strict=True))
            continue
        shapes = [v.aval.shape for v in eqn.invars]
        own = _interval(eqn.primitive.name, eqn.params, shapes, operands)
        env.update((v, _wrapped(own, v.aval.dtype) if _is_integer(v.aval.dtype) else _ALL) for v in eqn.outvars)
    return [read(v) for v in jaxpr.outvars]


def _is_integer(dtype: Any) -> bool:
    return getattr(dtype, "kind", "V") in "biu"


def _ends(value: Any) -> Interval:
    array = np.asarray(value)
    if not array.size or array.dtype.kind not in "biuf" or np.isnan(array).any():
        return _ALL
    return float(array.min()), float(array.max())
