"""Weight gradients as separate tasks in the schedule of a pipeline step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from meshlib.core.graph import Graph, Tensor
from meshlib.ops.control.deferred import Deferred
from meshlib.ops.movement.shape import transpose


class LaterWeights:
    """Operands that a backward stores for weight gradients, and the deferred operations that compute these."""

    def __init__(self, later: Deferred, results: Sequence[Tensor], graph: Graph, around: Graph) -> None:
        self.later, self.results = later, results
        outside = around.loop_body
        assert outside is not None
        fixed = set(outside.captured.values())  # the same in each tick
        self.outer = {x: y for x in later.inputs if (y := graph.outer_of(x)) is not None}
        self.tables = [x for x, y in self.outer.items() if y not in fixed and not y.dtype.is_float]
        self.fixed = [x for x, y in self.outer.items() if y in fixed]
        elsewhere = {*self.tables, *self.fixed}
        self.stored = [x for x in later.inputs if x not in elsewhere]

    def written(self, graph: Graph, read: Sequence[Tensor], swapped: Mapping[Tensor, Tensor]) -> list[Tensor]:
        """The gradients, in the body of their branch, from stored operands, with tables swapped for their task's."""
        given = {x: graph.adopt(self.outer[x]) for x in self.fixed}
        given |= {x: graph.adopt(swapped[self.outer[x]]) for x in self.tables}
        given |= {x: transpose(y, x.shape) for x, y in zip(self.stored, read, strict=True)}
        return self.later.written(graph, given, self.results)
