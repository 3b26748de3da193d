"""Values of loop counters and expressions of them in each trip.

Loops within it may end by such values: see `meshlib.jax.importing.rewrites.loops`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import compress
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun
from jax.interpreters.partial_eval import dce_jaxpr

from meshlib.jax.importing.code import CodeStep, Var, numpy_type, scan_sizes
from meshlib.jax.importing.table import RULES

_MOST = 1 << 14  # trips that are evaluated


def follow(step: CodeStep) -> None:
    """Record the values of a result in each trip, if its operands are known in each trip of one loop."""
    rule = RULES.get(step.kind)
    loops = {x.trips[0] for x in step.ins if x.trips is not None}
    known = all((x.const is not None or x.trips is not None) and not x.key for x in step.ins)
    if rule is None or rule.fold is None or not known or len(loops) != 1 or len(step.outs) != 1 or step.outs[0].shape:
        return
    count = next(len(x.trips[1]) for x in step.ins if x.trips is not None)
    counts = [
        rule.fold(step, *(x.elements if x.trips is None else x.trips[1][n] for x in step.ins)) for n in range(count)
    ]
    step.outs[0].trips = loops.pop(), np.asarray(counts).reshape(count).astype(numpy_type(step.outs[0].dtype))


def _set_slices(own: Sequence[Var], stacks: Sequence[Var], loop: int, order: int) -> None:
    """Record the values in each trip of scalars sliced from known stacks."""
    for x, stack in zip(own, stacks, strict=True):
        elements = None if x.shape or x.key else elements_of(stack)
        if elements is not None:
            x.trips = loop, elements[::order]


def count_trips(eqn: Any, ins: Sequence[Var], own: Sequence[Var], loop: int) -> None:
    """Record the values of a `scan` body's arguments in each trip: counters among its carries, and known slices.

    `own` are the body's arguments after its constants. Done only where a nested `while` may need it.
    """
    p = eqn.params
    closed, (consts, carries), length = p["jaxpr"], scan_sizes(p), int(p["length"])
    if not 0 < length <= _MOST or "while" not in {e.primitive.name for e in _walk(closed.jaxpr)}:
        return
    _set_slices(own[carries:], ins[consts + carries :], loop, -1 if p["reverse"] else 1)
    counters = [n for n in range(carries) if ins[consts + n].const is not None and not own[n].shape and not own[n].key]
    while counters:
        wanted = [n in counters for n in range(len(closed.jaxpr.outvars))]
        jaxpr, used = dce_jaxpr(closed.jaxpr, wanted)
        fixed = list(compress(ins[:consts], used))
        foreign = any(x.const is None or x.key for x in fixed) or any(used[consts + carries :])
        read = [n for n in range(carries) if used[consts + n]]
        if not foreign and set(read) <= set(counters):
            body, begins = ClosedJaxpr(jaxpr, closed.consts), [ins[consts + n] for n in counters]
            _set(body, fixed, read, counters, begins, own, loop, length)
            return
        counters = _independent(closed.jaxpr, counters, ins, consts, carries)


def elements_of(x: Var, depth: int = 8) -> np.ndarray[Any, Any] | None:
    """The elements of a value determined by positions alone, such as `jnp.arange(4) * 2`; None for data."""
    if x.const is not None:
        return np.asarray(x.elements)
    step = x.maker
    if step is None or not depth or len(x.shape) != 1 or x.shape[0] > _MOST:
        return None
    if step.kind == "iota":
        return np.arange(x.shape[0]).astype(numpy_type(x.dtype))
    rule = RULES.get(step.kind)
    if rule is None or rule.fold is None or not rule.by_element:
        return None
    operands = [elements_of(y, depth - 1) for y in step.ins]
    if any(y is None for y in operands):
        return None
    return np.asarray(np.broadcast_to(rule.fold(step, *operands), x.shape)).astype(numpy_type(x.dtype))


def _independent(jaxpr: Any, counters: Sequence[int], ins: Sequence[Var], consts: int, carries: int) -> list[int]:
    """The counters that depend on themselves and known values alone."""
    independent = []
    for n in counters:
        _, used = dce_jaxpr(jaxpr, [m == n for m in range(len(jaxpr.outvars))])
        known = all(ins[m].const is not None and not ins[m].key for m in range(consts) if used[m])
        others = {m for m in range(carries) if used[consts + m]} - {*counters}
        if known and not others and not any(used[consts + carries :]):
            independent.append(n)
    return independent if len(independent) < len(counters) else []


def _set(
    body: Any,
    fixed: Sequence[Var],
    read: Sequence[int],
    counters: Sequence[int],
    begins: Sequence[Var],
    own: Sequence[Var],
    loop: int,
    length: int,
) -> None:
    function, at = jaxpr_as_fun(body), [*counters]

    def trip(held: list[Any], _: None) -> tuple[list[Any], list[Any]]:
        outs = function(*(x.elements for x in fixed), *(held[at.index(n)] for n in read))
        return list(outs), held

    with jax.ensure_compile_time_eval():
        stacks = lax.scan(trip, [jax.numpy.asarray(x.elements) for x in begins], None, length=length)[1]
    for n, values in zip(counters, stacks, strict=True):
        own[n].trips = loop, np.asarray(values)


def _walk(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        yield eqn
        for held in eqn.params.values():
            for inner in held if isinstance(held, tuple | list) else (held,):
                if isinstance(inner, ClosedJaxpr | Jaxpr):
                    yield from _walk(getattr(inner, "jaxpr", inner))
