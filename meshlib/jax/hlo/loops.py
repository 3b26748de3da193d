"""Trip counts of loops in a compiled module, from the compiler's annotation or from condition and body."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from functools import partial

from meshlib.jax.hlo.text import Computation, HloInstruction, Module

_KNOWN = re.compile(r'known_trip_count":\{"n":"(\d+)"')
_INTEGER = re.compile(r"-?\d+")
_ALIKE = ("copy", "bitcast", "convert", "reshape", "copy-done", "optimization-barrier")
_COMPARE: Mapping[str, Callable[[int, int], bool]] = {  # of limit and counter
    "LT": operator.gt, "LE": operator.ge, "GT": operator.lt, "GE": operator.le, "NE": operator.ne, "EQ": operator.eq,
}  # fmt: skip
_FLIPPED = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE", "NE": "NE", "EQ": "EQ"}

Bound = Callable[[int], int | None]  # of a computation's parameter, or its tuple: element index -> integer


def trip_count(module: Module, holder: Computation, loop: HloInstruction) -> int | None:
    """Trips of a `while` instruction of `holder`; None if they depend on data.

    A counter that starts at a constant, grows by a constant and is compared with a constant, wherever the compiler has
    put these: into the loop's state, into fusions, behind copies.
    """
    known = _KNOWN.search(loop.attributes)
    if known is not None:
        return int(known[1])
    condition = module.computations.get(loop.called("condition") or "")
    body = module.computations.get(loop.called("body") or "")
    if condition is None or body is None or condition.root is None or body.root is None:
        return None
    begin = holder.instructions.get(loop.operands[0])

    def initial(n: int) -> int | None:
        return _element(module, holder, begin, n, lambda _: None)

    compared = _comparison(module, condition)
    if compared is None:
        return None
    where, a, b, direction = compared
    for counter, limit, flip in ((a, b, False), (b, a, True)):
        n = _state_index(where, counter)
        stop = _integer(module, where, limit, lambda k: initial(k) if _is_kept(body, k) else None)
        if n is None or stop is None:
            continue
        start = initial(n)
        following = None if start is None else _after(module, body, n, start)
        if start is None or following is None:
            continue
        grows = following - start
        if _after(module, body, n, following) != following + grows:
            continue
        return _trips(start, grows, stop, _FLIPPED[direction] if flip else direction)
    return None


def _trips(start: int, grows: int, stop: int, direction: str) -> int | None:
    """Number of times that the comparison of the counter with `stop` holds."""
    holds = partial(_COMPARE[direction], stop)
    if not holds(start):
        return 0
    if grows == 0:
        return None
    about = max(0, (stop - start) // grows - 1)
    for trips in range(about, about + 4):
        if not holds(start + trips * grows):
            return trips
    return None


def _comparison(module: Module, condition: Computation) -> tuple[Computation, str, str, str] | None:
    """The comparison that ends the loop: (its computation, two operands, direction)."""
    at, i = condition, condition.root
    while i is not None and i.opcode in (*_ALIKE, "fusion", "call"):
        if i.opcode in ("fusion", "call"):
            inner = module.computations.get(i.called("calls") or i.called("to_apply") or "")
            if inner is None or inner.root is None:
                return None
            at, i = _inlined(at, i, inner), inner.root
            i = at.instructions[i.name]
        else:
            i = at.instructions.get(i.operands[0])
    if i is None or i.opcode != "compare" or len(i.operands) != 2:
        return None
    direction = re.search(r"direction=(\w+)", i.attributes)
    return (at, i.operands[0], i.operands[1], direction[1]) if direction else None


def _inlined(outer: Computation, call: HloInstruction, inner: Computation) -> Computation:
    """One computation of both, in which the inner parameters are copies of the call's operands."""
    merged = dict(outer.instructions)
    for name, i in inner.instructions.items():
        if i.opcode == "parameter":
            merged[name] = HloInstruction(name, "copy", i.shape, (call.operands[int(i.operands[0])],), "", i.is_root)
        else:
            merged[name] = i
    return Computation(outer.name, merged)


def _state_index(at: Computation, name: str) -> int | None:
    """The element of the loop's state that a value is."""
    i = at.instructions.get(name)
    while i is not None and i.opcode in _ALIKE:
        i = at.instructions.get(i.operands[0])
    if i is None or i.opcode != "get-tuple-element":
        return None
    source = at.instructions.get(i.operands[0])
    return i.index if source is not None and source.opcode == "parameter" else None


def _is_kept(body: Computation, n: int) -> bool:
    """True if a trip returns an element of the state unchanged."""
    root = body.root
    if root is None or root.opcode != "tuple" or n >= len(root.operands):
        return False
    return _state_index(body, root.operands[n]) == n


def _after(module: Module, body: Computation, n: int, value: int) -> int | None:
    """The counter after a trip that begins with `value`."""
    return _element(module, body, body.root, n, lambda k: value if k == n else None)


def _element(module: Module, at: Computation, i: HloInstruction | None, n: int, state: Bound) -> int | None:
    """Element `n` of a tuple, if it is a known integer."""
    while i is not None and i.opcode in _ALIKE:
        i = at.instructions.get(i.operands[0])
    if i is None or i.opcode != "tuple" or n >= len(i.operands):
        return None
    return _integer(module, at, i.operands[n], state)


_ARITHMETIC: dict[str, Callable[[int, int], int]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
}


def _integer(module: Module, at: Computation, name: str, state: Bound) -> int | None:
    """The value of an integer scalar, if it follows from constants and the state."""
    i = at.instructions.get(name)
    if i is None:
        return None
    if i.opcode == "constant":
        return int(i.operands[0]) if i.operands and _INTEGER.fullmatch(i.operands[0]) else None
    if i.opcode in _ALIKE:
        return _integer(module, at, i.operands[0], state)
    if i.opcode == "get-tuple-element":
        source = at.instructions.get(i.operands[0])
        return state(i.index) if source is not None and source.opcode == "parameter" and i.index is not None else None
    if i.opcode in ("fusion", "call"):
        inner = module.computations.get(i.called("calls") or i.called("to_apply") or "")
        if inner is None or inner.root is None:
            return None
        return _integer(module, _inlined(at, i, inner), inner.root.name, state)
    if i.opcode in _ARITHMETIC:
        a, b = (_integer(module, at, x, state) for x in i.operands)
        return None if a is None or b is None else _ARITHMETIC[i.opcode](a, b)
    return None
