"""Shardings of operands and results under an assignment of mesh axes to factors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from layouts import LayoutError, Mesh, Shape, Sharding
from layouts.sharding import Pending, laid
from meshlib.core.graph import Operation
from meshlib.core.opdef import Factor

Axes: TypeAlias = tuple[str, ...]


def derive(
    factors: Sequence[Factor],
    axes: Mapping[str, Axes],
    shapes: Sequence[Shape],
    out_shape: Shape,
    mesh: Mesh,
    passed: Sequence[Axes],
) -> tuple[tuple[Sharding, ...], Sharding]:
    """The shardings of operands and result under an assignment of axes; also used by the checker.

    Raises: LayoutError if a size does not divide, or the assignment splits one dim in two ways at once.
    """
    split = [(f, axes[f.name]) for f in factors if axes.get(f.name)]
    operands = []
    for i, shape in enumerate(shapes):
        by_dim = _by_dim([(f.operands[i], over) for f, over in split])
        operands.append(_sharding_by_dim(shape, mesh, by_dim, tuple([(a, "sum") for a in passed[i]])))
    kinds = {a: "sum" for p in passed for a in p}
    for f, over in split:
        if f.role.pending is not None:
            kinds.update(dict.fromkeys(over, f.role.pending))
    by_dim = _by_dim([(f.outputs[0], over) for f, over in split if f.shares is None])
    for f, over in split:
        if f.shares is not None:  # existing splits of the dim are major
            by_dim[f.shares] = (*by_dim.get(f.shares, ()), *over)
    out = _sharding_by_dim(out_shape, mesh, by_dim, tuple(kinds.items()))
    return tuple(operands), out


def _by_dim(split: Sequence[tuple[str | None, Axes]]) -> dict[str | None, Axes]:
    names = [name for name, _ in split if name is not None]
    if len(set(names)) < len(names):
        raise LayoutError(f"splits one dim in two ways at once: {', '.join(names)}")
    return dict(split)


def _sharding_by_dim(shape: Shape, mesh: Mesh, by_dim: Mapping[str | None, Axes], pending: Pending) -> Sharding:
    return laid(shape, mesh, tuple([by_dim.get(n, ()) for n in shape.names]), pending)


def beside(op: Operation, first: Sharding) -> tuple[Sharding, ...]:
    """The shardings of all results of an operation, given that of the first: the same axes split each factor."""
    if len(op.outputs) == 1:
        return (first,)
    factors = op.opdef.roles(op)
    axes = {f.name: first.of(f.outputs[0]) for f in factors if f.outputs[0] is not None}
    shardings = [first]
    for n, y in enumerate(op.outputs[1:], start=1):
        by_dim = {f.outputs[n]: axes.get(f.name, ()) for f in factors}
        shardings.append(_sharding_by_dim(y.shape, first.mesh, by_dim, first.pending))
    return tuple(shardings)
