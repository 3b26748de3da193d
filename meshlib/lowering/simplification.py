"""Simplification before partitioning: dead code and common subexpressions.

Runs on the graph and not on the program, because the users of a value decide where it is materialised. The key of a
common subexpression holds the region, so that deliberate recomputation in the backward pass is preserved.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from meshlib.core.graph import UPDATE, Graph, Operation, Tensor
from meshlib.core.opdef import Halo, Home, Kind, Storage
from meshlib.core.replay import needed

_DEEPEST = 8  # maximum chain of recomputed operations
_COMPUTED_AGAIN = (Kind.SOURCE, Kind.ELEMENTWISE, Kind.VIEW)


@dataclass(eq=False)
class Simplified:
    """Live operations in order, with `inputs[op]` naming each operand's representative and its users.

    Values in `taken` are needed as well, under any sharding.
    """

    graph: Graph
    operations: list[Operation]
    inputs: dict[Operation, tuple[Tensor, ...]]
    same: dict[Tensor, Tensor]
    uses: dict[Tensor, list[tuple[Operation, int]]] = field(default_factory=dict)
    taken: set[Tensor] = field(default_factory=set)

    def of(self, t: Tensor) -> Tensor:
        """The representative of `t`."""
        t = self.graph.known.get(t, t)
        return self.same.get(t, t)

    def linked(self) -> Simplified:
        """This graph with the users of each tensor; copies to the host accept any sharding."""
        for op in self.operations:
            if op.opdef.kind is Kind.COPY and op.output.on_host:
                self.taken.update(self.inputs[op])
                continue
            for i in op.needs:
                self.uses.setdefault(self.inputs[op][i], []).append((op, i))
        return self

    @cached_property
    def again(self) -> frozenset[Tensor]:
        """Tensors that may be recomputed: those without operands, or computed from smaller or recomputable ones."""
        depth: dict[Tensor, int] = {}
        for op in self.operations:
            if _can_run_again(op):
                y, operands = op.output, self.inputs[op]
                far = 1 + max((depth.get(x, 0) for x in operands), default=0)
                if far <= _DEEPEST and all(x in depth or _bytes(x) < _bytes(y) for x in operands):
                    depth[y] = far
        return frozenset(depth)

    @cached_property
    def first(self) -> dict[Operation, tuple[int, ...]]:
        """For each operand and result of an operation, the index of the first one that is the same tensor."""
        tensors = {op: (*self.inputs[op], *op.outputs) for op in self.operations}
        return {op: tuple(map(some.index, some)) for op, some in tensors.items()}

    @cached_property
    def regions(self) -> dict[Operation, list[str]]:
        """Regions in which an operation may run: its own, and if it may run again, those that use its result."""
        used: dict[Tensor, set[str]] = {}
        regions_of: dict[Operation, list[str]] = {}
        for op in reversed(self.operations):
            regions = {UPDATE if op.opdef.kind is Kind.COMMIT else op.region}
            if op.outputs and op.output in self.again:
                regions |= used.get(op.output, set())
            regions_of[op] = [op.region, *sorted(regions - {op.region})]
            for x in self.inputs[op]:
                used.setdefault(x, set()).update(regions)
        return regions_of

    @cached_property
    def shifts(self) -> list[Operation]:
        """The operations that may exchange halos."""
        return [op for op in self.operations if isinstance(op.opdef.lower, Halo)]

    @cached_property
    def updating(self) -> frozenset[Operation]:
        """Elementwise operations whose results are used by each other and by variables alone."""
        some: set[Operation] = set()
        for op in reversed(self.operations):
            if op.opdef.kind is Kind.ELEMENTWISE and all(
                user in some or user.opdef.kind is Kind.COMMIT for user, _ in self.uses.get(op.output, ())
            ):
                some.add(op)
        return frozenset(some)

    @cached_property
    def often(self) -> frozenset[Tensor]:
        """Tensors with several users, or with a user that may run in several ways."""
        used: set[Tensor] = set()
        often: set[Tensor] = set()
        for op in reversed(self.operations):
            several = bool(op.outputs) and op.output in self.again and op.output in often
            for x in self.inputs[op]:
                if several or x in used:
                    often.add(x)
                used.add(x)
        return frozenset(often)


def simplify(graph: Graph, outputs: Iterable[Tensor], updates: Iterable[Operation]) -> Simplified:
    """Remove dead code and common subexpressions."""
    live = needed([*(graph.known.get(t, t).operation for t in outputs), *updates])
    result = Simplified(graph, [], {}, {})
    seen: dict[object, Operation] = {}
    for op in graph.operations:
        if op not in live:
            continue
        inputs = tuple(result.of(x) for x in op.inputs)
        alone = op.opdef.unique or not graph.gradient_of.keys().isdisjoint(op.outputs)
        if not alone and op.opdef.storage is Storage.ALIAS and op.opdef.home is Home.OPERAND:
            result.same[op.output] = inputs[0]
            continue
        if not alone:
            key = (op.opdef, inputs, tuple(map(_exactly, op.attrs.items())), op.region, op.owner)
            first = seen.setdefault(key, op)
            if first is not op:
                result.same.update(zip(op.outputs, first.outputs, strict=True))
                continue
        result.operations.append(op)
        result.inputs[op] = inputs
    # A representative may have died only together with all its users, so another sweep is not needed.
    return result.linked()


def _exactly(item: tuple[str, object]) -> tuple[object, ...]:
    """Key of an attribute that distinguishes 0.0 from -0.0, which are equal in Python."""
    value = item[1]
    is_negative_zero = isinstance(value, float | complex | np.generic) and value == 0 and str(value).startswith("-")
    return (*item, "-") if is_negative_zero else item


def _can_run_again(op: Operation) -> bool:
    kind = op.opdef
    plain = (kind.kind in _COMPUTED_AGAIN or kind.remade) and kind.home is not Home.GIVEN and kind.show is None
    return plain and len(op.outputs) == 1 and op.output not in op.graph.gradient_of


def _bytes(t: Tensor) -> int:
    return t.dtype.size_bytes(t.shape.size)
