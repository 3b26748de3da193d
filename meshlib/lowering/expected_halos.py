"""Shifts that are expected to share a halo exchange, determined before partitioning.

`halos` merges such exchanges in the partitioned program. The search must anticipate that, otherwise it overprices each
shift and gathers instead. Whether merging succeeds depends on the placements found, so programs found with and without
it are compared (`one_layout`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from meshlib.core.graph import BACKWARD, FORWARD, Operation, Tensor
from meshlib.core.opdef import Factor, Role
from meshlib.lowering.assigned import Homes
from meshlib.lowering.simplification import Simplified
from meshlib.program.exchanges import RUNS, Margin, Split, keeps_margins, needed_margins, takes_margins
from meshlib.program.signature import Signatures

Near: TypeAlias = frozenset[tuple[int, str]]  # (operand, dim) pairs whose halo another shift provides


class _Need(NamedTuple):
    """An operand with a margin that an operation needs; `must`: it cannot run without it."""

    op: Operation
    operand: int
    margin: Margin
    must: bool


def phase(region: str, across: bool) -> str:
    """The scope of an exchange: a region, or with `across` forward and backward together."""
    return FORWARD if across and region == BACKWARD else region


def near_shifts(graph: Simplified, homes: Homes, signatures: Signatures, across: bool = False) -> dict[Operation, Near]:
    """For each shift, the (operand, dim) pairs whose halo another shift provides.

    Among shifts in a phase that need the same rows, those with the smaller halo are served.
    """
    groups: dict[object, list[_Need]] = {}
    place = {op: n for n, op in enumerate(graph.operations)} if graph.shifts else {}
    for op in graph.shifts:
        factors = signatures.of(op).factors
        for factor, split in _shifted(op, factors, homes):
            for n, dim in enumerate(factor.operands):
                needed = needed_margins(op, factors, n, {}, split)
                if dim is not None and dim in needed:
                    root = _root(graph.inputs[op][n], dim, graph, signatures, split[factor.name], place)
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
    """(factor, split) for each dim split in the assigned sharding along which uniform halos are needed.

    For a sum over a split dim either operand can have the halo: the search decides which.
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


def _root(
    t: Tensor, dim: str, graph: Simplified, signatures: Signatures, count: int, place: Mapping[Operation, int]
) -> Tensor:
    """The earliest tensor from which alone `t` is computed row by row along a dim."""
    root, needed = t, {t}
    while True:
        t = max(needed, key=lambda x: place[x.operation])
        needed.remove(t)
        root = root if needed else t
        op = t.operation
        factors = signatures.of(op).factors
        split = {f.name: count for f in factors if f.outputs[0] == dim}
        has = [x for x in graph.inputs.get(op, ()) if dim in x.shape]
        by_row = all(f.role is Role.PARALLEL for f in factors if f.name in split)
        if not has or not by_row or not keeps_margins(op, factors, split):
            return root
        needed.update(has)
