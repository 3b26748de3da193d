"""Dimensions whose sizes depend on the layout, resolved from the rules and the mesh, in dims and whole graphs.

Most programs have the same shapes under every layout. Some depend on a number of blocks that the layout determines:
tokens that are sorted by expert on each device, and sent to as many shards as the experts are split into. A `SizePlan`
computes such sizes from the number of blocks of ordinary dims; until a layout is known, every dim has one block.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeAlias

from layouts import Dimension, LayoutRules, Mesh, Shape
from meshlib.core.graph import Graph, Operation, Tensor, TensorType
from meshlib.core.loop_record import LoopBody, LoopRecord
from meshlib.core.opdef import Kind
from meshlib.core.replay import all_operations

Part: TypeAlias = str | int


class SizePlan(ABC):
    """Sizes that depend on the layout; a frozen dataclass, so that equal plans are shared."""

    @abstractmethod
    def under(self, mesh: Mesh, rules: LayoutRules) -> SizePlan:
        """The plan for the numbers of blocks of a layout."""

    @abstractmethod
    def number(self, part: Part) -> float:
        """One of its sizes, or a number derived from them, by name; a literal number is returned unchanged."""

    def name(self, name: str) -> str:
        """The name of a dim once the layout is known."""
        return name

    def simplest(self, dim: LaidDimension) -> LaidDimension:
        """The dim that `dim` is in the plan as it is, where two parts of it are one."""
        return dim

    @property
    def note(self) -> str:
        """A note on the cost of its sizes under a layout; empty without one."""
        return ""

    def dim(self, name: str, part: Part) -> LaidDimension:
        """A dim with one of the plan's sizes."""
        return LaidDimension(name, self, part)


class LaidDimension(Dimension):
    """A dimension whose size is part of a plan. It is never equal to an ordinary dimension."""

    __slots__ = ("part", "plan")

    plan: SizePlan
    part: Part

    def __init__(self, name: str, plan: SizePlan, part: Part) -> None:
        size = int(plan.number(part))
        self._fill(name, plan, part, name=name, size=size, plan=plan, part=part)

    def renamed(self, name: str) -> LaidDimension:
        """This dimension under another name."""
        return LaidDimension(name, self.plan, self.part)

    def of(self, plan: SizePlan) -> Dimension:
        """The ordinary dimension under a resolved plan; under its own plan it stays unresolved."""
        if plan == self.plan:
            return plan.simplest(self)
        return Dimension(plan.name(self.name), int(plan.number(self.part)))

    def __repr__(self) -> str:
        return f"Dimension({self.name!r}, {self.size})"


class _LaidNumber:
    """A number that is part of a plan."""

    plan: SizePlan
    part: Part

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return type(self), (self.plan, self.part)


class LaidInt(_LaidNumber, int):
    """An integer that is part of a plan, for attributes and constants."""

    def __new__(cls, plan: SizePlan, part: Part) -> LaidInt:
        number = int.__new__(cls, int(plan.number(part)))
        number.plan, number.part = plan, part
        return number

    def of(self, plan: SizePlan) -> int:
        """The integer under a resolved plan."""
        return self if plan == self.plan else int(plan.number(self.part))


class LaidFloat(_LaidNumber, float):
    """A fraction that is part of a plan, for attributes and constants."""

    def __new__(cls, plan: SizePlan, part: Part) -> LaidFloat:
        number = float.__new__(cls, float(plan.number(part)))
        number.plan, number.part = plan, part
        return number

    def of(self, plan: SizePlan) -> float:
        """The fraction under a resolved plan."""
        return self if plan == self.plan else float(plan.number(self.part))


def size_of(dim: Dimension) -> int:
    """The size of a dim for attributes and constants: unresolved (a `LaidInt`) if the dim is."""
    return LaidInt(dim.plan, dim.part) if isinstance(dim, LaidDimension) else dim.size


def blocks(names: Iterable[str], mesh: Mesh, rules: LayoutRules, optional: bool = False) -> int:
    """The number of blocks into which a layout splits a dim of activations with one of these names.

    Args:
      optional: whether optional rules count if there is no required one.
    """
    axes: list[str] = []
    for name in names:
        own = rules.required_axes(name, "activations")
        if not own and optional:
            own = tuple(axis for rule in rules.for_dim(name) for axis in rule.axes)
        axes += [axis for axis in own if axis in mesh and axis not in axes]
    return mesh.group_size(axes)


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
        copy.make(tuple(Tensor(y.name, t.shape, t.dtype, copy) for y, t in zip(op.outputs, types, strict=True)))
        graph.operations.append(copy)
        self.operations[op] = copy
        self.tensors.update(zip(op.outputs, copy.outputs, strict=True))

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
