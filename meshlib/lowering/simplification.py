"""Simplification before partitioning: dead code and common subexpressions.

This runs on the graph and not on the program, because who uses a value decides where it is materialised. The key of
a common subexpression holds the region, so that work repeated in the backward on purpose stays repeated.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from meshlib.core.graph import Graph, Operation, Tensor
from meshlib.core.opdef import Home, Kind, Storage
from meshlib.core.replay import needed


@dataclass(eq=False)
class Simplified:
    """Live operations in order, with `inputs[op]` naming each operand's representative and its users.

    Values in `taken` are needed as well, wherever they lie.
    """

    graph: Graph
    operations: list[Operation]
    inputs: dict[Operation, tuple[Tensor, ...]]
    same: dict[Tensor, Tensor]
    uses: dict[Tensor, list[tuple[Operation, int]]] = field(default_factory=dict)
    taken: set[Tensor] = field(default_factory=set)

    def of(self, t: Tensor) -> Tensor:
        """The tensor that stands for `t`."""
        t = self.graph.known.get(t, t)
        return self.same.get(t, t)

    def linked(self) -> Simplified:
        """This, with the users of each tensor, and what is copied to the host taken as it lies."""
        for op in self.operations:
            if op.opdef.kind is Kind.COPY and op.output.on_host:
                self.taken.update(self.inputs[op])
                continue
            for i in op.needs:
                self.uses.setdefault(self.inputs[op][i], []).append((op, i))
        return self


def simplify(graph: Graph, outputs: Iterable[Tensor], updates: Iterable[Operation]) -> Simplified:
    """Dead code and common subexpressions removed."""
    live = needed([*(graph.known.get(t, t).operation for t in outputs), *updates])
    result = Simplified(graph, [], {}, {})
    seen: dict[object, Operation] = {}
    for op in graph.operations:
        if op not in live:
            continue
        inputs = tuple(result.of(x) for x in op.inputs)
        alone = op.opdef.unique or any(y in graph.gradient_of for y in op.outputs)
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
    # A representative may have become dead only together with all its users, so one more sweep is not needed.
    return result.linked()


def _exactly(item: tuple[str, object]) -> tuple[object, ...]:
    """An attribute such that 0.0 and -0.0 differ, which are equal to Python."""
    return (*item, "-") if item[1] == 0 and str(item[1]).startswith("-") else item
