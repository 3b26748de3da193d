"""A graph under a layout: the same operations, with layout-dependent sizes (`laid_dims`) resolved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from layouts import Dimension, Shape
from meshlib.core.graph import Graph, Operation, Tensor, TensorType
from meshlib.core.laid_dims import LaidDimension, LaidFloat, LaidInt, SizePlan
from meshlib.core.loop_record import LoopBody, LoopRecord
from meshlib.core.opdef import Kind
from meshlib.core.replay import all_operations

Resolution = Mapping[SizePlan, SizePlan]


def size_plans(graph: Graph) -> tuple[SizePlan, ...]:
    """The plans on which sizes of a graph depend."""
    return tuple(dict.fromkeys(d.plan for d in _dims(graph) if isinstance(d, LaidDimension)))


def _dims(graph: Graph) -> Iterator[Dimension]:
    for op in all_operations(graph.operations):
        for y in op.outputs:
            yield from y.shape


@dataclass(eq=False)
class ResolvedGraph:
    """A copy of a graph in which size plans are resolved, so that all dims are ordinary ones.

    Attributes:
      graph: the original. plans: plan -> the resolved plan under a layout.
      tensors, operations: original -> copy.
    """

    graph: Graph
    plans: Resolution
    tensors: dict[Tensor, Tensor] = field(default_factory=dict)
    operations: dict[Operation, Operation] = field(default_factory=dict)
    _graphs: dict[Graph, Graph] = field(default_factory=dict)
    _shapes: dict[Shape, Shape] = field(default_factory=dict)

    def copy(self) -> Graph:
        """Make the copy, and return it."""
        return self._graph(self.graph)

    def _graph(self, old: Graph) -> Graph:
        new = self._graphs[old] = Graph(
            named_dims=old.named_dims, remedies=dict(old.remedies), scope=old.scope, _counts=dict(old._counts)
        )
        if old.loop_body is not None:
            new.loop_body = LoopBody(self._graphs[old.loop_body.parent], old.loop_body.scope_around)
        for op in old.operations:
            self._operation(op, new)
        new.variables = {name: self.operations[op] for name, op in old.variables.items() if op in self.operations}
        new.inputs = {name: self.operations[op] for name, op in old.inputs.items() if op in self.operations}
        new.gradient_of = {self.tensors[t]: self.operations[op] for t, op in old.gradient_of.items()}
        new.known = {self.tensors[t]: self.tensors[value] for t, value in old.known.items()}
        new.inner = {self.operations[op] for op in old.inner if op in self.operations}
        new.again = {self.operations[op] for op in old.again if op in self.operations}
        if old.loop_body is not None and new.loop_body is not None:
            for f in fields(LoopBody):
                if f.name not in ("parent", "scope_around"):
                    setattr(new.loop_body, f.name, self._value(getattr(old.loop_body, f.name)))
        return new

    def _operation(self, op: Operation, graph: Graph) -> None:
        types = [TensorType(self._shape(y.shape), y.dtype) for y in op.outputs]
        inputs = tuple(self.tensors[x] for x in op.inputs)
        if len(inputs) and inputs[0].type == types[0] != op.output.type and self._joins_dims(op, inputs):
            self.tensors[op.output] = inputs[0]  # two dims of one name: the operation is the identity
            return
        attrs = {name: self._value(value) for name, value in op.attrs.items()}
        owner = None if op.owner is None else self.operations[op.owner]
        copy = Operation(op.name, op.opdef, inputs, attrs, graph, op.region, op.source, owner)
        outputs = tuple(Tensor(y.name, t.shape, t.dtype, copy) for y, t in zip(op.outputs, types, strict=True))
        object.__setattr__(copy, "outputs", outputs)
        graph.operations.append(copy)
        self.operations[op] = copy
        self.tensors.update(zip(op.outputs, outputs, strict=True))

    def _joins_dims(self, op: Operation, inputs: Sequence[Tensor]) -> bool:
        """True if an operation only renames dims that are one dim here, or sorts rows of one sorted run."""
        indices = op.opdef.indices
        if indices is None or "dim" not in op.attrs:
            return op.opdef.kind is Kind.VIEW and len(inputs) == 1
        return self._value(op.attrs["dim"]) in inputs[indices].shape

    def _value(self, x: Any) -> Any:
        """An attribute with tensors, operations, dims and sizes replaced by those of the copy."""
        if isinstance(x, str | bytes | bool) or x is None or callable(x):
            return x
        if isinstance(x, LaidInt | LaidFloat | LaidDimension):
            return x.of(self.plans[x.plan])
        if isinstance(x, Shape):
            return self._shape(x)
        if isinstance(x, Tensor):
            return self.tensors[x]
        if isinstance(x, Operation):
            return self.operations[x]
        if isinstance(x, LoopRecord):
            body = self._graph(x.body)
            others = {f.name: self._value(getattr(x, f.name)) for f in fields(x) if f.name != "body"}
            return replace(x, body=body, **others)
        if isinstance(x, dict):
            return {self._value(name): self._value(value) for name, value in x.items()}
        if isinstance(x, tuple) and hasattr(x, "_fields"):
            return type(x)(*map(self._value, x))
        if type(x) in (list, tuple):
            return type(x)(map(self._value, x))
        return x

    def _shape(self, shape: Shape) -> Shape:
        known = self._shapes.get(shape)
        if known is None:
            dims = [d.of(self.plans[d.plan]) if isinstance(d, LaidDimension) else d for d in shape]
            known = self._shapes[shape] = Shape(dims) if any(isinstance(d, LaidDimension) for d in shape) else shape
        return known
