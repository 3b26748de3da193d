"""Shifts that are expected to share a halo exchange, determined before partitioning.

`halos` makes them share it in the program that was found; the search for that has to know, or it takes each shift for
dear and gathers instead. Whether it comes true depends on where values then lie, so programs found with it and without
it are compared (`layout`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

from meshlib.core.graph import BACKWARD, FORWARD, Operation, Tensor
from meshlib.core.opdef import Factor, Halo, Role
from meshlib.lowering.assigned import Homes
from meshlib.lowering.simplification import Simplified
from meshlib.program.exchanges import RUNS
from meshlib.program.halo_margins import Margin, Split, keeps_margins, needed_margins, takes_margins
from meshlib.program.signature import Signatures

Near: TypeAlias = frozenset[tuple[int, str]]  # operands and dims of which others bring what is elsewhere


class _Need(NamedTuple):
    """An operand of which an operation needs a margin; `must`: it has no other way."""

    op: Operation
    operand: int
    margin: Margin
    must: bool


def phase(region: str, across: bool) -> str:
    """What an exchange serves: a region, or with `across` forward and backward together."""
    return FORWARD if across and region == BACKWARD else region


def near_shifts(graph: Simplified, homes: Homes, signatures: Signatures, across: bool = False) -> dict[Operation, Near]:
    """Of each shift the operands, and their dims, that another one serves.

    Of all in a phase that need the same rows, those that need no more are served.
    """
    groups: dict[object, list[_Need]] = {}
    for op in graph.operations:
        if not isinstance(op.opdef.lower, Halo):
            continue
        factors = signatures.of(op).factors
        for factor, split in _shifted(op, factors, homes):
            for n, dim in enumerate(factor.operands):
                needed = needed_margins(op, factors, n, {}, split)
                if dim is not None and dim in needed:
                    root = _root(graph.inputs[op][n], dim, graph, signatures, split[factor.name])
                    groups.setdefault((root, dim, phase(op.region, across), needed[dim].wrap), []).append(
                        _Need(op, n, needed[dim], factor.role is Role.HALO)
                    )
    served: dict[Operation, Near] = {}
    for group in groups.values():
        before = max(group, key=lambda x: (x.margin.before, x.must))
        after = max(group, key=lambda x: (x.margin.after, x.must))
        paying = (before, after) if after.margin.after else (before,)
        for x in group:
            if x not in paying:
                served[x.op] = served.get(x.op, frozenset()) | {(x.operand, x.margin.dim)}
    return served


def _shifted(op: Operation, factors: Sequence[Factor], homes: Homes) -> Iterator[tuple[Factor, Split]]:
    """The dims that are split at home along which it needs equally many rows of its neighbours, wherever it is.

    A sum over a split dim finds them in either operand: which of them pays is for the search to say.
    """
    for f in factors:
        if f.role not in RUNS:
            continue
        out, dim = f.outputs[0], f.operands[f.lead]
        tensor, name = (op.output, out) if out is not None else (op.inputs[f.lead], dim)
        home = homes.of(tensor)
        if name is not None and home.of(name):
            split = {f.name: home.mesh.group_size(home.of(name))}
            if takes_margins(op, factors, split):
                yield f, split


def _root(t: Tensor, dim: str, graph: Simplified, signatures: Signatures, count: int) -> Tensor:
    """What it is made of row by row, along a dim, as long as one operand alone has the dim."""
    while True:
        op = t.operation
        factors = signatures.of(op).factors
        split = {f.name: count for f in factors if f.outputs[0] == dim}
        has = [x for x in graph.inputs.get(op, ()) if dim in x.shape]
        by_row = all(f.role is Role.PARALLEL and has for f in factors if f.name in split)
        if len(has) != 1 or not by_row or not keeps_margins(op, factors, split):
            return t
        (t,) = has
