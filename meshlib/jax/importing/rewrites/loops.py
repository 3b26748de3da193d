"""`while` as a loop of bounded length, which lockstep execution on all cores requires.

The trip count is known where the condition depends only on numbers known from the start, such as a counter: that part
is run at import. Where only one conjunct does, as in (i < 100) & (error > eps), it bounds the trips, and the results of
trips after the end are discarded. The same holds where the count follows from the counter of an outer loop, as in
blockwise attention: the bound is the maximum over that loop's trips. Integers that depend on data may have bounds, as
`jnp.minimum(n, 3)` does. Where there is no such bound, the user may give one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import jaxpr_as_fun
from jax.interpreters.partial_eval import dce_jaxpr

from meshlib.jax.importing.code import CodeStep, Var
from meshlib.jax.importing.expansions import without_library_primitives
from meshlib.jax.importing.intervals import interval_of, results_within
from meshlib.jax.importing.rewrites.table import Function, rewrite
from meshlib.jax.importing.table import rule

# A loop that runs longer is taken for endless.
_MOST_TRIPS = 1 << 20
_MOST_INTERVALS = 1 << 12


@dataclass(frozen=True)
class _While:
    """The parts of a `while`: condition, body, and how many operands belong to each."""

    cond: Any
    body: Any
    of_cond: int
    of_body: int

    @classmethod
    def of(cls, step: CodeStep) -> _While:
        p = step.params
        cond, body = (without_library_primitives(p[name]) for name in ("cond_jaxpr", "body_jaxpr"))
        return cls(cond, body, int(p["cond_nconsts"]), int(p["body_nconsts"]))

    def parted(self, operands: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """Split operands into those of the condition, those of the body, and the carries."""
        both = self.of_cond + self.of_body
        return list(operands[: self.of_cond]), list(operands[self.of_cond : both]), list(operands[both:])


def _conjuncts(jaxpr: Any) -> Iterator[Any]:
    """The conjuncts of the loop condition."""
    makers = {out: eqn for eqn in jaxpr.eqns for out in eqn.outvars}
    waiting = list(jaxpr.outvars)
    while waiting:
        flag = waiting.pop()
        eqn = makers.get(flag) if not hasattr(flag, "val") else None
        if eqn is not None and (eqn.primitive.name == "and" or eqn.params.get("name") == "logical_and"):
            waiting += eqn.invars
        else:
            yield flag


def _needed_part(body: Any, consts: int, live: list[bool]) -> tuple[Any, list[bool], list[bool]]:
    """The part of a body that determines these carries in all trips, the arguments that it reads, and its carries."""
    while True:
        part, reads = dce_jaxpr(body, live, instantiate=[False] * consts + live)
        more = [a or b for a, b in zip(live, reads[consts:], strict=True)]
        if more == live:
            return part, reads, live
        live = more


def _deciding(w: _While, operands: Sequence[Var], flag: Any) -> tuple[Any, Any, list[list[Var]], list[Var]]:
    """The inputs of a part of the condition: test, body, constants of both, and the carries as the loop begins."""
    of_cond, of_body, carries = w.parted(operands)
    one_flag = w.cond.jaxpr.replace(outvars=[flag])
    _, needed = dce_jaxpr(one_flag, [True], instantiate=False)
    again, reads, live = _needed_part(w.body.jaxpr, len(of_body), list(needed[len(of_cond) :]))
    test, _ = dce_jaxpr(one_flag, [True], instantiate=[*needed[: len(of_cond)], *live])
    tested, run = (jax.extend.core.ClosedJaxpr(j, c.consts) for j, c in ((test, w.cond), (again, w.body)))
    return tested, run, [list(compress(of_cond, needed)), list(compress(of_body, reads))], list(compress(carries, live))


def _most_trips(w: _While, operands: Sequence[Var], flag: Any) -> int | None:
    """Upper bound on the trips from one conjunct, by intervals of integers that it depends on; None if unbounded."""
    tested, run, fixed, begins = _deciding(w, operands, flag)
    tests, runs, held = ([interval_of(x) for x in xs] for xs in (*fixed, begins))
    for count in range(_MOST_INTERVALS):
        if results_within(tested, [*tests, *held])[0][1] == 0:
            return count
        after = results_within(run, [*runs, *held])
        if after == held:
            break
        held = after
    return None


def _trips(w: _While, operands: Sequence[Var], flag: Any) -> tuple[int, bool] | None:
    """Upper bound on the trips from one conjunct alone, and whether it is always exact.

    For a nested loop it is the maximum over the trips of the outer loop.
    Returns: None if the conjunct depends on data, or never ends the loop.
    """
    tested, run, fixed, begins = _deciding(w, operands, flag)
    varying = [x for x in (*fixed[0], *fixed[1], *begins) if x.const is None or x.key]
    if any(x.trips is None for x in varying) or len({x.trips[0] for x in varying if x.trips is not None}) > 1:
        return None
    around = next((len(x.trips[1]) for x in varying if x.trips is not None), 1)

    def each(x: Var) -> Any:
        if x.trips is not None:
            return x.trips[1]
        assert x.const is not None
        return np.broadcast_to(x.const, (around, *x.shape))

    goes_on = jaxpr_as_fun(tested)
    trip = jaxpr_as_fun(run)

    def counted(tests: Any, runs: Any, starts: Any) -> Any:
        def some(state: Any) -> Any:
            count, held = state
            return (count < _MOST_TRIPS) & jax.numpy.any(goes_on(*tests, *held)[0])

        def after(state: Any) -> Any:
            count, held = state
            (more,) = goes_on(*tests, *held)
            return count + 1, [_where(more, *pair) for pair in zip(trip(*runs, *held), held, strict=True)]

        return lax.while_loop(some, after, (0, starts))[0]

    with jax.ensure_compile_time_eval():
        counts = np.asarray(jax.vmap(counted, axis_size=around)(*([each(x) for x in xs] for xs in (*fixed, begins))))
    return None if counts.max() == _MOST_TRIPS else (int(counts.max()), bool(counts.min() == counts.max()))


def _length(step: CodeStep) -> tuple[int | None, bool]:
    """Maximum number of trips (None if unknown), and whether the loop may end earlier."""
    w = _While.of(step)
    counts = [_trips(w, step.ins, flag) for flag in _conjuncts(w.cond.jaxpr)]
    known = [n for n in counts if n is not None]
    always = len(known) == len(counts) and all(same for _, same in known) and not w.cond.out_avals[0].shape
    if known:
        return min(n for n, _ in known), not always
    bounds = [_most_trips(w, step.ins, flag) for flag in _conjuncts(w.cond.jaxpr)]
    return min((n for n in bounds if n is not None), default=step.params["most_trips"]), True


def _where(more: Any, new: Any, old: Any) -> Any:
    """A carry after a trip, which under `vmap` only some elements take; their flags have the leading axes."""
    if jax.dtypes.issubdtype(old.dtype, jax.dtypes.prng_key):
        return new
    return jax.numpy.where(jax.numpy.expand_dims(more, range(np.ndim(more), old.ndim)), new, old)


def _as_scan(step: CodeStep) -> Function | None:
    length, may_end = _length(step)
    if length is None:
        return None
    w, trips = _While.of(step), length

    def run(*operands: Any) -> Any:
        of_cond, of_body, carries = w.parted(operands)
        goes_on, body = jaxpr_as_fun(w.cond), jaxpr_as_fun(w.body)

        def trip(held: list[Any], _: None) -> tuple[list[Any], None]:
            new_carries = body(*of_body, *held)
            if may_end:
                (more,) = goes_on(*of_cond, *held)
                new_carries = [_where(more, new, old) for new, old in zip(new_carries, held, strict=True)]
            return new_carries, None

        return lax.scan(trip, carries, None, length=trips)[0] if trips else carries

    return run


rewrite("while", _as_scan, own_lines=True)
rule(
    "while",
    axes=None,
    write=None,
    fault=lambda step: (
        "a loop whose number of trips depends on data; give it a bound, as in (i < 100) & (...) with a counter i that "
        "begins at a number, or as jnp.minimum(n, 100), or as from_jax(..., most_trips=100), or use lax.scan"
    ),
)
