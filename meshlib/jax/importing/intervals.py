"""Intervals of integers that depend on data, such as `jnp.minimum(n, 3)`, which may bound the trips of a loop."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from meshlib.jax.importing.code import Var

Interval = tuple[float, float]
_ALL = (-math.inf, math.inf)
_DEPTH = 16  # makers that are followed


def _of_dtype(dtype: Any) -> Interval:
    kind = np.dtype(dtype) if str(dtype) in ("bool", "int8", "uint8", "int16", "uint16") else None
    if kind is None:
        return (0, math.inf) if str(dtype).startswith("uint") else _ALL
    return (0, 1) if kind.kind == "b" else (np.iinfo(kind).min, np.iinfo(kind).max)


def _remainder(x: Interval, y: Interval) -> Interval:
    most = max(map(abs, y)) - 1
    return (0 if x[0] >= 0 else -min(most, -x[0])), (0 if x[1] <= 0 else min(most, x[1]))


def _flag(certain: bool, possible: bool) -> Interval:
    return float(certain), float(possible)


_SAME = (
    "convert_element_type broadcast_in_dim reshape squeeze expand_dims transpose slice copy rev reduce_max reduce_min"
)
_RULES: dict[str, Callable[..., Interval]] = {
    "add": lambda x, y: (x[0] + y[0], x[1] + y[1]),
    "sub": lambda x, y: (x[0] - y[1], x[1] - y[0]),
    "neg": lambda x: (-x[1], -x[0]),
    "max": lambda x, y: (max(x[0], y[0]), max(x[1], y[1])),
    "min": lambda x, y: (min(x[0], y[0]), min(x[1], y[1])),
    "clamp": lambda low, x, high: tuple(min(max(x[n], low[n]), high[n]) for n in (0, 1)),
    "rem": _remainder,
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
    if known is not None and known.size and known.dtype.kind in "biuf":
        return float(known.min()), float(known.max())
    low, high = _of_dtype(x.dtype)
    if x.maker is not None and depth and "int" in x.dtype:
        step = x.maker
        ins = [interval_of(y, depth - 1) for y in step.ins]
        own = _interval(step.kind, step.params, [y.shape for y in step.ins], ins)
        low, high = max(low, own[0]), min(high, own[1])
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
        env.update((v, own if getattr(v.aval.dtype, "kind", "V") in "biu" else _ALL) for v in eqn.outvars)
    return [read(v) for v in jaxpr.outvars]


def _ends(value: Any) -> Interval:
    array = np.asarray(value)
    return (float(array.min()), float(array.max())) if array.size and array.dtype.kind in "biuf" else _ALL
