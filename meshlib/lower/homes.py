"""Home: the sharding that the layout rules give a tensor (rule 1 of the lowering)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from layouts import LayoutRules, Mesh, Report, Shape, Sharding, check
from meshlib.errors import LayoutError
from meshlib.graph import UPDATE, Graph, Operation, Tensor

# Same value, same dims: bound to lie where the operand lies, so that gathers move the narrow type.
_FOLLOWS_OPERAND = ("cast", "identity", "stop_gradient")


@dataclass(eq=False)
class Homes:
    """The homes of one graph's tensors under one layout, made on demand."""

    graph: Graph
    mesh: Mesh
    rules: LayoutRules
    _made: dict[Tensor, Sharding] = field(default_factory=dict)

    def scope_of(self, t: Tensor) -> str:
        """Which scoped rules hold for a tensor: variables, slots (gradients and updates too) or activations."""
        op = t.operation
        if op.kind.name == "variable":
            return "slots" if op.attrs["slot_of"] else "variables"
        if t in self.graph.gradient_of or (op.region == UPDATE and op.owner is not None):
            return "slots"
        return "activations"

    def of(self, t: Tensor) -> Sharding:
        """The home of a tensor."""
        found = self._made.get(t)
        if found is None:
            found = self._made[t] = self._make(t)
        return found

    def _make(self, t: Tensor) -> Sharding:
        op = t.operation
        if op.kind.name == "constrain":
            return op.attrs["layout"].sharding(t.shape, self.mesh, "activations")  # type: ignore[no-any-return]
        if op.kind.name in _FOLLOWS_OPERAND and t not in self.graph.gradient_of:
            return self.of(op.inputs[0])
        try:
            return self.rules.sharding(t.shape, self.mesh, self.scope_of(t))
        except LayoutError as fault:
            raise LayoutError(f"{op}: {t}\n{fault}") from None


def check_layout(graph: Graph, operations: Iterable[Operation], mesh: Mesh, rules: LayoutRules) -> Report:
    """All faults of a layout over a program at once, and notes on what it leaves unused."""
    homes = Homes(graph, mesh, rules)
    names = {d.name for op in graph.operations for y in op.outputs for d in y.shape}
    return check(rules, mesh, _labelled(homes, operations), names)


def _labelled(homes: Homes, operations: Iterable[Operation]) -> Iterator[tuple[str, Shape, str]]:
    for op in operations:
        if op.kind.name in _FOLLOWS_OPERAND or op.kind.name in ("constrain", "assign"):
            continue
        for y in op.outputs:
            yield f"{op.kind.name} '{op.name}' ({op.source}): {y.dtype}{y.shape}", y.shape, homes.scope_of(y)
