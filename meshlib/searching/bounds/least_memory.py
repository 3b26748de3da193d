"""Lower bound of a layout's memory from the graph alone: state, and the values that are certainly live at some moment.

Variables, slots and inputs are resident, sharded as the layout says; other values are divided by all axes that could
split them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from layouts import LayoutRules, Mesh, Shape
from meshlib.core.graph import Operation, Tensor
from meshlib.core.opdef import Kind
from meshlib.core.replay import all_operations
from meshlib.lowering.assigned import scope_of
from meshlib.lowering.simplification import simplify
from meshlib.searching.bounds.live_values import LiveSet, live_sets_of
from meshlib.searching.renamed_dims import Passages


@dataclass(frozen=True)
class LeastMemory:
    """Lower bounds on a device's peak bytes for all layouts of one program.

    Attributes:
      resident: number of variables, slots and inputs of each shape, scope and width in bytes.
      live_sets: values that are live at once.
    """

    resident: Counter[tuple[Shape, str, float]]
    live_sets: Sequence[LiveSet]
    passages: Passages

    @staticmethod
    def of(outputs: Sequence[Tensor], updates: Sequence[Operation]) -> LeastMemory:
        """Bounds of the program with these outputs and updates."""
        graph = (updates[0] if updates else outputs[0].operation).graph
        simple = simplify(graph, outputs, updates)
        resident: Counter[tuple[Shape, str, float]] = Counter()
        for op in simple.operations:
            if op.opdef.kind in (Kind.INPUT, Kind.VARIABLE) and not op.output.on_host:
                resident[op.output.shape, scope_of(op.output), op.output.dtype.itemsize] += 1
        written = [x for op in simple.operations if op.opdef.kind is Kind.COMMIT for x in op.inputs]
        passages = Passages.of(all_operations(simple.operations), settled=False)
        return LeastMemory(resident, live_sets_of(simple, [*outputs, *written]), passages)

    def state_bytes(self, layout: LayoutRules, mesh: Mesh, gradients: bool = False) -> float:
        """Bytes of variables, slots and inputs on one device; `gradients`: and as much for gradients as for variables.

        Raises: LayoutError if the layout cannot shard one of them.
        """
        return sum(
            (1 + (gradients and scope == "variables")) * count * width * layout.sharding(shape, mesh, scope).local_size
            for (shape, scope, width), count in self.resident.items()
        )

    def peak_bytes(self, layout: LayoutRules, mesh: Mesh, inside: bool = True) -> float:
        """Lower bound on the peak of one device.

        inside: whether to count what is live within a trip of a loop, which depends on what the backward pass computes
        again; other values are as many or more with less rematerialisation.
        Raises: LayoutError if the layout cannot shard a variable, slot or input.
        """
        dims = {axis: {rule.dim for rule in layout.rules if axis in rule.axes} for axis in mesh.sizes_by_axis}
        parts: dict[Tensor, float] = {}

        def part_bytes(t: Tensor) -> float:
            if t not in parts:
                names = self.passages.split(t.shape)
                splitting = (axis for axis, own in dims.items() if names is None or not names.isdisjoint(own))
                whole = 0.0 if t.on_host else t.dtype.size_bytes(t.shape.size)
                parts[t] = whole / prod(map(mesh.axis_size, splitting))
            return parts[t]

        sizes = (live.least_bytes(part_bytes, inside) for live in self.live_sets)
        return self.state_bytes(layout, mesh) + max(sizes, default=0.0)
