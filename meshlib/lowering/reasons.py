"""Reasons of collectives, as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from layouts import Sharding
from layouts.plan import Step
from layouts.step_kinds import STEP_KINDS
from meshlib.core.graph import Operation, Tensor
from meshlib.core.opdef import Kind, Role
from meshlib.program.exchanges import Exchange
from meshlib.program.instructions import Reason

if TYPE_CHECKING:
    from meshlib.lowering.assigned import Homes


def explain_step(
    step: Step, t: Tensor, makers: Sequence[tuple[Operation, str]], user: Operation | None, homes: Homes
) -> Reason:
    """The reason of one step of a reshard of `t` for `user` (None: for its assigned sharding).

    `makers` are, for a reduction, the operations that left it pending, each with the dim that it reduced.
    """
    if makers:
        return _reduction(step, t, makers, homes)
    kind, op = STEP_KINDS[step.kind], t.operation if user is None else user
    wording = kind.wording
    if kind.optional_wording is not None and _could_split(user, t, step.dim):
        wording = kind.optional_wording
    names = {
        "user": f"the home of '{t.name}'" if user is None else _who(user),
        "tensor": t.name,
        "dim": step.dim,
        "to_dim": step.to_dim,
        "axes": "+".join(step.axes),
        "rules": _rules(homes, step.axes, (step.dim, step.to_dim)),
        "before": _axes(step.before),
        "after": _axes(step.after),
    }
    why, avoid = wording.why.format_map(names), wording.avoid.format_map(names)
    return Reason(op.name, step.dim, why, avoid, op.source, op.region)


def _could_split(user: Operation | None, t: Tensor, dim: str | None) -> bool:
    """True if an operation could use its operand with `dim` split, so that another choice would have been possible."""
    if user is None:
        return False
    at = [i for i, x in enumerate(user.inputs) if x is t]
    split = (Role.PARALLEL, Role.SUM)
    return any(f.role in split and any(f.operands[i] == dim for i in at) for f in user.opdef.roles(user))


def explain_exchange(exchange: Exchange, op: Operation, homes: Homes) -> Reason:
    """The reason of an exchange within an operation along a split dim."""
    over = "+".join(exchange.axes)
    if exchange.to_dim is not None:
        why = (
            f"{_who(op)} runs along '{exchange.dim}', split over {over}: every core needs a summary of all blocks for "
            f"its share of '{exchange.to_dim}'"
        )
    elif exchange.operand < 0:
        why = f"{_who(op)} runs along '{exchange.dim}', split over {over}: every core needs a summary of all blocks"
    else:
        x = op.inputs[exchange.operand].name
        why = f"{_who(op)} needs indices of '{exchange.dim}' of '{x}', split over {over}, held by other cores"
    avoid = f"leave '{exchange.dim}' unsplit over {over} ({_rules(homes, exchange.axes, (exchange.dim,))})"
    return Reason(op.name, exchange.dim, why, avoid, op.source, op.region)


def _reduction(step: Step, t: Tensor, makers: Sequence[tuple[Operation, str]], homes: Homes) -> Reason:
    """The reason of a reduction: the operation that left the sum pending, however late it is reduced."""
    maker = makers[0][0]
    dims = tuple(dict.fromkeys(_reduced(op, factor) for op, factor in makers))
    reduction = dict(step.before.pending)[step.axes[0]]
    verb = {"sum": "sums over", "max": "takes the maximum over", "min": "takes the minimum over"}[reduction]
    gradient_of = homes.graph.gradient_of.get(t)
    names = {
        "maker": _who(maker),
        "reduces": "takes elements along" if maker.opdef.reads_part else verb,
        "dims": _listed(dims),
        "dim": step.dim,
        "axes": "+".join(step.axes),
        "noun": {"sum": "sum", "max": "maximum", "min": "minimum"}[reduction],
        "gradient": "" if gradient_of is None else f", and '{gradient_of.name}' needs the whole gradient",
        "rules": _rules(homes, step.axes, dims),
    }
    wording = STEP_KINDS[step.kind].wording
    why, avoid = wording.why.format_map(names), wording.avoid.format_map(names)
    return Reason(maker.name, dims[0], why, avoid, maker.source, maker.region)


def _reduced(op: Operation, factor: str) -> str:
    """The first operand's dim of a factor, or the factor's own name if no operand has it."""
    names = (name for f in op.opdef.roles(op) if f.name == factor for name in f.operands if name is not None)
    return next(names, factor)


def _who(op: Operation) -> str:
    if op.opdef.kind is Kind.COMMIT:
        return f"the update of '{op.attrs['variable']}'"
    return f"{op.opdef.name} '{op.name}'"


def _listed(dims: tuple[str, ...]) -> str:
    return " and ".join(f"'{d}'" for d in dims)


def _axes(sharding: Sharding) -> str:
    return ", ".join(f"{d.name}@{'+'.join(a)}" for d, a in zip(sharding.shape, sharding.axes, strict=True) if a)


def _rules(homes: Homes, axes: tuple[str, ...], dims: Sequence[str | None] = ()) -> str:
    """The rules that use these axes; those about `dims` if there are any."""
    laid = [r for r in homes.rules.rules if set(r.axes) & set(axes)]
    texts = [str(r) for r in laid if r.dim in dims] or [str(r) for r in laid]
    return f"rule {'; '.join(texts)}" if texts else "no rule of the layout says so"
