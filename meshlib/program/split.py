"""What an assignment of mesh axes to factors means for the shardings of operands and results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from layouts import Shape, Sharding
from meshlib.graph import Operation
from meshlib.operation import Factor

Axes: TypeAlias = tuple[str, ...]


def derive(
    factors: Sequence[Factor],
    axes: dict[str, Axes],
    shapes: Sequence[Shape],
    out_shape: Shape,
    like: Sharding,
    passed: Sequence[Axes],
) -> tuple[tuple[Sharding, ...], Sharding]:
    """The shardings of operands and result that an assignment means. The checker goes by this too."""
    mesh = like.mesh
    operands = []
    for i, shape in enumerate(shapes):
        by_dim = {f.operands[i]: axes.get(f.name, ()) for f in factors}
        pending = tuple((a, "sum") for a in passed[i])
        operands.append(Sharding(shape, mesh, [by_dim.get(d.name, ()) for d in shape], pending))
    by_dim = {f.outputs[0]: axes.get(f.name, ()) for f in factors}
    kinds = {a: "sum" for p in passed for a in p}
    for f in factors:
        if f.role.reduces:
            kinds.update(dict.fromkeys(axes.get(f.name, ()), f.role.value))
    out = Sharding(out_shape, mesh, [by_dim.get(d.name, ()) for d in out_shape], kinds)
    return tuple(operands), out


def beside(op: Operation, first: Sharding) -> tuple[Sharding, ...]:
    """The shardings of all results of an operation, of which `first` is the first's: the same axes split a factor."""
    if len(op.outputs) == 1:
        return (first,)
    axes = {f.name: first.of(f.outputs[0]) for f in op.kind.roles(op) if f.outputs[0] is not None}
    found = [first]
    for n, y in enumerate(op.outputs[1:], start=1):
        by_dim = {f.outputs[n]: axes.get(f.name, ()) for f in op.kind.roles(op)}
        found.append(Sharding(y.shape, first.mesh, [by_dim.get(d.name, ()) for d in y.shape], first.pending))
    return tuple(found)
