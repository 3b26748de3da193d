"""Calls with a custom derivative rule (`jax.custom_vjp`, `jax.custom_jvp`), imported with that rule.

JAX itself turns a call into two functions: a forward, which returns results and residuals, and a backward, from
residuals and cotangents to cotangents of the operands. Both are imported like any other code: the forward where the
call is, the backward when a gradient is taken. So it makes no difference how the rule was written (`defvjp`, `defjvp`,
`defjvps`, `nondiff_argnums`, symbolic zeros), or what is around it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.extend import core
from jax.interpreters.partial_eval import dce_jaxpr

from meshlib.core.arguments import at
from meshlib.core.errors import GraphError
from meshlib.core.graph import Tensor
from meshlib.jax.importing.axes import Axes
from meshlib.jax.importing.code import DTYPES, Code, CodeStep, Var
from meshlib.jax.importing.control import unify
from meshlib.jax.importing.custom_rules import named
from meshlib.jax.importing.expansions import function_of
from meshlib.jax.importing.pairs import is_complex, parts_of
from meshlib.jax.importing.table import give, rule, same_axes
from meshlib.jax.importing.writing import StepWriter
from meshlib.ops.control.custom_gradients import gradient_of_residuals
from meshlib.ops.control.sources import constant
from meshlib.ops.movement.shape import transpose
from meshlib.ops.pointwise.casts import cast
from meshlib.ops.pointwise.reductions import reduce_sum

KIND = "custom_rule"


@dataclass(frozen=True)
class Ruled:
    """A call as JAX differentiates it, on real arrays: complex operands and results are pairs.

    forward    a jaxpr from operands to results and residuals
    backward   a jaxpr from residuals and cotangents of `floating` results to cotangents of `moving` operands
    refusal    what the rule says if it allows no gradient; then `moving` and `backward` are empty
    """

    forward: Any
    backward: Any
    moving: tuple[int, ...]
    floating: tuple[int, ...]
    refusal: str = ""

    @property
    def marks(self) -> dict[str, Any]:
        """Parameters of the imported step."""
        return {"moving": self.moving, "floating": self.floating, "refusal": self.refusal}


def ruled(eqn: Any, ins: Sequence[Var], axis_env: Sequence[tuple[str, int]] = ()) -> Ruled:
    """Forward and backward functions of a call of `ins` with a rule; `axis_env`: enclosing mapped axes.

    Raises: GraphError if the rule reads values of the enclosing function; whatever the rule raises.
    """
    operands, results = [v.aval for v in eqn.invars], [v.aval for v in eqn.outvars]
    reals, outs = parts_of(operands), parts_of(results)
    # As in JAX, the nonlinear operands of a `linear_call`, captured values and constants have no cotangent.
    fixed = sum(eqn.params.get(name, 0) for name in ("num_callee_consts", "num_res", "num_consts"))
    moving = tuple(
        n for n, (a, x) in enumerate(zip(reals, ins, strict=True)) if _is_float(a) and n >= fixed and x.moves
    )
    floating = tuple(n for n, a in enumerate(outs) if _is_float(a))
    function, env = function_of(eqn), list(axis_env)
    trees: list[Any] = []

    def in_parts(*parts: Any) -> list[Any]:
        results = function(*_joined(parts, operands))
        return [p for y in results for p in ((y.real, y.imag) if is_complex(y) else (y,))]

    def forward(*parts: Any) -> tuple[list[Any], list[Any]]:
        def of_moving(*given: Any) -> tuple[list[Any], list[Any]]:
            whole = list(parts)
            for n, x in zip(moving, given, strict=True):
                whole[n] = x
            results = in_parts(*whole)
            return [results[n] for n in floating], [y for n, y in enumerate(results) if n not in floating]

        floats, pull, rest = jax.vjp(of_moving, *(parts[n] for n in moving), has_aux=True)
        residuals, tree = jax.tree_util.tree_flatten(pull)
        trees.append(tree)
        both = {False: iter(rest), True: iter(floats)}
        return [next(both[n in floating]) for n in range(len(outs))], residuals

    closed, (_, residual_shapes) = jax.make_jaxpr(forward, return_shape=True, axis_env=env)(*reals)

    def backward(residuals: Sequence[Any], *cotangents: Any) -> Any:
        return jax.tree_util.tree_unflatten(trees[-1], residuals)(list(cotangents))

    refusal = ""
    try:
        back = jax.make_jaxpr(backward, axis_env=env)(residual_shapes, *(outs[n] for n in floating))
    except RuntimeError as fault:  # as of `equinox.internal.nondifferentiable_backward`
        refusal, moving = f"{named(eqn)}: {first_line(fault)}", ()
        back = jax.make_jaxpr(lambda *_: [])(residual_shapes, *(outs[n] for n in floating))
    _refuse_captured(*closed.consts, *back.consts)
    live, _ = dce_jaxpr(back.jaxpr, [True] * len(moving), instantiate=True)
    return Ruled(closed, core.ClosedJaxpr(live, back.consts), moving, floating, refusal)


def first_line(fault: Exception) -> str:
    """The first line of what an exception says, or its type."""
    return next(iter(str(fault).splitlines()), type(fault).__name__)[:200]


def _refuse_captured(*consts: Any) -> None:
    if any(isinstance(x, jax.core.Tracer) for x in consts):
        raise GraphError("it closes over a value that the arguments determine; pass that value as an argument")


def _is_float(aval: Any) -> bool:
    return bool(jax.dtypes.issubdtype(aval.dtype, np.floating))


def _joined(parts: Sequence[Any], avals: Sequence[Any]) -> list[Any]:
    rest = iter(parts)
    return [jax.lax.complex(next(rest), next(rest)) if is_complex(a) else next(rest) for a in avals]


# ---------------------------------------------------------------- axes


def _axes(axes: Axes, step: CodeStep) -> None:
    forward, backward = step.bodies
    unify(axes, forward)
    for inside, out in zip(forward.outs, step.outs, strict=False):
        if not out.key:
            same_axes(axes, CodeStep(step.kind, [inside], [out], {}, step.place))
    for ct, n in zip(backward.ins, step.params["floating"], strict=True):
        give(axes, ct, step.outs[n].axes)
    unify(axes, backward)
    for dx, n in zip(backward.outs, step.params["moving"], strict=True):
        for a, b in zip(dx.axes, step.ins[n].axes, strict=False):
            axes.tie(b, a)


# ---------------------------------------------------------------- writing


def _write(w: StepWriter, step: CodeStep) -> Sequence[Tensor | None]:
    forward, backward = step.bodies
    live = [n for n, out in enumerate(step.outs) if not out.key]
    inputs = [x for x in dict.fromkeys(step.ins) if x.const is None and not x.key]
    residuals = _read(backward)
    written: list[Tensor] = []

    def function(*given: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        written.extend(given)
        w.tensors.update(zip(inputs, given, strict=True))
        w.run(forward)
        # An operand may be constant along dims in which its cotangent varies.
        results = [w.full(w.under(forward.outs[n], step.outs[n].axes), step.outs[n].axes) for n in live]
        return results, [w.tensor(x) for x in residuals]

    def gradient(residual_values: Sequence[Tensor], dys: Sequence[Tensor | None]) -> list[Tensor | None]:
        if step.params["refusal"]:
            raise GraphError(f"{at('gradients')}: {step.params['refusal']} ({step.place.line})")
        inner = StepWriter(w.axes, dict(zip(residuals, residual_values, strict=True)), w.constraints)
        of_results = dict(zip(live, dys, strict=True))
        for ct, n in zip(backward.ins, step.params["floating"], strict=True):
            dy, dtype = of_results[n], DTYPES[ct.dtype]
            inner.tensors[ct] = constant(0, [], dtype) if dy is None else cast(dy, dtype)
        inner.run(backward)
        cotangents_of: dict[Var, list[Tensor]] = {}
        for dx, n in zip(backward.outs, step.params["moving"], strict=True):
            if step.ins[n] in inputs and dx.number != 0:
                cotangents_of.setdefault(step.ins[n], []).append(
                    inner.full(inner.under(dx, step.ins[n].axes), step.ins[n].axes)
                )
        return [_cotangent(cotangents_of.get(x, []), given) for x, given in zip(inputs, written, strict=True)]

    tensors: list[Tensor | None] = [None] * len(step.outs)
    operands = [w.tensor(x) for x in inputs]
    results = gradient_of_residuals(function, gradient, operands) if operands else function()[0]
    for n, t in zip(live, results, strict=True):
        tensors[n] = t
    return tensors


def _cotangent(parts: Sequence[Tensor], x: Tensor) -> Tensor | None:
    """Sum of an operand's cotangents, reduced over dims that the operand lacks."""
    if not parts:
        return None
    total = parts[0]
    for dx in parts[1:]:
        total = total + dx
    if set(total.shape) != set(x.shape):
        total = reduce_sum(total, output_shape=x.shape)
    return cast(transpose(total, x.shape), x.dtype.of_cotangents)


def _read(code: Code) -> list[Var]:
    """Outer values that a piece of code reads, in order, without constants and keys."""
    defined = {*code.vars()}
    read = [x for step in code.walk() for x in step.ins]
    read += [*code.outs, *(x for step in code.walk() for body in step.bodies for x in body.outs)]
    return [x for x in dict.fromkeys(read) if x not in defined and x.const is None and not x.key]


rule(KIND, axes=_axes, write=_write)
