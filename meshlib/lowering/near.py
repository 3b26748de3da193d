"""Shifts that are expected to share what they need of their neighbours with others, found before partitioning.

`halos` makes them share it in the program that was found; the search for that has to know, or it takes each shift for
dear and gathers instead. Whether it comes true depends on where values then lie, so programs found with it and without
it are compared (`layout`).
"""

from __future__ import annotations

from collections.abc import Iterator

from meshlib.graph import Operation, Tensor
from meshlib.lowering.homes import Homes
from meshlib.lowering.simplification import Simplified
from meshlib.operation import Factor, Halo, Role
from meshlib.program.margins import Margin, keeps_margins, needed_margins, takes_margins
from meshlib.program.signature import Signatures


def near_shifts(graph: Simplified, homes: Homes, signatures: Signatures) -> frozenset[Operation]:
    """The shifts that another one serves: of all in a region that need the same rows, those that need no more."""
    groups: dict[object, list[tuple[Operation, Margin]]] = {}
    for op in graph.operations:
        for factor in _shifted(op, homes, signatures):
            for n, dim in enumerate(factor.operands):
                needed = needed_margins(op, signatures.of(op).factors, n, {}, {factor.name})
                if dim is not None and dim in needed:
                    root = _root(graph.inputs[op][n], dim, graph, signatures)
                    groups.setdefault((root, dim, op.region, needed[dim].wrap), []).append((op, needed[dim]))
    served: set[Operation] = set()
    for group in groups.values():
        before = max(group, key=lambda x: x[1].before)[0]
        after = max(group, key=lambda x: x[1].after)
        paying = {before, after[0]} if after[1].after else {before}
        served.update(op for op, _ in group if op not in paying)
    return frozenset(served)


def _shifted(op: Operation, homes: Homes, signatures: Signatures) -> Iterator[Factor]:
    """The dims that are split at home along which it needs equally many rows of its neighbours, wherever it is."""
    if isinstance(op.kind.lower, Halo):
        factors = signatures.of(op).factors
        for f in factors:
            split = f.outputs[0] is not None and homes.of(op.output).of(f.outputs[0])
            if split and f.role is Role.HALO and takes_margins(op, factors, {f.name}):
                yield f


def _root(t: Tensor, dim: str, graph: Simplified, signatures: Signatures) -> Tensor:
    """What it is made of row by row, along a dim, as long as one operand alone has the dim."""
    while True:
        op = t.operation
        factors = signatures.of(op).factors
        split = {f.name for f in factors if f.outputs[0] == dim}
        has = [x for x in graph.inputs.get(op, ()) if dim in x.shape]
        by_row = all(f.role is Role.PARALLEL and has for f in factors if f.name in split)
        if len(has) != 1 or not by_row or not keeps_margins(op, factors, split):
            return t
        (t,) = has
