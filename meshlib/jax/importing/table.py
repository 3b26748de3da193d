"""Table of primitive rules: unification of axes, and translation into operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meshlib.core.graph import Tensor
from meshlib.jax.importing.axes import Axes, Axis
from meshlib.jax.importing.code import Array, CodeStep, Var

if TYPE_CHECKING:
    from meshlib.jax.importing.writing import StepWriter

Operand = Tensor | bool | int | float
Written = Sequence[Tensor | None] | Tensor


@dataclass(frozen=True)
class PrimitiveRule:
    """The import of one primitive.

    axes     sets the axes of the results, and unifies those of operands
    write    the results as tensors; they may lack dims of their axes, along which all elements are equal
    fault    why a step is not supported; None if it is
    fold     the result for known operands; for numbers, if `by_element`
    by_element  whether each element depends on those at the same position alone: operands have the results' axes
    """

    axes: Callable[[Axes, CodeStep], None]
    write: Callable[[StepWriter, CodeStep], Written]
    fault: Callable[[CodeStep], str | None] = lambda step: None
    fold: Callable[..., Array] | None = None
    by_element: bool = False


RULES: dict[str, PrimitiveRule] = {}


def rule(names: str, **of: Any) -> None:
    """Register the rule of one or several primitives, by JAX's names."""
    for name in names.split():
        assert name not in RULES, name
        RULES[name] = PrimitiveRule(**of)


# ---------------------------------------------------------------- helpers for unification


def give(axes: Axes, out: Var, axes_of_result: Sequence[Axis]) -> None:
    """Set the axes of a result."""
    assert tuple(a.size for a in axes_of_result) == out.shape, (out, [a.size for a in axes_of_result])
    out.axes = list(axes_of_result)
    axes.hold(out.space, out.axes)


def fresh(axes: Axes, out: Var) -> None:
    """Give a result new axes."""
    give(axes, out, [axes.new(n) for n in out.shape])


def same_axes(axes: Axes, step: CodeStep) -> None:
    """Unify axes of results and operands of one shape, except broadcast axes of length 1 and numbers."""
    for out in step.outs:
        operands = [x for x in step.ins if len(x.shape) == len(out.shape) and x.axes]
        # Data-dependent operands determine the axes, named ones first, such as the residual stream.
        operands.sort(key=lambda x: (not x.data, -sum(d.name is not None for d in axes.flat(x.axes))))
        whole = next((x for x in operands if x.shape == out.shape), None)
        give(axes, out, [axes.new(n) for n in out.shape] if whole is None else whole.axes)
        for x in operands:
            for a, b in zip(x.axes, out.axes, strict=True):
                if a.size == b.size:
                    axes.tie(b, a)
