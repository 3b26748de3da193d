"""Lower bound of a layout's memory from the graph alone: state, and what loops stack for the backward pass.

Variables, slots and inputs are resident, sharded as the layout says. When a loop begins, the results that earlier loops
stacked for it and for loops after it are live, each divided by all axes that could split it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from layouts import LayoutRules, Mesh, Shape
from meshlib.core.graph import Operation, Tensor
from meshlib.core.opdef import Kind
from meshlib.lowering.assigned import scope_of
from meshlib.searching.renamed_dims import Passages

Moment = tuple[Sequence[Tensor], Sequence[Tensor]]


@dataclass(frozen=True)
class LeastMemory:
    """Lower bounds on a device's peak bytes for all layouts of one program.

    Attributes:
      resident: number of variables, slots and inputs of each shape, scope and width in bytes.
      moments: for each loop and product, the stacked values that are live meanwhile, and results of which one is.
    """

    resident: Counter[tuple[Shape, str, float]]
    moments: Sequence[Moment]
    passages: Passages

    @staticmethod
    def of(operations: Sequence[Operation]) -> LeastMemory:
        """Bounds from all operations of a program, those in loops included."""
        resident: Counter[tuple[Shape, str, float]] = Counter()
        outer = [op for op in operations if op.graph.parent is None]
        for op in outer:
            if op.opdef.kind in (Kind.INPUT, Kind.VARIABLE) and not op.output.on_host:
                resident[op.output.shape, scope_of(op.output), op.output.dtype.itemsize] += 1
        return LeastMemory(resident, _moments(outer), Passages.of(operations, settled=False))

    def state_bytes(self, layout: LayoutRules, mesh: Mesh, gradients: bool = False) -> float:
        """Bytes of variables, slots and inputs on one device; `gradients`: and as much for gradients as for variables.

        Raises: LayoutError if the layout cannot shard one of them.
        """
        return sum(
            (1 + (gradients and scope == "variables")) * count * width * layout.sharding(shape, mesh, scope).local_size
            for (shape, scope, width), count in self.resident.items()
        )

    def peak_bytes(self, layout: LayoutRules, mesh: Mesh) -> float:
        """Lower bound on the peak of one device.

        Raises: LayoutError if the layout cannot shard a variable, slot or input.
        """
        dims = {axis: {rule.dim for rule in layout.rules if axis in rule.axes} for axis in mesh.sizes_by_axis}

        def part_bytes(t: Tensor) -> float:
            if t.on_host:
                return 0.0
            names = self.passages.split(t.shape)
            splitting = (axis for axis, own in dims.items() if names is None or not names.isdisjoint(own))
            return t.dtype.size_bytes(t.shape.size) / prod(map(mesh.axis_size, splitting))

        sizes = (sum(map(part_bytes, live)) + max(map(part_bytes, one), default=0.0) for live, one in self.moments)
        return self.state_bytes(layout, mesh) + max(sizes, default=0.0)


def _moments(outer: Sequence[Operation]) -> list[Moment]:
    """Moments of all loops and products outside loops."""
    before: dict[Operation, frozenset[Operation]] = {}  # loops and products that an operation depends on
    for op in outer:
        sources = {x.operation for x in op.inputs if x.operation in before}
        before[op] = frozenset(filter(_is_large, sources)).union(*(before[source] for source in sources))
    large = [*filter(_is_large, outer)]
    readers: dict[Tensor, list[Operation]] = {}
    for op in large:
        for y in _stacked_operands(op):
            readers.setdefault(y, []).append(op)

    def is_live(y: Tensor, op: Operation) -> bool:
        return y.operation in before[op] and any(last is op or op in before[last] for last in readers[y])

    return [([y for y in readers if is_live(y, op)], [*_products(op)]) for op in large]


def _is_large(op: Operation) -> bool:
    return op.loop is not None or op.opdef.kind is Kind.CONTRACTION


def _stacked_operands(op: Operation) -> list[Tensor]:
    """The operands with which a loop computes that other loops have stacked."""
    if op.loop is None:
        return []
    operands = (op.inputs[n] for n in op.loop.needs)
    return [x for x in operands if (of := x.operation).loop is not None and x in of.outputs[of.loop.carries :]]


def _products(op: Operation) -> Iterator[Tensor]:
    """The results of a product, or of those in a loop's body."""
    if op.loop is not None:
        for inside in op.loop.body.operations:
            yield from _products(inside)
    elif op.opdef.kind is Kind.CONTRACTION:
        yield from op.outputs
